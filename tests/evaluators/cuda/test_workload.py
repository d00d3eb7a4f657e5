"""Workloads in the process of the evaluator ``cuda``: who is captured where, and what is let go."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from evaluators.cuda.client import Bench
from evaluators.cuda.devices import APART, GRAPHS, MAX_INSTANCES
from evaluators.cuda.session import CudaEvaluator
from evaluators.cuda.workload import CudaWorkload, crowding
from evaluators.workload.host import came_of
from evaluators.workload.outcome import Outcome
from evaluators.workload.prices import JobTimer, first_of_kinds, kind_of
from evaluators.workload.setting import Setting
from evaluators.workload.simulate import Crowd, JobCost, simulate
from optimizer.workload.baselines import workload_baselines
from search_spaces.core.decoded_plan import RankSet
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import merge
from search_spaces.core.plan import LayerRanks, Plan
from search_spaces.core.platform import Platform
from search_spaces.core.pools import single_processors, with_pools
from search_spaces.core.workload import workload_of
from search_spaces.models import load
from search_spaces.spaces.workload_space import WorkloadSpace
from tests.support.narrowing import there
from tests.support.sentences import fails, says
from tests.support.strategies import chain_graph

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch (the extra cuda)")
VGG = "vgg11@0.25/32"


@contextmanager
def opened(text: str, graphs: list[Graph]) -> Iterator[CudaWorkload]:
    workload = workload_of(text)
    joined = merge("test", [(i.name, graphs[i.client]) for i in workload.instances])
    evaluator = CudaEvaluator("cpu")
    platform = with_pools(evaluator.platform().restrict(["stream0", "stream1"]))
    with evaluator.host(workload, joined, platform, "mean") as session:
        yield session


def test_models_that_run_at_once_take_the_places_of_different_instances() -> None:
    one, two, other = chain_graph(3), chain_graph(5), chain_graph(7)
    with opened("a×2,b", [one, two]) as session:
        names = [c.name for c in session.joined.components]
        assert names == ["a 1", "a 2", "b"]
        assert session._owners([one]) == ["a 1"]
        assert session._owners([two, one, one]) == ["b", "a 1", "a 2"]
        assert session._owners([one, one, one]) == ["a 1", "a 2", "b"]
        assert session._owners([other, one]) == ["a 2", "a 1"]  # a decomposed model takes what is left
        with fails(UnavailableError):
            session._owners([one] * 4)


@needs_torch
def test_an_owner_has_one_stream_whatever_the_number_of_models() -> None:
    from evaluators.cuda.worker import Worker

    worker = Worker("cpu")
    worker._capturing = {level: [(level, n) for n in range(MAX_INSTANCES)] for level in range(2)}
    owners = [f"instance {i}" for i in range(MAX_INSTANCES)]
    first = [worker._stream_of(owner, 0) for owner in owners]
    assert len(set(first)) == MAX_INSTANCES
    assert [worker._stream_of(owner, 0) for _ in range(3) for owner in owners] == first * 3
    assert worker._stream_of(owners[5], 1) == (1, 5)


@needs_torch
def test_the_process_lets_a_model_go_that_it_is_told_to_forget() -> None:
    from evaluators.cuda.worker import Worker

    worker, graph = Worker("cpu"), load("squeezenet1_1@0.25/32")
    kinds = [o.kind for o in graph.operators]
    jobs = [[list(range(len(kinds))), "f32", "stream0", 0]]
    for model in (1, 2):
        messages = {"op": "model", "model": model, "path": str(there(graph.source).path), "name": "m", "kinds": kinds}
        worker.answer(messages, b"")
        load_it = {
            "op": "load",
            "instance": model,
            "model": model,
            "owner": "a",
            "weights": "",
            "jobs": jobs,
            "after": [],
        }
        worker.answer(load_it, b"")
    for number in (1, 2):
        worker.answer({"op": "drop", "instance": number}, b"")
    worker.answer({"op": "forget", "model": 1}, b"")
    worker.answer({"op": "forget", "model": 3}, b"")
    assert set(worker._graphs) == {2}
    assert {key[0] for held in (worker._weights, worker._kept) for key in held} == {2}


@needs_torch
def test_decomposed_models_that_were_only_looked_at_leave_nothing() -> None:
    graph = load(VGG)
    layers = [i for i, o in enumerate(graph.operators[1:], 1) if o.kind == "CONV_2D"][:2]
    ranks: list[RankSet] = [(LayerRanks(layer, 8, 8),) for layer in layers]
    with opened(f"{VGG}×2", [graph]) as session:
        known = session.price(None, lambda _: None, {graph.digest: ranks[:1]})
        errors = [session.decomposed_error(graph, each) for each in ranks]
        assert all(error is not None and error > 0.0 for error in errors)
        bench = session._bench
        assert [model.graph for model in bench._models.values()] == [graph]
        assert list(Path(bench._folder.name).iterdir()) == []
        assert [digest for digest, _ in session._inputs] == [graph.digest]
        messages: list[str] = []
        more = session.price(known, messages.append, {graph.digest: ranks})
        says("\n".join(messages))
        ((kind, times),) = more["triple_s"][graph.digest].items()
        assert set(times) == {str(layer) for each in ranks for layer in each}
        assert known["triple_s"][graph.digest][kind].items() <= times.items()


def apart(count: int) -> tuple[dict[str, Plan], Platform]:
    """Return the plans in which each of ``count`` models runs apart, and their processors."""
    workload, graph = workload_of(f"{VGG}×{count}"), load(VGG)
    joined = merge("test", [(i.name, graph) for i in workload.instances])
    platform = with_pools(CudaEvaluator("cpu").platform().restrict(["stream0", "stream1"]))
    space = WorkloadSpace(workload, joined, platform, 4)
    named, processors = workload_baselines(space, CudaEvaluator("cpu").apart(platform, count))
    return {b.name: b.plan for b in named}, processors


def test_models_run_apart_in_each_precision_of_the_streams() -> None:
    streams = [CudaEvaluator("cpu").processor(name) for name in ("stream0", "stream1:f32", "stream2:f32")]
    found = CudaEvaluator("cpu").apart(with_pools(Platform("two", tuple(streams))), 3)
    assert [a.name for a in found[:3]] == [f"{name}, tf32" for name in APART.values()]
    assert [a.name for a in found[3:]] == [f"{name}, f32" for name in APART.values()]
    for each in found:
        assert len(each.processors) == 3
        assert len({kind_of(p) for p in each.processors}) == 1
        assert not any(a.excludes(b) for a, b in pairwise(each.processors))
    assert len({kind_of(each.processors[0]) for each in found}) == 6


def test_threads_of_one_precision_share_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are launched one by one compute in the precision that their process has at that moment."""
    streams = [CudaEvaluator("cpu").processor(name) for name in ("stream0", "stream1:f32")]
    platform, workload, graph = with_pools(Platform("two", tuple(streams))), workload_of("a×2"), chain_graph(3)
    joined = merge("test", [(i.name, graph) for i in workload.instances])
    found = {each.name: each.processors for each in CudaEvaluator("cpu").apart(platform, 2)}
    every = replace(platform, processors=(*platform.processors, *(p for each in found.values() for p in each)))
    monkeypatch.setattr(Bench, "facts", lambda _: {})
    with CudaEvaluator("cpu").host(workload, joined, every, "mean") as session:
        benches = {name: [id(session._bench_of(p)) for p in each] for name, each in found.items()}
    assert [len(set(each)) for each in benches.values()] == [2, 2, 1] * 2
    assert len({one for each in benches.values() for one in each}) == 10


