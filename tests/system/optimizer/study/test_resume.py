"""A study that is killed anywhere goes on as if nothing had happened: the same plans, nothing measured twice."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from evaluators.base import Agreement
from evaluators.measurement.disturbance import Disturbance, RunFilter
from evaluators.testing import Noise, SyntheticEvaluator, SyntheticSession, example_graph
from optimizer.report.console import render
from optimizer.study import course
from optimizer.study.history import History, Trial
from optimizer.study.log import Record, encode, header, read_log
from search_spaces.core.errors import RunFolderError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import ChainSpace
from tests.support.sentences import fails, says
from tests.support.short_studies import Killed, Quiet, go, killed_at, records, tried, verdict

EVALUATOR = SyntheticEvaluator(
    noise=Noise(run=0.01, instance=0.003, spike_share=0.05),
    interaction=lambda plan: 1.0 + int(plan.digest[:4], 16) / 2**18,
    fails=lambda plan: len(plan.stages) == 3 and int(plan.digest[-1], 16) < 2,
)


@pytest.fixture(autouse=True)
def _synthetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "make_evaluator", lambda _: EVALUATOR)
    monkeypatch.setattr("search_spaces.models.load", lambda *_, **__: example_graph(9))
    # How long a slow machine loads a plan decides what a final has time for, which is none of this file's matter.
    monkeypatch.setattr("evaluators.measurement.final.FinalComparison._counted_s", lambda *_: 0.0)
    monkeypatch.setattr("optimizer.study.loop._SLOW_LOAD_S", math.inf)


@pytest.fixture(scope="module")
def whole_runs() -> dict[str, tuple[list[Any], Any, int]]:
    return {}


def uninterrupted(
    sampler: str, known: dict[str, tuple[list[Any], Any, int]], tmp: pytest.TempPathFactory
) -> tuple[list[Any], Any, int]:
    if sampler not in known:
        folder = tmp.mktemp("whole")
        go(folder / "run", sampler=sampler)
        known[sampler] = tried(folder / "run"), verdict(folder / "run"), len(records(folder / "run"))
    return known[sampler]


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    sampler=st.sampled_from(["auto", "tpe", "random", "qmc", "nsga2"]),
    kills=st.lists(st.tuples(st.integers(1, 15), st.booleans()), min_size=1, max_size=4),
)
def test_killed_anywhere_it_reaches_the_same_plans(
    sampler: str,
    kills: list[tuple[int, bool]],
    whole_runs: dict[str, tuple[list[Any], Any, int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    wanted, decided, _ = uninterrupted(sampler, whole_runs, tmp_path_factory)
    folder = tmp_path_factory.mktemp("killed") / "run"
    for append, after in kills:
        with pytest.MonkeyPatch.context() as patch:
            killed_at(patch, append, after=after)
            before = len(records(folder)) if folder.exists() else 0
            try:
                go(folder, sampler=sampler)
            except Killed:
                assert len(records(folder)) == before + append - (not after)
            else:  # there was less left to do than that
                break
        found = tried(folder)
        assert found == wanted[: len(found)]
    go(folder, sampler=sampler)
    assert tried(folder) == wanted
    assert verdict(folder) == decided


@pytest.mark.parametrize("sampler", ["auto", "tpe", "random"])
def test_a_last_record_torn_at_any_byte_is_made_again(
    sampler: str, whole_runs: dict[str, tuple[list[Any], Any, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted, decided, _ = uninterrupted(sampler, whole_runs, tmp_path_factory)
    chance = random.Random(sampler)
    folder = tmp_path_factory.mktemp("torn") / "run"
    go(folder, sampler=sampler)
    log = folder / "trials.jsonl"
    content = log.read_bytes()
    for _ in range(6):
        log.write_bytes(content[: chance.randrange(len(header()), len(content))])
        watcher = Quiet()
        go(folder, sampler=sampler, watcher=watcher)
        assert tried(folder) == wanted
        assert verdict(folder) == decided


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_flipped_bit_costs_one_record_and_the_study_ends_well(
    data: st.DataObject, whole_runs: dict[str, tuple[list[Any], Any, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted, _, _ = uninterrupted("tpe", whole_runs, tmp_path_factory)
    folder = tmp_path_factory.mktemp("flipped") / "run"
    go(folder, sampler="tpe")
    log = folder / "trials.jsonl"
    content = bytearray(log.read_bytes())
    share = data.draw(st.integers(0, 10**6 - 1))  # of a log whose length differs from run to run: it has times in it
    place = len(header()) + share * (len(content) - len(header())) // 10**6
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    log.write_bytes(content)
    watcher = Quiet()
    result = go(folder, sampler="tpe", watcher=watcher)
    assert any("trials.jsonl" in message for message in watcher.messages)
    kept = tried(folder)
    assert len([trial for trial in wanted if trial in kept]) >= len(wanted) - 1
    assert result.history.measured == 26
    assert result.verdict is not None
    assert list(folder.glob("trials.jsonl.damaged-*"))


def test_every_record_may_be_lost(
    whole_runs: dict[str, tuple[list[Any], Any, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, _, count = uninterrupted("random", whole_runs, tmp_path_factory)
    folder = tmp_path_factory.mktemp("lost") / "run"
    go(folder, sampler="random")
    log = folder / "trials.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    for lost in range(1, count + 1, 3):
        log.write_bytes(b"".join(lines[:lost] + lines[lost + 1 :]))
        assert go(folder, sampler="random").history.measured >= 26


class Loads:
    """How many plans were loaded for the search, fresh ones for the verdict left out."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = SyntheticSession.load

        def counted(session: SyntheticSession, graph: Graph, plan: Plan, *, fresh: bool = False) -> Any:
            self.count += 1
            return original(session, graph, plan, fresh=fresh)

        patch.setattr(SyntheticSession, "load", counted)


