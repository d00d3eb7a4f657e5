"""A study from beginning to end: model, device, run folder, profile, loop, verdict, files."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from evaluators.base import Agreement, Session, counters_of
from evaluators.measurement.disturbance import RunFilter
from evaluators.measurement.final import FinalPolicy
from evaluators.objectives import LATENCY, OBJECTIVES, Objective, find_objective
from evaluators.registry import make_evaluator
from optimizer.baselines import Baseline, baselines
from optimizer.bounds import Beliefs, Bounds
from optimizer.branch_profile import branch_profile
from optimizer.branches import branch_baselines
from optimizer.coexecution import coexecution_baselines, coexecution_profile
from optimizer.config import StudyConfig, end_of_search, most_stages
from optimizer.deadline import missed, too_late, unreachable
from optimizer.decide import PAUSE_S, FinalSettings, Verdict, decide
from optimizer.devices import asks_for_several, choose_model_and_platform, error_hint
from optimizer.drift_monitor import DriftMonitor
from optimizer.feasibility import violations
from optimizer.goals import Aim, aim_of, asked, decide_front, policies
from optimizer.history import OPTIMUM, WARM, History, Trial
from optimizer.limits import allowed_error, expected, keeps, limits_of, none_keeps, unreachable_limit
from optimizer.loop import Loop, Origin, in_space
from optimizer.objective import check_several, check_states
from optimizer.pareto import Front
from optimizer.profile import Profile, known_profile, profile
from optimizer.ranks import rank_profile
from optimizer.result import Result
from optimizer.run import RunFolder, write_json
from optimizer.samplers import make_sampler
from optimizer.shared import PROFILE, SharedStudy
from optimizer.shared_loop import SharedLoop
from optimizer.sharing import placed, sharing
from optimizer.study_ends import Watcher, kept_at_the_end, kept_front, kept_verdict, tell_of_damage
from optimizer.warm import Warm, begin_warm
from search_spaces.branch_space import BranchSpace
from search_spaces.chain import chain_plan
from search_spaces.coexecution import CoexecutionSpace
from search_spaces.constraints import Violation
from search_spaces.errors import UsageError
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform, Processor
from search_spaces.rank_space import RankSpace
from search_spaces.registry import freedoms_in, make_space
from search_spaces.space import EnumerableSpace

_PRECISION = 0.005
_FINAL_S, _FINAL_SHARE, _LEAST_FINAL_S, _DISTURBED_S = 20.0, 0.2, 5.0, 60.0
_PAUSES = 3  # inferences after a pause, of each of two plans
_NO_OTHER = "the model's optimum"


@dataclass(slots=True)
class _Study:
    """What the steps of a study share."""

    config: StudyConfig
    graph: Graph
    platform: Platform
    space: EnumerableSpace
    watcher: Watcher
    history: History
    own: tuple[Processor, ...] = ()  # on which the runtime places a whole network itself
    begin_s: float = field(default_factory=time.monotonic)
    baselines: dict[str, Plan] = field(default_factory=dict)
    bounds: Bounds | None = None
    exhausted: bool = False
    front: Front | None = None  # of several objectives
    restored: int = 0  # plans that the log knew
    shared: SharedStudy | None = None
    runs: RunFilter = field(default_factory=RunFilter)
    placements: Mapping[str, str] = field(default_factory=dict)  # what the runtime did with the network there
    undecided: bool = False  # an earlier final of this study was

    def result(self, run: RunFolder, verdict: Verdict | None, deployed: Agreement | None) -> Result:
        return Result(
            self.graph,
            self.measured_on,
            self.config.evaluator,
            self.history,
            self.baselines,
            verdict,
            self.bounds,
            deployed,
            self.space.cardinality(),
            self.exhausted,
            time.monotonic() - self.begin_s,
            run.path,
            objective=self.objective,
            freedoms=freedoms_in(self.space),
            front=self.front,
            disturbance=self.runs.total,
            placements=self.placements,
        )

    @property
    def measured_on(self) -> Platform:
        """The platform with the runtime's own placements, which no plan of the space uses."""
        return replace(self.platform, processors=(*self.platform.processors, *self.own))

    @property
    def objectives(self) -> list[Objective]:
        """What is made small."""
        return [find_objective(name) for name in self.config.objective]

    @property
    def objective(self) -> Objective:
        """The first of the objectives."""
        return self.objectives[0]


