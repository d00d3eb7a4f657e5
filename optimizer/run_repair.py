"""A damaged manifest made anew from the settings and the log beside it, and what makes two studies different."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from optimizer.records import Record
from optimizer.storage import read_log
from search_spaces.errors import RunFolderError, UsageError
from search_spaces.yaml_file import read_settings

_MAX_NBYTES = 1 << 20
_SHOWN_CHARACTERS = 80


def remade_manifest(
    path: Path, config_file: str, log_file: str, fixed: Mapping[str, Any], schema_version: int
) -> dict[str, Any] | None:
    """Return a manifest that the settings and the log of a run folder allow for; None where they tell too little.

    The settings must be readable, and the log must hold a plan of the model that is asked for: what else the manifest
    said of the model and its processors is then taken from what is asked for.

    Raises:
        RunFolderError: they are those of another study.
    """
    settings = _settings(path / config_file)
    try:
        records = read_log(path / log_file).records
    except RunFolderError:
        return None
    plans = list(_plans(records))
    if settings is None or not plans:
        return None
    if plans[0].get("graph_digest") != fixed["model_digest"]:
        raise RunFolderError(f"{path} holds another study: it is of another model", "give another --study or --out")
    kept = {name: settings.get(name, value) for name, value in fixed.items()}
    return {
        "schema_version": schema_version,
        "study": settings["study"],
        "seed": settings.get("seed"),
        "fixed": kept,
        "fingerprint": {},
        "resumed": [],
        "remade": True,
    }


def put_aside(file: Path) -> Path:
    """Give a damaged file another name, and return that."""
    for number in count(1):
        other = file.with_name(f"{file.name}.damaged-{number}")
        if not other.exists():
            break
    return file.rename(other)


def difference(name: str, there: Any, here: Any) -> str:
    """Return in words how a setting of a study that exists differs from what is asked for."""
    if name == "model_digest":
        return "it is of another model"
    if name == "lanes":
        before, now = _names(there), _names(here)
        if before == now:
            return f"its processors {', '.join(before)} are others than those of the same names here"
        return f"it was measured on {', '.join(before) or 'none'}, not on {', '.join(now)}"
    if name == "study":
        return f"it is called {show(there)}, not {show(here)}"
    option = "--" + name.replace("_", "-")
    return f"it was begun with {option} {_value(there)}, not {_value(here)}"


def show(value: object) -> str:
    """Return a value as JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


def _value(value: Any) -> str:
    if value is None:
        return "left out"
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return show(text)[1:-1]


def _names(lanes: Any) -> list[str]:
    return [str(lane).split(" (", maxsplit=1)[0] for lane in lanes] if isinstance(lanes, Sequence) else []


def _plans(records: Sequence[Record]) -> Iterator[Mapping[str, Any]]:
    for record in records:
        plan = record.data.get("plan") if record.kind in {"trial", "baseline"} else None
        if isinstance(plan, Mapping):
            yield plan


def _settings(file: Path) -> dict[str, Any] | None:
    try:
        found = read_settings(file)
    except UsageError:
        return None
    return found if isinstance(found.get("study"), str) else None
