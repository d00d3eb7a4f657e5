"""The pictures of a study's report; each takes numbers of :mod:`optimizer.report.data` and returns an ``<svg>``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from optimizer.report.data import Bar, Point, Spread
from optimizer.report.svg import Plot, Scale, around, figure, part_colour, text_width
from search_spaces.core.wording import operator_range, plural

WIDTH, NARROW = 920.0, 340.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 44.0, 44.0
_LANE, _GAP = 24.0, 6.0
_FAMILIES = (("baseline", "baselines"), ("model", "best by the model"), ("search", "search"))
_NAME = 14.0  # height of a line of text, px
_LONGEST_NAME = 36
_ABOVE = ("above", "above the scale")
_FAR_PREDICTED = 4.0
_FAR = 1.5  # times the least latency; slower plans would flatten the scale
_CUT = 2.0  # an interval is drawn up to so many times the largest ratio, and down to as much below the least


def timelines(bars: Sequence[Bar], kinds: Sequence[str], width: float = WIDTH, *, several: bool = False) -> str:
    """Return processors over time, one block for each timeline, all on one scale.

    Args:
        kinds: of each operator, for the tips; empty where the model cannot be read.
        several: whether they are of several models, whose latencies are others than the time until all is done.
    """
    rows = sum(len(_lanes(bar)) for bar in bars)
    names = [lane for bar in bars for lane in _lanes(bar)]
    left = max(_LEFT, 16 + max(map(text_width, names), default=0))
    above = 16.0 if left > width / 2 else 0.0  # long names stand above their rows
    left = 12.0 if above else left
    height = rows * (_LANE + _GAP + above) + len(bars) * 30 + _BOTTOM + 10
    description = "; ".join(f"{b.name}, {b.source}: {figure(b.timeline.makespan_s * 1e3)} ms" for b in bars)
    plot = Plot("timeline", "Stages over time, by processor", description, width, height)
    longest = max((bar.timeline.makespan_s for bar in bars), default=1.0) * 1e3
    scale = around([longest], left, width - _RIGHT, zero=True)
    plot.axis_x(scale, height - _BOTTOM, 8.0, "ms since the start of the first inference")
    y = 10.0
    for bar in bars:
        many = f" for {max(bar.inferences) + 1} inferences" if bar.inferences and width >= WIDTH else ""
        end = f"{'all done after ' if several else ''}{figure(bar.timeline.makespan_s * 1e3)} ms"
        took = f", {bar.source}: {end}{many}"
        plot.text(8, y + 14, f"{_fitted(bar.name, width - text_width(took))}{took}", style="s")
        y += 24
        start_s = min(e.start_s for e in bar.timeline.events)
        inferences = bar.inferences or (None,) * len(bar.timeline.events)
        for lane in _lanes(bar):
            if above:
                plot.text(8, y + 12, _fitted(lane, width))
            else:
                plot.text(left - 8, y + 16, lane, anchor="end")
            y += above
            for event, inference in zip(bar.timeline.events, inferences, strict=True):
                if event.processor != lane:
                    continue
                first, last = (event.start_s - start_s) * 1e3, (event.end_s - start_s) * 1e3
                tip = f"stage {event.stage} on {lane}: {first:.3f} to {last:.3f} ms ({last - first:.3f} ms)"
                operators = bar.plan.stages[event.stage].operators
                tip += f"\n{operator_range(operators[0], operators[-1])}"
                if kinds:
                    tip += f": {kinds[operators[0]]} … {kinds[operators[-1]]}"
                style = "bar guess" if bar.source == "predicted" else "bar"
                plot.rect(scale(first), y, scale(last) - scale(first), _LANE, part_colour(event.stage), tip, style)
                label = str(event.stage) if inference is None else f"{event.stage}·{inference + 1}"
                if scale(last) - scale(first) > text_width(label) + 4:
                    plot.text((scale(first) + scale(last)) / 2, y + 16, label, anchor="middle")
            y += _LANE + _GAP
        y += 6
    return plot.svg()


def _lanes(bar: Bar) -> list[str]:
    named = (*(stage.processor for stage in bar.plan.stages), *(e.processor for e in bar.timeline.events))
    busy = {e.processor for e in bar.timeline.events}  # a plan may also name pools, which are not processors
    return [lane for lane in dict.fromkeys(named) if lane in busy]


def optimisation(
    points: Sequence[Point], bound_s: float | None, unit: str = "ms", bound: str = "bound", width: float = WIDTH
) -> str:
    """Return latency against the number of plans tried, with the best so far and the predicted bound of that name."""
    top, height = _top(width), 340.0
    last = points[-1].number if points else 1
    best_ms = points[-1].best_s * 1e3 if points else 0.0
    plot = Plot("history", "Latency of the plans in the order in which they were tried",
                f"{len(points)} plans; the best of them takes {figure(best_ms)} {unit}", width, height)  # fmt: skip
    x = around([1, last], _LEFT, width - _RIGHT, margin=0.02)
    y = _near(points, height - _BOTTOM, top, bound_s)
    plot.axis_y(y, _LEFT, width - _RIGHT, unit)
    plot.axis_x(x, height - _BOTTOM, top, "different plans tried")
    if bound_s:
        height_of = y(bound_s * 1e3)
        plot.line([(x.start, height_of), (x.end, height_of)], "bound", f"{bound}: {figure(bound_s * 1e3)} {unit}")
    # The line begins where it enters the scale.
    line = steps((x(p.number), y(p.best_s * 1e3)) for p in points if p.best_s * 1e3 <= y.high)
    for point in points:
        _mark(plot, x(point.number), y, point, unit)
    if line:
        plot.line(line, "best", "best so far")
    lines = [("best", "best so far"), *([("bound", bound)] if bound_s else [])]
    plot.legend(_margin(width), 18, [*_legend(points, y), *lines])
    return plot.svg()


def by_stages(points: Sequence[Point], best: Mapping[int, float], unit: str = "ms", width: float = WIDTH) -> str:
    """Return latency against the number of stages; a line joins the best of neighbouring numbers."""
    top, height = _top(width), 320.0
    description = "; ".join(f"{plural(k, 'stage')}: best {figure(s * 1e3)} {unit}" for k, s in best.items())
    plot = Plot("stages", "Latency by number of stages", description, width, height)
    y = _near(points, height - _BOTTOM, top)
    plot.axis_y(y, _LEFT, width - _RIGHT, unit)
    column = (width - _RIGHT - _LEFT) / max(len(best), 1)
    middle = {k: _LEFT + column * (i + 0.5) for i, k in enumerate(best)}
    every = math.ceil(text_width(str(max(best, default=0))) / column)  # labels that do not touch
    for k, x in list(middle.items())[::every]:
        plot.text(x, height - _BOTTOM + 16, str(k), anchor="middle", style="m")
    plot.text((_LEFT + width - _RIGHT) / 2, height - 10, "stages of the plan", anchor="middle", style="m")
    for i, point in enumerate(points):  # golden-ratio steps spread neighbours apart, the same way each time
        x = middle[point.stages] + column * 0.6 * ((i * 0.618034) % 1.0 - 0.5)
        _mark(plot, x, y, point, unit)
    on_scale = {k: s for k, s in best.items() if s * 1e3 <= y.high}
    neighbours = [k for k in on_scale if k + 1 in on_scale]  # 5 and 9 stages have no plans between them to compare
    for k in neighbours:
        ends = [(middle[j], y(on_scale[j] * 1e3)) for j in (k, k + 1)]
        plot.line(ends, "best", "best of each number of stages")
    line = [("best", "best of each number of stages")] if neighbours else []
    plot.legend(_margin(width), 18, [*_legend(points, y), *line])
    return plot.svg()


def predicted(points: Sequence[Point], width: float = WIDTH) -> str:
    """Return measured against predicted latency; where the model is right, plans lie on the diagonal."""
    known = [p for p in points if p.predicted_s is not None]
    top, side = _top(width), 420.0
    plot = Plot("predicted", "Predicted against measured latency", f"{len(known)} plans", width, side)
    far_s = _FAR_PREDICTED * min((p.best_s for p in known), default=0.0)
    known = [p for p in known if max(p.latency_s, p.predicted_s or 0.0) <= far_s]
    both = [v * 1e3 for p in known for v in (p.latency_s, p.predicted_s or 0.0)]
    x = around(both, _LEFT, width - _RIGHT)
    y = around(both, side - _BOTTOM, top)
    plot.axis_y(y, _LEFT, width - _RIGHT, "measured, ms")
    plot.axis_x(x, side - _BOTTOM, top, "predicted from the profiled operators, ms")
    plot.line([(x(x.low), y(x.low)), (x(x.high), y(x.high))], "equal", "predicted = measured")
    for point in known:
        plot.mark(x((point.predicted_s or 0.0) * 1e3), y(point.latency_s * 1e3), point.family, _tip(point))
    families = [f for f in _FAMILIES if any(p.family == f[0] for p in known)]
    plot.legend(_margin(width), 18, [*families, ("equal", "predicted = measured")])
    return plot.svg()


def distributions(spreads: Sequence[Spread], unit: str = "ms", width: float = WIDTH) -> str:
    """Return every sample of the named plans, with median and 95 % interval."""
    above = 16.0 if width < WIDTH else 0.0  # a narrow picture has the names above their rows
    row = 30.0 + above
    height = len(spreads) * row + _BOTTOM + 16
    left = 12 if above else 16 + max((text_width(s.name) for s in spreads), default=0)
    description = "; ".join(f"{s.name}: median {figure(s.samples.median * 1e3)} {unit}" for s in spreads)
    plot = Plot("samples", "Samples of the plans that have a name", description, width, height)
    far_ms = _FAR * min((s.samples.median for s in spreads), default=0.0) * 1e3
    values = [v * 1e3 for s in spreads for v in (*s.samples.values_s, *s.ci95_s) if v * 1e3 <= far_ms]
    x = around(values, left, width - _RIGHT)
    plot.axis_x(x, height - _BOTTOM, 6.0, unit)
    for i, spread in enumerate(spreads):
        y = 8 + row * (i + 0.5) + above / 2
        if above:
            plot.text(8, y - 14, _fitted(spread.name, width))
        else:
            plot.text(left - 10, y + 4, spread.name, anchor="end")
        if spread.samples.median * 1e3 > x.high:
            plot.text(x.end, y + 4, f"{figure(spread.samples.median * 1e3)} {unit} →", anchor="end", style="m")
            continue
        for j, value in enumerate(v * 1e3 for v in spread.samples.values_s):
            if value <= x.high:
                plot.mark(x(value), y + 12 * ((j * 0.618034) % 1.0 - 0.5), "search", f"{value:.4f} {unit}", 2.5)
        low, high = max(spread.ci95_s[0], x.low / 1e3), min(spread.ci95_s[1], x.high / 1e3)
        middle = spread.samples.median
        ends = ", ".join(figure(end * 1e3) for end in spread.ci95_s)
        tip = f"{spread.name}: {figure(middle * 1e3)} {unit} [{ends}]"
        plot.line([(x(low * 1e3), y), (x(high * 1e3), y)], "ci", tip)
        plot.line([(x(middle * 1e3), y - 9), (x(middle * 1e3), y + 9)], "ci", tip)
        if spread.ci95_s[1] * 1e3 > x.high:
            plot.text(x.end, y - 6, f"to {figure(spread.ci95_s[1] * 1e3)} →", anchor="end", style="m")
    return plot.svg()


def front(
    kept: Sequence[tuple[float, float]],
    every: Sequence[tuple[float, float, str]],
    titles: Sequence[str],
    knee: int,
    names: Sequence[str],
    width: float = WIDTH,
) -> str:
    """Return one objective against another: all plans, and a line through those of the front.

    Args:
        kept: the plans of the front, by the first objective.
        every: all plans, with who proposed them.
        knee: which of the front.
        names: of the plans of the front; those of the knee and of the ends are written beside their marks.
    """
    top, height = _top(width), 380.0
    best = " and ".join(map(figure, kept[knee]))
    description = f"front of {plural(len(kept), 'plan')}, beside {len(every)} others; the knee is at {best}"
    plot = Plot("front", "The plans that no other beats", description, width, height)
    most = [_FAR * max(p[side] for p in kept) for side in (0, 1)]
    near = [p for p in every if p[0] <= most[0] and p[1] <= most[1]]
    x = around([*(p[0] for p in near), *(p[0] for p in kept)], _LEFT, width - _RIGHT)
    y = around([*(p[1] for p in near), *(p[1] for p in kept)], height - _BOTTOM, top)
    plot.axis_y(y, _LEFT, width - _RIGHT, titles[1])
    plot.axis_x(x, height - _BOTTOM, top, titles[0])
    outside = 0
    for first, second, origin in every:
        inside = first <= x.high and second <= y.high
        outside += not inside
        tip = f"{origin}: {figure(first)}, {figure(second)}"
        plot.mark(x(min(first, x.high)), y(min(second, y.high)), "search" if inside else "above", tip)
    plot.line(steps((x(first), y(second)) for first, second in sorted(kept)), "best", "the front")
    named = {knee, *(min(range(len(kept)), key=lambda i: kept[i][side]) for side in (0, 1))}
    for index, (first, second) in enumerate(kept):
        label = f"{names[index]}: {figure(first)}, {figure(second)}" + (" (the knee)" if index == knee else "")
        plot.mark(x(first), y(second), "baseline" if index == knee else "model", label, 7.0 if index == knee else 4.0)
    # Left and right end, and baseline, of each name and mark.
    written = [(x(kept[i][0]) - 9, x(kept[i][0]) + 9, y(kept[i][1]) + 4) for i in named]
    for index in sorted(named, reverse=True):  # upwards: a name gives way to marks, and to those below it
        first, second = kept[index]
        right = x(first) > width / 2
        longest = min(_LONGEST_NAME, int(width / 16))
        text = names[index] if len(names[index]) <= longest else f"{names[index][: longest - 1]}…"
        text += " (knee)" if index == knee else ""
        at, long = x(first) + (-12 if right else 12), text_width(text)
        ends, base = (at - long, at) if right else (at, at + long), y(second) - 6
        while any(ends[0] < b and a < ends[1] and abs(base - other) < _NAME for a, b, other in written):
            base -= _NAME
        written.append((*ends, base))
        plot.text(at, base, text, anchor="end" if right else "start", style="n")
    legend = [("search", "other plans tried")] * (outside < len(every)) + [("baseline", "knee of the front")]
    if len(kept) > 1:
        legend += [("model", "other plans of the front"), ("best", "the front")]
    if outside:
        legend.append(("above", f"{plural(outside, 'plan')} outside the scale"))
    plot.legend(_margin(width), 18, legend)
    return plot.svg()


def forest(rows: Sequence[tuple[str, float, float, float]], label: str, width: float = WIDTH) -> str:
    """Return ratios with their intervals, one below the other, and a line at 1.

    Intervals that reach far beyond all ratios are cut, so that the others can be told apart.

    Args:
        rows: name, ratio, and the ends of its interval.
        label: of the axis of ratios.
    """
    row, left = 26.0, min(400.0, 24 + 1.1 * max(text_width(name) for name, *_ in rows))
    if width < WIDTH:  # a narrow picture has the names above their rows
        row, left = 44.0, 8.0
    height = row * len(rows) + 60
    plot = Plot(
        "ratios", "Ratios with intervals", "; ".join(f"{name}: {figure(r)}" for name, r, *_ in rows), width, height
    )
    ratios = [1.0, *(ratio for _, ratio, *_ in rows if math.isfinite(ratio))]
    least, most = min(ratios) / _CUT, max(ratios) * _CUT
    whole, rows = rows, [(name, ratio, max(low, least), min(high, most)) for name, ratio, low, high in rows]
    x = around([v for _, *each in rows for v in (*each, 1.0) if math.isfinite(v)], left, width - 20)
    plot.axis_x(x, height - 44, 4, label)
    plot.line([(x(1.0), 4), (x(1.0), height - 44)], "axis")
    for i, (name, ratio, low, high) in enumerate(rows):
        y = 6 + row * (i + 0.5)
        if width < WIDTH:
            plot.text(left, y - 10, _fitted(name, width))
        else:
            plot.text(left - 10, y + 4, name if len(name) <= 56 else f"{name[:55]}…", anchor="end")
        tip = f"{name}: {figure(ratio)} [{figure(whole[i][2])}, {figure(whole[i][3])}]"
        plot.line([(x(low), y), (x(high), y)], "ci", tip)
        plot.mark(x(ratio), y, "search", tip, 4.5)
    return plot.svg()


def _fitted(text: str, width: float) -> str:
    """Return a text, shortened at its end where it does not fit into a picture."""
    most = max(8, int((width - 16) / text_width("m")))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _top(width: float) -> float:
    """Return where the axes begin below the legend, which takes more rows in a narrow picture."""
    return _TOP if width >= WIDTH else _TOP + 54


def _margin(width: float) -> float:
    return _LEFT if width >= WIDTH else 8.0


def steps(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a line that keeps the height of each point until it is below or above the next."""
    found: list[tuple[float, float]] = []
    for x, y in points:
        found += [(x, found[-1][1]), (x, y)] if found else [(x, y)]
    return found


