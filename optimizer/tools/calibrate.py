"""Calibrate a cost model of this machine: choose what to time, time it, fit, and report the fit's errors.

A profile can be corrected with what a study measured on the real device (:func:`refine`).
Each timing is logged beside the profile at once; an interrupted calibration resumes from there.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import Batch, Evaluator, Session
from evaluators.cost_model.calibrate_kernels import TIMING
from evaluators.cost_model.calibrate_nets import DEEP, GENERATOR, TURNS, network
from evaluators.cost_model.calibrate_profile import (
    KEPT_OUT,
    MOST_NETS,
    Fits,
    build_profile,
    errors_on_models,
    next_network,
    usual_reference_s,
)
from evaluators.cost_model.calibrate_time import (
    Bench,
    Timed,
    check_seconds,
    is_of,
    pairs,
    time_contention,
    time_link,
)
from evaluators.cost_model.fit import errors_of, nonnegative_prices
from evaluators.cost_model.profile import (
    SUFFIXES,
    ContentionProfile,
    CostProfile,
    LinkProfile,
    ProcessorProfile,
    profile_digest,
    read_profile,
    to_json,
)
from evaluators.cost_model.session import CostModelSession
from evaluators.cost_model.transfers import profile_key
from evaluators.objectives import LATENCY
from evaluators.registry import make_evaluator
from evaluators.samples import Measurement
from optimizer.devices import choose_platform
from optimizer.exact.least import chain_costs
from optimizer.exact.segment_model import SegmentModel
from optimizer.files import write_atomic
from optimizer.provenance import provenance
from optimizer.report.answer import objective_of
from optimizer.report.data import finished_study
from optimizer.study.folder import CONFIG, LOG, read_config, resume_hint
from optimizer.study.history import Trial
from optimizer.study.log import Record, TrialLog, read_log
from search_spaces.core.bounded import built
from search_spaces.core.errors import (
    InfeasibleError,
    OptimizeError,
    ProfileError,
    RunFolderError,
    UnavailableError,
    UsageError,
    damage,
    plain_name,
)
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.wording import percent, plural
from search_spaces.core.workload import Client, with_given
from search_spaces.models import load
from search_spaces.spaces.segment_space import SegmentSpace

LEAST_MINUTES, MOST_MINUTES = 0.2, 600.0
_SHARE_OF_PAIRS, _SHARE_OF_MODELS, _SHARE_OF_SHARED = 0.15, 0.3, 0.12
_SURE_TIMINGS, _DISTURBED = 20, 1.1  # times of the reference network, 90th by 10th percentile; 1.04 on a quiet machine
_LEAST_NETS = 6
_APART = 4  # of so many networks one is timed in stages of one operator, too, beside the deep ones
_MOST_REFUSED = 20
LEAST_STAGES = 6
SHARED = "operators that processors share"
REFERENCE = "time of the reference network"


@dataclass(frozen=True, slots=True)
class Shared:
    """A model that is kept out of the fit, with chains of operators shared by two processors as CoDL would (seed 002).

    Attributes:
        name: of the model.
        on: the two processors.
        like: the kind of the first one.
        plan: what was timed, as plain values.
        stage_s: time of each stage.
        reference_s: time of the reference network on the first processor meanwhile.
    """

    name: str
    on: tuple[str, str]
    like: str
    plan: Mapping[str, Any]
    stage_s: tuple[float, ...]
    reference_s: float

    def __post_init__(self) -> None:
        """Check the times.

        Raises:
            ProfileError: one is no time.
        """
        check_seconds((*self.stage_s, self.reference_s), self.name)

    def check(self, platform: Platform) -> None:
        """Check that the plan can be predicted on a platform.

        Raises:
            ProfileError: the model is another one, or the plan does not fit it, the processors or the times.
        """
        processors = [p for p in platform.processors if p.name in self.on]
        if self.name not in KEPT_OUT or len(processors) != 2 or platform[self.on[0]].like != self.like:
            raise ProfileError("it names another model or other processors")
        try:
            plan = Plan.from_json(self.plan)
            plan.validate(load(self.name), platform)
        except OptimizeError as error:
            raise ProfileError(f"its plan is damaged: {error.what}") from error
        if len(plan.stages) != len(self.stage_s):
            raise ProfileError(f"it has {len(self.stage_s)} times for {plural(len(plan.stages), 'stage')}")


_KINDS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Any]]] = {
    "timed": ("timed", Timed.from_json),
    "link": ("links", lambda data: LinkProfile(**data)),
    "contention": ("contention", lambda data: ContentionProfile(**data)),
    "shared": ("shared", lambda data: built(Shared, data, "it is", ProfileError)),
}  # kind of a record → field of Measured, and constructor of its value

Rows = dict[str, list[tuple[float, float]]]
"""Processor of the profile → predicted seconds without the invocation, and measured seconds, of each stage."""


@dataclass(slots=True)
class Measured:
    """Content of a calibration's log.

    Attributes:
        timed: what was timed on each kind of processor.
        refused: how many networks a kind of processor could not run.
        links, contention: transfers between pairs of processors, and how they slow each other down.
        shared: models whose operators two processors share.
        fitted: the profile of all that was timed, where it was needed for a plan.
    """

    timed: list[Timed] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    links: list[LinkProfile] = field(default_factory=list)
    contention: list[ContentionProfile] = field(default_factory=list)
    shared: list[Shared] = field(default_factory=list)
    fitted: CostProfile | None = None

    def add(self, record: Record, platform: Platform) -> None:
        """Add a record of the log of a calibration of this platform.

        Raises:
            ProfileError: it is damaged.
        """
        try:
            if record.kind == "refused":
                self.refused[str(record.data["like"])] += 1
            elif record.kind in _KINDS:
                name, make = _KINDS[record.kind]
                value = make(record.data)
                if isinstance(value, Shared):
                    value.check(platform)
                getattr(self, name).append(value)
        except (KeyError, TypeError, ProfileError) as error:
            what = error.what if isinstance(error, ProfileError) else damage(error)
            raise ProfileError(
                f"record {record.n} of the calibration's log is damaged: {what}",
                "give another --out, or remove the log",
            ) from error


@dataclass(frozen=True, slots=True)
class Calibration:
    """A finished calibration.

    Attributes:
        profile, platform: what the file holds.
        out: the file.
        interrupted: whether Ctrl-C ended it early.
        step: of a refinement, the study and the errors on its plans before and after.
    """

    profile: CostProfile
    platform: Platform
    out: Path
    interrupted: bool = False
    step: Mapping[str, Any] | None = None


def calibrate(
    out: Path,
    processors: Sequence[str] | None = None,
    minutes: float = 10.0,
    *,
    evaluator: str = "litert",
    command: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Calibrate the processors of this machine and write their profile to ``out``.

    Raises:
        UsageError: an option is wrong, or the log beside ``out`` is of another machine or of other processors.
        ProfileError: too little was timed for a fit.
        UnavailableError: the device failed.
    """
    if not LEAST_MINUTES <= minutes <= MOST_MINUTES:
        raise UsageError(f"--minutes {minutes:g}: give {LEAST_MINUTES:g} to {MOST_MINUTES:g} minutes")
    check_out(out)
    measurer = make_evaluator(evaluator)
    platform = choose_platform(measurer, processors)
    end_s = time.monotonic() + 60.0 * minutes
    log, contents = TrialLog.open(out.with_suffix(".log"))
    interrupted = False
    with ExitStack() as stack:
        stack.callback(log.close)
        measured = Measured()
        session = stack.enter_context(measurer.prepare(platform))
        _check_log(log, contents.records, _identity(measurer, session, platform))
        for record in contents.records:
            measured.add(record, platform)
        if measured.timed:
            progress(f"{len(measured.timed)} timings of an earlier start are used")
        bench = stack.enter_context(Bench(measurer, session, platform))
        try:
            _Calibrator(measured, bench, log, progress).measure(end_s)
        except KeyboardInterrupt:
            interrupted = True
    return _finish(measured, platform, out, [*command], interrupted=interrupted)


