"""A study that several workers share: claims of plans, and their results.

A worker claims a plan by a running trial that carries the plan's digest. Of several claims of one plan the trial with
the lowest number wins, so workers that claim at once agree without messages. A result is written into the trial as a
record before the trial's state is set, and any worker that finds such a trial sets the state: a worker that dies in
between has lost nothing. Optuna's heartbeats find dead workers. Under ask and tell Optuna does not send them, so a
thread here does, and every :meth:`SharedStudy.look` fails the trials whose worker fell silent, which frees their plans.

A claim is one write. A result is one write, too, the record; Optuna's storages set the state separately.
"""

from __future__ import annotations

import json
import math
import os
import platform as host
import secrets
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from optuna.distributions import BaseDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, fail_stale_trials
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from optimizer.shared.storage import SILENT_BEATS, close_storage, open_storage, patiently, sqlite_file, unusable
from optimizer.study.config import StudyConfig, option, parse_config
from optimizer.study.folder import Identity
from optimizer.study.history import plain_attributes
from search_spaces.core.bounded import parsed_json
from search_spaces.core.errors import UsageError

BEAT, CLAIM, PLAN, RECORD, KIND, WORKER = "beat", "claim", "plan", "record", "kind", "worker"
SETTINGS, PROFILE, ERRORS = "settings", "profile", "errors"
KINDS = ("trial", "baseline")