def run_study(config: StudyConfig, watcher: Watcher, command: Sequence[str]) -> Result:
    """Run a study, or go on with one, and leave its run folder complete.

    Raises:
        OptimizeError: with the exit code that tells what went wrong; what was measured is in the run folder.
        Interrupted: the person pressed Ctrl-C after the run folder was open.
    """
    evaluator = make_evaluator(config.evaluator)
    if asks_for_several(evaluator, config):
        from optimizer.workload_study import run_workload

        check_several(config)
        return run_workload(config, watcher, command)
    if other := [name for name in config.objective if name not in OBJECTIVES]:
        raise UsageError(f"--objective {other[0]}: goes with several models", "see --workload, or leave it out")
    config = placed(config)
    make_sampler(config.sampler, config.seed, 0)  # an unknown sampler is told before a model is built
    watcher.message(f"reading {config.model}")
    graph, platform = choose_model_and_platform(evaluator, config)
    if hint := error_hint(evaluator, config):
        watcher.message(hint)
    space = make_space(config.allow, graph, platform, most_stages(config, len(graph.operators)))
    history = History(space.distributions(), config.objective[1:])
    own = evaluator.own_placements(platform) if not config.state else ()
    study = _Study(config, graph, platform, space, watcher, history, own)
    check_states(study.objectives, states=bool(config.state))
    fingerprint = {"evaluator": config.evaluator, "platform": platform.to_json()}
    lanes = [f"{p.name} ({p.like})" for p in platform.processors]
    with (
        sharing(config, graph.digest, lanes) as study.shared,
        RunFolder.create_or_resume(
            config, model_digest=graph.digest, fingerprint=fingerprint, command=command, lanes=lanes
        ) as run,
        kept_at_the_end(study, run),
    ):
        tell_of_damage(run, watcher)
        study.history.restore(run.contents.records)
        study.restored = len(study.history.known)
        if isinstance(space, CoexecutionSpace):
            watcher.message("finding what two processors can share")
        watcher.opened(run, study.history, space.cardinality())
        with evaluator.prepare(study.measured_on, run.path) as session:
            return _search(study, run, session)


def _search(study: _Study, run: RunFolder, session: Session) -> Result:
    config, history = study.config, study.history
    most = most_stages(config, len(study.graph.operators))
    warm = begin_warm(config, study.graph, study.platform, session, run, history, study.watcher.message, study.shared)
    profiled = _profile(study, run, asked(config, study.platform, session), warm)
    if isinstance(study.space, CoexecutionSpace):
        study.watcher.message("finding the best plan by the profile")
    aim = aim_of(config, study.graph, study.platform, study.space, session, profiled)
    study.runs = RunFilter(counters_of(aim.session))
    believed, study.bounds = aim.believed, aim.believed.bounds
    breaks = _constraints(study, aim, most)
    named = (*_named(study, profiled, believed, breaks), *aim.more)
    study.baselines = {b.name: b.plan for b in named}

    def notify(trial: Trial) -> None:
        study.watcher.trial(trial)
        monitor.after(trial)

    first = [*((b.name, b.plan) for b in named), *((OPTIMUM, plan) for plan in believed.optima)]
    first += [(WARM, plan) for plan in (warm.plans if warm else ())]
    queue: list[Origin] = [(origin, plan) for origin, plan in first if in_space(study.space, plan)]
    loop = _loop(study)(
        study.graph,
        study.space,
        aim.session,
        history,
        run.log,
        *policies(config),
        config.sampler,
        config.seed,
        config.budget,
        queue,
        aim.predict,
        notify,
        aim.problem(lambda plan: not breaks(plan)),
        breaks,
        study.bounds.space_s * (1.0 + config.precision) if config.stop_when_proven else 0.0,
        asks_all=allowed_error(config) is not None,
        known=sum(t.origin == WARM and in_space(study.space, t.plan) for t in history.outside),
        runs=study.runs,
        end_s=end_of_search(config),
    )
    monitor = DriftMonitor(aim.session, study.graph, history, run.log, study.runs, study.watcher.warn)
    monitor.restore(run.contents.records)
    loop.run_outside(b for b in named if not in_space(study.space, b.plan))
    study.exhausted = loop.run()
    verdict = kept_verdict(study, run)  # a finished study that is asked again has nothing new to measure
    if verdict is None:
        study.undecided = any(record.kind == "verdict" for record in run.contents.records)
        verdict = _decide(study, aim, loop)
        run.log.append("verdict", {**verdict.to_json(), "front": study.front.to_json() if study.front else None})
    elif len(config.objective) > 1:
        study.front = kept_front(run)
    study.placements = dict(session.placements(study.graph))
    return _finished(study, run, verdict, _deploy(study, run, session, verdict.best))


