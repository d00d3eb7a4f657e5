"""Small ``.tflite`` models made with the schema's object API, and a process of its own that runs them.

The drawn models hold what stages must get right: branches, several outputs, outputs that are read again, inputs that
are outputs, shared constants, weights that operators compute from constants, in-place reshapes, tensors read by many,
int8 pieces, optional inputs, and state.
"""

from __future__ import annotations

import atexit
import copy
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from hypothesis import strategies as st
from numpy.typing import NDArray

from search_spaces.core.graph import Graph
from search_spaces.models.flatbuffer import write_model
from search_spaces.models.zoo.builder import Builder, Draft
from tests.support.narrowing import there

TYPES = schema.TensorType
SHAPE = (1, 4, 4, 2)
Array = NDArray[Any]
_VERSIONS = {"BROADCAST_TO": 2}  # LiteRT has no kernel for the first version


class Net:
    """A model under construction: subgraphs, and constants that have a value."""

    def __init__(self) -> None:
        self.model = schema.ModelT(version=3, operatorCodes=[], subgraphs=[], buffers=[schema.BufferT()])
        self.values: list[Array] = []
        self.body()

    def body(self, name: str = "main") -> int:
        """Begin another subgraph and return its number."""
        self.graph = schema.SubGraphT(name=name, tensors=[], operators=[], inputs=[], outputs=[])
        self.model.subgraphs.append(self.graph)
        return len(self.model.subgraphs) - 1

    def tensor(self, shape: Sequence[int] = SHAPE, dtype: int = TYPES.FLOAT32, **fields: Any) -> int:
        fields = {"name": f"t{len(self.graph.tensors)}", "buffer": 0} | fields
        self.graph.tensors.append(schema.TensorT(shape=list(shape), type=dtype, hasRank=True, **fields))
        return len(self.graph.tensors) - 1

    def input(self, shape: Sequence[int] = SHAPE, dtype: int = TYPES.FLOAT32, **fields: Any) -> int:
        self.graph.inputs.append(self.tensor(shape, dtype, **fields))
        return int(self.graph.inputs[-1])

    def constant(self, value: Array, dtype: int | None = None, shape: Sequence[int] | None = None) -> int:
        self.model.buffers.append(schema.BufferT(data=np.frombuffer(value.tobytes(), np.uint8)))
        kind = getattr(TYPES, str(value.dtype).upper()) if dtype is None else dtype
        return self.tensor(value.shape if shape is None else shape, kind, buffer=len(self.model.buffers) - 1)

    def op(
        self,
        kind: str,
        inputs: Sequence[int],
        outputs: int | Sequence[int] | None = None,
        options: Any = None,
        **fields: Any,
    ) -> int:
        """Add an operator and return its first output, by default a new float tensor of ``SHAPE``."""
        made = [self.tensor()] if outputs is None else [outputs] if isinstance(outputs, int) else list(outputs)
        number = getattr(schema.BuiltinOperator, kind, schema.BuiltinOperator.CUSTOM)
        custom = kind if number == schema.BuiltinOperator.CUSTOM else None
        code = schema.OperatorCodeT(
            deprecatedBuiltinCode=min(number, 127),
            builtinCode=number,
            customCode=custom,
            version=_VERSIONS.get(kind, 1),
        )
        self.model.operatorCodes.append(code)
        if options is not None:
            name = type(options).__name__.removesuffix("T")
            side = "" if hasattr(schema.BuiltinOptions, name) else "2"
            fields[f"builtinOptions{side}"] = options
            fields[f"builtinOptions{side}Type"] = getattr(getattr(schema, f"BuiltinOptions{side}"), name)
        self.graph.operators.append(
            schema.OperatorT(opcodeIndex=len(self.model.operatorCodes) - 1, inputs=list(inputs), outputs=made, **fields)
        )
        return made[0] if made else -1

    def add(self, a: int, b: int) -> int:
        return self.op("ADD", [a, b], options=schema.AddOptionsT())

    def conv(self, x: int, kernel: int, bias: int) -> int:
        options = schema.Conv2DOptionsT(strideW=1, strideH=1)
        return self.op("CONV_2D", [x, kernel, bias], options=options)

    def reshape(self, x: int, shape: Sequence[int]) -> int:
        target = np.array(shape, np.int32)
        return self.op(
            "RESHAPE", [x, self.constant(target)], self.tensor(shape), schema.ReshapeOptionsT(newShape=target)
        )

    def outputs(self, *tensors: int) -> Net:
        self.graph.outputs = list(tensors)
        return self

    def write(self, path: Path) -> Path:
        write_model(self.model, {}, path)
        return path


