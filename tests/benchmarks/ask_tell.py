"""HEBO and SMAC3 over pipes, as a program of an environment of their own; :mod:`tests.benchmarks.partner` starts it.

It reads one JSON document a line: the parameters first, then ``{"ask": n}`` and ``{"tell": [[parameters, value], …]}``;
each ask is answered by a line.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any, TextIO

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

    def never(config: Configuration, seed: int = 0) -> float:
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


if __name__ == "__main__":
    serve(sys.argv[1], sys.stdin, sys.stdout)
