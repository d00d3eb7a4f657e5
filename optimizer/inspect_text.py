"""What ``optimize inspect`` prints for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import log

from rich.console import Group
from rich.table import Table
from rich.text import Text

from optimizer.inspect import Inspection, moved_bytes
from search_spaces.branches import BranchGroup, walk
from search_spaces.cuts import CutPoint
from search_spaces.errors import printable as plain
from search_spaces.graph import Graph, Tensor
from search_spaces.wording import human_bytes, percent

_MOST_BOUNDARIES = 5
_MOST_GROUPS = 16
_MOST_BRANCHES = 8
_MOST_TENSORS = 8
_MARKS = "▁▂▃▄▅▆▇█"
_MOST_MARKS = 1000


def render_inspection(found: Inspection, width: int) -> Group:
    """Return totals, inputs and outputs, operators by kind, cut points and parallel branches.

    Args:
        width: of the console, in characters.
    """
    parts: list[Text | Table] = [_head(found), Text(), _ends(found.graph), Text(), _kinds(found), *_unknown(found)]
    if found.cuts:
        parts += [Text(), *_profile(found.cuts, width), Text(), _boundaries(found)]
    parts += [Text(), *_branches(found)]
    return Group(*parts)


def human_count(number: int) -> str:
    """Return a count as people write it: ``15.5 G``."""
    if number < 1000:
        return str(number)
    size, units = number / 1000, ["k", "M", "G", "T", "P"]
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.1f} {units[0]}"


def printable(text: str, limit: int = 60) -> str:
    """Return a name from a file so that it can stand in a terminal or a picture, shortened in the middle."""
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


def _head(found: Inspection) -> Text:
    total = found.total
    file = f", {human_bytes(found.file_nbytes)} file" if found.file_nbytes is not None else ""
    moved = human_bytes(moved_bytes(total))
    count = len(found.graph.operators)
    return Text(f"{printable(found.graph.name)}: ", style="bold").append(
        f"{count:,} operator{'s' * (count != 1)}, {human_count(total.macs)} MACs, "
        f"{human_count(total.parameters)} parameters{file}; moves {moved}, {total.intensity:.1f} MACs a byte",
        style="not bold",
    )


def _ends(graph: Graph) -> Table:
    table = _table(("", "left"), ("shape", "left"), ("type", "left"), ("bytes", "right"), ("name", "left"))
    for what, indices in (("input", graph.inputs), ("output", graph.outputs)):
        for index in indices[:_MOST_TENSORS]:
            tensor = graph.tensors[index]
            nbytes = human_bytes(tensor.nbytes)
            table.add_row(what, shape_text(tensor), tensor.dtype, nbytes, Text(printable(tensor.name)))
        if len(indices) > _MOST_TENSORS:
            table.add_row(what, f"{len(indices) - _MOST_TENSORS:,} more")
    return table


def _kinds(found: Inspection) -> Table:
    columns = ("operators", "count", "MACs", "share", "parameters", "bytes moved", "MACs a byte")
    table = _table(*((name, "left" if name == "operators" else "right") for name in columns))
    for kind in found.kinds:
        cost = kind.cost
        share = cost.macs / found.total.macs if found.total.macs else 0.0
        table.add_row(
            Text(printable(kind.kind, 40) + ("" if cost.known else " *")),
            f"{kind.count:,}",
            human_count(cost.macs) if cost.macs else "–",
            percent(share, 1) if cost.macs else "",
            human_count(cost.parameters) if cost.parameters else "–",
            human_bytes(moved_bytes(cost)),
            f"{cost.intensity:.1f}" if cost.macs else "",
        )
    return table


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
    table = _table(("", "left"), ("cut", "right"), ("bytes", "right"), ("between", "left"), ("transfers", "left"))
    graph = found.graph
    shown = min(_MOST_BOUNDARIES, max(1, len(found.cuts) // 2))
    for title, cuts in (("cheapest", found.cheapest(shown)), ("largest", found.largest(shown))):
        for number, cut in enumerate(cuts):
            ends = f"{operator_text(graph, cut.position - 1)} and {operator_text(graph, cut.position)}"
            label = Text(title if number == 0 else "", style="bold")
            table.add_row(label, str(cut.position), human_bytes(cut.nbytes), Text(ends), handed_over(graph, cut))
    return table


def handed_over(graph: Graph, cut: CutPoint) -> str:
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
    table = _table(("from", "left"), ("to", "left"), ("branches", "right"), ("MACs of each", "left"))
    for group in listed[:_MOST_GROUPS]:
        indent = "  " * min(depth.get(id(group), 0), 4)
        macs = [human_count(sum(found.costs[o].macs for o in b.members())) for b in group.branches[:_MOST_BRANCHES]]
        more = " | …" if len(group.branches) > _MOST_BRANCHES else ""
        table.add_row(
            Text(indent + operator_text(found.graph, group.entry, "the model's inputs")),
            Text(operator_text(found.graph, group.exit, "the model's outputs")),
            str(len(group.branches)),
            " | ".join(macs) + more,
        )
    yield table
    if len(listed) > _MOST_GROUPS:
        yield Text(f"… and {len(listed) - _MOST_GROUPS:,} more; --json lists them all")


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in columns:
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    return table
