"""``--objective``: each is searched, proven where the evaluator computes, told in its unit, and kept by its study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evaluators.objectives import LATENCY, OBJECTIVES, Objective, PlacedModel, PricedSession, find_objective, pricing
from evaluators.testing import Noise, SyntheticEvaluator
from optimizer.cli import main
from optimizer.exact.front import undominated
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan
from tests.support.commands import answered
from tests.support.sentences import fails, says

MODEL = ["--model", "squeezenet1_1", "--evaluator", "cost-model", "--platform", "pixel4", "--max-stages", "3"]
STUDY = [*MODEL, "--processors", "1large,1small,gpu", "--budget", "30", "-q"]
POWERS = ["--power", "1large=2", "--power", "1small=0.5", "--power", "gpu=12"]

pytestmark = pytest.mark.usefixtures("elsewhere")


def study(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return answered(capsys, [*STUDY, *words])


@pytest.mark.parametrize("name", ["throughput", "energy", "memory", "occupancy"])
def test_one_objective_is_searched_and_bounded(capsys: pytest.CaptureFixture[str], name: str) -> None:
    objective = OBJECTIVES[name]
    found = study(capsys, "--objective", name, *(POWERS if name == "energy" else ()))
    assert found["objective"] == name
    best = found["best"][objective.key]["median"]
    assert best > 0
    assert all(
        best <= each[objective.key]["median"] * (1 + 1e-9)
        for each in found["baselines"].values()
        if each[objective.key]
    )
    bound = found[f"model_bound_{objective.shown_unit.lower()}"]
    assert bound <= best * (1 + 1e-9)
    if name != "memory":
        assert bound == pytest.approx(best, rel=0.02)


def test_a_new_objective_is_one_entry(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page on the code tells: a weighted sum of the processors' times is searched, bounded and explained."""

    def prices(platform: Platform, _: Mapping[str, float]) -> dict[str, float]:
        return {p.name: 3.0 if p.kind == "gpu" else 1.0 for p in platform.processors}

    rent = Objective("rent", "rent of an inference", "$", "m$", "sum", "rent", amount="rent", per_second=prices)
    monkeypatch.setitem(OBJECTIVES, "rent", rent)
    found = study(capsys, "--objective", "rent", "--out", "run")
    best = found["best"]["rent"]["median"]
    assert found["model_bound_m$"] == pytest.approx(best, rel=0.02)
    assert all(best <= each["rent"]["median"] * (1 + 1e-9) for each in found["baselines"].values() if each["rent"])
    assert study(capsys, "--objective", "rent", "--objective", "latency", "--out", "front")
    assert main(["explain", "run"]) == 0
    assert "m$" in capsys.readouterr().out


def largest_stage_gb(models: Sequence[PlacedModel]) -> float:
    def weights(graph: Graph, operators: tuple[int, ...]) -> int:
        return sum(graph.tensors[t].nbytes for t in graph.boundary(operators).constants)

    return max(weights(m.graph, stage.operators) for m in models for stage in m.plan.stages) / 1e9


