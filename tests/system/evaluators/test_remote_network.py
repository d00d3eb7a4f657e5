"""A board on another network, behind a link that delays, stalls and resets connections: two network namespaces."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from evaluators.remote.devices import ENVIRONMENT
from optimizer.tools.certificates import make_certificates
from tests.support.commands import SEARCHED
from tests.support.narrowing import there
from tests.support.remote_agents import ROOT
from tests.support.sentences import says

pytest.importorskip("grpc", reason="remote devices need the extra 'remote'")

CLIENT, BOARD = "10.77.31.1", "10.77.31.2"
FATES = ("slow", "reset:40000", "stall:60000", "reset:800000", "slow")


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"network namespaces are not permitted here: {done.stderr.decode().strip()}")


@contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two of them, joined by a pair of virtual cards and by nothing else."""
    if sys.platform != "linux":
        pytest.skip("network namespaces are Linux's")
    tag = secrets.token_hex(3)
    client, board = f"client-{tag}", f"board-{tag}"
    with ExitStack() as stack:
        try:
            for name in (client, board):
                ip("netns", "add", name)
                stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            ip("link", "add", f"d{tag}", "netns", client, "type", "veth", "peer", "name", f"b{tag}", "netns", board)
            for name, card, address in ((client, f"d{tag}", CLIENT), (board, f"b{tag}", BOARD)):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", card)
                ip("-n", name, "link", "set", card, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except FileNotFoundError:
            pytest.skip("network namespaces need the program ip")
        yield client, board


@contextmanager
def within(namespace: str, *words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = ["ip", "netns", "exec", namespace, sys.executable, *words]
    pipe, around = subprocess.PIPE, {**os.environ, **environment}
    process = subprocess.Popen(command, text=True, cwd=ROOT, env=around, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_a_study_on_a_board_behind_a_bad_link(tmp_path: Path) -> None:
    with namespaces() as (client, board), ExitStack() as stack:
        folder = tmp_path / "certificates"
        make_certificates(folder, [BOARD])
        tls = f"--tls-cert {folder}/agent.pem --tls-key {folder}/agent.key --tls-client-ca {folder}/ca.pem"
        options = f"--evaluator synthetic --listen {BOARD}:7450 --folder {tmp_path}/board {tls}"
        agent = stack.enter_context(within(board, "-m", "optimizer.cli", "agent", *shlex.split(options)))
        says(there(agent.stderr).readline())
        proxy = stack.enter_context(
            within(client, "-m", "tests.faults.chaos_proxy", "127.0.0.1:0", f"{BOARD}:7450", *FATES)
        )
        port = int(there(proxy.stdout).readline())
        devices = tmp_path / "devices.yaml"
        devices.write_text(
            f"devices:\n  pi:\n    agent: 127.0.0.1:{port}\n    server_name: {BOARD}\n    authority: {folder}/ca.pem\n"
            f"    certificate: {folder}/client.pem\n    key: {folder}/client.key\n"
        )
        words = ["--model", "squeezenet1_1@0.25/64", "--budget", "12", "--evaluator", "remote", "--device", "pi"]
        words += ["--out", str(tmp_path / "run"), "--json", "-q"]
        for _ in range(6):  # where the link broke in a comparison, the study ends and is resumed
            with within(client, "-m", "optimizer.cli", *words, **{ENVIRONMENT: str(devices)}) as study:
                out, errors = study.communicate(timeout=240)
            if study.returncode in SEARCHED:
                break
            assert study.returncode == 4, errors
        result = json.loads(out)
        assert result["unique_plans"] == 12
        proxy.terminate()
        assert proxy.communicate()[0].split()[:5] == [fate.partition(":")[0] for fate in FATES]  # each had its turn
    logged = [json.loads(line) for line in (tmp_path / "run" / "trials.jsonl").read_text().splitlines()]
    digests = [record["data"]["digest"] for record in logged if record["kind"] == "trial"]
    assert len(digests) == len(set(digests)) == 12
