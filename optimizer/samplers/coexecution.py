"""The sampler ``auto`` for co-execution: the model's optimum, then that of the model as measurement corrects it.

What a stage took tells how much longer than by the model its operators take there, split like that, and parts that
nobody has measured are taken to be off by as much as the usual ones. When the corrected optimum is known, what lies
beside the best plans measured is tried, the cheapest by the model first: a cut moved towards the slower side, a chain
made of two parts or parted in two, another axis, no split.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from statistics import geometric_mean, median

from evaluators.samples import Measurement
from evaluators.schedule import Timeline
from optimizer.exact.coexecution import CoexecutionModel
from optimizer.samplers.auto import Problem
from search_spaces.core.plan import Plan
from search_spaces.rewrites.splits import Axis
from search_spaces.spaces.coexecution import AXES, CoexecutionSpace, How, Part

_BEST = 3
_NEAR = 1.3  # what the other axis may cost by the model, to be tried
_LEAST, _MOST = 0.1, 10.0  # what a correction may be: beyond, something else went wrong

Key = tuple[int, int, str, str]


def _joining(timeline: Timeline | None) -> dict[int, float]:
    """Return, for stages that bring two sides together too, which share of their time that takes."""
    found: dict[int, list[float]] = {}
    for event in sorted(timeline.events, key=lambda e: e.start_s) if timeline is not None else ():
        found.setdefault(event.stage, []).append(event.end_s - event.start_s)
    return {stage: spans[-1] / sum(spans) for stage, spans in found.items() if len(spans) == 2 and sum(spans) > 0.0}


class CoexecutionProposer:
    """See the module, and :class:`~optimizer.samplers.auto.Proposer`."""

    def __init__(self, problem: Problem, space: CoexecutionSpace) -> None:
        self._problem = problem
        self._space = space
        self._model = CoexecutionModel(space, problem.model)
        self._plain = CoexecutionModel(space, problem.model)
        self._tried: set[str] = set()
        self._measured: list[tuple[float, tuple[Part, ...]]] = []
        self._factors: dict[Key, dict[float, list[float]]] = {}
        self._copies: list[float] = []
        self._axes: set[How | None] = set()

    def observe(self, plan: Plan, measurement: Measurement | None, speed: float = 1.0) -> None:
        """See :class:`~optimizer.samplers.auto.Proposer`."""
        self._tried.add(plan.digest)
        parts = self._space.parts(plan)
        self._axes.update(part.axis for part in parts)
        if measurement is None:
            return
        self._measured.append((measurement.latency_s.median / (speed * measurement.cold), parts))
        if measurement.stopped != "raced":
            self._learn(plan, parts, measurement, speed * measurement.cold)

    def _learn(self, plan: Plan, parts: tuple[Part, ...], measurement: Measurement, usual: float) -> None:
        took = {
            (stage.operators[0], stage.processor): (seconds / usual, index)
            for index, (stage, seconds) in enumerate(zip(plan.stages, measurement.stage_s, strict=True))
        }
        joining = _joining(measurement.timeline)
        for part in parts:
            believed = self._plain.sides_s(part)
            for lane, own, seconds in zip(part.on, self._space.side_operators(part), believed, strict=False):
                found_s, index = took.get((own[0], lane), (0.0, -1))
                if lane == part.on[0] and index in joining:
                    self._copies.append(found_s * joining[index] / max(1, self._model.joined_nbytes(part)))
                    found_s *= 1.0 - joining[index]
                elif lane == part.on[0]:
                    found_s = max(found_s - self._plain.join_s(part), 0.5 * found_s)
                if found_s > 0.0 and seconds > 0.0:
                    key = (part.first, part.last, str(part.axis or "whole"), lane)
                    factor = min(max(found_s / seconds, _LEAST), _MOST)
                    self._factors.setdefault(key, {}).setdefault(seconds, []).append(factor)
        by_axis: dict[str, list[float]] = {}
        for key, sides in self._factors.items():
            self._model.corrections[key] = sorted((s, geometric_mean(found)) for s, found in sides.items())
            by_axis.setdefault(key[2], []).append(geometric_mean(f for _, f in self._model.corrections[key]))
        for how, factors in by_axis.items():
            self._model.usual[how] = geometric_mean(factors)
        if self._copies:
            self._model.join_s_per_byte = median(self._copies)

    def propose(self) -> Plan | None:
        """See :class:`~optimizer.samplers.auto.Proposer`."""
        parts = self._model.best().parts
        across = self._across(parts)
        if across is not None:
            return across
        best = self._space.plan(parts)
        if best.digest not in self._tried and self._problem.fits(best):
            return best
        leaders = [parts for _, parts in sorted(self._measured, key=lambda pair: pair[0])[:_BEST]]
        near = [(self._model.cost_s(moved), moved) for parts in leaders for moved in self._beside(parts)]
        # On many lanes there are tens of thousands; plans are made of the cheapest ones only.
        for _, alike in groupby(sorted(near, key=itemgetter(0)), key=itemgetter(0)):
            plans = {plan.digest: plan for plan in (self._space.plan(moved) for _, moved in alike)}
            for digest in sorted(plans.keys() - self._tried):
                if self._problem.fits(plans[digest]):
                    return plans[digest]
        return None

    def _across(self, parts: tuple[Part, ...]) -> Plan | None:
        """Return parts with what is split along the other axis, where nothing has been tried along that yet."""
        if len(self._space.axes) < 2 or len(self._axes & set(AXES)) != 1:
            return None
        turned = [self._turned(part) for part in parts]
        if not any(turned):
            return None
        plan = self._space.plan([new or old for new, old in zip(turned, parts, strict=True)])
        return plan if plan.digest not in self._tried and self._problem.fits(plan) else None

    def _turned(self, part: Part) -> Part | None:
        """Return a part that is split along the other axis, at the same share, where that may be as good."""
        if part.axis is None or part.axis == "branches" or part.axis not in self._axes:
            return None
        axis = AXES[part.axis == AXES[0]]
        found = self._at(self._space.step(part), part.first, part.last, part.on, axis)
        return found if found is not None and self._plain.part_s(found) <= _NEAR * self._plain.part_s(part) else None

    def _beside(self, parts: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
        """Yield what is one step away from a sequence of parts."""
        for i, part in enumerate(parts):
            head, tail = parts[:i], parts[i + 1 :]
            for other in self._instead(part):
                yield (*head, other, *tail)
            if tail and part.axis == tail[0].axis != "branches":
                longer = Part(part.first, tail[0].last, part.on, part.axis, tail[0].cut)
                if part.axis is None or self._space.step(longer) is not None:
                    yield (*head, longer, *tail[1:])
            for middle in range(part.first + 1, part.last):
                first, second = self._nearest(part, part.first, middle), self._nearest(part, middle, part.last)
                if first is not None and second is not None:
                    yield (*head, first, second, *tail)

    def _instead(self, part: Part) -> Iterator[Part]:
        """Yield other ways to run the operators of a part."""
        for lane in self._space.lanes:
            yield Part(part.first, part.last, (lane,))
        for axis in self._space.axes:
            for pair in self._space.pairs:
                for cut in self._space.cuts(part.first, part.last, axis).values():
                    found = Part(part.first, part.last, pair, axis, cut)
                    if found != part:
                        yield found
        for which in self._space.branch_sets(part.first, part.last):
            for pair in self._space.pairs:
                yield Part(part.first, part.last, pair, "branches", which)

    def _nearest(self, part: Part, first: int, last: int) -> Part | None:
        """Return some operators of a part, shared as the part is, or None where they cannot be."""
        if part.axis is None:
            return Part(first, last, part.on)
        if part.axis == "branches":
            return None
        return self._at(self._space.step(part), first, last, part.on, part.axis)

    def _at(self, step: int | None, first: int, last: int, on: tuple[str, ...], axis: Axis) -> Part | None:
        """Return operators shared along an axis as near to a step as can be, or None where they cannot be."""
        cuts = self._space.cuts(first, last, axis)
        if step is None or not cuts:
            return None
        return Part(first, last, on, axis, cuts[min(cuts, key=lambda s: abs(s - step))])
