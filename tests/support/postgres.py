"""A PostgreSQL server of one's own for a test, as Debian's package brings it; it can be killed and started anew."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

_USER = "optimizer"


def _programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    here = shutil.which("initdb")
    return found[-1].parent if found else Path(here).parent if here else None


def _owner() -> dict[str, object]:
    """Return how to start the server, which refuses to be root."""
    if os.getuid():
        return {}
    for name in ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    pytest.skip("PostgreSQL does not run as root, and there is nobody else")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Postgres:
    """A server on a free port of the loopback address, with its files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        programs = _programs()
        if programs is None:
            pytest.skip("there is no PostgreSQL (Debian: apt-get install postgresql)")
        pytest.importorskip("psycopg", reason="PostgreSQL needs the extra 'postgres'")
        self._programs, self._data, self._owner = programs, folder / "data", _owner()
        folder.mkdir()
        if self._owner:
            shutil.chown(folder, self._owner["user"], self._owner["group"])  # type: ignore[call-overload]
        self._port = _free_port()
        command = [programs / "initdb", "-D", self._data, "-U", _USER, "-A", "trust", "--no-sync"]
        subprocess.run(command, check=True, capture_output=True, cwd="/", **self._owner)  # type: ignore[call-overload]
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = False
        self.start()
        self._begun = True

    @property
    def url(self) -> str:
        return f"postgresql://{_USER}@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Start the server; one that was killed first repairs its files.

        PostgreSQL chooses no port itself. Where another program took the one that was free, it ends, and is started
        with another one; the port of a server that has run is kept.
        """
        for _ in range(100):
            settings = ("listen_addresses=127.0.0.1", f"unix_socket_directories={self._data.parent}")
            options = [word for setting in (*settings, f"port={self._port}") for word in ("-c", setting)]
            process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, *options],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                **self._owner,  # type: ignore[call-overload]
            )
            for _ in range(100):
                if process.poll() is not None:
                    break  # what is left of the one before still holds the memory
                ready = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self._port)]
                if subprocess.run(ready, check=False).returncode == 0:
                    self._process = process
                    return
                time.sleep(0.1)
            else:
                process.kill()
            process.wait()
            time.sleep(0.2)
            self._port = self._port if self._begun else _free_port()
        pytest.fail("PostgreSQL does not start")

    def kill(self, how: int = signal.SIGKILL) -> None:
        """End the server without a chance to write anything down."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End it."""
        self.kill(signal.SIGINT)


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    """A server with its files in a folder of its own.

    Not below pytest's folders: the server runs as somebody else, and any pytest that starts closes those to others.
    """
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        server = Postgres(Path(name) / "postgres")
        try:
            yield server
        finally:
            server.close()
