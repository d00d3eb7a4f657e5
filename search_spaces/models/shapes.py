"""Shape inference: sizes for a model's open dimensions, and the shapes of all tensors that follow from them.

The runtime propagates the shapes in its own process, as a damaged operator may crash it. A run on zeros also gives
shapes that depend on the data, and those must stay open. So this module finds what is known without data: values that
depend on constants and shapes alone, and shapes that depend on such values. Known values become constants of the model,
and the operators that compute them (``SHAPE``, ``STRIDED_SLICE``, ``PACK`` before a ``RESHAPE``) are removed, so that
no stage needs a shape from another one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from search_spaces.core.errors import ModelError, UsageError
from search_spaces.core.graph import Graph, Operator
from search_spaces.models import INPUT_SHAPE
from search_spaces.models.atoms import IMPURE
from search_spaces.models.changes import BUILTIN, KINDS, changed, number_of, with_main
from search_spaces.models.dtypes import has_fixed_size, tensor_nbytes
from search_spaces.models.inputs import MAX_NBYTES, drawn, drawn_inputs
from search_spaces.models.litert import MAX_TENSOR_NBYTES, graph_of
from search_spaces.models.resize import answer_of
from search_spaces.models.source import ModelSource
from search_spaces.models.stages import StageModel

Shapes = Mapping[str, tuple[int, ...]]

_LOGGER = logging.getLogger("partition_optimizer")
_MAX_FOLDED_NBYTES = 1 << 24

# Operators whose output shapes also depend on values of inputs → positions of these inputs.
DECIDING_INPUTS: Mapping[str, tuple[int, ...]] = {
    "ARG_MAX": (1,), "ARG_MIN": (1,), "BATCH_TO_SPACE_ND": (1, 2), "BROADCAST_ARGS": (), "BROADCAST_TO": (1,),
    "CONV_3D_TRANSPOSE": (0,), "CUMSUM": (), "EXPAND_DIMS": (1,), "FILL": (0,), "MEAN": (1,), "MIRROR_PAD": (1,),
    "NON_MAX_SUPPRESSION_V4": (2,), "NON_MAX_SUPPRESSION_V5": (2,), "ONE_HOT": (1,), "PAD": (1,), "PADV2": (1,),
    "RANDOM_STANDARD_NORMAL": (0,), "RANDOM_UNIFORM": (0,), "RANGE": (0, 1, 2), "REDUCE_ALL": (1,), "REDUCE_ANY": (1,),
    "REDUCE_MAX": (1,), "REDUCE_MIN": (1,), "REDUCE_PROD": (1,), "RESHAPE": (1,), "RESIZE_BILINEAR": (1,),
    "RESIZE_NEAREST_NEIGHBOR": (1,), "RFFT2D": (1,), "SCATTER_ND": (2,), "SLICE": (1, 2), "SPACE_TO_BATCH_ND": (1, 2),
    "SPARSE_TO_DENSE": (1,), "SPLIT": (0,), "SPLIT_V": (1, 2), "STRIDED_SLICE": (1, 2, 3), "SUM": (1,), "TILE": (1,),
    "TOPK_V2": (1,), "TRANSPOSE": (1,), "TRANSPOSE_CONV": (0,), "UNSORTED_SEGMENT_MAX": (2,),
    "UNSORTED_SEGMENT_MIN": (2,), "UNSORTED_SEGMENT_PROD": (2,), "UNSORTED_SEGMENT_SUM": (2,), "MULTINOMIAL": (1,),
}  # fmt: skip

# Operators whose inputs (LSTM's basic cell) or outputs compiled models (LiteRT 2.3.0) keep in their own memory.
_UNSUITED = frozenset({"LSTM", "MULTINOMIAL", *(f"UNSORTED_SEGMENT_{k}" for k in ("MAX", "MIN", "PROD", "SUM"))})
# Operators whose output shapes always depend on the data.
_DATA_DECIDES = frozenset({"EMBEDDING_LOOKUP_SPARSE", "SEGMENT_SUM", "SKIP_GRAM", "UNIQUE", "WHERE", "LSH_PROJECTION"})


def needs_interpreter(model: Any) -> bool:
    """Return whether a stage (``ModelT``) needs LiteRT's interpreter, since compiled models do not run it correctly.

    Compiled models (LiteRT 2.3.0) keep no state in variable tensors. They silently leave some output buffers unwritten:
    of tensors whose size is known only when they are computed, and of those that are known before the first run (SHAPE,
    RANK, results of constants).
    """
    return any(_needs_interpreter(model, model.subgraphs[s.subgraphIndex]) for s in model.signatureDefs or ()) or (
        not model.signatureDefs and _needs_interpreter(model, model.subgraphs[0])
    )


def _needs_interpreter(model: Any, subgraph: Any) -> bool:
    operators = subgraph.operators or ()
    computed = {int(t) for o in operators for t in o.outputs} | {int(t) for t in subgraph.inputs}
    known = set(range(len(subgraph.tensors))) - computed
    unsized: set[int] = set()
    for operator in operators:
        kind = KINDS.get(number_of(model.operatorCodes[operator.opcodeIndex]), "")
        reads = [int(t) for t in operator.inputs if t != -1]
        deciding = [int(t) for p in DECIDING_INPUTS.get(kind, ()) for t in operator.inputs[p : p + 1] if t != -1]
        if kind in {"SHAPE", "RANK"} or (reads and known.issuperset(reads) and kind not in IMPURE):
            known.update(map(int, operator.outputs))
        elif kind in _DATA_DECIDES | _UNSUITED or not known.issuperset(deciding) or not unsized.isdisjoint(reads):
            unsized.update(map(int, operator.outputs))
    return any(t.isVariable for t in subgraph.tensors) or not (known | unsized).isdisjoint(map(int, subgraph.outputs))


def fix_shapes(graph: Graph, shapes: Shapes) -> Graph:
    """Return the model with the given input shapes and the shapes of all tensors that follow from them.

    A model whose shapes are all known is returned unchanged. Tensors whose size depends on data stay open.

    Args:
        shapes: input → its shape. An input with open dimensions that is left out gets the shape in the file.

    Raises:
        ModelError: the model does not run with these shapes.
        UsageError: there is no such input, or it cannot have this shape.
    """
    wanted = _checked(graph, shapes)
    open_tensors = any(-1 in t.shape for o in graph.operators for p in o.flat() for t in _tensors(graph, p))
    if graph.source is None or not (wanted or open_tensors):
        return graph
    known = _known(graph)
    answer = _ask(graph, graph.source, wanted, known.values)
    return graph_of(_resolved(graph, graph.source, known, answer), graph.name)


def size_outputs(graph: Graph) -> Graph:
    """Return the model with sizes for outputs whose size depends on the data, from a run on its inputs.

    Raises:
        ModelError: the model does not run on these inputs.
    """
    unsized = [t for t in graph.outputs if -1 in graph.tensors[t].shape]
    read = [graph.tensors[t] for t in graph.inputs]
    feedable = sum(t.nbytes for t in read) <= MAX_NBYTES and all(has_fixed_size(t.dtype) for t in read)
    if graph.source is None or not unsized or not feedable:
        return graph
    inputs = list(graph.source.given) or drawn_inputs(graph, 0)
    shapes = {n: graph.tensors[t].shape for n, t in enumerate(graph.inputs)}
    answer = _ask(graph, graph.source, shapes, (), inputs)
    tensors = list(graph.source.schema.subgraphs[0].tensors)
    for index in unsized:
        shape = answer["shapes"][index]
        tensors[index] = changed(tensors[index], shape=np.array(shape, np.int32), shapeSignature=None)
        name = graph.tensors[index].name
        _LOGGER.info("note: the size of output %r depends on the data; here it is %s", name, _shown(shape))
    model = with_main(graph.source.schema, tensors=tensors)
    return graph_of(replace(graph.source, schema=model, operators=(), recipes={}, fixed=True), graph.name)


def why_it_fails(stage: StageModel, graph: Graph) -> str:
    """Return the runtime's message for a stage that fails: number in the stage and kind of the operator, and reason.

    "" where the interpreter runs it, or it cannot be tried.
    """
    read = [graph.tensors[t] for t in stage.inputs]
    if sum(t.nbytes for t in read) > MAX_NBYTES or not all(has_fixed_size(t.dtype) for t in read):
        return ""
    given = dict(zip(graph.inputs, graph.source.given, strict=False)) if graph.source is not None else {}
    arrays = (given[t] if t in given else drawn(graph, t, np.random.default_rng(0)) for t in stage.inputs)
    inputs = [array.tobytes().hex() for array in arrays]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "stage.tflite"
        stage.write(path)
        question = {"path": str(path), "shapes": {}, "values": (), "tensors": 0, "inputs": inputs}
        return str(answer_of(question).get("error", ""))


def _checked(graph: Graph, shapes: Shapes) -> dict[int, tuple[int, ...]]:
    """Return position of the input → its shape, for inputs with open dimensions."""
    names = [graph.tensors[t].name for t in graph.inputs]
    for name, shape in shapes.items():
        if name not in names:
            raise UsageError(f"{INPUT_SHAPE} {name}=…: the model has no such input", f"it has: {', '.join(names)}")
        tensor = graph.tensors[graph.inputs[names.index(name)]]
        if len(shape) != len(tensor.shape) or any(d not in (-1, s) for d, s in zip(tensor.shape, shape, strict=True)):
            raise UsageError(
                f"{INPUT_SHAPE} {name}={_shown(shape)}: the input has the shape {_shown(tensor.shape)}",
                "only sizes shown as ? can be chosen",
            )
        if tensor_nbytes(shape, tensor.dtype) > MAX_TENSOR_NBYTES:
            raise UsageError(f"{INPUT_SHAPE} {name}={_shown(shape)}: that is more than any machine holds")
    wanted = {}
    for position, index in enumerate(graph.inputs):
        tensor = graph.tensors[index]
        if -1 in tensor.shape:
            wanted[position] = shapes.get(tensor.name) or _stored(graph, index)
            if tensor.name not in shapes:
                batch_only = tensor.shape[0] == -1 and -1 not in tensor.shape[1:]
                _LOGGER.info(
                    "note: %s of input %r is open; %s is used (change it with %s %s=…)",
                    "the batch size" if batch_only else f"the shape {_shown(tensor.shape)}",
                    tensor.name,
                    _shown(wanted[position]),
                    INPUT_SHAPE,
                    tensor.name,
                )
    return wanted


def _stored(graph: Graph, index: int) -> tuple[int, ...]:
    """Return the shape of an input with open dimensions as the file stores them; 1 where it stores none."""
    held = graph.source.schema.subgraphs[0].tensors[index].shape if graph.source else graph.tensors[index].shape
    declared = graph.tensors[index].shape
    return tuple(max(1, int(s)) if d < 0 else d for d, s in zip(declared, held, strict=True))


def _shown(shape: Sequence[int]) -> str:
    return ",".join("?" if d < 0 else str(d) for d in shape) or "()"


def _tensors(graph: Graph, operator: Operator) -> Iterator[Any]:
    return (graph.tensors[t] for t in operator.outputs)


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known without data.

    Attributes:
        shapes: tensors whose shape is known.
        values: computed tensors whose value is known, ascending.
        operators: operators of the file that compute these values only.
    """

    shapes: frozenset[int]
    values: tuple[int, ...]
    operators: frozenset[int]


