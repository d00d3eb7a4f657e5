"""Optimizers that want an environment of their own, as Optuna samplers; :mod:`tests.benchmarks.ask_tell` runs there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE
from tempfile import TemporaryDirectory
from typing import Any, cast

from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

BATCH = {"hebo": 10, "smac": 1}  # a suggestion of HEBO takes seconds, of several hardly more
_PROGRAM = Path(__file__).with_name("ask_tell.py")


class PartnerSampler(BaseSampler):
    """Asks an optimizer in another environment for all parameters.

    Args:
        interpreter: of that environment.
        kind: ``hebo`` or ``smac``.
        seed: of the study.
    """

    def __init__(self, interpreter: str, kind: str, seed: int) -> None:
        self._folder, self._seed, self._batch = TemporaryDirectory(), seed, BATCH[kind]
        command = [interpreter, str(_PROGRAM), kind, self._folder.name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, env=environment, cwd=self._folder.name
        )
        self._waiting: list[dict[str, Any]] = []
        self._unreported: list[tuple[dict[str, Any], float]] = []
        self._space: dict[str, BaseDistribution] = {}

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        """See Optuna's ``BaseSampler``; known from the first trial on, which is a baseline."""
        if not self._space:
            earlier = next((t for t in study.get_trials(deepcopy=False) if t.distributions), None)
            if earlier is None:
                return {}
            self._space = {n: d for n, d in earlier.distributions.items() if not d.single()}
            self._send({"parameters": [_plain(n, d) for n, d in self._space.items()], "seed": self._seed})
            for known in study.get_trials(deepcopy=False, states=[TrialState.COMPLETE]):
                self._note(known.params, known.value)
        return self._space

    def sample_relative(
        self,
        study: Study,  # noqa: ARG002
        trial: FrozenTrial,  # noqa: ARG002
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """See Optuna's ``BaseSampler``."""
        if not search_space:
            return {}
        if not self._waiting:
            self._send({"tell": self._unreported})
            self._unreported = []
            self._send({"ask": self._batch})
            self._waiting = json.loads(self._process.stdout.readline())  # type: ignore[union-attr]
        found = self._waiting.pop(0)
        return {name: _value(found[name], distribution) for name, distribution in search_space.items()}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """See Optuna's ``BaseSampler``; of the first trial alone."""
        return RandomSampler(self._seed).sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self,
        study: Study,  # noqa: ARG002
        trial: FrozenTrial,
        state: TrialState,  # noqa: ARG002
        values: Sequence[float] | None,
    ) -> None:
        """See Optuna's ``BaseSampler``."""
        if self._space and values:
            self._note(trial.params, values[0])

    def _note(self, params: dict[str, Any], value: float | None) -> None:
        plain = {n: params[n] if isinstance(d, IntDistribution) else str(params[n]) for n, d in self._space.items()}
        self._unreported.append((plain, float(value or 0.0)))

    def _send(self, message: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps(message) + "\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]

    def __del__(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _plain(name: str, distribution: BaseDistribution) -> dict[str, Any]:
    if isinstance(distribution, IntDistribution):
        return {"name": name, "low": distribution.low, "high": distribution.high}
    return {"name": name, "choices": list(cast("CategoricalDistribution", distribution).choices)}


def _value(found: Any, distribution: BaseDistribution) -> Any:
    if isinstance(distribution, IntDistribution):
        return int(found)
    choices = cast("CategoricalDistribution", distribution).choices
    return next(choice for choice in choices if str(choice) == found)
