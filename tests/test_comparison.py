"""Paired comparison over rebuilt instances: what the interval promises, checked by simulation, and what it costs."""

from __future__ import annotations

import itertools
import json
import math
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.base import Batch, Candidate
from evaluators.comparison import Comparison, ComparisonPolicy, Load, compare, finals
from evaluators.samples import Samples
from evaluators.testing import Noise, SyntheticCandidate
from evaluators.timeline import Event, Timeline
from search_spaces.errors import RunFolderError, UnavailableError, UsageError

POLICY = ComparisonPolicy()
QUIET = Noise(run=0.005, instance=0.0035, spike_share=0.05)
"""What FACTS of the reference machine say (0.5 % between two instances), and spikes."""
ROUGH = Noise(run=0.01, instance=0.005, spike_share=0.05)


def loader(latency_s: float, noise: Noise, rng: np.random.Generator) -> Load:
    timeline = Timeline((Event(0, "cpu", 0.0, latency_s),))
    return lambda: SyntheticCandidate(timeline, noise, np.random.default_rng(rng.integers(2**63)))


def repeat(
    times: int, latency_s: float, difference: float, noise: Noise, policy: ComparisonPolicy = POLICY
) -> list[Comparison]:
    rng = np.random.default_rng(7)
    baseline, candidate = loader(latency_s * (1 + difference), noise, rng), loader(latency_s, noise, rng)
    return [compare(baseline, candidate, policy, rng) for _ in range(times)]


def seconds(comparison: Comparison) -> float:
    return math.fsum((*comparison.baseline.values_s, *comparison.candidate.values_s))


@pytest.mark.parametrize("noise", [QUIET, ROUGH], ids=["quiet", "rough"])
@pytest.mark.parametrize("latency_s", [0.003, 0.02, 0.13])
def test_equal_candidates_are_called_equal(latency_s: float, noise: Noise) -> None:
    found = repeat(200, latency_s, 0.0, noise)
    assert np.mean([c.significant for c in found]) <= 0.05 + 0.03, "5 %, and twice the error of 200 tries"
    assert np.mean([c.unstable for c in found]) <= 0.01
    if noise is QUIET:
        assert np.std([math.log(c.speedup) for c in found]) <= 0.0035


@pytest.mark.parametrize("difference", [-0.02, 0.01, 0.05])
def test_the_interval_covers_the_true_ratio(difference: float) -> None:
    found = repeat(400, 0.02, difference, ROUGH)
    covered = np.mean([c.ci95[0] <= 1 + difference <= c.ci95[1] for c in found])
    assert 0.95 - 0.025 <= covered <= 0.97 + 0.02


@pytest.mark.parametrize(("difference", "share"), [(0.01, 0.8), (0.02, 0.95)])
def test_true_differences_are_found_within_five_seconds(difference: float, share: float) -> None:
    found = repeat(100, 0.02, difference, QUIET, ComparisonPolicy(max_s=5.0))
    assert np.mean([c.significant and c.speedup > 1.0 for c in found]) >= share
    assert max(map(seconds, found)) <= 5.0


@pytest.mark.parametrize(("latency_s", "most_s"), [(0.003, 2.0), (0.02, 5.0), (0.13, 12.0)])
def test_the_cost_follows_the_latency(latency_s: float, most_s: float) -> None:
    for comparison in repeat(5, latency_s, 0.0, ROUGH):
        assert seconds(comparison) <= most_s
        assert POLICY.min_rounds <= comparison.rounds <= POLICY.max_rounds
    assert all(c.rounds <= 6 for c in repeat(5, latency_s, 0.3, ROUGH)), "a large difference is decided at once"


def test_chance_decides_who_is_built_first() -> None:
    """Memory that was given back goes round, so each would get the same pages in every round if they took turns."""
    built = ""

    def named(name: str, load: Load) -> Load:
        def again() -> Candidate:
            nonlocal built
            built += name
            return load()

        return again

    rng = np.random.default_rng(3)
    one, other = (named(name, loader(0.02, ROUGH, rng)) for name in "ab")
    rounds = ComparisonPolicy(precision=1e-6, max_s=1e9, min_rounds=60, max_rounds=60)
    compare(one, other, rounds, rng)
    firsts = built[::2]
    assert set(map("".join, itertools.pairwise(firsts))) == {"aa", "ab", "ba", "bb"}
    assert 15 <= firsts.count("a") <= 45


