"""Plans run by LiteRT on this machine's cores: what they compute, when, where, and what happens when a lane dies."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluators.base import Evaluator
from evaluators.contract import check_timeline
from evaluators.litert.lanes import Lanes
from evaluators.litert.processors import local_platform
from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.testing import EvaluatorContract
from search_spaces.chain import chain_plan
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.models import load
from search_spaces.plan import Plan, Stage
from search_spaces.platform import Platform
from tests import strategies
from tests.litert_loading import loaded

pytestmark = pytest.mark.litert

FOUND = local_platform()
SINGLES = [p.name for p in FOUND.processors if len(p.options["cores"]) == 1]
two_cores = pytest.mark.skipif(len(SINGLES) < 2, reason="needs two cores")


def three_lanes() -> Platform:
    """All cores together and the first two of them alone, however many this machine has."""
    together = [p.name for p in FOUND.processors if p.name not in SINGLES]
    return FOUND.restrict([*together, *SINGLES[:2]])


PLATFORM = three_lanes()
LANES = [p.name for p in PLATFORM.processors]


@pytest.fixture(scope="module")
def session(cache_folder: Path) -> Iterator[LitertSession]:
    with LitertEvaluator().prepare(PLATFORM) as opened:
        yield opened


def pid_of(session: LitertSession, lane: str) -> int:
    return session._lanes._lanes[lane].pid


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class TestLitert(EvaluatorContract):
    measures = True

    def evaluator(self) -> Evaluator:
        class Small(LitertEvaluator):
            def platform(self) -> Platform:
                return PLATFORM

        return Small()

    def graph(self) -> Graph:
        return load("squeezenet1_1")


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_plan_on_any_lanes_computes_what_the_whole_model_computes(
    data: st.DataObject, session: LitertSession, squeezenet: Graph, mobilenet: Graph
) -> None:
    graph = data.draw(st.sampled_from([squeezenet, mobilenet]))
    plan = data.draw(
        st.one_of(strategies.placements(graph, PLATFORM, labels=6), strategies.chains(graph, PLATFORM)),
    )
    with closing(session.load(graph, plan)) as candidate:
        batch = candidate.run(3)
        assert batch.stage_s.shape == (3, len(plan.stages))
        assert batch.timeline is not None
        check_timeline(batch.timeline, graph, plan, PLATFORM)
        agreement = candidate.verify()
        assert agreement is not None
        assert agreement.identical


def test_a_plan_whose_outputs_are_wrong_is_noticed(session: LitertSession, squeezenet: Graph) -> None:
    plan = chain_plan(squeezenet, [5], [LANES[-1]] * 2)
    with closing(loaded(session, squeezenet, plan)) as candidate:
        candidate.run(1)
        output = squeezenet.outputs[0]
        candidate._view(output).reshape(-1)[3] += 1e-3
        agreement = candidate.verify()
    assert agreement is not None
    assert not agreement.accepted
    assert agreement.max_rel_error > 0


def branches(graph: Graph, first: str, second: str) -> Plan:
    """Run the two largest operators that read one tensor at the same time, as far as the lanes allow."""
    pair = max(
        (readers for readers in graph.consumers.values() if len(readers) == 2),
        key=lambda readers: sum(graph.tensors[t].nbytes for o in readers for t in graph.operators[o].outputs),
    )
    count = len(graph.operators)
    before, after = range(pair[0]), range(pair[1] + 1, count)
    assert pair[1] == pair[0] + 1
    stages = ((tuple(before), first), ((pair[0],), first), ((pair[1],), second), (tuple(after), first))
    return Plan(graph.digest, tuple(Stage(operators, lane) for operators, lane in stages))


def overlap_s(session: LitertSession, graph: Graph, plan: Plan) -> list[float]:
    """Return for how long stages 1 and 2 ran at the same time, in each of some inferences; below 0 is a pause."""
    found = []
    with closing(session.load(graph, plan)) as candidate:
        candidate.run(5)
        for _ in range(30):
            timeline = candidate.run(1).timeline
            assert timeline is not None
            at = {e.stage: e for e in timeline.events}
            found.append(min(at[1].end_s, at[2].end_s) - max(at[1].start_s, at[2].start_s))
    return found


@two_cores
def test_independent_branches_on_two_cores_run_at_the_same_time(session: LitertSession, squeezenet: Graph) -> None:
    one, two = SINGLES[:2]
    plan = branches(squeezenet, one, two)
    # What others run on this machine may hold one of the cores for most of such a row.
    rows = (overlap_s(session, squeezenet, plan) for _ in range(10))
    assert any(sum(o > 0 for o in row) > len(row) // 4 for row in rows)


@two_cores
def test_lanes_that_share_a_core_take_turns(session: LitertSession, squeezenet: Graph) -> None:
    together, alone = LANES[0], SINGLES[0]
    for pair in ((together, alone), (alone, together)):
        assert max(overlap_s(session, squeezenet, branches(squeezenet, *pair))) <= 0


def test_every_thread_of_a_lane_stays_on_its_cores_and_threads_share_none(
    session: LitertSession, squeezenet: Graph
) -> None:
    for processor in PLATFORM.processors:
        with closing(session.load(squeezenet, chain_plan(squeezenet, (), [processor.name]))) as candidate:
            candidate.run(2)
            tasks = list(Path(f"/proc/{pid_of(session, processor.name)}/task").iterdir())
            threads, cores = processor.options["threads"], processor.options["cores"]
            assert len(tasks) >= threads
            found = [os.sched_getaffinity(int(task.name)) for task in tasks]
            assert set().union(*found) == set(cores)
            if threads == len(cores):
                assert all(len(allowed) == 1 for allowed in found)


@contextmanager
def signalled(pid: int, number: int, after_s: float = 0.05) -> Iterator[None]:
    timer = threading.Timer(after_s, os.kill, (pid, number))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def works(session: LitertSession, graph: Graph) -> None:
    plan = chain_plan(graph, [5, 20], [SINGLES[0], SINGLES[-1], LANES[0]])
    with closing(session.load(graph, plan)) as candidate:
        candidate.run(3)
        agreement = candidate.verify()
        assert agreement is not None
        assert agreement.identical


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda n: signal.Signals(n).name)
@pytest.mark.parametrize("which", [0, -1], ids=["leader", "other"])
def test_a_lane_that_dies_in_the_middle_is_named_and_the_session_goes_on(
    session: LitertSession, squeezenet: Graph, number: int, which: int
) -> None:
    plan = chain_plan(squeezenet, [5], [SINGLES[0], SINGLES[-1]])
    lane = plan.stages[which].processor
    candidate = session.load(squeezenet, plan)
    candidate.run(1)
    pid = pid_of(session, lane)
    with signalled(pid, number), pytest.raises(UnavailableError) as caught:
        candidate.run(2000)
    assert lane in str(caught.value)
    assert signal.Signals(number).name in str(caught.value)
    with pytest.raises(UnavailableError, match="load the plan again"):
        candidate.run(1)
    candidate.close()
    candidate.close()
    works(session, squeezenet)
    assert not alive(pid)


@pytest.mark.parametrize("which", [0, -1], ids=["leader", "other"])
def test_a_lane_that_stops_answering_is_given_up(
    session: LitertSession, squeezenet: Graph, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = chain_plan(squeezenet, [5], [SINGLES[0], SINGLES[-1]])
    candidate = session.load(squeezenet, plan)
    pid = pid_of(session, plan.stages[which].processor)
    asked = Lanes.ask_all
    with monkeypatch.context() as patch:
        patch.setattr(Lanes, "ask_all", lambda self, requests, _, *more: asked(self, requests, 0.5, *more))
        with signalled(pid, signal.SIGSTOP), pytest.raises(UnavailableError, match="gave no answer within") as caught:
            candidate.run(2000)
    assert any(lane in str(caught.value) for lane in SINGLES[:2])
    candidate.close()
    works(session, squeezenet)
    assert not alive(pid)


def test_the_fork_server_may_die_too(session: LitertSession, squeezenet: Graph) -> None:
    candidate = session.load(squeezenet, chain_plan(squeezenet, [5], [SINGLES[0], SINGLES[-1]]))
    candidate.run(1)
    with signalled(session._lanes._zygotes["litert"].process.pid, signal.SIGKILL), pytest.raises(UnavailableError):
        candidate.run(5000)
    candidate.close()
    works(session, squeezenet)


def test_an_interrupt_in_the_middle_leaves_nothing_to_wait_for(session: LitertSession, squeezenet: Graph) -> None:
    candidate = session.load(squeezenet, chain_plan(squeezenet, [5], [SINGLES[0], SINGLES[-1]]))
    candidate.run(1)
    begin_s = time.monotonic()
    with signalled(os.getpid(), signal.SIGINT), pytest.raises(KeyboardInterrupt):
        candidate.run(2000)
    candidate.close()
    assert time.monotonic() - begin_s < 2.0
    works(session, squeezenet)


@two_cores
def test_a_plan_that_meets_at_hundreds_of_edges(session: LitertSession, mobilenet: Graph) -> None:
    count = len(mobilenet.operators)
    lanes = [SINGLES[i % 2] for i in range(count)]
    with closing(session.load(mobilenet, chain_plan(mobilenet, range(1, count), lanes))) as candidate:
        candidate.run(3)
        agreement = candidate.verify()
        assert agreement is not None
        assert agreement.identical


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
        lanes = [pid_of(session, name) for name in session._lanes._lanes]
        assert children() - processes
    del session, opened, candidate
    gc.collect()
    assert open_files() == files
    assert children() == processes
    assert not any(alive(pid) for pid in lanes)


def test_many_plans_do_not_pile_up_files_in_parent_or_lanes(session: LitertSession, squeezenet: Graph) -> None:
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
    parent, *lanes = (now - then for now, then in zip(count(), before, strict=True))
    assert not any(lanes)
    assert parent < 8  # one each time would be 8; what earlier tests left in the background may open or close some


def test_a_load_that_fails_leaves_nothing_behind(
    session: LitertSession, squeezenet: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = chain_plan(squeezenet, [11, 21], [SINGLES[0], SINGLES[-1], SINGLES[0]])
    works(session, squeezenet)
    gc.collect()
    before = open_files()
    asked = Lanes.ask

    def refuse(self: Lanes, lane: str, request: Any, limit_s: float) -> dict[str, Any]:
        if request.head["op"] == "compile" and lane == SINGLES[-1]:
            raise UnavailableError("refused for a test")
        return asked(self, lane, request, limit_s)

    for fresh in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(Lanes, "ask", refuse)
            with pytest.raises(UnavailableError, match="refused for a test"):
                session.load(squeezenet, plan, fresh=fresh)
    gc.collect()
    assert open_files() == before
    assert all(entry.users == 0 for entry in session._stages._entries.values())
    works(session, squeezenet)


def test_stages_are_shared_and_the_least_recently_used_go_first(squeezenet: Graph) -> None:
    limit_nbytes = 4_000_000
    lanes = Lanes(PLATFORM)
    lane = SINGLES[0]
    session = LitertSession(PLATFORM, lanes, limit_nbytes)
    try:
        entries = session._stages._entries

        def unused() -> int:
            return sum(e.nbytes for e in entries.values() if e.users == 0)

        def used() -> list[int]:
            return [e.number for e in entries.values() if e.users]

        first = chain_plan(squeezenet, [10], [lane] * 2)
        held = session.load(squeezenet, first)
        kept = used()
        for cut in (3, 12, 20, 28, 35):
            with closing(session.load(squeezenet, chain_plan(squeezenet, [cut], [lane] * 2))) as candidate:
                candidate.run(1)
                assert set(used()) >= set(kept)  # in use: never thrown out
            assert unused() <= limit_nbytes
        with closing(session.load(squeezenet, first)) as again:
            assert used() == kept
            again.run(1)
        with closing(session.load(squeezenet, first, fresh=True)) as other:
            assert used() == kept
            other.run(1)
        held.run(1)
        held.close()
        assert unused() <= limit_nbytes
        assert all(e.users == 0 for e in entries.values())
    finally:
        session.close()
        lanes.close()


def test_the_runtime_is_never_loaded_by_the_parent(tmp_path: Path, cache_folder: Path) -> None:
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from optimizer.cli import main\n"
        f"code = main(['--model', 'squeezenet1_1', '--budget', '3', '--max-stages', '2', '-q', '--json',"
        f" '--processors', '{SINGLES[0]}', '--out', sys.argv[1]])\n"
        "maps = Path('/proc/self/maps').read_text()\n"
        "loaded = sorted(m for m in sys.modules if m.startswith('ai_edge_litert.'))\n"
        "print(json.dumps([code, 'pywrap' in maps, loaded]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    # The package itself maps libLiteRt.so when it is imported for its schema; nothing that could call it is loaded.
    assert json.loads(run.stdout.splitlines()[-1]) == [0, False, ["ai_edge_litert.schema_py_generated"]]


@pytest.mark.parametrize("lanes", [[SINGLES[0]] * 4, SINGLES[:2] * 2 if len(SINGLES) > 1 else [SINGLES[0]] * 4])
def test_an_inference_over_its_limit_is_broken_off_and_the_next_one_is_whole(
    squeezenet: Graph, lanes: list[str]
) -> None:
    plan = chain_plan(squeezenet, (10, 20, 30), lanes)
    with LitertEvaluator().prepare(PLATFORM) as session, closing(session.load(squeezenet, plan)) as candidate:
        whole = candidate.run(3)
        limit_s = float(whole.stage_s[:, 0].max()) * 1e-3
        broken = candidate.run(5, stop_above_s=limit_s)
        assert len(broken.latency_s) == 1
        assert limit_s < broken.latency_s[0]
        assert broken.stage_s[0, 0] > 0
        assert not broken.stage_s[0, 1:].any()
        assert (candidate.run(2).stage_s > 0).all()
        agreement = candidate.verify()
        assert agreement is not None
        assert agreement.identical
