"""``optimize inspect``: what a model is made of, as numbers and as text; :mod:`optimizer.report.graph` draws it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from optimizer.report.console import make_console
from optimizer.report.terminal import table
from search_spaces.core.errors import printable as plain
from search_spaces.core.graph import Graph, Tensor
from search_spaces.core.intensity import Cost, operator_costs, parameter_total, unknown_kinds
from search_spaces.core.wording import human_bytes, percent
from search_spaces.spaces.branches import BranchGroup, branch_groups, walk
from search_spaces.spaces.cuts import CutPoint, cut_points

SCHEMA_VERSION = 1
_MOST_BOUNDARIES = 5
_MOST_GROUPS = 16
_MOST_BRANCHES = 8
_MOST_TENSORS = 8
_MARKS = "▁▂▃▄▅▆▇█"
_MOST_MARKS = 1000


@dataclass(frozen=True, slots=True)
class KindSummary:
    """All operators of one kind.

    Attributes:
        kind: as in :class:`~search_spaces.core.graph.Operator`.
        count: how many there are.
        cost: of all of them together; a weight that several share counts once.
    """

    kind: str
    count: int
    cost: Cost


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model's operators, cut points and parallel branches.

    Attributes:
        graph: the model.
        file_nbytes: size of its file, or None where it was not read from one.
        costs: of each operator.
        total: of all operators; a weight that several share counts once.
        kinds: of operators, by MACs and then bytes moved, most first.
        cuts: one for each position between two operators, ascending.
        groups: the outermost parallel-branch groups.
        unknown: kinds of operators that are counted as memory traffic alone → how many there are.
    """

    graph: Graph
    file_nbytes: int | None
    costs: tuple[Cost, ...]
    total: Cost
    kinds: tuple[KindSummary, ...]
    cuts: tuple[CutPoint, ...]
    groups: tuple[BranchGroup, ...]
    unknown: Mapping[str, int]

    def cheapest(self, count: int) -> tuple[CutPoint, ...]:
        """Return the cut points that the fewest bytes cross, fewest first; among equals, the earlier one."""
        return tuple(sorted(self.cuts, key=lambda cut: (cut.nbytes, cut.position))[:count])

    def largest(self, count: int) -> tuple[CutPoint, ...]:
        """Return the cut points that the most bytes cross, most first; among equals, the earlier one."""
        return tuple(sorted(self.cuts, key=lambda cut: (-cut.nbytes, cut.position))[:count])


def inspect_graph(graph: Graph) -> Inspection:
    """Count what a model is made of, in time near linear in its operators and what crosses its cut points."""
    costs = operator_costs(graph)
    members: dict[str, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        members.setdefault(operator.kind, []).append(index)
    kinds = [KindSummary(kind, len(found), _together(graph, costs, found)) for kind, found in members.items()]
    return Inspection(
        graph=graph,
        file_nbytes=graph.source.nbytes if graph.source is not None else None,
        costs=costs,
        total=_together(graph, costs, range(len(costs))),
        kinds=tuple(sorted(kinds, key=lambda k: (-k.cost.macs, -moved_bytes(k.cost), k.kind))),
        cuts=cut_points(graph),
        groups=branch_groups(graph),
        unknown=unknown_kinds(graph),
    )


def moved_bytes(cost: Cost) -> int:
    """Return the bytes that are read and written together."""
    return cost.read_bytes + cost.written_bytes


def to_json(found: Inspection) -> dict[str, Any]:
    """Return the document that ``optimize inspect --json`` prints.

    Sizes are bytes, ``intensity`` is MACs per byte. Operators, tensors and groups are named by their index. Groups are
    one flat list: ``within`` is the index of the innermost group that holds this one in a branch.
    """
    graph = found.graph
    return {
        "schema_version": SCHEMA_VERSION,
        "model": graph.name,
        "graph_digest": graph.digest,
        "file_nbytes": found.file_nbytes,
        "totals": {"operators": len(graph.operators), **_cost_json(found.total)},
        "inputs": _tensors_json(graph, graph.inputs),
        "outputs": _tensors_json(graph, graph.outputs),
        "kinds": [{"kind": k.kind, "count": k.count, **_cost_json(k.cost)} for k in found.kinds],
        "operators": [
            {
                "index": index,
                "kind": operator.kind,
                "parts": [part.kind for part in operator.parts],
                "outputs": _tensors_json(graph, operator.outputs),
                **_cost_json(cost),
            }
            for index, (operator, cost) in enumerate(zip(graph.operators, found.costs, strict=True))
        ],
        "cut_points": [
            {"position": c.position, "nbytes": c.nbytes, "tensors": _tensors_json(graph, c.tensors)} for c in found.cuts
        ],
        "branch_groups": _groups_json(found.groups),
        "unknown_kinds": dict(found.unknown),
    }


def _together(graph: Graph, costs: tuple[Cost, ...], operators: Iterable[int]) -> Cost:
    chosen = tuple(operators)
    macs, read_bytes, written_bytes = (
        sum(getattr(costs[o], name) for o in chosen) for name in ("macs", "read_bytes", "written_bytes")
    )
    known = all(costs[o].known for o in chosen)
    return Cost(macs, parameter_total(graph, chosen), read_bytes, written_bytes, known)


def _cost_json(cost: Cost) -> dict[str, Any]:
    names = ("macs", "parameters", "read_bytes", "written_bytes", "intensity", "known")
    return {name: getattr(cost, name) for name in names}


def _tensors_json(graph: Graph, indices: Iterable[int]) -> list[dict[str, Any]]:
    names = ("name", "shape", "dtype", "nbytes")
    return [{"index": i, **{name: getattr(graph.tensors[i], name) for name in names}} for i in indices]


def _groups_json(groups: Iterable[BranchGroup]) -> list[dict[str, Any]]:
    listed = list(walk(groups))
    within = {id(inner): index for index, g in enumerate(listed) for b in g.branches for inner in b.groups}
    return [
        {
            "entry": group.entry,
            "exit": group.exit,
            "within": within.get(id(group)),
            "branches": [list(branch.operators) for branch in group.branches],
        }
        for group in listed
    ]


def render(found: Inspection, width: int | None = None) -> Group:
    """Return totals, inputs and outputs, operators by kind, cut points and parallel branches.

    Args:
        width: of the console, in characters; that of stdout by default.
    """
    width = width or make_console().width
    parts: list[Text | Table] = [_head(found), Text(), _ends(found.graph), Text(), _kinds(found), *_unknown(found)]
    if found.cuts:
        parts += [Text(), *_profile(found.cuts, width), Text(), _boundaries(found)]
    parts += [Text(), *_branches(found)]
    return Group(*parts)


def human_count(number: int) -> str:
    """Return a count with one decimal and a unit: ``15.5 G``; below 1000 the number itself."""
    if number < 1000:
        return str(number)
    size, units = number / 1000, ["k", "M", "G", "T", "P"]
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.1f} {units[0]}"


