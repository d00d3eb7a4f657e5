"""A picture of a model's graph with its cut points: one SVG document that needs nothing else.

Each operator has a row of its own, in topological order, so that every cut point is a straight line between two rows
and the wires that cross this line are the tensors that cross the cut. The branches of a group stand side by side in
columns. A wire runs down the middle of a column where no operator is in its way, else down a track beside the column.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, count, takewhile
from pathlib import Path

from optimizer.tools.inspect import (
    Inspection,
    facts,
    group_texts,
    human_count,
    moved_bytes,
    operator_text,
    printable,
    shape_text,
)
from search_spaces.core.errors import UsageError
from search_spaces.core.graph import Graph, Tensor
from search_spaces.core.wording import human_bytes
from search_spaces.models.files import replacing
from search_spaces.spaces.branches import BranchGroup, walk
from search_spaces.spaces.cuts import CutPoint

CALLER = -1  # the row, and the origin of wires, of the model's inputs


_MARKED = 5  # cut points that are marked as the cheapest

# Pixels. A row is an operator and the gap below it, in which wires turn and the cut line runs.
_NODE, _GAP, _TRACK, _BETWEEN = 22, 24, 8, 22
_TURN_OUT, _TURN_IN, _ARROW = 5, 4, 3
_MARGIN, _BAR, _BAR_LEFT = 20, 120, 122
_CHARACTER = 6.63  # width of the 11 px monospaced font
_MOST_NAMES = 6

# Family → kinds; a known kind that is in no list works element by element.
_FAMILY_KINDS = {
    "convolution": "CONV_2D CONV_3D TRANSPOSE_CONV CONV_3D_TRANSPOSE",
    "depthwise convolution": "DEPTHWISE_CONV_2D",
    "matrix product": "FULLY_CONNECTED BATCH_MATMUL LSTM RNN SVDF UNIDIRECTIONAL_SEQUENCE_LSTM"
    " UNIDIRECTIONAL_SEQUENCE_RNN BIDIRECTIONAL_SEQUENCE_LSTM BIDIRECTIONAL_SEQUENCE_RNN",
    "pooling, reduction": "AVERAGE_POOL_2D MAX_POOL_2D L2_POOL_2D MEAN SUM REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN"
    " REDUCE_PROD ARG_MAX ARG_MIN CUMSUM SOFTMAX LOG_SOFTMAX L2_NORMALIZATION LOCAL_RESPONSE_NORMALIZATION",
    "copy, change of shape": "BATCH_TO_SPACE_ND BROADCAST_TO CAST CONCATENATION DEPTH_TO_SPACE DEQUANTIZE"
    " DYNAMIC_UPDATE_SLICE EXPAND_DIMS FILL GATHER GATHER_ND MIRROR_PAD PACK PAD PADV2 QUANTIZE RESHAPE"
    " RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR REVERSE_V2 SCATTER_ND SHAPE SLICE SPACE_TO_BATCH_ND SPACE_TO_DEPTH SPLIT"
    " SPLIT_V SQUEEZE STRIDED_SLICE TILE TRANSPOSE UNPACK",
}
_ELEMENTWISE, _GROUPED, _UNKNOWN = "element by element", "placed as one", "not known to the cost table"
_FAMILY = {kind: family for family, kinds in _FAMILY_KINDS.items() for kind in kinds.split()}
_FAMILIES = (*_FAMILY_KINDS, _ELEMENTWISE, _GROUPED, _UNKNOWN)


def check_picture(path: Path) -> None:
    """Check the ending of a picture's file, before any work is done for it.

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
        from optimizer.report.graph_page import render_page

        text = render_page(found)
    with replacing(path) as file:
        file.write(text.encode())


def render_svg(found: Inspection) -> str:
    """Return the ``<svg>`` element; operators have the ids ``op-0`` …, cut points ``cut-1`` …."""
    picture = _Picture.of(found)
    style = (Path(__file__).parent / "graph.css").read_text(encoding="utf-8")  # its colours suit the colour-blind
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
        f"<style>\n{style}</style>\n"
        f'<rect class="s" width="100%" height="100%"/>\n{body}\n</svg>\n'
    )


def tensor_text(tensor: Tensor) -> str:
    """Return name, shape, type and size of a tensor."""
    return f"{printable(tensor.name)}: {shape_text(tensor)} {tensor.dtype}, {human_bytes(tensor.nbytes)}"


@dataclass(frozen=True, slots=True)
class Wire:
    """A line for the tensors that one operator writes and another reads.

    Attributes:
        origin: row of the operator that writes, or :data:`CALLER`.
        target: row of the operator that reads.
        column, track: where the wire runs down; track 0 is the middle of the column, the others are to its left.
    """

    origin: int
    target: int
    column: int
    track: int


