"""A picture of a model's graph with its cut points: one SVG document that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from optimizer.graph_layout import CALLER, Box, Layout, Wire, lay_out
from optimizer.graph_style import FAMILIES, STYLE, UNKNOWN, family
from optimizer.inspect import Inspection, moved_bytes
from optimizer.inspect_text import human_count, operator_text, printable, shape_text
from search_spaces.cuts import CutPoint
from search_spaces.errors import UsageError
from search_spaces.graph import Tensor
from search_spaces.models.files import replacing
from search_spaces.wording import human_bytes

MARKED = 5  # cut points that are marked as the cheapest

# Pixels. A row is an operator and the gap below it, in which wires turn and the cut line runs.
_NODE, _GAP, _TRACK, _BETWEEN = 22, 24, 8, 22
_TURN_OUT, _TURN_IN, _ARROW, _CORNER = 5, 4, 3, 4
_MARGIN, _BAR, _BAR_LEFT = 20, 120, 122
_CHARACTER = 6.63  # width of the 11 px monospaced font
_MOST_NAMES = 6


def check_picture(path: Path) -> None:
    """Refuse a file that is no picture, before any work is done for it.

    Raises:
        UsageError: the name does not end in ``.svg`` or ``.html``.
    """
    if path.suffix.lower() not in {".svg", ".html", ".htm"}:
        raise UsageError(
            f"--picture {str(path)!r}: a picture is .svg or .html",
            f"try {path.stem or 'picture'}.svg, or .html to zoom",
        )


def write_picture(found: Inspection, path: Path) -> None:
    """Write the graph with its cut points as an SVG, or as an HTML page with tables; whole or not at all.

    Raises:
        UsageError: the name has another ending, or the file cannot be written.
    """
    check_picture(path)
    if path.suffix.lower() == ".svg":
        text = f'<?xml version="1.0" encoding="UTF-8"?>\n{render_svg(found)}'
    else:
        from optimizer.graph_page import render_page

        text = render_page(found)
    with replacing(path) as file:
        file.write(text.encode())


def render_svg(found: Inspection) -> str:
    """Return the ``<svg>`` element; operators have the ids ``op-0`` …, cut points ``cut-1`` …."""
    picture = _Picture.of(found)
    body = "\n".join(
        (*_legend(found, picture), *_boxes(found, picture), *_cuts(found, picture), *_wires(found, picture),
         *_caller(found, picture), *_nodes(found, picture))
    )  # fmt: skip
    name = escape(printable(found.graph.name))
    size = f'width="{picture.width:.0f}" height="{picture.height:.0f}"'
    box = f'viewBox="0 0 {picture.width:.0f} {picture.height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" {size} {box} role="img" aria-labelledby="gt gd">\n'
        f'<title id="gt">{name}: operators and cut points</title>\n'
        f'<desc id="gd">{escape(facts(found))}. Operators run from top to bottom in the order of execution; the bar '
        f"between two of them shows how many bytes cross a cut there.</desc>\n"
        f"<style>{STYLE}</style>\n"
        f'<rect class="s" width="100%" height="100%"/>\n{body}\n</svg>\n'
    )


def facts(found: Inspection) -> str:
    """Return operators, MACs and parameters in a line."""
    total, count = found.total, len(found.graph.operators)
    file = f" · {human_bytes(found.file_nbytes)}" if found.file_nbytes is not None else ""
    return (
        f"{count:,} operator{'s' * (count != 1)} · {human_count(total.macs)} MACs · "
        f"{human_count(total.parameters)} parameters{file}"
    )


def tensor_text(tensor: Tensor) -> str:
    """Return name, shape, type and size of a tensor."""
    return f"{printable(tensor.name)}: {shape_text(tensor)} {tensor.dtype}, {human_bytes(tensor.nbytes)}"


@dataclass(frozen=True, slots=True)
class _Picture:
    """Pixels of a layout.

    Attributes:
        labels: of each operator, its kind and its shape.
        lefts: of each column's operators.
        node: width of an operator.
        top: of row -1, where the model's inputs are.
        legend: lines of the legend, each a list of swatch and text.
    """

    layout: Layout
    labels: tuple[tuple[str, str], ...]
    lefts: tuple[float, ...]
    node: float
    top: float
    width: float
    height: float
    legend: tuple[tuple[tuple[int, str], ...], ...]

    @classmethod
    def of(cls, found: Inspection) -> _Picture:
        graph = found.graph
        layout = lay_out(graph, found.groups)
        labels = []
        for index, operator in enumerate(graph.operators):
            shape = shape_text(graph.tensors[operator.outputs[0]]) if operator.outputs else ""
            labels.append((f"{index} {printable(operator.kind, 24)}", printable(shape, 20)))
        node = max(len(kind) + len(shape) for kind, shape in labels) * _CHARACTER + 42
        lefts, x = [], float(_BAR_LEFT + _BAR + _MARGIN)
        for tracks in layout.tracks:
            x += tracks * _TRACK + _BETWEEN
            lefts.append(x)
            x += node
        width = max(x + _MARGIN, 640.0)
        legend = tuple(_legend_lines(found, width - 2 * _MARGIN))
        top = 76.0 + 18 * len(legend)
        height = top + (len(labels) + 1) * (_NODE + _GAP) + _MARGIN
        return cls(layout, tuple(labels), tuple(lefts), node, top, width, height, legend)

    def y(self, row: int) -> float:
        """Top of a row; the row -1 is the caller's."""
        return self.top + (row + 1) * (_NODE + _GAP)

    def middle(self, row: int, wire: Wire) -> float:
        """Where wires meet an operator; the caller's box is as wide as needed."""
        column = self.layout.columns[row] if row != CALLER else 0
        return self.lefts[column] + self.node / 2 if row != CALLER else self.lane(wire)

    def lane(self, wire: Wire) -> float:
        """Where a wire runs down."""
        left = self.lefts[wire.column]
        return left + self.node / 2 if wire.track == 0 else left - 6 - _TRACK * (wire.track - 0.5)


