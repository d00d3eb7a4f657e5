"""Times of a segment's runs on several processors at once: many placements, priced together.

A placement is a word (for each run the block of runs that it belongs to, numbered by first use) and a processor for
each block. With few runs all words are tried; with many, those of greedy schedules and their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain_costs import ChainCosts, Seconds
from search_spaces.core.platform import Platform
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.segments import Segment

Word = tuple[int, ...]
Ints = NDArray[np.int64]

_MOST_WAYS = 50_000  # placements of a segment's runs up to which all are priced
_PAIRS = 6  # fastest pairs of processors whose words are searched if there are more placements
_STEPS = 12  # of the local search from a greedy schedule, if there are more placements


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


class SideBySide:
    """The ways to place the runs of a segment on two processors or more that run at once.

    Args:
        costs: choose the words if there are too many.
    """

    def __init__(self, space: SegmentSpace, segment: Segment, costs: ChainCosts) -> None:
        self.segment, self._base = segment, space.base(segment)
        runs, processors = len(segment.runs), len(costs.platform.processors)
        self._ways: list[tuple[Words, Ints]] = []  # by the number of blocks, and on which processors these are
        for blocks in range(2, max(2, min(processors, runs, self._base)) + 1):
            on = np.array(list(_apart(costs.platform, blocks)), dtype=np.int64).reshape(-1, blocks)
            few = count_words(runs, blocks) * len(on) <= _MOST_WAYS
            if not len(on) or (blocks > 2 and not few):
                break
            found = [w for w in all_words(runs, blocks) if max(w) == blocks - 1] if few else None
            self._ways.append((words_of(segment, found or self._near(costs, on), blocks), on))

    def _near(self, costs: ChainCosts, pairs: Ints) -> list[Word]:
        """Return the words of greedy schedules on each pair of processors, and their neighbours."""
        runs = range(len(self.segment.runs))
        run_s = np.array([costs.operator_s[:, list(run)].sum(axis=1) for run in self.segment.runs]).T
        found: dict[Word, None] = {}
        whole_s = costs.operator_s.sum(axis=1)
        quickest = np.argsort(
            [sum(1.0 / max(whole_s[processor], 1e-12) for processor in on) for on in pairs], kind="stable"
        )
        for on in pairs[quickest[::-1][:_PAIRS]]:
            ends, free, word = [0.0] * len(runs), [0.0, 0.0], []
            for run in runs:
                ready = max((ends[b] for b in self.segment.reads[run]), default=0.0)
                over = [max(ready, free[b]) + float(run_s[on[b], run]) for b in (0, 1)]
                word.append(int(over[1] < over[0]))
                ends[run] = free[word[-1]] = over[word[-1]]
            best = tuple(word)
            behind_s = np.zeros(1 if self.segment.joint == self.segment.last else len(run_s))
            timed = Timed(run_s, costs.overhead_s, costs.transfer_s, behind_s)
            for _ in range(_STEPS):
                beside = [tuple(b ^ (r == moved) for r, b in enumerate(best)) for moved in runs]
                found |= dict.fromkeys((best, *beside))
                total = self.all_s(words_of(self.segment, (best, *beside), 2), on[None], timed, int(on[0]))
                least = int(total.min(axis=(1, 2)).argmin())
                if least == 0:
                    break
                best = beside[least - 1]
        return [word for word in dict.fromkeys(_renamed(word) for word in found) if max(word)]

    def least(self, timed: Timed, before: int | None) -> tuple[float, tuple[int, ...], int]:
        """Return the least seconds of runs and the rest, the processor of each run, and that of the join.

        Args:
            before: the processor on which the part before the segment ended.
        """
        return min((self._least(*ways, timed, before) for ways in self._ways), key=lambda found: found[0])

    def _least(self, words: Words, on: Ints, timed: Timed, before: int | None) -> tuple[float, tuple[int, ...], int]:
        total = self.all_s(words, on, timed, before)
        if total.shape[2] > 1 and self._base < len(timed.overhead_s):  # a block's code has two processors
            own = (on[..., None] == np.arange(total.shape[2])).any(axis=1)
            total = np.where(own[None], total, np.inf)
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


def _renamed(word: Word) -> Word:
    """Return a word whose blocks are numbered by first use."""
    names: dict[int, int] = {}
    return tuple(names.setdefault(block, len(names)) for block in word)
