"""``optimize execute``: run a plan from its files, or if this machine cannot, by its study's evaluator.

Several models run with the workload of the study, even if the workload's file has changed since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from evaluators.base import Agreement, Candidate, Session
from evaluators.litert.deployment import is_workload_plan, read_deployment, read_workload_plan, runs_here
from evaluators.litert.runner import PlanRunner, WorkloadRunner
from evaluators.objectives import LATENCY, OBJECTIVES, Objective, PricedCandidate, Pricing
from evaluators.samples import Measurement
from evaluators.sampling import SamplingPolicy, measure
from evaluators.workload.host import came_of
from evaluators.workload.outcome import Outcome, typical_figures
from optimizer.report.answer import HOSTED, figure_text, interval_ms, objective_of
from optimizer.report.data import finished_study, read_result
from optimizer.study.config import StudyConfig, parse_config
from optimizer.study.course import read_subject
from optimizer.study.folder import read_config, read_manifest
from optimizer.study.several_models import SeveralModels
from optimizer.study.subjects import Subject
from search_spaces.core.bounded import parsed_json, read_bounded
from search_spaces.core.decoded_plan import jobs_of
from search_spaces.core.errors import PlanError, RunFolderError, UsageError, plain_name
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.wording import plural
from search_spaces.core.workload import Workload, by_name
from search_spaces.models.source import libraries_of

_POLICY = SamplingPolicy(max_s=3.0, min_runs=10, max_runs=1000)
# Each run is a stream of 0.2 s or more.
_STREAM_POLICY = SamplingPolicy(max_s=3.0, min_runs=5, max_runs=12, warmup_max=2)
_FEWEST, _MOST, _LIMIT_S = 5, 200, 3.0  # runs of a workload, and the seconds that they may take beyond the fewest
_FIGURES = ("mean_ms", "worst_ms", "longest_ms", "makespan_ms", "throughput_per_s", "misses", "rejected")
_WORKLOAD = "workload.json"


@dataclass(frozen=True, slots=True)
class Executed:
    """The figures of a plan that was run: the document of ``--json``, and the same as text."""

    document: dict[str, Any]
    text: str

    @property
    def accepted(self) -> bool:
        """Whether its outputs are what they should be; True if they were not compared."""
        outputs = self.document.get("outputs")
        return outputs is None or bool(outputs["accepted"])


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The best plan of a study, and the session that its evaluator opens for it."""

    session: Session
    subject: Subject
    plan: Plan

    def load(self, *, fresh: bool = False) -> Candidate:
        """Load the plan; ``fresh`` rebuilds its instance."""
        return self.session.load(self.subject.graph, self.plan, fresh=fresh)


def plan_of(run: str) -> Path:
    """Return the folder of a run folder's plan; any other path is returned as it is.

    Raises:
        RunFolderError: it is a folder without a plan: of a study that is not finished, of a campaign, or any other.
    """
    path = Path(run)
    if (path / "best" / "plan.json").exists():
        return path / "best"
    if path.is_dir() and not (path / "plan.json").exists():
        finished_study(path)
        return path / "best"
    return path


def study_of(path: Path) -> Path | None:
    """Return the run folder of a plan, given by its ``plan.json`` or a folder; None of any other path."""
    if path.name != "plan.json" and not path.is_dir():
        return None
    folder = path if path.is_dir() else path.parent
    found = folder.parent if folder.name == "best" else folder
    return found if (found / "best" / "plan.json").is_file() and read_manifest(found) is not None else None


def has_several(run: Path) -> bool:
    """Return whether a study is of several models."""
    return (run / "best" / _WORKLOAD).is_file()


def is_predicted(run: Path) -> bool:
    """Return whether the figures of a study are predictions.

    Raises:
        RunFolderError: the study is not finished, or damaged.
    """
    return bool(read_result(run).get("predicted"))


