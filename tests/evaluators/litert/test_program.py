"""Who waits for whom, and where tensors lie: laws over random graphs, plans and processors. No runtime is needed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evaluators.litert.program import ALIGNMENT, LOG_NBYTES, Edge, Layout, Schedule, largest, layout, schedule
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Share, Stage
from search_spaces.core.platform import Platform
from search_spaces.models.litert import read_model
from search_spaces.models.zoo.builder import Builder
from search_spaces.rewrites.lower import lowering
from search_spaces.spaces.chain import chain_plan
from tests.support import strategies

Case = tuple[Graph, Plan, Platform]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    graph = draw(strategies.graphs(max_operators=9))
    platform = draw(strategies.shared_platforms())
    plan = draw(strategies.placements(graph, platform, labels=7))
    plan.validate(graph, platform)
    return graph, plan, platform


def dependencies(graph: Graph, plan: Plan) -> set[tuple[int, int]]:
    place = {operator: i for i, stage in enumerate(plan.stages) for operator in stage.operators}
    return {(place[a], place[b]) for b in place for a in graph.predecessors(b) if place[a] != place[b]}


def exclusions(plan: Plan, platform: Platform) -> set[tuple[int, int]]:
    processors = [platform[stage.processor] for stage in plan.stages]
    return {
        (a, b)
        for a, b in combinations(range(len(processors)), 2)
        if processors[a] == processors[b] or processors[a].excludes(processors[b])
    }


def certain(order: Schedule, edges: tuple[Edge, ...], count: int) -> list[set[int]]:
    """Return for each stage what is over before it starts, from the processors' order and the edges alone."""
    direct: list[set[int]] = [set() for _ in range(count)]
    for stages in order.stages.values():
        for earlier, later in combinations(stages, 2):
            direct[later].add(earlier)
    for edge in edges:
        direct[edge.after].add(edge.before)
    found: list[set[int]] = []
    for stage in range(count):
        found.append(direct[stage].union(*(found[before] for before in direct[stage])))
    return found


@given(cases())
def test_every_dependency_and_every_exclusion_is_kept(case: Case) -> None:
    graph, plan, platform = case
    order = schedule(graph, plan, platform)
    before = certain(order, order.edges, len(plan.stages))
    for first, then in dependencies(graph, plan) | exclusions(plan, platform):
        assert first in before[then]
    assert [{i for i in range(len(plan.stages)) if bits >> i & 1} for bits in order.before] == before


@given(cases())
def test_no_edge_is_implied_by_the_others(case: Case) -> None:
    graph, plan, platform = case
    order = schedule(graph, plan, platform)
    count = len(plan.stages)
    full = certain(order, order.edges, count)
    for edge in order.edges:
        assert plan.stages[edge.before].processor != plan.stages[edge.after].processor
        assert certain(order, tuple(e for e in order.edges if e != edge), count) != full


@given(cases())
def test_processors_keep_the_order_of_the_plan_and_never_spin_on_the_core_they_wait_for(case: Case) -> None:
    graph, plan, platform = case
    order = schedule(graph, plan, platform)
    assert sorted(i for stages in order.stages.values() for i in stages) == list(range(len(plan.stages)))
    leader = next(iter(order.stages))
    assert order.stages[leader][0] == 0
    for name, stages in order.stages.items():
        assert list(stages) == sorted(stages)
        assert {plan.stages[i].processor for i in stages} == {name}
    before = certain(order, order.edges, len(plan.stages))
    for edge in order.edges:
        mine = platform[plan.stages[edge.after].processor]
        last = max((i for i in range(edge.after) if plan.stages[i].processor == mine.name), default=None)
        over = set() if last is None else before[last] | {last}
        # Earlier stages that need its cores and are not over when it begins to wait.
        rivals = [i for i in range(edge.after) if i not in over and platform[plan.stages[i].processor].excludes(mine)]
        assert (edge.spin_ns == 0) == any(plan.stages[i].processor != mine.name for i in rivals)
    for edge in order.all_edges()[len(order.edges) :]:
        waits = leader if edge.after == -1 else next(n for n, stages in order.stages.items() if edge.after in stages)
        rest = [platform[stage.processor] for stage in plan.stages[order.stages[waits][-1] + 1 :]]
        assert (edge.spin_ns == 0) == any(platform[waits].excludes(processor) for processor in rest)


