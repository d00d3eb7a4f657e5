"""NSGA-II whose generations follow from the trials' numbers, so that it keeps no state.

Optuna's sampler writes each trial's generation and each generation's parents into attributes, which a study rebuilt
from parameters and values does not have; and it returns parents in another order when it reads them back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optuna.samplers import NSGAIISampler
from optuna.trial import TrialState

from optimizer.samplers.fixed import fixed_space

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


class NumberedNsga2Sampler(NSGAIISampler):
    """NSGA-II (Deb et al., 2002) in which generation ``g`` is the trials ``g·size … (g+1)·size - 1``.

    Args:
        seed: of this trial.
        size: trials in a generation.
    """

    def __init__(self, seed: int, size: int) -> None:
        super().__init__(seed=seed, population_size=size)
        self._size = size

    def get_trial_generation(self, study: Study, trial: FrozenTrial) -> int:  # noqa: ARG002 - Optuna's signature
        """Return the generation that a trial belongs to by its number."""
        return trial.number // self._size

    def get_population(self, study: Study, generation: int) -> list[FrozenTrial]:
        """Return the completed trials of a generation."""
        trials = study.get_trials(deepcopy=False)[generation * self._size : (generation + 1) * self._size]
        return [t for t in trials if t.state == TrialState.COMPLETE]

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the space of the study, without the search through all trials that Optuna's own makes."""
        return fixed_space(study, trial)

    def get_parent_population(self, study: Study, generation: int) -> list[FrozenTrial]:
        """Return the parents of a generation by number, so that the order is the same when they are read back."""
        return sorted(super().get_parent_population(study, generation), key=lambda t: t.number)
