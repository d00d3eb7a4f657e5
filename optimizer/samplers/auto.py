"""The sampler ``auto``: from the optimum of the model to the optimum of the device.

Its first proposal is the model's optimum. Measurements correct the model (:mod:`~optimizer.samplers.correction`).
Candidates are the optima of draws of the corrected costs, and neighbours of the best plans known, the region that
measurement confirms (:mod:`~optimizer.samplers.regions`). Of these, two are chosen alternately:

- the one with the best mean, to confirm the estimate;
- the one with the largest expected improvement on the best measured plan, over joint draws, so that errors which both
  share do not count as uncertainty (Jones, Schonlau and Welch 1998, eq. 14, by Monte Carlo). It reaches beyond the
  neighbourhood wherever a draw of the costs has its optimum elsewhere.

Candidates are computed after every trial at first, later in blocks of a quarter, at last a sixteenth, of the trials so
far. Where a block runs out of candidates, the search is widened, in small spaces to all remaining plans. A proposal is
a function of the seed and the earlier trials, so a study that is resumed proposes what the uninterrupted one would
have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from evaluators.samples import Measurement
from optimizer.exact.chain_costs import ChainCosts, ChainObjective, chain_cost
from optimizer.exact.front import Criterion
from optimizer.exact.ranks import RankLimits
from optimizer.samplers.correction import Correction
from optimizer.samplers.critic import Critic
from optimizer.samplers.pricing import Timing
from optimizer.samplers.regions import ChainRegion, Found
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import ChainSpace
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.space import EnumerableSpace

DRAWS = 16
_BLOCK_SHARE, _MOST_IN_BLOCK, _LATE = 4, 16, 48
_WARM_RUNS = 3
_USUAL_RUNS = 5
_CENSORED = 4.0
_LOST = 1.02  # a plan that lost a race counts as at least that many times as slow as the best one then


class Proposer(Protocol):
    """Proposes plans instead of parameters."""

    def observe(self, plan: Plan, measurement: Measurement | None, speed: float = 1.0) -> None:
        """Record a trial, in the order of trials.

        Args:
            plan: canonical.
            measurement: None for a plan that could not be measured.
            speed: the machine's slowness then: ratio of times to those at the start of the study.
        """
        ...

    def propose(self) -> Plan | None:
        """Return a plan that was not tried, or None where there is none."""
        ...


@dataclass(frozen=True, eq=False)
class Problem:
    """The search as samplers see it: the space and the model estimate.

    Attributes:
        model: the costs of operators, stages and transfers (s).
        fits: whether a plan keeps all constraints; others are never proposed.
        chains: what is minimised over chains, for objectives other than the latency; the model is then in its unit.
        criteria: for several objectives: makes them from costs of the latency; and the unit of a processor's stages.
        ranks: which convolutions may be decomposed, their costs, and the error that is allowed.
        search: for plans of any shape: makes their proposer from the problem and the study's seed.
        front: whether plans of any shape are searched for several objectives.
        optima: the best plans under the model, which ``auto`` proposes first.
        predict: the model's value of any plan of the space; None where ``model`` serves (chains).
        critic: for several networks: makes the critic that learns from the times of their jobs.
        guided: whether the model tells which plans may be good; else Optuna samples the space.
    """

    graph: Graph
    platform: Platform
    space: EnumerableSpace
    model: ChainCosts
    fits: Callable[[Plan], bool] = lambda _: True
    chains: ChainObjective | None = None
    criteria: tuple[Callable[[ChainCosts], Sequence[Criterion]], Callable[[str], float]] | None = None
    ranks: RankLimits | None = None
    search: Callable[[Problem, int], Proposer] | None = None
    front: bool = False
    optima: tuple[Plan, ...] = ()
    predict: Callable[[Plan], float] | None = None
    critic: Callable[[], Critic] | None = None
    guided: bool = True


def proposer_of(problem: Problem, seed: int) -> Proposer | None:
    """Return the proposer for a problem; None where the model's front cannot be computed."""
    from optimizer.samplers.objective import ObjectiveProposer
    from optimizer.samplers.pareto import ParetoProposer
    from optimizer.samplers.ranks import RankProposer
    from optimizer.samplers.segments import SegmentProposer

    if not problem.guided:
        return None
    if problem.search is not None:
        return None if problem.front else problem.search(problem, seed)
    if problem.criteria is not None:
        return None if isinstance(problem.space, SegmentSpace) else ParetoProposer(problem, seed, *problem.criteria)
    if problem.chains is not None:  # a sum cannot improve by splits: its optima are chains of whole operators
        return ObjectiveProposer(problem, seed, problem.chains)
    if isinstance(problem.space, SegmentSpace):
        return SegmentProposer(problem, problem.space, seed)
    if problem.ranks is not None:
        return RankProposer(problem, problem.ranks)
    return AutoProposer(problem, seed) if isinstance(problem.space, ChainSpace) else _of_any_plans(problem, seed)


def _of_any_plans(problem: Problem, seed: int) -> Proposer:
    """Return the proposer for plans of a plug-in's space."""
    from optimizer.workload.search import SHARED_STEPS, WorkloadProposer

    predict = problem.predict or partial(chain_cost, problem.model)
    critic = Critic(predict, problem.model)
    return WorkloadProposer(problem.space, predict, [*problem.optima], seed, SHARED_STEPS, critic, problem.fits)


