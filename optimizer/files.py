"""Writing files so that a kill or a full disk leaves the old file or the new one, never half of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from search_spaces.errors import OptimizeError, RunFolderError

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


@contextlib.contextmanager
def disk_errors(path: Path, hint: str = "") -> Iterator[None]:
    """Turn an operating system's error about ``path`` into one line.

    Raises:
        RunFolderError: instead of any OSError, and of the ValueError for a path that no system can have.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{path}: {(error.strerror or str(error)).lower()}", hint) from error
    except ValueError as error:
        if "null" not in str(error):  # a NUL byte in a path; anything else is no matter of the disk
            raise
        raise RunFolderError(f"{str(path)!r}: {error}", hint) from error


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all bytes; the system may take fewer than it is given, and tells of a full disk only then."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where the system can."""
    with contextlib.suppress(OSError):  # some network file systems cannot open or sync a folder
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_atomic(path: Path, content: bytes) -> None:
    """Replace the file at ``path``; whoever reads it meanwhile sees the old content or the new. Makes its folder.

    Raises:
        RunFolderError: it cannot be written; what was there before is untouched.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with disk_errors(path, "what was there before is untouched"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            try:
                write_all(descriptor, content)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def write_json(path: Path, data: Any) -> None:
    """Replace the file at ``path`` by ``data`` as indented JSON.

    Raises:
        OptimizeError: ``data`` holds what JSON cannot say (NaN, an object of a class, …).
        RunFolderError: the file cannot be written.
    """
    try:
        text = json.dumps(data, indent=2, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptimizeError(f"{path.name}: not writable as JSON: {error}") from error
    write_atomic(path, text.encode() + b"\n")


def is_temporary(name: str) -> bool:
    """Return whether a file of this name was left by :func:`write_atomic` when it was killed."""
    return _TEMPORARY.fullmatch(name) is not None
