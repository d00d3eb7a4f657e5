"""The numbers of a study's report, read from its run folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from evaluators.objectives import LATENCY, Objective
from evaluators.registry import make_evaluator
from evaluators.samples import Samples
from evaluators.schedule import Event, Law, Task, Timeline, in_rounds, needs_of, rounds, run_tasks
from evaluators.simulated import MeasuredPrices, ProfiledSession
from optimizer.exact.chain_costs import ChainCosts, weighed
from optimizer.files import damage_of, disk_errors, read_document
from optimizer.model.profile import Profile
from optimizer.report.answer import HOSTED, as_latencies, model_of, objective_of
from optimizer.study.folder import CONFIG, INFEASIBLE, LOG, RESULT, found_from, read_config, read_manifest, resume_hint
from optimizer.study.history import OPTIMUM, Trial
from optimizer.study.log import Record, read_log
from optimizer.study.verdict import Verdict, shown_samples, shown_scale
from search_spaces.core.errors import OptimizeError, PlanError, RunFolderError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph, merge
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.workload import Client, Workload, with_given

SCHEMA_VERSION = 1

STREAMED = 4
"""Inferences of a stream that are drawn."""

Family = Literal["baseline", "model", "search"]
"""The origin of a plan: a baseline, the model of single operators, or the search."""


_ANOTHER = "give another run"


@dataclass(frozen=True, slots=True)
class Point:
    """A plan that was measured.

    Attributes:
        number: distinct plans tried so far, itself included.
        latency_s: the median in the search, scaled to the machine's speed in the final.
        best_s: the least median up to here.
        predicted_s: by the model of single operators; None if that has no prediction.
        raced: whether it was stopped early, so that its latency is rough.
    """

    number: int
    family: Family
    origin: str
    stages: int
    latency_s: float
    best_s: float
    predicted_s: float | None
    raced: bool


@dataclass(frozen=True, slots=True)
class Bar:
    """A timeline to draw.

    Attributes:
        name: of the plan.
        source: ``measured`` or ``predicted``.
        inferences: of a stream, which inference each event is of; empty for a single one.
    """

    name: str
    source: Literal["measured", "predicted"]
    plan: Plan
    timeline: Timeline
    inferences: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Spread:
    """The samples of a plan that has a name, and the 95 % interval that tables show of it."""

    name: str
    samples: Samples
    ci95_s: tuple[float, float]


@dataclass(frozen=True)
class Study:
    """A finished study, as read from its run folder.

    Attributes:
        result: the document of ``--json``.
        trials: those that tried a plan for the first time, in order; baselines outside the space come first.
        graph: the model, or None where it cannot be read any more.
        missing: why the model cannot be read, or "".
        device: all that may change a number of its session; empty if it was not recorded.
        joined: the models of a study of several, where they can be read.
    """

    path: Path
    manifest: Mapping[str, Any]
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    trials: tuple[Trial, ...]
    verdict: Verdict | None
    profile: Profile | None
    platform: Platform
    graph: Graph | None
    missing: str
    device: Mapping[str, Any] = field(default_factory=dict)
    joined: JoinedGraph | None = None

    @cached_property
    def costs(self) -> ChainCosts | None:
        """The model of single operators, on the machine as it was in the final."""
        if self.profile is None:
            return None
        costs, slowness = self.profile.costs(self.platform), self.verdict.slowness if self.verdict is not None else 1.0
        return weighed(costs, {p.name: slowness for p in costs.platform.processors}, idle=True)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """Name → plan of the baselines, in the order of the table."""
        return {name: Plan.from_json(entry["plan"]) for name, entry in self.result["baselines"].items()}

    @cached_property
    def best(self) -> Plan:
        """The recommended plan."""
        return Plan.from_json(self.result["best"]["plan"])

    @property
    def objective(self) -> Objective:
        """The objective, the first of several; latencies here are in its unit."""
        return objective_of(self.result)

    @property
    def predicted(self) -> bool:
        """Whether all figures are predictions of the evaluator."""
        return bool(self.result.get("predicted"))

    @property
    def device_name(self) -> str:
        """The device that was measured or predicted; with the name of the CPU if it is this machine."""
        name = self.platform.name
        if self.predicted or self.device.get("evaluator") not in HOSTED:
            return name
        return f"{name} ({dict(self.manifest.get('machine', {})).get('cpu', 'unknown CPU')})"

    def model_of(self, stage: Stage) -> tuple[str, Graph | None, tuple[int, ...]]:
        """Return the model that a stage is of: its name among several, its graph, and the operators' numbers in it."""
        return model_of(stage, self.graph, self.joined)

    @property
    def baseline(self) -> str:
        """Name of the plan that the recommended one was compared with."""
        return self.verdict.reference.name if self.verdict else next(iter(self.plans), "")

    def trial(self, plan: Plan) -> Trial | None:
        """Return the trial that measured a plan."""
        return next((t for t in self.trials if t.plan.digest == plan.digest and t.measurement), None)

    def searched_s(self, trial: Trial) -> float:
        """Return the median of a trial, on the machine as it was in the final; infinite where it has none."""
        return trial.measurement.median_s * shown_scale(self.verdict, trial) if trial.measurement else math.inf

    @cached_property
    def _simulated(self) -> ProfiledSession | None:
        """The session that predicts by the model of single operators, where both it and the graph are known."""
        if (costs := self.costs) is None or self.graph is None:
            return None
        prices = MeasuredPrices(costs.operator_s, costs.overhead_s, costs.transfer_s[-1])
        return ProfiledSession(costs.platform, self.graph, prices, {})

    def predict(self, plan: Plan) -> Timeline | None:
        """Return the plan's timeline by the model of single operators; None where that does not cover it."""
        session, graph = self._simulated, self.graph
        if session is None or graph is None or plan.ranks or plan.is_split:
            return None
        try:
            return session.load(graph, plan).run(1).timeline
        except (PlanError, UnavailableError):  # the runtime's own placement, or an operator that is not supported
            return None


