"""Lowering of plans: from splits and ranks to plain stages of a rewritten model.

This is the only code that knows what a rewrite does to a plan. A convolution with ranks is replaced by the three of
its triple, in the same stage. Each side of a split becomes a stage, which includes the slices that it reads; the join
of the sides is one more stage, on the processor that runs the next stage. Triples within a split chain are split with
it. Along channels the split begins with the last convolution of the first triple, since the two before it read all
channels; these run first, on the processor of the first side.

Only the structure is rewritten: weights are factored and sliced when a stage that needs them is cut from the model.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from search_spaces.core.errors import PlanError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import LayerRanks, Plan, Stage
from search_spaces.core.platform import Platform
from search_spaces.core.recent import recent
from search_spaces.rewrites.splits import Split, SplitGraph, extent, split_operators
from search_spaces.rewrites.tucker import (
    Layer,
    Ranks,
    Triple,
    TuckerGraph,
    decompose,
    drawn,
    factored,
    outline,
    ranks_of,
)
from search_spaces.rewrites.views import Held, Viewed, as_it_is, without_copies

_KEPT = 64
_KEPT_TRIPLES = 1024
_TRIPLE = 3

Keeps = Literal["bits", "rounding", "approximation"]
Origin = tuple[int, int]
"""The operator of the plan's graph that an operator came from, and its place in the triple; 0 where there is none."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """A lowered plan and its rewritten model.

    Attributes:
        graph: the rewritten model.
        plan: of ``graph``, without shares and ranks.
        stage_of: for each stage of ``plan`` the stage of the original plan that it belongs to; a join belongs to the
            first side.
        origins: for each operator of ``graph`` the original operator that it computes, or helps to.
        split: whether operators are split.
        ranks: operator of the plan's graph → those of its triple.
        longest: for each operator of ``graph`` the longest side's share of its split, 1 where it is in none; empty if
            nothing is split.
        left_out: operators of ``graph`` that never run, because they need no copy.
        held: as of :class:`~search_spaces.rewrites.views.Viewed`, where they are left out of the plan, too.
        keeps: how exactly ``graph`` computes the model's outputs: bit for bit, up to rounding, or approximately.
    """

    graph: Graph
    plan: Plan
    stage_of: tuple[int, ...]
    origins: tuple[Origin, ...]
    keeps: Keeps = "bits"
    split: bool = False
    ranks: Mapping[int, Ranks] = field(default_factory=dict)
    longest: tuple[float, ...] = ()
    left_out: frozenset[int] = frozenset()
    held: Held = field(default_factory=dict)

    @property
    def rewritten(self) -> bool:
        """Whether the graph differs from the plan's."""
        return self.keeps != "bits"

    @property
    def shares(self) -> tuple[float, ...]:
        """For each operator of ``graph`` which part of its time an inference takes; empty if nothing is split."""
        return tuple(0.0 if o in self.left_out else share for o, share in enumerate(self.longest))

    def viewed(self, platform: Platform) -> Viewed:
        """Return the plan without the slices and concatenations of splits that need no copy on a platform."""
        return without_copies(self.graph, self.plan, platform) if self.split else as_it_is(self.graph, self.plan)

    def without(self, viewed: Viewed) -> Lowered:
        """Return the same plan, whose operators that ``viewed`` elides never run."""
        if not viewed.held:
            return self
        runs = {o for operators in viewed.operators for o in operators}
        return replace(self, left_out=frozenset(range(len(self.graph.operators))) - runs)

    def in_place(self, platform: Platform) -> Lowered:
        """Return the plan without the operators that need no copy, of the same graph."""
        if not (viewed := self.viewed(platform)).held:
            return self
        each = zip(viewed.operators, viewed.stage_of, strict=True)
        stages = tuple(Stage(operators, self.plan.stages[i].processor) for operators, i in each)
        numbers = tuple(self.stage_of[i] for i in viewed.stage_of)
        plan = Plan(self.graph.digest, stages, self.plan.dispatch)
        return replace(self.without(viewed), plan=plan, stage_of=numbers, held=viewed.held)


def as_it_stands(graph: Graph, plan: Plan) -> Lowered:
    """Return a plan as its own lowering: one without rewrites, or whose session rewrites."""
    return Lowered(graph, plan, tuple(range(len(plan.stages))), tuple((o, 0) for o in range(len(graph.operators))))


def lowering(graph: Graph) -> Lowering:
    """Return what lowers the plans of a graph; all who ask for that of one graph share its results."""
    found: Lowering | None = graph.derived.get("lowering")
    if found is None or found.file != _file(graph):
        found = graph.derived["lowering"] = Lowering(graph)
    return found


