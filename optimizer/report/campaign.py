"""Report of a campaign: the summary first, published figures beside ours, then every study."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from optimizer.campaign.models import accuracy_text, share_text
from optimizer.campaign.table import (
    AGAINST,
    Row,
    Tables,
    against_baseline,
    better_word,
    cell_text,
    device_text,
    explained_text,
    first_objective,
    front_text,
    fronts_of,
    gain_text,
    gather,
    group_text,
    how_known,
    makespan_text,
    mean_excess,
    named,
    rate_text,
    ratio_heading,
    read_state,
    shown_axes,
    vague_text,
)
from optimizer.report.document import (
    Block,
    Cell,
    Code,
    Column,
    Document,
    Section,
    Table,
    Text,
    headed,
    listed,
    machine_facts,
)
from optimizer.report.plots import forest, steps
from optimizer.report.study import at_two_widths
from optimizer.report.svg import Plot, Scale, around, text_width
from search_spaces.core.wording import percent, plural

PUBLISHED = "Our figures beside published ones"
_WIDTH = 920.0
_AT = (10, 25, 50, 100, 200, 400)
_INDICATORS = {
    "flops": "work (MACs)",
    "parameters": "parameters",
    "l1_accesses_estimate": "first-level cache accesses",
    "memory_accesses_estimate": "memory accesses",
    "flops_and_memory": "work and memory accesses",
}
_ROW = 22.0
_MARKS = ("search", "baseline", "model", "above")
_OF_LINES = ("baseline", "model", "search", "above")  # marks in the colours of lines


def campaign_document(folder: Path) -> Document:
    """Return the report of a campaign; studies that are not finished are listed without results.

    Raises:
        RunFolderError: as :func:`read_state`.
    """
    state = read_state(folder)
    tables = gather(folder, state)
    indicators = [_indicators(tables.indicators)] if tables.explained else []
    sections = [
        Section("explained", "What explains latency", (*explained(tables), *indicators)),
        Section("summary", "Summary", tuple(summary(state, tables))),
        Section("paper", PUBLISHED, tuple(published(tables))),
        Section("curves", "Best latency against plans tried", tuple(_curves(tables))),
        Section("studies", "Studies", tuple(_studies(state, tables))),
        Section("plans", "All plans", tuple(_plans(tables))),
        Section("environment", "Environment", tuple(_environment(state))),
        Section("again", "How to repeat it", tuple(_again(state))),
    ]
    return Document(
        title=str(state["name"]),
        subtitle=str(state.get("description") or "") or f"{len(state['studies'])} studies",
        sections=tuple(s for s in sections if s.blocks),
        files={},
    )


def summary(state: Mapping[str, Any], tables: Tables, *, times: bool = True) -> Iterator[Block]:
    """Yield what was found: in sentences, a row for each cell of the matrix, and a picture.

    Args:
        times: whether the table says the gain as a factor, too.
    """
    done = sum(s["status"] == "done" for s in state["studies"])
    failed = [s for s in state["studies"] if s["status"] == "failed"]
    compared = [r for r in tables.summary if r["ratio"] is not None]
    if compared or not tables.summary:
        yield Text(_answer(compared) if compared else "No study is finished yet.", "answer")
    evaluators = list(dict.fromkeys(named(r["evaluator"]) for r in tables.summary))
    by = f"; evaluator{'s' * (len(evaluators) > 1)} {', '.join(evaluators)}" if evaluators else ""
    begun = sum(s["status"] == "begun" for s in state["studies"])
    progress = (
        f"{done} of {len(state['studies'])} studies are done{f', {begun} begun: trials are kept' if begun else ''}"
    )
    yield Text(f"{progress}{f', {len(failed)} failed' if failed else ''}{by}.")
    if not tables.summary:
        return
    axes = shown_axes(tables.summary)
    for study, front in fronts_of(tables):
        yield Text(f"{study}: {front_text(front)}.")
    for row in tables.gains:
        which = " · ".join(named(row[axis]) for axis in axes if axis != "model")
        said = gain_text(row)
        yield Text(f"{which}: {said}." if which else f"{said[0].upper()}{said[1:]}.")
    for row in tables.rates:
        yield Text(f"{rate_text(row, axes)}.")
    yield from _trained(tables.trained)
    if text := makespan_text(tables.results):
        yield Text(f"{text[0].upper()}{text[1:]}.")
    names = [cell_text(row, axes) for row in tables.summary]
    units, several = {r["unit"] for r in tables.summary}, any(r["studies"] > 1 for r in tables.summary)
    unit = f", {units.pop()}" if len(units) == 1 else ""  # columns that have the same in each row are left out
    best = f"{'median ' * several}{how_known(tables)}best{unit}"
    head = headed(f"study; studies|d; {best}|.4g; unit; predicted; {AGAINST}; times as good")
    rows = tuple(
        (
            *(cell_text(r, axes), r["studies"] if several else None, r["best"], "" if unit else r["unit"]),
            *(_predicted(r, tables), against_baseline(r)),
            _times(r) if times else "",
        )
        for r in tables.summary
    )
    yield Table("Summary", head, rows)
    if compared:
        yield Text(
            "The best baseline is the best plan of one stage, or of several models the best baseline of all. The best "
            "other plan is any other one, also one of a published cut criterion.",
            "note",
        )
    if text := vague_text(tables.results):
        yield Text(f"{text}.", "note")
    ratios = [
        (n, float(r["ratio"]), float(r["ratio_low"]), float(r["ratio_high"]))
        for n, r in zip(names, tables.summary, strict=True)
        if r["ratio"] is not None
    ]
    if ratios:
        heading = ratio_heading(tables.summary)
        yield at_two_widths(
            "ratios",
            partial(forest, ratios, heading),
            f"{heading[0].upper()}{heading[1:]}, with the 95 % interval: over "
            "seeds and repetitions where there are several, else that of the study's final comparison.",
        )


def _trained(rows: Sequence[Row]) -> Iterator[Block]:
    """Yield the models that the campaign made: their work, accuracy and latency, and a picture."""
    if not rows:
        return
    if text := accuracy_text(rows):
        yield Text(text)
    columns = headed(
        "model; seeds|d; million MACs|.4g; best plan, ms|.4g; before training|.1%; accuracy, %; beside; points"
    )
    known = ("latency_ms", "accuracy_before", "accuracy", "beside", "difference")
    told = ({**r, "accuracy": share_text(r, "accuracy"), "difference": share_text(r, "difference")} for r in rows)
    cells = tuple((r["model"], r["seeds"], r["macs"] / 1e6, *(r[name] for name in known)) for r in told)
    yield Table("Models made by this campaign", columns, cells)
    if len(drawn := [row for row in rows if row["accuracy"] is not None]) > 1:
        text = (
            "Accuracy on inputs kept apart, against work relative to the family's largest model, with 95 % intervals."
        )
        yield at_two_widths("accuracy", partial(_accuracy_plot, drawn), text)


def _accuracy_plot(rows: Sequence[Row], width: float = _WIDTH) -> str:
    height, left = 380.0, 70.0 if width >= _WIDTH else 52.0
    description = "; ".join(f"{r['model']}: {percent(r['accuracy'], 1)}, {r['macs'] / 1e6:.3g} million" for r in rows)
    plot = Plot("accuracy", "Accuracy and multiply-accumulates", description, width, height)
    x = Scale(0.0, 105.0, left, width - 30)
    y = around((100 * row["accuracy"] for row in rows), height - 44, 60, margin=0.08)
    plot.axis_y(y, left, width - 30, "accuracy, %")
    plot.axis_x(x, height - 44, 60, "multiply-accumulates, % of the family's largest model")
    lines = list(dict.fromkeys((row["family"], bool(row["tucker"])) for row in rows))
    for i, line in enumerate(lines):
        largest = max(row["macs"] for row in rows if row["family"] == line[0])
        points = []
        for row in (row for row in rows if (row["family"], bool(row["tucker"])) == line):
            at, level = x(100 * row["macs"] / largest), y(100 * row["accuracy"])
            ends = (
                100 * (row["accuracy"] if row[end] is None else row[end]) for end in ("accuracy_low", "accuracy_high")
            )
            plot.line([(at, y(max(y.low, min(y.high, end)))) for end in ends], f"series c{i % 4}")
            plot.mark(at, level, _OF_LINES[i % 4], f"{row['model']}: {percent(row['accuracy'], 1)}", 5.0)
            points.append((at, level))
        plot.line(sorted(points), f"series c{i % 4}", line[0])
    names = [f"{family}{', decomposed' * cut}" for family, cut in lines]
    plot.legend(8, 18, [(_OF_LINES[i % 4], name) for i, name in enumerate(names)])
    return plot.svg()


def _answer(rows: Sequence[Row]) -> str:
    """Return in how many rows a plan is better than the best baseline; predictions apart from measurements."""
    better, noun = better_word(rows), "summary row" if any(row["studies"] > 1 for row in rows) else "study"
    found: list[str] = []
    for predicted, how in ((False, "Measured"), (True, "Predicted")):
        if each := [row for row in rows if bool(row["predicted"]) == predicted]:
            faster = sum(bool(row["significant"]) and row["ratio"] > 1.0 for row in each)
            what = "" if found else f"a plan is significantly {better} than the best baseline "
            found.append(f"{how}: {what}in {faster} of {plural(len(each), noun)}.")
    return " ".join(found)


def _predicted(row: Row, tables: Tables) -> str:
    """Return ``yes`` for a prediction among measurements."""
    return "yes" if row["predicted"] and not how_known(tables) else ""


def _times(row: Row) -> str:
    """Return how many times as good as the best baseline the best other plan is, with its interval."""
    if row["ratio"] is None:
        return ""
    value, low, high = (f"{row[name]:.3f}" for name in ("ratio", "ratio_low", "ratio_high"))
    return value if value == low == high else f"{value} [{low}, {high}]"


def published(tables: Tables) -> Iterator[Block]:
    """Yield our figures, beside published ones where there are any."""
    if not tables.expected:
        return
    if any(row["paper"] for row in tables.expected):
        yield Text("Other machines give other times, so compare ratios, not milliseconds.")
    yield Text("From, to: the 95 % interval of one study, or the least and the most of several.", "note")
    head = "what; paper|.4g; ours|.4g; from|.4g; to|.4g; ours / paper|.3f; ours is; left out|+.0%; remark; source"
    values = itemgetter("name", "paper", "ours", "ours_low", "ours_high", "ratio", "known", "left_out")
    rows = []
    for row in tables.expected:
        near = f"{'' if row['within'] else 'not '}within {percent(row['tolerance'])}"
        if row["within"] is False and _may_be_within(row):
            near += ", which the interval does not exclude"
        remark = row["missing"] or ("" if row["within"] is None else near)
        of = f"median of {row['studies']} studies" if row["studies"] > 1 else ""
        found = "; ".join(filter(None, (of, remark, "" if row["in_final"] else "not in the final")))
        rows.append((*values(row), found, row["source"]))
    yield Table(PUBLISHED, headed(head), tuple(rows))
    for fit in filter(None, dict.fromkeys(row["fit"] for row in tables.expected)):
        yield Text(f"{fit[0].upper()}{fit[1:]}.", "note")
    if any(row["known"] == "fitted" for row in tables.expected):
        yield Text(
            "Fitted: the profile was fitted to the published figure, so that it does not predict it. Left out: how far "
            "ours is off if the profile is fitted without it.",
            "note",
        )


def _may_be_within(row: Row) -> bool:
    """Return whether the interval of our figure reaches those that count as equal to the published one."""
    low, high = (row[name] or row["ours"] for name in ("ours_low", "ours_high"))
    allowed = row["paper"] * row["tolerance"]
    return bool(low <= row["paper"] + allowed and high >= row["paper"] - allowed)


def _curves(tables: Tables) -> Iterator[Block]:
    """Compare samplers by their mean excess over each model's best known plan, against plans tried."""
    samplers = list(dict.fromkeys(named(r["sampler"]) for r in tables.curves))
    if len(samplers) < 2:
        return
    curves = mean_excess(tables.curves)
    last = max(len(c) for c in curves.values())
    at = [n for n in _AT if n <= last] or [last]
    columns = headed("sampler", *(Column(f"after {n}", ".2%") for n in at))
    rows: tuple[tuple[Cell, ...], ...] = tuple((s, *(c[min(n, len(c)) - 1] for n in at)) for s, c in curves.items())
    alike: dict[tuple[float, ...], list[str]] = {}
    for sampler, curve in curves.items():
        alike.setdefault(tuple(round(excess, 9) for excess in curve), []).append(sampler)
    equal = "".join(f" Equal throughout: {', '.join(names)}." for names in alike.values() if len(names) > 1)
    yield at_two_widths(
        "curves",
        partial(_curves_plot, {", ".join(names): curve for curve, names in alike.items()}, last),
        "How far the best plan so far is above the best that any study of this model on this platform found, mean over "
        f"models and seeds. Baselines come first in every study.{equal}",
        Table("Mean excess", columns, rows),
    )


