"""The process of one lane: compiles stages, binds them to shared memory, and runs its share of a plan.

Several lanes run one plan together. They meet at edges: an edge is an ``eventfd`` that counts finished stages. A lane
that waits polls its edge for a moment (``spin_ns``, 0 where the other lane needs the same core) and then sleeps on it.
The system calls on an edge also order memory between the processes, on every architecture.

Every iteration begins when the leader (the lane of stage 0) gives the other lanes a token, and ends when the leader
has seen every stage that nobody waits for. Between iterations the leader may end the batch by lowering ``limit``.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

from evaluators.litert import wire
from evaluators.litert.capi import Compiled, Runtime
from evaluators.litert.device import Copy, Device
from evaluators.litert.mapping import Mapping
from search_spaces.errors import OptimizeError, UnavailableError

_SLEEP_MS = 1000
_CPU = 1  # litert_common.h: the CPU's bit among the accelerators


@dataclass(frozen=True, slots=True)
class _Edge:
    """One direction of a meeting between two lanes."""

    fd: int
    spin_ns: int
    poll: select.poll

    def wait(self) -> None:
        deadline = time.perf_counter_ns() + self.spin_ns
        while True:
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                if time.perf_counter_ns() >= deadline:
                    self.poll.poll(_SLEEP_MS)
            else:
                return


@dataclass(frozen=True, slots=True)
class _Step:
    """One stage on this lane: what it waits for, the call, and whom it tells."""

    stage: int
    compiled: Compiled
    signature: int
    inputs: Any  # a ctypes array of LiteRtTensorBuffer
    outputs: Any
    waits: tuple[_Edge, ...]
    signals: tuple[int, ...]
    uploads: tuple[Copy, ...] = ()  # on an accelerator: what comes from, and goes to, the shared memory
    downloads: tuple[Copy, ...] = ()


@dataclass(frozen=True, slots=True)
class _Program:
    """One lane's share of a plan."""

    steps: tuple[_Step, ...]
    go: tuple[_Edge, ...]  # the leader's token; empty on the leader itself
    starts: tuple[int, ...]  # edges on which the leader gives its tokens
    ends: tuple[_Edge, ...]  # edges that the leader has seen before an iteration is over
    fds: tuple[int, ...]
    buffers: tuple[c_void_p, ...]


class Engine(Protocol):
    """What a lane needs of a runtime to run compiled stages on memory of ours; :class:`Runtime` is LiteRT's."""

    def run_function(self) -> Callable[[Any, int, int, Any, int, Any], int]:
        """Return the function that runs stages: (handle, signature, count, inputs, count, outputs) → status."""
        ...

    def compile(self, header: bytes, fds: Sequence[int], signatures: int, settings: dict[str, Any]) -> Compiled:
        """Compile the model that a header and files make, one behind the other."""
        ...

    def bind(self, kind: Any, address: int, nbytes: int) -> c_void_p:
        """Return what the run function takes for a tensor at ``address``, of a kind that is in ``Compiled.ports``."""
        ...

    def unbind(self, buffer: c_void_p) -> None:
        """Give back what :meth:`bind` returned."""
        ...

    def release(self, compiled: Compiled) -> None:
        """Give back what was compiled."""
        ...


