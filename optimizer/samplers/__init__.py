"""Samplers by name.

:func:`study_sampler` makes the one sampler of a study (:mod:`optimizer.samplers.study`). It gives every trial a sampler
of its own, seeded by the study's seed and the trial's number, or has one sampler, made from the space and the search
model, propose all trials, as a function of seed, number and log. So a study that was interrupted and rebuilt from its
log proposes what the uninterrupted one would have proposed.

The options of ``tpe`` were chosen on 26 random chains of 22 operators on 3 processors (at most 4 stages, cold start;
mean distance from the optimum after 25 / 50 / 100 / 200 trials):

==============================================  ===========================
random                                          27.9 / 22.6 / 17.3 / 14.9 %
each parameter alone, Optuna's other defaults   27.2 / 21.8 / 16.5 / 15.1 %
jointly, Optuna's other defaults                26.3 / 22.7 / 21.1 / 19.2 %
jointly, 20 random first, 8 candidates (ours)   26.2 / 17.8 / 14.4 / 11.6 %
==============================================  ===========================

With its defaults the joint model settles too early: 84 different plans in 200 trials where ours proposes 113.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces.core.allowed_code import is_allowed
from search_spaces.core.errors import UsageError, shown
from search_spaces.core.plugins import entries, find_entry, is_ours, load_entry, origin
from search_spaces.core.wording import did_you_mean

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from optimizer.samplers.auto import Problem
    from optimizer.samplers.study import KnowingSampler, StudySampler
    from search_spaces.core.plan import Plan
    from search_spaces.spaces.space import EnumerableSpace

DEFAULT = "auto"
_WITH_POLICY = "reinforce@"


@dataclass(frozen=True, slots=True)
class SamplerKind:
    """A sampler with a name.

    Attributes:
        make: builds it for a trial, from ``(study's seed, trial's own seed)``.
        resumes: whether it depends on parameters, values and states of earlier trials only. If not, a study that is
            resumed asks it for the earlier trials again (:mod:`optimizer.study.history`).
        requires: an optional package that it needs, or "".
        extra: the extra of this product that installs it, or "".
        knows: for a sampler that must know the problem: builds it once for a study, from ``(problem, study's seed)``.
    """

    make: Callable[[int, int], BaseSampler]
    resumes: bool = True
    requires: str = ""
    extra: str = ""
    knows: Callable[[Problem, int], KnowingSampler] | None = None


def study_sampler(
    name: str,
    seed: int,
    space: EnumerableSpace,
    problem: Problem | None = None,
    *,
    allowed: Callable[[Plan], bool] = lambda _: True,
    predict: Callable[[Plan], float] = lambda _: 0.0,
) -> StudySampler:
    """Return the sampler of a study; set it as ``study.sampler``, and call its ``begin`` before each ``study.ask``.

    Args:
        name, seed: see :func:`make_sampler`.
        problem: the search problem, for samplers that must know it; without it they draw at random.
        allowed, predict: for plans that are drawn, see :class:`~optimizer.samplers.study.StudySampler`.

    Raises:
        UsageError: as in :func:`make_sampler`.
    """
    from optimizer.samplers.study import StudySampler

    kind = _find(name)
    sampler_of: Callable[[int], BaseSampler] = partial(make_sampler, name, seed)
    knowing = kind.knows(problem, seed) if kind.knows is not None and problem is not None else None
    return StudySampler(name, space, seed, sampler_of, knowing, allowed, predict)


def make_sampler(name: str, seed: int, number: int) -> BaseSampler:
    """Return the sampler that proposes the parameters of trial ``number`` of a study from those of earlier trials.

    Args:
        name: a key of ``SAMPLERS``, ``reinforce@FILE`` to start with the policy in a file, or ``module:Class`` for any
            other Optuna sampler that takes a ``seed``; importing it runs code, so the user must have named it
            (:mod:`search_spaces.core.allowed_code`).
        seed: the study's seed, 0 or more.
        number: the trial's number in the study.

    Raises:
        UsageError: the name is unknown, or is not that of a sampler that takes a seed, or the sampler needs a package
            that is not installed.
    """
    quiet_optuna()
    kind = _find(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about experimental and deprecated options, which the user did not choose
        return kind.make(seed, seed_of(seed, number))


def seed_of(seed: int, number: int) -> int:
    """Return the seed of a trial of a study."""
    import numpy as np

    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def resumes(name: str) -> bool:
    """Return whether a sampler depends on parameters, values and states of earlier trials only.

    Raises:
        UsageError: as in :func:`make_sampler`.
    """
    return _find(name).resumes


def sampler_names() -> list[str]:
    """Return the names of all samplers, those of plug-ins last."""
    return [*SAMPLERS, *(entry.name for entry in entries("sampler") if not is_ours(entry))]


def quiet_optuna() -> None:
    """Keep Optuna's log off the terminal: the study reports its trials itself."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    optuna.logging.disable_default_handler()


def _find(name: str) -> SamplerKind:
    if name.startswith(_WITH_POLICY):
        path = Path(name.removeprefix(_WITH_POLICY))
        return _with_policy(path, path.stat().st_mtime_ns if path.exists() else 0)
    if ":" in name:
        return _imported(name)
    if name not in SAMPLERS and name in {entry.name for entry in entries("sampler")}:
        entry = find_entry("sampler", name)
        return _checked(name, load_entry("sampler", entry), origin(entry))
    if name not in SAMPLERS:
        if "." in name:
            module, _, last = name.rpartition(".")
            raise UsageError(f"unknown sampler {name!r}", f"a class is named {module}:{last}")
        otherwise = f"give one of {', '.join(SAMPLERS)}, or module:Class"
        hint = did_you_mean(name.lower(), SAMPLERS, otherwise, most=3, cutoff=0.7)
        raise UsageError(f"unknown sampler {name!r}", hint)
    kind = SAMPLERS[name]
    if kind.requires and importlib.util.find_spec(kind.requires) is None:
        raise UsageError(
            f"sampler {name!r} needs the package {kind.requires!r}", f"pip install 'partition-optimizer[{kind.extra}]'"
        )
    return kind


@lru_cache(maxsize=1)
def _with_policy(path: Path, changed_ns: int) -> SamplerKind:  # noqa: ARG001 - a file that was trained again is read again
    """Return the sampler ``reinforce`` that starts with the policy in a file."""
    from optimizer.samplers.policy.network import Weights
    from optimizer.samplers.policy.reinforce import sampler_of

    weights = Weights.load(path)  # report errors before a model is built
    return replace(SAMPLERS["reinforce"], knows=lambda problem, seed: sampler_of(problem, seed, weights))


def _imported(path: str) -> SamplerKind:
    if not is_allowed(path):
        raise UsageError(
            f"sampler {shown(path)} is code, which a file or a shared study may not load",
            "name it on the command line: --sampler module:Class, or --allow-code for a campaign that you trust",
        )
    module, _, attribute = path.partition(":")
    try:
        with _current_folder():
            found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # user code: any exception becomes one line
        hint = "give module:Class, of an installed package or a file in the current folder"
        raise UsageError(f"sampler {path!r} cannot be imported: {error}", hint) from error
    return _checked(path, found, module)


@contextmanager
def _current_folder() -> Iterator[None]:
    """Let modules of the current folder be imported, after all others; with ``python -m`` they come first anyway."""
    folder = str(Path.cwd())
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)


