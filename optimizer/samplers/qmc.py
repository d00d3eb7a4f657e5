"""Quasi-random points: each trial takes the point of its own number, so the sampler keeps no state.

Optuna's ``QMCSampler`` counts its points in the study's attributes, which a study rebuilt from trials does not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler

from optimizer.samplers.fixed import fixed_space

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


class SobolSampler(RandomSampler):
    """Trial ``number`` is point ``number`` of a scrambled Sobol sequence over the parameters of the first trial.

    The first trial of a study, and parameters that it does not have, are drawn at random.

    Args:
        seed: scrambles the sequence; the same for every trial of a study.
        trial_seed: for random draws.
    """

    def __init__(self, seed: int, trial_seed: int) -> None:
        super().__init__(seed=trial_seed)
        self._seed = seed

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the space of the study."""
        return fixed_space(study, trial)

    def sample_relative(
        self,
        study: Study,  # noqa: ARG002 - Optuna's signature
        trial: FrozenTrial,
        search_space: Mapping[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Return the trial's point of the sequence."""
        if not search_space:
            return {}
        from scipy.stats.qmc import Sobol

        engine = Sobol(len(search_space), scramble=True, rng=self._seed)
        engine.fast_forward(trial.number)
        point = engine.random(1)[0]
        return {name: _value(search_space[name], float(u)) for name, u in zip(sorted(search_space), point, strict=True)}


def _value(distribution: BaseDistribution, u: float) -> Any:
    """Return the value at the fraction ``u`` (0 … 1, exclusive) of a distribution."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[int(u * len(distribution.choices))]
    if isinstance(distribution, IntDistribution) and not distribution.log:
        count = (distribution.high - distribution.low) // distribution.step + 1
        return distribution.low + distribution.step * int(u * count)
    if isinstance(distribution, IntDistribution):
        low, high = math.log(distribution.low - 0.5), math.log(distribution.high + 0.5)
        return min(max(round(math.exp(low + u * (high - low))), distribution.low), distribution.high)
    if not isinstance(distribution, FloatDistribution):
        raise TypeError(f"no point in a {type(distribution).__name__}")
    low, high = distribution.low, distribution.high
    if distribution.log:
        return min(max(math.exp(math.log(low) + u * (math.log(high) - math.log(low))), low), high)
    if distribution.step is not None:
        return low + distribution.step * int(u * (round((high - low) / distribution.step) + 1))
    return low + u * (high - low)