@needs_torch
def test_models_that_run_apart_have_processes_of_their_own_and_begin_at_once() -> None:
    plans, processors = apart(2)
    workload, graph = workload_of(f"{VGG}×2"), load(VGG)
    joined = merge("test", [(i.name, graph) for i in workload.instances])
    with CudaEvaluator("cpu").host(workload, joined, processors, "mean") as session:
        (crowded,) = session.price(None, lambda _: None)["slowed"].values()
        assert {f"{kind_of(p)}|{kind_of(p)}" for p in single_processors(processors)} <= crowded.keys()
        for name in APART.values():
            with closing(session.load(joined.graph, plans[name])) as run:
                found = came_of(run.run(2))
                assert there(run.verify()).accepted
            assert {e.processor for e in found.timeline.events} == {f"{name}: 1", f"{name}: 2"}
            assert max(r.came_s for each in found.requests for r in each) < 0.1
        processes = {bench.client.pid for bench in session._apart.values()}
        assert len(processes) == 5  # two, two, and one with two threads
        assert session._bench.client.pid not in processes
        one = session._apart[f"{APART[GRAPHS]}: 1"]
        with closing(session.load(joined.graph, plans[APART[GRAPHS]])) as run:
            os.kill(there(one.client.pid), signal.SIGKILL)
            with fails(UnavailableError):
                run.run(1)
            assert run.run(1).latency_s[0] > 0.0  # by a new process
        wrong = replace(
            plans[APART[GRAPHS]], stages=tuple(replace(s, processor="stream0") for s in plans[APART[GRAPHS]].stages)
        )
        with closing(session.load(joined.graph, wrong)) as run:
            assert came_of(run.run(1)).timeline.events[0].processor == "stream0"