def _legend_lines(found: Inspection, width: float) -> Iterator[tuple[tuple[int, str], ...]]:
    """Yield the legend's entries, as many a line as fit: the family's number, and its kinds with their counts."""
    kinds: dict[str, dict[str, int]] = {}
    for index, operator in enumerate(found.graph.operators):
        counts = kinds.setdefault(family(found, index), {})
        counts[operator.kind] = counts.get(operator.kind, 0) + 1
    line: list[tuple[int, str]] = []
    used = 0.0
    for number, name in enumerate(FAMILIES):
        if name not in kinds:
            continue
        most = sorted(kinds[name].items(), key=lambda item: -item[1])
        text = ", ".join(f"{count} {printable(kind, 24)}" for kind, count in most[:3]) + ", …" * (len(most) > 3)
        entry = f"{name}: {text}"
        size = 34 + _text_width(entry)
        if line and used + size > width:
            yield tuple(line)
            line, used = [], 0.0
        line.append((number, entry))
        used += size
    yield tuple(line)


def _text_width(text: str) -> float:
    """Return about the width of a text in the 11 px proportional font, in a wide one rather than a narrow one."""
    return sum(7.6 if c.isupper() else 6.2 for c in text)


def _legend(found: Inspection, picture: _Picture) -> Iterator[str]:
    yield f'<text class="h" x="{_MARGIN}" y="32">{escape(printable(found.graph.name))}</text>'
    yield f'<text class="m" x="{_MARGIN}" y="50">{escape(facts(found))}</text>'
    y = 72
    for line in picture.legend:
        x = float(_MARGIN)
        for number, text in line:
            yield (
                f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" rx="2" fill="var(--c{number})"/>'
                f'<text x="{x + 15:.0f}" y="{y}">{escape(text)}</text>'
            )
            x += 34 + _text_width(text)
        y += 18
    if found.cuts:
        top = picture.y(CALLER)
        yield f'<text class="m" x="{_MARGIN}" y="{top + 6:.0f}">bytes that cross a cut</text>'
        yield f'<text class="m" x="{_MARGIN}" y="{top + 20:.0f}">the cheapest are marked</text>'


def _boxes(found: Inspection, picture: _Picture) -> Iterator[str]:
    for box in picture.layout.boxes:
        first, last = box.columns[0], box.columns[1] - 1
        left = picture.lefts[first] - picture.layout.tracks[first] * _TRACK - 9
        right = picture.lefts[last] + picture.node + 9
        top, bottom = picture.y(box.rows[0]) - 6, picture.y(box.rows[1] - 1) + _NODE + 6
        yield (
            f'<g><title>{escape(_box_text(found, box))}</title><rect class="b" rx="8" x="{left:.1f}" y="{top:.1f}" '
            f'width="{right - left:.1f}" height="{bottom - top:.1f}"/></g>'
        )


