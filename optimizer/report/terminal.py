"""Tables and reports for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text as RichText

from optimizer.report.document import Block, Code, Figure, Table, Text
from optimizer.study.history import WARM
from search_spaces.core.wording import many, plural, seconds

if TYPE_CHECKING:
    from optimizer.study.result import Result

_ANY_WIDTH = 10_000
_LEAST_TEXT, _ENOUGH_TEXT = 20, 32  # characters that are left to the widest columns of a table
_HEADINGS = (1000, 14, 10, 6)  # characters of a line of a heading: as many as there is room for


class _Table(RichTable):
    """A table that, where it is too wide, breaks its headings and long texts rather than its figures.

    Attributes:
        heading: a line above the table, which may be wider than it.
    """

    heading = RichText()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table."""
        if self.heading:
            yield self.heading
        if Measurement.get(console, options.update(width=_ANY_WIDTH), self).maximum > options.max_width:
            self._keep_short(options.max_width)
        yield from super().__rich_console__(console, options)

    def _keep_short(self, width: int) -> None:
        """Break headings to the width of their columns, and keep as many columns as possible from being broken."""
        room, heads = width - 2 * (len(self.columns) - 1), [str(column.header) for column in self.columns]
        cells = [max((len(str(text)) for text in column.cells), default=0) for column in self.columns]
        for least in _HEADINGS:
            parts = [max(map(len, (*head.split(), head[:least])), default=0) for head in heads]
            widths = [max(pair) for pair in zip(cells, parts, strict=True)]
            if sum(widths) <= room or sum(widths) - max(widths) <= room - _ENOUGH_TEXT:
                break
        for column, head, widest in zip(self.columns, heads, widths, strict=True):
            column.header = "\n".join(wrap(head, max(1, widest)))
        for i in sorted(range(len(widths)), key=widths.__getitem__)[:-1]:
            room -= widths[i]
            if room < _LEAST_TEXT:
                break
            self.columns[i].no_wrap = True


def table(columns: Sequence[str], rows: Iterable[Sequence[str | RichText]] = (), title: str = "") -> RichTable:
    """Return a table without lines; names of columns with numbers begin with ``>``, and no text is markup or cut."""
    made = _Table(box=None, pad_edge=False, header_style="bold")
    made.heading = RichText(title, style="bold")
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
    over = f", {many(taken)} reused from --warm-start" if taken else ""
    return f"{plural(result.cardinality, 'plan')} in the space, {explored} tried{when}{over}"
