"""A session keeps models apart, and tells under what conditions it measures."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from evaluators.litert import stages
from evaluators.litert.candidate import blamed
from evaluators.litert.processors import local_platform
from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.litert.workers import Request, WorkerError
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform, Processor
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan
from tests.support.models.litert_loading import loaded
from tests.support.narrowing import there
from tests.support.sentences import fails, says

pytestmark = pytest.mark.litert

PLATFORM = local_platform()
PROCESSOR = next(p.name for p in PLATFORM.processors if len(p.options["cores"]) == 1)


@pytest.fixture
def session() -> Iterator[LitertSession]:
    with LitertEvaluator().prepare(PLATFORM.restrict([PROCESSOR])) as opened:
        yield opened


def with_other_weights(graph: Graph, path: Path) -> Graph:
    """Return a model of the same structure whose largest weights have the other sign."""
    assert graph.source is not None
    content = bytearray(graph.source.path.read_bytes())
    extent = max(graph.source.extents.values(), key=lambda e: e.nbytes)
    weights = np.frombuffer(content, np.float32, extent.nbytes // 4, extent.offset)
    np.negative(weights, out=weights)
    path.write_bytes(content)
    return load(str(path))


def test_models_of_one_structure_keep_their_own_weights(
    session: LitertSession, squeezenet: Graph, tmp_path: Path
) -> None:
    other = with_other_weights(squeezenet, tmp_path / "other.tflite")
    assert other.digest == squeezenet.digest
    outputs = []
    for graph in (squeezenet, other, squeezenet):
        for cuts in ((), (10, 20)):
            with closing(loaded(session, graph, chain_plan(graph, cuts, [PROCESSOR] * (len(cuts) + 1)))) as candidate:
                candidate.run(1)
                outputs.append(candidate.outputs()[0])
                assert there(candidate.verify()).identical
    assert np.array_equal(outputs[0], outputs[4])
    assert not np.array_equal(outputs[0], outputs[2])


def test_stages_that_were_cut_do_not_pile_up(
    session: LitertSession, squeezenet: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_MOST_CUT", 4)
    for cut in (5, 10, 15, 20, 5):
        session.load(squeezenet, chain_plan(squeezenet, [cut], [PROCESSOR] * 2)).close()
        assert len(session._stages._cut) <= 4


def test_a_session_tells_its_conditions(session: LitertSession, squeezenet: Graph) -> None:
    assert session.capabilities.conditions
    session.load(squeezenet, chain_plan(squeezenet, [], [PROCESSOR])).close()
    found = session.conditions()
    assert found["versions"].keys() == {"ai-edge-litert"}
    assert session._workers.processes() == [session._workers._running[PROCESSOR].pid]


def test_a_worker_that_was_stopped_between_two_stages_is_to_blame(squeezenet: Graph) -> None:
    processors = [p.name for p in PLATFORM.processors if len(p.options["cores"]) == 1][:2]
    if len(processors) < 2:
        pytest.skip("needs two cores")
    with LitertEvaluator().prepare(PLATFORM.restrict(processors)) as session:
        candidate = loaded(session, squeezenet, chain_plan(squeezenet, [10], processors))
        times = np.zeros((5, 2, 2), np.int64)
        times[:3] = 7  # three inferences are over, and the last processor had written down its end when it was stopped
        for stopped, number in ((processors[1], 1), (processors[0], 0)):
            error = WorkerError(processors[0], "gave no answer", fatal=True, silent=processors, stopped=[stopped])
            text = blamed(error, times, candidate.plan, candidate._schedule)
            assert text.startswith(f"processor {stopped!r} ")
            assert f" stage {number} " in text
            says(text)
        own = WorkerError(processors[0], "LiteRT failed in stage 1: status 5", fatal=True, reported=True)
        assert blamed(own, times, candidate.plan, candidate._schedule) == own.what, "it knows best"
        pid = session._workers._running[processors[1]].pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerError) as caught:
            session._workers.ask(processors[1], Request({"op": "arena", "id": -1, "nbytes": 0}), 0.3)
        assert caught.value.stopped == (processors[1],)


def test_a_device_that_is_only_described_cannot_be_measured() -> None:
    described = Platform("phone", (Processor("big", "cpu", {"big": 1.0}, "big"),))
    with (
        fails(UnavailableError),
        LitertEvaluator().prepare(described),
    ):
        pass