def _box_text(found: Inspection, box: Box) -> str:
    group = box.group
    start = operator_text(found.graph, group.entry, "the model's inputs")
    end = operator_text(found.graph, group.exit, "the model's outputs")
    macs = " | ".join(human_count(sum(found.costs[o].macs for o in b.members())) for b in group.branches)
    return f"{len(group.branches)} parallel branches from {start} to {end}\nMACs: {macs}"


def _cuts(found: Inspection, picture: _Picture) -> Iterator[str]:
    largest = max((cut.nbytes for cut in found.cuts), default=0)
    marked = _marked(found.cuts)
    for cut in found.cuts:
        y = picture.y(cut.position) - _GAP / 2
        bar = max(1.0, cut.nbytes / largest * _BAR) if cut.nbytes else 0.0
        yield (
            f'<g class="c{" k" * (cut.position in marked)}" id="cut-{cut.position}">'
            f"<title>{escape(cut_text(found, cut))}</title>"
            f'<rect class="z" x="{_MARGIN}" y="{y - 7:.1f}" width="{picture.width - 2 * _MARGIN:.0f}" height="14"/>'
            f'<line x1="{_BAR_LEFT + bar:.1f}" x2="{picture.width - _MARGIN:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="m e" x="{_MARGIN + 28}" y="{y + 4:.1f}">{cut.position}</text>'
            f'<text class="e" x="{_BAR_LEFT - 8}" y="{y + 4:.1f}">{human_bytes(cut.nbytes)}</text>'
            f'<rect class="r" x="{_BAR_LEFT}" y="{y - 5:.1f}" width="{bar:.1f}" height="10" rx="1"/></g>'
        )


