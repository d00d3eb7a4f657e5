"""Client of an adb server: its smart-socket protocol, shell protocol version 2, and sync.

The server is the one that ``adb start-server`` leaves on port 5037 of this machine; only the server talks to the
phones. The formats are those of ``OVERVIEW.TXT``, ``SERVICES.TXT`` and ``SYNC.TXT`` of Android's adb. Each request
opens a connection of its own, so that a failed request leaves no state behind.
"""

from __future__ import annotations

import shlex
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evaluators.litert.worker.wire import exactly
from search_spaces.core.errors import DeviceLostError, UnavailableError

PORT = 5037
_PIECE_NBYTES = 64 << 10  # largest piece in the sync protocol
_MAX_ANSWER_NBYTES = 64 << 20
_CONNECT_S = 5.0
_STDOUT, _STDERR, _EXIT = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Phone:
    """A phone that is attached to an adb server.

    Attributes:
        serial: as ``adb devices`` shows it.
        host, port: of the server.
    """

    serial: str
    host: str = "127.0.0.1"
    port: int = PORT

    def shell(self, words: Sequence[str], limit_s: float = 60.0) -> tuple[int, bytes, bytes]:
        """Run a command on the phone; return its exit status, standard output and standard error.

        Raises:
            DeviceLostError: the phone or the server is gone, or took longer than ``limit_s``.
        """
        with self._opened(f"shell,v2,raw:{shlex.join(words)}", limit_s) as connection:
            found = {_STDOUT: bytearray(), _STDERR: bytearray()}
            while True:
                kind, nbytes = struct.unpack("<BI", exactly(connection, 5))
                if nbytes > _MAX_ANSWER_NBYTES:
                    raise UnavailableError(f"phone {self.serial}: an answer of {nbytes} bytes is too large")
                content = exactly(connection, nbytes)
                if kind == _EXIT:
                    return content[0] if content else 1, bytes(found[_STDOUT]), bytes(found[_STDERR])
                if kind in found:
                    found[kind] += content
                    if len(found[kind]) > _MAX_ANSWER_NBYTES:
                        raise UnavailableError(f"phone {self.serial}: a command writes without end")

    def push(self, path: Path, there: str, mode: int = 0o644, limit_s: float = 600.0) -> None:
        """Copy a file to the phone.

        Raises:
            DeviceLostError: the phone or the server went away.
            UnavailableError: the phone refuses the file.
        """
        with self._opened("sync:", limit_s) as connection, path.open("rb") as file:
            name = f"{there},{0o100000 | mode}".encode()
            connection.sendall(b"SEND" + struct.pack("<I", len(name)) + name)
            while piece := file.read(_PIECE_NBYTES):
                connection.sendall(b"DATA" + struct.pack("<I", len(piece)) + piece)
            connection.sendall(b"DONE" + struct.pack("<I", int(path.stat().st_mtime) & 0xFFFFFFFF))
            kind, nbytes = _sync_head(connection)
            if kind != b"OKAY":
                raise self._sync_error(connection, there, nbytes)

    def pull(self, there: str, limit_s: float = 60.0) -> bytes:
        """Return the content of a file on the phone.

        Raises:
            DeviceLostError: the phone or the server went away.
            UnavailableError: there is no such file, or it is too large.
        """
        with self._opened("sync:", limit_s) as connection:
            name, found = there.encode(), bytearray()
            connection.sendall(b"RECV" + struct.pack("<I", len(name)) + name)
            while True:
                kind, nbytes = _sync_head(connection)
                if kind == b"DONE":
                    return bytes(found)
                if kind != b"DATA" or nbytes > _PIECE_NBYTES:
                    raise self._sync_error(connection, there, nbytes)
                found += exactly(connection, nbytes)
                if len(found) > _MAX_ANSWER_NBYTES:
                    raise UnavailableError(f"phone {self.serial}: {there} is too large")

    def _sync_error(self, connection: socket.socket, there: str, nbytes: int) -> UnavailableError:
        return UnavailableError(f"phone {self.serial}: {there}: {_text(connection, min(nbytes, 4096))}")

    @contextmanager
    def _opened(self, service: str, limit_s: float) -> Iterator[socket.socket]:
        """Open a service of the phone."""
        where = f"{self.host}:{self.port}"
        try:
            connection = socket.create_connection((self.host, self.port), timeout=_CONNECT_S)
        except OSError as error:
            raise UnavailableError(f"no adb server answers at {where}", "adb start-server") from error
        with connection:
            connection.settimeout(limit_s)
            try:
                self._ask(connection, f"host:transport:{self.serial}")
                self._ask(connection, service)
                yield connection
            except (OSError, EOFError) as error:
                reason = "took too long" if isinstance(error, TimeoutError) else "went away"
                raise DeviceLostError(f"phone {self.serial} {reason}", "see `adb devices`") from error

    def _ask(self, connection: socket.socket, service: str) -> None:
        request = service.encode()
        connection.sendall(f"{len(request):04x}".encode() + request)
        status = exactly(connection, 4)
        if status == b"OKAY":
            return
        if status != b"FAIL":
            raise UnavailableError(f"{self.host}:{self.port} is not an adb server", "adb start-server")
        reason = _text(connection, int(exactly(connection, 4), 16))
        lost = any(word in reason for word in ("not found", "offline", "closed"))
        raise (DeviceLostError if lost else UnavailableError)(f"phone {self.serial}: {reason}", "see `adb devices`")


def phones(host: str = "127.0.0.1", port: int = PORT, limit_s: float = 2.0) -> dict[str, str] | None:
    """Return serial → state (``device``, ``unauthorized``, …) of the phones that are attached to an adb server.

    None where no server answers; none is started.
    """
    try:
        with socket.create_connection((host, port), timeout=limit_s) as connection:
            Phone("", host, port)._ask(connection, "host:devices")  # noqa: SLF001 - the same protocol
            nbytes = int(exactly(connection, 4), 16)
            lines = exactly(connection, nbytes).decode(errors="replace").splitlines()
    except (OSError, EOFError, ValueError, UnavailableError):
        return None
    pairs = (line.partition("\t") for line in lines)
    return {serial: state for serial, _, state in pairs if serial}


def _sync_head(connection: socket.socket) -> tuple[bytes, int]:
    """Return the kind of the next message, and its size in bytes."""
    return struct.unpack("<4sI", exactly(connection, 8))


def _text(connection: socket.socket, nbytes: int) -> str:
    return " ".join(exactly(connection, nbytes).decode(errors="replace").split())
