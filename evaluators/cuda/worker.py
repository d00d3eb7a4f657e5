"""The computing process: models, weights and captured jobs on streams, which one loop keeps busy.

Messages are JSON heads followed by raw bytes (:mod:`evaluators.litert.worker.wire`). After a failed kernel CUDA refuses
every call of the process, and a call may hang; the parent then ends the process and starts another.

In the host's loop the scheduler decides which job goes to which stream, and the streams report which job has ended.

One thread does both. It starts a job by replaying its graph and polls the events of the busy processors in turn, so a
stream never waits for more than a few microseconds of Python; launching kernel by kernel from one thread per model is
slower, because the threads share the GIL.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from evaluators.cuda.devices import (
    GRAPHS,
    KERNELS,
    MAX_INSTANCES,
    MAX_STREAMS,
    MOST_PRIORITY,
    MPS,
    THREADS,
    torch_module,
    under_mps,
)
from evaluators.cuda.instance import Capturing, Instance, Launched, Tuning, apart, as_function, joined
from evaluators.cuda.lowering import Choose, Weights, plainly
from evaluators.litert.worker import wire
from evaluators.workload.scheduler import NEVER_NS, QueueClient, Scheduler
from search_spaces.core.errors import OptimizeError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.models.litert import read_model

_LOOK_S = 100e-6


class Streams(Protocol):
    """Processors by number; each runs one job at a time."""

    def start(self, processor: int, work: Any) -> None:
        """Start a job on a free processor."""
        ...

    def finished(self, processor: int) -> bool:
        """Return whether the job on a processor has ended and its outputs can be read.

        Raises:
            RuntimeError: the job failed.
        """
        ...

    def idle(self) -> None:
        """Called when no job has ended since the last poll; polling again at once detects an end soonest."""
        return

    def close(self) -> None:
        """Release everything."""
        ...


class CudaStreams(Streams):
    """Streams of the GPU, with their priorities; a job is a captured graph, and an event behind it marks its end."""

    def __init__(self, priorities: Sequence[int]) -> None:
        torch = torch_module()
        self._torch = torch
        self._streams = [torch.cuda.Stream(priority=-priority) for priority in priorities]
        self._events = [torch.cuda.Event() for _ in priorities]

    def start(self, processor: int, work: Any) -> None:
        """Start a job on a free processor."""
        self._torch.cuda.set_stream(self._streams[processor])
        work.replay()
        self._events[processor].record(self._streams[processor])

    def finished(self, processor: int) -> bool:
        """Return whether the job on a processor has ended and its outputs can be read."""
        return bool(self._events[processor].query())

    def close(self) -> None:
        """Wait for all jobs."""
        self._torch.cuda.synchronize()


class Threads(Streams):
    """Threads of this process in place of streams, without priorities; a job is a function."""

    def __init__(self, priorities: Sequence[int]) -> None:
        self._pools = [ThreadPoolExecutor(1, f"stream{i}") for i in range(len(priorities))]
        self._running: list[Future[Any] | None] = [None] * len(priorities)
        self._ended = Event()

    def start(self, processor: int, work: Callable[[], Any]) -> None:
        """Start a job on a free processor."""
        self._running[processor] = running = self._pools[processor].submit(work)
        running.add_done_callback(lambda _: self._ended.set())

    def finished(self, processor: int) -> bool:
        """Return whether the job on a processor has ended and its outputs can be read."""
        running = self._running[processor]
        if running is None or not running.done():
            return False
        running.result()
        return True

    def idle(self) -> None:
        """Called when no job has ended since the last poll; waits for one, because the threads need this core."""
        self._ended.wait(_LOOK_S)
        self._ended.clear()

    def close(self) -> None:
        """End the threads."""
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)


class LaunchingThreads(Threads):
    """Threads of this process, each with a stream on which it launches kernel by kernel; a job is a function."""

    def __init__(self, priorities: Sequence[int]) -> None:
        super().__init__(priorities)
        self._torch = torch = torch_module()
        self._streams = [torch.cuda.Stream() for _ in priorities]

    def start(self, processor: int, work: Callable[[], Any]) -> None:
        """Start a job on a free processor."""
        super().start(processor, partial(self._launched, self._streams[processor], work))

    def _launched(self, stream: Any, work: Callable[[], Any]) -> None:
        with self._torch.no_grad(), self._torch.cuda.stream(stream):
            work()
            stream.synchronize()


_NEAR_NS = 2_000_000
_NAP_S = 1e-3


def attend(
    scheduler: Scheduler,
    work: Sequence[Sequence[Any]],
    streams: Streams,
    limit_s: float,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> None:
    """Run the jobs of a scheduler until its run is over.

    Args:
        scheduler: its run is begun here.
        work: for each client and each of its jobs, the object that streams start.
        limit_s: a job that takes longer counts as failed.

    Raises:
        UnavailableError: a job failed, or took too long.
    """
    processors = sorted(
        {processor for client in scheduler.clients for processors in client.processors for processor in processors}
    )
    busy: dict[int, int] = {}  # processor → when its job began
    limit_ns = int(limit_s * 1e9)
    scheduler.begin(clock())
    look = True
    while True:
        if look or scheduler.next_arrival_ns() <= clock():
            scheduler.arrive(clock())
            for number, processor in scheduler.start(clock()):
                client, job = scheduler.whose(number)
                streams.start(processor, work[client][job])
                busy[processor] = clock()
            if scheduler.over:
                return
        look = False
        for processor in processors:
            if processor in busy and _ended(streams, processor):
                del busy[processor]
                scheduler.finish(processor, clock())
                look = True
                break  # jobs that became ready start before other processors are polled
        if look:
            continue
        now_ns = clock()
        for processor, began_ns in busy.items():
            if now_ns - began_ns > limit_ns:
                raise UnavailableError(f"a job on stream {processor} took longer than {limit_s:g} s")
        _pause(scheduler, streams, now_ns, waits=not busy)


def _ended(streams: Streams, processor: int) -> bool:
    try:
        return streams.finished(processor)
    except RuntimeError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UnavailableError(f"a job on stream {processor} failed: {lines[0]}") from error


def _pause(scheduler: Scheduler, streams: Streams, now_ns: int, *, waits: bool) -> None:
    if not waits:
        streams.idle()
        return
    next_ns = scheduler.next_arrival_ns()
    if next_ns == NEVER_NS:
        raise UnavailableError("the jobs of the workload wait for each other for ever")
    if next_ns - now_ns > _NEAR_NS:
        time.sleep(min((next_ns - now_ns - _NEAR_NS) * 1e-9, _NAP_S))


_MOST_KEPT = 64  # instances that are kept although they have been dropped

Answer = tuple[dict[str, Any], bytes]
Key = tuple[int, str, str, str]
"""Key of a loaded instance: model, owner, weights and jobs."""


class Worker:
    """The models, weights and captured jobs of one process, and its answers to messages.

    Args:
        device: ``cuda`` or ``cpu``.
        busy: number of streams that compute at once while variants are timed.
        known: variants that were chosen before; None: PyTorch's ordinary calls.
        apart: how models run apart in this process (:data:`~evaluators.cuda.devices.APART`); "" where a plan schedules.
        room_nbytes: memory for the weights of each model; None for as much as there is.
    """

    def __init__(
        self,
        device: str,
        busy: int = 1,
        known: Mapping[str, str] | None = None,
        apart: str = "",
        room_nbytes: int | None = None,
    ) -> None:
        self._torch = torch = torch_module()
        torch.set_grad_enabled(mode=False)
        self._device, self._tunes = device, device != "cpu" and known is not None
        self._busy, self._known, self._apart, self._room_nbytes = busy, dict(known or {}), apart, room_nbytes
        self._tunings: dict[str, Tuning] = {}
        self._graphs: dict[int, Graph] = {}
        self._weights: dict[tuple[int, str], Weights] = {}
        self._recorders: dict[tuple[int, str, int], Capturing] = {}
        self._instances: dict[int, Instance] = {}
        self._kept: OrderedDict[Key, Instance] = OrderedDict()
        self._keys: dict[int, Key] = {}
        self._owners: dict[str, int] = {}
        self._streams: Streams | None = None
        self._priorities: Sequence[int] = ()
        self._capturing: dict[int, list[Any]] = {}
        if device == "cpu" and apart:
            torch.set_num_threads(1)
        elif device != "cpu":
            torch.backends.cudnn.benchmark = apart not in {KERNELS, THREADS}
            levels = range(MOST_PRIORITY + 1)
            self._capturing = {n: [torch.cuda.Stream(priority=-n) for _ in range(MAX_INSTANCES)] for n in levels}

    def answer(self, head: Mapping[str, Any], payload: bytes) -> Answer:
        """Handle a message.

        Raises:
            UnavailableError: the request cannot be served.
        """
        known = ("model", "load", "drop", "forget", "inputs", "outputs", "run", "facts")
        ask: Callable[[Mapping[str, Any], bytes], Answer] = getattr(self, f"_{known[known.index(head['op'])]}")
        return ask(head, payload)

    def _model(self, head: Mapping[str, Any], _: bytes) -> Answer:
        graph = read_model(Path(head["path"]), head["name"])
        kinds = [o.kind for o in graph.operators]
        if kinds != head["kinds"]:
            raise UnavailableError(f"{head['path']}: the file does not hold the model's operators")
        self._graphs[head["model"]] = graph
        return {}, b""

    def _load(self, head: Mapping[str, Any], _: bytes) -> Answer:
        model, owner = int(head["model"]), str(head["owner"])
        weights = self._weights_of(model, str(head["weights"]))
        key = model, owner, str(head["weights"]), f"{head['jobs']} {head['after']}"
        instance = self._kept.pop(key, None)
        self._known.update(head.get("known", {}))
        if instance is None:
            jobs = [(operators, self._choose(precision)) for operators, precision, *_ in head["jobs"]]

            def recorder(place: int) -> Any:
                # Jobs of one processor never run at the same time; nor do jobs of one owner, unless `after` lets some
                # not wait for each other.
                *_, processor, priority = head["jobs"][place]
                return self._recorder(model, f"{owner} on {processor}" if head["after"] else owner, priority)

            def entered(place: int) -> None:
                self._compute_in(head["jobs"][place][1])

            plain = self._apart in {KERNELS, THREADS}
            instance = Instance(weights, jobs, recorder, entered, head["after"], plain=plain)
            gc.collect()
        self._instances[head["instance"]], self._keys[head["instance"]] = instance, key
        return {"chosen": self._new_choices()}, b""

    def _recorder(self, model: int, owner: str, priority: int) -> Any:
        if self._device == "cpu" or self._apart == THREADS:
            return as_function
        if self._apart == KERNELS:
            return Launched
        key = model, owner, priority
        if key not in self._recorders:
            self._recorders[key] = Capturing(self._stream_of(owner, priority))
        return self._recorders[key]

    def _stream_of(self, owner: str, priority: int) -> Any:
        """Return the stream on which graphs of an owner are captured; graphs that may run at once differ in owner.

        It has the priority of the stream that starts the graph, whose kernels keep it since PyTorch 2.10.
        """
        place = self._owners.setdefault(owner, len(self._owners))
        return self._capturing[priority][place % MAX_INSTANCES]

    def _weights_of(self, model: int, owner: str) -> Weights:
        if (model, owner) not in self._weights:
            like = next((w for (m, _), w in self._weights.items() if m == model), None)
            self._weights[model, owner] = Weights(self._graphs[model], self._device, like, self._room_nbytes)
        return self._weights[model, owner]

    def _choose(self, precision: str) -> Choose:
        if not self._tunes:
            return plainly
        found = self._tunings.setdefault(precision, Tuning(precision, self._busy))
        found.chosen.update(self._known)
        return found

    def _new_choices(self) -> dict[str, str]:
        return {key: way for t in self._tunings.values() for key, way in t.chosen.items() if key not in self._known}

    def _compute_in(self, precision: str) -> None:
        """Set the precision of everything that is computed or captured from now on."""
        if self._device != "cpu":
            allowed = precision == "tf32"
            self._torch.backends.cudnn.allow_tf32 = allowed
            self._torch.backends.cuda.matmul.allow_tf32 = allowed

    def _drop(self, head: Mapping[str, Any], _: bytes) -> Answer:
        instance = self._instances.pop(head["instance"], None)
        if instance is not None:
            self._kept[self._keys.pop(head["instance"])] = instance
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return {}, b""

    def _forget(self, head: Mapping[str, Any], _: bytes) -> Answer:
        """Release a model, and everything of it that is not loaded."""
        model = int(head["model"])
        self._graphs.pop(model, None)
        every: tuple[dict[Any, Any], ...] = self._weights, self._recorders, self._kept
        for held in every:
            for key in [key for key in held if key[0] == model]:
                del held[key]
        gc.collect()
        return {}, b""

    def _inputs(self, head: Mapping[str, Any], payload: bytes) -> Answer:
        self._instances[head["instance"]].set_inputs(apart(payload, head["shapes"]))
        return {}, b""

    def _outputs(self, head: Mapping[str, Any], _: bytes) -> Answer:
        arrays = self._instances[head["instance"]].outputs()
        return {"shapes": [list(a.shape) for a in arrays]}, joined(arrays)

    def _run(self, head: Mapping[str, Any], __: bytes) -> Answer:
        clients = [QueueClient.from_json(entry) for entry in head["clients"]]
        scheduler = Scheduler(clients, head["excluded"], head["dispatch"])
        streams = self._processors(head["priorities"])
        work = [self._instances[number].work for number in head["instances"]]
        stores, stop_ns = array("q"), head["stop_above_ns"]
        gc.disable()
        try:
            while time.perf_counter_ns() < head["begin_ns"]:
                pass
            for _ in range(head["runs"]):
                attend(scheduler, work, streams, head["limit_s"])
                stores.extend(scheduler.store)
                came_ns, ended_ns = scheduler.requests(0)[0]
                if stop_ns is not None and ended_ns - came_ns > stop_ns:
                    break
        finally:
            gc.enable()
            if self._device != "cpu":
                self._torch.cuda.set_stream(self._torch.cuda.default_stream())
        return {"size": scheduler.size}, stores.tobytes()

    def _processors(self, priorities: Sequence[int]) -> Streams:
        if len(priorities) > MAX_STREAMS:
            raise UnavailableError(f"{len(priorities)} streams are more than the {MAX_STREAMS} that are supported")
        if self._streams is None or priorities != self._priorities[: len(priorities)]:
            if self._streams is not None:
                self._streams.close()
            kind = LaunchingThreads if self._apart == THREADS else CudaStreams
            self._streams = Threads(priorities) if self._device == "cpu" else kind(priorities)
            self._priorities = priorities
        return self._streams

    def _facts(self, _: Mapping[str, Any], __: bytes) -> Answer:
        torch = self._torch
        found = {"torch": torch.__version__, "device": "cpu"}
        if self._device != "cpu":
            own = torch.cuda.get_device_properties(0)
            found |= {
                "device": own.name,
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
                "multiprocessors": own.multi_processor_count,
                "memory_nbytes": own.total_memory,
            }
        times = {k: v for t in self._tunings.values() for k, v in t.times_s.items()}
        used = torch.cuda.max_memory_reserved() if self._device != "cpu" else 0
        return {"facts": found, "times_s": times, "used_nbytes": used}, b""


def serve(channel: socket.socket, worker: Worker) -> None:
    """Answer messages until the other side is gone; a request that cannot be served is answered with an error.

    After a ``fatal`` error this process is of no more use: a job hangs on a stream, or CUDA refuses every call.
    """
    while True:
        try:
            head, payload, _ = wire.receive(channel)
        except (EOFError, OSError):
            return
        try:
            answer = worker.answer(head, payload)
        except OptimizeError as error:
            answer = {"error": error.what, "hint": error.hint, "fatal": head["op"] == "run"}, b""
        except (RuntimeError, MemoryError) as error:  # raised by PyTorch
            lines = str(error).strip().splitlines() or [type(error).__name__]
            answer = {"error": f"PyTorch failed: {lines[0]}", "fatal": True}, b""
        wire.send(channel, *answer)


def main() -> None:
    """Serve the parent; the first argument is the file descriptor of this end of the channel."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        head, _, _ = wire.receive(channel)
        # Streams that share a connection wait for each other. A process of one model needs one; a server that several
        # processes share (MPS) runs out of memory with more, so that one of many streams is no client of it.
        alone = head["apart"] in {GRAPHS, KERNELS}
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1" if alone else "32")
        if not alone and under_mps():
            os.environ[MPS] = "/dev"  # no server listens there
        try:
            worker = Worker(head["device"], head["busy"], head["known"], head["apart"], head["room_nbytes"])
        except (OptimizeError, RuntimeError) as error:
            wire.send(channel, {"error": str(error)})
            return
        wire.send(channel, {"ready": True})
        serve(channel, worker)
