"""Verdicts and tables of many drawn studies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.testing import SyntheticEvaluator
from tests.optimizer.study.test_verdict import EVALUATOR, GRAPH, NAMED, SPACE, verdict_of


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 0.3))
def test_no_row_of_the_table_contradicts_the_verdict(seed: int, spread: float) -> None:
    """Whatever the truth and whatever the search saw: no finalist is significantly faster than the recommended plan."""
    rng = np.random.default_rng(seed)
    plans = {p.digest: p for p in (*NAMED.values(), *(SPACE.plan_at(int(i)) for i in rng.integers(0, 60, 25)))}
    seen = {p: float(EVALUATOR.true_latency_s(GRAPH, p) * np.exp(0.1 * rng.standard_normal())) for p in plans.values()}
    factors = {digest: float(np.exp(-spread * rng.random())) for digest in plans}
    found = verdict_of(seen, lambda p: factors.get(p.digest, 1.0), evaluator=SyntheticEvaluator(seed=seed))
    best = found.standing(found.best)
    assert best is not None
    assert best.samples is not None
    for plan in found.plans:
        ratio = found.ratio(plan, found.best)
        if ratio is not None:
            assert ratio.high >= 1.0
            other = found.standing(plan)
            assert other is not None
            assert other.samples is not None
            met = len([1 for level in other.levels if level is not None])
            if met >= 2:  # figures of the table are in the order of the ratios
                assert other.samples.median / best.samples.median == pytest.approx(ratio.value, rel=0.05)
