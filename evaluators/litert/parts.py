"""Stage files with weights in common, which are stored once: in the first of the files.

The entry of each other file in a plan has ``parts``, a list of ``[file, offset, nbytes]``: byte ranges of files beside
it, or beside another model of the plan, that make the stage file when concatenated. Bytes that only this stage file has
are in ``stage_N.part``.
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
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import numpy as np

from search_spaces.core.errors import PlanError, reason_of
from search_spaces.models.files import replacing
from search_spaces.models.litert import read_model

LEAST_NBYTES = 64 << 10
"""Smaller runs are stored again: joining costs more than they take."""

Part = tuple[str, int, int]  # file, first byte, number of bytes

_NAME = re.compile(r"(?:\.\./model_\d+/)?(?:stage_\d+|whole)\.(?:tflite|part)")


def share_weights(plans: Mapping[Path, MutableMapping[str, Any]]) -> None:
    """Store weights that several stage files hold once, and record in the plans where they are.

    Args:
        plans: folder → the content of the ``plan.json`` there, whose entries get ``parts``.

    Raises:
        UsageError: a folder cannot be written, or the disk is full.
    """
    entries = [(folder, entry) for folder, plan in plans.items() for entry in _entries(plan)]
    files = [_File.read(folder, entry) for folder, entry in entries] if len(entries) > 1 else []
    often = Counter(nbytes for file in files for nbytes in {nbytes for _, nbytes in file.rows})
    named = {(file.folder / part[0]).resolve() for file in files for part in file.entry.get("parts", ())}
    known = _Known({}, {})
    for file in files:
        folder, entry, data, own = file.folder, file.entry, _bytes(file.path), Path(file.entry["file"]).stem + ".part"
        digests = {
            (first, nbytes): hashlib.sha256(data[first : first + nbytes]).digest()
            for first, nbytes in file.rows
            if often[nbytes] > 1
        }
        fixed = "parts" in entry or file.path.resolve() in named  # parts of other files point into it
        if not fixed and (parts := _split(folder, own, len(data), digests, known)):
            with replacing(folder / own) as rest:
                for (name, _, nbytes), end in zip(parts, accumulate(n for _, _, n in parts), strict=True):
                    rest.write(data[end - nbytes : end] if name == own else b"")
            file.path.unlink()
            entry["parts"] = parts
        lie = entry.get("parts", [(entry["file"], 0, len(data))])
        for (first, _), digest in digests.items():
            place = _place(folder, lie, first)
            known.digests[place] = digest
            known.places.setdefault(digest, place)


@dataclass(frozen=True, slots=True)
class _Known:
    """Where rows of weights lie, as file and first byte, and the digest of the row at each place."""

    places: dict[bytes, tuple[Path, int]]
    digests: dict[tuple[Path, int], bytes]


@dataclass(frozen=True, slots=True)
class _File:
    """A stage file, joined where it has parts, and the rows of its weights: first byte and size, in order.

    A filter that is split by channels consists of rows of the whole one.
    """

    folder: Path
    entry: MutableMapping[str, Any]
    path: Path
    rows: list[tuple[int, int]]

    @classmethod
    def read(cls, folder: Path, entry: MutableMapping[str, Any]) -> _File:
        if not _NAME.fullmatch(str(entry["file"])):
            raise PlanError(f"{folder}: the plan names a stage file {entry['file']!r}", "it is called stage_<n>.tflite")
        path = join(folder, entry["parts"], entry["sha256"]) if "parts" in entry else folder / entry["file"]
        graph = read_model(path)
        extents = graph.source.extents if graph.source is not None else {}
        counts = {tensor.buffer: tensor.shape[0] for tensor in graph.tensors if tensor.constant and tensor.shape}
        rows: list[tuple[int, int]] = []
        for buffer, extent in sorted(extents.items(), key=lambda pair: pair[1].offset):
            count = counts.get(buffer, 1)
            each = extent.nbytes // count if count and extent.nbytes % count == 0 else extent.nbytes
            if extent.nbytes >= LEAST_NBYTES:
                rows += [(extent.offset + first, each) for first in range(0, extent.nbytes, each)]
        return cls(folder, entry, path, rows)


def _split(folder: Path, own: str, size: int, digests: Mapping[tuple[int, int], bytes], known: _Known) -> list[Part]:
    """Return a file as runs of its own bytes and of known rows; an empty list where no run is long enough.

    Args:
        own: name of the file that will hold its own bytes.
        digests: (first byte, size) of each of its rows → digest, in order.
    """
    runs: list[tuple[int, Path, int, int]] = []  # first byte here, file, first byte there, number of bytes
    for (first, nbytes), digest in digests.items():
        begin, path, there, so_far = runs[-1] if runs else (0, Path(), 0, 0)
        if runs and first == begin + so_far and known.digests.get((path, there + so_far)) == digest:
            runs[-1] = begin, path, there, so_far + nbytes
        elif digest in known.places and first >= begin + so_far:  # otherwise the last run covers it
            runs.append((first, *known.places[digest], nbytes))
    parts: list[Part] = []
    moved, done = 0, 0  # bytes found elsewhere, by which its own move up; bytes handled so far
    for first, path, there, nbytes in runs:
        if nbytes >= LEAST_NBYTES:
            parts += [(own, done - moved, first - done), (os.path.relpath(path, folder), there, nbytes)]
            moved, done = moved + nbytes, first + nbytes
    return [part for part in (*parts, (own, done - moved, size - done)) if part[2]] if parts else []


def _place(folder: Path, parts: Sequence[Part], first: int) -> tuple[Path, int]:
    """Return the file that holds a byte of a stage file, and the position there."""
    for (name, offset, nbytes), end in zip(parts, accumulate(n for _, _, n in parts), strict=True):
        if first < end:
            return Path(os.path.normpath(folder / name)), offset + first - (end - nbytes)
    raise ValueError(f"byte {first} is beyond the file")


def _entries(plan: Mapping[str, Any]) -> list[MutableMapping[str, Any]]:
    return [*plan.get("files", ()), *([plan["fallback"]] if "fallback" in plan else ())]


def _bytes(path: Path) -> memoryview:
    """Return a file's bytes, read from disk on access."""
    return np.memmap(path, np.uint8, "r").data if path.stat().st_size else memoryview(b"")