def _marked(cuts: Sequence[CutPoint]) -> set[int]:
    """Return the positions of the cheapest cut points and of those that cost as little; none where all are equal."""
    sizes = sorted(cut.nbytes for cut in cuts)
    if not sizes or sizes[0] == sizes[-1]:
        return set()
    limit = sizes[min(MARKED, max(1, len(sizes) // 3)) - 1]
    return {cut.position for cut in cuts if cut.nbytes <= limit < sizes[-1]}


def cut_text(found: Inspection, cut: CutPoint) -> str:
    """Return where a cut lies and what crosses it, a line for each tensor."""
    graph = found.graph
    ends = f"{operator_text(graph, cut.position - 1)} and {operator_text(graph, cut.position)}"
    lines = [f"cut {cut.position}, between {ends}: {human_bytes(cut.nbytes)}"]
    lines += [tensor_text(graph.tensors[t]) for t in cut.tensors[:_MOST_NAMES]]
    if len(cut.tensors) > _MOST_NAMES:
        lines.append(f"and {len(cut.tensors) - _MOST_NAMES} more tensors")
    return "\n".join(lines)


def _wires(found: Inspection, picture: _Picture) -> Iterator[str]:
    graph = found.graph
    given = set(graph.inputs)
    for wire in picture.layout.wires:
        start, end, lane = picture.middle(wire.origin, wire), picture.middle(wire.target, wire), picture.lane(wire)
        above, below = picture.y(wire.origin) + _NODE, picture.y(wire.target) - _ARROW
        path = _rounded([(start, above), (start, above + _TURN_OUT), (lane, above + _TURN_OUT),
                         (lane, below - _TURN_IN), (end, below - _TURN_IN), (end, below)])  # fmt: skip
        read = dict.fromkeys(graph.operators[wire.target].inputs)
        handed = [
            t for t in read if (t in given if wire.origin == CALLER else graph.producer.get(t, CALLER) == wire.origin)
        ]
        origin = operator_text(graph, wire.origin if wire.origin != CALLER else None, "the model's inputs")
        text = "\n".join(
            [f"{origin} → {operator_text(graph, wire.target)}", *(tensor_text(graph.tensors[t]) for t in handed)]
        )
        yield (
            f'<g class="l"><title>{escape(text)}</title><path class="t" d="{path}"/><path class="w" d="{path}"/>'
            f'<path class="a" d="M{end:.1f} {below + _ARROW:.1f}l-3.5 -6h7z"/></g>'
        )


def _rounded(points: Sequence[tuple[float, float]]) -> str:
    """Return the path through points of which neighbours share a coordinate, its corners rounded."""
    kept: list[tuple[float, float]] = []
    for point in points:
        if kept and point == kept[-1]:
            continue
        if len(kept) > 1 and (kept[-2][0] == kept[-1][0] == point[0] or kept[-2][1] == kept[-1][1] == point[1]):
            kept[-1] = point
        else:
            kept.append(point)
    found = [f"M{kept[0][0]:.1f} {kept[0][1]:.1f}"]
    for before, corner, after in zip(kept, kept[1:], kept[2:], strict=False):
        enter, leave = _towards(corner, before), _towards(corner, after)
        found.append(f"L{enter[0]:.1f} {enter[1]:.1f}Q{corner[0]:.1f} {corner[1]:.1f} {leave[0]:.1f} {leave[1]:.1f}")
    found.append(f"L{kept[-1][0]:.1f} {kept[-1][1]:.1f}")
    return "".join(found)


def _towards(corner: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """Return the point where a corner's rounding begins on the way to another point."""
    dx, dy = other[0] - corner[0], other[1] - corner[1]
    length = abs(dx) + abs(dy)
    part = min(_CORNER, length / 2) / length
    return corner[0] + dx * part, corner[1] + dy * part


def _caller(found: Inspection, picture: _Picture) -> Iterator[str]:
    """Yield the model's inputs, wide enough for all wires that come from there."""
    graph = found.graph
    lanes = [picture.lane(wire) for wire in picture.layout.wires if wire.origin == CALLER]
    left = min([picture.lefts[0], *(x - 8 for x in lanes)])
    right = max([picture.lefts[0] + picture.node, *(x + 8 for x in lanes)])
    tensors = [graph.tensors[i] for i in graph.inputs]
    text = f"input {shape_text(tensors[0])} {tensors[0].dtype}" if len(tensors) == 1 else f"{len(tensors)} inputs"
    title = "\n".join(tensor_text(t) for t in tensors) or "the model reads nothing from the caller"
    y = picture.y(CALLER)
    yield (
        f'<g class="n"><title>{escape(title)}</title><rect class="f" x="{left:.1f}" y="{y:.1f}" '
        f'width="{right - left:.1f}" height="{_NODE}" rx="11"/><text x="{(left + right) / 2:.1f}" '
        f'y="{y + 15:.1f}" text-anchor="middle">{escape(text)}</text></g>'
    )


def _nodes(found: Inspection, picture: _Picture) -> Iterator[str]:
    wanted = set(found.graph.outputs)
    for index, (kind, shape) in enumerate(picture.labels):
        x, y = picture.lefts[picture.layout.columns[index]], picture.y(index)
        name = family(found, index)
        node = (
            f'<g class="n{" u" * (name == UNKNOWN)}" id="op-{index}"><title>{escape(_node_text(found, index))}</title>'
            f'<rect class="f" x="{x:.1f}" y="{y:.1f}" width="{picture.node:.1f}" height="{_NODE}" rx="4"/>'
            f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="6" height="{_NODE - 2}" rx="3" '
            f'fill="var(--c{FAMILIES.index(name)})"/>'
            f'<text x="{x + 14:.1f}" y="{y + 15:.1f}">{escape(kind)}</text>'
            f'<text class="m e" x="{x + picture.node - 9:.1f}" y="{y + 15:.1f}">{escape(shape)}</text>'
        )
        leaving = [found.graph.tensors[t] for t in found.graph.operators[index].outputs if t in wanted]
        if leaving:
            title = escape("handed to the caller\n" + "\n".join(tensor_text(t) for t in leaving))
            left, top = x + picture.node, y + _NODE / 2
            node += f'<g><title>{title}</title><path class="a" d="M{left:.1f} {top - 3:.1f}h7v-4l8 7l-8 7v-4h-7z"/></g>'
        yield f"{node}</g>"


def _node_text(found: Inspection, index: int) -> str:
    graph, cost = found.graph, found.costs[index]
    operator = graph.operators[index]
    lines = [operator_text(graph, index)]
    if operator.parts:
        lines.append("made of " + ", ".join(printable(part.kind, 24) for part in operator.parts[:_MOST_NAMES]))
    lines += [tensor_text(graph.tensors[t]) for t in operator.outputs[:_MOST_NAMES]]
    arithmetic = f"{human_count(cost.macs)} MACs, {cost.intensity:.1f} a byte; " if cost.macs else ""
    weights = f"{human_count(cost.parameters)} parameters; " if cost.parameters else ""
    lines.append(f"{arithmetic}{weights}moves {human_bytes(moved_bytes(cost))}")
    return "\n".join(lines)
