"""Packed weights that processes share: damaged ones are made again, and without a place for them all goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

from evaluators.litert.packed import Holder, existing_packed_weights, packed_weights
from evaluators.litert.session import LitertEvaluator, LitertSession
from search_spaces.core.graph import Graph
from search_spaces.models import load
from search_spaces.models.cache import ENVIRONMENT
from search_spaces.spaces.chain import chain_plan
from tests.support.disks import small_disk
from tests.support.models.litert_loading import agrees, litert_processors
from tests.support.models.tflite_models import Net
from tests.support.narrowing import there
from tests.support.sentences import says

if TYPE_CHECKING:
    from evaluators.litert.candidate import LitertCandidate

pytestmark = pytest.mark.litert

PLATFORM = litert_processors()
PROCESSORS = [p.name for p in PLATFORM.processors]


def works(session: LitertSession, graph: Graph) -> None:
    agrees(session, graph, chain_plan(graph, [5, 20], [PROCESSORS[0], PROCESSORS[-1], PROCESSORS[0]]))


def small_file(content: bytes) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        path.write_bytes(content)

    return build


def damage_nothing(path: Path) -> None:
    pytest.fail(f"{path} was made again without need")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)


def test_damaged_packed_weights_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    path = there(packed_weights("ab" * 32, small_file(b"0123456789")))
    assert path.read_bytes() == b"0123456789"
    assert packed_weights("ab" * 32, damage_nothing) == path == existing_packed_weights("ab" * 32)
    _flip(path)
    assert existing_packed_weights("ab" * 32) is None
    assert packed_weights("ab" * 32, small_file(b"again")) == path
    assert path.read_bytes() == b"again"
    assert packed_weights("ab" * 32, damage_nothing) == path
    assert packed_weights("cd" * 32, small_file(b"other")) != path


def test_what_is_held_is_not_removed_to_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    monkeypatch.setattr("evaluators.litert.packed._KEEP_NBYTES", 6)
    holder = Holder()
    first = there(packed_weights("ab" * 32, small_file(b"first")))
    assert holder.hold(first) == holder.hold(first) == first
    second = there(packed_weights("cd" * 32, small_file(b"second")))
    assert packed_weights("ab" * 32, damage_nothing) == first
    assert not second.exists()  # nobody holds it, and the first one was wanted later
    holder.close()
    packed_weights("ef" * 32, small_file(b"third"))
    assert [p.read_bytes() for p in tmp_path.glob("packed/*.xnnpack")] == [b"third"]
    assert holder.hold(first) is None
    assert holder.hold(None) is None


def test_a_session_makes_damaged_packed_weights_again(
    squeezenet: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    for _ in range(2):
        with LitertEvaluator().prepare(PLATFORM) as session:
            works(session, squeezenet)
        (file,) = tmp_path.glob("packed/*.xnnpack")
        _flip(file)
    assert "damaged" in caplog.text


def test_without_a_cache_folder_stages_pack_for_themselves(
    squeezenet: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING), LitertEvaluator().prepare(PLATFORM) as session:
        works(session, squeezenet)
    assert [r.name for r in caplog.records] == ["partition_optimizer"]
    says(caplog.messages[0])


def test_without_room_for_packed_weights_stages_pack_for_themselves(
    squeezenet: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        monkeypatch.setenv(ENVIRONMENT, str(disk))
        with LitertEvaluator().prepare(PLATFORM) as session:
            works(session, squeezenet)
            works(session, squeezenet)
        assert not [p for p in disk.rglob("*") if p.is_file() and p.stat().st_size]
    assert [r.name for r in caplog.records] == ["partition_optimizer"]
    says(caplog.messages[0])


def test_filters_in_one_buffer_under_two_shapes_are_not_taken_for_the_same(tmp_path: Path, cache_folder: Path) -> None:
    net = Net()
    first = net.input((1, 8))
    dense = schema.FullyConnectedOptionsT()
    filters = net.constant(np.random.default_rng(0).standard_normal((16, 8), dtype=np.float32))
    buffer = net.graph.tensors[filters].buffer
    wide = net.op("FULLY_CONNECTED", [first, filters, -1], net.tensor((1, 16)), dense)
    other = net.tensor((8, 16), buffer=buffer)
    path = net.outputs(net.op("FULLY_CONNECTED", [wide, other, -1], net.tensor((1, 8)), dense)).write(tmp_path / "n")
    interpreter = Interpreter(str(path.rename(tmp_path / "net.tflite")))
    interpreter.allocate_tensors()
    graph = load(str(tmp_path / "net.tflite"))
    with (
        LitertEvaluator().prepare(PLATFORM) as session,
        closing(session.load(graph, chain_plan(graph, [], PROCESSORS[:1]))) as found,
    ):
        candidate = cast("LitertCandidate", found)
        (given,) = session.inputs(graph)
        candidate.run(1)
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], given)
        interpreter.invoke()
        wanted = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
        assert candidate.outputs()[0].tobytes() == wanted.tobytes()
