"""What a file holds, as a digest that is computed once for as long as the file stays as it is."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

_Stamp = tuple[int, int, int, int, int]

_SETTLED_NS = 100_000_000  # well above the step of a file system's clock, within which a change leaves no trace
_known: dict[str, tuple[_Stamp, str]] = {}


def file_digest(path: Path) -> str:
    """Return the SHA-256 (hex) of a file (about 0.4 s for 553 MB).

    Asked again, it is not read again unless its place, size or times have changed since: a study asks for that of its
    model, its packed weights and its stage files several times.

    Raises:
        OSError: the file cannot be read.
    """
    key = os.path.realpath(path)
    with path.open("rb", buffering=0) as file:
        stamp = _stamp(file.fileno())
        if key in _known and _known[key][0] == stamp:
            return _known[key][1]
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _stamp(file.fileno()) == stamp and time.time_ns() - max(stamp[3:]) > _SETTLED_NS:
            _known[key] = (stamp, digest)
    return digest


def _stamp(file: int) -> _Stamp:
    found = os.fstat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
