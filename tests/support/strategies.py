"""Hypothesis strategies for graphs, platforms, chains of parts and their costs.

The graphs are small but hold what real models hold: branches, several inputs and outputs, tensors read by many,
shared weights, optional inputs left out, operators with several outputs, and outputs that are read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import networkx as nx
import numpy as np
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution

from optimizer.exact.chain_costs import ChainCosts
from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.chain import chain_plan

_KINDS = ("ADD", "CONV_2D", "RELU", "CONCATENATION", "SPLIT", "MyCustomOp")


def tensor(*shape: int, name: str = "t", dtype: str = "float32", constant: bool = False, buffer: int = 0) -> Tensor:
    """Return a tensor of 4, 2 or 1 bytes an element."""
    size = {"float32": 4, "int32": 4, "float16": 2, "int8": 1}[dtype]
    return Tensor(name, shape, dtype, size * prod(max(1, s) for s in shape), constant=constant, buffer=buffer)


def chain_graph(count: int, name: str = "chain") -> Graph:
    """Return ``count`` operators, each of which reads the one before it."""
    tensors = tuple(tensor(4, name=f"t{i}") for i in range(count + 1))
    operators = tuple(Operator("RELU", (i,), (i + 1,)) for i in range(count))
    return Graph(name, tensors, operators, (0,), (count,))


def followers(graph: Graph) -> nx.DiGraph[int]:
    """Return the operators, each with an edge to those that read what it writes."""
    found: nx.DiGraph[int] = nx.DiGraph()
    found.add_nodes_from(range(len(graph.operators)))
    found.add_edges_from((before, o) for o in range(len(graph.operators)) for before in graph.predecessors(o))
    return found


def one_core(core: int) -> Processor:
    """Return a processor of one core."""
    return Processor(f"cpu{core}", "cpu", {f"core{core}": 1.0}, "core", {"cores": (core,), "threads": 1})


def vgg16_graph() -> Graph:
    """Return VGG16's 22 operators: 13 convolutions, 5 poolings, 3 fully connected, a softmax; shapes as published."""
    tensors = [tensor(1, 224, 224, 3, name="image")]
    operators: list[Operator] = []

    def add(kind: str, *shape: int, weights: tuple[int, ...] = ()) -> None:
        reads = [operators[-1].outputs[0] if operators else 0]
        for weight in (weights, weights[:1]) if weights else ():
            reads.append(len(tensors))
            tensors.append(tensor(*weight, name=f"weight{len(tensors)}", constant=True))
        operators.append(Operator(kind, tuple(reads), (len(tensors),)))
        tensors.append(tensor(1, *shape, name=f"{kind.lower()}{len(operators)}"))

    side, channels = 224, 3
    for block in ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3):
        for width in block:
            add("CONV_2D", side, side, width, weights=(width, 3, 3, channels))
            channels = width
        side //= 2
        add("MAX_POOL_2D", side, side, channels)
    for width, features in ((4096, 25088), (4096, 4096), (1000, 4096)):
        add("FULLY_CONNECTED", width, weights=(width, features))
    add("SOFTMAX", 1000)
    return Graph("vgg16", tuple(tensors), tuple(operators), (0,), (operators[-1].outputs[0],))


_SHAPES = st.lists(st.sampled_from((-1, 1, 2, 3)), max_size=4).map(tuple)
_OF_KINDS, _OF_PORTS, _AT_MOST_TWO = st.sampled_from(_KINDS), st.sampled_from((1, 1, 1, 2)), st.integers(0, 2)


@cache
def _below(count: int) -> st.SearchStrategy[int]:
    """Numbers below ``count``; a strategy that was made before takes a fraction of the time of a new one."""
    return st.integers(0, count - 1)


@st.composite
def graphs(draw: st.DrawFn, *, max_operators: int = 7) -> Graph:
    """Graphs of 1 to ``max_operators`` operators in which every operator reads at least one activation."""
    tensors: list[Tensor] = []

    def new(*, constant: bool = False) -> int:
        made = tensor(*draw(_SHAPES), name=f"t{len(tensors)}", constant=constant)
        tensors.append(made)
        return len(tensors) - 1

    def some(among: Sequence[int]) -> list[int]:
        return [among[draw(_below(len(among)))] for _ in range(draw(_AT_MOST_TWO))]

    inputs = [new() for _ in range(1 + draw(_below(2)))]
    weights = [new(constant=True) for _ in range(draw(_AT_MOST_TWO))]
    ready = list(inputs)
    operators = []
    for _ in range(1 + draw(_below(max_operators))):
        recent = ready if draw(st.booleans()) else ready[-2:]  # mostly chains, with skips
        reads = [recent[-1 - draw(_below(len(recent)))], *some([*ready, *weights, -1])]
        writes = [new() for _ in range(draw(_OF_PORTS))]
        operators.append(Operator(draw(_OF_KINDS), tuple(reads), tuple(writes)))
        ready += writes
    read = {i for o in operators for i in o.inputs}
    unread = [i for i in ready if i not in read and i not in inputs]
    outputs = list(dict.fromkeys(unread + some(ready))) or ready[-1:]
    return Graph("drawn", tuple(tensors), tuple(operators), tuple(inputs), tuple(outputs))


