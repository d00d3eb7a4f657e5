"""Search problems on which samplers are compared: the best plan uses two kinds of processors, and the model is wrong.

What is true is a table: operators that were timed on this machine's kernels or on an H100 beside its CPU, of
:mod:`tests.benchmarks.sampler_tables`, or what the profile of a phone says, which was fitted to published
measurements. Beside it stands what no model knows: an operator takes 10 % (sd) more or less behind its predecessor in
one stage than alone. A plan is measured by simulating it on that table, without noise.

A sampler may use a model whose operators, calls and transfers are each off by 20 % (sd of the logarithm), drawn anew
for each seed: the profile of a study that timed such operators, and what the product makes of it.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Capabilities
from evaluators.cost_model.plans import UNSURE, PlanSimulator, part_costs
from evaluators.cost_model.session import CostModelEvaluator
from evaluators.cost_model.transfers import Prices
from evaluators.samples import Measurement, Samples
from evaluators.simulated import COPY_S_PER_BYTE, SimulatedSession, rewritten_s
from evaluators.workload.lowered import Lowerings
from evaluators.workload.predicted import WorkloadSimulator
from evaluators.workload.simulate import JobCost, stage_means_s
from optimizer.exact.bound import relax
from optimizer.model.goals import study_objective
from optimizer.model.profile import known_profile
from optimizer.samplers.auto import Problem
from optimizer.study.config import StudyConfig, most_stages
from optimizer.workload.baselines import first_plans
from optimizer.workload.search import (
    SHARED_STEPS,
    STEPS,
    WorkloadProposer,
    shared_starts,
    workload_costs,
    workload_critic,
)
from search_spaces.core.errors import OptimizeError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import merge
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.pools import single_processors, with_pools
from search_spaces.core.workload import workload_of
from search_spaces.models import load
from search_spaces.rewrites.lower import Lowered
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.registry import freedoms_in, make_space, make_workload_space
from search_spaces.spaces.shared_workload_space import SharedWorkloadSpace
from search_spaces.spaces.space import NeighbourlySpace, in_space
from tests.benchmarks.sampler_tables import Timed, read

MODEL_ERROR, HIDDEN = 0.2, 0.1
CUT_STAGES = 4
_QUIET = 0.25  # of the transfers that were read, that quantile: neighbours disturbed the others
_ANNEALING, _MORE, _CLIMBS = 450, 4500, 3  # of plans that are rewritten a prediction takes milliseconds
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Case:
    """A network, or several as a workload's words, on some processors of a machine or a phone."""

    network: str
    where: str
    processors: tuple[str, ...]
    allow: str = "cuts"

    def __str__(self) -> str:
        return f"{self.network} on {self.where}: {'+'.join(self.processors)}, {self.allow}"

    @property
    def several(self) -> bool:
        """Whether it is a workload."""
        return "," in self.network or "*" in self.network

    def seed(self, number: int) -> int:
        """Return a seed of the case's own: in spaces of one size the same one would draw the same plans."""
        return zlib.crc32(f"{self} {number}".encode())


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """What a study of a case needs.

    Attributes:
        truth: seconds that a plan takes; infinite where it does not run.
        measure: what a trial sees of a plan; None where it does not run.
        predict: what the model says.
        problem: for samplers that know problems.
        starts: plans that exact methods find best on the truth, and whole ones: where its search begins.
        baselines: everything on one processor.
        bound_s: no plan takes less in truth.
    """

    graph: Graph
    space: NeighbourlySpace
    truth: Callable[[Plan], float]
    measure: Callable[[Plan], Measurement | None]
    predict: Callable[[Plan], float]
    problem: Problem
    first: Plan
    starts: Sequence[Plan]
    baselines: Sequence[Plan]
    bound_s: float


class TableSession(SimulatedSession):
    """Prices the plans of one network by a table.

    Args:
        hidden: what an operator takes more behind its predecessor in one stage, relative, ``(P, n)``.
    """

    capabilities = Capabilities(rewrites=True)

    def __init__(self, platform: Platform, graph: Graph, table: Prices, hidden: _Array) -> None:
        super().__init__(platform)
        self.graph, self._table, self._hidden = graph, table, hidden
        self._made: dict[str, PlanSimulator] = {}

    def fingerprint(self) -> dict[str, Any]:
        """See :class:`~evaluators.base.Session`."""
        return {"evaluator": "table", "platform": self.platform.to_json()}

    def prices(self, lowered: Lowered) -> Prices:
        """See :class:`~evaluators.simulated.SimulatedSession`."""
        if not lowered.rewritten:
            return self._table
        operator_s = rewritten_s(self.graph, lowered, self._table.operator_s, lambda _, __: None)
        shape = operator_s.shape
        return replace(self._table, operator_s=operator_s, sigma=np.full(shape, UNSURE), traffic=np.full(shape[1], 0.5))

    def simulator_of(self, lowered: Lowered) -> PlanSimulator:
        """See :class:`~evaluators.simulated.SimulatedSession`."""
        key = f"{lowered.graph.digest} {lowered.plan.digest if lowered.held else ''}"
        if key not in self._made:
            if len(self._made) > 64:
                self._made.clear()
            self._made[key] = _Hiding(super().simulator_of(lowered), self._hidden, [o for o, _ in lowered.origins])
        return self._made[key]