def execute(plan: str, *, stream: bool = False, inputs: Sequence[str] = (), custom_ops: Sequence[str] = ()) -> Executed:
    """Measure a plan from its files, or that of a study without files from its models.

    Args:
        inputs: files with the inputs to run on, as typed; by default those that the search measured with.
        custom_ops: libraries with kernels of custom operators, as typed.
        stream: run inferences that follow each other without a pause and overlap, instead of one at a time.

    Raises:
        PlanError: the plan or a stage file is missing or damaged.
        UnavailableError: this machine cannot run it.
    """
    path = plan_of(plan)
    files = is_workload_plan(path)
    study = None if files or runs_here(path) else study_of(path)
    if study is not None and (inputs or custom_ops):
        raise UsageError("--input and --custom-ops: the plan has no files for this machine", "leave them out")
    if files or (study is not None and has_several(study)):
        if stream:
            raise UsageError("--stream: a plan of several models has its own arrivals", "leave it out")
        found = _workload_by_evaluator(study) if study is not None else _workload_files(path, inputs, custom_ops)
        return replace(found, text=found.text + _in_study(path))
    objective, stages = OBJECTIVES["throughput" if stream else "latency"], 0
    policy = _STREAM_POLICY if stream else _POLICY
    if study is not None:
        with reloaded(study) as again, closing(again.load()) as candidate:
            if stream and not again.session.capabilities.stream:
                raise UsageError("--stream: the evaluator of this study runs one inference at a time", "leave it out")
            how = (Pricing(objective, again.subject.platform, {}),)
            measured = measure(PricedCandidate(candidate, again.plan, how), policy)
            agreement = candidate.verify()
        document = _figures(again.subject.graph.name, objective, measured, again.plan, _outputs(study, agreement))
    else:
        name = read_deployment(path).graph.name
        with PlanRunner(path, custom_ops=libraries_of(custom_ops, [name]).get(name)) as runner:
            read = [runner.read(Path(file)) for file in by_name("--input", inputs, [name]).values()]
            runner.run(*read) if read else runner.run_seeded()
            deployed = runner.deployment
            how = (Pricing(objective, deployed.platform, {}),)
            measured = measure(PricedCandidate(runner.candidate, deployed.plan, how), policy)
            flying = {"in_flight": runner.in_flight} if stream else {}
        document = _figures(deployed.graph.name, objective, measured, deployed.plan, flying)
        stages = len(deployed.plan.stages)
    known = "" if stream else _in_study(path, stages)
    return Executed(document, "\n".join(_lines(document, objective, measured)) + known)


def _in_study(plan: Path, stages: int = 0) -> str:
    """Return lines about a plan in its study: its latency, if the study had this objective, and its number of stages.

    Args:
        stages: of the plan's files; 0 for several models, and without files.
    """
    if (run := study_of(plan)) is None:
        return ""
    try:
        result = read_result(run)
    except RunFolderError:  # the plan runs all the same
        return ""
    if result.get("predicted"):
        return ""
    if workload := result.get("workload"):
        return f"\nits study measured: mean {workload['outcomes']['best']['mean_ms']:.4g} ms"
    known = result["best"]["latency_ms"] if objective_of(result) == LATENCY else None
    if not known:
        return ""
    there = "" if result.get("evaluator") in HOSTED else f", by the evaluator {result.get('evaluator')}"
    figure = figure_text(known["median"] / 1e3, tuple(x / 1e3 for x in known["ci95"]), "ms")
    own = len(result["best"]["plan"]["stages"])
    joins = (
        f"\nthe files have {stages} stages, the study's plan {own}: shares of splits are joined by stages of their own"
    )
    return f"\nits study measured: {figure}{there}{joins if stages > own else ''}"


