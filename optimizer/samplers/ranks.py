"""The sampler ``auto`` for ranks: the optimum within the allowed error, corrected by measurements.

Where outputs are compared, measured errors correct the expected ones, and the optimum is computed again so that the
measured error keeps the limit. Once that optimum is measured, neighbours of the best measured plans follow, the
cheapest by the model first: a layer's ranks one step up or down, a cut moved, a stage on another processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import median

from evaluators.samples import Measurement
from optimizer.exact.ranks import RankLimits, best_ranked
from optimizer.samplers.auto import Problem
from search_spaces.core.errors import PlanError
from search_spaces.core.plan import Plan, canonical
from search_spaces.rewrites.tucker import ranks_of
from search_spaces.spaces.chain import chain_plan

_BEST = 3
_STEADY = 0.1  # relative: a correction that moves by less does not move the optimum


class RankProposer:
    """Proposes chains with ranks."""

    def __init__(self, problem: Problem, limits: RankLimits) -> None:
        self._problem, self._limits = problem, limits
        self._tried: set[str] = set()
        self._measured: list[tuple[float, Plan]] = []
        self._ratios: list[float] = []
        self._scale = 1.0
        self._optimum: Plan | None = None

    def observe(self, plan: Plan, measurement: Measurement | None, speed: float = 1.0) -> None:
        """Record a trial, in the order of trials."""
        self._tried.add(plan.digest)
        if measurement is None:
            return
        error = measurement.agreement.max_rel_error if measurement.agreement is not None else None
        expected = self._limits.model.space.error(plan)
        if error is not None and plan.ranks and expected > 0.0 and error > 0.0:
            self._ratios.append(error / expected)
        if error is None or error <= self._limits.most_error:
            self._measured.append((measurement.latency_s.median / (speed * measurement.cold), plan))

    def propose(self) -> Plan | None:
        """Return a plan that was not tried, or None where there is none."""
        scale = median(self._ratios) if self._ratios else 1.0
        if self._optimum is None or abs(scale / self._scale - 1.0) > _STEADY:
            self._scale = scale
            self._optimum = best_ranked(self._limits.model, self._limits.most_error / scale).best
        if self._optimum.digest not in self._tried and self._problem.fits(self._optimum):
            return self._optimum
        candidates: dict[str, tuple[float, Plan]] = {}
        for _, plan in sorted(self._measured, key=lambda pair: pair[0])[:_BEST]:
            for moved in self._beside(plan):
                if moved.digest not in self._tried and moved.digest not in candidates and self._fits(moved):
                    candidates[moved.digest] = self._limits.model.price(moved), moved
        if not candidates:
            return None
        return min(candidates.values(), key=lambda pair: (pair[0], pair[1].digest))[1]

    def _fits(self, plan: Plan) -> bool:
        """Return whether a plan keeps all constraints, including the limit for its corrected error."""
        expected = self._limits.model.space.error(plan) * self._scale
        return expected <= self._limits.most_error and self._problem.fits(plan)

    def _beside(self, plan: Plan) -> Iterator[Plan]:
        """Yield the neighbours of a plan within the space."""
        space = self._limits.model.space
        ranks = ranks_of(plan)
        for operator, options in space.options.items():
            place = options.index(ranks[operator]) if operator in ranks else len(options)
            for other in (place - 1, place + 1):
                if 0 <= other <= len(options):
                    rest = {o: r for o, r in ranks.items() if o != operator}
                    yield space.with_ranks(plan, rest | ({operator: options[other]} if other < len(options) else {}))
        for chain in self._chains_beside(plan):
            moved = replace(canonical(chain, space.graph, self._problem.platform), ranks=plan.ranks)
            try:
                self._problem.space.encode(moved)
            except PlanError:
                continue
            yield moved

    def _chains_beside(self, plan: Plan) -> Iterator[Plan]:
        graph, names = self._limits.model.space.graph, [p.name for p in self._problem.platform.processors]
        cuts = [stage.operators[0] for stage in plan.stages][1:]
        processors = [stage.processor for stage in plan.stages]
        borders = [0, *cuts, len(graph.operators)]
        for i, cut in enumerate(cuts):
            yield chain_plan(graph, [*cuts[:i], *cuts[i + 1 :]], [*processors[:i], *processors[i + 1 :]])
            for moved in (cut - 1, cut + 1):
                if borders[i] < moved < borders[i + 2]:
                    yield chain_plan(graph, [*cuts[:i], moved, *cuts[i + 1 :]], processors)
        for i, (first, last) in enumerate(pairwise(borders)):
            for name in names:
                yield chain_plan(graph, cuts, [*processors[:i], name, *processors[i + 1 :]])
                if last - first > 1:
                    middle = (first + last) // 2
                    yield chain_plan(
                        graph, [*cuts[:i], middle, *cuts[i:]], [*processors[: i + 1], name, *processors[i + 1 :]]
                    )
