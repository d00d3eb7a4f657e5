"""Dry run: what a study would search, without measuring anything."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evaluators.registry import make_evaluator
from optimizer.devices import asks_for_several, choose_model_and_platform
from optimizer.model.baselines import baselines
from optimizer.model.goals import asked
from optimizer.report.console import make_console
from optimizer.samplers import make_sampler
from optimizer.study.config import StudyConfig, space_of, with_freedoms
from optimizer.study.warm import fingerprint_of, warm_start
from search_spaces.core.wording import many


def dry_run(config: StudyConfig, *, as_json: bool) -> str:
    """Return what to print.

    Errors are those of the study's beginning, of one model with the evaluator's session open. Not checked are the run
    folder, a shared storage, and what only shows when plans are priced or measured.
    """
    make_sampler(config.sampler, config.seed, 0)
    several = asks_for_several(make_evaluator(config.evaluator), config)
    document = _workload(config) if several else _model(config)
    if as_json:
        return json.dumps({"schema_version": 1, **document}, indent=2)
    console = make_console()  # words stay whole on a terminal; a pipe gets a line for each name
    width = console.width if console.is_terminal else sys.maxsize
    return "\n".join(_line(f"{name:12}{_shown(value)}", width) for name, value in document.items())


def _line(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False)


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else many(value) if isinstance(value, int) else str(value)


def _model(config: StudyConfig) -> dict[str, Any]:
    evaluator = make_evaluator(config.evaluator)
    graph, platform = choose_model_and_platform(evaluator, config)
    config = with_freedoms(config, [graph], platform)
    space = space_of(config, graph, platform)
    with TemporaryDirectory() as folder, evaluator.prepare(platform, Path(folder)) as session:
        asked(config, platform, session)
        if config.warm_start is not None:
            warm_start(config.warm_start, fingerprint_of(session), config, graph, platform)
    return {
        "model": graph.name,
        "operators": len(graph.operators),
        "processors": [p.name for p in platform.processors],
        "allow": config.allow,
        "plans": space.cardinality(),
        "budget": config.budget,
        "baselines": [b.name for b in baselines(graph, platform, platform.processors[0].name)],
        "later": "further baselines, once the operators are timed",
    }


def _workload(config: StudyConfig) -> dict[str, Any]:
    from optimizer.workload.problem import read_problem
    from optimizer.workload.ranks import foreseen

    problem = read_problem(config, make_evaluator(config.evaluator))
    space, plans = problem.space, problem.space.cardinality()
    document: dict[str, Any] = {
        "workload": problem.workload.name,
        "models": [i.name for i in problem.workload.instances],
        "operators": len(problem.joined.graph.operators),
        "processors": [p.name for p in space.platform.processors],
        "objective": ", ".join(o.name for o in problem.objectives),
        "allow": problem.config.allow,
        "plans": plans,
        "budget": config.budget,
        "baselines": [b.name for b in problem.baselines],
    }
    return document | foreseen(problem.workload, space.platform, problem.choices, problem.baselines, plans)
