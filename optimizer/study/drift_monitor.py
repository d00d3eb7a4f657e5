"""Measures a reference plan between the trials of a study, so that all trials scale to one state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from evaluators.base import Session, conditions_of
from evaluators.measurement.disturbance import RunFilter
from evaluators.measurement.drift import probe
from evaluators.samples import Samples
from optimizer.study.history import History, Trial
from optimizer.study.log import Record, TrialLog
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.wording import percent

_TELL = 0.10


@dataclass(slots=True)
class DriftMonitor:
    """Measures the reference plan after trials, for :mod:`evaluators.measurement.drift`.

    Only sessions that report conditions measure on a machine whose speed may drift.

    Attributes:
        runs: makes the runs.
        progress: called when the speed has changed by more than a tenth.
    """

    session: Session
    graph: Graph
    history: History
    log: TrialLog
    runs: RunFilter
    progress: Callable[[str], None] = lambda _: None
    _plan: Plan | None = None
    _reported: float = 1.0

    def restore(self, records: Sequence[Record]) -> None:
        """Restore the state from a log, so that a resumed study measures the reference plan at the same trials."""
        for record in records:
            if record.kind in {"trial", "baseline"}:
                self._count(Trial.from_json(record.data))
            elif record.kind == "speed":
                data: Any = record.data
                self._plan = Plan.from_json(data["plan"])
                found = Samples.from_json(data["found"])
                self.history.drift.take(found, float(data["spent_s"]), int(data["position"]))

    def after(self, trial: Trial) -> None:
        """Measure the reference plan, if there is time for it, after a trial that is in the history.

        Raises:
            RunFolderError: the log cannot be written.
        """
        self._count(trial)
        if not (self.session.capabilities.conditions and self._choose() and self.history.drift.due()):
            return
        try:
            self._probe()
        except UnavailableError:
            return  # the loop finds out whether the device is gone

    def _choose(self) -> bool:
        """Choose the reference plan: the best of the first measured ones."""
        if self._plan is None and self.history.incumbent is not None:
            self._plan = next((t.plan for t in self.history.ranking() if not t.raced), None)
        return self._plan is not None

    def _probe(self) -> None:
        if self._plan is None:
            return
        with closing(self.session.load(self.graph, self._plan)) as candidate:
            found, spent_s = probe(candidate, self.runs)
        position, drift = self.history.next_number, self.history.drift
        drift.take(found, spent_s, position)
        self.log.append(
            "speed",
            {
                "plan": self._plan.to_json(),
                "found": replace(found, conditions=conditions_of(self.session)()).to_json(),
                "spent_s": spent_s,
                "position": position,
            },
        )
        if abs(drift.speed / self._reported - 1.0) > _TELL:
            self._reported = drift.speed
            speed = drift.speed
            what = f"{percent(speed - 1.0)} slower than" if speed > 1.0 else f"{percent(1.0 / speed - 1.0)} faster than"
            what = "again as fast as" if abs(speed - 1.0) <= _TELL else what
            self.progress(f"the machine runs {what} at the start of the study; measurements are scaled to one state")

    def _count(self, trial: Trial) -> None:
        if trial.measurement is not None and trial.repeat_of is None:
            found = trial.measurement
            self.history.drift.measured_s += sum(found.warmup_s) + sum(found.latency_s.values_s)
