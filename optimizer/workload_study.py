"""A study of several models at once, from beginning to end; beside :mod:`optimizer.study`, which is that of one."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evaluators.base import Agreement, Session, counters_of
from evaluators.measurement.disturbance import RunFilter
from evaluators.measurement.final import FinalPolicy
from evaluators.objectives import PricedSession
from evaluators.registry import make_evaluator
from evaluators.sampling import SamplingPolicy
from evaluators.workload.host import WorkloadSession
from evaluators.workload.objectives import WorkloadPricing, workload_pricing
from evaluators.workload.outcome import Outcome
from evaluators.workload.predicted import WorkloadSimulator
from optimizer.baselines import Baseline
from optimizer.config import StudyConfig, end_of_search
from optimizer.decide import FinalSettings, Verdict, decide
from optimizer.drift_monitor import DriftMonitor
from optimizer.goals import decide_front
from optimizer.history import OPTIMUM, History, Trial
from optimizer.loop import Loop, in_space
from optimizer.pareto import Front
from optimizer.records import Record
from optimizer.robust import in_states
from optimizer.run import RunFolder, write_json
from optimizer.samplers import make_sampler
from optimizer.study_ends import Watcher, kept_at_the_end, kept_front, kept_verdict, tell_of_damage
from optimizer.workload_baselines import first_plans
from optimizer.workload_limits import check
from optimizer.workload_memory import Memory
from optimizer.workload_problem import AUTO, Problem, read_problem
from optimizer.workload_ranks import PLAIN, RANKS, decomposed, grids_of, told, twins, write_rewritten
from optimizer.workload_result import WorkloadResult, summary
from optimizer.workload_search import STEPS, WorkloadProposer
from optimizer.workload_starts import shared_starts
from optimizer.workload_variants import Variants, find_variants
from search_spaces.arrangement import ranks_by_component
from search_spaces.constraints import infeasible
from search_spaces.errors import RewriteError, UnavailableError
from search_spaces.plan import Plan
from search_spaces.platform import Platform
from search_spaces.pools import lanes_of
from search_spaces.registry import freedoms_of, make_workload_space
from search_spaces.shared_workload_space import SharedWorkloadSpace
from search_spaces.workload_space import WorkloadSpace

_PRICES, _NO_OTHER = "prices", "the best predicted plan"
_SHARED_STEPS = 50  # a prediction of a split plan takes milliseconds
_OPTIMA, _TOLD_TURNS, _TOLD_RUNS, _TOLD_S = 4, 3, 3, 4.0
_NAMED = SamplingPolicy(max_s=1.5, min_runs=3)
_PROPOSED = SamplingPolicy(max_s=0.5, min_runs=2)
# A run of a workload is long, and of many requests: one is a turn.
_FINAL = FinalPolicy(
    max_s=20.0, min_rounds=3, max_rounds=8, min_blocks=2, max_blocks=4, turn_s=0.0, settle_s=0.0, loaded=4, least=4
)


@dataclass(slots=True)
class _Study:
    config: StudyConfig
    problem: Problem
    watcher: Watcher
    history: History
    simulator: WorkloadSimulator | None = None
    begin_s: float = field(default_factory=time.monotonic)
    exhausted: bool = False
    restored: int = 0
    runs: RunFilter = field(default_factory=RunFilter)
    asked: Sequence[WorkloadPricing] = ()
    front: Front | None = None  # of several objectives
    outcomes: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # client → that of its decomposed model

    def allow(self, variants: Variants) -> None:
        """Take variants of models into the space; the history begins anew."""
        problem, space = self.problem, self.problem.space
        problem.variants = variants
        problem.space = make_workload_space(
            self.config.allow, problem.workload, problem.joined, space.platform, self.config.max_stages, variants.sets
        )
        self.history = _history(problem)

    def restore(self, records: Sequence[Record]) -> None:
        """Take up what the log holds.

        A damaged log may have lost the variants, so that others were found: a trial then gets the parameters that its
        plan has now. One whose plan the space holds no more is known all the same, and keeps its place in the budget.
        """
        space = self.problem.space
        for record in records:
            if record.kind != "trial":
                self.history.restore((record,))
                continue
            trial = Trial.from_json(record.data)
            if in_space(space, trial.plan):
                if not _says(space, trial):
                    trial = replace(trial, params=space.encode(trial.plan))
                self.history.tell(trial)
            self.history.add(trial)
        self.restored = len(self.history.known)

    def result(self, run: RunFolder, verdict: Verdict | None, deployed: Agreement | None) -> WorkloadResult:
        problem = self.problem
        return WorkloadResult(
            problem.joined.graph,
            problem.platform,
            self.config.evaluator,
            self.history,
            {b.name: b.plan for b in problem.baselines},
            verdict,
            None,
            deployed,
            problem.space.cardinality(),
            self.exhausted,
            time.monotonic() - self.begin_s,
            run.path,
            disturbance=self.runs.total,
            workload=problem.workload,
            joined=problem.joined,
            objective=problem.objectives[0],
            freedoms=(*problem.space.freedoms, *(("ranks",) if problem.choices else ())),
            front=self.front,
            outcomes=self.outcomes,
            tucker=self.tucker(verdict.best if verdict is not None else None),
        )

    def tucker(self, best: Plan | None) -> dict[str, Any]:
        problem = self.problem
        if problem.variants is None or best is None:
            return {}
        ranks = ranks_by_component(best, problem.joined)
        return told(problem.workload, problem.joined, problem.variants, problem.choices, ranks, self.files)


def _history(problem: Problem) -> History:
    return History(problem.space.distributions(), [o.name for o in problem.objectives[1:]])


def _says(space: WorkloadSpace, trial: Trial) -> bool:
    """Return whether a trial's parameters stand for its plan."""
    try:
        return space.decode(trial.params) == trial.plan
    except LookupError:
        return False