def test_a_new_objective_that_follows_from_the_plan_is_one_entry(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Objective(
        "largest-stage",
        "weights of the largest stage",
        "GB",
        "MB",
        "plan",
        "largest_stage_mb",
        amount="weights in a stage",
        of_plan=largest_stage_gb,
    )
    monkeypatch.setitem(OBJECTIVES, new.name, new)
    whole = sum(t.nbytes for t in load("squeezenet1_1").tensors if t.constant) / 1e6
    found = study(capsys, "--objective", new.name, "--max-stages", "3", "--out", "run")
    assert found["best"]["largest_stage_mb"]["median"] < 0.7 * whole
    assert found["baselines"]["whole on gpu"]["largest_stage_mb"]["median"] == pytest.approx(whole)
    assert main(["explain", "run"]) == main(["report", "run"]) == 0
    told = capsys.readouterr().out
    assert "as fast" not in told
    assert "Lower bound" not in told
    front = study(capsys, "--objective", "latency", "--objective", new.name, "--max-stages", "3", "--out", "front")
    assert len(front["front"]["plans"]) > 1
    two = ["--model", "mobilenet_v1@0.25/128", "--allow", "cuts", "--objective", new.name]
    assert study(capsys, *two)["best"]["largest_stage_mb"]["median"] < whole


def longest_stage_s(_: float, stage_s: NDArray[np.float64], __: NDArray[np.float64]) -> float:
    return float(stage_s.max())


def latency_times_energy(run_s: float, stage_s: NDArray[np.float64], watts: NDArray[np.float64]) -> float:
    return run_s * float(stage_s @ watts)


def test_a_new_objective_that_follows_from_runs_is_one_entry(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is searched by predictions, and has no bound: neither the latency's nor any other."""
    longest = Objective("longest", "longest stage", "s", "ms", "run", "longest_ms", of_run=longest_stage_s)
    energy = OBJECTIVES["energy"]
    edp = Objective(
        "edp",
        "latency times energy",
        "Js",
        "mJs",
        "run",
        "edp_mjs",
        amount="latency times energy",
        per_second=energy.per_second,
        of_powers=True,
        of_run=latency_times_energy,
    )
    monkeypatch.setitem(OBJECTIVES, "longest", longest)
    monkeypatch.setitem(OBJECTIVES, "edp", edp)
    found = study(capsys, "--objective", "longest", "--out", "run")
    best = found["best"]["longest_ms"]["median"]
    named = [b["longest_ms"]["median"] for b in found["baselines"].values() if len(b["plan"]["stages"]) <= 3]
    assert found["model_bound_ms"] == 0.0
    assert best == pytest.approx(max(found["best"]["stage_ms"]))
    assert best < min(named)
    assert main(["explain", "run"]) == main(["report", "run"]) == 0
    assert "bound" not in capsys.readouterr().out.lower()
    assert main([*STUDY, "--objective", "longest"]) == 0
    assert "bound" not in capsys.readouterr().out
    one = study(capsys, "--objective", "edp", *POWERS, "--out", "edp")["best"]
    s_of_stages = np.array(one["stage_ms"]) / 1e3
    watts = np.array([{"1large": 2.0, "1small": 0.5, "gpu": 12.0}[s["processor"]] for s in one["plan"]["stages"]])
    assert one["edp_mjs"]["median"] >= 1e3 * s_of_stages.max() * float(s_of_stages @ watts) * (1 - 1e-9)
    two = ["--model", "mobilenet_v1@0.25/128,squeezenet1_1@0.25/64", "--allow", "cuts", "--objective", "edp", *POWERS]
    assert study(capsys, *two)["best"]["edp_mjs"]["median"] > 0


def test_a_bound_above_a_plan_is_left_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(OBJECTIVES["memory"], name="space", least=lambda _: 1.0)
    monkeypatch.setitem(OBJECTIVES, "space", wrong)
    assert main([*STUDY, "--objective", "space"]) == 0
    told = capsys.readouterr()
    says(told.err)
    assert "bound" not in told.out


def test_a_new_objective_of_watts_gets_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(_: Platform, powers: Mapping[str, float]) -> dict[str, float]:
        return {name: 2.0 * watts for name, watts in powers.items()}

    new = Objective("heat", "heat", "J", "mJ", "sum", "heat_mj", amount="heat", per_second=twice, of_powers=True)
    monkeypatch.setitem(OBJECTIVES, "heat", new)
    heat = study(capsys, "--objective", "heat", *POWERS, "--out", "heat")["best"]["heat_mj"]["median"]
    energy = study(capsys, "--objective", "energy", *POWERS, "--out", "energy")["best"]["energy_mj"]["median"]
    assert heat == pytest.approx(2.0 * energy)
    assert main(["explain", "heat"]) == 0
    assert main([*STUDY, "--objective", "heat"]) == 2
    says(capsys.readouterr().err)


def test_a_pipeline_beats_one_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    one = study(capsys, "--out", "one")["best"]["latency_ms"]["median"]
    stream = study(capsys, "--objective", "throughput", "--out", "stream")["best"]["period_ms"]["median"]
    assert stream < one


def test_the_table_is_in_the_objectives_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STUDY, "--objective", "energy", *POWERS]) == 0
    says(capsys.readouterr().out)


def test_without_powers_that_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STUDY, "--objective", "energy"]) == 2
    says(capsys.readouterr().err)


def test_an_unknown_objective_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STUDY, "--objective", "enrgy"]) == 2
    says(capsys.readouterr().err)
    with pytest.raises(UsageError):
        find_objective("speed")