def _curves_plot(curves: Mapping[str, Sequence[float]], last: int, width: float = _WIDTH) -> str:
    height = 360.0
    description = "; ".join(f"{s}: {percent(c[-1], 2)} after {len(c)}" for s, c in curves.items())
    left, right = (70, 130) if width >= _WIDTH else (52, 88)
    plot = Plot("curves", "Mean excess over the best plan known", description, width, height)
    x = around([1, last], left, width - right, margin=0.0)
    y = around([v * 100 for c in curves.values() for v in c[min(5, len(c) - 1) :]], height - 44, 40, zero=True)
    plot.axis_y(y, left, width - right, "% above the best")
    plot.axis_x(x, height - 44, 40, "different plans tried, known ones included")
    ends: list[float] = []
    for i, (sampler, curve) in enumerate(curves.items()):
        line = steps((x(n), max(y(v * 100), y.end)) for n, v in enumerate(curve, 1))
        plot.line(line, f"series c{i % 5}", sampler)
        below = line[-1][1]
        while any(abs(below - e) < 14 for e in ends):
            below -= 7
        ends.append(below)
        names = sampler.split(", ")
        short = len(names) == 1 or text_width(sampler) < right - 10
        plot.text(line[-1][0] + 10, below + 4, sampler if short else f"{names[0]} +{len(names) - 1}")
    return plot.svg()