def run_workload(config: StudyConfig, watcher: Watcher, command: Sequence[str]) -> WorkloadResult:
    """Run a study of several models, or go on with one; errors are those of :func:`optimizer.study.run_study`."""
    evaluator = make_evaluator(config.evaluator)
    make_sampler(config.sampler, config.seed, 0)
    watcher.message(f"reading {config.model}")
    problem = read_problem(config, evaluator)
    study = _Study(config, problem, watcher, _history(problem))
    with (
        RunFolder.create_or_resume(
            config,
            model_digest=f"{problem.joined.graph.digest}+{problem.workload.digest}",
            fingerprint={"evaluator": config.evaluator, "platform": problem.platform.to_json()},
            command=command,
            lanes=[f"{p.name} ({p.like})" for p in problem.space.platform.processors],
        ) as run,
        kept_at_the_end(study, run),
    ):
        tell_of_damage(run, watcher)
        if (ranks := next((r.data for r in run.contents.records if r.kind == RANKS), None)) is not None:
            study.allow(Variants.from_json(ranks))
        study.restore(run.contents.records)
        if problem.variants is not None or not problem.choices:
            watcher.opened(run, study.history, problem.space.cardinality())
        with evaluator.host(problem.workload, problem.joined, problem.platform, problem.objective, run.path) as session:
            return _search(study, run, session)