class Lane:
    """State of a lane and the operations that the parent may ask for."""

    def __init__(self, runtime: Engine, device: Device | None = None) -> None:
        self._runtime = runtime
        self._device = device
        self._run = runtime.run_function()
        self._mapping = Mapping()
        self._compiled: dict[int, Compiled] = {}
        self._arenas: dict[int, tuple[int, int]] = {}
        self._programs: dict[int, _Program] = {}

    def compile(self, head: dict[str, Any], header: bytes, fds: list[int]) -> dict[str, Any]:
        """Compile stages: a header, whose weights lie in the files that came along."""
        begin = time.perf_counter()
        compiled = self._runtime.compile(header, fds, head["signatures"], head["settings"])
        self._compiled[head["id"]] = compiled
        return {"compile_s": time.perf_counter() - begin, "accelerated": compiled.accelerated}

    def release(self, head: dict[str, Any], _: bytes, __: list[int]) -> dict[str, Any]:
        """Release compiled stages."""
        self._runtime.release(self._compiled.pop(head["id"]))
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
        """Bind this lane's stages of a plan to an arena and to the edges whose descriptors came along."""
        base, size = self._arenas[head["arena"]]
        kept = [os.dup(fd) for fd in fds]

        def edges(pairs: list[list[int]]) -> tuple[_Edge, ...]:
            found = []
            for index, spin_ns in pairs:
                poll = select.poll()
                poll.register(kept[index], select.POLLIN)
                found.append(_Edge(kept[index], spin_ns, poll))
            return tuple(found)

        steps = []
        buffers: dict[Any, tuple[c_void_p, Any]] = {}
        for step in head["steps"]:
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
            signals = tuple(kept[i] for i in step["signals"])
            waits = edges(step["waits"])
            steps.append(
                _Step(
                    step["stage"],
                    compiled,
                    step["signature"],
                    sides[0],
                    sides[1],
                    waits,
                    signals,
                    uploads,
                    downloads,
                )
            )
        starts = tuple(kept[i] for i in head["starts"])
        made = tuple(buffer for buffer, _ in buffers.values())
        self._programs[head["id"]] = _Program(
            tuple(steps), edges(head["go"]), starts, edges(head["ends"]), tuple(kept), made
        )
        return {}

    def _tensor(
        self,
        compiled: Compiled,
        step: dict[str, Any],
        side: str,
        index: int,
        base: int,
        buffers: dict[Any, tuple[c_void_p, Any]],
    ) -> c_void_p:
        """Return the buffer of a stage's input or output: over shared memory, or in the device's, once per tensor."""
        offset, nbytes, tensor = step[side][index]
        if self._device is None:
            kind = compiled.ports[step["signature"]][0 if side == "Input" else 1][index]
            buffer = self._runtime.bind(kind, base + offset, nbytes)
            buffers[step["stage"], side, index] = (buffer, None)
            return buffer
        buffer, needs = self._device.tensor(compiled, step["signature"], side, index)
        if needs[1] < nbytes:
            self._runtime.unbind(buffer)
            raise UnavailableError(f"stage {step['stage']}: the accelerator gives {needs[1]} bytes to {nbytes} bytes")
        if tensor not in buffers:
            buffers[tensor] = (buffer, needs)
        else:
            self._runtime.unbind(buffer)
            if buffers[tensor][1] != needs:
                raise UnavailableError(f"stage {step['stage']} wants tensor {tensor} in another form than it has")
        return buffers[tensor][0]

    def drop(self, head: dict[str, Any], _: bytes, __: list[int]) -> dict[str, Any]:
        """Forget a program."""
        program = self._programs.pop(head["id"])
        for buffer in program.buffers:
            self._runtime.unbind(buffer)
        for fd in program.fds:
            os.close(fd)
        return {}

    def run(self, head: dict[str, Any], _: bytes, __: list[int]) -> dict[str, Any]:
        """Run a program ``n`` times; start and end of each stage go into the arena's log as nanoseconds.

        The answer holds, for stages on an accelerator, how long they copied in and out the last time. A synchronised
        run waits for each stage, so that its time is its own; else only those wait whose results are read. With
        ``break_off`` an inference ends at the first stage that goes over the limit: the stages that are left are passed
        over, on every lane, but each still tells those that wait for it.
        """
        program = self._programs[head["id"]]
        base, _size = self._arenas[head["arena"]]
        stages = head["stages"]
        # log[0] is the limit; then start and end of stage s in iteration i at 1 + 2 * (i * stages + s).
        log = (ctypes.c_int64 * (1 + 2 * stages * head["n"])).from_address(base + head["log"])
        copies: dict[int, tuple[int, int]] = {}
        if self._device is None:
            calls = [self._call(step) for step in program.steps]
        else:
            wait_ns = self._device.idle_wait_ns()
            synchronised = wait_ns if head["synchronised"] else None
            calls = [_device_call(self._run, self._device, step, synchronised, copies) for step in program.steps]
        first_waits = program.go
        break_off_ns = head["stop_above_ns"] if head["break_off"] else 0
        for iteration in range(head["n"]):
            for edge in first_waits:
                edge.wait()
            if iteration > log[0]:
                break
            for fd in program.starts:
                os.eventfd_write(fd, 1)
            at = 1 + 2 * stages * iteration
            for step, call in zip(program.steps, calls, strict=True):
                for edge in step.waits:
                    edge.wait()
                if log[0] > iteration:
                    begin, end = call()
                    log[at + 2 * step.stage] = begin
                    log[at + 2 * step.stage + 1] = end
                    if break_off_ns and log[at] and end - log[at] > break_off_ns:
                        log[0] = iteration
                for fd in step.signals:
                    os.eventfd_write(fd, 1)
            if not first_waits:
                for edge in program.ends:
                    edge.wait()
                if head["stop_above_ns"] and iteration + 1 < head["n"]:
                    times = log[at : at + 2 * stages]
                    if log[0] <= iteration or max(times) - min(times) > head["stop_above_ns"]:
                        log[0] = iteration
                        for fd in program.starts:
                            os.eventfd_write(fd, 1)
                        break
        return {"copies": [[stage, *times] for stage, times in copies.items()]}

    def _call(self, step: _Step) -> Callable[[], tuple[int, int]]:
        run, clock = self._run, time.perf_counter_ns
        handle, signature = step.compiled.handle, step.signature
        inputs, outputs = step.inputs, step.outputs
        n_inputs, n_outputs = len(inputs), len(outputs)

        def call() -> tuple[int, int]:
            begin = clock()
            status = run(handle, signature, n_inputs, inputs, n_outputs, outputs)
            end = clock()
            if status:
                raise UnavailableError(f"LiteRT failed in stage {step.stage}: status {status}")
            return begin, end

        return call


