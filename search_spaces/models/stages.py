"""Stages cut out of a model or joined: each a valid ``.tflite`` model, as a file or as a view of the model's file.

A stage keeps the numbers of the model's buffers. Unused ones are left empty (a few bytes each), and data keyed by
buffer number, such as packed weights, serves the stages as it serves the whole model.

:func:`flattened` adds explicit RESHAPEs for GPUs. Converters fold the RESHAPE before a dense layer into the layer,
which then reads (1, 7, 7, 512) as a row of 25,088 numbers. LiteRT's CPU kernels support this; its GPU accelerator
(WebGPU, LiteRT 2.3.0) accepts the operator and silently computes something else: outputs of VGG and AlexNet were off by
98 % of the largest value.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from search_spaces.core.errors import ModelError
from search_spaces.core.graph import Boundary, Graph
from search_spaces.models.changes import changed, indices, made_operator, with_main
from search_spaces.models.files import file_digest, in_pages, replacing
from search_spaces.models.flatbuffer import MAX_NBYTES, Blobs, pack_header, point_at, point_outside, write_into
from search_spaces.models.litert import block_scales
from search_spaces.models.source import Extent, ModelSource
from search_spaces.models.subgraphs import reached, renumbered, stage_signatures

_KEPT_METADATA = (b"min_runtime_version",)
MAX_INSIDE_NBYTES = MAX_NBYTES - (64 << 20)  # weights within a flatbuffer leave room for the structure


@dataclass(frozen=True, slots=True)
class StageModel:
    """A stage's own structure, without weights.

    Attributes:
        schema: the unpacked ``ModelT`` of the stage; its buffers hold no data of the file.
        source: the model's file with the weights.
        buffers: numbers of the buffers whose weights the stage reads.
        inputs, outputs: tensors of the model's graph, in the order of the stage's subgraph.
        tensors: the graph's tensor for each tensor of the stage's subgraph; empty where a stage was read from
            its own file.
    """

    schema: Any
    source: ModelSource
    buffers: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tensors: tuple[int, ...] = ()

    @property
    def weight_nbytes(self) -> int:
        """Bytes of weights that the stage reads."""
        return sum(self.source.extents[b].nbytes for b in self.buffers)

    def view(self) -> bytes:
        """Return a header that is the stage's model when the model's file follows it in memory.

        The header is a whole number of pages long, so the file can be mapped behind it and no weight is copied.
        """
        return self._alone.view()

    def write(self, path: Path) -> str:
        """Write the stage as a stand-alone file and return its SHA-256 (hex).

        Weights beyond what a flatbuffer can hold are written behind it.

        Raises:
            ModelError: the model's file is gone or has changed.
            UsageError: the folder cannot be written, or the disk is full.
        """
        with replacing(path) as file:
            self._alone.write_into(file, str(path))
        return file_digest(path)

    @property
    def _alone(self) -> JoinedModel:
        return JoinedModel(self.schema, (self.source,), dict.fromkeys(self.buffers, 0))


def cut_stage(graph: Graph, operators: Sequence[int]) -> StageModel:
    """Cut ``operators`` (ascending) out of a graph that was read from a file.

    Operators that compute its constants and called subgraphs are included. Tensors keep names and quantisation. A stage
    with exactly the inputs and outputs of a signature of the model keeps that signature; any other stage gets one under
    the key of the first, with the names that the model's signatures give its tensors, or else the tensors' own. Of the
    metadata a stage keeps the minimum version of the runtime, and the whole model all.

    Raises:
        ModelError: the graph has no file behind it.
    """
    if graph.source is None:
        raise ModelError(f"model {graph.name!r} has no file to cut stages from")
    source, whole = graph.source, graph.source.schema
    main = whole.subgraphs[0]
    border = graph.boundary(operators)
    chosen = [main.operators[i] for i in (*_recipes(source, border), *source.file_operators(operators))]
    called = [whole.subgraphs[n] for n in reached(whole, chosen)]
    numbers = {n: i for i, n in enumerate(reached(whole, chosen), 1)}
    codes = sorted({int(o.opcodeIndex) for o in (*chosen, *(o for s in called for o in s.operators or ()))})
    code_of = {code: i for i, code in enumerate(codes)}
    order = _tensor_order(main, chosen, border)
    place = {tensor: i for i, tensor in enumerate(order)}

    part = changed(
        main,
        tensors=[_with_scales(main.tensors[t], place) for t in order],
        inputs=_placed(border.inputs, place),
        outputs=_placed(border.outputs, place),
        operators=[_moved(renumbered(o, code_of, numbers), place) for o in chosen],
    )
    bodies = [changed(s, operators=[renumbered(o, code_of, numbers) for o in s.operators or ()]) for s in called]
    stage = changed(whole, operatorCodes=[whole.operatorCodes[c] for c in codes], subgraphs=[part, *bodies])
    stage.signatureDefs = stage_signatures(whole, border, place)
    is_whole = len(operators) == len(graph.operators)
    stage.metadata = [m for m in whole.metadata or () if is_whole or m.name in _KEPT_METADATA] or None
    if not is_whole:
        stage.metadataBuffer = None
    read = {int(t.buffer) for s in stage.subgraphs for t in s.tensors or ()}
    read |= {int(m.buffer) for m in stage.metadata or ()}
    nothing = schema.BufferT()
    stage.buffers = [nothing] * len(whole.buffers)
    for buffer in read - source.extents.keys():  # data that is not in the file (ModelSource.fixed)
        if buffer < len(whole.buffers):  # a model without buffers may refer to buffer 0
            stage.buffers[buffer] = whole.buffers[buffer]
    buffers = tuple(sorted(read & set(source.extents)))
    return StageModel(stage, source, buffers, border.inputs, border.outputs, tuple(order))


def handing_out(stage: StageModel, inner: Sequence[int]) -> StageModel:
    """Return a stage with some of its inner tensors as further outputs.

    Args:
        inner: tensors of the model's graph, none of them an output yet.
    """
    place = {tensor: i for i, tensor in enumerate(stage.tensors)}
    outputs = np.concatenate([stage.schema.subgraphs[0].outputs, _placed(inner, place)])
    model = changed(with_main(stage.schema, outputs=outputs), signatureDefs=None)  # these had other outputs
    return replace(stage, schema=model, outputs=(*stage.outputs, *inner))


def packing_model(graph: Graph) -> StageModel:
    """Return the whole model plus a subgraph for each single operator that has weights.

    A runtime that packs weights while it compiles may pack those of an operator differently inside a stage and at its
    end (XNNPACK does for convolutions). Compiling this model packs both.

    Raises:
        ModelError: the graph has no file behind it.
    """
    whole = cut_stage(graph, range(len(graph.operators)))
    packing = changed(whole.schema, signatureDefs=None)
    for index, operator in enumerate(graph.operators):
        if not any(t != -1 and graph.tensors[t].constant for t in operator.inputs):
            continue
        part = cut_stage(graph, [index]).schema
        if len(part.subgraphs) > 1:  # called subgraphs are the same in every stage
            continue
        for each in part.subgraphs[0].operators:
            each.opcodeIndex += len(packing.operatorCodes)
        packing.operatorCodes = [*packing.operatorCodes, *part.operatorCodes]
        packing.subgraphs = [*packing.subgraphs, *part.subgraphs]
    return StageModel(packing, whole.source, whole.buffers, whole.inputs, whole.outputs, whole.tensors)


def with_values(graph: Graph, values: Mapping[int, NDArray[np.float32]]) -> StageModel:
    """Return the whole model with other values of some constants.

    Args:
        values: tensor → its values.

    Raises:
        ModelError: the graph has no file behind it.
    """
    whole = cut_stage(graph, range(len(graph.operators)))
    place = {tensor: i for i, tensor in enumerate(whole.tensors)}
    tensors, buffers = list(whole.schema.subgraphs[0].tensors), list(whole.schema.buffers)
    for tensor, array in values.items():  # each in a buffer of its own, as others may share the old one
        tensors[place[tensor]] = changed(tensors[place[tensor]], buffer=len(buffers))
        buffers.append(schema.BufferT(data=np.frombuffer(array.tobytes(), np.uint8)))
    used = {int(tensor.buffer) for tensor in tensors}
    model = changed(with_main(whole.schema, tensors=tensors), buffers=buffers)
    return replace(whole, schema=model, buffers=tuple(b for b in whole.buffers if b in used))


def _recipes(source: ModelSource, border: Boundary) -> list[int]:
    """Return the operators of the file, in its order, that compute a stage's constants."""
    found: set[int] = set()
    waiting = list(border.constants)
    while waiting:
        operator = source.recipes.get(waiting.pop())
        if operator is not None and operator not in found:
            found.add(operator)
            waiting += indices(source.schema.subgraphs[0].operators[operator].inputs)
    return sorted(found)


