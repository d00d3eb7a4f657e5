"""A worker process: compiles stages, binds them to shared memory, and runs a processor's share of a plan.

Several workers run one plan together. One that waits for another's stage polls its semaphore for a moment (``spin_ns``,
0 where another stage may need its cores), then sleeps; where it slept the last time, it sleeps first, and polls when
the post is due. Every inference begins when the leader (the worker of stage 0) posts to those whose first stage waits
for no other, and ends when the leader has seen the end of every stage for which no other waits. Between inferences the
leader may end the batch by lowering the limit in the log.

The module's ``main`` is the fork server: it has loaded one runtime's library, so that a new worker starts in
milliseconds. :mod:`evaluators.litert.workers` starts it with one end of a socket pair and the runtime's name. It serves
two operations: ``fork`` (start a worker on the socket that is sent along, pinned to cores, in a folder, with
environment variables of its own) and ``reap`` (how a dead worker ended).
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any

from evaluators.litert.adapters import vulkan_loader
from evaluators.litert.worker import wire
from evaluators.litert.worker.capi import Compiled, Copy, Device, Runtime
from evaluators.litert.worker.execution import (
    NO_LIMIT_NS,
    Run,
    Step,
    StreamStep,
    job_call,
    on_cpu,
    on_device,
    pinned_pool,
    run_rounds,
    uninterrupted_runs,
    with_limit,
    without_limit,
)
from evaluators.litert.worker.interpreters import Interpreters
from evaluators.litert.worker.openvino import OpenVino
from evaluators.litert.worker.runtimes import INTERPRETER, LITERT, OPENVINO, TFLITE
from evaluators.litert.worker.shared_memory import SLOT_NBYTES, Semaphore, map_file, post, unmap
from evaluators.litert.worker.shared_scheduler import SchedulerState
from search_spaces.core.errors import OptimizeError, UnavailableError

# LiteRT's GPU accelerator logs these when it takes a partition of operators, and when it rejects operators.
_KERNEL_MADE = "API from graph."
_UNSUPPORTED = re.compile(r"not supported by \w+ delegate:\n(.{1,2000}?)\n(?:No|\d+) operations will run", re.DOTALL)
_MOST_HEARD = 1 << 20
_CPU = 1  # litert_common.h: the CPU's bit among the accelerators
_PR_SET_PDEATHSIG = 1
_FALLING_ASLEEP_S = 1e-4  # from a worker's post that it is ready until it sleeps; it may need the leader's core
_OPERATIONS = ("compile", "release", "arena", "program", "drop", "run", "stream", "jobs")


Engine = Runtime | Interpreters | OpenVino
"""A runtime, as a worker uses it: by ``compile``, ``bind``, ``unbind`` and ``release``, as of :class:`Runtime`."""


@dataclass(frozen=True, slots=True)
class _Program:
    """One worker's share of a plan, bound to memory.

    Attributes:
        frames: its steps, once for each inference in flight.
        go: semaphores that the first stage waits for: other stages' or the leader's; empty on the leader itself.
        starts: semaphores to which the leader posts at the start of an inference.
        releases: semaphores to which the leader posts when it ends a batch early: those that the others wait for first.
        ready: to which another worker posts, once, that it waits; ``readies`` are those on which the leader waits.
        ends: semaphores on which the leader waits before an inference is over.
        semaphores: address and size of their memory.
        unbind: functions that release its tensors.
    """

    frames: tuple[tuple[Step, ...], ...]
    go: tuple[Semaphore, ...]
    starts: tuple[c_void_p, ...]
    ends: tuple[Semaphore, ...]
    releases: tuple[c_void_p, ...]
    ready: tuple[c_void_p, ...]
    readies: tuple[Semaphore, ...]
    semaphores: tuple[int, int]
    unbind: tuple[Callable[[], None], ...]


_Buffers = dict[Any, tuple[c_void_p, Any, Callable[[], None]]]
"""Tensor of a stage → its buffer, the accelerator's requirements, and the function that releases it."""
_Calls = Mapping[tuple[int, int], Mapping[int, Callable[[], int]]]
"""Processor and client → job → the function that runs it there and returns a status; 0 means success."""