def _checked(path: str, found: object, where: str) -> SamplerKind:
    """Return the kind for an Optuna sampler class from a plug-in or the command line."""
    from optuna.samplers import BaseSampler

    if not (inspect.isclass(found) and issubclass(found, BaseSampler)) or inspect.isabstract(found):
        raise UsageError(f"sampler {path!r} of {where} is not a subclass of optuna.samplers.BaseSampler")
    build: Callable[..., BaseSampler] = found

    def make(_: int, trial_seed: int) -> BaseSampler:
        from optimizer.samplers.foreign import ForeignSampler

        try:
            return ForeignSampler(path, build(seed=trial_seed), {k.requires: k.extra for k in SAMPLERS.values()})
        except Exception as error:
            raise UsageError(f"sampler {path!r} cannot be made from a seed: {error}", "it must accept seed=") from error

    return SamplerKind(make, resumes=False)


def _of(path: str, **options: Any) -> Callable[[int, int], BaseSampler]:
    """Return what makes a sampler from a trial's own seed; ``module:Class`` is imported when it is used."""
    module, _, name = path.partition(":")

    def make(_: int, trial_seed: int) -> BaseSampler:
        sampler: BaseSampler = getattr(importlib.import_module(module), name)(seed=trial_seed, **options)
        return sampler

    return make