def _tensor_order(main: Any, operators: Sequence[Any], border: Boundary) -> list[int]:
    order = dict.fromkeys(border.inputs)
    for operator in operators:
        for side in (operator.inputs, operator.outputs, operator.intermediates):
            order |= dict.fromkeys(t for t in indices(side) if t != -1)
    return list(order | dict.fromkeys(t for tensor in order for t in block_scales(main.tensors[tensor])))


def _with_scales(tensor: Any, place: Mapping[int, int]) -> Any:
    """Return a tensor whose blockwise scales, if any, refer to the tensor in the stage."""
    if not block_scales(tensor):
        return tensor
    details = tensor.quantization.details
    moved = changed(details, scales=place[details.scales])
    return changed(tensor, quantization=changed(tensor.quantization, details=moved))


def _moved(operator: Any, place: Mapping[int, int]) -> Any:
    """Renumber the tensors of an operator, in place, as in the stage."""
    operator.inputs = _placed(indices(operator.inputs), place)
    operator.outputs = _placed(indices(operator.outputs), place)
    if operator.intermediates is not None:
        operator.intermediates = _placed(indices(operator.intermediates), place)
    return operator


def _placed(tensors: Sequence[int], place: Mapping[int, int]) -> NDArray[np.int32]:
    return np.array([place.get(t, -1) for t in tensors], np.int32)


