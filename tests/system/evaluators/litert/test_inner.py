"""Inner tensors that stages of one processor hand out: where they lie, and that nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from ai_edge_litert.schema_py_generated import BuiltinOperator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluators.litert import stages
from evaluators.litert.deployment import read_deployment, with_inner_tensors
from evaluators.litert.program import Layout, Schedule, largest, layout, schedule
from evaluators.litert.runner import PlanRunner
from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.litert.stages import compiled_together, inner_tensors
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.models.stages import cut_stage
from search_spaces.spaces.chain import chain_plan
from tests.evaluators.litert.test_program import Memory
from tests.support import strategies
from tests.support.models.litert_loading import litert_processors, loaded, single_cores
from tests.support.models.tflite_models import Net, nets
from tests.support.narrowing import there

PLATFORM = litert_processors()
SINGLES = single_cores(PLATFORM)
ZOO = ["mobilenet_v1@0.25/64", "mobilenet_v1@0.25/64:int8", "squeezenet1_1@0.5/64:f16", "googlenet@0.25/64"]

Case = tuple[Graph, Plan, Platform, dict[int, tuple[int, ...]]]


def inside(graph: Graph, operators: Sequence[int]) -> list[int]:
    """Return all that a stage computes for itself, whether or not it would be handed out."""
    border = graph.boundary(operators).outputs
    return [t for o in operators for t in graph.operators[o].outputs if t not in border and t in graph.consumers]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A plan, and what each stage writes: its border, and any of its inner tensors."""
    graph = draw(strategies.graphs(max_operators=10))
    platform = draw(strategies.shared_platforms())
    plan = draw(strategies.placements(graph, platform, labels=4))
    outputs = {}
    for index, stage in enumerate(plan.stages):
        candidates = inside(graph, stage.operators)
        chosen = draw(st.sets(st.sampled_from(candidates))) if candidates else set()
        outputs[index] = (*graph.boundary(stage.operators).outputs, *sorted(chosen))
    return graph, plan, platform, outputs


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

    def __init__(self, case: Case, order: Schedule, memory: Memory, chance: random.Random) -> None:
        self.graph, self.plan, _, self.outputs = case
        self.order, self.memory, self.chance = order, memory, chance
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


def places_of(case: Case) -> tuple[Schedule, Layout]:
    graph, plan, platform, outputs = case
    order = schedule(graph, plan, platform)
    return order, layout(graph, plan, order.before, outputs)


@given(cases(), st.randoms(use_true_random=False))
def test_no_tensor_is_overwritten_while_it_is_needed_in_any_order(case: Case, chance: random.Random) -> None:
    graph, _, _, outputs = case
    order, places = places_of(case)
    assert set(places.offsets) == {*graph.inputs, *(t for written in outputs.values() for t in written)}
    assert places.nbytes <= largest(graph)
    memory = Memory(graph, places)
    for tensor in graph.inputs:
        memory.write(tensor)
    for _ in range(3):
        Execution(case, order, memory, chance).run()
        assert all(memory.holds(t) for t in (*graph.inputs, *graph.outputs) if t in places.offsets)


@given(cases())
def test_without_inner_tensors_the_layout_is_that_of_the_borders(case: Case) -> None:
    graph, plan, platform, _ = case
    before = schedule(graph, plan, platform).before
    borders = {i: graph.boundary(stage.operators).outputs for i, stage in enumerate(plan.stages)}
    assert layout(graph, plan, before, borders) == layout(graph, plan, before)


def test_a_chain_in_two_stages_needs_room_for_two_tensors() -> None:
    graph = strategies.chain_graph(9)
    platform = Platform("one", (strategies.one_core(0),))
    plan = chain_plan(graph, [4], ["cpu0", "cpu0"])
    outputs = {
        i: (*graph.boundary(s.operators).outputs, *inside(graph, s.operators)) for i, s in enumerate(plan.stages)
    }
    places = layout(graph, plan, schedule(graph, plan, platform).before, outputs)
    assert len({places.offsets[t] for t in range(1, 9)}) == 2


