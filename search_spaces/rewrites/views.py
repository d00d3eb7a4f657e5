"""Elision of slices and concatenations of rows that are contiguous in memory.

Height slices of NHWC tensors of one image are contiguous, and so are parts of a row. Where such a slice is taken of
another stage's output, or such outputs of other stages are concatenated, the operator is left out: the parts are
written to their place in the whole, and slices are read in place. Readers of the operator's output then depend on its
inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from search_spaces.core.graph import Graph, Operator
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform
from search_spaces.models.dtypes import integers

ALIGNMENT = 64
"""Bytes; runtimes require tensors to begin at multiples of it."""

Held = Mapping[int, tuple[tuple[int, int], ...]]
"""Tensor → the tensors in which it lies, each with the bytes of it there."""


@dataclass(frozen=True, slots=True)
class Viewed:
    """A plan without the elided operators.

    Attributes:
        graph: without them; its ``views`` say which tensor lies in which.
        plan: of that graph; stages that are empty now are removed.
        operators: for each stage of ``plan`` its operators, with indices of the original graph.
        stage_of: for each stage of ``plan`` its index in the original plan.
        held: for each tensor that an elided operator wrote, the tensors that hold it, and how many of its bytes each.
    """

    graph: Graph
    plan: Plan
    operators: tuple[tuple[int, ...], ...]
    stage_of: tuple[int, ...]
    held: Held = field(default_factory=dict)


def without_copies(graph: Graph, plan: Plan, platform: Platform) -> Viewed:
    """Return a plan without slices and concatenations between stages that need no copy.

    This requires memory that all processors share: a plan with stages on accelerators stays as it is.
    """
    found: _Views | None = None
    if all(platform[stage.processor].kind == "cpu" for stage in plan.stages):
        found = _Views(graph, plan)
    if found is None or not found.elided:
        return as_it_is(graph, plan)
    kept = [o for o in range(len(graph.operators)) if o not in found.elided]
    place = {o: i for i, o in enumerate(kept)}
    operators = tuple(found.depending(graph.operators[o]) for o in kept)
    made = replace(graph, operators=operators, views=found.views, source=None)
    left = [(i, tuple(o for o in s.operators if o in place)) for i, s in enumerate(plan.stages)]
    left = [(i, rest) for i, rest in left if rest]
    stages = tuple(Stage(tuple(place[o] for o in rest), plan.stages[i].processor) for i, rest in left)
    return Viewed(
        made, Plan(made.digest, stages), tuple(rest for _, rest in left), tuple(i for i, _ in left), found.held()
    )


def as_it_is(graph: Graph, plan: Plan) -> Viewed:
    """Return a plan with all its operators."""
    return Viewed(graph, plan, tuple(s.operators for s in plan.stages), tuple(range(len(plan.stages))))


class _Views:
    """Finds the operators that can be elided.

    Attributes:
        elided: these operators.
        views: tensor → the tensor whose memory it shares, and its byte offset there.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.elided: set[int] = set()
        self.views: dict[int, tuple[int, int]] = {}
        self._graph = graph
        self._sources: dict[int, tuple[int, ...]] = {}
        self._stage = {o: i for i, stage in enumerate(plan.stages) for o in stage.operators}
        for index, operator in enumerate(graph.operators):
            if operator.kind == "SLICE":
                self._slice(index, operator)
            elif operator.kind == "CONCATENATION":
                self._concatenation(index, operator)

    def depending(self, operator: Operator) -> Operator:
        """Return an operator with each input that is no longer written replaced by its sources."""
        inputs: list[int] = []
        for tensor in operator.inputs:
            inputs += self._sources.get(tensor, (tensor,))
        return replace(operator, inputs=tuple(inputs))

    def held(self) -> Held:
        """Return where the tensors lie that are no longer written, and in parts of which others."""
        return {t: tuple((s, self._common_nbytes(t, s)) for s in sources) for t, sources in self._sources.items()}

    def _common_nbytes(self, tensor: int, other: int) -> int:
        """Return how many bytes of memory two tensors share."""
        (root, first), (same, begin) = (self.views.get(t, (t, 0)) for t in (tensor, other))
        ends = first + self._graph.tensors[tensor].nbytes, begin + self._graph.tensors[other].nbytes
        return max(0, min(ends) - max(first, begin)) if root == same else 0

    def _is_outside(self, tensor: int, index: int) -> bool:
        """Return whether a tensor is written outside the stage that runs operator ``index``."""
        writer = self._graph.producer.get(tensor)
        if writer is None:
            return tensor in self._graph.inputs
        return writer in self.elided or self._stage[writer] != self._stage[index]

    def _slice(self, index: int, operator: Operator) -> None:
        source, target = operator.inputs[0], operator.outputs[0]
        begin = integers(self._graph, operator.inputs[1])
        whole, part = self._graph.tensors[source], self._graph.tensors[target]
        if begin is None or target in self._graph.outputs or not self._is_outside(source, index):
            return
        cut = [d for d, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
        if len(cut) != 1 or prod(whole.shape[: cut[0]]) != 1 or whole.nbytes % prod(whole.shape):
            return
        offset = begin[cut[0]] * prod(whole.shape[cut[0] + 1 :]) * (whole.nbytes // prod(whole.shape))
        root, first = self.views.get(source, (source, 0))
        if (first + offset) % ALIGNMENT:
            return
        self.views[target] = root, first + offset
        self._sources[target] = self._sources.get(source, (source,))
        self.elided.add(index)

    def _concatenation(self, index: int, operator: Operator) -> None:
        target = operator.outputs[0]
        shape = self._graph.tensors[target].shape
        axis = int(operator.options.get("axis", 0)) % len(shape)
        if (
            prod(shape[:axis]) != 1
            or target in self._graph.outputs
            or operator.options.get("fused_activation", "NONE") != "NONE"
            or not self._can_lie_inside(index, operator.inputs)
            or not self._counts_alike(operator)
        ):
            return
        offset = 0
        for tensor in operator.inputs:
            for other, (root, first) in list(self.views.items()):
                if root == tensor:
                    self.views[other] = target, first + offset
            self.views[tensor] = target, offset
            offset += self._graph.tensors[tensor].nbytes
        self._sources[target] = tuple(dict.fromkeys(s for t in operator.inputs for s in self._sources.get(t, (t,))))
        self.elided.add(index)

    def _can_lie_inside(self, index: int, tensors: Sequence[int]) -> bool:
        """Return whether parts can be written into the whole: by other stages, each once and at an aligned byte."""
        offset = 0
        for tensor in tensors:
            taken = tensor in self.views or tensor in self._graph.inputs or tensor in self._graph.outputs
            if taken or offset % ALIGNMENT or not self._is_outside(tensor, index) or tensors.count(tensor) > 1:
                return False
            offset += self._graph.tensors[tensor].nbytes
        return True

    def _counts_alike(self, operator: Operator) -> bool:
        """Return whether the parts and the whole have the same quantisation."""
        source = self._graph.source
        if source is None:
            return False
        every = [source.schema.subgraphs[0].tensors[t].quantization for t in (*operator.inputs, *operator.outputs)]
        return len({_scales(q) for q in every}) == 1


def _scales(found: object) -> tuple[tuple[float, ...], ...]:
    values = (getattr(found, name, None) for name in ("scale", "zeroPoint"))
    return tuple(tuple(float(v) for v in value) if value is not None else () for value in values)


def lie_inside(graph: Graph) -> bool:
    """Return whether every view of a graph lies, aligned, inside its tensor, and that is not a view itself."""
    tensors, views = graph.tensors, graph.views
    return all(
        0 <= tensor < len(tensors)
        and 0 <= root < len(tensors)
        and root not in views
        and first >= 0
        and first % ALIGNMENT == 0
        and first + tensors[tensor].nbytes <= tensors[root].nbytes
        for tensor, (root, first) in views.items()
    )
