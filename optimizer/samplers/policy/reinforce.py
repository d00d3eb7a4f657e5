"""The sampler ``reinforce``: a policy over the parameters of a space, and a critic; both learn during a study.

The policy (:mod:`~optimizer.samplers.policy.network`) starts with the cost model's prior for each choice, and with
weights that were trained on other networks and devices, where these are given. After every trial

- the critic learns from the stages' times how much longer each operator takes on each kind of processor than the model
  says: a linear model with a Gaussian prior. Trials use its mean and a draw of it alternately;
- the policy's preferences take a step towards the fastest plans so far, weighted by rank, and away from the mean of all
  (REINFORCE with a set of elites), with an entropy bonus.

Plans are drawn around the model's optimum and around the fastest proposal, in turns; the critic chooses among them. A
proposal is a function of the trials so far, so a study that is resumed proposes what the uninterrupted one would have.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evaluators.samples import Measurement
from optimizer.exact.chain_costs import chain_cost
from optimizer.samplers import seed_of
from optimizer.samplers.auto import Problem
from optimizer.samplers.critic import Critic
from optimizer.samplers.policy.features import Choices, Task
from optimizer.samplers.policy.network import Weights, draw, gradient
from optimizer.samplers.study import MOST_REPEATS, ExhaustedError, KnowingSampler
from search_spaces.core.errors import PlanError, UsageError
from search_spaces.core.plan import Plan
from search_spaces.spaces.chain import chain_plan

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

_Array = NDArray[np.float64]
DRAWS, HEATS = 64, (1.0, 0.6, 0.3, 0.1)  # logits are scaled down when a converged policy draws only known plans
RATE, ENTROPY, ELITES = 0.3, 0.003, 6
AT_ONCE = 256  # choices that are evaluated anew after a trial
_WARM_RUNS = 3


def task_of(problem: Problem) -> Task:
    """Return a problem as a policy's task.

    Raises:
        UsageError: there are several objectives.
    """
    if problem.criteria is not None or problem.front:
        raise UsageError("--sampler reinforce supports one objective", "give --sampler auto, or one --objective")

    def predict(plan: Plan) -> float:
        return chain_cost(problem.model, plan)

    known = problem.predict or predict
    space, names = problem.space, [members[0].name for members in problem.platform.classes().values()]
    middle = next(iter(problem.optima), None)
    if middle is None:
        wholes = [space.decode(space.encode(chain_plan(problem.graph, (), [name]))) for name in names]
        middle = min(wholes, key=known)
    return Task(space, problem.graph, known, middle, problem.fits)


def sampler_of(problem: Problem, seed: int, weights: Weights | None = None, *, learns: bool = True) -> ReinforceSampler:
    """Return the sampler of a study (:class:`ReinforceSampler`).

    Raises:
        UsageError: as in :func:`task_of`.
    """
    task = task_of(problem)
    # Stages in units other than seconds do not show operators' times.
    model = problem.model if problem.chains is None else None
    critic = problem.critic() if problem.critic is not None else Critic(task.predict, model)
    return ReinforceSampler(task, seed, critic, weights, learns=learns)


class ReinforceSampler(KnowingSampler):
    """Proposes plans that the policy draws and the critic chooses.

    Args:
        task: the policy's problem.
        seed: of the study.
        critic: an untrained one.
        weights: initial weights of the network; None for an untrained policy.
        learns: whether it learns from trials; otherwise it proposes plans as the policy draws them.
    """

    origin = "reinforce"
    patience = MOST_REPEATS

    def __init__(
        self, task: Task, seed: int, critic: Critic, weights: Weights | None = None, *, learns: bool = True
    ) -> None:
        self._task, self._seed, self._learns = task, seed, learns
        self._weights = weights or Weights.new(seed)
        self._critic = critic
        self._free = {name: d for name, d in task.space.distributions().items() if not d.single()}
        # Choices around the model's optimum, and around the fastest proposal.
        self._around = [Choices(task), *([Choices(task, AT_ONCE)] if learns else [])]
        self._preferred = np.zeros(len(self._around[0].of))
        self._known: set[str] = set()
        self._taken: list[NDArray[np.int64]] = []
        self._logs: list[float] = []
        self._best = math.inf
        self._proposed: set[str] = set()

    def proposed(self, plan: Plan) -> None:
        """Record that the plan observed next was its own proposal, now or before the study was interrupted."""
        self._proposed.add(plan.digest)

    def observe(self, plan: Plan, measurement: Measurement | None, speed: float = 1.0) -> None:
        """Record a plan that was tried, in the order of trials; see ``Proposer.observe``."""
        self._known.add(plan.digest)
        if measurement is None or not self._learns:
            return
        usual = speed * measurement.cold
        if measurement.stopped != "raced" or len(measurement.latency_s.values_s) >= _WARM_RUNS:
            self._critic.observe(plan, tuple(s / usual for s in measurement.stage_s))
        try:
            taken = self._around[0].which(self._task.space.encode(plan))
        except (PlanError, KeyError, ValueError):  # outside of the space
            return
        took = math.log(measurement.median_s / speed)
        self._taken.append(taken)
        self._logs.append(took)
        self._improve()
        if plan.digest in self._proposed and took < self._best:
            self._best = took
            self._around[1].centre(taken)
        self._around[1].look()

    def _improve(self) -> None:
        """Move the preferences a step towards the fastest plans."""
        logs = np.array(self._logs)
        order = np.argsort(logs, kind="stable")
        count = min(ELITES, len(logs) // 3)
        if not count:
            return
        weight = np.log(count + 0.5) - np.log(np.arange(1, count + 1))
        advantage = np.full(len(logs), -1.0 / len(logs))
        advantage[order[:count]] += weight / weight.sum()
        choices = self._around[0]
        logits = self._logits(choices)
        self._preferred += RATE * gradient(logits, choices, np.array(self._taken), advantage, ENTROPY)

    def _logits(self, choices: Choices) -> _Array:
        found: _Array = choices.prior + self._weights.scores(choices.features) + self._preferred
        return found

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        """Return the non-constant parameters of the space."""
        return self._free

    def sample_relative(
        self,
        study: Study,  # noqa: ARG002
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Return the parameters of a plan.

        Raises:
            ExhaustedError: no new plan was drawn.
        """
        plan = self._task.middle if self._task.middle.digest not in self._known else None
        if plan is None or not self._task.fits(plan):
            plan = self._drawn(trial.number)
        params = self._task.space.encode(plan)
        return {name: params[name] for name in search_space}

    def _drawn(self, number: int) -> Plan:
        """Draw plans, and return the untried one that is fastest by the critic."""
        rng = np.random.default_rng(seed_of(self._seed, number))
        self._critic.learn(rng if number % 2 else None)
        choices = self._around[number // 2 % len(self._around)]
        logits = self._logits(choices)
        new: dict[str, Plan] = {}
        for heat in HEATS:
            for which in draw(heat * logits, choices, DRAWS, rng):
                plan = choices.plan(which)
                if plan.digest not in self._known and plan.digest not in new and self._task.fits(plan):
                    new[plan.digest] = plan
                    if not self._learns:
                        return plan
            if len(new) >= DRAWS // 4:
                break
        if not new:
            raise ExhaustedError
        return min(new.values(), key=self._critic.seconds)
