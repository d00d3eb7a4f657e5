"""Keeps an eye on the machine's speed during a study: waits when it changes, and measures again what that spoilt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from evaluators.base import Session, Witness
from evaluators.drift import PAUSES_S, SpeedWatch, look
from evaluators.samples import Measurement, Samples
from optimizer.history import History, Trial
from optimizer.records import Record
from optimizer.storage import TrialLog
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.plan import Plan

_FINALISTS, _CLOSE = 8, 0.02


@dataclass(slots=True)
class Watchman:
    """Looks at one plan between the trials of a study; see :mod:`evaluators.drift`.

    Only a session that can tell its conditions measures on a machine whose speed may change.

    Attributes:
        measure: measures a plan again in full.
        tell: told when the speed has changed.
        sleep: waits some seconds.
    """

    session: Session
    graph: Graph
    history: History
    log: TrialLog
    measure: Callable[[Plan], Measurement]
    tell: Callable[[str], None] = lambda _: None
    sleep: Callable[[float], None] = time.sleep
    _watch: SpeedWatch = field(default_factory=SpeedWatch)
    _plan: Plan | None = None

    def restore(self, records: Sequence[Record]) -> None:
        """Take up what a log holds, so that a study that goes on looks when it would have looked."""
        for record in records:
            if record.kind in {"trial", "baseline", "repeat"}:
                self._count(Trial.from_json(record.data))
            elif record.kind == "speed":
                self._replay(record.data)

    def after(self, trial: Trial) -> None:
        """Look, if there is time for it, after a trial that is in the history.

        Raises:
            RunFolderError: the log cannot be written.
        """
        self._count(trial)
        if isinstance(self.session, Witness) and self._choose() and self._watch.due():
            self._look()

    def _choose(self) -> bool:
        """Settle on the plan to look at: the best of the first that were measured."""
        if self._plan is None and self.history.incumbent is not None:
            self._plan = next(t.plan for t in self.history.ranking() if not t.raced)
        return self._plan is not None

    def _look(self) -> None:
        good = self._watch.good
        try:
            changed = self._once()
            if changed != 1.0:
                changed = self._once()  # at once, since a spike is over by now
            if changed == 1.0:
                return
            seen = [changed]
            self.tell(f"the machine takes {changed:.2f} times as long as before; waiting for it")
            for pause_s in PAUSES_S:
                self.sleep(pause_s)
                changed = self._once()
                seen.append(changed)
                if changed == 1.0:
                    break
        except UnavailableError:
            return  # the loop finds out whether the device is gone
        if changed != 1.0:
            self._settle(changed)
        self._repeat(good, seen)

    def _once(self) -> float:
        if self._plan is None:
            return 1.0
        with closing(self.session.load(self.graph, self._plan)) as candidate:
            found, spent_s = look(candidate)
        position = self.history.next_number
        changed = self._watch.take(found, spent_s, position)
        conditions = self.session.conditions() if isinstance(self.session, Witness) else {}
        self.log.append(
            "speed",
            {
                "plan": self._plan.to_json(),
                "found": replace(found, conditions=conditions).to_json(),
                "spent_s": spent_s,
                "position": position,
                "changed": changed,
            },
        )
        return changed

    def _settle(self, changed: float) -> None:
        position = self.history.next_number
        self._watch.settle(changed, position)
        self.history.speed = self._watch.speed
        self.log.append("speed", {"settled": changed, "position": position})
        self.tell(f"the machine has changed its speed: things take {self._watch.speed:.2f} times as long as at first")

    def _replay(self, data: Any) -> None:
        if "settled" in data:
            self._watch.settle(float(data["settled"]), int(data["position"]))
            self.history.speed = self._watch.speed
            return
        self._plan = Plan.from_json(data["plan"])
        self._watch.take(Samples.from_json(data["found"]), float(data["spent_s"]), int(data["position"]))

    def _repeat(self, good: int, seen: Sequence[float]) -> None:
        """Measure again what was measured since the speed was last known, and may be among the best.

        The rest of that stretch is taken to have been measured at the fastest speed that it may have been, so that
        nothing looks better than it is.

        Args:
            seen: the changes of speed that were seen since.
        """
        fastest, slowest = min(1.0, *seen), max(1.0, *seen)
        close = suspects(self.history, good, fastest, slowest)
        for trial in [t for t in self.history.trials if t.number >= good and t.measurement is not None]:
            again = replace(trial, speed=trial.speed * fastest)
            if trial in close:
                try:
                    again = replace(trial, measurement=self.measure(trial.plan), speed=self.history.speed)
                except UnavailableError:
                    self.tell(f"trial {trial.number} could not be measured again")
                else:
                    self._count(again)
            if again != trial:
                self.log.append("repeat", again.to_json())
                self.history.correct(again)

    def _count(self, trial: Trial) -> None:
        if trial.measurement is not None and trial.repeat_of is None:
            found = trial.measurement
            self._watch.measured_s += sum(found.warmup_s) + sum(found.latency_s.values_s)


def suspects(history: History, good: int, fastest: float, slowest: float) -> list[Trial]:
    """Return the trials from number ``good`` on that could be among the fastest, for all that is known; at most eight.

    Args:
        fastest, slowest: how many times as long as usual things may have taken in that stretch: at most and at least 1.
    """
    stretch = [t for t in history.trials if t.number >= good and t.measurement is not None]
    others = (t.median_s for t in history.known.values() if t.number < good and t.measurement)
    surely_s = min([*others, *(t.median_s / fastest for t in stretch)], default=0.0)
    close = [t for t in stretch if t.median_s / slowest <= (1.0 + _CLOSE) * surely_s]
    return sorted(close, key=lambda t: t.median_s)[:_FINALISTS]
