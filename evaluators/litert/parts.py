"""Stage files that have weights in common: on disk these are once, in the first of the files.

The entry of such a file in a plan has ``parts``, a list of ``[file, offset, nbytes]``: runs of bytes of files beside
it, or beside another model of the plan, which make the stage file one behind another. What it has alone is
``stage_N.part``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from search_spaces.core.errors import PlanError
from search_spaces.models.files import replacing
from search_spaces.models.litert import read_model

LEAST_NBYTES = 64 << 10
"""Fewer are written again: joining costs more than they take."""

Part = tuple[str, int, int]  # file, first byte, how many

_NAME = re.compile(r"(?:\.\./model_\d+/)?(?:stage_\d+|whole)\.(?:tflite|part)")


def share_weights(plans: Mapping[Path, MutableMapping[str, Any]]) -> None:
    """Write weights that several stage files hold once, and say in the plans where they are.

    Args:
        plans: folder → the document of the plan there, whose entries get ``parts``.

    Raises:
        UsageError: a folder cannot be written, or the disk is full.
    """
    files = [_File.read(folder, entry) for folder, plan in plans.items() for entry in _entries(plan)]
    often = Counter(nbytes for file in files for _, nbytes in file.weights)
    named = {(file.folder / part[0]).resolve() for file in files for part in file.entry.get("parts", ())}
    known: dict[bytes, tuple[Path, int]] = {}  # digest of weights → where they lie
    for file in files:
        folder, entry, data, own = file.folder, file.entry, _bytes(file.path), Path(file.entry["file"]).stem + ".part"
        digests = {
            (first, nbytes): hashlib.sha256(data[first : first + nbytes]).digest()
            for first, nbytes in file.weights
            if often[nbytes] > 1
        }
        fixed = "parts" in entry or file.path.resolve() in named  # others need it as it is
        if not fixed and (parts := _split(folder, own, len(data), digests, known)):
            with replacing(folder / own) as rest:
                for (name, _, nbytes), end in zip(parts, accumulate(n for _, _, n in parts), strict=True):
                    rest.write(data[end - nbytes : end] if name == own else b"")
            file.path.unlink()
            entry["parts"] = parts
        lie = entry.get("parts", [(entry["file"], 0, len(data))])
        for (first, _), digest in digests.items():
            known.setdefault(digest, _place(folder, lie, first))


@dataclass(frozen=True, slots=True)
class _File:
    """A stage file, joined where it has parts, and its weights: first byte and size, in order."""

    folder: Path
    entry: MutableMapping[str, Any]
    path: Path
    weights: list[tuple[int, int]]

    @classmethod
    def read(cls, folder: Path, entry: MutableMapping[str, Any]) -> _File:
        path = join(folder, entry["parts"], entry["sha256"]) if "parts" in entry else folder / entry["file"]
        source = read_model(path).source
        extents = source.extents.values() if source is not None else ()
        return cls(folder, entry, path, sorted((e.offset, e.nbytes) for e in extents if e.nbytes >= LEAST_NBYTES))


def _split(
    folder: Path, own: str, size: int, digests: Mapping[tuple[int, int], bytes], known: Mapping[bytes, tuple[Path, int]]
) -> list[Part]:
    """Return a file as runs of its own bytes and of those that are known; nothing where none are.

    Args:
        own: the name of the file that is to hold its own bytes.
        digests: of its weights, by first byte and size, in order.
    """
    parts: list[Part] = []
    moved, done = 0, 0  # bytes that lie elsewhere, so that its own move up; so far
    for (first, nbytes), digest in digests.items():
        if digest in known and first >= done:  # else it lies within the one before
            path, offset = known[digest]
            parts += [(own, done - moved, first - done), (os.path.relpath(path, folder), offset, nbytes)]
            moved, done = moved + nbytes, first + nbytes
    return [part for part in (*parts, (own, done - moved, size - done)) if part[2]] if parts else []


def _place(folder: Path, parts: Sequence[Part], first: int) -> tuple[Path, int]:
    """Return the file and the place there of a byte of a stage file."""
    for (name, offset, nbytes), end in zip(parts, accumulate(n for _, _, n in parts), strict=True):
        if first < end:
            return folder / name, offset + first - (end - nbytes)
    raise ValueError(f"byte {first} is beyond the file")


def _entries(plan: Mapping[str, Any]) -> list[MutableMapping[str, Any]]:
    return [*plan.get("files", ()), *([plan["fallback"]] if "fallback" in plan else ())]


def _bytes(path: Path) -> memoryview:
    """Return a file's bytes, which are read when they are looked at."""
    return np.memmap(path, np.uint8, "r").data if path.stat().st_size else memoryview(b"")


def join(folder: Path, parts: Sequence[Any], digest: str) -> Path:
    """Return a stage file that was joined from its parts; it is there until the process ends.

    Args:
        folder: of the plan.
        digest: SHA-256 of the file; the caller checks it.

    Raises:
        PlanError: a part is not there, or not within its file.
    """
    to = Path(_room().name, f"{hashlib.sha256(repr(digest).encode()).hexdigest()}.tflite")
    try:
        named = [(str(name), int(first), int(nbytes)) for name, first, nbytes in parts]
        sizes = {name: (folder / name).stat().st_size for name, _, _ in named if _NAME.fullmatch(name)}
        if any(name not in sizes or not 0 <= first <= first + n <= sizes[name] for name, first, n in named):
            raise PlanError(f"{folder}: the plan is damaged: a part of a stage file lies in no file of the plan")
        if sum(nbytes for _, _, nbytes in named) > sum(sizes.values()):
            raise PlanError(f"{folder}: the plan is damaged: parts of a stage file are named several times")
        with to.open("wb") as file:
            for name, first, nbytes in named:
                file.write(_bytes(folder / name)[first : first + nbytes])
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"{folder}: the plan is damaged: parts of a stage file are not numbers") from error
    except OSError as error:
        raise PlanError(
            f"{error.filename or folder}: {(error.strerror or str(error)).lower()}", "keep stage files beside plan.json"
        ) from error
    return to


@cache
def _room() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="stages-")
