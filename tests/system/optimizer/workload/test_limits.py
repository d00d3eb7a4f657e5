"""What a workload demands at least: times that no plan goes below, and memory, which few choices of ranks may keep."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.cost_model.session import CostModelEvaluator
from evaluators.workload.lowered import Lowerings
from evaluators.workload.predicted import WorkloadSimulator
from evaluators.workload.simulate import JobCost
from optimizer.cli import main
from optimizer.study.config import parse_config
from optimizer.study.history import Trial
from optimizer.study.log import read_log
from optimizer.study.several_models import SeveralModels
from optimizer.workload.limits import Memory, bound_of, check, least
from optimizer.workload.ranks import find_variants, grids_of
from search_spaces.core.decoded_plan import RankSet
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import merge
from search_spaces.core.plan import LayerRanks
from search_spaces.core.workload import Arrival, Client, Workload
from search_spaces.models import load
from search_spaces.rewrites.lower import Lowered
from search_spaces.rewrites.tucker_ranks import RankChoices
from search_spaces.spaces.chain import chain_plan
from tests.search_spaces.core.test_workload import two_cores
from tests.support.commands import printed, studied
from tests.support.narrowing import there
from tests.support.sentences import says
from tests.support.strategies import chain_graph

ON = ["--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,3med,gpu", "--max-stages", "2", "-q"]
VGG = "vgg11@0.5/32+spectrum"

pytestmark = pytest.mark.usefixtures("few_steps")

run, study = partial(printed, ON), partial(studied, ON)

Row = Sequence[float]
ONCE = Arrival()


def simulator_of(
    both: Row, core: Row, fixed: Row, deadline_s: float | None = None, arrival: Arrival = ONCE
) -> WorkloadSimulator:
    """Return what prices a chain: milliseconds of each operator on all cores and on one, and of a job for itself."""
    workload = Workload("w", (Client("m", "m", deadline_s=deadline_s, arrival=arrival),))

    def price(model: Graph, lowered: Lowered, processor: int, operators: tuple[int, ...]) -> JobCost:
        kind = min(processor, 1)
        return JobCost((fixed[kind] + sum((both, core)[kind][o] for o in operators)) / 1e3)

    return WorkloadSimulator(Lowerings(workload, merge("w", [("m", chain_graph(len(both)))]), two_cores()), price)


def best_s(both: Row, core: Row, fixed: Row) -> float:
    """Return the least time of all plans, by trying every first job's end and processor, then that of what is left."""
    best = [0.0]
    for end in range(1, len(both) + 1):
        jobs = product(range(end), zip((both, core), fixed, strict=True))
        best.append(min(best[begin] + own + sum(each[begin:end]) for begin, (each, own) in jobs))
    return best[-1] / 1e3


costs_ms = st.sampled_from((0.5, 1.0, 3.0, math.inf))


@settings(max_examples=200)
@given(
    st.lists(st.tuples(costs_ms, costs_ms), min_size=1, max_size=6),
    st.tuples(st.sampled_from((0.0, 0.5, 4.0)), st.sampled_from((0.0, 0.5, 4.0))),
)
def test_no_plan_is_quicker_than_the_bound_and_one_reaches_it(
    each: list[tuple[float, float]], fixed: tuple[float, float]
) -> None:
    both, core = zip(*each, strict=True)
    simulator = simulator_of(both, core, fixed)
    assert least(simulator, simulator.joined.components[0].graph).latency_s == pytest.approx(best_s(both, core, fixed))


@pytest.mark.parametrize(
    ("arrival", "least_s"),
    [
        (Arrival("burst", 3), 0.002),
        (Arrival("closed", 3, offset_s=0.01), 0.006),
        (Arrival("periodic", 3, 0.05, 0.01), 0.1),
        (Arrival("poisson", 3, 0.05), 0.002),
    ],
    ids=lambda found: getattr(found, "kind", ""),
)
def test_no_run_ends_before_the_bound_of_the_makespan(arrival: Arrival, least_s: float) -> None:
    simulator = simulator_of([1.0, 1.0], [2.0, 2.0], [0.0, 0.0], arrival=arrival)
    graph = simulator.joined.components[0].graph
    bound = there(bound_of("makespan", simulator, {"m": least(simulator, graph)}, own=True)).space_s
    assert bound == pytest.approx(least_s)
    assert bound <= simulator.run(chain_plan(simulator.joined.graph, (), ["cpu"])).makespan_s * (1 + 1e-9)


def test_what_a_job_costs_for_itself_is_not_taken_for_each_operator() -> None:
    """One processor is quick and refuses an operator; jobs of one operator take 24 ms in all, the quickest plan 14."""
    both, core = [0.13] * 50 + [math.inf] + [0.13] * 49, [1.0] * 100
    quickest_s = best_s(both, core, (0.1, 0.1))
    assert quickest_s < 0.0145
    simulator = simulator_of(both, core, (0.1, 0.1), deadline_s=0.0145)
    assert check(simulator, Memory(simulator.workload, simulator.joined))["m"].latency_s == pytest.approx(quickest_s)


@pytest.fixture(scope="module")
def decomposable(cache_folder: Path) -> tuple[Graph, list[RankSet]]:
    """A model and three ways to decompose it: two of all layers, and one of a single layer."""
    graph = load("vgg11@0.25/32+spectrum")
    options = RankChoices(graph).options
    every = [tuple(LayerRanks(o, *found[level]) for o, found in sorted(options.items())) for level in (0, -1)]
    return graph, [*every, every[0][-1:]]


