"""Why the plan of several models is what it is: what each job would cost elsewhere, and how busy processors are.

All alternatives are predicted, by the prices that the study measured or that its evaluator knows. An explanation is the
document of ``--json``, with times in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from evaluators.workload.outcome import Objective, Outcome
from evaluators.workload.predicted import WorkloadSimulator
from optimizer.console import describe_operators
from optimizer.report.data import read_result
from optimizer.report.document import Block, Column, Table, Text, headed
from optimizer.run import LOG
from optimizer.storage import read_log
from optimizer.tools.execute import ReloadedWorkload, reloaded_workload
from search_spaces.arrangement import jobs_of
from search_spaces.errors import OptimizeError, RunFolderError
from search_spaces.plan import Plan

SCHEMA_VERSION = 1
Document = dict[str, Any]


def explain_workload(run: Path) -> Document:
    """Explain the plan of a finished study of several models.

    Raises:
        RunFolderError: it is no finished study, or its prices are not in its log.
        UnavailableError: its evaluator cannot be opened here.
    """
    outcomes = read_result(run)["workload"]["outcomes"]
    priced = [record.data for record in read_log(run / LOG).records if record.kind == "prices"]
    if not priced:
        raise RunFolderError(f"{run}: its log holds no prices of jobs", "explain a finished study")
    with reloaded_workload(run) as found:
        found.session.price(priced[-1], lambda _: None)
        simulator, objective = found.session.simulator, found.problem.objective
        key, best = f"{objective}_ms", simulator.run(found.plan)
        best_ms = best.value_s(objective) * 1e3
        return {
            "schema_version": SCHEMA_VERSION,
            "run_dir": str(run),
            "objective": objective,
            "best": {"predicted_ms": best_ms, "measured_ms": outcomes["best"].get(key)},
            "dispatch_predicted_ms": {
                name: simulator.run(replace(found.plan, dispatch=name)).value_s(objective) * 1e3
                for name in ("fifo", "priority", "edf")
            },
            "busy": _busy(best),
            "jobs": list(_jobs(found, simulator, best_ms)),
            "baselines": {
                b.name: {
                    "measured_ms": outcomes.get(b.name, {}).get(key),
                    "predicted_ms": _predicted_ms(simulator, b.plan, objective),
                }
                for b in found.problem.baselines
            },
        }


def _busy(found: Outcome) -> dict[str, float]:
    """Return for which share of the makespan each processor works, the busiest first."""
    spent: dict[str, float] = {}
    for event in found.timeline.events:
        spent[event.lane] = spent.get(event.lane, 0.0) + event.end_s - event.start_s
    return dict(sorted(((lane, s / found.makespan_s) for lane, s in spent.items()), key=lambda each: -each[1]))


def _jobs(found: ReloadedWorkload, simulator: WorkloadSimulator, best_ms: float) -> Iterator[Document]:
    """Yield the jobs of each instance, with the change of the objective were one elsewhere; None: it cannot run."""
    problem, plan = found.problem, found.plan
    for index, stages in jobs_of(plan, problem.joined).items():
        component = problem.joined.components[index]
        for number in stages:
            stage = plan.stages[number]
            elsewhere: dict[str, float | None] = {}
            for name in (p.name for p in problem.space.platform.processors if p.name != stage.processor):
                moved = list(plan.stages)
                moved[number] = replace(stage, processor=name)
                took_ms = _predicted_ms(simulator, replace(plan, stages=tuple(moved)), problem.objective)
                elsewhere[name] = None if took_ms is None else took_ms - best_ms
            yield {
                "instance": component.name,
                "operators": describe_operators(component.graph, component.own(stage.operators)),
                "processor": stage.processor,
                "elsewhere_predicted_more_ms": elsewhere,
            }


def _predicted_ms(simulator: WorkloadSimulator, plan: Plan, objective: Objective) -> float | None:
    try:
        return simulator.run(plan).value_s(objective) * 1e3
    except OptimizeError:
        return None


def head(found: Document) -> str:
    """Return what is explained."""
    return f"{found['run_dir']}: {found['objective']} of several models"


def blocks(found: Document) -> Iterator[Block]:
    """Yield the explanation as blocks of a report."""
    busy, (predicted_ms, measured_ms) = found["busy"], found["best"].values()
    measured = "not measured" if measured_ms is None else f"measured: {measured_ms:.4g} ms"
    yield Text(
        f"Objective: {found['objective']}; predicted for this plan: {predicted_ms:.4g} ms; {measured}. "
        "All changes below are predicted."
    )
    busiest = max(busy, key=lambda name: busy[name])
    yield Text(f"The busiest processor is {busiest}: it works for {busy[busiest]:.0%} of the makespan.")
    yield Table("How busy processors are", headed("processor; busy|.0%"), tuple(busy.items()))
    change = Column("change, ms", "+.4g")
    rows = tuple(
        (job["instance"], job["operators"], job["processor"], name, more, "" if more is not None else "does not run")
        for job in found["jobs"]
        for name, more in job["elsewhere_predicted_more_ms"].items()
    )
    columns = headed("model; job; on; moved to", change, "remark")
    yield Table("What each job would cost elsewhere", columns, rows)
    orders = tuple((name, value_ms - predicted_ms) for name, value_ms in found["dispatch_predicted_ms"].items())
    yield Table("Other orders of the queue", headed("jobs are taken by", change), orders)
    yield Table(
        "What else a person would have tried",
        headed("plan; measured, ms|.4g; predicted, ms|.4g"),
        tuple((name, each["measured_ms"], each["predicted_ms"]) for name, each in found["baselines"].items()),
    )
