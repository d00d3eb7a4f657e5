"""What an agent refuses: strangers, what is too large or not what it says, names that lead elsewhere, and code."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluators.remote import wire
from evaluators.remote.agent import Agent
from evaluators.remote.connection import Connection
from evaluators.remote.credentials import (
    ClientCredentials,
    ServerCredentials,
    is_loopback,
    read_token,
)
from evaluators.remote.devices import Device
from evaluators.remote.server import Served
from evaluators.remote.store import Store
from evaluators.testing import SyntheticEvaluator
from optimizer.cli import main
from optimizer.tools.certificates import make_certificates
from search_spaces.core.errors import DeviceLostError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.spaces.chain import chain_plan
from tests.support.narrowing import there
from tests.support.remote_agents import agent_here
from tests.support.sentences import fails, says

pytestmark = pytest.mark.timing

grpc = pytest.importorskip("grpc", reason="remote devices need the extra 'remote'")

TOKEN = "correct-horse-battery-staple"
CLIENT = "ab" * 32  # one and the same, whose every Open takes the place of the one before


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder / "ours", ["127.0.0.1", "pi4.local"])
    make_certificates(folder / "others", ["127.0.0.1"])
    return folder


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Served]]:
    with agent_here(SyntheticEvaluator(), tmp_path_factory.mktemp("agent"), max_file_nbytes=1 << 20) as pair:
        yield pair


def connection(address: str, credentials: ClientCredentials | None = None) -> Connection:
    return Connection(Device("here", address, credentials or ClientCredentials()))


def opened(served: Served) -> tuple[Connection, dict[str, Any]]:
    """A connection that has the lease."""
    ours = connection(served.address)
    client = {"client": CLIENT}
    platform = wire.platform_to_json(SyntheticEvaluator().platform())
    ours.call("Open", {**client, "platform": platform}, 10.0)
    return ours, client


def pem(folder: Path, name: str) -> bytes:
    return (folder / name).read_bytes()


def test_who_is_let_in(certificates: Path, tmp_path: Path) -> None:
    ours, others = certificates / "ours", certificates / "others"
    pair = pem(ours, "agent.pem"), pem(ours, "agent.key")
    mine = ClientCredentials(pem(ours, "ca.pem"), pem(ours, "client.pem"), pem(ours, "client.key"))
    stranger = replace(mine, certificate=pem(others, "client.pem"), key=pem(others, "client.key"))
    with agent_here(
        SyntheticEvaluator(), tmp_path / "a", credentials=ServerCredentials(*pair, pem(ours, "ca.pem"))
    ) as (_, served):
        assert connection(served.address, mine).call("Describe", {}, 10.0)["device"] == "here"
        for wrong in (ClientCredentials(), replace(mine, certificate=b"", key=b""), stranger):
            with pytest.raises(UnavailableError):
                connection(served.address, wrong).call("Describe", {}, 3.0)
        with fails(UnavailableError):
            connection(served.address, replace(mine, authority=pem(others, "ca.pem"))).call("Describe", {}, 3.0)
    with agent_here(SyntheticEvaluator(), tmp_path / "b", credentials=ServerCredentials(*pair, token=TOKEN)) as (
        _,
        served,
    ):
        known = ClientCredentials(pem(ours, "ca.pem"), token=TOKEN)
        assert connection(served.address, known).call("Describe", {}, 10.0)["device"] == "here"
        for token in ("", TOKEN[:-1], f"{TOKEN} ", "wrong"):
            for method in ("Describe", "Open", "Run", "Renew", "Has"):
                with fails(UnavailableError):
                    connection(served.address, replace(known, token=token)).call(method, {}, 10.0)
        with pytest.raises(DeviceLostError):  # without TLS nothing is understood
            connection(served.address, ClientCredentials(token=TOKEN)).call("Describe", {}, 3.0)


def test_beyond_this_machine_there_must_be_certificates(certificates: Path, tmp_path: Path) -> None:
    ours = certificates / "ours"
    pair = pem(ours, "agent.pem"), pem(ours, "agent.key")
    for host in ("0.0.0.0", "::", "192.168.1.20", "pi4.local"):
        for wrong in (ServerCredentials(), ServerCredentials(token=TOKEN), ServerCredentials(*pair)):
            with fails(UsageError):
                wrong.check(host)
        ServerCredentials(*pair, token=TOKEN).check(host)
        ServerCredentials(*pair, pem(ours, "ca.pem")).check(host)
    for host in ("127.0.0.1", "::1", "[::1]", "localhost", "127.8.8.8"):
        assert is_loopback(host)
        ServerCredentials().check(host)
    assert main(["agent", "--evaluator", "synthetic", "--listen", "0.0.0.0:0", "--folder", str(tmp_path)]) == 2


def test_a_token_is_secret(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("short\n")
    file.chmod(0o600)
    with fails(UsageError):
        read_token(file)
    file.write_text(f"{TOKEN}\n")
    assert read_token(file) == TOKEN
    file.chmod(0o644)
    with fails(UsageError):
        read_token(file)
    assert TOKEN not in repr(ServerCredentials(b"c", b"k", token=TOKEN))


def test_a_file_that_is_not_what_it_says_is_not_kept(agent: tuple[Agent, Served], small: Graph, tmp_path: Path) -> None:
    store = agent[0].store
    content = there(small.source).path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    ours, client = opened(agent[1])
    file = tmp_path / "model.tflite"
    for sent, name in (
        (content[:-1] + bytes([content[-1] ^ 1]), digest),
        (b"no model at all", None),
        (pickle.dumps({"a": 1}), None),
    ):
        file.write_bytes(sent)
        with fails(UnavailableError, UsageError):
            ours.send(file, {**client, "model": name or hashlib.sha256(sent).hexdigest()})
        assert not list(store.folder.iterdir())
    file.write_bytes(content)
    ours.send(file, {**client, "model": digest})
    loading = {**client, "model": digest, "name": "m", "plan": chain_plan(small, [], ["cpu"]).to_json()}
    assert ours.call("Load", loading, 10.0)["candidate"] == 1
    # What was changed in the store meanwhile is noticed by the next study.
    ours, client = opened(agent[1])
    stored = store.path(digest)
    stored.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with fails(UnavailableError):
        ours.call("Load", {**loading, **client}, 10.0)
    assert not stored.exists()


def test_what_is_too_large_is_refused_before_it_comes(agent: tuple[Agent, Served], tmp_path: Path) -> None:
    ours, client = opened(agent[1])
    large = tmp_path / "large.tflite"
    large.write_bytes(bytes(2 << 20))
    digest = hashlib.sha256(bytes(2 << 20)).hexdigest()
    with fails(UnavailableError):
        ours.call("Has", {**client, "model": digest, "nbytes": 2 << 20}, 10.0)
    with fails(UnavailableError):
        ours.send(large, {**client, "model": digest})

    def liar() -> Iterator[bytes]:
        yield wire.packed({**client, "model": digest, "nbytes": 1000})
        for _ in range(64):
            yield bytes(1 << 20)

    answer = ours._channel.stream_unary(f"/{wire.SERVICE}/Store")(liar(), timeout=10.0)
    says(wire.unpacked(answer)["error"]["what"])
    with pytest.raises(grpc.RpcError) as refused:
        ours._channel.unary_unary(f"/{wire.SERVICE}/Load")(bytes(wire.MESSAGE_NBYTES + 1), timeout=10.0)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not list(agent[0].store.folder.iterdir())


NAMES = ["../../etc/passwd", "/etc/passwd", "a" * 63, "A" * 64, "..", "", "\0" * 64, "a" * 64 + "\n"]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere_are_not_taken(
    name: str, agent: tuple[Agent, Served], tmp_path: Path, small: Graph
) -> None:
    with pytest.raises(wire.WireError):
        Store(tmp_path).path(name)
    plan = chain_plan(small, [], ["cpu"]).to_json()
    ours, client = opened(agent[1])
    with pytest.raises(UnavailableError):
        ours.call("Has", {**client, "model": name, "nbytes": 5}, 10.0)
    with pytest.raises(UnavailableError):
        ours.call("Load", {**client, "model": name, "name": "m", "plan": plan}, 10.0)
    request = wire.packed({**client, "name": name})
    (reported,) = ours._channel.unary_stream(f"/{wire.SERVICE}/Fetch")(request, timeout=10.0)
    assert reported.startswith(b"E")
    with pytest.raises(UnavailableError):  # nor by a client, whatever a device says
        ours.fetch(tmp_path, client["client"], {"name": name, "sha256": "a" * 64, "nbytes": 5})
    assert not list(tmp_path.iterdir())


def test_nobody_asks_for_what_could_harm_the_machine(agent: tuple[Agent, Served]) -> None:
    ours = connection(agent[1].address)
    platform = wire.platform_to_json(SyntheticEvaluator().platform())
    threads = {**platform["processors"][0], "options": {"cores": [0, 1], "threads": 10_000}}
    library = {**platform["processors"][0], "kind": "npu", "options": {"folder": "/tmp/evil"}}
    for wrong in (threads, library):
        with fails(UnavailableError):
            ours.call("Open", {"client": CLIENT, "platform": {**platform, "processors": [wrong]}}, 10.0)
    for name in ("npu:/tmp/evil", "npu:evil", "../x", "cpu\n"):
        with pytest.raises((UnavailableError, UsageError)):
            ours.call("Processor", {"name": name}, 10.0)


class _Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return open, ("/nonexistent/was-run",)


def test_processors_are_counted_before_their_names_are_compared() -> None:
    with fails(wire.WireError):
        wire.platform_from_json({"name": "many", "processors": [{"name": f"p{i}"} for i in range(20_000)]})


def test_code_is_not_run(agent: tuple[Agent, Served]) -> None:
    ours = connection(agent[1].address)
    for method in (*agent[0].methods, "Renew", "Has"):
        reported = ours._channel.unary_unary(f"/{wire.SERVICE}/{method}")(pickle.dumps(_Bomb()), timeout=10.0)
        assert "JSON" in wire.unpacked(reported)["error"]["what"]
    for module in sorted((Path(wire.__file__).parent).glob("*.py")):
        source = module.read_text()
        assert not any(word in source for word in ("pickle.", "import pickle", "eval(", "exec(", "yaml.load(")), module


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(
    [
        "client",
        "model",
        "name",
        "plan",
        "platform",
        "names",
        "candidate",
        "n",
        "stop_above_s",
        "workload",
        "models",
        "objective",
        "known",
        "grids",
        "ranks",
    ]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data(), st.dictionaries(KEYS, JSON, max_size=6), st.booleans())
def test_whatever_is_asked_is_answered(
    agent: tuple[Agent, Served], drawn: st.DataObject, data: dict[str, Any], inside: bool
) -> None:
    method = drawn.draw(st.sampled_from([*agent[0].methods, "Renew", "Has"]))
    ours, client = opened(agent[1])
    with suppress(UnavailableError, UsageError):
        ours.call(method, {**data, **client} if inside else data, 10.0)
    assert ours.call("Describe", {}, 10.0)["device"] == "here"
    ours.close()
