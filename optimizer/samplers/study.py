"""The sampler of a study: wraps the chosen sampler so that a study never runs out of new plans.

Every proposed plan comes from :class:`StudySampler`, which Optuna's ``study.ask`` calls. It has another sampler propose
the trial: one of this package, Optuna's, or a user's. Where that one has repeated itself too often, or has no plan left
(:class:`ExhaustedError`), an untried plan is drawn; where nearly all plans of a space are known, they are enumerated.

A proposal is a function of the seed, the trial's number and the trials before it, which :meth:`StudySampler.update`
records; only the study calls it, in the order of trials.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import TrialState

from optimizer.samplers.stateless import value_at
from optimizer.study.history import OPTIMUM, UNSEEN, Trial, contains
from search_spaces.core.errors import UsageError, shown
from search_spaces.core.plan import Plan
from search_spaces.spaces.registry import freedoms_in
from search_spaces.spaces.space import EnumerableSpace, NeighbourlySpace, SearchSpace

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from evaluators.samples import Measurement
    from optimizer.samplers.auto import Proposer

MOST_REPEATS = 50
_DRAWS = 1000
_CHOICES, _COSTLY_CHOICES = 32, 8  # chains are predicted in microseconds, other plans in milliseconds
_REFUSED = 50  # after so many plans in a row that break a limit, one is returned without a prediction


class ExhaustedError(Exception):
    """Raised by a sampler that has no plan left to propose."""


class KnowingSampler(BaseSampler):
    """A sampler made once for a study, from the problem.

    Attributes:
        origin: source of the last proposal, for the log.
        patience: after so many repeats in a row a plan is drawn instead.
    """

    origin: str
    patience = 1

    def proposed(self, plan: Plan) -> None:
        """Record that the plan observed next was its own proposal, now or before the study was interrupted."""

    def observe(self, plan: Plan, measurement: Measurement | None, speed: float) -> None:
        """Record a plan that was tried, in the order of trials; see ``Proposer.observe``."""

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw one parameter at random; all others come from the proposed plan."""
        return RandomSampler(seed=trial.number).sample_independent(study, trial, param_name, param_distribution)


