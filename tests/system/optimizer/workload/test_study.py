"""Studies of several models on the cost model: what they find, how they resume, and errors in options."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from evaluators.cost_model.session import CostModelEvaluator
from evaluators.objectives import OBJECTIVES
from evaluators.workload.predicted import PredictedSession
from optimizer.cli import main
from optimizer.study.config import parse_config
from optimizer.study.several_models import SeveralModels
from optimizer.workload.baselines import mapped
from optimizer.workload.search import WorkloadProposer
from tests.support.commands import printed, studied
from tests.support.sentences import says

ON = ["--evaluator", "cost-model", "--platform", "snapdragon855", "-q"]

pytestmark = pytest.mark.usefixtures("elsewhere", "few_steps")

run, study = partial(printed, ON), partial(studied, ON)


def test_the_best_plan_is_no_worse_than_any_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    found = study(capsys, "--model", "squeezenet1_1x2,mobilenet_v1@0.5", "--budget", "30", "--max-stages", "2")
    outcomes = found["workload"]["outcomes"]
    assert found["workload"]["instances"] == ["squeezenet1_1 1", "squeezenet1_1 2", "mobilenet_v1@0.5"]
    assert set(outcomes) == {"best", *found["baselines"]}
    assert any(name.startswith("one process per model") for name in outcomes)
    assert all(entry["mean_ms"] >= outcomes["best"]["mean_ms"] - 1e-9 for entry in outcomes.values())
    assert found["objective"] == "mean"
    assert found["best"]["latency_ms"]["median"] == pytest.approx(outcomes["best"]["mean_ms"])
    assert outcomes["best"]["predicted"]["mean_ms"] == pytest.approx(outcomes["best"]["mean_ms"])
    assert (Path(found["run_dir"]) / "best" / "workload.json").is_file()
    assert found["best"]["plan"]["dispatch"] in {"fifo", "priority"}


def test_what_the_model_may_be_wrong_about_is_in_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    found = study(capsys, "--model", "squeezenet1_1x2", "--budget", "6", "--max-stages", "1")["speedup"]
    low, high = found["ci95"]
    assert found["predicted"]
    assert low < found["ratio"] * 0.99 < found["ratio"] * 1.01 < high


def test_nothing_is_learned_from_trials_that_only_repeat_predictions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def learned(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("optimizer.study.several_models.workload_critic", learned)
    assert study(capsys, "--model", "squeezenet1_1x2", "--budget", "4", "--max-stages", "2")["best"]["plan"]


def test_auto_finds_the_best_of_all_plans() -> None:
    values = {"model": "squeezenet1_1,mobilenet_v1@0.5", "budget": "1", "evaluator": "cost-model", "max_stages": "1"}
    evaluator = CostModelEvaluator()
    problem = SeveralModels.read(parse_config({**values, "platform": "snapdragon855"}), evaluator)
    space = problem.space
    arguments = problem.workload, problem.joined, problem.platform, problem.objective
    with evaluator.host(*arguments) as session:

        def value_s(index: int) -> float:
            return session.simulator.run(space.plan_at(index)).value_s("mean")

        def predict(plan: Any) -> float:
            return session.simulator.run(plan).value_s("mean")

        least = min(map(value_s, range(space.cardinality())))
        best = WorkloadProposer(space, predict, [space.plan_at(0)], 0).ranking(1)[0]
        assert predict(best) == pytest.approx(least)


@pytest.mark.parametrize("models", ["squeezenet1_1,mobilenet_v1@0.5", "squeezenet1_1x8,mobilenet_v1@0.5"])
def test_each_whole_model_on_its_best_processor_is_a_baseline(models: str) -> None:
    values = {"model": models, "budget": "1", "evaluator": "cost-model", "platform": "snapdragon855"}
    problem = SeveralModels.read(parse_config(values), CostModelEvaluator())
    last = len(problem.joined.components) - 1

    def predict(plan: Any) -> float:
        """Let the last model be faster on the CPU, the others on the GPU, if not more than four of them share it."""
        on = {problem.joined.component_of[s.operators[0]]: s.processor for s in plan.stages}
        wanted = sum(on[k] != ("cpu" if k == last else "gpu") for k in on)
        return float(wanted + 3 * max(0, sum(name == "gpu" for name in on.values()) - 4))

    found = mapped(problem.space, predict)
    assert len(found.plan.stages) == last + 1
    on = [s.processor for s in sorted(found.plan.stages, key=lambda s: s.operators)]
    assert on[-1] == "cpu"
    assert on.count("gpu") == min(4, last)
    assert predict(found.plan) == max(0, last - 4)


def test_a_workload_is_a_file_and_tells_what_would_be_searched(capsys: pytest.CaptureFixture[str]) -> None:
    Path("robot.yaml").write_text("models:\n  - {model: squeezenet1_1, count: 2, arrival: closed}\n")
    words = ("--workload", "robot.yaml", "--objective", "makespan", "--dry-run")
    document = json.loads(run(capsys, *words, "--json"))
    assert document["models"] == ["squeezenet1_1 1", "squeezenet1_1 2"]
    assert document["objective"] == "makespan"
    assert "squeezenet1_1 1" in run(capsys, *words)
    table = run(capsys, "--workload", "robot.yaml", "--allow", "cuts", "--budget", "3")
    assert "one process per model" in table
    says(table)


BOTH = ("--objective", "latency", "--objective", "memory")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--model", "squeezenet1_1x0"], 2),
        (["--model", "squeezenet1_1", "--model", "squeezenet1_1"], 2),
        (["--model", "squeezenet1_1x2", "--objective", "energy"], 2),
        (["--model", "squeezenet1_1x2", "--deadline", "5"], 2),
        (["--model", "squeezenet1_1x2", "--warm-start", "x"], 2),
        (["--model", "squeezenet1_1x2", "--rate", "2"], 2),
        (["--model", "squeezenet1_1", "--rate", "2"], 2),
        (["--model", "squeezenet1_1", "--rate", "1e-300"], 2),
        (["--model", "squeezenet1_1x2", "--sampler", "reinforce", *BOTH], 2),
        (["--model", "squeezenet1_1x2", "--max-stages", "0"], 2),
        (["--workload", "missing.yaml"], 2),
        (["--workload", "small.yaml"], 3),
        (["--workload", "late.yaml"], 3),
        (["--workload", "busy.yaml", "--allow", "cuts"], 3),
    ],
)
def test_what_cannot_be_is_one_line_with_its_exit_code(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int
) -> None:
    one = "  - {model: squeezenet1_1"
    Path("small.yaml").write_text(f"memory_limit_mb: 1\nmodels:\n{one}}}\n")
    Path("late.yaml").write_text(f"models:\n{one}, deadline_ms: 0.5}}\n")
    periodic = "arrival: {kind: periodic, period_ms: 5, requests: 3}, deadline_ms: 1000"
    Path("busy.yaml").write_text(f"models:\n{one}, count: 8, {periodic}}}\n")
    output = run(capsys, *words, "--budget", "3", code=code)
    assert output.startswith("optimize: ")
    assert output.count("\n") == 1
    says(output)


def test_missing_powers_are_refused_before_anything_is_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PredictedSession, "price", lambda *_: pytest.fail("priced"))
    words = ("--model", "squeezenet1_1x2", "--processors", "cpu,gpu", "--objective", "makespan,energy")
    says(run(capsys, *words, "--power", "cpu=2", "--out", "refused", code=2))
    assert not Path("refused").exists()


def test_another_rate_is_another_study(capsys: pytest.CaptureFixture[str]) -> None:
    Path("pair.yaml").write_text(
        "models: [{model: squeezenet1_1, arrival: {kind: periodic, period_ms: 50, requests: 3}}]\n"
    )
    words = ("--workload", "pair.yaml", "--allow", "cuts", "--budget", "2", "--study", "mine")
    run(capsys, *words, "--rate", "2")
    says(run(capsys, *words, code=2))
    run(capsys, *words, "--rate", "2")


def test_the_report_tells_model_by_model(capsys: pytest.CaptureFixture[str]) -> None:
    study(capsys, "--model", "squeezenet1_1x2", "--budget", "4", "--out", "told")
    assert main(["report", "told"]) == 0
    capsys.readouterr()
    page = Path("told/report.html").read_text()
    says(page)
    assert "squeezenet1_1 2" in page
    assert "timeline" in page
    events = json.loads(Path("told/viewers/trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} <= {"cpu", "gpu"}


def test_states_of_the_platform_are_allowed_for(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for words in ((), ("--state", "cool:", "--state", "hot:cpu=2,gpu=2")):
        output = study(
            capsys,
            "--model",
            "squeezenet1_1x2",
            "--budget",
            "4",
            "--max-stages",
            "1",
            "--objective",
            "makespan",
            *words,
            "--out",
            f"{len(words)}",
        )
        found[words] = output["best"]["latency_ms"]["median"]
    usual, worst = found.values()
    assert usual < worst


@pytest.mark.parametrize("name", ["latency-p99", "energy", "memory", "occupancy", "throughput"])
def test_several_models_have_the_objectives_of_one(capsys: pytest.CaptureFixture[str], name: str) -> None:
    powers = ["--power", "cpu=2", "--power", "gpu=1"] if name == "energy" else []
    words = ["--model", "squeezenet1_1@0.25/64,googlenet@0.25/64", "--allow", "cuts,branches", "--budget", "4"]
    found = study(capsys, *words, "--objective", name, *powers)
    key = OBJECTIVES[name].key
    best = found["best"][key]["median"]
    others = [each[key]["median"] for each in found["baselines"].values() if each[key]]
    assert 0.0 < best <= min(others) * (1 + 1e-9)
    assert found["space"]["freedoms"] == ["cuts", "branches"]


def test_several_models_have_a_front(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--model",
        "squeezenet1_1@0.25/64*2",
        "--budget",
        "4",
        "--objective",
        "makespan",
        "--objective",
        "occupancy",
    ]
    found = study(capsys, *words, "--out", "front")
    assert len(found["front"]["objectives"]) == 2
    assert main(["report", "front"]) == 0
    again = study(capsys, *words, "--out", "front")
    assert again["front"] == found["front"]
