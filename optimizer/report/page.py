"""A report as one HTML file that needs nothing else: no script, no font, no network; light and dark."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from optimizer.report.document import Block, Code, Document, Figure, Table, Text
from optimizer.report.svg import COLOURS, PLOT_STYLE

_UNIT = re.compile(r"(?<=[0-9]) (?=%|m?s\b)")  # a number and its unit stay on one line
_POWER = re.compile(r"\b10\^([0-9]+)")
_LONG = 48  # characters of a cell that may take several lines
_MANY = 3  # columns of a table that scrolls where it is wider than the page
_HEAD = 14  # characters of a heading that take one line; a longer one takes two
_CHARACTER, _PADDING = 7.5, 24  # estimated width of a character of a table, and of the space beside its cells, px


def _colours(index: int) -> str:
    return "".join(f"--{name}:{pair[index]};" for name, pair in COLOURS.items())


_ROOT = f"""\
:root{{color-scheme:light dark;{_colours(0)}--page:#f5f6f8;--focus:#1d5fd0;--edge:#5a626c80}}
@media (prefers-color-scheme:dark){{:root{{{_colours(1)}--page:#0f1114;--focus:#8ab4f8;--edge:#a3abb580}}}}
"""


def render(document: Document) -> str:
    """Return the page of a report."""
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    body = "\n".join(
        f'<section id="{s.name}" aria-labelledby="{s.name}-h"><h2 id="{s.name}-h">{escape(s.title)}</h2>\n'
        + "\n".join(part for block in s.blocks for part in _block(block, s.title))
        + "\n</section>"
        for s in document.sections
    )
    parts = {s.name: s.title for s in document.sections}
    style = f"{_ROOT}{style}{PLOT_STYLE}\n"
    return page(document.title, document.title, document.subtitle, parts, body, style)


def page(
    title: str, heading: str, subtitle: str, parts: Mapping[str, str], body: str, style: str, script: str = ""
) -> str:
    """Return an HTML document that needs nothing else.

    Args:
        parts: id on the page → text of its link at the top.
        body: HTML.
        script: the only one that the browser may run.
    """
    links = "\n".join(f'<a href="#{name}">{escape(text)}</a>' for name, text in parts.items())
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    code = ""
    if script:
        code = f"<script>\n{script}</script>\n"
        digest = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#main">To the content</a>
<header>
<h1>{escape(heading)}</h1>
<p class="sub">{_text(subtitle)}</p>
<nav aria-label="Parts of this page">{links}</nav>
</header>
<main id="main">
{body}
</main>
{code}</body>
</html>
"""


def _block(block: Block, heading: str) -> Iterator[str]:
    if isinstance(block, Text):
        style = f' class="{block.style}"' if block.style else ""
        yield f"<p{style}>{_text(block.text)}</p>"
    elif isinstance(block, Code):
        yield f'<pre tabindex="0"><code>{escape(block.text)}</code></pre>'
    elif isinstance(block, Table):
        if block.caption != heading:
            yield f"<h3>{escape(block.caption)}</h3>"
        yield from _table(block)
    else:
        yield from _figure(block)


def _text(text: str) -> str:
    """Return text as HTML, with powers of ten as superscripts."""
    return _POWER.sub(r"10<sup>\1</sup>", _UNIT.sub("&nbsp;", escape(text)))


def _figure(figure: Figure) -> Iterator[str]:
    label = escape(figure.caption, quote=True)
    if figure.wide:
        px = re.search(r'width="([0-9]+)', figure.svg)
        yield f"<figure>{_hint(int(px[1]) if px else 0, 'Scroll sideways for all of it →')}"
        yield f'<div class="scroll wide" tabindex="0" role="group" aria-label="{label}">{figure.svg}</div>'
    elif figure.narrow:
        yield f'<figure><div class="broad">{figure.svg}</div><div class="narrow">{figure.narrow}</div>'
    else:
        yield f'<figure><div class="scroll" tabindex="0" role="group" aria-label="{label}">{figure.svg}</div>'
    yield f"<figcaption>{_text(figure.caption)}</figcaption>"
    if figure.table is not None:
        yield "<details><summary>The same as numbers</summary>"
        yield from _table(figure.table)
        yield "</details>"
    yield "</figure>"


def _hint(width_px: int, text: str) -> str:
    """Return a line that shows where the screen is narrower than what follows."""
    return f'<p class="hint" style="--w:{width_px}px" aria-hidden="true">{text}</p>'


def _table(table: Table) -> Iterator[str]:
    label = escape(table.caption, quote=True)
    headed = table.group == 1  # each value of the first column is a row of its own, above those that it is about
    columns = [(i, table.columns[i]) for i in table.used[headed:]]
    rows = list(table.cells())
    many = len(columns) >= _MANY
    if many:
        widths = [max(_least(c.name), *(min(len(row[i]), _LONG) for row in rows)) for i, c in columns]
        px = round(sum(widths) * _CHARACTER + len(widths) * _PADDING)
        yield _hint(px, "Scroll sideways for all columns →")
    style = "table many" if many else "table"
    yield f'<div class="{style}" tabindex="0" role="group" aria-label="{label}"><table>'
    yield f"<caption>{escape(table.caption)}</caption><thead><tr>"
    yield "".join(f'<th scope="col"{_right(c.form)}{_wide(c.name)}>{escape(c.name)}</th>' for _, c in columns)
    yield "</tr></thead><tbody>"
    for row in rows:
        if headed and row[0]:
            span = f'<th scope="colgroup" colspan="{len(columns)}"><span>{escape(row[0])}</span></th>'
            yield f'<tr class="of">{span}</tr>'
        cells = [f"<td{_right(column.form, row[i])}>{escape(row[i])}</td>" for i, column in columns]
        cells[0] = f'<th scope="row"{cells[0][3:-5]}</th>'
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _least(head: str) -> int:
    """Return the characters of a line of a heading: all of a short one, or about half of a longer one."""
    return len(head) if len(head) <= _HEAD else max(len(head) // 2 + 3, *map(len, head.split()))


def _wide(head: str) -> str:
    return f' style="min-width:{_least(head)}ch"' if len(head) > _HEAD else ""


def _right(form: str, cell: str = "") -> str:
    return ' class="r"' if form else ' class="long"' if len(cell) > _LONG else ""