def _loop(study: _Study) -> Callable[..., Loop]:
    """Return what makes the loop: of a study of its own, or of one that is shared."""
    if study.shared is None:
        return Loop
    return partial(SharedLoop, shared=study.shared, worker=secrets.randbits(31))


def _finished(study: _Study, run: RunFolder, verdict: Verdict, deployed: Agreement | None) -> Result:
    """Write down the result, which stays even where the best plan misses the deadline."""
    result = study.result(run, verdict, deployed)
    write_json(run.path / "result.json", result.to_json())
    best, measured = result.samples(verdict.best), result.measurement(verdict.best)
    took_s = best.median if best is not None and study.objective == LATENCY else None
    if measured is not None and LATENCY.name in measured.figures:
        took_s = measured.figures[LATENCY.name]
    if took_s is not None and (late := missed(_deadline_s(study.config), took_s)) is not None:
        raise late
    if (broken := none_keeps(limits_of(study.config), study.history, study.objective.name)) is not None:
        raise broken
    return result


def _deadline_s(config: StudyConfig) -> float:
    return math.inf if config.deadline is None else config.deadline / 1e3


def _constraints(study: _Study, aim: Aim, most: int) -> Callable[[Plan], tuple[Violation, ...]]:
    """Return what tells which constraints a plan breaks.

    Raises:
        InfeasibleError: even the best plan in the model clearly misses the deadline.
    """
    deadline_s, costs, predict = _deadline_s(study.config), aim.latency, aim.latency_s
    bounded = study.bounds is not None and study.objective == LATENCY
    limits = limits_of(study.config)
    if (beyond := unreachable_limit(limits, aim.least)) is not None:
        raise beyond
    if study.bounds is not None and bounded and (hopeless := unreachable(deadline_s, study.bounds.space_s)) is not None:
        raise hopeless

    own = {processor.name for processor in study.own}

    def breaks(plan: Plan) -> tuple[Violation, ...]:
        if any(stage.processor in own for stage in plan.stages):  # of which no model tells anything
            return ()
        late = too_late(deadline_s, predict, plan)
        return (
            *violations(study.graph, costs, most, plan),
            *late,
            *expected(limits, aim.figures, plan),
            *aim.breaks(plan),
        )

    return breaks


def _named(
    study: _Study, profiled: Profile, believed: Beliefs, breaks: Callable[[Plan], tuple[Violation, ...]]
) -> tuple[Baseline, ...]:
    """Return the baselines; where no processor can hold the model alone, the model's optimum is one."""
    fastest = profiled.fastest(study.platform)
    inner = study.space.chains if isinstance(study.space, RankSpace) else study.space
    if isinstance(inner, BranchSpace):
        named = branch_baselines(inner, study.platform, believed.costs, fastest)
    elif isinstance(inner, CoexecutionSpace):
        named = coexecution_baselines(study.graph, study.platform, inner, believed.costs, fastest)
    else:
        named = baselines(study.graph, study.platform, fastest)
    for processor in study.own:
        plan = chain_plan(study.graph, (), [processor.name])
        named = (*named, Baseline(f"LiteRT's own placement ({processor.name})", plan))
    if all(any(v.unit not in {"stages", "s", "J"} for v in breaks(b.plan)) for b in named):
        return (*named, Baseline(_NO_OTHER, believed.optima[0]))
    return named


