"""Campaigns on a Dask cluster: the same tables as here, whatever happens to workers, and who may do what there."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from optimizer.campaign.cluster import pack, unpack
from optimizer.cli import main
from search_spaces.core.errors import RunFolderError
from tests.support.campaign_files import MODEL, answers, written
from tests.support.remote_agents import ROOT
from tests.support.sentences import fails, says

distributed = pytest.importorskip("distributed", reason="campaigns on a cluster need the extra 'cluster'")

CAMPAIGN = (
    f"name: x\nmatrix: {{model: {MODEL}, evaluator: synthetic, sampler: [random, auto], seed: [0, 1], budget: 6}}\n"
)


@contextmanager
def cluster(workers: int, options: tuple[str, ...] = (), scheduler: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """A scheduler and workers as a person starts them; gives the address and the processes of the workers."""
    with ExitStack() as stack:
        command = [sys.executable, "-m", "dask", "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
        first = _started(stack, [*command, *scheduler])
        address = _reported(first, "Scheduler at:").split("Scheduler at:")[1].strip()
        command = [sys.executable, "-m", "dask", "worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
        others = [_started(stack, [*command, "--host", "127.0.0.1", *options]) for _ in range(workers)]
        for other in others:
            _reported(other, "Registered to:")
        yield address, others


def _started(stack: ExitStack, command: list[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def _reported(process: subprocess.Popen[str], what: str) -> str:
    """Wait until a process tells something, and go on reading, so that it never has to wait for us."""
    assert process.stderr is not None
    for line in process.stderr:
        if what in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return line
    raise AssertionError(f"it ended without {what!r}")


@pytest.mark.usefixtures("as_elsewhere")
def test_a_cluster_finds_what_this_machine_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, here, there = written(tmp_path, CAMPAIGN), tmp_path / "here", tmp_path / "there"
    assert main(["run", str(path), "--out", str(here), "-q"]) == 0
    with cluster(2) as (address, workers):
        killed = threading.Timer(4.0, workers[0].send_signal, (signal.SIGKILL,))
        killed.start()
        assert main(["run", str(path), "--out", str(there), "-q", "--scheduler", address]) == 0
        killed.join()
        assert answers(there) == answers(here)
        assert main(["run", str(path), "--out", str(there), "-q", "--scheduler", address]) == 0  # nothing is run again
        measuring = written(tmp_path, f"name: y\nmatrix: {{model: {MODEL}, budget: 5}}\n")
        assert main(["run", str(measuring), "--out", str(tmp_path / "y"), "-q", "--scheduler", address]) == 2
        says(capsys.readouterr().err)
    assert not list(there.rglob("stage_*.tflite"))
    assert all(json.loads(p.read_text())["complete"] for p in there.glob("*/result.json"))


def test_who_reaches_a_cluster_runs_anything_there_and_tls_says_who_does(tmp_path: Path) -> None:
    """The boundary that the guide states: a client of Dask is trusted with its workers, so it shows a certificate."""
    pair = (str(tmp_path / "pair.pem"), str(tmp_path / "pair.key"))
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    for certificate, key in (pair, (str(tmp_path / "other.pem"), str(tmp_path / "other.key"))):
        subprocess.run(
            [*command, "-subj", "/CN=cluster", "-keyout", key, "-out", certificate], check=True, capture_output=True
        )
    tls = ("--protocol", "tls", "--tls-ca-file", pair[0], "--tls-cert", pair[0], "--tls-key", pair[1])
    with cluster(1, tls, tls) as (address, workers):
        assert address.startswith("tls://")

        def security(certificate: str, key: str) -> Any:
            return distributed.Security(
                tls_ca_file=pair[0], tls_client_cert=certificate, tls_client_key=key, require_encryption=True
            )

        with distributed.Client(address, security=security(*pair), set_as_default=False) as client:
            assert client.submit(os.getpid).result() == workers[0].pid
        other = security(str(tmp_path / "other.pem"), str(tmp_path / "other.key"))
        with pytest.raises((OSError, TimeoutError)):
            distributed.Client(address, security=other, timeout=2.0, set_as_default=False)
        assert main(["run", str(written(tmp_path, CAMPAIGN)), "-q", "--scheduler", address.replace("tls", "tcp")]) == 4


def test_run_folders_travel_without_stage_files_and_stay_where_they_belong(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "best").mkdir(parents=True)
    for name in ("manifest.json", "best/plan.json", "best/stage_0.tflite", "runtime.log"):
        (source / name).write_text(name)
    unpack(pack(source), tmp_path / "target")
    found = sorted(
        p.relative_to(tmp_path / "target").as_posix() for p in (tmp_path / "target").rglob("*") if p.is_file()
    )
    assert found == ["best/plan.json", "manifest.json"]
    for name in ("../evil", "/etc/evil", "a/../../evil", "a\\..\\evil"):
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr(name, "x")
        with pytest.raises(RunFolderError):
            unpack(content.getvalue(), tmp_path / "inner" / "target")
        assert not (tmp_path / "inner").exists()
    with fails(RunFolderError):
        unpack(b"no archive", tmp_path / "target")


@pytest.mark.parametrize("address", ["host", "tcp://host", "ssh://host:1", "tcp://:8786"])
def test_what_is_no_scheduler_is_reported(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, CAMPAIGN)
    assert main(["run", str(path), "--out", str(tmp_path / "o"), "-q", "--scheduler", address]) == 2
    says(capsys.readouterr().err)


def test_a_scheduler_that_does_not_answer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.campaign.cluster._CONNECT_S", 1.0)
    begin_s = time.monotonic()
    path = written(tmp_path, CAMPAIGN)
    assert main(["run", str(path), "--out", str(tmp_path / "o"), "-q", "--scheduler", "tcp://127.0.0.1:9"]) == 4
    assert time.monotonic() - begin_s < 20.0