def _search(study: _Study, run: RunFolder, session: WorkloadSession) -> WorkloadResult:
    problem, config = study.problem, study.config
    memory = Memory(problem.workload, problem.joined)
    study.simulator = _prices(study, run, session, memory)
    history = study.history
    study.runs = RunFilter(counters_of(session))
    lanes = problem.space.platform
    study.asked = asked = [workload_pricing(o, problem.workload, lanes, session) for o in problem.objectives]
    priced = PricedSession(session, asked)
    told: Session = priced if len(asked) > 1 or asked[0].of_run != asked[0].objective.name else session
    if config.state:
        told = in_states(told, Platform(lanes.name, lanes_of(lanes)), config.state, config.robust)
    predict = _predictor(study, told, memory)
    proposer, queue = _first(study, memory, predict)

    def notify(trial: Trial) -> None:
        study.watcher.trial(trial)
        monitor.after(trial)

    loop = Loop(
        problem.joined.graph,
        problem.space,
        told,
        history,
        run.log,
        _NAMED,
        _PROPOSED,
        config.sampler,
        config.seed,
        config.budget,
        queue,
        predict,
        notify,
        violations=memory.violations,
        proposer=proposer if config.sampler == AUTO else None,
        runs=study.runs,
        end_s=end_of_search(config),
    )
    monitor = DriftMonitor(told, problem.joined.graph, history, run.log, study.runs, study.watcher.warn)
    monitor.restore(run.contents.records)
    loop.run_outside(b for b in problem.baselines if not in_space(problem.space, b.plan))
    study.exhausted = loop.run()
    verdict = kept_verdict(study, run)
    if verdict is None:
        how = FinalSettings(
            problem.joined.graph,
            _FINAL,
            config.seed,
            study.watcher.message,
            cores=len({core for p in lanes.processors for core in p.cores}),
        )
        named = {b.name: b.plan for b in problem.baselines}
        if len(asked) > 1:
            study.front, verdict = decide_front(priced, history, named, how, problem.objectives)
        else:
            verdict = decide(told, history, named, how)
        run.log.append("verdict", {**verdict.to_json(), "front": study.front.to_json() if study.front else None})
    elif len(asked) > 1:
        study.front = kept_front(run)
    return _finished(study, run, session, verdict)


def _first(
    study: _Study, memory: Memory, predict: Callable[[Plan], float]
) -> tuple[WorkloadProposer, list[tuple[str, Plan]]]:
    """Name the baselines that only predictions tell; return who proposes plans, and what is tried first.

    Raises:
        InfeasibleError: no plan keeps the memory limit, whatever its ranks.
    """
    problem, config = study.problem, study.config
    starts = first_plans(problem.space)
    plans = [b.plan for b in starts]
    variants = problem.variants
    steps = STEPS
    if isinstance(problem.space, SharedWorkloadSpace) and study.simulator is not None:
        steps = _SHARED_STEPS
        cut = WorkloadSpace(problem.workload, problem.joined, problem.space.platform, config.max_stages)
        plans += WorkloadProposer(cut, predict, plans, config.seed).ranking(1)  # so that more freedom is never worse
        plans += shared_starts(problem.space, study.simulator)
    if variants is not None and any(variants.of):
        lanes = problem.space.platform
        plain = make_workload_space(config.allow, problem.workload, problem.joined, lanes, config.max_stages)
        plans += WorkloadProposer(plain, predict, plans, config.seed, steps).ranking(1)
        problem.baselines += twins(problem.space, problem.baselines, variants, predict)
        problem.baselines += (Baseline(PLAIN, plans[-1]),)
        limited = problem.workload.memory_limit_nbytes is not None
        plans += decomposed(problem.space, plans, variants, memory.sparing(variants.sets) if limited else {})
    proposer = WorkloadProposer(problem.space, predict, plans, config.seed, steps)
    best = proposer.ranking(1)[0]  # plans that break the limit come after all others
    if memory.violations(best) and (broken := memory.violations(min((best, *plans), key=memory.of_plan))):
        raise infeasible(*broken)
    if all(memory.violations(b.plan) for b in problem.baselines):
        problem.baselines += (Baseline(_NO_OTHER, best),)
    queue = [(b.name, b.plan) for b in problem.baselines if in_space(problem.space, b.plan)]
    queue += [(OPTIMUM, plan) for plan in proposer.ranking(_OPTIMA)]
    queue += [(b.name, b.plan) for b in starts]
    return proposer, queue


