"""Prices of a workload's jobs: what a log may hold, and what is timed when triples are missing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from evaluators.schedule import Event, Timeline
from evaluators.workload.lowered import Lowerings
from evaluators.workload.outcome import Outcome, Request
from evaluators.workload.prices import JobTimer, PriceTable
from evaluators.workload.setting import Setting
from search_spaces.core.decoded_plan import RankSet
from search_spaces.core.errors import RunFolderError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import merge
from search_spaces.core.plan import LayerRanks
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.workload import workload_of
from search_spaces.models import load
from search_spaces.rewrites.lower import lowering
from tests.support.sentences import fails, says

MODEL = "vgg11@0.25/32"
PROCESSORS = [Processor(name, "cpu", {name: 1.0}, name) for name in ("good", "bad")]
TABLE = PriceTable(
    {"m": {"good": 2.0}},
    {"m": {"good": (1.0, 0.5)}},
    {"good": 0.25},
    {"m": {"good|good": 1.5}},
    {"m": {"good": {"1: 8x8": 0.3}}},
)


def alone(found: Setting, parts: Sequence[tuple[Graph, Sequence[int]]], runs: int) -> list[Outcome]:
    """Run a model on processors of which one has no memory left; every job takes a millisecond."""
    processor = found.processors[found.clients[0].processors[0][0]]
    if processor == "bad":
        raise UnavailableError("no memory is left")
    ((_, cuts),) = parts
    jobs = len(cuts) + 1
    events = tuple(Event(i, processor, i * 1e-3, (i + 1) * 1e-3) for i in range(jobs))
    request = Request(0.0, jobs * 1e-3, rejected=False, missed=False)
    return [Outcome(((request,),), jobs * 1e-3, Timeline(events))] * runs


def never(found: Setting, parts: Sequence[tuple[Graph, Sequence[int]]], runs: int) -> list[Outcome]:
    pytest.fail("timed again")


def test_a_processor_that_does_not_run_a_decomposed_model_is_reported_and_the_others_are_timed() -> None:
    graph = load(MODEL)
    workload = workload_of(MODEL)
    lowerings = Lowerings(
        workload, merge("one", [(workload.instances[0].name, graph)]), Platform("two", tuple(PROCESSORS))
    )
    layers = [i for i, o in enumerate(graph.operators[1:], 1) if o.kind == "CONV_2D"][:2]
    first: RankSet = (LayerRanks(layers[0], 8, 8),)
    second: RankSet = (LayerRanks(layers[1], 8, 8),)
    messages: list[str] = []
    forgotten: list[Graph] = []

    def extended(table: PriceTable, sets: list[RankSet], timed: Any = alone) -> PriceTable:
        messages.clear()
        forgotten.clear()
        grids = {graph.digest: sets}
        timer = JobTimer(PROCESSORS, timed, messages.append)
        return timer.with_triples(table, [graph], grids, forgotten.append)

    empty = replace(TABLE, triple_s={})
    found = extended(empty, [first])
    assert {kind: set(times) for kind, times in found.triple_s[graph.digest].items()} == {"good": {str(first[0])}}
    says(messages[-1])
    assert [g.digest for g in forgotten] == [lowering(graph).decomposed_to_time(first).graph.digest]
    assert forgotten[0].digest == lowering(graph).decomposed(first).graph.digest
    assert extended(found, [first], never) == found
    assert messages == []
    more = extended(found, [first, second])
    assert set(more.triple_s[graph.digest]["good"]) == {str(first[0]), str(second[0])}
    says("\n".join(text for text in messages if text.startswith("timing")))
    assert lowerings.origin(lowering(graph).decomposed(second).graph) is graph
    assert lowerings.origin(graph) is graph


def test_prices_survive_their_log() -> None:
    found = PriceTable.from_json(json.loads(json.dumps(TABLE.to_json())))
    assert found.to_json() == json.loads(json.dumps(TABLE.to_json()))


@pytest.mark.parametrize("value", [5, None, [], "soon", {"m": None}, {"m": {"good": "soon"}}])
@pytest.mark.parametrize("name", ["whole_s", "operator_s", "slowed", "triple_s"])
def test_prices_that_are_not_nested_as_they_should_be_are_reported(name: str, value: Any) -> None:
    with fails(RunFolderError):
        PriceTable.from_json({**TABLE.to_json(), name: value})


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, None, "1", True, 10**400])
def test_prices_that_are_no_times_are_reported(value: Any) -> None:
    damaged: list[dict[str, Any]] = [
        {"whole_s": {"m": {"good": value}}},
        {"operator_s": {"m": {"good": [1.0, value]}}},
        {"job_s": {"good": value}},
        {"slowed": {"m": {"good|good": value}}},
        {"triple_s": {"m": {"good": {"1: 8x8": value}}}},
    ]
    for change in damaged:
        with fails(RunFolderError):
            PriceTable.from_json({**TABLE.to_json(), **change})
    for name in ("whole_s", "operator_s", "job_s", "slowed"):
        with fails(RunFolderError):
            PriceTable.from_json({key: known for key, known in TABLE.to_json().items() if key != name})


@pytest.mark.parametrize("name", ["whole_s", "operator_s", "slowed", "job_s", "operators"])
def test_prices_of_another_model_are_reported(name: str) -> None:
    graph = load(MODEL)
    whole = {graph.digest: {"good": 1.0}}
    each = {graph.digest: {"good": [0.1] * len(graph.operators)}}
    document: dict[str, Any] = {
        "whole_s": whole,
        "operator_s": each,
        "job_s": {"good": 0.0},
        "slowed": {graph.digest: {}},
    }
    PriceTable.from_json(document).check([graph])
    document |= {"operator_s": {graph.digest: {"good": [0.1]}}} if name == "operators" else {name: {}}
    with fails(RunFolderError):
        PriceTable.from_json(document).check([graph])
