"""Workloads measured on this machine's lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement, Capabilities
from evaluators.litert import tensors
from evaluators.litert.berth import Berth
from evaluators.litert.crew import Crew
from evaluators.litert.packed import Holder, packed_weights, usable_packed
from evaluators.litert.processors import computes_with_xnnpack
from evaluators.litert.replay import Replay
from evaluators.litert.settings import packs_weights, tolerance
from evaluators.litert.workbench import Jobs, Workbench
from evaluators.litert.workload_files import deploy_workload
from evaluators.litert.workload_prices import PriceTable, measure_prices, one_seat
from evaluators.litert.workload_session import MeasuredWorkload
from evaluators.machine import Conditions
from evaluators.measurement.disturbance import Counters, TaskCounters
from evaluators.workload.desk import Seat
from evaluators.workload.hosted import HostedRun
from evaluators.workload.lowered import LoweredModel, over_before
from evaluators.workload.outcome import Objective, Outcome
from evaluators.workload.setting import HOST, Setting, setting
from search_spaces.arrangement import RankSet
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.joined_graph import JoinedGraph
from search_spaces.models.stages import StageModel, cut_stage
from search_spaces.plan import Dispatch, Plan, Stage
from search_spaces.platform import Platform
from search_spaces.pools import members
from search_spaces.rewrites.lower import Lowering
from search_spaces.rewrites.views import as_it_is
from search_spaces.workload import Workload

_INPUT_SEED = 0
_MOST_CUT = 2048  # stages that are kept; more than a model has operators


@dataclass(slots=True)
class _Model:
    """What is known of one model, however many instances there are."""

    graph: Graph
    packed: Path | None
    inputs: list[NDArray[np.generic]]
    reference: list[NDArray[np.generic]] = field(default_factory=list)


class LitertWorkload(MeasuredWorkload):
    """See :class:`~evaluators.workload.host.WorkloadSession`; the crew is the caller's.

    Args:
        platform: lanes, pools, and lanes that only baselines use.
        facts: of the evaluator, for the fingerprint.
    """

    def __init__(
        self,
        workload: Workload,
        joined: JoinedGraph,
        platform: Platform,
        objective: Objective,
        crew: Crew,
        facts: Mapping[str, Any],
    ) -> None:
        super().__init__(workload, joined, platform, objective)
        fitting = [p for p in self._lanes if computes_with_xnnpack(p) and p.resources]
        self._reference_lane = next(filter(packs_weights, fitting), fitting[0])
        self._crew, self._facts = crew, dict(facts)
        self.bench = Workbench(crew, platform)
        self._numbers = count(1)
        self._models: dict[int, _Model] = {}
        self._packed = Holder()
        self._cut: dict[tuple[str, tuple[int, ...]], StageModel] = {}
        used = {core for p in self._lanes for core in p.cores}
        self._conditions = Conditions(used, crew.processes, facts)
        self._counters = TaskCounters(used, crew.processes)
        self.capabilities = Capabilities(
            conditions=True, counters=self._counters.works, deploy=True, decompose=True, outputs=True
        )

    def close(self) -> None:
        """Tell that no lane is going to read what the session has made."""
        self._packed.close()

    def counters(self) -> Counters:
        """Return the kernel's counters of the worker processes."""
        return self._counters.read()

    def conditions(self) -> dict[str, Any]:
        """See :class:`~evaluators.base.Session`."""
        return self._conditions.now()

    def fingerprint(self) -> dict[str, Any]:
        """See :class:`~evaluators.base.Session`."""
        return {**self._facts, "workload": self.workload.digest, "objective": self.objective}

    def measured(self, graphs: Sequence[Graph], progress: Callable[[str], None]) -> PriceTable:
        """See :class:`~evaluators.litert.workload_session.MeasuredWorkload`."""
        return measure_prices(graphs, self._lanes, self.alone, progress)

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> WorkloadRun:  # noqa: ARG002
        """See :class:`~evaluators.base.Session`; every candidate has memory of its own.

        Args:
            graph: the joined one.
        """
        found = setting(self.workload, self.joined, plan, self.platform, self.lowerings)
        berths: list[Berth] = []
        try:
            for index, seat, model in zip(found.components, found.seats, found.models, strict=True):
                component = self.joined.components[index]
                client = self.workload.client_of(index)
                lanes = [members(self.platform[name]) for name in model.processors]
                owner = component.name if self._threaded(lanes) or client.own_weights else ""
                made = self._jobs(model, seat, owner, own=client.own_weights)
                berths.append(Berth(made, lanes, self.platform, self._crew, self.bench, self._numbers))
                berths[-1].set_inputs(self._model(component.graph).inputs)
            return WorkloadRun(self, found, plan, berths)
        except BaseException:
            for berth in berths:
                berth.close()
            raise

    def _threaded(self, lanes: Sequence[Sequence[str]]) -> bool:
        """Return whether lanes are threads of one process, which must not run one compiled model at the same time."""
        return any(HOST in self.platform[lane].options for each in lanes for lane in each)

    def _in_a_row(self, graph: Graph, cuts: Sequence[int]) -> LoweredModel:
        """Return a model, or what one was decomposed to, whose jobs wait for each other."""
        borders = [0, *cuts, len(graph.operators)]
        stages = tuple(Stage(tuple(range(a, b)), self._reference_lane.name) for a, b in pairwise(borders))
        lowered = Lowering(graph).lower(Plan(graph.digest, stages))
        return LoweredModel(graph, lowered, as_it_is(graph, lowered.plan), tuple(range(len(stages))), ())

    def _jobs(self, model: LoweredModel, seat: Seat, owner: str, *, own: bool) -> Jobs:
        """Return jobs of a model of the workload, or of what one was rewritten to."""
        graph, operators = model.graph, model.operators
        whole = self.lowerings.origin(model.model)
        packed = None if own else usable_packed(self._model(whole).packed, graph, whole, operators)
        digest = self.digest(graph)
        for each in operators:
            if (key := (digest, each)) not in self._cut:
                if len(self._cut) >= _MOST_CUT:
                    self._cut.pop(next(iter(self._cut)))
                self._cut[key] = cut_stage(graph, each)
        stages = tuple(self._cut[digest, each] for each in operators)
        return Jobs(graph, operators, stages, model.viewed, over_before(seat), digest, packed, owner)

    def _model(self, graph: Graph) -> _Model:
        """Return what is known of a model of the workload."""
        if id(graph) not in self._models:
            lane = self._reference_lane
            digest, packed = self.digest(graph), None
            if packs_weights(lane):
                packed = packed_weights(digest, lambda path: self.bench.pack(lane.name, graph, path))
            inputs = tensors.model_inputs(graph, _INPUT_SEED)
            self._models[id(graph)] = _Model(graph, self._packed.hold(packed), inputs)
        return self._models[id(graph)]

    def forget(self, graph: Graph) -> None:
        """See :class:`~evaluators.litert.workload_session.MeasuredWorkload`."""
        digest = self.digest(graph)
        self._cut = {key: stage for key, stage in self._cut.items() if key[0] != digest}

    def replay(self, found: Setting, dispatch: Dispatch, berths: Sequence[Berth]) -> Replay:
        """Return what runs a setting."""
        return Replay(found, dispatch, berths, self._crew, self.bench, self.platform.limits.run_s)

    def alone(self, found: Setting, parts: Sequence[tuple[Graph, Sequence[int]]], runs: int) -> list[Outcome]:
        """See :class:`~evaluators.litert.workload_session.MeasuredWorkload`."""
        berths = []
        try:
            for number, (seat, (graph, cuts)) in enumerate(zip(found.seats, parts, strict=True)):
                lanes = [[found.lanes[lane] for lane in each] for each in seat.lanes]
                owner = f"alone {number}" if self._threaded(lanes) else ""
                jobs = self._jobs(self._in_a_row(graph, cuts), seat, owner, own=False)
                berths.append(Berth(jobs, lanes, self.platform, self._crew, self.bench, self._numbers))
                berths[-1].set_inputs(self.inputs(graph))
            made = self.replay(found, "fifo", berths)
            outcomes = [made.run() for _ in range(runs)]
            if made.failures:
                raise UnavailableError(next(iter(made.failures.values())))
            return outcomes
        finally:
            for berth in berths:
                berth.close()

    def agreement(
        self, graph: Graph, outputs: Sequence[NDArray[np.generic]], lanes: Sequence[str], off: float = 0.0
    ) -> Agreement:
        """Compare outputs of a model with those of the whole model on the reference lane.

        Args:
            off: how far they may be from them beside what lanes explain.
        """
        model = self._model(graph)
        if not model.reference:
            model.reference = self._outputs(graph)
        allowed = tolerance([self.platform[lane] for lane in lanes], self._reference_lane, graph)
        return tensors.agreement(graph, outputs, model.reference, allowed + off)

    def decomposed_error(self, graph: Graph, ranks: RankSet) -> float | None:
        """See :class:`~evaluators.base.Session`."""
        made, _ = self.lowerings.whole(graph, ranks)
        try:
            outputs = self._outputs(made)
        finally:
            self.forget(made)
        return self.agreement(graph, outputs, [self._reference_lane.name]).max_rel_error

    def _outputs(self, graph: Graph) -> list[NDArray[np.generic]]:
        """Return what a model computes as a whole on the reference lane."""
        lane = [p.name for p in self._lanes].index(self._reference_lane.name)
        found = one_seat(lane, 1, self._lanes)
        jobs = self._jobs(self._in_a_row(graph, ()), found.seats[0], "", own=False)
        berth = Berth(jobs, [[self._reference_lane.name]], self.platform, self._crew, self.bench, self._numbers)
        try:
            berth.set_inputs(self.inputs(graph))
            made = self.replay(found, "fifo", [berth])
            made.run()
            if made.failures:
                raise UnavailableError(f"{graph.name}: {next(iter(made.failures.values()))}")
            return berth.outputs()
        finally:
            berth.close()

    def process(self, lane: str) -> int | None:
        """Return the number of the process that a lane is, or is a thread of; None where it is not running."""
        return self._crew.process_of(self.bench.process(lane))

    def digest(self, graph: Graph) -> str:
        """Return the digest of a model's file, and of what a model was decomposed to.

        Raises:
            UnavailableError: it has no file.
        """
        if graph.source is None:
            raise UnavailableError(f"model {graph.name!r} has no file; LiteRT runs files")
        return graph.source.content_digest()

    def inputs(self, graph: Graph) -> list[NDArray[np.generic]]:
        """Return what a model is measured with, decomposed or not."""
        return self._model(self.lowerings.origin(graph)).inputs

    def deploy(self, folder: Path, graph: Graph, plan: Plan) -> Agreement:  # noqa: ARG002
        """See :class:`~evaluators.base.Session`."""
        return deploy_workload(self, folder, plan)


