"""The user's cache folder for models that take seconds to build; files are verified on each use."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from search_spaces.core.bounded import parsed_json, read_bounded
from search_spaces.core.errors import UsageError, reason_of
from search_spaces.models.files import file_digest, replacing

ENVIRONMENT = "PARTITION_OPTIMIZER_CACHE"
SCHEMA_VERSION = 1

_LOGGER = logging.getLogger("partition_optimizer")
_HINT = f"set {ENVIRONMENT} to a folder with free space that you may write to"


def cache_dir() -> Path:
    """Return the cache folder: ``$PARTITION_OPTIMIZER_CACHE``, or the system's default; it need not exist."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen:
        return Path(chosen).absolute()
    from platformdirs import user_cache_path

    return user_cache_path("partition-optimizer")


def cached(name: str, version: int, build: Callable[[Path], None]) -> Path:
    """Return the file ``models/<name>.v<version>.tflite`` of the cache folder, made by :func:`kept`.

    Args:
        name: what is cached; a plain file name.
        version: of the builder; another version is another file.
        build: writes the file at the path that it is given.

    Raises:
        UsageError: the cache folder cannot be written, or the disk is full.
    """
    return kept(cache_dir() / "models" / f"{name}.v{version}.tflite", build)


def kept(path: Path, build: Callable[[Path], None]) -> Path:
    """Return the file at ``path``, made by ``build`` where it is missing or damaged.

    The file's digest is written beside it and checked on every call (about 0.3 s for 553 MB). A damaged file is
    reported to the logger ``partition_optimizer`` and built again. Concurrent processes build a file once.

    Raises:
        UsageError: the folder cannot be written, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path):
            problem = _problem(path)
            if problem is not None:
                if path.exists():
                    _LOGGER.warning("%s: the cached file is damaged (%s) and is made again", path, problem)
                _build(path, build)
    except OSError as error:
        if _problem(path) is None:  # a read-only cache still serves its files
            return path
        raise UsageError(f"{error.filename or path}: the cache cannot be written: {reason_of(error)}", _HINT) from error
    except UsageError as error:
        if isinstance(error.__cause__, OSError):
            raise UsageError(error.what, _HINT) from error
        raise
    return path


def private_folder(path: Path) -> Path | None:
    """Return a folder for files that are trusted as they are, made if need be; None where others could write to it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        _LOGGER.warning("%s: the cache folder cannot be used: %s", path, reason_of(error))
        return None
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        _LOGGER.warning("%s: the cache folder is not used: another user could write to it", path)
        return None
    return path


def prune(folder: Path, pattern: str, most_nbytes: int) -> None:
    """Remove the oldest files that match a pattern until the rest has at most ``most_nbytes`` bytes."""
    total = 0
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob(pattern), key=lambda p: p.stat().st_mtime, reverse=True):
            total += path.stat().st_size
            if total > most_nbytes:
                path.unlink(missing_ok=True)


def intact(path: Path) -> bool:
    """Return whether a file that :func:`kept` has made is there and undamaged."""
    return _problem(path) is None


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Lock the entry for this process; the system releases the lock when the process ends, even if killed."""
    with path.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _LOGGER.info("another process is writing %s; waiting for it", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(path: Path, build: Callable[[Path], None]) -> None:
    """Build in a temporary folder, which a killed build may have left and is emptied first."""
    workshop = path.with_suffix(".building")
    shutil.rmtree(workshop, ignore_errors=True)
    workshop.mkdir()
    try:
        made = workshop / path.name
        build(made)
        side = {"schema_version": SCHEMA_VERSION, "sha256": file_digest(made), "nbytes": made.stat().st_size}
        made.replace(path)
        with replacing(_side(path)) as file:
            file.write(json.dumps(side, indent=2).encode())
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _problem(path: Path) -> str | None:
    """Return why an entry cannot be used, or None where it can."""
    try:
        nbytes = path.stat().st_size
        side = parsed_json(read_bounded(_side(path)))
        if not isinstance(side, dict) or side.get("schema_version") != SCHEMA_VERSION:
            return "its digest file cannot be read"
        if nbytes != side.get("nbytes"):
            return f"it has {nbytes} bytes instead of {side.get('nbytes')}"
        return None if file_digest(path) == side.get("sha256") else "its digest differs"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except OSError as error:
        return reason_of(error)
    except (ValueError, RecursionError):
        return "its digest file cannot be read"


def _side(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256.json")
