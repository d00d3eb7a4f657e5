"""The part of a campaign's report that tells what explains latency: work, weights or memory traffic (seed 004)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from optimizer.campaign_indicators import GROUP
from optimizer.campaign_table import Row, Tables
from optimizer.report.document import Block, Cell, Column, Figure, Table, Text
from optimizer.report.svg import Plot, Scale, text_width
from search_spaces.wording import percent

NAMES = {
    "flops": "work (MACs)",
    "parameters": "parameters",
    "l1_accesses_estimate": "first-level cache accesses",
    "memory_accesses_estimate": "memory accesses",
    "flops_and_memory": "work and memory accesses",
}
_WIDTH, _ROW = 920.0, 22.0
_MARKS = ("search", "baseline", "model", "above")


def indicator_blocks(tables: Tables) -> Iterator[Block]:
    """Return a picture of each R², the same as numbers, and the indicators of each model."""
    if not tables.explained:
        return
    measured = [r for r in tables.explained if r["evaluator"] != "cost-model"]
    worst = min(measured or tables.explained, key=lambda r: float(r["flops"]))
    yield Text(
        f"A straight line through the work of the models explains {percent(worst['flops'], 1)} of the variance of "
        f"their latencies where it explains least ({_group(worst)}); with memory accesses it is "
        f"{percent(worst['flops_and_memory'], 1)}.",
        "answer",
    )
    yield Text(
        "Accesses are estimates from the sizes of tensors, not counts of hardware counters. Each line has an "
        "intercept; “work and memory accesses” has two slopes, so it is never below either. A cost model "
        "is itself a sum of work and bytes: what it shows is its own law.",
        "note",
    )
    columns = (Column("where"), Column("models", "d"), *(Column(f"R² {name}", ".4f") for name in NAMES.values()))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (_group(r), r["models"], *(r[name] for name in NAMES)) for r in tables.explained
    )
    table = Table("How much of the variance of latency each explains", columns, rows)
    yield Figure("explained", _picture(tables.explained), "R² of a straight line through each indicator.", table)
    yield _models(tables.indicators)


def _models(rows: Sequence[Row]) -> Table:
    columns = (Column("model"), Column("where"), Column("million MACs", ",.1f"), Column("million parameters", ",.3f"),
               Column("million first-level accesses", ",.1f"), Column("million memory accesses", ",.2f"),
               Column("best plan, ms", ".4g"))  # fmt: skip
    cells = tuple((r["model"], _where(r), *(r[name] / 1e6 for name in list(NAMES)[:4]), r["latency_ms"]) for r in rows)
    return Table("Indicators of each model", columns, cells)


def _picture(rows: Sequence[Row]) -> str:
    families = list(dict.fromkeys(str(r["family"]) for r in rows))
    devices = list(dict.fromkeys(_where(r) for r in rows))
    left = 24 + max(text_width(name) for name in NAMES.values())
    height = 40 + len(families) * (len(NAMES) * _ROW + 28) + 44
    description = "; ".join(
        f"{_group(r)}: {', '.join(f'{name} {r[key]:.3f}' for key, name in NAMES.items())}" for r in rows
    )
    plot = Plot("explained", "How much of the variance of latency each indicator explains", description, _WIDTH, height)
    least = min(0.9, *(float(r[name]) for r in rows for name in NAMES))
    x = Scale(least - 0.02, 1.005, left, _WIDTH - 20)
    plot.axis_x(x, height - 44, 30, "R² of a straight line")
    plot.legend(left, 18, [(_MARKS[i % 4], device) for i, device in enumerate(devices)])
    y = 36.0
    for family in families:
        plot.text(8, y + 16, "all models" if family == "all" else family, style="s")
        y += 28
        for name, shown in NAMES.items():
            plot.text(left - 10, y + 4, shown, anchor="end", style="m")
            for row in rows:
                if row["family"] == family:
                    mark = _MARKS[devices.index(_where(row)) % 4]
                    plot.mark(x(row[name]), y, mark, f"{_group(row)}, {shown}: {row[name]:.4f}", 4.5)
            y += _ROW
    return plot.svg()


def _where(row: Row) -> str:
    named = [str(row[axis]) for axis in GROUP if row[axis] is not None]
    return "measured here on " + named[-1] if named[0] == "litert" and len(named) > 1 else " · ".join(named)


def _group(row: Row) -> str:
    return f"{'all models' if row['family'] == 'all' else row['family']}, {_where(row)}"
