"""Bad luck and bad manners: killed workers, garbage on ports, clients that vanish, files that change while read."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import threading
import time
from pathlib import Path

import pytest

from optimizer.cli import main
from search_spaces.models import load
from tests.faults.worker_kills import run
from tests.support.commands import SEARCHED

MODEL = "squeezenet1_1@0.25/64"


@pytest.mark.litert
def test_workers_are_killed_at_random_moments(tmp_path: Path) -> None:
    """The long one is ``python -m tests.faults.worker_kills 30 0``."""
    seen = run(tmp_path / "run", kills=4, seed=1, budget=14)
    assert sum(seen.codes.get(code, 0) for code in SEARCHED) == 1
    assert set(seen.codes) <= {4, *SEARCHED}
    assert (seen.lost, seen.damaged) == (0, False)
    assert seen.measured > 0


def test_garbage_and_clients_that_vanish_are_no_trouble_to_an_agent(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="remote devices need the extra 'remote'")
    from evaluators.remote import wire
    from evaluators.remote.connection import Connection
    from evaluators.remote.credentials import split_address
    from evaluators.remote.devices import Device
    from evaluators.testing import SyntheticEvaluator
    from tests.support.remote_agents import agent_here

    content = load(MODEL).source
    assert content is not None
    with agent_here(SyntheticEvaluator(), tmp_path, max_file_nbytes=64 << 20) as (agent, served):
        host, port = split_address(served.address, 0)
        chance = random.Random(0)
        for number in range(100):
            with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5.0) as garbage:
                garbage.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" * (number % 2) + chance.randbytes(4096))
        client = {"client": "ab" * 32}
        for _ in range(10):  # of an upload that was announced with 32 MB two pieces come, and then nobody
            ours = Connection(Device("here", served.address))
            ours.call("Open", {**client, "platform": wire.platform_to_json(SyntheticEvaluator().platform())}, 10.0)
            announced = {**client, "model": hashlib.sha256(b"x").hexdigest(), "nbytes": 32 << 20}
            gone = threading.Event()

            def messages(announced: dict[str, object] = announced, gone: threading.Event = gone) -> object:
                yield wire.packed(announced)
                yield bytes(1 << 20)
                gone.set()
                time.sleep(0.2)
                yield bytes(1 << 20)

            call = ours._channel.stream_unary(f"/{wire.SERVICE}/Store").future(messages(), timeout=30.0)
            assert gone.wait(10.0)
            call.cancel()
            ours.close()
        ours = Connection(Device("here", served.address))
        ours.call("Open", {**client, "platform": wire.platform_to_json(SyntheticEvaluator().platform())}, 10.0)
        digest = hashlib.sha256(content.path.read_bytes()).hexdigest()
        ours.send(content.path, {**client, "model": digest})
        assert agent.store.has(digest)
        end_s = time.monotonic() + 10.0
        while list(agent.store.folder.glob(".*")) and time.monotonic() < end_s:
            time.sleep(0.1)
        assert [p.name for p in agent.store.folder.iterdir()] == [f"{digest}.tflite"]
        ours.close()


def test_files_that_change_while_they_are_read_end_with_a_documented_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_folder = tmp_path / "run"
    words = ["--model", MODEL, "--evaluator", "cost-model", "--platform", "xavier", "--max-stages", "2", "-q"]
    assert main([*words, "--budget", "4", "--out", str(run_folder)]) == 0
    files = [p for p in run_folder.rglob("*") if p.suffix in {".json", ".jsonl", ".yaml"}]
    whole = {path: path.read_bytes() for path in files}
    ended = threading.Event()

    def disturb() -> None:
        chance = random.Random(0)
        while not ended.is_set():
            path = chance.choice(files)
            content = whole[path]
            at = chance.randrange(len(content))
            with contextlib.suppress(OSError):
                if chance.randrange(2):
                    path.write_bytes(content[:at])
                    time.sleep(0.001)
                    path.write_bytes(content)
                else:
                    other = path.with_name(".other")
                    other.write_bytes(content[:at] + b"\x00" + content[at:])
                    other.replace(path)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        codes = [main(["report", str(run_folder), "--out", str(tmp_path / "out")]) for _ in range(15)]
        codes += [main(["explain", str(run_folder)]) for _ in range(5)]
    finally:
        ended.set()
        thread.join()
    assert set(codes) <= {0, 2}
    assert "Traceback" not in capfd.readouterr().err
