"""The course of a study: run folder, model estimate, loop, final, files, and early ends; of one model or of several."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar, cast

from evaluators.base import Agreement, Session, counters_of
from evaluators.measurement.disturbance import Disturbance, RunFilter
from evaluators.measurement.final import FinalPolicy
from evaluators.objectives import Priced
from evaluators.registry import make_evaluator
from optimizer.devices import asks_for_several
from optimizer.model.baselines import Baseline, is_baseline, own_plans
from optimizer.model.bounds import Bounds
from optimizer.samplers import make_sampler
from optimizer.shared.loop import SharedLoop
from optimizer.shared.study import SharedStudy, check_joins, placed, sharing
from optimizer.study.config import StudyConfig
from optimizer.study.folder import INFEASIBLE, LOG, RESULT, Identity, RunFolder, write_json
from optimizer.study.front import Front, decide_front
from optimizer.study.history import WARM, History, Trial
from optimizer.study.loop import LOST, DriftMonitor, Loop, Origin
from optimizer.study.result import Result
from optimizer.study.subjects import Search, Subject
from optimizer.study.verdict import PAUSE_S, FinalSettings, Verdict, decide
from optimizer.study.warm import fingerprint_of, warm_start
from search_spaces.core.errors import (
    InfeasibleError,
    OptimizeError,
    RunFolderError,
    UsageError,
    damage,
)
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.wording import plural
from search_spaces.core.workload import Workload
from search_spaces.spaces.space import in_space

_PRECISION = 0.005
_FINAL_S, _FINAL_SHARE, _LEAST_FINAL_S, _DISTURBED_S = 20.0, 0.2, 5.0, 60.0
_CLAIM_SHARE = 0.3
_DISTURBED = "disturbed"  # kind of the records of what disturbed a session's search
_FINAL_OF_TRIAL_S = 0.5  # seconds of the final for each trial of the budget: 40 allow all 20 s
_PAUSES = 3  # inferences after a pause, of each of two plans
_KINDS = ("trial", "baseline", "verdict")  # a verdict covers the trials before it, and no later one

Fact = TypeVar("Fact")


class Watcher(Protocol):
    """Watches a study's progress, as :mod:`optimizer.report.console` does."""

    def message(self, text: str) -> None:
        """Report the current step."""
        ...

    def warn(self, text: str) -> None:
        """Report a warning, which is always shown."""
        ...

    def opened(self, run: RunFolder, history: History, space_size: int) -> None:
        """Report that the run folder is open and what it held."""
        ...

    def trial(self, trial: Trial) -> None:
        """Report a finished trial."""
        ...


class Interrupted(Exception):  # noqa: N818 - it is no error
    """The person ended a study early; everything measured is in the run folder.

    Attributes:
        result: the result so far, or None where nothing was measured.
        resume_command: resumes the study.
    """

    def __init__(self, result: Result | None, resume_command: str) -> None:
        super().__init__(resume_command)
        self.result = result
        self.resume_command = resume_command


