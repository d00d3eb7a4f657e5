"""A page around a graph's picture: zoom and pan, and the same facts as tables. One file, nothing is loaded from afar.

Without scripts the picture still scrolls and the tables stand; the script adds zoom, dragging and sorting.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from optimizer.report.graph import facts, render_svg
from optimizer.tools.inspect import (
    Inspection,
    groups_text,
    handed_over,
    human_count,
    moved_bytes,
    operator_text,
    printable,
    shape_text,
)
from search_spaces.branches import walk
from search_spaces.intensity import Cost
from search_spaces.wording import human_bytes


def render_page(found: Inspection) -> str:
    """Return the page as one HTML document."""
    style, script = (Path(__file__).with_suffix(end).read_text(encoding="utf-8") for end in (".css", ".js"))
    digest = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    name = escape(printable(found.graph.name))
    tables = "\n".join(_sections(found))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{name}: operators and cut points</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{name}</h1>
<p>{escape(facts(found))}; {escape(groups_text(found.groups))}</p>
</header>
<nav aria-label="Parts of this page"><a href="#graph">Graph</a><a href="#kinds">Operators by kind</a>
<a href="#cuts">Cut points</a><a href="#branches">Parallel branches</a><a href="#operators">Operators</a></nav>
<main>
<div class="bar" role="group" aria-label="Zoom" hidden>
<button type="button" data-do="in" aria-label="Zoom in">+</button>
<button type="button" data-do="out" aria-label="Zoom out">−</button>
<button type="button" data-do="full">100 %</button>
<button type="button" data-do="fit">Fit width</button>
<output aria-live="polite"></output>
<span>drag or arrow keys to move; + − 1 0, or Ctrl and the wheel, to zoom; hover for details</span>
</div>
<div class="view" id="graph" tabindex="0" role="region" aria-label="Graph of {name}; the tables below say the same">
{render_svg(found)}</div>
{tables}
</main>
<script>
{script}</script>
</body>
</html>
"""


# A cell is a text, or a number to sort by and its text. A column is a heading, and whether it holds numbers.
_Cell = str | tuple[float, str]


def _sections(found: Inspection) -> Iterator[str]:
    costs = (("MACs", True), ("parameters", True), ("bytes moved", True), ("MACs a byte", True))
    yield _section(
        "kinds",
        "Operators by kind",
        (("kind", False), ("count", True), *costs),
        ([printable(k.kind, 40), (k.count, f"{k.count:,}"), *_cost_cells(k.cost)] for k in found.kinds),
    )
    yield _section(
        "cuts",
        "Cut points",
        (("cut", True), ("bytes that cross", True), ("after", False), ("before", False), ("transfers", False)),
        _cut_rows(found),
        "cut",
    )
    yield _section(
        "branches",
        "Parallel branches",
        (("from", False), ("to", False), ("branches", True), ("operators of each", False), ("MACs of each", False)),
        _branch_rows(found),
    )
    yield _section(
        "operators",
        "Operators",
        (("operator", True), ("kind", False), ("output", False), ("type", False), *costs, ("name", False)),
        _operator_rows(found),
        "op",
    )


def _cost_cells(cost: Cost) -> Iterator[_Cell]:
    yield cost.macs, human_count(cost.macs) if cost.known else "not known"
    yield cost.parameters, human_count(cost.parameters)
    yield moved_bytes(cost), human_bytes(moved_bytes(cost))
    yield cost.intensity, f"{cost.intensity:.1f}"


def _cut_rows(found: Inspection) -> Iterator[list[_Cell]]:
    graph = found.graph
    for cut in found.cuts:
        ends = (operator_text(graph, cut.position - 1), operator_text(graph, cut.position))
        yield [(cut.position, str(cut.position)), (cut.nbytes, human_bytes(cut.nbytes)), *ends, handed_over(graph, cut)]


def _branch_rows(found: Inspection) -> Iterator[list[_Cell]]:
    for group in walk(found.groups):
        members = [branch.members() for branch in group.branches]
        yield [
            operator_text(found.graph, group.entry, "the model's inputs"),
            operator_text(found.graph, group.exit, "the model's outputs"),
            (len(members), str(len(members))),
            " | ".join(str(len(m)) for m in members),
            " | ".join(human_count(sum(found.costs[o].macs for o in m)) for m in members),
        ]


def _operator_rows(found: Inspection) -> Iterator[list[_Cell]]:
    graph = found.graph
    for index, (operator, cost) in enumerate(zip(graph.operators, found.costs, strict=True)):
        output = graph.tensors[operator.outputs[0]] if operator.outputs else None
        yield [
            (index, str(index)),
            printable(operator.kind, 40),
            shape_text(output) if output else "",
            output.dtype if output else "",
            *_cost_cells(cost),
            printable(output.name) if output else "",
        ]


def _section(
    anchor: str, title: str, columns: Sequence[tuple[str, bool]], rows: Iterable[Sequence[_Cell]], linked: str = ""
) -> str:
    """Return a heading and a table; ``linked`` is the prefix of ids in the picture that the first column leads to."""
    heads = "".join(
        f'<th scope="col"{" class=r data-sort" if number else ""}>{escape(name)}</th>' for name, number in columns
    )
    body = "\n".join(f"<tr>{''.join(_cells(row, linked))}</tr>" for row in rows)
    content = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table><caption>{title}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
        if body
        else "<p>none</p>"
    )
    return f'<h2 id="{anchor}">{title}</h2>\n{content}'


def _cells(row: Sequence[_Cell], linked: str) -> Iterator[str]:
    for number, cell in enumerate(row):
        tag = 'th scope="row"' if number == 0 else "td"
        value, text = ("", cell) if isinstance(cell, str) else (f' class="r" data-v="{cell[0]:.12g}"', cell[1])
        shown = escape(text)
        if linked and number == 0:
            shown = f'<a href="#{linked}-{shown}">{shown}</a>'
        yield f"<{tag}{value}>{shown}</{tag[:2]}>"