class Memory:
    """Which tensor was last written to each aligned piece of an arena."""

    def __init__(self, graph: Graph, places: Layout) -> None:
        self.graph = graph
        self.places = places
        self.owner = np.full(-(-places.nbytes // ALIGNMENT), -1)

    def piece(self, tensor: int) -> slice:
        first = self.places.offsets[tensor]
        assert first % ALIGNMENT == 0
        assert first + self.graph.tensors[tensor].nbytes <= self.places.nbytes
        return slice(first // ALIGNMENT, -(-(first + max(1, self.graph.tensors[tensor].nbytes)) // ALIGNMENT))

    def write(self, tensor: int) -> None:
        self.owner[self.piece(tensor)] = tensor

    def holds(self, tensor: int) -> bool:
        return bool((self.owner[self.piece(tensor)] == tensor).all())


def inside(graph: Graph, operators: Sequence[int]) -> list[int]:
    """Return all that a stage computes for itself, whether or not it would be handed out."""
    border = graph.boundary(operators).outputs
    return [t for o in operators for t in graph.operators[o].outputs if t not in border and t in graph.consumers]


def later(graph: Graph, operators: set[int], operator: int, written: set[int]) -> set[int]:
    """Return an operator and those of its stage that the runtime might fuse with it: a tensor between stays inside."""
    found, waiting = {operator}, [operator]
    while waiting:
        for tensor in set(graph.operators[waiting.pop()].outputs) - written:
            new = set(graph.consumers.get(tensor, ())) & operators - found
            found |= new
            waiting += new
    return found


class Execution:
    """Runs a plan in one of the orders that processors, edges and data allow, and checks what lies in the arena."""

    def __init__(
        self, case: Case, outputs: Mapping[int, tuple[int, ...]], order: Schedule, memory: Memory, chance: random.Random
    ) -> None:
        self.graph, self.plan, _ = case
        self.outputs, self.order, self.memory, self.chance = outputs, order, memory, chance
        self.done: set[int] = set()

    def may_start(self, stage: int) -> bool:
        before = {s for s in range(len(self.plan.stages)) if self.order.before[stage] >> s & 1}
        return before <= self.done

    def run(self) -> None:
        waiting = set(range(len(self.plan.stages)))
        running: dict[int, Iterator[None]] = {}
        while waiting or running:
            stage = self.chance.choice([*running, *(s for s in sorted(waiting) if self.may_start(s))])
            if stage in waiting:
                waiting.remove(stage)
                running[stage] = self.stage(stage)
            if next(running[stage], self) is self:
                del running[stage]
                self.done.add(stage)

    def stage(self, index: int) -> Iterator[None]:
        """Run operators in any order of the data, reading as late as a fused operator might."""
        graph, written = self.graph, set(self.outputs[index])
        operators = set(self.plan.stages[index].operators)
        left, over = set(operators), set[int]()
        unread: dict[int, set[int]] = {}  # operator → those that must be over before its inputs are certainly read
        while left:
            ready = [o for o in sorted(left) if not graph.predecessors(o) & left]
            operator = self.chance.choice(ready)
            left.remove(operator)
            unread[operator] = later(graph, operators, operator, written)
            for tensor in set(graph.operators[operator].outputs) & written:
                self.memory.write(tensor)
            yield
            over.add(operator)
            for reader, needed in unread.items():
                if operator in needed or reader == operator:
                    for tensor in graph.operators[reader].inputs:
                        source = graph.producer.get(tensor)
                        if tensor in graph.inputs or (source is not None and tensor in self.memory.places.offsets):
                            assert self.memory.holds(tensor)
            yield
        assert all(self.memory.holds(t) for t in graph.boundary(operators).outputs)


@st.composite
def outputs_of(draw: st.DrawFn, graph: Graph, plan: Plan) -> dict[int, tuple[int, ...]]:
    """What each stage writes: its border, and any of its inner tensors."""
    found = {}
    for index, stage in enumerate(plan.stages):
        candidates = inside(graph, stage.operators)
        chosen = draw(st.sets(st.sampled_from(candidates))) if candidates else set()
        found[index] = (*graph.boundary(stage.operators).outputs, *sorted(chosen))
    return found


@given(cases(), st.data(), st.randoms(use_true_random=False))
def test_no_tensor_is_overwritten_while_it_is_needed_in_any_order(
    case: Case, data: st.DataObject, chance: random.Random
) -> None:
    graph, plan, platform = case
    outputs = data.draw(outputs_of(graph, plan))
    order = schedule(graph, plan, platform)
    places = layout(graph, plan, order.before, outputs)
    assert set(places.offsets) == {*graph.inputs, *(t for written in outputs.values() for t in written)}
    assert places.nbytes <= largest(graph)
    memory = Memory(graph, places)
    for tensor in graph.inputs:
        memory.write(tensor)
    log = slice(places.log // ALIGNMENT, (places.log + LOG_NBYTES) // ALIGNMENT)
    for _ in range(3):  # inputs stay for the next inference
        Execution(case, outputs, order, memory, chance).run()
        assert all(memory.holds(t) for t in (*graph.inputs, *graph.outputs) if t in places.offsets)
        assert (memory.owner[log] == -1).all()
    borders = {i: graph.boundary(stage.operators).outputs for i, stage in enumerate(plan.stages)}
    assert layout(graph, plan, order.before, borders) == layout(graph, plan, order.before)


@given(cases())
def test_inputs_lie_in_one_place_for_every_plan(case: Case) -> None:
    graph, plan, platform = case
    other = Plan(graph.digest, (Stage(tuple(range(len(graph.operators))), platform.processors[0].name),))
    places = [layout(graph, p, schedule(graph, p, platform).before) for p in (plan, other)]
    assert places[0].log == places[1].log
    assert all(places[0].offsets[t] == places[1].offsets[t] for t in graph.inputs)


def test_a_chain_of_equal_tensors_needs_room_for_two() -> None:
    graph = strategies.chain_graph(9)
    platform = Platform("one", (strategies.one_core(0),))
    plan = Plan(graph.digest, tuple(Stage((i,), "cpu0") for i in range(9)))
    places = layout(graph, plan, schedule(graph, plan, platform).before)
    between = {places.offsets[t] for t in range(1, 9)}
    assert len(between) == 2


def test_a_chain_in_two_stages_needs_room_for_two_tensors() -> None:
    graph = strategies.chain_graph(9)
    platform = Platform("one", (strategies.one_core(0),))
    plan = chain_plan(graph, [4], ["cpu0", "cpu0"])
    outputs = {
        i: (*graph.boundary(s.operators).outputs, *inside(graph, s.operators)) for i, s in enumerate(plan.stages)
    }
    places = layout(graph, plan, schedule(graph, plan, platform).before, outputs)
    assert len({places.offsets[t] for t in range(1, 9)}) == 2


def test_parts_of_tensors_lie_where_their_processor_wrote_before(tmp_path: Path) -> None:
    net = Builder("narrowing")
    x = net.input((1, 16, 16, 4))
    for layer, filters in enumerate((32, 16, 8, 4)):
        x = net.conv(x, filters, 3, f"conv{layer}")
    net.finish(net.mean(x, "mean", keep=True)).write(tmp_path / "model.tflite")
    graph = read_model(tmp_path / "model.tflite")
    platform = Platform("two", (strategies.one_core(0), strategies.one_core(1)))
    sides = [Share("height", 0, 4), Share("height", 4, 16)]
    stages = [Stage((i,), f"cpu{j}", share) for i in range(4) for j, share in enumerate(sides)]
    viewed = lowering(graph).lower(Plan(graph.digest, (*stages, Stage((4,), "cpu0")))).viewed(platform)
    places = layout(viewed.graph, viewed.plan, schedule(viewed.graph, viewed.plan, platform).before)
    written = [t for t, (_, first) in viewed.graph.views.items() if first and t in viewed.graph.producer]
    assert len(written) == 4
    assert len({places.offsets[t] for t in written}) == 2  # as there is no need to keep more than two maps
