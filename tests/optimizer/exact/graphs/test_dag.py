"""Best plans of graphs with branches: exact equals brute force, and no plan goes below the bound."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.exact.bound import relax
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.graphs.dag import best_plan
from optimizer.exact.graphs.graph_costs import GraphCosts, makespan_s, simulate
from optimizer.exact.graphs.segment_model import solve_segment
from optimizer.exact.graphs.segment_plans import SegmentCosts, improved, list_schedule
from optimizer.exact.graphs.segment_search import Problem, search_segment
from optimizer.exact.graphs.segments import Segment, segments
from search_spaces.core.errors import InfeasibleError, PlanError, UsageError
from search_spaces.core.graph import Graph, Operator
from search_spaces.core.plan import Plan, Stage, canonical
from search_spaces.core.platform import Platform, Processor, tell_apart
from search_spaces.spaces.segments import gates
from tests.search_spaces.spaces.test_branches import network
from tests.support.sentences import fails
from tests.support.strategies import (
    chain_graph,
    followers,
    graphs,
    one_core,
    placements,
    platforms,
    shared_platforms,
    tensor,
)


@st.composite
def graph_costs(draw: st.DrawFn, graph: Graph, platform: Platform, *, refusals: bool = True) -> GraphCosts:
    """Costs with ties; alike processors cost alike, and every operator runs somewhere."""
    processors, count = len(platform.processors), len(graph.operators)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from((1, 3, 1000)))
    leader = [next(i for i, q in enumerate(platform.processors) if q.like == p.like) for p in platform.processors]
    operator_s = rng.integers(0, scale, (processors, count), endpoint=True)[leader] * 1e-3
    if refusals:
        refused = rng.random((processors, count))[leader] < draw(st.sampled_from((0.0, 0.3)))
        operator_s[refused & ~refused.all(axis=0)] = np.inf
    overhead_s = rng.integers(0, scale, processors, endpoint=True)[leader] * 1e-4
    tensors = len(graph.tensors)
    between = rng.integers(0, scale, (tensors, processors, processors), endpoint=True)[:, leader][:, :, leader] * 3e-4
    within = rng.integers(0, scale, (tensors, processors), endpoint=True)[:, leader] * 1e-4
    between[:, np.arange(processors), np.arange(processors)] = within
    return GraphCosts(platform, *(np.asarray(a, dtype=np.float64) for a in (operator_s, overhead_s, between)))


def _partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in _partitions(rest):
        yield [[first], *partition]
        for i, part in enumerate(partition):
            yield [*partition[:i], [first, *part], *partition[i + 1 :]]


def _every_plan(graph: Graph, platform: Platform) -> Iterator[Plan]:
    """Yield every way to form stages, in every order in which they can be dispatched, on all processors."""
    names = [p.name for p in platform.processors]
    for partition in _partitions(list(range(len(graph.operators)))):
        for order in permutations(partition):
            place = {o: i for i, part in enumerate(order) for o in part}
            if all(place[b] <= place[o] for o in place for b in graph.predecessors(o)):
                for processors in product(names, repeat=len(order)):
                    yield Plan(graph.digest, tuple(Stage(tuple(p), n) for p, n in zip(order, processors, strict=True)))


@settings(max_examples=40, deadline=None)
@given(graphs(max_operators=3), st.one_of(platforms(max_processors=2), shared_platforms()), st.data())
def test_the_best_plan_is_the_one_that_brute_force_finds(graph: Graph, platform: Platform, data: st.DataObject) -> None:
    platform = Platform(platform.name, tell_apart(platform.processors[:3]))
    costs = data.draw(graph_costs(graph, platform))
    best = min(makespan_s(graph, costs, plan) for plan in _every_plan(graph, platform))
    found = best_plan(graph, costs)
    assert found.value == makespan_s(graph, costs, found.best) == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert found.proven
    assert found.bound <= best * (1 + 1e-9)
    assert relax(graph, costs).latency_s <= best * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(graphs(max_operators=9), platforms(max_processors=3), st.data())
def test_no_plan_beats_the_best_or_goes_below_the_bound(graph: Graph, platform: Platform, data: st.DataObject) -> None:
    costs = data.draw(graph_costs(graph, platform, refusals=False))
    found = best_plan(graph, costs, 5.0)
    plan = data.draw(placements(graph, platform))
    assert found.bound <= found.value <= makespan_s(graph, costs, plan) * (1 + 1e-9) + 1e-12
    found.best.validate(graph, platform)
    usual = canonical(found.best, graph, platform)
    assert makespan_s(graph, costs, usual) >= found.value * (1 - 1e-12)


@settings(max_examples=25, deadline=None)
@given(graphs(max_operators=5), platforms(max_processors=2), st.data())
def test_the_solver_proves_what_the_search_finds(graph: Graph, platform: Platform, data: st.DataObject) -> None:
    costs = data.draw(graph_costs(graph, platform, refusals=False))
    parts = segments(graph)
    segment = max(parts, key=lambda s: len(s.operators))
    entry = 0 if segment.entry is not None else None
    of = SegmentCosts(graph, costs, segment, entry)
    answer = solve_segment(of, None, 600.0)  # however slow the machine is
    assert answer is not None
    seconds = of.seconds(answer.stages, continued=answer.continued)
    known = list_schedule(of, None)
    assert known is not None
    assert seconds <= known.cost_s * (1 + 1e-5) + 1e-9
    assert answer.bound_s <= seconds * (1 + 1e-9)
    assert seconds == pytest.approx(answer.bound_s, rel=1e-5, abs=1e-9)
    if len(parts) == 1:
        assert seconds == pytest.approx(best_plan(graph, costs).value, rel=1e-5, abs=1e-9)


@given(graphs())
def test_segments_hold_every_operator_once_and_gates_divide_the_graph(graph: Graph) -> None:
    import networkx as nx

    assert [o for s in segments(graph) for o in s.operators] == list(range(len(graph.operators)))
    whole = followers(graph)
    for gate in gates(graph):
        assert nx.ancestors(whole, gate) == set(range(gate))
        assert nx.descendants(whole, gate) == set(range(gate + 1, len(graph.operators)))
        assert all(a == gate or (a < gate) == (b <= gate) for a, b in whole.edges)


def test_the_best_plan_of_a_chain_is_the_best_chain() -> None:
    platform = Platform("p", tuple(Processor(f"p{i}", "cpu", {}, f"p{i}") for i in range(3)))
    rng = np.random.default_rng(3)
    between = rng.gamma(1.0, 1e-3, (3, 3)) * (1 - np.eye(3))
    operator_s, overhead_s, graph = rng.gamma(1.0, 5e-3, (3, 30)), np.full(3, 1e-4), chain_graph(30)
    costs = ChainCosts(platform, operator_s, overhead_s, np.broadcast_to(between, (30, 3, 3)))
    tensors = np.broadcast_to(between, (len(graph.tensors), 3, 3))
    found = best_plan(graph, GraphCosts(platform, operator_s, overhead_s, tensors))
    assert found.value == pytest.approx(best_chains(costs, 30)[0].cost_s)
    assert canonical(found.best, graph, platform) == found.best
    assert found.proven


def _two_branches() -> tuple[Graph, GraphCosts]:
    operators = (
        Operator("RELU", (0,), (1,)),
        Operator("RELU", (1,), (2,)),
        Operator("RELU", (1,), (3,)),
        Operator("ADD", (2, 3), (4,)),
    )
    graph = Graph("branches", (tensor(1),) * 5, operators, (0,), (4,))
    platform = Platform("p", (Processor("a", "cpu", {}, "a"), Processor("b", "cpu", {}, "b")))
    costs = GraphCosts(platform, np.array([[1.0, 5, 5, 1], [9, 4, 4, 9]]), np.zeros(2), np.full((5, 2, 2), 0.1))
    return graph, costs


def test_branches_run_side_by_side() -> None:
    graph, costs = _two_branches()
    found = best_plan(graph, costs)
    assert found.value == pytest.approx(1 + 5 + 0.1 * 3 + 1)
    events = simulate(graph, costs, found.best).events
    assert {e.processor for e in events} == {"a", "b"}
    assert found.gap == pytest.approx(0.0)
    together = GraphCosts(
        Platform("p", (Processor("a", "cpu", {"x": 1.0}, "a"), Processor("b", "cpu", {"x": 1.0}, "b"))),
        costs.operator_s,
        costs.overhead_s,
        costs.transfer_s,
    )
    assert best_plan(graph, together).value == pytest.approx(1 + 4 + 4 + 1 + 0.1 * 3)


def test_wrong_input_is_reported() -> None:
    graph, costs = _two_branches()
    with fails(UsageError):
        best_plan(graph, costs, 0.0)
    refused = GraphCosts(costs.platform, costs.operator_s.copy(), costs.overhead_s, costs.transfer_s)
    refused.operator_s[:, 2] = np.inf
    with fails(InfeasibleError):
        best_plan(graph, refused)
    with pytest.raises(PlanError):
        simulate(chain_graph(3), costs, best_plan(graph, costs).best)
    for wrong in (-1.0, np.nan):
        with fails(ValueError):
            GraphCosts(costs.platform, costs.operator_s * wrong, costs.overhead_s, costs.transfer_s)
    with fails(ValueError):
        GraphCosts(costs.platform, costs.operator_s, costs.overhead_s, costs.transfer_s[0])


def test_a_reader_that_has_run_is_no_longer_waited_for() -> None:
    # The first operator is read twice: the search once took its first reader to be still to come, and proved too much.
    edges = [("in", "a"), *(("in", f"free{i}") for i in range(5)), ("a", "b"), ("a", "c"), ("b", "c")]
    graph = network(*edges)
    cores = Platform("three cores", tuple(one_core(i) for i in range(3)))
    seconds = [1e-3 if name in ("a", "b") else 0.0 for name in dict.fromkeys(name for _, name in edges)]
    costs = GraphCosts(
        cores, np.array([seconds] * 3), np.full(3, 1e-4), np.full((len(graph.tensors), 3, 3), 3e-4) * (1 - np.eye(3))
    )
    (segment,) = segments(graph)
    problem = Problem.make(SegmentCosts(graph, costs, segment, None), None)
    plan, bound_s = search_segment(problem, segment.operators, 2.2e-3, time.monotonic() + 60.0)
    assert plan is not None
    assert plan.cost_s == bound_s == pytest.approx(2.1e-3)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=5, deadline=None)
def test_a_large_graph_takes_no_longer_than_its_list_schedule(seed: int) -> None:
    rng, count = np.random.default_rng(seed), 60
    tensors = tuple(tensor(4, name=f"t{i}") for i in range(count + 1))
    reads = [
        sorted({int(i) for i in rng.integers(max(0, o - 8), o, rng.integers(1, 4))}) if o else [] for o in range(count)
    ]
    operators = [Operator("ADD", tuple(i + 1 for i in r) or (0,), (o + 1,)) for o, r in enumerate(reads)]
    read = {i for r in reads for i in r}
    graph = Graph("large", tensors, tuple(operators), (0,), tuple(o + 1 for o in range(count) if o not in read))
    platform = Platform("four", tuple(Processor(f"cpu{i}", "cpu", {f"core{i}": 1.0}, f"kind{i}") for i in range(4)))
    costs = GraphCosts(
        platform, rng.uniform(1.0, 4.0, (4, count)), rng.uniform(0.0, 0.3, 4), rng.uniform(0.0, 0.5, (count + 1, 4, 4))
    )
    whole = SegmentCosts(graph, costs, Segment(None, tuple(range(count)), None), None)
    known = list_schedule(whole, None)
    assert known is not None
    better = improved(whole, None, known, 0.2)
    assert better.cost_s <= known.cost_s
    stages = (Stage(operators, platform.processors[on].name) for operators, on in better.stages)
    assert makespan_s(graph, costs, Plan(graph.digest, tuple(stages))) == pytest.approx(better.cost_s)
    found = best_plan(graph, costs, 0.4)
    assert found.bound <= found.value <= known.cost_s * (1 + 1e-12)
