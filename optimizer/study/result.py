"""The result of a study of one model or several, and the document that ``--json`` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluators.base import Agreement
from evaluators.measurement.disturbance import Disturbance, in_words
from evaluators.measurement.final import Ratio
from evaluators.objectives import LATENCY, Objective
from evaluators.samples import Measurement, Samples
from evaluators.workload.outcome import TIMES, Outcome
from optimizer.model.bounds import Bounds
from optimizer.study.front import Front
from optimizer.study.history import History
from optimizer.study.verdict import Verdict, shown_samples, shown_scale
from search_spaces.core.decoded_plan import jobs_of
from search_spaces.core.errors import RunFolderError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.wording import plural
from search_spaces.core.workload import Workload

if TYPE_CHECKING:
    from evaluators.litert.runner import PlanRunner


SCHEMA_VERSION = 1
_MOST_PROPOSED = 5
_MOST_NAMED = 4
_ROUNDING = 1e-9  # relative
_OF_OUTPUTS = ("identical", "max_rel_error", "outputs", "tolerance")


@dataclass(frozen=True, slots=True)
class Row:
    """A plan of the table.

    Attributes:
        name: of a baseline, or number and stages of a plan that the search found: ``plan 17: 0–12|13–38 gpu``.
        value: the objective's median, in ``unit``; None where it is unknown.
        low, high: its 95 % interval.
        source: ``final``, ``search``, ``predicted`` or "".
        slower: how much longer than the recommended plan it takes, relative; None unless both were in the final.
        failure: why it has no figure, or "".
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    unit: str
    source: str
    slower: float | None
    stages: int
    processors: tuple[str, ...]
    recommended: bool
    failure: str
    plan: Plan = field(repr=False)


