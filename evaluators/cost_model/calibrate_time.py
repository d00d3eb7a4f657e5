"""The bench: times generated networks and models of the zoo on the lanes of a session."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

import numpy as np

from evaluators.base import Candidate, Evaluator, Session, unsupported_operators
from evaluators.cost_model.calibrate_measure import ROUNDS, reference_network, reference_s, time_model, warm, whole_plan
from evaluators.cost_model.calibrate_profile import Timed
from evaluators.cost_model.columns import Array
from evaluators.cost_model.features import OperatorFeatures, operator_features
from evaluators.litert.settings import packs_weights
from search_spaces.errors import ModelError, UnavailableError
from search_spaces.graph import Graph
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.models.zoo.builder import Draft
from search_spaces.platform import Platform, Processor

SECONDS = 0.15  # spent on each of the things that are timed of a model


class Bench:
    """Times models; use it in a ``with``.

    Attributes:
        session, platform: where it times.
    """

    def __init__(self, evaluator: Evaluator, session: Session, platform: Platform) -> None:
        self.session = session
        self.platform = platform
        self._files = evaluator.name != "synthetic"  # what reads no files is given structures
        self._runtime = evaluator.name
        self._stack = ExitStack()
        self._references: dict[str, Candidate] = {}

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(TemporaryDirectory()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def loaded(self, draft: Draft) -> Graph:
        """Return a draft's graph, with a file where the session needs one."""
        if not self._files:
            return draft.graph()
        path = self._folder / f"{draft.name}-{draft.graph().digest[:16]}.tflite"  # two drafts may have one name
        if not path.exists():
            draft.write(path)
        return read_model(path, draft.name)

    def time(self, lane: Processor, draft: Draft) -> Timed:
        """Time a network on a lane.

        Raises:
            UnavailableError: the device failed, or refuses the network.
        """
        graph = self.loaded(draft)
        try:
            return self.time_graph(lane, graph)
        finally:
            if graph.source is not None:
                graph.source.path.unlink(missing_ok=True)

    def time_zoo(self, lane: Processor, name: str) -> Timed:
        """Time a model of the zoo on a lane; see :meth:`time`.

        Raises:
            ModelError: there is no such model.
        """
        if not self._files:
            from search_spaces.models.zoo import draft

            return self.time_graph(lane, draft(name).graph())
        graph = load(name)
        if graph.source is None:
            raise ModelError(f"{name} has no file")
        return self.time_graph(lane, graph)

    def time_graph(self, lane: Processor, graph: Graph) -> Timed:
        """Time a graph that the session can load; see :meth:`time`."""
        features = operator_features(graph)
        if unsupported_operators(self.session, graph, lane.name):
            raise UnavailableError(f"{lane.name} does not support all operators of {graph.name}")
        reference = self._reference(lane)
        if self._profiles(lane) and graph.source is not None:
            kernel_s, clock_s = self._kernels(lane, graph, features)
            whole_s, usual_s = self._whole(lane, graph, reference)
            kernel_s = kernel_s * (usual_s / clock_s)
            return Timed(graph.name, lane.like, features, kernel_s, whole_s, usual_s)
        found = time_model(self.session, graph, lane.name, reference, seconds=SECONDS)
        call_s = max(0.0, (sum(found.stage_s) - found.whole_s) / max(1, len(features) - 1))
        own_s = np.array([s - call_s if s > 2 * call_s else s / 2 for s in found.stage_s])
        own_s[[f.free for f in features]] = np.nan
        return Timed(graph.name, lane.like, features, own_s, found.whole_s, found.reference_s)

    def _profiles(self, lane: Processor) -> bool:
        """Return whether the runtime tells what its kernels take on a lane."""
        return self._runtime == "litert" and packs_weights(lane)

    def _kernels(self, lane: Processor, graph: Graph, features: Sequence[OperatorFeatures]) -> tuple[Array, float]:
        from evaluators.cost_model.machine import profile_kernels
        from evaluators.cost_model.machine_match import operator_seconds

        path = self.loaded(reference_network()).source
        if graph.source is None or path is None:
            raise UnavailableError(f"{graph.name} has no file")
        packed = self._folder / "packed.xnnpack"
        packed.unlink(missing_ok=True)
        found = profile_kernels(graph.source.path, path.path, lane, packed, seconds=SECONDS)
        seconds = operator_seconds(features, found.names, found.kernel_s, graph)
        return np.where(seconds > 0, seconds, np.nan), found.reference_s

    def _whole(self, lane: Processor, graph: Graph, reference: Candidate) -> tuple[float, float]:
        """Return what a whole model takes, and the reference meanwhile."""
        with closing(self.session.load(graph, whole_plan(graph, lane.name))) as candidate:
            runs = int(np.clip(SECONDS / ROUNDS / warm(candidate), 2, 60))
            beats = max(2, int(0.006 / warm(reference)))
            wholes, clocks = [], [reference_s(reference, beats)]
            for _ in range(ROUNDS):
                wholes.append(float(np.median(candidate.run(runs).latency_s)))
                clocks.append(reference_s(reference, beats))
        usual = float(np.median(clocks))
        beside = (np.array(clocks[1:]) + np.array(clocks[:-1])) / 2
        return float(np.median(np.array(wholes) / beside * usual)), usual

    def _reference(self, lane: Processor) -> Candidate:
        if lane.like not in self._references:
            graph = self.loaded(reference_network())
            candidate = self.session.load(graph, whole_plan(graph, lane.name))
            self._stack.callback(candidate.close)
            self._references[lane.like] = candidate
        return self._references[lane.like]
