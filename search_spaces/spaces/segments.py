"""Segments of a model: operators between two gates, and the runs among them that can run side by side.

A *gate* is an operator that depends on all operators before it, on which all operators after it depend, and whose
outputs are all that crosses to them. No operator after a gate can begin before the gate has ended, so each segment is
an independent problem once the processors of the gates are chosen. In a network of modules (GoogLeNet, Inception,
ResNet, SqueezeNet) a segment is a module; in a chain of operators it is one operator.

The runs of a segment are those of its branches. Where edges cross (feature pyramids, most graphs of a table), operators
that could run at the same time are in one run; each of its longest sequences is a run of its own then: one operator
reads only the one before it, which has no other reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from search_spaces.core.graph import Graph
from search_spaces.spaces.branch_runs import BranchRuns


@dataclass(frozen=True)
class Segment:
    """Consecutive operators, and the runs among them that can be on different processors at the same time.

    Attributes:
        first, last: the operators, half-open.
        joint: where the runs end: the gate that reads them, or ``last`` where the model ends without one.
        runs: the operators of each run, by their first one; together they are ``first … joint-1``. Empty where
            nothing can run side by side.
        reads: for each run the runs that it reads from, all of them before it.
    """

    first: int
    last: int
    joint: int
    runs: tuple[tuple[int, ...], ...] = ()
    reads: tuple[frozenset[int], ...] = ()

    def __len__(self) -> int:
        """Return how many operators it has."""
        return self.last - self.first

    @cached_property
    def before(self) -> tuple[int, ...]:
        """For each run, the runs that must have ended before it begins, as a bit set."""
        found: list[int] = []
        for reads in self.reads:
            bits = 0
            for run in reads:
                bits |= found[run] | 1 << run
            found.append(bits)
        return tuple(found)

    @cached_property
    def after(self) -> tuple[int, ...]:
        """For each run, the runs that can begin only after it has ended, as a bit set."""
        found = [0] * len(self.runs)
        for run, bits in enumerate(self.before):
            for other in range(run):
                found[other] |= (bits >> other & 1) << run
        return tuple(found)

    @cached_property
    def readers(self) -> tuple[int, ...]:
        """For each run, the runs that read from it, as a bit set."""
        found = [0] * len(self.runs)
        for run, reads in enumerate(self.reads):
            for before in reads:
                found[before] |= 1 << run
        return tuple(found)

    def stages(self, on: Sequence[object]) -> list[tuple[int, ...]]:
        """Return which runs become a stage together, where run ``i`` is on the processor ``on[i]``.

        A run joins the last stage on its processor if that delays nothing: the run waits for nothing that the stage has
        not waited for, and every run elsewhere that waits for the stage also waits for the run.
        """
        before, after, readers = self.before, self.after, self.readers
        same: dict[object, int] = {}  # by the processor, as a bit set: the runs on it
        for run, processor in enumerate(on):
            same[processor] = same.get(processor, 0) | 1 << run
        last: dict[object, int] = {}
        made: list[list[int]] = []
        known: list[int] = []  # for each stage, as a bit set: its runs and those that ended before it
        waiting: list[int] = []  # for each stage, as a bit set: the runs elsewhere that read from it
        for run, processor in enumerate(on):
            elsewhere = readers[run] & ~same[processor]
            at = last.get(processor)
            if at is not None and not before[run] & ~known[at] and not waiting[at] & ~after[run]:
                made[at].append(run)
                known[at] |= 1 << run
                waiting[at] |= elsewhere
                continue
            last[processor] = len(made)
            made.append([run])
            known.append(before[run] | 1 << run)
            waiting.append(elsewhere)
        return [tuple(stage) for stage in made]


def gates(graph: Graph) -> list[int]:
    """Return the gates, ascending."""
    count = len(graph.operators)
    readers = [[c for t in o.outputs for c in graph.consumers.get(t, ())] for o in graph.operators]
    after = [bool(graph.predecessors(o)) for o in range(count)]
    # The first position from which on every operator reads from another one.
    rooted = count
    while rooted > 0 and after[rooted - 1]:
        rooted -= 1
    found, reach = [], -1
    for operator in range(count):
        # All operators before it are read, but by none after it; all after it read from some operator. So all paths
        # lead through it.
        if reach <= operator and operator + 1 >= rooted:
            found.append(operator)
        if not readers[operator]:
            break
        reach = max(reach, *readers[operator])
    return found


def segments_of(graph: Graph) -> tuple[Segment, ...]:
    """Return the segments in order; together they hold every operator once."""
    runs = BranchRuns.of(graph).runs
    found: list[Segment] = []
    first = 0
    for gate in gates(graph):
        found.append(_segment(graph, runs, first, gate + 1, gate))
        first = gate + 1
    if first < len(graph.operators):
        found.append(_segment(graph, runs, first, len(graph.operators), len(graph.operators)))
    return tuple(found)


def _segment(graph: Graph, runs: Sequence[tuple[int, ...]], first: int, last: int, joint: int) -> Segment:
    empty = Segment(first, last, joint)
    inside: list[tuple[int, ...]] = []
    for run in runs:
        if own := tuple(o for o in run if first <= o < joint):
            parts = _sequences(graph, own)
            inside += parts if _side_by_side(graph, empty, parts) is not None else [own]
    every = _sequences(graph, range(first, joint))
    return _side_by_side(graph, empty, sorted(inside)) or _side_by_side(graph, empty, every) or empty


def _side_by_side(graph: Graph, empty: Segment, runs: Sequence[tuple[int, ...]]) -> Segment | None:
    """Return a segment with runs; None if none of them can be placed by itself, or no two can run at the same time."""
    run_of = {operator: number for number, run in enumerate(runs) for operator in run}
    reads = tuple(
        frozenset(run_of[p] for o in run for p in graph.predecessors(o) if p in run_of) - {number}
        for number, run in enumerate(runs)
    )
    if any(read > number for number, each in enumerate(reads) for read in each):
        return None
    found = replace(empty, runs=tuple(runs), reads=reads)
    return found if any(bits != (1 << number) - 1 for number, bits in enumerate(found.before)) else None


def _sequences(graph: Graph, operators: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the longest sequences of operators in which one reads only the one before it, its only reader."""
    found: dict[int, tuple[int, ...]] = {}  # by the last operator
    for operator in operators:
        before = next(iter(graph.predecessors(operator)), None) if len(graph.predecessors(operator)) == 1 else None
        readers = (
            {c for t in graph.operators[before].outputs for c in graph.consumers.get(t, ())} if before in found else ()
        )
        begun = found.pop(before) if before is not None and len(readers) == 1 else ()
        found[operator] = (*begun, operator)
    return sorted(found.values())