def _device_call(
    run: Any, device: Device, step: _Step, idle_wait_ns: int | None, copies: dict[int, tuple[int, int]]
) -> Callable[[], tuple[int, int]]:
    """Return the call of a stage on an accelerator; the clock stops when what others read is in shared memory.

    Args:
        idle_wait_ns: what waiting for nothing takes, in a synchronised run, else None.
    """
    clock = time.perf_counter_ns
    handle, signature = step.compiled.handle, step.signature
    n_inputs, n_outputs = len(step.inputs), len(step.outputs)
    # Whoever is told that the stage is over, and reads nothing of it, needs what it used up (cores, say).
    must_wait = idle_wait_ns is not None or (bool(step.signals) and not step.downloads)

    def call() -> tuple[int, int]:
        begin = clock()
        for copy in step.uploads:
            device.upload(copy)
        copied_in = clock()
        status = run(handle, signature, n_inputs, step.inputs, n_outputs, step.outputs)
        if status:
            raise UnavailableError(f"LiteRT failed in stage {step.stage}: status {status}")
        if must_wait:
            device.wait()
        ran = clock()
        for copy in step.downloads:
            device.download(copy)
        end = clock()
        copies[step.stage] = (copied_in - begin, end - ran)
        return begin, max(begin + 1, end - (idle_wait_ns or 0))

    return call


def litert_lane(runtime: Runtime, accelerators: int, dispatch_folder: str) -> Lane:
    """Return a lane of LiteRT, whose accelerators are now looked for."""
    runtime.start(accelerators, dispatch_folder)
    return Lane(runtime, Device(runtime) if accelerators & ~_CPU else None)


def serve(channel: socket.socket, lane: Lane) -> None:
    """Answer the parent until it is gone."""
    operations = {
        "compile": lane.compile,
        "release": lane.release,
        "arena": lane.arena,
        "program": lane.program,
        "drop": lane.drop,
        "run": lane.run,
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
