"""The process of one lane: compiles stages, binds them to shared memory, and runs its share of a plan.

Several lanes run one plan together. They meet at edges (:mod:`evaluators.litert.edges`), which count finished stages.
A lane that waits polls its edge for a moment (``spin_ns``, 0 where another stage may need its cores), then sleeps;
where it slept the last time, it sleeps first, and polls when the edge is about to be told.

Every iteration begins when the leader (the lane of stage 0) gives the other lanes a token, and ends when the leader
has seen every stage that nobody waits for. Between iterations the leader may end the batch by lowering ``limit``.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from evaluators.litert import wire
from evaluators.litert.capi import Compiled, Runtime
from evaluators.litert.device import Copy, Device
from evaluators.litert.edges import SLOT_NBYTES, Edge, tell
from evaluators.litert.interpreters import Interpreters
from evaluators.litert.jobs import job_call, take_jobs
from evaluators.litert.mapping import Mapping as Memory
from evaluators.litert.pinning import pinned_pool
from evaluators.litert.rounds import Turn, go_round
from evaluators.litert.runtimes import INTERPRETER, LITERT
from evaluators.litert.stretches import NO_LIMIT_NS, Step, by_parts, on_cpu, on_device, straight_on_cpu, stretches
from search_spaces.errors import OptimizeError, UnavailableError

# What the accelerator for graphics adapters writes when it takes a run of operators, and of what it does not take.
_KERNEL_MADE = "API from graph."
_UNSUPPORTED = re.compile(r"not supported by \w+ delegate:\n(.{1,2000}?)\n(?:No|\d+) operations will run", re.DOTALL)
_MOST_HEARD = 1 << 20
_CPU = 1  # litert_common.h: the CPU's bit among the accelerators


@dataclass(frozen=True, slots=True)
class _Program:
    """One lane's share of a plan."""

    steps: tuple[Step, ...]
    go: tuple[Edge, ...]  # the leader's token; empty on the leader itself
    starts: tuple[c_void_p, ...]  # semaphores of edges on which the leader gives its tokens
    ends: tuple[Edge, ...]  # edges that the leader has seen before an iteration is over
    meetings: tuple[int, int]  # the memory of the edges: address and size
    unbind: tuple[Callable[[], None], ...]


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """One lane's share of a plan for a stream of inferences."""

    rounds: Callable[[], None]
    meetings: tuple[int, int]
    unbind: tuple[Callable[[], None], ...]


_Buffers = dict[Any, tuple[c_void_p, Any, Callable[[], None]]]
"""What a stage's tensor is bound to, what the accelerator needs of it, and what gives it back."""


class Engine(Protocol):
    """What a lane needs of a runtime to run compiled stages on memory of ours; :class:`Runtime` is LiteRT's."""

    def compile(self, header: bytes, fds: Sequence[int], signatures: int, settings: dict[str, Any]) -> Compiled:
        """Compile the model that a header and files make, one behind the other."""
        ...

    def bind(self, kind: Any, address: int, nbytes: int) -> c_void_p:
        """Return what ``Compiled.run`` takes for a tensor at ``address``, of a kind that is in ``Compiled.ports``."""
        ...

    def unbind(self, buffer: c_void_p) -> None:
        """Give back what :meth:`bind` returned."""
        ...

    def release(self, compiled: Compiled) -> None:
        """Give back what was compiled."""
        ...


