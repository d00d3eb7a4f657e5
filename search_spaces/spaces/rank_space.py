"""The space of ranks: plans of another space, with Tucker ranks for each convolution (seed 001)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from search_spaces.core.errors import PlanError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.rewrites.tucker import ranks_of
from search_spaces.rewrites.tucker_ranks import RankChoices
from search_spaces.spaces.registry import freedoms_in
from search_spaces.spaces.space import NeighbourlySpace

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import BaseDistribution


class RankSpace(RankChoices):
    """All plans of another space, each with every choice of ranks.

    Parameters (fixed for the study): those of the other space; and for each layer ``i`` with a choice ``ranks_i``, the
    number of its triple, the smallest first; the last number leaves the layer as it is.

    Args:
        chains: the other space.

    Raises:
        RewriteError: the model has no convolution larger than 1 by 1, or is quantised.
    """

    def __init__(self, graph: Graph, chains: NeighbourlySpace) -> None:
        self.chains = chains
        super().__init__(graph)

    @property
    def freedoms(self) -> tuple[str, ...]:
        """The freedoms of its plans."""
        return (*freedoms_in(self.chains), "ranks")

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the parameters; the same ones for the whole study."""
        from optuna.distributions import IntDistribution

        own = {f"ranks_{operator}": IntDistribution(0, len(found)) for operator, found in self.options.items()}
        return {**self.chains.distributions(), **own}

    def decode(self, params: Mapping[str, Any]) -> Plan:
        """Return the canonical plan."""
        ranks = {}
        for operator, found in self.options.items():
            which = int(params[f"ranks_{operator}"])
            if which < len(found):
                ranks[operator] = found[which]
        return self.with_ranks(self.chains.decode(params), ranks)

    def encode(self, plan: Plan) -> dict[str, Any]:
        """Return parameters with ``decode(encode(plan)) == plan``.

        Raises:
            PlanError: the other space does not hold the plan's stages, or this one not its ranks.
        """
        params = self.chains.encode(replace(plan, ranks=()))
        ranks = ranks_of(plan)
        for operator, found in self.options.items():
            wanted = ranks.pop(operator, None)
            if wanted is not None and wanted not in found:
                raise PlanError(f"the space does not hold ranks {wanted} of operator {operator}")
            params[f"ranks_{operator}"] = len(found) if wanted is None else found.index(wanted)
        if ranks:
            raise PlanError(f"the space does not hold ranks of operator {min(ranks)}")
        return params

    def cardinality(self) -> int:
        """Return the number of different canonical plans; plans beyond the allowed error count as well."""
        return self.chains.cardinality() * self._choices

    @cached_property
    def _choices(self) -> int:
        return prod(len(found) + 1 for found in self.options.values())

    def plan_at(self, index: int) -> Plan:
        """Return the plan number ``index`` of 0 … ``cardinality() - 1``, by chain, then by ranks.

        Raises:
            IndexError: there is no such number.
        """
        chain, rest = divmod(index, self._choices)
        ranks = {}
        for operator, found in self.options.items():
            rest, which = divmod(rest, len(found) + 1)
            if which < len(found):
                ranks[operator] = found[which]
        return self.with_ranks(self.chains.plan_at(chain), ranks)

    def neighbour(self, plan: Plan, rng: np.random.Generator) -> Plan:
        """Return the plan after one random move: one of the other space, or one step in the ranks of a layer.

        Args:
            plan: of this space.
        """
        if not self.options or rng.random() < 0.5:
            return replace(self.chains.neighbour(replace(plan, ranks=()), rng), ranks=plan.ranks)
        ranks = ranks_of(plan)
        operator = list(self.options)[int(rng.integers(len(self.options)))]
        options = self.options[operator]
        place = options.index(ranks[operator]) if operator in ranks else len(options)
        moved = min(max(place + (1 if rng.random() < 0.5 else -1), 0), len(options))
        rest = {o: r for o, r in ranks.items() if o != operator}
        return self.with_ranks(plan, rest | ({operator: options[moved]} if moved < len(options) else {}))