def quantized(scale: float) -> Any:
    return schema.QuantizationParametersT(scale=[scale], zeroPoint=[3])


def variable(net: Net, name: str = "v") -> tuple[int, int]:
    """Add a counter that adds its input on every run; return the handle and the value read."""
    options = schema.VarHandleOptionsT(container="", sharedName=name)
    handle = net.op("VAR_HANDLE", [], net.tensor([], TYPES.RESOURCE), options)
    return handle, net.op("READ_VARIABLE", [handle], options=schema.ReadVariableOptionsT())


def _value(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


@st.composite
def nets(draw: st.DrawFn, *, max_layers: int = 7) -> Net:
    """Models of up to ``max_layers`` layers of one to three operators each."""
    net = Net()
    ready = [net.input() for _ in range(draw(st.integers(1, 2)))]
    kernels = [net.constant(_value(i, 2, 1, 1, 2)) for i in range(2)]
    half = net.constant(_value(7, 2, 3, 3, 2).astype(np.float16))
    kernels.append(net.op("DEQUANTIZE", [half], net.tensor((2, 3, 3, 2)), schema.DequantizeOptionsT()))
    bias, shift = net.constant(_value(8, 2)), net.constant(_value(9, *SHAPE))
    kernels.append(net.op("NEG", [kernels[-1]], net.tensor((2, 3, 3, 2)), schema.NegOptionsT()))
    for _ in range(draw(st.integers(1, max_layers))):
        x, y = draw(st.sampled_from(ready[-3:])), draw(st.sampled_from([*ready, shift]))
        layer = draw(st.sampled_from(("conv", "add", "relu", "reshape", "split", "int8", "optional")))
        if layer == "conv":
            ready.append(net.conv(x, draw(st.sampled_from(kernels)), bias))
        elif layer == "add":
            ready.append(net.add(x, y))
        elif layer == "relu":
            ready.append(net.op("RELU", [x]))
        elif layer == "reshape":
            ready.append(net.reshape(net.reshape(x, (1, prod(SHAPE))), SHAPE))
        elif layer == "split":
            pieces = [net.tensor((1, 4, 4, 1)) for _ in range(2)]
            net.op("SPLIT", [net.constant(np.array(3, np.int32)), x], pieces, schema.SplitOptionsT(numSplits=2))
            joined = draw(st.sampled_from((pieces, pieces[::-1], [pieces[0]] * 2)))
            ready.append(net.op("CONCATENATION", joined, options=schema.ConcatenationOptionsT(axis=3)))
        elif layer == "int8":
            small = [net.tensor(dtype=TYPES.INT8, quantization=quantized(0.05)) for _ in range(2)]
            net.op("QUANTIZE", [x], small[0], schema.QuantizeOptionsT())
            net.op("RELU", [small[0]], small[1])
            ready.append(net.op("DEQUANTIZE", [small[1]], options=schema.DequantizeOptionsT()))
        else:
            flat = net.reshape(x, (1, 32))
            weights = net.constant(_value(10, 32, 32))
            options = schema.FullyConnectedOptionsT()
            ready.append(
                net.reshape(net.op("FULLY_CONNECTED", [flat, weights, -1], net.tensor((1, 32)), options), SHAPE)
            )
    wanted = draw(st.lists(st.sampled_from(ready), max_size=2))
    return net.outputs(*wanted, ready[-1])


def tiny() -> Draft:
    """One layer of each kind, 4 KB in all."""
    net = Builder("tiny")
    x = net.input((1, 8, 8, 3))
    x = net.conv(x, 4, 3, "conv", stride=2, activation="RELU6")
    y = net.depthwise_conv(x, 3, "depthwise")
    x = net.concat([net.add(x, y, "add"), net.max_pool(x, 2, 1, "max", "SAME")], "concat")
    x = net.reshape(net.mean(net.average_pool(x, 2, 2, "average"), "mean"), (1, 1, 8), "reshape")
    return net.finish(net.softmax(net.fully_connected(x, 5, "fc", activation="RELU")))


def single(inputs: list[Any], buffers: list[Any] | None = None) -> Any:
    """A model of one RESHAPE that reads ``inputs``."""
    output = schema.TensorT(name="y", shape=[4], type=0, buffer=0)
    operator = schema.OperatorT(
        opcodeIndex=0, inputs=list(range(len(inputs))), outputs=[len(inputs)], builtinOptionsType=0
    )
    subgraph = schema.SubGraphT(
        tensors=[*inputs, output], inputs=[0], outputs=[len(inputs)], operators=[operator], name="main"
    )
    code = schema.OperatorCodeT(
        builtinCode=schema.BuiltinOperator.RESHAPE, deprecatedBuiltinCode=schema.BuiltinOperator.RESHAPE
    )
    return schema.ModelT(
        version=3, operatorCodes=[code], subgraphs=[subgraph], buffers=[schema.BufferT(), *(buffers or [])]
    )


def with_signature(net: Net, key: str = "serve") -> Net:
    """Give the model a signature that lists its inputs in the other order than the subgraph."""
    main = net.model.subgraphs[0]
    signature = schema.SignatureDefT(signatureKey=key, subgraphIndex=0)
    signature.inputs = [schema.TensorMapT(name=f"in{t}", tensorIndex=t) for t in reversed(main.inputs)]
    signature.outputs = [schema.TensorMapT(name=f"out{t}", tensorIndex=t) for t in main.outputs]
    net.model.signatureDefs = [signature]
    return net


@cache
def _worker() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, get_context("forkserver"))
    atexit.register(pool.shutdown)
    return pool


