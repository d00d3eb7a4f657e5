"""A model as an immutable graph of operators and tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from search_spaces.core.errors import ModelError, absent, shown

if TYPE_CHECKING:
    from search_spaces.models.source import ModelSource

_STATEFUL = frozenset({"ASSIGN_VARIABLE", "HASHTABLE_IMPORT", "READ_VARIABLE", "VAR_HANDLE"})


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the model's main subgraph.

    Attributes:
        name: as in the file; need not be unique.
        shape: dimensions; -1 where the file leaves one open.
        dtype: element type in lower case, as the schema names it (``float32``, ``int8``, …).
        nbytes: size of the tensor with open dimensions counted as 1.
        constant: whether it has the same value in every inference: the file holds it, or operators compute it from
            such tensors alone (a float16 weight that is dequantised).
        variable: whether it keeps state between invocations.
        buffer: index of the file's buffer that holds a constant's value; 0 where there is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    constant: bool = False
    variable: bool = False
    buffer: int = 0


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator; its index in ``Graph.operators`` is its identity and a topological position.

    An operator is placed as a whole. Operators of the file that cannot be separated, because they share state or a
    tensor of unknown size crosses between them, are one operator here, of kind ``GROUP``.

    Attributes:
        kind: the schema's name (``CONV_2D``), or the custom operator's own name.
        inputs: tensor indices, -1 for an optional input left out.
        outputs: tensor indices.
        options: the builtin options that affect cost (strides, filter sizes, activation, …), plain values.
        parts: the operators of a group in the order of execution; empty for any other operator.
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Operator, ...] = ()

    def flat(self) -> tuple[Operator, ...]:
        """Return the operators that a group is made of, or the operator itself."""
        return self.parts or (self,)


@dataclass(frozen=True, slots=True)
class Boundary:
    """The tensors that cross the border of a set of operators, as indices in ascending order.

    Attributes:
        inputs: activations that the set reads and does not produce; variable tensors are not activations.
        outputs: activations that it produces and that others, or the caller, need.
        constants: weights that it reads.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[int, ...]


class Derived(dict[str, Any]):
    """What is made from a graph and kept with it; a copy of the graph begins without."""

    def __reduce__(self) -> tuple[type[Derived], tuple[()]]:
        return Derived, ()


@dataclass(frozen=True, slots=True)
class Graph:
    """A model: tensors, operators in topological order, and the tensors that enter and leave.

    Operators that read only constants are left out: their outputs count as constants, and they are copied into every
    stage that reads one.

    Attributes:
        name: of the model, for people.
        tensors, operators: addressed by their index.
        inputs, outputs: tensor indices in the order of the model's signature.
        source: the file that holds the weights; not part of equality or digest.
        views: tensor → the tensor whose memory it shares, and its offset there in bytes (see ``rewrites/views.py``).
        digest: SHA-256 (hex) of the structure: operators, options, tensors, inputs and outputs, not the weights.
        producer: tensor index → operator that writes it (inputs and constants are absent).
        consumers: tensor index → operators that read it, ascending.
        derived: what others keep as long as this graph, by a name of theirs.

    Raises:
        ModelError: an index out of range, a tensor written twice, or operators out of topological order.
    """

    name: str
    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    source: ModelSource | None = field(default=None, compare=False, repr=False)
    views: Mapping[int, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)
    digest: str = field(init=False, repr=False)
    producer: Mapping[int, int] = field(init=False, repr=False, compare=False)
    consumers: Mapping[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    derived: Derived = field(default_factory=Derived, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        producer, consumers = self._validate()
        object.__setattr__(self, "producer", producer)
        object.__setattr__(self, "consumers", consumers)
        object.__setattr__(self, "digest", self._structure_digest())

    def _validate(self) -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
        size = len(self.tensors)
        for index in (*self.inputs, *self.outputs):
            if not 0 <= index < size:
                raise ModelError(f"model {self.name!r}: input or output refers to {absent('tensor', index, size)}")
        given = set(self.inputs)
        ready = given | {i for i, t in enumerate(self.tensors) if t.constant or t.variable}
        producer: dict[int, int] = {}
        consumers: dict[int, list[int]] = {}
        for position, operator in enumerate(self.operators):
            for index in operator.inputs:
                if index == -1:
                    continue
                if not 0 <= index < size:
                    raise ModelError(f"model {self.name!r}: operator {position} reads {absent('tensor', index, size)}")
                if index not in ready:
                    raise ModelError(
                        f"model {self.name!r}: operator {position} ({operator.kind}) reads tensor {index} "
                        f"({shown(self.tensors[index].name)}) before any operator writes it"
                    )
                readers = consumers.setdefault(index, [])
                if not readers or readers[-1] != position:
                    readers.append(position)
            for index in operator.outputs:
                if not 0 <= index < size:
                    raise ModelError(f"model {self.name!r}: operator {position} writes {absent('tensor', index, size)}")
                if index in producer or index in given or self.tensors[index].constant:
                    raise ModelError(f"model {self.name!r}: operator {position} writes tensor {index} a second time")
                producer[index] = position
                ready.add(index)
        for index in self.outputs:
            if index not in producer and index not in given:
                raise ModelError(f"model {self.name!r}: no operator writes output tensor {index}")
        return producer, {index: tuple(readers) for index, readers in consumers.items()}

    def _structure_digest(self) -> str:
        structure = [
            [[t.name, t.shape, t.dtype, t.constant, t.variable] for t in self.tensors],
            [[[p.kind, p.inputs, p.outputs, sorted(p.options.items())] for p in o.flat()] for o in self.operators],
            self.inputs,
            self.outputs,
        ]
        return hashlib.sha256(json.dumps(structure, separators=(",", ":"), default=str).encode()).hexdigest()

    def boundary(self, operators: Iterable[int]) -> Boundary:
        """Return the tensors that cross the border of a set of operators."""
        inside = set(operators)
        reads = {i for o in inside for i in self.operators[o].inputs if i != -1}
        writes = {i for o in inside for i in self.operators[o].outputs}
        wanted, given = set(self.outputs), set(self.inputs)
        return Boundary(
            inputs=tuple(sorted(i for i in reads - writes if i in self.producer or i in given)),
            outputs=tuple(
                sorted(i for i in writes if i in wanted or any(c not in inside for c in self.consumers.get(i, ())))
            ),
            constants=tuple(sorted(i for i in reads if self.tensors[i].constant)),
        )

    def predecessors(self, operator: int) -> set[int]:
        """Return the operators whose outputs ``operator`` reads."""
        return {self.producer[i] for i in self.operators[operator].inputs if i in self.producer}

    @property
    def stateful(self) -> bool:
        """Whether an inference may depend on earlier ones; operators that call subgraphs count as stateful."""
        parts = (part for operator in self.operators for part in operator.flat())
        return any(t.variable for t in self.tensors) or any(p.kind in _STATEFUL or "calls" in p.options for p in parts)

    @property
    def activation_tensors(self) -> tuple[int, ...]:
        """Tensors computed at run time, the inputs included, ascending."""
        return tuple(sorted({*self.inputs, *self.producer}))
