"""Devices that die: a study goes on with them, or on another one."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from evaluators.remote.devices import ENVIRONMENT
from optimizer.cli import main
from search_spaces.core.errors import DeviceLostError
from search_spaces.core.graph import Graph
from search_spaces.spaces.chain import chain_plan
from tests.evaluators.remote.test_session import evaluator_at
from tests.support.commands import answered
from tests.support.remote_agents import agent_process

pytest.importorskip("grpc", reason="remote devices need the extra 'remote'")


def test_a_device_that_comes_back_goes_on_and_one_that_does_not_is_left(
    tmp_path: Path, small: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = chain_plan(small, [], ["cpu"])
    devices = tmp_path / "devices.yaml"
    with agent_process(tmp_path / "b") as (_, other), agent_process(tmp_path / "a") as (process, address):
        devices.write_text(
            f"devices:\n  a: {{agent: '{address}', wait_s: 20}}\n  b: {{agent: '{other}', wait_s: 20}}\n"
        )
        monkeypatch.setenv(ENVIRONMENT, str(devices))
        remote = evaluator_at("a,b")
        with remote.prepare(remote.platform()) as session:
            assert session.fingerprint()["device"] == "a"
            fresh, shown = session.load(small, plan), session.load(small, plan)
            shown.run(1)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            with pytest.raises(DeviceLostError):
                shown.run(1)  # samples of two devices make no sample
            assert len(fresh.run(2).latency_s) == 2  # this one had none yet, and is moved
            assert session.fingerprint()["device"] == "b"


def test_a_study_survives_the_death_of_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent is killed at random moments and started anew; every plan of the budget is measured all the same."""
    devices = tmp_path / "devices.yaml"
    monkeypatch.setenv(ENVIRONMENT, str(devices))
    known, over = threading.Event(), threading.Event()

    def live_and_die() -> None:
        listen = "127.0.0.1:0"
        for lived_s in (1.0, 0.6, 0.3, 0.9, None):
            with agent_process(tmp_path / "device", options=["--listen", listen]) as (process, address):
                listen = address  # the ones after it are found where it was
                if not known.is_set():
                    devices.write_text(f"devices:\n  flaky: {{agent: '{address}', wait_s: 30}}\n")
                    known.set()
                if over.wait(lived_s):
                    return
                process.kill()

    thread = threading.Thread(target=live_and_die)
    thread.start()
    try:
        assert known.wait(60.0)
        words = ["--model", "squeezenet1_1@0.25/64", "--budget", "40", "--evaluator", "remote", "--device", "flaky"]
        for _ in range(8):  # a study that lost the device where nothing may be repeated ends, and is resumed
            if main([*words, "--out", str(tmp_path / "run"), "--json", "-q"]) == 0:
                break
    finally:
        over.set()
        thread.join()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["unique_plans"] == 40
    records = [json.loads(line) for line in (tmp_path / "run" / "trials.jsonl").read_text().splitlines()]
    tried = [r["data"] for r in records if r["kind"] == "trial"]
    digests = [t["digest"] for t in tried if t["measurement"]]
    assert len(digests) == len(set(digests)) >= 38


def test_several_models_are_explained_without_their_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices, run = tmp_path / "devices.yaml", str(tmp_path / "run")
    monkeypatch.setenv(ENVIRONMENT, str(devices))
    with agent_process(tmp_path / "device", "litert") as (_, address):
        devices.write_text(f"devices:\n  away: {{agent: '{address}', wait_s: 1}}\n")
        words = ["--model", "squeezenet1_1@0.25/32*2", "--budget", "8", "--evaluator", "remote", "--device", "away"]
        assert main([*words, "--processors", "cpu,cpu0", "--allow", "cuts", "--out", run, "-q"]) in {0, 5}
        capsys.readouterr()
    found = answered(capsys, ["explain", run])
    predicted = found["baselines"]["one after another on cpu"]["predicted_ms"]
    assert found["best"]["measured_ms"] > 0.0
    assert min(found["best"]["predicted_ms"], predicted) > 0.0
    assert {part["processor"] for part in found["parts"]} <= {"cpu", "cpu0"}
    devices.unlink()
    assert main(["explain", run]) == 0
