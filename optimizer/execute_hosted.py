"""Run a plan of several models again where its evaluator writes no files: from the models, as the study did.

That is what ``optimize execute`` does with a study on a GPU's streams, or on a cost model. What the models are asked is
what they were asked in the study, whatever its workload's file says now.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, chdir, closing, nullcontext
from pathlib import Path
from typing import Any

from evaluators.base import Agreement
from evaluators.registry import make_evaluator
from evaluators.workload.outcome import Outcome
from optimizer.config import StudyConfig, parse_config
from optimizer.execute_workload import FEWEST, LIMIT_S, MOST, Executed, render
from optimizer.run import CONFIG, read_manifest
from optimizer.workload_problem import read_problem
from search_spaces.arrangement import jobs_of
from search_spaces.bounded import parsed_json, read_bounded
from search_spaces.errors import PlanError, RunFolderError, UsageError
from search_spaces.plan import Plan
from search_spaces.workload import Arrival, Client, Workload
from search_spaces.yaml_file import read_settings

_WORKLOAD = "workload.json"


def study_of(path: Path) -> Path | None:
    """Return the run folder of several models that a plan lies in, given by itself or its folder; None for others."""
    folder = path if path.is_dir() else path.parent
    found = folder.parent if folder.name == "best" else folder
    return found if (found / "best" / _WORKLOAD).is_file() and read_manifest(found) is not None else None


def execute_hosted(run: Path, *, as_json: bool) -> Executed:
    """Run the best plan of a study some times, and compare outputs with the whole models'.

    Raises:
        RunFolderError: the study's settings are damaged, or its models, or what they are asked, are others now.
        PlanError: the plan is damaged.
        UnavailableError: this machine cannot run it.
    """
    run = run.resolve()
    config = parse_config({name: value for name, value in _settings(run).items() if name in StudyConfig.model_fields})
    workload = _workload(run / "best" / _WORKLOAD)
    with _where(run / "best" / _WORKLOAD, [*(c.model for c in workload.clients), str(config.platform or "")]):
        return _execute(run, config, workload, as_json=as_json)


def _execute(run: Path, config: StudyConfig, workload: Workload, *, as_json: bool) -> Executed:
    plan = _plan(run / "best" / "plan.json")
    evaluator = make_evaluator(config.evaluator)
    problem = read_problem(config, evaluator, workload)
    manifest = read_manifest(run) or {"fixed": {}}
    digest = f"{problem.joined.graph.digest}+{problem.workload.digest}"
    if digest != manifest["fixed"].get("model_digest") or plan.graph_digest != problem.joined.graph.digest:
        raise RunFolderError(f"{run}: its models or their options have changed", "search again")
    outcomes: list[Outcome] = []
    arguments = problem.workload, problem.joined, problem.platform, problem.objective
    with (
        evaluator.host(*arguments) as session,
        closing(session.load(problem.joined.graph, plan)) as candidate,
    ):
        candidate.run(1)
        begin_s = time.monotonic()
        while len(outcomes) < MOST and (len(outcomes) < FEWEST or time.monotonic() - begin_s < LIMIT_S):
            candidate.run(1)
            outcomes.append(candidate.outcome)
        agreement = candidate.verify()
    names = [problem.joined.components[k].name for k in jobs_of(plan, problem.joined)]
    text = render(problem.workload.name, names, outcomes, {}, as_json=as_json, more=_outputs(agreement))
    return Executed(text, agreement is None or agreement.accepted)


def _outputs(agreement: Agreement | None) -> Mapping[str, Any]:
    if agreement is None:
        return {"outputs": None}
    error = agreement.max_rel_error
    return {"outputs": {"max_rel_error": error, "allowed": agreement.tolerance, "accepted": agreement.accepted}}


def _settings(run: Path) -> Mapping[str, Any]:
    try:
        return read_settings(run / CONFIG)
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
        return Plan.from_json(parsed_json(read_bounded(path)))
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{path}: cannot be read: {error}", "search again") from error