def _known(graph: Graph) -> _Known:
    constants = {i for i, t in enumerate(graph.tensors) if t.constant}
    shapes, values = {*constants, *graph.inputs}, set(constants)
    folded: set[int] = set()
    for index, operator in _in_order(graph):
        reads = [t for t in operator.inputs if t != -1 and not graph.tensors[t].variable]
        deciding = [t for p in DECIDING_INPUTS.get(operator.kind, ()) for t in operator.inputs[p : p + 1] if t != -1]
        pure = operator.kind in BUILTIN and operator.kind not in IMPURE
        declared = not any(-1 in t.shape for t in _tensors(graph, operator))
        if values.issuperset(reads) or (
            shapes.issuperset(reads)
            and (pure or declared)
            and values.issuperset(deciding)
            and operator.kind not in _DATA_DECIDES
        ):
            shapes.update(operator.outputs)
        tells_shape = operator.kind in {"SHAPE", "RANK"} and shapes.issuperset(reads)
        small = sum(t.nbytes for t in _tensors(graph, operator)) <= _MAX_FOLDED_NBYTES
        if pure and reads and small and (tells_shape or values.issuperset(reads)):
            values.update(operator.outputs)
            if not set(graph.outputs) & set(operator.outputs):
                folded.add(index)
    computed = {t for i, o in _in_order(graph) if i in folded for t in o.outputs}
    return _Known(frozenset(shapes), tuple(sorted(computed)), frozenset(folded))


