"""A study of several models at once, from beginning to end; beside :mod:`optimizer.study`, which is that of one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from evaluators.base import Agreement, Evaluator
from evaluators.comparison import ComparisonPolicy
from evaluators.registry import make_evaluator
from evaluators.sampling import SamplingPolicy
from evaluators.workload.host import Host, WorkloadDeployer, WorkloadSession
from evaluators.workload.outcome import OBJECTIVES, Objective, Outcome
from evaluators.workload.predicted import WorkloadSimulator
from optimizer.baselines import Baseline
from optimizer.config import StudyConfig
from optimizer.decide import Verdict, decide
from optimizer.devices import choose_platform
from optimizer.history import OPTIMUM, History, Trial
from optimizer.loop import Loop, in_space, measure_plan
from optimizer.run import RunFolder, write_json
from optimizer.samplers import SAMPLERS, make_sampler
from optimizer.study_ends import Watcher, kept_at_the_end, kept_verdict, tell_of_damage
from optimizer.watch import Watchman
from optimizer.workload_baselines import baseline_lanes, first_plans, workload_baselines
from optimizer.workload_limits import check, memory_violations
from optimizer.workload_ranks import (
    PLAIN,
    RANKS,
    choices_of,
    decomposed,
    grids_of,
    told,
    twins,
    with_errors,
    write_rewritten,
)
from optimizer.workload_result import WorkloadResult, summary
from optimizer.workload_search import WorkloadProposer
from optimizer.workload_variants import Variants, find_variants
from search_spaces.arrangement import ranks_by_component
from search_spaces.errors import UnavailableError, UsageError
from search_spaces.joined_graph import JoinedGraph, merge
from search_spaces.models import load
from search_spaces.plan import Plan
from search_spaces.platform import Platform
from search_spaces.pools import with_pools
from search_spaces.rewrites.tucker_choices import RankChoices
from search_spaces.workload import RANKED_ERROR, Workload, workload_of
from search_spaces.workload_file import read_workload
from search_spaces.workload_space import WorkloadSpace

SPACE, TUCKER = "workload", "tucker"
_AUTO, _PRICES, _NO_OTHER = "auto", "prices", "the simulator's optimum"
_OPTIMA, _TOLD_RUNS, _TOLD_S = 4, 9, 4.0
_NAMED = SamplingPolicy(max_s=1.5, min_runs=3)
_PROPOSED = SamplingPolicy(max_s=0.5, min_runs=2)
_DECIDED = ComparisonPolicy(max_s=8.0, min_pairs=3)


@dataclass(slots=True)
class Problem:
    """What is asked, made ready to be searched.

    Attributes:
        platform: of the space and of the baselines.
        choices: of each client that may be decomposed what its convolutions may become.
        variants: what models may become in the space; None where none may be decomposed, or nothing is known yet.
    """

    workload: Workload
    joined: JoinedGraph
    space: WorkloadSpace
    platform: Platform
    objective: Objective
    baselines: tuple[Baseline, ...]
    choices: dict[int, RankChoices] = field(default_factory=dict)
    variants: Variants | None = None


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
    outcomes: dict[str, Any] = field(default_factory=dict)

    def allow(self, variants: Variants) -> None:
        """Take variants of models into the space, in which nothing may have been tried yet."""
        problem, space = self.problem, self.problem.space
        problem.variants = variants
        problem.space = WorkloadSpace(
            problem.workload, problem.joined, space.platform, self.config.max_stages, variants.sets
        )
        self.history = History(problem.space.distributions())

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
            workload=problem.workload,
            joined=problem.joined,
            goal=problem.objective,
            outcomes=self.outcomes,
            tucker=self.tucker(verdict.best if verdict is not None else None),
        )

    def tucker(self, best: Plan | None) -> dict[str, Any]:
        problem = self.problem
        if problem.variants is None or best is None:
            return {}
        return told(problem.workload, problem.joined, problem.variants, ranks_by_component(best, problem.joined))


def read_problem(config: StudyConfig, evaluator: Evaluator) -> Problem:
    """Return what a study of several models is about.

    Raises:
        UsageError: the workload, a model, a platform or a setting cannot be.
        UnavailableError: a processor cannot be used here, or the evaluator runs no workloads.
    """
    if not isinstance(evaluator, Host):
        raise UsageError(
            f"--evaluator {config.evaluator}: it runs one model at a time",
            "give litert, cuda, cost-model, or a single --model",
        )
    if config.space not in {SPACE, TUCKER, "chain"}:
        raise UsageError(f"--space {config.space}: several models are searched in the space {SPACE!r}", "leave it out")
    if config.deadline is not None:
        raise UsageError("--deadline: of several models each has its own", "say deadline_ms in the workload's file")
    if config.sampler != _AUTO and (
        (kind := SAMPLERS.get(config.sampler)) is not None and (kind.proposes is not None or kind.knows is not None)
    ):
        raise UsageError(f"--sampler {config.sampler}: it knows no workloads", "give auto, tpe, random, qmc or nsga2")
    from_file = config.model.endswith((".yaml", ".yml"))
    most = RANKED_ERROR if config.max_error is None else config.max_error
    workload = read_workload(Path(config.model), most) if from_file else workload_of(config.model)
    workload = with_errors(workload, config)
    graphs = {c.model: load(c.model, config.input_shape) for c in workload.clients}
    parts = [(i.name, graphs[workload.clients[i.client].model]) for i in workload.instances]
    joined = merge(workload.name, parts)
    found = choose_platform(evaluator, config.processors, config.platform, allow_fallback=config.allow_fallback)
    space = WorkloadSpace(workload, joined, with_pools(found), config.max_stages)
    threads = config.evaluator == "litert"
    processes = bool(getattr(evaluator, "sliced_lanes", True))
    wanted: str | Sequence[str] = config.objective
    objective = workload_objective([wanted] if isinstance(wanted, str) else wanted)
    named = workload_baselines(space, threads=threads, processes=processes)
    lanes = baseline_lanes(space, threads=threads, processes=processes)
    return Problem(workload, joined, space, lanes, objective, named, choices_of(workload, graphs))


def workload_objective(names: Sequence[str]) -> Objective:
    """Return the objective of several models; the latency stands for its mean.

    Raises:
        UsageError: it is none of theirs, or there are several.
    """
    found = next((o for o in OBJECTIVES if o == ("mean" if names[0] == "latency" else names[0])), None)
    if found is None or len(names) > 1:
        raise UsageError(
            f"--objective {', '.join(names)}: several models have one of {', '.join(OBJECTIVES)}", "give one of them"
        )
    return found


def run_workload(config: StudyConfig, watcher: Watcher, command: Sequence[str]) -> WorkloadResult:
    """Run a study of several models, or go on with one; errors are those of :func:`optimizer.study.run_study`."""
    evaluator = make_evaluator(config.evaluator)
    make_sampler(config.sampler, config.seed, 0)
    watcher.message(f"reading {config.model}")
    problem = read_problem(config, evaluator)
    config = config.model_copy(update={"space": config.space if config.space == TUCKER else SPACE})
    study = _Study(config, problem, watcher, History(problem.space.distributions()))
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
        study.history.restore(run.contents.records)
        study.restored = len(study.history.known)
        if problem.variants is not None or not problem.choices:
            watcher.opened(run, study.history, problem.space.cardinality())
        host = cast("Host", evaluator)
        with host.host(problem.workload, problem.joined, problem.platform, problem.objective, run.path) as session:
            return _search(study, run, session)


def _search(study: _Study, run: RunFolder, session: WorkloadSession) -> WorkloadResult:
    problem, config = study.problem, study.config
    study.simulator = simulator = _prices(study, run, session)
    history = study.history
    predict = _predictor(simulator, problem.objective)
    proposer, queue = _first(study, simulator, predict)

    def notify(trial: Trial) -> None:
        study.watcher.trial(trial)
        watchman.after(trial)

    loop = Loop(
        problem.joined.graph,
        problem.space,
        session,
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
        violations=partial(memory_violations, simulator),
        proposer=proposer if config.sampler == _AUTO else None,
    )
    watchman = Watchman(
        session,
        problem.joined.graph,
        history,
        run.log,
        lambda plan: measure_plan(loop, plan, race=False),
        study.watcher.warn,
    )
    watchman.restore(run.contents.records)
    loop.run_outside(b for b in problem.baselines if not in_space(problem.space, b.plan))
    study.exhausted = loop.run()
    verdict = kept_verdict(study, run)
    if verdict is None:
        verdict = decide(
            problem.joined.graph,
            session,
            history,
            {b.name: b.plan for b in problem.baselines},
            _DECIDED,
            config.seed,
            study.watcher.message,
        )
        run.log.append("verdict", verdict.to_json())
    return _finished(study, run, session, verdict)


def _first(
    study: _Study, simulator: WorkloadSimulator, predict: Callable[[Plan], float]
) -> tuple[WorkloadProposer, list[tuple[str, Plan]]]:
    """Name the baselines that only predictions tell; return who proposes plans, and what is tried first."""
    problem, config = study.problem, study.config
    starts = first_plans(problem.space)
    plans = [b.plan for b in starts]
    if problem.variants is not None:
        plain = WorkloadSpace(problem.workload, problem.joined, problem.space.platform, config.max_stages)
        plans += WorkloadProposer(plain, predict, plans, config.seed).ranking(1)
        problem.baselines += twins(problem.space, problem.baselines, problem.variants, predict)
        problem.baselines += (Baseline(PLAIN, plans[-1]),)
        plans += decomposed(problem.space, plans, problem.variants)
    proposer = WorkloadProposer(problem.space, predict, plans, config.seed)
    if all(memory_violations(simulator, b.plan) for b in problem.baselines):
        problem.baselines += (Baseline(_NO_OTHER, proposer.ranking(1)[0]),)
    queue = [(b.name, b.plan) for b in problem.baselines if in_space(problem.space, b.plan)]
    queue += [(OPTIMUM, plan) for plan in proposer.ranking(_OPTIMA)]
    queue += [(b.name, b.plan) for b in starts]
    return proposer, queue


def _prices(study: _Study, run: RunFolder, session: WorkloadSession) -> WorkloadSimulator:
    """Learn what jobs cost, and what models may become, unless the log knows; return what predicts by it."""
    problem, tell = study.problem, study.watcher.message
    known = next((r.data for r in run.contents.records if r.kind == _PRICES), None)
    new = bool(problem.choices) and problem.variants is None
    grids = grids_of(problem.workload, problem.choices) if new else {}
    priced = session.price(known, tell, grids) if grids else session.price(known, tell)
    simulator = session.simulator
    if new:
        lanes = problem.space.platform
        found = find_variants(session, problem.workload, problem.joined, lanes, problem.choices, grids, tell)
        least_s = check(simulator, found.sets)
        study.allow(found)
    else:
        least_s = check(simulator, problem.variants.sets if problem.variants is not None else ())
    if known is None:
        run.log.append(_PRICES, {**priced, "least_s": least_s})
    if new and problem.variants is not None:
        run.log.append(RANKS, problem.variants.to_json())
        study.watcher.opened(run, study.history, problem.space.cardinality())
    return simulator


def _predictor(simulator: WorkloadSimulator, objective: Objective) -> Callable[[Plan], float]:
    def predict(plan: Plan) -> float:
        if memory_violations(simulator, plan):
            return math.inf
        try:
            return simulator.run(plan, known=True).value_s(objective)
        except UnavailableError:
            return math.inf

    return predict


def _finished(study: _Study, run: RunFolder, session: WorkloadSession, verdict: Verdict) -> WorkloadResult:
    """Run the plans that are told of a few times more, for every model's own figures; write down all."""
    named = {"best": verdict.best, **{b.name: b.plan for b in study.problem.baselines}}
    for name, plan in named.items():
        trial = study.history.known.get(plan.digest)
        if trial is not None and trial.measurement is not None:
            study.watcher.message(f"every model's own latency: {name}")
            study.outcomes[name] = _told(study, session, plan)
    folder = run.path / "best"
    write_json(folder / "workload.json", {"schema_version": 1, **study.problem.workload.to_json()})
    deployed = None
    if isinstance(session, WorkloadDeployer):
        study.watcher.message("writing the stage files")
        deployed = session.deploy(folder, verdict.best)
    else:
        write_json(folder / "plan.json", verdict.best.to_json())
    problem = study.problem
    write_rewritten(folder, problem.workload, problem.joined, ranks_by_component(verdict.best, problem.joined))
    result = study.result(run, verdict, deployed)
    write_json(run.path / "result.json", result.to_json())
    return result


def _told(study: _Study, session: WorkloadSession, plan: Plan) -> dict[str, Any]:
    outcomes: list[Outcome] = []
    begin_s = time.monotonic()
    with closing(session.load(study.problem.joined.graph, plan)) as candidate:
        candidate.run(1)
        while len(outcomes) < _TOLD_RUNS and (len(outcomes) < 2 or time.monotonic() - begin_s < _TOLD_S):
            candidate.run(1)
            outcomes.append(candidate.outcome)
    predicted = study.simulator.run(plan) if study.simulator is not None else None
    return summary(study.problem.workload, study.problem.objective, outcomes, predicted, plan, study.problem.joined)
