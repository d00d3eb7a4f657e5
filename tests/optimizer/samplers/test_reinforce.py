"""``reinforce``: its gradient is right, its critic learns, it places any space, and a policy can be kept in a file."""

from __future__ import annotations

import math
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest

from evaluators.samples import Measurement, Samples
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import chain_cost
from optimizer.samplers import quiet_optuna, study_sampler
from optimizer.samplers.auto import Problem
from optimizer.samplers.critic import Critic
from optimizer.samplers.policy.features import NAMES, Choices, softmax
from optimizer.samplers.policy.network import Weights, draw, gradient
from optimizer.samplers.policy.reinforce import task_of
from optimizer.samplers.policy.training import advantages
from optimizer.study.history import Trial
from search_spaces.core.errors import UsageError
from search_spaces.core.plan import Plan
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.registry import make_space
from tests.benchmarks.instances import Instance, instance
from tests.support.sentences import fails

SMALL, OTHER = instance(0), instance(22)


def problem(of: Instance) -> Problem:
    best = best_chains(of.model, of.max_stages)[0]
    optimum = chain_plan(of.graph, best.cuts, best.processors)
    return Problem(of.graph, of.model.platform, of.space, of.model, optima=(optimum,))


def random_weights(seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    return Weights(*(0.3 * rng.standard_normal(a.shape) for a in Weights.new(0).arrays()))


def test_choices_are_those_of_the_parameters_and_draws_are_plans_of_the_space() -> None:
    for of in (SMALL, OTHER):
        choices = Choices(task_of(problem(of)))
        middle = of.space.encode(problem(of).optima[0])
        assert choices.params(choices.which(middle)) == middle
        drawn = draw(choices.prior, choices, 50, np.random.default_rng(0))
        plans = [choices.plan(which) for which in drawn]
        assert all(of.space.decode(of.space.encode(plan)) == plan for plan in plans)
        assert len({plan.digest for plan in plans}) > 10


def test_what_changes_nothing_is_reported_and_what_takes_longer_is_less_likely() -> None:
    choices = Choices(task_of(problem(SMALL)))
    assert not choices.longer[choices.idle].any()
    assert choices.longer.min() >= -1e-9  # from the optimum of chains
    chance = softmax(choices.prior, choices.first, choices.of)
    np.testing.assert_allclose(np.add.reduceat(chance, choices.first), 1.0)
    worst = int(choices.longer.argmax())
    assert chance[worst] < chance[choices.middle[choices.of[worst]]]


def test_the_gradient_is_that_of_the_objective() -> None:
    choices = Choices(task_of(problem(SMALL)))
    weights, entropy, rng = random_weights(4), 0.1, np.random.default_rng(5)
    taken = draw(choices.prior, choices, 6, rng)
    advantage = rng.standard_normal(6)

    def objective(at: Weights) -> float:
        chance = softmax(choices.prior + at.scores(choices.features), choices.first, choices.of)
        surprise = -float((chance * np.log(np.maximum(chance, 1e-300))).sum())
        return float(advantage @ np.log(chance[taken]).sum(axis=1)) + entropy * surprise

    logits = choices.prior + weights.scores(choices.features)
    slope = weights.slopes(choices.features, gradient(logits, choices, taken, advantage, entropy))
    for which, (at, towards) in enumerate(zip(weights.arrays(), slope.arrays(), strict=True)):
        direction = rng.standard_normal(at.shape)
        sides = []
        for sign in (1.0, -1.0):
            arrays = list(weights.arrays())
            arrays[which] = at + sign * 1e-5 * direction
            sides.append(objective(Weights(*arrays)))
        assert float((towards * direction).sum()) == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-4)


def test_the_critic_learns_what_stages_take() -> None:
    def predict(plan: Plan) -> float:
        return chain_cost(SMALL.model, plan)

    critic = Critic(predict, SMALL.model)
    plans = [SMALL.space.plan_at(i * 97) for i in range(60)]
    for plan in plans[:40]:
        critic.observe(plan, SMALL.measure(plan, np.random.default_rng(0))[1])
    before = [abs(math.log(critic.seconds(plan) / SMALL.true_s(plan))) for plan in plans[40:]]
    critic.learn(None)
    after = [abs(math.log(critic.seconds(plan) / SMALL.true_s(plan))) for plan in plans[40:]]
    assert np.mean(after) < 0.5 * np.mean(before)
    critic.learn(np.random.default_rng(1))
    assert [critic.seconds(plan) for plan in plans] != after


