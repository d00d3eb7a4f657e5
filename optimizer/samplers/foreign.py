"""Samplers given as ``module:Class`` or by a plug-in; their exceptions become usage errors of one line."""

from __future__ import annotations

from collections.abc import Mapping

from optuna.samplers import BaseSampler, RandomSampler

from evaluators.forwarding import Forwarding, Found, Given, Method, forwarded
from optimizer.samplers.study import ExhaustedError
from search_spaces.core.errors import OptimizeError, UsageError
from search_spaces.core.plugins import place_of


class ForeignSampler(Forwarding, BaseSampler):
    """Forwards to another sampler.

    Args:
        path: the user's name for the sampler.
        sampler: the sampler to forward to.
        extras: package → the extra of this product that installs it.
    """

    inner: BaseSampler

    def __init__(self, path: str, sampler: BaseSampler, extras: Mapping[str, str]) -> None:
        self.inner = sampler
        self._path, self._extras = path, extras

    def call(self, method: Method[Given, Found], /, *arguments: Given.args, **options: Given.kwargs) -> Found:
        """Call the sampler's method of that name.

        Raises:
            UsageError: it failed.
        """
        try:
            return super().call(method, *arguments, **options)
        except (OptimizeError, ExhaustedError):
            raise
        except ImportError as error:
            extra = self._extras.get(error.name or "")
            hint = f"pip install 'partition-optimizer[{extra}]'" if extra else "install what it needs"
            raise UsageError(f"sampler {self._path!r} needs the package {error.name!r}", hint) from error
        except Exception as error:  # user code: any exception
            raise UsageError(
                f"sampler {self._path!r} failed: {type(error).__name__}: {error}{place_of(error)}"
            ) from error

    reseed_rng = forwarded(RandomSampler.reseed_rng)
    infer_relative_search_space = forwarded(RandomSampler.infer_relative_search_space)
    sample_relative = forwarded(RandomSampler.sample_relative)
    sample_independent = forwarded(RandomSampler.sample_independent)
    before_trial = forwarded(RandomSampler.before_trial)
    after_trial = forwarded(RandomSampler.after_trial)
