"""A page around a graph's picture: zoom and pan, and the same facts as tables. One file that loads nothing else.

Without scripts the picture still scrolls and the tables are complete; the script adds zoom, dragging and sorting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from optimizer.report.graph import render_svg
from optimizer.report.page import page
from optimizer.tools.inspect import (
    Inspection,
    counted,
    facts,
    group_texts,
    groups_text,
    moved_bytes,
    operator_text,
    printable,
    shape_text,
    transferred,
)
from search_spaces.core.intensity import Cost
from search_spaces.core.wording import human_bytes
from search_spaces.spaces.branches import walk

_Cell = str | int | tuple[float, str]
"""A text, a number, or a number to sort by and its text."""

_COSTS = (">MACs", ">parameters", ">bytes moved", ">MACs a byte")
_PARTS = {
    "graph": "Graph",
    "kinds": "Operators by kind",
    "cuts": "Cut points",
    "branches": "Parallel branches",
    "operators": "Operators",
}
_BAR = """<div class="bar" role="group" aria-label="Zoom" hidden>
<button type="button" data-do="in" aria-label="Zoom in">+</button>
<button type="button" data-do="out" aria-label="Zoom out">−</button>
<button type="button" data-do="full">100 %</button>
<button type="button" data-do="fit">Fit width</button>
<output aria-live="polite"></output>
<span>drag or arrow keys to move; + − 1 0, or Ctrl and the wheel, to zoom; hover for details</span>
</div>"""


def render_page(found: Inspection) -> str:
    """Return the page as one HTML document."""
    style, script = (Path(__file__).with_suffix(end).read_text(encoding="utf-8") for end in (".css", ".js"))
    name = printable(found.graph.name)
    label = escape(f"Graph of {name}; the tables below say the same")
    view = f'<div class="view" id="graph" tabindex="0" role="region" aria-label="{label}">\n{render_svg(found)}</div>'
    kinds = ([printable(k.kind, 40), (k.count, f"{k.count:,}"), *_cost_cells(k.cost)] for k in found.kinds)
    branches = ("from", "to", ">branches", "operators of each", "MACs of each")
    operators = (">operator", "kind", "output", "type", *_COSTS, "name")
    body = "\n".join(
        (
            _BAR,
            view,
            _section("kinds", ("kind", ">count", *_COSTS), kinds),
            _section("cuts", (">cut", ">bytes that cross", "after", "before", "transfers"), _cut_rows(found), "cut"),
            _section("branches", branches, _branch_rows(found)),
            _section("operators", operators, _operator_rows(found), "op"),
        )
    )
    subtitle = f"{facts(found)}; {groups_text(found.groups)}"
    return page(f"{name}: operators and cut points", name, subtitle, _PARTS, body, style, script)


def _cost_cells(cost: Cost) -> Iterator[_Cell]:
    yield cost.macs, counted(cost.macs) if cost.known else "not known"
    yield cost.parameters, counted(cost.parameters)
    yield moved_bytes(cost), human_bytes(moved_bytes(cost))
    yield cost.intensity, f"{cost.intensity:.1f}" if cost.macs else "–"


def _cut_rows(found: Inspection) -> Iterator[list[_Cell]]:
    graph = found.graph
    for cut in found.cuts:
        ends = (operator_text(graph, cut.position - 1), operator_text(graph, cut.position))
        yield [cut.position, (cut.nbytes, human_bytes(cut.nbytes)), *ends, transferred(graph, cut)]


def _branch_rows(found: Inspection) -> Iterator[list[_Cell]]:
    for group in walk(found.groups):
        start, end, macs = group_texts(found, group)
        counts = " | ".join(str(len(branch.members())) for branch in group.branches)
        yield [start, end, len(macs), counts, " | ".join(macs)]


def _operator_rows(found: Inspection) -> Iterator[list[_Cell]]:
    graph = found.graph
    for index, (operator, cost) in enumerate(zip(graph.operators, found.costs, strict=True)):
        output = graph.tensors[operator.outputs[0]] if operator.outputs else None
        made = (shape_text(output), output.dtype) if output else ("", "")
        name = printable(output.name) if output else ""
        yield [index, printable(operator.kind, 40), *made, *_cost_cells(cost), name]


def _section(anchor: str, heads: Sequence[str], rows: Iterable[Sequence[_Cell]], linked: str = "") -> str:
    """Return a heading and a table.

    Args:
        heads: of columns; those with numbers begin with ``>``.
        linked: prefix of the ids in the picture that the first column leads to.
    """
    title = _PARTS[anchor]
    headings = "".join(
        f'<th scope="col"{" class=r data-sort" if name[0] == ">" else ""}>{escape(name.removeprefix(">"))}</th>'
        for name in heads
    )
    body = "\n".join(f"<tr>{''.join(_cells(row, linked))}</tr>" for row in rows)
    content = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table><caption>{title}</caption>'
        f"<thead><tr>{headings}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
        if body
        else "<p>none</p>"
    )
    return f'<h2 id="{anchor}">{title}</h2>\n{content}'


def _cells(row: Sequence[_Cell], linked: str) -> Iterator[str]:
    for number, cell in enumerate(row):
        tag = "td" if number else 'th scope="row"'
        key, text = cell if isinstance(cell, tuple) else (cell, str(cell))
        sortable = "" if isinstance(key, str) else f' class="r" data-v="{key:.12g}"'
        shown = escape(text)
        if linked and number == 0:
            shown = f'<a href="#{linked}-{shown}">{shown}</a>'
        yield f"<{tag}{sortable}>{shown}</{tag[:2]}>"
