"""Times of a segment's runs on several processors at once: many placements, priced together.

A placement is a word (for each run the block of runs that it belongs to, numbered by first use) and a processor for
each block. With few runs all words are tried; with many, those that annealing finds from greedy schedules.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain_costs import NEVER_S, ChainCosts, Seconds, concurrent_sets
from search_spaces.core.platform import Platform
from search_spaces.spaces.segments import Segment

Word = tuple[int, ...]
Ints = NDArray[np.int64]

_MOST_WAYS = 50_000  # placements of a segment's runs up to which all are priced
_MOST_SETS = 1000  # ordered choices of processors up to which all words may be priced
_SETS = 6  # largest sets of processors that run at once, by their speed alone, that annealing searches
_LOOKS, _MOST_LOOKS = 200, 300_000  # words for each run, and runs of all words, that annealing prices
_WARM, _COLD = 0.005, 0.0001  # temperatures of annealing, relative to the time
_TOGETHER = 0.4  # share of the moves in which a run goes with those that it reads from
_FEW_RUNS = 24  # up to so many runs, all neighbours of the best word are priced after each processor, too


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """Words of a segment, R of them, as the stages that they make: at most S of them, in at most K blocks.

    Attributes:
        words: R of them.
        members: shape ``(R, S, runs)``: which runs a stage holds.
        block: shape ``(R, S)``: its block; -1 where there is no such stage.
        first: shape ``(R, S)``: its first operator.
        after: shape ``(R, S, S)``: which stages it waits for.
        read: shape ``(R, S, K)``: from which blocks it reads, other than its own.
        entering: shape ``(R, S)``: whether it reads what lies before the segment.
    """

    words: tuple[Word, ...]
    members: NDArray[np.float64]
    block: Ints
    first: Ints
    after: NDArray[np.bool_]
    read: NDArray[np.bool_]
    entering: NDArray[np.bool_]


def words_of(segment: Segment, words: Sequence[Word], blocks: int) -> Words:
    """Return words as arrays."""
    made = [segment.stages(word) for word in words]
    most, runs = max(map(len, made)), len(segment.runs)
    shape = len(words), most
    members, block = np.zeros((*shape, runs)), np.full(shape, -1, dtype=np.int64)
    first = np.full(shape, segment.first, dtype=np.int64)
    after, read = np.zeros((*shape, most), dtype=np.bool_), np.zeros((*shape, blocks), dtype=np.bool_)
    entering = np.zeros(shape, dtype=np.bool_)
    for r, (word, stages) in enumerate(zip(words, made, strict=True)):
        stage_of = {run: s for s, stage in enumerate(stages) for run in stage}
        for s, stage in enumerate(stages):
            members[r, s, list(stage)] = 1.0
            block[r, s], first[r, s] = word[stage[0]], min(segment.runs[run][0] for run in stage)
            before = {stage_of[b] for run in stage for b in segment.reads[run]} - {s}
            after[r, s, list(before)] = True
            read[r, s, list({int(block[r, b]) for b in before} - {int(block[r, s])})] = True
            entering[r, s] = any(not segment.reads[run] for run in stage)
    return Words(tuple(words), members, block, first, after, read, entering)


def all_words(runs: int, blocks: int) -> Iterator[Word]:
    """Yield all words of so many runs in at most so many blocks."""

    def longer(word: Word, used: int) -> Iterator[Word]:
        if len(word) == runs:
            yield word
            return
        for block in range(min(used + 1, blocks)):
            yield from longer((*word, block), max(used, block + 1))

    yield from longer((), 0)


def count_words(runs: int, blocks: int) -> int:
    """Return how many words there are."""
    ways = [1] + [0] * blocks  # by the number of blocks in use
    for _ in range(runs):
        ways = [0] + [ways[b] * b + ways[b - 1] for b in range(1, blocks + 1)]
    return sum(ways)


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """Seconds of a segment's operators, stages and transfers on L processors.

    Attributes:
        run_s: shape ``(L, runs)``: the operators of each run.
        overhead_s: shape ``(L,)``.
        transfer_s: shape ``(n, L, L)``: before an operator, from one processor to another; 0 within a processor.
        behind_s: shape ``(L,)``: of the rest, by the processor on which the runs are joined; (1,) if nothing reads
            them.
    """

    run_s: Seconds
    overhead_s: Seconds
    transfer_s: Seconds
    behind_s: Seconds


def run_s(segment: Segment, costs: ChainCosts) -> Seconds:
    """Return the seconds of the operators of each run on each of L processors, shape ``(L, runs)``."""
    return np.array([costs.operator_s[:, list(run)].sum(axis=1) for run in segment.runs]).T


class _Lists(NamedTuple):
    """What :class:`Timed` has of a segment, as lists, which are faster than arrays for one placement.

    Attributes:
        run_s: of each processor and run.
        overhead_s: of each processor.
        transfer_s: before the first operator of each run, from one processor to another.
    """

    run_s: list[list[float]]
    overhead_s: list[float]
    transfer_s: list[list[list[float]]]


def _lists(segment: Segment, timed: Timed) -> _Lists:
    first = [run[0] for run in segment.runs]
    return _Lists(timed.run_s.tolist(), timed.overhead_s.tolist(), timed.transfer_s[first].tolist())


def placed_s(segment: Segment, on: Sequence[int], timed: Timed, before: int | None, after: int | None) -> float:
    """Return the seconds of a segment's runs and the rest, as :meth:`SideBySide.all_s` for one placement.

    Args:
        on: the processor of each run.
        before: the processor on which the part before the segment ended.
        after: that on which the runs are joined; None if nothing reads them.
    """
    free = _free_s(segment, on, _lists(segment, timed), before)
    if after is None:
        return max(free.values()) + float(timed.behind_s[0])
    back = (end_s + float(timed.transfer_s[segment.joint, p, after]) for p, end_s in free.items())
    return max(back) + float(timed.behind_s[after])


def _free_s(segment: Segment, on: Sequence[int], lists: _Lists, before: int | None) -> dict[int, float]:
    """Return when each processor has ended its last run."""
    run_s, overhead_s, transfer_s = lists
    ends = [0.0] * len(on)  # of the runs of earlier stages
    free: dict[int, float] = {}
    for members in segment.stages(on):
        processor, own_s = on[members[0]], transfer_s[members[0]]
        took = overhead_s[processor]
        ready = free.get(processor, 0.0)
        sources: set[int] = set()
        for run in members:
            took += run_s[processor][run]
            for read in segment.reads[run]:
                ready = max(ready, ends[read])
                sources.add(on[read])
        if before is not None and not all(segment.reads[run] for run in members):
            took += own_s[before][processor]
        sources.discard(processor)
        if sources:
            took += sum([own_s[source][processor] for source in sources])
        end_s = free[processor] = ready + took
        for run in members:
            ends[run] = end_s
    return free


class SideBySide:
    """The ways to place the runs of a segment on two processors or more that run at once.

    Args:
        costs: choose the words if there are too many.

    Attributes:
        exact: whether all words are priced.
    """

    def __init__(self, segment: Segment, costs: ChainCosts) -> None:
        self.segment, self.exact = segment, True
        runs, processors = len(segment.runs), len(costs.platform.processors)
        self._ways: list[tuple[Words, Ints]] = []  # by the number of blocks, and on which processors these are
        for blocks in range(2, max(2, min(processors, runs)) + 1):
            on = np.array(list(islice(_apart(costs.platform, blocks), _MOST_SETS + 1)), dtype=np.int64)
            if not len(on):
                break
            if len(on) <= _MOST_SETS and count_words(runs, blocks) * len(on) <= _MOST_WAYS:
                words = [word for word in all_words(runs, blocks) if max(word) == blocks - 1]
                self._ways.append((words_of(segment, words, blocks), on))
            else:
                self.exact = False
        self._ways += [] if self.exact else self._near(costs)

    def _near(self, costs: ChainCosts) -> Iterator[tuple[Words, Ints]]:
        """Yield words of annealing from a greedy schedule on each of the fastest sets of processors, and the set."""
        runs = len(self.segment.runs)
        timed = Timed(np.minimum(run_s(self.segment, costs), NEVER_S), costs.overhead_s, costs.transfer_s, np.zeros(1))
        whole_s = np.minimum(costs.operator_s, NEVER_S).sum(axis=1)
        likes = [processor.like for processor in costs.platform.processors]
        sets = {tuple(sorted(likes[p] for p in on)): on for on in concurrent_sets(costs.platform)[::-1] if len(on) > 1}
        fastest = sorted(sets.values(), key=lambda on: -sum(1.0 / max(float(whole_s[p]), 1e-12) for p in on))[:_SETS]
        lists, reads = _lists(self.segment, timed), self.segment.reads
        rng = random.Random(0)  # noqa: S311
        for on in fastest:
            blocks = len(on)

            def seconds(word: Word, on: tuple[int, ...] = on) -> float:
                return max(_free_s(self.segment, [on[block] for block in word], lists, None).values())

            now = best = self._greedy(timed, on)
            now_s = best_s = seconds(best)
            looks = min(_MOST_LOOKS // runs, _LOOKS * runs)
            for look in range(looks):
                run, block = rng.randrange(runs), rng.randrange(blocks)
                moved = {run, *reads[run]} if rng.random() < _TOGETHER else {run}
                tried = tuple(block if r in moved else b for r, b in enumerate(now))
                if tried == now:
                    continue
                tried_s = seconds(tried)
                heat_s = max(best_s, 1e-12) * _WARM * (_COLD / _WARM) ** (look / looks)
                if tried_s <= now_s or rng.random() < math.exp((now_s - tried_s) / heat_s):
                    now, now_s = tried, tried_s
                    if now_s < best_s:
                        best, best_s = now, now_s
            beside = range(runs) if runs <= _FEW_RUNS else ()
            words = {best, *((*best[:r], b, *best[r + 1 :]) for r in beside for b in range(blocks))}
            yield words_of(self.segment, sorted(words), blocks), np.array([on], dtype=np.int64)

    def _greedy(self, timed: Timed, on: Sequence[int]) -> Word:
        """Return the word in which each run, in order, is where it ends first."""
        ends, free, word = list[float](), [0.0] * len(on), list[int]()
        for run, reads in enumerate(self.segment.reads):
            first, over = self.segment.runs[run][0], list[float]()
            for block, processor in enumerate(on):
                ready = max((ends[b] for b in reads), default=0.0)
                moved = sum(
                    float(timed.transfer_s[first, on[b], processor]) for b in {word[b] for b in reads} - {block}
                )
                begun = 0.0 if any(word[b] == block for b in reads) else float(timed.overhead_s[processor])
                over.append(max(ready, free[block]) + moved + begun + float(timed.run_s[processor, run]))
            word.append(over.index(min(over)))
            ends.append(over[word[-1]])
            free[word[-1]] = ends[-1]
        return tuple(word)

    def least(self, timed: Timed, before: int | None) -> tuple[float, tuple[int, ...], int]:
        """Return the least seconds of runs and the rest, the processor of each run, and that of the join.

        Args:
            before: the processor on which the part before the segment ended.
        """
        none = math.inf, (0,) * len(self.segment.runs), 0
        return min((self._least(*ways, timed, before) for ways in self._ways), key=lambda found: found[0], default=none)

    def _least(self, words: Words, on: Ints, timed: Timed, before: int | None) -> tuple[float, tuple[int, ...], int]:
        total = self.all_s(words, on, timed, before)
        word, which, meet = np.unravel_index(int(total.argmin()), total.shape)
        placed = tuple(int(on[which][b]) for b in words.words[int(word)])
        return float(total[word, which, meet]), placed, int(meet) if len(timed.behind_s) > 1 else placed[0]

    def all_s(self, words: Words, on: Ints, timed: Timed, before: int | None) -> Seconds:
        """Return the seconds of each of R words on each of J choices of processors, by the processor of the join.

        Args:
            on: shape ``(J, K)``: the processor of each block.

        Returns:
            shape ``(R, J, L)``, or ``(R, J, 1)`` where nothing reads the runs.
        """
        count, most = words.block.shape
        which = np.arange(len(on))
        free = np.zeros((count, len(on), on.shape[1]))
        ends = np.full((count, len(on), most), -np.inf)
        for s in range(most):
            exists = words.block[:, s] >= 0
            block = np.maximum(words.block[:, s], 0)
            processor = on[:, block].T  # (R, J)
            first = words.first[:, s]
            took = np.einsum("rn,rjn->rj", words.members[:, s], timed.run_s[processor]) + timed.overhead_s[processor]
            if before is not None:
                took += np.where(words.entering[:, s, None], timed.transfer_s[first[:, None], before, processor], 0.0)
            for k in range(on.shape[1]):
                paid = timed.transfer_s[first[:, None], on[which, k][None], processor]
                took += np.where(words.read[:, s, k, None], paid, 0.0)
            ready = np.where(words.after[:, s, None, :s], ends[:, :, :s], 0.0).max(axis=2, initial=0.0)
            own = np.take_along_axis(free, np.broadcast_to(block[:, None, None], (count, len(on), 1)), axis=2)[..., 0]
            end = np.where(exists[:, None], np.maximum(ready, own) + took, -np.inf)
            ends[:, :, s] = end
            np.put_along_axis(
                free,
                np.broadcast_to(block[:, None, None], (count, len(on), 1)),
                np.maximum(own, end)[..., None],
                axis=2,
            )
        if len(timed.behind_s) == 1:
            alone: Seconds = ends.max(axis=2)[..., None] + timed.behind_s
            return alone
        back = timed.transfer_s[self.segment.joint][on]  # (J, K, L)
        used = np.where(free > 0.0, free, -np.inf)
        found: Seconds = (used[..., None] + back[None]).max(axis=2) + timed.behind_s
        return found


@lru_cache(maxsize=256)
def side_by_side(segment: Segment, costs: ChainCosts) -> SideBySide:
    """Return the ways to place a segment's runs, made once for each segment and costs."""
    return SideBySide(segment, costs)


def _apart(platform: Platform, count: int) -> Iterator[tuple[int, ...]]:
    """Yield ordered choices of ``count`` processors that can run at once; of alike ones only the first ``count``."""
    names = {p.name for group in platform.classes().values() for p in group[:count]}
    chosen = [(i, p) for i, p in enumerate(platform.processors) if p.name in names]

    def longer(found: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(found) == count:
            yield found
            return
        for i, processor in chosen:
            if i not in found and not any(processor.excludes(platform.processors[o]) for o in found):
                yield from longer((*found, i))

    yield from longer(())
