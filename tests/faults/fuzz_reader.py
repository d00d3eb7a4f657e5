"""Damage models in every way that comes to mind, and read what is left as a person's command would.

``python -m tests.faults.fuzz_reader --cases 100000`` prints what was refused, what was read, the slowest case and the
memory taken; it ends with 1 at the first case that is neither a graph nor one line. The same seed damages the same way.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import struct
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from search_spaces.core.errors import ModelError, OptimizeError
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs, unknown_kinds
from search_spaces.core.plan import canonical
from search_spaces.core.platform import Platform, Processor
from search_spaces.models.dtypes import has_fixed_size
from search_spaces.models.flatbuffer import IDENTIFIER, write_into
from search_spaces.models.inputs import drawn_inputs
from search_spaces.models.litert import read_model
from search_spaces.models.shapes import needs_interpreter
from search_spaces.models.stages import cut_stage
from search_spaces.spaces.chain import ChainSpace
from search_spaces.spaces.cuts import cut_points, layer_length, parameter_count
from tests.support.models.tflite_models import SHAPE, TYPES, Net, quantized, variable, with_signature

CASE_S = 2.0
SPARE_NBYTES = 1 << 20  # beside 4 times the file
_PROCESSORS = Platform("fuzz", tuple(Processor(n, "cpu", {}, "cpu") for n in ("a", "b")))
_NUMBERS = (0, 1, 2, 3, 4, 7, 8, 127, 128, 255, 256, 65535, 65536, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


def corpus(folder: Path) -> list[bytes]:
    """Return small models that hold between them every kind of table that the reader meets."""
    nets = (_layers(), _variables(), _recurrent(), _calls(), _rare(), _fitted())
    return [net.write(folder / "seed.tflite").read_bytes() for net in nets]


def runnable_corpus(folder: Path) -> list[bytes]:
    """Return those models that LiteRT runs as they are."""
    nets = (_layers(), _variables(), _calls(), _rare(runnable=True))
    return [net.write(folder / "seed.tflite").read_bytes() for net in nets]


def _layers() -> Net:
    net = Net()
    x = net.input()
    half = net.constant(np.ones((2, 3, 3, 2), np.float16))
    kernel = net.op("DEQUANTIZE", [half], net.tensor((2, 3, 3, 2)), schema.DequantizeOptionsT())
    bias = net.constant(np.zeros(2, np.float32))
    y = net.conv(net.conv(x, kernel, bias), kernel, bias)
    small = net.tensor(dtype=TYPES.INT8, quantization=quantized(0.5))
    net.op("QUANTIZE", [net.add(x, y)], small, schema.QuantizeOptionsT())
    y = net.reshape(net.op("DEQUANTIZE", [small], options=schema.DequantizeOptionsT()), (1, 32))
    weights = net.constant(np.ones((4, 32), np.float32))
    options = schema.FullyConnectedOptionsT(fusedActivationFunction=1)
    net.outputs(net.op("FULLY_CONNECTED", [y, weights, -1], net.tensor((1, 4)), options), x)
    net.model.buffers.append(schema.BufferT(data=np.frombuffer(b"2.3.0", np.uint8)))
    net.model.metadata = [schema.MetadataT("min_runtime_version", len(net.model.buffers) - 1)]
    net.model.description = "layers"
    return with_signature(net)


def _variables() -> Net:
    net = Net()
    x = net.input()
    net.op("CALL_ONCE", [], [], schema.CallOnceOptionsT(initSubgraphIndex=1))
    handle, before = variable(net)
    after = net.add(x, before)
    net.op("ASSIGN_VARIABLE", [handle, after], [], schema.AssignVariableOptionsT())
    net.outputs(net.op("NEG", [after], options=schema.NegOptionsT()))
    net.body("init")
    handle = net.op("VAR_HANDLE", [], net.tensor([], TYPES.RESOURCE), schema.VarHandleOptionsT("", "v"))
    net.op("ASSIGN_VARIABLE", [handle, net.constant(np.zeros(SHAPE, np.float32))], [])
    return net


def _recurrent() -> Net:
    net = Net()
    state = net.tensor((1, 6), isVariable=True)
    features, weights = net.constant(np.ones((2, 32), np.float32)), net.constant(np.ones((2, 3), np.float32))
    reads = [net.reshape(net.input(), (1, 32)), features, weights, -1, state]
    return net.outputs(net.op("SVDF", reads, net.tensor((1, 2)), schema.SVDFOptionsT(rank=1)))


def _calls() -> Net:
    net = Net()
    x, flag = net.input(), net.input((1,), TYPES.BOOL)
    y = net.op("IF", [flag, x], options=schema.IfOptionsT(thenSubgraphIndex=1, elseSubgraphIndex=2))
    z = net.op("WHILE", [y], options=schema.WhileOptionsT(condSubgraphIndex=3, bodySubgraphIndex=2))
    net.outputs(z, y, z)
    for name, kind in (("then", "RELU"), ("else", "TANH")):
        net.body(name)
        net.outputs(net.op(kind, [net.input()]))
    net.body("cond")
    net.input()
    return net.outputs(net.constant(np.zeros(1, np.bool_), TYPES.BOOL))


def _rare(*, runnable: bool = False) -> Net:
    """Sparse weights; where nobody has to run it also a custom operator, text, an open dimension, and int4."""
    net = Net()
    x = net.input((1, 8), shapeSignature=None if runnable else [-1, 8])
    dimension = schema.DimensionMetadataT(format=0, denseSize=4)
    segments, indices = schema.Int32VectorT(values=[0, 1, 2, 3, 4]), schema.Int32VectorT(values=[0, 1, 2, 7])
    packed = schema.DimensionMetadataT(
        format=1, arraySegmentsType=1, arraySegments=segments, arrayIndicesType=1, arrayIndices=indices
    )
    sparsity = schema.SparsityParametersT(traversalOrder=[0, 1], dimMetadata=[dimension, packed])
    weights = net.constant(np.ones(4, np.float32), shape=(4, 8))
    net.graph.tensors[weights].sparsity = sparsity
    dense = net.op("DENSIFY", [weights], net.tensor((4, 8)), schema.DensifyOptionsT())
    options = schema.FullyConnectedOptionsT()
    if runnable:
        y = net.op("FULLY_CONNECTED", [x, dense, -1], net.tensor((1, 4)), options)
        return net.outputs(net.op("SOFTMAX", [y], net.tensor((1, 4)), schema.SoftmaxOptionsT(beta=1.0)))
    y = net.op("FULLY_CONNECTED", [x, dense, -1], net.tensor((1, 4), shapeSignature=[-1, 4]), options)
    nibbles = net.constant(np.zeros(2, np.int8), TYPES.INT4, (4,))
    z = net.op("MyOwn", [y, nibbles], net.tensor((1, 4)), customOptions=np.arange(9, dtype=np.uint8))
    text = net.constant(np.frombuffer(b"\1\0\0\0\10\0\0\0\11\0\0\0t", np.uint8), TYPES.STRING, (1,))
    return net.outputs(net.op("MyOwn", [z, text], net.tensor((1, 4))), x)


def _fitted() -> Net:
    """Inputs that must fit, sizes at run time, scales by blocks, a constant output that is read, two signatures."""
    net = Net()
    held = net.constant(np.ones((2, 64), np.float32))
    scales = net.constant(np.ones((8, 2), np.float16))
    weights = net.constant(np.zeros(256, np.uint8), TYPES.INT4, (8, 64))
    details = schema.BlockwiseQuantizationT(scales=scales, zeroPoints=-1, blockSize=32)
    net.graph.tensors[weights].quantization = schema.QuantizationParametersT(
        detailsType=schema.QuantizationDetails.BlockwiseQuantization, details=details
    )
    indices, count, shape = net.input((3,), TYPES.INT32), net.input((), TYPES.INT32), net.input((2,), TYPES.INT32)
    row = net.op("GATHER", [held, indices], net.tensor((3, 64)), schema.GatherOptionsT(axis=0))
    dense = net.op("FULLY_CONNECTED", [row, weights, -1], net.tensor((3, 8)), schema.FullyConnectedOptionsT())
    best = [net.tensor((3, 2)), net.tensor((3, 2), TYPES.INT32)]
    net.op("TOPK_V2", [dense, count], best)
    filled = net.op("FILL", [shape, net.constant(np.array(1.0, np.float32))], net.tensor((2, 3)))
    places = net.op("WHERE", [net.input((4,), TYPES.BOOL)], net.tensor((4, 1), TYPES.INT64, shapeSignature=[-1, 1]))
    ends = [net.input((), TYPES.INT32) for _ in range(3)]
    steps = net.op("RANGE", ends, net.tensor((4,), TYPES.INT32))
    with_signature(net.outputs(held, *best, filled, places, steps))
    net.body("second")
    net.outputs(net.op("RELU", [net.input((1, 3))], net.tensor((1, 3))))
    other = schema.SignatureDefT(signatureKey="second", subgraphIndex=1, inputs=[], outputs=[])
    net.model.signatureDefs.append(other)
    return net


@dataclass(slots=True)
class Tally:
    """What became of the cases."""

    read: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    most_nbytes: float = 0.0
    lines: dict[str, int] = field(default_factory=dict)


class DefectError(Exception):
    """A case that is neither a graph nor one clear line."""


def damaged(seeds: list[bytes], cases: int, seed: int) -> Iterator[bytes]:
    """Yield ``cases`` damaged files."""
    random = np.random.default_rng(seed)
    structures = [_unpacked(content) for content in seeds]
    for _ in range(cases):
        which = int(random.integers(len(seeds)))
        if random.random() < 0.25:
            yield _odd_structure(structures[which], random)
            continue
        content = bytearray(seeds[which])
        for _ in range(int(random.choice((1, 1, 1, 2, 3, 8)))):
            _WAYS[int(random.integers(len(_WAYS)))](content, random)
        yield bytes(content)


def _place(content: bytearray, random: np.random.Generator, width: int) -> int:
    """Return a place for ``width`` bytes; most of the structure is aligned."""
    last = max(0, len(content) - width)
    return int(random.integers(last + 1)) // width * width if len(content) > width else 0


def _truncate(content: bytearray, random: np.random.Generator) -> None:
    del content[int(random.integers(len(content) + 1)) :]


def _flip_bits(content: bytearray, random: np.random.Generator) -> None:
    if content:
        content[_place(content, random, 1)] ^= 1 << int(random.integers(8))


def _byte(content: bytearray, random: np.random.Generator) -> None:
    if content:
        content[_place(content, random, 1)] = int(random.integers(256))


def _number(width: int) -> Callable[[bytearray, np.random.Generator], None]:
    def change(content: bytearray, random: np.random.Generator) -> None:
        place = _place(content, random, width)
        number = int(random.choice(_NUMBERS)) if random.random() < 0.7 else int(random.integers(1 << 32))
        content[place : place + width] = struct.pack("<Q", number)[:width]

    return change


def _offset_back(content: bytearray, random: np.random.Generator) -> None:
    """Make a reference lead to another place of the file: circles, and tables read as other tables."""
    place, target = _place(content, random, 4), _place(content, random, 4)
    content[place : place + 4] = struct.pack("<I", (target - place) % (1 << 32))


def _copy(content: bytearray, random: np.random.Generator) -> None:
    length = int(random.integers(1, 64))
    source, target = _place(content, random, 4), _place(content, random, 4)
    content[target : target + length] = content[source : source + length]


def _cut_out(content: bytearray, random: np.random.Generator) -> None:
    place = _place(content, random, 4)
    del content[place : place + int(random.integers(1, 64))]


def _noise(content: bytearray, random: np.random.Generator) -> None:
    place = _place(content, random, 4)
    content[place : place + 16] = random.bytes(16)


_WAYS = (_truncate, _flip_bits, _byte, _number(4), _number(4), _number(2), _number(8), _offset_back, _copy, _cut_out,
         _noise)  # fmt: skip


def _unpacked(content: bytes) -> Any:
    return schema.ModelT.InitFromPackedBuf(content, 0)


def _tables(value: Any) -> list[Any]:
    """Return all tables of a structure."""
    found = [value] if hasattr(value, "__dict__") else []
    for item in vars(value).values() if found else ():
        for element in item if isinstance(item, list) else [item]:
            if hasattr(element, "__dict__"):
                found += _tables(element)
    return found


def _odd_structure(model: Any, random: np.random.Generator) -> bytes:
    """Write a model in which one number or list is odd: well formed, and wrong."""
    tables = _tables(model)
    table = tables[int(random.integers(len(tables)))]
    fields = [n for n, v in vars(table).items() if isinstance(v, int | np.ndarray | list) and not isinstance(v, bool)]
    if not fields:
        return IDENTIFIER
    name = fields[int(random.integers(len(fields)))]
    whole = getattr(table, name)
    try:
        setattr(table, name, _odd(whole, random))
        file = io.BytesIO()
        write_into(file, model, {}, name)
        return file.getvalue()
    except (ModelError, struct.error, ArithmeticError, ValueError, TypeError, IndexError):
        return IDENTIFIER  # the format cannot hold it
    finally:
        setattr(table, name, whole)


def _odd(value: Any, random: np.random.Generator) -> Any:
    odd = int(random.choice((-(2**31), -9, -2, -1, 0, 1, 2, 3, 5, 17, 300, 2**20, 2**31 - 1)))
    if isinstance(value, int):
        return odd
    changed = value.copy()
    if len(changed) and isinstance(changed[0], int | np.integer) and random.random() < 0.7:
        changed[int(random.integers(len(changed)))] = odd
        return changed
    return changed[: int(random.integers(len(changed) + 1))]


def follow(graph: Graph) -> None:
    """Do with a graph what commands do before anything is measured."""
    operator_costs(graph)
    unknown_kinds(graph)
    cut_points(graph)
    space = ChainSpace(graph, _PROCESSORS, min(3, len(graph.operators)))
    plan = space.plan_at(space.cardinality() - 1)
    canonical(plan, graph, _PROCESSORS).validate(graph, _PROCESSORS)
    layer_length(graph, len(plan.stages))
    parameter_count(graph, len(plan.stages))
    for stage in plan.stages:
        made = cut_stage(graph, stage.operators)
        made.view()
        needs_interpreter(made.schema)
    read = [graph.tensors[t] for t in graph.inputs]
    if sum(t.nbytes for t in read) < SPARE_NBYTES // 8 and all(has_fixed_size(t.dtype) for t in read):
        drawn_inputs(graph, 0)


def examine(path: Path, tally: Tally, *, memory: bool = False) -> Graph | None:
    """Read one file and what follows from it.

    Raises:
        DefectError: it raised what it should not, took too long, or too much memory.
    """
    graph, line = None, ""
    if memory:
        tracemalloc.start()
    begin = time.process_time()  # of its own: others may use the cores
    try:
        graph = read_model(path)
        follow(graph)
        for signature in graph.source.schema.signatureDefs or () if graph.source else ():
            follow(read_model(path, signature=(signature.signatureKey or b"").decode(errors="replace")))
    except OptimizeError as error:
        line = str(error)
        if error.exit_code != 2 or "\n" in line or len(line) > 2000:
            raise DefectError(f"{error!r}") from error
    except Exception as error:
        raise DefectError(f"{type(error).__name__}: {error}") from error
    finally:
        took_s = time.process_time() - begin
        nbytes = tracemalloc.get_traced_memory()[1] if memory else 0
        tracemalloc.stop()
    tally.slowest_s = max(tally.slowest_s, took_s)
    tally.most_nbytes = max(tally.most_nbytes, nbytes)
    if took_s > CASE_S:
        raise DefectError(f"took {took_s:.1f} s")
    if nbytes > 4 * path.stat().st_size + SPARE_NBYTES:
        raise DefectError(f"took {nbytes} bytes for a file of {path.stat().st_size}")
    tally.refused += bool(line)
    tally.read += not line
    return graph


def fuzz(cases: int, seed: int, keep: Path | None = None) -> Tally:
    """Examine ``cases`` damaged files, in memory where there is such a folder; every 20th with its memory counted.

    Raises:
        DefectError: with the number of the case; its file is left at ``keep``.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:  # noqa: PTH112
        return _fuzz(cases, seed, Path(folder), keep)


def _fuzz(cases: int, seed: int, folder: Path, keep: Path | None) -> Tally:
    path, tally = folder / "case.tflite", Tally()
    seeds = corpus(folder)
    for content in seeds:  # what is imported on the way is no memory of a case
        path.write_bytes(content)
        examine(path, Tally())
    for number, content in enumerate(damaged(seeds, cases, seed)):
        path.write_bytes(content)
        try:
            examine(path, tally, memory=number % 20 == 0)
        except DefectError as error:
            if keep is not None:
                keep.write_bytes(content)
            raise DefectError(f"case {number} of seed {seed}: {error}") from error
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage models and read them.")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="where to leave a case that failed")
    options = parser.parse_args()
    begin = time.monotonic()
    try:
        tally = fuzz(options.cases, options.seed, options.keep)
    except DefectError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(
        f"{options.cases} cases in {time.monotonic() - begin:.0f} s: {tally.refused} refused, {tally.read} read; "
        f"slowest {tally.slowest_s:.3f} s, at most {tally.most_nbytes / 1e6:.2f} MB counted, "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB resident at the peak\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
