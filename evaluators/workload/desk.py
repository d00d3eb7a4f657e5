"""The desk at which the jobs of several models queue for lanes (seed 001): the law of runner and simulator alike.

A request of an instance is a row of jobs, one after another; an instance works on one request at a time, and the others
wait in its own bounded queue. So at most one job of each instance is in the job queue, which is therefore bounded too.
Whenever a job becomes ready or ends, the queue is gone through in order, and each job starts on the first of its lanes
that is free, as are all lanes that this one excludes. A job that finds none claims its lanes: no later one may take
them, or what they exclude. So a job waits for those before it in the queue and no other, and under ``fifo``, where the
queue only grows at its end, none waits for ever.

All that changes is kept in one row of whole numbers, which several processes may share; times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass

from search_spaces.plan import Dispatch

IDLE, READY, RUNNING, OVER = range(4)
REJECTED, FAILED = -1, -2
"""When a request ended that was turned away, or whose model failed; 0: it has not ended."""

NEVER_NS = 1 << 62
_HEAD = 1  # begin of the run
_STATUS, _REQUEST, _JOB, _READY, _LANE, _COME, _FIELDS = range(7)


@dataclass(frozen=True, slots=True)
class Seat:
    """One instance as the desk sees it.

    Attributes:
        lanes: of each job, those that may take it, the preferred one first.
        releases_ns: when each request comes, after the begin; of a closed loop, when the first one does.
        requests: how many come.
        closed: whether each request comes when the one before has ended.
        priority: the larger, the sooner.
        deadline_ns: after its arrival; 0 for none.
        queue: most requests that wait.
    """

    lanes: tuple[tuple[int, ...], ...]
    releases_ns: tuple[int, ...]
    requests: int
    closed: bool = False
    priority: int = 0
    deadline_ns: int = 0
    queue: int = 64


class Desk:
    """See the module.

    Args:
        seats: instances, those first that go first among equals.
        excluded: for each lane a bit set of the lanes that cannot run while it does, itself among them.
        dispatch: the order of the queue.
        store: :meth:`size` numbers, all 0 at first; what others may share.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        excluded: Sequence[int],
        dispatch: Dispatch,
        store: MutableSequence[int] | None = None,
    ) -> None:
        self.seats = tuple(seats)
        self._excluded = tuple(excluded)
        self._dispatch = dispatch
        self._lanes_at = _HEAD + _FIELDS * len(self.seats)
        self._records: list[int] = []
        self._runs: list[int] = []
        end = self._lanes_at + len(self._excluded)
        for seat in self.seats:
            self._records.append(end)
            end += 2 * seat.requests
            self._runs.append(end)
            end += 3 * seat.requests * len(seat.lanes)
        self.size = end
        self.store = [0] * end if store is None else store

    def begin(self, now_ns: int) -> None:
        """Start a run: forget everything."""
        store = self.store
        store[: self.size] = [0] * self.size
        store[0] = now_ns
        for lane in range(len(self._excluded)):
            store[self._lanes_at + lane] = -1

    def arrive(self, now_ns: int) -> None:
        """Take up the requests that have come by now; one that finds its instance's queue full is turned away."""
        store = self.store
        for k, seat in enumerate(self.seats):
            at = _HEAD + _FIELDS * k
            if store[at + _STATUS] == OVER:
                continue
            while store[at + _COME] < len(seat.releases_ns):
                number = store[at + _COME]
                came_ns = store[0] + seat.releases_ns[number]
                if came_ns > now_ns:
                    break
                store[at + _COME] = number + 1
                store[self._records[k] + 2 * number] = came_ns
                if store[at + _STATUS] == IDLE:
                    store[at + _REQUEST] = number
                    self._queue(at, came_ns)
                elif self._waiting(k) > seat.queue:
                    store[self._records[k] + 2 * number + 1] = REJECTED

    def next_arrival_ns(self) -> int:
        """Return when the next request comes by itself."""
        store = self.store
        found = NEVER_NS
        for k, seat in enumerate(self.seats):
            at = _HEAD + _FIELDS * k
            if store[at + _STATUS] != OVER and store[at + _COME] < len(seat.releases_ns):
                found = min(found, store[0] + seat.releases_ns[store[at + _COME]])
        return found

    def start(self, now_ns: int) -> list[tuple[int, int]]:
        """Give jobs to lanes; return instance and lane of each that begins now."""
        store = self.store
        queue = sorted(
            (self._key(k), k) for k in range(len(self.seats)) if store[_HEAD + _FIELDS * k + _STATUS] == READY
        )
        taken = 0
        for lane in range(len(self._excluded)):
            if store[self._lanes_at + lane] >= 0:
                taken |= 1 << lane
        found = []
        for _, k in queue:
            at = _HEAD + _FIELDS * k
            lanes = self.seats[k].lanes[store[at + _JOB]]
            for lane in lanes:
                if not self._excluded[lane] & taken:
                    found.append((k, lane))
                    taken |= 1 << lane
                    store[at + _STATUS], store[at + _LANE] = RUNNING, lane
                    store[self._lanes_at + lane] = k
                    store[self._run(k)] = now_ns
                    store[self._run(k) + 2] = lane
                    break
            else:
                for lane in lanes:
                    taken |= 1 << lane
        return found

    def finish(self, lane: int, now_ns: int) -> None:
        """Take note that the job on a lane has ended."""
        store = self.store
        k = store[self._lanes_at + lane]
        at = _HEAD + _FIELDS * k
        store[self._lanes_at + lane] = -1
        store[self._run(k) + 1] = now_ns
        store[at + _JOB] += 1
        if store[at + _JOB] < len(self.seats[k].lanes):
            self._queue(at, now_ns)
        else:
            self._ended(k, now_ns)

    def fail(self, k: int) -> None:
        """Take an instance out: its request fails, and all that are still to come."""
        store, seat = self.store, self.seats[k]
        at = _HEAD + _FIELDS * k
        if store[at + _STATUS] == RUNNING:
            store[self._lanes_at + store[at + _LANE]] = -1
        store[at + _STATUS] = OVER
        for number in range(seat.requests):
            ended = self._records[k] + 2 * number + 1
            if store[ended] == 0:
                store[ended] = FAILED

    def on(self, lane: int) -> int:
        """Return the instance that a lane works for, or -1."""
        return self.store[self._lanes_at + lane]

    def job(self, k: int) -> int:
        """Return which of its jobs an instance is at."""
        return self.store[_HEAD + _FIELDS * k + _JOB]

    def started_ns(self, k: int) -> int:
        """Return when the running job of an instance began."""
        return self.store[self._run(k)]

    def mark(self, k: int, now_ns: int) -> None:
        """Put right when the running job of an instance began."""
        self.store[self._run(k)] = now_ns

    @property
    def over(self) -> bool:
        """Whether all requests have ended."""
        return all(self.store[_HEAD + _FIELDS * k + _STATUS] == OVER for k in range(len(self.seats)))

    def requests(self, k: int) -> list[tuple[int, int]]:
        """Return when each request of an instance came and ended, or how; see :data:`REJECTED`."""
        first, count = self._records[k], self.seats[k].requests
        flat = list(self.store[first : first + 2 * count])
        return list(zip(flat[::2], flat[1::2], strict=True))

    def runs(self, k: int) -> list[list[tuple[int, int, int]]]:
        """Return start, end and lane of each job of each request of an instance; zeros where it did not run."""
        jobs, first = len(self.seats[k].lanes), self._runs[k]
        flat = list(self.store[first : first + 3 * jobs * self.seats[k].requests])
        rows = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
        return [rows[i : i + jobs] for i in range(0, len(rows), jobs)]

    def _key(self, k: int) -> tuple[int, ...]:
        """Return by what a ready job is queued: the least first."""
        at = _HEAD + _FIELDS * k
        if self._dispatch in {"fifo", "static"}:
            return (self.store[at + _READY],)
        seat = self.seats[k]
        came_ns = self.store[self._records[k] + 2 * self.store[at + _REQUEST]]
        if self._dispatch == "priority":
            return -seat.priority, came_ns
        return came_ns + seat.deadline_ns if seat.deadline_ns else NEVER_NS, came_ns

    def _run(self, k: int) -> int:
        """Return where the times of an instance's present job are kept."""
        at = _HEAD + _FIELDS * k
        jobs = len(self.seats[k].lanes)
        return self._runs[k] + 3 * (self.store[at + _REQUEST] * jobs + self.store[at + _JOB])

    def _queue(self, at: int, now_ns: int) -> None:
        self.store[at + _STATUS], self.store[at + _READY] = READY, now_ns

    def _waiting(self, k: int) -> int:
        """Return how many requests have come, and neither begun nor been turned away."""
        at = _HEAD + _FIELDS * k
        numbers = range(self.store[at + _REQUEST] + 1, self.store[at + _COME])
        return sum(self.store[self._records[k] + 2 * n + 1] == 0 for n in numbers)

    def _ended(self, k: int, now_ns: int) -> None:
        """Go on with the next request of an instance."""
        store, seat = self.store, self.seats[k]
        at, records = _HEAD + _FIELDS * k, self._records[k]
        store[records + 2 * store[at + _REQUEST] + 1] = now_ns
        store[at + _JOB] = 0
        number = store[at + _REQUEST] + 1
        if seat.closed and number < seat.requests:
            store[at + _REQUEST] = number
            store[records + 2 * number] = now_ns
            self._queue(at, now_ns)
            return
        while number < store[at + _COME] and store[records + 2 * number + 1] == REJECTED:
            number += 1
        store[at + _REQUEST] = min(number, seat.requests - 1)
        if number >= seat.requests:
            store[at + _STATUS] = OVER
        elif number < store[at + _COME]:
            self._queue(at, now_ns)
        else:
            store[at + _STATUS] = IDLE
