"""Writing files so that a kill or a full disk leaves the old file or the new one, never half of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from search_spaces.core.bounded import parsed_json, read_bounded
from search_spaces.core.errors import OptimizeError, PlanError, RunFolderError, UsageError, damage, reason_of, shown
from search_spaces.models.files import replacing

_MOST_NBYTES = 256 << 20
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


@contextlib.contextmanager
def disk_errors(path: Path, hint: str = "") -> Iterator[None]:
    """Turn an operating system's error about ``path`` into one line.

    Raises:
        RunFolderError: instead of any OSError, and of the ValueError for a path with a NUL byte.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{path}: {reason_of(error)}", hint) from error
    except ValueError as error:
        if "null" not in str(error):  # "embedded null byte": others are defects
            raise
        raise RunFolderError(f"{str(path)!r}: {error}", hint) from error


@contextlib.contextmanager
def damage_of(file: Path, hint: str = "") -> Iterator[None]:
    """Name ``file`` in errors about its content.

    Raises:
        RunFolderError: instead of the errors of missing and wrong values.
    """
    try:
        yield
    except (RunFolderError, PlanError) as error:
        if str(file.parent) in error.what:
            raise
        raise RunFolderError(f"{file}: {error.what}", error.hint or hint) from error
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise RunFolderError(f"{file}: damaged: {damage(error)}", hint) from error


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all bytes; the system may take fewer than it is given, and reports a full disk only then."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_atomic(path: Path, content: bytes) -> None:
    """Replace the file at ``path``; a concurrent reader sees the old content or the new. Makes its folder.

    Raises:
        RunFolderError: it cannot be written; the previous file is unchanged.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as file:
            file.write(content)
    except UsageError as error:
        raise RunFolderError(error.what, error.hint or "the previous file is unchanged") from error


def write_json(path: Path, data: Any) -> None:
    """Replace the file at ``path`` by ``data`` as indented JSON.

    Raises:
        OptimizeError: ``data`` holds what JSON cannot represent (NaN, an object of a class, …).
        RunFolderError: the file cannot be written.
    """
    try:
        text = json.dumps(data, indent=2, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptimizeError(f"{path.name}: not writable as JSON: {error}") from error
    write_atomic(path, text.encode() + b"\n")


def read_document(
    file: Path, version: int, hint: str, damaged: type[RunFolderError] = RunFolderError
) -> dict[str, Any]:
    """Return a JSON document of this program.

    Args:
        version: the newest ``schema_version`` that can be read.
        hint: what to do if it is damaged; the error is then ``damaged``.

    Raises:
        RunFolderError: it is missing, damaged, or written by a newer version.
    """
    with disk_errors(file):
        content = read_bounded(file, _MOST_NBYTES)
    try:
        document = dict(parsed_json(content))
        found = document["schema_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(f"{file}: damaged: {error}", hint) from error
    if type(found) is not int:
        raise damaged(f"{file}: damaged: schema_version is {shown(found)}, no number", hint)
    if found > version:
        reason = f"schema_version is {found}, and this version reads up to {version}"
        raise RunFolderError(f"{file}: {reason}", "update the program")
    return document


def is_temporary(name: str) -> bool:
    """Return whether a file of this name was left by :func:`write_atomic` when it was killed."""
    return _TEMPORARY.fullmatch(name) is not None
