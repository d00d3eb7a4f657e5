"""Explanation of a study's plan: costs of changes, limits that bind, and the alternatives.

Predictions are marked as such, with the study's measurements beside them. An explanation is the document of ``--json``,
with times in milliseconds; :func:`blocks` formats it. Of several models, plans are simulated with the prices that the
study measured or that its evaluator has; what needs an additive model of costs (cuts, limits, numbers of stages) is
empty.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast, get_args

import numpy as np

from evaluators.energy import OPTION
from evaluators.measurement.final import Ratio
from evaluators.objectives import (
    LATENCY,
    Objective,
    PricedCandidate,
    PricedSession,
    Pricing,
    find_objective,
    powers_or_meter,
)
from evaluators.registry import make_evaluator
from evaluators.simulated import SimulatedPlan
from evaluators.workload.host import WorkloadSession
from evaluators.workload.lowered import Lowerings
from evaluators.workload.objectives import find_workload_objective
from evaluators.workload.predicted import WorkloadSimulator
from evaluators.workload.prices import PriceTable
from optimizer.devices import choose_model_and_platform
from optimizer.exact.bound import Relaxation, model_error, relax
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import NEVER_S, ChainCosts, ChainObjective, weighed
from optimizer.exact.least import chain_costs, least_chain
from optimizer.exact.segment_model import SegmentModel
from optimizer.files import damage_of
from optimizer.model.bounds import ObjectiveModel, known_weights, price_of
from optimizer.report.answer import ORDERS, UNDECIDED, describe_operators, slower_text, slower_than
from optimizer.report.data import Study
from optimizer.report.document import Block, Column, Table, Text, headed, shown
from optimizer.study.config import StudyConfig, parse_config
from optimizer.study.folder import LOG, RESULT
from optimizer.study.log import read_log
from optimizer.study.several_models import SeveralModels
from optimizer.tools.execute import reloaded, reread
from search_spaces.core.errors import InfeasibleError, OptimizeError, RunFolderError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Dispatch, Plan, Stage, canonical
from search_spaces.core.platform import Platform
from search_spaces.core.pools import single_processors
from search_spaces.core.wording import percent, plural
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.cuts import cut_points
from search_spaces.spaces.registry import freedoms_of, needs_any_stages
from search_spaces.spaces.segment_space import SegmentSpace

SCHEMA_VERSION = 1
_MOST_PARTS = 8
_LOOKS = 10_000  # choices of processors to try for each number of stages: an explanation takes seconds
_PATIENCE_S = 2.0  # for each best chain: many equal chains of a period would take hours
_HAIR = 1e-9
_LITTLE = 1e-3  # relative to the latency: a limit that costs less is shown as “hardly any”
_TIME = ".4g"
_WITHOUT = "no stage on "
_SHARE = "–"  # in place of processors to which a stage might move

Document = dict[str, Any]
Best = Callable[[int, int], tuple[Plan, float] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Predicts plans without measuring: the evaluator itself if it computes its latencies, else what a study profiled.

    Attributes:
        name: its name in texts.
        platform: the processors that stages may be moved to.
        objective: whose values it predicts.
        price: predicted value of a plan, in the objective's unit; infinite for one that cannot run.
        costs: additive; infinite for what is not supported; None of several models.
        best: the best chain of a least and a most number of stages, and its price; None if there is none.
        own: whether it is the evaluator itself, whose predictions do not vary.
        chains: how stages add up.
        simulator: of several models.
    """

    name: str
    graph: Graph
    platform: Platform
    objective: Objective
    price: Callable[[Plan], float]
    costs: ChainCosts | None = None
    best: Best = lambda *_: None
    own: bool = False
    chains: ChainObjective = "latency"
    simulator: WorkloadSimulator | None = None


def _priced_by(model: Model, powers: Mapping[str, float]) -> Model:
    """Return a model of latencies as one of its objective; a percentile of the latency is predicted as the latency."""
    objective, costs = model.objective, model.costs
    if objective.aggregation == "path" or costs is None:
        return model
    weighted = weighed(costs, known_weights(Pricing(objective, costs.platform, powers)))
    alone = ObjectiveModel(objective, model.graph, replace(weighted, beyond_s=None))  # stages need not be consecutive
    if not objective.is_additive:  # so there is no best chain
        own = alone.predict if objective.aggregation == "plan" else model.price
        return replace(model, price=own, best=lambda *_: None)

    def price(plan: Plan) -> float:
        return alone.predict(plan) if math.isfinite(model.price(plan)) else math.inf

    best = partial(_best_by_costs, model.graph, weighted, chains=alone.chains)
    return replace(model, costs=weighted, price=price, best=best, chains=alone.chains)