@needs_torch
def test_a_model_that_runs_apart_is_not_cut_over_processes() -> None:
    plans, processors = apart(2)
    workload, graph = workload_of(f"{VGG}×2"), load(VGG)
    joined = merge("test", [(i.name, graph) for i in workload.instances])
    first, *rest = plans[APART[GRAPHS]].stages
    mine = sorted(first.operators)
    halves = [replace(first, operators=tuple(mine[:4])), replace(first, operators=tuple(mine[4:]), processor="stream0")]
    with (
        CudaEvaluator("cpu").host(workload, joined, processors, "mean") as session,
        fails(UnavailableError),
    ):
        session.load(joined.graph, replace(plans[APART[GRAPHS]], stages=(*halves, *rest)))


TRUE = {True: {True: 1.3, False: 1.05}, False: {True: 2.0, False: 1.3}}
"""Whether a job has priority → whether the other job has → the factor on its time."""


def test_crowding_finds_what_priority_changes() -> None:
    names = [*(f"stream{i}" for i in range(4)), *(f"stream{i}:priority={n}" for n in (1, 3) for i in range(4))]
    processors = [CudaEvaluator("cpu").processor(name) for name in names]
    before = [p.options.get("priority", 0) > 0 for p in processors]
    short, long = chain_graph(3), chain_graph(5)
    alone_s = {short.digest: 1e-3, long.digest: 4e-3}

    def alone(found: Setting, parts: Sequence[tuple[Graph, Sequence[int]]], runs: int) -> list[Outcome]:
        costs = []
        for graph, _ in parts:
            row = {
                n: JobCost(alone_s[graph.digest], tuple(TRUE[before[n]][b] for b in before)) for n in range(len(names))
            }
            costs.append([row])
        return [simulate(found, "fifo", costs, Crowd(Platform("p", tuple(processors))))] * runs

    timer = JobTimer(processors, alone, lambda _: None)
    kind = kind_of(processors[0])
    whole_s = {digest: {kind: s} for digest, s in alone_s.items()}
    found = crowding([short, short, long, long], timer, whole_s)
    for factors in found.values():
        assert factors[f"{kind}|{kind}"] == pytest.approx(1.3, rel=0.02)
        for first in (f"{kind}:priority=1", f"{kind}:priority=3"):
            assert factors[f"{first}|{first}"] == pytest.approx(1.3, rel=0.02)
            assert factors[f"{first}|{kind}"] == pytest.approx(1.05, rel=0.03)
            assert factors[f"{kind}|{first}"] == pytest.approx(2.0, rel=0.05)
        assert factors[f"{kind}:priority=3|{kind}:priority=1"] < factors[f"{kind}:priority=1|{kind}:priority=3"]


def test_jobs_are_timed_once_for_all_priorities() -> None:
    processors = [CudaEvaluator("cpu").processor(name) for name in ("stream0", "stream0:priority=1", "stream1:f32")]
    assert list(first_of_kinds(processors).values()) == [0, 2]
    assert list(first_of_kinds(processors[::-1]).values()) == [0, 2]
    changed = [replace(p, like=f"{p.like}+memory=0.6") for p in processors]  # as a platform's file may
    assert list(first_of_kinds(changed).values()) == [0, 2]
    platform = with_pools(Platform("three", tuple(processors)))
    assert len({a.name for a in CudaEvaluator("cpu").apart(platform, 2)}) == 2 * len(APART)
    workload, graph = workload_of("a×2"), chain_graph(3)
    space = WorkloadSpace(workload, merge("test", [(i.name, graph) for i in workload.instances]), platform, 2)
    used = {stage.processor for b in workload_baselines(space)[0] for stage in b.plan.stages}
    assert used == {"stream0", "stream1:f32"}