@contextmanager
def mapped(source: ModelSource) -> Iterator[memoryview]:
    """Map a model's file into memory, read-only.

    Raises:
        ModelError: the file is gone or has changed.
    """
    try:
        with source.path.open("rb") as file:
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{source.path}: {error}") from error
    if len(whole) != source.nbytes:
        raise ModelError(f"{source.path}: the file changed while it was in use", "start again")
    try:
        yield memoryview(whole)
    finally:
        with suppress(BufferError):  # an error on its way out, as of a full disk, may hold parts of it until then
            whole.close()


_FILTERED = (
    schema.BuiltinOperator.CONV_2D,
    schema.BuiltinOperator.DEPTHWISE_CONV_2D,
    schema.BuiltinOperator.FULLY_CONNECTED,
)
_AS_INPUT = "weights_as_input_"


def weights_as_inputs(stage: StageModel) -> tuple[StageModel, dict[str, Extent]]:
    """Return a stage that reads its float32 filters as additional inputs, and name of the input → extent in the file.

    For a runtime that copies the weights of a file; it gets them mapped instead. A stage that calls subgraphs keeps its
    filters.
    """
    main = stage.schema.subgraphs[0]
    readers: dict[int, set[tuple[bool, int]]] = {}
    for operator in main.operators:
        code = stage.schema.operatorCodes[operator.opcodeIndex].builtinCode
        for position, tensor in enumerate(operator.inputs):
            readers.setdefault(int(tensor), set()).add((code in _FILTERED, position))
    taken = {t: main.tensors[t] for t, found in readers.items() if found == {(True, 1)}}
    moved = {t: e for t, tensor in taken.items() if (e := _alone(stage, tensor)) is not None}
    if len(stage.schema.subgraphs) > 1 or any((t.name or b"").startswith(_AS_INPUT.encode()) for t in main.tensors):
        moved = {}
    tensors = list(main.tensors)
    for tensor in moved:
        tensors[tensor] = changed(main.tensors[tensor], buffer=0, name=f"{_AS_INPUT}{tensor}".encode())
    made = with_main(stage.schema, tensors=tensors, inputs=[*main.inputs, *moved])
    if moved:
        made.signatureDefs = []
    used = {tensor.buffer for subgraph in made.subgraphs for tensor in subgraph.tensors}
    buffers = tuple(b for b in stage.buffers if b in used)
    return replace(stage, schema=made, buffers=buffers), {f"{_AS_INPUT}{t}": e for t, e in moved.items()}


