"""``--allow ranks`` with several models: ways to decompose each model, baselines, messages and files (seed 001).

For each kind of processor, and for the whole allowed error and shares of it, the ranks that save most time there become
a set (:mod:`optimizer.exact.ranks`), by the timings of layers and triples; a triple that is no faster than its layer on
that kind is in none of its sets. If outputs are computed, their error is then measured, and a set beyond the limit is
made again for a smaller error, or left out. So every set has a known cost and is allowed; the search chooses one, or
none, for each model, together with cuts and processors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.workload.apart import PROCESSES
from evaluators.workload.host import WorkloadSession
from evaluators.workload.prices import Size
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.ranks import Chains, RankCosts, best_ranked, uniform
from optimizer.files import disk_errors
from optimizer.model.baselines import Baseline
from optimizer.model.ranks import warn_of_none
from optimizer.model.ranks_text import macs_saved
from optimizer.study.config import StudyConfig
from optimizer.study.limits import allowed_error
from optimizer.workload.baselines import SEQUENTIAL, STATIC
from search_spaces.core.bounded import built
from search_spaces.core.decoded_plan import RankSet, joined_ranks
from search_spaces.core.errors import InfeasibleError, RewriteError, RunFolderError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import LayerRanks, Plan
from search_spaces.core.platform import Platform
from search_spaces.core.pools import single_processors
from search_spaces.core.wording import plural
from search_spaces.core.workload import Client, Workload
from search_spaces.models.stages import cut_stage
from search_spaces.rewrites.tucker import Ranks, decompose, ranks_of
from search_spaces.rewrites.tucker_ranks import RankChoices
from search_spaces.spaces.registry import freedoms_of
from search_spaces.spaces.workload_space import WorkloadSpace

RANKS = "ranks"
"""Kind of the log record that holds :class:`~optimizer.workload.ranks.Variants`."""

PLAIN = "the best predicted plan without Tucker"
_RANKED = ", Tucker"

RankSets = Sequence[RankSet]

SHARES = (1.0, 0.5, 0.25)
"""Shares of the allowed error for which a set is made."""

_UNIFORM = "one share for all layers"
_TRIES, _SAFE, _MILDEST = 4, 0.9, 0.3
_LOGGER = logging.getLogger("partition_optimizer")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to decompose a model.

    Attributes:
        error: relative error of its outputs.
        made_for: the kind of processor on which it saves most, or ``one share for all layers``.
        measured: whether the error is of computed outputs; else it is estimated from the filters.
    """

    ranks: RankSet
    error: Size
    made_for: str
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Variants:
    """The distinct variants of each client of a workload."""

    of: tuple[tuple[Variant, ...], ...]

    @property
    def sets(self) -> tuple[tuple[RankSet, ...], ...]:
        """The ranks alone, for :class:`~search_spaces.spaces.workload_space.WorkloadSpace`."""
        return tuple(tuple(v.ranks for v in each) for each in self.of)

    def strongest(self) -> Iterator[dict[int, int]]:
        """Yield for each ``made_for``: client → the number of its first such variant, from 1; 0 for none."""
        yield from map(self._first, dict.fromkeys(v.made_for for each in self.of for v in each))

    def uniform(self) -> dict[int, int]:
        """Return client → the number of its variant with one share for all layers, from 1; 0 for none."""
        return self._first(_UNIFORM)

    def _first(self, made_for: str) -> dict[int, int]:
        numbers = ((i for i, v in enumerate(each, 1) if v.made_for == made_for) for each in self.of)
        return {c: next(each, 0) for c, each in enumerate(numbers)}

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], clients: int) -> Variants:
        """Build those of a number of clients from what :meth:`to_json` returned.

        Raises:
            RunFolderError: a field is missing or has the wrong type, or a client is missing.
        """
        found = built(cls, data, "the ranks in the trial log are", RunFolderError)
        if len(found.of) != clients:
            raise RunFolderError(
                f"the ranks in the trial log are damaged: they are of {plural(len(found.of), 'client')}, not {clients}"
            )
        return found


def as_set(ranks: Mapping[int, Ranks]) -> RankSet:
    """Return ranks, ascending by operator."""
    return tuple(LayerRanks(o, *ranks[o]) for o in sorted(ranks))


def most_variants(platform: Platform) -> int:
    """Return how many ways to decompose a model are searched at most, on the processors and pools of a space."""
    return len(SHARES) * len(replace(platform, processors=single_processors(platform)).classes()) + 1


