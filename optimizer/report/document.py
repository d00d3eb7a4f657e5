"""Content of a report, before it is a page or Markdown: sections of paragraphs, tables, figures and commands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from search_spaces.core.wording import human_bytes

Cell = str | int | float | None
"""A text, or a number that is shown with its column's format; None is shown as a dash."""

_NOUGHT = 1e-12


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; its style is ``answer`` for the answer itself, ``note`` for small print."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to be typed or copied."""

    text: str


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading, with the unit.
        form: how numbers are written, as in ``format()``; "" for text, which is aligned left.
    """

    name: str
    form: str = ""


def headed(*heads: str | Column) -> tuple[Column, ...]:
    """Return columns from headings: ``plan; took, ms|.4g`` are one of text and one of numbers."""
    found: list[Column] = []
    for head in heads:
        found += [Column(*each.split("|")) for each in head.split("; ")] if isinstance(head, str) else [head]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns.

    Attributes:
        group: how many of the first columns are left empty where they repeat the row above; on a page a single one is a
            heading above its rows.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    group: int = 0

    @property
    def used(self) -> tuple[int, ...]:
        """Indices of the columns that are not empty."""
        return tuple(i for i in range(len(self.columns)) if any(row[i] not in {None, ""} for row in self.rows))

    def cells(self) -> Iterator[tuple[str, ...]]:
        """Yield each row as formatted text."""
        before: tuple[Cell, ...] | None = None
        for row in self.rows:
            same = 0
            while before is not None and same < self.group and row[same] == before[same]:
                same += 1
            yield tuple(
                "" if i < same else shown(cell, column.form)
                for i, (cell, column) in enumerate(zip(row, self.columns, strict=True))
            )
            before = row


def listed(caption: str, heads: tuple[str, str], values: Mapping[str, object]) -> Table:
    """Return a table of names and values as they are."""
    return Table(caption, headed(*heads), tuple((str(name), plain(value)) for name, value in values.items()))


def machine_facts(machine: Mapping[str, object]) -> dict[str, object]:
    """Return the recorded properties of a machine under names for a reader; sizes with a unit."""
    return {
        name.removesuffix("_bytes").replace("_", " "): human_bytes(value)
        if name.endswith("_bytes") and isinstance(value, int)
        else value
        for name, value in machine.items()
    }


def plain(value: object) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with the numbers that it shows.

    Attributes:
        name: of its files, without ending.
        svg: an ``<svg>`` element whose colours are those of the page (``var(--…)``).
        caption: what it shows.
        table: the same as numbers.
        narrow: the picture drawn for a narrow screen, or "".
        wide: whether it keeps its own size and scrolls.
    """

    name: str
    svg: str
    caption: str
    table: Table | None = None
    wide: bool = False
    narrow: str = ""


Block = Text | Code | Table | Figure


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report with a heading."""

    name: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A report.

    Attributes:
        title: of the page.
        subtitle: what it is about, in a line.
        sections: the answer first.
        files: relative path → JSON text of each file that is written beside the report.
    """

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    files: Mapping[str, str]

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All figures, in order."""
        return tuple(b for s in self.sections for b in s.blocks if isinstance(b, Figure))


def shown(cell: Cell, form: str) -> str:
    """Return a cell as formatted text: ``g`` keeps the zeros at the end, and a minus is U+2212."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, float) and abs(cell) < _NOUGHT and "+" in form:
        cell = 0.0  # a difference of equal sums
    text = format(cell, form) if form else str(cell)
    if form.endswith("g") and cell and "e" not in text:  # 6.870 below 12.34, as the terminal has it
        text = format(cell, form.replace(".", "#.", 1)).rstrip(".")
    if not text.strip("+-0.%"):  # no sign before a zero
        text = text.lstrip("+-")
    text = text.replace("-", "−")
    return f"{text[:-1]} %" if text.endswith("%") else text