@dataclass(slots=True)
class Study:
    """The state that the steps of a study share.

    Attributes:
        own: plans of ``--compare-with``.
        front: of several objectives.
        restored: how many plans the log held.
        disturbed: what kept measurements of earlier sessions off their cores.
        undecided: whether an earlier final of this study was undecided.
    """

    config: StudyConfig
    subject: Subject
    watcher: Watcher
    run: RunFolder
    shared: SharedStudy | None
    own: tuple[Baseline, ...] = ()
    history: History = field(init=False)
    begin_s: float = field(default_factory=time.monotonic)
    baselines: dict[str, Plan] = field(default_factory=dict)
    bounds: Bounds | None = None
    exhausted: bool = False
    proven: bool = False
    front: Front | None = None
    restored: int = 0
    disturbed: Disturbance = field(default=Disturbance(), init=False)
    runs: RunFilter = field(default_factory=RunFilter)
    undecided: bool = False

    def __post_init__(self) -> None:
        self.begin()

    @property
    def asked(self) -> tuple[Plan, ...]:
        """The plans of ``--compare-with``, baselines among them, which always take part in the final."""
        named = (self.baselines[name] for name in self.config.compare_with if name in self.baselines)
        return (*(b.plan for b in self.own), *named)

    def begin(self) -> None:
        """Start the history from the log; also called after the space has changed."""
        subject = self.subject
        self.history = History(subject.space.distributions(), [o.name for o in subject.objectives[1:]])
        subject.restore(self.history, self.run.contents.records)
        self.restored = len(self.history.known)
        records = [r.data for r in self.run.contents.records if r.kind == _DISTURBED]
        try:
            self.disturbed = sum(map(Disturbance.from_json, records), Disturbance())
        except (TypeError, ValueError) as error:
            raise RunFolderError(f"the record of disturbances is damaged: {damage(error)}") from error

    def opened(self) -> None:
        """Report that the space is known, and what the log held of it."""
        self.watcher.opened(self.run, self.history, self.subject.space.cardinality())

    def holds(self, plan: Plan) -> bool:
        """Return whether the space holds a plan."""
        return in_space(self.subject.space, plan)

    def fact(self, kind: str, make: Callable[[], Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Fact]) -> Fact:
        """Return what the log holds of a kind; else what all workers use, which the first one makes, and log it."""
        for record in self.run.contents.records:
            if record.kind == kind:
                return read(record.data)
        found = make() if self.shared is None else self.shared.fact(kind, make)
        value = read(found)  # another worker may have written anything
        self.run.log.append(kind, found)
        return value

    def result(self, verdict: Verdict | None, deployed: Agreement | None) -> Result:
        """Return the result so far."""
        return Result(
            self.subject.graph,
            self.subject.measured_on,
            self.config.evaluator,
            self.history,
            self.baselines,
            verdict,
            self.bounds.slower(verdict.slowness) if self.bounds and verdict else self.bounds,
            deployed,
            self.subject.space.cardinality(),
            self.exhausted,
            time.monotonic() - self.begin_s,
            self.run.path,
            objective=self.subject.objectives[0],
            front=self.front,
            proven=self.proven,
            disturbance=self.disturbed + self.runs.total,
            earlier=self.restored,
            **self.subject.result_fields(self, verdict),
        )


def run_study(config: StudyConfig, watcher: Watcher, command: Sequence[str]) -> Result:
    """Run or resume a study, and leave its run folder complete.

    Raises:
        OptimizeError: with its exit code; everything measured is in the run folder.
        Interrupted: the person pressed Ctrl-C after the run folder was open.
    """
    begin_s = time.monotonic()
    watcher.message(f"reading {config.model}")
    subject = read_subject(placed(config))
    config, of = subject.config, identity(subject)
    own = own_plans(config.compare_with, subject.checked)
    fingerprint = {"evaluator": config.evaluator, "platform": subject.platform.to_json()}
    with (
        sharing(config, of) as shared,
        RunFolder.create_or_resume(config, of, fingerprint=fingerprint, command=command) as run,
    ):
        tell_of_damage(run, watcher)
        subject.resume(run.contents.records)
        study = Study(config, subject, watcher, run, shared, own, begin_s=begin_s)
        with kept_at_the_end(study):
            if subject.ready:
                study.opened()
            try:
                with subject.session(run.path) as session:
                    return _search(study, session)
            except InfeasibleError as error:
                known = run.contents.records
                if not known or (known[-1].kind, known[-1].data) != (INFEASIBLE, {"what": error.what}):
                    run.log.append(INFEASIBLE, {"what": error.what})  # reports tell why there is no result
                raise


def foreseen(config: StudyConfig) -> dict[str, Any]:
    """Return what a study would search, as plain values, without running anything.

    Errors are those of the study's beginning, with the evaluator's session open. Not seen is what only shows when plans
    are priced or measured.
    """
    subject = read_subject(placed(config))
    config, of = subject.config, identity(subject)
    own = own_plans(config.compare_with, subject.checked)
    check_joins(config, of)
    RunFolder.check(config, of)
    with TemporaryDirectory() as folder, subject.session(Path(folder)) as session:
        subject.ask(session)
        check_traffic(config, session)
        if config.warm_start is not None:
            warm_start(config.warm_start, fingerprint_of(session), subject)
    found = subject.foreseen()
    return {**found, "baselines": [*found["baselines"], *(b.name for b in own)]}


def check_traffic(config: StudyConfig, session: Session) -> None:
    """Check that a session can count what a study asks for.

    Raises:
        UsageError: it cannot.
    """
    if config.count_traffic and not session.capabilities.traffic:
        raise UsageError(
            f"--count-traffic: evaluator {config.evaluator!r} does not count memory traffic here",
            "use --evaluator cuda, for one model, where NVIDIA's ncu is installed",
        )


