"""Looking at a model: branch groups of DenseNet121 in 100 ms, linear in operators; reading and listing in 1 s."""

from __future__ import annotations

from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from optimizer.report.console import make_console
from optimizer.report.graph_page import render_page
from optimizer.tools.inspect import inspect_graph, render
from search_spaces.core.graph import Graph, Operator
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.models.zoo import draft
from search_spaces.spaces.branches import branch_groups, walk
from tests.support.strategies import chain_graph, tensor

_BLOCKS = (6, 12, 24, 16)  # layers of DenseNet121's blocks (Huang et al. 2017, arXiv:1608.06993, table 1)


def dense_graph(*, shortcuts: bool) -> Graph:
    """Return the operators of DenseNet121: each layer reads the sum of all before it, or each of them anew."""
    reads: list[tuple[int, ...]] = [(), (0,)]

    def add(*before: int) -> int:
        reads.append(before)
        return len(reads) - 1

    last = 1
    for layers in _BLOCKS:
        earlier = [last]
        for _ in range(layers):
            joined = last if shortcuts else add(*earlier) if len(earlier) > 1 else last
            new = add(add(add(add(joined))))  # scale, shift, 1x1, 3x3
            earlier.append(new)
            last = add(joined, new) if shortcuts else new
        last = add(add(add(last)))
    tensors = tuple(tensor(1, 8) for _ in range(len(reads) + 1))
    operators = tuple(Operator("OP", tuple(b + 1 for b in before) or (0,), (i + 1,)) for i, before in enumerate(reads))
    return Graph("dense", tensors, operators, (0,), (len(reads),))


@pytest.mark.parametrize("shortcuts", [True, False], ids=["joined at every layer", "every layer reads all"])
def test_densenet121(benchmark: BenchmarkFixture, shortcuts: bool) -> None:
    graph = dense_graph(shortcuts=shortcuts)
    assert len(graph.operators) >= 300
    assert benchmark(branch_groups, graph) == ()
    assert _median_s(benchmark) < 0.1


@pytest.mark.parametrize("count", [1000, 10_000])
def test_chain(benchmark: BenchmarkFixture, count: int) -> None:
    graph = chain_graph(count)
    assert benchmark(branch_groups, graph) == ()
    benchmark.extra_info["us_per_operator"] = _median_s(benchmark) / count * 1e6


def test_groups_nested_a_thousand_deep(benchmark: BenchmarkFixture) -> None:
    depth = 1000
    reads: list[tuple[int, ...]] = [()]
    sides = []
    for _ in range(depth):
        entry = len(reads) - 2 if len(reads) > 1 else 0
        sides.append(len(reads) + 1)
        reads += [(entry,), (entry,)]
    last = len(reads) - 2
    for side in reversed(sides):
        reads.append((last, side))
        last = len(reads) - 1
    tensors = tuple(tensor(1, 8) for _ in range(len(reads) + 1))
    operators = tuple(Operator("OP", tuple(b + 1 for b in before) or (0,), (i + 1,)) for i, before in enumerate(reads))
    graph = Graph("nested", tensors, operators, (0,), (len(reads),))
    groups = benchmark(branch_groups, graph)
    assert sum(1 for _ in walk(groups)) == depth


@pytest.mark.parametrize("name", ["resnet152", "densenet121", "regnet_y_32gf"])
def test_read_and_list(benchmark: BenchmarkFixture, name: str) -> None:
    source = load(name).source
    assert source is not None
    console = make_console(stderr=True)
    console.quiet = True

    def read_and_list() -> None:
        console.print(render(inspect_graph(read_model(source.path)), console.width))

    benchmark(read_and_list)
    assert _median_s(benchmark) < 1


@pytest.mark.parametrize("name", ["resnet152", "densenet121", "vit_b16"])
def test_draw(benchmark: BenchmarkFixture, name: str) -> None:
    found = inspect_graph(draft(name).graph())
    benchmark.extra_info["nbytes"] = len(benchmark(render_page, found))
    assert _median_s(benchmark) < 1


def _median_s(benchmark: Any) -> float:
    """Return the median in seconds; the fixture's statistics have no types."""
    return float(benchmark.stats.stats.median)
