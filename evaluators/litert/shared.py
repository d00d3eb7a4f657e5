"""Memory that the parent and the lanes share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from evaluators.litert.lanes import Lanes, Request
from search_spaces.errors import UnavailableError

SETUP_LIMIT_S = 60.0
# How long a lane may do nothing: this, and the time of an inference, after a first result several times over.
SLACK_S = 1.0


class Arena:
    """Shared memory of the parent and all lanes, under a number that the lanes know it by."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create(f"arena-{number}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.nbytes)
            self.memory = mmap.mmap(self.fd, self.nbytes)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise UnavailableError(f"cannot get {self.nbytes} bytes of shared memory: {error}") from error
        self.known_to: set[str] = set()

    def introduce(self, lanes: Lanes, names: Sequence[str]) -> None:
        """Make the arena known to the lanes that do not know it yet."""
        new = [name for name in names if name not in self.known_to]
        head = {"op": "arena", "id": self.number, "nbytes": self.nbytes}
        lanes.ask_all({name: Request(head, fds=[self.fd]) for name in new}, SETUP_LIMIT_S)
        self.known_to.update(new)

    def close(self, lanes: Lanes | None) -> None:
        """Give the memory back; with ``lanes``, have them unmap it too."""
        if lanes is not None:
            head = {"op": "arena", "id": self.number, "nbytes": 0}
            lanes.ask_all({name: Request(head) for name in self.known_to}, SETUP_LIMIT_S)
        os.close(self.fd)
