"""How a study ends: interrupted early or late, on an unsteady machine, and what it then says of its numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console

from evaluators import base
from evaluators.base import Agreement, Candidate, Capabilities, Session
from evaluators.forwarding import ForwardingSession
from evaluators.machine import problems
from evaluators.testing import SyntheticEvaluator, example_graph
from optimizer.report.console import render
from optimizer.study import course
from optimizer.study.course import Interrupted
from optimizer.study.log import read_log
from optimizer.study.one_model import OneModel
from optimizer.study.result import Result
from optimizer.study.verdict import Verdict
from optimizer.study.verdict import decide as decided
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from tests.support.sentences import fails, says
from tests.support.short_studies import Quiet
from tests.support.short_studies import go as short_study

ROOT = Path(__file__).parents[4]
CONDITIONS = {"governor": "powersave", "load": 0.4, "steal": 0.0, "clock_hz": 2e9, "versions": {"x": "1"}}


class Telling(ForwardingSession):
    """A synthetic session that tells conditions, so that it is looked at."""

    def __init__(self, inner: Session) -> None:
        super().__init__(inner)
        self.capabilities = Capabilities(conditions=True)

    def conditions(self) -> dict[str, Any]:
        return dict(CONDITIONS)

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        return self.inner.load(graph, plan, fresh=fresh)


class Evaluator(base.Evaluator):
    name = "telling"

    def platform(self) -> Platform:
        return SyntheticEvaluator().platform()

    @contextmanager
    def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[Session]:
        with SyntheticEvaluator().prepare(platform, scratch) as inner:
            yield Telling(inner)


@pytest.fixture(autouse=True)
def _synthetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "make_evaluator", lambda _: Evaluator())
    monkeypatch.setattr("search_spaces.models.load", lambda *_, **__: example_graph(6))


def go(folder: Path, watcher: Quiet | None = None) -> Result:
    return short_study(folder, budget=15, watcher=watcher)


def interrupt(*_: object) -> Agreement | None:
    raise KeyboardInterrupt


def test_a_finished_study_that_is_interrupted_keeps_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(tmp_path)
    before = (tmp_path / "result.json").read_bytes()
    assert json.loads(before)["complete"]
    monkeypatch.setattr(OneModel, "finish", interrupt)
    with fails(Interrupted):
        go(tmp_path)
    assert (tmp_path / "result.json").read_bytes() == before


def test_an_interrupt_as_soon_as_the_folder_is_open_tells_how_to_go_on(tmp_path: Path) -> None:
    watcher = Quiet()
    with (
        patch.object(watcher, "opened", side_effect=KeyboardInterrupt),
        fails(Interrupted) as caught,
    ):
        go(tmp_path, watcher)
    assert caught.value.result is None
    go(tmp_path)


def test_what_cannot_be_decided_is_kept_and_decided_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def unsteady(*words: Any, **more: Any) -> Verdict:
        return replace(decided(*words, **more), undecided="“whole on cpu0” may be up to 30 % faster")

    with monkeypatch.context() as patch:
        patch.setattr(course, "decide", unsteady)
        first = go(tmp_path)
    assert first.verdict is not None
    assert first.verdict.undecided
    says(shown(first))
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["complete"]
    assert not document["decided"]
    assert (tmp_path / "best" / "plan.json").exists(), "the best known plan is written all the same"
    again = go(tmp_path)
    assert again.verdict is not None
    assert not again.verdict.undecided
    kinds = [record.kind for record in read_log(tmp_path / "trials.jsonl").records]
    assert kinds.count("verdict") == 2
    assert kinds.count("trial") == first.history.measured


def shown(result: Result) -> str:
    console = Console(width=300, record=True, file=StringIO())
    console.print(render(result))
    return console.export_text()


def test_stage_times_are_of_the_runs_that_the_latency_is_of(tmp_path: Path) -> None:
    result = go(tmp_path)
    verdict = result.verdict
    assert verdict is not None
    assert verdict.challenger is not None
    for plan in (verdict.reference.plan, verdict.challenger):
        standing = verdict.standing(plan)
        assert standing is not None
        stage_s = result.stage_s(plan)
        assert stage_s == standing.stage_s
        assert len(stage_s) == len(plan.stages)
        samples = result.samples(plan)
        assert samples is not None
        assert samples.conditions == CONDITIONS
        assert max(stage_s) <= samples.median * 1.01
    document = result.to_json()
    assert document["best"]["stage_ms"] == [s * 1e3 for s in result.stage_s(verdict.best)]
    assert document["best"]["latency_ms"]["conditions"] == CONDITIONS
    assert document["best"]["latency_ms"]["source"] == "final"
    assert verdict.scale == pytest.approx(1.0, rel=0.03)
    text = shown(result)
    assert "scaled" not in text
    says(text)


def test_a_machine_that_was_faster_at_the_end_is_reported(tmp_path: Path) -> None:
    result = go(tmp_path)
    assert result.verdict is not None
    changed = replace(result, verdict=replace(result.verdict, scale=0.5))
    says(shown(changed))


def test_figures_of_the_search_are_told_apart_from_the_finals(tmp_path: Path) -> None:
    result = go(tmp_path)
    assert result.verdict is not None
    outside = [name for name, plan in result.baselines.items() if not result.in_final(plan)]
    for line in shown(result).splitlines():
        if any(line.startswith(f"{name} ") for name in outside):
            assert "about" in line
            assert "search" in line or "stopped early" in line


@pytest.mark.parametrize(
    ("conditions", "count"),
    [
        ({}, 0),
        ({"governor": "performance", "load": 0.01, "steal": 0.0, "temperature_c": 40.0}, 0),
        ({"steal": 0.2, "temperature_c": 99.0}, 2),
        ({"load": "much", "steal": None, "temperature_c": True, "governor": 3}, 0),
    ],
)
def test_what_is_wrong_with_conditions(conditions: dict[str, Any], count: int) -> None:
    assert len(problems(conditions)) == count


@pytest.mark.parametrize(
    "words",
    ["inspec", "--model zzz", "--model squeezenet1_1@0.5/64 --evaluator synthetic --budget 2 --json --out run"],
)
def test_nothing_but_data_gets_onto_stdout_where_stderr_is_closed(words: str, tmp_path: Path) -> None:
    run = subprocess.run(
        f'"{sys.executable}" -m optimizer.cli {words} 2>&-',
        shell=True,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    if run.stdout:
        assert json.loads(run.stdout)["schema_version"] == 1
    assert (run.returncode == 0) == bool(run.stdout)
