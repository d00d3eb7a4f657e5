"""``--warm-start``: measurements of the same model on the same device are reused; else plans carry over."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from evaluators.testing import SyntheticCandidate, SyntheticSession
from optimizer.cli import main
from optimizer.study.history import WARM
from optimizer.study.log import encode, header, read_log
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from tests.support.commands import answered
from tests.support.commands import tried as listed
from tests.support.sentences import says

STUDY = ["--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,1small,gpu"]
STUDY += ["--max-stages", "2", "-q"]

pytestmark = pytest.mark.usefixtures("elsewhere")


def study(capsys: pytest.CaptureFixture[str], model: str, out: str, *words: str) -> dict[str, Any]:
    return answered(capsys, ["--model", model, *STUDY, "--out", out, *words])


def tried(out: str) -> set[str]:
    """Return the plans that were measured in a study itself."""
    records = read_log(Path(out) / "trials.jsonl").records
    return {
        r.data["digest"]
        for r in records
        if r.kind in ("trial", "baseline") and r.data["origin"] != WARM and r.data["repeat_of"] is None
    }


def test_nothing_is_measured_twice(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--sampler", "tpe", "--budget", "15")
    first = study(capsys, "squeezenet1_1", "first", *words)
    second = study(capsys, "squeezenet1_1", "second", *words, "--seed", "1", "--warm-start", "first")
    assert not tried("first") & tried("second")
    assert second["unique_plans"] == 15
    assert second["best"]["latency_ms"]["median"] <= first["best"]["latency_ms"]["median"]
    again = study(capsys, "squeezenet1_1", "second", *words, "--seed", "1", "--warm-start", "first")
    assert again["unique_plans"] == 15
    assert again["best"] == second["best"]


def test_a_space_that_is_known_is_exhausted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--max-stages", "1", "--budget", "10")
    study(capsys, "squeezenet1_1", "first", *words)
    found = study(capsys, "squeezenet1_1", "second", *words, "--warm-start", "first")
    assert found["space"]["exhausted"]
    assert not tried("second")


def test_plans_carry_over_to_another_model_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    study(capsys, "squeezenet1_1", "first", "--budget", "12")
    study(capsys, "mobilenet_v1", "model", "--budget", "6", "--warm-start", "first")
    study(capsys, "squeezenet1_1", "device", "--budget", "6", "--warm-start", "first", "--processors", "1small,gpu")
    for out in ("model", "device"):
        origins = [r.data["origin"] for r in read_log(Path(out) / "trials.jsonl").records if r.kind == "trial"]
        assert origins.count(WARM) >= 1


def measured(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Return a list that gets each plan that is loaded before the last comparison."""
    found: list[Plan] = []
    load = SyntheticSession.load

    def noted(self: SyntheticSession, graph: Graph, plan: Plan, *, fresh: bool = False) -> SyntheticCandidate:
        if not fresh:
            found.append(plan)
        return load(self, graph, plan, fresh=fresh)

    monkeypatch.setattr(SyntheticSession, "load", noted)
    return found


def synthetic(capsys: pytest.CaptureFixture[str], out: str, *words: str) -> str:
    """Do a study on a device that has to be measured, and return its messages about the warm start."""
    options = ["--model", "squeezenet1_1@0.25/64", "--evaluator", "synthetic", "--max-stages", "2", "--budget", "8"]
    capsys.readouterr()
    assert main([*options, "--out", out, *words]) == 0
    output = capsys.readouterr().err
    return next((line for line in output.splitlines() if " reused from " in line or " will be measured " in line), "")


def test_not_one_operator_is_timed_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = measured(monkeypatch)
    synthetic(capsys, "first")
    assert max(len(plan.stages) for plan in loaded) > 2  # the operators, each for itself
    before = {plan.digest for plan in loaded}
    loaded.clear()
    says(synthetic(capsys, "second", "--seed", "1", "--warm-start", "first"))
    assert loaded
    assert not before & {plan.digest for plan in loaded}
    assert {len(plan.stages) for plan in loaded} == {2}


def test_what_is_known_of_a_processor_is_known_whatever_the_others_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = measured(monkeypatch)
    synthetic(capsys, "two", "--processors", "cpu0,cpu1")
    before = {plan.digest for plan in loaded}
    loaded.clear()
    synthetic(capsys, "three", "--warm-start", "two")
    assert not before & {plan.digest for plan in loaded}
    timed = [plan for plan in loaded if len(plan.stages) not in (2, 3, 4)]  # whole, and every operator for itself
    assert {stage.processor for plan in timed for stage in plan.stages} == {"cpu"}
    loaded.clear()
    synthetic(capsys, "one", "--processors", "cpu1,cpu", "--warm-start", "three")  # cpu1 is like cpu0, which had a turn
    assert all(len(plan.stages) in (2, 3, 4) for plan in loaded)


def test_numbers_of_another_kind_are_not_taken_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = measured(monkeypatch)
    synthetic(capsys, "first")
    loaded.clear()
    says(synthetic(capsys, "second", "--objective", "occupancy", "--warm-start", "first"))
    assert sum(len(plan.stages) > 4 for plan in loaded) == 1  # a baseline; the operators are known all the same
    assert {r.data["origin"] for r in read_log(Path("second/trials.jsonl")).records if r.kind == "trial"} >= {WARM}
    says(synthetic(capsys, "third", "--deadline", "50", "--warm-start", "first"))
    states = ("--state", "cool:", "--state", "hot:gpu=3")
    study(capsys, "squeezenet1_1", "cool", "--budget", "6")
    study(capsys, "squeezenet1_1", "hot", "--budget", "6", *states, "--warm-start", "cool")
    assert not any(r.data["origin"] == WARM for r in read_log(Path("hot/trials.jsonl")).records if r.kind == "baseline")


