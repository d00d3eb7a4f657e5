"""The parent's side of the computing process: starts it, sends requests with time limits, loads and runs models."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.cuda.devices import HINT, precision_of, priority_of
from evaluators.cuda.instance import apart, joined
from evaluators.cuda.lowering import check
from evaluators.cuda.traffic import counted
from evaluators.litert.worker import wire
from evaluators.own_process import connected_process
from evaluators.workload.scheduler import Scheduler
from evaluators.workload.setting import Setting
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Dispatch
from search_spaces.core.platform import Platform, Processor
from search_spaces.models.stages import cut_stage

START_LIMIT_S = 120.0
_LAST_S = 0.5


class Client:
    """A process of :mod:`evaluators.cuda.worker`; replaced by a new one when it dies or does not answer in time.

    Attributes:
        generation: counts the processes, so that callers know when models that they loaded are gone.
        chosen: the fastest variant of each kernel timed so far; passed on to a new process.
        room_nbytes: memory for the weights of each model; None for as much as there is.

    Args:
        device: ``cuda`` or ``cpu``.
        busy: number of streams that compute at once while variants are timed.
        chosen: variants that are known already; extended here. None: PyTorch's ordinary calls.
        apart: how models run apart in it (:data:`~evaluators.cuda.devices.APART`); "" where a plan schedules them.
        log: file for PyTorch's own messages; none by default.
    """

    def __init__(
        self,
        device: str,
        busy: int,
        chosen: dict[str, str] | None,
        apart: str = "",
        log: Path | None = None,
        room_nbytes: int | None = None,
    ) -> None:
        self.generation = 0
        self.chosen, self.apart = chosen, apart
        self._device, self._busy = device, busy
        self._log, self.room_nbytes = log, room_nbytes
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id, or None where no process runs."""
        return self._process.pid if self._process is not None else None

    def ask(self, head: Mapping[str, Any], limit_s: float, payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Send a request and return the answer.

        Raises:
            UnavailableError: the process refused, died, or did not answer within ``limit_s``.
        """
        if self._closed:
            raise UnavailableError("the session is closed", "load candidates inside the `with` block of prepare()")
        answer, data = self._exchange(self._channel or self._start(), head, limit_s, payload)
        if "error" in answer:
            if answer.get("fatal"):
                self._end()
            raise UnavailableError(str(answer["error"]), str(answer.get("hint", "")))
        if self.chosen is not None:
            self.chosen.update(answer.get("chosen", {}))
        return answer, data

    def _exchange(
        self, channel: socket.socket, head: Mapping[str, Any], limit_s: float, payload: bytes = b""
    ) -> tuple[dict[str, Any], bytes]:
        try:
            channel.settimeout(limit_s)
            wire.send(channel, dict(head), payload)
            answer, data, _ = wire.receive(channel)
        except TimeoutError as error:
            self._end()
            raise UnavailableError(f"the GPU's process gave no answer within {limit_s:.3g} s") from error
        except (EOFError, OSError, json.JSONDecodeError) as error:
            raise UnavailableError(f"the GPU's process {self._end()}", "its messages are in runtime.log") from error
        except BaseException:
            self._end()  # otherwise the pending answer would be taken for the next request's
            raise
        return answer, data

    def _start(self) -> socket.socket:
        """Start the process, and return the parent's end of its channel."""
        log = os.open(self._log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            # Ctrl-C is for the parent, which ends this process.
            self._process, channel = connected_process("evaluators.cuda.worker", log=log, own_session=True)
        finally:
            os.close(log)
        self._channel = channel
        if self._closed:  # meanwhile, by another thread
            self._end()
            raise UnavailableError("the session is closed")
        hello = {"device": self._device, "busy": self._busy, "known": self.chosen, "apart": self.apart}
        hello["room_nbytes"] = self.room_nbytes
        answer, _ = self._exchange(channel, hello, START_LIMIT_S)
        if "error" in answer:
            self._end()
            raise UnavailableError(str(answer["error"]), HINT)
        return channel

    def _end(self) -> str:
        """End the process, and return how it ended, as a predicate."""
        self.generation += 1
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if channel is not None:
            channel.close()
        if process is None:
            return "is not there"
        try:
            code = process.wait(_LAST_S)  # its exit code, if it died by itself
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "was ended"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def close(self) -> None:
        """End the process; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._end()


_SLACK_S = 10.0

Arrays = Sequence[NDArray[np.generic]]


@dataclass(slots=True)
class _Model:
    """A model as the process reads it from its file.

    Attributes:
        inputs, outputs: for each input and output of the file, its position among the graph's.
        generation: of the process that has read it.
    """

    number: int
    graph: Graph
    path: Path
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    generation: int = -1


@dataclass(slots=True)
class Loaded:
    """An instance that has been requested.

    Attributes:
        bench: that loads and runs it.
        jobs: operators, precision, processor name and priority of each.
        after: for each job a bit set of the jobs that it waits for; () where each waits for the one before it.
        owner: name; instances of one owner never run at the same time.
        weights: name of the weights that it reads.
        generation: of the process that holds it.
    """

    bench: Bench
    number: int
    graph: Graph
    jobs: tuple[tuple[tuple[int, ...], str, str, int], ...]
    after: tuple[int, ...]
    owner: str
    weights: str
    inputs: Arrays
    generation: int = -1


class Bench:
    """The models that one worker process holds; loads and runs them.

    Args:
        platform: the streams, and time limits for loading, and for one request of a model.
    """

    def __init__(self, client: Client, platform: Platform) -> None:
        self.client, self._limits = client, platform.limits
        self._priorities = {p.name: priority_of(p) for p in platform.processors}
        self._models: dict[tuple[str, str], _Model] = {}
        self._numbers, self._model_numbers = count(1), count(1)
        self._folder = TemporaryDirectory(prefix="cuda-models-")

    def close(self) -> None:
        """End the process and delete its files."""
        self.client.close()
        self._folder.cleanup()

    def take(
        self,
        graph: Graph,
        jobs: Sequence[tuple[Sequence[int], Processor]],
        owner: str,
        weights: str,
        inputs: Arrays,
        after: Sequence[int] = (),
    ) -> Loaded:
        """Load an instance and return it.

        Args:
            after: for each job a bit set of the jobs that it waits for; () where each waits for the one before it.

        Raises:
            UnavailableError: an operator is not supported, or there is not enough memory.
        """
        made = tuple((tuple(o), str(precision_of(p)), p.name, priority_of(p)) for o, p in jobs)
        check(graph, [o for operators, *_ in made for o in operators])
        needs = () if all(job == 0 or bits >> (job - 1) & 1 for job, bits in enumerate(after)) else tuple(after)
        loaded = Loaded(self, next(self._numbers), graph, made, needs, owner, weights, inputs)
        self.ready(loaded)
        return loaded

    def _there(self, held: _Model | Loaded) -> bool:
        """Return whether the current process holds a model or an instance."""
        return held.generation == self.client.generation and self.client.pid is not None

    def ready(self, loaded: Loaded) -> None:
        """Load an instance again if its process has ended."""
        if self._there(loaded):
            return
        model = self._model(loaded.graph)
        head = {"op": "load", "instance": loaded.number, "model": model.number, "owner": loaded.owner}
        jobs = [[list(operators), *rest] for operators, *rest in loaded.jobs]
        rest: dict[str, Any] = {"weights": loaded.weights, "jobs": jobs, "after": list(loaded.after)}
        if self.client.apart:  # another process has chosen them since this one began
            rest["known"] = self.client.chosen or {}
        self.client.ask({**head, **rest}, self._limits.load_s)
        loaded.generation = self.client.generation
        self.set_inputs(loaded)

    def set_inputs(self, loaded: Loaded) -> None:
        """Send the inputs of an instance; its outputs are overwritten."""
        arrays = [loaded.inputs[i] for i in self._model(loaded.graph).inputs]
        head = {"op": "inputs", "instance": loaded.number, "shapes": [list(a.shape) for a in arrays]}
        self.client.ask(head, self._limits.load_s, joined(arrays))

    def outputs(self, loaded: Loaded) -> list[NDArray[np.generic]]:
        """Return the outputs of an instance's last request, in the order of the graph."""
        answer, data = self.client.ask({"op": "outputs", "instance": loaded.number}, self._limits.load_s)
        arrays = [array.copy() for array in apart(data, answer["shapes"])]
        order = self._model(loaded.graph).outputs
        return [arrays[order.index(i)] for i in range(len(order))]

    def give_back(self, loaded: Loaded) -> None:
        """Release an instance; a second call does nothing."""
        if self._there(loaded):
            self.client.ask({"op": "drop", "instance": loaded.number}, self._limits.load_s)
        loaded.generation = -1

    def forget(self, graph: Graph) -> None:
        """Release a model without loaded instances: its weights, its captured graphs, and the file made for it."""
        model = self._models.pop(self._key(graph), None)
        if model is None:
            return
        if self._there(model):
            self.client.ask({"op": "forget", "model": model.number}, self._limits.load_s)
        if model.path.parent == Path(self._folder.name):
            model.path.unlink(missing_ok=True)

    def run(
        self,
        found: Setting,
        dispatch: Dispatch,
        instances: Sequence[Loaded],
        runs: int = 1,
        stop_above_s: float = math.inf,
        begin_ns: int = 0,
    ) -> list[Scheduler]:
        """Run a setting ``runs`` times, and return the scheduler's state after each run.

        Args:
            instances: one for each client.
            stop_above_s: stop after a run whose first request takes longer.
            begin_ns: on the clock of :func:`time.perf_counter_ns`, when the first run begins; else at once.

        Raises:
            UnavailableError: a job failed or took too long.
        """
        for each in instances:
            self.ready(each)
        head: dict[str, Any] = {
            "op": "run",
            "clients": [asdict(client) for client in found.clients],
            "excluded": list(found.excluded),
            "priorities": [self._priorities.get(name, 0) for name in found.processors],
            "dispatch": dispatch,
            "instances": [each.number for each in instances],
            "runs": runs,
            "stop_above_ns": int(stop_above_s * 1e9) if math.isfinite(stop_above_s) else None,
            "limit_s": self._limits.run_s,
            "begin_ns": begin_ns,
        }
        most = max(len(client.processors) * client.requests for client in found.clients)
        last_s = max(max(client.releases_ns) for client in found.clients) * 1e-9
        answer, data = self.client.ask(head, _SLACK_S + runs * (last_s + most * self._limits.run_s))
        size, stores = answer["size"], array("q")
        stores.frombytes(data)
        if not size or len(stores) % size:
            raise UnavailableError("the GPU's process reported no whole run")
        return [
            Scheduler(found.clients, found.excluded, dispatch, stores[i : i + size])
            for i in range(0, len(stores), size)
        ]

    def traffic(self, loaded: Loaded) -> dict[str, float]:
        """Return the memory traffic of an instance's inference. Raises as :func:`~evaluators.cuda.traffic.counted`."""
        jobs = [(list(operators), precision) for operators, precision, *_ in loaded.jobs]
        model = {"path": str(self._model(loaded.graph).path), "name": loaded.graph.name}
        known = {"chosen": self.client.chosen or {}, "room_nbytes": self.client.room_nbytes}
        return counted({**model, "jobs": jobs, **known})

    def facts(self) -> dict[str, Any]:
        """Return device, versions, timings of kernels, and memory in use."""
        return self.client.ask({"op": "facts"}, self._limits.load_s)[0]

    @staticmethod
    def _key(graph: Graph) -> tuple[str, str]:
        if graph.source is None:
            raise UnavailableError(f"model {graph.name!r} has no file; the evaluator cuda reads weights from files")
        # Models of one structure may have different weights.
        return graph.digest, graph.source.content_digest()

    def _model(self, graph: Graph) -> _Model:
        key = self._key(graph)
        if key not in self._models:
            self._models[key] = self._made(graph, next(self._model_numbers))
        model = self._models[key]
        if not self._there(model):
            kinds = [o.kind for o in graph.operators]
            head = {"op": "model", "model": model.number, "path": str(model.path), "name": graph.name, "kinds": kinds}
            self.client.ask(head, self._limits.load_s)
            model.generation = self.client.generation
        return model

    def _made(self, graph: Graph, number: int) -> _Model:
        if graph.source is not None and not graph.source.fixed:
            return _Model(number, graph, graph.source.path, (*range(len(graph.inputs)),), (*range(len(graph.outputs)),))
        stage = cut_stage(graph, range(len(graph.operators)))  # the structure in the file differs from the graph
        path = Path(self._folder.name) / f"model{number}.tflite"
        stage.write(path)
        inputs = tuple(graph.inputs.index(t) for t in stage.inputs)
        return _Model(number, graph, path, inputs, tuple(graph.outputs.index(t) for t in stage.outputs))
