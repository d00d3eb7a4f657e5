"""``--warm-start RUN``: what an earlier study knows of this one.

Of the same model on the same device, everything that was measured is taken over: the operators' times, and every plan
with its stages; none of it is measured again, and it costs no budget. The last comparison is made anew in any case. Of
another model or device the best plans are carried over: cuts to where the same share of the work is done, processors
to those of the same name, or else of the same kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from optimizer.config import StudyConfig
from optimizer.history import History, Trial
from optimizer.profile import Profile
from optimizer.provenance import provenance
from optimizer.report.data import Study, read_study
from optimizer.run import RunFolder
from search_spaces.chain import chain_plan
from search_spaces.errors import PlanError
from search_spaces.graph import Graph
from search_spaces.intensity import operator_costs
from search_spaces.plan import Plan, canonical
from search_spaces.platform import Platform

ORIGIN = "warm start"
_CARRIED = 6
_MACHINE = ("cpu", "architecture", "cores", "usable_cores", "memory_bytes")


@dataclass(frozen=True, slots=True)
class Warm:
    """What is taken over.

    Attributes:
        trials: measured plans of this very model on this very device; numbered -1, since they cost no budget.
        profile: the operators' times, of the same.
        plans: what the best plans of another model or device become here, the best first.
        told: what was taken over, in words.
    """

    trials: tuple[Trial, ...]
    profile: Profile | None
    plans: tuple[Plan, ...]
    told: str


def begin_warm(
    config: StudyConfig, graph: Graph, platform: Platform, run: RunFolder, history: History, tell: Callable[[str], None]
) -> Warm | None:
    """Take over what an earlier study knows, into the log of one that begins; one that goes on has done so.

    Raises:
        RunFolderError: there is no finished study in the folder.
    """
    if config.warm_start is None:
        return None
    warm = warm_start(config.warm_start, config, graph, platform, config.evaluator)
    if not run.resumed:
        tell(warm.told)
        for trial in warm.trials:
            run.log.append("baseline", trial.to_json())
            history.add_outside(trial)
    return warm


def warm_start(run: Path, config: StudyConfig, graph: Graph, platform: Platform, evaluator: str) -> Warm:
    """Return what a finished study knows of one that begins.

    Raises:
        RunFolderError: there is no finished study in the folder.
    """
    study = read_study(run)
    other = _difference(study, config, graph, platform, evaluator)
    if not other:
        known = {t.plan.digest: t for t in study.trials if t.measurement is not None}
        trials = tuple(replace(t, number=-1, origin=ORIGIN, params={}, attributes={}) for t in known.values())
        return Warm(trials, study.profile, (), f"{len(trials)} plans and the operators' times are known from {run}")
    plans = carried(study, graph, platform)
    return Warm((), None, plans, f"{len(plans)} plans are carried over from {run}, which is of {other}")


def _difference(study: Study, config: StudyConfig, graph: Graph, platform: Platform, evaluator: str) -> str:
    """Return what is different about an earlier study, so that its numbers are not ours; "" where nothing is."""
    if study.manifest["fixed"].get("model_digest") != graph.digest:
        return "another model"
    if study.manifest["fixed"].get("objective", "latency") != ",".join(config.objective):
        return "another objective"
    if study.result["evaluator"] != evaluator:
        return "another evaluator"
    if study.result["platform"]["processors"] != json.loads(json.dumps(platform.to_json()["processors"])):
        return "another platform"
    mine, theirs = provenance(), study.manifest
    if any(mine["machine"][name] != theirs.get("machine", {}).get(name) for name in _MACHINE):
        return "another machine"
    runtime = "ai-edge-litert"
    if mine["packages"][runtime] != theirs.get("packages", {}).get(runtime):
        return f"another version of {runtime}"
    return ""


def carried(study: Study, graph: Graph, platform: Platform) -> tuple[Plan, ...]:
    """Return what the best plans of a study become on another graph or platform, the best first."""
    before = _shares(study.graph) if study.graph is not None else None
    after = _shares(graph)
    lanes = _lanes(study.platform, platform)
    ranked = sorted((t for t in study.trials if t.measurement is not None), key=lambda t: t.median_s)
    found: dict[str, Plan] = {}
    for trial in ranked:
        borders = [stage.operators[0] for stage in trial.plan.stages[1:]]
        ends = [stage.operators[-1] + 1 for stage in trial.plan.stages[:-1]]
        if borders != ends or any(s.share is not None for s in trial.plan.stages):
            continue  # parts that do not follow each other, or are split, mean nothing elsewhere
        total = trial.plan.stages[-1].operators[-1] + 1
        shares = [before[b] if before is not None else b / total for b in borders]
        cuts = [_nearest(after, share) for share in shares]
        names = [lanes[stage.processor] for stage in trial.plan.stages]
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
    """Return which share of the multiply-accumulates is done before each operator, and 1 at the end."""
    work = [cost.macs + 1 for cost in operator_costs(graph)]
    total = sum(work)
    return [0.0, *(done / total for done in accumulate(work))]


def _nearest(shares: Sequence[float], wanted: float) -> int:
    """Return the operator before which about the wanted share of the work is done."""
    return min(range(1, len(shares)), key=lambda i: abs(shares[i] - wanted))


def _lanes(before: Platform, after: Platform) -> dict[str, str]:
    """Return a processor for each of another platform: of its name, or else the next of its kind."""
    names = [p.name for p in after.processors]
    found: dict[str, str] = {}
    for processor in before.processors:
        alike: Sequence[str] = [p.name for p in after.processors if p.kind == processor.kind] or names
        earlier = sum(p.kind == processor.kind for p in before.processors[: before.processors.index(processor)])
        found[processor.name] = processor.name if processor.name in names else alike[earlier % len(alike)]
    return found