def _figures(
    name: str, objective: Objective, found: Measurement, plan: Plan, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the document of ``--json`` for a plan of one model."""
    samples, stages = found.latency_s, zip(plan.stages, found.stage_s, strict=True)
    return {
        "schema_version": 1,
        "model": name,
        **more,
        objective.key: {
            "median": samples.median * 1e3,
            "ci95": [x * 1e3 for x in samples.ci95],
            "samples": len(samples.values_s),
            "values": [x * 1e3 for x in samples.values_s],
        },
        "stages": [{"processor": stage.processor, "ms": seconds * 1e3} for stage, seconds in stages],
    }


def _lines(document: Mapping[str, Any], objective: Objective, found: Measurement) -> list[str]:
    samples = found.latency_s
    how = "predicted" if document.get("predicted") else plural(len(samples.values_s), "run")
    latency = f"{interval_ms(samples)}, {how}"
    if objective.aggregation == "busiest":
        flying = f", {document['in_flight']} in flight" if "in_flight" in document else ""
        latency = f"a result every {interval_ms(samples)}, {1.0 / samples.median:.4g} a second{flying}"
    stages = [f"stage {i} on {s['processor']}: {s['ms']:.2f} ms" for i, s in enumerate(document["stages"])]
    return [f"{plain_name(document['model'])}: {latency}", *stages, *_output_lines(document)]


def _workload_files(path: Path, inputs: Sequence[str], custom_ops: Sequence[str]) -> Executed:
    """Run a workload from its files; a model that fails is reported, and the others go on."""
    clients = list(dict.fromkeys(read_workload_plan(path).clients))
    with WorkloadRunner(path, custom_ops=libraries_of(custom_ops, clients)) as runner:
        for client, file in by_name("--input", inputs, clients).items():
            runner.read(client, Path(file))
        runner.run()
        outcomes = _runs(runner.run)
        files, failures = runner.files, runner.failures
    return _of_workload(files.name, files.names, outcomes, {"failures": dict(failures)})


def _workload_by_evaluator(run: Path) -> Executed:
    """Run the best plan of a study of several models, and compare outputs with the whole models'."""
    with reloaded(run) as found, closing(found.load()) as candidate:
        candidate.run(1)
        outcomes, agreement = _runs(lambda: came_of(candidate.run(1))), candidate.verify()
    subject = cast("SeveralModels", found.subject)
    workload, joined = subject.workload, subject.joined
    names = [joined.components[k].name for k in jobs_of(found.plan, joined)]
    return _of_workload(workload.name, names, outcomes, {"failures": {}, **_outputs(run, agreement)})


def _runs(once: Callable[[], Outcome]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    begin_s = time.monotonic()
    while len(outcomes) < _MOST and (len(outcomes) < _FEWEST or time.monotonic() - begin_s < _LIMIT_S):
        outcomes.append(once())
    return outcomes


def _of_workload(name: str, names: Sequence[str], outcomes: Sequence[Outcome], more: Mapping[str, Any]) -> Executed:
    """Return the typical figures of some runs of a workload.

    Args:
        names: of the instances, in the order in which they go first.
        more: fields of the JSON document: why instances failed, and the check of ``outputs``.
    """
    document: dict[str, Any] = {"schema_version": 1, "workload": name, "runs": len(outcomes)}
    figures = typical_figures([o.to_json() for o in outcomes])
    document |= {key: figures[key] for key in _FIGURES}
    document |= {"instances_ms": dict(zip(names, figures["instances_ms"], strict=True)), **more}
    how = "predicted" if document.get("predicted") else plural(len(outcomes), "run")
    latency = (
        f"mean {document['mean_ms']:.4g} ms, worst {document['worst_ms']:.4g} ms, all done after "
        f"{document['makespan_ms']:.4g} ms; {document['throughput_per_s']:.4g} requests a second, "
        f"{document['misses']:.0f} missed; {how}"
    )
    took = [
        f"{plain_name(n)}: {document['failures'].get(n) or f'{ms:.4g} ms'}"
        for n, ms in document["instances_ms"].items()
    ]
    text = "\n".join([f"{plain_name(name)}: {latency}", *took, *_output_lines(document)])
    return Executed(document, text)


def _outputs(run: Path, agreement: Agreement | None) -> Mapping[str, Any]:
    """Return how outputs compare, for the document of ``--json``, and whether figures are predicted."""
    if agreement is None:
        return {"predicted": is_predicted(run), "outputs": None}
    error = agreement.to_json()["max_rel_error"]
    return {"outputs": {"max_rel_error": error, "allowed": agreement.tolerance, "accepted": agreement.accepted}}


def _output_lines(document: Mapping[str, Any]) -> list[str]:
    """Return a line about the ``outputs`` of a document; empty if it has none."""
    if "outputs" not in document:
        return []
    if (outputs := document["outputs"]) is None:
        predicted = document["predicted"]
        return ["everything is predicted; nothing was run" if predicted else "the evaluator returns no outputs"]
    error = outputs["max_rel_error"]
    how = f"off by up to {error or 0:.2g} of the whole model's largest value; {outputs['allowed']:.2g} is allowed"
    if not error:
        how = "equal to the whole model's" if error == 0 else "infinite or no numbers where the whole model's are not"
    return [f"outputs are {'correct' if outputs['accepted'] else 'wrong'}: {how}"]


@contextmanager
def reloaded(run: Path) -> Iterator[Reloaded]:
    """Open a session of a study's evaluator for its best plan.

    Raises:
        RunFolderError: the study's settings are damaged, or its models or their options have changed.
        PlanError: the plan is damaged.
        UnavailableError: the device is not there.
    """
    with reread(run) as (subject, plan), subject.session() as session:
        yield Reloaded(session, subject, plan)


@contextmanager
def open_workload(run: Path, *names: str) -> Iterator[Workload]:
    """Yield the workload of a study of several models; in the folder where the study ran, if its models are there.

    Args:
        names: of more files that the study named.

    Raises:
        RunFolderError: it cannot be read.
    """
    path = run.resolve() / "best" / _WORKLOAD
    try:
        document = parsed_json(read_bounded(path))
        workload = Workload.from_json(document)
    except (OSError, ValueError, RecursionError, UsageError) as error:
        raise RunFolderError(f"{path}: cannot be read: {error}", "search again") from error
    files, folder = [*(name for c in workload.clients for name in (c.model, c.input)), *names], document.get("folder")
    there = False
    with suppress(OSError, ValueError):  # another person's folder
        there = isinstance(folder, str) and any(f and not Path(f).exists() and Path(folder, f).is_file() for f in files)
    with chdir(folder) if there else nullcontext():
        yield workload


@contextmanager
def reread(run: Path, platform: Platform | None = None) -> Iterator[tuple[Subject, Plan]]:
    """Read the models of a study again, and its best plan.

    Args:
        platform: that of a study of several models, where the device need not be asked.

    Raises:
        RunFolderError, PlanError, UnavailableError: as of :func:`reloaded`.
    """
    run = run.resolve()
    config = _config(run)
    with open_workload(run, str(config.platform or "")) if has_several(run) else nullcontext() as workload:
        plan = _plan(run / "best" / "plan.json")
        # Evaluators that are opened again run no custom operators.
        bare = workload and replace(workload, clients=tuple(replace(c, custom_ops=None) for c in workload.clients))
        subject = read_subject(config, bare, platform)
        manifest = read_manifest(run) or {"fixed": {}}
        digest = f"{subject.graph.digest}+{workload.digest}" if workload else subject.digest
        if digest != manifest["fixed"].get("model_digest") or plan.graph_digest != subject.graph.digest:
            raise RunFolderError(f"{run}: its models or their options have changed", "search again")
        yield subject, plan


def _config(run: Path) -> StudyConfig:
    try:
        settings = read_config(run)
        # Evaluators that are opened again run no custom operators, and nothing is searched.
        known = StudyConfig.model_fields.keys() - {"custom_ops", "precision"}
        if settings.get("max_stages") == StudyConfig.model_fields["max_stages"].default:
            known -= {"max_stages"}  # or as many as there are operators
        return parse_config({name: value for name, value in settings.items() if name in known})
    except UsageError as error:
        raise RunFolderError(error.what, "search again") from error


def _plan(path: Path) -> Plan:
    try:
        document = parsed_json(read_bounded(path))
        return Plan.from_json(document.get("plan", document))  # files of several models hold more than the plan
    except PlanError as error:
        raise PlanError(f"{path}: {error.what}", error.hint) from error
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise PlanError(f"{path}: cannot be read: {error}", "search again") from error