def _prices(study: _Study, run: RunFolder, session: WorkloadSession, memory: Memory) -> WorkloadSimulator:
    """Learn what jobs cost, and what models may become, unless the log knows; return what predicts by it.

    Each is written down as soon as it is known. Where a damaged log has lost one of them it is learnt again.
    """
    problem, config, tell = study.problem, study.config, study.watcher.message
    known = next((r.data for r in reversed(run.contents.records) if r.kind == _PRICES), None)
    new = bool(problem.choices) and problem.variants is None
    grids = grids_of(problem.workload, problem.choices) if problem.choices and (new or known is None) else {}
    priced = session.price(known, tell, grids) if grids else session.price(known, tell)
    if json.loads(json.dumps(priced)) != known:  # new, or completed
        run.log.append(_PRICES, priced)
    simulator = session.simulator
    if not new:
        freedoms = freedoms_of(config.allow)
        check(simulator, memory, problem.variants.sets if problem.variants is not None else (), freedoms)
        return simulator
    lanes = problem.space.platform
    found = find_variants(session, problem.workload, problem.joined, lanes, problem.choices, grids, tell)
    run.log.append(RANKS, found.to_json())
    check(simulator, memory, found.sets, freedoms_of(config.allow))
    study.allow(found)
    study.restore(run.contents.records)
    study.watcher.opened(run, study.history, problem.space.cardinality())
    return simulator


def _predictor(study: _Study, told: Session, memory: Memory) -> Callable[[Plan], float]:
    """Return what predicts the first objective of a plan; infinite where it cannot be run, or breaks the limit.

    Args:
        told: predicts it in all states of the platform, where a person names some.
    """
    graph, simulator, how = study.problem.joined.graph, study.simulator, study.asked[0]

    def predict(plan: Plan) -> float:
        if memory.violations(plan) or simulator is None:
            return math.inf
        try:
            if not study.config.state:
                return how.value(plan, simulator.run(plan, known=True))
            with closing(told.load(graph, plan)) as candidate:
                return float(candidate.run(1).latency_s[0])
        except (RewriteError, UnavailableError):  # what is split may need all that a triple computes
            return math.inf

    return predict


def _finished(study: _Study, run: RunFolder, session: WorkloadSession, verdict: Verdict) -> WorkloadResult:
    """Run the plans that are told of a few times more, for every model's own figures; write down all."""
    named = {"best": verdict.best, **{b.name: b.plan for b in study.problem.baselines}}
    measured = {
        n: p for n, p in named.items() if (t := study.history.known.get(p.digest)) is not None and t.measurement
    }
    study.outcomes = _outcomes(study, session, measured)
    folder = run.path / "best"
    # Paths of models and platforms may be relative to where the study ran.
    document = {"schema_version": 1, **study.problem.workload.to_json(), "folder": str(Path.cwd())}
    write_json(folder / "workload.json", document)
    deployed = None
    if session.capabilities.deploy:
        study.watcher.message("writing the stage files")
        deployed = session.deploy(folder, study.problem.joined.graph, verdict.best)
    else:
        write_json(folder / "plan.json", verdict.best.to_json())
    problem = study.problem
    ranks = ranks_by_component(verdict.best, problem.joined)
    study.files = write_rewritten(folder, problem.workload, problem.joined, ranks)
    result = study.result(run, verdict, deployed)
    write_json(run.path / "result.json", result.to_json())
    return result


def _outcomes(study: _Study, session: WorkloadSession, plans: Mapping[str, Plan]) -> dict[str, Any]:
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
            with closing(session.load(study.problem.joined.graph, plan)) as candidate:
                candidate.run(1)
                for _ in range(_TOLD_RUNS):
                    candidate.run(1)
                    outcomes[plan.digest].append(candidate.outcome)
    problem = study.problem

    def told(plan: Plan) -> dict[str, Any]:
        run = study.simulator.run(plan) if study.simulator is not None else None
        predicted = (run, study.asked[0].value(plan, run)) if run is not None else None
        return summary(problem.workload, outcomes[plan.digest], predicted, plan, problem.joined)

    return {name: told(plan) for name, plan in plans.items()}