def join(folder: Path, parts: Sequence[Any], digest: str) -> Path:
    """Join a stage file from its parts and return its path; it exists until the process ends.

    Args:
        folder: of the plan.
        digest: SHA-256 (hex) of the file.

    Raises:
        PlanError: a part is missing or lies outside its file, or the joined file has another digest.
    """
    try:
        named = [(str(name), int(first), int(nbytes)) for name, first, nbytes in parts]
        sizes = {name: (folder / name).stat().st_size for name, _, _ in named if _NAME.fullmatch(name)}
        if any(name not in sizes or not 0 <= first <= first + n <= sizes[name] for name, first, n in named):
            raise PlanError(f"{folder}: the plan is damaged: a part of a stage file lies in no file of the plan")
        if sum(nbytes for _, _, nbytes in named) > sum(sizes.values()):
            raise PlanError(f"{folder}: the plan is damaged: parts of a stage file are named several times")
        found = hashlib.sha256()
        with NamedTemporaryFile(dir=_room().name, suffix=".tflite", delete=False) as file:
            for name, first, nbytes in named:
                run = _bytes(folder / name)[first : first + nbytes]
                found.update(run)
                file.write(run)
        if found.hexdigest() != digest:
            Path(file.name).unlink()
            raise PlanError(f"{folder}: parts make another stage file than the plan was made with: its digest differs")
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"{folder}: the plan is damaged: parts of a stage file are not numbers") from error
    except OSError as error:
        raise PlanError(
            f"{error.filename or folder}: {reason_of(error)}", "keep stage files beside plan.json"
        ) from error
    to = Path(_room().name, f"{digest}.tflite")
    return Path(file.name).replace(to)  # processes that have an earlier one open keep it


@cache
def _room() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="stages-")
