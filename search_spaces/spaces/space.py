"""The protocols of search spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from search_spaces.core.errors import PlanError
from search_spaces.core.plan import Plan

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import BaseDistribution


class SearchSpace(Protocol):
    """A set of plans, addressed by named parameters with fixed distributions."""

    def distributions(self) -> Mapping[str, BaseDistribution]:
        """Return the parameters; the same ones for the whole study."""
        ...

    def decode(self, params: Mapping[str, Any]) -> Plan:
        """Return the canonical plan of any parameters within the distributions; a pure function."""
        ...

    def encode(self, plan: Plan) -> dict[str, Any]:
        """Return parameters with ``decode(encode(plan)) == plan``.

        Raises:
            PlanError: the plan is not in the space.
        """
        ...

    def cardinality(self) -> int:
        """Return the number of different canonical plans."""
        ...


@runtime_checkable
class EnumerableSpace(SearchSpace, Protocol):
    """A space whose plans have numbers."""

    def plan_at(self, index: int) -> Plan:
        """Return plan number ``index`` of 0 … ``cardinality() - 1``."""
        ...


@runtime_checkable
class NeighbourlySpace(EnumerableSpace, Protocol):
    """A space with its own neighbourhood, which suits it better than general moves."""

    def neighbour(self, plan: Plan, rng: np.random.Generator) -> Plan:
        """Return a plan of the space, one random move away from another one."""
        ...


def in_space(space: SearchSpace, plan: Plan) -> bool:
    """Return whether a plan is a point of a space."""
    try:
        space.encode(plan)
    except PlanError:
        return False
    return True