def _alone(stage: StageModel, tensor: Any) -> Extent | None:
    """Return the extent of a constant of plain float32 values; None for any other constant."""
    scaled = tensor.quantization is not None and tensor.quantization.scale is not None
    plain = tensor.type == schema.TensorType.FLOAT32 and not scaled and tensor.sparsity is None
    return stage.source.extents.get(tensor.buffer) if plain and tensor.buffer in stage.buffers else None


@dataclass(frozen=True, slots=True)
class JoinedModel:
    """Stages in one model, with the signatures ``stage_0``, ``stage_1`` … in their order.

    Attributes:
        schema: the schema's ``ModelT``, without weights.
        sources: the files that hold the weights.
        buffers: number of a buffer → the source that holds it, as a position in ``sources``.
    """

    schema: Any
    sources: tuple[ModelSource, ...]
    buffers: Mapping[int, int]

    def view(self) -> bytes:
        """Return a header that is the model when the files follow it in memory.

        The header is a whole number of pages long and each file begins on a page, so that the files can be mapped
        and no weight is copied.
        """
        outside = {b for b, s in self.buffers.items() if not self.sources[s].extents[b].inline}
        header, fields = pack_header(self.schema, self.buffers.keys(), outside)
        begins = [in_pages(len(header))]
        for source in self.sources:
            begins.append(begins[-1] + in_pages(source.nbytes))
        for buffer, field in fields.items():
            extent, begin = self._extent(buffer), begins[self.buffers[buffer]]
            if buffer in outside:
                point_outside(header, field, begin + extent.offset, extent.nbytes)
            else:
                point_at(header, field, begin + extent.offset - 4)
        return bytes(header).ljust(begins[0], b"\0")

    def _extent(self, buffer: int) -> Extent:
        return self.sources[self.buffers[buffer]].extents[buffer]

    def write_into(self, file: BinaryIO, name: str) -> None:
        """Write the model, the weights that it reads included, to an open, empty file.

        Weights beyond what a flatbuffer can hold are written behind it.

        Args:
            name: of the file, for errors.

        Raises:
            ModelError: a file that holds weights is gone or has changed.
            OSError: the file cannot be written.
        """
        nbytes = sum(self._extent(buffer).nbytes for buffer in self.buffers)
        with ExitStack() as stack:
            weights = [stack.enter_context(mapped(source)) for source in self.sources]

            def blob(buffer: int) -> memoryview:
                extent = self._extent(buffer)
                return weights[self.buffers[buffer]][extent.offset : extent.offset + extent.nbytes]

            write_into(file, self.schema, Blobs(self.buffers, blob), name, outside=nbytes > MAX_INSIDE_NBYTES)