@pytest.fixture(scope="module")
def session(cache_folder: Path) -> Iterator[LitertSession]:
    with LitertEvaluator().prepare(PLATFORM) as opened:
        yield opened


def agrees(session: LitertSession, graph: Graph, plan: Plan, folder: Path) -> None:
    """Check a plan, and its files, against the whole model."""
    with closing(loaded(session, graph, plan, fresh=True)) as candidate:
        candidate.run(3)
        assert there(candidate.verify()).identical
        handed_out = set(candidate._layout.offsets)
    for processor, indices in compiled_together(plan, PLATFORM, [cut_stage(graph, s.operators) for s in plan.stages]):
        found = {t for i in indices for t in inner_tensors(graph, plan.stages[i].operators)}
        assert found <= handed_out if len(indices) > 1 else not found & handed_out, processor
    assert session.deploy(folder, graph, plan).identical


@pytest.fixture
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models hand out small tensors."""
    monkeypatch.setattr(stages, "_LEAST_NBYTES", 1)


@pytest.fixture
def all_kinds(all_sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that can be handed out is, fused away or not."""
    kinds = frozenset(BuiltinOperator.__dict__)
    monkeypatch.setattr(stages, "_WRITERS", kinds)
    monkeypatch.setattr(stages, "_READERS", kinds)


@pytest.mark.litert
@pytest.mark.usefixtures("all_sizes")
@pytest.mark.parametrize("name", ZOO)
def test_models_of_the_zoo_compute_the_same_on_one_processor(session: LitertSession, name: str, tmp_path: Path) -> None:
    graph = load(name)
    count = len(graph.operators)
    for parts in (2, 5):
        cuts = [count * i // parts for i in range(1, parts)]
        agrees(session, graph, chain_plan(graph, cuts, [SINGLES[-1]] * parts), tmp_path)


@pytest.mark.litert
@pytest.mark.usefixtures("all_kinds")
@pytest.mark.parametrize("name", ZOO)
def test_whatever_is_handed_out_makes_no_difference(session: LitertSession, name: str, tmp_path: Path) -> None:
    graph = load(name)
    agrees(session, graph, chain_plan(graph, [len(graph.operators) // 2], [SINGLES[-1]] * 2), tmp_path)


@pytest.mark.litert
def test_two_processors_that_take_turns_compute_the_same(
    session: LitertSession, squeezenet: Graph, tmp_path: Path
) -> None:
    processors = [SINGLES[0], SINGLES[-1]] * 3
    agrees(session, squeezenet, chain_plan(squeezenet, [5, 11, 19, 25, 32], processors), tmp_path)


@pytest.mark.litert
@pytest.mark.usefixtures("all_kinds")
@given(net=nets(), data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drawn_models_compute_the_same(session: LitertSession, tmp_path: Path, net: Net, data: st.DataObject) -> None:
    graph = read_model(net.write(tmp_path / "m.tflite"))
    plan = data.draw(strategies.placements(graph, PLATFORM, labels=3))
    agrees(session, graph, plan, tmp_path)


@pytest.mark.litert
def test_files_keep_their_outputs_and_their_runner_uses_as_little_memory(
    session: LitertSession, squeezenet: Graph, tmp_path: Path
) -> None:
    plan = chain_plan(squeezenet, [10, 20], [SINGLES[-1]] * 3)
    session.deploy(tmp_path, squeezenet, plan)
    deployment = read_deployment(tmp_path)
    for index, stage in enumerate(plan.stages):
        file = read_model(tmp_path / f"stage_{index}.tflite")
        assert len(file.outputs) == len(squeezenet.boundary(stage.operators).outputs)
    graph, apart, _ = with_inner_tensors(
        deployment, compiled_together(deployment.plan, deployment.platform, deployment.stages)
    )
    assert [o.kind for o in graph.operators] == [o.kind for o in squeezenet.operators]
    assert [s.operators for s in apart.stages] == [s.operators for s in plan.stages]
    with closing(loaded(session, squeezenet, plan)) as candidate, PlanRunner(tmp_path) as runner:
        assert runner.candidate._layout.nbytes == candidate._layout.nbytes