class _Hiding(PlanSimulator):
    """Simulates as another one does, with what operators take more behind their predecessors."""

    def __init__(self, other: PlanSimulator, hidden: _Array, origins: Sequence[int]) -> None:
        super().__init__(other.graph, other.platform, other.prices, other.held)
        self._hidden, self._origins = hidden, origins

    def stage(self, processor: int, operators: tuple[int, ...]) -> tuple[float, float, tuple[float, ...]]:
        """See :class:`~evaluators.cost_model.plans.PlanSimulator`."""
        work_s, share, slowed = super().stage(processor, operators)
        members = {self._origins[o] for o in operators}
        more = [
            self._hidden[processor, self._origins[o]] * self.prices.operator_s[processor, o]
            for o in operators
            if self._origins[o] - 1 in members
        ]
        return work_s + float(sum(more)), share, slowed


def table_of(network: str, where: str, processors: Sequence[str]) -> tuple[Graph, Platform, Prices]:
    """Return a network, the processors, and what its operators take there."""
    graph = load(network)
    if where in {place for place, _ in _timed()}:
        return (graph, *_measured(_timed()[where, network], processors))
    evaluator = CostModelEvaluator()
    described = evaluator.described(where)
    if described is None:
        raise ValueError(where)
    platform = described.restrict(list(processors))
    with evaluator.prepare(platform) as session:
        return graph, platform, replace(session.simulator(graph).prices, alone_s=None)


@cache
def _timed() -> Mapping[tuple[str, str], Timed]:
    return read()


def _measured(of: Timed, processors: Sequence[str]) -> tuple[Platform, Prices]:
    platform = of.platform.restrict(list(processors))
    tables = [table for (where, _), table in _timed().items() if where == of.where]

    def between(a: str, b: str) -> float:
        pair = "|".join(sorted((a, b)))
        read_s = [table.profile.transfer_s[pair] for table in tables if pair in table.profile.transfer_s]
        return 0.0 if a == b else float(np.quantile(read_s, _QUIET))

    operator_s = np.array([of.profile.operator_s[name] for name in processors])
    rows, count = operator_s.shape
    alike, nothing = np.ones((rows, rows)), np.zeros(rows)
    return platform, Prices(
        operator_s=operator_s,
        sigma=np.full((rows, count), UNSURE),
        traffic=np.full(count, 0.5),
        invocation_s=np.array([of.profile.overhead_s[name] for name in processors]),
        io_s_per_byte=nothing,
        latency_s=np.array([[between(a, b) for b in processors] for a in processors]),
        byte_s=COPY_S_PER_BYTE * (1.0 - np.eye(rows)),
        slow_compute=alike,
        slow_memory=alike,
        capacity_bytes=nothing,
        pressure_per_byte=nothing,
        power_w=np.full(rows, np.nan),
    )


def _wrong(table: Prices, rng: np.random.Generator) -> Prices:
    """Return what a calibration might have read."""

    def off(values: _Array) -> _Array:
        found: _Array = values * np.exp(MODEL_ERROR * rng.standard_normal(values.shape))
        return found

    return replace(
        table,
        operator_s=off(table.operator_s),
        invocation_s=off(table.invocation_s),
        latency_s=off(table.latency_s),
        byte_s=off(table.byte_s),
    )


def setup(case: Case, number: int) -> Setup:
    """Return the study of a case whose model is wrong in the way of a seed."""
    logging.disable(logging.WARNING)  # what a profile cannot vouch for is no matter here
    return _workload(case, number) if case.several else _network(case, number)


def _hidden(case: Case, network: str, shape: tuple[int, ...]) -> _Array:
    seed = zlib.crc32(f"{network} {case.where}".encode())
    return HIDDEN * np.random.default_rng([seed, 5]).standard_normal(shape)