class PlanSampler(KnowingSampler):
    """Proposes the parameters of plans from a proposer.

    Args:
        name: of the sampler.
        space: encodes the plans.
        proposer: proposes plans by a model that measurements correct; None where there are only ``optima``.
        optima: of the model, proposed before anything else.
        fits: whether a plan keeps all constraints.
        otherwise: makes the sampler for a trial, by its number, where there is no plan to propose; None for none.
    """

    def __init__(
        self,
        name: str,
        space: SearchSpace,
        proposer: Proposer | None,
        optima: Sequence[Plan] = (),
        fits: Callable[[Plan], bool] = lambda _: True,
        otherwise: Callable[[int], BaseSampler] | None = None,
    ) -> None:
        self.origin = self._name = name
        self._space, self._proposer, self._fits, self._otherwise = space, proposer, fits, otherwise
        self._optima = list(optima)
        self._free = {name: d for name, d in space.distributions().items() if not d.single()}
        self._other: BaseSampler | None = None

    def observe(self, plan: Plan, measurement: Measurement | None, speed: float) -> None:
        """Record a plan that was tried, in the order of trials; see ``Proposer.observe``."""
        self._optima = [other for other in self._optima if other.digest != plan.digest]
        if self._proposer is not None:
            self._proposer.observe(plan, measurement, speed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the non-constant parameters, or those of the sampler that stands in."""
        self._other = None
        self._plan = self._proposed()
        if self._plan is None and self._otherwise is not None:
            self._other = self._otherwise(trial.number)
            return self._other.infer_relative_search_space(study, trial)
        return self._free

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the parameters of the plan.

        Raises:
            ExhaustedError: no plan is left.
        """
        if self._other is not None:
            return self._other.sample_relative(study, trial, search_space)
        if self._plan is None:
            raise ExhaustedError
        params = self._space.encode(self._plan)
        return {name: params[name] for name in search_space}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return the value of the sampler that stands in, or a random one."""
        if self._other is not None:
            return self._other.sample_independent(study, trial, param_name, param_distribution)
        return super().sample_independent(study, trial, param_name, param_distribution)

    def _proposed(self) -> Plan | None:
        self.origin = OPTIMUM
        for plan in self._optima:
            if self._fits(plan):
                return plan
        self.origin = self._name
        return self._proposer.propose() if self._proposer is not None else None


class StudySampler(BaseSampler):
    """The sampler of a study, around the chosen one.

    Args:
        name: of the wrapped sampler.
        space: the search space.
        seed: of random draws.
        sampler_of: returns the sampler for a trial, by its number.
        knowing: proposes all trials instead; None for samplers that need parameters and values only.
        allowed: whether a plan keeps all constraints.
        predict: the model's value of a plan: the best of several drawn plans is proposed.

    Attributes:
        origin: source of the last proposal: the sampler's name, ``model optimum`` or ``random draw``.
    """

    def __init__(
        self,
        name: str,
        space: EnumerableSpace,
        seed: int,
        sampler_of: Callable[[int], BaseSampler],
        knowing: KnowingSampler | None = None,
        allowed: Callable[[Plan], bool] = lambda _: True,
        predict: Callable[[Plan], float] = lambda _: 0.0,
    ) -> None:
        self._name, self._space, self._seed = name, space, seed
        self._sampler_of, self._knowing = sampler_of, knowing
        self._allowed, self._predict = allowed, predict
        self._distributions = dict(space.distributions())
        self._free = {name: d for name, d in self._distributions.items() if not d.single()}
        self._known: set[str] = set()
        self._most = MOST_REPEATS if knowing is None else knowing.patience
        self._repeats, self._patience = 0, self._most
        self._number = 0
        self._given: Mapping[str, Any] | None = None
        self._inner: BaseSampler = RandomSampler(seed=seed)
        self.origin = name

    def update(self, trial: Trial) -> None:
        """Record a trial, in the order of trials; those outside of the space come first.

        After several repeats in a row a new plan is drawn. That number halves each time this happens, since a sampler
        that has converged only takes time, and is restored when the sampler finds a new plan.
        """
        if trial.repeat_of is not None:
            self._repeats += 1
            return
        self._known.add(trial.plan.digest)
        if trial.number >= 0:
            self._repeats = 0
            self._patience = max(1, self._patience // 2) if trial.origin == UNSEEN else self._most
        if self._knowing is not None:
            if trial.origin == self._knowing.origin:
                self._knowing.proposed(trial.plan)
            self._knowing.observe(trial.plan, trial.measurement, trial.speed)

    def begin(self, number: int, given: Mapping[str, Any] | None = None) -> None:
        """Set the number of the next trial to be asked for.

        Args:
            given: the trial's parameters in the log; they are proposed again, whatever the sampler draws now.
        """
        self._number, self._given = number, given
        self._inner = self._knowing or self._sampler_of(number)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """See Optuna's ``BaseSampler``."""
        self.origin = self._name
        self._inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return all non-constant parameters; the wrapped sampler may choose some of them one by one."""
        self._own = self._inner.infer_relative_search_space(study, trial)
        return self._free

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the wrapped sampler's proposal, or the parameters of an untried plan."""
        found = self._sampled(study, trial, search_space)
        return found if self._given is None else {name: self._given[name] for name in found}

    def _sampled(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        if self._repeats < self._patience:
            try:
                found = self._inner.sample_relative(study, trial, self._own)
            except ExhaustedError:
                pass
            else:
                if self._knowing is not None:
                    self.origin = self._knowing.origin
                    return found
                return {name: self._checked(name, value) for name, value in found.items() if name in search_space}
        self.origin = UNSEEN
        params = self._space.encode(self._unseen(study))
        return {name: params[name] for name in search_space}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return the wrapped sampler's value of one parameter."""
        value = self._inner.sample_independent(study, trial, param_name, param_distribution)
        return self._checked(param_name, value) if self._given is None else self._given[param_name]

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """See Optuna's ``BaseSampler``."""
        self._inner.after_trial(study, trial, state, values)

    def _checked(self, name: str, value: Any) -> Any:
        if not contains(self._distributions[name], value):
            where = self._distributions[name]
            raise UsageError(f"sampler {self._name!r} proposes {name} = {shown(str(value))}, which is not in {where}")
        return value

    def _unseen(self, study: Study) -> Plan:
        """Draw some untried plans, and return the best one by the model.

        Raises:
            ExhaustedError: every plan of the space was tried, or is being measured.
        """
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        whole = [t.params for t in running if t.params.keys() == self._distributions.keys()]
        busy = {self._space.decode(params).digest for params in whole}
        known = self._known | busy
        rng = np.random.default_rng([self._seed, self._number])
        cardinality = self._space.cardinality()
        drawn: dict[str, Plan] = {}
        choices = _COSTLY_CHOICES if {*freedoms_in(self._space)} - {"cuts"} else _CHOICES
        refused = 0
        for _ in range(_DRAWS):
            plan = self._space.plan_at(below(cardinality, rng))
            if plan.digest in known:
                continue
            if self._allowed(plan):
                drawn[plan.digest] = plan
                if len(drawn) == choices:
                    break
            elif not drawn and (refused := refused + 1) == _REFUSED:
                return plan
        if drawn:
            return min(drawn.values(), key=self._predict)
        # So many misses in a row occur only where nearly all plans of a small space are known.
        for plan in map(self._space.plan_at, range(cardinality)):
            if plan.digest not in known:
                return plan
        raise ExhaustedError


def below(limit: int, rng: np.random.Generator) -> int:
    """Return a uniform integer below ``limit``, which may not fit into 64 bits."""
    nbytes = (limit.bit_length() + 7) // 8 + 8
    return int.from_bytes(rng.bytes(nbytes), "little") % limit


def moved(space: EnumerableSpace, plan: Plan, rng: np.random.Generator) -> Plan:
    """Return a plan of a space, one random move away: a neighbour, or else with another value of a parameter."""
    if isinstance(space, NeighbourlySpace):
        return space.neighbour(plan, rng)
    distributions = space.distributions()
    name = list(distributions)[int(rng.integers(len(distributions)))]
    return space.decode(space.encode(plan) | {name: value_at(distributions[name], rng.random())})