class Worker:
    """State of a worker, and the operations that the parent may request."""

    def __init__(self, engines: Mapping[str, Engine], device: Device | None = None, cores: Sequence[int] = ()) -> None:
        self._engines = engines
        self._device = device
        self._cores = cores
        self._compiled: dict[int, Compiled] = {}
        self._arenas: dict[int, tuple[int, int]] = {}
        self._programs: dict[int, _Program] = {}
        self.operations = {name: getattr(self, name) for name in _OPERATIONS}

    def compile(self, head: dict[str, Any], header: bytes, fds: list[int]) -> dict[str, Any]:
        """Compile stages: a header, whose weights lie in the files that were sent along."""
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
        """Map shared memory under a number; size 0 unmaps it."""
        old = self._arenas.pop(head["id"], None)
        if old:
            unmap(*old)
        if head["nbytes"]:
            self._arenas[head["id"]] = (map_file(fds[0], head["nbytes"], write=True), head["nbytes"])
        return {}

    def program(self, head: dict[str, Any], _: bytes, fds: list[int]) -> dict[str, Any]:
        """Bind stages of a plan to each frame of an arena, and to semaphores, whose memory was sent along."""
        base, size = self._arenas[head["arena"]]
        memory = map_file(fds[0], head["semaphores_nbytes"], write=True), head["semaphores_nbytes"]

        def place(index: int) -> c_void_p:
            return c_void_p(memory[0] + index * SLOT_NBYTES)

        def waits(pairs: Sequence[tuple[int, int]]) -> tuple[Semaphore, ...]:
            return tuple(Semaphore(place(i), spin_ns, regular=head["regular"] and spin_ns > 0) for i, spin_ns in pairs)

        def step(entry: dict[str, Any], offset: int, buffers: _Buffers) -> Step:
            meets = waits(entry["waits"]), tuple(map(place, entry["signals"]))
            return self._step(entry, (base + offset, size - offset), buffers, *meets)

        frames, unbind = [], list[Callable[[], None]]()
        for frame in range(head["frames"]):
            buffers: _Buffers = {}
            frames.append(tuple(step(entry, frame * head["frame_nbytes"], buffers) for entry in head["steps"]))
            unbind += [give_back for _, _, give_back in buffers.values()]
        go, ends, readies = (waits(head[which]) for which in ("go", "ends", "readies"))
        starts, releases, ready = (tuple(map(place, head[which])) for which in ("starts", "releases", "ready"))
        made = _Program(tuple(frames), go, starts, ends, releases, ready, readies, memory, tuple(unbind))
        self._programs[head["id"]] = made
        return {}

    def _step(
        self,
        step: dict[str, Any],
        memory: tuple[int, int],
        buffers: _Buffers,
        waits: tuple[Semaphore, ...],
        signals: tuple[c_void_p, ...],
    ) -> Step:
        """Bind a stage to ``memory``: address and size."""
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

    def _tensor(
        self, compiled: Compiled, step: dict[str, Any], side: str, index: int, base: int, buffers: _Buffers
    ) -> c_void_p:
        """Return the buffer of a stage's input or output: in shared memory, or in the device's, once per tensor."""
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
                raise UnavailableError(f"stage {step['stage']} requires tensor {tensor} in another layout")
        return buffers[tensor][0]

    def drop(self, head: dict[str, Any], _: bytes, __: list[int]) -> dict[str, Any]:
        """Forget a program."""
        if program := self._programs.pop(head["id"], None):  # binding it may have failed
            for unbind in program.unbind:
                unbind()
            unmap(*program.semaphores)
        return {}

    def _log(self, head: dict[str, Any], inferences: int) -> Any:
        """Return the log in an arena: start and end of stage s in inference i at 1 + 2 * (i * stages + s)."""
        base, _size = self._arenas[head["arena"]]
        return (ctypes.c_int64 * (1 + 2 * head["stages"] * inferences)).from_address(base + head["log"])

    def _preparing(
        self, log: Any, terms: dict[int, Sequence[int]], *, synchronised: bool
    ) -> Callable[[Sequence[Step]], Run]:
        """Return the function that prepares steps to run on this processor."""
        device = self._device
        if device is None:
            return lambda steps: on_cpu(steps, log)
        idle_wait_ns = device.idle_wait_ns()
        wait_ns = idle_wait_ns if synchronised else None
        return lambda steps: on_device(steps, log, device, wait_ns, terms)

    def run(self, head: dict[str, Any], _: bytes, __: list[int]) -> dict[str, Any]:
        """Run a program ``n`` times; start and end of each stage (ns) are written to the arena's log.

        With ``apart`` they are written at the end of the stage; with a limit, before another worker learns of the
        stage; else when this worker has to wait for another, and at the end. A synchronised run
        waits for the end of each stage on an accelerator, so that its time is its own, and its answer holds the terms
        (ns) of these stages; else only stages whose results are read wait. With ``break_off`` an inference ends at
        the first stage that exceeds the limit: later stages are skipped, on every worker, but each still posts.
        """
        program = self._programs[head["id"]]
        (steps,) = program.frames
        stages, stop_above_ns = head["stages"], head["stop_above_ns"]
        log = self._log(head, head["n"])
        terms: dict[int, Sequence[int]] = {}
        limit_ns = stop_above_ns if head["break_off"] and stop_above_ns else NO_LIMIT_NS
        if self._device is None and not stop_above_ns and not head["apart"]:
            infer = without_limit(steps, log)
        else:
            prepare = self._preparing(log, terms, synchronised=head["synchronised"])
            infer = with_limit(uninterrupted_runs(steps, prepare, apart=head["apart"]), log, limit_ns)
        first_waits = program.go
        for waits in program.ready:
            post(waits)
        for other in program.readies:
            other.wait()
        if program.readies:
            time.sleep(_FALLING_ASLEEP_S)
        for inference in range(head["n"]):
            for wait in first_waits:
                wait.wait()
            if inference > log[0]:
                break
            for start in program.starts:
                post(start)
            at = 1 + 2 * stages * inference
            infer(inference, at)
            if not first_waits:
                for end in program.ends:
                    end.wait()
                if stop_above_ns and inference + 1 < head["n"]:
                    times = log[at : at + 2 * stages]
                    if log[0] <= inference or max(times) - min(times) > stop_above_ns:
                        log[0] = inference
                        for release in program.releases:
                            post(release)
                        break
        return {"terms": [[stage, *times] for stage, times in terms.items()]}

    def stream(self, head: dict[str, Any], _: bytes, __: list[int]) -> dict[str, Any]:
        """Run a program's frames in turn until the log says that the stream is over."""
        log = self._log(head, head["kept"])
        prepare = self._preparing(log, {}, synchronised=False)
        steps = [
            StreamStep(lag, bound[0].waits, tuple(prepare([step]) for step in bound), bound[0].signals)
            for lag, bound in zip(head["lags"], zip(*self._programs[head["id"]].frames, strict=True), strict=True)
        ]
        run_rounds(steps, log, head["stages"], head["kept"], head["depth"])
        return {}

    def jobs(self, head: dict[str, Any], _: bytes, fds: list[int]) -> dict[str, Any]:
        """Take jobs of several models from a scheduler's queue until its run is over; return which clients failed.

        A process may be several processors at once, each a thread of its own.
        """
        calls = {
            (processor, client): {s.stage: job_call(s, self._device) for s in self._programs[number].frames[0]}
            for processor, client, number in head["programs"]
        }
        places = [(map_file(fd, nbytes, write=True), nbytes) for fd, nbytes in zip(fds, head["nbytes"], strict=True)]
        state = SchedulerState(head["scheduler"], *(address for address, _ in places))
        failed: list[tuple[int, int]] = []
        try:
            first, *others = head["processors"]
            threads = [threading.Thread(target=_take_jobs, args=(state, each, calls, failed)) for each in others]
            for thread in threads:
                thread.start()
            _take_jobs(state, first, calls, failed)
            for thread in threads:
                thread.join()
        finally:
            for place in places:
                unmap(*place)
        return {"failed": failed}