def read_study(path: Path) -> Study:
    """Read a finished study.

    Raises:
        RunFolderError: it is no run folder, not finished, damaged, or written by a newer version.
    """
    manifest, result = finished_study(path)
    records = read_log(path / LOG).records
    with damage_of(path / LOG, _ANOTHER):
        trials = [Trial.from_json(record.data) for record in records if record.kind in {"trial", "baseline"}]
    verdicts = [r for r in records if r.kind == "verdict"]
    profiles = [r for r in records if r.kind == "profile"]
    config: dict[str, Any] = {}
    with suppress(UsageError):
        config = read_config(path)
    graph, joined, missing = _models(config, result, manifest)
    with damage_of(path / RESULT, _ANOTHER):
        verdicts = verdicts if result["complete"] else []
        platform = recorded_platform(result["platform"])
    with damage_of(path / LOG, _ANOTHER):
        verdict = Verdict.from_json(verdicts[-1].data) if verdicts else None
        profile = Profile.from_json(profiles[-1].data) if profiles else None
    device = next((r.data for r in records if r.kind == "device"), {})
    first = tuple(t for t in trials if t.repeat_of is None)
    return Study(path, manifest, config, result, first, verdict, profile, platform, graph, missing, device, joined)


def finished_study(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifest and the result of a finished study.

    Raises:
        RunFolderError: it is no run folder, not finished, damaged, or written by a newer version.
    """
    manifest = read_manifest(path)
    if not path.exists():
        raise RunFolderError(f"{path}: there is no such folder", "give the folder of a study")
    if manifest is None and (path / "campaign.json").exists():
        raise RunFolderError(f"{path} holds a campaign", "give the folder of one of its studies")
    if manifest is None:
        raise RunFolderError(f"{path}: is not a run folder: it has no manifest.json", "give the folder of a study")
    return manifest, read_result(path)


def points(study: Study) -> tuple[Point, ...]:
    """Return every plan that was measured, in the order in which it was tried."""
    names = {plan.digest for plan in study.plans.values()}
    found: list[Point] = []
    best_s = float("inf")
    for number, trial in enumerate(study.trials, 1):
        if trial.measurement is None:
            continue
        predicted = study.predict(trial.plan) if study.objective == LATENCY else None
        median_s = study.searched_s(trial)
        if not trial.raced:
            best_s = min(best_s, median_s)
        family: Family = "model" if trial.origin == OPTIMUM else "search"
        if trial.plan.digest in names:
            family = "baseline"
        known_s, stages = predicted.makespan_s if predicted else None, len(trial.plan.stages)
        least_s = min(best_s, median_s)
        found.append(Point(number, family, trial.origin, stages, median_s, least_s, known_s, trial.raced))
    return tuple(found)


def best_by_stages(found: tuple[Point, ...]) -> dict[int, float]:
    """Return the least median latency for each number of stages, ascending."""
    counts = sorted({point.stages for point in found})
    return {count: min(p.latency_s for p in found if p.stages == count) for count in counts}


def spreads(study: Study) -> tuple[Spread, ...]:
    """Return the samples of the baselines, and of the recommended or the next best plan if it is none of them."""
    known = ((name, entry["latency_ms"]) for name, entry in study.result["baselines"].items())
    found = [_spread(name, ms) for name, ms in known if ms is not None]
    challenger = _challenger(study)
    if challenger is not None and challenger[1] not in study.plans.values():
        name, plan = challenger
        standing = study.verdict.standing(plan) if study.verdict is not None else None
        if standing is not None and standing.samples is not None:
            own = study.result["best"]["latency_ms"] if study.verdict and study.verdict.best == plan else None
            found.append(_spread(name, own) if own else Spread(name, standing.samples, standing.samples.ci95))
    return tuple(found)


def _spread(name: str, ms: Mapping[str, Any]) -> Spread:
    low, high = ms["ci95"]
    return Spread(name, Samples(tuple(v / 1e3 for v in ms["values"])), (low / 1e3, high / 1e3))


def _challenger(study: Study) -> tuple[str, Plan] | None:
    """Return the name and the plan that is drawn beside the reference."""
    verdict = study.verdict
    if verdict is None or verdict.challenger is None:
        return None
    if verdict.best == verdict.challenger:
        return "recommended plan", verdict.challenger
    own = (name for name, plan in study.plans.items() if plan == verdict.challenger)
    return next(own, "next best plan"), verdict.challenger


def bars(study: Study) -> tuple[Bar, ...]:
    """Return the timelines to lay side by side: best plan and baseline, measured and predicted."""
    named = {study.baseline: study.plans.get(study.baseline)}
    if (challenger := _challenger(study)) is not None:
        beside: dict[str, Plan | None] = {challenger[0]: challenger[1]}
        named = beside | named if challenger[1] == study.best else named | beside  # the recommended plan first
    return tuple(bar for name, plan in named.items() if plan is not None for bar in _both(study, name, plan))


def _both(study: Study, name: str, plan: Plan) -> Iterator[Bar]:
    trial = study.trial(plan)
    if trial is not None and trial.measurement is not None and trial.measurement.timeline is not None:
        seen = trial.measurement.timeline
        timed = "workload" in study.result and Workload.from_json(study.result["workload"]).timed
        factor = 1.0 if study.predicted or timed else shown_scale(study.verdict, trial)
        shown = shown_samples(study.verdict, trial, plan)
        if not study.predicted and study.objective == LATENCY and shown is not None:
            factor = shown.median / seen.makespan_s
        yield _bar(study, name, "predicted" if study.predicted else "measured", plan, seen.slower(factor))
        if study.predicted:
            return
    predicted = study.predict(plan)
    if predicted is not None:
        yield _bar(study, name, "predicted", plan, predicted)


def _bar(study: Study, name: str, source: Literal["measured", "predicted"], plan: Plan, found: Timeline) -> Bar:
    """Return a timeline to draw; in a study of throughput it is a stream of inferences."""
    index = {p.name: i for i, p in enumerate(study.platform.processors)}
    events = {e.stage: e for e in found.events}
    if study.objective.aggregation != "busiest" or study.graph is None or set(events) != set(range(len(plan.stages))):
        return Bar(name, source, plan, found)
    needs = needs_of(study.graph, plan)
    tasks = [
        Task(index[e.processor], e.end_s - e.start_s, tuple((b, 0.0) for b in sorted(needs[stage])))
        for stage, e in sorted(events.items())
    ]
    how = rounds(plan, study.platform, needs)
    ordered, whose = in_rounds(tasks, how, STREAMED)
    stages = sorted(range(len(tasks)), key=lambda i: (how.lag[i], i))  # the order of each inference's tasks
    left = {inference: iter(stages) for inference in range(STREAMED)}
    streamed: list[tuple[Event, int]] = []
    for inference, (start_s, end_s) in zip(whose, run_tasks(ordered, Law.of(study.platform)), strict=True):
        stage = next(left[inference])
        streamed.append((Event(stage, plan.stages[stage].processor, start_s, end_s), inference))
    streamed.sort(key=lambda pair: (pair[0].start_s, pair[0].stage))
    return Bar(name, source, plan, Timeline(tuple(e for e, _ in streamed)), tuple(n for _, n in streamed))


def read_result(path: Path) -> dict[str, Any]:
    """Return the document of ``--json`` of a finished study; numbers of any objective have the keys of latencies.

    Raises:
        RunFolderError: the study is not finished, damaged, or written by a newer version.
    """
    file = path / RESULT
    with disk_errors(file):
        finished = file.is_file()
    if not finished:
        last: Sequence[Record] = ()
        with suppress(RunFolderError):
            last = read_log(path / LOG).records[-1:]
        if last and last[0].kind == INFEASIBLE:
            what = f"{path}: the study has no result: {last[0].data.get('what')}"
            raise RunFolderError(what, "run it again with other limits")
        raise RunFolderError(f"{path}: the study is not finished: it has no result.json", resume_hint(path))
    result = read_document(file, SCHEMA_VERSION, f"to write it again, {resume_hint(path)}")
    if result.get("best") is None:
        raise RunFolderError(f"{path}: no plan has been measured yet", resume_hint(path))
    with damage_of(file, _ANOTHER):
        as_latencies(result)
    return result


def _models(
    config: Mapping[str, Any], result: Mapping[str, Any], manifest: Mapping[str, Any]
) -> tuple[Graph | None, JoinedGraph | None, str]:
    """Return the model, or the joined graph of several, if their digest is unchanged; else the reason."""
    if "model" not in config:
        return None, None, f"{CONFIG} is missing or damaged"
    source, joined = str(config["model"]), None
    try:
        if workload := result.get("workload"):
            clients = [
                c | {name: found_from(manifest, c.get(name)) for name in ("model", "input")}
                for c in workload["clients"]
            ]
            graphs = [graph for c in clients for graph in [_model(config, c["model"], c)] * int(c["count"])]
            joined = merge(source, list(zip(map(str, workload["instances"]), graphs, strict=True)))
            found = joined.graph
        else:
            (client,) = with_given((Client(source, source),), config)
            found = _model(config, source, asdict(client))
    except OptimizeError as error:
        if error.what.startswith(f"{source}: ") and not Path(source).exists():
            return None, None, f"{source}: there is no such file here, nor where the study ran"
        return None, None, str(error)
    if found.digest != result["model"]["digest"]:
        return None, None, f"{source} has changed since the study"
    return (None, joined, "") if joined is not None else (found, None, "")


def _model(config: Mapping[str, Any], source: str, given: Mapping[str, Any]) -> Graph:
    from search_spaces.models import load

    if source.endswith((".yaml", ".yml")):
        evaluator = make_evaluator(str(config.get("evaluator")))
        if evaluator.capabilities.graphs:
            return evaluator.graph_of(source)
    inputs = Path(given.get("input") or "")  # it may be gone
    return load(
        source,
        tuple(config.get("input_shape") or ()),
        signature=given.get("signature"),
        inputs=inputs if inputs.is_file() else None,
    )


def recorded_platform(data: Mapping[str, Any]) -> Platform:
    """Return the platform in a result's document."""
    return Platform(
        str(data["name"]),
        tuple(
            Processor(str(p["name"]), p["kind"], dict(p["resources"]), str(p["like"]), dict(p["options"]), p["slots"])
            for p in data["processors"]
        ),
    )