def identity(subject: Subject) -> Identity:
    """Return what a study is of."""
    processors = tuple(sorted(f"{p.name} ({p.like})" for p in subject.processors))
    return Identity(subject.digest, subject.inputs_digest, processors)


def read_subject(config: StudyConfig, workload: Workload | None = None, platform: Platform | None = None) -> Subject:
    """Return the subject of a study; errors are those of :func:`run_study`.

    Args:
        workload, platform: of several models, where they are recorded: files and the device are not asked then.
    """
    make_sampler(config.sampler, config.seed, 0)  # an unknown sampler is reported before a model is built
    evaluator = make_evaluator(config.evaluator)
    if evaluator.capabilities.predicts and "precision" in config.model_fields_set and not config.stop_when_proven:
        raise UsageError("--precision has no effect: latencies are predicted", "leave it out")
    if workload is not None or asks_for_several(evaluator, config):
        from optimizer.study.several_models import SeveralModels

        return SeveralModels.read(config, evaluator, workload, platform)
    from optimizer.study.one_model import OneModel

    return OneModel.read(config, evaluator)


def _search(study: Study, session: Session) -> Result:
    config, subject, run = study.config, study.subject, study.run
    check_traffic(config, session)
    search = subject.learn(study, session)
    history = study.history
    study.runs = RunFilter(counters_of(search.session))
    study.bounds = search.bounds
    study.baselines = {b.name: b.plan for b in (*search.baselines, *study.own)}
    for name in config.compare_with:
        if is_baseline(name) and name not in study.baselines and not Path(name).exists():
            has = ", ".join(b.name for b in search.baselines)
            study.watcher.warn(f"--compare-with {name!r}: this study has no such baseline; it has {has}")

    def notify(trial: Trial) -> None:
        study.watcher.trial(trial)
        monitor.after(trial)

    first = [*((b.name, b.plan) for b in search.baselines), *((WARM, plan) for plan in search.carried)]
    queue: list[Origin] = [(origin, plan) for origin, plan in first if study.holds(plan)]
    make: Callable[..., Loop] = Loop
    if study.shared is not None:
        make = partial(SharedLoop, shared=study.shared, worker=secrets.randbits(31))
    loop = make(
        subject.graph,
        subject.space,
        search,
        history,
        run.log,
        config.sampler,
        config.seed,
        config.budget,
        queue,
        notify,
        study.bounds.space_s * (1.0 + config.precision) if study.bounds and config.stop_when_proven else 0.0,
        runs=study.runs,
        limit_s=math.inf if config.minutes is None else 60.0 * config.minutes,
        asked={plan.digest for plan in study.asked},
        lost={str(record.data.get("plan")) for record in run.contents.records if record.kind == LOST},
    )
    monitor = DriftMonitor(loop, study.watcher.warn, scaled=subject.scaled)
    monitor.restore(run.contents.records)
    if history.measured > config.budget:
        tried = f"{plural(history.measured, 'plan')} had been tried already"
        study.watcher.warn(f"{tried}, so --budget {config.budget} adds none")
    try:
        loop.run_outside((*study.own, *(b for b in search.baselines if not study.holds(b.plan))))
        study.exhausted = loop.run()
        study.proven = loop.proven and history.measured < config.budget
    finally:
        if disturbed := study.runs.total.to_json():
            run.log.append(_DISTURBED, disturbed)
    bounds, objective = study.bounds, subject.objectives[0]
    least = min((t.median_s for t in history.trials), default=math.inf)
    exact = bounds and (bounds.own or not objective.is_additive)  # values have no error
    if bounds and exact and least < bounds.space_s * (1.0 - 1e-6):
        study.bounds = None
        study.watcher.warn(f"the lower bound of {objective.name} is left out: it is wrong, since a plan is below it")
    verdict = kept_verdict(study)  # a finished study has nothing new to measure
    if verdict is None:
        study.undecided = any(record.kind == "verdict" for record in run.contents.records)
        verdict = _decide(study, search, loop)
        run.log.append("verdict", {**verdict.to_json(), "front": study.front.to_json() if study.front else None})
    elif len(subject.objectives) > 1:
        study.front = kept_front(run)
    deployed = subject.finish(study, session, verdict)
    result = study.result(verdict, deployed)
    write_json(run.path / RESULT, result.to_json())
    subject.check(result)
    return result


