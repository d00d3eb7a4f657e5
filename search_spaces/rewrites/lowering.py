"""A plan with split stages as a plan without: of the rewritten model, in which each side is a branch.

Each side becomes a stage of its own operators, the slices that it reads among them. What brings the sides together is
one more stage, on the processor that goes on with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from search_spaces.errors import PlanError
from search_spaces.graph import Graph
from search_spaces.plan import Plan, Stage
from search_spaces.rewrites.operator_split import SplitGraph, split_operators
from search_spaces.rewrites.splits import Split, extent

_KEPT = 64


@dataclass(frozen=True, slots=True)
class Lowered:
    """A plan as it is run.

    Attributes:
        graph, plan: the rewritten model, and the plan of it.
        stage_of: for each stage of ``plan`` the stage of the plan before that it belongs to; a join belongs to the
            first side.
        operator_of: for each operator of ``graph`` the one of the model before that it computes, or helps to.
    """

    graph: Graph
    plan: Plan
    stage_of: tuple[int, ...]
    operator_of: tuple[int, ...]


def is_split(plan: Plan) -> bool:
    """Return whether a plan has stages that are sides of a split."""
    return any(stage.share is not None for stage in plan.stages)


def splits_of(graph: Graph, plan: Plan) -> tuple[Split, ...]:
    """Return what a plan splits, in the order of operators.

    Raises:
        PlanError: a split stage is no run of operators, or its shares do not add up to the whole.
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


class Lowering:
    """Lowers the plans of one model, and keeps what it has rewritten lately."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: OrderedDict[tuple[Split, ...], SplitGraph] = OrderedDict()

    def lower(self, plan: Plan) -> Lowered:
        """Return a plan as it is run; one without splits stays as it is.

        Raises:
            PlanError: its shares do not go together.
            RewriteError: an operator cannot be split like that.
        """
        if not is_split(plan):
            return Lowered(self._graph, plan, tuple(range(len(plan.stages))), tuple(range(len(self._graph.operators))))
        splits = splits_of(self._graph, plan)
        if splits not in self._known:
            self._known[splits] = split_operators(self._graph, splits)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(splits)
        return _lowered(self._known[splits], plan, splits)


def _lowered(made: SplitGraph, plan: Plan, splits: Sequence[Split]) -> Lowered:
    kept: dict[int, int] = {}
    sides: dict[tuple[int, int], list[int]] = {}
    joins: dict[int, list[int]] = {}
    for index, role in enumerate(made.roles):
        if role.what == "kept":
            kept[role.operator] = index
        elif role.what == "side":
            sides.setdefault((role.split, role.side), []).append(index)
        else:
            joins.setdefault(role.split, []).append(index)
    number = {split.first: i for i, split in enumerate(splits)}
    stages: list[Stage] = []
    stage_of: list[int] = []
    groups = plan.sides()
    written: set[int] = set()
    for index, stage in enumerate(plan.stages):
        if index in written:
            continue
        if stage.share is None:
            stages.append(Stage(tuple(sorted(kept[o] for o in stage.operators)), stage.processor))
            stage_of.append(index)
            continue
        which = number[stage.operators[0]]
        members = groups[index]
        written.update(members)
        ordered = sorted(members, key=lambda i: _first(plan.stages[i]))
        for side, member in sorted(enumerate(ordered), key=lambda pair: pair[1]):
            operators = tuple(sides[which, side])
            stages.append(Stage(operators, plan.stages[member].processor))
            stage_of.append(member)
        stages.append(Stage(tuple(joins[which]), _goes_on(plan, index, members)))
        stage_of.append(members[0])
    operator_of = tuple(role.operator for role in made.roles)
    return Lowered(made.graph, Plan(made.graph.digest, tuple(stages)), tuple(stage_of), operator_of)


def _first(stage: Stage) -> int:
    return stage.share.first if stage.share is not None else 0


def _goes_on(plan: Plan, index: int, members: Sequence[int]) -> str:
    """Return the processor that brings the sides together: that of the stage after them, or else of the first side."""
    after = next((s for i, s in enumerate(plan.stages) if i > index and i not in members), plan.stages[index])
    return after.processor
