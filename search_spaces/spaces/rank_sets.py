"""The rank sets of a workload's models; all instances of a model use the same set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from search_spaces.core.decoded_plan import DecodedPlan, RankSet
from search_spaces.core.errors import PlanError

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import IntDistribution


class RankSets:
    """The choice of ranks in a space of workloads.

    Args:
        sets: the rank sets of each client, none of them empty; every client may also stay undecomposed.
        clients: the client of each instance.
    """

    def __init__(self, sets: Sequence[Sequence[RankSet]], clients: Sequence[int]) -> None:
        self.sets = tuple(tuple(each) for each in sets) or ((),) * (max(clients) + 1)
        self._clients = tuple(clients)
        self._open = [c for c, each in enumerate(self.sets) if each]

    def __bool__(self) -> bool:
        """Return whether some model has a choice."""
        return bool(self._open)

    def __len__(self) -> int:
        """Return the number of choices of all models together; leaving all models as they are is one."""
        return prod(len(each) + 1 for each in self.sets)

    def chosen(self, which: Mapping[int, int]) -> tuple[RankSet, ...]:
        """Return the ranks of each instance, for an :class:`~search_spaces.core.decoded_plan.DecodedPlan`.

        Args:
            which: client → the number of its set; 0, the default, leaves the model as it is.
        """
        if not any(which.values()):
            return ()
        each = [((), *sets)[which.get(c, 0)] for c, sets in enumerate(self.sets)]
        return tuple(each[c] for c in self._clients)

    def which(self, found: DecodedPlan) -> dict[int, int]:
        """Return client → the number of its set.

        Raises:
            PlanError: there is no such set, or instances of one client have different ones.
        """
        numbers = dict.fromkeys(self._open, 0)
        for c, sets in enumerate(self.sets) if found.ranks else ():
            mine = {found.ranks[k] for k, client in enumerate(self._clients) if client == c}
            if len(mine) > 1:
                raise PlanError(f"instances of model {c + 1} have different ranks")
            (own,) = mine
            if own and own not in sets:
                raise PlanError(f"the space does not hold the ranks of model {c + 1}")
            numbers[c] = ((), *sets).index(own)
        return numbers

    def distributions(self) -> dict[str, IntDistribution]:
        """Return ``ranks_C`` for each client with a choice, C from 1."""
        from optuna.distributions import IntDistribution

        return {f"ranks_{c + 1}": IntDistribution(0, len(self.sets[c])) for c in self._open}

    def decode(self, params: Mapping[str, Any]) -> tuple[RankSet, ...]:
        """Return the ranks of each instance, from parameters."""
        return self.chosen({c: int(params[f"ranks_{c + 1}"]) for c in self._open})

    def encode(self, found: DecodedPlan) -> dict[str, int]:
        """Return parameters; raises what :meth:`which` raises."""
        which = self.which(found)
        return {f"ranks_{c + 1}": which[c] for c in self._open}

    def at(self, index: int) -> tuple[RankSet, ...]:
        """Return choice number ``index`` of 0 … ``len(self) - 1``; number 0 decomposes nothing."""
        which = {}
        for c in self._open:
            index, which[c] = divmod(index, len(self.sets[c]) + 1)
        return self.chosen(which)

    def neighbour(self, found: DecodedPlan, rng: np.random.Generator) -> tuple[RankSet, ...]:
        """Return ranks with those of one client changed; some client must have a choice."""
        which = self.which(found)
        c = self._open[int(rng.integers(len(self._open)))]
        others = [n for n in range(len(self.sets[c]) + 1) if n != which[c]]
        return self.chosen(which | {c: others[int(rng.integers(len(others)))]})
