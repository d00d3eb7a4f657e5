"""A plan: which operators run together as a stage, and on which processor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from search_spaces.core.errors import PlanError, UsageError, absent, shown
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform

Dispatch = Literal["static", "fifo", "priority", "edf"]

SCHEMA_VERSION = 1
MAX_OPERATORS = 1_000_000  # a damaged plan file must not fill the memory
_CONTENT = json.JSONEncoder(sort_keys=True, separators=(",", ":"))  # made once: searches make many plans


@dataclass(frozen=True, slots=True)
class Share:
    """One side of a chain of operators that is split along an axis (seed 002).

    Attributes:
        axis: ``height`` or ``channels``.
        first, last: the indices that this side computes, half-open, along the axis of the chain's output; of its last
            operator's input, where that is a mean over the axis.
    """

    axis: Literal["height", "channels"]
    first: int
    last: int

    def __str__(self) -> str:
        return f"{'rows' if self.axis == 'height' else self.axis} {self.first} to {self.last - 1}"


class LayerRanks(NamedTuple):
    """A convolution that runs as its Tucker-2 triple (seed 001).

    Attributes:
        operator: the convolution, in the graph of the plan.
        inputs, outputs: channels per group before and after the core (:class:`search_spaces.rewrites.tucker.Ranks`).
    """

    operator: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.operator}: {self.inputs}x{self.outputs}"


@dataclass(frozen=True, slots=True)
class Stage:
    """Operators (ascending indices) that are compiled together and run on one processor.

    Attributes:
        share: the side that this stage computes of a split; the other sides are stages of the same operators.
    """

    operators: tuple[int, ...]
    processor: str
    share: Share | None = None

    @property
    def text(self) -> str:
        """Its operators and its processor, as ``1–21 gpu``."""
        runs = ", ".join(f"{a}" if b - a == 1 else f"{a}–{b - 1}" for a, b in runs_of(self.operators))
        return f"{runs} {self.processor}" + (f" ({self.share})" if self.share is not None else "")

    @property
    def begin(self) -> int:
        """The first index of its share; 0 of a whole stage."""
        return self.share.first if self.share is not None else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in the order in which they are dispatched; stage ``i`` reads only from stages before it.

    Adjacent stages on one processor are not merged: loading them separately is the effect that seed 000 measures.

    Attributes:
        graph_digest: the graph that the plan is for.
        stages: every operator of the graph is in exactly one, or in one for each side of its split.
        dispatch: ``static``: each processor runs its stages in this order. Stages of several models at once go through
            a queue instead, from which processors take them (:mod:`search_spaces.core.decoded_plan`).
        ranks: convolutions that run as triples, ascending; stages name the original operators.
        digest: SHA-256 (hex) of the content; equal canonical plans have equal digests.
    """

    graph_digest: str
    stages: tuple[Stage, ...]
    dispatch: Dispatch = "static"
    ranks: tuple[LayerRanks, ...] = ()
    digest: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        content = _CONTENT.encode(self.to_json())
        object.__setattr__(self, "digest", hashlib.sha256(content.encode()).hexdigest())

    def __str__(self) -> str:
        """Return the stages as ``0 cpu0 | 1–21 gpu``, a side of a split as ``3–7 cpu0 (rows 0 to 5)``."""
        return " | ".join(stage.text for stage in self.stages)

    def by_processor(self) -> dict[str, list[int]]:
        """Return the stages of each processor in dispatch order, processors in the order of their first stage."""
        found: dict[str, list[int]] = {}
        for index, stage in enumerate(self.stages):
            found.setdefault(stage.processor, []).append(index)
        return found

    @property
    def is_split(self) -> bool:
        """Whether some stages are sides of a split."""
        return any(stage.share is not None for stage in self.stages)

    @property
    def is_chain(self) -> bool:
        """Whether stages are consecutive operators, none of them split."""
        operators = [operator for stage in self.stages for operator in stage.operators]
        return not self.is_split and operators == list(range(len(operators)))

    def sides(self) -> dict[int, tuple[int, ...]]:
        """Return, for each stage, the stages that are sides of the same split, in the order of their shares.

        Raises:
            PlanError: sides do not follow each other from 0 on, or are not all along one axis.
        """
        found: dict[int, tuple[int, ...]] = {i: (i,) for i, stage in enumerate(self.stages) if stage.share is None}
        split: dict[tuple[int, ...], list[int]] = {}
        for index, stage in enumerate(self.stages):
            if stage.share is not None:
                split.setdefault(stage.operators, []).append(index)
        for indices in split.values():
            end = 0
            members = sorted((share.first, i, share) for i in indices if (share := self.stages[i].share) is not None)
            for first, index, share in members:
                if first != end or share.last <= first or share.axis != members[0][2].axis or len(members) < 2:
                    raise PlanError(f"stage {index} has {share}; splits need consecutive shares of one axis from 0 on")
                end = share.last
            order = tuple(i for _, i, _ in members)
            found |= dict.fromkeys(indices, tuple(sorted(order)))
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values; operator runs are written as half-open ``[first, last]`` pairs."""
        return {
            "schema_version": SCHEMA_VERSION,
            "graph_digest": self.graph_digest,
            "dispatch": self.dispatch,
            "stages": [
                {"operators": runs_of(s.operators), "processor": s.processor}
                | ({"share": [s.share.axis, s.share.first, s.share.last]} if s.share is not None else {})
                for s in self.stages
            ],
        } | ({"ranks": [list(layer) for layer in self.ranks]} if self.ranks else {})

    @classmethod
    def from_json(cls, data: object) -> Plan:
        """Build a plan from what :meth:`to_json` returned; unknown fields are ignored.

        Raises:
            PlanError: a field is missing or has the wrong type, or the schema version is not supported.
        """
        if not isinstance(data, Mapping):
            raise PlanError(f"a plan is a JSON object, not {type(data).__name__}")
        version = data.get("schema_version")
        if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
            raise PlanError(f"plan has schema_version {shown(version)}; this version reads 1 to {SCHEMA_VERSION}")
        dispatch: Any = data.get("dispatch")
        if dispatch not in get_args(Dispatch):
            known = ", ".join(get_args(Dispatch))
            raise PlanError(f"plan has dispatch {shown(dispatch)}; this version runs: {known}")
        graph_digest, stages = data.get("graph_digest"), data.get("stages")
        if not isinstance(graph_digest, str):
            raise PlanError(f"plan is damaged: its graph_digest is {shown(graph_digest)}, not a string")
        if not isinstance(stages, list | tuple):
            raise PlanError(f"plan is damaged: its stages are {shown(stages)}, not a list")
        return cls(graph_digest, tuple(_stages_from_json(stages)), dispatch, _ranks_from_json(data.get("ranks", ())))

    def validate(self, graph: Graph, platform: Platform | None = None) -> None:
        """Check that the plan is for this graph, covers it once, is in dispatch order, and names known processors.

        Raises:
            PlanError: it does not; the text names the stage and operator.
        """
        if self.graph_digest != graph.digest:
            raise PlanError(f"plan is for another graph ({self.graph_digest[:12]}…), not {graph.name!r}")
        _check_ranks(self.ranks, graph)
        if _in_order(self.stages, graph):
            if platform is not None:
                for index, stage in enumerate(self.stages):
                    _check_processor(index, stage, platform)
            return
        place: dict[int, int] = {}
        sides = self.sides()
        for index, stage in enumerate(self.stages):
            if not stage.operators:
                raise PlanError(f"stage {index} of the plan is empty")
            for operator in stage.operators:
                if not 0 <= operator < len(graph.operators):
                    raise PlanError(f"stage {index} names {absent('operator', operator, len(graph.operators))}")
                if operator in place and (place[operator] == index or index not in sides[place[operator]]):
                    raise PlanError(f"operator {operator} is in stage {place[operator]} and in stage {index}")
                place[operator] = index
            if list(stage.operators) != sorted(stage.operators):
                raise PlanError(f"stage {index} of the plan does not name its operators in ascending order")
            if platform is not None:
                _check_processor(index, stage, platform)
        if len(place) != len(graph.operators):
            missing = next(o for o in range(len(graph.operators)) if o not in place)
            raise PlanError(f"operator {missing} ({graph.operators[missing].kind}) is in no stage of the plan")
        for operator, index in place.items():
            for before in graph.predecessors(operator):
                if place[before] > sides[index][0] and place[before] != index:
                    raise PlanError(
                        f"stage {index} reads what stage {place[before]} writes later "
                        f"(operators {before} → {operator}): the stages form a cycle or are out of order"
                    )


def canonical(plan: Plan, graph: Graph, platform: Platform) -> Plan:
    """Return the canonical form, which is the same for all equivalent plans.

    Stages are put into the topological order that takes the smallest operator first, and interchangeable processors are
    named in the order of first use. Idempotent.

    Raises:
        PlanError: the stages form a cycle.
        UsageError: the plan names a processor that the platform lacks.
    """
    in_order = _in_order(plan.stages, graph)
    stages = plan.stages if in_order else _topological(plan.stages, graph)
    members = {like: iter(group) for like, group in platform.classes().items()}
    renamed: dict[str, str] = {}
    for stage in stages:
        if stage.processor not in renamed:
            renamed[stage.processor] = next(members[platform[stage.processor].like]).name
    if in_order and all(new == old for old, new in renamed.items()) and list(plan.ranks) == sorted(plan.ranks):
        return plan
    return Plan(
        plan.graph_digest,
        tuple(replace(s, operators=tuple(sorted(s.operators)), processor=renamed[s.processor]) for s in stages),
        plan.dispatch,
        tuple(sorted(plan.ranks)),
    )


def needs(plan: Plan, graph: Graph) -> tuple[int, ...]:
    """Return, for each stage of a plan without splits, the stages that it reads from, as a bit set."""
    place = {operator: index for index, stage in enumerate(plan.stages) for operator in stage.operators}
    found = []
    for index, stage in enumerate(plan.stages):
        sources = {place[before] for operator in stage.operators for before in graph.predecessors(operator)}
        found.append(sum(1 << source for source in sources if source != index))
    return tuple(found)


def _in_order(stages: Sequence[Stage], graph: Graph) -> bool:
    """Tell whether the stages are consecutive runs of all operators, and so in topological order."""
    if not all(stage.operators and stage.share is None for stage in stages):
        return False
    return [o for stage in stages for o in stage.operators] == list(range(len(graph.operators)))


def _check_ranks(ranks: Sequence[LayerRanks], graph: Graph) -> None:
    before = -1
    for operator, *both in ranks:
        if not before < operator < len(graph.operators) or graph.operators[operator].kind != "CONV_2D":
            raise PlanError(f"the plan has ranks for operator {operator}: not a convolution, or out of order")
        if min(both) < 1:
            raise PlanError(f"the plan has rank {min(both)} for operator {operator}; the least is 1")
        before = operator


def _check_processor(index: int, stage: Stage, platform: Platform) -> None:
    try:
        platform[stage.processor]
    except UsageError as error:
        raise PlanError(f"stage {index} of the plan: {error.what}", error.hint) from error


def _topological(stages: Sequence[Stage], graph: Graph) -> list[Stage]:
    place: dict[int, set[int]] = {}
    for index, stage in enumerate(stages):
        for operator in stage.operators:
            place.setdefault(operator, set()).add(index)
    waiting: dict[int, set[int]] = {}
    for index, stage in enumerate(stages):
        inside = set(stage.operators) if stage.share is not None else set()
        before = {b for o in stage.operators for b in graph.predecessors(o) if b in place and b not in inside}
        waiting[index] = {i for b in before for i in place[b]} - {index}
    ordered: list[Stage] = []
    done: set[int] = set()
    while waiting:
        ready = [i for i, needs in waiting.items() if needs <= done]
        if not ready:
            raise PlanError(f"stages {sorted(waiting)} of the plan form a cycle")
        chosen = min(ready, key=lambda i: (min(stages[i].operators, default=-1), stages[i].begin))
        ordered.append(stages[chosen])
        done.add(chosen)
        del waiting[chosen]
    return ordered


def runs_of(operators: Sequence[int]) -> list[list[int]]:
    """Return ascending operators as half-open runs of consecutive ones."""
    runs: list[list[int]] = []
    for operator in operators:
        if runs and runs[-1][1] == operator:
            runs[-1][1] = operator + 1
        else:
            runs.append([operator, operator + 1])
    return runs


def _stages_from_json(stages: Sequence[object]) -> Iterator[Stage]:
    room = MAX_OPERATORS
    for index, stage in enumerate(stages):
        if not isinstance(stage, Mapping) or not isinstance(stage.get("processor"), str):
            raise PlanError(f"plan is damaged: stage {index} is {shown(stage)}, without a processor's name")
        operators = _from_runs(stage.get("operators"), index, room)
        room -= len(operators)
        yield Stage(operators, stage["processor"], _share(stage.get("share"), index))


def _ranks_from_json(data: object) -> tuple[LayerRanks, ...]:
    if not isinstance(data, list | tuple):
        raise PlanError(f"plan is damaged: its ranks are {shown(data)}, not a list")
    for entry in data:
        if not (isinstance(entry, list | tuple) and len(entry) == 3 and all(type(n) is int for n in entry)):
            raise PlanError(f"plan is damaged: {shown(entry)} is not an operator and its two ranks")
    return tuple(LayerRanks(*entry) for entry in data)


def _share(data: object, stage: int) -> Share | None:
    if data is None:
        return None
    if not (isinstance(data, list | tuple) and len(data) == 3 and all(type(d) is int for d in data[1:])):
        raise PlanError(f"plan is damaged: stage {stage} has the share {shown(data)}")
    if data[0] not in ("height", "channels"):
        raise PlanError(f"plan is damaged: stage {stage} is split along {shown(data[0])}")
    return Share(data[0], data[1], data[2])


def _from_runs(runs: object, stage: int, room: int) -> tuple[int, ...]:
    """Return the operators of half-open runs, which ascend and hold at most ``room`` operators together."""
    if not isinstance(runs, list | tuple):
        raise PlanError(f"plan is damaged: the operators of stage {stage} are {shown(runs)}, not a list")
    operators: list[int] = []
    for run in runs:
        after = operators[-1] + 1 if operators else 0
        if not (
            isinstance(run, list | tuple)
            and len(run) == 2
            and all(type(end) is int for end in run)
            and after <= run[0] < run[1] <= run[0] + room - len(operators)
        ):
            raise PlanError(f"plan is damaged: stage {stage} has {shown(run)} where a run of operators is due")
        operators.extend(range(run[0], run[1]))
    return tuple(operators)
