"""``--allow ranks`` with several models: which of them are decomposed, the baselines, the messages and the files."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimizer.files import disk_errors
from optimizer.model.baselines import Baseline
from optimizer.study.config import StudyConfig
from optimizer.study.limits import allowed_error
from optimizer.workload.baselines import PROCESSES, SEQUENTIAL, STATIC
from optimizer.workload.variants import Variants, as_set, most_variants
from search_spaces.core.decoded_plan import RankSet, joined_ranks
from search_spaces.core.errors import RewriteError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.workload import Workload
from search_spaces.models.stages import cut_stage
from search_spaces.rewrites.tucker import decompose, outline, ranks_of
from search_spaces.rewrites.tucker_ranks import RankChoices
from search_spaces.spaces.registry import freedoms_of
from search_spaces.spaces.workload_space import WorkloadSpace

RANKS = "ranks"
"""Kind of the log record that holds :class:`~optimizer.workload.variants.Variants`."""

PLAIN = "the best predicted plan without Tucker"
_RANKED = ", Tucker"
_LOGGER = logging.getLogger("partition_optimizer")

RankSets = Sequence[RankSet]


def with_errors(workload: Workload, config: StudyConfig) -> Workload:
    """Return a workload with the command line's error limit for each client that may be decomposed and has none.

    Raises:
        UsageError: ``--allow ranks`` or ``--max-error`` has no effect.
    """
    if "ranks" in freedoms_of(config.allow):
        most = allowed_error(config)
        workload = replace(
            workload, clients=tuple(replace(c, tucker=most) if c.tucker is None else c for c in workload.clients)
        )
        if not any(c.tucker for c in workload.clients):
            if config.max_error == 0.0:
                raise UsageError("--max-error 0 rules out every decomposition", "leave ranks out of --allow")
            raise UsageError("--allow ranks: the workload's file lets no model be decomposed", "leave ranks out")
    elif config.max_error is not None and not any(c.tucker for c in workload.clients):
        raise UsageError("--max-error with several models requires --allow ranks", "leave it out, or allow ranks")
    return workload


def choices_of(workload: Workload, graphs: Sequence[Graph]) -> dict[int, RankChoices]:
    """Return client → ranks that its convolutions may have; a client that cannot be decomposed is left out.

    Args:
        graphs: of each client; clients of one model share theirs.

    Raises:
        RewriteError: none of them can be decomposed.
    """
    found: dict[int, RankChoices] = {}
    made: dict[int, RankChoices] = {}
    problems: list[RewriteError] = []
    for c, (client, graph) in enumerate(zip(workload.clients, graphs, strict=True)):
        if not client.tucker:
            continue
        try:
            found[c] = made[id(graph)] = made.get(id(graph)) or RankChoices(graph)
        except RewriteError as error:
            problems.append(error)
    if problems and not found:
        raise problems[0]
    for problem in problems:
        _LOGGER.warning("%s: it stays as it is", problem.what)
    return found


def grids_of(workload: Workload, choices: Mapping[int, RankChoices]) -> dict[str, list[RankSet]]:
    """Return graph digest → sets of triples to price: all layers with their first, second, … choice.

    Triples that alone exceed the allowed error are left out. Models of one structure have the same prices, whatever
    their weights: the triples of one are priced for all.

    Raises:
        RewriteError, ModelError: the weights cannot be read.
    """
    alike: dict[str, list[tuple[RankChoices, float]]] = {}
    for graph in {id(each.graph): each.graph for each in choices.values()}.values():
        mine = {c: each for c, each in choices.items() if each.graph is graph}
        most = max(workload.clients[c].tucker or 0.0 for c in mine)
        each = next(iter(mine.values()))
        _warn_of_none(each, workload.clients[next(iter(mine))].model, most)
        alike.setdefault(graph.digest, []).append((each, most))
    found: dict[str, list[RankSet]] = {}
    for digest, models in alike.items():
        options = models[0][0].options
        for level in range(max(map(len, options.values()), default=0)):
            wanted = {o: ranks[level] for o, ranks in options.items() if level < len(ranks)}
            ranks = as_set({o: r for o, r in wanted.items() if any(one.loss(o, r) <= most**2 for one, most in models)})
            if ranks:
                found.setdefault(digest, []).append(ranks)
    return found


def _warn_of_none(choices: RankChoices, model: str, most: float) -> None:
    if not choices.places:
        _LOGGER.warning("%s: no triple takes fewer multiply-accumulates than its convolution: it stays as it is", model)
        return
    least = min(choices.loss(*place) ** 0.5 for place in choices.places)
    if least > most:
        _LOGGER.warning(
            "%s: no convolution keeps an error of %g as a triple (the nearest has %.2g), so it stays as it is: allow a "
            "larger --max-error, or give weights that were trained; random ones have no low rank, but those of "
            "NAME+spectrum do",
            model,
            most,
            least,
        )


def twins(
    space: WorkloadSpace, named: Sequence[Baseline], variants: Variants, predict: Callable[[Plan], float]
) -> tuple[Baseline, ...]:
    """Return the usual baseline with decomposed models: one share for all layers, and processes (seed 001).

    Args:
        named: the baselines of the models as they are.
        predict: seconds of a plan.
    """
    ranks = joined_ranks(space.ranks.chosen(variants.uniform()), space.joined)
    usual = _usual(named)[1] if ranks else []
    mine = [Baseline(f"{b.name}{_RANKED}", replace(b.plan, ranks=ranks)) for b in usual]
    return (min(mine, key=lambda b: predict(b.plan)),) if mine else ()


def _usual(named: Sequence[Baseline]) -> tuple[str, list[Baseline]]:
    """Return the most usual kind of baseline for decomposed models, and the baselines of this kind."""
    for kind in (PROCESSES, STATIC, SEQUENTIAL):
        if mine := [b for b in named if b.name.startswith(kind)]:
            return kind, mine
    return "", []


def decomposed(
    space: WorkloadSpace, plans: Sequence[Plan], variants: Variants, sparing: Mapping[int, int]
) -> list[Plan]:
    """Return plans with each model decomposed as is best on some kind of processor, and as spares memory.

    Args:
        sparing: client → the number of its variant that takes little memory, from 1; empty without a memory limit.
    """
    which = [*variants.strongest(), sparing]
    each = dict.fromkeys(joined_ranks(space.ranks.chosen(numbers), space.joined) for numbers in which)
    return [replace(plan, ranks=ranks) for plan in plans for ranks in each if ranks]


def foreseen(
    workload: Workload, platform: Platform, choices: Mapping[int, RankChoices], named: Sequence[Baseline], plans: int
) -> dict[str, Any]:
    """Return the fields of a dry run about ranks, as plain values; empty if no model may be decomposed.

    Timing finds the variants of a model; before that only their largest number is known.

    Args:
        platform: the processors of the space.
        named: the baselines of the models as they are.
        plans: in the space, all models as they are.
    """
    if not choices:
        return {}
    ways = most_variants(platform)
    kind, _ = _usual(named)
    return {
        "baselines": [*(b.name for b in named), *([f"{kind}{_RANKED}"] if kind else []), PLAIN],
        "tucker": [f"{workload.clients[c].name} within {workload.clients[c].tucker or 0.0:g}" for c in choices],
        "most_ways": ways,
        "most_plans": plans * (ways + 1) ** len(choices),
    }


def rank_summary(
    workload: Workload,
    joined: JoinedGraph,
    variants: Variants,
    choices: Mapping[int, RankChoices],
    best: RankSets,
    files: Mapping[str, str],
) -> dict[str, Any]:
    """Return the result for each model that might be decomposed, as plain values.

    Args:
        choices: of each client that can be.
        best: of each component the ranks in the best plan, or none.
        files: client → the file of its decomposed model, if one was written.
    """
    clients = [i.client for i in workload.instances]
    found: dict[str, Any] = {}
    for c, client in enumerate(workload.clients):
        if not client.tucker:
            continue
        own = best[clients.index(c)] if best else ()
        variant = next((v for v in variants.of[c] if v.ranks == own), None)
        found[client.name] = {
            "max_error": client.tucker,
            "decomposable": c in choices,
            "variants": len(variants.of[c]),
            "ranks": [list(layer) for layer in own],
            "error": variant.error if variant else None,
            "error_measured": variant.measured if variant else None,
            "macs_saved": _saved(joined.components[clients.index(c)].graph, own) if own else 0.0,
            "file": files.get(client.name),
        }
    return found


def _saved(graph: Graph, ranks: RankSet) -> float:
    after = outline(graph, ranks_of(Plan(graph.digest, (), ranks=ranks)))
    macs = [sum(each.macs for each in operator_costs(g)) for g in (graph, after)]
    return 1.0 - macs[1] / macs[0]


def write_rewritten(folder: Path, workload: Workload, joined: JoinedGraph, best: RankSets) -> dict[str, str]:
    """Write each decomposed model of a plan as a file of its own, and return client → its name.

    Files of a best plan before this one are removed.

    Raises:
        UsageError: the folder cannot be written.
        RewriteError, ModelError: the weights cannot be read any more.
    """
    clients = [i.client for i in workload.instances]
    found: dict[str, str] = {}
    for c, client in enumerate(workload.clients):
        own = best[clients.index(c)] if best else ()
        if own:
            graph = joined.components[clients.index(c)].graph
            made = decompose(graph, ranks_of(Plan(graph.digest, (), ranks=own))).graph
            called = re.sub(r"[^A-Za-z0-9._-]+", "-", client.name).strip(".-")[:60] or "model"
            found[client.name] = f"tucker_{c + 1}_{called}.tflite"
            cut_stage(made, range(len(made.operators))).write(folder / found[client.name])
    with disk_errors(folder):
        for old in folder.glob("tucker_[0-9]*_*.tflite"):
            if old.name not in found.values():
                old.unlink()
    return found
