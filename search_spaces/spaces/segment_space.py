"""The space of all freedoms: cuts, branches side by side, and operators split in two (seeds 000, 002 and 003).

Gates divide a model into segments (:mod:`~search_spaces.spaces.segments`). For each segment a plan says whether a block
begins there and how that block runs, up to the next one: whole on one processor; split between two along height or
channels, as one chain or operator by operator; or with the runs of the segment side by side on any processors. The
sides of a block run at the same time and join at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any, Literal

from search_spaces.core.errors import PlanError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Share, Stage, canonical
from search_spaces.core.platform import Platform
from search_spaces.rewrites.splits import Axis, extent
from search_spaces.spaces.processor_words import located
from search_spaces.spaces.segments import Segment, segments_of
from search_spaces.spaces.shared_chains import GRID, LONGEST
from search_spaces.spaces.shared_parts import Part, SharedParts

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import BaseDistribution

AXES: tuple[Axis, ...] = ("height", "channels")
Way = Literal["whole", "height", "channels", "each height", "each channels", "branches"]
"""How a block is run.

``each``: every operator of the segment is split by itself, along this axis if possible, else along the other one. The
segment's last operator runs whole with what follows, as after branches, except a concatenation that ends the block.
"""

EACH: Mapping[Way, tuple[Axis, Axis]] = {
    "each height": ("height", "channels"),
    "each channels": ("channels", "height"),
}
"""The ways that split each operator by itself: the axis that is tried first, and the other one."""

_MOVES = 50
_MOST_CODES = 1 << 53  # up to here whole numbers are exact as floats


@dataclass(frozen=True, slots=True)
class Block:
    """Operators from one cut to the next, and the way in which they run.

    Attributes:
        first, last: the operators, half-open.
        on: the processor; of a shared block, the one on which its sides are joined.
        other: the second processor of a shared block.
        share: of a split, the first processor's share in units of 1/:data:`GRID`. Of branches, the processors of the
            runs as a number with one digit per run, the first run's the lowest: 0 is ``on``, 1 is ``other``, the next
            digits are the other processors in the order of the platform.
    """

    first: int
    last: int
    way: Way
    on: str
    other: str = ""
    share: int = 1


class Numbering:
    """Numbers of the sequences of blocks that make up a model.

    Args:
        size: in how many ways operators can be run as one block, given the first one and the one after the last.

    Attributes:
        total: how many sequences there are.
    """

    def __init__(self, size: Callable[[int, int], int], graph: Graph) -> None:
        self._size, self._count = size, len(graph.operators)
        self._rest = [0] * self._count + [1]  # by the operator, the number of ways from it to the end
        for first in reversed(range(self._count)):
            for last in range(first + 1, self._count + 1):
                self._rest[first] += size(first, last) * self._rest[last]
        self.total = self._rest[0]

    def at(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield the operators (half-open) and the way of each block of sequence number ``index``."""
        first = 0
        while first < self._count:
            ends = range(first + 1, self._count + 1)
            last, index = located(index, ((end, self._size(first, end) * self._rest[end]) for end in ends))
            which, index = divmod(index, self._rest[last])
            yield first, last, which
            first = last