def _file(graph: Graph) -> tuple[int, ...]:
    """Return what changes when a graph's file is written again."""
    with suppress(OSError):
        if graph.source is not None:
            found = graph.source.path.stat()
            return found.st_ino, found.st_size, found.st_mtime_ns
    return ()


class Lowering:
    """Lowers the plans of one model; caches the latest triples, and the 64 latest rewritten models of either kind.

    Attributes:
        graph: the model.
        file: tells whether its weights are still those of its file.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.file = _file(graph)
        self._one_thread = threading.RLock()
        self._triples: OrderedDict[Hashable, Triple] = OrderedDict()
        self._models: OrderedDict[Hashable, TuckerGraph] = OrderedDict()
        self._splits: OrderedDict[Hashable, SplitGraph] = OrderedDict()

    def lower(self, plan: Plan) -> Lowered:
        """Return a lowered plan; one without rewrites stays as it is.

        Raises:
            PlanError: its shares do not go together.
            RewriteError: an operator cannot be split or decomposed like that.
            ModelError: the model has no file, and the plan splits operators.
        """
        if not (plan.is_split or plan.ranks):
            return as_it_stands(self.graph, plan)
        made = self.decomposed(plan.ranks)
        if not plan.is_split:
            members = _members(made.origins, len(self.graph.operators))
            stages = tuple(Stage(_all(members, s.operators), s.processor) for s in plan.stages)
            numbers = tuple(range(len(stages)))
            placed = Plan(made.graph.digest, stages, plan.dispatch)
            return Lowered(made.graph, placed, numbers, _places(made.origins), "approximation", ranks=ranks_of(plan))
        splits = _Splits(self.graph, plan, made.origins)
        with self._one_thread:
            key = plan.ranks, splits.made
            whole = recent(self._splits, key, lambda: split_operators(made.graph, splits.made), _KEPT)
        places = _places(made.origins)
        origins = tuple(places[role.operator] for role in whole.roles)
        found = splits.lowered(whole, origins, "approximation" if plan.ranks else "rounding")
        return replace(found, ranks=ranks_of(plan))

    def decomposed(self, ranks: tuple[LayerRanks, ...]) -> TuckerGraph:
        """Return the model with some convolutions replaced by triples; without weights where it has no file.

        Raises:
            RewriteError: an operator cannot be decomposed, or a rank is above its channels.
        """
        if not ranks:
            return TuckerGraph(self.graph, tuple(range(len(self.graph.operators))), {})
        wanted = {operator: Ranks(*both) for operator, *both in ranks}
        with self._one_thread:
            return recent(self._models, ranks, lambda: self._decomposed(wanted), _KEPT)

    def decomposed_to_time(self, ranks: tuple[LayerRanks, ...]) -> TuckerGraph:
        """Return the decomposed model with random filters, which cost no factoring; its outputs mean nothing."""
        wanted = {operator: Ranks(*both) for operator, *both in ranks}
        with self._one_thread:
            return recent(self._models, ("drawn", ranks), lambda: decompose(self.graph, wanted, drawn), _KEPT)

    def has_made(self, graph: Graph) -> bool:
        """Return whether a graph is one of the cached rewritten models."""
        with self._one_thread:
            known = [made.graph for kept in (self._models, self._splits) for made in kept.values()]
        return any(made is graph for made in known)

    def _decomposed(self, ranks: dict[int, Ranks]) -> TuckerGraph:
        if self.graph.source is not None:
            return decompose(self.graph, ranks, self._triple)
        origins = (o for o in range(len(self.graph.operators)) for _ in range(_TRIPLE if o in ranks else 1))
        return TuckerGraph(outline(self.graph, ranks), tuple(origins), {})

    def _triple(self, layer: Layer, ranks: Ranks) -> Triple:
        key = layer.operator, ranks
        with self._one_thread:
            return recent(self._triples, key, lambda: factored(self.graph, layer, ranks), _KEPT_TRIPLES)


class _Splits:
    """The splits of a plan, with operator indices of the decomposed model, and the stages that they replace.

    Attributes:
        made: the splits, in the order of operators.
    """

    def __init__(self, graph: Graph, plan: Plan, origins: Sequence[int]) -> None:
        self.made: tuple[Split, ...] = ()
        self._plan, self._groups = plan, plan.sides()
        self._members = _members(origins, len(graph.operators))
        self._longest: list[float] = []  # share of the longest side of each
        self._number: dict[int, int] = {}  # first operator of a split → its place in ``made``
        self._leads: dict[int, tuple[int, ...]] = {}  # the same → operators that run before the sides
        for number, split in enumerate(splits_of(graph, plan)):
            first, last = self._members[split.first], self._members[split.last - 1]
            lead = first[:-1] if split.axis == "channels" else ()
            self._number[split.first], self._leads[split.first] = number, lead
            sizes = [s.share.last - s.share.first for s in plan.stages if s.share and s.operators[0] == split.first]
            self._longest.append(max(sizes) / sum(sizes))
            self.made += (Split(first[len(lead)], last[-1] + 1, split.axis, split.cuts),)

    def lowered(self, whole: SplitGraph, origins: tuple[Origin, ...], keeps: Keeps) -> Lowered:
        """Return the plan of the split model."""
        kept: dict[int, int] = {}
        sides: dict[tuple[int, int], list[int]] = {}
        joins: dict[int, list[int]] = {}
        for index, role in enumerate(whole.roles):
            if role.what == "kept":
                kept[role.operator] = index
            elif role.what == "side":
                sides.setdefault((role.split, role.side), []).append(index)
            else:
                joins.setdefault(role.split, []).append(index)
        found: list[tuple[int, Stage]] = []  # each with the original stage that it belongs to
        written: set[int] = set()
        for index, stage in enumerate(self._plan.stages):
            if index in written:
                continue
            if stage.share is None:
                operators = tuple(sorted(kept[o] for o in _all(self._members, stage.operators)))
                found.append((index, Stage(operators, stage.processor)))
                continue
            which, members = self._number[stage.operators[0]], self._groups[index]
            written.update(members)
            ordered = sorted(members, key=lambda i: self._plan.stages[i].begin)
            if lead := self._leads[stage.operators[0]]:
                first = self._plan.stages[ordered[0]].processor
                found.append((ordered[0], Stage(tuple(kept[o] for o in lead), first)))
            for side, member in sorted(enumerate(ordered), key=lambda pair: pair[1]):
                found.append((member, Stage(tuple(sides[which, side]), self._plan.stages[member].processor)))
            found.append((members[0], Stage(tuple(joins[which]), self._goes_on(index, members))))
        plan = Plan(whole.graph.digest, tuple(stage for _, stage in found), self._plan.dispatch)
        longest = tuple(self._longest[role.split] if role.what == "side" else 1.0 for role in whole.roles)
        numbers = tuple(index for index, _ in found)
        return Lowered(whole.graph, plan, numbers, origins, keeps, split=True, longest=longest)

    def _goes_on(self, index: int, members: Sequence[int]) -> str:
        """Return the processor of the join: that of the stage after the sides, or of the first side if none follows."""
        stages = self._plan.stages
        after = next((s for i, s in enumerate(stages) if i > index and i not in members), stages[index])
        return after.processor


def splits_of(graph: Graph, plan: Plan) -> tuple[Split, ...]:
    """Return the splits of a plan, in the order of operators.

    Raises:
        PlanError: a split stage is not a run of operators, or its shares do not add up to the whole.
        RewriteError: it cannot be split.
    """
    found: dict[int, Split] = {}
    for indices in dict.fromkeys(plan.sides().values()):
        sides = [plan.stages[i] for i in indices]
        shares = sorted((s.share.first, s.share.last) for s in sides if s.share is not None)
        share = sides[0].share
        if share is None:
            continue
        first, last = sides[0].operators[0], sides[0].operators[-1] + 1
        if sides[0].operators != tuple(range(first, last)):
            raise PlanError(f"stage {indices[0]} of the plan is split, and no run of consecutive operators")
        length = extent(graph, first, last, share.axis)
        if shares[-1][1] != length:
            raise PlanError(
                f"stage {indices[-1]} of the plan ends at {shares[-1][1]} of {length} along {share.axis}",
                "shares must add up to the whole",
            )
        found[first] = Split(first, last, share.axis, tuple(end for _, end in shares[:-1]))
    return tuple(found[first] for first in sorted(found))


def _members(origins: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Return, for each operator of the original model, those of the decomposed model that come from it."""
    found: list[list[int]] = [[] for _ in range(count)]
    for index, origin in enumerate(origins):
        found[origin].append(index)
    return [tuple(each) for each in found]


def _all(members: Sequence[tuple[int, ...]], operators: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for o in operators for i in members[o])


def _places(origins: Sequence[int]) -> tuple[Origin, ...]:
    """Return the origins, each with the operator's place among those of the same origin, which are consecutive."""
    found: list[Origin] = []
    for before, origin in pairwise((-1, *origins)):
        found.append((origin, found[-1][1] + 1 if origin == before else 0))
    return tuple(found)
