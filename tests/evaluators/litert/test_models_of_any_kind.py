"""Plans of models with state, subgraphs, signatures and odd outputs run in stages and agree with the whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluators.litert.candidate import LitertCandidate
from evaluators.litert.session import LitertEvaluator, LitertSession
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.cuts import every_layer
from tests.search_spaces.models.test_shapes import flattening
from tests.support.models.litert_loading import agrees, litert_processors, loaded
from tests.support.models.stage_models import calling, counter
from tests.support.models.tflite_models import SHAPE, Net, nets, with_signature
from tests.support.narrowing import there
from tests.support.sentences import fails
from tests.support.strategies import chains

pytestmark = pytest.mark.litert
PLATFORM = litert_processors()
NAMES = [p.name for p in PLATFORM.processors]


@pytest.fixture(scope="module")
def session() -> Iterator[LitertSession]:
    with LitertEvaluator().prepare(PLATFORM) as session:
        yield session


_NUMBERS = itertools.count()  # of drawn models


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which no file is written twice: the session reads weights from the file that it met first."""
    return tmp_path


def apart(graph: Graph) -> Plan:
    """Every operator a stage, on all processors in turns."""
    count = len(graph.operators)
    return chain_plan(graph, every_layer(graph), [NAMES[i % len(NAMES)] for i in range(count)])


@given(net=nets(), data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drawn_models_on_the_processors_in_any_order(
    session: LitertSession, folder: Path, net: Net, data: st.DataObject
) -> None:
    graph = read_model(net.write(folder / f"{next(_NUMBERS)}.tflite"))
    agrees(session, graph, data.draw(chains(graph, PLATFORM)))
    agrees(session, graph, apart(graph))


@pytest.mark.parametrize("net", [calling(), calling(nested=True)], ids=["if", "nested"])
def test_subgraphs_run_in_stages(session: LitertSession, folder: Path, net: Net) -> None:
    graph = read_model(net.write(folder / "m.tflite"))
    agrees(session, graph, apart(graph))


@pytest.mark.parametrize("second", ["", "v", "w"])
def test_state_makes_no_difference_to_the_verdict(session: LitertSession, folder: Path, second: str) -> None:
    graph = read_model(counter(second).write(folder / f"m{second}.tflite"))
    for _ in range(2):
        agrees(session, graph, apart(graph), runs=5)


def test_state_is_fresh_in_what_is_deployed(session: LitertSession, folder: Path) -> None:
    graph = read_model(counter().write(folder / "deployed.tflite"))
    session.load(graph, apart(graph)).run(4)
    target = folder / "best"
    target.mkdir()
    assert session.deploy(target, graph, apart(graph)).identical


def test_signatures_in_another_order_than_the_subgraph(session: LitertSession, folder: Path) -> None:
    net = Net()
    x, y = net.input(), net.input((1, 4, 4, 1))
    z = net.op("SUB", [x, y], options=schema.SubOptionsT())
    net.outputs(net.op("SUB", [z, x], options=schema.SubOptionsT()), z)
    graph = read_model(with_signature(net).write(folder / "m.tflite"))
    agrees(session, graph, apart(graph))
    agrees(session, graph, chain_plan(graph, [], NAMES[:1]))


def test_outputs_that_are_inputs_or_listed_twice_or_without_dimensions(session: LitertSession, folder: Path) -> None:
    net = Net()
    x = net.input()
    y = net.op("NEG", [x], options=schema.NegOptionsT())
    axes = net.constant(np.arange(4, dtype=np.int32))
    total = net.op("SUM", [y, axes], net.tensor(()), schema.ReducerOptionsT())
    graph = read_model(net.outputs(y, x, y, total).write(folder / "m.tflite"))
    agrees(session, graph, apart(graph))
    candidate = loaded(session, graph, apart(graph))
    candidate.run(1)
    first, given_x, again, scalar = candidate.outputs()
    candidate.close()
    assert np.array_equal(first, np.negative(np.asarray(given_x, np.float32)))
    assert np.array_equal(first, again)
    assert np.isclose(scalar, first.sum(), rtol=1e-5)


def test_shapes_that_a_person_gave(session: LitertSession, folder: Path, tmp_path: Path) -> None:
    path = str(flattening().write(folder / "open.tflite"))
    for batch in (2, 3):  # in one session: packed weights and stages of the one must not serve the other
        graph = load(path, [f"image={batch},2,2"])
        agrees(session, graph, apart(graph))
    assert session.deploy(tmp_path, graph, apart(graph)).identical


def test_state_in_variable_tensors_is_kept_between_runs(session: LitertSession, folder: Path) -> None:
    net = Net()
    state = net.tensor((1, 6), isVariable=True)
    constants = [net.constant(np.ones(shape, np.float32)) for shape in ((2, 4), (2, 3))]
    reads = [net.input((1, 4)), *constants, -1, state]
    net.outputs(net.op("SVDF", reads, net.tensor((1, 2)), schema.SVDFOptionsT(rank=1)))
    graph = read_model(net.write(folder / "m.tflite"))
    with closing(session.load(graph, apart(graph), fresh=True)) as candidate:
        assert isinstance(candidate, LitertCandidate)
        candidate.run(1)
        first = candidate.outputs()
        agreement = there(candidate.verify())
        candidate.run(1)
        assert not np.array_equal(first[0], candidate.outputs()[0])
    assert agreement.identical


def test_what_no_machine_holds_is_refused_in_words(session: LitertSession, folder: Path) -> None:
    net = Net()
    shape = (1, 1 << 19, 1 << 19, 1)
    graph = read_model(net.outputs(net.op("RELU", [net.input(shape)], net.tensor(shape))).write(folder / "m.tflite"))
    with fails(UnavailableError):
        session.load(graph, apart(graph))


def test_a_stage_without_inputs(session: LitertSession, folder: Path) -> None:
    net = Net()
    x, one = net.input(), net.constant(np.ones(SHAPE, np.float32))
    two = net.add(one, one)
    graph = read_model(net.outputs(net.add(x, two), two).write(folder / "m.tflite"))
    agrees(session, graph, apart(graph))
