"""The space of chains: cuts of the topological order, and a processor for each stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import comb
from typing import TYPE_CHECKING, Any

from search_spaces.core.decoded_plan import in_runs
from search_spaces.core.errors import PlanError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage, canonical
from search_spaces.core.platform import Platform
from search_spaces.spaces.processor_words import count_words, located, word_at

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import BaseDistribution


def chain_plan(graph: Graph, cuts: Sequence[int], processors: Sequence[str]) -> Plan:
    """Return the plan that cuts the topological order before the operators ``cuts`` (ascending).

    Consecutive stages of a topological order never form a cycle.
    """
    return Plan(graph.digest, in_runs(len(graph.operators), cuts, processors))


def consecutive_cuts(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Return where whole stages of consecutive operators are cut.

    Raises:
        PlanError: they are not that.
    """
    end = 0
    for index, stage in enumerate(stages):
        if stage.share is not None or stage.operators != tuple(range(end, end + len(stage.operators))):
            raise PlanError(f"stage {index} is not a run of consecutive operators")
        end += len(stage.operators)
    return tuple(stage.operators[0] for stage in stages[1:])


def distinct_cuts(proposed: Iterable[int], last: int) -> tuple[int, ...]:
    """Return cuts before operators 1 … ``last``, ascending; one proposed twice moves to the next free place."""
    cuts: set[int] = set()
    for first in proposed:
        cut = first
        while cut in cuts:
            cut = cut % last + 1
        cuts.add(cut)
    return tuple(sorted(cuts))


class ChainSpace:
    """All plans of 1 to ``max_stages`` consecutive stages over the processors of a platform.

    Parameters (fixed for the study): ``stages``; ``cut_1`` …, the operator before which to cut; ``processor_1`` …, that
    of each stage. Of interchangeable processors only the first ``max_stages`` are offered.

    Raises:
        UsageError: there are more stages than operators, or fewer than one.
    """

    def __init__(self, graph: Graph, platform: Platform, max_stages: int) -> None:
        count = len(graph.operators)
        if max_stages < 1:
            raise UsageError(f"--max-stages {max_stages}: a plan has at least 1 stage")
        if max_stages > count:
            raise UsageError(
                f"--max-stages {max_stages}: {graph.name!r} has only {count} operators", f"give at most {count}"
            )
        self._graph = graph
        self._platform = platform
        self.max_stages = max_stages
        self._classes = [tuple(p.name for p in group[:max_stages]) for group in platform.classes().values()]
        self._processors = [p.name for p in platform.processors if any(p.name in names for names in self._classes)]

    freedoms = ("cuts",)

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the parameters; the same ones for the whole study."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        last = len(self._graph.operators) - 1
        found: dict[str, BaseDistribution] = {"stages": IntDistribution(1, self.max_stages)}
        found |= {f"cut_{i}": IntDistribution(1, last) for i in range(1, self.max_stages)}
        found |= {f"processor_{i}": CategoricalDistribution(self._processors) for i in range(1, self.max_stages + 1)}
        return found

    def decode(self, params: Mapping[str, Any]) -> Plan:
        """Return the canonical plan; a cut proposed twice moves to the next free place, so ``stages`` always holds."""
        parts = int(params["stages"])
        cuts = distinct_cuts((int(params[f"cut_{i}"]) for i in range(1, parts)), len(self._graph.operators) - 1)
        processors = [str(params[f"processor_{i}"]) for i in range(1, parts + 1)]
        return canonical(chain_plan(self._graph, cuts, processors), self._graph, self._platform)

    def encode(self, plan: Plan) -> dict[str, Any]:
        """Return parameters with ``decode(encode(plan)) == plan``.

        Parameters that the plan leaves open get fixed values. A plan that is not canonical gets the parameters of its
        canonical form.

        Raises:
            PlanError: the plan does not fit the graph or the platform, has too many stages, or is not a chain.
        """
        plan.validate(self._graph, self._platform)
        if len(plan.stages) > self.max_stages:
            raise PlanError(f"plan has {len(plan.stages)} stages, the space at most {self.max_stages}")
        plan = canonical(plan, self._graph, self._platform)
        cuts = consecutive_cuts(plan.stages)
        params: dict[str, Any] = {"stages": len(plan.stages)}
        for i in range(1, self.max_stages):
            params[f"cut_{i}"] = cuts[i - 1] if i <= len(cuts) else 1
        for i in range(1, self.max_stages + 1):
            params[f"processor_{i}"] = plan.stages[i - 1].processor if i <= len(plan.stages) else self._processors[0]
        return params

    def cardinality(self) -> int:
        """Return the number of different canonical plans."""
        return sum(self._size(parts) for parts in range(1, self.max_stages + 1))

    def plan_at(self, index: int) -> Plan:
        """Return plan number ``index`` of 0 … ``cardinality() - 1``, by number of stages, then cuts, then processors.

        Raises:
            IndexError: there is no such number.
        """
        if index < 0:
            raise IndexError(index)
        parts, index = located(index, ((k, self._size(k)) for k in range(1, self.max_stages + 1)))
        cut_rank, word_rank = divmod(index, self._words(parts))
        cuts = combination(len(self._graph.operators) - 1, parts - 1, cut_rank)
        return chain_plan(self._graph, cuts, word_at(word_rank, parts, self._classes))

    def neighbour(self, plan: Plan, rng: np.random.Generator) -> Plan:
        """Return the plan after one random move: a stage on another processor, a cut moved, removed or added.

        Args:
            plan: of this space.
        """
        count, processors = len(self._graph.operators), [stage.processor for stage in plan.stages]
        cuts = [stage.operators[0] for stage in plan.stages[1:]]
        free = [c for c in range(1, count) if c not in cuts]
        move = int(rng.integers(4))
        if move == 1 and cuts and free:
            cuts[int(rng.integers(len(cuts)))] = free[int(rng.integers(len(free)))]
        elif move == 2 and cuts:
            gone = int(rng.integers(len(cuts)))
            del cuts[gone], processors[gone + int(rng.integers(2))]
        elif move == 3 and free and len(processors) < self.max_stages:
            cut = free[int(rng.integers(len(free)))]
            processors.insert(
                sum(c < cut for c in cuts) + 1, self._processors[int(rng.integers(len(self._processors)))]
            )
            cuts.append(cut)
        else:
            processors[int(rng.integers(len(processors)))] = self._processors[int(rng.integers(len(self._processors)))]
        return canonical(chain_plan(self._graph, sorted(cuts), processors), self._graph, self._platform)

    def _size(self, parts: int) -> int:
        return comb(len(self._graph.operators) - 1, parts - 1) * self._words(parts)

    def _words(self, parts: int) -> int:
        return count_words(parts, self._classes)


def combination(top: int, size: int, rank: int) -> list[int]:
    """Return the subset number ``rank`` (lexicographic) of ``size`` elements of 1 … ``top``."""
    chosen: list[int] = []
    first = 1
    for left in range(size - 1, -1, -1):
        while rank >= (count := comb(top - first, left)):
            rank -= count
            first += 1
        chosen.append(first)
        first += 1
    return chosen
