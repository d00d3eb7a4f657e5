"""Kernels as the runtime tells them, and the operators that they run."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evaluators.cost_model.calibrate_kernels import LoadedOpenVino, middle
from evaluators.cost_model.calibrate_time import operator_seconds, run_order
from evaluators.cost_model.features import operator_features
from search_spaces.core.graph import Graph, Operator
from tests.support import strategies


@given(strategies.graphs(), st.sets(st.sampled_from(["ADD", "CONV_2D", "RELU", "CONCATENATION"])))
def test_what_runs_in_turns_on_two_sides_has_its_inputs(graph: Graph, own: set[str]) -> None:
    order = run_order(graph, own)
    assert sorted(order) == list(range(len(graph.operators)))
    place = {operator: i for i, operator in enumerate(order)}
    assert all(place[p] < place[o] for o in order for p in graph.predecessors(o))
    turns = sum((graph.operators[a].kind in own) != (graph.operators[b].kind in own) for a, b in pairwise(order))
    as_it_is = sum((a.kind in own) != (b.kind in own) for a, b in pairwise(graph.operators))
    assert turns <= as_it_is + 1
    assert run_order(graph, ()) == list(range(len(graph.operators)))


def two_branches() -> Graph:
    """An operator that only the interpreter runs, in the first of two branches."""
    tensors = tuple(strategies.tensor(1, 8, 8, 4, name=f"t{i}") for i in range(5))
    operators = (
        Operator("RESIZE_NEAREST_NEIGHBOR", (0,), (1,)),
        Operator("LOGISTIC", (1,), (2,)),
        Operator("LOGISTIC", (0,), (3,)),
        Operator("ADD", (2, 3), (4,)),
    )
    return Graph("branches", tensors, operators, (0,), (4,))


def test_kernels_are_told_apart_though_the_interpreter_runs_some() -> None:
    graph = two_branches()
    features = operator_features(graph)
    names = ["RESIZE_NEAREST_NEIGHBOR", "Sigmoid (NC, F32)", "Sigmoid (NC, F32)", "Add (ND, F32)"]
    assert list(operator_seconds(features, names, [1.0, 2.0, 3.0, 4.0], graph)) == [1.0, 2.0, 3.0, 4.0]
    assert np.isnan(operator_seconds(features, names, [1.0, 2.0, 3.0, 4.0])).all()
    late = ["LOGISTIC", *names[:1], "Add (ND, F32)"]  # one LOGISTIC was merged: they cannot be told apart
    found = operator_seconds(features, late, [1.0, 2.0, 3.0], graph)
    assert list(np.isnan(found)) == [False, True, True, False]


@given(st.lists(st.lists(st.floats(1e-7, 1.0), min_size=3, max_size=3), min_size=1, max_size=9))
def test_the_usual_times_of_kernels_add_up_to_the_usual_time_of_the_whole(runs: list[list[float]]) -> None:
    whole = middle([[sum(run)] for run in runs])[0]
    assert np.isclose(sum(middle(runs)), whole)
    assert min(map(sum, runs)) <= whole * (1 + 1e-9)
    assert whole <= max(map(sum, runs)) * (1 + 1e-9)


class _Runtime:
    def __init__(self, model: _Counting) -> None:
        self.kernels = model.kernels_of


class _Counting(LoadedOpenVino):
    """Two kernels, of which the second is fused; its first run is slow, and reports are as OpenVINO's."""

    def __init__(self, durations_us: list[float]) -> None:
        self._durations_us, self._sum_us = durations_us, 0
        self._compiled, self._runtime = None, _Runtime(self)

    def run(self) -> float:
        took_us = self._durations_us[self._runs]
        self._runs, self._sum_us = self._runs + 1, self._sum_us + int(took_us)
        return took_us * 1e-6

    def kernels_of(self, _: object) -> list[tuple[str, float]]:
        return [("Convolution", self._sum_us // max(1, self._runs) * 1e-6), ("Relu", 0.0)]


@given(st.floats(1e3, 1e5), st.lists(st.floats(10.0, 1000.0), min_size=8, max_size=60), st.integers(1, 4))
def test_kernels_of_openvino_are_the_last_runs(first: float, rest: list[float], warm: int) -> None:
    model = _Counting([first, *rest])
    for _ in range(warm):
        model.run()
    runs = len(rest) + 1 - warm
    found = model.kernels(runs)
    usual_us = middle([[took] for took in rest[warm - 1 :]])[0]
    assert [name for name, _ in found] == ["Convolution", "Relu"]
    assert abs(found[0][1] * 1e6 - usual_us) <= 1.0 + 1.5 * (warm + 1) / runs + 0.01 * usual_us
    assert found[0][1] >= 1e-6
    assert found[1][1] == 0.0
