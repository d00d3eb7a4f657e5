"""``optimize storage`` lets in whom an agent would: strangers, floods and what is too large are refused in one line."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluators.remote.devices import ENVIRONMENT
from evaluators.remote.server import Rate
from optimizer.cli import main
from optimizer.shared import storage as shared_storage
from optimizer.shared.storage import close_storage, open_storage, patiently
from optimizer.shared.study import SharedStudy
from optimizer.tools.certificates import make_certificates
from optimizer.tools.storage_server import MOST_NBYTES
from search_spaces.core.errors import UnavailableError, UsageError
from tests.faults.shared_chaos import ROOT
from tests.support.sentences import fails, says

pytest.importorskip("grpc", reason="grpc:// needs the extra 'grpc'")

TOKEN = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates, those of a stranger, and tokens."""
    found = tmp_path_factory.mktemp("storage")
    make_certificates(found / "ours", ["127.0.0.1", "localhost"])
    make_certificates(found / "others", ["127.0.0.1", "localhost"])
    for name, text in (("token", TOKEN), ("wrong", TOKEN[::-1])):
        (found / name).write_text(f"{text}\n")
        (found / name).chmod(0o600)
    return found


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """A server of a storage of its own; gives its address."""
    url = f"sqlite:///{folder / 'shared.db'}"
    command = [sys.executable, "-m", "optimizer.cli", "storage", url, "--listen", "127.0.0.1:0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"grpc://(\S+), until", line := process.stderr.readline())
            assert found, line
            yield found[1]
        finally:
            process.terminate()
            process.communicate(timeout=30)


@pytest.fixture(scope="module")
def secure(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a certificate and a token."""
    ours = folder / "ours"
    shown = ("--tls-cert", str(ours / "agent.pem"), "--tls-key", str(ours / "agent.key"))
    with served(tmp_path_factory.mktemp("secure"), *shown, "--token-file", str(folder / "token")) as address:
        yield address


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Write the file that says how ``grpc://lab`` is reached."""

    def write(address: str, **fields: object) -> str:
        path = tmp_path / "devices.yaml"
        lines = [f"    {key}: {value}\n" for key, value in {"server": address, **fields}.items()]
        path.write_text(f"storages:\n  lab:\n{''.join(lines)}")
        monkeypatch.setenv(ENVIRONMENT, str(path))
        return "grpc://lab"

    return write


def test_beyond_this_machine_it_does_not_start_without_a_certificate_and_clients_it_knows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = folder / "ours"
    pair = ["--tls-cert", str(ours / "agent.pem"), "--tls-key", str(ours / "agent.key")]
    for host in ("0.0.0.0:0", "[::]:0", "192.168.1.20:13000"):
        for options in ([], ["--token-file", str(folder / "token")], pair):
            words = ["storage", f"sqlite:///{tmp_path / 'x.db'}", "--listen", host, *options]
            assert main(words) == 2
            says(capsys.readouterr().err)
    assert not (tmp_path / "x.db").exists()


def test_who_shows_the_token_over_tls_shares(secure: str, folder: Path, named: Any) -> None:
    url = named(secure, authority=folder / "ours" / "ca.pem", token_file=folder / "token")
    for place in (url, f"grpc://{secure}"):  # by name, and by the address that the file knows
        storage = open_storage(place)
        study = SharedStudy(storage, "s", "me", 10)
        assert study.fact("a", lambda: 7) == 7
        study.close()
        close_storage(storage)


def test_strangers_are_refused(
    secure: str, folder: Path, named: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shared_storage, "READY_S", 3.0)
    ours, others = folder / "ours" / "ca.pem", folder / "others" / "ca.pem"
    for fields in ({"authority": ours}, {"authority": ours, "token_file": folder / "wrong"}):
        words = ["--study", "s", "--storage", named(secure, **fields), "-q"]
        assert main(words) == 4
        (line,) = capsys.readouterr().err.splitlines()
        says(line)
    for fields in ({"authority": others, "token_file": folder / "token"}, {}):
        with fails(UnavailableError):
            open_storage(named(secure, **fields))
    with fails(UsageError):
        open_storage("grpc://192.168.1.5:13000")
    with fails(UsageError):
        open_storage(named("192.168.1.5:13000"))


def test_what_is_too_large_is_refused_at_once(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        storage = open_storage(f"grpc://{address}")
        study = SharedStudy(storage, "s", "me", 10)
        begin_s = time.monotonic()
        with fails(UnavailableError):
            patiently(lambda: storage.set_study_user_attr(study._id, "x", "x" * (MOST_NBYTES + 1)), "it", 60.0)
        assert time.monotonic() - begin_s < 20.0
        assert study.fact("a", lambda: 7) == 7
        study.close()
        close_storage(storage)


def test_a_rate_is_kept() -> None:
    now = [0.0]
    rate = Rate(10.0, lambda: now[0])
    assert sum(rate.admits() for _ in range(50)) == 10
    now[0] = 0.35
    assert sum(rate.admits() for _ in range(50)) == 3
    now[0] = 1000.0
    assert sum(rate.admits() for _ in range(50)) == 10


def test_garbage_and_half_open_connections_are_no_trouble(tmp_path: Path) -> None:
    with served(tmp_path) as address, contextlib.ExitStack() as stack:
        host, _, port = address.rpartition(":")
        for number in range(300):
            each = stack.enter_context(socket.create_connection((host, int(port)), timeout=10.0))
            if number % 3:
                with contextlib.suppress(OSError):
                    each.sendall(b"GET / HTTP/1.1\r\n\r\n" if number % 3 == 1 else bytes(range(256)) * 64)
        storage = open_storage(f"grpc://{address}")
        study = SharedStudy(storage, "s", "me", 10)
        assert study.fact("a", lambda: 7) == 7
        study.close()
        close_storage(storage)
