"""Plans measured by an agent: the same contract as any evaluator, models sent once, devices that come and go."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import given
from hypothesis import strategies as st

from evaluators.base import Agreement, Batch, Evaluator, OutputError
from evaluators.contract import EvaluatorContract
from evaluators.litert.processors import local_platform
from evaluators.litert.session import LitertEvaluator
from evaluators.remote import wire
from evaluators.remote.connection import Link, agent_state, sendable
from evaluators.remote.devices import ENVIRONMENT, Device
from evaluators.remote.session import RemoteEvaluator
from evaluators.testing import SyntheticEvaluator
from evaluators.workload.host import came_of
from optimizer.cli import main
from search_spaces.core.errors import DeviceLostError, OptimizeError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import merge
from search_spaces.core.platform import Platform
from search_spaces.core.pools import with_pools
from search_spaces.core.workload import Arrival, Client, Workload
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.workload_space import WorkloadSpace
from tests.support.models.tflite_models import TYPES, Net
from tests.support.narrowing import there
from tests.support.remote_agents import agent_here, agent_process
from tests.support.sentences import fails

pytest.importorskip("grpc", reason="remote devices need the extra 'remote'")


def evaluator_at(address: str) -> RemoteEvaluator:
    found = RemoteEvaluator()
    found.at(address)
    return found


class TestRemoteContract(EvaluatorContract):
    call_s = 1.0

    @pytest.fixture(autouse=True)
    def _agent(self, tmp_path: Path) -> Iterator[None]:
        with agent_here(SyntheticEvaluator(), tmp_path) as (_, served):
            self.address = served.address
            yield

    def evaluator(self) -> Evaluator:
        return evaluator_at(self.address)

    def graph(self) -> Graph:
        return load("squeezenet1_1@0.25/64")


@pytest.mark.litert
def test_what_an_agent_measures_and_deploys_is_what_its_machine_does(tmp_path: Path, small: Graph) -> None:
    with agent_process(tmp_path / "device", "litert") as (_, address):
        remote = evaluator_at(address)
        platform = remote.platform()
        assert platform.processors == local_platform().processors
        processors = [remote.processor("cpu0"), remote.processor("cpu0:builtin")]
        platform = replace(platform, processors=tuple(processors))
        plan = chain_plan(small, [5], ["cpu0", "cpu0:builtin"])
        with remote.prepare(platform) as session:
            with closing(session.load(small, plan)) as candidate:
                batch = candidate.run(3)
                assert len(batch.latency_s) == 3
                assert batch.timeline is not None
                assert there(candidate.verify()).accepted
            assert session.conditions()["device_time_utc"]
            assert "versions" in session.conditions()
            assert session.fingerprint()["there"]["evaluator"] == "litert"
            assert session.capabilities.deploy
            folder = tmp_path / "best"
            folder.mkdir()
            assert session.deploy(folder, small, plan).accepted
    assert sorted(p.name for p in folder.iterdir()) == ["plan.json", "stage_0.tflite", "stage_1.tflite"]
    assert main(["execute", str(folder / "plan.json"), "--json"]) == 0


@pytest.mark.litert
def test_inputs_that_fit_come_along_with_the_stage_files(tmp_path: Path) -> None:
    net = Net()
    x, count = net.input((1, 20)), net.input((), TYPES.INT32)
    best = [net.tensor((1, 3)), net.tensor((1, 3), TYPES.INT32)]
    net.op("TOPK_V2", [x, count], best, schema.TopKV2OptionsT())
    graph = load(str(net.outputs(*best).write(tmp_path / "m.tflite")))
    folder = tmp_path / "best"
    folder.mkdir()
    with agent_process(tmp_path / "device", "litert") as (_, address):
        remote = evaluator_at(address)
        with remote.prepare(replace(remote.platform(), processors=(remote.processor("cpu0"),))) as session:
            assert session.deploy(folder, graph, chain_plan(graph, (), ["cpu0"])).accepted
    assert main(["execute", str(folder / "plan.json"), "--json"]) == 0


@pytest.mark.litert
def test_several_models_are_hosted_on_a_device(tmp_path: Path) -> None:
    workload = Workload("w", (Client("a", "a", count=2), Client("b", "b", arrival=Arrival("closed", 2))))
    graphs = [load(name) for name in ("squeezenet1_1@0.25/64", "mobilenet_v1@0.25/32")]
    joined = merge("w", [(each.name, graphs[each.client]) for each in workload.instances])
    with agent_process(tmp_path / "device", "litert") as (_, address):
        remote = evaluator_at(address)
        processors = tuple(remote.processor(name) for name in ("cpu0", "cpu0:builtin"))
        platform = with_pools(Platform("two", processors))
        space = WorkloadSpace(workload, joined, platform, 2)
        plan = space.plan_at(space.cardinality() // 2)
        with remote.host(workload, joined, platform, "mean") as session:
            prices = session.price(None, lambda _: None)
            assert {graph.digest for graph in graphs} == {*prices["whole_s"]}
            with closing(session.load(joined.graph, plan)) as candidate:
                found = candidate.run(3)
                outcome = came_of(found)
                assert found.latency_s[-1] == pytest.approx(outcome.value_s("mean"))
                assert [len(each) for each in outcome.requests] == [1, 1, 2]
                assert (agreement := candidate.verify()) is not None
                assert agreement.accepted
            predicted = session.simulator.run(plan).value_s("mean")
        with LitertEvaluator().host(workload, joined, platform, "mean") as here:
            assert json.loads(json.dumps(here.price(prices, lambda _: None))) == json.loads(json.dumps(prices))
            assert here.simulator.run(plan).value_s("mean") == pytest.approx(predicted)


def test_a_damaged_workload_is_refused(tmp_path: Path, small: Graph) -> None:
    workload = Workload("w", (Client("a", "a"),))
    joined = merge("w", [("a", small)])
    wrong: tuple[Any, ...] = ({}, [], {**workload.to_json(), "clients": [{"name": 3, "model": "a"}]})
    with agent_here(SyntheticEvaluator(), tmp_path) as (_, served):
        remote = evaluator_at(served.address)
        for document in wrong:
            with fails(OptimizeError), pytest.MonkeyPatch.context() as patch:
                patch.setattr(Workload, "to_json", lambda _, document=document: document)
                with remote.host(workload, joined, remote.platform(), "mean"):
                    pass
        with fails(OptimizeError), remote.host(workload, joined, remote.platform(), "mean"):  # it hosts none
            pass


def test_a_study_on_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with agent_process(tmp_path / "device") as (_, address):
        words = ["--model", "squeezenet1_1@0.25/64", "--budget", "6", "--evaluator", "remote", "--device", address]
        assert main([*words, "--out", str(tmp_path / "run"), "--json", "-q"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["unique_plans"] == 6
    trials = [json.loads(line) for line in (tmp_path / "run" / "trials.jsonl").read_text().splitlines()]
    measured = [t["data"]["measurement"] for t in trials if t["kind"] == "trial" and t["data"]["measurement"]]
    assert measured
    assert all(m["latency_s"]["conditions"]["device_time_utc"] for m in measured)


def test_a_model_is_sent_once_whatever_was_done_to_it(tmp_path: Path, small: Graph) -> None:
    with agent_here(SyntheticEvaluator(), tmp_path) as (agent, served):
        for _ in range(2):
            remote = evaluator_at(served.address)
            with remote.prepare(remote.platform()) as session:
                for cut in (3, 5):
                    session.load(small, chain_plan(small, [cut], ["cpu0", "cpu1"])).close()
            (stored,) = agent.store.folder.glob("*.tflite")
            stamps = {(stored.stat().st_ino, stored.stat().st_ctime_ns)}
        assert len(stamps) == 1
        assert stored.name == f"{there(small.source).content_digest()}.tflite"
        assert read_model(stored).digest == small.digest


def test_a_rewritten_model_is_sent_as_it_is_now(tmp_path: Path, small: Graph) -> None:
    fixed = replace(small, source=replace(there(small.source), fixed=True))
    sent = sendable(fixed, tmp_path)
    written = read_model(sent.path)
    assert [o.kind for o in written.operators] == [o.kind for o in fixed.operators]
    sent.plan(chain_plan(fixed, [4], ["cpu", "cpu"])).validate(written)


class _Fails(SyntheticEvaluator):
    """Fails in the way of a plug-in: not by an error of ours."""

    def prepare(self, platform: Platform, scratch: Path | None = None) -> Any:  # noqa: ARG002
        raise RuntimeError("no such board")


def test_what_fails_there_is_one_line_here(tmp_path: Path, small: Graph) -> None:
    with agent_here(SyntheticEvaluator(fails=lambda plan: len(plan.stages) > 1), tmp_path) as (_, served):
        remote = evaluator_at(served.address)
        with remote.prepare(remote.platform()) as session:
            with fails(UnavailableError):
                session.load(small, chain_plan(small, [3], ["cpu0", "cpu1"]))
            session.load(small, chain_plan(small, [], ["cpu"])).close()
    with agent_here(_Fails(), tmp_path) as (_, served):
        remote = evaluator_at(served.address)
        with fails(UnavailableError), remote.prepare(remote.platform()):
            pass


@pytest.mark.timing
def test_two_studies_never_measure_at_once(
    tmp_path: Path, small: Graph, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with agent_here(SyntheticEvaluator(), tmp_path) as (_, served):
        devices = tmp_path / "devices.yaml"
        devices.write_text(f"devices:\n  pi: {{agent: '{served.address}', wait_s: 0.2}}\n")
        monkeypatch.setenv(ENVIRONMENT, str(devices))
        first, second = evaluator_at("pi"), evaluator_at(served.address)
        with first.prepare(first.platform()) as session:
            session.load(small, chain_plan(small, [], ["cpu"])).close()
            with fails(UnavailableError), evaluator_at("pi").prepare(first.platform()):
                pass
            ended = []

            def other() -> None:
                with second.prepare(second.platform()) as theirs:
                    ended.append(time.monotonic())
                    theirs.load(small, chain_plan(small, [], ["cpu"])).close()

            thread = threading.Thread(target=other)
            thread.start()
            while "waiting" not in caplog.text and thread.is_alive():
                time.sleep(0.01)
            time.sleep(0.5)
            still = time.monotonic()
        thread.join()
        assert "waiting" in caplog.text
        assert ended
        assert ended[0] > still


def test_a_client_that_falls_silent_loses_its_lease(tmp_path: Path, small: Graph) -> None:
    with agent_here(SyntheticEvaluator(), tmp_path, lease_s=0.5) as (_, served):
        first, second = evaluator_at(served.address), evaluator_at(served.address)
        with first.prepare(first.platform()) as session:
            candidate = session.load(small, chain_plan(small, [], ["cpu"]))
            candidate.run(1)
            session._link._closed.set()  # its heart stops
            with second.prepare(second.platform()) as theirs:
                theirs.load(small, chain_plan(small, [], ["cpu"])).run(1)
                with pytest.raises(DeviceLostError):
                    candidate.run(1)


def test_devices_are_named_or_told_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = tmp_path / "devices.yaml"
    monkeypatch.setenv(ENVIRONMENT, str(devices))
    for text in (
        "devices:\n  pi: {agent: 10.0.0.7}\n",
        "devices:\n  pi: {agent: 10.0.0.7, authority: no.pem}\n",
        "devices:\n  pi:\n    agent: 10.0.0.7\n    authority: ~nobody-here/x.pem\n",
        "devices:\n  pi: {agent: '127.0.0.1:\u0663\u0664'}\n",
        f"devices:\n  pi: {{agent: '127.0.0.1:{'7' * 5000}'}}\n",
        "devices:\n  pi: {agnt: 10.0.0.7}\n",
        "devices:\n  pi: {agent: 'a:b:c/d'}\n",
        "devices:\n  other: {agent: 127.0.0.1}\n",
    ):
        devices.write_text(text)
        with fails(UsageError):
            evaluator_at("pi")
    with fails(UsageError):
        evaluator_at("10.0.0.7:7450")
    with fails(UsageError):
        RemoteEvaluator().platform()
    with socket.socket() as silent:  # bound, so that nobody else gets the port; nobody listens
        silent.bind(("127.0.0.1", 0))
        devices.write_text(f"devices:\n  gone: {{agent: '127.0.0.1:{silent.getsockname()[1]}', wait_s: 0}}\n")
        with fails(UnavailableError):
            evaluator_at("gone").platform()


def test_a_device_that_stays_away_is_waited_for_once() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        away = Device("away", f"127.0.0.1:{silent.getsockname()[1]}", wait_s=1.5)
        link = Link([away], SyntheticEvaluator().platform(), [])
        took_s = []
        for _ in range(2):
            begin_s = time.monotonic()
            with pytest.raises(UnavailableError):
                link.connect()
            took_s.append(time.monotonic() - begin_s)
        link.close()
    assert took_s[0] >= 1.5 > took_s[1]


@given(
    st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=5),
    st.integers(1, 4),
    st.none() | st.lists(st.floats(-1.0, 1.0), max_size=3),
)
def test_batches_come_over_the_wire(latency_s: list[float], stages: int, errors: list[float] | None) -> None:
    stage_s = np.outer(latency_s, np.full(stages, 0.5))
    batch = Batch(np.array(latency_s), stage_s, None, None if errors is None else np.array(errors))
    found = wire.batch_from_json(wire.unpacked(wire.packed({"b": wire.batch_to_json(batch)}))["b"])
    assert found.latency_s.tolist() == latency_s
    assert found.stage_s.tolist() == stage_s.tolist()
    assert (found.errors is None) == (errors is None)


@given(st.floats(allow_nan=True), st.floats(min_value=0, allow_infinity=True))
def test_agreements_come_over_the_wire(error: float, tolerance: float) -> None:
    output = Agreement(False, error, error, tolerance, (OutputError("y", error, error),), (3, 100))
    found = there(wire.agreement_from_json(wire.unpacked(wire.packed({"a": wire.agreement_to_json(output)}))["a"]))
    assert (found.outputs[0].name, found.top1) == ("y", (3, 100))
    assert found.accepted == output.accepted or tolerance == float("inf")


def test_a_study_moves_to_a_device_that_is_alike_alone(
    tmp_path: Path, small: Graph, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    devices, plan = tmp_path / "devices.yaml", chain_plan(small, [], ["cpu"])
    monkeypatch.setenv(ENVIRONMENT, str(devices))
    with (
        agent_here(SyntheticEvaluator(), tmp_path / "a") as (_, a),
        agent_here(SyntheticEvaluator(interaction=lambda *_: 1.0), tmp_path / "b") as (_, b),
        agent_here(SyntheticEvaluator(), tmp_path / "c") as (_, c),
    ):
        served = {"a": a, "b": b, "c": c}
        places = (f"  {name}: {{agent: '{each.address}', wait_s: 0.1}}\n" for name, each in served.items())
        devices.write_text("devices:\n" + "".join(places))
        alike, unlike = evaluator_at("a,b,c"), evaluator_at("a,b")
        with alike.prepare(alike.platform()) as session:
            candidate = session.load(small, plan)
            a.close()
            assert len(candidate.run(2).latency_s) == 2
            assert session.fingerprint()["device"] == "c"
            assert "measuring on c" in caplog.text
        with unlike.prepare(unlike.platform()) as session:  # begins on b
            assert session.fingerprint()["device"] == "b"
    port = int(a.address.rpartition(":")[2])
    with (
        agent_here(SyntheticEvaluator(), tmp_path / "a", port=port) as (_, a),
        unlike.prepare(unlike.platform()) as session,
    ):
        a.close()
        with pytest.raises(UnavailableError):
            session.load(small, plan)


def test_an_agent_says_whether_it_is_free(tmp_path: Path) -> None:
    with agent_here(SyntheticEvaluator(), tmp_path) as (_, served):
        device, remote = Device("pi", served.address), evaluator_at(served.address)
        assert agent_state(device).state == "free"
        with remote.prepare(remote.platform()):
            found = agent_state(device)
        assert (found.state, found.processors) == ("busy", tuple(p.name for p in remote.platform().processors))
    assert agent_state(device).processors == ()