# What a worker decides for itself; all else is the study's.
_OWN = ("minutes", "study", "out", "storage", "device", "heartbeat", "warm_start", "compare_with")
# Settings that define values and plans: all workers must agree on them.
_AGREED = ("evaluator", "objective", "max_stages", "allow", "state", "robust", "power")

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to measure a plan.

    Attributes:
        trial_id: in the storage.
        number: of the trial in the study.
        digest: of the plan.
    """

    trial_id: int
    number: int
    digest: str


class SharedStudy:
    """A study in a storage, as one worker sees it. For one thread; a second one sends heartbeats.

    Args:
        storage: one that :func:`~optimizer.shared.storage.open_storage` returned.
        name: of the study.
        worker: a unique name of this worker.
        heartbeat_s: seconds between heartbeats.
        objectives: how many values each of its trials has, all minimised.

    Attributes:
        pending: digest → parameters of each plan that a worker measures now.
        lost: how many results of this worker came too late, after its trial had been failed.
    """

    def __init__(self, storage: BaseStorage, name: str, worker: str, heartbeat_s: int, objectives: int = 1) -> None:
        self._storage = storage
        self._worker = worker
        self._heartbeat_s = heartbeat_s
        self._objectives = objectives
        self._id = self._patiently(lambda: self._study_id(name, [StudyDirection.MINIMIZE] * objectives))
        self._study = self._patiently(lambda: Study(study_name=name, storage=storage))  # it queries the storage
        self._seen: set[int] = set()
        self._first_seen: dict[int, float] = {}
        self._mine: int | None = None
        self._closed = threading.Event()
        self._beat = threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True)
        self.pending: dict[str, Mapping[str, Any]] = {}
        self.lost = 0
        self._beat.start()

    def _study_id(self, name: str, directions: list[Any]) -> int:

        with suppress(DuplicatedStudyError):
            return self._storage.create_new_study(directions, name)
        return self._storage.get_study_id_from_name(name)

    def _patiently(self, call: Callable[[], Found]) -> Found:
        return patiently(call, "the storage")

    def close(self) -> None:
        """Stop the heartbeats."""
        self._closed.set()
        self._beat.join()

    def fact(self, key: str, make: Callable[[], Any]) -> Any:
        """Return a value that all workers of the study share; the first worker makes and stores it."""

        def known() -> dict[str, Any]:
            return self._patiently(lambda: self._storage.get_study_user_attrs(self._id))

        if key not in known():
            made = make()
            if key not in known():  # no other worker has made it meanwhile
                self._patiently(lambda: self._storage.set_study_user_attr(self._id, key, made))
        return known()[key]

    def look(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return kind and record of each trial that any worker finished since the last call, by trial number.

        Trials whose worker has died are failed first, or finished if their record was written.
        """
        found = []
        with warnings.catch_warnings(action="ignore"):
            self._patiently(lambda: fail_stale_trials(self._study))
        pending: dict[str, Mapping[str, Any]] = {}
        for trial in self._trials():
            if trial.number in self._seen:
                continue
            if trial.state.is_finished():
                self._seen.add(trial.number)
                self._first_seen.pop(trial.number, None)
            record = trial.user_attrs.get(RECORD)
            if record is not None:
                kind, data = self._read(trial)
                if not trial.state.is_finished():
                    self._settle(trial._trial_id, data)  # noqa: SLF001 - the storage's own way to name a trial
                    self._seen.add(trial.number)
                found.append((kind, data))
            elif not trial.state.is_finished():
                pending.setdefault(str(trial.user_attrs.get(PLAN)), trial.params)
                self._adopt(trial)
        self.pending = pending
        return found

    def claim(
        self,
        digest: str,
        kind: str,
        params: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
        room: int | None = None,
    ) -> Claim | None:
        """Claim a plan; return None if another worker has it, or there is no room for another trial.

        Args:
            room: how many trials of kind ``trial`` the study may have at most.
        """
        token = uuid.uuid4().hex
        attributes = {CLAIM: token, PLAN: digest, KIND: kind, WORKER: self._worker}
        self._patiently(lambda: self._create(attributes, params, distributions))
        trials = self._trials()
        mine = [t for t in trials if t.user_attrs.get(CLAIM) == token]
        first = mine[0]
        self._mine = first._trial_id  # noqa: SLF001 - for the next heartbeat
        for other in mine[1:]:  # made when the answer to the first attempt was lost
            self._yield(other._trial_id)  # noqa: SLF001
        before = [t for t in trials if t.number < first.number and _counts(t)]
        taken = any(t.user_attrs.get(PLAN) == digest for t in before)
        if taken or (room is not None and sum(t.user_attrs.get(KIND) == "trial" for t in before) >= room):
            self._mine = None
            self._yield(first._trial_id)  # noqa: SLF001
            return None
        return Claim(first._trial_id, first.number, digest)  # noqa: SLF001

    def finish(self, claim: Claim, record: Mapping[str, Any]) -> None:
        """Write the result of a claim; nothing is written if its trial has been failed meanwhile.

        Args:
            record: plain values. ``values`` go to Optuna, one for each objective, or None for a failure;
                ``attributes`` are the attributes that samplers read, as those of constraints that the plan breaks.
        """
        text = json.dumps(record, allow_nan=False)
        try:
            self._patiently(lambda: self._storage.set_trial_user_attr(claim.trial_id, RECORD, text))
        except UpdateFinishedTrialError:
            if RECORD not in self._patiently(lambda: self._storage.get_trial(claim.trial_id)).user_attrs:
                self.lost += 1
        else:
            self._settle(claim.trial_id, record)
        finally:
            self._mine = None

    def give_up(self, claim: Claim) -> None:
        """Free a plan that is not measured after all."""
        self._mine = None
        self._yield(claim.trial_id)

    def _trials(self) -> list[FrozenTrial]:
        return self._patiently(lambda: self._storage.get_all_trials(self._id, deepcopy=False))

    def _create(
        self, attributes: dict[str, str], params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution]
    ) -> None:
        last = self._storage.get_all_trials(self._id, deepcopy=False)[-64:]
        if any(t.user_attrs.get(CLAIM) == attributes[CLAIM] for t in last):
            return
        used = {name: distributions[name] for name in params}
        with warnings.catch_warnings(action="ignore"):
            template = create_trial(
                state=TrialState.RUNNING, params=dict(params), distributions=used, user_attrs=attributes
            )
        self._storage.create_new_trial(self._id, template)

    def _settle(self, trial_id: int, record: Mapping[str, Any]) -> None:
        """Set the attributes and the state that a record implies; another worker may have done so."""
        values = record.get("values")
        state = TrialState.FAIL if values is None else TrialState.COMPLETE
        with suppress(UpdateFinishedTrialError):
            for name, value in plain_attributes(record.get("attributes") or {}).items():
                self._patiently(partial(self._storage.set_trial_system_attr, trial_id, name, value))
            self._patiently(lambda: self._storage.set_trial_state_values(trial_id, state, values))

    def _read(self, trial: FrozenTrial) -> tuple[str, Mapping[str, Any]]:
        """Return kind and record of a trial; they are checked, since any client of the storage may write them.

        Raises:
            UsageError: it is no record of this program.
        """
        kind = trial.user_attrs.get(KIND)
        try:
            data = parsed_json(trial.user_attrs[RECORD])
            values, attributes = data["values"], data.get("attributes") or {}
            plain = values is None or (
                len(values) == self._objectives and all(type(v) in (int, float) and abs(v) < math.inf for v in values)
            )
            if kind in KINDS and plain and isinstance(attributes, dict):
                return str(kind), data
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
            pass
        raise UsageError(
            f"trial {trial.number} of the shared study is not a record of this program", "give another --study"
        )

    def _yield(self, trial_id: int) -> None:

        with suppress(UpdateFinishedTrialError):
            self._patiently(lambda: self._storage.set_trial_state_values(trial_id, TrialState.FAIL))

    def _sign(self, trial_id: int) -> None:
        """Send a heartbeat; through a proxy, which has none of Optuna's, by an attribute that its server reads."""
        storage = self._storage
        if isinstance(storage, BaseHeartbeat):
            self._patiently(lambda: storage.record_heartbeat(trial_id))
            return
        with suppress(UpdateFinishedTrialError):
            self._patiently(lambda: storage.set_trial_user_attr(trial_id, BEAT, time.time()))

    def _keep_beating(self) -> None:
        while not self._closed.wait(self._heartbeat_s):
            trial_id = self._mine
            if trial_id is not None:
                with suppress(Exception):  # the worker itself sees the error at its next call
                    self._sign(trial_id)

    def _adopt(self, trial: FrozenTrial) -> None:
        """Send one heartbeat for a claim that may never have had one: without any it never becomes stale."""
        since_s = self._first_seen.setdefault(trial.number, time.monotonic())
        if 0.0 < since_s < time.monotonic() - SILENT_BEATS * self._heartbeat_s:
            self._sign(trial._trial_id)  # noqa: SLF001
            self._first_seen[trial.number] = -1.0


