"""Comparison of two runs' plans: both run interleaved, over rebuilt instances, or both are predicted."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import Batch, Candidate
from evaluators.litert.deployment import is_workload_plan, read_deployment, read_workload_plan, runs_here
from evaluators.litert.runner import PlanRunner, WorkloadRunner
from evaluators.measurement.disturbance import TaskCounters, in_words
from evaluators.measurement.final import FinalPolicy, compare
from evaluators.objectives import LATENCY
from optimizer.report.answer import HOSTED, UNDECIDED, interval_ms, objective_of, slower_text, slower_than
from optimizer.report.data import read_result
from optimizer.study.several_models import SeveralModels
from optimizer.tools.execute import is_predicted, plan_of, reloaded, study_of
from search_spaces.core.bounded import parsed_json, read_bounded
from search_spaces.core.errors import OptimizeError, RunFolderError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import MEMORY, Platform
from search_spaces.core.wording import plural
from search_spaces.models.source import libraries_of

_POLICY = FinalPolicy(max_s=20.0)


@dataclass(frozen=True, slots=True)
class _Source:
    """One of the two plans.

    Attributes:
        interface: equal for all plans of the same model or models.
        content: digest of the model that its files were cut from.
        plan: equal for plans that do the same work with the same files, or by the same evaluator on the same platform.
        load: returns a rebuilt instance.
        processes: of the instances that run.
        queued_s: how long these have waited for measurements of other studies.
        predicted: the platform that the plan is predicted for; "" if it runs.
        objective: of several models, what a run returns.
        minimised: the objectives of its study, where it is known.
        measured_by: the evaluator and its device, of a plan that has no files for this machine.
        accelerators: kinds of those that the plan loads.
        elsewhere: the evaluator of its study, where that measured another machine and the plan runs here.
    """

    interface: tuple[Any, ...]
    content: str
    plan: tuple[Any, ...]
    load: Callable[[], Candidate]
    processes: Callable[[], list[int]] = list
    queued_s: Callable[[], float] = float
    predicted: str = ""
    objective: str = "mean"
    minimised: str = ""
    measured_by: str = ""
    accelerators: frozenset[str] = frozenset()
    elsewhere: str = ""


@dataclass(frozen=True, slots=True)
class _FromFiles(Candidate):
    """A plan run from its files; its runner is in ``running`` until it is closed."""

    runner: PlanRunner | WorkloadRunner
    running: list[Any]
    measure: Callable[[int, float], Batch]

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        return self.measure(n, stop_above_s)

    def close(self) -> None:
        self.runner.close()
        self.running.remove(self.runner)


def _measure_workload(runner: WorkloadRunner, n: int, stop_above_s: float) -> Batch:
    """Return the mean latency of the models in each of some runs."""
    values: list[float] = []
    while True:
        last = runner.run()
        values.append(last.value_s("mean"))
        if runner.failures:
            raise UnavailableError(next(iter(runner.failures.values())))
        if len(values) == n or values[-1] > stop_above_s:
            return Batch(np.array(values), np.array(values)[:, None], outcome=last, run_s=last.makespan_s)


def compare_runs(
    first: str, second: str, *, custom_ops: Sequence[str] = (), progress: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, Any], str]:
    """Compare the best plans of two run folders (or two ``plan.json``); return the document of ``--json``, and text.

    Plans are compared by their latency; those of several models by the mean of their models' latencies. Where both are
    the same plan, nothing is run.

    Args:
        custom_ops: libraries with kernels of custom operators, as typed.
        progress: called once a round.

    Raises:
        PlanError: a plan or a stage file is missing or damaged.
        RunFolderError: the plans are for different models (a model and its rewrites are one) or predicted for different
            devices, or only one is predicted.
    """
    with ExitStack() as stack:
        paths = [plan_of(run) for run in (first, second)]
        if not all(is_workload_plan(path) or runs_here(path) for path in paths):
            # A study of several models that is opened again runs in the folder where its models lie.
            paths = [path.resolve() if path.exists() else path for path in paths]
        one, other = (_source(path, stack, custom_ops) for path in paths)
        if one.content != other.content and one.interface != other.interface:
            names = " and ".join(source.interface[0] for source in (one, other))
            raise RunFolderError(f"the two runs are of different models ({names})", "compare runs of one model")
        if one.objective != other.objective:
            objectives = f"{one.objective} and {other.objective}"
            raise RunFolderError(
                f"the two runs have different objectives ({objectives})", "compare runs of one objective"
            )
        if bool(one.predicted) != bool(other.predicted):
            raise RunFolderError(
                f"the plan of {first if one.predicted else second} is predicted, the other one measured",
                "compare two that are predicted, or two that run on this machine",
            )
        if one.predicted != other.predicted:
            raise RunFolderError(
                f"the plans are predicted for different devices ({one.predicted} and {other.predicted})",
                "compare runs of one device",
            )
        named = {"schema_version": 1, "first": first, "second": second, "same_plan": one.plan == other.plan}
        if one.plan == other.plan:
            equal = {"speedup": 1.0, "ci95": [1.0, 1.0], "significant": False, "rounds": 0}
            same = {**named, **equal, "baseline": None, "candidate": None, "notes": []}
            return same, "the two runs have the same plan"
        counters = TaskCounters(
            os.sched_getaffinity(0),
            lambda: [*one.processes(), *other.processes()],
            queued_s=lambda: one.queued_s() + other.queued_s(),
        )
        found = compare(
            one.load,
            other.load,
            _POLICY,
            np.random.default_rng(0),
            counters=counters.read if counters.works and not one.predicted else None,
            progress=progress,
            groups=(one.accelerators, other.accelerators),
        )
    lines = [f"{first}: {interval_ms(found.baseline)}", f"{second}: {interval_ms(found.candidate)}"]
    ratio = found.ratio  # how many times as long the first one takes
    how = "" if one.predicted else f", in {plural(found.final.rounds, 'pair')} of freshly loaded plans"
    faster, slower, by = (second, first, ratio) if ratio.value > 1.0 else (first, second, ratio.inverse)
    text = slower_text(by)
    took = "takes" if "times as" in text else "is"
    found_out = f"the plan of {slower} {took} {slower_than(by, LATENCY, f'that of {faster}')}"
    if one.predicted and ratio.value == 1.0:
        found_out = "both plans are predicted to take the same time"
    elif text == UNDECIDED:
        found_out = "which plan is faster is not decided"
    elif text.startswith("equal"):
        found_out = f"the two plans are {text}"
    lines.append(f"{'significant' if ratio.significant else 'not significant'}: {found_out}{how}")
    notes = in_words(found.final.disturbance, found.final.repeated, os.cpu_count() or 1)
    if one.predicted:
        notes.append("both are predicted; nothing was run")
    if one.measured_by != other.measured_by:
        here, there = (each.measured_by or "litert on this machine" for each in (one, other))
        notes.append(f"{first} is measured by {here}, {second} by {there}")
    for run, each in ((first, one), (second, other)):
        if each.elsewhere:
            here = "both plans are" if one.measured_by == other.measured_by else "its plan is"
            notes.append(
                f"the study {run} was measured by {each.elsewhere} on another machine; {here} measured on this one"
            )
    for name in dict.fromkeys(each.minimised for each in (one, other)):
        if name and name != LATENCY.name:
            notes.append(f"their latencies are compared; a study minimised {name}")
    if one.content != other.content:
        notes.append("their model files differ: operators of one are split, or have other weights")
    return {**named, **found.to_json(), "notes": notes}, "\n".join([*lines, *notes])


def _source(path: Path, stack: ExitStack, custom_ops: Sequence[str]) -> _Source:
    """Return the source of a plan; whatever it opens is closed with the stack."""
    running: list[Any] = []
    if is_workload_plan(path):
        files = read_workload_plan(path)
        _check_memory(path, files.platform)
        names, libraries = ", ".join(files.names), libraries_of(custom_ops, list(dict.fromkeys(files.clients)))

        def load_several() -> Candidate:
            runner = WorkloadRunner(path, custom_ops=libraries)
            running.append(runner)
            runner.run()
            return _FromFiles(runner, running, partial(_measure_workload, runner))

        return _Source(
            (names,),
            names,
            _documents(path),
            load_several,
            lambda: [p for runner in running for p in runner.processes()],
            lambda: sum(runner.queued_s for runner in running),
            elsewhere=_elsewhere(study_of(path)),
        )
    run = None if runs_here(path) else study_of(path)
    if run is None:
        deployed = read_deployment(path)
        _check_memory(path, deployed.platform)
        library = libraries_of(custom_ops, [deployed.graph.name]).get(deployed.graph.name)

        def load() -> Candidate:
            runner = PlanRunner(path, custom_ops=library)
            runner.run_seeded()
            running.append(runner)
            return _FromFiles(runner, running, runner.measure)

        return _Source(
            _interface(deployed.graph),
            deployed.content_digest,
            _documents(path),
            load,
            lambda: [p for runner in running for p in runner.processes()],
            lambda: sum(runner.queued_s for runner in running),
            accelerators=deployed.platform.accelerators(s.processor for s in deployed.plan.stages),
            minimised=_minimised(study_of(path)),
            elsewhere=_elsewhere(study_of(path)),
        )
    done = (run.resolve(),)  # profiles and devices of two studies may differ
    found = stack.enter_context(reloaded(run))
    predicted = found.subject.platform.name if is_predicted(run) else ""
    if isinstance(of := found.subject, SeveralModels):
        names = ", ".join(component.name for component in of.joined.components)
        return _Source(
            (names,), names, done, partial(found.load, fresh=True), predicted=predicted, objective=of.objective
        )
    graph, platform = of.graph, of.platform
    return _Source(
        _interface(graph),
        graph.source.content_digest() if graph.source is not None else "",
        done,
        partial(found.load, fresh=True),
        predicted=predicted,
        accelerators=platform.accelerators(s.processor for s in found.plan.stages),
        minimised=_minimised(run),
        measured_by=f"{read_result(run)['evaluator']} on {platform.name}",
    )


def _minimised(run: Path | None) -> str:
    """Return the objective of a study of one model, or "" where it is not known."""
    with suppress(OptimizeError):
        return objective_of(read_result(run)).name if run is not None else ""
    return ""


def _elsewhere(run: Path | None) -> str:
    """Return the evaluator of a study that measured another machine, or ""."""
    with suppress(OptimizeError):
        evaluator = str(read_result(run)["evaluator"]) if run is not None else ""
        return "" if evaluator in HOSTED else evaluator
    return ""


def _documents(path: Path) -> tuple[Any, ...]:
    """Return what a ``plan.json`` and those of its models say; they name their files by digests."""
    folder, file = (path, path / "plan.json") if path.is_dir() else (path.parent, path)
    return tuple(parsed_json(read_bounded(each)) for each in (file, *sorted(folder.glob("model_*/plan.json"))))


def _interface(graph: Graph) -> tuple[Any, ...]:
    """Return what a model has in common with its rewrites: its name, and shapes and types of inputs and outputs."""
    ends = ([(graph.tensors[t].shape, graph.tensors[t].dtype) for t in some] for some in (graph.inputs, graph.outputs))
    return graph.name, *ends


def _check_memory(path: Path, platform: Platform) -> None:
    if any(MEMORY in processor.options for processor in platform.processors):
        raise UsageError(
            f"{path}: the memory of its processors is limited, and plans that are loaded together would share it",
            "compare it in a study, by --compare-with",
        )