class Lane:
    """State of a lane and the operations that the parent may ask for."""

    def __init__(self, engines: Mapping[str, Engine], device: Device | None = None, cores: Sequence[int] = ()) -> None:
        self._engines = engines
        self._device = device
        self._cores = cores
        self._mapping = Memory()
        self._compiled: dict[int, Compiled] = {}
        self._arenas: dict[int, tuple[int, int]] = {}
        self._programs: dict[int, _Program] = {}
        self._pipelines: dict[int, _Pipeline] = {}

    def compile(self, head: dict[str, Any], header: bytes, fds: list[int]) -> dict[str, Any]:
        """Compile stages: a header, whose weights lie in the files that came along."""
        begin = time.perf_counter()
        settings = head["settings"]
        with (
            _heard() as said,
            pinned_pool(() if self._device else self._cores, settings.get("xnnpack", settings).get("num_threads", 1)),
        ):
            compiled = self._engines[head["engine"]].compile(header, fds, head["signatures"], settings)
        self._compiled[head["id"]] = compiled
        return {
            "compile_s": time.perf_counter() - begin,
            "accelerated": compiled.accelerated,
            "kernels": "".join(said).count(_KERNEL_MADE),
            "unsupported": _UNSUPPORTED.findall("".join(said))[-1:],
        }

    def release(self, head: dict[str, Any], _: bytes, __: list[int]) -> dict[str, Any]:
        """Release compiled stages."""
        compiled = self._compiled.pop(head["id"])
        compiled.engine.release(compiled)
        return {}

    def arena(self, head: dict[str, Any], _: bytes, fds: list[int]) -> dict[str, Any]:
        """Map shared memory under a number; a size of 0 unmaps it."""
        old = self._arenas.pop(head["id"], None)
        if old:
            self._mapping.unmap(*old)
        if head["nbytes"]:
            self._arenas[head["id"]] = (self._mapping.map(fds[0], head["nbytes"], write=True), head["nbytes"])
        return {}

    def program(self, head: dict[str, Any], _: bytes, fds: list[int]) -> dict[str, Any]:
        """Bind this lane's stages of a plan to an arena and to the edges, whose memory came along."""
        base, size = self._arenas[head["arena"]]
        meetings = self._mapping.map(fds[0], head["edges_nbytes"], write=True), head["edges_nbytes"]

        def place(index: int) -> c_void_p:
            return c_void_p(meetings[0] + head["slots"][index] * SLOT_NBYTES)

        def edges(pairs: list[list[int]]) -> tuple[Edge, ...]:
            return tuple(Edge(place(index), spin_ns, regular=spin_ns > 0) for index, spin_ns in pairs)

        buffers: _Buffers = {}
        steps = tuple(
            self._step(step, (base, size), buffers, edges(step["waits"]), tuple(place(i) for i in step["signals"]))
            for step in head["steps"]
        )
        starts = tuple(place(i) for i in head["starts"])
        made = tuple(unbind for _, _, unbind in buffers.values())
        self._programs[head["id"]] = _Program(steps, edges(head["go"]), starts, edges(head["ends"]), meetings, made)
        return {}

    def _step(
        self,
        step: dict[str, Any],
        memory: tuple[int, int],
        buffers: _Buffers,
        waits: tuple[Edge, ...],
        signals: tuple[c_void_p, ...],
    ) -> Step:
        """Bind a stage to memory: address and size."""
        base, size = memory
        compiled = self._compiled[step["compiled"]]
        sides: list[Any] = []
        for kinds, side in zip(compiled.ports[step["signature"]], ("Input", "Output"), strict=True):
            ports = step[side]
            if len(kinds) != len(ports):
                raise UnavailableError(f"stage {step['stage']} has {len(kinds)} tensors, not {len(ports)}")
            if any(offset + nbytes > size for offset, nbytes, _ in ports):
                raise UnavailableError(f"stage {step['stage']} does not fit its shared memory")
            found = [self._tensor(compiled, step, side, i, base, buffers) for i in range(len(ports))]
            sides.append((c_void_p * len(found))(*(buffer.value for buffer in found)))
        uploads, downloads = (
            tuple(Copy(c_void_p(array[i]), base + step[side][i][0], step[side][i][1]) for i in step[which])
            for array, side, which in zip(sides, ("Input", "Output"), ("uploads", "downloads"), strict=True)
        )
        into, out = sides
        return Step(step["stage"], compiled, step["signature"], into, out, waits, signals, uploads, downloads)

    def pipeline(self, head: dict[str, Any], _: bytes, fds: list[int]) -> dict[str, Any]:
        """Bind this lane's stages to each of several frames of an arena, for a stream of inferences."""
        base, size = self._arenas[head["arena"]]
        meetings = self._mapping.map(fds[0], head["edges_nbytes"], write=True), head["edges_nbytes"]
        log = (ctypes.c_int64 * (1 + 2 * head["stages"] * head["kept"])).from_address(base + head["log"])
        made: list[Callable[[], None]] = []
        prepare = self._preparing(log, {}, synchronised=False)
        frames: list[list[Step]] = [[] for _ in head["steps"]]
        for frame in range(head["frames"]):
            buffers: _Buffers = {}
            offset = frame * head["frame_nbytes"]
            for which, step in enumerate(head["steps"]):
                waits = tuple(Edge(c_void_p(meetings[0] + i * SLOT_NBYTES), ns) for i, ns in step["waits"])
                signals = tuple(c_void_p(meetings[0] + i * SLOT_NBYTES) for i in step["signals"])
                frames[which].append(self._step(step, (base + offset, size - offset), buffers, waits, signals))
            made += [unbind for _, _, unbind in buffers.values()]
        turns = tuple(
            Turn(step["lag"], bound[0].waits, tuple(prepare([one]) for one in bound), bound[0].signals)
            for step, bound in zip(head["steps"], frames, strict=True)
        )
        rounds = partial(go_round, turns, log, head["stages"], head["kept"], head["depth"])
        self._pipelines[head["id"]] = _Pipeline(rounds, meetings, tuple(made))
        return {}

    def stream(self, head: dict[str, Any], _: bytes, __: list[int]) -> dict[str, Any]:
        """Run a pipeline until the log says that the stream is over."""
        self._pipelines[head["id"]].rounds()
        return {}

    def dismantle(self, head: dict[str, Any], _: bytes, __: list[int]) -> dict[str, Any]:
        """Forget a pipeline."""
        gone = self._pipelines.pop(head["id"])
        for unbind in gone.unbind:
            unbind()
        self._mapping.unmap(*gone.meetings)
        return {}

    def _tensor(
        self,
        compiled: Compiled,
        step: dict[str, Any],
        side: str,
        index: int,
        base: int,
        buffers: _Buffers,
    ) -> c_void_p:
        """Return the buffer of a stage's input or output: over shared memory, or in the device's, once per tensor."""
        offset, nbytes, tensor = step[side][index]
        if self._device is None:
            kind = compiled.ports[step["signature"]][0 if side == "Input" else 1][index]
            buffer: c_void_p = compiled.engine.bind(kind, base + offset, nbytes)
            buffers[step["stage"], side, index] = (buffer, None, partial(compiled.engine.unbind, buffer))
            return buffer
        buffer, needs = self._device.tensor(compiled, step["signature"], side, index)
        unbind = partial(compiled.engine.unbind, buffer)
        if needs[1] < nbytes:
            unbind()
            raise UnavailableError(f"stage {step['stage']}: the accelerator gives {needs[1]} bytes to {nbytes} bytes")
        if tensor not in buffers:
            buffers[tensor] = (buffer, needs, unbind)
        else:
            unbind()
            if buffers[tensor][1] != needs:
                raise UnavailableError(f"stage {step['stage']} wants tensor {tensor} in another form than it has")
        return buffers[tensor][0]

    def drop(self, head: dict[str, Any], _: bytes, __: list[int]) -> dict[str, Any]:
        """Forget a program."""
        program = self._programs.pop(head["id"])
        for unbind in program.unbind:
            unbind()
        self._mapping.unmap(*program.meetings)
        return {}

    def _preparing(
        self, log: Any, copies: dict[int, tuple[int, int]], *, synchronised: bool
    ) -> Callable[[Sequence[Step]], Callable[[int, int], bool]]:
        """Return what makes steps ready to run here."""
        device = self._device
        if device is None:
            return lambda steps: on_cpu(steps, log)
        idle_wait_ns = device.idle_wait_ns()
        wait_ns = idle_wait_ns if synchronised else None
        return lambda steps: on_device(steps, log, device, wait_ns, copies)

    def run(self, head: dict[str, Any], _: bytes, __: list[int]) -> dict[str, Any]:
        """Run a program ``n`` times; start and end of each stage go into the arena's log as nanoseconds.

        With ``apart`` they are there as soon as it is over; where there is a limit, before another lane is told of the
        stage; else before the lane waits for another, and at the end. The answer holds,
        for stages on an accelerator, how long they copied in and out the last time. A synchronised run waits for each
        stage, so that its time is its own; else only those wait whose results are read. With ``break_off`` an inference
        ends at the first stage that goes over the limit: the stages that are left are passed over, on every lane, but
        each still tells those that wait for it.
        """
        program = self._programs[head["id"]]
        base, _size = self._arenas[head["arena"]]
        stages = head["stages"]
        # log[0] is the limit; then start and end of stage s in iteration i at 1 + 2 * (i * stages + s).
        log = (ctypes.c_int64 * (1 + 2 * stages * head["n"])).from_address(base + head["log"])
        copies: dict[int, tuple[int, int]] = {}
        limit_ns = head["stop_above_ns"] if head["break_off"] and head["stop_above_ns"] else NO_LIMIT_NS
        if self._device is None and not head["stop_above_ns"] and not head["apart"]:
            infer = straight_on_cpu(program.steps, log)
        else:
            prepare = self._preparing(log, copies, synchronised=head["synchronised"])
            infer = by_parts(stretches(program.steps, prepare, apart=head["apart"]), log, limit_ns)
        first_waits = program.go
        for iteration in range(head["n"]):
            for edge in first_waits:
                edge.wait()
            if iteration > log[0]:
                break
            for start in program.starts:
                tell(start)
            at = 1 + 2 * stages * iteration
            infer(iteration, at)
            if not first_waits:
                for edge in program.ends:
                    edge.wait()
                if head["stop_above_ns"] and iteration + 1 < head["n"]:
                    times = log[at : at + 2 * stages]
                    if log[0] <= iteration or max(times) - min(times) > head["stop_above_ns"]:
                        log[0] = iteration
                        for start in program.starts:
                            tell(start)
                        break
        return {"copies": [[stage, *times] for stage, times in copies.items()]}

    def jobs(self, head: dict[str, Any], _: bytes, fds: list[int]) -> dict[str, Any]:
        """Take jobs of several models from a desk until its run is over; see :mod:`evaluators.litert.jobs`."""
        calls = {
            (lane, seat): {step.stage: job_call(step, self._device) for step in self._programs[number].steps}
            for lane, seat, number in head["programs"]
        }
        return take_jobs(head, fds, self._mapping, calls)


