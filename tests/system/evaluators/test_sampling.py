"""Error rates of racing and the final comparison over hundreds of simulated studies."""

from __future__ import annotations

import numpy as np

from evaluators.measurement.final import FinalComparison, FinalPolicy
from evaluators.samples import Measurement
from evaluators.sampling import measure
from tests.evaluators.test_sampling import POLICY, Scripted, shared_machine


def test_the_best_of_forty_with_five_times_fewer_runs() -> None:
    rng = np.random.default_rng(3)
    studies, wrong, runs = 100, 0, 0
    for study in range(studies):
        gaps = rng.uniform(0.0, 0.6, 39) if study % 2 else 0.01 + rng.exponential(0.1, 39)
        latency_s = 0.01 * rng.permutation(np.concatenate([[1.0], 1.0 + gaps]))
        made: list[Scripted] = []

        def load(index: int, latency_s: np.ndarray = latency_s, made: list[Scripted] = made) -> Scripted:
            made.append(shared_machine(rng, float(latency_s[index])))
            return made[-1]

        best: Measurement | None = None
        found: dict[int, Measurement] = {}
        for index in range(40):
            measurement = measure(load(index), POLICY, None if best is None else best.latency_s)
            if measurement.stopped != "raced":
                found[index] = measurement
                if best is None or measurement.latency_s.median < best.latency_s.median:
                    best = measurement
        top = sorted(found, key=lambda i: found[i].latency_s.median)[:5]
        runs += sum(candidate.done for candidate in made)
        last = FinalComparison([lambda i=i, load=load: load(i) for i in top], FinalPolicy(), rng).run()  # type: ignore[misc]
        winner = top[last.fastest]
        wrong += latency_s[winner] > 1.01 * latency_s.min()
    assert runs / studies <= 40 * 100 / 5
    assert wrong / studies <= 0.01
