"""Reports of campaigns: predictions are marked, and tables and curves can be read."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from typing import Any

from optimizer.campaign.file import AXES
from optimizer.campaign.table import Tables
from optimizer.report.campaign import _curves, _plans, _studies, published, summary
from optimizer.report.document import Block, Document, Figure, Section, Table, Text
from optimizer.report.page import render
from tests.support.sentences import says

STUDIES = {"here": False, "phone": True}  # → whether it is predicted
STATE = {"studies": [{"name": name, "status": "done", "error": ""} for name in STUDIES]}


def a_row(study: str, plan: str = "best") -> dict[str, Any]:
    axes = dict.fromkeys(AXES) | {"model": study, "objective": "latency", "seed": 0, "evaluator": "e"}
    numbers = dict.fromkeys(("gap", "misses", "over_best", "over_best_low", "over_best_high", "predicted_makespan_ms"))
    value = {"value": 2.0, "value_low": 1.9, "value_high": 2.1, "unit": "ms", "stages": 2, "samples": 3}
    return axes | numbers | value | {"study": study, "plan": plan, "predicted": STUDIES[study]}


def a_summary(study: str, *, significant: bool) -> dict[str, Any]:
    ratio = {"ratio": 1.1, "ratio_low": 1.05, "ratio_high": 1.15, "significant": significant}
    return a_row(study) | ratio | {"studies": 2, "best": 2.0}


def some_tables(**more: Any) -> Tables:
    empty: dict[str, Any] = {field.name: [] for field in dataclasses.fields(Tables)}
    rows = [a_row(study, plan) for study in STUDIES for plan in ("best", "whole on cpu")]
    found = [a_summary("here", significant=False), a_summary("phone", significant=True)]
    return Tables(**empty | {"results": rows, "summary": found, "unreadable": {}} | more)


def page_of(*blocks: Block) -> str:
    return render(Document("x", "", (Section("s", "All plans", blocks),), {}))


def test_predictions_are_told_from_measurements() -> None:
    tables = some_tables()
    says(next(str(b.text) for b in summary(STATE, tables) if isinstance(b, Text)))
    for blocks in (_studies(STATE, tables), _plans(tables), summary(STATE, tables)):
        table = next(b for b in blocks if isinstance(b, Table))
        column = [c.name for c in table.columns].index("predicted")
        assert {row[column] for row in table.cells()} == {"", "yes"}
    alike = some_tables(results=[a_row("phone")], summary=[a_summary("phone", significant=True)])
    table = next(b for b in _plans(alike) if isinstance(b, Table))
    assert [table.columns[i].name for i in table.used].count("predicted") == 1  # of the values, not beside them
    says(next(str(b.text) for b in summary(STATE, alike) if isinstance(b, Text)))


def test_fitted_figures_have_no_verdict() -> None:
    row = {"name": "a", "paper": 1.0, "ours": 1.0, "ours_low": 1.0, "ours_high": 1.0, "ratio": 1.0, "tolerance": 0.1}
    row |= {"in_final": True, "studies": 1, "missing": "", "source": "x", "left_out": None, "fit": ""}
    fitted = {"known": "fitted", "within": None, "left_out": -0.17, "fit": "the profile is fitted"}
    blocks = list(published(some_tables(expected=[row | fitted, row | {"known": "measured", "within": True}])))
    table = next(b for b in blocks if isinstance(b, Table))
    assert [(cells[6], bool(cells[8])) for cells in table.cells()] == [("fitted", False), ("measured", True)]
    assert [cells[7] for cells in table.cells()] == ["−17 %", "–"]
    assert sum("profile" in b.text for b in blocks if isinstance(b, Text)) == 2


def test_models_that_a_campaign_made_are_a_table_and_a_picture() -> None:
    head = {"family": "vgg16", "seeds": 3, "parameters": 5, "latency_ms": 1.0, "accuracy_before": None, "beside": None}
    none = dict.fromkeys(("difference", "difference_low", "difference_high"))
    rows = [
        {**head, **none, "model": "a", "tucker": None, "macs": 200, **shares(0.9, 0.88, 0.92)},
        {**head, **none, "model": "b", "tucker": None, "macs": 100, **shares(0.85, 0.8, 0.9)},
        {**head, "model": "c", "tucker": "vbmf", "macs": 100, **shares(0.6, 0.0, 1.0), "beside": "b"}
        | {"difference": -0.25, "difference_low": -0.4, "difference_high": -0.1},
        {**head, **none, "model": "d", "tucker": "vbmf", "macs": 90, **dict.fromkeys(shares(0, 0, 0))},
    ]
    blocks = list(summary({"studies": [{"status": "done"}]}, some_tables(trained=rows)))
    says(next(b.text for b in blocks if isinstance(b, Text) and "beside" in b.text))
    table = next(b for b in blocks if isinstance(b, Table) and len(b.rows) == 4)
    assert [row[-1] for row in table.rows] == ["", "", "−25.0 [−40.0, −10.0]", ""]
    picture = next(b for b in blocks if isinstance(b, Figure) and "ccuracy" in b.caption)
    assert len(re.findall(r'<path class="series c\d"', picture.svg)) == 3 + 2  # an interval each, a line for each kind
    for x, y in re.findall(
        r"[ML]([-\d.]+) ([-\d.]+)", "".join(re.findall(r'class="series c\d" d="(.*?)"', picture.svg))
    ):
        assert 0.0 <= float(x) <= 920.0
        assert 0.0 <= float(y) <= 380.0


def shares(value: float, low: float, high: float) -> dict[str, float]:
    return {"accuracy": value, "accuracy_low": low, "accuracy_high": high}


def test_each_study_is_a_heading_above_its_plans() -> None:
    page = page_of(*_plans(some_tables()))
    heads = re.findall(r'<tr class="of"><th scope="colgroup" colspan="(\d+)"><span>(.*?)</span>', page)
    assert [name for _, name in heads] == list(STUDIES)
    assert {int(span) for span, _ in heads} == {page.count('<th scope="col"')}
    assert re.findall(r'<th scope="row">(.*?)</th>', page) == ["best", "whole on cpu"] * 2


def test_equal_curves_are_one_line_with_both_names_and_curves_are_steps() -> None:
    rows = [
        a_row("here") | {"sampler": sampler, "study": sampler, "repetition": 1, "plans": plans, "best": best}
        for sampler, values in (("tpe", (4.0, 2.0)), ("auto", (4.0, 2.0)), ("random", (4.0, 3.0)))
        for plans, best in enumerate(values, 1)
    ]
    (found,) = _curves(some_tables(curves=rows))
    assert isinstance(found, Figure)
    says(found.caption)
    lines = re.findall(r'class="series (c\d)" d="M(.*?)"', found.svg)
    assert [colour for colour, _ in lines] == ["c0", "c1"]
    for _, line in lines:
        points = [point.split() for point in line.split("L")]
        assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(points))