def check_out(out: Path) -> None:
    """Check that a profile can be written to a file.

    Raises:
        UsageError: it has another suffix, is a folder, or its folder is missing.
    """
    if out.suffix not in SUFFIXES:
        raise UsageError(
            f"--out {out}: a profile is a .json or .yaml file",
            f"give {out.with_suffix('.json') if out.name else 'here.json'}",
        )
    if out.is_dir():
        raise UsageError(f"--out {out}: is a folder", "give a file")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}", "make it first")


def _identity(evaluator: Evaluator, session: Session, platform: Platform) -> dict[str, Any]:
    machine = provenance()
    return {
        "evaluator": evaluator.name,
        "cpu": machine["machine"]["cpu"],
        "runtime": session.fingerprint().get("runtime"),
        "processors": [[p.name, p.like] for p in platform.processors],
        "generator of networks": GENERATOR,
        "timing": TIMING,
    }


def _check_log(log: TrialLog, records: Sequence[Record], identity: dict[str, Any]) -> None:
    """Check that a log is of this machine; a new one gets a record of the machine."""
    if not records:
        log.append("calibration", identity)
        return
    known = dict(records[0].data) if records[0].kind == "calibration" else {}
    for name, value in identity.items():
        if known.get(name) != value:
            raise RunFolderError(
                f"{log.path}: is of another calibration ({name}: {known.get(name)}, not {value})",
                "give another --out, or remove the log",
            )


