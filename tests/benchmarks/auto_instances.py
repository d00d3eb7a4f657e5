"""What ``auto`` comes to where the truth is not the model: ``python -m tests.benchmarks.auto_instances OUT.json``.

The 60 instances are those of :mod:`tests.benchmarks.instances`; a trial's times have 3 % of noise. Regret is what a
plan truly takes more than the known optimum: of the measured plan that ``auto`` believes to be the fastest, and of the
one that looked fastest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from evaluators.samples import Measurement, Samples
from optimizer.provenance import provenance
from optimizer.samplers.auto import AutoProposer, Problem
from tests.benchmarks.instances import COUNT, instance

BUDGETS = (1, 5, 10, 25, 50, 100, 200)


def regrets(number: int) -> tuple[list[float], list[float]]:
    """Return the regrets of an instance at each budget, in per cent: of the plan believed, and of the fastest."""
    of, rng = instance(number), np.random.default_rng([number, 1])
    proposer = AutoProposer(Problem(of.graph, of.model.platform, of.space, of.model), number)
    believed, looked, least_s, fastest = [], [], np.inf, None
    for trial in range(1, BUDGETS[-1] + 1):
        plan = proposer.propose()
        if plan is not None:
            latency_s, stage_s = of.measure(plan, rng)
            proposer.observe(plan, Measurement(Samples((latency_s,)), stage_s, (), "limit"))
            if latency_s < least_s:
                least_s, fastest = latency_s, plan
        if trial in BUDGETS and fastest is not None:
            believed.append(100.0 * (of.true_s(proposer.ranking()[0][0]) / of.optimum_s - 1.0))
            looked.append(100.0 * (of.true_s(fastest) / of.optimum_s - 1.0))
    return believed, looked


def main() -> None:
    """Write the mean regrets and those of each instance after the last budget."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    rows = np.array([regrets(number) for number in range(COUNT)]).transpose(1, 0, 2)
    means = [dict(zip(map(str, BUDGETS), kind.mean(axis=0).round(4).tolist(), strict=True)) for kind in rows]
    document = {
        "schema_version": 1,
        "made_by": "python -m tests.benchmarks.auto_instances OUT.json",
        **provenance(),
        "instances": COUNT,
        "believed_fastest_percent": means[0],
        "looked_fastest_percent": means[1],
        "believed_each_percent": {str(b): rows[0][:, i].round(4).tolist() for i, b in enumerate(BUDGETS)},
    }
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