def _counts(trial: FrozenTrial) -> bool:
    """Tell whether a trial measures or has measured its plan; those that were given up have no record."""
    return not trial.state.is_finished() or RECORD in trial.user_attrs


def _attributes(storage: BaseStorage, name: str) -> Mapping[str, Any] | None:
    """Return what workers of a study share; None if there is no study of this name."""

    def ask() -> Mapping[str, Any] | None:
        try:
            return storage.get_study_user_attrs(storage.get_study_id_from_name(name))
        except KeyError:
            return None

    return patiently(ask, "the storage")


def checked_settings(found: Any, name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the settings of a study that were read from a storage, checked.

    Raises:
        UsageError: they are no settings of this program.
    """
    parts = ("config", "agreed")
    if not isinstance(found, dict) or not all(isinstance(found.get(part), dict) for part in parts):
        raise UsageError(f"--study {name}: its settings in the storage are damaged", "give another --study")
    return found


@contextmanager
def _opened(url: str, heartbeat_s: int) -> Iterator[BaseStorage]:
    storage = open_storage(url, heartbeat_s)
    try:
        yield storage
    finally:
        close_storage(storage)


def placed(config: StudyConfig) -> StudyConfig:
    """Return the settings of a worker, with a run folder that no other has.

    Raises:
        UsageError: the study has no name by which others could join it.
    """
    if config.storage is not None and config.study is None:
        raise UsageError("--storage requires the name of the study", "give --study NAME")
    if config.storage is None or config.out is not None:
        return config
    return config.model_copy(update={"out": Path("runs", f"{config.study}-{host.node() or 'worker'}-{os.getpid()}")})


def joined(own: Mapping[str, Any]) -> StudyConfig:
    """Return the settings of a study that others have begun.

    Args:
        own: what was given on this worker's command line.

    Raises:
        UsageError: there is no such study, or an option differs from the study's.
        UnavailableError: the storage cannot be reached.
    """
    mine = {name: own[name] for name in _OWN if own.get(name) is not None}
    config = parse_config({"model": "joined", "budget": 1, **mine})
    if config.storage is None or config.study is None:
        raise UsageError("--model is missing", "or give --study and --storage to join a study")
    with _opened(config.storage, config.heartbeat) as storage:
        attributes = _attributes(storage, config.study)
    if attributes is None or SETTINGS not in attributes:
        raise UsageError(f"--study {config.study}: the storage has no such study", "begin it with --model")
    known = checked_settings(attributes[SETTINGS], config.study)
    # Each worker chooses where it writes and what it measures on.
    theirs = {name: value for name, value in known["config"].items() if name not in _OWN}
    study = parse_config({**theirs, **mine})
    # The budget's default cannot be recognised here: it is the study's.
    given = {name: own[name] for name in own if own[name] is not None and name not in (*_OWN, "budget")}
    asked = parse_config({**theirs, **mine, **given})
    for name in given:
        there, here = (_plain(getattr(each, name)) for each in (study, asked))
        if there != here:
            raise UsageError(
                f"--study {config.study}: it has {option(name)} {_words(there)}, not {_words(here)}",
                "leave it out, or give another --study",
            )
    return study


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def check_joins(config: StudyConfig, identity: Identity) -> None:
    """Check that a study can be begun or joined in its storage; nothing is begun, and no file of SQLite is made.

    Raises:
        UsageError: the storage has another study of this name.
        UnavailableError: the storage cannot be reached.
    """
    if config.storage is None:
        return
    if (file := sqlite_file(config.storage)) is not None and not file.exists():
        if not os.access(file.parent, os.W_OK | os.X_OK):
            raise unusable(f"storage {config.storage}", "unable to open database file")
        return
    with _opened(config.storage, config.heartbeat) as storage:
        if (known := _attributes(storage, str(config.study))) is not None and SETTINGS in known:
            _agree(config, _settings(config, identity), known[SETTINGS])


@contextmanager
def sharing(config: StudyConfig, identity: Identity) -> Iterator[SharedStudy | None]:
    """Yield the shared study, which is begun if it is new; None if the study is not shared.

    Raises:
        UsageError: it is another study than the settings are for.
        UnavailableError: the storage cannot be reached.
    """
    if config.storage is None:
        yield None
        return
    worker = f"{host.node()}-{os.getpid()}-{secrets.token_hex(4)}"
    with (
        _opened(config.storage, config.heartbeat) as storage,
        closing(
            SharedStudy(storage, str(config.study), worker, config.heartbeat, objectives=len(config.objective))
        ) as shared,
    ):
        mine = _settings(config, identity)
        _agree(config, mine, shared.fact(SETTINGS, lambda: mine))
        yield shared


def _agree(config: StudyConfig, mine: Mapping[str, Any], found: Any) -> None:
    """Raise where the settings in a storage are damaged, or those of another study."""
    known = checked_settings(found, str(config.study))
    there = known["agreed"]
    if there.get("model_digest") != mine["agreed"]["model_digest"]:
        theirs, ours = (_words(settings["config"].get("model")) for settings in (known, mine))
        what = (
            f"it is of {theirs}, not of {ours}"
            if theirs != ours
            else f"{ours} has other shapes, or has changed since it began"
        )
        raise UsageError(f"--study {config.study}: {what}", "give another --study")
    for name, value in mine["agreed"].items():
        if there.get(name) != value:
            what = option(name) if name in _AGREED else name.replace("_", " ")
            raise UsageError(
                f"--study {config.study}: it has {what} {_words(there.get(name))}, not {_words(value)}",
                "give another --study",
            )


def _words(value: object) -> str:
    return (", ".join(map(str, value)) or "not given") if isinstance(value, list) else str(value)


def _settings(config: StudyConfig, identity: Identity) -> dict[str, Any]:
    settings = config.model_dump(mode="json", exclude_unset=True)
    agreed = {name: config.model_dump(mode="json")[name] for name in _AGREED}
    return {
        "config": {name: value for name, value in settings.items() if name not in _OWN},
        "agreed": {**agreed, **identity.to_json()},
    }