class WorkloadRun(HostedRun):
    """A loaded plan of a workload; see :class:`~evaluators.workload.host.WorkloadCandidate`."""

    def __init__(self, session: LitertWorkload, found: Setting, plan: Plan, berths: Sequence[Berth]) -> None:
        super().__init__(found, plan, session.objective)
        self._session, self._berths = session, list(berths)
        self.replay = session.replay(found, plan.dispatch, berths)

    def once(self) -> Outcome:
        """See :class:`~evaluators.workload.hosted.HostedRun`."""
        found = self.replay.run()
        if self.replay.failures:
            seat, reason = next(iter(self.replay.failures.items()))
            name = self._session.joined.components[self._found.components[seat]].name
            raise UnavailableError(f"{name}: {reason}")
        return found

    def agreements(self) -> Iterator[Agreement]:
        """See :class:`~evaluators.workload.hosted.HostedRun`."""
        session = self._session
        for index, berth, model in zip(self._found.components, self._berths, self._found.models, strict=True):
            lanes = [lane for name in model.processors for lane in members(session.platform[name])]
            off = model.may_be_off(session.workload.client_of(index).tucker or 0.0)
            yield session.agreement(model.model, berth.outputs(), lanes, off)

    def close(self) -> None:
        """See :class:`~evaluators.base.Candidate`."""
        for berth in self._berths:
            berth.close()