@dataclass(frozen=True, slots=True)
class _Calibrator:
    """Times what the log lacks, and logs each timing at once."""

    measured: Measured
    bench: Bench
    log: TrialLog
    progress: Callable[[str], None]

    def measure(self, end_s: float) -> None:
        """Time pairs of processors, networks, whole models, and shared ones, in shares of the time that is left."""
        left_s = max(0.0, end_s - time.monotonic())
        self._pairs(end_s - left_s * (1.0 - _SHARE_OF_PAIRS))
        self._networks(end_s - left_s * _SHARE_OF_MODELS)
        models_s = end_s - left_s * _SHARE_OF_SHARED
        for name in KEPT_OUT:
            for processor in self._kinds():
                known = any((t.like, t.name) == (processor.like, name) for t in self.measured.timed)
                if known or time.monotonic() > models_s:
                    continue
                self.progress(f"timing {name} on {processor.name}, which is kept out of the fit")
                try:
                    self._keep("timed", self.bench.time_zoo(processor, name))
                except UnavailableError as error:
                    self.progress(f"{name} is left out on {processor.name}: {error.what}")
        self._shared(end_s)

    def _shared(self, end_s: float) -> None:
        """Time models that are kept out of the fit with chains of operators shared by two processors."""
        measured, platform = self.measured, self.bench.platform
        both = {frozenset((a.name, b.name)): (a, b) for a, b in pairs(platform) if not a.excludes(b)}.values()
        kept = [name for name in KEPT_OUT if any(t.name == name for t in measured.timed)]
        known = {(s.name, *s.on) for s in measured.shared}
        left = [(name, a, b) for name, (a, b) in product(kept, both) if (name, a.name, b.name) not in known]
        if not left or time.monotonic() > end_s:
            return
        measured.fitted = build_profile(platform, measured.timed, measured.links, measured.contention)
        for name, a, b in left:
            if time.monotonic() > end_s:
                break
            self.progress(f"timing {name} shared by {a.name} and {b.name}")
            try:
                graph, two = load(name), platform.restrict([a.name, b.name])
                space = SegmentSpace(graph, two, branches=False)
                costs = chain_costs(two, CostModelSession(measured.fitted, two).part_costs(graph))
                plan = space.plan(SegmentModel(space, costs).greedy().parts)
                stage_s, reference_s = self.bench.time_plan(a, graph, plan)
            except (InfeasibleError, UnavailableError, UsageError) as error:  # also what cannot be rewritten
                self.progress(f"{name} is left out on {a.name} and {b.name}: {error.what}")
                continue
            found = Shared(name, (a.name, b.name), a.like, plan.to_json(), tuple(stage_s.tolist()), reference_s)
            self._keep("shared", found)

    def _keep(self, kind: str, value: Any) -> None:
        getattr(self.measured, _KINDS[kind][0]).append(value)
        self.log.append(kind, value.to_json() if kind == "timed" else asdict(value))

    def _kinds(self) -> list[Processor]:
        """Return a processor of each kind."""
        return [members[0] for members in self.bench.platform.classes().values()]

    def _networks(self, end_s: float) -> None:
        measured = self.measured
        fits: Fits = {}
        for number in range(MOST_NETS):
            for processor in self._kinds():
                mine = [t for t in measured.timed if t.like == processor.like and t.seed is not None]
                if len(mine) > number or (time.monotonic() > end_s and number >= _LEAST_NETS):
                    continue
                seed = next_network(mine, measured.refused[processor.like], fits=fits)
                self.progress(f"timing network {number + 1} on {processor.name}")
                try:
                    timed = self.bench.time(
                        processor, network(f"net{seed}", seed), apart=number % _APART == 0 or seed % TURNS in DEEP
                    )
                except UnavailableError as error:
                    measured.refused[processor.like] += 1
                    self.log.append("refused", {"like": processor.like, "seed": seed, "reason": error.what})
                    if measured.refused[processor.like] > _MOST_REFUSED:
                        raise
                    continue
                self._keep("timed", replace(timed, seed=seed))
            if time.monotonic() > end_s and number >= _LEAST_NETS:
                break

    def _pairs(self, end_s: float) -> None:
        """Time each pair of processors: transfers, and running at once if they can."""
        for pair in pairs(self.bench.platform):
            source, target = pair
            linked = any(is_of(link, *pair) for link in self.measured.links)
            likes = source.like, target.like
            crowded = source.excludes(target) or any((c.victim, c.other) == likes for c in self.measured.contention)
            if linked and crowded:
                continue
            if time.monotonic() > end_s:
                break
            if not linked:
                self.progress(f"timing transfers from {source.name} to {target.name}")
                self._keep("link", time_link(self.bench.session, self.bench.loaded, *pair))
            if not crowded:
                self.progress(f"timing {source.name} beside {target.name}")
                self._keep("contention", time_contention(self.bench.session, self.bench.loaded, *pair))


