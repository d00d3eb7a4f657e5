"""CMA-ES whose state follows from the parameters and values of earlier trials.

Optuna's sampler keeps its optimizer as a pickle in the trials' attributes, which would run as code wherever a log is
read or a shared study is joined. Here the completed trials are passed to the optimizer again, in the order of their
numbers, and the trial's seed decides its proposal: a study that is resumed proposes what the uninterrupted one did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from optuna._transform import _SearchSpaceTransform
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler
from optuna.trial import TrialState

from optimizer.samplers.fixed import fixed_space

if TYPE_CHECKING:
    from cmaes import CMA
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

_SIGMA = 1.0 / 6.0  # of the unit cube, as in Optuna's sampler
_optimizers: WeakKeyDictionary[Study, tuple[list[int], CMA]] = WeakKeyDictionary()
"""Study → numbers of the trials passed to its optimizer, and the optimizer; a proposal passes only new trials."""


class ReplayedCmaEsSampler(RandomSampler):
    """CMA-ES (Hansen, 2016) over the numeric parameters of the space; categorical ones are drawn at random.

    The first completed trial is left out, as in Optuna; of the later ones, each ``population_size`` are a generation,
    whichever sampler proposed them.

    Args:
        seed: of this trial.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self._seed = seed

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the numeric parameters of the study."""
        space = fixed_space(study, trial)
        return {name: d for name, d in space.items() if isinstance(d, FloatDistribution | IntDistribution)}

    def sample_relative(
        self,
        study: Study,
        trial: FrozenTrial,  # noqa: ARG002 - Optuna's signature
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Return a point drawn from the current distribution; {} before a trial is completed."""
        self._raise_error_if_multi_objective(study)
        completed = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if not search_space or not completed:
            return {}
        space = _SearchSpaceTransform(search_space, transform_step=True, transform_0_1=True)
        optimizer = _replayed(study, space, completed[1:])
        optimizer.reseed_rng(self._seed)
        return space.untransform(optimizer.ask())


def _replayed(study: Study, space: _SearchSpaceTransform, trials: list[FrozenTrial]) -> CMA:
    """Return the optimizer after every whole generation of the trials."""
    from cmaes import CMA

    numbers = [t.number for t in trials]
    known, optimizer = _optimizers.get(study, ([], None))
    if optimizer is None or numbers[: len(known)] != known:
        mean = np.full(len(space.bounds), 0.5)
        known, optimizer = [], CMA(mean, _SIGMA, space.bounds, n_max_resampling=10 * len(mean))
    size = optimizer.population_size
    while len(known) + size <= len(numbers):
        generation = trials[len(known) : len(known) + size]
        optimizer.tell([(space.transform(t.params), float(t.value or 0.0)) for t in generation])
        known = numbers[: len(known) + size]
    _optimizers[study] = known, optimizer
    return optimizer