class AutoProposer:
    """Proposes chains for one objective and one model.

    Args:
        problem: a space of chains, and the model of its costs.
        seed: of the study.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem, self._seed = problem, seed
        self._correction = Correction(problem.model)
        self._timing = Timing(problem.graph, problem.platform)
        self._region = ChainRegion(problem.graph, problem.platform, cast("ChainSpace", problem.space))
        self._trials: list[tuple[Plan, Measurement | None, float]] = []
        self._measured: list[Plan] = []  # plans of the region that have been learnt from
        self._tried: list[int] = []  # their positions among the plans that were added to the region
        self._added = 0
        self._fed = 0
        self._best_s = math.inf
        self._block = -1
        self._found: Found | None = None
        self._wide = False
        self._open: dict[bytes, int] = {}

    def observe(self, plan: Plan, measurement: Measurement | None, speed: float = 1.0) -> None:
        """Record a trial, in the order of trials."""
        self._trials.append((plan, measurement, speed))
        if self._open and (name := self._region.name(plan)) is not None:
            self._open.pop(name, None)

    def propose(self) -> Plan | None:
        """Return a plan that was not tried and keeps all constraints, or None where there is none."""
        for wide in (False, True):
            found = self._candidates(wide=wide)
            while self._open:
                columns = np.fromiter(self._open.values(), dtype=np.int64)
                chosen = int(columns[_choice(found, columns, confirm=len(self._trials) % 2 == 1)])
                plan = found.plan(chosen)
                if self._problem.fits(plan):
                    return plan
                del self._open[found.names[chosen]]
        return None

    def ranking(self) -> list[tuple[Plan, float]]:
        """Return the measured plans of the space with their estimated times (s), the best first.

        The estimate uses all measurements of a plan's stages, since the plan that looks fastest after few runs was
        partly lucky.
        """
        self._learn(len(self._trials))
        if not self._measured:
            return []
        mean = self._correction.draw(0, np.random.default_rng(0))
        estimate = self._region.price(mean, self._tried)[0]
        return [(self._measured[i], float(estimate[i])) for i in np.argsort(estimate, kind="stable")]

    def _candidates(self, *, wide: bool) -> Found:
        """Return the candidates of the block that the next trial is in; ``wide`` once the usual ones are used up."""
        number, start = len(self._trials), max(self._block, 0)
        while start + _block_size(start) <= number:
            self._learn(start)  # block by block, as an uninterrupted study does
            start += _block_size(start)
        if self._found is None or start > self._block or wide > self._wide:
            self._learn(start)
            rng = np.random.default_rng([self._seed, start])
            draws, self._wide = self._correction.draw(DRAWS, rng), wide
            self._found = self._region.look(draws, self._tried, rng, wide=wide)
            self._open = {name: column for column, name in enumerate(self._found.names)}
            self._block = start
            for plan, *_ in self._trials[start:]:
                name = self._region.name(plan)
                if name is not None:
                    self._open.pop(name, None)
        return self._found

    def _learn(self, until: int) -> None:
        """Learn from the trials before number ``until``."""
        for plan, measurement, speed in self._trials[self._fed : until]:
            inside = self._region.name(plan) is not None
            if measurement is not None:
                self._correct(plan, measurement, speed)
                if inside:
                    self._measured.append(plan)
                    self._tried.append(self._added)
            if inside:
                self._region.add(plan)
                self._added += 1
        self._fed = max(self._fed, until)
        plans = self._correction.plans
        if plans:
            self._correction.choose(1 << (plans.bit_length() - 1))

    def _correct(self, plan: Plan, measurement: Measurement, speed: float) -> None:
        """Learn from a measurement; from a race lost in the first runs, only that it was lost."""
        samples, raced = measurement.latency_s, measurement.stopped == "raced"
        usual = speed * measurement.cold
        stage_s, latency_s = tuple(s / usual for s in measurement.stage_s), samples.median / usual
        noise = math.sqrt(_USUAL_RUNS / min(max(len(samples.values_s), 1), 2 * _USUAL_RUNS))
        if raced and (len(samples.values_s) < _WARM_RUNS or min(stage_s) <= 0.0):
            mean = self._correction.draw(0, np.random.default_rng(0))
            estimate = [float(s[0]) for s in self._timing.stage_s(plan.stages, mean)]
            model_s = float(self._timing.latency_s(plan.stages, mean)[0])
            short = _LOST * self._best_s / model_s if model_s > 0.0 else 0.0
            if not short > 1.0 or math.isinf(short):
                return
            stage_s, latency_s, noise = tuple(s * short for s in estimate), model_s * short, _CENSORED
        elif min(stage_s) <= 0.0:
            return  # stopped for a reason other than its own slowness
        elif not raced:
            self._best_s = min(self._best_s, latency_s)
        waits, gap_s = self._timing.waits(plan.stages, stage_s, latency_s, self._problem.model.transfer_s)
        self._correction.observe(plan.stages, stage_s, waits, gap_s, noise)


def _choice(found: Found, columns: NDArray[np.int64], *, confirm: bool) -> int:
    """Return the index of the column to try next: the best mean, or the largest expected improvement."""
    latency_s = found.latency_s[:, columns]
    if not confirm and found.best_s is not None:
        improvement = np.maximum(found.best_s[1:, None] - latency_s[1:], 0.0).mean(axis=0)
        if improvement.max() > 0.0:
            return int(improvement.argmax())
    return int(latency_s[0].argmin())


def _block_size(start: int) -> int:
    """Return the size of a block of candidates: a quarter of the trials so far, 16 from 64 to 256."""
    share = start // _BLOCK_SHARE
    return min(max(share, 1), max(_MOST_IN_BLOCK, share - _LATE))
