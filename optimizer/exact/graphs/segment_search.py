"""The best plan of a small segment by best-first search over schedules, built operator by operator.

A partial plan is a set of operators that have been placed, and the stage that was begun last. The next operator joins
that stage or begins a new one on some processor, not before the last stage began; so each plan comes up once, its
stages in the order in which they begin. A partial plan dominates another one with the same operators placed, the same
last stage as later operators see it, and the same processors for outputs that are still read, if none of its times is
later.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass
from typing import NamedTuple

from optimizer.exact.chain_costs import busy_with, exclusive_groups
from optimizer.exact.graphs.segment_plans import SegmentCosts, SegmentPlan

_BEAM = 100  # partial plans kept at each depth
_LOOK = 256  # expansions between two checks of the time


@dataclass(frozen=True, slots=True)
class Problem:
    """A segment for given processors of its gates; operators and tensors count from 0, the entry is the last.

    Attributes:
        reads: for each operator, what it reads from others: ``(writer, tensor)``.
        needs, readers, tensor_readers: as bits, the operators that each one reads, and the readers of each operator
            and tensor.
        seconds: for each operator, on each processor.
        overhead, transfer: seconds of a stage on each processor; of each tensor, from processor to processor.
        excluded: for each processor, those that are busy with it, itself included.
        tails: for each operator its readers, as bits, and for each of them the least time from the operator's end on
            each processor to the end of the segment, if that reader is still to come.
        groups, share: processors that exclude each other, and for each operator the least that it adds to their mean
            load.
        entry_processor: of the gate before the segment, or None.
    """

    reads: tuple[tuple[tuple[int, int], ...], ...]
    needs: tuple[int, ...]
    readers: tuple[int, ...]
    tensor_readers: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    overhead: tuple[float, ...]
    transfer: tuple[tuple[tuple[float, ...], ...], ...]
    excluded: tuple[tuple[int, ...], ...]
    tails: tuple[tuple[tuple[int, tuple[float, ...]], ...], ...]
    groups: tuple[tuple[int, ...], ...]
    share: tuple[float, ...]
    entry_processor: int | None

    @classmethod
    def make(cls, of: SegmentCosts, exit_processor: int | None) -> Problem:
        """Return the problem of a segment."""
        graph, costs, segment = of.graph, of.costs, of.segment
        local = {o: i for i, o in enumerate((*segment.operators, *([] if segment.entry is None else [segment.entry])))}
        count, processors = len(segment.operators), costs.platform.processors
        every = range(len(processors))
        tensors: dict[int, int] = {}
        reads = []
        for operator in segment.operators:
            inside = dict.fromkeys(t for t in graph.operators[operator].inputs if graph.producer.get(t) in local)
            reads.append(tuple((local[graph.producer[t]], tensors.setdefault(t, len(tensors))) for t in inside))
        readers, tensor_readers = [0] * len(local), [0] * len(tensors)
        for operator, inputs in enumerate(reads):
            for writer, tensor in inputs:
                readers[writer] |= 1 << operator
                tensor_readers[tensor] |= 1 << operator
        seconds = [[float(costs.operator_s[processor, o]) for processor in every] for o in segment.operators]
        if exit_processor is not None:
            seconds[-1] = [s if processor == exit_processor else math.inf for processor, s in enumerate(seconds[-1])]
        transfer = [costs.transfer_s[t].tolist() for t in tensors]
        tails: list[dict[int, list[float]]] = [{} for _ in local]
        for reader in range(count - 1, -1, -1):
            rest = [max((there[q] for there in tails[reader].values()), default=0.0) for q in every]
            for writer, tensor in reads[reader]:
                found = tails[writer].setdefault(1 << reader, [0.0] * len(processors))
                for processor in every:
                    there = min(
                        (0.0 if q == processor else transfer[tensor][processor][q]) + seconds[reader][q] + rest[q]
                        for q in every
                    )
                    found[processor] = max(found[processor], there)
        groups = exclusive_groups(costs.platform)
        weight = [sum(processor in g for g in groups) / len(groups) for processor in every]
        return cls(
            tuple(reads),
            tuple(sum(1 << w for w in {w for w, _ in inputs} if w < count) for inputs in reads),
            tuple(readers),
            tuple(tensor_readers),
            tuple(map(tuple, seconds)),
            tuple(float(s) for s in costs.overhead_s),
            tuple(tuple(map(tuple, table)) for table in transfer),
            busy_with(costs.platform),
            tuple(tuple((bit, tuple(there)) for bit, there in found.items()) for found in tails),
            tuple(groups),
            tuple(min(w * s for w, s in zip(weight, row, strict=True)) for row in seconds),
            of.entry_processor,
        )

    @property
    def bound_s(self) -> float:
        """Lower bound of all plans of the segment: the longest path, or the mean load."""
        return _estimate(self, _begin(self))


class _State(NamedTuple):
    """A partial plan.

    Attributes:
        done: operators placed, a bit each.
        processor: of the last stage; -1 where there is none.
        inside: operators of the last stage that others still read.
        read: tensors that the last stage has read, and that others still will.
        start, length: of the last stage.
        free: when each processor is free.
        ready: writers of earlier stages that are still read: ``(operator, processor, end)``.
        rest: mean load that operators which are not placed add to the groups.
        operator: the one placed last.
        begins: whether it began a stage.
        parent: the plan before it.
    """

    done: int
    processor: int
    inside: int
    read: int
    start: float
    length: float
    free: tuple[float, ...]
    ready: tuple[tuple[int, int, float], ...]
    rest: float
    operator: int
    begins: bool
    parent: _State | None

    @property
    def key(self) -> tuple[object, ...]:
        """What later operators see of it, beside times: of states with the same key, one may dominate another."""
        seen = ((o, processor) for o, processor, _ in self.ready)
        return (self.done, self.processor, self.inside, self.read, *seen)


def search_segment(
    problem: Problem, operators: tuple[int, ...], most_s: float, stop_s: float
) -> tuple[SegmentPlan | None, float]:
    """Return the best plan that takes less than ``most_s``, or None, and a bound on all plans.

    Args:
        operators: numbers in the graph of the segment's operators.
        stop_s: the monotonic time at which to give up, with the bound that is reached by then.
    """
    everything = (1 << len(problem.reads)) - 1
    first = _begin(problem)
    heap: list[tuple[float, int, int, _State]] = [(_estimate(problem, first), 0, 0, first)]
    seen: dict[tuple[object, ...], list[tuple[float, ...]]] = {}
    number = pushed = 0
    while heap:
        bound, left, _, state = heapq.heappop(heap)
        if bound >= most_s:
            return None, most_s
        if state.done == everything:
            return _plan(state, operators, bound), bound
        number += 1
        if number % _LOOK == 0 and time.monotonic() > stop_s:
            return None, bound
        times = (state.start, state.length, *state.free, *(end for _, _, end in state.ready))
        others = seen.setdefault(state.key, [])
        if any(all(a <= b for a, b in zip(other, times, strict=True)) for other in others):
            continue
        others.append(times)
        for child in _children(problem, state):
            estimate = max(bound, _estimate(problem, child))
            if estimate < most_s:
                pushed += 1
                heapq.heappush(heap, (estimate, left - 1, pushed, child))
    return None, most_s


def beam_segment(problem: Problem, operators: tuple[int, ...]) -> SegmentPlan | None:
    """Return a good plan without proof: at each depth only the most promising partial plans are kept."""
    states = [_begin(problem)]
    for _ in operators:
        best: dict[tuple[object, ...], tuple[float, int, _State]] = {}
        for number, state in enumerate(child for parent in states for child in _children(problem, parent)):
            key, rated = state.key, (_estimate(problem, state), number, state)
            if key not in best or rated < best[key]:
                best[key] = rated
        states = [state for _, _, state in sorted(best.values())[:_BEAM]]
    if not states:
        return None
    return _plan(states[0], operators, max(states[0].start + states[0].length, *states[0].free))


def _begin(problem: Problem) -> _State:
    """Return the plan in which nothing is placed but the entry."""
    entry = problem.entry_processor
    inside = 1 << len(problem.reads) if entry is not None else 0
    free, rest = (0.0,) * len(problem.overhead), sum(problem.share)
    return _State(0, -1 if entry is None else entry, inside, 0, 0.0, 0.0, free, (), rest, -1, begins=False, parent=None)


def _children(problem: Problem, state: _State) -> list[_State]:
    found = []
    end = state.start + state.length
    ready = {o: (processor, at) for o, processor, at in state.ready}
    closed = dict(ready)
    for operator in _bits(state.inside):
        closed[operator] = (state.processor, end)
    for operator in range(len(problem.reads)):
        if state.done >> operator & 1 or problem.needs[operator] & ~state.done:
            continue
        done = state.done | 1 << operator
        rest = state.rest - problem.share[operator]
        if state.processor >= 0 and problem.seconds[operator][state.processor] < math.inf:
            found.append(_joined(problem, state, operator, ready, done, rest))
        for processor, seconds in enumerate(problem.seconds[operator]):
            if seconds == math.inf:
                continue
            begin, took, read = max(state.free[processor], state.start), problem.overhead[processor] + seconds, 0
            for writer, tensor in problem.reads[operator]:
                source, at = closed[writer]
                begin = max(begin, at)
                took += problem.transfer[tensor][source][processor]
                if problem.tensor_readers[tensor] & ~done:
                    read |= 1 << tensor
            still = tuple((o, *closed[o]) for o in sorted(closed) if problem.readers[o] & ~done)
            inside = 1 << operator if problem.readers[operator] & ~done else 0
            free = _busy(problem, state.free, processor, begin + took)
            found.append(_State(done, processor, inside, read, begin, took, free, still, rest, operator, True, state))
    return found


def _joined(
    problem: Problem, state: _State, operator: int, ready: dict[int, tuple[int, float]], done: int, rest: float
) -> _State:
    """Return the plan in which an operator joins the last stage."""
    processor = state.processor
    begin, took, read = state.start, state.length + problem.seconds[operator][processor], state.read
    for writer, tensor in problem.reads[operator]:
        if state.inside >> writer & 1 or read >> tensor & 1:
            continue
        source, at = ready[writer]
        begin = max(begin, at)
        took += problem.transfer[tensor][source][processor]
        read |= 1 << tensor
    inside = sum(1 << o for o in (*_bits(state.inside), operator) if problem.readers[o] & ~done)
    read = sum(1 << t for t in _bits(read) if problem.tensor_readers[t] & ~done)
    still = tuple((o, *ready[o]) for o in sorted(ready) if problem.readers[o] & ~done)
    free = _busy(problem, state.free, processor, begin + took)
    return _State(done, processor, inside, read, begin, took, free, still, rest, operator, begins=False, parent=state)


def _busy(problem: Problem, free: tuple[float, ...], processor: int, until: float) -> tuple[float, ...]:
    times = list(free)
    for other in problem.excluded[processor]:
        times[other] = max(times[other], until)
    return tuple(times)


def _estimate(problem: Problem, state: _State) -> float:
    """Return a lower bound of the segment's seconds after a partial plan."""
    end = state.start + state.length
    least = max(end, *state.free)
    placed = [(o, state.processor, end) for o in _bits(state.inside)]
    for operator, processor, at in (*placed, *state.ready):
        for reader, there in problem.tails[operator]:
            if not state.done & reader:
                least = max(least, at + there[processor])
    loads = sum(min(state.free[processor] for processor in group) for group in problem.groups)
    return max(least, loads / len(problem.groups) + state.rest)


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _plan(state: _State, operators: tuple[int, ...], cost_s: float) -> SegmentPlan:
    steps: list[_State] = []
    at: _State | None = state
    while at is not None and at.operator >= 0:
        steps.append(at)
        at = at.parent
    stages: list[tuple[list[int], int]] = []
    continued = bool(steps) and not steps[-1].begins
    for step in reversed(steps):
        if step.begins or not stages:
            stages.append(([], step.processor))
        stages[-1][0].append(operators[step.operator])
    return SegmentPlan(tuple((tuple(sorted(s)), processor) for s, processor in stages), continued, cost_s, cost_s)