@pytest.mark.parametrize(("pair_s", "runs"), [(0.0, 5), (0.045, 15), (1.0, 25)])
def test_a_pair_lasts_as_long_as_it_is_told(pair_s: float, runs: int) -> None:
    timeline, counted = Timeline((Event(0, "cpu", 0.0, 0.02),)), 0

    class Counting(SyntheticCandidate):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
            nonlocal counted
            counted += n
            return super().run(n, stop_above_s)

    def load() -> Candidate:
        return Counting(timeline, Noise(run=0.0, cold=0.0), np.random.default_rng(0))

    policy = ComparisonPolicy(min_rounds=5, max_rounds=5, min_pairs=1, max_pairs=1, pair_s=pair_s)
    found = compare(load, load, policy, np.random.default_rng(0))
    assert len(found.baseline.values_s) == 5
    assert counted == 2 * (5 + 2 * runs), "one run settles an instance, and one comes before each that counts"


def test_exchanging_the_two_inverts_the_ratio() -> None:
    still = Noise(run=0.0, cold=0.0)
    rng = np.random.default_rng(0)
    slow, fast = loader(0.03, still, rng), loader(0.02, still, rng)
    there, back = compare(slow, fast, POLICY, rng), compare(fast, slow, POLICY, rng)
    assert there.speedup == pytest.approx(1.5)
    assert back.speedup == pytest.approx(1 / 1.5)
    assert there.significant
    assert not compare(slow, slow, POLICY, rng).significant


class Multiplying:
    """Real work on this machine: products of matrices."""

    def __init__(self, products: int) -> None:
        self.matrix = np.ones((64, 64))
        self.products = products

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:  # noqa: ARG002
        took_s = []
        for _ in range(n):
            start_s = time.perf_counter()
            for _ in range(self.products):
                self.matrix @ self.matrix
            took_s.append(time.perf_counter() - start_s)
        return Batch(np.array(took_s), np.array(took_s)[:, None])

    def verify(self) -> None:
        return None

    def close(self) -> None:
        return


def test_real_work_on_this_machine() -> None:
    rng = np.random.default_rng(0)
    found = compare(lambda: Multiplying(80), lambda: Multiplying(40), ComparisonPolicy(max_s=1.0), rng)
    assert found.significant
    assert found.speedup == pytest.approx(2.0, rel=0.3)


@dataclass
class Throttling:
    """A candidate of a device that gets slower by a step after some instances."""

    latency_s: float
    open: list[int]

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:  # noqa: ARG002
        latency_s = np.full(n, self.latency_s)
        return Batch(latency_s, latency_s[:, None])

    def verify(self) -> None:
        return None

    def close(self) -> None:
        self.open[0] -= 1


def throttling(rng: np.random.Generator, opened: list[int], step: float) -> Load:
    count = itertools.count()

    def load() -> Throttling:
        opened[0] += 1
        assert opened[0] <= 2
        factor = math.exp(0.003 * rng.standard_normal()) * (step if next(count) >= 5 else 1.0)
        return Throttling(0.02 * factor, opened)

    return load


def test_throttling_is_noticed_and_everything_is_closed() -> None:
    rng = np.random.default_rng(0)
    opened = [0]
    policy = ComparisonPolicy(min_rounds=10)
    steady = compare(throttling(rng, opened, 1.0), throttling(rng, opened, 1.0), policy, rng)
    assert not steady.unstable
    both = compare(throttling(rng, opened, 1.3), throttling(rng, opened, 1.3), policy, rng)
    assert both.unstable
    assert both.drift == pytest.approx(0.3, abs=0.02)
    assert both.speedup == pytest.approx(1.0, abs=0.01), "the pairs are interleaved, so the ratio stands"
    one = compare(throttling(rng, opened, 1.3), throttling(rng, opened, 1.0), policy, rng)
    assert one.unstable
    assert opened == [0]