@settings(max_examples=40)
@given(st.data())
def test_no_choice_of_ranks_takes_less_memory_than_the_bound(
    decomposable: tuple[Graph, list[RankSet]], data: st.DataObject
) -> None:
    graph, ways = decomposable
    clients = tuple(
        Client(name, "m", data.draw(st.integers(1, 2)), own_weights=data.draw(st.booleans())) for name in "abc"
    )
    workload = Workload("w", clients)
    joined = merge("w", [(i.name, graph) for i in workload.instances])
    sets = [data.draw(st.lists(st.sampled_from(ways), unique=True)) for _ in clients]
    memory, instances = Memory(workload, joined), [i.client for i in workload.instances]

    def nbytes(chosen: Sequence[RankSet]) -> int:
        return memory.nbytes([chosen[c] for c in instances])

    fewest = min(map(nbytes, product(*([(), *each] for each in sets))))
    assert memory.bound_nbytes(sets) <= fewest
    found = memory.sparing(sets)
    assert nbytes([((), *each)[found[c]] for c, each in enumerate(sets)]) == fewest
    assert memory.bound_nbytes() == memory.nbytes()


def test_what_a_decomposed_model_takes_is_worked_out_once(
    decomposable: tuple[Graph, list[RankSet]], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, ways = decomposable
    workload = Workload("w", (Client("m", "m", 2),))
    memory = Memory(workload, merge("w", [(i.name, graph) for i in workload.instances]))
    first = memory.nbytes([ways[0], ways[0]])
    monkeypatch.delattr("optimizer.workload.limits.outline")
    assert memory.nbytes([ways[0], ways[0]]) == first


def two_clients(errors: Sequence[float], limit_nbytes: float | None = None) -> str:
    """Write a workload of two clients of one model that share its weights, and return the file's name."""
    limit = [] if limit_nbytes is None else [f"memory_limit_mb: {limit_nbytes / 1e6}"]
    models = [f"  - {{model: '{VGG}', name: n{i}, tucker: {{max_error: {e}}}}}" for i, e in enumerate(errors)]
    Path("w.yaml").write_text("\n".join([*limit, "models:", *models]) + "\n")
    return "w.yaml"


def memory_of(errors: Sequence[float]) -> tuple[Memory, Sequence[Sequence[RankSet]]]:
    """Return what tells the memory of :func:`two_clients`, and the ranks that each may get."""
    values = {"model": two_clients(errors), "budget": "1", "evaluator": "cost-model", "platform": "pixel4"}
    evaluator = CostModelEvaluator()
    problem = SeveralModels.read(parse_config({**values, "processors": "1large,3med,gpu"}), evaluator)
    with evaluator.host(problem.workload, problem.joined, problem.platform, problem.objective) as session:
        grids, processors = grids_of(problem.workload, problem.choices), problem.space.platform
        arguments = session, problem.workload, processors, problem.choices, grids, lambda _: None
        return Memory(problem.workload, problem.joined), find_variants(*arguments).sets


def sparing_nbytes(memory: Memory, sets: Sequence[Sequence[RankSet]]) -> int:
    found = memory.sparing(sets)
    return memory.nbytes([((), *each)[found[c]] for c, each in enumerate(sets)])


@pytest.mark.usefixtures("elsewhere")
def test_a_limit_that_no_choice_keeps_is_reported_before_anything_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """Each model for itself would keep it with ranks that the other must not have."""
    memory, sets = memory_of((0.4, 0.15))
    bound, fewest = memory.bound_nbytes(sets), sparing_nbytes(memory, sets)
    assert bound < fewest
    words = ("--workload", two_clients((0.4, 0.15), (bound + fewest) / 2), "--budget", "8")
    says(run(capsys, *words, code=3))


@pytest.mark.parametrize(
    ("client", "code"),
    [
        ("count: 6, deadline_ms: 20", 3),
        ("count: 2, deadline_ms: 20, arrival: {kind: periodic, period_ms: 40, requests: 5}", 3),
        ("count: 6, deadline_ms: 200", 0),
        ("count: 6, deadline_ms: 20, arrival: {kind: poisson, rate_per_s: 2, requests: 3}", 0),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_requests_that_are_due_before_all_processors_could_have_answered(
    tmp_path: Path, client: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(f"models:\n  - {{model: squeezenet1_1, {client}}}\n")
    words = ["--workload", str(path), "--evaluator", "cost-model", "--platform", "xavier", "--budget", "3", "-q"]
    assert main([*words, "--out", str(tmp_path / "run")]) == code
    if code:
        says(capsys.readouterr().err)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("objective", ["mean", "worst", "makespan"])
def test_no_plan_of_several_models_is_below_the_bound(capsys: pytest.CaptureFixture[str], objective: str) -> None:
    words = ["--model", "squeezenet1_1@0.25/64,mobilenet_v1@0.25/128", "--evaluator", "cost-model", "--budget", "20"]
    words += ["--platform", "pixel4", "--processors", "1large,1small,gpu", "--objective", objective, "-q", "--json"]
    words += ["--allow", "cuts"]
    assert main([*words, "--out", "run"]) == 0
    found = json.loads(capsys.readouterr().out)
    trials = [Trial.from_json(r.data) for r in read_log(Path("run", "trials.jsonl")).records if r.kind == "trial"]
    assert min(t.median_s for t in trials) * 1e3 >= found["bounds"]["space_ms"] - 1e-6  # clocks count nanoseconds
    assert found["gap"] < 0.5
