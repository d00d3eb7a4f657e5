"""Models, instances and runs in the computing process, as sessions ask for them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.cuda.client import Client, joined
from evaluators.cuda.settings import precision_of
from evaluators.cuda.support import check
from evaluators.workload.scheduler import Scheduler
from evaluators.workload.setting import Setting
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.models.stages import cut_stage
from search_spaces.plan import Dispatch
from search_spaces.platform import Limits, Processor

_SLACK_S = 10.0

Arrays = Sequence[NDArray[np.generic]]


@dataclass(slots=True)
class _Model:
    """A model as the process reads it.

    Attributes:
        inputs, outputs: of each input and output of the file, which one of the graph it is.
        generation: of the process that knows it.
    """

    number: int
    graph: Graph
    path: Path
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    generation: int = -1


@dataclass(slots=True)
class Loaded:
    """An instance that was asked for.

    Attributes:
        jobs: operators of each, its precision, and what it was given to.
        after: of each job a bit set of those that it waits for; () where each waits for the one before it.
        owner: whose it is: instances of one owner never run at the same time.
        weights: whose weights it reads.
        generation: of the process that holds it.
    """

    number: int
    graph: Graph
    jobs: tuple[tuple[tuple[int, ...], str, str], ...]
    after: tuple[int, ...]
    owner: str
    weights: str
    inputs: Arrays
    generation: int = -1


class Bench:
    """See the module.

    Args:
        limits: how long loading, and one request of a model, may take.
    """

    def __init__(self, client: Client, limits: Limits) -> None:
        self.client, self._limits = client, limits
        self._models: dict[tuple[str, str], _Model] = {}
        self._numbers, self._model_numbers = count(1), count(1)
        self._folder = TemporaryDirectory(prefix="cuda-models-")

    def close(self) -> None:
        """End the process and forget all."""
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
        """Return an instance, loaded.

        Args:
            after: of each job a bit set of those that it waits for; () where each waits for the one before it.

        Raises:
            UnavailableError: an operator is refused, or there is no memory.
        """
        made = tuple((tuple(operators), str(precision_of(lane)), lane.name) for operators, lane in jobs)
        check(graph, [o for operators, *_ in made for o in operators])
        needs = () if all(job == 0 or bits >> (job - 1) & 1 for job, bits in enumerate(after)) else tuple(after)
        loaded = Loaded(next(self._numbers), graph, made, needs, owner, weights, inputs)
        self.ready(loaded)
        return loaded

    def ready(self, loaded: Loaded) -> None:
        """Load an instance again where its process is gone."""
        if loaded.generation == self.client.generation and self.client.pid is not None:
            return
        model = self._model(loaded.graph)
        head = {"op": "load", "instance": loaded.number, "model": model.number, "owner": loaded.owner}
        jobs = [[list(operators), precision, lane] for operators, precision, lane in loaded.jobs]
        rest = {"weights": loaded.weights, "jobs": jobs, "after": list(loaded.after)}
        self.client.ask({**head, **rest}, self._limits.load_s)
        loaded.generation = self.client.generation
        self.set_inputs(loaded)

    def set_inputs(self, loaded: Loaded) -> None:
        """Send the inputs of an instance, which spoils its outputs."""
        arrays = [loaded.inputs[i] for i in self._model(loaded.graph).inputs]
        head = {"op": "inputs", "instance": loaded.number, "shapes": [list(a.shape) for a in arrays]}
        self.client.ask(head, self._limits.load_s, joined(arrays))

    def outputs(self, loaded: Loaded) -> list[NDArray[np.generic]]:
        """Return the outputs of an instance's last request, in the order of the graph."""
        answer, data = self.client.ask({"op": "outputs", "instance": loaded.number}, self._limits.load_s)
        arrays, begin = [], 0
        for shape in answer["shapes"]:
            size = int(np.prod(shape))
            arrays.append(np.frombuffer(data, np.float32, size, begin).reshape(shape).copy())
            begin += 4 * size
        order = self._model(loaded.graph).outputs
        return [arrays[order.index(i)] for i in range(len(order))]

    def give_back(self, loaded: Loaded) -> None:
        """Let an instance go; a second call does nothing."""
        if loaded.generation == self.client.generation and self.client.pid is not None:
            self.client.ask({"op": "drop", "instance": loaded.number}, self._limits.load_s)
        loaded.generation = -1

    def forget(self, graph: Graph) -> None:
        """Let a model go that nobody has loaded: its weights, what was captured of it, and the file made of it."""
        model = self._models.pop(self._key(graph), None)
        if model is None:
            return
        if model.generation == self.client.generation and self.client.pid is not None:
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
    ) -> list[Scheduler]:
        """Run a setting some times, and return the desk as each run left it.

        Args:
            instances: of each seat.
            stop_above_s: end with a run whose first request takes longer.

        Raises:
            UnavailableError: a job failed or took too long.
        """
        for each in instances:
            self.ready(each)
        head: dict[str, Any] = {
            "op": "run",
            "seats": [asdict(seat) for seat in found.clients],
            "excluded": list(found.excluded),
            "dispatch": dispatch,
            "instances": [each.number for each in instances],
            "runs": runs,
            "stop_above_ns": int(stop_above_s * 1e9) if math.isfinite(stop_above_s) else None,
            "limit_s": self._limits.run_s,
        }
        most = max(len(seat.lanes) * seat.requests for seat in found.clients)
        last_s = max(max(seat.releases_ns) for seat in found.clients) * 1e-9
        answer, data = self.client.ask(head, _SLACK_S + runs * (last_s + most * self._limits.run_s))
        size, stores = answer["size"], array("q")
        stores.frombytes(data)
        if not size or len(stores) % size:
            raise UnavailableError("the GPU's process told of no whole run")
        return [
            Scheduler(found.clients, found.excluded, dispatch, stores[i : i + size])
            for i in range(0, len(stores), size)
        ]

    def facts(self) -> dict[str, Any]:
        """Return device and versions, and what kernels were timed."""
        return self.client.ask({"op": "facts"}, self._limits.load_s)[0]

    @staticmethod
    def _key(graph: Graph) -> tuple[str, str]:
        if graph.source is None:
            raise UnavailableError(f"model {graph.name!r} has no file; the evaluator cuda reads weights from files")
        # Models of one structure may have other weights.
        return graph.digest, graph.source.content_digest()

    def _model(self, graph: Graph) -> _Model:
        key = self._key(graph)
        if key not in self._models:
            self._models[key] = self._made(graph, next(self._model_numbers))
        model = self._models[key]
        if model.generation != self.client.generation or self.client.pid is None:
            kinds = [o.kind for o in graph.operators]
            head = {"op": "model", "model": model.number, "path": str(model.path), "name": graph.name, "kinds": kinds}
            self.client.ask(head, self._limits.load_s)
            model.generation = self.client.generation
        return model

    def _made(self, graph: Graph, number: int) -> _Model:
        if graph.source is not None and not graph.source.fixed:
            inputs, outputs = tuple(range(len(graph.inputs))), tuple(range(len(graph.outputs)))
            return _Model(number, graph, graph.source.path, inputs, outputs)
        stage = cut_stage(graph, range(len(graph.operators)))  # the file's structure is another
        path = Path(self._folder.name) / f"model{number}.tflite"
        stage.write(path)
        inputs = tuple(graph.inputs.index(t) for t in stage.inputs)
        outputs = tuple(graph.outputs.index(t) for t in stage.outputs)
        return _Model(number, graph, path, inputs, outputs)
