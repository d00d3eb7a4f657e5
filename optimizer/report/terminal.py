"""Tables and reports for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text as RichText

from optimizer.report.document import Block, Code, Figure, Table, Text
from optimizer.study.history import WARM
from search_spaces.core.wording import many, plural, seconds

if TYPE_CHECKING:
    from optimizer.study.result import Result


def table(columns: Sequence[str], rows: Iterable[Sequence[str | RichText]] = (), title: str = "") -> RichTable:
    """Return a table without lines; names of columns with numbers begin with ``>``, and no text is markup or cut."""
    heading = RichText(title, style="bold") if title else None
    made = RichTable(title=heading, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in rows:
        made.add_row(*(RichText(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def render(title: str, blocks: Iterable[Block]) -> Group:
    """Return paragraphs and tables of a report, and the numbers of its pictures."""
    parts: list[Any] = [RichText(title, style="bold")]
    for block in (block.table if isinstance(block, Figure) else block for block in blocks):
        if isinstance(block, Text | Code):
            parts += [RichText(), RichText(block.text)]
        elif block is not None:
            parts += [RichText(), table_of(block)]
    return Group(*parts)


def table_of(block: Table) -> RichTable:
    """Return a table of a report without the columns that are empty."""
    names = [f"{'>' if block.columns[i].form else ''}{block.columns[i].name}" for i in block.used]
    return table(names, ([row[i] for i in block.used] for row in block.cells()), block.caption)


def tried_text(result: Result) -> str:
    """Return ``1,234 plans in the space, 20 of them tried in 54 s``."""
    history = result.history
    explored = f"{'all' if result.exhausted else many(history.measured)} of them"
    taken = sum(trial.origin == WARM for trial in history.outside)
    if beyond := sum(trial.origin != WARM and trial.measurement is not None for trial in history.outside):
        explored += f" and {plural(beyond, 'baseline')} outside of it"
    new, took = len(history.known) - taken - result.earlier, seconds(result.wall_s)
    when = f" in {took}" if not result.earlier else f", {many(new)} now in {took}" if new > 0 else " earlier"
    over = f", {many(taken)} taken over" if taken else ""
    return f"{plural(result.cardinality, 'plan')} in the space, {explored} tried{when}{over}"
