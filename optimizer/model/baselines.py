"""Baselines of one model (each processor alone, and the cut criteria of seed 000), and plans that a person gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from search_spaces.core.bounded import parsed_json, read_bounded
from search_spaces.core.errors import OptimizeError, PlanError, UsageError, damage
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


def own_plans(paths: Sequence[str], checked: Callable[[Plan], Plan]) -> tuple[Baseline, ...]:
    """Return the plans of ``--compare-with``: of files as ``plan.json``, or the recommended ones of studies.

    Args:
        paths: of plans, of their folders, or of run folders.
        checked: returns the canonical form of a plan that can be run.

    Raises:
        PlanError: a file is missing or damaged, or its plan cannot be run.
        UsageError: two plans have one name.
    """
    found: dict[str, Baseline] = {}
    for text in paths:
        path = Path(text)
        name = OWN + (path.stem if path.suffix == ".json" and path.stem != "plan" else text)
        if name in found:
            raise UsageError(f"--compare-with {text}: another plan has this name", "rename one of the files")
        try:
            plan = checked(_read_plan(path))
        except OSError as error:
            raise PlanError(f"--compare-with {text}: {error.strerror}", "give a plan.json, or a run folder") from error
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise PlanError(f"--compare-with {text}: not a plan: {damage(error)}", "give a plan.json") from error
        except OptimizeError as error:
            hint = error.hint or "give a plan of this model, or the run folder of its study"
            raise PlanError(f"--compare-with {text}: {error.what}", hint) from error
        found[name] = Baseline(name, plan)
    return tuple(found.values())


def _read_plan(path: Path) -> Plan:
    """Return the plan of a file or folder: of a study as it was searched, since its files hold the rewritten one."""
    if (result := path / "result.json").is_file():
        return Plan.from_json(parsed_json(read_bounded(result))["best"]["plan"])
    document = parsed_json(read_bounded(path / "plan.json" if path.is_dir() else path))
    return Plan.from_json(document["plan"] if isinstance(document, dict) and "plan" in document else document)
