"""Baselines of one model (each processor alone, and the cut criteria of seed 000), and plans that a person gives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from search_spaces.core.bounded import Own, parsed_json, read_bounded
from search_spaces.core.errors import OptimizeError, PlanError, UsageError, damage, reason_of
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, canonical
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.cuts import every_layer, layer_length, layer_type, parameter_count, weighted_layer_length

MOST_PARTS = 4
OWN = "plan of "
"""Start of the names of plans that a person gives."""

SEED_003 = "branch greedy (NEST-C)"
SIDE_BY_SIDE = "every group side by side"
GREEDY = "CoDL's greedy chains"
SINGLE = "operators split one by one"
BY_HEIGHT, BY_CHANNELS = "operators split by height alone", "operators split by channels alone"
CHAINS = "chains split"
EVERY = "every operator shared"
BRANCHES = "branches side by side"
CUTS = "best cuts by the model"
LIST = "list scheduling (HEFT)"

MEANINGS = {
    "whole on": "The model is one stage on this processor.",
    "layer length": "It is cut into K stages of as many operators each, all on the processor that runs it fastest.",
    "layers with weights": "It is cut into K stages of as many layers with weights each, all on the processor that "
    "runs it fastest; only where a study asks for it.",
    "layer type": "It is cut where its fully connected layers begin, all on the processor that runs it fastest.",
    "parameter count": "It is cut into K stages with about the same number of parameters, all on the processor that "
    "runs it fastest.",
    "every layer": "Each operator is a stage of its own, all on the processor that runs the model fastest.",
    SEED_003: "Each group of parallel branches is spread over the processors, or stays in one place where that is "
    "predicted to be faster, as in NEST-C.",
    SIDE_BY_SIDE: "Each group of parallel branches is spread over the processors, as if starting stages and transfers "
    "took no time.",
    GREEDY: "Each operator is split between two processors where that is predicted to be faster, and chains of them "
    "grow while that saves time, as in CoDL.",
    SINGLE: "Each operator alone is split between two processors where that is predicted to be faster.",
    BY_HEIGHT: "Each operator alone is split between two processors where that is predicted to be faster, by height; "
    "within a module by channels where height is not possible.",
    BY_CHANNELS: "Each operator alone is split between two processors where that is predicted to be faster, by "
    "channels; within a module by height where channels are not possible.",
    CHAINS: "Chains of operators are split between two processors in the best predicted way; branches stay together.",
    EVERY: "Every operator that can be is split between the two processors that are the fastest together, in "
    "proportion to their speed.",
    BRANCHES: "Branches run on different processors at once in the best predicted way; no operator is split.",
    CUTS: "The model is cut into consecutive stages in the best predicted way, without branches or splits.",
    LIST: "Stages are placed in order of priority, each where it ends first (HEFT).",
    "LiteRT's own placement": "LiteRT decides which operators the accelerator runs; the CPU runs the others.",
    "the model's optimum": "The plan that the model predicts to be best; here no processor can run the model alone.",
    "the nominal plan": "The plan that is best by the model for the usual state of the machine.",
    "Tucker, one share for all layers": "All convolutions are decomposed with the same share of their ranks.",
    "the best chain without Tucker": "The model is cut into consecutive stages in the best predicted way, and no "
    "convolution is decomposed.",
    "one process per model": "Each model runs whole in its own process; the operating system, or the GPU, shares what "
    "there is.",
    "one thread per model": "Each model runs whole in a thread of one process; the operating system, or the GPU, "
    "shares what there is.",
    "one after another": "The models run whole on this processor, one at a time.",
    "one processor per model": "The models run whole, each on a processor of its own, in turns if there are too few.",
    "whole models": "Each model runs whole on the processor that is best for all models together, by prediction.",
    "the best predicted plan without Tucker": "The best plan by prediction in which no convolution is decomposed.",
    "the best predicted plan": "The plan that is predicted to be best; here no other baseline keeps the limits.",
    OWN: "A plan that was given by --compare-with.",
}
"""Start of a baseline's name → what the plan is, in a sentence."""


