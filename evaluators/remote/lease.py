"""Who measures on a device: one client at a time, for as long as it shows that it is alive."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from search_spaces.errors import UnavailableError


class BusyError(UnavailableError):
    """The device measures for somebody else, and will be free again."""


class Lease:
    """The right to measure on a device. What is beside each other on one device disturbs each other, whatever cores it
    uses, so there is one lease and not one for each processor.

    Args:
        seconds: after which a silent client has lost it.
    """  # noqa: D205

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._client = ""
        self._study = ""
        self._until_s = 0.0

    def take(self, client: str, study: str) -> None:
        """Give the lease to a client that asks for it, which may have it already.

        Raises:
            BusyError: another client has it.
        """
        with self._lock:
            left_s = self._until_s - time.monotonic()
            if self._client not in ("", client) and left_s > 0.0:
                raise BusyError(f"busy with study {self._study!r}", "wait until it has ended, or take another device")
            self._client, self._study, self._until_s = client, study, time.monotonic() + self.seconds

    def renew(self, client: str) -> bool:
        """Return whether the client has the lease, which then lasts anew."""
        with self._lock:
            if not client or client != self._client:
                return False
            self._until_s = time.monotonic() + self.seconds
            return True

    def end(self, client: str) -> None:
        """Give the lease up."""
        with self._lock:
            if client == self._client:
                self._client = ""

    def lapsed(self) -> str:
        """Return the client that has not been heard of for too long, or ""."""
        with self._lock:
            return self._client if self._client and time.monotonic() > self._until_s else ""


@contextmanager
def whole_machine(lock: Path) -> Iterator[None]:
    """Keep other agents of this machine from measuring meanwhile.

    Raises:
        BusyError: one of them does.
        OSError: the lock cannot be made.
    """
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError("busy with another agent of this machine", "end one of the two") from None
        yield