def _finish(
    measured: Measured, platform: Platform, out: Path, command: Sequence[str], *, interrupted: bool
) -> Calibration:
    try:
        profile = measured.fitted or build_profile(platform, measured.timed, measured.links, measured.contention)
    except ProfileError as error:
        if interrupted:
            raise KeyboardInterrupt("what was timed is kept; the same command goes on") from error
        raise
    profile = replace(
        profile,
        provenance={"command": list(command), **provenance(), "timings": len(measured.timed)},
        errors={
            **errors_on_models(profile, measured.timed),
            **_errors_on_shared(profile, platform, measured),
            REFERENCE: _reference_ms(measured),
        },
    )
    write_profile(out, profile, platform)
    return Calibration(profile, platform, out, interrupted)


def _reference_ms(measured: Measured) -> dict[str, dict[str, float]]:
    """Return percentiles of the reference network's times on each kind of processor, and their number."""
    found: dict[str, list[float]] = {}
    took = [(t.like, t.reference_s) for t in measured.timed] + [(s.like, s.reference_s) for s in measured.shared]
    for like, seconds in took:
        found.setdefault(like, []).append(1e3 * seconds)
    return {
        like: {f"p{q}": round(float(np.percentile(ms, q)), 6) for q in (10, 90)} | {"timings": len(ms)}
        for like, ms in found.items()
    }


def write_profile(out: Path, profile: CostProfile, platform: Platform, *, indent: int | None = 1) -> None:
    """Write a profile's file, whole or not at all.

    Raises:
        RunFolderError: it cannot be written.
    """
    separators = (",", ":") if indent is None else None
    text = json.dumps(
        to_json(profile, platform), indent=indent, separators=separators, ensure_ascii=False, allow_nan=False
    )
    write_atomic(out, (text + "\n").encode())


def refine(file: Path, run: Path) -> Calibration:
    """Scale each processor's prices, and set its cost of a stage, by the stages that a study measured on it.

    A profile by which the study's plans would be predicted worse is not written.

    Raises:
        ProfileError: the profile lacks processors of the study, or the study measured too little.
        RunFolderError: there is no finished study in that folder.
        UsageError: a file cannot be read, or the study is not one of measured latencies of one model.
    """
    profile, platform = read_profile(file)
    graph, runs = _run(run, platform)
    before = _predicted(profile, platform, graph, runs)
    rows = _stages(profile, platform, before, runs)
    if not any(len(of) >= LEAST_STAGES for of in rows.values()):
        raise ProfileError(
            f"{run}: measured {max(map(len, rows.values()), default=0)} stages on a processor of the profile",
            f"{LEAST_STAGES} or more are needed: give the study a larger --budget",
        )
    processors = dict(profile.processors)
    for key, of in rows.items():
        if len(of) >= LEAST_STAGES:
            processors[key] = _scaled(processors[key], of)
    refined = replace(profile, processors=processors)
    after = _predicted(refined, platform, graph, runs)
    measured = [measurement.median_s for _, measurement in runs]
    stages = [(plan, measurement.stage_s) for plan, measurement in runs]
    step: dict[str, Any] = {
        "run": run.name,
        "model": graph.name,
        "profile_digest": profile_digest(profile),
        "plans": len(measured),
        "before": errors_of([float(batch.latency_s[0]) for batch in before], measured),
        "after": errors_of([float(batch.latency_s[0]) for batch in after], measured),
        "parts": {
            when: {what: errors_of(*np.array(pairs).T) for what, pairs in _parts(batches, stages).items()}
            for when, batches in (("before", before), ("after", after))
        },
    }
    known: Any = profile.provenance.get("refined", ())
    refined = replace(
        refined,
        provenance={**profile.provenance, "refined": [*known, step]},
        errors={**profile.errors, "study": step["after"]},
    )
    if step["after"]["median"] > step["before"]["median"]:
        return Calibration(profile, platform, file, step=step)
    write_profile(file, refined, platform)
    return Calibration(refined, platform, file, step=step)


