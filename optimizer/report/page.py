"""A report as one HTML file that needs nothing else: no script, no font, no network; light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from optimizer.report.document import Block, Code, Document, Figure, Table, Text
from optimizer.report.svg import COLOURS, PLOT_STYLE


def _colours(index: int) -> str:
    return "".join(f"--{name}:{pair[index]};" for name, pair in COLOURS.items())


_STYLE = f"""
:root{{color-scheme:light dark;{_colours(0)}--page:#f5f6f8;--focus:#1d5fd0;--edge:#5a626c80}}
@media (prefers-color-scheme:dark){{:root{{{_colours(1)}--page:#0f1114;--focus:#8ab4f8;--edge:#a3abb580}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;padding:24px 16px 64px;max-width:1000px;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}}
h1{{font-size:26px;line-height:1.2;margin:0}}
h2{{font-size:19px;margin:36px 0 8px}}
p{{margin:6px 0;max-width:76ch;overflow-wrap:anywhere}}
.sub{{color:var(--muted)}}.note{{color:var(--muted);font-size:14px}}.answer{{font-size:19px;font-weight:600}}
nav{{display:flex;flex-wrap:wrap;gap:2px 16px;margin:12px 0 0;font-size:15px}}
a{{color:inherit}}
:focus-visible{{outline:2px solid var(--focus);outline-offset:2px}}
.skip{{position:absolute;left:-999px}}.skip:focus{{left:16px;top:4px;background:var(--surface);padding:4px 12px}}
figure{{margin:12px 0;background:var(--surface);border:1px solid var(--line);border-radius:8px;padding:12px}}
figcaption{{font-size:14px;color:var(--muted);margin-top:6px;max-width:90ch}}
.scroll{{overflow:auto;max-height:80vh}}
.scroll,.table{{background:linear-gradient(to right,var(--surface) 30%,transparent) 0 0/48px 100%,
linear-gradient(to left,var(--surface) 30%,transparent) 100% 0/48px 100%,
linear-gradient(to right,var(--edge),transparent) 0 0/14px 100%,
linear-gradient(to left,var(--edge),transparent) 100% 0/14px 100%;background-repeat:no-repeat;
background-attachment:local,local,scroll,scroll;background-color:var(--surface)}}
.plot{{display:block;margin:0 auto;max-width:100%;height:auto;min-width:600px}}
.wide svg{{display:block;margin:0 auto;max-width:none}}
details{{margin-top:8px;font-size:14px}}summary{{cursor:pointer;color:var(--muted);width:fit-content}}
.table{{overflow:auto;max-height:70vh;margin:8px 0;border:1px solid var(--line);
border-radius:8px}}
details .table{{max-height:40vh}}
table{{border-collapse:collapse;width:100%;font-size:14px}}
th,td{{padding:4px 12px;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}}
thead th{{position:sticky;top:0;background:var(--surface);white-space:nowrap}}
tbody th{{font-weight:400;min-width:14ch}}tbody tr:last-child>*{{border-bottom:0}}
.r{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
caption{{position:absolute;clip-path:inset(50%);width:1px;height:1px;overflow:hidden}}
pre{{background:var(--surface);border:1px solid var(--line);border-radius:8px;padding:8px 12px;overflow:auto;
font:14px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}}
@media print{{nav,.skip,details{{display:none}}figure,.table,pre{{break-inside:avoid}}
.scroll,.table{{max-height:none}}}}
{PLOT_STYLE}
"""


def render(document: Document) -> str:
    """Return the page."""
    title, subtitle = escape(document.title), escape(document.subtitle)
    links = "".join(f'<a href="#{s.name}">{escape(s.title)}</a>' for s in document.sections)
    body = "\n".join(
        f'<section id="{s.name}" aria-labelledby="{s.name}-h"><h2 id="{s.name}-h">{escape(s.title)}</h2>\n'
        + "\n".join(part for block in s.blocks for part in _block(block))
        + "\n</section>"
        for s in document.sections
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<a class="skip" href="#main">To the content</a>
<header>
<h1>{title}</h1>
<p class="sub">{subtitle}</p>
<nav aria-label="Parts of this page">{links}</nav>
</header>
<main id="main">
{body}
</main>
</body>
</html>
"""


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Text):
        style = f' class="{block.style}"' if block.style else ""
        yield f"<p{style}>{escape(block.text)}</p>"
    elif isinstance(block, Code):
        yield f'<pre tabindex="0"><code>{escape(block.text)}</code></pre>'
    elif isinstance(block, Table):
        yield from _table(block)
    else:
        yield from _figure(block)


def _figure(figure: Figure) -> Iterator[str]:
    style = "scroll wide" if figure.wide else "scroll"
    label = escape(figure.caption, quote=True)
    yield f'<figure><div class="{style}" tabindex="0" role="group" aria-label="{label}">{figure.svg}</div>'
    yield f"<figcaption>{escape(figure.caption)}</figcaption>"
    if figure.table is not None:
        yield "<details><summary>The same as numbers</summary>"
        yield from _table(figure.table)
        yield "</details>"
    yield "</figure>"


def _table(table: Table) -> Iterator[str]:
    label = escape(table.caption, quote=True)
    yield f'<div class="table" tabindex="0" role="group" aria-label="{label}"><table>'
    yield f"<caption>{escape(table.caption)}</caption><thead><tr>"
    columns = [(i, table.columns[i]) for i in table.used]
    yield "".join(f'<th scope="col"{_right(c.form)}>{escape(c.name)}</th>' for _, c in columns)
    yield "</tr></thead><tbody>"
    for row in table.cells():
        cells = [f"<td{_right(column.form)}>{escape(row[i])}</td>" for i, column in columns]
        cells[0] = f'<th scope="row"{cells[0][3:-5]}</th>'
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _right(form: str) -> str:
    return ' class="r"' if form else ""