def _take_jobs(state: SchedulerState, processor: int, calls: _Calls, failed: list[tuple[int, int]]) -> None:
    clock, scheduler, wake_up = time.perf_counter_ns, state.scheduler, state.wake_up(processor)
    post(state.ready)
    while True:
        wake_up.wait()
        while (number := scheduler.on(processor)) >= 0:
            client, job = scheduler.whose(number)
            call = calls[processor, client][job]
            scheduler.mark(number, clock())
            status = call()
            now_ns = clock()
            with state.held(processor):
                if status:
                    failed.append((client, status))
                    scheduler.fail(client)
                scheduler.finish(processor, now_ns)
                woken = state.step(now_ns)
            state.wake(other for other in woken if other != processor)
        if scheduler.over:
            return


@contextmanager
def _heard() -> Iterator[list[str]]:
    """Yield a list that receives what the runtime logs meanwhile, once that is over; the log receives it, too."""
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


def _serve(channel: socket.socket, worker: Worker) -> None:
    """Answer the parent until it is gone."""
    while True:
        try:
            head, payload, fds = wire.receive(channel)
        except (EOFError, ConnectionError):
            return
        try:
            answer = worker.operations[head["op"]](head, payload, fds)
        except OptimizeError as error:
            answer = {"error": error.what}
        finally:
            for fd in fds:
                os.close(fd)
        wire.send(channel, answer)