def litert_lane(runtime: Runtime, accelerators: int, dispatch_folder: str, cores: Sequence[int] = ()) -> Lane:
    """Return a lane of LiteRT on these cores, whose accelerators are now looked for."""
    runtime.start(accelerators, dispatch_folder)
    engines: dict[str, Engine] = {LITERT: runtime, INTERPRETER: Interpreters("ai_edge_litert.interpreter")}
    return Lane(engines, Device(runtime) if accelerators & ~_CPU else None, cores)


@contextmanager
def _heard() -> Iterator[list[str]]:
    """Return what the runtime writes to the log meanwhile, once that is over; the log gets it all the same."""
    log, heard = os.dup(2), list[str]()
    with os.fdopen(os.memfd_create("heard", os.MFD_CLOEXEC), "w+b") as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield heard
        finally:
            os.dup2(log, 2)
            os.close(log)
            text = os.pread(kept.fileno(), _MOST_HEARD, 0)
            os.write(2, text)
            heard.append(text.decode(errors="replace"))


def serve(channel: socket.socket, lane: Lane) -> None:
    """Answer the parent until it is gone."""
    operations = {
        "compile": lane.compile,
        "release": lane.release,
        "arena": lane.arena,
        "program": lane.program,
        "drop": lane.drop,
        "run": lane.run,
        "jobs": lane.jobs,
        "pipeline": lane.pipeline,
        "stream": lane.stream,
        "dismantle": lane.dismantle,
    }
    while True:
        try:
            head, payload, fds = wire.receive(channel)
        except (EOFError, ConnectionError):
            return
        try:
            answer = operations[head["op"]](head, payload, fds)
        except OptimizeError as error:
            answer = {"error": error.what}
        finally:
            for fd in fds:
                os.close(fd)
        wire.send(channel, answer)