def _decide(study: Study, search: Search, loop: Loop) -> Verdict:
    """Compare every plan that may be the best with the others, and choose."""
    drift, history = study.history.drift, study.history
    loaded_s = sum(t.measurement.load_s for t in history.known.values() if t.measurement)
    spent_s = drift.measured_s + drift.probed_s + loaded_s  # also when resumed
    if not search.session.capabilities.computed:
        spent_s = max(time.monotonic() - study.begin_s, spent_s)
    policy, pauses = _policy(study.config, max(spent_s, _FINAL_S) if study.undecided else spent_s)
    how = FinalSettings(
        study.subject.graph,
        policy,
        study.config.seed,
        study.watcher.message,
        fits=study.subject.fits,
        allowed=search.allowed,
        cores=len({core for p in study.subject.processors for core in p.cores}),
        pauses=pauses,
        platform=study.subject.measured_on,
        counted=study.subject.objectives[0].of_plan is not None,
        scaled=study.subject.scaled,
        asked=frozenset(plan.digest for plan in study.asked),
        traffic=study.config.count_traffic,
    )
    objectives = study.subject.objectives
    if len(objectives) > 1:
        priced = cast("Priced", search.session)
        study.front, verdict = decide_front(priced, history, study.baselines, how, objectives)
        return verdict
    return decide(search.session, history, study.baselines, how, loop.by_estimate())


def final_s(config: StudyConfig, spent_s: float = 0.0) -> float:
    """Return the seconds of a study's final: at most 20 s or a fifth of the study, less for a few quick trials.

    Args:
        spent_s: seconds of the study so far; 0 before it begins, as for the plan of a campaign.
    """
    least_s = max(_LEAST_FINAL_S, spent_s, _FINAL_OF_TRIAL_S * config.budget)
    return min(max(_FINAL_S, _FINAL_SHARE * spent_s), least_s)


def _policy(config: StudyConfig, spent_s: float) -> tuple[FinalPolicy, int]:
    """Return the final's policy, and the inferences after a pause.

    Two rounds find the best plan, but a gain of 3 % took five rounds or more to become significant, and twice as many
    among forty plans on a busier machine: a third is added for those.

    Args:
        spent_s: as of :func:`final_s`.
    """
    limit_s = final_s(config, spent_s)
    pauses = _PAUSES if spent_s >= _FINAL_S else 1
    policy = FinalPolicy(
        precision=min(config.precision, _PRECISION),
        max_s=limit_s - 2 * PAUSE_S * pauses,
        disturbed_s=min(_DISTURBED_S, 2.0 * limit_s),
        claim_s=_CLAIM_SHARE * limit_s,
    )
    return policy, pauses


def kept_verdict(study: Study) -> Verdict | None:
    """Return the verdict that the log holds; None where it is undecided, or lacks plans that were measured since."""
    last = next((r for r in reversed(study.run.contents.records) if r.kind in _KINDS), None)
    if last is None or last.kind != "verdict" or len(study.history.known) != study.restored:
        return None
    found = Verdict.from_json(last.data)
    known = study.history.known
    given = [plan for plan in study.asked if plan.digest in known and known[plan.digest].measurement is not None]
    return None if found.undecided or any(plan not in found.plans for plan in given) else found


def kept_front(run: RunFolder) -> Front | None:
    """Return the front of several objectives that the log holds with its verdict.

    Raises:
        RunFolderError: it is damaged.
    """
    last = next((r for r in reversed(run.contents.records) if r.kind == "verdict"), None)
    data: Any = last.data.get("front") if last is not None else None
    return None if data is None else Front.from_json(data)


def tell_of_damage(run: RunFolder, watcher: Watcher) -> None:
    """Report damage of the run folder's log, and what has changed since the study began."""
    for found in run.contents.damage:
        watcher.warn(f"{run.path / LOG}: {found}")
    if run.contents.original is not None:
        watcher.warn(f"the damaged file is kept as {run.contents.original}")
    for change in run.changes:
        watcher.warn(change)


@contextmanager
def kept_at_the_end(study: Study) -> Iterator[None]:
    """Save the result so far if a study ends early; one that was finished before keeps its result.

    Raises:
        Interrupted: the person pressed Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        result = study.result(None, None) if study.history.known else None
        with suppress(OptimizeError):
            if result is not None and kept_verdict(study) is None:
                write_json(study.run.path / RESULT, result.to_json())
        raise Interrupted(result, study.run.resume_command) from None
