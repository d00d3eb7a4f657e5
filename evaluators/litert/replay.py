"""A plan of a workload on the lanes of a crew: a run of it is a run of the whole workload."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence

from evaluators.litert.berth import Berth
from evaluators.litert.board import Board, SharedBoard, board_head
from evaluators.litert.crew import Crew
from evaluators.litert.lanes import Request
from evaluators.litert.workbench import Workbench
from evaluators.workload.outcome import Outcome, outcome
from evaluators.workload.setting import Setting
from search_spaces.errors import UnavailableError
from search_spaces.plan import Dispatch

_READY_LIMIT_S = 30.0
_LOOK_S, _NEAR_S = 0.02, 0.002
_SLACK_S, _LIMIT_FACTOR = 1.0, 50.0
_MOST_BIRTHS = 4  # of one process in one run


class Replay:
    """Runs a plan's workload; see the module.

    A model that crashes, or hangs, is taken out: its requests fail, its process is started anew, and all other models
    go on. ``failures`` tells of it, by seat; later runs leave it out.

    Args:
        berths: of each seat of ``found``.
        run_s: how long a job may take while nothing is known of it.
    """

    def __init__(
        self, found: Setting, dispatch: Dispatch, berths: Sequence[Berth], crew: Crew, bench: Workbench, run_s: float
    ) -> None:
        self.failures: dict[int, str] = {}
        self._found, self._berths, self._crew, self._bench = found, tuple(berths), crew, bench
        self._head = board_head(found, dispatch)
        self._limits_s = [run_s] * len(self._berths)
        self._births_before: dict[str, int] = {}

    def run(self) -> Outcome:
        """Run the workload once.

        Raises:
            UnavailableError: no request was answered, or lanes cannot be started.
        """
        self._births_before = dict(self._crew.births)
        with SharedBoard(self._head) as shared:
            board = shared.board
            for seat in self.failures:
                board.desk.fail(seat)
            processes = self._processes()
            for process in processes:
                self._enter(process, shared)
            with board.held():
                now_ns = board.desk.store[0] = time.perf_counter_ns()
                woken = board.step(now_ns)
            board.ring(woken)
            self._attend(shared, set(processes))
            if len(self.failures) == len(self._berths):
                raise UnavailableError(f"every model failed; the first: {next(iter(self.failures.values()))}")
            found = outcome(board.desk, self._found.stages, self._found.lanes)
        self._learn(found)
        return found

    def _processes(self) -> dict[str, list[int]]:
        """Return the processes that have something to do, with their lanes."""
        found: dict[str, set[int]] = {}
        for number, seat in enumerate(self._found.seats):
            if number not in self.failures:
                for lane in {lane for lanes in seat.lanes for lane in lanes}:
                    found.setdefault(self._bench.process(self._found.lanes[lane]), set()).add(lane)
        return {process: sorted(lanes) for process, lanes in found.items()}

    def _enter(self, process: str, shared: SharedBoard) -> None:
        """Send the lanes of a process to the desk, and wait until they listen; bind anew what was lost."""
        lanes = self._processes()[process]
        programs = []
        for number, (seat, berth) in enumerate(zip(self._found.seats, self._berths, strict=True)):
            if number in self.failures or process not in berth.processes:
                continue
            berth.bind()
            mine = {lane for lanes_ in seat.lanes for lane in lanes_}.intersection(lanes)
            programs += [[lane, number, berth.program(process)] for lane in sorted(mine)]
        sizes = {"store_nbytes": shared.store_nbytes, "bells_nbytes": shared.bells_nbytes}
        head = {"op": "jobs", "board": shared.head, "lanes": lanes, "programs": programs, **sizes}
        self._crew.send(process, Request(head, fds=[shared.store_fd, shared.bells_fd]))
        deadline_s = time.monotonic() + _READY_LIMIT_S
        for _ in lanes:
            while not shared.board.listens():
                if time.monotonic() > deadline_s or self._crew.answers([process], 1e-3):
                    raise UnavailableError(f"processor {process!r} {self._crew.end(process)} before its first job")

    def _attend(self, shared: SharedBoard, working: set[str]) -> None:
        """Stay until all lanes have left the desk: let requests in when they come, look after lanes that are silent."""
        board = shared.board
        while working:
            left_s = (board.desk.next_arrival_ns() - time.perf_counter_ns()) * 1e-9
            due = left_s < _NEAR_S
            if due:
                time.sleep(max(0.0, left_s))
            answers = self._crew.answers(sorted(working), 0.0 if due else min(left_s - _NEAR_S, _LOOK_S))
            for process, answer in answers.items():
                working.discard(process)
                if answer is None:
                    self._lost(shared, process, self._crew.end(process), working)
                elif "error" in answer:
                    self._crew.end(process)
                    self._lost(shared, process, str(answer["error"]), working)
                for seat, status in (answer or {}).get("failed", ()):
                    self.failures[seat] = f"the runtime failed in a job: status {status}"
            self._end_what_hangs(shared, working)
            if due:
                with board.held():
                    woken = board.step(time.perf_counter_ns())
                board.ring(woken)

    def _end_what_hangs(self, shared: SharedBoard, working: set[str]) -> None:
        desk, now_ns = shared.board.desk, time.perf_counter_ns()
        processes = self._processes()
        for process in sorted(working):
            for lane in processes.get(process, ()):
                if (job := desk.on(lane)) < 0:
                    continue
                seat, started_ns = desk.whose(job)[0], desk.started_ns(job)  # 0 between two jobs
                if started_ns and (now_ns - started_ns) * 1e-9 > self._limits_s[seat]:
                    working.discard(process)
                    self._crew.end(process)
                    self._lost(shared, process, f"gave no answer within {self._limits_s[seat]:.0f} s", working)
                    break

    def _lost(self, shared: SharedBoard, process: str, reason: str, working: set[str]) -> None:
        """Take out the models whose jobs a lost process was running, and start it anew for the others."""
        board, desk = shared.board, shared.board.desk
        lanes = self._processes().get(process, [])
        for lane in lanes:
            board.release(lane)
        busy = {lane: desk.whose(desk.on(lane))[0] for lane in lanes if desk.on(lane) >= 0}
        self._take_out(board, busy.values(), f"processor {process!r} {reason}", free=busy)
        if process not in self._processes() or desk.over:
            return
        ended = self._crew.births.get(process, 0) - self._births_before.get(process, 0)
        problem = f"processor {process!r} {reason} repeatedly" if ended > _MOST_BIRTHS else ""
        try:
            if not problem:
                self._enter(process, shared)
        except UnavailableError as error:
            problem = error.what
        if problem:
            mine = [n for n, b in enumerate(self._berths) if n not in self.failures and process in b.processes]
            self._take_out(board, mine, problem)
            return
        working.add(process)
        board.ring(self._processes().get(process, ()))  # what was given to it meanwhile

    def _take_out(self, board: Board, seats: Iterable[int], reason: str, free: Iterable[int] = ()) -> None:
        """Let no more jobs of some instances begin.

        Args:
            free: lanes that died with a job.
        """
        with board.held():
            now_ns = time.perf_counter_ns()
            for seat in seats:
                self.failures[seat] = reason
                board.desk.fail(seat)
            for lane in free:
                board.desk.finish(lane, now_ns)
            woken = board.step(now_ns)
        board.ring(woken)

    def _learn(self, found: Outcome) -> None:
        """Set limits by what jobs took: one that takes many times as long hangs."""
        times: dict[int, list[float]] = {}
        for event in found.timeline.events:
            times.setdefault(event.stage, []).append(event.end_s - event.start_s)
        for number, stages in enumerate(self._found.stages):
            known = [statistics.median(times[s]) for s in stages if s in times]
            if known:
                limit_s = _SLACK_S + _LIMIT_FACTOR * len(self._berths) * max(known)
                self._limits_s[number] = min(self._limits_s[number], limit_s)
