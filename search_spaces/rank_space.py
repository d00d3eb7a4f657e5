"""The space of ranks: a chain of parts, and for each convolution how far it is factored, if at all (seed 001)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from search_spaces.chain import ChainSpace
from search_spaces.errors import PlanError
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform
from search_spaces.rewrites.tucker_choices import RankChoices
from search_spaces.rewrites.tucker_layers import ranks_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


class RankSpace(RankChoices):
    """All chains of 1 to ``max_stages`` parts, each with every choice of ranks.

    Parameters (fixed for the study): those of :class:`~search_spaces.chain.ChainSpace`; and for each layer with a
    choice ``ranks_i``, the number of its triple, the smallest first; the last number leaves it as it is.

    Raises:
        RewriteError: the model has no convolution larger than 1 by 1, or is quantised.
        UsageError: as the space of chains.
    """

    def __init__(self, graph: Graph, platform: Platform, max_stages: int) -> None:
        self.chains = ChainSpace(graph, platform, max_stages)
        super().__init__(graph)

    def distributions(self) -> dict[str, BaseDistribution]:
        """See :class:`~search_spaces.space.SearchSpace`."""
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
        """See :class:`~search_spaces.space.SearchSpace`.

        Raises:
            PlanError: the plan is not in the space: its parts are none of the space of chains, or its ranks others.
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
        """See :class:`~search_spaces.space.SearchSpace`; plans beyond the allowed error count as well."""
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
