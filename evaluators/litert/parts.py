"""Stage files that have weights in common: on disk these are once, in the first of the files.

The entry of such a file in a plan has ``parts``, a list of ``[file, offset, nbytes]``: runs of bytes of files beside
it, or beside another model of the plan, which make the stage file one behind another. What it has alone is
``stage_N.part``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
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

_NAME = re.compile(r"(?:\.\./model_\d+/)?(?:stage_\d+|whole)\.(?:tflite|part)")


def share_weights(plans: Mapping[Path, MutableMapping[str, Any]]) -> None:
    """Write weights that several stage files hold once, and say in the plans where they are.

    Args:
        plans: folder → the document of the plan there, whose entries get ``parts``.

    Raises:
        UsageError: a folder cannot be written, or the disk is full.
    """
    entries = [(folder, entry) for folder, plan in plans.items() for entry in _entries(plan)]
    known: dict[bytes, tuple[Path, int]] = {}  # digest of weights → where they lie
    for folder, entry in entries if len(entries) > 1 else ():
        path = folder / entry["file"]
        source, data = read_model(path).source, _bytes(path)
        extents = source.extents.values() if source is not None else ()
        found = sorted((e.offset, e.nbytes) for e in extents if e.nbytes >= LEAST_NBYTES)
        digests = [hashlib.sha256(data[first : first + nbytes]).digest() for first, nbytes in found]
        parts: list[tuple[str, int, int]] = []
        own, moved, done = path.with_suffix(".part"), 0, 0  # bytes that lie elsewhere, so that others move up; so far
        new: dict[bytes, int] = {}
        for digest, (first, nbytes) in zip(digests, found, strict=True):
            if first < done:
                continue  # it lies within the one before
            if digest in known:
                parts += [(own.name, done - moved, first - done), (*_from(folder, known[digest]), nbytes)]
                moved, done = moved + nbytes, first + nbytes
            else:
                new.setdefault(digest, first - moved)
        if parts:
            parts.append((own.name, done - moved, len(data) - done))
            ends = accumulate(nbytes for _, _, nbytes in parts)
            with replacing(own) as file:
                for (name, _, nbytes), end in zip(parts, ends, strict=True):
                    file.write(data[end - nbytes : end] if name == own.name else b"")
            path.unlink()
            entry["parts"] = [part for part in parts if part[2]]
        known |= {digest: (own if parts else path, first) for digest, first in new.items()}


def _entries(plan: Mapping[str, Any]) -> list[MutableMapping[str, Any]]:
    return [*plan.get("files", ()), *([plan["fallback"]] if "fallback" in plan else ())]


def _bytes(path: Path) -> memoryview:
    """Return a file's bytes, which are read when they are looked at."""
    return np.memmap(path, np.uint8, "r").data if path.stat().st_size else memoryview(b"")


def _from(folder: Path, place: tuple[Path, int]) -> tuple[str, int]:
    return os.path.relpath(place[0], folder), place[1]


def join(folder: Path, parts: Sequence[Any], digest: str) -> Path:
    """Return a stage file that was joined from its parts; it is there until the process ends.

    Args:
        folder: of the plan.
        digest: SHA-256 of the file; the caller checks it.

    Raises:
        PlanError: a part is not there, or not within its file.
    """
    to = Path(_room().name, f"{hashlib.sha256(digest.encode()).hexdigest()}.tflite")
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
    except (TypeError, ValueError) as error:
        raise PlanError(f"{folder}: the plan is damaged: parts of a stage file are not numbers") from error
    except OSError as error:
        raise PlanError(
            f"{error.filename or folder}: {(error.strerror or str(error)).lower()}", "keep stage files beside plan.json"
        ) from error
    return to


@cache
def _room() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="stages-")
