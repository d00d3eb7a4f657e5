"""A study that is killed anywhere goes on as if nothing had happened: the same plans, nothing measured twice."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from evaluators.base import Agreement
from evaluators.testing import Noise, SyntheticEvaluator, SyntheticSession, example_graph
from optimizer import study
from optimizer.config import StudyConfig
from optimizer.console import render
from optimizer.history import History, Trial
from optimizer.records import Record, header
from optimizer.result import Result
from optimizer.run import RunFolder
from optimizer.storage import TrialLog, read_log
from optimizer.study import run_study
from search_spaces.chain import ChainSpace
from search_spaces.errors import UsageError
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform

EVALUATOR = SyntheticEvaluator(
    noise=Noise(run=0.01, instance=0.003, spike_share=0.05),
    interaction=lambda plan: 1.0 + int(plan.digest[:4], 16) / 2**18,
    fails=lambda plan: len(plan.stages) == 3 and int(plan.digest[-1], 16) < 2,
)
ROOT = Path(__file__).parents[1]


class Killed(BaseException):
    """Stands for a process that is gone: nobody catches it."""


class Quiet:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.trials: list[Trial] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def warn(self, text: str) -> None:
        self.messages.append(text)

    def opened(self, run: RunFolder, history: History, space_size: int) -> None:
        pass

    def trial(self, trial: Trial) -> None:
        self.trials.append(trial)


@pytest.fixture(autouse=True)
def _synthetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "make_evaluator", lambda _: EVALUATOR)
    monkeypatch.setattr("search_spaces.models.load", lambda *_: example_graph(9))


def go(folder: Path, *, watcher: Quiet | None = None, **changed: Any) -> Result:
    values = {"model": "example", "budget": 26, "max_stages": 3, "evaluator": "synthetic", "out": folder} | changed
    return run_study(StudyConfig.model_validate(values), watcher or Quiet(), ["optimize"])


def tried(folder: Path) -> list[Any]:
    """Return everything in the log that the search decided and measured."""
    found = []
    for record in records(folder):
        if record.kind in {"trial", "baseline"}:
            trial = Trial.from_json(record.data)
            found.append(
                (trial.number, trial.plan.digest, trial.origin, trial.median_s, trial.failure, trial.repeat_of)
            )
    return found


def records(folder: Path) -> tuple[Record, ...]:
    return read_log(folder / "trials.jsonl").records


def verdict(folder: Path) -> Any:
    return next(r.data for r in reversed(records(folder)) if r.kind == "verdict")


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


def killed_at(patch: pytest.MonkeyPatch, append: int, *, after: bool) -> None:
    """Have the process die at an append to the log, before anything is written or when all of it is."""
    original = TrialLog.append
    count = 0

    def dying(self: TrialLog, kind: str, data: Any) -> Record:
        nonlocal count
        count += 1
        if count == append and not after:
            raise Killed
        record = original(self, kind, data)
        if count == append:
            raise Killed
        return record

    patch.setattr(TrialLog, "append", dying)


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
    place = data.draw(st.integers(len(header()), len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    log.write_bytes(content)
    watcher = Quiet()
    result = go(folder, sampler="tpe", watcher=watcher)
    assert any("trial log" in message for message in watcher.messages)
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


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 1), ("sampler", "random"), ("max_stages", 2), ("processors", ("cpu0",))]
)
def test_another_study_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    go(tmp_path / "run", budget=12)
    content = (tmp_path / "run" / "trials.jsonl").read_bytes()
    with pytest.raises(UsageError, match=f"begun with --{name.replace('_', '-')} "):
        go(tmp_path / "run", budget=12, **{name: value})
    assert (tmp_path / "run" / "trials.jsonl").read_bytes() == content


@pytest.mark.parametrize("keep", [["cpu0"], ["cpu", "cpu0"]])
def test_a_machine_with_other_lanes_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: list[str]
) -> None:
    go(tmp_path / "run", budget=14)
    other = EVALUATOR.platform().restrict(keep)
    monkeypatch.setattr(SyntheticEvaluator, "platform", lambda _: Platform("other", other.processors))
    with pytest.raises(UsageError, match=f"it was measured on cpu, cpu0, cpu1, not on {', '.join(keep)}") as caught:
        go(tmp_path / "run", budget=20)
    assert "\n" not in str(caught.value)


def test_the_same_lanes_in_another_order_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(tmp_path / "run", budget=14)
    other = EVALUATOR.platform().restrict(["cpu0", "cpu1", "cpu"])
    monkeypatch.setattr(SyntheticEvaluator, "platform", lambda _: Platform("other", other.processors))
    watcher = Quiet()
    assert go(tmp_path / "run", budget=20, watcher=watcher).history.measured == 20
    assert any("since the study began, " in message for message in watcher.messages)


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


def test_a_killed_verdict_is_made_again(
    tmp_path: Path, whole_runs: dict[str, tuple[list[Any], Any, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted, decided, count = uninterrupted("tpe", whole_runs, tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, count, after=False)
        with pytest.raises(Killed):
            go(tmp_path / "run", sampler="tpe")
    assert not any(r.kind == "verdict" for r in records(tmp_path / "run"))
    go(tmp_path / "run", sampler="tpe")
    assert (tried(tmp_path / "run"), verdict(tmp_path / "run")) == (wanted, decided)


# Real processes

COMMAND = [sys.executable, "-m", "optimizer.cli", "--model", "squeezenet1_1", "--evaluator", "synthetic"]


def start(arguments: list[str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def wait_for_trials(log: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not log.exists() or log.read_bytes().count(b'"kind":"trial"') < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_kill_minus_nine_at_random_moments(tmp_path: Path) -> None:
    arguments = ["--budget", "40", "--max-stages", "3", "--study", "s", "-q"]
    whole = start([*arguments, "--out", "whole"], tmp_path)
    assert whole.wait(120) == 0
    whole.communicate()
    for count in (1, 9, 25):
        process = start([*arguments, "--out", "killed"], tmp_path)
        wait_for_trials(tmp_path / "killed" / "trials.jsonl", count, process)
        process.kill()
        process.communicate()
        found = tried(tmp_path / "killed")
        assert len(found) >= count
        assert found == tried(tmp_path / "whole")[: len(found)]
    process = start([*arguments, "--out", "killed"], tmp_path)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert tried(tmp_path / "killed") == tried(tmp_path / "whole")
    assert verdict(tmp_path / "killed") == verdict(tmp_path / "whole")


def interrupted_and_resumed(arguments: list[str], folder: Path, tmp_path: Path, number: int) -> list[str]:
    process = start([*arguments, "--json"], tmp_path)
    wait_for_trials(folder / "trials.jsonl", 4, process)
    begin_s = time.monotonic()
    os.killpg(process.pid, number)  # as a terminal does: everyone gets it
    stdout, stderr = process.communicate(timeout=30)
    assert time.monotonic() - begin_s < 5
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    document = json.loads(stdout)
    assert document["complete"] is False
    assert document["best"]["latency_ms"]["median"] > 0
    last = stderr.splitlines()[-1]
    assert last.startswith("optimize: interrupted; go on with: optimize ")
    return shlex.split(last.partition("go on with: ")[2])[1:]


def end_of(process: subprocess.Popen[str]) -> Any:
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return json.loads(stdout)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_prints_the_command_that_goes_on(tmp_path: Path, number: int) -> None:
    folder = tmp_path / "runs" / "my study"
    arguments = ["--budget", "60", "--sampler", "random", "--out", "runs/my study"]
    command = interrupted_and_resumed(arguments, folder, tmp_path, number)
    before = tried(folder)
    again = subprocess.Popen(
        [sys.executable, "-m", "optimizer.cli", *command, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    document = end_of(again)
    assert document["complete"]
    assert document["unique_plans"] == 60
    assert tried(folder)[: len(before)] == before


@pytest.mark.litert
def test_an_interrupt_while_the_device_measures(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["--evaluator", "litert", "--budget", "500", "--out", "run"]
    command = interrupted_and_resumed(arguments, folder, tmp_path, signal.SIGINT)
    assert command[:2] == ["--model", "squeezenet1_1"]