def test_workers_share_what_one_of_them_brings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = measured(monkeypatch)
    synthetic(capsys, "first")
    loaded.clear()
    shared = ("--study", "s", "--storage", "sqlite:///shared.db")
    synthetic(capsys, "begun", "--warm-start", "first", *shared)
    assert main([*shared, "--out", "joined", "-q"]) == 0  # which needs neither the folder nor anything measured
    assert not tried("first") & {plan.digest for plan in loaded}
    assert len({plan.digest for plan in loaded}) == len(loaded) == 8
    assert tried("joined") == tried("begun")


def test_a_warm_start_that_failed_is_made_up_for(capsys: pytest.CaptureFixture[str]) -> None:
    study(capsys, "squeezenet1_1@0.25/64", "first", "--budget", "12")
    second = ("squeezenet1_1@0.25/64", "second", "--budget", "12")
    assert main(["--model", second[0], *STUDY, "--out", *second[1:], "--warm-start", "frist"]) == 2
    says(capsys.readouterr().err)
    study(capsys, *second, "--warm-start", "first")
    assert not tried("first") & tried("second")


def test_times_that_are_missing_or_of_another_model_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    synthetic(capsys, "first")
    log = Path("first/trials.jsonl")
    kept = [(r.kind, dict(r.data)) for r in read_log(log).records]

    def damaged(key: str, value: Any) -> None:
        lines = [encode(i, k, {**d, key: value} if k == "profile" else d) for i, (k, d) in enumerate(kept, 1)]
        log.write_bytes(header() + b"".join(lines))

    damaged("whole_s", {})
    says(synthetic(capsys, "without", "--warm-start", "first"))
    operator_s = next(data["operator_s"] for kind, data in kept if kind == "profile")
    damaged("operator_s", {like: values[1:] for like, values in operator_s.items()})
    assert main(["--model", "squeezenet1_1@0.25/64", "--evaluator", "synthetic", "--warm-start", "first"]) == 2
    says(capsys.readouterr().err)


def test_a_study_that_goes_on_takes_over_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("squeezenet1_1@0.25/64", "second", "--sampler", "random")
    study(capsys, "squeezenet1_1@0.25/64", "first", "--budget", "12")
    study(capsys, *small, "--seed", "1", "--budget", "8")
    before = tried("second")
    found = study(capsys, *small, "--seed", "1", "--budget", "20", "--warm-start", "first")
    assert found["unique_plans"] == 20
    assert not tried("first") & (tried("second") - before)


def test_what_the_earlier_study_learns_meanwhile_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model, words = "squeezenet1_1@0.25/64", ("--seed", "1", "--sampler", "random")
    study(capsys, model, "first", "--budget", "8")
    shutil.copytree("first", "before")
    study(capsys, model, "parts", *words, "--budget", "6", "--warm-start", "first")
    study(capsys, model, "first", "--budget", "16")
    found = study(capsys, model, "parts", *words, "--budget", "6", "--warm-start", "first")
    assert found["unique_plans"] == 6
    records = read_log(Path("parts/trials.jsonl")).records
    assert [r.kind for r in records].count("verdict") == 1
    study(capsys, model, "parts", *words, "--budget", "12", "--warm-start", "first")
    study(capsys, model, "whole", *words, "--budget", "12", "--warm-start", "before")
    assert listed("parts") == listed("whole")


def test_plans_that_were_carried_over_stay_those(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--seed", "1", "--sampler", "random")
    study(capsys, "squeezenet1_1@0.25/64", "first", "--budget", "6")
    shutil.copytree("first", "before")
    study(capsys, "mobilenet_v1@0.25/128", "parts", *words, "--budget", "5", "--warm-start", "first")
    study(capsys, "squeezenet1_1@0.25/64", "first", "--budget", "25")
    study(capsys, "mobilenet_v1@0.25/128", "parts", *words, "--budget", "12", "--warm-start", "first")
    study(capsys, "mobilenet_v1@0.25/128", "whole", *words, "--budget", "12", "--warm-start", "before")
    assert listed("parts") == listed("whole")


def test_plans_that_this_study_does_not_allow_are_not_taken_over(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "squeezenet1_1@0.25/64", "--evaluator", "cost-model", "--platform", "snapdragon855", "-q"]
    both = ["--objective", "latency", "--objective", "memory"]
    answered(capsys, [*words, *both, "--allow", "splits", "--budget", "6", "--out", "before"])
    later = ["--allow", "branches", "--warm-start", "before", "--budget", "9", "--out", "now"]
    found = answered(capsys, [*words, *later])
    records = read_log(Path("now") / "trials.jsonl").records
    plans = [Plan.from_json(r.data["plan"]) for r in records if r.kind in ("trial", "baseline")]
    assert not any(plan.is_split for plan in plans)
    assert not Plan.from_json(found["best"]["plan"]).is_split
