"""The evaluator ``cuda`` on threads in the place of streams, and what it says where there is no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from evaluators.contract import EvaluatorContract
from evaluators.cuda.client import Client
from evaluators.cuda.devices import APART, find_gpu, parse_stream, platform_of
from evaluators.cuda.session import CudaEvaluator
from evaluators.registry import make_evaluator
from optimizer.cli import main
from optimizer.study.config import parse_config
from optimizer.study.several_models import SeveralModels
from optimizer.workload.ranks import grids_of
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import merge
from search_spaces.core.plan import LayerRanks, Plan
from search_spaces.core.platform import Platform, Processor, memory_limit_nbytes
from search_spaces.core.pools import with_pools
from search_spaces.core.workload import workload_of
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.shared_parts import Part
from search_spaces.spaces.workload_space import WorkloadSpace
from tests.support.commands import SEARCHED, tells
from tests.support.narrowing import there
from tests.support.sentences import fails

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch (the extra cuda)")
SMALL = "squeezenet1_1@0.25/32"


def test_it_is_installed_under_its_name() -> None:
    found = make_evaluator("cuda")
    assert isinstance(found, CudaEvaluator)
    assert found.capabilities.workloads
    assert found.capabilities.names


def test_without_pytorch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with fails(UnavailableError):
        CudaEvaluator().platform()


@needs_torch
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with fails(UnavailableError):
        find_gpu()
    tells(capsys, "--model", SMALL, "--evaluator", "cuda", "-q", code=4)


def test_processors_are_alike_and_none_excludes_another() -> None:
    platform = platform_of("NVIDIA X")
    assert [p.name for p in platform.processors[:8]] == [f"stream{i}" for i in range(8)]
    assert {p.like for p in platform.processors[:8]} == {"cuda:NVIDIA X:tf32"}
    assert {p.timed_as for p in platform.processors} == {"cuda:NVIDIA X:tf32"}
    assert not any(a.excludes(b) for a in platform.processors for b in platform.processors if a is not b)
    assert parse_stream("stream3", "NVIDIA X") == platform.processors[3]
    exact = parse_stream("stream3:f32", "NVIDIA X")
    assert exact.like == "cuda:NVIDIA X:f32"
    assert parse_stream(exact.name, "NVIDIA X") == exact
    small = parse_stream("stream3:f32:memory=400MB", "NVIDIA X")
    assert small.like != exact.like
    assert parse_stream(small.name, "NVIDIA X") == small
    assert memory_limit_nbytes([small]) == 400_000_000
    first = parse_stream("stream3:f32:priority=2", "NVIDIA X")
    assert first.like != exact.like
    assert first.timed_as == exact.timed_as == exact.like
    assert not first.excludes(exact)
    assert parse_stream(first.name, "NVIDIA X") == first
    for name in ("stream3:memory=1GB:memory=1GB", "stream3:memory=400", "stream3:priority=0", "stream3:priority=4"):
        with fails(UsageError):
            parse_stream(name, "NVIDIA X")
    for name in ("stream", "stream03", "stream3:f16", "cpu0", "stream3:", "stream32", "stream-1", "stream٣"):
        with fails(UsageError):
            parse_stream(name, "NVIDIA X")


@needs_torch
class TestContract(EvaluatorContract):
    """What every evaluator must do."""

    call_s = 5.0

    def evaluator(self) -> CudaEvaluator:
        return CudaEvaluator("cpu")

    def graph(self) -> Graph:
        return load(SMALL)

    def plans(self, graph: Graph, platform: Platform) -> list[Plan]:
        a, b = (p.name for p in platform.processors[:2])
        return [chain_plan(graph, (), [a]), chain_plan(graph, (7, 20), [a, b, a])]


@needs_torch
def test_inferences_of_a_stream_overlap_and_compute_what_the_model_does() -> None:
    evaluator = CudaEvaluator("cpu")
    graph = load("googlenet@0.25/64")
    with evaluator.prepare(evaluator.platform()) as session:
        plan = chain_plan(graph, (40,), ["stream0", "stream1"])
        with closing(session.load(graph, plan)) as candidate:
            found = candidate.stream(12)
            assert found.latency_s.shape == (12,)
            assert found.stage_s.shape == (12, 2)
            # No processor does more than one stage at a time, and both are hardly ever idle; single runs differ.
            assert found.latency_s.sum() > 0.8 * found.stage_s.sum(axis=0).max()
            assert found.latency_s.sum() < found.stage_s.sum()
            os.kill(session._bench.client.pid or 0, signal.SIGKILL)
            with fails(UnavailableError):
                candidate.stream(1)
            assert there(candidate.verify()).accepted


@needs_torch
@pytest.mark.parametrize("allow", ["cuts", "cuts,branches,splits,ranks"])
def test_a_study_of_throughput(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("optimizer.study.course.make_evaluator", lambda _: CudaEvaluator("cpu"))
    words = ["--model", f"{SMALL}+spectrum", "--evaluator", "cuda", "--processors", "stream0,stream1"]
    words += ["--allow", allow, "--max-error", "0.5"] if "ranks" in allow else ["--allow", allow]
    assert main([*words, "--objective", "throughput", "--budget", "4", "--out", "run", "-q"]) in SEARCHED
    found = json.loads(Path("run/result.json").read_text())
    assert found["objective"] == "throughput"
    assert found["best"]["period_ms"]["median"] > 0.0


@needs_torch
def test_operators_are_refused_by_name() -> None:
    evaluator = CudaEvaluator("cpu")
    platform = evaluator.platform()
    graph = load("squeezenet1_1@0.5/64:int8")
    with evaluator.prepare(platform) as session:
        assert list(session.unsupported_operators(graph, "stream0")) == list(range(len(graph.operators)))
        with fails(UnavailableError):
            session.load(graph, chain_plan(graph, (), ["stream0"]))


@needs_torch
def test_branches_on_two_streams_overlap_and_compute_what_the_model_does() -> None:
    evaluator = CudaEvaluator("cpu")
    graph = load("googlenet@0.25/64")
    platform = evaluator.platform()
    names = tuple(p.name for p in platform.processors[:2])
    space = SegmentSpace(graph, platform.restrict(names), splits=False)
    first, last = space.branching[0].first, space.branching[0].joint
    parts = [
        Part(0, first, names[:1]),
        Part(first, last, (*names, *names), "branches"),
        Part(last, len(graph.operators), names[:1]),
    ]
    with evaluator.prepare(platform) as session, closing(session.load(graph, space.plan(parts))) as candidate:
        timeline = there(candidate.run(20).timeline)
        ran = {e.stage: e for e in timeline.events}
        assert ran[1].start_s < ran[2].end_s
        assert ran[2].start_s < ran[1].end_s
        assert there(candidate.verify()).accepted


@needs_torch
def test_a_process_that_dies_is_reported_and_a_new_one_takes_its_place() -> None:
    evaluator = CudaEvaluator("cpu")
    graph = load(SMALL)
    with evaluator.prepare(evaluator.platform()) as session:
        bench = session._bench
        with closing(session.load(graph, chain_plan(graph, (5,), ["stream0", "stream1"]))) as candidate:
            candidate.run(2)
            pid = there(bench.client.pid)
            os.kill(pid, signal.SIGKILL)
            with fails(UnavailableError):
                candidate.run(1)
            assert candidate.run(3).latency_s.shape == (3,)
            assert there(candidate.verify()).accepted
            assert bench.client.pid not in {None, pid}


@needs_torch
def test_a_process_that_hangs_is_ended() -> None:
    client = Client("cpu", 1, None)
    client.ask({"op": "facts"}, 30.0)
    pid = there(client.pid)
    os.kill(pid, signal.SIGSTOP)
    begin_s = time.monotonic()
    with fails(UnavailableError):
        client.ask({"op": "facts"}, 1.0)
    assert time.monotonic() - begin_s < 5.0
    client.ask({"op": "facts"}, 30.0)
    client.close()
    client.close()
    with fails(UnavailableError):
        client.ask({"op": "facts"}, 1.0)


@needs_torch
def test_a_plan_with_ranks_runs() -> None:
    evaluator = CudaEvaluator("cpu")
    graph = load("vgg11@0.25/32")
    first = next(i for i, o in enumerate(graph.operators[1:], 1) if o.kind == "CONV_2D")
    whole = chain_plan(graph, (3,), ["stream0", "stream1"])
    plan = Plan(whole.graph_digest, whole.stages, whole.dispatch, (LayerRanks(first, 8, 8),))
    with evaluator.prepare(evaluator.platform()) as session, closing(session.load(graph, plan)) as candidate:
        assert candidate.run(2).stage_s.shape == (2, 2)
        agreement = there(candidate.verify())
        assert agreement.max_rel_error > 0
        assert agreement.accepted


def test_more_instances_than_can_be_captured_apart_are_refused() -> None:
    workload = workload_of(f"{SMALL}×33")
    graph = load(SMALL)
    joined = merge("many", [(i.name, graph) for i in workload.instances])
    evaluator = CudaEvaluator("cpu")
    with (
        fails(UnavailableError),
        evaluator.host(workload, joined, with_pools(evaluator.platform()), "mean"),
    ):
        pass


def test_processors_of_another_kind_are_refused() -> None:
    platform = Platform("here", (Processor("cpu0", "cpu", {"core0": 1.0}, "core", {"cores": (0,), "threads": 1}),))
    with (
        fails(UnavailableError),
        CudaEvaluator("cpu").prepare(platform),
    ):
        pass


@needs_torch
@pytest.mark.parametrize("own", [False, True])
def test_a_study_of_several_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("optimizer.study.course.make_evaluator", lambda _: CudaEvaluator("cpu"))
    arrival = f"own_weights: {str(own).lower()}, arrival: {{kind: closed, requests: 4}}"
    entry = f"name: a, model: '{SMALL}', count: 2, {arrival}"
    Path("w.yaml").write_text(f"models:\n  - {{{entry}}}\n  - {{name: b, model: 'mobilenet_v1@0.25/32'}}\n")
    words = ["--model", "w.yaml", "--evaluator", "cuda", "--budget", "3", "--max-stages", "2", "--out", "run", "--json"]
    assert main([*words, "-q"]) in {0, 5}
    out, _ = capsys.readouterr()
    found: dict[str, Any] = json.loads(out or (tmp_path / "run" / "result.json").read_text())
    assert {"one after another on stream0", "one processor per model", *APART.values()} <= set(found["baselines"])
    prices = [json.loads(line) for line in Path("run/trials.jsonl").read_text().splitlines() if '"prices"' in line]
    assert prices


@needs_torch
def test_decomposed_models_are_priced_and_run() -> None:
    model = "vgg11@0.25/32+spectrum"
    evaluator = CudaEvaluator("cpu")
    values = {"model": f"{model}×2", "budget": "1", "allow": "cuts,ranks", "max_error": "0.3", "evaluator": "cuda"}
    problem = SeveralModels.read(parse_config({**values, "processors": "stream0,stream1"}), evaluator)
    grids = {digest: sets[2:3] for digest, sets in grids_of(problem.workload, problem.choices).items()}
    ((digest, (ranks,)),) = grids.items()
    arguments = problem.workload, problem.joined, problem.platform, problem.objective
    with evaluator.host(*arguments) as session:
        prices = json.loads(json.dumps(session.price(None, lambda _: None, grids)))
        (times,) = prices["triple_s"][digest].values()
        assert set(times) == {str(layer) for layer in ranks}
        assert min(times.values()) > 0.0
        error = there(session.decomposed_error(problem.joined.components[0].graph, ranks))
        assert error > 0.0
        space = WorkloadSpace(problem.workload, problem.joined, problem.space.platform, 2, [[ranks]])
        plan = space.plan_at(space.cardinality() - 1)
        assert len(plan.ranks) == 2 * len(ranks)
        assert len(plan.stages) == 4
        assert session.simulator.run(plan).answered == 2
        with closing(session.load(problem.joined.graph, plan)) as candidate:
            assert candidate.run(2).stage_s.shape == (2, 4)
            agreement = there(candidate.verify())
            assert agreement.max_rel_error == pytest.approx(error, rel=1e-2)
            assert agreement.tolerance == pytest.approx(0.3 + 5e-2)  # and what TF32 explains
