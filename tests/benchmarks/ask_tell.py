"""Optimizers that want an environment of their own, as Optuna samplers: HEBO and SMAC3, asked and told over pipes.

``PartnerSampler(["/env/bin/python"], "hebo")`` starts this file there as a program. It reads one JSON document a line:
the parameters first, then ``{"ask": n}`` and ``{"tell": [[parameters, value], …]}``; each ask is answered by a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from subprocess import DEVNULL, PIPE
from tempfile import TemporaryDirectory
from typing import Any, TextIO, cast

with contextlib.suppress(ImportError):  # the other environments need no Optuna
    from optuna import Study
    from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
    from optuna.samplers import BaseSampler, RandomSampler
    from optuna.trial import FrozenTrial, TrialState

BATCH = {"hebo": 4, "smac": 1}  # a suggestion of HEBO takes seconds, of several hardly more
_RANDOM_AT_FIRST = 20  # as for TPE


def _hebo(parameters: list[dict[str, Any]], seed: int) -> Any:
    import numpy as np
    import pandas as pd
    import torch
    from hebo.design_space.design_space import DesignSpace
    from hebo.optimizers.hebo import HEBO

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - it draws from there
    names = [p["name"] for p in parameters]
    space = DesignSpace().parse(
        [
            {"name": p["name"], "type": "cat", "categories": [str(c) for c in p["choices"]]}
            if "choices" in p
            else {"name": p["name"], "type": "int", "lb": p["low"], "ub": p["high"]}
            for p in parameters
        ]
    )
    optimizer = HEBO(space, rand_sample=_RANDOM_AT_FIRST, scramble_seed=seed % 2**31)

    class Adapter:
        def ask(self, count: int) -> list[dict[str, Any]]:
            return [{n: row[n] for n in names} for row in optimizer.suggest(count).to_dict("records")]

        def tell(self, found: list[tuple[dict[str, Any], float]]) -> None:
            rows = pd.DataFrame([params for params, _ in found])
            optimizer.observe(rows, np.array([[value] for _, value in found]))

    return Adapter()


def _smac(parameters: list[dict[str, Any]], seed: int) -> Any:
    from ConfigSpace import CategoricalHyperparameter, Configuration, ConfigurationSpace, UniformIntegerHyperparameter
    from smac import HyperparameterOptimizationFacade as Facade
    from smac import Scenario
    from smac.runhistory.dataclasses import TrialInfo, TrialValue

    space = ConfigurationSpace(seed=seed % 2**31)
    space.add(
        [
            CategoricalHyperparameter(p["name"], [str(c) for c in p["choices"]])
            if "choices" in p
            else UniformIntegerHyperparameter(p["name"], p["low"], p["high"])
            for p in parameters
        ]
    )
    folder = sys.argv[2]
    scenario = Scenario(space, deterministic=True, n_trials=10_000, seed=seed % 2**31, output_directory=folder)
    design = Facade.get_initial_design(scenario, n_configs=_RANDOM_AT_FIRST)

    def never(config: Configuration, seed: int = 0) -> float:  # noqa: ARG001 - SMAC checks the names
        raise NotImplementedError

    smac = Facade(scenario, never, initial_design=design, overwrite=True, logging_level=False)
    asked: dict[str, TrialInfo] = {}

    class Adapter:
        def ask(self, count: int) -> list[dict[str, Any]]:
            infos = [smac.ask() for _ in range(count)]
            asked.update({json.dumps(dict(i.config), default=str): i for i in infos})
            return [dict(info.config) for info in infos]

        def tell(self, found: list[tuple[dict[str, Any], float]]) -> None:
            for params, value in found:
                new = TrialInfo(Configuration(space, values=params), seed=0)
                smac.tell(asked.get(json.dumps(params, default=str), new), TrialValue(cost=value), save=False)

    return Adapter()


def serve(kind: str, lines: TextIO, answers: TextIO) -> None:
    """Answer until the input ends; what libraries print goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        head = json.loads(next(lines))
        optimizer = {"hebo": _hebo, "smac": _smac}[kind](head["parameters"], head["seed"])
        for line in lines:
            message = json.loads(line)
            if "tell" in message:
                optimizer.tell(message["tell"])
                continue
            answers.write(json.dumps(optimizer.ask(message["ask"]), default=lambda v: v.item()) + "\n")
            answers.flush()


class PartnerSampler(BaseSampler):
    """Asks an optimizer in another environment for all parameters.

    Args:
        interpreter: of that environment.
        kind: ``hebo`` or ``smac``.
        seed: of the study.
    """

    def __init__(self, interpreter: str, kind: str, seed: int) -> None:
        self._folder, self._seed, self._batch = TemporaryDirectory(), seed, BATCH[kind]
        command = [interpreter, __file__, kind, self._folder.name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, env=environment, cwd=self._folder.name
        )
        self._waiting: list[dict[str, Any]] = []
        self._untold: list[tuple[dict[str, Any], float]] = []
        self._space: dict[str, BaseDistribution] = {}

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
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
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """See Optuna's ``BaseSampler``."""
        if not search_space:
            return {}
        if not self._waiting:
            self._send({"tell": self._untold})
            self._untold = []
            self._send({"ask": self._batch})
            self._waiting = json.loads(self._process.stdout.readline())  # type: ignore[union-attr]
        found = self._waiting.pop(0)
        return {name: _value(found[name], distribution) for name, distribution in search_space.items()}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """See Optuna's ``BaseSampler``; of the first trial alone."""
        return RandomSampler(self._seed).sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """See Optuna's ``BaseSampler``."""
        if self._space and values:
            self._note(trial.params, values[0])

    def _note(self, params: dict[str, Any], value: float | None) -> None:
        plain = {n: params[n] if isinstance(d, IntDistribution) else str(params[n]) for n, d in self._space.items()}
        self._untold.append((plain, float(value or 0.0)))

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


if __name__ == "__main__":
    serve(sys.argv[1], sys.stdin, sys.stdout)