class SegmentSpace(SharedParts):
    """All ways to cut a model into blocks, of which at most one begins in each segment, and to run them.

    Parameters (fixed for the study), by the segment's first operator S: ``cut_S``, whether a block begins in it (of
    several operators: at which, from 1, or 0 for none); ``way_S``, ``on_S``, ``with_S`` (``Block.other``) and
    ``share_S``, the fields of that :class:`Block`. A choice with one option has no parameter. A block that cannot be
    split as its parameters say runs whole. The processors of many runs are several numbers, ``share_S`` (the first
    runs), ``share_S_1``, …, each of which is exact as a float, as storages and samplers keep it.

    Args:
        splits: whether operators may be split.
        branches: whether branches may run side by side.

    Raises:
        UsageError: there is one processor only.
    """

    def __init__(self, graph: Graph, platform: Platform, *, splits: bool = True, branches: bool = True) -> None:
        names = [p.name for p in platform.processors]
        if all(a.excludes(b) for a, b in combinations(platform.processors, 2)):
            what = "splits" if splits else "branches"
            raise UsageError(
                f"{what} require two processors that run at once; {', '.join(names)} "
                f"{'exclude each other' if len(names) > 1 else 'is the only one'}",
                "give --processors with two of them, for example cpu0,cpu1",
            )
        super().__init__(graph)
        self.platform = platform
        self.axes: tuple[Axis, ...] = AXES if splits else ()
        found = segments_of(graph)
        self.segments = found if branches else tuple(replace(s, runs=(), reads=()) for s in found)
        self._branches = branches
        self._place = {name: i for i, name in enumerate(names)}
        self._segment_of = tuple(number for number, s in enumerate(self.segments) for _ in range(len(s)))
        self._others = {
            (a, b): (a, b, *(name for name in names if name not in (a, b))) for a, b in permutations(names, 2)
        }

    @property
    def freedoms(self) -> tuple[str, ...]:
        """The freedoms of its plans."""
        return ("cuts", *(("branches",) if self._branches else ()), *(("splits",) if self.axes else ()))

    @property
    def offers(self) -> frozenset[str]:
        """The freedoms besides cuts that some block of this model can use."""
        ways = {way for found in self.ways for way in found} - {"whole"}
        return frozenset({"branches" if way == "branches" else "splits" for way in ways})

    @property
    def branching(self) -> tuple[Segment, ...]:
        """The segments whose runs can run side by side."""
        return tuple(segment for segment in self.segments if segment.runs)

    @cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Pairs of processors that run at once, each in both orders; of interchangeable ones the first two only."""
        return tuple((a, b) for a, b in self.all_pairs if a in self.processors and b in self.processors)

    @cached_property
    def all_pairs(self) -> tuple[tuple[str, str], ...]:
        """Pairs of processors that can run at once, each in both orders."""
        return tuple((a.name, b.name) for a, b in permutations(self.platform.processors, 2) if not a.excludes(b))

    @cached_property
    def processors(self) -> tuple[str, ...]:
        """Processors for unshared blocks: of interchangeable ones the first two.

        A shared block may join on either of the two, and the operators after it then run there.
        """
        return tuple(p.name for group in self.platform.classes().values() for p in group[:2])

    def segment(self, operator: int) -> Segment:
        """Return the segment that an operator is in."""
        return self.segments[self._segment_of[operator]]

    def may_follow(self, first: int, last: int) -> bool:
        """Return whether one block may begin at ``first`` and the next one at ``last``, or the model end there."""
        return last == len(self._segment_of) or self._segment_of[first] < self._segment_of[last]

    @property
    def base(self) -> int:
        """The base of the number that encodes the processors of a segment's runs."""
        return len(self._place)

    def _numbers(self, segment: Segment) -> list[int]:
        """Return of how many codes each parameter is that together encode the processors of a segment's runs."""
        runs, most = len(segment.runs), int(math.log(_MOST_CODES, self.base))
        return [self.base ** min(most, runs - begin) for begin in range(0, runs, most)]

    def code(self, where: Sequence[str], on: str, other: str) -> int:
        """Return the number that encodes the processors of a segment's runs, as in :class:`Block`."""
        order = self._others[on, other]
        return sum(order.index(name) * self.base**i for i, name in enumerate(where))

    # Blocks and parts

    def parts_of(self, block: Block) -> tuple[Part, ...]:
        """Return the parts of a block."""
        return self._shared(block) or (Part(block.first, block.last, (block.on,)),)

    def expand(self, blocks: Sequence[Block]) -> tuple[Part, ...]:
        """Return the parts of blocks that follow each other."""
        return tuple(part for block in blocks for part in self.parts_of(block))

    def _shared(self, block: Block) -> tuple[Part, ...] | None:
        on = block.on, block.other
        if block.way == "whole" or on not in self._others:
            return None
        if block.way == "branches":
            return self._side_by_side(block)
        if not self.axes or self.platform[on[0]].excludes(self.platform[on[1]]):
            return None
        if block.way in EACH:
            found = tuple(self._each(block))
            return found if any(part.axis is not None for part in found) else None
        axis = _axis(block.way)
        cut = self.cuts(block.first, block.last, axis).get(block.share)
        return None if cut is None else (Part(block.first, block.last, on, axis, cut),)

    def _side_by_side(self, block: Block) -> tuple[Part, ...] | None:
        segment = self.segment(block.first)
        if not segment.runs or block.first != segment.first or block.last < segment.last:
            return None
        order, rest = self._others[block.on, block.other], block.share
        if rest >= self.base ** len(segment.runs):
            return None
        where = []
        for _ in segment.runs:
            rest, digit = divmod(rest, self.base)
            where.append(order[digit])
        used = [self.platform[name] for name in set(where)]
        if set(where) == {block.on} or any(a.excludes(b) for a, b in combinations(used, 2)):
            return None
        behind = (Part(segment.joint, block.last, (block.on,)),) if segment.joint < block.last else ()
        if len(set(where)) == 1:
            return (Part(segment.first, segment.joint, (where[0],)), *behind)
        return (Part(segment.first, segment.joint, tuple(where), "branches"), *behind)

    def _each(self, block: Block) -> Iterator[Part]:
        whole = block.first
        for operator in self.split_alone(block.first, block.last):
            found = self.alone(operator, block.way, block.share)
            if found is None:
                continue
            if whole < operator:
                yield Part(whole, operator, (block.on,))
            yield Part(operator, operator + 1, (block.on, block.other), *found)
            whole = operator + 1
        if whole < block.last:
            yield Part(whole, block.last, (block.on,))

    def split_alone(self, first: int, last: int) -> list[int]:
        """Return which operators of a block are split where each is split by itself."""
        end = self.segment(first).last
        inside = range(first, end if last == end and self.concatenates(end - 1) else end - 1)
        return [o for o in inside if any(self.cuts(o, o + 1, axis) for axis in self.axes)]

    def concatenates(self, operator: int) -> bool:
        """Return whether an operator only concatenates its inputs."""
        return self.graph.operators[operator].kind == "CONCATENATION"

    def alone(self, operator: int, way: Way, share: int) -> tuple[Axis, int] | None:
        """Return the axis along which an operator alone is split, and the cut nearest to a share."""
        for axis in EACH[way]:
            if cuts := self.cuts(operator, operator + 1, axis):
                return axis, cuts[min(cuts, key=lambda step: (abs(step - share), step))]
        return None

    def plan(self, parts: Sequence[Part]) -> Plan:
        """Return the canonical plan of parts that follow each other."""
        stages: list[Stage] = []
        for part in parts:
            if part.axis == "branches":
                stages += self._stages(part.first, part.on)
            elif part.axis is None:
                stages.append(Stage(tuple(range(part.first, part.last)), part.on[0]))
            else:
                length = extent(self.graph, part.first, part.last, part.axis)
                shares = (Share(part.axis, 0, part.cut), Share(part.axis, part.cut, length))
                operators = tuple(range(part.first, part.last))
                stages += [Stage(operators, processor, share) for processor, share in zip(part.on, shares, strict=True)]
        return canonical(Plan(self.graph.digest, tuple(stages)), self.graph, self.platform)

    def _stages(self, first: int, on: Sequence[str]) -> list[Stage]:
        """Return the stages of a segment's runs, each on its processor."""
        segment = self.segment(first)
        return [
            Stage(tuple(sorted(o for run in runs for o in segment.runs[run])), on[runs[0]])
            for runs in segment.stages(on)
        ]

    def placed(self, on: Sequence[str]) -> tuple[Part, ...]:
        """Return the parts of a plan that splits nothing, by the processor of each operator.

        A run is on the processor of its first operator, and so are operators between two gates that form no branches.
        """
        found: list[Part] = []

        def whole(first: int, last: int, name: str) -> None:
            if found and found[-1].axis is None and found[-1].on == (name,):
                found[-1] = replace(found[-1], last=last)
            elif first < last:
                found.append(Part(first, last, (name,)))

        for segment in self.segments:
            where = tuple(on[run[0]] for run in segment.runs)
            if len(set(where)) > 1:
                found.append(Part(segment.first, segment.joint, where, "branches"))
            else:
                whole(segment.first, segment.joint, where[0] if where else on[segment.first])
            if segment.joint < segment.last:
                whole(segment.joint, segment.last, on[segment.joint] if segment.runs else on[segment.first])
        return tuple(found)

    def parts(self, plan: Plan) -> tuple[Part, ...]:
        """Return the parts of a plan; stages that may be branches side by side count as branches.

        Raises:
            PlanError: the plan is not made of such parts.
        """
        plan.validate(self.graph, self.platform)
        plan = canonical(plan, self.graph, self.platform)
        begin: dict[int, list[Stage]] = {}
        for stage in plan.stages:
            begin.setdefault(stage.operators[0], []).append(stage)
        found: list[Part] = []
        first = 0
        while first < len(self.graph.operators):
            part = self._branched(begin, first)
            if part is None:
                stages = sorted(begin.get(first, []), key=lambda s: s.share.first if s.share else 0)
                operators = stages[0].operators if stages else ()
                if operators != tuple(range(first, first + len(operators))) or not 1 <= len(stages) <= 2:
                    raise PlanError(f"the stages from operator {first} on are not a run on one or two processors")
                share = stages[0].share
                how, cut = (share.axis, share.last) if share is not None else (None, 0)
                part = Part(first, operators[-1] + 1, tuple(s.processor for s in stages), how, cut)
            found.append(part)
            first = part.last
        return tuple(found)

    def _branched(self, begin: Mapping[int, Sequence[Stage]], first: int) -> Part | None:
        """Return the part that begins at an operator, if it is the runs of a segment on several processors."""
        segment = self.segment(first)
        if not segment.runs or first != segment.first:
            return None
        inside = [stage for o in range(first, segment.joint) for stage in begin.get(o, ())]
        processor = {o: stage.processor for stage in inside for o in stage.operators if stage.share is None}
        if sorted(processor) != list(range(first, segment.joint)) or len(set(processor.values())) < 2:
            return None
        on = tuple(processor[run[0]] for run in segment.runs)
        same = set(self._stages(first, on)) == set(inside)
        return Part(first, segment.joint, on, "branches") if same else None

    def blocks(self, plan: Plan) -> tuple[Block, ...]:
        """Return the blocks of a plan.

        Raises:
            PlanError: the plan is not in the space.
        """
        parts = self.parts(plan)
        begun: dict[int, list[Part]] = {}
        for part in parts:
            begun.setdefault(self._segment_of[part.first], []).append(part)
        found = tuple(self._block(self.segments[number], own) for number, own in begun.items())
        if self.expand(found) != parts:
            raise PlanError("its stages begin where the space has no cuts, or do not end where the next ones begin")
        return found

    def _block(self, segment: Segment, parts: Sequence[Part]) -> Block:
        """Return the block of the parts that begin in a segment."""
        first, last = parts[0].first, parts[-1].last
        for block in self._candidates(segment, parts, first, last):
            if self.parts_of(block) == tuple(parts):
                return block
        if len(parts) == 1 and parts[0].axis is not None:
            part = parts[0]
            if last - first > LONGEST:
                raise PlanError(f"operators {first} to {last - 1} are more than the {LONGEST} that are split together")
            raise PlanError(f"{part.axis} {part.cut} of operator {last - 1} is not a step of the grid")
        raise PlanError(
            f"operators {segment.first} to {segment.last - 1} form one segment, in which at most one cut is allowed; "
            f"the plan begins stages at operators {', '.join(str(part.first) for part in parts)}"
        )

    def same(self, block: Block) -> Iterator[Block]:
        """Yield all blocks with the same parts, the block itself included.

        The processors of branches can be encoded with any pair as ``on`` and ``other``.
        """
        parts = self.parts_of(block)
        if block.way != "branches" or parts == (Part(block.first, block.last, (block.on,)),):
            yield block
            return
        segment = self.segment(block.first)
        where = parts[0].on if parts[0].axis == "branches" else parts[0].on * len(segment.runs)
        for on, other in self._others:
            found = replace(block, on=on, other=other, share=self.code(where, on, other))
            if self.parts_of(found) == parts:
                yield found

    def _candidates(self, segment: Segment, parts: Sequence[Part], first: int, last: int) -> Iterator[Block]:
        part = parts[0]
        if len(parts) == 1 and part.axis is None:
            yield Block(first, last, "whole", part.on[0])
        elif len(parts) == 1 and part.axis != "branches" and part.axis is not None:
            step = self.step(part)
            if step is not None:
                yield Block(first, last, part.axis, part.on[0], part.on[1], step)
        joint = parts[1] if len(parts) == 2 else None
        whole = part.axis is None and joint is not None and part.last == segment.joint
        if segment.runs and first == segment.first and (part.axis == "branches" or whole):
            on = joint.on[0] if joint is not None else part.on[0]
            where = part.on * len(segment.runs) if whole else part.on
            other = next((name for name in where if name != on), None)
            if other is not None:
                yield Block(first, last, "branches", on, other, self.code(where, on, other))
        split = next((p for p in parts if p.axis is not None and p.axis != "branches"), None)
        if split is not None:
            for way in EACH:
                for share in range(1, GRID):
                    yield Block(first, last, way, split.on[0], split.on[1], share)

    # Parameters

    @cached_property
    def ways(self) -> tuple[tuple[Way, ...], ...]:
        """For each segment, how blocks that begin there can be run."""
        return tuple(tuple(self._ways_from(segment)) for segment in self.segments)

    def _ways_from(self, segment: Segment) -> Iterator[Way]:
        yield "whole"
        for axis in self.axes:
            if any(self._can_begin(o, axis) for o in range(segment.first, segment.last)):
                yield axis
        inside = range(segment.first, segment.last)
        if len(segment) > 1 and any(self.cuts(o, o + 1, axis) for o in inside for axis in self.axes):
            yield from EACH
        if segment.runs:
            yield "branches"

    def _can_begin(self, operator: int, axis: Axis) -> bool:
        """Return whether some chain that begins with an operator can be split."""
        most = min(operator + LONGEST, len(self.graph.operators))
        return any(self.cuts(operator, last, axis) for last in range(operator + 1, most + 1))

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the parameters; the same ones for the whole study."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        found: dict[str, BaseDistribution] = {}
        names = list(self._place)
        for segment, ways in zip(self.segments, self.ways, strict=True):
            at = segment.first
            if at:
                one = len(segment) == 1
                found[f"cut_{at}"] = CategoricalDistribution([False, True]) if one else IntDistribution(0, len(segment))
            found[f"on_{at}"] = CategoricalDistribution(names)
            if len(ways) > 1:
                codes, *more = self._numbers(segment) if "branches" in ways else [2]
                found[f"way_{at}"] = CategoricalDistribution(ways)
                found[f"with_{at}"] = CategoricalDistribution(names)
                found[f"share_{at}"] = IntDistribution(0 if more else 1, max(codes - 1, GRID - 1 if self.axes else 1))
                found |= {f"share_{at}_{i}": IntDistribution(0, each - 1) for i, each in enumerate(more, 1)}
        return found

    def decode(self, params: Mapping[str, Any]) -> Plan:
        """Return the canonical plan; a block that its parameters cannot split runs whole."""
        return self.plan(self.expand(self.blocks_from(params)))

    def blocks_from(self, params: Mapping[str, Any]) -> tuple[Block, ...]:
        """Return the blocks of parameters."""
        found: list[Block] = []
        for segment in self.segments:
            at = segment.first
            cut = int(params[f"cut_{at}"]) if at else 1
            if cut:
                way, other = params.get(f"way_{at}", "whole"), str(params.get(f"with_{at}", ""))
                share = int(params.get(f"share_{at}", 1))
                if way == "branches" and segment.runs:
                    codes, *more = self._numbers(segment)
                    for i, each in enumerate(more, 1):
                        share += codes * int(params[f"share_{at}_{i}"])
                        codes *= each
                found.append(Block(at + cut - 1, 0, way, str(params[f"on_{at}"]), other, share))
        ends = [*(block.first for block in found[1:]), len(self.graph.operators)]
        return tuple(replace(block, last=last) for block, last in zip(found, ends, strict=True))

    def encode(self, plan: Plan) -> dict[str, Any]:
        """Return parameters with ``decode(encode(plan)) == plan``.

        Parameters that the plan leaves open get fixed values.

        Raises:
            PlanError: the plan is not in the space.
        """
        return self.encode_blocks(self.blocks(plan))

    def encode_blocks(self, blocks: Sequence[Block]) -> dict[str, Any]:
        """Return the parameters of blocks."""
        begun = {self._segment_of[block.first]: block for block in blocks}
        main = next(iter(self._place))
        params: dict[str, Any] = {}
        for number, (segment, ways) in enumerate(zip(self.segments, self.ways, strict=True)):
            at, block = segment.first, begun.get(number)
            if at:
                cut = 0 if block is None else block.first - at + 1
                params[f"cut_{at}"] = bool(cut) if len(segment) == 1 else cut
            params[f"on_{at}"] = main if block is None else block.on
            if len(ways) > 1:
                shared = block if block is not None and block.way != "whole" else Block(0, 0, "whole", main, main)
                params |= {f"way_{at}": shared.way, f"with_{at}": shared.other, f"share_{at}": shared.share}
                if "branches" in ways:
                    params |= self._encoded(at, self._numbers(segment), shared)
        return params

    def _encoded(self, at: int, codes: Sequence[int], block: Block) -> dict[str, int]:
        """Return the parameters that encode the processors of many runs; none of one number."""
        if len(codes) == 1:
            return {}
        rest, found = block.share if block.way == "branches" else 0, []
        for each in codes:
            rest, digits = divmod(rest, each)
            found.append(digits)
        first = {f"share_{at}": found[0]} if block.way == "branches" else {}
        return first | {f"share_{at}_{i}": digits for i, digits in enumerate(found[1:], 1)}

    # All plans, by number, and those near one

    def shares(self, first: int, last: int) -> list[tuple[Way, int]]:
        """Return the ways to share a block between two processors, and the number of shares of each."""
        segment, ways = self.segment(first), self.ways[self._segment_of[first]]
        found: list[tuple[Way, int]] = [(axis, len(self.cuts(first, last, axis))) for axis in self.axes]
        found += [(way, GRID - 1) for way in EACH if way in ways]
        if "branches" in ways and first == segment.first:
            found.append(("branches", self.base ** len(segment.runs) - 1))
        return [(way, count) for way, count in found if count]

    def share_at(self, first: int, last: int, way: Way, index: int) -> int:
        """Return share number ``index`` of :meth:`shares`."""
        return index + 1 if way in EACH or way == "branches" else list(self.cuts(first, last, _axis(way)))[index]

    def pairs_for(self, way: Way) -> tuple[tuple[str, str], ...]:
        """Return the pairs of processors for a block; branches may join on a processor that runs none of them."""
        return tuple(self._others) if way == "branches" else self.all_pairs

    def count(self, first: int, last: int) -> int:
        """Return the number of ways to run a block; several may be the same plan."""
        return len(self._place) + sum(count * len(self.pairs_for(way)) for way, count in self.shares(first, last))

    def mode_at(self, first: int, last: int, index: int) -> Block:
        """Return way number ``index`` of :meth:`count` to run a block."""
        if index < len(self._place):
            return Block(first, last, "whole", list(self._place)[index])
        shares = ((way, count * len(self.pairs_for(way))) for way, count in self.shares(first, last))
        way, index = located(index - len(self._place), shares)
        pairs = self.pairs_for(way)
        which, pair = divmod(index, len(pairs))
        return Block(first, last, way, *pairs[pair], self.share_at(first, last, way, which))

    @cached_property
    def _numbers_of_plans(self) -> Numbering:
        return Numbering(lambda first, last: self.count(first, last) if self.may_follow(first, last) else 0, self.graph)

    def cardinality(self) -> int:
        """Return the number of plans.

        Plans that differ only in the names of interchangeable processors, or that several sets of parameters describe,
        count several times.
        """
        return self._numbers_of_plans.total

    def plan_at(self, index: int) -> Plan:
        """Return plan number ``index`` of 0 … ``cardinality() - 1``.

        Raises:
            IndexError: there is no such number.
        """
        if not 0 <= index < self.cardinality():
            raise IndexError(index)
        blocks = [self.mode_at(first, last, which) for first, last, which in self._numbers_of_plans.at(index)]
        return self.plan(self.expand(blocks))

    def neighbour(self, plan: Plan, rng: np.random.Generator) -> Plan:
        """Return the plan after one random move: a block changed, a cut moved, two blocks merged, or one cut in two.

        Args:
            plan: of this space.
        """
        blocks = self.blocks(plan)
        for _ in range(_MOVES):
            found = self.plan(self.expand(self.moved(blocks, rng)))
            if found != plan:
                return found
        return plan

    def moved(self, blocks: Sequence[Block], rng: np.random.Generator) -> Sequence[Block]:
        """Return blocks after one random move, which may leave them as they are."""
        i, move = int(rng.integers(len(blocks))), int(rng.integers(4))
        block = blocks[i]
        if move == 0 or (block.way == "branches" and rng.random() < 0.5):
            other = self._one_elsewhere(block, rng) if block.way == "branches" and rng.random() < 0.75 else None
            return [*blocks[:i], other or self.otherwise(block.first, block.last, rng), *blocks[i + 1 :]]
        if move <= 2 and i + 1 < len(blocks):
            after = blocks[i + 1]
            cut = self._between(block.first, after.last, rng) if move == 1 else None
            if cut is None:
                return [*blocks[:i], self.kept(block.first, after.last, block, rng), *blocks[i + 2 :]]
            return [
                *blocks[:i],
                self.kept(block.first, cut, block, rng),
                self.kept(cut, after.last, after, rng),
                *blocks[i + 2 :],
            ]
        cut = self._between(block.first, block.last, rng)
        if cut is None:
            return blocks
        if rng.random() < 0.5:
            halves = self.kept(block.first, cut, block, rng), self.otherwise(cut, block.last, rng)
        else:
            halves = self.otherwise(block.first, cut, rng), self.kept(cut, block.last, block, rng)
        return [*blocks[:i], *halves, *blocks[i + 1 :]]

    def begins(self, first: int, last: int) -> list[int]:
        """Return where a block may begin between the first operators of two others (or the end of the model)."""
        return [o for o in range(first + 1, last) if self.may_follow(first, o) and self.may_follow(o, last)]

    def _between(self, first: int, last: int, rng: np.random.Generator) -> int | None:
        found = self.begins(first, last)
        return found[int(rng.integers(len(found)))] if found else None

    def otherwise(self, first: int, last: int, rng: np.random.Generator) -> Block:
        """Return a random way to run operators as a block."""
        names, shares = list(self._place), self.shares(first, last)
        if not shares or rng.random() < 0.5:
            return Block(first, last, "whole", names[int(rng.integers(len(names)))])
        way, count = shares[int(rng.integers(len(shares)))]
        pairs = self.pairs_for(way)
        pair = pairs[int(rng.integers(len(pairs)))]
        # Generators draw whole numbers up to 2^63 only; there may be many more placements of runs.
        which = (
            int(rng.integers(count)) if count < _MOST_CODES else int.from_bytes(rng.bytes(count.bit_length())) % count
        )
        return Block(first, last, way, *pair, self.share_at(first, last, way, which))

    def _one_elsewhere(self, block: Block, rng: np.random.Generator) -> Block:
        """Return a block of branches with one run on another processor."""
        place = self.base ** int(rng.integers(len(self.segment(block.first).runs)))
        digit = block.share // place % self.base
        return replace(block, share=block.share + (int(rng.integers(self.base)) - digit) * place)

    def kept(self, first: int, last: int, like: Block, rng: np.random.Generator) -> Block:
        """Return a block of other operators that runs as nearly as possible like a given one."""
        found = replace(like, first=first, last=last)
        if like.way in self.axes:
            cuts = self.cuts(first, last, _axis(like.way))
            if cuts:
                found = replace(found, share=min(cuts, key=lambda step: abs(step - like.share)))
        if like.way == "whole" or self._shared(found) is not None:
            return found
        return Block(first, last, "whole", (like.on, like.other)[int(rng.integers(2))])


def _axis(way: Way) -> Axis:
    return "height" if way == "height" else "channels"
