"""Baselines of one model: each processor alone, and the cut criteria of seed 000. And plans that a person gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from search_spaces.core.bounded import parsed_json, read_bounded
from search_spaces.core.errors import OptimizeError, PlanError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, canonical
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.cuts import every_layer, layer_length, layer_type, parameter_count

MOST_PARTS = 4
OWN = "plan of "
"""Start of the names of plans that a person gives."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A plan to compare with, and its name in tables."""

    name: str
    plan: Plan


def baselines(graph: Graph, platform: Platform, fastest: str) -> tuple[Baseline, ...]:
    """Return the baselines of a model: whole on each kind of processor, then the criteria of seed 000 on ``fastest``.

    Args:
        fastest: name of the processor that runs the whole model fastest.
    """
    found = [
        Baseline(f"whole on {members[0].name}", chain_plan(graph, (), [members[0].name]))
        for members in platform.classes().values()
    ]
    most = min(MOST_PARTS, len(graph.operators))
    cuts = {f"layer length K={k}": layer_length(graph, k) for k in range(2, most + 1)}
    cuts["layer type K=2"] = layer_type(graph)
    cuts |= {f"parameter count K={k}": parameter_count(graph, k) for k in range(2, most + 1)}
    cuts["every layer"] = every_layer(graph)
    for name, positions in cuts.items():
        if positions:  # some criteria find no cut: a model without fully connected layers, or of one layer
            found.append(Baseline(name, chain_plan(graph, positions, [fastest] * (len(positions) + 1))))
    return tuple(Baseline(b.name, canonical(b.plan, graph, platform)) for b in found)


def own_plans(paths: Sequence[str], graph: Graph, platform: Platform) -> tuple[Baseline, ...]:
    """Return the plans of ``--compare-with``: of files as ``plan.json``, or of studies.

    Args:
        paths: of plans, of their folders, or of run folders.
        platform: the processors that plans may name.

    Raises:
        PlanError: a file is missing or damaged, or its plan is not for this model or these processors.
        UsageError: two plans have one name.
    """
    found: dict[str, Baseline] = {}
    for text in paths:
        file = next((f for f in (Path(text, "best", "plan.json"), Path(text, "plan.json")) if f.is_file()), Path(text))
        name = OWN + (file.stem if file == Path(text) and file.stem != "plan" else text)
        if name in found:
            raise UsageError(f"--compare-with {text}: another plan has this name", "rename one of the files")
        try:
            plan = Plan.from_json(parsed_json(read_bounded(file)))
            plan.validate(graph, platform)
        except OSError as error:
            raise PlanError(f"--compare-with {text}: {error.strerror}", "give a plan.json, or a run folder") from error
        except (ValueError, RecursionError) as error:
            raise PlanError(f"--compare-with {text}: not a plan: {error}", "give a plan.json") from error
        except OptimizeError as error:
            raise PlanError(f"--compare-with {text}: {error.what}", error.hint) from error
        found[name] = Baseline(name, plan)
    return tuple(found.values())
