"""The answer of a study of several models, for a terminal: plans against each other, then model by model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from optimizer.report.terminal import table, tried_text
from search_spaces.core.decoded_plan import jobs_of
from search_spaces.core.plan import runs_of

if TYPE_CHECKING:
    from optimizer.workload.result import WorkloadResult
    from search_spaces.core.plan import Stage

_FIGURES = (("mean", "mean_ms"), ("worst", "worst_ms"), ("makespan", "makespan_ms"), ("per s", "throughput_per_s"))
_MOST_JOBS = 24


def workload_head(result: WorkloadResult) -> Text:
    """Return what was searched, and for what."""
    count = len(result.workload.instances)
    names = ", ".join(p.name for p in result.platform.processors if p.resources)
    return Text(
        f"{result.workload.name}: {count} models at once on {names}, for the {result.objective.title}; "
        f"{tried_text(result)}"
    )


def outcomes_table(result: WorkloadResult) -> Table:
    """Return latencies, makespan and throughput of the best plan and of each baseline."""
    late, objective = result.workload.deadlines, result.objective
    own = objective.name not in {"mean", "worst", "makespan", "misses", "throughput"}
    heads = [name if name == "per s" else f"{name}, ms" for name, _ in _FIGURES]
    heads += [*(["missed"] if late else []), *([f"{objective.name}, {objective.shown}"] if own else [])]
    if not result.predicted:
        heads.append(f"predicted, {objective.shown}")
    made = table(("plan", *(f">{head}" for head in heads)))
    for name, entry in result.outcomes.items():
        row = [_number(entry[key]) for _, key in _FIGURES]
        if late:
            row.append(f"{entry['misses']:.0f} of {entry['requests']:.0f}")
        plan = result.best if name == "best" else result.baselines[name]
        if own:
            samples = result.samples(plan) if plan is not None else None
            row.append(_number(samples.median * 1e3 if samples else None))
        if not result.predicted:
            predicted = entry.get("predicted")
            row.append(_number(predicted["objective"]) if predicted else "")
        made.add_row(Text(name, style="bold" if name == "best" else ""), *row)
    for name, plan in result.baselines.items():
        trial = result.history.known.get(plan.digest)
        if name not in result.outcomes:
            made.add_row(Text(name), Text(trial.failure if trial else "not tried (budget)"))
    return made


def jobs_table(result: WorkloadResult) -> Table:
    """Return the best plan, model by model in the order in which they go first."""
    plan = result.best
    title = "best plan" if plan is None else f"best plan: requests are served {_ORDERS[plan.dispatch]}"
    listed: list[tuple[str, ...]] = []
    times: dict[str, Any] = result.outcomes.get("best", {}).get("instances_ms", {})
    shown = list(jobs_of(plan, result.joined).items()) if plan is not None else []
    for place, (index, stages) in enumerate(shown[:_MOST_JOBS], 1):
        component = result.joined.components[index]
        rows = (
            (replace(plan.stages[s], operators=component.own(plan.stages[s].operators)) for s in stages) if plan else ()
        )
        listed.append((str(place), component.name, _jobs(rows), _number(times.get(component.name))))
    if len(shown) > _MOST_JOBS:
        listed.append(("…", f"{len(shown) - _MOST_JOBS} more models", "", ""))
    return table((">order", "model", "stages: operators on processor", ">ms"), listed, title)


def _jobs(stages: Iterable[Stage]) -> str:
    """Return stages in words; sides of a split, which follow each other, are one job on two processors."""
    found: list[str] = []
    split: tuple[int, ...] = ()
    for stage in stages:
        where = stage.processor if stage.share is None else f"{stage.processor} ({stage.share})"
        if stage.share is not None and stage.operators == split:
            found[-1] += f" and {where}"
            continue
        split = stage.operators if stage.share is not None else ()
        runs = (
            f"{first} to {last - 1}" if last - first > 1 else f"{first}" for first, last in runs_of(stage.operators)
        )
        found.append(f"{', '.join(runs)} on {where}")
    return "; ".join(found)


def tucker_lines(result: WorkloadResult) -> list[Text]:
    """Return a line for each model that might be decomposed: how far it is in the best plan."""
    lines = []
    for name, entry in result.tucker.items():
        allowed = f"{entry['max_error']:g} allowed"
        if entry["ranks"]:
            count = len(entry["ranks"])
            what = f"{count} convolution{'s run' if count > 1 else ' runs'} as Tucker-2 triples"
            known = "off by" if entry["error_measured"] else "expected to be off by"
            off = "" if entry["error"] is None else f", outputs {known} {entry['error']:.2g}"
            saved = f"{what}: {entry['macs_saved']:.1%} fewer multiply-accumulates{off}"
            lines.append(Text(f"{name}: {saved} ({allowed})"))
        elif not entry["decomposable"]:
            lines.append(Text(f"{name}: as it is, it cannot be decomposed"))
        elif entry["variants"]:
            lines.append(Text(f"{name}: as it is, {entry['variants']} ways to decompose it were searched ({allowed})"))
        else:
            lines.append(Text(f"{name}: as it is, no way to decompose it saves time within its error ({allowed})"))
    return lines


_ORDERS = {
    "fifo": "first come, first served",
    "priority": "by priority, then the oldest request first",
    "edf": "the earliest deadline first",
    "static": "in a fixed order",
}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
