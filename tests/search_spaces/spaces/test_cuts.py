import itertools

from hypothesis import given
from hypothesis import strategies as st

from search_spaces.core.errors import UsageError
from search_spaces.core.graph import Graph, Operator
from search_spaces.core.intensity import operator_costs
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.cuts import CutPoint, cut_points, every_layer, layer_length, layer_type, parameter_count
from tests.support.sentences import fails
from tests.support.strategies import chain_graph, graphs, tensor, vgg16_graph


@given(graphs(max_operators=10))
def test_what_crosses_is_what_the_rest_of_the_graph_reads(graph: Graph) -> None:
    count = len(graph.operators)
    expected = []
    for position in range(1, count):
        tensors = graph.boundary(range(position, count)).inputs
        expected.append(CutPoint(position, tensors, sum(graph.tensors[t].nbytes for t in tensors)))
    assert cut_points(graph) == tuple(expected)


@given(graphs(max_operators=10), st.data())
def test_every_criterion_gives_cuts_of_the_parts_asked_for(graph: Graph, data: st.DataObject) -> None:
    count = len(graph.operators)
    parts = data.draw(st.integers(1, count))
    for cuts in (layer_length(graph, parts), parameter_count(graph, parts)):
        assert len(cuts) == parts - 1
        chain_plan(graph, cuts, ["cpu"] * parts).validate(graph)
    chain_plan(graph, every_layer(graph), ["cpu"] * count).validate(graph)
    assert len(layer_type(graph)) <= 1


@given(graphs(max_operators=8), st.data())
def test_parameter_count_is_the_most_equal_then_the_cheapest_to_transfer(graph: Graph, data: st.DataObject) -> None:
    count = len(graph.operators)
    parts = data.draw(st.integers(1, min(4, count)))
    weights = [c.parameters for c in operator_costs(graph)]
    crossing = {c.position: c.nbytes for c in cut_points(graph)}

    def worth(cuts: tuple[int, ...]) -> tuple[int, int]:
        borders = (0, *cuts, count)
        squares = sum(sum(weights[a:b]) ** 2 for a, b in itertools.pairwise(borders))
        return squares, sum(crossing[c] for c in cuts)

    best = min(worth(cuts) for cuts in itertools.combinations(range(1, count), parts - 1))
    assert worth(parameter_count(graph, parts)) == best


@given(st.integers(1, 60), st.data())
def test_layer_length_is_even(count: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, count))
    cuts = layer_length(chain_graph(count), parts)
    sizes = {b - a for a, b in itertools.pairwise((0, *cuts, count))}
    assert max(sizes) - min(sizes) <= 1


def test_the_criteria_of_seed_000_on_vgg16() -> None:
    graph = vgg16_graph()
    first_connected = 18
    assert graph.operators[first_connected].kind == "FULLY_CONNECTED"
    assert layer_type(graph) == (first_connected,)
    assert [layer_length(graph, k) for k in (2, 3, 4)] == [(11,), (7, 14), (5, 11, 16)]
    # fc6 alone holds 103 of 138 million parameters
    assert [parameter_count(graph, k) for k in (2, 3, 4)] == [(19,), (18, 19), (18, 19, 20)]
    assert every_layer(graph) == tuple(range(1, 22))


def test_layer_type_needs_convolutions_and_then_fully_connected_ones() -> None:
    def with_kinds(*kinds: str) -> Graph:
        plain = chain_graph(len(kinds))
        operators = tuple(Operator(k, o.inputs, o.outputs) for k, o in zip(kinds, plain.operators, strict=True))
        return Graph("kinds", plain.tensors, operators, plain.inputs, plain.outputs)

    assert layer_type(with_kinds("CONV_2D", "RELU")) == ()
    assert layer_type(with_kinds("FULLY_CONNECTED", "SOFTMAX")) == ()
    assert layer_type(with_kinds("FULLY_CONNECTED", "CONV_2D")) == ()
    # squeeze-and-excite blocks have fully connected operators between convolutions
    kinds = ("CONV_2D", "FULLY_CONNECTED", "CONV_2D", "MEAN", "FULLY_CONNECTED", "FULLY_CONNECTED")
    assert layer_type(with_kinds(*kinds)) == (4,)


def test_skips_inputs_and_outputs_that_are_read_again() -> None:
    #  0 (input) → op 0 → 1 (an output, read by op 2) → op 1 → 2 → op 2 → 3; op 2 reads the second input, 4, too
    tensors = (tensor(1), tensor(10), tensor(100), tensor(1), tensor(1000))
    operators = (Operator("RELU", (0,), (1,)), Operator("RELU", (1,), (2,)), Operator("ADD_N", (1, 2, 4), (3,)))
    graph = Graph("skips", tensors, operators, (0, 4), (1, 3))
    assert cut_points(graph) == (CutPoint(1, (1, 4), 4 * 1010), CutPoint(2, (1, 2, 4), 4 * 1110))
    unread = Graph("unread", tensors, (*operators[:2], Operator("RELU", (2,), (3,))), (0,), (1, 3))
    assert cut_points(unread) == (CutPoint(1, (1,), 40), CutPoint(2, (2,), 400))


def test_more_parts_than_operators_are_refused() -> None:
    for parts in (0, 4):
        for criterion in (layer_length, parameter_count):
            with fails(UsageError):
                criterion(chain_graph(3), parts)


def test_huge_models_do_not_overflow() -> None:
    weights = [tensor(2**20, 2**12, constant=True) for _ in range(4)]  # 2^34 parameters together
    tensors = (*weights, *(tensor(1) for _ in range(5)))
    operators = tuple(Operator("FULLY_CONNECTED", (4 + i, i), (5 + i,)) for i in range(4))
    graph = Graph("huge", tensors, operators, (4,), (8,))
    assert [parameter_count(graph, k) for k in (2, 4)] == [(2,), (1, 2, 3)]