def _studies(state: Mapping[str, Any], tables: Tables) -> Iterator[Block]:
    best = {r["study"]: r for r in tables.results if r["plan"] == "best"}
    found = f"{how_known(tables)}best"
    head = (
        f"study; state; {found}|.4g; 95 % from|.4g; to|.4g; unit; predicted; stages|d; above the predicted bound|+.1%; "
    )
    columns = headed(f"{head}remark")
    rows: list[tuple[Cell, ...]] = []
    for study in state["studies"]:
        row = best.get(study["name"], {})
        remark = study["error"] or tables.unreadable.get(study["name"], "")
        value, bound = (
            map(row.get, keys) for keys in (("value", "value_low", "value_high", "unit"), ("stages", "gap"))
        )
        predicted = _predicted(row, tables) if row else ""
        rows.append((study["name"], study["status"], *value, predicted, *bound, remark))
    yield Table("Studies", columns, tuple(rows))


def _plans(tables: Tables) -> Iterator[Block]:
    if not tables.results:
        return
    columns = headed(
        f"study; plan; stages|d; {how_known(tables).strip() or 'median'}|.4g; 95 % from|.4g; to|.4g; unit; "
        "predicted; samples|d; relative to the best plan|.3f; 95 % from|.3f; to|.3f"
    )
    measured = ("value", "value_low", "value_high", "unit", "predicted", "samples")
    ratios = ("over_best", "over_best_low", "over_best_high")
    late = tuple("misses" for _ in range(any(r["misses"] is not None for r in tables.results)))
    columns += headed("requests missed|d") if late else ()
    values = itemgetter("study", "plan", "stages", *measured, *ratios, *late)
    none = dict.fromkeys(ratios)
    shown = ({**r, "predicted": _predicted(r, tables)} for r in tables.results)
    rows = (values(r if first_objective(r).scales else {**r, **none}) for r in shown)
    yield Table("All plans", columns, tuple(rows), group=1)
    yield Text(
        "results.csv (and results.parquet) hold the same with every axis; curves.csv the course of each study.", "note"
    )


