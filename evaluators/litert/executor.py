"""Runs a plan of a workload: model instances bound to worker processes, and all their requests from a job queue."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from evaluators.litert import tensors
from evaluators.litert.program import ONE_FRAME, Binding, Copies, layout
from evaluators.litert.settings import CPU, accelerators_of
from evaluators.litert.stages import Entry, StageCache, StageSource, engine_of, failure, failure_of_files
from evaluators.litert.worker.runtimes import INTERPRETER
from evaluators.litert.worker.shared_memory import Semaphores
from evaluators.litert.worker.shared_scheduler import SharedScheduler, scheduler_head
from evaluators.litert.workers import Arena, Request, bind_program, notify
from evaluators.workload.lowered import over_before
from evaluators.workload.outcome import Outcome, outcome
from evaluators.workload.scheduler import QueueClient
from evaluators.workload.setting import Setting
from search_spaces.core.errors import UnavailableError
from search_spaces.core.plan import Dispatch
from search_spaces.models.stages import StageModel
from search_spaces.rewrites.views import Viewed

_READY_LIMIT_S = 30.0
_LOOK_S, _NEAR_S = 0.02, 0.002
_SLACK_S, _LIMIT_FACTOR = 1.0, 50.0
_MOST_ENDS = 4  # how often one process may end in one run

Arrays = Sequence[NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Jobs:
    """An instance's model, cut into jobs.

    Attributes:
        source: the model, whose graph ``operators`` refer to.
        operators: of each job.
        stages: the jobs as models.
        viewed: the jobs without operators that move nothing; decides where tensors lie.
    """

    source: StageSource
    operators: tuple[tuple[int, ...], ...]
    stages: tuple[StageModel, ...]
    viewed: Viewed


class InstanceBinding:
    """An instance of a model bound to the processes that may run its jobs: compiled there, with memory of its own.

    Args:
        client: the instance as the scheduler sees it.
        names: processor names, by the numbers that ``client`` uses.
        numbers: returns numbers of programs and memories that these workers do not use yet.

    Attributes:
        number: identifies jobs and memory to the processes.
        processes: those that may run its jobs.

    Raises:
        UnavailableError: a worker cannot compile the jobs, or there is not enough memory.
    """

    def __init__(
        self,
        jobs: Jobs,
        client: QueueClient,
        names: Sequence[str],
        stages: StageCache,
        numbers: count[int],
    ) -> None:
        self.jobs, self.number = jobs, next(numbers)
        self._before = over_before(client)
        self._jobs_of: dict[str, dict[int, str]] = {}  # process → the jobs that it may run, and a processor for each
        for job, processors in enumerate(client.processors):
            for name in (names[processor] for processor in processors):
                self._jobs_of.setdefault(stages.process(name), {})[job] = name
        self.processes = tuple(self._jobs_of)
        self._stages, self._workers = stages, stages.workers
        self._entries: dict[str, Entry] = {}
        self._arena: Arena | None = None
        try:
            self.bind()
        except BaseException:
            self.close()
            raise

    def bind(self) -> None:
        """Compile the jobs in processes that are new or were restarted, and bind them to the memory."""
        lost = [p for p in self._jobs_of if p not in self._entries or self._entries[p].ends != self._workers.ends[p]]
        for process in lost:
            entry = self._taken(process)
            if process in self._entries:
                self._stages.give_back(self._entries[process])
            self._entries[process] = entry
        if self._arena is None:
            self._lay_out()
        for process in lost:
            self._send(process)

    def _taken(self, process: str) -> Entry:
        which, jobs = self._jobs_of[process], self.jobs
        processor, cut = next(iter(which.values())), [jobs.stages[job] for job in which]
        if len(jobs.stages) > 1 and engine_of(self._stages.platform[processor], cut) == INTERPRETER:
            raise UnavailableError(
                f"{jobs.source.graph.name!r} has state or dynamic sizes: beside other models it runs as one stage",
                "give --max-stages 1, or search it alone",
            )
        group = tuple(jobs.operators[job] for job in which)
        return self._stages.take(jobs.source, processor, group, cut)

    def _ports(self, process: str) -> dict[int, tuple[Sequence[int], Sequence[int]]]:
        pairs = zip(self._jobs_of[process], self._entries[process].models, strict=True)
        return {job: (model.inputs, model.outputs) for job, model in pairs}

    def _lay_out(self) -> None:
        outputs: dict[int, Sequence[int]] = {}
        for process in self._entries:  # a job may expose more inner tensors in one process than in another
            for job, (_, given) in self._ports(process).items():
                outputs[job] = max(outputs.get(job, ()), given, key=len)
        viewed = self.jobs.viewed
        self._layout = layout(viewed.graph, viewed.plan, self._before, outputs)
        self._arena = Arena(self.number, self._layout.nbytes)

    def _send(self, process: str) -> None:
        """Have a process map the memory, and bind the jobs to it."""
        ports, entry = self._ports(process), self._entries[process]
        own_memory = accelerators_of(self._stages.platform[next(iter(self._jobs_of[process].values()))]) != CPU
        copied = {j: Copies(frozenset(i), frozenset(o)) if own_memory else Copies() for j, (i, o) in ports.items()}
        compiled = {job: (entry.number, signature) for signature, job in enumerate(ports)}
        bound = Binding(self.jobs.source.graph, compiled, ports, copied, self._layout)
        arena = self._bound_arena()
        arena.introduce(self._workers, [process])
        with closing(Semaphores(0)) as semaphores:
            program = {**ONE_FRAME, "steps": [bound.step(job) for job in ports]}
            bind_program(self._workers, self.number, arena, semaphores, {process: program})

    def why(self, what: str) -> str:
        """Return the error text of a failed job; it names the operator where all processors of the jobs are CPUs."""
        jobs, platform = self.jobs, self._stages.platform
        if any(platform[name].kind != "cpu" for names in self._jobs_of.values() for name in names.values()):
            return what
        if jobs.source.graph.source is None:
            return str(failure_of_files(jobs.stages, UnavailableError(what)))
        return str(failure(jobs.source.graph, sorted(o for job in jobs.operators for o in job), what))

    def set_inputs(self, arrays: Arrays) -> None:
        """Copy one array per input of the model into its memory, and overwrite its outputs."""
        tensors.fill(self.jobs.source.graph, self._view, arrays)

    def outputs(self) -> list[NDArray[np.generic]]:
        """Return copies of the outputs of the last request."""
        return [self._view(tensor).copy() for tensor in self.jobs.source.graph.outputs]

    def _bound_arena(self) -> Arena:
        if self._arena is None:
            raise UnavailableError("the instance is closed")
        return self._arena

    def _view(self, tensor: int) -> NDArray[np.generic]:
        return tensors.view(
            self._bound_arena().map, self._layout.offsets[tensor], self.jobs.source.graph.tensors[tensor]
        )

    def close(self) -> None:
        """Release programs and memory; a second call does nothing."""
        arena, self._arena = self._arena, None
        for process, entry in self._entries.items():
            with suppress(UnavailableError):  # the process has ended, and its program with it
                notify(self._workers, {process: entry.ends}, {"op": "drop", "id": self.number})
            self._stages.give_back(entry)
        self._entries.clear()
        if arena is not None:
            with suppress(UnavailableError):
                arena.give_back(self._workers)


class Executor:
    """Runs a plan of a workload; a run serves all requests of the workload.

    A model that crashes or hangs is taken out: its requests fail, its process is restarted, and all other models go
    on. ``failures`` holds the reason for each client; later runs leave it out.

    Args:
        instances: one for each client of ``found``.
    """

    def __init__(
        self,
        found: Setting,
        dispatch: Dispatch,
        instances: Sequence[InstanceBinding],
        stages: StageCache,
    ) -> None:
        self.failures: dict[int, str] = {}
        self._found, self._instances, self._workers, self._stages = found, tuple(instances), stages.workers, stages
        self._head = scheduler_head(found.clients, found.excluded, dispatch)
        self._limits_s = [stages.platform.limits.run_s] * len(self._instances)  # until its jobs have been timed
        self._ends_before: dict[str, int] = {}

    def run(self) -> Outcome:
        """Run the workload once.

        Raises:
            UnavailableError: no request was answered, or workers cannot be started.
        """
        self._ends_before = dict(self._workers.ends)
        processes = self._processes()
        with self._workers.measuring(processes, first=False), closing(SharedScheduler(self._head)) as state:
            for client in self.failures:
                state.scheduler.fail(client)
            for process in processes:
                self._enter(process, state)
            with state.held():
                now_ns = state.scheduler.store[0] = time.perf_counter_ns()
                woken = state.step(now_ns)
            state.wake(woken)
            self._attend(state, set(processes))
            if len(self.failures) == len(self._instances):
                several = "every model failed; the first: " if len(self.failures) > 1 else ""
                raise UnavailableError(several + next(iter(self.failures.values())))
            found = outcome(state.scheduler, self._found.stages, self._found.processors)
        self._learn(found)
        return found

    def _processes(self) -> dict[str, list[int]]:
        """Return the processes that have jobs to run, with their processors."""
        found: dict[str, set[int]] = {}
        for number, client in enumerate(self._found.clients):
            if number not in self.failures:
                for processor in {processor for processors in client.processors for processor in processors}:
                    found.setdefault(self._stages.process(self._found.processors[processor]), set()).add(processor)
        return {process: sorted(processors) for process, processors in found.items()}

    def _enter(self, process: str, state: SharedScheduler) -> None:
        """Have the processors of a process wait for jobs; bind again what a restart has lost."""
        processors = self._processes()[process]
        programs = []
        for number, (client, instance) in enumerate(zip(self._found.clients, self._instances, strict=True)):
            if number in self.failures or process not in instance.processes:
                continue
            instance.bind()
            mine = {processor for each in client.processors for processor in each}.intersection(processors)
            programs += [(processor, number, instance.number) for processor in sorted(mine)]
        head = {
            "op": "jobs",
            "scheduler": state.head,
            "processors": processors,
            "programs": programs,
            "nbytes": [memory.nbytes for memory in state.memories],
        }
        self._workers.send(process, Request(head, fds=[memory.fd for memory in state.memories]))
        deadline_s = time.monotonic() + _READY_LIMIT_S
        for _ in processors:
            while not state.one_more_is_ready():
                if time.monotonic() > deadline_s or self._workers.answers([process], 1e-3):
                    raise UnavailableError(f"processor {process!r} {self._workers.end(process)} before its first job")

    def _attend(self, state: SharedScheduler, working: set[str]) -> None:
        """Wait until no process takes jobs any more; admit requests as they arrive, and end processes that hang."""
        while working:
            left_s = (state.scheduler.next_arrival_ns() - time.perf_counter_ns()) * 1e-9
            due = left_s < _NEAR_S
            if due:
                time.sleep(max(0.0, left_s))
            answers = self._workers.answers(sorted(working), 0.0 if due else min(left_s - _NEAR_S, _LOOK_S))
            for process, answer in answers.items():
                working.discard(process)
                if answer is None:
                    self._lost(state, process, self._workers.end(process), working)
                elif "error" in answer:
                    self._workers.end(process)
                    self._lost(state, process, str(answer["error"]), working)
                for client, status in (answer or {}).get("failed", ()):
                    self.failures[client] = self._instances[client].why(f"the runtime failed in a job: status {status}")
            self._end_what_hangs(state, working)
            if due:
                with state.held():
                    woken = state.step(time.perf_counter_ns())
                state.wake(woken)

    def _end_what_hangs(self, state: SharedScheduler, working: set[str]) -> None:
        scheduler, now_ns = state.scheduler, time.perf_counter_ns()
        processes = self._processes()
        for process in sorted(working):
            for processor in processes.get(process, ()):
                if (job := scheduler.on(processor)) < 0:
                    continue
                client, started_ns = scheduler.whose(job)[0], scheduler.started_ns(job)  # 0 between two jobs
                if started_ns and (now_ns - started_ns) * 1e-9 > self._limits_s[client]:
                    working.discard(process)
                    self._workers.end(process)
                    self._lost(state, process, f"gave no answer within {self._limits_s[client]:.3g} s", working)
                    break

    def _lost(self, state: SharedScheduler, process: str, reason: str, working: set[str]) -> None:
        """Take out the models whose jobs a lost process was running, and restart it for the others."""
        scheduler = state.scheduler
        processors = self._processes().get(process, [])
        for processor in processors:
            state.release(processor)
        busy = {
            processor: scheduler.whose(scheduler.on(processor))[0]
            for processor in processors
            if scheduler.on(processor) >= 0
        }
        self._take_out(state, busy.values(), f"processor {process!r} {reason}", free=busy)
        if process not in self._processes() or scheduler.over:
            return
        ended = self._workers.ends[process] - self._ends_before.get(process, 0)
        problem = f"processor {process!r} {reason} repeatedly" if ended > _MOST_ENDS else ""
        try:
            if not problem:
                self._enter(process, state)
        except UnavailableError as error:
            problem = error.what
        if problem:
            mine = [n for n, i in enumerate(self._instances) if n not in self.failures and process in i.processes]
            self._take_out(state, mine, problem)
            return
        working.add(process)
        state.wake(self._processes().get(process, ()))  # jobs were assigned to it meanwhile

    def _take_out(self, state: SharedScheduler, clients: Iterable[int], reason: str, free: Iterable[int] = ()) -> None:
        """Start no more jobs of some instances.

        Args:
            free: processors that were lost while they ran a job.
        """
        with state.held():
            now_ns = time.perf_counter_ns()
            for client in clients:
                self.failures[client] = reason
                state.scheduler.fail(client)
            for processor in free:
                state.scheduler.finish(processor, now_ns)
            woken = state.step(now_ns)
        state.wake(woken)

    def _learn(self, found: Outcome) -> None:
        """Set time limits from measured jobs: one that takes many times as long counts as hanging."""
        times: dict[int, list[float]] = {}
        for event in found.timeline.events:
            times.setdefault(event.stage, []).append(event.end_s - event.start_s)
        for number, stages in enumerate(self._found.stages):
            known = [statistics.median(times[s]) for s in stages if s in times]
            if known:
                limit_s = _SLACK_S + _LIMIT_FACTOR * len(self._instances) * max(known)
                self._limits_s[number] = min(self._limits_s[number], limit_s)
