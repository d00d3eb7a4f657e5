"""A session over many models gives back what the earlier ones needed, in its own process and in its workers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from evaluators.cost_model.calibrate_nets import random_network
from evaluators.litert.processors import make_processor
from evaluators.litert.program import largest
from evaluators.litert.session import LitertSession
from evaluators.litert.workers import Workers
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform
from search_spaces.models.litert import read_model
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.cuts import every_layer
from tests.support.models.litert_loading import loaded
from tests.support.narrowing import there

pytestmark = pytest.mark.litert

PROCESSOR = "cpu0"
MODELS, OPERATORS = 5, 8


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> list[Graph]:
    folder = tmp_path_factory.mktemp("many")
    found = []
    for number in range(MODELS):
        draft = random_network(f"many{number}", np.random.default_rng(number), OPERATORS)
        draft.write(folder / f"{draft.name}.tflite")
        found.append(read_model(folder / f"{draft.name}.tflite", draft.name))
    return found


@pytest.fixture
def session(graphs: list[Graph]) -> Iterator[LitertSession]:
    """Has room for the two largest models."""
    platform = Platform("here", (make_processor(PROCESSOR),))
    processors = Workers(platform)
    opened = LitertSession(platform, processors, 2 * max(map(largest, graphs)))
    try:
        yield opened
    finally:
        opened.close()
        processors.close()


def shared_nbytes(session: LitertSession) -> int:
    """Return the shared memory that the worker process has mapped."""
    (pid,) = session._workers.processes()
    lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    arenas = [i for i, line in enumerate(lines) if "/memfd:arena-" in line]
    return sum(int(lines[i + 1].split()[1]) << 10 for i in arenas)


def visit(session: LitertSession, graph: Graph) -> None:
    for cuts in (every_layer(graph)[:0], every_layer(graph)):
        plan = chain_plan(graph, cuts, [PROCESSOR] * (len(cuts) + 1))
        with closing(session.load(graph, plan)) as candidate:
            candidate.run(1)


def test_many_models_do_not_pile_up(session: LitertSession, graphs: list[Graph]) -> None:
    limit_nbytes = 2 * max(map(largest, graphs))
    assert sum(map(largest, graphs)) > limit_nbytes
    files = []
    for graph in graphs:
        visit(session, graph)
        gc.collect()
        files.append(len(list(Path("/proc/self/fd").iterdir())))
        assert shared_nbytes(session) <= limit_nbytes + (len(graphs) << 12)
    assert len(session._models) < len(graphs)
    # Our file of the memory, that of its mapping, and the one by which packed weights are held where they are.
    assert files[-1] <= files[0] + 3 * len(session._models)


def test_a_model_that_is_held_stays_and_one_that_went_comes_back(session: LitertSession, graphs: list[Graph]) -> None:
    first = graphs[0]
    held = loaded(session, first, chain_plan(first, (), [PROCESSOR]))
    held.run(1)
    before = [array.copy() for array in held.outputs()]
    for graph in graphs[1:]:
        visit(session, graph)
    held.run(1)
    assert all(np.array_equal(a, b) for a, b in zip(before, held.outputs(), strict=True))
    held.close()
    for graph in (*graphs[1:], first):
        visit(session, graph)
    with closing(loaded(session, first, chain_plan(first, (), [PROCESSOR]))) as again:
        again.run(1)
        assert all(np.array_equal(a, b) for a, b in zip(before, again.outputs(), strict=True))
        assert there(again.verify()).identical
