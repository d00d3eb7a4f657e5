"""Several models as one graph of disjoint components, so that one plan places all of them (seed 001)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from search_spaces.core.errors import UsageError
from search_spaces.core.graph import Graph, Operator, Tensor


@dataclass(frozen=True, slots=True)
class Component:
    """One model within a joined graph.

    Attributes:
        name: unique in the joined graph.
        graph: the model's own graph, whose ``source`` is its file.
        first_operator: index of its operator 0 in the joined graph.
    """

    name: str
    graph: Graph
    first_operator: int

    @property
    def operators(self) -> range:
        """Its operators in the joined graph."""
        return range(self.first_operator, self.first_operator + len(self.graph.operators))

    def own(self, operators: Sequence[int]) -> tuple[int, ...]:
        """Return the model's own indices of operators of the joined graph."""
        return tuple(o - self.first_operator for o in operators)


@dataclass(frozen=True)
class JoinedGraph:
    """Models that share nothing, as one graph.

    Attributes:
        graph: has no file of its own: stages are cut from the components' graphs.
        components: in the order of their operators.
    """

    graph: Graph
    components: tuple[Component, ...]

    @cached_property
    def component_of(self) -> tuple[int, ...]:
        """For each operator the position of its component."""
        return tuple(i for i, component in enumerate(self.components) for _ in component.operators)


def merge(name: str, models: Sequence[tuple[str, Graph]]) -> JoinedGraph:
    """Return models as one graph; tensor names are prefixed with the name of their component.

    Args:
        models: name and graph of each component; a graph may appear several times.

    Raises:
        UsageError: there is no model, or two components have one name.
    """
    if not models:
        raise UsageError(f"{name!r} joins no models")
    if len({part for part, _ in models}) != len(models):
        raise UsageError(f"{name!r} joins two models of one name")
    components, tensors, operators = list[Component](), list[Tensor](), list[Operator]()
    inputs, outputs = list[int](), list[int]()
    views: dict[int, tuple[int, int]] = {}
    for part, graph in models:
        shift = len(tensors)
        components.append(Component(part, graph, len(operators)))
        tensors += [replace(t, name=f"{part}/{t.name}") for t in graph.tensors]
        operators += [_shifted(o, shift) for o in graph.operators]
        inputs += [t + shift for t in graph.inputs]
        outputs += [t + shift for t in graph.outputs]
        views |= {t + shift: (root + shift, first) for t, (root, first) in graph.views.items()}
    joined = Graph(name, tuple(tensors), tuple(operators), tuple(inputs), tuple(outputs), views=views)
    return JoinedGraph(joined, tuple(components))


def _shifted(operator: Operator, shift: int) -> Operator:
    return replace(
        operator,
        inputs=tuple(t if t == -1 else t + shift for t in operator.inputs),
        outputs=tuple(t + shift for t in operator.outputs),
        parts=tuple(_shifted(part, shift) for part in operator.parts),
    )