def _environment(state: Mapping[str, Any]) -> Iterator[Block]:
    parts = {"Python": state.get("python"), **dict(state.get("packages", {}))}
    facts = {"time": str(state.get("created_utc", "")), **machine_facts(dict(state.get("machine", {}))), **parts}
    yield listed("Environment", ("what", "value"), facts)


def _again(state: Mapping[str, Any]) -> Iterator[Block]:
    yield Code(shlex.join(str(word) for word in state.get("command", [])))
    yield Text("Studies that are finished are not run again, unless their options changed.", "note")


def explained(tables: Tables) -> Iterator[Block]:
    """Yield a picture of each R², the same as numbers, and errors about networks that were left out."""
    if not tables.explained:
        return
    yield Text(explained_text(tables.explained), "answer")
    yield Text(
        "Accesses are estimates from the sizes of tensors, not counts of hardware counters. Each line has an "
        "intercept; “work and memory accesses” has two slopes, so it is never below either. A cost model "
        "is itself a sum of work and bytes, so its R² only shows that.",
        "note",
    )
    columns = headed("where; models|d", *(Column(f"R² {name}", ".4f") for name in _INDICATORS.values()))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (group_text(r), r["models"], *(r[name] for name in _INDICATORS)) for r in tables.explained
    )
    table = Table("How much of the variance of latency each explains", columns, rows)
    caption = "R² of a straight line through each indicator."
    yield at_two_widths("explained", partial(_explained_plot, tables.explained), caption, table)
    yield Text(
        "A line that explains much of the variance may still be wrong about a network that it was not fitted to. Each "
        "network of a family is predicted from the others of its family, and each family from the other families.",
        "note",
    )
    yield _left_out(tables.explained)


