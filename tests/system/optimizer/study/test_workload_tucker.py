"""Several models that may be decomposed: the space's ranks, what is chosen for them, studies from end to end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.cost_model.session import CostModelEvaluator
from evaluators.litert.packed import packed_weights
from evaluators.litert.runner import WorkloadRunner
from evaluators.litert.session import LitertEvaluator
from optimizer.cli import main
from optimizer.study.config import parse_config
from optimizer.study.log import read_log
from optimizer.study.several_models import SeveralModels
from optimizer.workload.limits import Memory
from optimizer.workload.ranks import PLAIN, Variants, find_variants, grids_of
from search_spaces.core.decoded_plan import component_plan, decoded_plan, jobs_of, ranks_by_component
from search_spaces.core.errors import PlanError, RunFolderError
from search_spaces.core.plan import LayerRanks
from search_spaces.models.cache import ENVIRONMENT
from search_spaces.models.litert import read_model
from search_spaces.spaces.workload_space import WorkloadSpace
from tests.search_spaces.core.test_workload import space_of
from tests.support.commands import printed, studied, tried
from tests.support.sentences import fails, says

VGG, SQUEEZENET = "vgg11@0.5/32+spectrum", "squeezenet1_1@0.5/64+spectrum"
MODELS = f"{VGG}×2,{SQUEEZENET}"
ON = ["--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,3med,gpu", "--max-stages", "2", "-q"]
ALLOWED = ["--allow", "ranks", "--max-error", "0.2"]

pytestmark = pytest.mark.usefixtures("elsewhere", "few_steps")

run, study = partial(printed, ON), partial(studied, ON)


def ranked(space: WorkloadSpace, sets: list[list[tuple[LayerRanks, ...]]]) -> WorkloadSpace:
    """Return a space of chains in which clients have sets of ranks; whether operators are convolutions is not asked."""
    made = WorkloadSpace.__new__(WorkloadSpace)
    made.__dict__ |= space.__dict__
    made.ranks = type(space.ranks)(sets, [0, 0, 1])
    return made


SETS: list[list[tuple[LayerRanks, ...]]] = [
    [(LayerRanks(0, 8, 8),), (LayerRanks(0, 8, 8), LayerRanks(1, 8, 16))],
    [(LayerRanks(1, 16, 16),)],
]
SPACE = ranked(space_of((2, 2), (2, 1), jobs=1), SETS)


def test_ranks_are_numbered_with_the_plans_and_each_is_there_once() -> None:
    plain = space_of((2, 2), (2, 1), jobs=1)
    assert SPACE.cardinality() == plain.cardinality() * 3 * 2
    plans = [SPACE.plan_at(i) for i in range(SPACE.cardinality())]
    assert len({plan.digest for plan in plans}) == len(plans)
    for plan in plans:
        own = ranks_by_component(plan, SPACE.joined) or ((),) * 3
        assert own[0] == own[1]
        assert own[0] in ((), *SETS[0])
        assert own[2] in ((), *SETS[1])
    assert {p.digest for p in plans if not p.ranks} == {plain.plan_at(i).digest for i in range(plain.cardinality())}


@settings(max_examples=50)
@given(st.integers(0, SPACE.cardinality() - 1), st.integers(0, 2**31))
def test_ranks_survive_being_taken_apart_and_put_together(index: int, seed: int) -> None:
    plan = SPACE.plan_at(index)
    found = decoded_plan(plan, SPACE.joined)
    assert SPACE.plan(found) == plan
    rng = np.random.default_rng(seed)
    assert SPACE.plan(replace(found, ranks=SPACE.ranks.neighbour(found, rng))).ranks != plan.ranks
    numbers = SPACE.ranks.encode(found)
    assert SPACE.ranks.decode(numbers) == found.ranks or not plan.ranks
    for component, stages in jobs_of(plan, SPACE.joined).items():
        own = component_plan(plan, SPACE.joined, component, stages)
        assert own.graph_digest == SPACE.joined.components[component].graph.digest
        assert own.ranks == (found.ranks[component] if found.ranks else ())


def test_ranks_that_are_none_of_the_space_are_reported() -> None:
    found = decoded_plan(SPACE.plan_at(0), SPACE.joined)
    with fails(PlanError):
        SPACE.ranks.which(replace(found, ranks=(SETS[0][0], (), ())))
    with fails(PlanError):
        SPACE.ranks.which(replace(found, ranks=((), (), SETS[0][0])))
    with fails(RunFolderError):
        Variants.from_json({"of": [[{"ranks": [[1]]}]]}, 1)


def problem_of(**values: str) -> tuple[SeveralModels, CostModelEvaluator]:
    evaluator = CostModelEvaluator()
    common = {"model": MODELS, "budget": "1", "evaluator": "cost-model", "platform": "pixel4", "allow": "cuts,ranks"}
    return SeveralModels.read(parse_config({**common, "max_error": "0.2", **values}), evaluator), evaluator


@pytest.fixture(scope="module")
def found() -> Iterator[tuple[SeveralModels, Variants, Any]]:
    problem, evaluator = problem_of(processors="1large,3med,gpu")
    with evaluator.host(problem.workload, problem.joined, problem.platform, problem.objective) as session:
        grids = grids_of(problem.workload, problem.choices)
        processors = problem.space.platform
        yield (
            problem,
            find_variants(session, problem.workload, processors, problem.choices, grids, lambda _: None),
            session.simulator,
        )


def test_variants_keep_their_error_and_each_triple_is_quicker_where_it_is_for(
    found: tuple[SeveralModels, Variants, Any],
) -> None:
    problem, variants, simulator = found
    processors = [p for p in problem.platform.processors if p.resources]
    assert [len({v.ranks for v in each}) for each in variants.of] == [len(each) for each in variants.of]
    assert all(variants.of)
    for c, each in enumerate(variants.of):
        choices = problem.choices[c]
        grids = grids_of(problem.workload, {c: choices})[choices.graph.digest]
        for variant in each:
            assert variant.error <= 0.2
            number = next((i for i, p in enumerate(processors) if p.like == variant.made_for), None)
            for layer in variant.ranks if number is not None else ():
                grid = next(g for g in grids if layer in g)
                triple = simulator.prices(choices.graph, grid)(number, (layer.operator,))
                assert triple < simulator.prices(choices.graph)(number, (layer.operator,))
    again = json.loads(json.dumps(variants.to_json()))
    assert Variants.from_json(again, len(variants.of)) == variants
    with fails(RunFolderError):
        Variants.from_json(again, len(variants.of) + 1)


def test_a_job_with_ranks_costs_what_its_decomposed_operators_do(found: tuple[SeveralModels, Variants, Any]) -> None:
    problem, variants, simulator = found
    space = WorkloadSpace(problem.workload, problem.joined, problem.space.platform, 2, variants.sets)
    plain = space.plan_at(0)
    strongest = next(variants.strongest())
    made = space.plan(replace(decoded_plan(plain, space.joined), ranks=space.ranks.chosen(strongest)))
    assert made.ranks
    assert simulator.run(made).makespan_s != simulator.run(plain).makespan_s
    memory = Memory(problem.workload, problem.joined)
    assert memory.of_plan(made) < memory.of_plan(plain) == memory.nbytes()
    errors = simulator.errors(made), simulator.errors(plain)
    assert errors[0].shape == errors[1].shape
    assert math.isfinite(float((errors[0] ** 2).sum()))


def test_ranks_are_searched_with_processors_and_the_result_tells_them(capsys: pytest.CaptureFixture[str]) -> None:
    result = study(capsys, "--model", MODELS, *ALLOWED, "--budget", "25", "--out", "run")
    tucker, outcomes = result["workload"]["tucker"], result["workload"]["outcomes"]
    assert set(tucker) == {VGG, SQUEEZENET}
    assert tucker[VGG]["ranks"]
    assert 0.0 < tucker[VGG]["error"] <= tucker[VGG]["max_error"] == 0.2
    assert 0.0 < tucker[VGG]["macs_saved"] < 1.0
    # Both copies have the ranks, and the plan has those that it should have.
    count = sum(len(entry["ranks"]) * (2 if name == VGG else 1) for name, entry in tucker.items())
    assert len(result["best"]["plan"]["ranks"]) == count
    assert PLAIN in outcomes
    assert any(name.endswith(", Tucker") for name in outcomes)
    assert outcomes["best"]["mean_ms"] < outcomes[PLAIN]["mean_ms"]
    graph = read_model(next(Path("run/best").glob("tucker_1_*.tflite")), "written")
    whole = SeveralModels.read(
        parse_config({"model": MODELS, "budget": "1", "evaluator": "cost-model", "platform": "pixel4"}),
        CostModelEvaluator(),
    )
    assert len(graph.operators) == len(whole.joined.components[0].graph.operators) + 2 * len(tucker[VGG]["ranks"])
    assert main(["report", "run"]) == 0
    capsys.readouterr()
    says(Path("run/report.html").read_text())
    assert main(["execute", "run", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["mean_ms"] == pytest.approx(outcomes["best"]["mean_ms"])
    assert set(again["instances_ms"]) == set(result["workload"]["instances"])
    assert main(["execute", "run/best/plan.json"]) == 0
    says(capsys.readouterr().out)
    assert main(["explain", "run"]) == 0
    says(capsys.readouterr().out)
    assert main(["export", "run"]) == 0
    assert "model_0/stage_0.tflite" in capsys.readouterr().out
    says(run(capsys, "--model", MODELS, *ALLOWED, "--budget", "25", "--out", "run"))
    Path("run/config.yaml").unlink()
    assert main(["execute", "run"]) == 2
    says(capsys.readouterr().err)


def test_a_study_with_ranks_that_goes_on_tries_what_an_uninterrupted_one_tries(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--model", MODELS, *ALLOWED)
    study(capsys, *words, "--budget", "4", "--out", "parts")
    study(capsys, *words, "--budget", "9", "--out", "parts")
    study(capsys, *words, "--budget", "9", "--out", "whole")

    assert tried("parts") == tried("whole")
    output = run(
        capsys, "--model", MODELS, "--allow", "ranks", "--max-error", "0.1", "--budget", "9", "--out", "parts", code=2
    )
    says(output)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_other_samplers_choose_ranks_too(capsys: pytest.CaptureFixture[str], sampler: str) -> None:
    result = study(capsys, "--model", MODELS, *ALLOWED, "--budget", "20", "--sampler", sampler, "--out", "run")
    trials = [r.data for r in read_log(Path("run/trials.jsonl")).records if r.kind == "trial"]
    assert any(t["origin"] == sampler and t["plan"].get("ranks") for t in trials)
    assert result["unique_plans"] == 20


def test_a_file_says_which_models_may_be_decomposed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"  - {{model: '{VGG}', name: a, tucker: {{max_error: 0.15}}}}", f"  - {{model: '{VGG}', name: b}}"]
    Path("w.yaml").write_text("models:\n" + "\n".join(lines) + "\n")
    output = study(capsys, "--workload", "w.yaml", "--budget", "12")["workload"]["tucker"]
    assert {name: entry["max_error"] for name, entry in output.items()} == {"a": 0.15}
    lines[1] = lines[1].replace("name: b", "name: b, tucker: false")
    Path("w.yaml").write_text("models:\n" + "\n".join(lines) + "\n")
    assert set(study(capsys, "--workload", "w.yaml", "--allow", "ranks", "--budget", "12")["workload"]["tucker"]) == {
        "a"
    }


def test_a_memory_limit_that_only_decomposed_models_keep(capsys: pytest.CaptureFixture[str]) -> None:
    models = f"models:\n  - {{model: '{VGG}', count: 2, own_weights: true}}\n  - {{model: '{SQUEEZENET}'}}\n"
    Path("w.yaml").write_text(models)
    problem, _ = problem_of(model="w.yaml")
    whole_mb = Memory(problem.workload, problem.joined).nbytes() / 1e6
    Path("w.yaml").write_text(f"memory_limit_mb: {0.95 * whole_mb}\n{models}")
    words = ("--workload", "w.yaml", "--budget", "12")
    says(run(capsys, *words, code=3))
    result = study(capsys, *words, "--allow", "ranks", "--max-error", "0.4")
    assert result["best"]["plan"]["ranks"]
    Path("w.yaml").write_text(f"memory_limit_mb: 0.1\n{models}")
    says(run(capsys, *words, "--allow", "ranks", code=3))


@pytest.mark.parametrize(
    "words",
    [
        ["--model", MODELS, "--max-error", "0.2"],
        ["--model", MODELS, "--allow", "ranks", "--max-error", "0"],
        ["--model", MODELS, "--allow", "ranks", "--max-error", "-1"],
        ["--model", "squeezenet1_1@0.5/64:int8×2", "--allow", "ranks"],
        ["--model", "mobilebert/8×2", "--allow", "ranks"],
        ["--workload", "no.yaml", "--allow", "ranks"],
        ["--workload", "wrong.yaml"],
        ["--workload", "below.yaml"],
        ["--workload", "key.yaml"],
        ["--model", MODELS, "--signature", "x"],
    ],
)
def test_what_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    one = f"models:\n  - {{model: '{VGG}', tucker: "
    Path("no.yaml").write_text(f"{one}false}}\n")
    Path("wrong.yaml").write_text(f"{one}often}}\n")
    Path("below.yaml").write_text(f"{one}{{max_error: -0.1}}}}\n")
    Path("key.yaml").write_text(f"{one}{{error: 0.1}}}}\n")
    output = run(capsys, *words, "--budget", "3", code=2)
    assert output.startswith("optimize: ")
    assert output.count("\n") == 1
    says(output)


def test_models_that_cannot_be_decomposed_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", f"{VGG},mobilebert/8", "--allow", "ranks", "--max-error", "0.2", "--budget", "6", "--json"]
    assert main([*words, *ON]) == 0
    out, err = capsys.readouterr()
    assert err
    assert json.loads(out)["workload"]["tucker"]["mobilebert/8"]["variants"] == 0


def test_an_error_that_nothing_keeps_is_reported_and_the_study_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "vgg11@0.25/32×2", "--allow", "ranks", "--max-error", "0.01", "--budget", "5", "--json"]
    assert main([*words, *ON]) == 0
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if "decomposed within" in line]
    says(line)
    result = json.loads(out)
    assert not result["best"]["plan"].get("ranks")
    assert result["workload"]["tucker"]["vgg11@0.25/32"]["variants"] == 0


@pytest.mark.litert
def test_decomposed_models_are_measured_and_their_files_compute_what_they_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(Path("cache").absolute()))
    model = "vgg11@0.25/32+spectrum"
    values = {"model": f"{model}×2", "budget": "1", "processors": "cpu0", "allow": "cuts,ranks", "max_error": "0.3"}
    evaluator = LitertEvaluator()
    problem = SeveralModels.read(parse_config(values), evaluator)
    grids = grids_of(problem.workload, problem.choices)
    processors = problem.space.platform
    with evaluator.host(problem.workload, problem.joined, problem.platform, problem.objective) as session:
        ((_, (_, ranks, *_)),) = grids.items()
        grids = {digest: [ranks] for digest in grids}
        prices = json.loads(json.dumps(session.price(None, lambda _: None, grids)))
        table = prices["triple_s"][problem.joined.components[0].graph.digest]
        assert set(table) == {processors.processors[0].like}
        assert all(took_s > 0.0 for each in table.values() for took_s in each.values())
        session.price(prices, lambda _: pytest.fail("measured again"), grids)
        arguments = problem.workload, processors, problem.choices, grids, lambda _: None
        for variant in find_variants(session, *arguments).of[0]:  # none where the machine was busy
            assert 0.0 < variant.error <= 0.3
        error = session.decomposed_error(problem.joined.components[0].graph, ranks)
        (packed,) = Path("cache/packed").glob("*.xnnpack")  # of the model as it is
        monkeypatch.setattr("evaluators.litert.packed._KEEP_NBYTES", 0)
        packed_weights("ab" * 32, lambda path: path.touch())
        assert packed.exists()
        space = WorkloadSpace(problem.workload, problem.joined, processors, 2, [[ranks]])
        plan = space.plan_at(space.cardinality() - 1)
        assert len(plan.stages) == 4
        assert len(plan.ranks) == 2 * len(ranks)
        assert math.isfinite(session.simulator.run(plan).makespan_s)
        with closing(session.load(space.joined.graph, plan)) as candidate:
            candidate.run(1)
            agreement = candidate.verify()
            assert agreement is not None
            assert agreement.max_rel_error == pytest.approx(error)
            assert agreement.tolerance == 0.3
        Path("files").mkdir()
        deployed = session.deploy(Path("files"), space.joined.graph, plan)
        assert deployed.max_rel_error == pytest.approx(error)
    with WorkloadRunner("files") as runner:
        assert runner.run().answered == 2
        assert len({o.tobytes() for name in runner.names for o in runner.outputs(name)}) == 1