@dataclass(frozen=True, slots=True)
class Box:
    """The extent of a branch group: half-open rows and columns."""

    group: BranchGroup
    rows: tuple[int, int]
    columns: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """A picture's geometry.

    Attributes:
        columns: of each operator; its row is its index.
        tracks: how many each column has to its left; one at least for each column that is in use.
        wires: by origin, then longest first.
        boxes: outer ones first.
    """

    columns: tuple[int, ...]
    tracks: tuple[int, ...]
    wires: tuple[Wire, ...]
    boxes: tuple[Box, ...]


def lay_out(graph: Graph, groups: Sequence[BranchGroup]) -> Layout:
    """Place operators and wires.

    Args:
        groups: the outermost ones, as :func:`~search_spaces.spaces.branches.branch_groups` returns them.
    """
    columns = [0] * len(graph.operators)
    boxes = _place(groups, columns)
    wires = _route(graph, columns)
    tracks = [0] * (max(columns, default=0) + 1)
    for wire in wires:
        tracks[wire.column] = max(tracks[wire.column], wire.track)
    return Layout(tuple(columns), tuple(tracks), tuple(wires), tuple(boxes))


def _place(groups: Sequence[BranchGroup], columns: list[int]) -> list[Box]:
    """Give the operators of all branches their columns; return the extent of each group, outer ones first."""
    listed = list(walk(groups))
    widths: dict[int, list[int]] = {}  # of a group's branches
    rows: dict[int, tuple[int, int]] = {}
    for group in reversed(listed):  # inner groups first
        widths[id(group)] = [max((sum(widths[id(g)]) for g in b.groups), default=1) for b in group.branches]
        inner = [rows[id(g)] for b in group.branches for g in b.groups]
        first = min(*(b.operators[0] for b in group.branches), *(r[0] for r in inner))
        end = max(*(b.operators[-1] + 1 for b in group.branches), *(r[1] for r in inner))
        rows[id(group)] = (first, end)
    left = {id(group): 0 for group in groups}
    boxes = []
    for group in listed:
        start = column = left[id(group)]
        for branch, width in zip(group.branches, widths[id(group)], strict=True):
            for operator in branch.operators:
                columns[operator] = column
            left |= {id(inner): column for inner in branch.groups}
            column += width
        boxes.append(Box(group, rows[id(group)], (start, column)))
    return boxes


def _route(graph: Graph, columns: Sequence[int]) -> list[Wire]:
    occupied: dict[int, list[int]] = {}  # column → rows of its operators, ascending
    for row, column in enumerate(columns):
        occupied.setdefault(column, []).append(row)
    known = {**dict.fromkeys(graph.inputs, CALLER), **graph.producer}
    ends = {(known[t], row) for row, operator in enumerate(graph.operators) for t in operator.inputs if t in known}
    used: dict[tuple[int, int], tuple[int, int]] = {}  # column and track → origin and target of the wire seen last
    wires = []
    for origin, target in sorted(ends, key=lambda wire: (wire[0], -wire[1])):
        here, there = columns[origin] if origin != CALLER else columns[target], columns[target]
        middles = [(there, 0), (here, 0)]
        clear = (track for track in middles if not _any_between(occupied[track[0]], origin, target))
        track = next((track for track in clear if _is_free(used, track, origin)), None)
        track = track or _track(used, max(here, there), origin)
        before = used.get(track)
        used[track] = (origin, max(target, before[1]) if before and before[0] == origin else target)
        wires.append(Wire(origin, target, *track))
    return wires


def _any_between(rows: Sequence[int], first: int, last: int) -> bool:
    """Tell whether one of the ascending rows lies between two, both excluded."""
    index = bisect_right(rows, first)
    return index < len(rows) and rows[index] < last


def _is_free(used: dict[tuple[int, int], tuple[int, int]], track: tuple[int, int], origin: int) -> bool:
    """Return whether a wire from ``origin`` may enter a track; wires of one origin share it, others follow below."""
    before = used.get(track)
    return before is None or before[0] == origin or before[1] <= origin


def _track(used: dict[tuple[int, int], tuple[int, int]], column: int, origin: int) -> tuple[int, int]:
    """Return the track beside a column that wires of this origin use already, or the nearest free one."""
    tracks = list(takewhile(used.__contains__, ((column, track) for track in count(1))))
    own = (track for track in tracks if used[track][0] == origin)
    free = (track for track in tracks if used[track][1] <= origin)
    return next(chain(own, free), (column, len(tracks) + 1))


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
        return self.track(wire) if row == CALLER else self.lefts[self.layout.columns[row]] + self.node / 2

    def track(self, wire: Wire) -> float:
        """Where a wire runs down."""
        left = self.lefts[wire.column]
        return left + self.node / 2 if wire.track == 0 else left - 6 - _TRACK * (wire.track - 0.5)