def join(stages: Sequence[StageModel]) -> JoinedModel:
    """Join stages that were cut from one model, or read from stage files of one model.

    Raises:
        ModelError: the stages are not of one model.
    """
    by_id = {id(stage.source): stage.source for stage in stages}
    sources = tuple(by_id.values())
    number_of = {key: i for i, key in enumerate(by_id)}
    joined = changed(stages[0].schema, metadata=None, metadataBuffer=None, operatorCodes=[], signatureDefs=[])
    mains: list[Any] = []
    bodies: list[Any] = []
    codes: dict[tuple[Any, ...], int] = {}
    for index, stage in enumerate(stages):
        code_of = {}
        for number, code in enumerate(stage.schema.operatorCodes):
            key = (code.builtinCode, code.deprecatedBuiltinCode, code.customCode, code.version)
            if key not in codes:
                codes[key] = len(codes)
                joined.operatorCodes.append(code)
            code_of[number] = codes[key]
        main, *called = stage.schema.subgraphs
        numbers = {i: len(stages) + len(bodies) + i - 1 for i in range(1, len(called) + 1)}
        for subgraph, found in ((main, mains), *((body, bodies) for body in called)):
            found.append(
                changed(subgraph, operators=[renumbered(o, code_of, numbers) for o in subgraph.operators or ()])
            )
        signature = schema.SignatureDefT(signatureKey=b"stage_%d" % index, subgraphIndex=index)
        signature.inputs = [schema.TensorMapT(name=b"i%d" % i, tensorIndex=int(t)) for i, t in enumerate(main.inputs)]
        signature.outputs = [schema.TensorMapT(name=b"o%d" % i, tensorIndex=int(t)) for i, t in enumerate(main.outputs)]
        joined.signatureDefs.append(signature)
    joined.subgraphs = [*mains, *bodies]
    longest: list[Any] = max((stage.schema.buffers for stage in stages), key=len)
    joined.buffers = list(longest)
    buffers: dict[int, int] = {}
    for stage in stages:
        for buffer, held in enumerate(stage.schema.buffers if stage.source.fixed else ()):
            if held.data is not None:  # data that is not in a file (ModelSource.fixed)
                joined.buffers[buffer] = held
        for buffer in stage.buffers:
            holder = sources[buffers.setdefault(buffer, number_of[id(stage.source)])]
            if holder.extents[buffer].nbytes != stage.source.extents[buffer].nbytes:
                raise ModelError(f"{holder.path} and {stage.source.path} are not stages of one model")
    return JoinedModel(joined, sources, buffers)


def flattened(model: Any) -> Any:
    """Return a model (``ModelT``) in which dense layers that flatten their input read the output of a RESHAPE.

    Inputs and outputs stay the same; the model itself is returned where there is nothing to do.
    """
    found = changed(model, operatorCodes=list(model.operatorCodes))
    found.subgraphs = [_spelled_out(found, subgraph) for subgraph in model.subgraphs]
    alike = all(new is old for new, old in zip(found.subgraphs, model.subgraphs, strict=True))
    return model if alike else found


def _spelled_out(model: Any, subgraph: Any) -> Any:
    tensors, operators = list(subgraph.tensors or ()), []
    flat: dict[tuple[int, tuple[int, int]], int] = {}
    for operator in subgraph.operators or ():
        shape = _flat_shape(model, subgraph, operator)
        if shape is None:
            operators.append(operator)
            continue
        source = int(operator.inputs[0])
        if (source, shape) not in flat:
            flat[source, shape] = len(tensors)
            row = changed(tensors[source], shape=list(shape), shapeSignature=None, buffer=0, isVariable=False)
            tensors.append(row)
            options = schema.ReshapeOptionsT(newShape=list(shape))
            operators.append(made_operator(model.operatorCodes, "RESHAPE", [source], [flat[source, shape]], options))
        operators.append(changed(operator, inputs=[flat[source, shape], *(int(t) for t in operator.inputs[1:])]))
    return changed(subgraph, tensors=tensors, operators=operators) if flat else subgraph


def _flat_shape(model: Any, subgraph: Any, operator: Any) -> tuple[int, int] | None:
    """Return the rows and columns of a dense layer's flattened input, or None where it needs no RESHAPE."""
    if model.operatorCodes[operator.opcodeIndex].builtinCode != schema.BuiltinOperator.FULLY_CONNECTED:
        return None
    if operator.builtinOptions is not None and operator.builtinOptions.keepNumDims:
        return None
    read = subgraph.tensors[int(operator.inputs[0])]
    weights = subgraph.tensors[int(operator.inputs[1])]
    shape = [int(d) for d in (() if read.shape is None else read.shape)]
    columns = int(weights.shape[-1]) if weights.shape is not None and len(weights.shape) == 2 else 0
    known = all(d > 0 for d in shape) and (read.shapeSignature is None or all(d >= 0 for d in read.shapeSignature))
    if len(shape) <= 2 or not known or columns <= 0 or prod(shape) % columns:
        return None
    return prod(shape) // columns, columns