def _run(run: Path, platform: Platform) -> tuple[Graph, list[tuple[Plan, Measurement]]]:
    """Return a study's model, and each plan that was measured in full with its measurement."""
    manifest, result = finished_study(run)
    config = read_config(run)
    if "model" not in config:
        raise RunFolderError(f"{run / CONFIG}: is damaged: it names no model")
    if not result.get("complete"):
        raise RunFolderError(f"{run}: the study is not finished", resume_hint(run))
    if result.get("workload"):
        raise UsageError(f"{run}: a study of several models cannot refine a profile", "give a study of one model")
    if result.get("predicted"):
        raise UsageError(f"{run}: this study was predicted, not measured", "give a run that measured the device")
    if (objective := objective_of(result)) != LATENCY:
        raise UsageError(f"{run}: this study measured {objective.name}, not latency", "give a study of the latency")
    known = {p.name: f"{p.name} ({p.like})" for p in platform.processors}
    missing = [str(each) for each in manifest["fixed"].get("measured_on", ()) if each not in known.values()]
    if names := [name for each in missing if (name := each.partition(" (")[0]) not in known]:
        what = f"{run}: the study ran on {', '.join(names)}, too, and the profile has only {', '.join(known)}"
        raise ProfileError(what, "give a study with --processors of the profile's, or calibrate all of them")
    if missing:
        there = known[missing[0].partition(" (")[0]]
        what = f"{run}: the study's {missing[0]} is another processor than the profile's {there}"
        raise ProfileError(what, "give a study of the profile's device")
    (client,) = with_given((Client(str(config["model"]), str(config["model"])),), config)
    graph = load(client.model, tuple(config.get("input_shape") or ()), signature=client.signature)
    trials = [Trial.from_json(r.data) for r in read_log(run / LOG).records if r.kind in {"trial", "baseline"}]
    return graph, [
        (t.plan, t.measurement) for t in trials if t.measurement and not t.raced and t.measurement.cold == 1.0
    ]


def _predicted(
    profile: CostProfile, platform: Platform, graph: Graph, runs: Sequence[tuple[Plan, Measurement]]
) -> list[Batch]:
    """Return the prediction of each plan, with the seconds of its stages."""
    session = CostModelSession(profile, platform)
    return [session.load(graph, plan).one for plan, _ in runs]


def _stages(
    profile: CostProfile, platform: Platform, predicted: Sequence[Batch], runs: Sequence[tuple[Plan, Measurement]]
) -> Rows:
    """Return the stages to fit: not those that a join of a split counts to, which may run on another processor."""
    found: Rows = {}
    for (plan, measurement), batch in zip(runs, predicted, strict=True):
        calls = Counter(event.stage for event in batch.timeline.events) if batch.timeline else Counter()
        for index, stage in enumerate(plan.stages):
            key, measured = profile_key(profile, platform[stage.processor]), measurement.stage_s[index]
            if measured > 0 and calls[index] == 1:
                found.setdefault(key, []).append((batch.stage_s[0, index] - profile[key].invocation_s, measured))
    return found