def explain(study: Study, progress: Callable[[str], None] = lambda _: None) -> Document:
    """Explain a study's plan by its first objective, or of several models by the figure of runs that this follows from.

    Numbers are in thousandths of the objective's unit, whatever the keys of the document say.

    Args:
        progress: called with what is computed next.

    Raises:
        RunFolderError: its model, profile or prices are not available any more.
        UnavailableError: its evaluator predicts, and cannot be opened here.
    """

    def listed(name: str, rows: Iterator[Document]) -> list[Document]:
        progress(f"computing the {name}")
        return list(rows)

    with _model_of(study) as (opened, model):
        work, least, simulator = _Work(opened, model), _least(opened, model), model.simulator
        same = model.objective == opened.objective
        orders = get_args(Dispatch) if simulator is not None else ()
        return {
            "schema_version": SCHEMA_VERSION,
            "run_dir": str(opened.path),
            "objective": model.objective.name,
            "minimised": opened.objective.name,
            "unit": model.objective.shown_unit,
            "stage_unit": model.objective.stage_unit,
            "amount": model.objective.amount or "time",
            "front": bool(opened.result.get("front")),
            "predicted_by": model.name,
            "plan": opened.best.to_json(),
            "best": work.known(opened.best),
            "cuts": listed("prices of moved cuts", work.cuts()),
            "parts": listed("prices of other processors", work.parts()),
            "orders": {name: work.known(replace(opened.best, dispatch=name)) for name in orders if name != "static"},
            "busy": _busy(simulator, opened.best) if simulator is not None else {},
            "limits": listed("prices of limits", work.limits()),
            "best_predicted": work.best_predicted,
            "by_stages": listed("best plan of each number of stages", work.by_stages()),
            "by_cuts_alone": work.by_cuts_alone,
            "baselines": {name: work.known(plan) for name, plan in opened.plans.items()},
            "no_plan_below": {
                "predicted_ms": least.latency_s * 1e3,
                "critical_path_ms": least.critical_path_s * 1e3,
                "work_ms": least.work_s * 1e3,
            }
            if least is not None
            else None,
            "final_comparison": opened.result.get("speedup") if same and opened.objective.scales else None,
            "states": list(opened.config.get("state") or ()),
            "note": "the stages are not consecutive operators, so moving a cut has no price"
            if model.costs is not None and not work.is_chain
            else None,
        }


@contextmanager
def _model_of(study: Study) -> Iterator[tuple[Study, Model]]:
    """Open the predictor of a study; yield the study with its models where they were read again.

    Raises:
        RunFolderError: the study holds no profile, or its model cannot be read any more.
    """
    if "workload" in study.result:
        with _simulated(study) as (subject, simulator):
            objective = find_workload_objective(subject.objective)
            slowness = study.verdict.slowness if study.verdict is not None else 1.0
            price = partial(_simulated_s, simulator, subject, slowness)
            graph, platform = subject.joined.graph, subject.space.platform
            name = "the simulator"
            yield (
                replace(study, joined=subject.joined),
                Model(name, graph, platform, objective, price, own=study.predicted, simulator=simulator),
            )
        return
    if study.graph is None:
        raise RunFolderError(
            f"{study.path}: {study.missing or 'its model is not known'}", "an explanation needs the model"
        )
    if study.profile is None or study.costs is None:
        raise RunFolderError(f"{study.path}: it holds no profile of the operators", "explain a finished study")
    platform, objective = study.costs.platform, study.objective
    powers: Mapping[str, float] = {p.name: p.options[OPTION] for p in platform.processors if OPTION in p.options}
    price = partial(_predicted, study, _pricing(objective, platform, powers))
    name, best = "the profiled operators", partial(_best_by_costs, study.graph, study.costs)
    profiled = _priced_by(Model(name, study.graph, platform, objective, price, study.costs, best), powers)
    if not study.predicted:  # its device may be away
        yield study, profiled
        return
    evaluator = make_evaluator(str(study.result["evaluator"]))
    given = {name: study.config.get(name) for name in StudyConfig.model_fields}
    graph, platform = choose_model_and_platform(evaluator, parse_config(given))
    now = json.loads(json.dumps(platform.to_json()))
    if graph.digest != study.graph.digest or now != study.result["platform"]:
        raise RunFolderError(f"{study.path}: its model or its platform has changed", "run the study again")
    with evaluator.prepare(platform) as session:
        if not session.capabilities.costs:
            yield study, profiled
            return
        powers, _ = powers_or_meter(objective, platform, session)
        priced = PricedSession(session, [_pricing(objective, platform, powers)])
        tables, own_price = session.part_costs(graph), price_of(graph, priced)
        least = chain_costs(platform, tables, least=True)

        def least_of(fewest: int, most: int) -> tuple[Plan, float] | None:
            try:
                found = least_chain(graph, least, own_price, most, min_stages=fewest, looks=_LOOKS)
            except InfeasibleError:
                return None
            return found.best, found.value

        costs = chain_costs(platform, tables)
        own = Model("this cost model", graph, platform, objective, own_price, costs, least_of, own=True)
        yield study, _priced_by(own, powers)