def _borders(stages: Sequence[tuple[Sequence[int], str]]) -> str:
    """Return operators and processors of stages, shortened: ``0–12 gpu, 13|14–82 cpu0``."""
    runs = groupby(stages[:_MOST_NAMED], lambda stage: stage[1])
    ends = ((name, [dict.fromkeys((operators[0], operators[-1])) for operators, _ in run]) for name, run in runs)
    found = [f"{'|'.join('–'.join(map(str, each)) for each in run)} {name}" for name, run in ends]
    return ", ".join(found) + (", …" if len(stages) > _MOST_NAMED else "")


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """The result of a finished or interrupted study.

    Attributes:
        baselines: name → plan, in the order of the table; ``history`` holds their measurements.
        verdict: None where the study was interrupted before the end.
        bounds: lower bounds under the model, in the machine's state in the final; None before the profile.
        disturbance: interruptions of the measuring threads during the search.
        front: of several objectives; ``best`` is at its knee.
        objective: the first of several; figures of plans are in its unit.
        deployed: the agreement of the written stage files with the whole model; None where none were written.
        exhausted: whether every plan of the space was tried.
        proven: whether the search ended before its budget, since the best plan is near enough to the predicted bound.
        freedoms: of the space, from :data:`search_spaces.spaces.registry.FREEDOMS`; () for a plug-in's space.
        placements: processor on which the runtime itself places a network → how it placed this one.
        tolerances: which processors an error limit would allow, as a sentence; "" if unknown.
        wall_s: seconds of this session, without earlier ones.
        earlier: plans that had been tried before this session.
        workload, joined: of several models; figures of plans are then the objective's values of runs of all.
        predictions: digest of a plan of several models → the simulator's run, and the objective's value.
        tucker: of several, model that may be decomposed → its result, of :func:`optimizer.workload.ranks.rank_summary`.
    """

    graph: Graph
    platform: Platform
    evaluator: str
    history: History
    baselines: Mapping[str, Plan]
    verdict: Verdict | None
    bounds: Bounds | None
    deployed: Agreement | None
    cardinality: int
    exhausted: bool
    wall_s: float
    run_dir: Path
    objective: Objective = field(default=LATENCY, kw_only=True)
    front: Front | None = field(default=None, kw_only=True)
    proven: bool = field(default=False, kw_only=True)
    freedoms: tuple[str, ...] = field(default=(), kw_only=True)
    disturbance: Disturbance = field(default=Disturbance(), kw_only=True)
    placements: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    tolerances: str = field(default="", kw_only=True)
    earlier: int = field(default=0, kw_only=True)
    workload: Workload | None = field(default=None, kw_only=True)
    joined: JoinedGraph | None = field(default=None, kw_only=True)
    predictions: Mapping[str, tuple[Outcome, float]] = field(default_factory=dict, kw_only=True)
    tucker: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def best(self) -> Plan | None:
        """The recommended plan; without a verdict the one with the smallest median."""
        if self.verdict is not None:
            return self.verdict.best
        ranking = self.history.ranking()
        return ranking[0].plan if ranking else None

    @property
    def predicted(self) -> bool:
        """Whether the figures are predictions."""
        final = self.verdict.final if self.verdict is not None else None
        return final is not None and (final.predicted or (final.exact and final.computed))

    def samples(self, plan: Plan) -> Samples | None:
        """Return the samples to report of a plan: the final's, or the search's scaled to the final."""
        return shown_samples(self.verdict, self.history.known.get(plan.digest), plan)

    def interval(self, plan: Plan) -> tuple[float, float] | None:
        """Return the 95 % interval of a plan's figure, in the objective's unit; for a prediction, the model's error.

        The interval of a figure of the search includes the drift of the machine.
        """
        samples = self.samples(plan)
        if samples is None:
            return None
        if self.verdict is None:
            return samples.ci95
        standing = self.verdict.standing(plan)
        if standing is not None and standing.errors is not None:
            far = math.exp(1.96 * math.hypot(*standing.errors))
            return samples.median / far, samples.median * far
        if self.verdict.final.exact:
            return samples.median, samples.median
        low, high = samples.ci95
        if standing is not None:  # turns of one instance are not independent: use the rounds
            far = math.exp(self.verdict.instance_half(plan))
            return min(low, samples.median / far), max(high, samples.median * far)
        if self.predicted:
            return samples.median, samples.median
        far = math.exp(1.96 * self.verdict.scale_sigma)
        return low / far, high * far

    def in_final(self, plan: Plan) -> bool:
        """Return whether a plan's figure comes from the final."""
        return self.verdict is not None and self.verdict.standing(plan) is not None

    def against_best(self, plan: Plan) -> Ratio | None:
        """Return the ratio of a plan's time to the recommended one's; None if no final or prediction has it."""
        if self.verdict is None:
            return None
        found, reference = self.verdict.ratio(plan, self.verdict.best), self.verdict.standing(self.verdict.best)
        own, best = self.samples(plan), self.samples(self.verdict.best)
        if found or not (own and best and self.verdict.final.exact) or (reference and reference.errors is not None):
            return found
        ratio = own.median / best.median
        return Ratio(*[1.0 if abs(ratio - 1.0) < _ROUNDING else ratio] * 3)

    def stage_s(self, plan: Plan) -> tuple[float, ...]:
        """Return the seconds of a plan's stages, from the same runs as :meth:`samples`; empty where there are none."""
        standing = self.verdict.standing(plan) if self.verdict else None
        if standing is not None:
            return standing.stage_s
        measured = self.measurement(plan)
        return measured.stage_s if measured else ()

    @property
    def disturbances(self) -> list[str]:
        """Disturbances of the search and the final, in sentences."""
        cores = self.verdict.cores if self.verdict else 1
        found = [f"during the search, {text}" for text in in_words(self.disturbance, 0, cores)]
        return found + [f"during the final, {text}" for text in (self.verdict.disturbances if self.verdict else ())]

    def measurement(self, plan: Plan) -> Measurement | None:
        """Return a plan's measurement in the search."""
        trial = self.history.known.get(plan.digest)
        return trial.measurement if trial else None

    def figures(self, plan: Plan) -> dict[str, float]:
        """Return a plan's values by further objectives: the final's if it is on the front, else the search's."""
        measured = self.measurement(plan)
        found = dict(measured.figures) if measured else {}
        if self.front is not None:
            values = next((each.values for each in self.front.plans if each.plan == plan), ())
            found |= {o.name: s for o, s in zip(self.front.objectives, values, strict=False) if o.name in found}
        return found

    def agreement(self, plan: Plan) -> Agreement | None:
        """Return the agreement of a plan's outputs with the whole model's, from the search or else the final."""
        measured = self.measurement(plan)
        if measured is not None and measured.agreement is not None:
            return measured.agreement
        return self.verdict.compared.get(plan.digest) if self.verdict is not None else None

    @property
    def model_bound_s(self) -> float | None:
        """The lower bound of the space under the model, in seconds; its optimum where that is proven."""
        return self.bounds.space_s if self.bounds else None

    @property
    def gap(self) -> float | None:
        """The best plan's median above the predicted bound, relative; below 0 the predictions are wrong."""
        samples = self.samples(self.best) if self.best else None
        if samples is None or not self.model_bound_s:
            return None
        gap = samples.median / self.model_bound_s - 1.0
        return gap if abs(gap) > _ROUNDING else 0.0

    @property
    def model_error(self) -> float | None:
        """The best plan's median below the bound, relative to it: the least error of the model."""
        samples = self.samples(self.best) if self.best else None
        return self.bounds.error(samples.median) if samples is not None and self.bounds is not None else None

    @property
    def plan(self) -> Plan:
        """The recommended plan.

        Raises:
            UnavailableError: no plan could be measured.
        """
        if self.best is None:
            raise UnavailableError("the study measured no plan", "see the failures in its trial log")
        return self.best

    def rows(self) -> list[tuple[str, Plan]]:
        """Return the table's plans: the baselines, then the best proposals, in the final's order."""
        rows = list(self.baselines.items())
        if self.verdict is None:
            return rows
        final, known = self.verdict.final, {plan.digest for _, plan in rows}
        order = sorted(final.measured, key=lambda i: final.effect(i, final.fastest))
        proposed = [plan for i in order if (plan := self.verdict.plans[i]).digest not in known]
        if self.verdict.best in proposed:  # always shown
            proposed = [self.verdict.best, *(p for p in proposed if p != self.verdict.best)]
        number = self.history.number
        return rows + [(f"plan {number(plan)}{self._described(plan)}", plan) for plan in proposed[:_MOST_PROPOSED]]

    def _described(self, plan: Plan) -> str:
        """Return the first stages; of several models their numbers in each model, after the order of the queue."""
        if self.joined is None:
            return f": {_borders([(s.operators, s.processor) for s in plan.stages])}"
        models, most = dict[str, list[tuple[Sequence[int], str]]](), plan.stages[:_MOST_NAMED]
        for stage in most:
            component = self.joined.components[self.joined.component_of[stage.operators[0]]]
            models.setdefault(component.name, []).append((component.own(stage.operators), stage.processor))
        whole = {component.name: len(component.operators) for component in self.joined.components}
        told = (
            f"{name} [{stages[0][1] if len(stages[0][0]) == whole[name] else _borders(stages)}]"
            for name, stages in models.items()
        )
        return f" ({plan.dispatch}): {', '.join(told)}{', …' if len(plan.stages) > len(most) else ''}"

    def table(self) -> list[Row]:
        """Return the terminal's table as typed rows."""
        found = []
        for name, plan in self.rows():
            samples, interval, ratio = self.samples(plan), self.interval(plan), self.against_best(plan)
            has, trial = samples is not None and interval is not None, self.history.known.get(plan.digest)
            source = ("predicted" if self.predicted else "final" if self.in_final(plan) else "search") if has else ""
            failure = "" if has else trial.failure if trial else "not tried"
            low, high = (x * 1e3 for x in interval) if has and interval else (None, None)
            value = samples.median * 1e3 if has and samples else None
            slower = ratio.value - 1.0 if ratio else None
            processors = tuple(dict.fromkeys(s.processor for s in plan.stages))
            best, unit = plan == self.best, self.objective.shown_unit
            row = Row(name, value, low, high, unit, source, slower, len(plan.stages), processors, best, failure, plan)
            found.append(row)
        return found

    def to_dataframe(self) -> Any:
        """Return the table as a ``pandas.DataFrame``, a row for each plan.

        Raises:
            UnavailableError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise UnavailableError("a data frame needs pandas", "pip install pandas") from error
        rows = [{f.name: getattr(row, f.name) for f in fields(Row) if f.name != "plan"} for row in self.table()]
        return pd.DataFrame(rows)

    def report(self, folder: str | Path | None = None) -> Path:
        """Write the report for a browser, into the run folder or another one; return the page's path.

        Raises:
            UsageError: something else than a folder is given.
            RunFolderError: it cannot be written.
        """
        from optimizer.report.write import report

        known = isinstance(folder, str | Path | None)
        if not known or (folder and (Path(folder).suffix == ".html" or Path(folder).is_file())):
            raise UsageError(f"report {str(folder)!r}: a report is a folder with a page", "give a folder")
        return report(self.run_dir, Path(folder) if folder is not None else None)

    def runner(self) -> PlanRunner:
        """Return a runner of the recommended plan from its files; close it, or use it in a ``with``.

        Raises:
            PlanError: the study wrote no stage files, since plans were predicted.
            UnavailableError: this machine lacks the plan's processors.
        """
        from evaluators.litert.runner import PlanRunner

        return PlanRunner(self.run_dir / "best")

    def __repr__(self) -> str:
        """Return one line: the model, the recommended plan's name or stages, and its figure."""
        best = self.best
        if best is None:
            return f"<Result {self.graph.name}: no plan measured>"
        names = [name for name, plan in self.baselines.items() if plan == best]
        processors = ", ".join(dict.fromkeys(stage.processor for stage in best.stages))
        what = names[0] if names else f"{plural(len(best.stages), 'stage')} on {processors}"
        samples = self.samples(best)
        figure = f", {samples.median * 1e3:.4g} {self.objective.shown_unit}" if samples else ""
        return f"<Result {self.graph.name}: {what}{figure}>"

    def __str__(self) -> str:
        """Return the text of the terminal."""
        from optimizer.report.console import make_console, render

        console = make_console()
        with console.capture() as captured:
            console.print(render(self), crop=False)
        return captured.get()

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook, with what the terminal shows in bold and in colour."""
        from optimizer.report.console import make_console, render

        console = make_console(record=True)
        console.print(render(self), crop=False)
        return console.export_html(inline_styles=True, code_format='<pre style="white-space:pre-wrap">{code}</pre>')

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        verdict = self.verdict
        return {
            "schema_version": SCHEMA_VERSION,
            "model": {"name": self.graph.name, "digest": self.graph.digest, "operators": len(self.graph.operators)},
            "platform": self.platform.to_json(),
            "evaluator": self.evaluator,
            "objective": self.objective.name,
            **({"front": self.front.to_json()} if self.front else {}),
            "complete": verdict is not None,
            "decided": verdict is not None and not verdict.undecided,
            "predicted": self.predicted,
            "best": self._plan_json(self.best) if self.best else None,
            "baselines": {
                name: self._plan_json(plan) | {"against": self._against(plan)} for name, plan in self.baselines.items()
            },
            "speedup": self._speedup_json(),
            "final": self._final_json(),
            f"model_bound_{self.objective.shown_unit.lower()}": self.model_bound_s * 1e3
            if self.model_bound_s is not None
            else None,
            "gap": self.gap,
            "model_error": self.model_error,
            "bounds": self.bounds.to_json() if self.bounds else None,
            "trials": len(self.history.trials),
            "unique_plans": self.history.measured,
            "proposed_plans": len(self.history.known.keys() - {plan.digest for plan in self.baselines.values()}),
            "cache_hits": self.history.repeats,
            "space": {"freedoms": list(self.freedoms), "plans": self.cardinality, "exhausted": self.exhausted},
            "deployed": self.deployed.to_json() if self.deployed is not None else None,
            "disturbances": self.disturbances,
            "placements": dict(self.placements),
            "tolerances": self.tolerances,
            "wall_s": self.wall_s,
            "run_dir": str(self.run_dir),
            **({"workload": self._workload_json(self.workload)} if self.workload is not None else {}),
        }

    def _workload_json(self, workload: Workload) -> dict[str, Any]:
        instances = [i.name for i in workload.instances]
        tucker = {"tucker": dict(self.tucker)} if self.tucker else {}
        return {**workload.to_json(), "instances": instances, "outcomes": self.outcomes, **tucker}

    @property
    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each of several models under the recommended plan and each baseline; {} before.

        They are of the final's runs, or else of the search's, scaled to the machine's state in the final.

        Raises:
            RunFolderError: the log has figures of another number of models.
        """
        if self.verdict is None or self.workload is None or self.joined is None:
            return {}
        found = {}
        for name, plan in {"best": self.verdict.best, **self.baselines}.items():
            standing, trial = self.verdict.standing(plan), self.history.known.get(plan.digest)
            measured = standing or (trial.measurement if trial is not None else None)
            if measured is not None and self.samples(plan) is not None and measured.outcome:
                scale = shown_scale(self.verdict, trial) if standing is None and trial is not None else 1.0
                names = [self.workload.instances[k].name for k in jobs_of(plan, self.joined)]
                found[name] = self._figures(plan, names, measured.outcome, scale)
        return found

    def _figures(self, plan: Plan, names: Sequence[str], typical: Mapping[str, Any], scale: float) -> dict[str, Any]:
        """Return figures of runs of a plan, scaled to the value of the objective; by ``scale`` where that has none."""
        samples, slowness = self.samples(plan), self.verdict.slowness if self.verdict else 1.0
        value_ms = {**typical, "throughput_ms": 1e3 / typical["throughput_per_s"]}.get(f"{self.objective.name}_ms")
        scale = samples.median * 1e3 / value_ms if samples and value_ms else scale
        # A run that waits for requests lasts as long on a slower machine.
        timed = self.workload is not None and self.workload.timed
        times = {*TIMES} - {"makespan_ms"} if timed else {*TIMES}
        found = {key: value * scale if key in times and value is not None else value for key, value in typical.items()}
        found["throughput_per_s"] /= 1.0 if timed else scale
        if len(names) != len(typical["instances_ms"]):
            raise RunFolderError("the log is damaged: a run of several models has figures of another number of models")
        found["instances_ms"] = {name: ms * scale for name, ms in zip(names, typical["instances_ms"], strict=True)}
        if plan.digest in self.predictions:
            run, predicted = self.predictions[plan.digest]
            found["predicted"] = {
                "objective": predicted * slowness * 1e3,
                "mean_ms": run.value_s("mean") * slowness * 1e3,
                "makespan_ms": run.makespan_s * (1.0 if timed else slowness) * 1e3,
            }
        return found

    def _speedup_json(self) -> dict[str, Any] | None:
        """Return the comparison of the recommended plan, or the next best one, with the best one-stage plan."""
        verdict = self.verdict
        ratio = verdict.speedup if verdict is not None else None
        if verdict is None or ratio is None or verdict.challenger is None:
            return None
        return {
            **_ratio_json(ratio),
            "significant": ratio.significant,
            "predicted": verdict.final.predicted,
            "baseline": verdict.reference.name,
            "plan": verdict.challenger.to_json(),
            "number": self.history.number(verdict.challenger),
        }

    def _final_json(self) -> dict[str, Any] | None:
        verdict = self.verdict
        if verdict is None:
            return None
        criterion = verdict.criterion
        return {
            "plans": len(verdict.plans),
            "rounds": verdict.final.rounds,
            "precision": verdict.precision,
            "left_out": verdict.left_out,
            "scale": verdict.scale,
            "scale_sigma": verdict.scale_sigma,
            "criterion": {
                "name": criterion[0],
                "slower": criterion[1].value,
                "ci95": [criterion[1].low, criterion[1].high],
            }
            if criterion
            else None,
            "disturbance": verdict.final.disturbance.to_json(),
            "repeated": verdict.final.repeated,
            "undecided": verdict.undecided or None,
            **({"traffic": dict(verdict.traffic)} if verdict.traffic else {}),
        }

    def _against(self, plan: Plan) -> dict[str, Any]:
        """Return the ratio of a plan's time to that of each other baseline, where the final compared both."""
        ratios = (
            {name: self.verdict.ratio(plan, other) for name, other in self.baselines.items()} if self.verdict else {}
        )
        others = {name: ratio for name, ratio in ratios.items() if ratio is not None and self.baselines[name] != plan}
        return {name: _ratio_json(ratio) for name, ratio in others.items()}

    def _plan_json(self, plan: Plan) -> dict[str, Any]:
        samples, measured, agreement = self.samples(plan), self.measurement(plan), self.agreement(plan)
        interval, ratio = self.interval(plan), self.against_best(plan)
        outputs = agreement.to_json() if agreement is not None else None
        failure = self.history.known[plan.digest].failure if plan.digest in self.history.known else "not tried"
        unit, pauses_s = self.objective.stage_unit.lower(), self.verdict.after_pause_s if self.verdict else {}
        terms_s = measured.timeline.terms_s if measured and measured.timeline else {}
        return {
            "plan": plan.to_json(),
            "number": self.history.number(plan) if plan.digest in self.history.known else None,
            self.objective.key: {
                "median": samples.median * 1e3,
                "ci95": [x * 1e3 for x in interval],
                "source": "predicted" if self.predicted else "final" if self.in_final(plan) else "search",
                "samples": len(samples.values_s),
                "values": [x * 1e3 for x in samples.values_s],
                "conditions": dict(samples.conditions),
            }
            if samples and interval
            else None,
            "slower_than_best": _ratio_json(ratio)
            | {"racing": self.verdict is not None and self.verdict.still_racing(plan)}
            if ratio
            else None,
            "after_pause_ms": pauses_s[plan.digest] * 1e3 if plan.digest in pauses_s else None,
            f"stage_{unit}": [s * 1e3 for s in stage_s] if (stage_s := self.stage_s(plan)) else None,
            **({"figures": self.figures(plan)} if measured and measured.figures else {}),
            **({"terms_ms": {term: round(s * 1e3, 4) for term, s in terms_s.items()}} if terms_s else {}),
            **{name: outputs[name] if outputs else None for name in _OF_OUTPUTS},
            "stopped": measured.stopped if measured else None,
            "failure": failure or None,
        }


def _ratio_json(ratio: Ratio) -> dict[str, Any]:
    return {"ratio": ratio.value, "ci95": [ratio.low, ratio.high]}
