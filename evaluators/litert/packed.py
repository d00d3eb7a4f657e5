"""Weights packed by XNNPACK, once per model, for all stages, processors and plans.

XNNPACK rearranges weights when it compiles; for VGG16 that takes a second and another 553 MB. Its cache file identifies
packed weights by their buffer's number in the model, and stage files keep those numbers. So one file, made from the
whole model and mapped once into memory, serves every stage of every plan. The runtime does not notice when the model or
the machine changes: the file's name therefore holds the digest of both, and its own digest is checked before use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from evaluators.machine import kernel_text
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.models.cache import cache_dir, intact, kept

_LOGGER = logging.getLogger("partition_optimizer")
_KEEP_NBYTES = 4 << 30
_WITH_WEIGHTS = {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV"}  # the second input


def packed_weights(content_digest: str, build: Callable[[Path], None]) -> Path | None:
    """Return the packed weights of a model, made by ``build`` where they are missing or damaged.

    Args:
        content_digest: SHA-256 of the model file.
        build: compiles the whole model so that the runtime writes the file it is given.

    Returns:
        The file, or None where the cache folder cannot be used; stages then pack their own weights.
    """
    path = _path(content_digest)

    def make(temporary: Path) -> None:
        build(temporary)
        temporary.chmod(0o444)  # the runtime opens it again and again, and must never write to it

    with contextlib.suppress(OSError):
        os.utime(path)  # the last use, for _prune; set before the digest is checked, which a later change would void
    try:
        kept(path, make)
    except (UsageError, UnavailableError) as error:
        # XNNPACK ends its process when the disk is full.
        _LOGGER.warning("packed weights are not kept (%s); every stage packs its own, which is slower", error)
        return None
    _prune(path)
    return path


def existing_packed_weights(content_digest: str) -> Path | None:
    """Return the packed weights of a model if they exist and are intact, else None."""
    path = _path(content_digest)
    return path if intact(path) else None


class Holder:
    """Keeps packed weights from being removed until workers have opened them.

    Each file is locked while it is held, which keeps other processes from removing it on file systems with locks.
    """

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def hold(self, path: Path | None) -> Path | None:
        """Keep a file until :meth:`let_go` or :meth:`close`; return its path, or None where it no longer exists."""
        if path is None:
            return None
        try:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a file system without locks; _remove holds its lock only for a moment
            fcntl.flock(number, fcntl.LOCK_SH)
        if not os.fstat(number).st_nlink:
            os.close(number)
            return None
        self.let_go(path)  # an earlier file at this path was damaged and made again
        self._files[path] = number
        return path

    def let_go(self, path: Path | None) -> None:
        """Release a file; does nothing for one that is not held."""
        number = self._files.pop(path, None) if path is not None else None
        if number is not None:
            os.close(number)

    def close(self) -> None:
        """Release all files."""
        for path in list(self._files):
            self.let_go(path)


def _path(content_digest: str) -> Path:
    key = machine_digest(importlib.metadata.version("ai-edge-litert"), content_digest)
    return cache_dir() / "packed" / f"{key}.xnnpack"


def _prune(keep: Path) -> None:
    """Remove the least recently used files, so that the folder stays within its limit."""
    total = 0
    with contextlib.suppress(OSError):
        files = sorted(keep.parent.glob("*.xnnpack"), key=lambda p: p.stat().st_mtime, reverse=True)
        for path in files:
            total += path.stat().st_size
            if total > _KEEP_NBYTES and path != keep:
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a file and those beside it with its stem, unless a process holds it."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError as error:
            _LOGGER.debug("%s: cannot be locked (%s)", path, error)
        for mine in path.parent.glob(f"{path.stem}.*"):
            mine.unlink(missing_ok=True)


def machine_digest(*words: str) -> str:
    """Return a digest of some words, such as a runtime's version, and of the CPU's model and instruction sets."""
    wanted = ("model name", "flags", "Features", "CPU part")
    pairs = (line.partition(":") for line in kernel_text(Path("/proc/cpuinfo")).splitlines())
    found = {" ".join(value.split()) for key, _, value in pairs if key.strip() in wanted}
    return hashlib.sha256("\n".join([*words, *sorted(found)]).encode()).hexdigest()[:32]


def can_be_packed(graph: Graph) -> bool:
    """Return whether XNNPACK's file can hold a model's weights: filters in one buffer must have one kind and shape."""
    seen: dict[int, tuple[str, tuple[int, ...]]] = {}
    filters = ((o.kind, graph.tensors[o.inputs[1]]) for o in graph.operators if o.kind in _WITH_WEIGHTS)
    return all(seen.setdefault(t.buffer, (kind, t.shape)) == (kind, t.shape) for kind, t in filters if t.constant)


def usable_packed(packed: Path | None, graph: Graph, whole: Graph, stages: Sequence[Sequence[int]]) -> Path | None:
    """Return the packed weights for stages that are compiled together.

    None where they read weights that were not packed: slices of the model's, or weights that replace them.

    Args:
        packed: of ``whole``, the model that ``graph`` is, or was rewritten from.
        stages: operators of each.
    """
    if graph is whole or whole.source is None:
        return packed
    buffers = len(whole.source.schema.buffers)  # buffers after these hold slices of weights, or replacements
    operators = [graph.operators[index] for each in stages for index in each]
    made = any(o.kind in _WITH_WEIGHTS and graph.tensors[o.inputs[1]].buffer >= buffers for o in operators)
    return None if made else packed
