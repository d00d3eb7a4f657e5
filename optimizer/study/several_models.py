"""The subject of a study of several models: their workload, prices of jobs, and each model's own figures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from evaluators.base import Agreement, Evaluator, Session
from evaluators.objectives import OBJECTIVES, Objective, PricedSession
from evaluators.sampling import SamplingPolicy
from evaluators.workload.host import WorkloadSession
from evaluators.workload.lowered import Lowerings
from evaluators.workload.objectives import WorkloadPricing, find_workload_objective, workload_pricing
from evaluators.workload.outcome import Outcome
from evaluators.workload.predicted import WorkloadSimulator
from evaluators.workload.setting import setting
from optimizer.model.baselines import Baseline
from optimizer.model.robust import in_states
from optimizer.samplers.auto import Problem as SamplerProblem
from optimizer.study.config import StudyConfig
from optimizer.study.course import Study
from optimizer.study.folder import write_json
from optimizer.study.history import History, Trial
from optimizer.study.limits import expected, keeps, limits_of, none_keeps
from optimizer.study.records import Record
from optimizer.study.result import Result
from optimizer.study.subjects import Search
from optimizer.study.verdict import Verdict
from optimizer.study.warm import PRICES, Warm, begin_warm, fingerprint_of, warm_several
from optimizer.workload.baselines import first_plans, mapped
from optimizer.workload.critic import workload_costs, workload_critic
from optimizer.workload.limits import Least, bound_of, check
from optimizer.workload.memory import Memory
from optimizer.workload.problem import Problem, read_problem
from optimizer.workload.ranks import PLAIN, RANKS, decomposed, foreseen, grids_of, rank_summary, twins, write_rewritten
from optimizer.workload.result import WorkloadResult
from optimizer.workload.search import STEPS, WorkloadProposer
from optimizer.workload.starts import shared_starts
from optimizer.workload.variants import Variants, find_variants
from search_spaces.core.constraints import Violation, infeasible
from search_spaces.core.decoded_plan import decoded_plan, ranks_by_component
from search_spaces.core.errors import PlanError, RewriteError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.pools import single_processors
from search_spaces.models.inputs import given_digest
from search_spaces.spaces.registry import freedoms_of, make_workload_space
from search_spaces.spaces.shared_workload_space import SharedWorkloadSpace
from search_spaces.spaces.space import in_space
from search_spaces.spaces.workload_space import WorkloadSpace

_NO_OTHER = "the best predicted plan"
_SHARED_STEPS = 150  # predicting a split plan takes milliseconds
_NAMED = SamplingPolicy(max_s=1.5, min_runs=3)
_PROPOSED = SamplingPolicy(max_s=0.5, min_runs=2)


@dataclass(slots=True)
class SeveralModels:
    """A study of several models.

    Attributes:
        simulator: predicts plans once prices are known.
        asked: the pricing of each objective and limit.
        least: each client's lower bound.
        files: client → file of its decomposed model.
    """

    config: StudyConfig
    evaluator: Evaluator
    problem: Problem
    simulator: WorkloadSimulator | None = None
    asked: Sequence[WorkloadPricing] = ()
    least: Mapping[str, Least] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, config: StudyConfig, evaluator: Evaluator) -> SeveralModels:
        """Return the subject of the settings; errors are those of :func:`~optimizer.workload.problem.read_problem`."""
        problem = read_problem(config, evaluator)
        return cls(problem.config, evaluator, problem)

    @property
    def graph(self) -> Graph:
        """The joined network."""
        return self.problem.joined.graph

    @property
    def space(self) -> WorkloadSpace:
        """The plans that are searched; :meth:`learn` may add to it."""
        return self.problem.space

    @property
    def platform(self) -> Platform:
        """The requested platform, which the run folder records."""
        return self.problem.platform

    @property
    def measured_on(self) -> Platform:
        """That platform with the processors that only baselines use."""
        return self.problem.platform

    @property
    def processors(self) -> Sequence[Processor]:
        """The processors of the space."""
        return self.problem.space.platform.processors

    @property
    def objectives(self) -> Sequence[Objective]:
        """The objectives; all are minimised."""
        return self.problem.objectives

    @property
    def digest(self) -> str:
        """Digest of the models, and of everything that changes what a plan computes."""
        return f"{self.graph.digest}+{self.problem.workload.digest}"

    @property
    def inputs_digest(self) -> str:
        """Changes with the inputs that a person gave; "" without any."""
        return given_digest(c.graph for c in self.problem.joined.components)

    @property
    def ready(self) -> bool:
        """Whether the variants of models are known, or none are searched."""
        return self.problem.variants is not None or not self.problem.choices

    def checked(self, plan: Plan) -> Plan:
        """Return the canonical form of a plan that a person gives."""
        problem = self.problem
        joined, platform = problem.joined, problem.platform
        setting(plan, Lowerings(problem.workload, joined, platform))
        clients = [i.client for i in problem.workload.instances]
        found = decoded_plan(plan, joined).canonical(clients, platform).plan(joined)
        if plan.ranks and not in_space(self.space, found):
            raise PlanError("the plan has ranks that are not known before the search", "give one without ranks")
        return found

    def resume(self, records: Sequence[Record]) -> None:
        """Restore the variants that an earlier session of the study has found."""
        if (ranks := next((r.data for r in records if r.kind == RANKS), None)) is not None:
            self._allow(Variants.from_json(ranks, len(self.problem.workload.clients)))

    def _allow(self, variants: Variants) -> None:
        """Add variants of models to the space."""
        problem, space = self.problem, self.problem.space
        problem.variants = variants
        problem.space = make_workload_space(
            self.config.allow, problem.workload, problem.joined, space.platform, self.config.max_stages, variants.sets
        )

    def restore(self, history: History, records: Sequence[Record]) -> None:
        """Add the trials of the log to the history.

        If a damaged log has lost the variants and others were found, a trial gets the present parameters of its plan. A
        plan that the space no longer holds still counts in the budget.
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
        """Open the session that measures or predicts plans."""
        problem = self.problem
        return self.evaluator.host(problem.workload, problem.joined, problem.platform, problem.objective, folder)

    def ask(self, session: Session) -> Session:
        """Return the session that measures or predicts the objectives, in all states that are asked for."""
        problem, config = self.problem, self.config
        processors, hosted = problem.space.platform, cast("WorkloadSession", session)
        objectives = [*problem.objectives, *(find_workload_objective(name) for name in _limited(config, problem))]
        self.asked = asked = [workload_pricing(o, problem.workload, processors, hosted) for o in objectives]
        priced: Any = PricedSession(session, asked)
        if len(asked) == 1 and asked[0].of_run == asked[0].objective.name:
            priced = session
        if config.state:
            single = Platform(processors.name, single_processors(processors))
            priced = in_states(priced, single, config.state, config.robust)
        return cast("Session", priced)

    def foreseen(self) -> dict[str, Any]:
        """Return what would be searched; with ranks, before they are known."""
        problem = self.problem
        plans = problem.space.cardinality()
        found: dict[str, Any] = {
            "workload": problem.workload.name,
            "models": [i.name for i in problem.workload.instances],
            "operators": len(self.graph.operators),
            "processors": [p.name for p in self.processors],
            "objective": ", ".join(o.name for o in self.objectives),
            "allow": self.config.allow,
            "plans": plans,
            "budget": self.config.budget,
            "baselines": [b.name for b in problem.baselines],
        }
        return found | foreseen(problem.workload, problem.space.platform, problem.choices, problem.baselines, plans)

    def learn(self, study: Study, session: Session) -> Search:
        """Measure prices of jobs, and find the variants of models."""
        problem, config = self.problem, self.config
        hosted = cast("WorkloadSession", session)
        memory = Memory(problem.workload, problem.joined)
        self.simulator = self._prices(study, hosted, memory)
        warm = begin_warm(config, self.taken, session, study.run, study.history, study.watcher.message, study.shared)
        priced: Any = self.ask(session)
        several = len(problem.objectives) > 1
        predict = self._predictor(priced, memory)
        limits = limits_of(config)
        figures = {how.objective.name: self._figure(how) for how in self.asked[len(problem.objectives) :]}

        def breaks(plan: Plan) -> tuple[Violation, ...]:
            return (*memory.violations(plan), *expected(limits, figures, plan))

        proposer = self._first(memory, predict)
        computed = session.capabilities.computed
        known = self._known(proposer, predict, lambda plan: not breaks(plan), self.simulator, memory, computed=computed)
        bounds = None
        if not config.state:
            own = session.capabilities.states  # a session with states computes them
            bounds = bound_of(problem.objectives[0].name, self.simulator, self.least, own=own)
        return Search(
            priced,
            predict,
            tuple(problem.baselines),
            breaks,
            _NAMED,
            _PROPOSED,
            problem=known,
            carried=warm.plans if warm is not None else (),
            bounds=bounds,
            priced=priced if several else None,
            fits=lambda trial: keeps(limits, trial, problem.objectives[0].name),
        )

    def taken(self, run: Path, fingerprint: Mapping[str, Any]) -> Warm:
        """Return what an earlier study of several models has measured of this one."""

        def holds(plan: Plan) -> bool:
            named = {b.plan.digest for b in self.problem.baselines}
            return plan.digest in named or in_space(self.space, plan)

        return warm_several(run, fingerprint, self.config, self.digest, self.processors, holds)

    def _figure(self, how: WorkloadPricing) -> Callable[[Plan], float]:
        """Return a function that predicts a limited figure of a plan."""

        def figure(plan: Plan) -> float:
            try:
                return how.value(plan, self.simulator.run(plan, known=True)) if self.simulator is not None else 0.0
            except (RewriteError, UnavailableError):
                return math.inf

        return figure

    def _first(self, memory: Memory, predict: Callable[[Plan], float]) -> WorkloadProposer:
        """Add the baselines that need predictions; return the proposer.

        Raises:
            InfeasibleError: no plan keeps the memory limit, whatever its ranks.
        """
        problem, config = self.problem, self.config
        whole = mapped(problem.space, predict)
        if whole.plan.digest not in {b.plan.digest for b in problem.baselines} and not memory.violations(whole.plan):
            problem.baselines += (whole,)
        plans = [*(b.plan for b in first_plans(problem.space)), whole.plan]
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
            processors = problem.space.platform
            plain = make_workload_space(config.allow, problem.workload, problem.joined, processors, config.max_stages)
            plans += WorkloadProposer(plain, predict, plans, config.seed, steps).ranking(1)
            problem.baselines += twins(problem.space, problem.baselines, variants, predict)
            problem.baselines += (Baseline(PLAIN, plans[-1]),)
            limited = problem.workload.memory_limit_nbytes is not None
            plans += decomposed(problem.space, plans, variants, memory.sparing(variants.sets) if limited else {})
        proposer = WorkloadProposer(problem.space, predict, plans, config.seed, steps)
        best = proposer.ranking(1)[0]  # plans that violate the limit come last
        if memory.violations(best) and (broken := memory.violations(min((best, *plans), key=memory.of_plan))):
            raise infeasible(*broken)
        if all(memory.violations(b.plan) for b in problem.baselines):
            problem.baselines += (Baseline(_NO_OTHER, best),)
        return proposer

    def _known(
        self,
        proposer: WorkloadProposer,
        predict: Callable[[Plan], float],
        fits: Callable[[Plan], bool],
        simulator: WorkloadSimulator,
        memory: Memory,
        *,
        computed: bool,
    ) -> SamplerProblem:
        """Return the search as samplers see it.

        They learn from measured times of jobs if the objective follows from these.

        Args:
            computed: whether trials tell what was predicted, and nothing more.
        """
        space, how = self.problem.space, self.asked[0]
        costs = workload_costs(simulator, space.platform)

        def value(plan: Plan, simulator: WorkloadSimulator) -> float:
            if memory.violations(plan):
                return math.inf
            try:
                return how.value(plan, simulator.run(plan, known=True))
            except (RewriteError, UnavailableError):
                return math.inf

        learns = how.objective.aggregation == "path" and not self.config.state and not computed
        critic = partial(workload_critic, simulator, costs, value) if learns else None
        return SamplerProblem(
            self.graph,
            space.platform,
            space,
            costs,
            fits,
            search=lambda of, seed: proposer.anew(seed, critic() if critic is not None else None, of.fits),
            optima=tuple(proposer.ranking(1)),
            predict=predict,
            critic=critic,
        )

    def _prices(self, study: Study, session: WorkloadSession, memory: Memory) -> WorkloadSimulator:
        """Measure prices of jobs and find variants, unless the log holds them; return the predictor.

        Each is logged as soon as it is known. What a damaged log has lost is measured again.
        """
        problem, config, progress, run = self.problem, self.config, study.watcher.message, study.run
        logged = known = next((r.data for r in reversed(run.contents.records) if r.kind == PRICES), None)
        new = bool(problem.choices) and problem.variants is None
        grids = grids_of(problem.workload, problem.choices) if problem.choices and (new or known is None) else {}
        more = (grids,) if grids else ()
        if known is None and config.warm_start is not None:
            known = self.taken(config.warm_start, fingerprint_of(session)).prices
        # All workers use the first one's prices, so that they propose by one model.
        if known is None and study.shared is not None:
            known = study.shared.fact(PRICES, lambda: session.price(None, progress, *more))
        priced = session.price(known, progress, *more)
        if json.loads(json.dumps(priced)) != logged:  # new, or completed
            run.log.append(PRICES, priced)
        simulator = session.simulator
        if not new:
            freedoms = freedoms_of(config.allow)
            sets = problem.variants.sets if problem.variants is not None else ()
            self.least = check(simulator, memory, sets, freedoms)
            return simulator
        processors = problem.space.platform

        def find() -> Variants:
            return find_variants(
                session, problem.workload, problem.joined, processors, problem.choices, grids, progress
            )

        shared = study.shared
        count = len(problem.workload.clients)
        found = find() if shared is None else Variants.from_json(shared.fact(RANKS, lambda: find().to_json()), count)
        run.log.append(RANKS, found.to_json())
        self.least = check(simulator, memory, found.sets, freedoms_of(config.allow))
        self._allow(found)
        study.begin()
        study.opened()
        return simulator

    def _predictor(self, priced: Session, memory: Memory) -> Callable[[Plan], float]:
        """Return the predictor of the first objective; infinite if a plan cannot run or violates the memory limit.

        Args:
            priced: predicts it in all states of the platform, if there are any.
        """
        graph, simulator, how = self.graph, self.simulator, self.asked[0]

        def predict(plan: Plan) -> float:
            if memory.violations(plan) or simulator is None:
                return math.inf
            try:
                if not self.config.state:
                    return how.value(plan, simulator.run(plan, known=True))
                with closing(priced.load(graph, plan)) as candidate:
                    return float(candidate.run(1).latency_s[0])
            except (RewriteError, UnavailableError):  # a split operator may need all outputs of a triple
                return math.inf

        return predict

    def finish(self, study: Study, session: Session, verdict: Verdict) -> Agreement | None:
        """Write the files of the recommended plan."""
        problem = self.problem
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
        """Return the result so far."""
        problem, tucker = self.problem, dict[str, Any]()
        if problem.variants is not None and verdict is not None:
            ranks = ranks_by_component(verdict.best, problem.joined)
            tucker = rank_summary(
                problem.workload, problem.joined, problem.variants, problem.choices, ranks, self.files
            )
        return WorkloadResult(
            **known,
            workload=problem.workload,
            joined=problem.joined,
            freedoms=(*problem.space.freedoms, *(("ranks",) if problem.choices else ())),
            predictions=self._predictions(known, verdict) if verdict is not None else {},
            tucker=tucker,
        )

    def check(self, result: Result) -> None:
        """Check that the recommended plan keeps the limits."""
        if (broken := none_keeps(limits_of(self.config), result.history, self.objectives[0].name)) is not None:
            raise broken

    def _predictions(self, known: Mapping[str, Any], verdict: Verdict) -> dict[str, tuple[Outcome, float]]:
        """Return what the simulator predicts for the recommended plan and each baseline, and the objective's value."""
        history: History = known["history"]
        if self.simulator is None:
            return {}
        found = {}
        for plan in (verdict.best, *known["baselines"].values()):
            if (trial := history.known.get(plan.digest)) is not None and trial.measurement is not None:
                run = self.simulator.run(plan)
                found[plan.digest] = run, self.asked[0].value(plan, run)
        return found


def _says(space: WorkloadSpace, trial: Trial) -> bool:
    """Return whether a trial's parameters decode to its plan."""
    try:
        return space.decode(trial.params) == trial.plan
    except LookupError:
        return False


def _limited(config: StudyConfig, problem: Problem) -> list[str]:
    """Return the objectives that are limited but not minimised."""
    names = {objective.name for objective in problem.objectives}
    return [limit.name for limit in limits_of(config) if limit.name in OBJECTIVES and limit.name not in names]