def _decide(study: _Study, aim: Aim, loop: Loop) -> Verdict:
    config = study.config
    most = most_stages(config, len(study.graph.operators))
    drift = study.history.drift
    loaded_s = sum(t.measurement.load_s for t in study.history.known.values() if t.measurement)
    spent_s = max(time.monotonic() - study.begin_s, drift.measured_s + drift.probed_s + loaded_s)  # also when resumed
    if study.undecided:
        spent_s = max(spent_s, _FINAL_S)
    # At most 20 s or a fifth of the study; of a study of a few seconds about as long as its search.
    limit_s = min(max(_FINAL_S, _FINAL_SHARE * spent_s), max(_LEAST_FINAL_S, spent_s))
    pauses = _PAUSES if limit_s >= _FINAL_S else 1
    policy = FinalPolicy(
        precision=min(config.precision, _PRECISION),
        max_s=limit_s - 2 * PAUSE_S * pauses,
        disturbed_s=min(_DISTURBED_S, 2.0 * limit_s),
    )
    if aim.priced is not None:  # a run takes longer than the number that it gives says
        policy = replace(policy, min_rounds=3, max_rounds=8, min_blocks=1, max_blocks=1, turn_s=0.0, settle_s=0.0)
    how = FinalSettings(
        study.graph,
        policy,
        config.seed,
        study.watcher.message,
        fits=lambda trial: keeps(limits_of(config), trial, study.objective.name),
        allowed=lambda plan: len(plan.stages) <= most or in_space(study.space, plan),
        cores=len({core for p in study.platform.processors for core in p.cores}),
        pauses=pauses,
    )
    if aim.priced is not None and len(config.objective) > 1:
        study.front, verdict = decide_front(aim.priced, study.history, study.baselines, how, study.objectives)
        return verdict
    return decide(aim.session, study.history, study.baselines, how, loop.believed())


def _profile(study: _Study, run: RunFolder, session: Session, warm: Warm | None = None) -> Profile:
    for record in run.contents.records:
        if record.kind == "profile":
            return Profile.from_json(record.data)

    def find() -> Profile:
        return _measured_profile(study, session, warm)

    # All workers propose by one model: that of whoever was first.
    shared = study.shared
    found = find() if shared is None else Profile.from_json(shared.fact(PROFILE, lambda: find().to_json()))
    run.log.append("profile", found.to_json())
    return found


def _measured_profile(study: _Study, session: Session, warm: Warm | None) -> Profile:
    if session.capabilities.costs:
        found = known_profile(session.part_costs(study.graph), study.platform)
        return _with_ranks(study, session, found)
    known = warm.profile if warm is not None else None
    if warm is not None and warm.complete and known is not None:
        return known
    found = profile(session, study.graph, study.platform, study.watcher.message, known)
    inner = study.space.chains if isinstance(study.space, RankSpace) else study.space
    if isinstance(inner, BranchSpace):
        found = branch_profile(session, study.graph, study.platform, inner, found, study.watcher.message)
    elif isinstance(inner, CoexecutionSpace):
        found = coexecution_profile(session, study.graph, study.platform, inner, found, study.watcher.message)
    return _with_ranks(study, session, found)


def _with_ranks(study: _Study, session: Session, known: Profile) -> Profile:
    if not isinstance(study.space, RankSpace):
        return known
    error, tell = allowed_error(study.config) or 0.0, study.watcher.message
    return rank_profile(session, study.graph, study.platform, study.space, known, error, tell)


def _deploy(study: _Study, run: RunFolder, session: Session, plan: Plan) -> Agreement | None:
    """Write the best plan's files where the evaluator can make them run."""
    folder = run.path / "best"
    if session.capabilities.deploy:
        study.watcher.message("writing the stage files")
        folder.mkdir(exist_ok=True)
        return session.deploy(folder, study.graph, plan)
    write_json(folder / "plan.json", plan.to_json())
    return None