def _left_out(rows: Sequence[Row]) -> Table:
    parts = [(name, part) for name in ("flops", "flops_and_memory") for part in ("median", "p90")]
    shown = {"median": "median", "p90": "90th percentile"}
    columns = headed("left out", *(f"{_INDICATORS[name]}: {shown[part]}, 95 %" for name, part in parts))
    cells = tuple(
        (
            f"each family, {device_text(r)}" if r["family"] == "all" else f"each of {group_text(r)}",
            *(_interval(r, f"{name}_error_{part}") for name, part in parts),
        )
        for r in rows
        if "flops_error_median" in r
    )
    return Table("Errors about networks that were left out", columns, cells)


def _interval(row: Row, name: str) -> str:
    low, high = (percent(row[f"{name}_{end}"], 0).removesuffix(" %") for end in ("low", "high"))
    return f"{percent(row[name], 0)} [{low}, {high}]"


def _indicators(rows: Sequence[Row]) -> Table:
    columns = headed(
        "model; where; million MACs|,.1f; million parameters|,.3f",
        "million first-level accesses|,.1f; million memory accesses|,.2f; best plan, ms|.4g; 95 % from|.4g; to|.4g",
    )
    took = itemgetter("latency_ms", "ci_low_ms", "ci_high_ms")
    cells = tuple(
        (r["model"], device_text(r), *(r[name] / 1e6 for name in list(_INDICATORS)[:4]), *took(r)) for r in rows
    )
    return Table("Indicators of each model", columns, cells)


def _explained_plot(rows: Sequence[Row], width: float = _WIDTH) -> str:
    families = list(dict.fromkeys(str(r["family"]) for r in rows))
    devices = list(dict.fromkeys(device_text(r) for r in rows))
    left = 24 + max(text_width(name) for name in _INDICATORS.values())
    height = 40 + len(families) * (len(_INDICATORS) * _ROW + 28) + 44
    description = "; ".join(
        f"{group_text(r)}: {', '.join(f'{name} {r[key]:.3f}' for key, name in _INDICATORS.items())}" for r in rows
    )
    plot = Plot("explained", "How much of the variance of latency each indicator explains", description, width, height)
    least = min(0.9, *(float(r[name]) for r in rows for name in _INDICATORS))
    x = Scale(least - 0.02, 1.005, left, width - 20)
    plot.axis_x(x, height - 44, 30, "R² of a straight line")
    plot.legend(left if width >= _WIDTH else 8, 18, [(_MARKS[i % 4], device) for i, device in enumerate(devices)])
    y = 36.0
    for family in families:
        plot.text(8, y + 16, "all models" if family == "all" else family, style="s")
        y += 28
        for name, shown in _INDICATORS.items():
            plot.text(left - 10, y + 4, shown, anchor="end", style="m")
            for row in rows:
                if row["family"] == family:
                    mark = _MARKS[devices.index(device_text(row)) % 4]
                    plot.mark(x(row[name]), y, mark, f"{group_text(row)}, {shown}: {row[name]:.4f}", 4.5)
            y += _ROW
    return plot.svg()
