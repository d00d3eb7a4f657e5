"""Inner tensors that stages of one processor hand out change nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from ai_edge_litert.schema_py_generated import BuiltinOperator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluators.litert import stages
from evaluators.litert.deployment import read_deployment, with_inner_tensors
from evaluators.litert.runner import PlanRunner
from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.litert.stages import compiled_together, inner_tensors
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.models.stages import cut_stage
from search_spaces.spaces.chain import chain_plan
from tests.support import strategies
from tests.support.models.litert_loading import litert_processors, loaded, single_cores
from tests.support.models.tflite_models import Net, nets
from tests.support.narrowing import there

PLATFORM = litert_processors()
SINGLES = single_cores(PLATFORM)
ZOO = ["mobilenet_v1@0.25/64", "mobilenet_v1@0.25/64:int8", "squeezenet1_1@0.5/64:f16", "googlenet@0.25/64"]


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
