"""The sampler ``reinforce``: a policy gradient over cuts and placements.

Before the first trial the policy learns on the model of the costs, at no device time; weights that were trained on
other models can be given instead. Then it proposes plans by drawing from the policy, and after every batch of finished
trials the policy takes a step towards what was faster than the batch's mean. The policy is a function of the finished
trials alone, so a study that goes on proposes what the uninterrupted one would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from optuna.trial import TrialState

from optimizer.samplers import seed_of
from optimizer.samplers.auto import Problem
from optimizer.samplers.chains import ChainPricing, Chains, from_plan
from optimizer.samplers.correction import Correction
from optimizer.samplers.policy.features import features
from optimizer.samplers.policy.network import Weights, gradient, retrace, roll_out
from optimizer.samplers.policy.training import ENTROPY, Adam, Chain, Lesson, advantages, pretrain
from optimizer.samplers.study import MOST_REPEATS, KnowingSampler
from search_spaces.core.errors import UsageError
from search_spaces.spaces.chain import ChainSpace, chain_plan

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

BATCHES = 80
DRAWS = 24
TRIALS_IN_BATCH = 8
RATE_ON_DEVICE = 0.005
CERTAINTIES = (1.0, 0.7, 0.4, 0.0)


def lesson(problem: Problem) -> Lesson:
    """Return a problem as something to learn on: what the policy sees, and the model's prediction of its plans.

    Raises:
        UsageError: the problem's plans are no chains.
    """
    space = problem.space
    if not isinstance(space, ChainSpace):
        raise UsageError("--sampler reinforce supports cuts only", "give --allow cuts, or --sampler auto")
    pricing = ChainPricing(problem.graph, problem.platform)
    costs = Correction(problem.model).draw(0, np.random.default_rng(0))
    count, most = len(problem.graph.operators), space.max_stages

    def predict(chains: Sequence[Chain]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = pricing.latency_s(Chains.of(chains, count, most), costs)[0]
        return found

    return Lesson(features(problem.graph, problem.model, most), predict)


class Learner:
    """The policy of a study after any number of its finished trials.

    Args:
        problem: what the policy acts on.
        seed: of the study.
        weights: to begin with; None learns them on the problem's own model.
    """

    def __init__(self, problem: Problem, seed: int, weights: Weights | None = None) -> None:
        self._problem = problem
        self.lesson = lesson(problem)
        self._begin = weights or pretrain(Weights.new(seed), [self.lesson], BATCHES, seed)
        self._adam = Adam(self._begin, RATE_ON_DEVICE)
        self._batches = 0

    def weights_after(self, finished: Sequence[tuple[Mapping[str, Any], float]]) -> Weights:
        """Return the weights after trials, given as parameters and seconds, in the order of trials."""
        batches = len(finished) // TRIALS_IN_BATCH
        if batches < self._batches:
            self._adam, self._batches = Adam(self._begin, RATE_ON_DEVICE), 0
        while self._batches < batches:
            first = self._batches * TRIALS_IN_BATCH
            batch = finished[first : first + TRIALS_IN_BATCH]
            plans = [self._problem.space.decode(params) for params, _ in batch]
            chains = [from_plan(plan, self._problem.platform) for plan in plans]
            seconds = np.array([value for _, value in batch])
            rollout = retrace(self._adam.weights, self.lesson.seen, chains)
            self._adam.step(gradient(self._adam.weights, rollout, advantages(seconds), ENTROPY))
            self._batches += 1
        return self._adam.weights


class ReinforceSampler(KnowingSampler):
    """Proposes what the policy draws.

    Args:
        problem, seed: of the study.
        weights: to begin with; None learns them on the problem's own model.

    Raises:
        UsageError: the problem's plans are no chains.
    """

    origin = "reinforce"
    patience = MOST_REPEATS

    def __init__(self, problem: Problem, seed: int, weights: Weights | None = None) -> None:
        self._learner, self._problem, self._seed = Learner(problem, seed, weights), problem, seed

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        """Return the parameters of the space that leave a choice."""
        return {name: d for name, d in self._problem.space.distributions().items() if not d.single()}

    def sample_relative(
        self,
        study: Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Return the parameters of a plan that the policy draws: of several draws the first that is new.

        A policy that has settled draws what it knows; it is then drawn from with less and less certainty.
        """
        done = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        finished = [(t.params, float(t.value)) for t in done if t.number < trial.number and t.value is not None]
        weights = self._learner.weights_after(finished)
        problem = self._problem
        names = [p.name for p in problem.platform.processors]
        rng = np.random.default_rng(seed_of(self._seed, trial.number))
        known = {tuple(params.values()) for params, _ in finished}
        fallback: dict[str, Any] = {}
        for certainty in CERTAINTIES:
            drawn = roll_out(weights.softened(certainty), self._learner.lesson.seen, DRAWS, rng)
            for cuts, lanes in dict.fromkeys(drawn.chains()):
                plan = chain_plan(problem.graph, cuts, [names[lane] for lane in lanes])
                params = problem.space.encode(plan)
                if problem.fits(plan):
                    fallback = {name: params[name] for name in search_space}
                    if tuple(params.values()) not in known:
                        return fallback
        return fallback
