"""``--warm-start RUN``: reuses the measurements and plans of an earlier study.

From the same model on the same device, all measurements are taken over: the operators' times, and every plan with its
stages; none of it is measured again or costs budget. Only new processors are timed. If figures mean something else, as
with another objective, the operators' times are taken over and the best plans are measured again. The final is always
measured again. From another model or device the best plans are carried over: cuts to the same share of the work,
processors to those of the same name, or else of the same kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluators.base import Session
from evaluators.objectives import OBJECTIVES
from evaluators.registry import make_evaluator
from optimizer.model.goals import needed
from optimizer.model.profile import Profile
from optimizer.provenance import provenance
from optimizer.report.data import Study, read_study
from optimizer.study.config import StudyConfig
from optimizer.study.folder import LOG
from optimizer.study.history import WARM, Trial
from optimizer.study.limits import allowed_error
from optimizer.study.log import read_log
from search_spaces.core.errors import PlanError, RunFolderError
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs
from search_spaces.core.plan import Plan, canonical
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.wording import plural
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.registry import freedoms_of

if TYPE_CHECKING:
    from optimizer.study import course
    from optimizer.study.subjects import Subject

TAKEN = "taken"
"""Kind of the log record that a warm start is complete; it holds the plans that were carried over."""

PRICES = "prices"
"""Kind of the log record of the prices of jobs of several models."""

_CARRIED = 6
_MACHINE = ("cpu", "architecture", "cores", "usable_cores", "memory_bytes")
_PASSING = ("platform", "kernel")  # not compared: processors are, one by one; a kernel's update makes no other device
_RUNTIME = "ai-edge-litert"


@dataclass(frozen=True, slots=True)
class Known:
    """Costs that an earlier study measured on unchanged processors.

    Attributes:
        what: the kind of costs, in words.
        profile: the operators' times; None of several models.
        complete: whether the profile covers all processors.
        prices: of jobs of several models.
    """

    what: str
    profile: Profile | None = None
    complete: bool = False
    prices: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Warm:
    """Data taken over from an earlier study.

    Attributes:
        trials: measured plans of the same model on the same device; numbered -1, since they cost no budget.
        plans: the best plans carried over that are not among the trials, the best first.
        summary: what was reused, in words.
        known: costs; None from another model or device.
    """

    trials: tuple[Trial, ...]
    plans: tuple[Plan, ...]
    summary: str
    known: Known | None = None


def fingerprint_of(session: Session) -> dict[str, Any]:
    """Return everything that may change a figure of a session, as logged."""
    found: dict[str, Any] = json.loads(json.dumps(session.fingerprint(), default=str))
    return found


def begin_warm(study: course.Study, session: Session) -> Warm | None:
    """Copy data of an earlier study into the log of a new one; into a resumed one, what it lacks.

    Done once and logged, so that this study does not change if the earlier one goes on. A study lacks data if it began
    without a warm start, or was killed before all was copied. The log also gets the device, for later studies. Workers
    of a shared study get the measured plans from the storage.

    Args:
        session: on the device as it is.

    Raises:
        RunFolderError: there is no finished study in the folder.
    """
    run, history, earlier = study.run, study.history, study.config.warm_start
    known = [record.data for record in run.contents.records if record.kind == "device"]
    now = fingerprint_of(session)
    if changed := _changed(known[-1], now) if known else "":
        study.watcher.warn(f"since the study was last run, the device changed: another {changed}")
    if changed or not known:
        run.log.append("device", now)
    if earlier is None:
        return None
    warm = warm_start(earlier, now, study.subject)
    source = str(earlier.resolve())
    taken = [r.data for r in run.contents.records if r.kind == TAKEN and r.data.get("run") == source]
    if taken:
        return replace(warm, trials=(), plans=tuple(map(Plan.from_json, taken[-1]["plans"])))
    lacking = [t for t in warm.trials if t.plan.digest not in history.known]
    if lacking or not run.resumed:
        study.watcher.message(warm.summary)
    for trial in lacking:
        if study.shared is None:
            run.log.append("baseline", trial.to_json())
            history.add_outside(trial)
        elif (claim := study.shared.claim(trial.plan.digest, "baseline", {}, {})) is not None:
            study.shared.finish(claim, {**trial.to_json(), "values": history.value_of(trial)})
    run.log.append(TAKEN, {"run": source, "plans": [plan.to_json() for plan in warm.plans]})
    return warm


def warm_start(run: Path, fingerprint: Mapping[str, Any], of: Subject) -> Warm:
    """Return the data that a finished study has for a new one.

    Args:
        fingerprint: from :func:`fingerprint_of`.

    Raises:
        RunFolderError: there is no finished study in the folder.
    """
    study, config = read_study(run), of.config
    other = _other_device(study, config, of.digest, fingerprint)
    before = {p.name: _plain(p) for p in study.platform.processors}
    same = [p.name for p in of.processors if before.get(p.name) == _plain(p)]
    known, plans = None if other else of.known(study, same), of.carried(study)
    best = plural(len(plans), "best plan")
    if known is None:
        return Warm((), plans, f"{run} is of {other or 'other processors'}: its {best} will be measured here")
    if numbers := _other_numbers(study, config):
        why = f"because it has {numbers}"
        return Warm((), plans, f"{known.what} reused from {run}; its {best} will be measured again, {why}", known)
    trials = _known_trials(study, of, same)
    digests = {t.plan.digest for t in trials}
    changed = len(same) < len(of.processors) or len(same) < len(before)
    left = tuple(p for p in plans if p.digest not in digests) if changed else ()
    summary = f"{plural(len(trials), 'plan')} and the {known.what} reused from {run}"
    return Warm(trials, left, summary, known)


def earlier_times(
    study: Study, same: Sequence[str], config: StudyConfig, graph: Graph, platform: Platform
) -> Known | None:
    """Return the operators' times on unchanged processors; None where there are none.

    Args:
        same: the names of these processors.

    Raises:
        RunFolderError: they are not those of the model.
    """
    if not same:
        return None
    before = {p.name: p for p in study.platform.processors}
    likes = {platform[name].like: before[name].like for name in reversed(same)}
    found = study.profile.of(likes) if study.profile is not None else None
    if found is not None and any(len(row) != len(graph.operators) for row in found.operator_s.values()):
        raise RunFolderError(
            f"{study.path}: damaged: its operators' times are not those of its model", "warm-start from another"
        )
    complete = found is not None and found.knows(platform) and _same_space(study, config)
    return Known("operator times", found, complete)


def _same_space(study: Study, config: StudyConfig) -> bool:
    """Return whether an earlier study also measured the joins or triples that this one needs."""
    same = study.config.get("allow", "cuts") == config.allow
    return same and ("ranks" not in freedoms_of(config.allow) or study.config.get("max_error") == config.max_error)


def _known_trials(study: Study, of: Subject, same: Sequence[str]) -> tuple[Trial, ...]:
    """Return the measured plans on unchanged processors that have all figures of this study."""
    config, measured = of.config, measured_trials(study)
    figures = {*config.objective[1:], *needed(config)}
    # Some evaluators compare no outputs; the others skip plans that lost their race.
    compared = any(t.measurement.agreement is not None for t in measured if t.measurement)
    asked = compared and allowed_error(config) is not None
    found: dict[str, Trial] = {}
    for trial in measured:
        here, known = of.here(trial.plan, study, same), trial.measurement
        if known is None or here is None:
            continue
        if not figures <= known.figures.keys() or (asked and known.agreement is None):
            continue
        known = known if here == trial.plan else replace(known, timeline=None)
        found[here.digest] = replace(
            trial, number=-1, plan=here, origin=WARM, params={}, attributes={}, measurement=known
        )
    return tuple(found.values())


def earlier_prices(study: Study) -> Known:
    """Return the prices of jobs of several models."""
    records = read_log(study.path / LOG).records
    prices = next((r.data for r in reversed(records) if r.kind == PRICES), None)
    return Known("job times", prices=prices)


def measured_trials(study: Study) -> Sequence[Trial]:
    """Return one trial of each plan that a study has measured."""
    return list({t.plan.digest: t for t in study.trials if t.measurement is not None}.values())


def best_plans(study: Study, holds: Callable[[Plan], bool]) -> tuple[Plan, ...]:
    """Return the best plans of a study of the same models, among those that can be measured here."""
    measured = [t for t in measured_trials(study) if holds(t.plan)]
    return tuple(t.plan for t in sorted(measured, key=lambda t: t.median_s))[:_CARRIED]


def _allowed(plan: Plan, config: StudyConfig) -> bool:
    """Return whether a plan splits operators or decomposes convolutions only where this study's plans may."""
    freedoms = freedoms_of(config.allow)
    needs = ["splits"] * plan.is_split + ["ranks"] * bool(plan.ranks)
    return not freedoms or freedoms.issuperset(needs)


