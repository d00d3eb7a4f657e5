"""The sampler ``auto`` for branches and splits: the optimum of the model, then of the corrected model.

The ratio of a stage's measured to its predicted time corrects its part; parts without a measurement get the usual
correction. Once the corrected optimum is measured, neighbours of the best measured plans follow, the cheapest by the
model first: a cut moved, two blocks merged or one split, another share, another axis, nothing shared. Every other
proposal is that of ``auto`` for cuts alone, which learns from plans of cuts alone, so that cuts are searched as well as
without sharing. Where no plan that shares work has been the fastest, seven of eight proposals are cuts alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from operator import itemgetter
from statistics import geometric_mean, median

import numpy as np

from evaluators.samples import Measurement
from evaluators.schedule import Timeline
from optimizer.exact.segment_model import SegmentModel
from optimizer.samplers.auto import AutoProposer, Problem
from search_spaces.core.errors import PlanError
from search_spaces.core.plan import Plan
from search_spaces.spaces.chain import ChainSpace
from search_spaces.spaces.segment_space import AXES, EACH, Block, SegmentSpace
from search_spaces.spaces.shared_chains import GRID
from search_spaces.spaces.shared_parts import How, Part
from search_spaces.spaces.space import in_space

_BEST = 3
_STAGES = 4  # at most, in plans of cuts alone
_ENOUGH, _GAIN, _SELDOM = 16, 0.99, 8  # after 16 shared plans that gained less than 1 %, every eighth proposal shares
_NEAR = 1.3  # the other axis is tried if the model's time grows by less than this factor
_LEAST, _MOST = 0.1, 10.0  # limits of a correction; beyond them something else went wrong
_CODES = 64  # placements of a segment's runs that are all tried as neighbours
_RUNS = 48  # of a segment that are moved at a time
_SAME = 1e-9  # relative differences of rounding

Key = tuple[int, int, str, str]


def _joining(timeline: Timeline | None) -> dict[int, float]:
    """Return, for stages that also join two sides, the share of their time that joining takes."""
    found: dict[int, list[float]] = {}
    for event in sorted(timeline.events, key=lambda e: e.start_s) if timeline is not None else ():
        found.setdefault(event.stage, []).append(event.end_s - event.start_s)
    return {stage: spans[-1] / sum(spans) for stage, spans in found.items() if len(spans) == 2 and sum(spans) > 0.0}


class SegmentProposer:
    """Proposes plans of blocks, with times corrected by measured stages."""

    def __init__(self, problem: Problem, space: SegmentSpace, seed: int) -> None:
        self._problem = problem
        self._space = space
        chains = ChainSpace(problem.graph, problem.platform, min(_STAGES, len(problem.graph.operators)))
        self._cuts = AutoProposer(
            replace(problem, space=chains, fits=lambda plan: in_space(space, plan) and problem.fits(plan)), seed
        )
        self._seen = 0
        self._fastest_s = {True: math.inf, False: math.inf}  # of chains, and of plans that share work
        self._sharing = 0
        self._model = SegmentModel(space, problem.model)
        self._plain = SegmentModel(space, problem.model)
        self._tried: set[str] = set()
        self._measured: list[tuple[float, tuple[Block, ...]]] = []
        self._factors: dict[Key, dict[float, list[float]]] = {}
        self._copies: list[float] = []
        self._axes: set[How | None] = set()
        self._optimum: tuple[object, tuple[Block, ...]] | None = None  # what the model had learned, and its best blocks
        self._priced: dict[tuple[Block, str | None], float] = {}  # by that model, after a processor (s)

    def observe(self, plan: Plan, measurement: Measurement | None, speed: float = 1.0) -> None:
        """Record a trial, in the order of trials."""
        self._tried.add(plan.digest)
        self._seen += 1
        if plan.is_chain:
            self._cuts.observe(plan, measurement, speed)
        try:
            blocks = self._space.blocks(plan)
        except PlanError:  # a baseline outside of the space
            return
        parts = self._space.expand(blocks)
        self._axes.update(part.axis for part in parts)
        if measurement is None:
            return
        found_s = measurement.latency_s.median / (speed * measurement.cold)
        self._fastest_s[plan.is_chain] = min(self._fastest_s[plan.is_chain], found_s)
        self._sharing += not plan.is_chain
        self._measured.append((found_s, blocks))
        if measurement.stopped != "raced":
            self._learn(plan, parts, measurement, speed * measurement.cold)

    def _learn(self, plan: Plan, parts: tuple[Part, ...], measurement: Measurement, usual: float) -> None:
        seconds = np.array(measurement.stage_s) / usual
        took: dict[tuple[int, str], tuple[float, int]] = {}  # part's first operator and side → its time, its last stage
        first_of = {o: part.first for part in parts for o in range(part.first, part.last)}
        for index, stage in enumerate(plan.stages):
            side = first_of[stage.operators[0]], stage.processor
            took[side] = took.get(side, (0.0, index))[0] + float(seconds[index]), index
        joining = _joining(measurement.timeline)
        for part in parts:
            for processor, model_s in self._sides_s(part).items():
                found_s, index = took.get((part.first, processor), (0.0, -1))
                if processor == part.on[0] and part.axis != "branches":
                    if index in joining:
                        self._copies.append(found_s * joining[index] / max(1, self._model.joined_nbytes(part)))
                        found_s *= 1.0 - joining[index]
                    else:
                        found_s = max(found_s - self._plain.join_s(part), 0.5 * found_s)
                if found_s > 0.0 and model_s > 0.0:
                    own = part.first, part.last, str(part.axis or "whole"), processor
                    factor = min(max(found_s / model_s, _LEAST), _MOST)
                    self._factors.setdefault(own, {}).setdefault(model_s, []).append(factor)
        by_axis: dict[str, list[float]] = {}
        for key, sides in self._factors.items():
            self._model.corrections[key] = sorted((s, geometric_mean(found)) for s, found in sides.items())
            by_axis.setdefault(key[2], []).append(geometric_mean(f for _, f in self._model.corrections[key]))
        for how, factors in by_axis.items():
            self._model.usual[how] = geometric_mean(factors)
        if self._copies:
            self._model.join_s_per_byte = median(self._copies)

    def _sides_s(self, part: Part) -> dict[str, float]:
        """Return the model's working time of each processor of a part (s), without synchronisation."""
        if part.axis != "branches":
            return dict(zip(part.on, self._plain.sides_s(part), strict=False))
        return self._plain.branch_s(part)

    def propose(self) -> Plan | None:
        """Return a plan that was not tried, or None where there is none."""
        lost = self._sharing >= _ENOUGH and self._fastest_s[False] > _GAIN * self._fastest_s[True]
        sharing = self._seen % (_SELDOM if lost else 2) == 0
        first, second = (self._shared, self._cuts.propose) if sharing else (self._cuts.propose, self._shared)
        return first() or second()

    def best(self) -> tuple[Block, ...]:
        """Return the optimum of the corrected model; it is searched for again once a correction is new.

        A correction by 1, as of predicted studies, is none.
        """
        model = self._model
        factors = {key: tuple(ways) for key, ways in model.corrections.items()}
        ones = all(abs(factor - 1.0) < _SAME for ways in factors.values() for _, factor in ways)
        join_s = None if model.join_s_per_byte is None else float(f"{model.join_s_per_byte:.9g}")
        learned = join_s, None if ones else factors
        if self._optimum is None or self._optimum[0] != learned:
            self._optimum = learned, model.best().blocks
            self._priced.clear()
        return self._optimum[1]

    def _shared(self) -> Plan | None:
        blocks = self.best()
        across = self._across(blocks)
        if across is not None:
            return across
        best = self._plan(blocks)
        if best.digest not in self._tried and self._problem.fits(best):
            return best
        leaders = [blocks for _, blocks in sorted(self._measured, key=lambda pair: pair[0])[:_BEST]]
        near = [found for each in leaders for found in self.near(each)]
        # On many processors there are tens of thousands of neighbours; plans are made of the cheapest ones only.
        for _, alike in groupby(sorted(near, key=itemgetter(0)), key=itemgetter(0)):
            moved = ((*blocks[:first], *new, *blocks[last:]) for _, blocks, first, new, last in alike)
            plans = {plan.digest: plan for plan in map(self._plan, moved)}
            for digest in sorted(plans.keys() - self._tried):
                if self._problem.fits(plans[digest]):
                    return plans[digest]
        return None

    def near(self, blocks: tuple[Block, ...]) -> Iterator[tuple[float, tuple[Block, ...], int, tuple[Block, ...], int]]:
        """Yield the neighbours of a sequence of blocks: the time (s), the blocks, and which of them others replace.

        A block's time depends on the processor before it alone: only what changes, and what follows it, is priced.
        """
        before = (None, *(block.on for block in blocks))
        own_s = [self._block_after_s(block, on) for block, on in zip(blocks, before, strict=False)]
        ahead_s = [0.0, *accumulate(own_s)]
        behind_s = [*reversed([0.0, *accumulate(reversed(own_s))]), 0.0]
        for first, new, last in self._beside(blocks):
            total_s, on = ahead_s[first], before[first]
            for block in new:
                total_s += self._block_after_s(block, on)
                on = block.on
            if last < len(blocks):
                total_s += self._block_after_s(blocks[last], on) + behind_s[last + 1]
            yield float(f"{total_s:.12g}"), blocks, first, new, last  # sums of equal times are equal

    def _block_after_s(self, block: Block, before: str | None) -> float:
        """Return the time of a block after a processor (s), which is computed once."""
        found = self._priced.get((block, before))
        if found is None and (block.way in AXES or block.way in EACH):  # all ways to split these operators together
            price = self._model.splits_s if block.way in AXES else self._model.each_s
            splits = price(block.first, block.last, before)
            self._priced |= {(each, before): seconds for each, seconds in splits.items()}
            found = splits.get(block)
        if found is None:
            found = self._priced[block, before] = self._model.block_s(block, before)
        return found

    def _plan(self, blocks: Sequence[Block]) -> Plan:
        return self._space.plan(self._space.expand(blocks))

    def _across(self, blocks: tuple[Block, ...]) -> Plan | None:
        """Return a plan whose splits use the other axis, if no plan with that axis has been tried yet, else None."""
        if len(self._space.axes) < 2 or len(self._axes & set(AXES)) != 1:
            return None
        turned = [self._turned(block) for block in blocks]
        if not any(turned):
            return None
        plan = self._plan([new or old for new, old in zip(turned, blocks, strict=True)])
        return plan if plan.digest not in self._tried and self._problem.fits(plan) else None

    def _turned(self, block: Block) -> Block | None:
        """Return a block split along the other axis, at about the same share, if it may be as fast, else None."""
        if block.way in EACH:
            ways = list(EACH)
            return replace(block, way=ways[block.way == ways[0]])
        if block.way not in AXES or block.way not in self._axes:
            return None
        axis = AXES[block.way == AXES[0]]
        cuts = self._space.cuts(block.first, block.last, axis)
        if not cuts:
            return None
        found = replace(block, way=axis, share=min(cuts, key=lambda step: abs(step - block.share)))
        return found if self._block_s(found) <= _NEAR * self._block_s(block) else None

    def _block_s(self, block: Block) -> float:
        return self._plain.cost_s(self._space.parts_of(block))

    def _beside(self, blocks: tuple[Block, ...]) -> Iterator[tuple[int, tuple[Block, ...], int]]:
        """Yield the neighbours of a sequence of blocks: which ones (half-open), and the blocks in their place."""
        for i, block in enumerate(blocks):
            for other in self._instead(block):
                yield i, (other,), i + 1
            after = blocks[i + 1] if i + 1 < len(blocks) else None
            if after and block.way == after.way and block.way in {"whole", *AXES}:
                yield i, (replace(block, last=after.last, share=after.share),), i + 2
            for middle in self._space.begins(block.first, block.last):
                first, second = replace(block, last=middle), self._nearest(block, middle)
                yield i, (self._nearest(first, first.first), second), i + 1

    def _instead(self, block: Block) -> Iterator[Block]:
        """Yield other ways to run the operators of a block."""
        first, last = block.first, block.last
        for processor in self._space.processors:
            yield Block(first, last, "whole", processor)
        for axis in self._space.axes:
            for on, other in self._space.pairs:
                for step in self._space.cuts(first, last, axis):
                    yield Block(first, last, axis, on, other, step)
        segment = self._space.segment(first)
        if self._space.axes and len(segment) > 1:
            for way in EACH:
                for on, other in self._space.pairs:
                    yield from (Block(first, last, way, on, other, share) for share in range(1, GRID))
        if segment.runs and first == segment.first:
            base = self._space.base
            count = base ** len(segment.runs)
            if count > _CODES and block.way == "branches":  # one run elsewhere
                digits = [block.share // base**r % base for r in range(len(segment.runs))]
                each = -(-len(digits) // _RUNS)
                for r in range(self._seen % each, len(digits), each):
                    codes = (block.share + (d - digits[r]) * base**r for d in range(base) if d != digits[r])
                    yield from (replace(block, share=code) for code in codes if code)
            elif count <= _CODES:
                for on, other in self._space.pairs_for("branches"):
                    yield from (Block(first, last, "branches", on, other, code) for code in range(1, count))

    def _nearest(self, block: Block, first: int) -> Block:
        """Return the operators of a block from ``first`` on, with the nearest share that is possible."""
        found = replace(block, first=first)
        if block.way in AXES:
            cuts = self._space.cuts(first, block.last, AXES[block.way == AXES[1]])
            if cuts:
                return replace(found, share=min(cuts, key=lambda step: abs(step - block.share)))
        return found if block.way in EACH else Block(first, block.last, "whole", block.on)