Piece = tuple[str, bytes, tuple[int, ...], tuple[int, ...]]


def some_inputs(graph: Graph, seed: int = 0) -> dict[int, Array]:
    random = np.random.default_rng(seed)
    found: dict[int, Array] = {}
    for index in graph.inputs:
        tensor = graph.tensors[index]
        low, high = {"int32": (0, 2), "int8": (-100, 100)}.get(tensor.dtype, (-1, 1))
        found[index] = random.uniform(low, high, tensor.shape).astype(tensor.dtype)
    return found


def whole_model(graph: Graph) -> list[Piece]:
    return [(str(there(graph.source).path), b"", graph.inputs, graph.outputs)]


def plain_interpreter(graph: Graph) -> Any:
    """Return the runtime with its own kernels, in which every tensor can be read after a run."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    interpreter = Interpreter(
        str(there(graph.source).path),
        experimental_preserve_all_tensors=True,
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    interpreter.allocate_tensors()
    return interpreter


def run_pieces(pieces: Sequence[Piece], values: dict[int, Array], times: int = 1) -> list[dict[int, Array]]:
    """Run models one after another in a process of its own, ``times`` times, and return all tensors that crossed.

    Args:
        pieces: path, what stands before the file's content, tensors read and tensors written of each.
        values: tensor → its value, for those that nobody writes.
    """
    return _worker().submit(_run, list(pieces), values, times).result(timeout=60)


def _run(pieces: Sequence[Piece], given: dict[int, Array], times: int) -> list[dict[int, Array]]:
    from ai_edge_litert.interpreter import Interpreter

    made = []
    for path, head, reads, writes in pieces:
        interpreter = Interpreter(model_content=head + Path(path).read_bytes(), num_threads=1)
        interpreter.allocate_tensors()
        made.append((interpreter, reads, writes))
    results = []
    for _ in range(times):
        values = copy.copy(given)
        for interpreter, reads, writes in made:
            for detail, tensor in zip(interpreter.get_input_details(), reads, strict=True):
                interpreter.set_tensor(detail["index"], values[tensor])
            interpreter.invoke()
            for detail, tensor in zip(interpreter.get_output_details(), writes, strict=True):
                values[tensor] = interpreter.get_tensor(detail["index"])
        results.append(values)
    return results
