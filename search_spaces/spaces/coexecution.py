"""The space of co-execution: a chain of parts, each of which one processor runs or two share (seeds 002 and 003).

A part that is shared is split along height or output channels, or it is a group of parallel branches, some of which run
on each processor. Both sides run at the same time, and meet at its end. So a plan is where parts begin and end, and for
each part how it is shared, at which share, and on which processors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import permutations
from typing import TYPE_CHECKING, Any

from search_spaces.core.errors import PlanError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Share, Stage, canonical
from search_spaces.core.platform import Platform
from search_spaces.rewrites.splits import Axis, extent
from search_spaces.spaces.shared_chains import GRID, LONGEST
from search_spaces.spaces.shared_parts import How, Mode, Part, SharedParts

__all__ = ["AXES", "GRID", "CoexecutionSpace", "How", "Mode", "Part"]

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import BaseDistribution


AXES: tuple[Axis, ...] = ("height", "channels")
_MOVES = 50


class CoexecutionSpace(SharedParts):
    """All ways to cut a model into parts and to run each whole, or split in two.

    Parameters (fixed for the study): for each operator but the first, ``cut_i``: whether a part begins there; for each
    operator, ``split_i``, ``share_i``, ``on_i`` and ``with_i``, which count where a part begins. A part that cannot be
    shared as it is told runs whole.

    Args:
        splits: whether operators may be split.
        branches: whether the branches of a group may run on two processors.

    Raises:
        UsageError: there is one processor only.
    """

    def __init__(self, graph: Graph, platform: Platform, *, splits: bool = True, branches: bool = True) -> None:
        if len(platform.processors) < 2:
            raise UsageError(
                "splits require two processors, and there is one",
                "give --processors with two of them, as cpu0,cpu1",
            )
        super().__init__(graph, branches=branches)
        self.platform = platform
        self.axes: tuple[Axis, ...] = AXES if splits else ()
        self._place = {p.name: i for i, p in enumerate(platform.processors)}

    @property
    def freedoms(self) -> tuple[str, ...]:
        """What its plans may do."""
        return ("cuts", *(("branches",) if self._branches else ()), *(("splits",) if self.axes else ()))

    @cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Pairs of lanes that can run at the same time, each in both orders; of lanes alike, the first ones only."""
        names = [p.name for group in self.platform.classes().values() for p in group[:2]]
        lanes = [p for p in self.platform.processors if p.name in names]
        found = [(a.name, b.name) for a, b in permutations(lanes, 2) if not a.excludes(b)]
        alike = {p.name: p.like for p in lanes}
        return tuple((a, b) for a, b in found if alike[a] != alike[b] or self._place[a] < self._place[b])

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """Lanes for what is not split: of those that are alike, the first one."""
        return tuple(group[0].name for group in self.platform.classes().values())

    def plan(self, parts: list[Part] | tuple[Part, ...]) -> Plan:
        """Return the canonical plan of parts that follow each other."""
        stages: list[Stage] = []
        for part in parts:
            operators = tuple(range(part.first, part.last))
            if part.axis is None or part.axis == "branches":
                stages += [Stage(own, lane) for own, lane in zip(self.side_operators(part), part.on, strict=True)]
                continue
            length = extent(self.graph, part.first, part.last, part.axis)
            shares = (Share(part.axis, 0, part.cut), Share(part.axis, part.cut, length))
            stages += [Stage(operators, lane, share) for lane, share in zip(part.on, shares, strict=True)]
        return canonical(Plan(self.graph.digest, tuple(stages)), self.graph, self.platform)

    def distributions(self) -> dict[str, BaseDistribution]:
        """See :class:`~search_spaces.spaces.space.SearchSpace`."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        found: dict[str, BaseDistribution] = {}
        names = [p.name for p in self.platform.processors]
        for i in range(len(self.graph.operators)):
            if i:
                found[f"cut_{i}"] = CategoricalDistribution([False, True])
            begins = any(first == i for first, _ in self.groups)
            kinds = ["whole", *self.axes, *(["branches"] if begins else [])]
            found[f"split_{i}"] = CategoricalDistribution(kinds)
            found[f"share_{i}"] = IntDistribution(1, GRID - 1)
            found[f"on_{i}"] = CategoricalDistribution(names)
            found[f"with_{i}"] = CategoricalDistribution(names)
        return found

    def decode(self, params: Mapping[str, Any]) -> Plan:
        """Return the canonical plan; a part that cannot be shared as it is told runs whole on its first processor."""
        count = len(self.graph.operators)
        begins = [i for i in range(count) if i == 0 or params[f"cut_{i}"]]
        parts = []
        for first, last in zip(begins, [*begins[1:], count], strict=True):
            how, step = params[f"split_{first}"], int(params[f"share_{first}"])
            on, other = str(params[f"on_{first}"]), str(params[f"with_{first}"])
            parts.append(self._shared(first, last, (how, step, on, other)) or Part(first, last, (on,)))
        return self.plan(parts)

    def _shared(self, first: int, last: int, mode: tuple[Any, int, str, str]) -> Part | None:
        how, step, on, other = mode
        if on == other or self.platform[on].excludes(self.platform[other]):
            return None
        if how not in self.axes and how != "branches":
            return None
        if how == "branches":
            return Part(first, last, (on, other), how, step) if step in self.branch_sets(first, last) else None
        cut = self.cuts(first, last, how).get(step)
        return None if cut is None else Part(first, last, (on, other), how, cut)

    def parts(self, plan: Plan) -> tuple[Part, ...]:
        """Return the parts of a plan; what can be read as branches of a group side by side is read so.

        Raises:
            PlanError: the plan is not in the space.
        """
        plan.validate(self.graph, self.platform)
        plan = canonical(plan, self.graph, self.platform)
        begin: dict[int, list[int]] = {}
        for index, stage in enumerate(plan.stages):
            begin.setdefault(stage.operators[0], []).append(index)
        found: list[Part] = []
        first = 0
        while first < len(self.graph.operators):
            part = self._branched(plan, first)
            if part is None:
                members = begin.get(first, [])
                stages = sorted((plan.stages[i] for i in members), key=lambda s: s.share.first if s.share else 0)
                operators = stages[0].operators if stages else ()
                if operators != tuple(range(first, first + len(operators))) or not 1 <= len(stages) <= 2:
                    raise PlanError(f"the stages from operator {first} on are no run on one or two processors")
                share = stages[0].share
                how, cut = (share.axis, share.last) if share is not None else (None, 0)
                part = Part(first, operators[-1] + 1, tuple(s.processor for s in stages), how, cut)
            found.append(part)
            first = part.last
        return tuple(found)

    def _branched(self, plan: Plan, first: int) -> Part | None:
        """Return the part that begins at an operator, if it is a group whose branches run on two processors."""
        for (begin, last), branches in self.groups.items():
            if begin != first:
                continue
            inside = [s for s in plan.stages if first <= s.operators[0] < last and s.share is None]
            inside.sort(key=lambda s: self._place[s.processor])
            if len(inside) != 2 or sorted((*inside[0].operators, *inside[1].operators)) != list(range(first, last)):
                continue
            on = inside[0].processor, inside[1].processor
            second = set(inside[1].operators)
            apart = all(second.issuperset(b) or second.isdisjoint(b) for b in branches)
            if on[0] != on[1] and apart and not self.platform[on[0]].excludes(self.platform[on[1]]):
                return Part(first, last, on, "branches", sum(1 << i for i, b in enumerate(branches) if b[0] in second))
        return None

    def encode(self, plan: Plan) -> dict[str, Any]:
        """See :class:`~search_spaces.spaces.space.SearchSpace`; parameters that the plan leaves open get fixed values.

        Raises:
            PlanError: the plan is not in the space.
        """
        names = [p.name for p in self.platform.processors]
        params: dict[str, Any] = {}
        for i in range(len(self.graph.operators)):
            if i:
                params[f"cut_{i}"] = False
            params |= {f"split_{i}": "whole", f"share_{i}": 1, f"on_{i}": names[0], f"with_{i}": names[0]}
        for part in self.parts(plan):
            i = part.first
            if i:
                params[f"cut_{i}"] = True
            params[f"on_{i}"] = part.on[0]
            if part.axis is None:
                continue
            step = part.cut if part.axis == "branches" else self.step(part)
            if step is None:
                if part.last - part.first > LONGEST:
                    raise PlanError(
                        f"operators {part.first} to {part.last - 1} are more than the {LONGEST} that are split together"
                    )
                raise PlanError(f"{part.axis} {part.cut} of operator {part.last - 1} is no step of the grid")
            params |= {f"split_{i}": part.axis, f"share_{i}": step, f"with_{i}": part.on[1]}
        return params

    @cached_property
    def _ways(self) -> tuple[int, ...]:
        """For each operator in how many ways the operators from it to the end can be run."""
        count = len(self.graph.operators)
        ways = [0] * count + [1]
        for first in reversed(range(count)):
            ways[first] = sum(self._count(first, last) * ways[last] for last in range(first + 1, count + 1))
        return tuple(ways)

    def _count(self, first: int, last: int) -> int:
        """Return the length of :meth:`modes`."""
        splits = 0
        if last - first <= LONGEST:
            splits = sum(int((self.chains(last, axis).lengths >= last - first).sum()) for axis in self.axes)
        pairs = len(self._all_pairs)
        return len(self.platform.processors) + splits * pairs + len(self.branch_sets(first, last)) * (pairs // 2)

    def modes(self, first: int, last: int) -> list[Mode]:
        """Return in how many ways a part can be run: every one that a canonical plan can have."""
        found: list[Mode] = [("whole", lane.name) for lane in self.platform.processors]
        for axis in self.axes:
            found += [(axis, step, a, b) for step in self.cuts(first, last, axis) for a, b in self._all_pairs]
        ordered = [(a, b) for a, b in self._all_pairs if self._place[a] < self._place[b]]
        found += [("branches", which, a, b) for which in self.branch_sets(first, last) for a, b in ordered]
        return found

    @cached_property
    def _all_pairs(self) -> tuple[tuple[str, str], ...]:
        lanes = self.platform.processors
        return tuple((a.name, b.name) for a, b in permutations(lanes, 2) if not a.excludes(b))

    def cardinality(self) -> int:
        """Return the number of plans.

        Those are counted apart that differ in the names of lanes that are alike, or that are a group of branches side
        by side as well as one part behind another.
        """
        return self._ways[0]

    def plan_at(self, index: int) -> Plan:
        """Return plan number ``index`` of 0 … ``cardinality() - 1``.

        Raises:
            IndexError: there is no such number.
        """
        if not 0 <= index < self.cardinality():
            raise IndexError(index)
        parts: list[Part] = []
        first, count = 0, len(self.graph.operators)
        while first < count:
            for last in range(first + 1, count + 1):
                plans = self._count(first, last) * self._ways[last]
                if index < plans:
                    break
                index -= plans
            which, index = divmod(index, self._ways[last])
            parts.append(self.part(first, last, self.modes(first, last)[which]))
            first = last
        return self.plan(parts)

    def neighbour(self, plan: Plan, rng: np.random.Generator) -> Plan:
        """Return the plan after one random move: a part otherwise, a cut moved, two parts as one, or one as two.

        Args:
            plan: of this space.
        """
        parts = list(self.parts(plan))
        for _ in range(_MOVES):
            i, move = int(rng.integers(len(parts))), int(rng.integers(4))
            part = parts[i]
            if move == 0:
                made = [*parts[:i], self._otherwise(part.first, part.last, rng), *parts[i + 1 :]]
            elif i + 1 < len(parts) and move <= 2:
                last = parts[i + 1].last
                cut = int(rng.integers(part.first + 1, last)) if move == 1 and last - part.first > 1 else last
                again = [(part.first, cut, part), (cut, last, parts[i + 1])][: 2 if cut < last else 1]
                made = [*parts[:i], *(self._kept(*each, rng) for each in again), *parts[i + 2 :]]
            elif part.last - part.first > 1:
                cut = int(rng.integers(part.first + 1, part.last))
                if rng.random() < 0.5:
                    halves = self._kept(part.first, cut, part, rng), self._otherwise(cut, part.last, rng)
                else:
                    halves = self._otherwise(part.first, cut, rng), self._kept(cut, part.last, part, rng)
                made = [*parts[:i], *halves, *parts[i + 1 :]]
            else:
                continue
            found = self.plan(made)
            if found != plan:
                return found
        return plan

    def _otherwise(self, first: int, last: int, rng: np.random.Generator) -> Part:
        """Return some way to run operators as a part."""
        modes = self.modes(first, last)
        shared = [mode for mode in modes if mode[0] != "whole"]
        among = shared if shared and rng.random() < 0.5 else [mode for mode in modes if mode[0] == "whole"]
        return self.part(first, last, among[int(rng.integers(len(among)))])

    def _kept(self, first: int, last: int, like: Part, rng: np.random.Generator) -> Part:
        """Return operators run as a part is that held some of them, as near as can be."""
        if like.axis is None:
            return Part(first, last, like.on)
        step = self.step(like)
        cuts = self.cuts(first, last, like.axis) if like.axis != "branches" and step is not None else {}
        if not cuts or step is None:
            return Part(first, last, (like.on[int(rng.integers(len(like.on)))],))
        return Part(first, last, like.on, like.axis, cuts[min(cuts, key=lambda s: abs(s - step))])

    def part(self, first: int, last: int, mode: Mode) -> Part:
        """Return a part that is run in one of :meth:`modes`."""
        if mode[0] == "whole":
            return Part(first, last, (mode[1],))
        if mode[0] == "branches":
            return Part(first, last, (mode[2], mode[3]), mode[0], mode[1])
        return Part(first, last, (mode[2], mode[3]), mode[0], self.cuts(first, last, mode[0])[mode[1]])
