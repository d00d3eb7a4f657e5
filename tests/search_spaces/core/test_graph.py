import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.core.errors import ModelError
from search_spaces.core.graph import Graph, Operator
from tests.support.sentences import fails
from tests.support.strategies import chain_graph, graphs, tensor


@given(graphs())
def test_producers_and_consumers_say_what_the_operators_say(graph: Graph) -> None:
    for index in range(len(graph.tensors)):
        assert graph.consumers.get(index, ()) == tuple(i for i, o in enumerate(graph.operators) if index in o.inputs)
        writers = [i for i, o in enumerate(graph.operators) if index in o.outputs]
        assert writers == ([graph.producer[index]] if index in graph.producer else [])


@given(graphs())
def test_operators_are_in_topological_order(graph: Graph) -> None:
    assert all(before < o for o in range(len(graph.operators)) for before in graph.predecessors(o))


@given(graphs(), st.data())
def test_what_leaves_one_side_of_a_border_enters_the_other_or_leaves_the_model(
    graph: Graph, data: st.DataObject
) -> None:
    everything = set(range(len(graph.operators)))
    inside = data.draw(st.sets(st.sampled_from(sorted(everything))))
    here, there = graph.boundary(inside), graph.boundary(everything - inside)
    assert set(here.outputs) <= set(there.inputs) | set(graph.outputs)
    assert set(here.inputs) <= set(there.outputs) | set(graph.inputs)
    assert not any(graph.tensors[i].constant for i in (*here.inputs, *here.outputs))
    assert all(graph.tensors[i].constant for i in here.constants)


@given(graphs())
def test_the_whole_graph_borders_on_its_inputs_and_outputs(graph: Graph) -> None:
    border = graph.boundary(range(len(graph.operators)))
    assert set(border.inputs) == {i for i in graph.inputs if i in graph.consumers}
    assert set(border.outputs) == {i for i in graph.outputs if i in graph.producer}


@given(graphs(), graphs())
def test_digest_and_equality_agree(one: Graph, other: Graph) -> None:
    again = Graph(one.name, one.tensors, one.operators, one.inputs, one.outputs)
    assert again == one
    assert again.digest == one.digest
    assert (one.digest == other.digest) == (one == other)


def test_the_digest_sees_options_and_not_the_model_name() -> None:
    tensors = (tensor(1), tensor(1))
    plain = Graph("a", tensors, (Operator("RELU", (0,), (1,)),), (0,), (1,))
    renamed = Graph("b", tensors, (Operator("RELU", (0,), (1,)),), (0,), (1,))
    strided = Graph("a", tensors, (Operator("RELU", (0,), (1,), {"stride_h": 2}),), (0,), (1,))
    assert plain.digest == renamed.digest
    assert plain.digest != strided.digest


@pytest.mark.parametrize(
    ("operators", "inputs", "outputs"),
    [
        ([((7,), (1,))], (0,), (1,)),
        ([((0,), (7,))], (0,), (1,)),
        ([((0,), (1,)), ((0,), (1,))], (0,), (1,)),
        ([((0,), (0,))], (0,), (0,)),
        ([((2,), (1,)), ((0,), (2,))], (0,), (1,)),
        ([((0,), (1,))], (9,), (1,)),
        ([((0,), (1,))], (-1,), (1,)),
        ([((0,), (1,))], (0,), (2,)),
        ([((-2,), (1,))], (0,), (1,)),
    ],
)
def test_a_graph_that_cannot_be_is_refused(
    operators: list[tuple[tuple[int, ...], tuple[int, ...]]],
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
) -> None:
    with fails(ModelError):
        Graph("bad", (tensor(1),) * 3, tuple(Operator("RELU", *o) for o in operators), inputs, outputs)


def test_a_tensor_read_twice_by_one_operator_has_one_consumer() -> None:
    graph = Graph("square", (tensor(2), tensor(2)), (Operator("MUL", (0, 0), (1,)),), (0,), (1,))
    assert graph.consumers[0] == (0,)


def test_a_model_may_hand_its_input_through() -> None:
    graph = chain_graph(1)
    through = Graph("through", graph.tensors, graph.operators, (0,), (0, 1))
    assert through.boundary([0]).outputs == (1,)
