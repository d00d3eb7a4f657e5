"""Ranks in a study of several models (seed 001): which ways to decompose each model are worth a search.

For each kind of processor, and for the whole allowed error and shares of it, the ranks that save most time there become
a set (:mod:`optimizer.exact.ranks`), by the timings of layers and triples; a triple that is no faster than its layer on
that kind is in none of its sets. If outputs are computed, their error is then measured, and a set beyond the limit is
made again for a smaller error, or left out. So every set has a known cost and is allowed; the search chooses one, or
none, for each model, together with cuts and processors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from evaluators.workload.host import WorkloadSession
from evaluators.workload.prices import Size
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.ranks import RankCosts, best_ranked, uniform
from search_spaces.core.bounded import built
from search_spaces.core.decoded_plan import RankSet
from search_spaces.core.errors import InfeasibleError, RunFolderError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import LayerRanks, Plan
from search_spaces.core.platform import Platform
from search_spaces.core.pools import single_processors
from search_spaces.core.wording import plural
from search_spaces.core.workload import Client, Workload
from search_spaces.rewrites.tucker import Ranks
from search_spaces.rewrites.tucker_ranks import RankChoices

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
        for what in dict.fromkeys(v.made_for for each in self.of for v in each):
            yield {
                c: next((i for i, v in enumerate(each, 1) if v.made_for == what), 0) for c, each in enumerate(self.of)
            }

    def uniform(self) -> dict[int, int]:
        """Return client → the number of its variant with one share for all layers, from 1; 0 for none."""
        return {
            c: next((i for i, v in enumerate(each, 1) if v.made_for == _UNIFORM), 0) for c, each in enumerate(self.of)
        }

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
    joined: JoinedGraph,
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
    clients = [i.client for i in workload.instances]
    return Variants(
        tuple(
            tuple(finder.variants(client, joined.components[clients.index(c)].graph, choices[c]))
            if c in choices
            else ()
            for c, client in enumerate(workload.clients)
        )
    )


class _Finder:
    """Finds variants of models; clients of the same model share measured errors."""

    def __init__(
        self,
        session: WorkloadSession,
        platform: Platform,
        grids: Mapping[str, Sequence[RankSet]],
        progress: Callable[[str], None],
    ) -> None:
        self._session, self._simulator, self._progress = session, session.simulator, progress
        self._platform, self._grids = platform, grids
        self._errors: dict[tuple[int, RankSet], tuple[float, bool]] = {}

    def variants(self, client: Client, graph: Graph, choices: RankChoices) -> list[Variant]:
        """Return the variants of a client, one kind of processor after the other, the largest allowed error first."""
        if not self._grids.get(graph.digest):
            return []
        self._progress(f"finding the errors of {client.name} when it is decomposed")
        most = client.tucker or 0.0
        models = self._models(graph, choices)
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

    def _models(self, graph: Graph, choices: RankChoices) -> dict[str, RankCosts]:
        """Return the costs of layers and triples on each kind of processor that supports the whole model."""
        found = {}
        for like, group in replace(self._platform, processors=single_processors(self._platform)).classes().items():
            if (model := self._costs(graph, choices, group[0].name)) is not None:
                found[like] = model
        return found

    def _costs(self, graph: Graph, choices: RankChoices, name: str) -> RankCosts | None:
        """Return the costs of layers and triples on a processor; None if it does not support the whole model."""
        processor = [p.name for p in single_processors(self._simulator.platform)].index(name)
        count, part_s = len(graph.operators), self._simulator.part_s
        operator_s = np.array([[part_s(graph, processor, (o,)) for o in range(count)]])
        if not np.isfinite(operator_s).all():
            return None
        alone = Platform(name, (self._platform[name],))
        costs = ChainCosts(alone, operator_s, np.zeros(1), np.zeros((count, 1, 1)))
        triple_s = np.full((1, len(choices.places)), np.inf)
        for ranks in self._grids[graph.digest]:
            for layer in ranks:
                place = choices.places[layer.operator, Ranks(layer.inputs, layer.outputs)]
                triple_s[0, place] = part_s(graph, processor, (layer.operator,), ranks)
        return RankCosts(choices, costs, triple_s)

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
        if key not in self._errors:
            expected = choices.error(Plan(choices.graph.digest, (), ranks=ranks))
            try:
                measured = self._session.decomposed_error(choices.graph, ranks)
            except UnavailableError as error:
                _LOGGER.warning("%s cannot be run decomposed: %s", choices.graph.name, error)
                measured = float("inf")
            self._errors[key] = (expected, False) if measured is None else (measured, True)
        return self._errors[key]


def _alike(model: RankCosts, error: float) -> RankSet:
    """Return ranks of one share for all layers within an error."""
    return as_set(uniform(model, model.platform.processors[0].name, error))


def _ranks(model: RankCosts, error: float) -> RankSet:
    """Return the quickest ranks within an error."""
    try:
        return best_ranked(model, error, 1).best.ranks
    except InfeasibleError:
        return ()