def _in_order(graph: Graph) -> list[tuple[int, Operator]]:
    """Return the placed operators of the file with their indices there, in the order of execution."""
    parts = [part for operator in graph.operators for part in operator.flat()]
    numbers = graph.source.file_operators(range(len(graph.operators))) if graph.source else range(len(parts))
    return sorted(zip(numbers, parts, strict=True), key=lambda pair: pair[0])


def _ask(
    graph: Graph,
    source: ModelSource,
    shapes: Mapping[int, tuple[int, ...]],
    values: Sequence[int],
    inputs: Sequence[NDArray[Any]] | None = None,
) -> Any:
    question = {"path": str(source.path), "shapes": shapes, "values": values, "tensors": len(graph.tensors)}
    question["inputs"] = None if inputs is None else [array.tobytes().hex() for array in inputs]
    with TemporaryDirectory() as folder:
        if source.signature:  # the file's main subgraph is not this one
            whole = Path(folder) / "model.tflite"
            question["path"] = str(whole)
            StageModel(source.schema, source, tuple(sorted(source.extents)), (), ()).write(whole)
        answer = answer_of(question)
    if "error" in answer:
        why = str(answer["error"]).strip()
        raise ModelError(
            f"{source.path}: the runtime cannot run the model with these shapes{': ' * bool(why)}{why}",
            f"give others: {INPUT_SHAPE} name=1,224,224,3",
        )
    return answer


def _resolved(graph: Graph, source: ModelSource, known: _Known, answer: Any) -> ModelSource:
    """Return the source with known shapes and values written into its structure."""
    main, buffers = source.schema.subgraphs[0], list(source.schema.buffers)
    tensors = [changed(tensor) for tensor in main.tensors]
    for index, tensor in enumerate(tensors):
        if graph.tensors[index].constant:
            continue
        shape = answer["shapes"][index]
        if index in known.shapes and shape is not None:
            tensor.shape, tensor.shapeSignature = np.array(shape, np.int32), None
        elif index in graph.producer or index not in graph.inputs:
            rank = len(graph.tensors[index].shape)
            tensor.shape, tensor.shapeSignature = np.ones(rank, np.int32), np.full(rank, -1, np.int32)
    for index in known.values:
        tensors[index].buffer = len(buffers)
        data = np.frombuffer(bytes.fromhex(answer["values"][str(index)]), np.uint8)
        buffers.append(schema.BufferT(data=data if len(data) else None))
    operators = [o for i, o in enumerate(main.operators) if i not in known.operators]
    model = changed(with_main(source.schema, tensors=tensors, operators=operators), buffers=buffers)
    return replace(source, schema=model, operators=(), recipes={}, fixed=True)