@contextmanager
def _simulated(study: Study) -> Iterator[tuple[SeveralModels, WorkloadSimulator]]:
    """Open what predicts plans of a study of several models; of a measured one without its device."""
    run = study.path
    priced = [record.data for record in read_log(run / LOG).records if record.kind == "prices"]
    if not priced:
        raise RunFolderError(f"{run}: its log has no job times", "explain a finished study")
    if study.predicted:
        with reloaded(run) as found:
            session = cast("WorkloadSession", found.session)
            session.price(priced[-1], lambda _: None)
            yield cast("SeveralModels", found.subject), session.simulator
        return
    searched = tuple(p for p in single_processors(study.platform) if p.resources)  # baselines alone use the others
    with reread(run, replace(study.platform, processors=searched)) as (of, _):
        subject = cast("SeveralModels", of)
        lowerings = Lowerings(subject.workload, subject.joined, subject.platform)
        yield subject, PriceTable.from_json(priced[-1]).simulator(lowerings)


def _simulated_s(simulator: WorkloadSimulator, subject: SeveralModels, slowness: float, plan: Plan) -> float:
    try:
        return simulator.run(plan).value_s(subject.objective) * slowness
    except OptimizeError:
        return math.inf


def _busy(simulator: WorkloadSimulator, plan: Plan) -> dict[str, float]:
    """Return for which share of the makespan each processor works, the busiest first."""
    found, spent_s = simulator.run(plan), dict[str, float]()
    for event in found.timeline.events:
        spent_s[event.processor] = spent_s.get(event.processor, 0.0) + event.end_s - event.start_s
    return {name: spent_s[name] / found.makespan_s for name in sorted(spent_s, key=lambda name: -spent_s[name])}


def _pricing(objective: Objective, platform: Platform, powers: Mapping[str, float]) -> Pricing:
    """Return how a model prices plans: by the objective where that follows from runs alone, else by the latency."""
    how = Pricing(objective if objective.aggregation == "run" else LATENCY, platform, powers)
    return replace(how, powers=known_weights(how))


def _predicted(study: Study, how: Pricing, plan: Plan) -> float:
    try:
        found = study.predict(plan)
    except OptimizeError:
        return math.inf
    if found is None:
        return math.inf
    return float(PricedCandidate(SimulatedPlan(found, None, lambda: math.inf), plan, (how,)).run(1).latency_s[0])


def _best_by_costs(
    graph: Graph, costs: ChainCosts, fewest: int, most: int, chains: ChainObjective = "latency"
) -> tuple[Plan, float] | None:
    """Return the best chain of an additive model and its price, or None where none fits or is proven in time."""
    stop_s = time.monotonic() + _PATIENCE_S
    try:
        found = best_chains(costs, most, objective=chains, min_stages=fewest, stop_s=stop_s)[0]
    except (InfeasibleError, UnavailableError, ValueError):
        return None
    return chain_plan(graph, found.cuts, found.processors), found.cost_s


def _least(study: Study, model: Model) -> Relaxation | None:
    """Return the lower bounds of all plans: the study's, or else those of whole operators; None of several models.

    Raises:
        RunFolderError: the result is damaged.
    """
    if model.costs is None:
        return None
    bounds = study.result.get("bounds")
    if not bounds and not model.objective.is_additive:
        return None
    if not bounds:
        return relax(model.graph, model.costs)
    with damage_of(study.path / RESULT):
        return Relaxation(float(bounds["critical_path_ms"]) / 1e3, float(bounds["work_ms"]) / 1e3)


