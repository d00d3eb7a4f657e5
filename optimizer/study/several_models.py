"""The subject of a study of several models: their workload, prices of jobs, and each model's own figures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from evaluators.base import Agreement, Evaluator, Session
from evaluators.objectives import Objective, PricedSession
from evaluators.sampling import SamplingPolicy
from evaluators.workload.host import WorkloadSession
from evaluators.workload.lowered import Lowerings
from evaluators.workload.objectives import WorkloadPricing, find_workload_objective, workload_pricing
from evaluators.workload.outcome import Objective as OfOutcome
from evaluators.workload.outcome import Outcome
from evaluators.workload.predicted import WorkloadSimulator
from evaluators.workload.setting import setting
from optimizer.devices import as_told, choose_platform, go_to, model_of
from optimizer.model.baselines import Baseline
from optimizer.model.goals import needed
from optimizer.model.robust import in_states
from optimizer.report.data import Study as Earlier
from optimizer.samplers.auto import Problem as SamplerProblem
from optimizer.study.config import StudyConfig, with_freedoms
from optimizer.study.course import Study
from optimizer.study.folder import write_json
from optimizer.study.history import History, Trial
from optimizer.study.limits import expected, limits_of
from optimizer.study.log import Record
from optimizer.study.subjects import Search, Subject
from optimizer.study.verdict import Verdict
from optimizer.study.warm import PRICES, Known, begin_warm, best_plans, earlier_prices, fingerprint_of, warm_start
from optimizer.workload.baselines import first_plans, mapped, workload_baselines
from optimizer.workload.limits import Least, Memory, bound_of, check
from optimizer.workload.ranks import (
    PLAIN,
    RANKS,
    Variants,
    choices_of,
    decomposed,
    find_variants,
    foreseen,
    grids_of,
    rank_summary,
    twins,
    with_errors,
    write_rewritten,
)
from optimizer.workload.search import (
    SHARED_STEPS,
    STEPS,
    WorkloadProposer,
    shared_starts,
    workload_costs,
    workload_critic,
)
from search_spaces.core.constraints import Violation, infeasible
from search_spaces.core.decoded_plan import RankSet, decoded_plan, ranks_by_component
from search_spaces.core.errors import PlanError, RewriteError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph, merge
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.pools import single_processors, with_pools
from search_spaces.core.workload import RANKED_ERROR, Workload, names_file, with_given, workload_of
from search_spaces.core.workload_file import read_workload
from search_spaces.rewrites.tucker_ranks import RankChoices
from search_spaces.spaces.registry import freedoms_of, make_workload_space
from search_spaces.spaces.shared_workload_space import SharedWorkloadSpace
from search_spaces.spaces.space import in_space
from search_spaces.spaces.workload_space import WorkloadSpace

_NO_OTHER = "the best predicted plan"
_NAMED = SamplingPolicy(max_s=1.5, min_runs=3)
_PROPOSED = SamplingPolicy(max_s=0.5, min_runs=2)


@dataclass(slots=True)
class SeveralModels(Subject):
    """A study of several models.

    Attributes:
        platform: of the space and of the baselines.
        choices: client that may be decomposed → ranks that its convolutions may have.
        variants: decomposed models of the space; None if none may be decomposed, or before they are found.
        simulator: predicts plans once prices are known.
        asked: the pricing of each objective and limit.
        least: each client's lower bound.
        files: client → file of its decomposed model.
    """

    space: WorkloadSpace
    workload: Workload
    joined: JoinedGraph
    baselines: tuple[Baseline, ...]
    choices: dict[int, RankChoices]
    variants: Variants | None = None
    simulator: WorkloadSimulator | None = None
    asked: Sequence[WorkloadPricing] = ()
    least: Mapping[str, Least] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        config: StudyConfig,
        evaluator: Evaluator,
        workload: Workload | None = None,
        platform: Platform | None = None,
    ) -> SeveralModels:
        """Return the subject that the settings describe.

        Args:
            workload: that of the settings, if it was read already.
            platform: that of the settings, where it is recorded; the device is not asked then.

        Raises:
            UsageError: the workload, a model, a platform or a setting is wrong.
            UnavailableError: a processor cannot be used here, or the evaluator runs no workloads.
        """
        if not evaluator.capabilities.workloads:
            raise UsageError(
                f"--evaluator {config.evaluator}: it runs one model at a time",
                "give litert, cuda, cost-model, table, remote, or a single --model",
            )
        if config.deadline is not None:
            raise UsageError(
                "--deadline is not supported with several models", "set deadline_ms of each in the workload's file"
            )
        if len(config.objective) > 1 and config.sampler.partition("@")[0] == "reinforce":
            raise UsageError("--sampler reinforce supports one objective", "give --sampler auto, or one --objective")
        if platform is None:
            go_to(evaluator, config)
        workload = with_errors(workload or _workload(config), config)
        known = {c.source: model_of(evaluator, c, config) for c in workload.clients}
        graphs = [known[c.source] for c in workload.clients]
        parts = [(i.name, graphs[i.client]) for i in workload.instances]
        joined = merge(workload.name, parts)
        found = platform or choose_platform(
            evaluator, config.processors, config.platform, allow_fallback=config.allow_fallback, several=True
        )
        found = as_told(found, config, evaluator)
        config = with_freedoms(config, graphs, found)
        space = make_workload_space(config.allow, workload, joined, with_pools(found), config.max_stages)
        objectives = _objectives(config.objective)
        if any(o.name == "misses" for o in objectives) and not workload.deadlines:
            raise UsageError("--objective misses: no model has a deadline", "set deadline_ms in the workload's file")
        # The busy time of processes that share cores is not known, and no state names them.
        can = evaluator.capabilities.apart and not config.state
        can = can and not any(o.aggregation in ("sum", "run") for o in objectives)
        apart = evaluator.apart(space.platform, len(workload.instances)) if can else ()
        named, processors = workload_baselines(space, apart)
        choices = choices_of(workload, graphs)
        return cls(config, evaluator, joined.graph, processors, space, objectives, workload, joined, named, choices)

    @property
    def scaled(self) -> bool:
        """Whether values of the first objective are in proportion to the machine's slowness."""
        first = self.objectives[0]
        return first.scales and not (self.workload.timed and first.name in {"makespan", "throughput"})

    @property
    def objective(self) -> OfOutcome:
        """The figure that runs return, from which, or beside which, the objectives are computed."""
        return WorkloadPricing(self.objectives[0], self.platform, {}).of_run

    @property
    def processors(self) -> Sequence[Processor]:
        """The processors of the space."""
        return self.space.platform.processors

    @property
    def models(self) -> Sequence[Graph]:
        """The network of each instance."""
        return [component.graph for component in self.joined.components]

    @property
    def digest(self) -> str:
        """Digest of the models, and of everything that changes what a plan computes."""
        return f"{self.graph.digest}+{self.workload.digest}"

    @property
    def ready(self) -> bool:
        """Whether the variants of models are known, or none are searched."""
        return self.variants is not None or not self.choices

    def checked(self, plan: Plan) -> Plan:
        """Return the canonical form of a plan that a person gives."""
        joined, platform = self.joined, self.platform
        setting(plan, Lowerings(self.workload, joined, platform))
        clients = [i.client for i in self.workload.instances]
        found = decoded_plan(plan, joined).canonical(clients, platform).plan(joined)
        if plan.ranks and not in_space(self.space, found):
            raise PlanError("the plan has ranks that are not known before the search", "give one without ranks")
        return found

    def resume(self, records: Sequence[Record]) -> None:
        """Restore the variants that an earlier session of the study has found."""
        if (ranks := next((r.data for r in records if r.kind == RANKS), None)) is not None:
            self._allow(Variants.from_json(ranks, len(self.workload.clients)))

    def _allow(self, variants: Variants) -> None:
        """Add variants of models to the space."""
        self.variants = variants
        self.space = self._space(variants.sets)

    def _space(self, sets: Sequence[Sequence[RankSet]] = ()) -> WorkloadSpace:
        """Return the space in which clients may have these ranks."""
        config = self.config
        return make_workload_space(
            config.allow, self.workload, self.joined, self.space.platform, config.max_stages, sets
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

    def session(self, folder: Path | None = None) -> AbstractContextManager[Session]:
        """Open the session that measures or predicts plans."""
        return self.evaluator.host(self.workload, self.joined, self.platform, self.objective, folder)

    def ask(self, session: Session) -> Session:
        """Return the session that measures or predicts the objectives, in all states that are asked for."""
        config, processors, hosted = self.config, self.space.platform, cast("WorkloadSession", session)
        objectives = [*self.objectives, *(find_workload_objective(name) for name in needed(config))]
        self.asked = asked = [workload_pricing(o, self.workload, processors, hosted) for o in objectives]
        priced: Any = PricedSession(session, asked)
        if len(asked) == 1 and asked[0].of_run == asked[0].objective.name:
            priced = session
        if config.state:
            single = Platform(processors.name, single_processors(processors))
            priced = in_states(priced, single, config.state, config.robust)
        return cast("Session", priced)

    def foreseen(self) -> dict[str, Any]:
        """Return what would be searched; with ranks, before they are known."""
        plans = self.space.cardinality()
        found: dict[str, Any] = {
            "workload": self.workload.name,
            "models": [i.name for i in self.workload.instances],
            "operators": len(self.graph.operators),
            "processors": [p.name for p in self.processors],
            "objective": ", ".join(o.name for o in self.objectives),
            "allow": self.config.allow,
            "plans": plans,
            "budget": self.config.budget,
            "baselines": [b.name for b in self.baselines],
        }
        return found | foreseen(self.workload, self.space.platform, self.choices, self.baselines, plans)

    def learn(self, study: Study, session: Session) -> Search:
        """Measure prices of jobs, and find the variants of models."""
        config, hosted = self.config, cast("WorkloadSession", session)
        priced: Any = self.ask(session)  # first, so that what it refuses is not timed
        memory = Memory(self.workload, self.joined)
        simulator = self.simulator = self._prices(study, hosted, memory)
        warm = begin_warm(study, session)
        how, limited = self.asked[0], self.asked[len(self.objectives) :]
        limits, figures = limits_of(config), {o.objective.name: partial(_value, o, simulator) for o in limited}
        simulators, together = [simulator], math.fsum
        if config.state:
            each = (cast("WorkloadSession", hosted.in_state(state)) for state in priced.states)
            simulators, together = [one.simulator for one in each], priced.value_s

        def value(plan: Plan, simulator: WorkloadSimulator) -> float:
            return math.inf if memory.violations(plan) else _value(how, simulator, plan)

        def predict(plan: Plan) -> float:
            return together([value(plan, simulator) for simulator in simulators])

        def breaks(plan: Plan) -> tuple[Violation, ...]:
            return (*memory.violations(plan), *expected(limits, figures, plan))

        proposer, space = self._first(simulator, memory, predict), self.space
        costs = workload_costs(simulator, space.platform)
        # Measured times of jobs teach only where the objective follows from them.
        learns = how.objective.aggregation == "path" and not config.state and not session.capabilities.computed
        critic = partial(workload_critic, simulator, costs, value) if learns else None
        bounds = None
        if not config.state:
            own = session.capabilities.states  # a session with states computes them
            bounds = bound_of(self.objectives[0].name, simulator, self.least, own=own)
        return Search(
            priced,
            predict,
            tuple(self.baselines),
            breaks,
            _NAMED,
            _PROPOSED,
            SamplerProblem(
                self.graph,
                space.platform,
                space,
                costs,
                fits=lambda plan: not breaks(plan),
                search=lambda of, seed: proposer.anew(seed, critic() if critic is not None else None, of.fits),
                optima=tuple(proposer.ranking(1)),
                predict=predict,
                critic=critic,
            ),
            warm.plans if warm is not None else (),
            bounds,
        )

    def known(self, study: Earlier, same: Sequence[str]) -> Known | None:
        """Return the prices of jobs, if all processors are unchanged."""
        return earlier_prices(study) if len(same) == len(self.processors) else None

    def here(self, plan: Plan, study: Earlier, same: Sequence[str]) -> Plan | None:  # noqa: ARG002
        """Return a plan of the space or a baseline; None of any other."""
        named = {b.plan.digest for b in self.baselines}
        return plan if plan.digest in named or in_space(self.space, plan) else None

    def carried(self, study: Earlier) -> tuple[Plan, ...]:
        """Return the best plans of an earlier study that can be measured here."""
        return best_plans(study, lambda plan: self.here(plan, study, ()) is not None)

    def _first(
        self, simulator: WorkloadSimulator, memory: Memory, predict: Callable[[Plan], float]
    ) -> WorkloadProposer:
        """Add the baselines that need predictions; return the proposer.

        Raises:
            InfeasibleError: no plan keeps the memory limit, whatever its ranks.
        """
        config = self.config
        whole = mapped(self.space, predict)
        if whole.plan.digest not in {b.plan.digest for b in self.baselines} and not memory.violations(whole.plan):
            self.baselines += (whole,)
        plans = [*(b.plan for b in first_plans(self.space)), whole.plan]
        variants = self.variants
        steps = STEPS
        if isinstance(self.space, SharedWorkloadSpace):
            steps = SHARED_STEPS
            cut = WorkloadSpace(self.workload, self.joined, self.space.platform, config.max_stages)
            # so that more freedom is never worse
            plans += WorkloadProposer(cut, predict, plans, config.seed, STEPS).ranking(1)
            plans += shared_starts(self.space, simulator)
        if variants is not None and any(variants.of):
            plans += WorkloadProposer(self._space(), predict, plans, config.seed, steps).ranking(1)
            self.baselines += twins(self.space, self.baselines, variants, predict)
            self.baselines += (Baseline(PLAIN, plans[-1]),)
            limited = self.workload.memory_limit_nbytes is not None
            plans += decomposed(self.space, plans, variants, memory.sparing(variants.sets) if limited else {})
        proposer = WorkloadProposer(self.space, predict, plans, config.seed, steps)
        best = proposer.ranking(1)[0]  # plans that violate the limit come last
        if memory.violations(best) and (broken := memory.violations(min((best, *plans), key=memory.of_plan))):
            raise infeasible(*broken)
        if all(memory.violations(b.plan) for b in self.baselines):
            self.baselines += (Baseline(_NO_OTHER, best),)
        return proposer

    def _prices(self, study: Study, session: WorkloadSession, memory: Memory) -> WorkloadSimulator:
        """Measure prices of jobs and find variants, unless the log holds them; return the predictor.

        Each is logged as soon as it is known. What a damaged log has lost is measured again.
        """
        config, progress, run = self.config, study.watcher.message, study.run
        logged = known = next((r.data for r in reversed(run.contents.records) if r.kind == PRICES), None)
        new = bool(self.choices) and self.variants is None
        grids = grids_of(self.workload, self.choices) if self.choices and (new or known is None) else {}
        more = (grids,) if grids else ()
        if known is None and config.warm_start is not None:
            taken = warm_start(config.warm_start, fingerprint_of(session), self).known
            known = taken.prices if taken is not None else None
        # All workers use the first one's prices, so that they propose by one model.
        if known is None and study.shared is not None:
            known = study.shared.fact(PRICES, lambda: session.price(None, progress, *more))
        priced = session.price(known, progress, *more)
        if json.loads(json.dumps(priced)) != logged:  # new, or completed
            run.log.append(PRICES, priced)
        simulator = session.simulator

        def find() -> dict[str, Any]:
            return find_variants(session, self.workload, self.space.platform, self.choices, grids, progress).to_json()

        found = self.variants
        if new:
            found = study.fact(RANKS, find, partial(Variants.from_json, clients=len(self.workload.clients)))
        sets = found.sets if found is not None else ()
        self.least = check(simulator, memory, sets, freedoms_of(config.allow))
        if new and found is not None:
            self._allow(found)
            study.begin()
            study.opened()
        return simulator

    def finish(self, study: Study, session: Session, verdict: Verdict) -> Agreement | None:
        """Write the files of the recommended plan."""
        folder = study.run.path / "best"
        # Paths of models and platforms may be relative to where the study ran.
        document = {"schema_version": 1, **self.workload.to_json(), "folder": str(Path.cwd())}
        write_json(folder / "workload.json", document)
        # Not super(): @dataclass(slots=True) makes a new class, which super() here does not know.
        deployed = Subject.finish(self, study, session, verdict)
        ranks = ranks_by_component(verdict.best, self.joined)
        self.files = write_rewritten(folder, self.workload, self.joined, ranks)
        return deployed

    def result_fields(self, study: Study, verdict: Verdict | None) -> dict[str, Any]:
        """Return the fields of the result so far in which subjects differ."""
        tucker, predictions = dict[str, Any](), dict[str, tuple[Outcome, float]]()
        if self.variants is not None and verdict is not None:
            ranks = ranks_by_component(verdict.best, self.joined)
            tucker = rank_summary(self.workload, self.joined, self.variants, self.choices, ranks, self.files)
        for plan in (verdict.best, *study.baselines.values()) if verdict is not None else ():
            trial = study.history.known.get(plan.digest)
            if self.simulator is not None and trial is not None and trial.measurement is not None:
                run = self.simulator.run(plan)
                predictions[plan.digest] = run, self.asked[0].value(plan, run)
        return {
            "workload": self.workload,
            "joined": self.joined,
            "freedoms": (*self.space.freedoms, *(("ranks",) if self.choices else ())),
            "predictions": predictions,
            "tucker": tucker,
        }


def _value(how: WorkloadPricing, simulator: WorkloadSimulator, plan: Plan) -> float:
    """Return what a simulator predicts of an objective of a plan; infinite if the plan cannot run."""
    try:
        return how.value(plan, simulator.run(plan, known=True))
    except (RewriteError, UnavailableError):  # a split operator may need all outputs of a triple
        return math.inf


def _says(space: WorkloadSpace, trial: Trial) -> bool:
    """Return whether a trial's parameters decode to its plan."""
    try:
        return space.decode(trial.params) == trial.plan
    except LookupError:
        return False


def _workload(config: StudyConfig) -> Workload:
    """Return the workload that the command line names, from its file or from words."""
    most_error = RANKED_ERROR if config.max_error is None else config.max_error
    found = read_workload(Path(config.model), most_error) if names_file(config.model) else workload_of(config.model)
    found = found if config.rate is None else found.at_rate(config.rate)
    return replace(found, clients=with_given(found.clients, config.given))


def _objectives(names: Sequence[str]) -> tuple[Objective, ...]:
    """Return the objectives of several models.

    Raises:
        UsageError: a name is unknown, or given twice.
    """
    found = tuple(find_workload_objective(name) for name in names)
    if len({objective.name for objective in found}) < len(found):
        raise UsageError(f"--objective {', '.join(names)}: one is given twice", "give each once")
    return found