def _sobol(seed: int, trial_seed: int) -> BaseSampler:
    from optimizer.samplers.stateless import SobolSampler

    return SobolSampler(seed, trial_seed)


def _brute_force(problem: Problem, seed: int) -> KnowingSampler:
    from optimizer.samplers.enumeration import EnumerationProposer
    from optimizer.samplers.study import PlanSampler

    return PlanSampler("brute-force", problem.space, EnumerationProposer(problem, seed))


def _auto(problem: Problem, seed: int) -> KnowingSampler:
    from optimizer.samplers.auto import proposer_of
    from optimizer.samplers.study import PlanSampler

    proposer = proposer_of(problem, seed)
    # No model guides what follows from the plan alone, and some fronts; the drawn plans are ranked by prediction.
    otherwise = None if proposer is not None else partial(make_sampler, "nsga2", seed)
    optima = problem.optima if problem.critic is None else ()  # the critic has already learnt from the baselines
    return PlanSampler(DEFAULT, problem.space, proposer, optima, problem.fits, otherwise)


def _reinforce(problem: Problem, seed: int) -> KnowingSampler:
    from optimizer.samplers.policy.reinforce import sampler_of

    return sampler_of(problem, seed)


_RANDOM = _of("optuna.samplers:RandomSampler")

SAMPLERS: dict[str, SamplerKind] = {
    # The model's optimum, then plans by a model corrected with measurements.
    "auto": SamplerKind(_RANDOM, knows=_auto),
    # Policy gradient with a critic, over all parameters of a space; reinforce@FILE begins with a trained policy.
    "reinforce": SamplerKind(_RANDOM, knows=_reinforce),
    # Tree-structured Parzen estimator, all parameters together.
    "tpe": SamplerKind(
        _of(
            "optimizer.samplers.stateless:FixedTpeSampler",
            multivariate=True,
            constant_liar=False,
            n_startup_trials=20,
            n_ei_candidates=8,
        ),
    ),
    # Uniform over the parameters.
    "random": SamplerKind(_RANDOM),
    # Every plan of the space once, in random order.
    "brute-force": SamplerKind(_RANDOM, knows=_brute_force),
    # Scrambled Sobol sequence.
    "qmc": SamplerKind(_sobol),
    # Genetic algorithm NSGA-II, generations of 20.
    "nsga2": SamplerKind(_of("optimizer.samplers.stateless:NumberedNsga2Sampler", size=20)),
    # Genetic algorithm NSGA-III, for several objectives.
    "nsga3": SamplerKind(_of("optuna.samplers:NSGAIIISampler"), resumes=False),
    # CMA-ES; draws categorical parameters at random.
    "cmaes": SamplerKind(_of("optimizer.samplers.stateless:ReplayedCmaEsSampler"), requires="cmaes", extra="cmaes"),
    # Gaussian process.
    "gp": SamplerKind(_of("optuna.samplers:GPSampler"), requires="torch", extra="gp"),
}
