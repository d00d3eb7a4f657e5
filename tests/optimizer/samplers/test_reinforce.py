"""``reinforce``: its gradient is right, it learns from a model, carries over to another, and can be kept in a file."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optimizer.samplers.auto import Problem
from optimizer.samplers.policy.features import NAMES, features
from optimizer.samplers.policy.network import Weights, gradient, retrace, roll_out
from optimizer.samplers.policy.reinforce import Learner
from optimizer.samplers.policy.training import advantages
from search_spaces.core.errors import UsageError
from search_spaces.spaces.chain import chain_plan
from tests.benchmarks.instances import Instance, instance
from tests.support.sentences import fails

SMALL, OTHER = instance(0), instance(22)


def problem(of: Instance) -> Problem:
    return Problem(of.graph, of.model.platform, of.space, of.model)


def random_weights(seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    return Weights(*(0.3 * rng.standard_normal(a.shape) for a in Weights.new(0).arrays()))


def test_plans_that_a_policy_draws_are_plans_of_the_space() -> None:
    for of in (SMALL, OTHER):
        seen = features(of.graph, of.model, of.max_stages)
        names = [p.name for p in of.model.platform.processors]
        for weights in (Weights.new(0), random_weights(1)):
            chains = roll_out(weights, seen, 50, np.random.default_rng(0)).chains()
            plans = [chain_plan(of.graph, cuts, [names[lane] for lane in lanes]) for cuts, lanes in chains]
            assert all(of.space.decode(of.space.encode(plan)) for plan in plans)
            assert len({plan.digest for plan in plans}) > 10
    parts = [len(lanes) for _, lanes in roll_out(Weights.new(0), seen, 400, np.random.default_rng(0)).chains()]
    assert set(parts) == set(range(1, OTHER.max_stages + 1))  # before anything is learned, all numbers of parts occur


def test_the_decisions_of_given_plans_are_found_again() -> None:
    seen = features(SMALL.graph, SMALL.model, SMALL.max_stages)
    drawn = roll_out(random_weights(2), seen, 20, np.random.default_rng(3))
    again = retrace(random_weights(2), seen, drawn.chains())
    np.testing.assert_array_equal(again.actions, drawn.actions)
    np.testing.assert_allclose(again.probabilities, drawn.probabilities)


def test_the_gradient_is_that_of_the_objective() -> None:
    seen = features(SMALL.graph, SMALL.model, SMALL.max_stages)
    weights, entropy = random_weights(4), 0.1
    rollout = roll_out(weights, seen, 6, np.random.default_rng(5))
    advantage = np.random.default_rng(6).standard_normal(6)

    def objective(at: Weights) -> float:
        chance = retrace(at, seen, rollout.chains()).probabilities
        taken = np.take_along_axis(chance, rollout.actions[:, :, None], axis=2)[:, :, 0]
        surprise = -(chance * np.log(np.maximum(chance, 1e-300))).sum(axis=(1, 2))
        return float(np.mean(advantage * np.log(taken).sum(axis=1) + entropy * surprise))

    slope = gradient(weights, rollout, advantage, entropy)
    rng = np.random.default_rng(7)
    for which, (at, towards) in enumerate(zip(weights.arrays(), slope.arrays(), strict=True)):
        direction = rng.standard_normal(at.shape)
        sides = []
        for sign in (1.0, -1.0):
            arrays = list(weights.arrays())
            arrays[which] = at + sign * 1e-5 * direction
            sides.append(objective(Weights(*arrays)))
        assert float((towards * direction).sum()) == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-4)


def test_trials_move_the_policy_and_only_trials_do() -> None:
    learner = Learner(problem(SMALL), 0, Weights.new(0))
    plans = [SMALL.space.plan_at(i * 97) for i in range(20)]
    trials = [(SMALL.space.encode(plan), SMALL.true_s(plan)) for plan in plans]
    first, second = learner.weights_after(trials[:8]), learner.weights_after(trials)
    assert not np.array_equal(first.out, second.out)
    assert np.array_equal(learner.weights_after(trials[:15]).out, first.out)
    assert np.array_equal(Learner(problem(SMALL), 0, Weights.new(0)).weights_after(trials).out, second.out)


def test_advantages_have_no_scale_and_count_what_does_not_run_as_slow() -> None:
    found = advantages(np.array([1.0, 2.0, 4.0]))
    np.testing.assert_allclose(found, advantages(np.array([10.0, 20.0, 40.0])))
    assert found.sum() == pytest.approx(0.0)
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