def counted(number: int) -> str:
    """Return a count as of :func:`human_count`, or a dash for none."""
    return human_count(number) if number else "–"


def printable(text: str, limit: int = 60) -> str:
    """Return a name from a file without control characters, shortened in the middle, for a terminal or a picture."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}…{text[-(limit - limit // 2 - 1) :]}"
    return plain(text).replace("\n", "\ufffd")


def shape_text(tensor: Tensor) -> str:
    """Return ``1×224×224×3``, with ``?`` for an open dimension; a single value has the shape ``scalar``."""
    return "×".join("?" if size < 0 else str(size) for size in tensor.shape) or "scalar"


def operator_text(graph: Graph, index: int | None, missing: str = "") -> str:
    """Return an operator's index and kind, or ``missing`` where there is none."""
    return missing if index is None else f"{index} {printable(graph.operators[index].kind, 40)}"


def groups_text(groups: Sequence[BranchGroup]) -> str:
    """Return ``9 groups of parallel branches (9 of 4)``, those within others counted too."""
    sizes = Counter(len(group.branches) for group in walk(groups))
    if not sizes:
        return "no parallel branches"
    count, within = sizes.total(), sizes.total() - len(groups)
    found = ", ".join(f"{number} of {size}" for size, number in sorted(sizes.items()))
    nested = f"; {within} of them within a branch of another" if within else ""
    return f"{count} {'group' if count == 1 else 'groups'} of parallel branches ({found} branches{nested})"


def facts(found: Inspection) -> str:
    """Return operators, MACs, parameters and the file's size in a line."""
    total, operators = found.total, len(found.graph.operators)
    file = f", {human_bytes(found.file_nbytes)} file" if found.file_nbytes is not None else ""
    return (
        f"{operators:,} operator{'s' * (operators != 1)}, {human_count(total.macs)} MACs, "
        f"{human_count(total.parameters)} parameters{file}"
    )


def group_texts(found: Inspection, group: BranchGroup) -> tuple[str, str, list[str]]:
    """Return where a group of branches begins, where it ends, and the MACs of each branch."""
    start = operator_text(found.graph, group.entry, "the model's inputs")
    end = operator_text(found.graph, group.exit, "the model's outputs")
    return start, end, [human_count(sum(found.costs[o].macs for o in b.members())) for b in group.branches]


def _head(found: Inspection) -> Text:
    moved = f"moves {human_bytes(moved_bytes(found.total))}, {found.total.intensity:.1f} MACs a byte"
    name = Text(f"{printable(found.graph.name)}: ", style="bold")
    return name.append(f"{facts(found)}; {moved}", style="not bold")


