"""Profiles as files: one JSON document with a device's lanes, their prices, and where both come from.

A file may be given by its path, or by its name where it ships with the product (``experiments/profiles/NAME.json``).
JSON is YAML, so that a profile may also be called ``.yaml``, as platforms are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from evaluators.cost_model.process import Process
from evaluators.cost_model.profile import CostProfile
from search_spaces.bounded import parsed_json, read_bounded
from search_spaces.errors import ProfileError, UsageError, shown
from search_spaces.platform import Platform

SCHEMA_VERSION = 1
KIND = "cost profile"
SHIPPED = Path(__file__).parents[2] / "experiments" / "profiles"
SUFFIXES = (".json", ".yaml", ".yml")
_MAX_NBYTES, _HEAD_NBYTES = 64 << 20, 256
_NOT_NEGATIVE = ("processors", "links", "contention")


def find_profile(source: str | Path) -> tuple[CostProfile, Platform] | None:
    """Return the profile that a path or a shipped name stands for; None where it is neither.

    Raises:
        ProfileError: the file is a damaged profile.
        UsageError: it cannot be read.
    """
    name, path = str(source), Path(source)
    if path.suffix != ".json" and not _begins_as_profile(path):
        path = SHIPPED / f"{name}.json"
        if "/" in name or "\0" in name or not path.is_file():
            return None
    return read_profile(path)


def _begins_as_profile(path: Path) -> bool:
    """Return whether a file of YAML is a profile, and not a platform."""
    if path.suffix not in SUFFIXES:
        return False
    try:
        head = read_bounded(path, _MAX_NBYTES)[:_HEAD_NBYTES]
    except OSError:
        return False
    return head.lstrip().startswith(b"{") and KIND.encode() in head


def shipped_profiles() -> list[str]:
    """Return the names of the profiles that ship with the product."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def to_json(profile: CostProfile, platform: Platform) -> dict[str, Any]:
    """Return a profile and its lanes as plain values."""
    plain = _plain(profile)
    return {"schema_version": SCHEMA_VERSION, "kind": KIND, "platform": platform.to_json(), "profile": plain}


def profile_digest(profile: CostProfile) -> str:
    """Return the SHA-256 (hex) of all that a profile predicts with; provenance and errors are no part of it."""
    content = {name: value for name, value in _plain(profile).items() if name not in {"provenance", "errors"}}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_profile(path: Path) -> tuple[CostProfile, Platform]:
    """Read a profile; unknown fields are ignored.

    Raises:
        ProfileError: it is no profile, of a newer version, damaged, or holds a number that is no price.
        UsageError: the file cannot be read.
    """
    try:
        if not path.is_file():
            raise UsageError(f"{path}: there is no such file", "optimize calibrate --out FILE makes a profile")
        content = parsed_json(read_bounded(path, _MAX_NBYTES))
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: is not a JSON document: {error}") from error
    try:
        return from_json(content)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error.what}", error.hint) from error


def from_json(content: object) -> tuple[CostProfile, Platform]:
    """Build a profile and its lanes from what :func:`to_json` returned; unknown fields are ignored.

    Raises:
        ProfileError: a field is missing or has the wrong type, or a price is negative or no number.
    """
    if not isinstance(content, Mapping) or content.get("kind") != KIND:
        raise ProfileError("is not a cost profile", "optimize calibrate --out FILE makes one")
    version = content.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise ProfileError(f"has schema_version {shown(version)}; this version reads 1 to {SCHEMA_VERSION}")
    platform, profile = _build(Platform, content.get("platform")), _build(CostProfile, content.get("profile"))
    for processor in profile.processors.values():
        for key, kernel in processor.kernels.items():
            if isinstance(kernel.correction, Process) and not kernel.correction.fits():
                raise ProfileError(f"{key} was fitted by another version of this program", "calibrate the device again")
    for where, number in _numbers({n: _plain(getattr(profile, n)) for n in _NOT_NEGATIVE}, "profile"):
        if not (math.isfinite(number) and number >= 0.0):
            raise ProfileError(f"{where} is {number}, which is not a price", "calibrate the device again")
    return profile, platform


def _build(kind: Any, content: object) -> Any:
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or kind.__name__
        raise ProfileError(f"{kind.__name__.lower()} is damaged: {where}: {first['msg'].lower()}") from error


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _numbers(value: Any, where: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key not in {"errors", "correction"}:
                yield from _numbers(each, f"{where}.{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _numbers(each, f"{where}.{index}")
    elif isinstance(value, float | int) and not isinstance(value, bool):
        yield where, float(value)