def _network(case: Case, number: int) -> Setup:
    graph, platform, table = table_of(case.network, case.where, case.processors)
    rng = np.random.default_rng([case.seed(number), 11])
    wrong = _wrong(table, rng)
    hidden = _hidden(case, case.network, table.operator_s.shape)
    known = TableSession(platform, graph, table, hidden)
    config = StudyConfig(model=case.network, budget=1, allow=case.allow, seed=number)
    space = make_space(config.allow, graph, platform, most_stages(config, len(graph.operators)))
    if not isinstance(space, NeighbourlySpace):
        raise TypeError(type(space))

    def solved(prices: Prices) -> tuple[Problem, Callable[[Plan], float]]:
        session = TableSession(platform, graph, prices, np.zeros_like(hidden))
        profiled = known_profile(part_costs(session.simulator(graph)), platform)
        objective = study_objective(config, graph, platform, space, session, profiled)
        optima = tuple(plan for plan in objective.problem.optima if in_space(space, plan))
        return replace(objective.problem, optima=optima, predict=objective.predict), objective.predict

    problem, predict = solved(wrong)
    folded = replace(table, operator_s=table.operator_s * (1.0 + hidden))
    best, _ = solved(folded)
    least = replace(best.model, operator_s=table.operator_s * (1.0 + np.minimum(hidden, 0.0)))
    wholes = [chain_plan(graph, (), [members[0].name]) for members in platform.classes().values()]
    wholes = [plan for plan in wholes if math.isfinite(_seconds(known, plan))]
    split = range(len(graph.operators)) if "splits" in case.allow else ()
    return Setup(
        graph,
        space,
        partial(_seconds, known),
        partial(_run, known),
        predict,
        problem,
        problem.optima[0],
        [*best.optima, *wholes],
        wholes,
        relax(graph, least, split).latency_s,
    )


def _run(session: TableSession, plan: Plan) -> Measurement | None:
    try:
        with closing(session.load(session.graph, plan)) as candidate:
            batch = candidate.run(1)
    except OptimizeError:
        return None
    stage_s = tuple(float(s) for s in batch.stage_s[0])
    return Measurement(Samples((float(batch.latency_s[0]),)), stage_s, (), "limit", batch.timeline)


def _seconds(session: TableSession, plan: Plan) -> float:
    found = _run(session, plan)
    return math.inf if found is None else found.latency_s.median


def _workload(case: Case, number: int) -> Setup:
    workload = workload_of(case.network)
    tables = {client.model: table_of(client.model, case.where, case.processors) for client in workload.clients}
    joined = merge(workload.name, [(i.name, tables[workload.clients[i.client].model][0]) for i in workload.instances])
    platform = with_pools(next(iter(tables.values()))[1])
    made = make_workload_space(case.allow, workload, joined, platform, CUT_STAGES)

    def simulator(error: np.random.Generator | None) -> WorkloadSimulator:
        sessions: dict[str, TableSession] = {}
        for name, (graph, processors, table) in tables.items():
            hidden = _hidden(case, name, table.operator_s.shape)
            prices = table if error is None else _wrong(table, error)
            sessions[graph.digest] = TableSession(processors, graph, prices, hidden * (error is None))

        def price(model: Graph, lowered: Lowered, processor: int, operators: tuple[int, ...]) -> JobCost:
            work_s, _, slowed = sessions[model.digest].simulator_of(lowered).stage(processor, operators)
            return JobCost(work_s, slowed)

        return WorkloadSimulator(Lowerings(workload, joined, platform), price)

    known, estimate = simulator(None), simulator(np.random.default_rng([case.seed(number), 11]))
    costs = workload_costs(estimate, platform)

    def value(plan: Plan, of: WorkloadSimulator) -> float:
        try:
            return of.run(plan, known=True).value_s("mean")
        except OptimizeError:
            return math.inf

    def measure(plan: Plan) -> Measurement | None:
        try:
            outcome = known.run(plan, known=True)
        except OptimizeError:
            return None
        stage_s = tuple(stage_means_s(outcome, known.setting(plan, known=True), len(plan.stages)))
        return Measurement(Samples((outcome.value_s("mean"),)), stage_s, (), "limit", outcome.timeline)

    firsts = [baseline.plan for baseline in first_plans(made)]
    shared = isinstance(made, SharedWorkloadSpace)

    def proposer(seed: int, of: WorkloadSimulator = estimate, steps: int = 0) -> WorkloadProposer:
        predict, starts = partial(value, of=of), list(firsts)
        if isinstance(made, SharedWorkloadSpace):
            plain = make_workload_space("cuts", workload, joined, platform, CUT_STAGES)
            starts += WorkloadProposer(plain, predict, starts, seed).ranking(1)
            starts += shared_starts(made, of)
        steps = steps or (SHARED_STEPS if shared else STEPS)
        return WorkloadProposer(made, predict, starts, seed, steps)

    annealed, predict = proposer(case.seed(number)), partial(value, of=estimate)
    critic = partial(workload_critic, estimate, costs, value)
    first = annealed.ranking(1)[0]
    least_s = sum(float(table.operator_s.min(axis=0).sum()) for _, _, table in tables.values()) * (1.0 - 3 * HIDDEN)
    return Setup(
        joined.graph,
        made,
        partial(value, of=known),
        measure,
        predict,
        Problem(
            joined.graph,
            platform,
            made,
            costs,
            search=lambda of, seed: annealed.anew(seed, critic(), of.fits),
            optima=(first,),
            predict=predict,
            critic=critic,
        ),
        first,
        proposer(0, known).ranking(4),
        [p for p in firsts if len(single_processors(platform)) and math.isfinite(value(p, known))],
        least_s / max(1, len(platform.processors)),
    )


