"""Tensors inside stages that lie where we say.

A runtime keeps what a stage computes for itself in a workspace of its own. With the tensors between stages in our
arena, a cut model then goes through more memory than the whole one, and out of the nearest cache. So stages that share
a lane hand out their inner tensors too, as further outputs, and the arena reuses space among them all. Stage files keep
their true outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evaluators.litert.deployment import Deployment
from evaluators.litert.settings import packs_weights
from search_spaces.errors import ModelError
from search_spaces.graph import Graph, Operator, Tensor
from search_spaces.models.litert import graph_of
from search_spaces.models.stages import StageModel, handing_out
from search_spaces.plan import Plan, Stage
from search_spaces.platform import Processor

# Elements of a fixed size, in whole bytes.
_PLAIN = frozenset({"float32", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bool"})
# Each further output costs the runtime about 1 µs a call, and what fits the innermost cache may lie anywhere.
_LEAST_NBYTES = 64 << 10
# What XNNPACK computes without a look at its neighbours. It fuses a PAD with the convolution that reads it (ResNet-50's
# first stage was 13 % slower with the tensor between them handed out) and a RELU with what it reads, and it works in
# place where it only looks at elements or changes a shape.
_WRITERS = frozenset(
    {
        *("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "FULLY_CONNECTED"),
        *("MAX_POOL_2D", "AVERAGE_POOL_2D", "CONCATENATION", "ADD", "RESIZE_BILINEAR"),
    }
)
_READERS = _WRITERS | {"PAD", "PADV2", "MEAN", "MUL", "SOFTMAX"}


def opens(processor: Processor, stages: int) -> bool:
    """Return whether that many stages on a lane hand out their inner tensors.

    XNNPACK only: other kernels are so slow that it makes no difference, or work in place, and a stage alone on its lane
    has nothing to share space with.
    """
    return stages > 1 and packs_weights(processor)


def inner_tensors(graph: Graph, operators: Sequence[int]) -> tuple[int, ...]:
    """Return what a stage computes for itself and hands out, ascending.

    Any operator of a graph can be a stage of its own, so its outputs can cross a border. Left out is what the runtime
    fuses away, what is too small to matter, and what has no size before it is computed.
    """
    border = set(graph.boundary(operators).outputs)
    found = []
    for operator in operators:
        for tensor in graph.operators[operator].outputs:
            kinds = [graph.operators[reader].kind for reader in graph.consumers.get(tensor, ())]
            stands_alone = graph.operators[operator].kind in _WRITERS and kinds and _READERS.issuperset(kinds)
            if stands_alone and tensor not in border and _has_place(graph.tensors[tensor]):
                found.append(tensor)
    return tuple(sorted(found))


def _has_place(tensor: Tensor) -> bool:
    plain = tensor.dtype in _PLAIN and not tensor.variable and min(tensor.shape, default=0) >= 0
    return plain and tensor.nbytes >= _LEAST_NBYTES


def opened(
    graph: Graph, processor: Processor, stages: Sequence[Sequence[int]], models: Sequence[StageModel]
) -> tuple[StageModel, ...]:
    """Return the stages of a lane as they are compiled there, with their inner tensors as outputs where it pays.

    Args:
        stages: the operators of each.
        models: the stages, cut from ``graph``.
    """
    if not opens(processor, len(stages)):
        return tuple(models)
    return tuple(handing_out(m, inner_tensors(graph, o)) for m, o in zip(models, stages, strict=True))


def told_apart(
    deployment: Deployment, lanes: Sequence[tuple[str, Sequence[int]]]
) -> tuple[Graph, Plan, tuple[StageModel, ...]]:
    """Return graph, plan and stages of a deployment with the operators of stages that hand out inner tensors.

    The tensors that cross borders keep their numbers; a stage that hands out nothing stays one operator.

    Args:
        lanes: lanes and the stages that are compiled together there.
    """
    graph, platform = deployment.graph, deployment.platform
    open_stages = {i for lane, indices in lanes if opens(platform[lane], len(indices)) for i in indices}
    tensors, operators = list(graph.tensors), list[Operator]()
    stages, models = list[Stage](), list[StageModel]()
    try:
        for index, (stage, operator) in enumerate(zip(deployment.stages, graph.operators, strict=True)):
            first = len(operators)
            if index in open_stages:
                part = graph_of(stage.source, graph.name)
                number = _numbers(part, stage, tensors)
                operators += [_renumbered(o, number, stage, operator) for o in part.operators]
                models.append(replace(stage, tensors=tuple(number[t] for t in range(len(part.tensors)))))
            else:
                operators.append(operator)
                models.append(stage)
            stages.append(Stage(tuple(range(first, len(operators))), deployment.plan.stages[index].processor))
        whole = Graph(graph.name, tuple(tensors), tuple(operators), graph.inputs, graph.outputs, views=graph.views)
    except (ModelError, ValueError):  # stages that do not fit each other inside run as they are
        return graph, deployment.plan, deployment.stages
    return whole, Plan(whole.digest, tuple(stages)), tuple(models)


def _numbers(part: Graph, stage: StageModel, tensors: list[Tensor]) -> dict[int, int]:
    """Return a number for each tensor of a stage, and put what stays inside behind ``tensors``."""
    number = dict(zip((*part.inputs, *part.outputs), (*stage.inputs, *stage.outputs), strict=True))
    for index, tensor in enumerate(part.tensors):
        if index not in number:
            number[index] = len(tensors)
            tensors.append(tensor)
    return number


def _renumbered(operator: Operator, number: dict[int, int], stage: StageModel, whole: Operator) -> Operator:
    """Return an operator of a stage with the plan's numbers; what lies in other tensors depends on who writes those."""
    written = tuple(t for t in whole.inputs if t not in stage.inputs)
    inputs: list[int] = []
    for tensor in (number.get(t, -1) for t in operator.inputs):
        inputs += written if tensor in stage.inputs and tensor not in whole.inputs else (tensor,)
    return replace(operator, inputs=tuple(inputs), outputs=tuple(number[t] for t in operator.outputs))
