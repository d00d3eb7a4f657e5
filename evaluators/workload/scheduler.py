"""The job scheduler of several models, used by both the measuring host and the simulator.

A request of an instance is a graph of jobs. A job is ready when the jobs that it reads from have ended. An instance
works on one request at a time; further requests wait in its own bounded queue, so each job of an instance is in the job
queue at most once, and that queue is bounded too.

Whenever a job becomes ready or ends, the queue is scanned in order. A job starts on the first of its processors that
is free and excludes only free ones. If there is none, the job reserves its processors: no later job may take them, or
those that they exclude. So a job waits only for jobs before it in the queue. Under ``fifo``, where the queue grows only
at its end, no job starves.

The whole state is one array of integers, which several processes may share; times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

from search_spaces.core.plan import Dispatch

IDLE, BUSY, OVER = range(3)
REJECTED, FAILED = -1, -2
"""End times of a request that was rejected, or whose model failed; 0: it has not ended."""

NEVER_NS = 1 << 62
_HEAD = 1  # beginning of the run
_STATUS, _REQUEST, _COME, _LEFT, _FIELDS = range(5)  # of an instance; _LEFT: unfinished jobs of its request
_STATE, _READY, _JOB_FIELDS = range(3)  # of a job of its request
_WAITS, _QUEUED, _RUNS, _DONE = range(4)


@dataclass(frozen=True, slots=True)
class QueueClient:
    """One instance, as input of the scheduler.

    Attributes:
        processors: for each job, those that may run it, the preferred one first.
        releases_ns: arrival of each request, from the beginning of the run; of a closed loop, of the first one only.
        requests: number of requests.
        closed: whether each request comes when the one before has ended.
        priority: larger is served sooner.
        deadline_ns: after the arrival of a request; 0 for none.
        queue: capacity of the queue of waiting requests.
        after: for each job, a bit set of the earlier jobs that it waits for; () where each waits for the one before.
    """

    processors: tuple[tuple[int, ...], ...]
    releases_ns: tuple[int, ...]
    requests: int
    closed: bool = False
    priority: int = 0
    deadline_ns: int = 0
    queue: int = 64
    after: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QueueClient:
        """Build a client from its fields as plain values."""
        lists = {name: tuple(data[name]) for name in ("releases_ns", "after")}
        return cls(**{**data, **lists, "processors": tuple(map(tuple, data["processors"]))})

    def needs(self, job: int) -> list[int]:
        """Return the jobs that a job waits for, ascending."""
        if not self.after:
            return [job - 1] if job else []
        found, bits = [], self.after[job]
        while bits:
            found.append((bits & -bits).bit_length() - 1)
            bits &= bits - 1
        return found


class Scheduler:
    """The job scheduler's state and rules; jobs are numbered instance by instance.

    Args:
        clients: instances; among equals, earlier ones are served first.
        excluded: for each processor, a bit set of the processors that cannot run while it does, itself included.
        dispatch: the order of the queue.
        store: ``size`` integers, all 0 at first, which other processes may share.
    """

    def __init__(
        self,
        clients: Sequence[QueueClient],
        excluded: Sequence[int],
        dispatch: Dispatch,
        store: MutableSequence[int] | None = None,
    ) -> None:
        self.clients = tuple(clients)
        self._excluded = tuple(excluded)
        self._dispatch = dispatch
        self._jobs_at = _HEAD + _FIELDS * len(self.clients)
        self._first: list[int] = []  # number of the first job of each instance
        self._owner: list[int] = []  # instance of each job
        self._processors = [processors for client in self.clients for processors in client.processors]
        self._needs: list[list[int]] = []
        self._readers: list[list[int]] = []
        for k, client in enumerate(self.clients):
            first = len(self._owner)
            self._first.append(first)
            for job in range(len(client.processors)):
                needs = [first + other for other in client.needs(job)]
                for other in needs:
                    self._readers[other].append(first + job)
                self._owner.append(k)
                self._needs.append(needs)
                self._readers.append([])
        self._queue_at = self._jobs_at + _JOB_FIELDS * len(self._owner)  # length of the queue, then its jobs
        self._processors_at = self._queue_at + 1 + len(self._owner)
        self._records: list[int] = []
        self._runs: list[int] = []
        end = self._processors_at + len(self._excluded)
        for client in self.clients:
            self._records.append(end)
            end += 2 * client.requests
            self._runs.append(end)
            end += 3 * client.requests * len(client.processors)
        self.size = end
        self.store = [0] * end if store is None else store

    def begin(self, now_ns: int) -> None:
        """Start a run with a cleared state."""
        store = self.store
        store[: self.size] = [0] * self.size
        store[0] = now_ns
        for processor in range(len(self._excluded)):
            store[self._processors_at + processor] = -1

    def arrive(self, now_ns: int) -> None:
        """Accept the requests that have come by now, or reject them if the instance's queue is full."""
        store = self.store
        for k, client in enumerate(self.clients):
            at = _HEAD + _FIELDS * k
            if store[at + _STATUS] == OVER:
                continue
            while store[at + _COME] < len(client.releases_ns):
                number = store[at + _COME]
                came_ns = store[0] + client.releases_ns[number]
                if came_ns > now_ns:
                    break
                store[at + _COME] = number + 1
                store[self._records[k] + 2 * number] = came_ns
                if store[at + _STATUS] == IDLE:
                    self._work_on(k, number, came_ns)
                elif self._waiting(k) > client.queue:
                    store[self._records[k] + 2 * number + 1] = REJECTED

    def next_arrival_ns(self) -> int:
        """Return when the next request comes that depends on no other; :data:`NEVER_NS` if there is none."""
        store = self.store
        found = NEVER_NS
        for k, client in enumerate(self.clients):
            at = _HEAD + _FIELDS * k
            if store[at + _STATUS] != OVER and store[at + _COME] < len(client.releases_ns):
                found = min(found, store[0] + client.releases_ns[store[at + _COME]])
        return found

    def start(self, now_ns: int) -> list[tuple[int, int]]:
        """Start all jobs that can start now; return the job and processor of each."""
        store = self.store
        first = self._queue_at + 1
        waiting = store[first : first + store[self._queue_at]]
        if not len(waiting):
            return []
        queue = [n for n in waiting if store[_HEAD + _FIELDS * self._owner[n] + _STATUS] == BUSY]
        if len(queue) > 1:
            queue.sort(key=self._key)
        left: list[int] = []
        taken = 0
        for processor, n in enumerate(store[self._processors_at : self._processors_at + len(self._excluded)]):
            if n >= 0:
                taken |= 1 << processor
        found: list[tuple[int, int]] = []
        for n in queue:
            processors = self._processors[n]
            for processor in processors:
                if not self._excluded[processor] & taken:
                    found.append((n, processor))
                    taken |= 1 << processor
                    store[self._jobs_at + _JOB_FIELDS * n + _STATE] = _RUNS
                    store[self._processors_at + processor] = n
                    run = self._run(n)
                    store[run], store[run + 2] = now_ns, processor
                    break
            else:
                left.append(n)
                for processor in processors:
                    taken |= 1 << processor
        store[self._queue_at] = len(left)
        store[first : first + len(left)] = left
        return found

    def finish(self, processor: int, now_ns: int) -> None:
        """Mark the job on a processor as ended; the processor is free."""
        store = self.store
        n = store[self._processors_at + processor]
        store[self._processors_at + processor] = -1
        k = self._owner[n]
        at = _HEAD + _FIELDS * k
        if store[at + _STATUS] == OVER:
            return
        store[self._run(n) + 1] = now_ns
        store[self._jobs_at + _JOB_FIELDS * n + _STATE] = _DONE
        store[at + _LEFT] -= 1
        if not store[at + _LEFT]:
            self._ended(k, now_ns)
            return
        for reader in self._readers[n]:
            needs = self._needs[reader]
            if len(needs) == 1 or all(store[self._jobs_at + _JOB_FIELDS * m + _STATE] == _DONE for m in needs):
                self._queue(reader, now_ns)

    def fail(self, k: int) -> None:
        """Stop an instance: its request and all later ones fail; its running jobs end as usual."""
        store, client = self.store, self.clients[k]
        store[_HEAD + _FIELDS * k + _STATUS] = OVER
        for number in range(client.requests):
            ended = self._records[k] + 2 * number + 1
            if store[ended] == 0:
                store[ended] = FAILED

    def on(self, processor: int) -> int:
        """Return the job that a processor runs, or -1."""
        return self.store[self._processors_at + processor]

    def whose(self, n: int) -> tuple[int, int]:
        """Return the instance of a job, and its index among the instance's jobs."""
        k = self._owner[n]
        return k, n - self._first[k]

    def ran_on(self, n: int) -> int:
        """Return the processor of a job that has started in its instance's current request."""
        return self.store[self._run(n) + 2]

    def started_ns(self, n: int) -> int:
        """Return when a running job began."""
        return self.store[self._run(n)]

    def mark(self, n: int, now_ns: int) -> None:
        """Correct the start time of a running job."""
        self.store[self._run(n)] = now_ns

    @property
    def over(self) -> bool:
        """Whether all requests have ended."""
        return all(self.store[_HEAD + _FIELDS * k + _STATUS] == OVER for k in range(len(self.clients)))

    def requests(self, k: int) -> list[tuple[int, int]]:
        """Return arrival and end of each request of an instance; the end may be :data:`REJECTED` or :data:`FAILED`."""
        first, count = self._records[k], self.clients[k].requests
        flat = list(self.store[first : first + 2 * count])
        return list(zip(flat[::2], flat[1::2], strict=True))

    def runs(self, k: int) -> list[list[tuple[int, int, int]]]:
        """Return start, end and processor of each job of each request of an instance; zeros where it did not run."""
        jobs, first = len(self.clients[k].processors), self._runs[k]
        flat = list(self.store[first : first + 3 * jobs * self.clients[k].requests])
        rows = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
        return [rows[i : i + jobs] for i in range(0, len(rows), jobs)]

    def copy(self, k: int, other: Scheduler, of: int, processors: Sequence[int]) -> None:
        """Take the requests and runs of an instance from another scheduler whose run is over.

        Args:
            k: the instance.
            other, of: the other scheduler, and the instance's number there.
            processors: for each processor there, its number here.
        """
        requests = [value for request in other.requests(of) for value in request]
        runs = [value for row in other.runs(of) for start, end, p in row for value in (start, end, processors[p])]
        for first, values in ((self._records[k], requests), (self._runs[k], runs)):
            for place, value in enumerate(values, first):
                self.store[place] = value

    def _key(self, n: int) -> tuple[int, ...]:
        """Return the sort key of a ready job in the queue."""
        if self._dispatch in {"fifo", "static"}:
            return self.store[self._jobs_at + _JOB_FIELDS * n + _READY], n
        k = self._owner[n]
        client = self.clients[k]
        came_ns = self.store[self._records[k] + 2 * self.store[_HEAD + _FIELDS * k + _REQUEST]]
        if self._dispatch == "priority":
            return -client.priority, came_ns, n
        return came_ns + client.deadline_ns if client.deadline_ns else NEVER_NS, came_ns, n

    def _run(self, n: int) -> int:
        """Return the position in ``store`` of a job's times, for its instance's current request."""
        k = self._owner[n]
        request, jobs = self.store[_HEAD + _FIELDS * k + _REQUEST], len(self.clients[k].processors)
        return self._runs[k] + 3 * (request * jobs + n - self._first[k])

    def _queue(self, n: int, now_ns: int) -> None:
        store, at = self.store, self._jobs_at + _JOB_FIELDS * n
        store[at + _STATE], store[at + _READY] = _QUEUED, now_ns
        store[self._queue_at] += 1
        store[self._queue_at + store[self._queue_at]] = n

    def _work_on(self, k: int, number: int, now_ns: int) -> None:
        """Begin a request of an instance: jobs that wait for no other are ready."""
        at, jobs = _HEAD + _FIELDS * k, len(self.clients[k].processors)
        self.store[at + _STATUS], self.store[at + _REQUEST], self.store[at + _LEFT] = BUSY, number, jobs
        for n in range(self._first[k], self._first[k] + jobs):
            self.store[self._jobs_at + _JOB_FIELDS * n + _STATE] = _WAITS
            if not self._needs[n]:
                self._queue(n, now_ns)

    def _waiting(self, k: int) -> int:
        """Return how many requests are in an instance's queue."""
        at = _HEAD + _FIELDS * k
        numbers = range(self.store[at + _REQUEST] + 1, self.store[at + _COME])
        return sum(self.store[self._records[k] + 2 * n + 1] == 0 for n in numbers)

    def _ended(self, k: int, now_ns: int) -> None:
        """End the current request of an instance, and begin the next one."""
        store, client = self.store, self.clients[k]
        at, records = _HEAD + _FIELDS * k, self._records[k]
        store[records + 2 * store[at + _REQUEST] + 1] = now_ns
        number = store[at + _REQUEST] + 1
        if client.closed and number < client.requests:
            store[records + 2 * number] = now_ns
            self._work_on(k, number, now_ns)
            return
        while number < store[at + _COME] and store[records + 2 * number + 1] == REJECTED:
            number += 1
        if number >= client.requests:
            store[at + _STATUS] = OVER
        elif number < store[at + _COME]:
            self._work_on(k, number, now_ns)
        else:
            store[at + _STATUS], store[at + _REQUEST] = IDLE, number