def reference(found: Setup) -> tuple[float, Plan]:
    """Return the least that a search knowing the truth finds: by annealing and climbing, from exact methods' plans."""
    starts = [p for p in found.starts if math.isfinite(found.truth(p))]
    steps = _ANNEALING if "splits" in freedoms_in(found.space) else _MORE
    annealed = WorkloadProposer(found.space, found.truth, starts, 0, steps).ranking(1)[0]
    best, best_s = annealed, found.truth(annealed)
    rng = np.random.default_rng(12)
    for _ in range(_CLIMBS):
        before_s = best_s
        for _ in range(steps):
            plan = found.space.neighbour(best, rng)
            if (took_s := found.truth(plan)) < best_s * (1 - 1e-9):
                best, best_s = plan, took_s
        if before_s == best_s:
            break
    return best_s, best


def kinds_of(found: Setup, plan: Plan) -> set[str]:
    """Return the names of the processors that a plan uses."""
    return {stage.processor for stage in plan.stages}


_X, _B, _T = ("cpu0", "cpu1:openvino"), ("cpu0", "cpu1:builtin"), ("cpu0", "cpu1:builtin", "cpu1:openvino")
_G, _ALL = ("cpu", "gpu"), "cuts,branches,splits"
FEW = (
    Case("squeezenet1_1", "xeon", _X),
    Case("squeezenet1_0", "xeon", _T),
    Case("googlenet", "xeon", _B),
    Case("mobilenet_v1", "xeon", _X),
    Case("googlenet:int8", "xeon", _B),
    Case("resnet18", "xeon", _X),
    Case("inception_v3", "h100", _G),
    Case("alexnet", "mi8se", ("gpu", "5small")),
    Case("alexnet", "pixel4", ("gpu", "3med")),
    Case("squeezenet1_1*4", "xeon", _X),
    Case("squeezenet1_1*3,resnet50", "h100", _G),
    Case("alexnet*2,squeezenet1_1*2", "mi8se", ("gpu", "2large", "6small")),
)
"""For samplers whose proposals take seconds."""

CASES = (
    *FEW,
    Case("mobilenet_v1:int8", "xeon", _X),
    Case("mobilenet_v2:int8", "xeon", _T),
    Case("alexnet", "xeon", _X),
    Case("inception_v3", "xeon", _X),
    Case("mobilenet_v3_large", "xeon", _X),
    Case("densenet121@0.5", "xeon", _T),
    Case("resnet50", "xeon", _X),
    Case("alexnet@0.75", "mi8se", ("gpu", "2small")),
    Case("vgg11@0.5", "mi8se", ("gpu", "4small")),
    Case("vgg16@0.5", "mi8se", ("gpu", "6small")),
    Case("alexnet@0.75", "pixel4", ("gpu", "1med")),
    Case("squeezenet1_1*2,mobilenet_v1", "xeon", _B),
    Case("googlenet,resnet18,mobilenet_v2", "xeon", _X),
    Case("squeezenet1_1,efficientnet_lite0*2", "xeon", _T),
    Case("densenet121,inception_v3,resnet50", "h100", _G),
    Case("googlenet,mobilenet_v2*2", "s10", ("gpu", "2large")),
    Case("googlenet", "xeon", _X, "cuts,branches"),
    Case("googlenet", "xeon", _B, "cuts,branches"),
    Case("squeezenet1_0", "xeon", _X, "cuts,branches"),
    Case("mobilenet_v1", "xeon", _X, "cuts,splits"),
    Case("alexnet", "mi8se", ("gpu", "6small"), _ALL),
)