def _figures(predicted_s: float | None, more_s: float | None, measured_s: float | None, why_not: str) -> Document:
    """Return the figures of a plan, in milliseconds."""
    return {
        "predicted_ms": _ms(predicted_s),
        "predicted_more_ms": _ms(more_s),
        "measured_ms": _ms(measured_s),
        "why_not": why_not or None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _segments(study: Study, model: Model) -> SegmentSpace | None:
    """Return the space of a study of latencies whose plans may have branches or splits; None for any other."""
    freedoms = freedoms_of(str(study.config.get("allow") or "cuts"))
    additive = model.costs is not None and model.objective.aggregation == "path"
    if not additive or freedoms.isdisjoint(("branches", "splits")):
        return None
    return SegmentSpace(model.graph, model.platform, splits="splits" in freedoms, branches="branches" in freedoms)


class _Work:
    """Makes the parts of an explanation, from a study and its model."""

    def __init__(self, study: Study, model: Model) -> None:
        self._study, self._model = study, model
        self._graph, self._plan = model.graph, study.best
        self.is_chain = model.costs is not None and self._plan.is_chain
        self._measured = {} if study.predicted else _measured(study, model)
        most = int(study.config.get("max_stages") or 4)
        self._any_stages = needs_any_stages(str(study.config.get("allow") or "cuts"))
        self._most = min(_MOST_PARTS if self._any_stages else most, len(self._graph.operators))
        self._most = max(self._most, len(self._plan.stages) if self.is_chain else 1)
        self._space = _segments(study, model)
        self._costs = model.costs if model.objective.is_additive else None
        best = self._best_under(self._costs, self._most) if self._costs is not None else None
        self._least_s = best[1] if best is not None else None
        self.best_predicted = best[0].to_json() if best is not None else None
        self._best_s = self._priced(self._plan)[0]

    @property
    def by_cuts_alone(self) -> bool:
        """Whether the study's plans may have branches or splits, and the best plans by number of stages have none."""
        return self._space is not None

    def _best_under(self, costs: ChainCosts, most: int) -> tuple[Plan, float] | None:
        """Return the best plan of the study's space under other costs and its price; None where none fits."""
        if self._space is None:
            return _best_by_costs(self._graph, costs, 1, most, self._model.chains)
        found = SegmentModel(self._space, costs).best()
        return None if found.cost_s >= NEVER_S else (self._space.plan(found.parts), found.cost_s)

    def known(self, plan: Plan) -> Document:
        """Return a plan's prediction, its difference from the study's plan, its measurement, and why it has none."""
        predicted_s, why_not = self._priced(plan)
        more_s = None if predicted_s is None or self._best_s is None else predicted_s - self._best_s
        return _figures(predicted_s, more_s, self._measured.get(plan.digest), why_not)

    def _priced(self, plan: Plan) -> tuple[float | None, str]:
        refused = self._refused(plan)
        if not refused and math.isfinite(seconds := self._model.price(plan)):
            return seconds, ""
        split = self._model.costs is not None and any(stage.share is not None for stage in plan.stages)
        return None, refused or ("predictions do not cover splits" if split else "not supported there")

    def _refused(self, plan: Plan) -> str:
        costs = self._model.costs
        if costs is None:  # the simulator tells itself
            return ""
        index = {p.name: i for i, p in enumerate(costs.platform.processors)}
        kept = np.zeros(len(index))
        for stage in plan.stages:
            if stage.processor not in index:
                return f"no model covers the runtime's own placement on {stage.processor}"
            processor, operators = index[stage.processor], list(stage.operators)
            bad = next((o for o in operators if not math.isfinite(costs.operator_s[processor, o])), None)
            if bad is not None:
                return f"operator {bad} ({self._graph.operators[bad].kind}) is not supported on {stage.processor}"
            if costs.operator_nbytes is not None and costs.memory_bytes is not None:
                kept[processor] += costs.operator_nbytes[operators].sum()
                if kept[processor] > costs.memory_bytes[processor]:
                    return f"does not fit into the memory of {stage.processor}"
        return "predictions do not cover triples" if plan.ranks else ""

    def cuts(self) -> Iterator[Document]:
        """Yield the cuts of a chain, each with the plans that have it one operator earlier and later."""
        nbytes = {point.position: point.nbytes for point in cut_points(self._graph)}
        for index, stage in enumerate(self._plan.stages[1:] if self.is_chain else (), 1):
            before = stage.operators[0]
            sides = {"left": self._moved(index, before - 1), "right": self._moved(index, before + 1)}
            yield {"before": before, "nbytes": nbytes[before], **sides}

    def _moved(self, index: int, to: int) -> Document:
        """Return the figures of the plan whose stage ``index`` begins at operator ``to``."""
        stages = list(self._plan.stages)
        both = (*stages[index - 1].operators, *stages[index].operators)
        if not both[0] < to <= both[-1]:
            return _figures(None, None, None, "the stage would be empty")
        stages[index - 1] = Stage(tuple(o for o in both if o < to), stages[index - 1].processor)
        stages[index] = Stage(tuple(o for o in both if o >= to), stages[index].processor)
        return self.known(replace(self._plan, stages=tuple(stages)))

    def parts(self) -> Iterator[Document]:
        """Yield the stages, each with the plan's figures if it ran on another processor."""
        same = self._model.objective == self._study.objective and not self._study.config.get("state")
        stage_ms = self._study.result["best"].get("stage_ms") if same else None
        for index, stage in enumerate(self._plan.stages):
            elsewhere: dict[str, Document] = {}
            alike: dict[str, list[str]] = {}
            others = [p.name for p in self._model.platform.processors if p.name != stage.processor]
            if stage.share is not None and self._model.costs is not None:
                elsewhere, others = {_SHARE: _figures(None, None, None, "one share of a split")}, []
            for name in others:
                stages = list(self._plan.stages)
                stages[index] = replace(stage, processor=name)
                moved = replace(self._plan, stages=tuple(stages))
                if self._model.costs is not None:
                    moved = canonical(moved, self._graph, self._model.platform)
                alike.setdefault(moved.digest, []).append(name)
                elsewhere[moved.digest] = self.known(moved)
            if alike:  # interchangeable processors make one plan
                elsewhere = {", ".join(names): elsewhere[digest] for digest, names in alike.items()}
            model, graph, operators = self._study.model_of(stage)
            yield {
                "model": model,
                "operators": describe_operators(graph or self._graph, operators),
                "processor": stage.processor,
                "stage_ms": stage_ms[index] if stage_ms else None,
                "elsewhere": elsewhere,
            }

    def limits(self) -> Iterator[Document]:
        """Yield the limits and their costs; none without an additive model of the objective and its best plan."""
        if (costs := self._costs) is not None and self._least_s is not None:
            yield from (*self._constraints(costs), *self._prices(costs), *self._processors(costs))

    def _constraints(self, costs: ChainCosts) -> Iterator[Document]:
        """Yield limits of the study: stages, deadline, memory, and operators that are not supported."""
        if self._most < len(self._graph.operators) and not self._any_stages:
            yield self._limit(f"at most {plural(self._most, 'stage')} (--max-stages)", costs, self._most + 1)
        deadline = self._study.config.get("deadline") if self._study.objective == LATENCY else None
        if deadline is not None and self._least_s is not None:
            spare_ms = float(deadline) - 1e3 * (self._measured.get(self._plan.digest) or self._best_s or 0.0)
            how = f"{spare_ms:.4g} ms to spare" if spare_ms >= 0 else f"missed by {-spare_ms:.4g} ms"
            yield _limit(f"--deadline {float(deadline):g} ms: {how}", self._least_s, 0.0)
        # The prices of plans with branches or splits take neither memory nor slow large stages into account.
        if self._space is None and costs.operator_nbytes is not None and costs.memory_bytes is not None:
            yield self._limit("memory of the processors", replace(costs, memory_bytes=None, operator_nbytes=None))
        for number, processor in enumerate(costs.platform.processors):
            if count := int((~np.isfinite(costs.operator_s[number])).sum()):
                allowed = costs.operator_s.copy()
                allowed[number] = np.where(np.isfinite(allowed[number]), allowed[number], allowed.min(axis=0))
                what = f"{plural(count, 'operator')} not supported on {processor.name}"
                what += " (if supported: as fast as on the fastest other processor)"
                yield self._limit(what, replace(costs, operator_s=allowed))

    def _prices(self, costs: ChainCosts) -> Iterator[Document]:
        """Yield the costs of stages beside their operators."""
        if costs.transfer_s.any():
            yield self._limit("transfers take time", replace(costs, transfer_s=np.zeros_like(costs.transfer_s)))
        if costs.overhead_s.any():
            yield self._limit("starting a stage takes time", replace(costs, overhead_s=np.zeros_like(costs.overhead_s)))
        if self._space is None and costs.beyond_s is not None and costs.beyond_s.any():
            what = "large stages slow down, and tensors that cross a cut are copied"
            yield self._limit(what, replace(costs, beyond_s=None))

    def _processors(self, costs: ChainCosts) -> Iterator[Document]:
        """Yield the best plan without each kind of processor."""
        kinds = costs.platform.classes()
        for like, members in kinds.items() if len(kinds) > 1 else ():
            names = {p.name for p in members}
            without = costs.operator_s.copy()
            without[[p.name in names for p in costs.platform.processors]] = np.inf
            which = ", ".join(sorted(names)) if len(names) < 4 else f"{len(names)} processors like {like}"
            yield self._limit(f"{_WITHOUT}{which}", replace(costs, operator_s=without))

    def _limit(self, what: str, costs: ChainCosts, most: int | None = None) -> Document:
        """Return the best plan under other costs, and what it saves, both by the additive model."""
        found = self._best_under(costs, most or self._most)
        if found is None or self._least_s is None:
            return _limit(what, None, None)
        saves_s = self._least_s - found[1]
        return _limit(what, found[1], saves_s if abs(saves_s) > _HAIR * self._least_s else 0.0)

    def by_stages(self) -> Iterator[Document]:
        """Yield the best plan of each number of stages, up to one more than was allowed; none of several models."""
        if self._model.costs is None:
            return
        best: dict[int, tuple[float, Plan]] = {}
        for plan in (trial.plan for trial in self._study.trials):
            seconds, count = self._measured.get(plan.digest), len(plan.stages)
            if seconds is not None and (count not in best or seconds < best[count][0]):
                best[count] = seconds, plan
        for count in range(1, min(self._most + 1, _MOST_PARTS, len(self._graph.operators)) + 1):
            predicted, measured = self._model.best(count, count), best.get(count)
            yield {
                "stages": count,
                "predicted_ms": predicted[1] * 1e3 if predicted else None,
                "predicted": predicted[0].to_json() if predicted else None,
                "measured_ms": measured[0] * 1e3 if measured else None,
                "measured": measured[1].to_json() if measured else None,
            }


def _measured(study: Study, model: Model) -> dict[str, float]:
    """Return digest of a plan → its measured value of the model's objective: the final's, else the search's, scaled."""
    named = {"best": study.best, **study.plans}
    if model.objective != study.objective:  # which follows from runs; the result has their figures, too
        outcomes, key = study.result["workload"]["outcomes"], f"{model.objective.name}_ms"
        return {named[name].digest: outcome[key] / 1e3 for name, outcome in outcomes.items()}
    sure = (t for t in study.trials if t.measurement and (model.own or not t.raced))
    entries = {"best": study.result["best"], **study.result["baselines"]}
    shown_ms = {named[name].digest: entry["latency_ms"] for name, entry in entries.items()}
    final = ((p.digest, study.verdict.standing(p)) for p in study.verdict.plans) if study.verdict is not None else ()
    return (
        {t.plan.digest: study.searched_s(t) for t in sure}
        | {digest: standing.samples.median for digest, standing in final if standing and standing.samples}
        | {digest: found["median"] / 1e3 for digest, found in shown_ms.items() if found is not None}
    )


def _limit(what: str, without_s: float | None, saves_s: float | None) -> Document:
    """Return a limit, the seconds of the best plan without it, and by how much that is faster."""
    binds = saves_s is not None and saves_s > 0
    return {"what": what, "binds": binds, "without_ms": _ms(without_s), "saves_ms": _ms(saves_s)}


def head(found: Document) -> str:
    """Return what is explained."""
    what = f"{found['minimised']} of several models" if found["orders"] else Plan.from_json(found["plan"])
    return f"{found['run_dir']}: {what}"


def blocks(found: Document) -> Iterator[Block]:
    """Yield the explanation as blocks of a report."""
    best, least, unit = found["best"], found["no_plan_below"], found["unit"]
    objective = find_workload_objective(found["objective"])
    if found["minimised"] != found["objective"]:
        why = f"{found['minimised']}, the objective of the study, follows from runs"
        yield Text(f"All figures are of the {objective.title}: {why}.")
    elif found["front"] or found["objective"] != LATENCY.name:
        of = "the first of several objectives" if found["front"] else "the objective of the study"
        title = objective.title if found["orders"] else find_objective(found["objective"]).title
        counted = "" if objective.scales else " Each missed deadline adds the longest deadline to the mean."
        yield Text(f"All figures are of {of}: {title}.{counted}")
    measured = "not measured" if best["measured_ms"] is None else f"{shown(best['measured_ms'], _TIME)} {unit} measured"
    text = (
        f"{shown(best['predicted_ms'], _TIME)} {unit} predicted by {found['predicted_by']}, {measured}. All "
        "predictions below are made in the same way."
    )
    if best["why_not"]:
        text = f"{measured}, not predicted: {best['why_not']}. Predictions below are by {found['predicted_by']}."
    yield Text(f"This plan: {text}{_error(found)}")
    if states := found["states"]:
        yield Text(f"Predictions below are of the device as its profile has it, without {', '.join(states)}.", "note")
    if found["note"]:
        yield Text(f"Note: {found['note']}.", "note")
    if found["cuts"]:
        yield _cuts(found)
    if busy := found["busy"]:
        busiest = next(iter(busy))
        yield Text(f"The busiest processor is {busiest}: it works for {percent(busy[busiest])} of the makespan.")
        yield Table("How busy processors are", headed("processor; busy|.0%"), tuple(busy.items()))
    shares = sum(_SHARE in part["elsewhere"] for part in found["parts"])
    if not any(part["elsewhere"] for part in found["parts"]):
        yield Text("There is no other processor to which a stage might move.")
    elif shares < len(found["parts"]) and not best["why_not"]:
        yield _parts(found)
    if shares:
        how_many = f"{shares} of {len(found['parts'])}"
        yield Text(f"Note: stages that compute one share of a split ({how_many}) are not moved.", "note")
    if orders := found["orders"]:
        rows = tuple((ORDERS[name], *_known(entry)) for name, entry in orders.items())
        yield Table("Other orders of the queue", headed("order", *_columns(found)), rows)
    if found["limits"]:
        yield _limits(found)
    if any(k["predicted_ms"] is not None or k["measured_ms"] is not None for k in found["by_stages"]):
        yield _by_stages(found)
    if text := _final(found):
        yield Text(text)
    yield _baselines(found)
    if least is None or not least["predicted_ms"]:
        return
    if objective.aggregation == "plan":
        yield Text(f"Lower bound for any plan: {least['predicted_ms']:.4g} {unit}, from the model's operators alone.")
        return
    shared = least["work_ms"] >= least["critical_path_ms"]
    why = "all work shared evenly" if shared else "the longest path of operators"
    if objective.aggregation == "sum":
        why = "each operator where it needs least"
    wrong = model_error(best["measured_ms"], least["predicted_ms"]) if best["measured_ms"] is not None else 0.0
    below = f" This one was measured {percent(wrong, 1)} below that, so predictions are wrong by at least as much."
    of = "" if objective.quantile is None else "of the median latency "
    yield Text(
        f"Lower bound {of}for any plan: {least['predicted_ms']:.4g} {unit} (predicted), {why} "
        f"(work {least['work_ms']:.4g} {unit}, path {least['critical_path_ms']:.4g} {unit}).{below if wrong else ''}"
    )


def _error(found: Document) -> str:
    """Return how far the predictions below were from what was measured."""
    pairs = ((k["predicted_ms"], k["measured_ms"]) for k in (found["best"], *found["baselines"].values()))
    known = list(dict.fromkeys(pair for pair in pairs if all(pair)))  # one of a plan that has two names
    if not known or find_workload_objective(found["objective"]).of_plan is not None:
        return ""
    wrong = statistics.median(abs(predicted / measured - 1.0) for predicted, measured in known)
    which = "baselines" if found["best"]["why_not"] else "this one and baselines"
    of = f"in the median of {len(known)} plans ({which})" if len(known) > 1 else "for the plan that has both"
    return f" The predictions were {percent(wrong)} off {of}: smaller differences say little."


def _final(found: Document) -> str:
    """Return the result of the final comparison, which decides; the table above has medians of few runs."""
    final, best_ms = found["final_comparison"], found["best"]["measured_ms"]
    if final is None:
        return ""
    ratio, (low, high) = final["ratio"], final["ci95"]
    objective = find_workload_objective(found["objective"])
    if final["plan"] == found["plan"] and objective.is_time and ratio < 1.0:  # the knee of a front
        slower = slower_than(Ratio(ratio, low, high).inverse, objective, f"“{final['baseline']}”")
        sentence = f"In the final comparison, this plan {'took' if 'times as' in slower else 'was'} {slower}."
    elif final["plan"] == found["plan"] and objective.is_time:
        how = f"{ratio:.3f} times as fast as “{final['baseline']}”"
        how += "" if low == high else f" (95 %: {low:.3f} to {high:.3f})"
        sentence = f"In the final comparison, this plan was {how}."
    elif final["plan"] == found["plan"]:
        other = slower_text(Ratio(ratio, low, high), objective)
        sentence = f"In the final comparison, “{final['baseline']}” {'was' if 'equal' in other else 'took'} {other}."
    else:
        slower = slower_text(Ratio(ratio, low, high).inverse, objective)
        took = "was" if objective.is_time or slower.startswith("equal") else "took"
        how = "was not decided against it" if slower == UNDECIDED else f"{took} {slower}"
        sentence = f"In the final comparison, the next best plan {how}."
    lucky = best_ms and any((k["measured_ms"] or math.inf) < best_ms for k in found["by_stages"])
    if not lucky:
        return sentence
    return f"Plans that look faster above are not significantly so, or were measured in few runs only. {sentence}"


def _columns(found: Document) -> tuple[Column, ...]:
    """Return the columns of a plan's figures."""
    unit = found["unit"]
    return headed(f"predicted change, {unit}|+.4g", Column(f"measured, {unit}", _TIME), "remark")


def _known(entry: Mapping[str, Any]) -> tuple[float | None, float | None, str]:
    """Return the cells under :func:`_columns`."""
    return entry["predicted_more_ms"], entry["measured_ms"], entry["why_not"] or ""


def _cuts(found: Document) -> Table:
    rows = tuple(
        (f"before {cut['before']}, {cut['nbytes']:,} B cross", f"one operator {side}", *_known(cut[side]))
        for cut in found["cuts"]
        for side in ("left", "right")
    )
    return Table("What moving a cut would cost", headed("cut; move", *_columns(found)), rows, group=1)


def _parts(found: Document) -> Table:
    alone = {"–": {"predicted_more_ms": None, "measured_ms": None, "why_not": "there is no other processor"}}
    rows = tuple(
        (part["model"], part["operators"].partition(":")[0], part["processor"], part["stage_ms"], name, *_known(entry))
        for part in found["parts"]
        if _SHARE not in part["elsewhere"]
        for name, entry in (part["elsewhere"] or alone).items()
    )
    source = "predicted" if found["best"]["measured_ms"] is None else "measured"
    columns = headed(
        "model; operators; processor", Column(f"{source}, {found['stage_unit']}", _TIME), "moved to", *_columns(found)
    )
    return Table("What each stage would cost on another processor", columns, rows, group=4)


def _limits(found: Document) -> Table:
    rows, same = [], found["best_predicted"] in (None, found["plan"])
    idle = [limit for limit in found["limits"] if limit["what"].startswith(_WITHOUT) and limit["saves_ms"] == 0]
    names = ", ".join(limit["what"].removeprefix(_WITHOUT) for limit in idle)
    merged = [{**idle[0], "what": f"{_WITHOUT}any one of {names}"}] if len(idle) > 1 else idle
    for limit in [*(limit for limit in found["limits"] if limit not in idle), *merged]:
        saves, without = limit["saves_ms"], limit["without_ms"]
        word = f"costs {found['amount']}" if limit["binds"] else "no plan found" if without is None else ""
        if limit["binds"] and saves < _LITTLE * without:
            word = "hardly any"
        elif saves is not None and saves < 0:
            word = "needed" if same else "used by the best predicted plan"
        rows.append((limit["what"], without, None if saves is None else -saves, word))
    name = f"best plan without it, predicted, {found['unit']}"
    columns = headed("limit", Column(name, _TIME), f"predicted change, {found['unit']}|+.4g; remark")
    other = ""
    if not same:
        stages = Plan.from_json(found["best_predicted"]).stages
        names = ", ".join(dict.fromkeys(stage.processor for stage in stages))
        other = f" ({plural(len(stages), 'stage')} on {names}; not the recommended one)"
    return Table(f"Which limits cost {found['amount']}: against the best predicted plan{other}", columns, tuple(rows))


def _by_stages(found: Document) -> Table:
    rows = tuple(
        (
            k["stages"],
            k["predicted_ms"],
            str(Plan.from_json(k["predicted"])) if k["predicted"] else "no plan found",
            k["measured_ms"],
            str(Plan.from_json(k["measured"])) if k["measured"] else "",
        )
        for k in found["by_stages"]
    )
    unit = found["unit"]
    alone = ", by cuts alone" if found["by_cuts_alone"] else ""
    predicted = headed(Column(f"predicted{alone}, {unit}", _TIME), f"best predicted{alone}")
    columns = headed("stages|d", *predicted, Column(f"measured, {unit}", _TIME), "best measured")
    return Table("The best plan of each number of stages", columns, rows)


def _baselines(found: Document) -> Table:
    best_ms, rows = found["best"]["measured_ms"], []
    for name, entry in found["baselines"].items():
        more, measured, why_not = _known(entry)
        rows.append((name, more, measured, measured / best_ms if measured is not None and best_ms else None, why_not))
    columns = headed("plan", *_columns(found)[:2], "times as long|.4g", _columns(found)[2])
    return Table("Baselines", columns, tuple(rows))
