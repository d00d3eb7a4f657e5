"""Samplers given as ``module:Class`` or by a plug-in; their exceptions become usage errors of one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from optuna.samplers import BaseSampler

from optimizer.samplers.study import ExhaustedError
from search_spaces.core.errors import OptimizeError, UsageError

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, TrialState


class ForeignSampler(BaseSampler):
    """Forwards to another sampler.

    Args:
        path: the user's name for the sampler.
        sampler: the sampler to forward to.
        extras: package → the extra of this product that installs it.
    """

    def __init__(self, path: str, sampler: BaseSampler, extras: Mapping[str, str]) -> None:
        self.sampler = sampler
        self._path, self._extras = path, extras

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (OptimizeError, ExhaustedError):
            raise
        except ImportError as error:
            extra = self._extras.get(error.name or "")
            hint = f"pip install 'partition-optimizer[{extra}]'" if extra else "install what it needs"
            raise UsageError(f"sampler {self._path!r} needs the package {error.name!r}", hint) from error
        except Exception as error:  # user code: any exception
            raise UsageError(f"sampler {self._path!r} failed: {type(error).__name__}: {error}") from error

    def reseed_rng(self) -> None:
        """See Optuna's ``BaseSampler``."""
        self.sampler.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """See Optuna's ``BaseSampler``."""
        with self._telling():
            return self.sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """See Optuna's ``BaseSampler``."""
        with self._telling():
            return self.sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """See Optuna's ``BaseSampler``."""
        with self._telling():
            return self.sampler.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """See Optuna's ``BaseSampler``."""
        with self._telling():
            self.sampler.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """See Optuna's ``BaseSampler``."""
        with self._telling():
            self.sampler.after_trial(study, trial, state, values)
