"""``auto``: it begins at the model's optimum, learns from parts, never repeats itself, and goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.samples import Measurement, Samples
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import chain_cost
from optimizer.samplers.auto import AutoProposer, Problem, Proposer, proposer_of
from optimizer.samplers.chains import ChainPricing, Chains, distinct, from_plan, neighbours
from optimizer.samplers.correction import Correction
from optimizer.samplers.draws import Draws, cheapest_chains
from optimizer.samplers.pricing import Timing
from search_spaces.core.plan import Plan, canonical
from search_spaces.spaces.chain import ChainSpace, chain_plan
from tests.benchmarks.instances import COUNT, Instance, instance

CHAIN, BRANCHING = instance(0), instance(2)
FOUR_PROCESSORS = instance(24)


class NoMoves:
    """A space as a plug-in may have it: parameters alone, and no moves of its own."""

    def __init__(self, like: Instance) -> None:
        self.distributions, self.decode, self.encode = like.space.distributions, like.space.decode, like.space.encode
        self.cardinality, self.plan_at = like.space.cardinality, like.space.plan_at


def problem(of: Instance, **changes: Any) -> Problem:
    return replace(Problem(of.graph, of.model.platform, of.space, of.model), **changes)


def measured(latency_s: float, stage_s: tuple[float, ...], runs: int = 5, *, raced: bool = False) -> Measurement:
    return Measurement(Samples((latency_s,) * runs), stage_s, (), "raced" if raced else "limit")


def study(proposer: Proposer, of: Instance, trials: int, begin: int = 0) -> list[Plan]:
    """Run trials ``begin … trials - 1``; what each measures depends on its number alone."""
    plans = []
    for number in range(begin, trials):
        plan = proposer.propose()
        assert plan is not None
        proposer.observe(plan, outcome(of, plan, number))
        plans.append(plan)
    return plans


def outcome(of: Instance, plan: Plan, number: int) -> Measurement | None:
    latency_s, stage_s = of.measure(plan, np.random.default_rng([of.number, number]))
    if number % 11 == 10:
        return None
    if number % 5 == 4:
        return measured(latency_s, (*stage_s[:-1], 0.0), 1, raced=True)  # broken off in the last part
    return measured(latency_s, stage_s)


def test_the_instances_are_what_they_say() -> None:
    for number in (0, 1, 2, 3, 5, 24):
        one, same = instance(number), instance(number)
        plan = one.space.plan_at(one.space.cardinality() // 2)
        assert one.true_s(plan) == same.true_s(plan)
        assert 20 <= len(one.graph.operators) <= 210
        assert 2 <= len(one.model.platform.processors) <= 4
        assert one.optimum_s <= min(one.true_s(one.space.plan_at(i)) for i in range(50)) + 1e-12
    assert COUNT == 60


@pytest.mark.parametrize("of", [CHAIN, BRANCHING], ids=["chain", "branches"])
def test_the_known_optimum_is_the_best_of_all_plans(of: Instance) -> None:
    small = replace(of, max_stages=3, space=ChainSpace(of.graph, of.model.platform, 3))
    best = min(small.true_s(small.space.plan_at(i)) for i in range(small.space.cardinality()))
    assert best == pytest.approx(small.optimum_s)


@pytest.mark.parametrize("of", [CHAIN, FOUR_PROCESSORS], ids=["two processors", "four processors"])
def test_the_first_proposal_is_the_optimum_of_the_model(of: Instance) -> None:
    first = AutoProposer(problem(of), 0).propose()
    assert first is not None
    assert chain_cost(of.model, first) == pytest.approx(best_chains(of.model, of.max_stages)[0].cost_s)


@pytest.mark.parametrize("of", [CHAIN, BRANCHING, FOUR_PROCESSORS], ids=["chain", "branches", "four processors"])
def test_proposals_are_different_plans_of_the_space(of: Instance) -> None:
    plans = study(AutoProposer(problem(of), 3), of, 40)
    assert len({p.digest for p in plans}) == 40
    for plan in plans:
        assert of.space.decode(of.space.encode(plan)) == plan


@pytest.mark.parametrize("of", [CHAIN, BRANCHING], ids=["chain", "branches"])
def test_a_study_that_goes_on_proposes_what_the_uninterrupted_one_did(of: Instance) -> None:
    whole = study(AutoProposer(problem(of), 5), of, 37)
    for interrupted in (1, 6, 17, 30, 36):
        again = AutoProposer(problem(of), 5)
        for number, plan in enumerate(whole[:interrupted]):
            again.observe(plan, outcome(of, plan, number))
        assert study(again, of, 37, interrupted) == whole[interrupted:]


def test_plans_that_break_a_constraint_are_not_proposed() -> None:
    def fits(plan: Plan) -> bool:
        return len(plan.stages) != 3

    plans = study(AutoProposer(problem(CHAIN, fits=fits), 0), CHAIN, 30)
    assert all(fits(plan) for plan in plans)


def test_operators_that_a_processor_refuses_stay_off_it() -> None:
    operator_s = CHAIN.model.operator_s.copy()
    operator_s[0, 5:9] = np.inf
    refusing = replace(CHAIN.model, operator_s=operator_s)
    name = CHAIN.model.platform.processors[0].name
    for plan in study(AutoProposer(problem(CHAIN, model=refusing), 0), CHAIN, 20):
        assert not any(s.processor == name and set(s.operators) & {5, 6, 7, 8} for s in plan.stages)


def test_it_learns_where_the_model_is_wrong() -> None:
    """The mean regret after 25 trials, of a few instances; the campaign has all of them."""
    regrets = []
    for number in (0, 8, 30, 51):
        of = instance(number)
        proposer = AutoProposer(problem(of), 0)
        for trial in range(25):
            plan = proposer.propose()
            assert plan is not None
            proposer.observe(plan, measured(*of.measure(plan, np.random.default_rng([number, trial]))))
        first, second = proposer.ranking()[:2]
        assert first[1] <= second[1]
        regrets.append(of.true_s(first[0]) / of.optimum_s - 1)
    assert np.mean(regrets) <= 0.01, regrets


def test_a_space_without_moves_is_searched_by_its_parameters() -> None:
    of = BRANCHING
    proposer = proposer_of(problem(of, space=NoMoves(of)), 1)
    assert proposer is not None
    plans = study(proposer, of, 25)
    assert len({p.digest for p in plans}) == 25
    for plan in plans:
        plan.validate(of.graph, of.model.platform)
    assert min(of.true_s(p) for p in plans[5:]) < of.true_s(plans[0])


def draws(of: Instance, count: int = 3) -> Draws:
    return Correction(of.model).draw(count, np.random.default_rng(0))


@pytest.mark.parametrize("of", [CHAIN, BRANCHING, FOUR_PROCESSORS], ids=["chain", "branches", "four processors"])
def test_many_chains_are_priced_as_one_plan_is(of: Instance) -> None:
    rng = np.random.default_rng(0)
    plans = [of.space.plan_at(int(rng.random() * of.space.cardinality())) for _ in range(40)]
    platform = of.model.platform
    chains = Chains.of([from_plan(p, platform) for p in plans], len(of.graph.operators), of.max_stages)
    together = ChainPricing(of.graph, platform).latency_s(chains, draws(of))
    one_by_one = np.array([Timing(of.graph, platform).latency_s(p.stages, draws(of)) for p in plans]).T
    np.testing.assert_allclose(together, one_by_one)


def test_the_cheapest_chains_are_those_of_the_exact_solver() -> None:
    of = FOUR_PROCESSORS
    mean = Correction(of.model).draw(0, np.random.default_rng(0))
    (found,) = cheapest_chains(mean, of.max_stages)
    exact = best_chains(of.model, of.max_stages)[0]
    names = [p.name for p in of.model.platform.processors]
    plan = chain_plan(of.graph, found[0], [names[processor] for processor in found[1]])
    assert chain_cost(of.model, plan) == pytest.approx(exact.cost_s, rel=1e-3)


@given(st.integers(0, 2**32), st.sampled_from([CHAIN, FOUR_PROCESSORS]))
@settings(max_examples=30)
def test_neighbours_are_chains_of_the_space(seed: int, of: Instance) -> None:
    rng = np.random.default_rng(seed)
    platform, count = of.model.platform, len(of.graph.operators)
    plans = [of.space.plan_at(int(rng.random() * of.space.cardinality())) for _ in range(3)]
    start = Chains.of([from_plan(p, platform) for p in plans], count, of.max_stages)
    found = distinct(neighbours(start, len(platform.processors), 3, rng), platform)
    assert len(set(found.names())) == len(found) > 10
    for row in range(0, len(found), 7):
        plan = Plan(of.graph.digest, found.stages(row, platform))
        assert of.space.decode(of.space.encode(plan)) == plan == canonical(plan, of.graph, platform)


def test_what_was_measured_draws_the_posterior_to_it() -> None:
    of = CHAIN
    correction, platform = Correction(of.model), of.model.platform
    timing = Timing(of.graph, platform)
    plan = of.space.plan_at(of.space.cardinality() // 3)
    estimate = timing.stage_s(plan.stages, correction.draw(0, np.random.default_rng(0)))
    took = [float(s[0]) * 1.3 for s in estimate]
    before = correction.draw(200, np.random.default_rng(1))
    for _ in range(3):
        correction.observe(plan.stages, took)
    after = correction.draw(200, np.random.default_rng(1))
    for then, now, seconds in zip(
        timing.stage_s(plan.stages, before), timing.stage_s(plan.stages, after), took, strict=True
    ):
        assert now[0] == pytest.approx(seconds, rel=0.05)
        assert np.std(now) < np.std(then) / 3


def test_a_lost_race_teaches_only_that_it_was_lost() -> None:
    def estimate(*outcomes: Callable[[Plan], Measurement]) -> float:
        """Return what the second of two plans takes by the estimate."""
        proposer = AutoProposer(problem(CHAIN), 0)
        best, worse = CHAIN.space.plan_at(0), CHAIN.space.plan_at(1)
        for plan, out in zip((best, worse), outcomes, strict=True):
            proposer.observe(plan, out(plan))
        return {p.digest: s for p, s in proposer.ranking()}[worse.digest]

    def usual(plan: Plan) -> Measurement:
        return measured(2.0, tuple(2.0 / len(plan.stages) for _ in plan.stages))

    def nothing(plan: Plan) -> Measurement:
        return measured(1.0, tuple(1.0 / len(plan.stages) for _ in plan.stages))

    def broken_off(plan: Plan) -> Measurement:
        return measured(1e-3, tuple(1e-3 if i == 0 else 0.0 for i in range(len(plan.stages))), 1, raced=True)

    assert estimate(usual, broken_off) > 1.1 * estimate(usual, nothing)


def test_parts_that_took_no_time_at_all_do_not_end_a_study() -> None:
    """A clock may be too coarse for them, and a run that was broken off never came to its last ones."""
    proposer = AutoProposer(problem(CHAIN), 0)
    for index in range(60):
        plan = CHAIN.space.plan_at(index)
        stage_s = tuple(0.0 if index % 2 or i else 1.0 for i in range(len(plan.stages)))
        proposer.observe(plan, measured(1.0, stage_s))
    assert len(proposer.ranking()) == 60
    assert proposer.propose() is not None
    correction = Correction(CHAIN.model)
    for _ in range(3):
        correction.observe(CHAIN.space.plan_at(0).stages, (0.0,) * len(CHAIN.space.plan_at(0).stages))
    correction.draw(4, np.random.default_rng(0))


@pytest.mark.parametrize("took_s", [0.0, 1e-12, 1e-300])
def test_parts_that_cost_nothing_and_took_nothing_do_not_end_a_study(took_s: float) -> None:
    """A model may say 0 s of an operator, as of those that a GPU runs with their neighbours."""
    model = replace(CHAIN.model, operator_s=np.zeros_like(CHAIN.model.operator_s))
    correction = Correction(model)
    for _ in range(3):
        for index in range(40):
            stages = CHAIN.space.plan_at(index).stages
            correction.observe(stages, (took_s,) * len(stages), [(0, 1)] if len(stages) > 1 else ())
    for plans in (1, 100):
        correction.choose(plans)
        drawn = correction.draw(4, np.random.default_rng(0))
        assert np.isfinite(drawn.operator_s).all()


def test_a_small_space_is_proposed_to_its_last_plan_and_gone_on_with() -> None:
    """Where the neighbours of the best plans are used up, the rest of the space is looked at."""
    space = ChainSpace(CHAIN.graph, CHAIN.model.platform, 2)
    proposer = AutoProposer(problem(CHAIN, space=space), 0)
    whole = study(proposer, CHAIN, space.cardinality())
    assert len({plan.digest for plan in whole}) == space.cardinality()
    assert proposer.propose() is None
    for interrupted in (20, space.cardinality() - 5):
        again = AutoProposer(problem(CHAIN, space=space), 0)
        for number, plan in enumerate(whole[:interrupted]):
            again.observe(plan, outcome(CHAIN, plan, number))
        assert study(again, CHAIN, interrupted + 5, interrupted) == whole[interrupted : interrupted + 5]
