"""Weights packed once per model, for all stages, lanes and plans.

XNNPACK rearranges weights when it compiles; for VGG16 that takes a second and another 553 MB. Its cache file names
packed weights by the buffer's number in the model, and our stage files keep those numbers; so one file, made from the
whole model, serves every stage of every plan, mapped once into memory. The runtime does not notice when the model or
the machine changes: the file's name therefore holds the digest of both, and its own digest is checked before use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from search_spaces.models.cache import cache_dir

_LOGGER = logging.getLogger("partition_optimizer")
_KEEP_NBYTES = 4 << 30


def packed_weights(content_digest: str, build: Callable[[Path], None]) -> Path | None:
    """Return the packed weights of a model, made by ``build`` where they are missing or damaged.

    Args:
        content_digest: SHA-256 of the model file.
        build: compiles the whole model so that the runtime writes the file it is given.

    Returns:
        The file, or None where the cache folder cannot be used; stages then pack their own weights.
    """
    path = _path(content_digest)
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _intact(path):
                _make(path, build)
            os.utime(path)
        _prune(folder, path)
    except OSError as error:
        _LOGGER.warning("packed weights are not cached (%s); every stage packs its own, which is slower", error)
        return None
    return path


def existing_packed_weights(content_digest: str) -> Path | None:
    """Return the packed weights of a model if they are there and intact; nothing is made."""
    path = _path(content_digest)
    return path if _intact(path) else None


def _path(content_digest: str) -> Path:
    key = hashlib.sha256(f"{content_digest} {_machine()}".encode()).hexdigest()[:32]
    return cache_dir() / "packed" / f"{key}.xnnpack"


def _make(path: Path, build: Callable[[Path], None]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        build(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        temporary.chmod(0o444)
        temporary.replace(path)
        _side(path).write_text(json.dumps({"schema_version": 1, "sha256": digest, "nbytes": path.stat().st_size}))
    finally:
        temporary.unlink(missing_ok=True)


def _intact(path: Path) -> bool:
    try:
        side = json.loads(_side(path).read_text())
        if not path.exists():
            return False
        if path.stat().st_size == side["nbytes"]:
            with path.open("rb", buffering=0) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == side["sha256"]:
                    return True
        _LOGGER.warning("packed weights %s are damaged; they are made again", path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return False


def _side(path: Path) -> Path:
    return path.with_suffix(".json")


def _prune(folder: Path, keep: Path) -> None:
    """Remove what was not used for the longest time, so that the folder stays within its limit."""
    total = 0
    with contextlib.suppress(OSError):
        files = sorted(folder.glob("*.xnnpack"), key=lambda p: p.stat().st_mtime, reverse=True)
        for path in files:
            total += path.stat().st_size
            if total > _KEEP_NBYTES and path != keep:
                path.unlink()
                _side(path).unlink(missing_ok=True)


def _machine() -> str:
    """Return what packing depends on: the runtime, and the processor's model and instruction sets."""
    wanted = ("model name", "flags", "Features", "CPU part")
    found = [importlib.metadata.version("ai-edge-litert")]
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in wanted:
                found.append(" ".join(value.split()))
    return "\n".join(sorted(set(found)))