@st.composite
def platforms(draw: st.DrawFn, *, max_processors: int = 4) -> Platform:
    """Platforms of at most ``max_processors`` processors, of which some are alike, in any order."""
    classes = draw(st.lists(st.sampled_from(("big", "small", "gpu")), min_size=1, max_size=max_processors))
    processors = tuple(
        Processor(f"p{i}", "gpu" if like == "gpu" else "cpu", {f"core{i}": 1.0}, like) for i, like in enumerate(classes)
    )
    return Platform("drawn", processors)


@st.composite
def chains(draw: st.DrawFn, graph: Graph, platform: Platform) -> Plan:
    """Chains of parts of any length on any processors, not canonical."""
    count = len(graph.operators)
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    names = [p.name for p in platform.processors]
    return chain_plan(graph, cuts, [names[draw(_below(len(names)))] for _ in range(len(cuts) + 1)])


def parameters(distributions: Mapping[str, BaseDistribution]) -> st.SearchStrategy[dict[str, Any]]:
    """Values of all parameters of a space."""

    def values(of: Any) -> st.SearchStrategy[Any]:
        return st.sampled_from(of.choices) if hasattr(of, "choices") else st.integers(of.low, of.high)

    return st.fixed_dictionaries({name: values(of) for name, of in distributions.items()})


@st.composite
def partitions(draw: st.DrawFn, graph: Graph, platform: Platform) -> Plan:
    """Stages of any operators in any order; many are no plans that could run."""
    count = len(graph.operators)
    labels = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    stages = [tuple(o for o in range(count) if labels[o] == label) for label in draw(st.permutations(range(4)))]
    names = [p.name for p in platform.processors]
    rows = [{"operators": [[o, o + 1] for o in s], "processor": draw(st.sampled_from(names))} for s in stages if s]
    data: dict[str, Any] = {"schema_version": 1, "graph_digest": graph.digest, "dispatch": "static", "stages": rows}
    return Plan.from_json(data)


@st.composite
def shared_platforms(draw: st.DrawFn) -> Platform:
    """All cores of a small machine together, each alone, and processors that take half of a core, in any order."""
    cores = draw(st.integers(1, 3))
    processors = [Processor("all", "cpu", {f"core{i}": 1.0 for i in range(cores)}, "all")]
    processors += [Processor(f"one{i}", "cpu", {f"core{i}": 1.0}, "one") for i in range(cores)]
    processors += [Processor(f"half{i}", "cpu", {"core0": 0.5}, "half") for i in range(2)]
    return Platform("drawn", tuple(draw(st.permutations(processors))))


@st.composite
def placements(draw: st.DrawFn, graph: Graph, platform: Platform, *, labels: int = 4) -> Plan:
    """Plans that can run, of any shape: stages need not be contiguous, in any order that the graph allows.

    Operators are thrown together at random; what then depends on each other in a circle becomes one stage.
    """
    count = len(graph.operators)
    drawn = draw(st.lists(st.integers(0, labels - 1), min_size=count, max_size=count))
    quotient: nx.DiGraph[int] = nx.DiGraph()
    quotient.add_nodes_from(drawn)
    quotient.add_edges_from(
        (drawn[a], drawn[b]) for b in range(count) for a in graph.predecessors(b) if drawn[a] != drawn[b]
    )
    parts = nx.condensation(quotient)
    waiting = {part: set(parts.predecessors(part)) for part in parts}
    names = [p.name for p in platform.processors]
    stages = []
    while waiting:
        ready = [p for p, needs in waiting.items() if not needs & waiting.keys()]
        part = ready[draw(_below(len(ready)))]
        del waiting[part]
        members = parts.nodes[part]["members"]
        operators = tuple(o for o in range(count) if drawn[o] in members)
        stages.append(Stage(operators, names[draw(_below(len(names)))]))
    return Plan(graph.digest, tuple(stages))


@st.composite
def chain_costs(draw: st.DrawFn, platform: Platform, count: int, *, refusals: bool = True) -> ChainCosts:
    """Costs of ``count`` operators, with ties and unsupported operators; alike processors cost alike."""
    processors = len(platform.processors)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from((1, 3, 1000)))  # few levels give ties
    leader = [next(i for i, q in enumerate(platform.processors) if q.like == p.like) for p in platform.processors]
    operator_s = rng.integers(0, scale, (processors, count), endpoint=True)[leader] * 1e-3
    if refusals:
        operator_s[rng.random((processors, count))[leader] < draw(st.sampled_from((0.0, 0.1, 0.5)))] = np.inf
    overhead_s = rng.integers(0, scale, processors, endpoint=True)[leader] * 1e-4
    between = rng.integers(0, scale, (count, processors, processors), endpoint=True) * 1e-4
    within = rng.integers(0, scale, (count, processors), endpoint=True)[:, leader] * 1e-5
    transfer_s = between[:, leader][:, :, leader]
    transfer_s[:, np.arange(processors), np.arange(processors)] = within
    arrays = (np.asarray(array, dtype=np.float64) for array in (operator_s, overhead_s, transfer_s))
    return ChainCosts(platform, *arrays)
