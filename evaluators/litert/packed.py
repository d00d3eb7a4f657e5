"""Weights packed once per model, for all stages, processors and plans.

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
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

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
        os.utime(path)  # when it was last wanted; before its digest is taken, which holds for the file as it stands
    try:
        kept(path, make)
    except (UsageError, UnavailableError) as error:
        # Where the disk is full while it packs, XNNPACK ends its process.
        _LOGGER.warning("packed weights are not kept (%s); every stage packs its own, which is slower", error)
        return None
    _prune(path)
    return path


def existing_packed_weights(content_digest: str) -> Path | None:
    """Return the packed weights of a model if they are there and intact; nothing is made."""
    path = _path(content_digest)
    return path if intact(path) else None


class Holder:
    """Keeps packed weights where they are until workers have them open; they are not removed meanwhile.

    That is true of other processes, too, on file systems with locks: each file is locked for as long as it is held.
    """

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def hold(self, path: Path | None) -> Path | None:
        """Return a path that stays a file's until :meth:`let_go` or :meth:`close`; None where it is gone already."""
        if path is None:
            return None
        try:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        with contextlib.suppress(OSError):  # where there are no locks; whoever is removing it has it for a moment only
            fcntl.flock(number, fcntl.LOCK_SH)
        if not os.fstat(number).st_nlink:
            os.close(number)
            return None
        self.let_go(path)  # what was there before it was damaged, and made again
        self._files[path] = number
        return path

    def let_go(self, path: Path | None) -> None:
        """Tell that a file is no longer needed; one that is not held is none."""
        number = self._files.pop(path, None) if path is not None else None
        if number is not None:
            os.close(number)

    def close(self) -> None:
        """Let all files go."""
        for path in list(self._files):
            self.let_go(path)


def _path(content_digest: str) -> Path:
    key = machine_digest(importlib.metadata.version("ai-edge-litert"), content_digest)
    return cache_dir() / "packed" / f"{key}.xnnpack"


def _prune(keep: Path) -> None:
    """Remove what was not used for the longest time, so that the folder stays within its limit."""
    total = 0
    with contextlib.suppress(OSError):
        files = sorted(keep.parent.glob("*.xnnpack"), key=lambda p: p.stat().st_mtime, reverse=True)
        for path in files:
            total += path.stat().st_size
            if total > _KEEP_NBYTES and path != keep:
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a file and what lies beside it, unless somebody holds it."""
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
    """Return a digest of some words, as a runtime's version, and of the processor's model and instruction sets."""
    wanted = ("model name", "flags", "Features", "CPU part")
    found: set[str] = set()
    with contextlib.suppress(OSError):
        pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        found = {" ".join(value.split()) for key, _, value in pairs if key.strip() in wanted}
    return hashlib.sha256("\n".join([*words, *sorted(found)]).encode()).hexdigest()[:32]


def can_be_packed(graph: Graph) -> bool:
    """Return whether XNNPACK's file can hold a model's weights: it takes two filters in one buffer for the same."""
    seen: dict[int, tuple[str, tuple[int, ...]]] = {}
    filters = ((o.kind, graph.tensors[o.inputs[1]]) for o in graph.operators if o.kind in _WITH_WEIGHTS)
    return all(seen.setdefault(t.buffer, (kind, t.shape)) == (kind, t.shape) for kind, t in filters if t.constant)


def usable_packed(packed: Path | None, graph: Graph, whole: Graph, stages: Sequence[Sequence[int]]) -> Path | None:
    """Return the packed weights that stages can use, which are compiled together.

    None where they read weights that nobody has packed: parts of the model's, or what was made in their place.

    Args:
        packed: of ``whole``, the model that ``graph`` was rewritten from, or is.
        stages: operators of each.
    """
    if graph is whole or whole.source is None:
        return packed
    buffers = len(whole.source.schema.buffers)  # those behind them are parts of weights, or made in their place
    operators = [graph.operators[index] for each in stages for index in each]
    made = any(o.kind in _WITH_WEIGHTS and graph.tensors[o.inputs[1]].buffer >= buffers for o in operators)
    return None if made else packed
