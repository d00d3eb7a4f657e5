from collections.abc import Sequence

import pytest
from ai_edge_litert.schema_py_generated import BuiltinOperator
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.core import intensity
from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.core.intensity import Cost, operator_costs, parameter_total, unknown_kinds
from tests.support.strategies import graphs, tensor, vgg16_graph

_SIZES = st.integers(1, 12)


def _weight(*shape: int, dtype: str = "float32") -> Tensor:
    return tensor(*shape, dtype=dtype, constant=True)


def _alone(kind: str, inputs: Sequence[Tensor | None], *outputs: Tensor) -> Cost:
    """Return the cost of one operator; None is an optional input left out."""
    given_inputs = [t for t in inputs if t is not None]
    numbers = iter(range(len(given_inputs)))
    reads = tuple(-1 if t is None else next(numbers) for t in inputs)
    count = len(given_inputs)
    writes = tuple(range(count, count + len(outputs)))
    activations = tuple(i for i, t in enumerate(given_inputs) if not t.constant)
    graph = Graph("one", (*given_inputs, *outputs), (Operator(kind, reads, writes),), activations, writes)
    return operator_costs(graph)[0]


@given(_SIZES, _SIZES, _SIZES)
def test_the_table_of_seed_004(d: int, m: int, k: int) -> None:
    data = tensor(1, d, d, m)
    normal = _alone("CONV_2D", [data, _weight(m, k, k, m)], data)
    depthwise = _alone("DEPTHWISE_CONV_2D", [data, _weight(1, k, k, m)], data)
    pointwise = _alone("CONV_2D", [data, _weight(m, 1, 1, m)], data)
    moved = [(c.read_bytes + c.written_bytes) // 4 for c in (normal, depthwise, pointwise)]
    assert [normal.macs, depthwise.macs, pointwise.macs] == [d**2 * m**2 * k**2, d**2 * m * k**2, d**2 * m**2]
    assert moved == [d**2 * 2 * m + k**2 * m**2, d**2 * 2 * m + k**2 * m, d**2 * 2 * m + m**2]
    assert normal.intensity == pytest.approx(normal.macs / (4 * moved[0]))


@given(_SIZES, _SIZES, _SIZES, _SIZES)
def test_a_matrix_product_is_one_whichever_operator_makes_it(batch: int, m: int, k: int, n: int) -> None:
    left, right, result = tensor(batch, m, k), tensor(batch, k, n), tensor(batch, m, n)
    turned_left, turned_right = tensor(batch, k, m), tensor(batch, n, k)
    expected = batch * m * k * n
    for one in (left, turned_left):
        for other in (right, turned_right):
            assert _alone("BATCH_MATMUL", [one, other], result).macs == expected
    assert _alone("FULLY_CONNECTED", [tensor(batch * m, k), _weight(n, k)], tensor(batch * m, n)).macs == expected


@given(graphs())
def test_every_graph_has_costs_and_each_weight_counts_once_in_the_total(graph: Graph) -> None:
    costs = operator_costs(graph)
    assert len(costs) == len(graph.operators)
    assert all(min(c.macs, c.parameters, c.read_bytes, c.written_bytes) >= 0 for c in costs)
    assert sum(c.written_bytes for c in costs) == sum(graph.tensors[i].nbytes for i in graph.producer)
    assert max(c.parameters for c in costs) <= parameter_total(graph) <= sum(c.parameters for c in costs)
    named = unknown_kinds(graph)
    assert sum(named.values()) == sum(not c.known for c in costs)
    assert set(named) <= {"MyCustomOp"}


def test_vgg16_as_published() -> None:
    graph = vgg16_graph()
    costs = operator_costs(graph)
    assert parameter_total(graph) == sum(c.parameters for c in costs) == 138_357_544
    assert sum(c.macs for c in costs) == 15_470_264_320
    assert [c.macs for c, o in zip(costs, graph.operators, strict=True) if o.kind == "MAX_POOL_2D"] == [0] * 5
    assert parameter_total(graph, range(18)) == 14_714_688
    assert not unknown_kinds(graph)


def test_grouped_convolution_reads_its_group_only() -> None:
    cost = _alone("CONV_2D", [tensor(1, 8, 8, 32), _weight(64, 3, 3, 8), _weight(64)], tensor(1, 8, 8, 64))
    assert cost.macs == 8 * 8 * 64 * 3 * 3 * 8
    assert cost.parameters == 64 * 3 * 3 * 8 + 64


def test_transposed_and_spatial_convolutions() -> None:
    shape = _weight(4, dtype="int32")
    flat = _alone("TRANSPOSE_CONV", [shape, _weight(16, 2, 2, 8), tensor(1, 5, 5, 8)], tensor(1, 10, 10, 16))
    assert flat.macs == 5 * 5 * 8 * 2 * 2 * 16
    solid = _alone("CONV_3D", [tensor(1, 4, 4, 4, 3), _weight(2, 3, 3, 3, 7)], tensor(1, 4, 4, 4, 7))
    assert solid.macs == 4**3 * 7 * 2 * 3 * 3 * 3
    back = _alone("CONV_3D_TRANSPOSE", [shape, _weight(2, 3, 3, 7, 3), tensor(1, 4, 4, 4, 3)], tensor(1, 8, 8, 8, 7))
    assert back.macs == 4**3 * 3 * 2 * 3 * 3 * 7


def test_recurrent_layers_use_each_matrix_once_a_step() -> None:
    steps, features, cells = 10, 6, 5
    state = Tensor("state", (1, cells), "float32", 4 * cells, variable=True)
    matrices = [_weight(cells, features)] * 4 + [_weight(cells, cells)] * 4
    full: list[Tensor | None] = [
        tensor(1, steps, features),
        *matrices,
        None,
        None,
        None,
        *[_weight(cells)] * 4,
        None,
        None,
        state,
    ]
    cost = _alone("UNIDIRECTIONAL_SEQUENCE_LSTM", full, tensor(1, steps, cells))
    assert cost.macs == steps * 4 * (cells * features + cells * cells)
    basic = _alone(
        "LSTM",
        [
            tensor(1, features),
            tensor(1, cells),
            _weight(4 * cells, features + cells),
            _weight(4 * cells),
            tensor(1, cells),
        ],
        tensor(1, cells),
    )
    assert basic.macs == 4 * cells * (features + cells)
    svdf = _alone("SVDF", [tensor(2, features), _weight(8, features), _weight(8, 3), None, state], tensor(2, 4))
    assert svdf.macs == 2 * (8 * features + 8 * 3)


def test_shapes_and_axes_are_no_parameters_but_whole_number_biases_are() -> None:
    reshape = _alone("RESHAPE", [tensor(1, 12), _weight(2, dtype="int32")], tensor(3, 4))
    assert (reshape.parameters, reshape.macs) == (0, 0)
    quantised = _alone(
        "CONV_2D",
        [tensor(1, 4, 4, 2, dtype="int8"), _weight(3, 1, 1, 2, dtype="int8"), _weight(3, dtype="int32")],
        tensor(1, 4, 4, 3, dtype="int8"),
    )
    assert quantised.parameters == 3 * 2 + 3
    assert quantised.read_bytes == 32 + 6 + 12


def test_a_table_is_read_where_it_is_looked_up() -> None:
    table, rows = _weight(30_000, 128), tensor(7, dtype="int32")
    cost = _alone("GATHER", [table, rows], tensor(7, 128))
    assert cost.read_bytes == 7 * 128 * 4 + 7 * 4
    assert cost.parameters == 30_000 * 128


def test_shared_weights_and_shared_buffers_count_once_in_the_total() -> None:
    tensors = (
        tensor(1, 4),
        tensor(4, 4, constant=True),
        tensor(1, 4),
        tensor(1, 4),
        tensor(4, 4, constant=True, buffer=7),
        tensor(1, 4),
        tensor(4, 4, constant=True, buffer=7),
        tensor(1, 4),
    )
    reads = ((0, 1), (2, 1), (3, 4), (5, 6))
    operators = tuple(Operator("FULLY_CONNECTED", r, (w,)) for r, w in zip(reads, (2, 3, 5, 7), strict=True))
    graph = Graph("tied", tensors, operators, (0,), (7,))
    assert [c.parameters for c in operator_costs(graph)] == [16] * 4
    assert parameter_total(graph) == 32
    assert parameter_total(graph, [1, 3]) == 32
    assert parameter_total(graph, []) == 0


def test_unknown_operators_move_memory_and_are_named() -> None:
    cost = _alone("MyCustomOp", [tensor(10)], tensor(20))
    assert cost == Cost(macs=0, parameters=0, read_bytes=40, written_bytes=80, known=False)
    assert cost.intensity == 0
    assert _alone("SHAPE", [tensor(10)], tensor(1, dtype="int32")).read_bytes == 0


@pytest.mark.parametrize("kind", sorted(intensity._MACS))
def test_operators_of_a_damaged_model_cost_nothing_rather_than_fail(kind: str) -> None:
    for inputs in ([], [tensor()], [tensor(), tensor()], [None, tensor(), None], [tensor(3), None, tensor(3)]):
        assert _alone(kind, inputs, tensor(2)).macs == 0
        assert _alone(kind, inputs).macs == 0


def test_the_kinds_are_those_of_the_schema() -> None:
    builtin = {name for name in vars(BuiltinOperator) if not name.startswith("_")}
    assert not intensity._MOVES - builtin
    assert not set(intensity._MACS) - builtin
    assert not intensity._MOVES & set(intensity._MACS)
    assert not (intensity._READS_PART | intensity._READS_SHAPE) - intensity._MOVES