def test_a_finished_study_asked_again_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = go(tmp_path / "run")
    content = (tmp_path / "run" / "trials.jsonl").read_bytes()
    loads = Loads(monkeypatch)
    again = go(tmp_path / "run")
    assert loads.count == 0
    assert (tmp_path / "run" / "trials.jsonl").read_bytes() == content
    one, other = first.to_json(), again.to_json()
    assert {k: v for k, v in one.items() if k != "wall_s"} == {k: v for k, v in other.items() if k != "wall_s"}


def test_a_budget_may_grow_and_shrink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(tmp_path / "run", budget=20)
    short = tried(tmp_path / "run")
    grown = go(tmp_path / "run", budget=30)
    assert tried(tmp_path / "run")[: len(short)] == short
    assert grown.history.measured == 30
    loads = Loads(monkeypatch)
    assert go(tmp_path / "run", budget=5).history.measured == 30
    assert loads.count == 0


def test_what_disturbed_earlier_sessions_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disturbed(RunFilter):
        """A filter on a machine whose cores others use 30 % of the time."""

        def __init__(self, counters: Any = None) -> None:
            super().__init__(counters)
            self.total = Disturbance(lasted_s=10.0, waited_s=3.0)

    monkeypatch.setattr(course, "RunFilter", Disturbed)
    go(tmp_path / "run", budget=6)
    assert go(tmp_path / "run", budget=9).disturbance == Disturbance(lasted_s=20.0, waited_s=6.0)
    log = tmp_path / "run" / "trials.jsonl"
    broken = [Record(r.n, r.kind, {"waited_s": "x"}) if r.kind == "disturbed" else r for r in read_log(log).records]
    log.write_bytes(header() + b"".join(encode(n, r.kind, r.data) for n, r in enumerate(broken, 1)))
    with fails(RunFolderError):
        go(tmp_path / "run", budget=9)


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 1), ("sampler", "random"), ("max_stages", 2), ("processors", ("cpu0",))]
)
def test_another_study_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    go(tmp_path / "run", budget=12)
    content = (tmp_path / "run" / "trials.jsonl").read_bytes()
    with fails(UsageError):
        go(tmp_path / "run", budget=12, **{name: value})
    assert (tmp_path / "run" / "trials.jsonl").read_bytes() == content


@pytest.mark.parametrize("keep", [["cpu0"], ["cpu", "cpu0"]])
def test_a_machine_with_other_processors_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: list[str]
) -> None:
    go(tmp_path / "run", budget=14)
    other = EVALUATOR.platform().restrict(keep)
    monkeypatch.setattr(SyntheticEvaluator, "platform", lambda _: Platform("other", other.processors))
    with fails(UsageError) as caught:
        go(tmp_path / "run", budget=20)
    assert "\n" not in str(caught.value)


def test_the_same_processors_in_another_order_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(tmp_path / "run", budget=14)
    other = EVALUATOR.platform().restrict(["cpu0", "cpu1", "cpu"])
    monkeypatch.setattr(SyntheticEvaluator, "platform", lambda _: Platform("other", other.processors))
    watcher = Quiet()
    assert go(tmp_path / "run", budget=20, watcher=watcher).history.measured == 20
    says("\n".join(message for message in watcher.messages if "began" in message))


def test_only_a_plan_with_files_is_offered_to_be_run(tmp_path: Path) -> None:
    result = go(tmp_path / "run", budget=3)
    agreed = replace(result, deployed=Agreement(identical=True, max_abs_error=0.0, max_rel_error=0.0, tolerance=0.0))
    shown = []
    for each in (result, agreed):
        console = Console(width=1000, record=True, file=StringIO())
        console.print(render(each))
        shown.append(f"optimize execute {tmp_path}/run/best/plan.json" in console.export_text())
    assert shown == [False, True]


def test_a_repeat_without_its_first_trial_is_nothing(tmp_path: Path) -> None:
    go(tmp_path / "run", max_stages=1, budget=1)
    first = next(Trial.from_json(r.data) for r in records(tmp_path / "run") if r.kind == "trial")
    again = replace(first, number=1, measurement=None, repeat_of=0)
    space = ChainSpace(example_graph(9), EVALUATOR.platform(), 1)
    repeats = (Record(2, "trial", again.to_json()),)
    history = History(space.distributions())
    history.restore(repeats)
    assert history.measured == 0
    assert [t.state.name for t in history.study.trials] == ["FAIL"]


def test_a_verdict_does_not_speak_of_later_trials(tmp_path: Path) -> None:
    go(tmp_path / "run", budget=14)
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, 20 - 14 + 1, after=False)  # six trials, then the verdict
        with pytest.raises(Killed):
            go(tmp_path / "run", budget=20)
    found = [r.kind for r in records(tmp_path / "run")]
    assert found.count("verdict") == 1
    assert found[-1] == "trial"
    go(tmp_path / "run", budget=20)
    assert [r.kind for r in records(tmp_path / "run")] == [*found, "verdict"]
