"""The sampler ``brute-force``: every plan of a space once, in an order that follows from the seed."""

from __future__ import annotations

import math

import numpy as np

from evaluators.samples import Measurement
from optimizer.samplers.auto import Problem
from search_spaces.core.plan import Plan


class EnumerationProposer:
    """Proposes every plan of a small space.

    Args:
        problem: plans that break a constraint are left out.
        seed: of the order.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self._space, self._fits = problem.space, problem.fits
        self._count = self._space.cardinality()
        rng = np.random.default_rng([seed, 79])
        # Steps coprime to the count visit every index once.
        self._begin, self._step = (int.from_bytes(rng.bytes(16), "little") % max(self._count, 1) for _ in range(2))
        while math.gcd(self._step, self._count) != 1:
            self._step += 1
        self._tried: set[str] = set()
        self._at = 0

    def observe(self, plan: Plan, measurement: Measurement | None, speed: float = 1.0) -> None:  # noqa: ARG002
        """Record a trial, in the order of trials."""
        self._tried.add(plan.digest)

    def propose(self) -> Plan | None:
        """Return a plan that was not tried, or None where there is none."""
        while self._at < self._count:
            plan = self._space.plan_at((self._begin + self._at * self._step) % self._count)
            if plan.digest not in self._tried and self._fits(plan):
                return plan
            self._at += 1
        return None