def _become_worker(channel_fd: int, head: Mapping[str, Any], make: Callable[[dict[str, Any]], Worker]) -> None:
    start = head["start"]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Pin before anything is compiled: threads of a pool inherit the affinity of their creator.
    os.sched_setaffinity(0, start["cores"])
    os.environ.update(start["environment"])
    if head["folder"] is not None:
        with suppress(OSError):
            os.chdir(head["folder"])
    with socket.socket(fileno=channel_fd) as channel:
        if start["environment"]:
            # A driver with a Vulkan loader beside it needs that one, before the accelerator looks for a loader.
            vulkan_loader(start["environment"].get("VK_DRIVER_FILES", ""))
        _serve(channel, make(start))


def _loaded(runtime: str) -> Callable[[dict[str, Any]], Worker]:
    """Load a runtime; return the function that makes a worker after the fork, given the worker's ``start``."""
    if runtime == LITERT:
        library = Runtime()

        def litert(start: dict[str, Any]) -> Worker:
            library.start(start["accelerators"], start["dispatch_folder"])
            engines: dict[str, Engine] = {LITERT: library, INTERPRETER: Interpreters("ai_edge_litert.interpreter")}
            return Worker(engines, Device(library) if start["accelerators"] & ~_CPU else None, start["cores"])

        return litert
    if runtime == OPENVINO:
        openvino = OpenVino()
        return lambda start: Worker({OPENVINO: openvino}, cores=start["cores"])
    interpreters = Interpreters("tflite_runtime.interpreter")
    interpreters.load()  # before the fork, so that the workers need not
    return lambda start: Worker({TFLITE: interpreters}, cores=start["cores"])


def _write_to(log: int) -> None:
    """Send the output of this process to a file descriptor, and close that."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def main() -> None:
    """Serve until the parent closes its end of the channel, or dies.

    The workers die with this process. This process must not die with the thread that started it, which may belong to a
    server that outlives the thread.
    """
    # Ctrl-C is for the parent, which then ends the workers in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    make = _loaded(sys.argv[2])
    workers = 0
    with socket.socket(fileno=int(sys.argv[1])) as control:
        while True:
            try:
                head, _, fds = wire.receive(control)
            except (EOFError, ConnectionError):
                return
            if head["op"] == "reap":
                _, status = os.waitpid(head["pid"], 0)
                workers -= 1
                if not workers:  # the log's session may be over
                    _write_to(os.open(os.devnull, os.O_WRONLY))
                wire.send(control, {"status": os.waitstatus_to_exitcode(status)})
                continue
            channel, log = fds
            _write_to(log)
            workers += 1
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    control.close()
                    _become_worker(channel, head, make)
                    code = 0
                except BaseException:  # noqa: BLE001 - a defect; its traceback goes to the worker's log
                    traceback.print_exc()
                finally:
                    os._exit(code)
            os.close(channel)
            wire.send(control, {"pid": pid})
