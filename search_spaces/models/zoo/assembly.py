"""Construction of models with deferred weights: the structure, and how each weight is drawn.

Weights are He-normal (He et al. 2015, arXiv:1502.01852): standard deviation ``sqrt(2 / fan_in)``. Each tensor has its
own random stream, seeded by the names of model and tensor, so a weight depends neither on the order of layers nor on
other tensors. It is made when it is written, so the peak memory of building is one tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.models.dtypes import DTYPES, enumerators, tensor_nbytes
from search_spaces.models.flatbuffer import ALIGNMENT, Blobs, pack_header, write_model
from search_spaces.models.litert import VERSION, plain_options
from search_spaces.models.operators import made_operator

SPECTRUM_RATE = 8.0  # singular values fall as exp(-8 k / n): a quarter of the rank holds 98 % of the energy
SPECTRUM_CHANNELS = 16  # axes with fewer channels keep full rank

Array = NDArray[Any]

_KINDS = enumerators(schema.BuiltinOperator)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the model being built: its index and its shape (N, H, W, C or fewer dimensions)."""

    index: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of normally distributed weights.

    Attributes:
        name: of the tensor.
        shape: outputs first and inputs last, for those that ``low_rank`` may apply to.
        std: standard deviation.
        mean: of the distribution.
        low_rank: whether singular values along the first and the last axis fall exponentially (``+spectrum``).
        half: whether it is stored as float16.
    """

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    low_rank: bool = False
    half: bool = False

    def make(self, model: str) -> Array:
        """Return the weights of this tensor in a model of this name."""
        digest = hashlib.sha256(f"{model}/{self.name}".encode()).digest()
        random = np.random.default_rng(np.random.SeedSequence(int.from_bytes(digest, "little")))
        values: Array = random.standard_normal(self.shape, np.float32)
        if self.low_rank:
            for axis in (0, -1):
                values = _decaying(values, axis, random)
        values *= np.float32(self.std)
        if self.mean:
            values += np.float32(self.mean)
        return values.astype(np.float16) if self.half else values


@dataclass(frozen=True, slots=True)
class Draft:
    """A model with deferred weights.

    Attributes:
        name: the seed of its weights.
        schema: the structure, a ``ModelT``; buffers of weights are empty.
        weights: buffer number → how its weights are drawn.
    """

    name: str
    schema: Any
    weights: Mapping[int, Weight]

    @property
    def parameters(self) -> int:
        """Number of weights, biases included."""
        return sum(prod(w.shape) for w in self.weights.values())

    @property
    def nbytes(self) -> int:
        """Size of the file that :meth:`write` makes."""
        size = {b: prod(w.shape) * (2 if w.half else 4) for b, w in self.weights.items()}
        size |= {i: len(b.data) for i, b in enumerate(self.schema.buffers) if b.data is not None}
        end = len(pack_header(self.schema, size)[0])
        for _, nbytes in sorted(size.items()):
            end = -(-(end + 4) // ALIGNMENT) * ALIGNMENT + nbytes
        return end

    def graph(self) -> Graph:
        """Return the graph of the written file, without writing it."""
        sub = self.schema.subgraphs[0]
        kinds = [_KINDS[code.builtinCode] for code in self.schema.operatorCodes]
        operators = tuple(
            Operator(kinds[o.opcodeIndex], tuple(o.inputs), tuple(o.outputs), plain_options(o)) for o in sub.operators
        )
        tensors = []
        for tensor in sub.tensors:
            shape, dtype = tuple(tensor.shape), DTYPES[tensor.type]
            nbytes = tensor_nbytes(shape, dtype)
            tensors.append(Tensor(tensor.name, shape, dtype, nbytes, bool(tensor.buffer), buffer=tensor.buffer))
        return Graph(self.name, tuple(tensors), operators, tuple(sub.inputs), tuple(sub.outputs))

    def write(self, path: Path) -> None:
        """Make the weights and write the model; the same bytes each time.

        Raises:
            UsageError: the folder cannot be written, or the disk is full.
        """
        write_model(self.schema, Blobs(self.weights, lambda buffer: self.weights[buffer].make(self.name)), path)


class Assembly:
    """A model under construction, operator by operator; :class:`~.builder.Builder` adds layers to it.

    Args:
        name: of the model; also the seed of its weights.
        low_rank: whether matrices and filters get a decaying spectrum.
    """

    def __init__(self, name: str, *, low_rank: bool = False) -> None:
        self._name = name
        self._low_rank = low_rank
        self._graph = schema.SubGraphT(name="main", tensors=[], operators=[], inputs=[], outputs=[])
        self._model = schema.ModelT(
            version=VERSION, description=name, operatorCodes=[], subgraphs=[self._graph], buffers=[schema.BufferT()]
        )
        self._weights: dict[int, Weight] = {}

    def input(self, shape: Sequence[int], name: str = "input", dtype: str = "FLOAT32") -> Value:
        """Add an input of the model."""
        value = self._tensor(name, shape, dtype)
        self._graph.inputs.append(value.index)
        return value

    def weight(
        self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0, *, matrix: bool = False
    ) -> Value:
        """Add a constant of normally distributed float32; a ``matrix`` may be low-rank (``+spectrum``)."""
        self._model.buffers.append(schema.BufferT())
        buffer = len(self._model.buffers) - 1
        self._weights[buffer] = Weight(name, shape, std, mean, matrix and self._low_rank)
        return self._tensor(name, shape, buffer=buffer)

    def constant(self, name: str, value: Array) -> Value:
        """Add a constant of given int32 or float32 numbers."""
        self._model.buffers.append(schema.BufferT(data=np.ascontiguousarray(value).reshape(-1).view(np.uint8)))
        return self._tensor(name, value.shape, value.dtype.name.upper(), len(self._model.buffers) - 1)

    def operator(
        self,
        kind: str,
        inputs: Sequence[Value],
        shape: Sequence[int],
        name: str,
        options: Any = None,
        dtype: str = "FLOAT32",
    ) -> Value:
        """Add an operator with one output, which gets the operator's name."""
        output = self._tensor(name, shape, dtype)
        read, codes = [v.index for v in inputs], self._model.operatorCodes
        self._graph.operators.append(made_operator(codes, kind, read, [output.index], options))
        return output

    def finish(self, *outputs: Value) -> Draft:
        """Return the model with these outputs; the builder must not be used afterwards."""
        self._graph.outputs = [v.index for v in outputs]
        signature = schema.SignatureDefT(signatureKey="serving_default", subgraphIndex=0)
        signature.inputs = [self._signature_entry(i) for i in self._graph.inputs]
        signature.outputs = [self._signature_entry(i) for i in self._graph.outputs]
        self._model.signatureDefs = [signature]
        return Draft(self._name, self._model, self._weights)

    def _signature_entry(self, index: int) -> Any:
        return schema.TensorMapT(name=self._graph.tensors[index].name, tensorIndex=index)

    def _tensor(self, name: str, shape: Sequence[int], dtype: str = "FLOAT32", buffer: int = 0) -> Value:
        kind = getattr(schema.TensorType, dtype)
        self._graph.tensors.append(schema.TensorT(name=name, shape=list(shape), type=kind, buffer=buffer, hasRank=True))
        return Value(len(self._graph.tensors) - 1, tuple(shape))


def _decaying(values: Array, axis: int, random: np.random.Generator) -> Array:
    """Scale the directions of an axis by ``exp(-rate k / n)``, in a random orthogonal basis; the energy is kept.

    The basis is a cosine transform with random signs: dense, exactly orthogonal, and fast for 25,088 channels.
    """
    from scipy.fft import dct

    count = values.shape[axis]
    if count < SPECTRUM_CHANNELS:
        return values
    along = [1] * values.ndim
    along[axis] = count
    scale = np.exp(-SPECTRUM_RATE * np.arange(count) / count)
    scale /= np.sqrt(np.mean(scale**2))
    values *= scale.astype(np.float32).reshape(along)
    values = dct(values, axis=axis, norm="ortho", overwrite_x=True)
    values *= random.choice(np.array([-1, 1], np.float32), count).reshape(along)
    return values
