"""Plans without files for this machine, loaded again by the evaluator of their study.

What several models are asked is what they were asked in the study, whatever its workload's file says now.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, chdir, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluators.base import Agreement, Evaluator, Session
from evaluators.registry import make_evaluator
from evaluators.workload.host import WorkloadSession
from evaluators.workload.outcome import Outcome
from optimizer.config import StudyConfig, parse_config
from optimizer.devices import choose_model_and_platform
from optimizer.execute_workload import FEWEST, LIMIT_S, MOST, Executed, render
from optimizer.report.data import read_result
from optimizer.run import CONFIG, read_manifest
from optimizer.workload_problem import Problem, read_problem
from search_spaces.arrangement import jobs_of
from search_spaces.bounded import parsed_json, read_bounded
from search_spaces.errors import PlanError, RunFolderError, UsageError
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform
from search_spaces.workload import Arrival, Client, Workload
from search_spaces.yaml_file import read_settings

_WORKLOAD = "workload.json"


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The best plan of a study, and the session that its evaluator opens for it."""

    session: Session
    graph: Graph
    plan: Plan
    platform: Platform


@dataclass(frozen=True, slots=True)
class ReloadedWorkload:
    """The best plan of a study of several models, and the session that its evaluator opens for it."""

    session: WorkloadSession
    problem: Problem
    plan: Plan


def study_of(path: Path) -> Path | None:
    """Return the run folder that a plan lies in, given by itself or its folder; None where it lies elsewhere."""
    folder = path if path.is_dir() else path.parent
    found = folder.parent if folder.name == "best" else folder
    return found if (found / "best" / "plan.json").is_file() and read_manifest(found) is not None else None


def has_several(run: Path) -> bool:
    """Return whether a study is of several models."""
    return (run / "best" / _WORKLOAD).is_file()


@contextmanager
def reloaded(run: Path) -> Iterator[Reloaded]:
    """Open a session of a study's evaluator for its best plan.

    Raises:
        RunFolderError: the study's settings are damaged, or its model is another one now.
        PlanError: the plan is damaged.
        UnavailableError: the device is not there.
    """
    run = run.resolve()
    config = _config(run)
    plan = _plan(run / "best" / "plan.json")
    evaluator = make_evaluator(config.evaluator)
    graph, platform = choose_model_and_platform(evaluator, config)
    if graph.digest != plan.graph_digest:
        raise RunFolderError(f"{run}: {config.model} is another model now", "search again")
    with evaluator.prepare(platform) as session:
        yield Reloaded(session, graph, plan, platform)


@contextmanager
def open_problem(run: Path) -> Iterator[tuple[Evaluator, Problem, Plan]]:
    """Read again what a study of several models was about; yield its evaluator, that, and its best plan.

    Raises:
        RunFolderError: the study's settings are damaged, or its models, or what they are asked, are others now.
        PlanError: the plan is damaged.
    """
    run = run.resolve()
    config, workload = _config(run), _workload(run / "best" / _WORKLOAD)
    with _where(run / "best" / _WORKLOAD, [*(c.model for c in workload.clients), str(config.platform or "")]):
        evaluator, plan = make_evaluator(config.evaluator), _plan(run / "best" / "plan.json")
        problem = read_problem(config, evaluator, workload)
        manifest = read_manifest(run) or {"fixed": {}}
        digest = f"{problem.joined.graph.digest}+{problem.workload.digest}"
        if digest != manifest["fixed"].get("model_digest") or plan.graph_digest != problem.joined.graph.digest:
            raise RunFolderError(f"{run}: its models or their options have changed", "search again")
        yield evaluator, problem, plan


@contextmanager
def reloaded_workload(run: Path) -> Iterator[ReloadedWorkload]:
    """Open a session of a study's evaluator for its best plan of several models; errors as :func:`open_problem`.

    Raises:
        UnavailableError: the device is not there.
    """
    with open_problem(run) as (evaluator, problem, plan):
        asked = problem.workload, problem.joined, problem.platform, problem.objective
        with evaluator.host(*asked) as session:
            yield ReloadedWorkload(session, problem, plan)


def execute_hosted(run: Path, *, as_json: bool) -> Executed:
    """Run the best plan of a study of several models some times, and compare outputs with the whole models'."""
    outcomes: list[Outcome] = []
    with (
        reloaded_workload(run) as found,
        closing(found.session.load(found.problem.joined.graph, found.plan)) as candidate,
    ):
        candidate.run(1)
        begin_s = time.monotonic()
        while len(outcomes) < MOST and (len(outcomes) < FEWEST or time.monotonic() - begin_s < LIMIT_S):
            candidate.run(1)
            outcomes.append(candidate.outcome)
        agreement = candidate.verify()
    problem = found.problem
    names = [problem.joined.components[k].name for k in jobs_of(found.plan, problem.joined)]
    text = render(problem.workload.name, names, outcomes, {}, as_json=as_json, more=told_outputs(run, agreement))
    return Executed(text, agreement is None or agreement.accepted)


def told_outputs(run: Path, agreement: Agreement | None) -> Mapping[str, Any]:
    """Return how outputs compare, for the document of ``--json``, and whether figures are predicted."""
    if agreement is None:
        return {"predicted": is_predicted(run), "outputs": None}
    error = agreement.max_rel_error
    return {"outputs": {"max_rel_error": error, "allowed": agreement.tolerance, "accepted": agreement.accepted}}


def is_predicted(run: Path) -> bool:
    """Return whether the figures of a study are predictions.

    Raises:
        RunFolderError: the study is not finished, or damaged.
    """
    return bool(read_result(run).get("predicted"))


def _config(run: Path) -> StudyConfig:
    try:
        settings = read_settings(run / CONFIG)
        return parse_config({name: value for name, value in settings.items() if name in StudyConfig.model_fields})
    except UsageError as error:
        raise RunFolderError(error.what, "search again") from error


def _where(path: Path, names: Sequence[str]) -> AbstractContextManager[None]:
    """Go to where the study ran if a file that it named lies there, and does not lie here."""
    try:
        folder = Path(parsed_json(read_bounded(path))["folder"])
        elsewhere = any(name and not Path(name).exists() and (folder / name).is_file() for name in names)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        elsewhere = False
    return chdir(folder) if elsewhere else nullcontext()


def _workload(path: Path) -> Workload:
    """Read what :meth:`~search_spaces.workload.Workload.to_json` returned."""
    try:
        document = parsed_json(read_bounded(path))
        clients = tuple(Client(**{**each, "arrival": Arrival(**each["arrival"])}) for each in document["clients"])
        return Workload(str(document["name"]), clients, document["seed"], document["memory_limit_nbytes"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, UsageError) as error:
        raise RunFolderError(f"{path}: cannot be read: {error!r}", "search again") from error


def _plan(path: Path) -> Plan:
    try:
        document = parsed_json(read_bounded(path))
        return Plan.from_json(document.get("plan", document))  # files of several models hold more than the plan
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise PlanError(f"{path}: cannot be read: {error}", "search again") from error
