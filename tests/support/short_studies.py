"""Short studies on the synthetic evaluator: run, killed at any append to their log, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optimizer.study.config import StudyConfig
from optimizer.study.course import run_study
from optimizer.study.folder import RunFolder
from optimizer.study.history import History, Trial
from optimizer.study.log import Record, TrialLog, read_log
from optimizer.study.result import Result


class Killed(BaseException):
    """Stands for a process that is gone: nobody catches it."""


class Quiet:
    """A watcher that keeps its messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.trials: list[Trial] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def warn(self, text: str) -> None:
        self.messages.append(text)

    def opened(self, run: RunFolder, history: History, space_size: int) -> None:
        pass

    def trial(self, trial: Trial) -> None:
        self.trials.append(trial)


def go(folder: Path, *, watcher: Quiet | None = None, **changed: Any) -> Result:
    values = {"model": "example", "budget": 26, "max_stages": 3, "evaluator": "synthetic", "out": folder} | changed
    return run_study(StudyConfig.model_validate(values), watcher or Quiet(), ["optimize"])


def tried(folder: Path) -> list[Any]:
    """Return everything in the log that the search decided and measured."""
    found = []
    for record in records(folder):
        if record.kind in {"trial", "baseline"}:
            trial = Trial.from_json(record.data)
            found.append(
                (trial.number, trial.plan.digest, trial.origin, trial.median_s, trial.failure, trial.repeat_of)
            )
    return found


def records(folder: Path) -> tuple[Record, ...]:
    return read_log(folder / "trials.jsonl").records


def verdict(folder: Path) -> Any:
    return next(r.data for r in reversed(records(folder)) if r.kind == "verdict")


def killed_at(patch: pytest.MonkeyPatch, append: int, *, after: bool) -> None:
    """Have the process die at an append to the log, before anything is written or when all of it is."""
    original = TrialLog.append
    count = 0

    def dying(self: TrialLog, kind: str, data: Any) -> Record:
        nonlocal count
        count += 1
        if count == append and not after:
            raise Killed
        record = original(self, kind, data)
        if count == append:
            raise Killed
        return record

    patch.setattr(TrialLog, "append", dying)