@pytest.mark.parametrize("allow", ["cuts", "cuts,branches", "cuts,branches,splits"])
def test_it_places_any_space_and_follows_from_seed_number_and_trials(allow: str) -> None:
    from search_spaces.core.platform import Platform, Processor
    from search_spaces.models import load

    graph = load("squeezenet1_1@0.25/64")
    platform = Platform("p", tuple(Processor(n, "cpu", {n: 1.0}, n) for n in ("a", "b")))
    space = make_space(allow, graph, platform, 3 if allow == "cuts" else len(graph.operators))
    rng = np.random.default_rng(3)
    count = len(graph.operators)
    costs = replace(
        SMALL.model,
        platform=platform,
        operator_s=rng.uniform(1e-4, 1e-3, (2, count)),
        overhead_s=np.full(2, 1e-5),
        transfer_s=np.full((count, 2, 2), 1e-5),
    )
    seconds = {}
    for run in range(2):
        quiet_optuna()
        of = Problem(graph, platform, space, costs, predict=lambda plan: len(plan.stages) * 1e-3)
        sampler = study_sampler("reinforce", 7, space, of)
        study, plans = optuna.create_study(sampler=sampler), []
        for number in range(12):
            sampler.begin(number)
            trial = study.ask(dict(space.distributions()))
            plan = space.decode(trial.params)
            took_s = 1e-3 * (1 + int(plan.digest[:4], 16) / 65536)
            stage_s = (took_s / len(plan.stages),) * len(plan.stages)
            study.tell(trial, took_s)
            measured = Measurement(Samples((took_s,)), stage_s, (), "limit")
            sampler.update(Trial(number, plan, sampler.origin, trial.params, measurement=measured))
            plans.append(plan.digest)
        seconds[run] = plans
    assert seconds[0] == seconds[1]
    assert len(set(seconds[0])) == 12


def test_several_objectives_are_refused() -> None:
    with fails(UsageError):
        task_of(replace(problem(SMALL), front=True))


def test_advantages_have_no_scale_and_favour_the_best_quarter() -> None:
    found = advantages(np.array([1.0, 2.0, 4.0, 8.0]))
    np.testing.assert_allclose(found, advantages(np.array([10.0, 20.0, 40.0, 80.0])))
    assert found[0] - found[1] > found[1] - found[2] > 0.0
    assert advantages(np.array([1.0, 2.0, np.inf])).argmin() == 2
    assert not advantages(np.array([3.0, 3.0])).any()
    assert not advantages(np.array([np.inf])).any()


def test_a_policy_can_be_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.npz"
    weights = random_weights(8)
    weights.save(path)
    assert all(np.array_equal(a, b) for a, b in zip(Weights.load(path).arrays(), weights.arrays(), strict=True))


def test_a_policy_that_unpacks_to_more_than_weights_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "policy.npz"
    np.savez_compressed(
        path, inner=np.zeros(10**6), bias=np.zeros(1), out=np.zeros(1), schema_version=1, features=NAMES
    )
    assert path.stat().st_size < 10**5
    with fails(UsageError):
        Weights.load(path)


@pytest.mark.parametrize("entry", [b"no array", b"\x93NUMPY\x01\x00\x10\x00{'descr': '<f8',", b"\x93NUMPY\x09"])
def test_an_archive_of_something_else_is_no_policy(tmp_path: Path, entry: bytes) -> None:
    path = tmp_path / "policy.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("inner", "bias", "out", "schema_version", "features"):
            archive.writestr(f"{name}.npy", entry)
    with fails(UsageError):
        Weights.load(path)


@pytest.mark.parametrize("damage", ["missing", "empty", "text", "cut", "features", "shape", "nan"])
def test_what_is_no_policy_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "policy.npz"
    weights = random_weights(8)
    if damage == "shape":
        weights = replace(weights, out=weights.out[:-1])
    if damage == "nan":
        weights = replace(weights, out=weights.out * np.nan)
    weights.save(path)
    if damage == "missing":
        path.unlink()
    elif damage in {"empty", "text"}:
        path.write_bytes(b"" if damage == "empty" else b"no policy")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    elif damage == "features":
        with path.open("wb") as file:
            inner, bias, out = weights.arrays()
            np.savez(file, inner=inner, bias=bias, out=out, schema_version=1, features=NAMES[1:])
    with fails(UsageError):
        Weights.load(path)