def _parts(
    predicted: Sequence[Batch], runs: Sequence[tuple[Plan, Sequence[float]]]
) -> dict[str, list[tuple[float, float]]]:
    """Return predicted and measured seconds of stages, and of what several processors share: of its longest side.

    Args:
        runs: each plan with the measured seconds of its stages.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for (plan, stage_s), batch in zip(runs, predicted, strict=True):
        sides: dict[tuple[int, ...], list[int]] = {}
        for index, stage in enumerate(plan.stages):
            sides.setdefault(stage.operators, []).append(index)
        for of in sides.values():
            pair = float(batch.stage_s[0, of].max()), max(stage_s[i] for i in of)
            if pair[1] > 0:
                found.setdefault("stages" if len(of) == 1 else SHARED, []).append(pair)
    return found


def _errors_on_shared(profile: CostProfile, platform: Platform, measured: Measured) -> dict[str, Any]:
    """Return the errors on operators that two processors share, by the names of the two."""
    session, found = CostModelSession(profile, platform), dict[str, list[tuple[float, float]]]()
    for each in measured.shared:
        usual_s = usual_reference_s([t for t in measured.timed if t.like == each.like])
        plan = Plan.from_json(each.plan)
        took = plan, [s * usual_s / each.reference_s for s in each.stage_s]
        parts = _parts([session.load(load(each.name), plan).one], [took])
        found.setdefault(" and ".join(each.on), []).extend(parts.get(SHARED, []))
    return {SHARED: {on: errors_of(*np.array(pairs).T) for on, pairs in found.items() if pairs}} if found else {}


def _scaled(processor: ProcessorProfile, rows: Sequence[tuple[float, float]]) -> ProcessorProfile:
    """Return a processor scaled by the factor and the constant that fit the measured stages best."""
    predicted, measured = np.array(rows).T
    table = np.stack([predicted, np.ones_like(predicted)], axis=1)
    factor, invocation = map(float, nonnegative_prices(table, measured))
    if factor <= 0:
        return processor
    kernels = {
        key: replace(model, prices={name: price * factor for name, price in model.prices.items()})
        for key, model in processor.kernels.items()
    }
    return replace(
        processor,
        kernels=kernels,
        dispatch_s=processor.dispatch_s * factor,
        io_s_per_byte=processor.io_s_per_byte * factor,
        far_call_s=processor.far_call_s * factor,
        invocation_s=invocation,
    )


def render(found: Calibration) -> str:
    """Return the profile's path and its errors, in lines; of a refinement the errors on the study's plans."""
    if found.step is not None:
        before, after = found.step["before"], found.step["after"]
        worse = after["median"] > before["median"]
        refined = f"{'not ' * worse}refined by the study {found.step['run']} of {plain_name(found.step['model'])}"
        lines = [f"{found.out}: {refined}"]
        for when in ("before", "after"):
            lines.append(f"{when}: its plans {_errors(found.step[when])}")
            lines += [f"{when}: {what} {_errors(errors)}" for what, errors in found.step["parts"][when].items()]
        if worse:
            lines.append("warning: the profile stays as it was, since it would predict these plans worse")
        elif after["kendall"] < before["kendall"]:
            lines.append("warning: the refined profile orders these plans worse; refine it by a study of more plans")
        return "\n".join(lines)
    processors = {like: "/".join(p.name for p in members) for like, members in found.platform.classes().items()}
    lines = [
        f"{found.out}: {', '.join(processors.get(k, k) for k in found.profile.processors)} of {found.platform.name}"
    ]
    for like, errors in found.profile.errors.items():
        if not isinstance(errors, Mapping) or "models" not in errors:
            continue
        who = processors.get(like, like)
        lines.append(f"{who}: models kept out of the fit {_errors(errors['models'])}")
        if errors.get("operators"):
            lines.append(f"{who}: their operators {_errors(errors['operators'])}")
    shared: Mapping[str, Any] = found.profile.errors.get(SHARED, {})
    lines += [f"operators that {on} share {_errors(errors)}" for on, errors in shared.items()]
    if len(lines) > 1 and not shared and any(not a.excludes(b) for a, b in pairs(found.platform)):
        lines.append("operators that processors share were not timed; give it more --minutes")
    regret = found.profile.errors.get("regret")
    if isinstance(regret, Mapping):
        lines.append(
            f"choosing a processor by it costs {percent(regret['mean'], 1)} on average, "
            f"at most {percent(regret['most'], 1)}"
        )
    if len(lines) == 1:
        lines.append("no model was kept out of the fit, so its errors are not known; give it more --minutes")
    for like, took_ms in found.profile.errors.get(REFERENCE, {}).items():
        if took_ms["timings"] >= _SURE_TIMINGS and took_ms["p90"] > _DISTURBED * took_ms["p10"]:
            lines.append(
                f"warning: one network took {took_ms['p10']:.3g} to {took_ms['p90']:.3g} ms on "
                f"{processors.get(like, like)} (10th to 90th percentile): others used the machine, or its clock "
                "changed; a calibration in a quiet hour, with another --out, predicts better"
            )
    return "\n".join(lines)


def _errors(errors: Mapping[str, Any]) -> str:
    return (
        f"({errors['cases']:.0f}): median error {percent(errors['median'], 1)}, 90th percentile "
        f"{percent(errors['p90'], 1)}; "
        f"within 10 %: {percent(errors['within_10'])}; rank correlation {errors['kendall']:.2f}"
    )
