"""An explanation as tables: for a terminal, and for the report of a study."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from evaluators.measurement.final import Ratio
from optimizer.console import slower_text
from optimizer.exact.bound import model_error
from optimizer.explanation import Explanation, Told
from optimizer.report.document import Block, Column, Table, Text, shown
from search_spaces.plan import Plan
from search_spaces.wording import percent

if TYPE_CHECKING:
    from rich.console import Group

_TIME = ".4g"
_LITTLE = 1e-3  # of the latency: what binds by less than this is not worth a thought


def blocks(found: Explanation) -> Iterator[Block]:
    """Yield the explanation as blocks of a report."""
    predicted, measured = _ms(found.best.predicted_s), _ms(found.best.measured_s)
    yield Text(
        f"This plan: {shown(predicted, _TIME)} ms predicted by {found.model}, "
        f"{shown(measured, _TIME)} ms measured. All predictions below are by the same model."
    )
    if found.note:
        yield Text(f"Note: {found.note}.", "note")
    if found.cuts:
        yield _cuts(found)
    yield _parts(found)
    yield _limits(found)
    yield _by_stages(found)
    if text := _final(found):
        yield Text(text)
    yield _baselines(found)
    relaxed = found.relaxed
    why = "the longest path of operators"
    if relaxed.work_s > relaxed.critical_path_s:
        why = "all work shared evenly"
    wrong = model_error(found.best.measured_s, relaxed.latency_s) if found.best.measured_s is not None else 0.0
    yield Text(
        f"Lower bound for any plan: {relaxed.latency_s * 1e3:.4g} ms (predicted), {why} "
        f"(work {relaxed.work_s * 1e3:.4g} ms, path {relaxed.critical_path_s * 1e3:.4g} ms)."
        + (
            f" This one was measured {percent(wrong, 1)} below that, so the model is wrong by at least as much."
            if wrong
            else ""
        )
    )


def _final(found: Explanation) -> str:
    """Return how the final comparison went, which decided; the table above it has medians of few runs."""
    final, best = found.final, found.best.measured_s
    if final is None:
        return ""
    ratio, (low, high) = final["ratio"], final["ci95"]
    how = f"{ratio:.3f} times as fast"
    if final["plan"] == found.plan.to_json():
        told = f"In the final comparison, this plan was {how} as “{final['baseline']}” (95 %: {low:.3f} to {high:.3f})."
    else:
        slower = slower_text(Ratio(ratio, low, high).inverse)
        told = f"In the final comparison, the fastest other plan was {slower}."
    lucky = best is not None and any(k.measured_s is not None and k.measured_s < best for k in found.by_stages)
    return f"Plans that look faster above were measured in few runs only. {told}" if lucky else told


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _more(told: Told, best: Told) -> float | None:
    if told.predicted_s is None or best.predicted_s is None:
        return None
    more = (told.predicted_s - best.predicted_s) * 1e3
    return more + 0.0  # no minus before a zero


def _cuts(found: Explanation) -> Table:
    rows = []
    for cut in found.cuts:
        for name, told in (("one operator left", cut.left), ("one operator right", cut.right)):
            where = f"before {cut.before}, {cut.nbytes:,} B cross"
            rows.append((where, name, _more(told, found.best), _ms(told.measured_s), told.why_not))
    columns = (Column("cut"), Column("move"), Column("predicted change, ms", "+.4g"), Column("measured, ms", _TIME),
               Column("remark"))  # fmt: skip
    return Table("What moving a cut would cost", columns, tuple(rows), group=1)


def _parts(found: Explanation) -> Table:
    rows = [
        (part.operators, part.processor, _ms(part.measured_s), name, _more(told, found.best), _ms(told.measured_s),
         told.why_not)
        for part in found.parts
        for name, told in (part.elsewhere or (("–", Told(None, None, "there is non other processor")),))
    ]  # fmt: skip
    columns = (Column("operators"), Column("processor"), Column("took, ms", _TIME), Column("moved to"),
               Column("predicted change, ms", "+.4g"), Column("measured, ms", _TIME), Column("remark"))  # fmt: skip
    return Table("What each stage would cost on another processor", columns, tuple(rows), group=3)


def _limits(found: Explanation) -> Table:
    rows = []
    for limit in found.limits:
        change = None if limit.saves_s is None else -limit.saves_s * 1e3 + 0.0
        word = "costs time" if limit.binds else "no plan left" if limit.without_s is None else ""
        if limit.saves_s and limit.without_s is not None and 0 < limit.saves_s < _LITTLE * limit.without_s:
            word = "hardly any"
        word = "needed" if change is not None and change > 0 else word
        rows.append((limit.what, _ms(limit.without_s), change, word))
    columns = (Column("limit"), Column("best plan without it, predicted, ms", _TIME), Column("change, ms", "+.4g"),
               Column("remark"))  # fmt: skip
    return Table("Which limits cost time", columns, tuple(rows))


def _by_stages(found: Explanation) -> Table:
    rows = tuple(
        (
            k.stages,
            _ms(k.predicted_s),
            _borders(k.predicted) if k.predicted else "no plan",
            _ms(k.measured_s),
            _borders(k.measured) if k.measured and k.stages <= 8 else "",
        )
        for k in found.by_stages
    )
    columns = (Column("K", "d"), Column("predicted, ms", _TIME), Column("best in the model"),
               Column("measured, ms", _TIME), Column("best measured"))  # fmt: skip
    return Table("The best plan for every K", columns, rows)


def _baselines(found: Explanation) -> Table:
    best = found.best.measured_s
    rows = tuple(
        (
            name,
            _more(told, found.best),
            _ms(told.measured_s),
            told.measured_s / best if told.measured_s is not None and best else None,
            told.why_not,
        )
        for name, told in found.baselines
    )
    columns = (Column("plan"), Column("predicted change, ms", "+.4g"), Column("measured, ms", _TIME),
               Column("times as long", ".4f"), Column("remark"))  # fmt: skip
    return Table("Baselines", columns, rows)


def head(found: Explanation) -> str:
    """Return what is explained."""
    return f"{found.run}: {_borders(found.plan)}"


def render(title: str, told: Iterable[Block]) -> Group:
    """Return what a person reads in a terminal."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

    parts: list[RichText | RichTable] = [RichText(title, style="bold")]
    for block in told:
        parts.append(RichText())
        if isinstance(block, Text):
            parts.append(RichText(block.text))
        elif isinstance(block, Table):
            caption = RichText(block.caption, style="bold")
            table = RichTable(title=caption, title_justify="left", box=None, pad_edge=False, header_style="bold")
            for i in block.used:
                column = block.columns[i]
                table.add_column(column.name, justify="right" if column.form else "left")
            for row in block.cells():
                table.add_row(*(RichText(row[i]) for i in block.used))
            parts.append(table)
    return Group(*parts)


def _borders(plan: Plan) -> str:
    """Return a chain as ``0–9 cpu0 | 10–21 gpu``."""
    return " | ".join(
        f"{s.operators[0]}–{s.operators[-1]} {s.processor}"
        if len(s.operators) == s.operators[-1] - s.operators[0] + 1
        else f"{len(s.operators)} operators {s.processor}"
        for s in plan.stages
    )
