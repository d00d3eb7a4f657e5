"""Workloads in the process of the evaluator ``cuda``: who is captured where, and what is let go."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evaluators.cuda.devices import MAX_INSTANCES
from evaluators.cuda.session import CudaEvaluator
from evaluators.cuda.workload import CudaWorkload
from search_spaces.core.decoded_plan import RankSet
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import merge
from search_spaces.core.plan import LayerRanks
from search_spaces.core.pools import with_pools
from search_spaces.core.workload import workload_of
from search_spaces.models import load
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
    worker._capturing = list(range(MAX_INSTANCES))
    owners = [f"instance {i}" for i in range(MAX_INSTANCES)]
    first = [worker._stream_of(owner) for owner in owners]
    assert len(set(first)) == MAX_INSTANCES
    assert [worker._stream_of(owner) for _ in range(3) for owner in owners] == first * 3


@needs_torch
def test_the_process_lets_a_model_go_that_it_is_told_to_forget() -> None:
    from evaluators.cuda.worker import Worker

    worker, graph = Worker("cpu"), load("squeezenet1_1@0.25/32")
    kinds = [o.kind for o in graph.operators]
    jobs = [[list(range(len(kinds))), "f32", "stream0"]]
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
