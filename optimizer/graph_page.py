"""A page around a graph's picture: zoom and pan, and the same facts as tables. One file, nothing is loaded from afar.

Without scripts the picture still scrolls and the tables stand; the script adds zoom, dragging and sorting.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from optimizer.graph_picture import facts, render_svg
from optimizer.inspect import Inspection, moved_bytes
from optimizer.inspect_text import groups_text, handed_over, human_count, operator_text, printable, shape_text
from search_spaces.branches import walk
from search_spaces.intensity import Cost
from search_spaces.wording import human_bytes

_STYLE = """
:root{color-scheme:light dark;--page:#f5f6f8;--card:#fff;--ink:#1b1f24;--muted:#5a626c;--line:#d4d9e0;--focus:#1d5fd0}
@media (prefers-color-scheme:dark){:root{--page:#0f1114;--card:#15181c;--ink:#e8eaed;--muted:#a3abb5;--line:#333a43;
--focus:#8ab4f8}}
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:1500px;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:22px;margin:0}h2{font-size:17px;margin:28px 0 8px}p{margin:4px 0 12px;color:var(--muted)}
a{color:inherit}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:0 0 12px}
.bar{display:flex;flex-wrap:wrap;gap:8px;align-items:center;margin:0 0 8px;color:var(--muted)}
button{font:inherit;color:var(--ink);background:var(--card);border:1px solid var(--line);border-radius:6px;
padding:4px 12px;cursor:pointer}
:focus-visible{outline:2px solid var(--focus);outline-offset:2px}
.view{height:80vh;min-height:320px;overflow:auto;resize:vertical;background:var(--card);border:1px solid var(--line);
border-radius:8px;cursor:grab}
.view.drag{cursor:grabbing;user-select:none}
.view svg{display:block;margin:0 auto}
.scroll{overflow:auto;max-height:70vh;background:var(--card);border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:4px 12px;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}
thead th{position:sticky;top:0;background:var(--card);z-index:1}
tbody th{font-weight:400}
.r{text-align:right;font-variant-numeric:tabular-nums}
th button{border:0;padding:0;background:none;font-weight:600}
th[aria-sort=ascending] button::after{content:" ▲"}th[aria-sort=descending] button::after{content:" ▼"}
caption{position:absolute;clip-path:inset(50%);width:1px;height:1px;overflow:hidden}
@media print{.view{height:auto;overflow:visible}.bar,nav{display:none}}
"""

_SCRIPT = """
"use strict";
const view = document.querySelector(".view"), svg = view.querySelector("svg"), shown = document.querySelector("output");
const width = svg.viewBox.baseVal.width, height = svg.viewBox.baseVal.height;
let scale = 1;
function zoom(to, x = view.clientWidth / 2, y = view.clientHeight / 2) {
  const next = Math.min(4, Math.max(0.05, to)), box = svg.getBoundingClientRect(), frame = view.getBoundingClientRect();
  const px = (x - (box.left - frame.left)) / scale, py = (y - (box.top - frame.top)) / scale;
  scale = next;
  svg.setAttribute("width", width * scale);
  svg.setAttribute("height", height * scale);
  const after = svg.getBoundingClientRect();
  view.scrollLeft += after.left - frame.left + px * scale - x;
  view.scrollTop += after.top - frame.top + py * scale - y;
  shown.textContent = Math.round(scale * 100) + " %";
}
function fit() { zoom(Math.min(1, (view.clientWidth - 2) / width)); }
const actions = {in: () => zoom(scale * 1.25), out: () => zoom(scale / 1.25), full: () => zoom(1), fit};
for (const button of document.querySelectorAll("[data-do]"))
  button.addEventListener("click", () => actions[button.dataset.do]());
view.addEventListener("keydown", event => {
  const name = {"+": "in", "=": "in", "-": "out", "1": "full", "0": "fit"}[event.key];
  if (name && !event.ctrlKey && !event.metaKey && !event.altKey) { actions[name](); event.preventDefault(); }
});
view.addEventListener("wheel", event => {
  if (!event.ctrlKey && !event.metaKey) return;
  const frame = view.getBoundingClientRect();
  zoom(scale * Math.exp(-event.deltaY / 400), event.clientX - frame.left, event.clientY - frame.top);
  event.preventDefault();
}, {passive: false});
let from = null;
view.addEventListener("pointerdown", event => {
  if (event.pointerType !== "mouse" || event.button) return;
  const frame = view.getBoundingClientRect();
  if (event.clientX - frame.left > view.clientWidth || event.clientY - frame.top > view.clientHeight) return;
  from = [event.clientX + view.scrollLeft, event.clientY + view.scrollTop];
  view.setPointerCapture(event.pointerId);
  view.classList.add("drag");
});
view.addEventListener("pointermove", event => {
  if (!from) return;
  view.scrollLeft = from[0] - event.clientX;
  view.scrollTop = from[1] - event.clientY;
});
for (const name of ["pointerup", "pointercancel"])
  view.addEventListener(name, () => { from = null; view.classList.remove("drag"); });
for (const head of document.querySelectorAll("th[data-sort]")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const body = head.closest("table").tBodies[0], index = head.cellIndex;
    const key = row => Number(row.cells[index].dataset.v);
    body.append(...[...body.rows].sort((a, b) => sign * (key(a) - key(b))));
  });
}
document.querySelector(".bar").hidden = false;
zoom(Math.max(0.6, Math.min(1, (view.clientWidth - 2) / width)));
view.scrollTo(0, 0);
"""


def render_page(found: Inspection) -> str:
    """Return the page as one HTML document."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
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
<style>{_STYLE}</style>
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
<script>{_SCRIPT}</script>
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