def moved_here(
    plan: Plan, study: Study, same: Sequence[str], config: StudyConfig, graph: Graph, platform: Platform
) -> Plan | None:
    """Return a plan on identical processors here, in canonical form; None where the new study has none like it.

    Args:
        same: the names of unchanged processors.
    """
    moved = _on_processors(plan, study.platform, same)
    if moved is None or not _allowed(moved, config):
        return None
    here = canonical(moved, graph, platform)  # it may have another name where other processors are alike
    return here if [s.operators for s in here.stages] == [s.operators for s in moved.stages] else None


def _on_processors(plan: Plan, platform: Platform, processors: Sequence[str]) -> Plan | None:
    """Return a plan moved to identical processors among those allowed; None where there are none."""
    used = dict.fromkeys(stage.processor for stage in plan.stages)
    names = {processor: processor for processor in used if processor in processors}
    for processor in used:
        alike = platform.classes()[platform[processor].like]
        free = [p.name for p in alike if p.name in processors and p.name not in names.values()]
        if processor not in names and not free:
            return None
        names.setdefault(processor, free[0] if free else processor)
    return replace(plan, stages=tuple(replace(s, processor=names[s.processor]) for s in plan.stages))


def _plain(processor: Processor) -> Any:
    """Return a processor's own properties, without the names of those that are like it."""
    described = [processor.kind, dict(processor.resources), dict(processor.options), processor.slots]
    return json.loads(json.dumps(described))


