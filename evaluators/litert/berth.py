"""An instance of a model bound to the processes that may run its jobs: compiled there, with memory of its own."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.litert import tensors
from evaluators.litert.arena import layout
from evaluators.litert.crew import Crew
from evaluators.litert.edges import memory_of_edges
from evaluators.litert.lanes import Request
from evaluators.litert.settings import CPU, accelerators_of
from evaluators.litert.workbench import Compiled, Jobs, Workbench
from search_spaces.errors import UnavailableError
from search_spaces.platform import Platform

_SETUP_LIMIT_S = 60.0

Arrays = Sequence[NDArray[np.generic]]


class _Memory:
    """Shared memory of one instance, under a number that lanes know it by."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number, self.nbytes = number, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create(f"instance-{number}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.nbytes)
            self.map = mmap.mmap(self.fd, self.nbytes)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise UnavailableError(f"cannot get {nbytes} bytes of shared memory: {error}") from error


@dataclass(slots=True)
class _Bound:
    """The jobs on one process."""

    compiled: Compiled
    program: int
    birth: int


class Berth:
    """See the module.

    Args:
        lanes: of each job those that may take it.
        numbers: gives each program and memory a number that the crew's lanes have not heard yet.

    Raises:
        UnavailableError: a lane refuses the jobs, or there is no memory.
    """

    def __init__(
        self,
        jobs: Jobs,
        lanes: Sequence[Sequence[str]],
        platform: Platform,
        crew: Crew,
        bench: Workbench,
        numbers: count[int],
    ) -> None:
        self.jobs = jobs
        self._lanes = {bench.process(lane): lane for each in lanes for lane in each}
        self._which = {
            process: [job for job, each in enumerate(lanes) if process in map(bench.process, each)]
            for process in self._lanes
        }
        self._platform, self._crew, self._bench, self._numbers = platform, crew, bench, numbers
        self._bound: dict[str, _Bound] = {}
        self._memory: _Memory | None = None
        self._offsets: dict[int, int] = {}
        try:
            self.bind()
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> tuple[str, ...]:
        """The processes that may run its jobs."""
        return tuple(self._lanes)

    def program(self, process: str) -> int:
        """Return what a process calls the jobs."""
        return self._bound[process].program

    def bind(self) -> None:
        """Compile the jobs where that is still to be done, or was lost with a process, and bind them to the memory."""
        fresh = []
        for process, lane in self._lanes.items():
            bound = self._bound.get(process)
            if bound is not None and bound.birth == self._crew.births.get(process, 0):
                continue
            compiled = self._bench.take(lane, self.jobs, self._which[process])
            if bound is not None:
                self._bench.give_back(bound.compiled)
            self._bound[process] = _Bound(compiled, next(self._numbers), self._crew.births.get(process, 0))
            fresh.append((process, lane))
        if self._memory is None:
            self._memory = self._laid_out()
        for process, lane in fresh:
            self._send(process, lane, self._memory)

    def _laid_out(self) -> _Memory:
        jobs = self.jobs
        outputs: dict[int, Sequence[int]] = {}
        for bound in self._bound.values():  # lanes may hand out more or fewer of a job's inner tensors
            for job, (_, given) in bound.compiled.ports.items():
                outputs[job] = max(outputs.get(job, ()), given, key=len)
        found = layout(jobs.viewed.graph, jobs.viewed.plan, jobs.before, outputs)
        self._offsets = dict(found.offsets)
        return _Memory(next(self._numbers), found.nbytes)

    def _send(self, process: str, lane: str, memory: _Memory) -> None:
        """Tell a process of the memory, and bind the jobs to it."""
        bound, graph = self._bound[process], self.jobs.graph
        copies = accelerators_of(self._platform[lane]) != CPU
        steps = []
        for signature, (job, (inputs, outputs)) in enumerate(bound.compiled.ports.items()):
            places = [[(self._offsets[t], graph.tensors[t].nbytes, t) for t in side] for side in (inputs, outputs)]
            steps.append(
                {
                    "stage": job,
                    "compiled": bound.compiled.number,
                    "signature": signature,
                    "Input": places[0],
                    "Output": places[1],
                    "uploads": list(range(len(inputs))) if copies else [],
                    "downloads": list(range(len(outputs))) if copies else [],
                    "waits": [],
                    "signals": [],
                }
            )
        arena = {"op": "arena", "id": memory.number, "nbytes": memory.nbytes}
        self._crew.ask(process, Request(arena, fds=[memory.fd]), _SETUP_LIMIT_S)
        fd, nbytes = memory_of_edges(0)
        try:
            head: dict[str, Any] = {"op": "program", "id": bound.program, "arena": memory.number, "steps": steps}
            head |= {"go": [], "starts": [], "ends": [], "slots": [], "edges_nbytes": nbytes}
            self._crew.ask(process, Request(head, fds=[fd]), _SETUP_LIMIT_S)
        finally:
            os.close(fd)

    def set_inputs(self, arrays: Arrays) -> None:
        """Copy one array per input of the model into its memory, and spoil its outputs."""
        graph = self.jobs.graph
        for tensor, array in zip(graph.inputs, arrays, strict=True):
            self._view(tensor)[...] = array
        for tensor in graph.outputs:
            if tensor not in graph.inputs:
                self._view(tensor).reshape(-1).view(np.uint8)[...] = 0xFF

    def outputs(self) -> list[NDArray[np.generic]]:
        """Return copies of the outputs of the last request."""
        return [self._view(tensor).copy() for tensor in self.jobs.graph.outputs]

    def _view(self, tensor: int) -> NDArray[np.generic]:
        if self._memory is None:
            raise UnavailableError("the instance is closed")
        return tensors.view(self._memory.map, self._offsets[tensor], self.jobs.graph.tensors[tensor])

    def close(self) -> None:
        """Give programs and memory back; a second call does nothing."""
        memory, self._memory = self._memory, None
        for process, bound in self._bound.items():
            if bound.birth == self._crew.births.get(process, 0):
                self._forget(process, {"op": "drop", "id": bound.program})
                if memory is not None:
                    self._forget(process, {"op": "arena", "id": memory.number, "nbytes": 0})
            self._bench.give_back(bound.compiled)
        self._bound.clear()
        if memory is not None:
            os.close(memory.fd)

    def _forget(self, process: str, head: dict[str, Any]) -> None:
        try:
            self._crew.ask(process, Request(head), _SETUP_LIMIT_S)
        except UnavailableError:
            return  # it is gone, and with it what it was to forget
