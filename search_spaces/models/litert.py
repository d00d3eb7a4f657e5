"""Reader of ``.tflite`` files as a checked :class:`~search_spaces.core.graph.Graph`; weights stay in the file.

Inconsistent operators are rejected, since the runtime trusts the file and would write outside its buffers. Checked are
the numbers of tensors of common operators, and the shapes of their outputs where their inputs have known shapes; the
kernels of LiteRT require the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from search_spaces.core.errors import ModelError, absent, shown
from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.core.wording import plural
from search_spaces.models.atoms import arrange
from search_spaces.models.changes import BUILTIN, KINDS, changed, indices, made_operator, number_of, with_main
from search_spaces.models.dtypes import DTYPES, element_bits, enumerators, has_fixed_size, tensor_nbytes
from search_spaces.models.flatbuffer import unpack
from search_spaces.models.source import Extent, ModelSource
from search_spaces.models.subgraphs import called, check_calls, operator_states, select_signature

MAX_ELEMENTS = 64  # longer lists are tables of data, not settings

# Field of the schema → value → name. Fields without an entry are numbers, or lists of them.
_ENUMERATIONS: Mapping[str, Mapping[int, str]] = {
    "padding": enumerators(schema.Padding),
    "fusedActivationFunction": enumerators(schema.ActivationFunctionType),
    "weightsFormat": enumerators(schema.FullyConnectedOptionsWeightsFormat),
    "kernelType": enumerators(schema.LSTMKernelType),
    "combiner": enumerators(schema.CombinerType),
    "mode": enumerators(schema.MirrorPadMode),
    "reduceFunction": enumerators(schema.ReduceWindowFunction),
    **dict.fromkeys(("inDataType", "outDataType", "outType", "idxOutType", "quantizedBiasType"), DTYPES),
}

_RENAMED: Mapping[str, str] = {"fusedActivationFunction": "fused_activation"}


def plain_options(operator: Any) -> dict[str, Any]:
    """Return the builtin options of a schema ``OperatorT``: numbers, names of enumerators, tuples of numbers.

    The schema's ``strideH`` becomes ``stride_h``, its ``fusedActivationFunction`` ``fused_activation``.

    Raises:
        ValueError: an enumeration has a value that the installed schema does not know.
    """
    found: dict[str, Any] = {}
    for options in (operator.builtinOptions, operator.builtinOptions2):
        for field, value in vars(options).items() if options is not None else ():
            plain = _plain(field, value)
            if plain is not None:
                found[_RENAMED.get(field) or re.sub(r"(?<!^)(?=[A-Z])", "_", field).lower()] = plain
    return found


def _plain(field: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tuple(value.tolist()) if value.size <= MAX_ELEMENTS else None
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (bool, float)):
        return value
    if not isinstance(value, int):
        return None
    names = _ENUMERATIONS.get(field)
    if names is None:
        return value
    if value not in names:
        raise ValueError(f"option {field} has the value {value}, which the installed schema does not know")
    return names[value]


def check_references(source: ModelSource) -> None:
    """Check that signatures and metadata refer to existing buffers, subgraphs and tensors.

    Raises:
        ValueError: one does not.
    """
    model = source.schema
    buffers = len(model.buffers)
    for number in model.metadataBuffer if model.metadataBuffer is not None else ():
        if not 0 <= number < buffers:
            raise ValueError(f"its metadata is in {absent('buffer', number, buffers)}")
    for entry in model.metadata or ():
        if not 0 <= entry.buffer < buffers:
            raise ValueError(f"metadata {shown(entry.name)} is in {absent('buffer', entry.buffer, buffers)}")
    for signature in model.signatureDefs or ():
        if not 0 <= signature.subgraphIndex < len(model.subgraphs):
            raise ValueError(f"a signature is for {absent('subgraph', signature.subgraphIndex, len(model.subgraphs))}")
        tensors = len(model.subgraphs[signature.subgraphIndex].tensors or ())
        for entry in (*(signature.inputs or ()), *(signature.outputs or ())):
            if not 0 <= entry.tensorIndex < tensors:
                key = shown(signature.signatureKey)
                raise ValueError(f"signature {key} names {absent('tensor', entry.tensorIndex, tensors)}")


def block_scales(tensor: Any) -> tuple[int, ...]:
    """Return the tensor with the scales of a blockwise quantised tensor; empty for any other."""
    held = tensor.quantization
    blockwise = schema.QuantizationDetails.BlockwiseQuantization
    if held is None or held.detailsType != blockwise or held.details is None:
        return ()
    return (int(held.details.scales),)


def check_blocks(subgraph: Any, index: int, sizes: Mapping[int, int]) -> None:
    """Check that a blockwise quantised tensor has scales that fit it.

    Args:
        sizes: buffer → bytes that it holds.

    Raises:
        ValueError: it has not.
    """
    tensor = subgraph.tensors[index]
    for scales in block_scales(tensor):
        details = tensor.quantization.details
        count = prod(indices(tensor.shape))
        if not 0 <= scales < len(subgraph.tensors) or details.blockSize < 1 or count % details.blockSize:
            raise ValueError(f"tensor {index} is quantised by blocks of {details.blockSize} with scales {scales}")
        held = subgraph.tensors[scales]
        elements = prod(indices(held.shape))
        half = held.type == schema.TensorType.FLOAT16
        if not half or elements != count // details.blockSize or sizes.get(held.buffer, 0) < 2 * elements:
            raise ValueError(f"tensor {index} is quantised by blocks, and its scales (tensor {scales}) do not fit")
        if details.zeroPoints > 0:
            raise ValueError(f"tensor {index} is quantised by blocks with zero points, which the runtime does not read")


def check_sparsity(sparsity: Any, shape: Sequence[int], bits: int, nbytes: int) -> None:
    """Check that a sparse tensor's data can be unfolded to its shape.

    Dimensions are stored in ``traversalOrder``, each dense (all positions) or sparse (a list of positions for
    each position of the dimension before); blocks are further dimensions that subdivide those of ``blockMap``.

    Args:
        sparsity: the schema's ``SparsityParametersT``.
        shape: of the tensor.
        bits: of an element.
        nbytes: of the stored data.

    Raises:
        ValueError: it cannot be unfolded.
    """
    order, blocks = indices(sparsity.traversalOrder), indices(sparsity.blockMap)
    levels = sparsity.dimMetadata or []
    rank = len(shape)
    if sorted(order) != list(range(rank + len(blocks))) or len(levels) != len(order):
        raise ValueError("is sparse in other dimensions than it has")
    if any(not 0 <= b < rank for b in blocks) or len(set(blocks)) != len(blocks):
        raise ValueError("is sparse in blocks of other dimensions than it has")
    sizes = [*shape, *(1 for _ in blocks)]
    for dimension, level in zip(order, levels, strict=True):
        if dimension >= rank:
            sizes[dimension] = size = level.denseSize
            divided = blocks[dimension - rank]
            if level.format != schema.DimensionType.DENSE or size < 1 or shape[divided] % size:
                raise ValueError("is sparse in blocks that do not fill it")
            sizes[divided] = shape[divided] // size
    places = 1
    for dimension, level in zip(order, levels, strict=True):
        places = _places(level, sizes[dimension], places)
        if places * bits > 8 * nbytes:
            raise ValueError(f"is sparse and needs more than the {nbytes} bytes that it has")


def _places(level: Any, size: int, before: int) -> int:
    """Return the number of positions after one more dimension."""
    if level.format == schema.DimensionType.DENSE:
        if level.denseSize != size:
            raise ValueError(f"is sparse with a dimension of {level.denseSize} in place of {size}")
        return before * size
    segments = indices(level.arraySegments.values if level.arraySegments is not None else None)
    places = indices(level.arrayIndices.values if level.arrayIndices is not None else None)
    if (
        len(segments) != before + 1
        or segments[0]
        or list(segments) != sorted(segments)
        or segments[-1] != len(places)
        or any(not 0 <= i < size for i in places)
    ):
        raise ValueError("is sparse with places outside of its shape")
    return len(places)


Shape = tuple[int, ...]
_Rule = Callable[[Operator, Sequence[Shape]], Shape | int | None]


def check_operator(operator: Operator, tensors: Sequence[Tensor]) -> None:
    """Check one operator.

    Args:
        operator: of any kind; its tensors exist.
        tensors: of its subgraph.

    Raises:
        ValueError: it has too few or too many tensors, or its output has another shape than it computes.
    """
    found = _CHECKS.get(operator.kind)
    if found is None:
        return
    least, most, outputs, rule = found
    if not least <= len(operator.inputs) <= most or len(operator.outputs) != outputs:
        raise ValueError(f"has {plural(len(operator.inputs), 'input')} and {plural(len(operator.outputs), 'output')}")
    if rule is None:
        return
    needed = operator.inputs[:least]
    if -1 in needed:
        raise ValueError(f"lacks input {needed.index(-1)}")
    shapes = [tensors[t].shape for t in operator.inputs if t != -1]
    declared = tensors[operator.outputs[0]].shape
    if not declared or any(d < 0 for shape in (*shapes, declared) for d in shape):
        return  # an empty shape may be an unknown one
    made = rule(operator, shapes)
    if made is not None and made != (prod(declared) if isinstance(made, int) else declared):
        text = f"{made} elements" if isinstance(made, int) else f"the shape {made}"
        raise ValueError(f"computes {text}, but its output has the shape {declared}")


def _broadcast(_: Operator, shapes: Sequence[Shape]) -> Shape:
    rank = max(map(len, shapes))
    columns = zip(*((1,) * (rank - len(s)) + s for s in shapes), strict=True)
    made = tuple(next((d for d in column if d != 1), 1) for column in columns)
    if any(d not in (1, m) for s in shapes for d, m in zip(reversed(s), reversed(made), strict=False)):
        raise ValueError(f"cannot combine the shapes {' and '.join(map(str, shapes))}")
    return made


def _fully_connected(_: Operator, shapes: Sequence[Shape]) -> int | None:
    weights = shapes[1]
    if len(weights) != 2 or not weights[1] or prod(shapes[0]) % weights[1]:
        raise ValueError(f"cannot multiply {shapes[0]} by weights of {weights}")
    return prod(shapes[0]) // weights[1] * weights[0]


def _convolution(operator: Operator, shapes: Sequence[Shape]) -> Shape:
    _four(shapes[0], shapes[1])
    _, height, width, _ = shapes[1]
    channels = shapes[1][3 if operator.kind == "DEPTHWISE_CONV_2D" else 0]
    return _window(operator, shapes[0], (height, width), channels)


def _pool(operator: Operator, shapes: Sequence[Shape]) -> Shape:
    _four(shapes[0])
    size = (operator.options.get("filter_height", 0), operator.options.get("filter_width", 0))
    return _window(operator, shapes[0], size, shapes[0][3])


def _four(*shapes: Shape) -> None:
    wrong = next((s for s in shapes if len(s) != 4), None)
    if wrong is not None:
        raise ValueError(f"takes four dimensions, not {wrong}")


def _window(operator: Operator, shape: Shape, kernel: tuple[int, int], channels: int) -> Shape:
    options = operator.options
    strides = options.get("stride_h", 0), options.get("stride_w", 0)
    dilations = options.get("dilation_h_factor", 1), options.get("dilation_w_factor", 1)
    if min(*strides, *dilations, *kernel) < 1:
        raise ValueError(f"has a window of {kernel} with strides of {strides}")
    lost = [0 if options.get("padding") == "SAME" else (k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    height, width = (-(-(n - less) // s) for n, less, s in zip(shape[1:3], lost, strides, strict=True))
    return shape[0], height, width, channels


_UNARY = """ABS CAST CEIL COS DENSIFY DEQUANTIZE ELU EXP FLOOR GELU HARD_SWISH L2_NORMALIZATION LEAKY_RELU LOG
LOGICAL_NOT LOGISTIC LOG_SOFTMAX NEG QUANTIZE RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 ROUND RSQRT SIGN SIN SOFTMAX SQRT
SQUARE TANH ZEROS_LIKE""".split()  # noqa: SIM905 - a list of quoted names is harder to read

_BINARY = """ADD DIV EQUAL FLOOR_DIV FLOOR_MOD GREATER GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND LOGICAL_OR MAXIMUM
MINIMUM MUL NOT_EQUAL POW SQUARED_DIFFERENCE SUB""".split()  # noqa: SIM905 - as in intensity.py

_MANY = 1 << 31

# Kind → fewest and most inputs, outputs, and what shape (or how many elements) the output has.
_CHECKS: Mapping[str, tuple[int, int, int, _Rule | None]] = {
    **dict.fromkeys(_UNARY, (1, 1, 1, lambda _, shapes: shapes[0])),
    **dict.fromkeys(_BINARY, (2, 2, 1, _broadcast)),
    "ASSIGN_VARIABLE": (2, 2, 0, None),
    "AVERAGE_POOL_2D": (1, 1, 1, _pool),
    "CALL_ONCE": (0, 0, 0, None),
    "CONCATENATION": (1, _MANY, 1, lambda _, shapes: sum(map(prod, shapes))),
    "CONV_2D": (2, 3, 1, _convolution),
    "DEPTHWISE_CONV_2D": (2, 3, 1, _convolution),
    "FULLY_CONNECTED": (2, 3, 1, _fully_connected),
    "L2_POOL_2D": (1, 1, 1, _pool),
    "MAX_POOL_2D": (1, 1, 1, _pool),
    "MEAN": (2, 2, 1, None),
    "READ_VARIABLE": (1, 1, 1, None),
    "RESHAPE": (1, 2, 1, lambda _, shapes: prod(shapes[0])),
    "TRANSPOSE": (2, 2, 1, lambda _, shapes: prod(shapes[0])),
    "VAR_HANDLE": (0, 0, 1, None),
}


VERSION = 3  # of the schema; the runtime accepts no other
MAX_RANK = 64
_KIND_CHARACTERS = 100
MAX_TENSOR_NBYTES = 1 << 40

_NEWER = "install a newer ai-edge-litert"


def read_model(path: Path, name: str | None = None, signature: str | None = None) -> Graph:
    """Read the main subgraph of a ``.tflite`` file; time and memory do not depend on the size of its weights.

    Args:
        path: the file, which is not trusted.
        name: of the model; the file's stem where left out.
        signature: key of the signature whose subgraph is read; the first subgraph where left out.

    Raises:
        ModelError: the file is missing, unreadable, not a model, truncated, damaged, or needs a newer schema.
    """
    model, extents, nbytes = unpack(path)
    for subgraph in model.subgraphs or ():
        for tensor in subgraph.tensors or ():
            if len(indices(tensor.shapeSignature)) != len(indices(tensor.shape)):
                tensor.shapeSignature = None  # the Interpreter ignores it
    try:
        source = ModelSource(path, nbytes, model, extents)
        return graph_of(source if signature is None else select_signature(source, signature), name or path.stem)
    except ValueError as error:
        raise ModelError(
            f"{path}: the model cannot be used: {error}", "get the file again, or convert it again"
        ) from None
    except ModelError as error:
        raise ModelError(f"{path}: {error.what}", error.hint) from None


def graph_of(source: ModelSource, name: str, before: Graph | None = None) -> Graph:
    """Return the graph of a model whose structure has been read.

    Args:
        before: the graph that was rewritten; what ``source`` shares with its source was checked before.

    Raises:
        ModelError, ValueError: the structure is damaged or not supported.
    """
    model = source.schema
    if model.version != VERSION:
        raise ValueError(f"its schema has version {model.version}, not {VERSION}")
    if not model.subgraphs:
        raise ValueError("it has no subgraph")
    if model.externalBuffers or any(t.externalBuffer for s in model.subgraphs for t in s.tensors or ()):
        raise ModelError("the model keeps weights in other files", "convert it again with its weights in one file")
    check_references(source)
    source = with_computed_outputs(source)
    model = source.schema
    kinds = [_kind(code) for code in model.operatorCodes or ()]
    order = check_calls(model)
    digests: dict[int, str] = {}
    for number in order:
        if number:
            try:
                digests[number] = _part(source, f"{name}/{number}", number, kinds, digests, _Known(source, None)).digest
            except (ModelError, ValueError) as error:
                raise type(error)(f"subgraph {number}: {error}") from None
    raw = _part(source, name, 0, kinds, digests, _Known(source, before))
    if not raw.operators:
        raise ModelError("the model has no operators", "there is nothing to partition")
    return arrange(raw, operator_states(model, order), BUILTIN, source)


def with_computed_outputs(source: ModelSource) -> ModelSource:
    """Return a model whose outputs are all written by operators: a SQUEEZE copies each output that is a constant."""
    model = source.schema
    main = model.subgraphs[0]
    count = len(main.tensors or ())
    computed = {*indices(main.inputs), *(i for o in main.operators or () for i in indices(o.outputs))}
    known = [
        t
        for t in dict.fromkeys(indices(main.outputs))
        if 0 <= t < count and t not in computed and not main.tensors[t].isVariable and main.tensors[t].buffer > 0
    ]
    if not known:
        return source
    tensors, operators, codes = list(main.tensors), list(main.operators or ()), list(model.operatorCodes or ())
    for index in known:
        constant = tensors[index]
        shape = np.array([1, *indices(constant.shape)], np.int32)
        tensors[index] = changed(constant, buffer=0)
        tensors.append(changed(constant, shape=shape, shapeSignature=None))
        operators = [_reading(o, index, len(tensors)) for o in operators]
        tensors.append(constant)
        options = schema.SqueezeOptionsT(squeezeDims=np.array([0], np.int32))
        read, written = np.array([len(tensors) - 2], np.int32), np.array([index], np.int32)
        operators.append(made_operator(codes, "SQUEEZE", read, written, options))
    model = changed(with_main(model, tensors=tensors, operators=operators), operatorCodes=codes)
    return replace(source, schema=model, fixed=True)


def _reading(operator: Any, tensor: int, instead: int) -> Any:
    """Return an operator that reads ``instead`` where it read ``tensor``."""
    read = [instead if t == tensor else t for t in indices(operator.inputs)]
    return changed(operator, inputs=np.array(read, np.int32)) if instead in read else operator


class _Known:
    """What a rewritten main subgraph has in common with the one before."""

    def __init__(self, source: ModelSource, before: Graph | None) -> None:
        self._extents = source.extents
        self._operators: dict[int, Operator] = {}
        self._tensors: tuple[tuple[Any, Tensor], ...] = ()
        if before is not None and before.source is not None:
            main = before.source.schema.subgraphs[0]
            self._tensors = tuple(zip(main.tensors, before.tensors, strict=True))
            if not (before.source.operators or before.source.recipes):
                pairs = zip(main.operators, before.operators, strict=True)
                self._operators = {id(own): operator for own, operator in pairs}

    def operator(self, own: Any) -> Operator | None:
        """Return the operator of an object of the schema."""
        return self._operators.get(id(own))

    def tensor(self, own: Any, index: int, *, computed: bool) -> Tensor | None:
        """Return a tensor that is computed, or a constant in the file, now as before."""
        if index >= len(self._tensors) or self._tensors[index][0] is not own:
            return None
        tensor = self._tensors[index][1]
        same = not (tensor.constant or tensor.variable) if computed else tensor.constant and own.buffer in self._extents
        return tensor if same else None


def _part(
    source: ModelSource,
    name: str,
    number: int,
    kinds: list[str],
    digests: Mapping[int, str],
    known: _Known,
) -> Graph:
    """Return a subgraph of the file as a graph.

    Args:
        kinds: names of the operator codes.
        digests: of the subgraphs that it calls; a graph's digest covers its whole structure.
        known: of the graph before it was rewritten.
    """
    subgraph = source.schema.subgraphs[number]
    inputs, outputs = indices(subgraph.inputs), indices(subgraph.outputs)
    operators = tuple(
        known.operator(o) or _operator(o, i, kinds, digests) for i, o in enumerate(subgraph.operators or ())
    )
    computed = {*inputs, *(i for operator in operators for i in operator.outputs)}
    count = len(subgraph.tensors or ())
    for index, entry in enumerate(subgraph.operators or ()):
        wrong = next((i for i in indices(entry.intermediates) if not -1 <= i < count), None)
        if wrong is not None:
            raise ValueError(f"operator {index} keeps a result in {absent('tensor', wrong, count)}")
    tensors = tuple(
        known.tensor(t, i, computed=i in computed) or _tensor(t, i, i in computed, source)
        for i, t in enumerate(subgraph.tensors or ())
    )
    sizes = {number: extent.nbytes for number, extent in source.extents.items()}
    for index in range(count):
        check_blocks(subgraph, index, sizes)
    for index, operator in enumerate(operators):
        try:
            # The graph reports an index out of range.
            if all(-1 <= t < count for t in (*operator.inputs, *operator.outputs)):
                check_operator(operator, tensors)
        except ValueError as error:
            raise ValueError(f"operator {index} ({operator.kind}) {error}") from None
    if number:  # the result of a branch may be a constant; the outputs of the model must be computed
        for i in outputs:
            if not 0 <= i < len(tensors):
                raise ValueError(f"its output refers to {absent('tensor', i, len(tensors))}")
            if i not in computed and not tensors[i].constant and not tensors[i].variable:
                raise ValueError(f"no operator writes output tensor {i}")
        outputs = tuple(i for i in outputs if i in computed)
    return Graph(name, tensors, operators, inputs, outputs, source)


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _kind(code: Any) -> str:
    """Return the name of an operator code."""
    number = number_of(code)
    if number == schema.BuiltinOperator.CUSTOM:
        custom = "".join(c if c.isprintable() else "?" for c in _text(code.customCode)[:_KIND_CHARACTERS]) or "CUSTOM"
        return f"CUSTOM {custom}" if custom in BUILTIN else custom
    if number not in KINDS:
        raise ModelError(f"operator code {number} is not known to the installed schema", _NEWER)
    return KINDS[number]


def _operator(operator: Any, index: int, kinds: list[str], digests: Mapping[int, str]) -> Operator:
    if not 0 <= operator.opcodeIndex < len(kinds):
        raise ValueError(f"operator {index} has {absent('code', operator.opcodeIndex, len(kinds))}")
    kind = kinds[operator.opcodeIndex]
    unknown = (operator.builtinOptionsType and operator.builtinOptions is None) or (
        operator.builtinOptions2Type and operator.builtinOptions2 is None
    )
    if unknown:
        raise ModelError(f"operator {index} ({kind}) has options that the installed schema does not know", _NEWER)
    try:
        options = plain_options(operator)
    except ValueError as error:
        raise ValueError(f"operator {index} ({kind}): {error}") from None
    calls = called(operator)
    if calls:
        options["calls"] = tuple(digests[n] for n in calls)
    return Operator(kind, indices(operator.inputs), indices(operator.outputs), options)


def _tensor(tensor: Any, index: int, computed: bool, source: ModelSource) -> Tensor:
    """Return a tensor; ``computed``: whether an operator or the caller writes it."""
    name = _text(tensor.name)
    what = f"tensor {index} ({shown(name)})"
    shape, signature = indices(tensor.shape), indices(tensor.shapeSignature)
    dtype = DTYPES.get(tensor.type)
    if dtype is None:
        raise ModelError(f"{what} has type {tensor.type}, unknown to the installed schema", _NEWER)
    if not 0 <= tensor.buffer < max(1, len(source.schema.buffers)):
        raise ValueError(f"{what} has {absent('buffer', tensor.buffer, len(source.schema.buffers))}")
    if len(shape) > MAX_RANK or min(shape, default=0) < -1 or min(signature, default=0) < -1:
        raise ValueError(f"{what} has an impossible shape")
    nbytes = tensor_nbytes(shape, dtype)
    if nbytes > MAX_TENSOR_NBYTES:
        raise ValueError(f"{what} has the shape {shape}, more than any machine holds")
    extent = source.extents.get(tensor.buffer)
    if extent is None and source.fixed and source.schema.buffers[tensor.buffer].data is not None:
        extent = Extent(0, len(source.schema.buffers[tensor.buffer].data))
    # An empty list (the shape of a scalar) is a constant without data.
    if extent is not None and (computed or tensor.isVariable):
        raise ValueError(f"{what} is computed and yet has data")
    constant = not tensor.isVariable and not computed and (extent is not None or 0 in shape)
    if constant and extent is not None and not has_fixed_size(dtype):
        nbytes = extent.nbytes
    if constant and extent is not None and extent.nbytes < nbytes and tensor.sparsity is None:
        raise ValueError(f"{what} needs {nbytes} bytes and has {extent.nbytes}")
    if tensor.sparsity is not None:
        try:
            check_sparsity(tensor.sparsity, shape, element_bits(dtype), extent.nbytes if extent is not None else 0)
        except ValueError as error:
            raise ValueError(f"{what} {error}") from None
    return Tensor(
        name, signature or shape, dtype, nbytes, constant, bool(tensor.isVariable), tensor.buffer if constant else 0
    )
