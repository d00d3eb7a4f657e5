"""What a study of several models is of: their workload, what jobs cost, and what each model does under a plan."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from evaluators.base import Agreement, Evaluator, Session
from evaluators.measurement.final import FinalPolicy
from evaluators.objectives import OBJECTIVES, Objective, PricedSession
from evaluators.sampling import SamplingPolicy
from evaluators.workload.host import WorkloadSession
from evaluators.workload.objectives import WorkloadPricing, find_workload_objective, workload_pricing
from evaluators.workload.outcome import Outcome
from evaluators.workload.predicted import WorkloadSimulator
from optimizer.model.baselines import Baseline
from optimizer.model.objective import check_several
from optimizer.model.robust import in_states
from optimizer.study.config import StudyConfig
from optimizer.study.course import Study
from optimizer.study.folder import write_json
from optimizer.study.history import History, Trial
from optimizer.study.limits import expected, keeps, limits_of, none_keeps
from optimizer.study.loop import in_space
from optimizer.study.records import Record
from optimizer.study.result import Result
from optimizer.study.subjects import FINAL_S, Search
from optimizer.study.verdict import Verdict
from optimizer.study.warm import PRICES, Warm, begin_warm, fingerprint_of, warm_several
from optimizer.workload.baselines import first_plans
from optimizer.workload.critic import WorkloadCritic, workload_critic
from optimizer.workload.limits import Least, bound_of, check
from optimizer.workload.memory import Memory
from optimizer.workload.problem import AUTO, Problem, read_problem
from optimizer.workload.ranks import PLAIN, RANKS, decomposed, grids_of, told, twins, write_rewritten
from optimizer.workload.result import WorkloadResult, summary
from optimizer.workload.search import STEPS, WorkloadProposer
from optimizer.workload.starts import shared_starts
from optimizer.workload.variants import Variants, find_variants
from search_spaces.core.arrangement import ranks_by_component
from search_spaces.core.constraints import Violation, infeasible
from search_spaces.core.errors import RewriteError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.pools import lanes_of
from search_spaces.spaces.registry import freedoms_of, make_workload_space
from search_spaces.spaces.shared_workload_space import SharedWorkloadSpace
from search_spaces.spaces.workload_space import WorkloadSpace

_NO_OTHER = "the best predicted plan"
_SHARED_STEPS = 50  # a prediction of a split plan takes milliseconds
_TOLD_TURNS, _TOLD_RUNS, _TOLD_S = 3, 3, 4.0
_NAMED = SamplingPolicy(max_s=1.5, min_runs=3)
_PROPOSED = SamplingPolicy(max_s=0.5, min_runs=2)
# A run of a workload is long, and of many requests: one is a turn.
_FINAL = FinalPolicy(
    max_s=FINAL_S, min_rounds=3, max_rounds=8, min_blocks=2, max_blocks=4, turn_s=0.0, settle_s=0.0, loaded=4, least=4
)
_PAUSES = 3  # inferences after a pause, of each of two plans


@dataclass(slots=True)
class SeveralModels:
    """See :class:`~optimizer.study.subjects.Subject`.

    Attributes:
        simulator: predicts plans, once prices are known.
        asked: how plans are measured by each objective and limit.
        least: of each client what no plan goes below.
        outcomes: of the recommended plan and of baselines each model's own figures, at the end.
        files: client → that of its decomposed model.
    """

    config: StudyConfig
    evaluator: Evaluator
    problem: Problem
    simulator: WorkloadSimulator | None = None
    asked: Sequence[WorkloadPricing] = ()
    least: Mapping[str, Least] = field(default_factory=dict)
    outcomes: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, config: StudyConfig, evaluator: Evaluator) -> SeveralModels:
        """Return what the settings ask for; errors are those of :func:`~optimizer.workload.problem.read_problem`."""
        check_several(config)
        return cls(config, evaluator, read_problem(config, evaluator))

    @property
    def graph(self) -> Graph:
        """The joined network."""
        return self.problem.joined.graph

    @property
    def space(self) -> WorkloadSpace:
        """See :class:`~optimizer.study.subjects.Subject`."""
        return self.problem.space

    @property
    def platform(self) -> Platform:
        """See :class:`~optimizer.study.subjects.Subject`."""
        return self.problem.platform

    @property
    def measured_on(self) -> Platform:
        """See :class:`~optimizer.study.subjects.Subject`."""
        return self.problem.platform

    @property
    def processors(self) -> Sequence[Processor]:
        """See :class:`~optimizer.study.subjects.Subject`."""
        return self.problem.space.platform.processors

    @property
    def objectives(self) -> Sequence[Objective]:
        """See :class:`~optimizer.study.subjects.Subject`."""
        return self.problem.objectives

    @property
    def digest(self) -> str:
        """See :class:`~optimizer.study.subjects.Subject`."""
        return f"{self.graph.digest}+{self.problem.workload.digest}"

    @property
    def ready(self) -> bool:
        """Whether nothing is to be found out of how models may be decomposed."""
        return self.problem.variants is not None or not self.problem.choices

    def resume(self, records: Sequence[Record]) -> None:
        """See :class:`~optimizer.study.subjects.Subject`."""
        if (ranks := next((r.data for r in records if r.kind == RANKS), None)) is not None:
            self._allow(Variants.from_json(ranks))

    def _allow(self, variants: Variants) -> None:
        """Take variants of models into the space."""
        problem, space = self.problem, self.problem.space
        problem.variants = variants
        problem.space = make_workload_space(
            self.config.allow, problem.workload, problem.joined, space.platform, self.config.max_stages, variants.sets
        )

    def restore(self, history: History, records: Sequence[Record]) -> None:
        """Take up the trials of the log.

        A damaged log may have lost the variants, so that others were found: a trial then gets the parameters that its
        plan has now. One whose plan the space holds no more is known all the same, and keeps its place in the budget.
        """
        space = self.space
        for record in records:
            if record.kind != "trial":
                history.restore((record,))
                continue
            trial = Trial.from_json(record.data)
            if in_space(space, trial.plan):
                if not _says(space, trial):
                    trial = replace(trial, params=space.encode(trial.plan))
                history.tell(trial)
            history.add(trial)

    def session(self, folder: Path) -> AbstractContextManager[Session]:
        """See :class:`~optimizer.study.subjects.Subject`."""
        problem = self.problem
        return self.evaluator.host(problem.workload, problem.joined, problem.platform, problem.objective, folder)

    def learn(self, study: Study, session: Session) -> Search:
        """Learn what jobs cost, and what models may become; see :class:`~optimizer.study.subjects.Subject`."""
        problem, config = self.problem, self.config
        hosted = cast("WorkloadSession", session)
        memory = Memory(problem.workload, problem.joined)
        self.simulator = self._prices(study, hosted, memory)
        warm = begin_warm(config, self._taken, session, study.run, study.history, study.watcher.message, study.shared)
        lanes, several = problem.space.platform, len(problem.objectives) > 1
        objectives = [*problem.objectives, *(find_workload_objective(name) for name in _limited(config, problem))]
        self.asked = asked = [workload_pricing(o, problem.workload, lanes, hosted) for o in objectives]
        told: Any = PricedSession(session, asked)
        if len(asked) == 1 and asked[0].of_run == asked[0].objective.name:
            told = session
        if config.state:
            told = in_states(told, Platform(lanes.name, lanes_of(lanes)), config.state, config.robust)
        predict = self._predictor(told, memory)
        limits = limits_of(config)
        figures = {how.objective.name: self._figure(how) for how in asked[len(problem.objectives) :]}

        def breaks(plan: Plan) -> tuple[Violation, ...]:
            return (*memory.violations(plan), *expected(limits, figures, plan))

        proposer = self._first(memory, predict)
        bounds = None
        if not config.state:
            own = session.capabilities.states  # whoever knows its states computes them
            bounds = bound_of(problem.objectives[0].name, self.simulator, self.least, own=own)
        return Search(
            told,
            predict,
            tuple(problem.baselines),
            breaks,
            _NAMED,
            _PROPOSED,
            lambda _: (_FINAL, _PAUSES),
            proposer=proposer if config.sampler == AUTO else None,
            carried=warm.plans if warm is not None else (),
            bounds=bounds,
            priced=told if several else None,
            fits=lambda trial: keeps(limits, trial, problem.objectives[0].name),
        )

    def _taken(self, run: Path, fingerprint: Mapping[str, Any]) -> Warm:
        """Return what an earlier study of several models knows of this one."""

        def holds(plan: Plan) -> bool:
            named = {b.plan.digest for b in self.problem.baselines}
            return plan.digest in named or in_space(self.space, plan)

        return warm_several(run, fingerprint, self.config, self.digest, self.processors, holds)

    def _figure(self, how: WorkloadPricing) -> Callable[[Plan], float]:
        """Return what predicts a figure of plans that is limited."""

        def figure(plan: Plan) -> float:
            try:
                return how.value(plan, self.simulator.run(plan, known=True)) if self.simulator is not None else 0.0
            except (RewriteError, UnavailableError):
                return math.inf

        return figure

    def _first(self, memory: Memory, predict: Callable[[Plan], float]) -> WorkloadProposer:
        """Name the baselines that only predictions tell; return who proposes plans.

        Raises:
            InfeasibleError: no plan keeps the memory limit, whatever its ranks.
        """
        problem, config = self.problem, self.config
        plans = [b.plan for b in first_plans(problem.space)]
        variants = problem.variants
        steps = STEPS
        if isinstance(problem.space, SharedWorkloadSpace) and self.simulator is not None:
            steps = _SHARED_STEPS
            cut = WorkloadSpace(problem.workload, problem.joined, problem.space.platform, config.max_stages)
            plans += WorkloadProposer(cut, predict, plans, config.seed).ranking(
                1
            )  # so that more freedom is never worse
            plans += shared_starts(problem.space, self.simulator)
        if variants is not None and any(variants.of):
            lanes = problem.space.platform
            plain = make_workload_space(config.allow, problem.workload, problem.joined, lanes, config.max_stages)
            plans += WorkloadProposer(plain, predict, plans, config.seed, steps).ranking(1)
            problem.baselines += twins(problem.space, problem.baselines, variants, predict)
            problem.baselines += (Baseline(PLAIN, plans[-1]),)
            limited = problem.workload.memory_limit_nbytes is not None
            plans += decomposed(problem.space, plans, variants, memory.sparing(variants.sets) if limited else {})
        proposer = WorkloadProposer(problem.space, predict, plans, config.seed, steps, self._critic(memory))
        best = proposer.ranking(1)[0]  # plans that break the limit come after all others
        if memory.violations(best) and (broken := memory.violations(min((best, *plans), key=memory.of_plan))):
            raise infeasible(*broken)
        if all(memory.violations(b.plan) for b in problem.baselines):
            problem.baselines += (Baseline(_NO_OTHER, best),)
        return proposer

    def _critic(self, memory: Memory) -> WorkloadCritic | None:
        """Return what learns from the times of jobs; None where these are not what is made small, or in many states."""
        how = self.asked[0]
        if self.simulator is None or self.config.state or how.objective.law != "latency":
            return None

        def value(plan: Plan, simulator: WorkloadSimulator) -> float:
            if memory.violations(plan):
                return math.inf
            try:
                return how.value(plan, simulator.run(plan, known=True))
            except (RewriteError, UnavailableError):
                return math.inf

        return workload_critic(self.simulator, self.problem.space.platform, value)

    def _prices(self, study: Study, session: WorkloadSession, memory: Memory) -> WorkloadSimulator:
        """Learn what jobs cost, and what models may become, unless the log knows; return what predicts by it.

        Each is written down as soon as it is known. Where a damaged log has lost one of them it is learnt again.
        """
        problem, config, tell, run = self.problem, self.config, study.watcher.message, study.run
        logged = known = next((r.data for r in reversed(run.contents.records) if r.kind == PRICES), None)
        new = bool(problem.choices) and problem.variants is None
        grids = grids_of(problem.workload, problem.choices) if problem.choices and (new or known is None) else {}
        more = (grids,) if grids else ()
        if known is None and config.warm_start is not None:
            known = self._taken(config.warm_start, fingerprint_of(session)).prices
        # All workers propose by one model: that of whoever was first.
        if known is None and study.shared is not None:
            known = study.shared.fact(PRICES, lambda: session.price(None, tell, *more))
        priced = session.price(known, tell, *more)
        if json.loads(json.dumps(priced)) != logged:  # new, or completed
            run.log.append(PRICES, priced)
        simulator = session.simulator
        if not new:
            freedoms = freedoms_of(config.allow)
            sets = problem.variants.sets if problem.variants is not None else ()
            self.least = check(simulator, memory, sets, freedoms)
            return simulator
        lanes = problem.space.platform

        def find() -> Variants:
            return find_variants(session, problem.workload, problem.joined, lanes, problem.choices, grids, tell)

        shared = study.shared
        found = find() if shared is None else Variants.from_json(shared.fact(RANKS, lambda: find().to_json()))
        run.log.append(RANKS, found.to_json())
        self.least = check(simulator, memory, found.sets, freedoms_of(config.allow))
        self._allow(found)
        study.begin()
        study.opened()
        return simulator

    def _predictor(self, told: Session, memory: Memory) -> Callable[[Plan], float]:
        """Return what predicts the first objective of a plan; infinite where it cannot be run, or breaks the limit.

        Args:
            told: predicts it in all states of the platform, where a person names some.
        """
        graph, simulator, how = self.graph, self.simulator, self.asked[0]

        def predict(plan: Plan) -> float:
            if memory.violations(plan) or simulator is None:
                return math.inf
            try:
                if not self.config.state:
                    return how.value(plan, simulator.run(plan, known=True))
                with closing(told.load(graph, plan)) as candidate:
                    return float(candidate.run(1).latency_s[0])
            except (RewriteError, UnavailableError):  # what is split may need all that a triple computes
                return math.inf

        return predict

    def finish(self, study: Study, session: Session, verdict: Verdict) -> Agreement | None:
        """Run the plans of the table a few times more, for every model's own figures; record all."""
        problem, known = self.problem, study.history.known
        named = {"best": verdict.best, **{b.name: b.plan for b in problem.baselines}}
        measured = {n: p for n, p in named.items() if (t := known.get(p.digest)) is not None and t.measurement}
        self.outcomes = self._outcomes(study, cast("WorkloadSession", session), measured)
        folder = study.run.path / "best"
        # Paths of models and platforms may be relative to where the study ran.
        document = {"schema_version": 1, **problem.workload.to_json(), "folder": str(Path.cwd())}
        write_json(folder / "workload.json", document)
        deployed = None
        if session.capabilities.deploy:
            study.watcher.message("writing the stage files")
            deployed = session.deploy(folder, problem.joined.graph, verdict.best)
        else:
            write_json(folder / "plan.json", verdict.best.to_json())
        ranks = ranks_by_component(verdict.best, problem.joined)
        self.files = write_rewritten(folder, problem.workload, problem.joined, ranks)
        return deployed

    def result(self, known: Mapping[str, Any], verdict: Verdict | None) -> WorkloadResult:
        """See :class:`~optimizer.study.subjects.Subject`."""
        problem, tucker = self.problem, dict[str, Any]()
        if problem.variants is not None and verdict is not None:
            ranks = ranks_by_component(verdict.best, problem.joined)
            tucker = told(problem.workload, problem.joined, problem.variants, problem.choices, ranks, self.files)
        return WorkloadResult(
            **known,
            workload=problem.workload,
            joined=problem.joined,
            freedoms=(*problem.space.freedoms, *(("ranks",) if problem.choices else ())),
            outcomes=self.outcomes,
            tucker=tucker,
        )

    def check(self, result: Result) -> None:
        """See :class:`~optimizer.study.subjects.Subject`."""
        if (broken := none_keeps(limits_of(self.config), result.history, self.objectives[0].name)) is not None:
            raise broken

    def _outcomes(self, study: Study, session: WorkloadSession, plans: Mapping[str, Plan]) -> dict[str, Any]:
        """Return every model's own figures under each plan; plans take turns, so that none meets another machine."""
        outcomes: dict[str, list[Outcome]] = {plan.digest: [] for plan in plans.values()}
        distinct = list({plan.digest: plan for plan in plans.values()}.values())
        limit_s = _TOLD_S * len(distinct)
        begin_s = time.monotonic()
        for turn in range(_TOLD_TURNS):
            if turn and time.monotonic() - begin_s > limit_s:
                break
            study.watcher.message(f"every model's own latency, turn {turn + 1} of {_TOLD_TURNS}")
            for plan in distinct:
                with closing(session.load(self.graph, plan)) as candidate:
                    candidate.run(1)
                    for _ in range(_TOLD_RUNS):
                        candidate.run(1)
                        outcomes[plan.digest].append(candidate.outcome)
        problem = self.problem

        def shown(plan: Plan) -> dict[str, Any]:
            run = self.simulator.run(plan) if self.simulator is not None else None
            predicted = (run, self.asked[0].value(plan, run)) if run is not None else None
            return summary(problem.workload, outcomes[plan.digest], predicted, plan, problem.joined)

        return {name: shown(plan) for name, plan in plans.items()}


def _says(space: WorkloadSpace, trial: Trial) -> bool:
    """Return whether a trial's parameters stand for its plan."""
    try:
        return space.decode(trial.params) == trial.plan
    except LookupError:
        return False


def _limited(config: StudyConfig, problem: Problem) -> list[str]:
    """Return the objectives that are no aim of a study, but are limited."""
    names = {objective.name for objective in problem.objectives}
    return [limit.name for limit in limits_of(config) if limit.name in OBJECTIVES and limit.name not in names]
