"""Models that were sent to a device: each stored once under its digest, checked on arrival, and limited in size."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from evaluators.remote.wire import DIGEST, WireError
from search_spaces.models.cache import prune
from search_spaces.models.files import replacing

MAX_FILE_NBYTES = 8 << 30
MAX_STORE_NBYTES = 32 << 30


class Store:
    """A folder of models by their SHA-256.

    Args:
        folder: made where it does not exist.
        max_file_nbytes: limit for one model; for all it is :data:`MAX_STORE_NBYTES`, and the least recently used are
            removed.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, max_file_nbytes: int = MAX_FILE_NBYTES) -> None:
        self.folder = folder
        self.max_file_nbytes = min(max_file_nbytes, MAX_STORE_NBYTES)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in folder.glob(".*.tmp"):  # left by an agent that was killed
            left.unlink(missing_ok=True)

    def path(self, digest: str) -> Path:
        """Return the path of the model with this digest, whether or not it is there.

        Raises:
            WireError: the text is not a digest (it could be a path that leads elsewhere).
        """
        if not DIGEST.fullmatch(digest):
            raise WireError(f"{digest[:80]!r} is not a SHA-256")
        return self.folder / f"{digest}.tflite"

    def has(self, digest: str) -> bool:
        """Return whether a model is there, and record that it is used now.

        Raises:
            WireError: the text is not a digest.
        """
        path = self.path(digest)
        with suppress(OSError):
            os.utime(path)
        return path.is_file()

    def receive(self, digest: str, nbytes: int, pieces: Iterable[bytes]) -> Path:
        """Receive a model and return its path, where it appears only after its digest was checked.

        Raises:
            WireError: the model is too large, or its size or digest differs from the announcement.
            UsageError: the disk is full.
        """
        path = self.path(digest)
        self.check_size(nbytes)
        prune(self.folder, "*.tflite", MAX_STORE_NBYTES - nbytes)
        receive_file(path, digest, nbytes, pieces)
        return path

    def check_size(self, nbytes: int) -> None:
        """Check that a model of this size is accepted.

        Raises:
            WireError: the model is empty or too large.
        """
        if not 0 < nbytes <= self.max_file_nbytes:
            raise WireError(f"a file of {nbytes} bytes is too large", f"at most {self.max_file_nbytes}")


def receive_file(path: Path, digest: str, nbytes: int, pieces: Iterable[bytes]) -> None:
    """Write a file from its pieces; it appears only after its size and digest were checked.

    Raises:
        WireError: its size or digest differs from the announcement.
        UsageError: the disk is full.
    """
    found, took = hashlib.sha256(), 0
    with replacing(path) as file:
        for piece in pieces:
            took += len(piece)
            if took > nbytes:
                raise WireError(f"a file of {nbytes} bytes was announced, but more came")
            found.update(piece)
            file.write(piece)
        if took != nbytes:
            raise WireError(f"a file of {nbytes} bytes was announced, but {took} came")
        if found.hexdigest() != digest:
            raise WireError(f"a file came with digest {found.hexdigest()[:12]}…, not the {digest[:12]}… announced")
