"""Why the plan of several models is what it is: what each job would cost elsewhere, and how busy processors are.

All alternatives are predicted, by the prices that the study measured or that its evaluator knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evaluators.workload.outcome import Objective, Outcome
from evaluators.workload.predicted import WorkloadSimulator
from optimizer.console import describe_operators
from optimizer.execute_hosted import ReloadedWorkload, reloaded_workload
from optimizer.report.data import read_result
from optimizer.report.document import Block, Column, Table, Text
from optimizer.run import LOG
from optimizer.storage import read_log
from search_spaces.arrangement import jobs_of
from search_spaces.errors import OptimizeError, RunFolderError
from search_spaces.plan import Plan

SCHEMA_VERSION = 1
_PRICES = "prices"


@dataclass(frozen=True, slots=True)
class Job:
    """One job of an instance.

    Attributes:
        elsewhere: processor or pool → by how many seconds the objective would change with the job there; None where it
            does not run.
    """

    instance: str
    operators: str
    processor: str
    elsewhere: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class WorkloadExplanation:
    """Why this plan of several models.

    Attributes:
        dispatches: the objective by the order in which jobs are taken from the queue.
        busy: share of the makespan for which each processor works.
        plans: the best plan and baselines by name: seconds of the objective as measured and as predicted.
    """

    run: Path
    objective: Objective
    predicted_s: float
    measured_s: float | None
    dispatches: dict[str, float]
    busy: dict[str, float]
    jobs: tuple[Job, ...]
    plans: dict[str, tuple[float | None, float | None]]

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--json``; times are in milliseconds."""
        return {
            "schema_version": SCHEMA_VERSION,
            "run_dir": str(self.run),
            "objective": self.objective,
            "best": {"predicted_ms": _ms(self.predicted_s), "measured_ms": _ms(self.measured_s)},
            "dispatch_predicted_ms": {name: _ms(seconds) for name, seconds in self.dispatches.items()},
            "busy": self.busy,
            "jobs": [
                {
                    "instance": job.instance,
                    "operators": job.operators,
                    "processor": job.processor,
                    "elsewhere_predicted_more_ms": {name: _ms(more) for name, more in job.elsewhere.items()},
                }
                for job in self.jobs
            ],
            "baselines": {
                name: {"measured_ms": _ms(measured), "predicted_ms": _ms(predicted)}
                for name, (measured, predicted) in self.plans.items()
            },
        }

    def blocks(self) -> Iterator[Block]:
        """Yield the explanation as blocks of a report."""
        measured = "not measured" if self.measured_s is None else f"measured: {self.measured_s * 1e3:.4g} ms"
        yield Text(
            f"Objective: {self.objective}; predicted for this plan: {self.predicted_s * 1e3:.4g} ms; {measured}. "
            "All changes below are predicted."
        )
        busiest = max(self.busy, key=lambda name: self.busy[name])
        yield Text(f"The busiest processor is {busiest}: it works for {self.busy[busiest]:.0%} of the makespan.")
        yield Table("How busy processors are", (Column("processor"), Column("busy", ".0%")), tuple(self.busy.items()))
        rows = tuple(
            (job.instance, job.operators, job.processor, name, _ms(more), "" if more is not None else "does not run")
            for job in self.jobs
            for name, more in job.elsewhere.items()
        )
        columns = (Column("model"), Column("job"), Column("on"), Column("moved to"), Column("change, ms", "+.4g"),
                   Column("remark"))  # fmt: skip
        yield Table("What each job would cost elsewhere", columns, rows)
        yield Table(
            "Other orders of the queue",
            (Column("jobs are taken by"), Column("change, ms", "+.4g")),
            tuple((name, (seconds - self.predicted_s) * 1e3) for name, seconds in self.dispatches.items()),
        )
        yield Table(
            "What else a person would have tried",
            (Column("plan"), Column("measured, ms", ".4g"), Column("predicted, ms", ".4g")),
            tuple((name, _ms(measured), _ms(predicted)) for name, (measured, predicted) in self.plans.items()),
        )


def explain_workload(run: Path) -> WorkloadExplanation:
    """Explain the plan of a finished study of several models.

    Raises:
        RunFolderError: it is no finished study, or its prices are not in its log.
        UnavailableError: its evaluator cannot be opened here.
    """
    outcomes = read_result(run)["workload"]["outcomes"]
    priced = [record.data for record in read_log(run / LOG).records if record.kind == _PRICES]
    if not priced:
        raise RunFolderError(f"{run}: its log holds no prices of jobs", "explain a finished study")
    with reloaded_workload(run) as found:
        found.session.price(priced[-1], lambda _: None)
        simulator, objective = found.session.simulator, found.problem.objective
        best = simulator.run(found.plan)
        best_s = best.value_s(objective)
        named = {b.name: b.plan for b in found.problem.baselines}
        key = f"{objective}_ms"
        return WorkloadExplanation(
            run,
            objective,
            best_s,
            _seconds(outcomes["best"].get(key)),
            {
                name: simulator.run(replace(found.plan, dispatch=name)).value_s(objective)
                for name in ("fifo", "priority", "edf")
            },
            _busy(best),
            tuple(_jobs(found, simulator, best_s)),
            {
                name: (_seconds(outcomes.get(name, {}).get(key)), _predicted(simulator, plan, objective))
                for name, plan in named.items()
            },
        )


def _busy(found: Outcome) -> dict[str, float]:
    """Return for which share of the makespan each processor works, the busiest first."""
    spent: dict[str, float] = {}
    for event in found.timeline.events:
        spent[event.lane] = spent.get(event.lane, 0.0) + event.end_s - event.start_s
    return dict(sorted(((lane, s / found.makespan_s) for lane, s in spent.items()), key=lambda each: -each[1]))


def _jobs(found: ReloadedWorkload, simulator: WorkloadSimulator, best_s: float) -> Iterator[Job]:
    problem, plan = found.problem, found.plan
    others = [p.name for p in problem.space.platform.processors]
    for index, stages in jobs_of(plan, problem.joined).items():
        component = problem.joined.components[index]
        for number in stages:
            stage = plan.stages[number]
            elsewhere: dict[str, float | None] = {}
            for name in (other for other in others if other != stage.processor):
                moved = list(plan.stages)
                moved[number] = replace(stage, processor=name)
                took_s = _predicted(simulator, replace(plan, stages=tuple(moved)), problem.objective)
                elsewhere[name] = None if took_s is None else took_s - best_s
            operators = describe_operators(component.graph, component.own(stage.operators))
            yield Job(component.name, operators, stage.processor, elsewhere)


def _predicted(simulator: WorkloadSimulator, plan: Plan, objective: Objective) -> float | None:
    try:
        return simulator.run(plan).value_s(objective)
    except OptimizeError:
        return None


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