def _legend_lines(found: Inspection, width: float) -> Iterator[tuple[tuple[int, str], ...]]:
    """Yield lines of the legend, each with as many entries as fit: a family's number, and its kinds with counts."""
    kinds: dict[str, Counter[str]] = {}
    for index, operator in enumerate(found.graph.operators):
        kinds.setdefault(_family(found, index), Counter())[operator.kind] += 1
    line: list[tuple[int, str]] = []
    used = 0.0
    for number, name in ((i, name) for i, name in enumerate(_FAMILIES) if name in kinds):
        text = ", ".join(f"{some} {printable(kind, 24)}" for kind, some in kinds[name].most_common(3))
        entry = f"{name}: {text}{', …' * (len(kinds[name]) > 3)}"
        size = 34 + _text_width(entry)
        if line and used + size > width:
            yield tuple(line)
            line, used = [], 0.0
        line.append((number, entry))
        used += size
    yield tuple(line)


def _text_width(text: str) -> float:
    """Return a text's estimated width in the 11 px proportional font, for a wide font."""
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
    start, end, macs = group_texts(found, box.group)
    return f"{len(macs)} parallel branches from {start} to {end}\nMACs: {' | '.join(macs)}"


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
    limit = sizes[min(_MARKED, max(1, len(sizes) // 3)) - 1]
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
    known = {**dict.fromkeys(graph.inputs, CALLER), **graph.producer}
    for wire in picture.layout.wires:
        start, end, track = picture.middle(wire.origin, wire), picture.middle(wire.target, wire), picture.track(wire)
        above, below = picture.y(wire.origin) + _NODE, picture.y(wire.target) - _ARROW
        turns = f"V{above + _TURN_OUT:.1f}H{track:.1f}V{below - _TURN_IN:.1f}H{end:.1f}V{below:.1f}"
        path = f"M{start:.1f} {above:.1f}{turns}"
        read = dict.fromkeys(graph.operators[wire.target].inputs)
        transferred = [t for t in read if known.get(t) == wire.origin]
        origin = operator_text(graph, wire.origin if wire.origin != CALLER else None, "the model's inputs")
        text = "\n".join(
            [f"{origin} → {operator_text(graph, wire.target)}", *(tensor_text(graph.tensors[t]) for t in transferred)]
        )
        yield (
            f'<g class="l"><title>{escape(text)}</title><path class="t" d="{path}"/><path class="w" d="{path}"/>'
            f'<path class="a" d="M{end:.1f} {below + _ARROW:.1f}l-3.5 -6h7z"/></g>'
        )


def _caller(found: Inspection, picture: _Picture) -> Iterator[str]:
    """Yield the model's inputs, wide enough for all wires that come from there."""
    graph = found.graph
    tracks = [picture.track(wire) for wire in picture.layout.wires if wire.origin == CALLER]
    left = min([picture.lefts[0], *(x - 8 for x in tracks)])
    right = max([picture.lefts[0] + picture.node, *(x + 8 for x in tracks)])
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
        name = _family(found, index)
        node = (
            f'<g class="n{" u" * (name == _UNKNOWN)}" id="op-{index}"><title>{escape(_node_text(found, index))}</title>'
            f'<rect class="f" x="{x:.1f}" y="{y:.1f}" width="{picture.node:.1f}" height="{_NODE}" rx="4"/>'
            f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="6" height="{_NODE - 2}" rx="3" '
            f'fill="var(--c{_FAMILIES.index(name)})"/>'
            f'<text x="{x + 14:.1f}" y="{y + 15:.1f}">{escape(kind)}</text>'
            f'<text class="m e" x="{x + picture.node - 9:.1f}" y="{y + 15:.1f}">{escape(shape)}</text>'
        )
        leaving = [found.graph.tensors[t] for t in found.graph.operators[index].outputs if t in wanted]
        if leaving:
            title = escape("returned to the caller\n" + "\n".join(tensor_text(t) for t in leaving))
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


def _family(found: Inspection, index: int) -> str:
    """Return the family that an operator is drawn as, one of ``_FAMILIES``."""
    operator = found.graph.operators[index]
    if not found.costs[index].known:
        return _UNKNOWN
    return _GROUPED if operator.parts else _FAMILY.get(operator.kind, _ELEMENTWISE)