def test_a_candidate_that_fails_closes_the_other() -> None:
    opened = [0]
    rng = np.random.default_rng(0)

    def fails() -> Throttling:
        raise UnavailableError("out of memory")

    for _ in range(10):
        with pytest.raises(UnavailableError):
            compare(throttling(rng, opened, 1.0), fails, POLICY, rng)
        assert opened == [0]


@dataclass
class Predicted:
    """A prediction: every run is the same, and says what it may be wrong about."""

    latency_s: float
    errors: tuple[float, ...]

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        del stop_above_s
        stages = np.full((n, 1), self.latency_s)
        return Batch(stages[:, 0], stages, None, np.array(self.errors))

    def verify(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("faster", "errors", "significant"),
    [(1.003, (0.1, 0.0), False), (1.1, (0.0, 0.1), False), (1.1, (0.1, 0.0), True), (1.5, (0.0, 0.1), True)],
    ids=["nothing differs", "another lane", "the same lane", "much faster"],
)
def test_a_prediction_is_only_as_significant_as_its_model(
    faster: float, errors: tuple[float, ...], significant: bool
) -> None:
    whole, cut = Predicted(0.01 * faster, (0.1, 0.0)), Predicted(0.01, errors)
    found = compare(lambda: whole, lambda: cut, POLICY, np.random.default_rng(0))
    assert found.significant is significant
    assert found.speedup == pytest.approx(faster)
    assert found.model_sigma is not None
    assert Comparison.from_json(json.loads(json.dumps(found.to_json()))) == found


@given(st.floats(0.5, 2.0), st.floats(0.001, 0.5), st.floats(-0.5, 0.5), st.booleans())
def test_comparisons_survive_a_file(speedup: float, half: float, drift: float, unstable: bool) -> None:
    ends = (speedup - half, speedup + half)
    made = Comparison(speedup, ends, (speedup,), Samples((1.0,), {"load": 1}), Samples((2.0,)), drift, unstable)
    assert Comparison.from_json({**json.loads(json.dumps(made.to_json())), "later": 1}) == made
    assert made.significant == (not ends[0] <= 1.0 <= ends[1])


@pytest.mark.parametrize("data", [None, {}, {"ci95": [1]}, {"ci95": "no"}])
def test_damaged_comparisons(data: object) -> None:
    with pytest.raises(RunFolderError, match="damaged"):
        Comparison.from_json(data)


def test_finals_spend_their_runs_on_the_best() -> None:
    rng = np.random.default_rng(5)
    wins = 0
    for _ in range(50):
        loads = [loader(0.02 * (1 + gap), ROUGH, rng) for gap in (0.05, 0.02, 0.0, 0.03, 0.3)]
        samples = finals(loads, POLICY, rng)
        counts = [len(s.values_s) for s in samples]
        wins += min(range(5), key=lambda i: samples[i].median) == 2
        assert counts[4] <= 9
        assert counts[4] < max(counts)
        assert math.fsum(v for s in samples for v in s.values_s) <= POLICY.max_s + 0.5
    assert wins >= 49


def test_finals_of_one_and_of_none() -> None:
    rng = np.random.default_rng(5)
    (only,) = finals([loader(0.02, QUIET, rng)], POLICY, rng, lambda: {"governor": "performance"})
    assert len(only.values_s) == 9
    assert only.conditions == {"governor": "performance"}
    with pytest.raises(UsageError):
        finals([], POLICY, rng)


@pytest.mark.parametrize(
    "wrong",
    [
        {"precision": 1.0},
        {"max_s": -1.0},
        {"min_rounds": 2},
        {"min_rounds": 9, "max_rounds": 8},
        {"min_pairs": 0},
        {"min_pairs": 9, "max_pairs": 8},
        {"pair_s": -0.1},
        {"pair_s": math.nan},
    ],
)
def test_policies_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        ComparisonPolicy(**wrong)  # type: ignore[arg-type]