def _other_device(study: Study, config: StudyConfig, digest: str, fingerprint: Mapping[str, Any]) -> str:
    """Return the difference between an earlier study's device and this one, in words; "" for none."""
    if study.manifest["fixed"].get("model_digest") != digest:
        return "another model"
    if study.result.get("evaluator") != config.evaluator:
        return "another evaluator"
    if study.config.get("device") != config.device:
        return "another device"
    if bool(study.config.get("allow_fallback")) != config.allow_fallback:
        return "another --allow-fallback"
    mine, theirs = provenance(), study.manifest
    if make_evaluator(config.evaluator).capabilities.measures_here:
        if any(mine["machine"][name] != theirs.get("machine", {}).get(name) for name in _MACHINE):
            return "another machine"
        if mine["packages"][_RUNTIME] != theirs.get("packages", {}).get(_RUNTIME):
            return f"another version of {_RUNTIME}"
    changed = _changed(study.device, fingerprint) if study.device else ""
    return f"another device: {changed} is not what it was" if changed else ""


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the first part in which two fingerprints are of different devices; "" for none."""
    old, new = _lasting(before), _lasting(now)
    names = (name for name in sorted({*old, *new}) if old.get(name) != new.get(name))
    return next(names, "").replace("_", " ")


def _lasting(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a fingerprint that identify the device; a remote one's is nested in ours."""
    return {
        name: _lasting(value) if isinstance(value, Mapping) else value
        for name, value in fingerprint.items()
        if name not in _PASSING
    }


def _other_numbers(study: Study, config: StudyConfig) -> str:
    """Return why figures of an earlier study differ in meaning from ours; "" where they do not."""
    then = study.config
    if str(study.manifest["fixed"].get("objective", "latency")).split(",")[0] != config.objective[0]:
        return "another objective"
    states = (list(then.get("state") or ()), then.get("robust", "worst"))
    if states[0] != list(config.state) or (config.state and states[1] != config.robust):
        return "other states of the platform"
    names = {*config.objective, *needed(config)}
    of_powers = any(OBJECTIVES[name].of_powers for name in names if name in OBJECTIVES)
    if of_powers and list(then.get("power") or ()) != list(config.power):
        return "other powers"
    return ""


def carried(study: Study, graph: Graph, platform: Platform) -> tuple[Plan, ...]:
    """Return the best plans of a study, carried over to another graph or platform, the best first."""
    before = _shares(study.graph) if study.graph is not None else None
    after = _shares(graph)
    processors = _processors(study.platform, platform)
    ranked = sorted((t for t in study.trials if t.measurement is not None), key=lambda t: t.median_s)
    found: dict[str, Plan] = {}
    for trial in ranked:
        if not trial.plan.is_chain:
            continue  # only chains of whole stages can be carried over
        borders = [stage.operators[0] for stage in trial.plan.stages[1:]]
        total = trial.plan.stages[-1].operators[-1] + 1
        shares = [before[b] if before is not None else b / total for b in borders]
        cuts = [_nearest(after, share) for share in shares]
        names = [processors[stage.processor] for stage in trial.plan.stages]
        kept = [i for i, cut in enumerate(cuts) if cut < len(graph.operators) and cut not in cuts[:i]]
        try:
            plan = canonical(
                chain_plan(graph, [cuts[i] for i in kept], [names[0], *(names[i + 1] for i in kept)]), graph, platform
            )
        except PlanError:
            continue
        found.setdefault(plan.digest, plan)
        if len(found) == _CARRIED:
            break
    return tuple(found.values())


def _shares(graph: Graph) -> list[float]:
    """Return the share of multiply-accumulates before each operator, and 1 at the end."""
    work = [cost.macs + 1 for cost in operator_costs(graph)]
    total = sum(work)
    return [0.0, *(done / total for done in accumulate(work))]


def _nearest(shares: Sequence[float], wanted: float) -> int:
    """Return the operator before which about the given share of the work lies."""
    return min(range(1, len(shares)), key=lambda i: abs(shares[i] - wanted))


def _processors(before: Platform, after: Platform) -> dict[str, str]:
    """Map each processor of another platform to one of the same name, or else of the same kind."""
    names = [p.name for p in after.processors]
    found: dict[str, str] = {}
    for processor in before.processors:
        alike: Sequence[str] = [p.name for p in after.processors if p.kind == processor.kind] or names
        earlier = sum(p.kind == processor.kind for p in before.processors[: before.processors.index(processor)])
        found[processor.name] = processor.name if processor.name in names else alike[earlier % len(alike)]
    return found