def _near(points: Sequence[Point], start: float, end: float, bound_s: float | None = None) -> Scale:
    """Return a vertical scale for the plans that come near the best one."""
    least_s = min((p.best_s for p in points), default=0.0)
    shown = [p.latency_s * 1e3 for p in points if p.latency_s <= _FAR * least_s]
    return around([*shown, bound_s * 1e3] if bound_s else shown, start, end)


def _legend(points: Sequence[Point], y: Scale) -> list[tuple[str, str]]:
    """Return the marks that are drawn, with their names."""
    inside = {p.family for p in points if p.latency_s * 1e3 <= y.high}
    above = sum(p.latency_s * 1e3 > y.high for p in points)
    found = [f for f in _FAMILIES if f[0] in inside]
    return [*found, (_ABOVE[0], f"{plural(above, 'plan')} {_ABOVE[1]}")] if above else found


def _mark(plot: Plot, x: float, y: Scale, point: Point, unit: str) -> None:
    above = point.latency_s * 1e3 > y.high
    plot.mark(x, y.end if above else y(point.latency_s * 1e3), "above" if above else point.family, _tip(point, unit))


def _tip(point: Point, unit: str = "ms") -> str:
    text = f"plan {point.number}, {point.origin}: {figure(point.latency_s * 1e3)} {unit}, K={point.stages}"
    if point.predicted_s is not None:
        text += f", predicted from its operators: {figure(point.predicted_s * 1e3)} ms"
    return text + (", stopped early" if point.raced else "")
