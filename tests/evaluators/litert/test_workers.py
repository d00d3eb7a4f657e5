"""Workers that die, hang or are interrupted are named, and whatever happens nothing of them is left behind."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.litert.workers import WorkerError, Workers
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.spaces.chain import chain_plan
from tests.support.models.litert_loading import agrees, pid_of, signalled, single_cores, three_processors
from tests.support.sentences import fails

pytestmark = [pytest.mark.litert, pytest.mark.timing]

PLATFORM = three_processors()
PROCESSORS = [p.name for p in PLATFORM.processors]
SINGLES = single_cores(PLATFORM)


@pytest.fixture(scope="module")
def session(cache_folder: Path) -> Iterator[LitertSession]:
    with LitertEvaluator().prepare(PLATFORM) as opened:
        yield opened


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def works(session: LitertSession, graph: Graph) -> None:
    agrees(session, graph, chain_plan(graph, [5, 20], [SINGLES[0], SINGLES[-1], PROCESSORS[0]]))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda n: signal.Signals(n).name)
@pytest.mark.parametrize("which", [0, -1], ids=["leader", "other"])
def test_a_worker_that_dies_in_the_middle_is_named_and_the_session_goes_on(
    session: LitertSession, squeezenet: Graph, number: int, which: int
) -> None:
    plan = chain_plan(squeezenet, [5], [SINGLES[0], SINGLES[-1]])
    processor = plan.stages[which].processor
    candidate = session.load(squeezenet, plan)
    candidate.run(1)
    pid = pid_of(session, processor)
    with signalled(pid, number), pytest.raises(UnavailableError) as caught:
        candidate.run(2000)
    assert processor in str(caught.value)
    assert signal.Signals(number).name in str(caught.value)
    with fails(UnavailableError):
        candidate.run(1)
    candidate.close()
    candidate.close()
    works(session, squeezenet)
    assert not alive(pid)


@pytest.mark.parametrize("which", [0, -1], ids=["leader", "other"])
def test_a_worker_that_stops_answering_is_given_up(
    session: LitertSession, squeezenet: Graph, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = chain_plan(squeezenet, [5], [SINGLES[0], SINGLES[-1]])
    candidate = session.load(squeezenet, plan)
    pid = pid_of(session, plan.stages[which].processor)
    asked = Workers.ask_all
    with monkeypatch.context() as patch:
        patch.setattr(Workers, "ask_all", lambda self, requests, _, *more: asked(self, requests, 0.5, *more))
        with signalled(pid, signal.SIGSTOP), fails(UnavailableError) as caught:
            candidate.run(2000)
    assert any(processor in str(caught.value) for processor in SINGLES[:2])
    candidate.close()
    works(session, squeezenet)
    assert not alive(pid)


def test_the_fork_server_may_die_too(session: LitertSession, squeezenet: Graph) -> None:
    candidate = session.load(squeezenet, chain_plan(squeezenet, [5], [SINGLES[0], SINGLES[-1]]))
    candidate.run(1)
    with (
        signalled(session._workers._fork_servers["litert"].process.pid, signal.SIGKILL),
        pytest.raises(UnavailableError),
    ):
        candidate.run(5000)
    candidate.close()
    works(session, squeezenet)


def test_an_interrupt_in_the_middle_leaves_nothing_to_wait_for(session: LitertSession, squeezenet: Graph) -> None:
    candidate = session.load(squeezenet, chain_plan(squeezenet, [5], [SINGLES[0], SINGLES[-1]]))
    one_s = float(np.median(candidate.run(5).latency_s))
    begin_s = time.monotonic()
    with signalled(os.getpid(), signal.SIGINT), pytest.raises(KeyboardInterrupt):
        candidate.run(100_000)
    candidate.close()
    assert time.monotonic() - begin_s < 50_000 * one_s
    works(session, squeezenet)


def open_files() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except OSError:
            continue
    return sorted(f for f in found if any(word in f for word in ("arena", "edges", "socket", "tflite", "pipe")))


def children() -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid():
                found.add(int(entry.name))
    return found


def test_a_closed_session_leaves_no_process_no_file_and_no_memory(squeezenet: Graph) -> None:
    with LitertEvaluator().prepare(PLATFORM):
        pass  # its fork server stays, and serves the next
    gc.collect()
    files, processes = open_files(), children()
    with LitertEvaluator().prepare(PLATFORM) as opened:
        session: LitertSession = opened
        for fresh in (False, True):
            candidate = session.load(squeezenet, chain_plan(squeezenet, [7], [SINGLES[0], SINGLES[-1]]), fresh=fresh)
            candidate.run(2)
            candidate.verify()
            candidate.close()
        with pytest.raises(UnavailableError), signalled(pid_of(session, SINGLES[0]), signal.SIGKILL):
            session.load(squeezenet, chain_plan(squeezenet, (), [SINGLES[0]])).run(5000)
        works(session, squeezenet)
        processors = [pid_of(session, name) for name in session._workers._running]
    del session, opened, candidate
    gc.collect()
    assert open_files() == files
    assert children() == processes
    assert not any(alive(pid) for pid in processors)


def test_many_plans_do_not_pile_up_files_in_parent_or_processors(session: LitertSession, squeezenet: Graph) -> None:
    def count() -> list[int]:
        folders = [Path("/proc/self/fd"), *(Path(f"/proc/{pid_of(session, name)}/fd") for name in SINGLES[:2])]
        return [len(list(folder.iterdir())) for folder in folders]

    def cycle(fresh: bool) -> None:
        plan = chain_plan(squeezenet, [9, 20], [SINGLES[0], SINGLES[-1], SINGLES[0]])
        with closing(session.load(squeezenet, plan, fresh=fresh)) as candidate:
            candidate.run(2)

    cycle(fresh=False)
    cycle(fresh=True)
    gc.collect()
    before = count()
    for fresh in (False, True) * 4:
        cycle(fresh)
    gc.collect()
    parent, *processors = (now - then for now, then in zip(count(), before, strict=True))
    assert not any(processors)
    assert parent < 8  # one each time would be 8; what earlier tests left in the background may open or close some


def test_a_load_that_fails_leaves_nothing_behind(
    session: LitertSession, squeezenet: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = chain_plan(squeezenet, [11, 21], [SINGLES[0], SINGLES[-1], SINGLES[0]])
    works(session, squeezenet)
    gc.collect()
    before = open_files()
    asked = Workers.ask_each

    def refuse(
        self: Workers, requests: Mapping[str, Any], limit_s: float
    ) -> tuple[dict[str, Any], dict[str, WorkerError]]:
        refused = SINGLES[-1]
        answers, _ = asked(self, {name: request for name, request in requests.items() if name != refused}, limit_s)
        return answers, {refused: WorkerError(refused, "refused for a test", fatal=False, reported=True)}

    for fresh in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(Workers, "ask_each", refuse)
            with fails(UnavailableError):
                session.load(squeezenet, plan, fresh=fresh)
    gc.collect()
    assert open_files() == before
    assert all(entry.users == 0 for entry in session._stages._entries.values())
    works(session, squeezenet)


def test_sessions_one_after_another_have_one_fork_server(squeezenet: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def server() -> int:
        with LitertEvaluator().prepare(PLATFORM) as opened:
            assert isinstance(opened, LitertSession)
            works(opened, squeezenet)
            worker = Path(f"/proc/{pid_of(opened, SINGLES[0])}/stat")
            return int(worker.read_text().rpartition(")")[2].split()[1])

    first = server()
    assert server() == first
    monkeypatch.setenv("LD_BIND_NOW", "1")  # which the loader of libraries reads when a process starts
    assert server() != first


def test_a_fork_server_that_still_has_a_worker_is_not_kept(squeezenet: Graph) -> None:
    with LitertEvaluator().prepare(PLATFORM) as opened:
        assert isinstance(opened, LitertSession)
        works(opened, squeezenet)
        workers = opened._workers
        lost = workers._running.pop(SINGLES[0])  # as where an interrupt comes while it is ended
    end_s = time.monotonic() + 5.0
    while alive(lost.pid) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not alive(lost.pid)
    lost.channel.close()
    workers.close()  # a second time