def test_a_study_keeps_its_objective(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--objective", "occupancy", "--out", "run"]
    first = study(capsys, *words)
    again = study(capsys, *words)
    assert again["best"]["plan"] == first["best"]["plan"]
    assert again["unique_plans"] == first["unique_plans"]
    assert main([*STUDY, "--out", "run"]) == 2
    assert "objective" in capsys.readouterr().err


@pytest.mark.parametrize("sampler", ["auto", "nsga2", "nsga3", "tpe"])
def test_several_objectives_give_a_front(capsys: pytest.CaptureFixture[str], sampler: str) -> None:
    words = ["--objective", "latency", "--objective", "energy", *POWERS, "--sampler", sampler]
    found = study(capsys, *words)
    plans = found["front"]["plans"]
    table = [list(each["values"].values()) for each in plans]
    assert len(undominated(np.array(table))) == len(table)
    assert sum(each["knee"] for each in plans) == 1
    knee = next(each for each in plans if each["knee"])
    assert found["best"]["plan"] == knee["plan"]
    assert found["best"]["figures"]["energy"] * 1e3 == pytest.approx(knee["values"]["energy_mj"])
    if sampler == "auto":
        assert len(plans) >= 2
        run = Path(found["run_dir"])
        assert main(["report", str(run)]) == 0
        says((run / "report.html").read_text())
        assert main([*STUDY, *words, "--out", str(run)]) == 0
        says(capsys.readouterr().out)


def test_the_order_of_objectives_does_not_matter(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*POWERS, "--max-stages", "2", "--budget", "30"]
    names = ["--objective", "latency", "--objective", "energy"]
    one = study(capsys, *words, *names, "--out", "one")
    other = study(capsys, *words, *names[2:], *names[:2], "--out", "other")
    assert one["front"] == other["front"]
    assert one["best"]["plan"] == other["best"]["plan"]


def test_prices_are_of_the_plan_that_runs(squeezenet: Graph) -> None:
    evaluator = SyntheticEvaluator(noise=Noise(run=0.0, cold=0.0))
    platform = evaluator.platform()
    stated = Platform("told", tuple(replace(p, options={**p.options, "power_w": 2.0}) for p in platform.processors))
    plan = chain_plan(squeezenet, (20,), ("cpu", "cpu0"))
    with evaluator.prepare(stated) as session:
        took = session.load(squeezenet, plan).run(1).stage_s[0]
        for name, wanted in (("energy", 2.0 * took.sum()), ("occupancy", 2.0 * took[0] + took[1])):
            priced = PricedSession(session, [pricing(OBJECTIVES[name], stated, session)])
            batch = priced.load(squeezenet, plan).run(2)
            assert batch.latency_s == pytest.approx([wanted, wanted])
            assert batch.stage_s.sum(axis=1) == pytest.approx(batch.latency_s)
        both = PricedSession(
            session, [pricing(OBJECTIVES[n], stated, session) for n in ("latency", "energy", "memory")]
        )
        figures = both.load(squeezenet, plan).figures()
        assert set(figures) == {"energy", "memory"}
        tail = PricedSession(session, [pricing(OBJECTIVES["latency-p99"], stated, session)])
        assert tail.load(squeezenet, plan).run(1).latency_s[0] == pytest.approx(took.sum(), rel=1e-6)
        with fails(UnavailableError):
            pricing(OBJECTIVES["throughput"], stated, session)
    assert LATENCY.shown_unit == "ms"


def test_the_front_of_a_cost_model_is_the_front_of_all_plans(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--objective", "latency", "--objective", "energy", *POWERS, "--max-stages", "2"]
    found = study(capsys, *words, "--budget", "60", "--out", "auto")
    front = [tuple(each["values"].values()) for each in found["front"]["plans"]]
    everything = study(capsys, *words, "--sampler", "brute-force", "--budget", "1000", "--out", "all")
    every = [tuple(each["values"].values()) for each in everything["front"]["plans"]]
    assert everything["space"]["exhausted"]
    # Of plans that the model cannot tell apart one stands for the others, so the two fronts need not be the same.
    reach = np.array(every).max(axis=0) - np.array(every).min(axis=0)
    for one, other in ((front, every), (every, front)):
        for values in one:
            assert min(np.max(np.abs(np.subtract(values, v)) / reach) for v in other) <= 0.2
