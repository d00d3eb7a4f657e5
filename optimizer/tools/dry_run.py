"""What a study would search, told without measuring anything."""

from __future__ import annotations

import json
from typing import Any

from evaluators.registry import make_evaluator
from optimizer.devices import asks_for_several, choose_model_and_platform
from optimizer.model.baselines import baselines
from optimizer.study.config import StudyConfig, most_stages
from search_spaces.core.wording import many
from search_spaces.spaces.registry import make_space


def dry_run(config: StudyConfig, *, as_json: bool) -> str:
    """Return what to print; errors are those of the study."""
    several = asks_for_several(make_evaluator(config.evaluator), config)
    document = _workload(config) if several else _model(config)
    if as_json:
        return json.dumps({"schema_version": 1, **document}, indent=2)
    return "\n".join(f"{name:12}{_shown(value)}" for name, value in document.items())


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else many(value) if isinstance(value, int) else str(value)


def _model(config: StudyConfig) -> dict[str, Any]:
    graph, platform = choose_model_and_platform(make_evaluator(config.evaluator), config)
    space = make_space(config.allow, graph, platform, most_stages(config, len(graph.operators)))
    return {
        "model": graph.name,
        "operators": len(graph.operators),
        "processors": [p.name for p in platform.processors],
        "plans": space.cardinality(),
        "budget": config.budget,
        "baselines": [b.name for b in baselines(graph, platform, platform.processors[0].name)],
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
        "plans": plans,
        "budget": config.budget,
        "baselines": [b.name for b in problem.baselines],
    }
    return document | foreseen(problem.workload, space.platform, problem.choices, problem.baselines, plans)