_ASKED = {f"layers with weights K={k}": k for k in range(2, MOST_PARTS + 1)}
_COUNTED = ("layer length", "parameter count")
_CRITERIA = {
    "every layer",
    "layer type K=2",
    *_ASKED,
    *(f"{kind} K={k}" for kind in _COUNTED for k in range(2, MOST_PARTS + 1)),
}


@dataclass(frozen=True, slots=True)
class Baseline:
    """A plan to compare with, and its name in tables."""

    name: str
    plan: Annotated[Plan, Own(Plan.from_json)]


def baselines(graph: Graph, platform: Platform, fastest: str, asked: Collection[str] = ()) -> tuple[Baseline, ...]:
    """Return the baselines of a model: whole on each kind of processor, then the criteria of seed 000 on ``fastest``.

    Args:
        fastest: name of the processor that runs the whole model fastest.
        asked: names of criteria that are left out otherwise.
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
    cuts |= {name: weighted_layer_length(graph, k) for name, k in _ASKED.items() if name in asked}
    for name, positions in cuts.items():
        if positions:  # some criteria find no cut: a model without fully connected layers, or of one layer
            found.append(Baseline(name, chain_plan(graph, positions, [fastest] * (len(positions) + 1))))
    return tuple(Baseline(b.name, canonical(b.plan, graph, platform)) for b in found)


def is_baseline(name: str) -> bool:
    """Return whether some study may have a baseline of this name; names of a person's own plans are none."""
    if name.startswith(("every layer", "layer", "parameter", OWN)):
        return name in _CRITERIA
    return name.startswith(tuple(MEANINGS))


def is_asked_for(name: str) -> bool:
    """Return whether a study has a baseline of this name only where it is asked for it."""
    return name in _ASKED


def glossary(names: Iterable[str]) -> dict[str, str]:
    """Return name → meaning of baselines; names that differ in an ending are one: ``layer length``."""
    found: dict[str, str] = {}
    for name in names:
        key = max((start for start in MEANINGS if name.startswith(start)), key=len, default="")
        if key:
            found[key if name == key else f"{key.strip()} …"] = MEANINGS[key]
    return found


def own_plans(given: Sequence[str], checked: Callable[[Plan], Plan]) -> tuple[Baseline, ...]:
    """Return the plans of ``--compare-with``: of files as ``plan.json``, or the recommended ones of studies.

    Args:
        given: paths of plans, of their folders, or of run folders; names of baselines are left out.
        checked: returns the canonical form of a plan that can be run.

    Raises:
        PlanError: a file is missing or damaged, or its plan cannot be run.
        UsageError: two plans have one name.
    """
    found: dict[str, Baseline] = {}
    for text in given:
        path = Path(text)
        if is_baseline(text) and not path.exists():
            continue
        name = OWN + (path.stem if path.suffix == ".json" and path.stem != "plan" else text)
        if name in found:
            raise UsageError(f"--compare-with {text}: another plan has this name", "rename one of the files")
        try:
            plan = checked(read_plan(path))
        except OSError as error:
            raise PlanError(
                f"--compare-with {text}: {reason_of(error)}",
                "give a plan.json, a run folder, or a baseline's name (see --dry-run)",
            ) from error
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise PlanError(f"--compare-with {text}: not a plan: {damage(error)}", "give a plan.json") from error
        except OptimizeError as error:
            hint = error.hint or "give a plan of this model, or the run folder of its study"
            raise PlanError(f"--compare-with {text}: {error.what}", hint) from error
        found[name] = Baseline(name, plan)
    return tuple(found.values())


def read_plan(path: Path) -> Plan:
    """Return the plan of a file or folder: of a study as it was searched, since its files hold the rewritten one.

    Raises:
        OSError, OptimizeError, ValueError, LookupError, TypeError, RecursionError: it is missing or damaged.
    """
    if (result := path / "result.json").is_file():
        return Plan.from_json(parsed_json(read_bounded(result))["best"]["plan"])
    document = parsed_json(read_bounded(path / "plan.json" if path.is_dir() else path))
    return Plan.from_json(document["plan"] if isinstance(document, dict) and "plan" in document else document)