def _ends(graph: Graph) -> Table:
    rows: list[list[str]] = []
    for what, indices in (("input", graph.inputs), ("output", graph.outputs)):
        for tensor in (graph.tensors[index] for index in indices[:_MOST_TENSORS]):
            size = [shape_text(tensor), tensor.dtype, human_bytes(tensor.nbytes)]
            rows.append([what, *size, printable(tensor.name)])
        if len(indices) > _MOST_TENSORS:
            rows.append([what, f"{len(indices) - _MOST_TENSORS:,} more"])
    return table(("", "shape", "type", ">bytes", "name"), rows)


def _kinds(found: Inspection) -> Table:
    rows = []
    for kind in found.kinds:
        cost, some = kind.cost, kind.cost.macs
        name = printable(kind.kind, 40) + ("" if cost.known else " *")
        share = percent(some / found.total.macs if found.total.macs else 0.0, 1) if some else ""
        weights, work = counted(cost.parameters), counted(some)
        moved = human_bytes(moved_bytes(cost))
        rows.append((name, f"{kind.count:,}", work, share, weights, moved, f"{cost.intensity:.1f}" if some else ""))
    return table(("operators", ">count", ">MACs", ">share", ">parameters", ">bytes moved", ">MACs a byte"), rows)


def _unknown(found: Inspection) -> list[Text]:
    if not found.unknown:
        return []
    names = ", ".join(f"{count} {printable(kind, 40)}" for kind, count in sorted(found.unknown.items()))
    return [Text(f"* counted as memory traffic alone, for what they compute is not known: {names}", style="yellow")]


def _profile(cuts: Sequence[CutPoint], width: int) -> Iterator[Text]:
    """Yield a mark for each cut point, in lines that begin with the position of their first mark."""
    step = -(-len(cuts) // _MOST_MARKS)
    least = [min(cut.nbytes for cut in cuts[i : i + step]) for i in range(0, len(cuts), step)]
    low, high = min((n for n in least if n), default=0), max(least)
    each = "" if step == 1 else f"; each mark is the cheapest of {step}"
    scale = f"{_MARKS[-1]} {human_bytes(high)}"
    if low < high:
        scale = f"{_MARKS[0]} {human_bytes(low)} to {scale}, logarithmic"
    count = f"{len(cuts):,} cut point{'s' * (len(cuts) != 1)}"
    yield Text(f"bytes that cross at {count} ({scale}{each})", style="bold")
    label = len(str(len(cuts)))
    room = max(10, (width - label - 2) // 10 * 10)
    for start in range(0, len(least), room):
        marks = "".join(_mark(nbytes, low, high) for nbytes in least[start : start + room])
        yield Text(f"{cuts[start * step].position:>{label}}  ").append(marks, style="cyan")


def _mark(nbytes: int, low: int, high: int) -> str:
    if not nbytes:
        return "·"
    level = log(nbytes / low) / log(high / low) if high > low else 1.0
    return _MARKS[min(int(level * len(_MARKS)), len(_MARKS) - 1)]


def _boundaries(found: Inspection) -> Table:
    graph, rows = found.graph, []
    most = min(_MOST_BOUNDARIES, max(1, len(found.cuts) // 2))
    for title, cuts in (("cheapest", found.cheapest(most)), ("largest", found.largest(most))):
        for number, cut in enumerate(cuts):
            ends = f"{operator_text(graph, cut.position - 1)} and {operator_text(graph, cut.position)}"
            label = Text(title if number == 0 else "", style="bold")
            rows.append((label, str(cut.position), human_bytes(cut.nbytes), ends, transferred(graph, cut)))
    return table(("", ">cut", ">bytes", "between", "transfers"), rows)


def transferred(graph: Graph, cut: CutPoint) -> str:
    """Return the shape and type of what crosses a cut, or how many tensors do."""
    if len(cut.tensors) != 1:
        return f"{len(cut.tensors)} tensors"
    tensor = graph.tensors[cut.tensors[0]]
    return f"{shape_text(tensor)} {tensor.dtype}"


def _branches(found: Inspection) -> Iterator[Text | Table]:
    yield Text(groups_text(found.groups), style="bold")
    listed = list(walk(found.groups))
    if not listed:
        return
    depth: dict[int, int] = {}
    for group in listed:
        for branch in group.branches:
            depth |= dict.fromkeys(map(id, branch.groups), depth.get(id(group), 0) + 1)
    rows = []
    for group in listed[:_MOST_GROUPS]:
        indent = "  " * min(depth.get(id(group), 0), 4)
        start, end, macs = group_texts(found, group)
        more = " | …" if len(macs) > _MOST_BRANCHES else ""
        rows.append((indent + start, end, str(len(macs)), " | ".join(macs[:_MOST_BRANCHES]) + more))
    yield table(("from", "to", ">branches", "MACs of each"), rows)
    if len(listed) > _MOST_GROUPS:
        yield Text(f"… and {len(listed) - _MOST_GROUPS:,} more; --json lists them all")
