"""A report as Markdown, with its pictures as files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from optimizer.report.document import Block, Code, Document, Figure, Table, Text

_MOST_ROWS = 60
_TICKS = re.compile("`+")
_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_[]<>|#"})


def render(document: Document, plots: str) -> str:
    """Return the report; ``plots`` is the folder of the pictures, relative to it."""
    parts = [f"# {escaped(document.title)}", escaped(document.subtitle)]
    for section in document.sections:
        parts.append(f"## {escaped(section.title)}")
        parts += [part for block in section.blocks for part in _block(block, plots, section.title)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block, plots: str, heading: str) -> Iterator[str]:
    if isinstance(block, Text):
        yield f"**{escaped(block.text)}**" if block.style == "answer" else escaped(block.text)
    elif isinstance(block, Code):
        fence = "`" * max(3, 1 + max(map(len, _TICKS.findall(block.text)), default=0))  # the text must not end it
        yield f"{fence}sh\n{block.text}\n{fence}"
    elif isinstance(block, Table):
        if block.caption != heading:
            yield f"### {escaped(block.caption)}"
        yield _table(block)
    elif isinstance(block, Figure):
        yield f"![{escaped(block.caption)}]({plots}/{block.name}.svg)\n\n{escaped(block.caption)}"
        if block.table is not None:
            yield _table(block.table)


def _table(table: Table) -> str:
    columns = [table.columns[i] for i in table.used]
    lines = [
        "| " + " | ".join(escaped(c.name) for c in columns) + " |",
        "|" + "|".join("---:" if c.form else "---" for c in columns) + "|",
    ]
    for row in islice(table.cells(), _MOST_ROWS):
        cells = (escaped(row[i]) for i in table.used)
        lines.append("| " + " | ".join(cells) + " |")
    text = "\n".join(lines)
    more = len(table.rows) - _MOST_ROWS
    return f"{text}\n\n… and {more} more rows" if more > 0 else text


def escaped(text: str) -> str:
    """Return text in one line, escaped for Markdown."""
    return " ".join(text.split()).translate(_SPECIAL)
