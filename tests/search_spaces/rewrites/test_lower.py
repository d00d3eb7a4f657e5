"""Lowering: plans with any rewrites together are plans of one rewritten model that computes what the model computes."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.cost_model.session import CostModelEvaluator
from evaluators.guard import guarded
from evaluators.litert.session import LitertEvaluator
from evaluators.testing import SyntheticCandidate, SyntheticEvaluator, SyntheticSession
from search_spaces.core.graph import Graph
from search_spaces.core.plan import LayerRanks, Plan
from search_spaces.models.litert import read_model
from search_spaces.models.stages import cut_stage
from search_spaces.rewrites.lower import Lowering, lowering
from search_spaces.rewrites.tucker import Layer, tucker_layers
from search_spaces.spaces.segment_space import SegmentSpace
from tests.search_spaces.rewrites.test_tucker import images, outputs
from tests.search_spaces.spaces.test_segment_space import TWO, small
from tests.support.narrowing import there


def written(folder: Path) -> Graph:
    """Return a network with two convolutions that may be decomposed and can be split along both axes."""
    return read_model(small().net.write(folder / "model.tflite"))


def with_ranks(plan: Plan, layers: tuple[Layer, ...], share: float) -> Plan:
    ranks = (LayerRanks(x.operator, *(max(1, int(c * share)) for c in x.full)) for x in layers)
    return replace(plan, ranks=tuple(ranks))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_triples_and_sides_meet(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        graph = written(Path(name))
        space = SegmentSpace(graph, TWO)
        split = space.plan_at(data.draw(st.integers(0, space.cardinality() - 1)))
        layers = data.draw(st.lists(st.sampled_from(tucker_layers(graph)), unique=True, max_size=2))
        plan = with_ranks(split, tuple(sorted(layers, key=lambda x: x.operator)), 1.0)
        lowered = Lowering(graph).lower(plan)
        lowered.plan.validate(lowered.graph, TWO)
        assert sorted(set(lowered.stage_of)) == list(range(len(plan.stages)))
        assert {operator for operator, _ in lowered.origins} == set(range(len(graph.operators)))
        mine, theirs = (outputs(g, images(graph)) for g in (lowered.graph, graph))
    for one, other in zip(mine, theirs, strict=True):  # full ranks lose nothing but rounding
        np.testing.assert_allclose(one, other, atol=1e-4 * float(np.abs(other).max()))


def test_weights_are_factored_when_a_stage_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = written(tmp_path)
    plan = with_ranks(SegmentSpace(graph, TWO).plan_at(0), tucker_layers(graph), 0.5)
    with monkeypatch.context() as patch:
        patch.setattr("search_spaces.rewrites.lower.factored", None)
        lowered = Lowering(graph).lower(plan)
    made = cut_stage(lowered.graph, lowered.plan.stages[0].operators)
    made.write(tmp_path / "stage.tflite")
    assert read_model(tmp_path / "stage.tflite").operators


def test_a_model_to_time_has_other_weights_and_no_filter_is_factored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = written(tmp_path)
    ranks = with_ranks(SegmentSpace(graph, TWO).plan_at(0), tucker_layers(graph), 0.5).ranks
    made = lowering(graph).decomposed(ranks).graph
    with monkeypatch.context() as patch:
        patch.setattr("search_spaces.rewrites.lower.factored", None)
        timed = lowering(graph).decomposed_to_time(ranks)
        found = outputs(timed.graph, images(graph))
    assert (timed.graph.digest, timed.graph.tensors) == (made.digest, made.tensors)
    assert there(timed.graph.source).content_digest() != there(made.source).content_digest()
    assert lowering(graph).has_made(timed.graph)
    assert all(np.isfinite(each).all() for each in found)


@pytest.mark.litert
@pytest.mark.parametrize("axis", ["height", "channels"])
def test_triples_in_split_chains_run_and_are_predicted(tmp_path: Path, axis: str) -> None:
    graph = written(tmp_path)
    evaluator = LitertEvaluator()
    platform = evaluator.platform().restrict(["cpu0", "cpu1"])
    space = SegmentSpace(graph, platform)
    found = (space.plan_at(i) for i in range(space.cardinality()))
    shares = (plan for plan in found if any(s.share and s.share.axis == axis for s in plan.stages))
    split = max((next(shares) for _ in range(50)), key=lambda plan: max(len(s.operators) for s in plan.stages))
    plan = with_ranks(split, tucker_layers(graph), 0.5)
    triples = replace(plan, stages=space.plan_at(0).stages)
    with evaluator.prepare(platform) as session:
        errors = []
        for each in (plan, triples):
            with closing(session.load(graph, each)) as candidate:
                batch = candidate.run(2)
                assert batch.stage_s.shape == (2, len(each.stages))
                agreement = there(candidate.verify())
                errors.append(agreement.max_rel_error)
        (tmp_path / "best").mkdir()
        agreement = session.deploy(tmp_path / "best", graph, plan)
    assert errors[0] == pytest.approx(errors[1], abs=1e-4)
    assert agreement.max_rel_error == pytest.approx(errors[0], abs=1e-4)
    predictor = CostModelEvaluator()
    described = there(predictor.described("pixel4"))
    processors = [p.name for p in described.processors][:2]
    moved = replace(plan, stages=tuple(replace(s, processor=processors[int(s.processor[-1])]) for s in plan.stages))
    with predictor.prepare(described) as model, closing(model.load(graph, moved)) as candidate:
        assert candidate.run(1).latency_s[0] > 0.0
        assert candidate.stream(1).latency_s[0] > 0.0
        assert (errors_of := candidate.run(1).errors) is not None
        assert np.isfinite(errors_of).all()


def test_a_plug_in_gets_plain_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = written(tmp_path)
    space = SegmentSpace(graph, TWO)
    split = next(p for p in map(space.plan_at, range(1000)) if p.is_split)
    plan = with_ranks(split, tucker_layers(graph), 0.5)
    seen: list[Plan] = []
    load = SyntheticSession.load

    def watched(session: SyntheticSession, graph: Graph, plan: Plan, *, fresh: bool = False) -> SyntheticCandidate:
        seen.append(plan)
        return load(session, graph, plan, fresh=fresh)

    monkeypatch.setattr(SyntheticSession, "load", watched)
    evaluator = guarded(SyntheticEvaluator(), "plug-in")
    with evaluator.prepare(TWO) as session, closing(session.load(graph, plan)) as candidate:
        assert candidate.run(3).stage_s.shape == (3, len(plan.stages))
        assert candidate.verify() is None
    assert not seen[0].is_split
    assert not seen[0].ranks


def test_each_of_two_models_of_one_structure_keeps_its_weights(tmp_path: Path) -> None:
    graph = written(tmp_path)
    other = read_model(Path(shutil.copy(tmp_path / "model.tflite", tmp_path / "other.tflite")))
    assert graph.digest == other.digest
    assert lowering(graph).graph is graph
    assert lowering(other).graph is other
    assert lowering(other) is lowering(other)
    assert pickle.loads(pickle.dumps(graph)) == graph


def test_weights_that_were_written_again_are_read_again(tmp_path: Path) -> None:
    graph = written(tmp_path)
    before = lowering(graph)
    path = tmp_path / "model.tflite"
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(1, 1))  # as by a later clock: this file system's may not have moved on
    assert lowering(graph) is not before