def find_variants(
    session: WorkloadSession,
    workload: Workload,
    platform: Platform,
    choices: Mapping[int, RankChoices],
    grids: Mapping[str, Sequence[RankSet]],
    progress: Callable[[str], None],
) -> Variants:
    """Return the variants of each model.

    Args:
        session: with prices of jobs.
        platform: the processors of the space.

    Raises:
        UsageError: the session does not run plans with ranks.
        RewriteError, ModelError: the weights cannot be read.
    """
    if not session.capabilities.decompose:
        raise UsageError("--allow ranks: the evaluator runs no decomposed models", "give litert, cuda or cost-model")
    finder = _Finder(session, platform, grids, progress)
    return Variants(
        tuple(
            tuple(finder.variants(client, choices[c])) if c in choices else ()
            for c, client in enumerate(workload.clients)
        )
    )


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds variants of models; clients of the same model share measured errors."""

    session: WorkloadSession
    platform: Platform
    grids: Mapping[str, Sequence[RankSet]]
    progress: Callable[[str], None]
    errors: dict[tuple[int, RankSet], tuple[float, bool]] = field(default_factory=dict)

    def variants(self, client: Client, choices: RankChoices) -> list[Variant]:
        """Return the variants of a client, one kind of processor after the other, the largest allowed error first."""
        if not self.grids.get(choices.graph.digest):
            return []
        self.progress(f"finding the errors of {client.name} when it is decomposed")
        most = client.tucker or 0.0
        models = self._models(choices)
        found = [
            self._within(choices, partial(_ranks, model), share * most, most, like)
            for like, model in models.items()
            for share in SHARES
        ]
        if models:
            fastest = min(models.values(), key=lambda m: float(m.costs.operator_s.sum()))
            found.append(self._within(choices, partial(_alike, fastest), most, most, _UNIFORM))
        named = {v.ranks: v for v in found if v is not None}  # of equal ones the last: one share has its own name
        return list(named.values())

    def _models(self, choices: RankChoices) -> dict[str, RankCosts]:
        """Return the costs of layers and triples on each kind of processor that supports the whole model."""
        found = {}
        for like, group in replace(self.platform, processors=single_processors(self.platform)).classes().items():
            if (model := self._costs(choices, group[0].name)) is not None:
                found[like] = model
        return found

    def _costs(self, choices: RankChoices, name: str) -> RankCosts | None:
        """Return the costs of layers and triples on a processor; None if it does not support the whole model."""
        simulator, graph = self.session.simulator, choices.graph
        processor = [p.name for p in single_processors(simulator.platform)].index(name)
        count, price = len(graph.operators), simulator.prices(graph)
        operator_s = np.array([[price(processor, (o,)) for o in range(count)]])
        if not np.isfinite(operator_s).all():
            return None
        alone = Platform(name, (self.platform[name],))
        costs = ChainCosts(alone, operator_s, np.zeros(1), np.zeros((count, 1, 1)))
        triple_s = np.full((1, len(choices.places)), np.inf)
        for ranks in self.grids[graph.digest]:
            price = simulator.prices(graph, ranks)
            for layer in ranks:
                place = choices.places[layer.operator, Ranks(layer.inputs, layer.outputs)]
                triple_s[0, place] = price(processor, (layer.operator,))
        return RankCosts(choices, costs, triple_s, Chains(graph, 1))

    def _within(
        self, choices: RankChoices, ranks_for: Callable[[float], RankSet], error: float, most: float, made_for: str
    ) -> Variant | None:
        """Return ranks of the expected ``error``, or of a smaller one if their measured error exceeds ``most``."""
        for _ in range(_TRIES):
            ranks = ranks_for(error)
            if not ranks:
                return None
            off, measured = self._error(choices, ranks)
            if off <= most:
                return Variant(ranks, off, made_for, measured)
            error *= max(_MILDEST, min(_SAFE, _SAFE * most / off))
        return None

    def _error(self, choices: RankChoices, ranks: RankSet) -> tuple[float, bool]:
        """Return the relative error of the outputs, and whether it was measured."""
        key = id(choices.graph), ranks
        if key not in self.errors:
            expected = choices.error(Plan(choices.graph.digest, (), ranks=ranks))
            try:
                measured = self.session.decomposed_error(choices.graph, ranks)
            except UnavailableError as error:
                _LOGGER.warning("%s cannot be run decomposed: %s", choices.graph.name, error)
                measured = float("inf")
            self.errors[key] = (expected, False) if measured is None else (measured, True)
        return self.errors[key]


def _alike(model: RankCosts, error: float) -> RankSet:
    """Return ranks of one share for all layers within an error."""
    return as_set(uniform(model, model.platform.processors[0].name, error))


def _ranks(model: RankCosts, error: float) -> RankSet:
    """Return the quickest ranks within an error."""
    try:
        return best_ranked(model, error).best.ranks
    except InfeasibleError:
        return ()


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
        warn_of_none(each, workload.clients[next(iter(mine))].model, most)
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
            "macs_saved": macs_saved(joined.components[clients.index(c)].graph, own) if own else 0.0,
            "file": files.get(client.name),
        }
    return found


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
