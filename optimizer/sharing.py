"""Joining a study that several workers share."""

from __future__ import annotations

import os
import platform as host
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optimizer.config import StudyConfig, option, parse_config
from optimizer.shared import SETTINGS, SharedStudy, checked_settings, settings_of
from optimizer.shared_storage import close_storage, open_storage
from search_spaces.errors import UsageError

# What a worker decides for itself; all else is the study's.
_OWN = ("minutes", "study", "out", "storage", "device", "heartbeat", "warm_start")
# What a number means, and which plans there are: in these all workers agree.
_AGREED = ("evaluator", "objective", "max_stages", "allow", "state", "robust", "power")


def placed(config: StudyConfig) -> StudyConfig:
    """Return the settings of a worker, with a run folder that no other has.

    Raises:
        UsageError: the study has no name by which others could join it.
    """
    if config.storage is None or config.out is not None:
        return config
    if config.study is None:
        raise UsageError("--storage requires the name of the study", "give --study NAME")
    return config.model_copy(update={"out": Path("runs", f"{config.study}-{host.node() or 'worker'}-{os.getpid()}")})


def joined(own: Mapping[str, Any]) -> StudyConfig:
    """Return the settings of a study that others have begun.

    Args:
        own: what was given on this worker's command line.

    Raises:
        UsageError: there is no such study, or something was given that is not for a worker to say.
        UnavailableError: the storage cannot be reached.
    """
    mine = {name: own[name] for name in _OWN if own.get(name) is not None}
    config = parse_config({"model": "joined", "budget": 1, **mine})
    if config.storage is None or config.study is None:
        raise UsageError("--model is missing", "or give --study and --storage to join a study")
    storage = open_storage(config.storage, config.heartbeat)
    try:
        known = settings_of(storage, config.study)
    finally:
        close_storage(storage)
    # Where a worker writes, and what it measures on, is its own to say.
    theirs = {name: value for name, value in known["config"].items() if name not in _OWN}
    study = parse_config({**theirs, **mine})
    # The budget cannot be told from its default here: it is the study's.
    given = {name: own[name] for name in own if own[name] is not None and name not in (*_OWN, "budget")}
    asked = parse_config({**theirs, **mine, **given})
    for name in given:
        there, here = (_plain(getattr(each, name)) for each in (study, asked))
        if there != here:
            raise UsageError(
                f"--study {config.study}: {option(name)} is {_words(there)} there and {_words(here)} here",
                "leave it out, or give another --study",
            )
    return study


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


@contextmanager
def sharing(config: StudyConfig, model_digest: str, lanes: Sequence[str]) -> Iterator[SharedStudy | None]:
    """Give the shared study, which is begun if it is new; None where a study is not shared.

    Raises:
        UsageError: it is another study than the settings are for.
        UnavailableError: the storage cannot be reached.
    """
    if config.storage is None:
        yield None
        return
    storage = open_storage(config.storage, config.heartbeat)
    worker = f"{host.node()}-{os.getpid()}-{secrets.token_hex(4)}"
    shared = SharedStudy(storage, str(config.study), worker, config.heartbeat, objectives=len(config.objective))
    try:
        mine = _settings(config, model_digest, lanes)
        there = checked_settings(shared.fact(SETTINGS, lambda: mine), str(config.study))["agreed"]
        for name, value in mine["agreed"].items():
            if name in there and there[name] != value:  # what it lacks, an earlier version did not ask
                what = option(name) if name in _AGREED else name.replace("_", " ")
                raise UsageError(
                    f"--study {config.study}: {what} is {_words(there[name])} there and {_words(value)} here",
                    "give another --study",
                )
        yield shared
    finally:
        shared.close()
        close_storage(storage)


def _words(value: object) -> str:
    return (", ".join(map(str, value)) or "not given") if isinstance(value, list) else str(value)


def _settings(config: StudyConfig, model_digest: str, lanes: Sequence[str]) -> dict[str, Any]:
    settings = config.model_dump(mode="json", exclude_unset=True)
    agreed = {name: config.model_dump(mode="json")[name] for name in _AGREED}
    return {
        "config": {name: value for name, value in settings.items() if name not in _OWN},
        "agreed": {**agreed, "model_digest": model_digest, "lanes": sorted(lanes)},
    }
