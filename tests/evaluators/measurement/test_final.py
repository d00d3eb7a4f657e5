"""The final: what its intervals promise, checked by simulation; what it spends; what it survives."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from evaluators.base import Batch, Candidate
from evaluators.measurement.disturbance import Counters
from evaluators.measurement.final import (
    INSTANCE_NOISE,
    Final,
    FinalComparison,
    FinalPolicy,
    Load,
    Standing,
    _positive_part,
    compare,
)
from evaluators.samples import Samples
from evaluators.schedule import Event, Timeline
from evaluators.testing import Noise, SyntheticCandidate
from evaluators.workload.outcome import Outcome, Request
from search_spaces.core.bounded import built, plain
from search_spaces.core.errors import RunFolderError, UnavailableError, UsageError
from tests.support.narrowing import there
from tests.support.sentences import fails, says

POLICY = FinalPolicy(max_s=10.0)
QUIET = Noise(run=0.005, instance=0.0035, spike_share=0.05)
"""What FACTS of the reference machine say (0.5 % between two instances), and spikes."""
ROUGH = Noise(run=0.01, instance=0.005, spike_share=0.05)
STILL = Noise(run=0.0, cold=0.0)


def _read(data: object) -> Final:
    return built(Final, data, "the final in the log is", RunFolderError)


def loader(latency_s: float, noise: Noise, rng: np.random.Generator) -> Load:
    timeline = Timeline((Event(0, "cpu", 0.0, latency_s),))
    return lambda: SyntheticCandidate(timeline, noise, np.random.default_rng(rng.integers(2**63)))


def also(call: Callable[[], object], load: Load) -> Load:
    """Return what calls something each time that it builds an instance."""

    def again() -> Candidate:
        call()
        return load()

    return again


def final_of(levels: NDArray[np.float64], racing: tuple[int, ...] | None = None) -> Final:
    """Return a final of levels, a row for each round and NaN where a plan took no part."""
    rows = [tuple(None if np.isnan(v) else float(v) for v in column) for column in levels.T]
    standings = tuple(Standing(Samples((1.0,)), row) for row in rows)
    return Final(standings, tuple(range(len(rows))) if racing is None else racing)


def test_runs_are_spent_on_the_best() -> None:
    rng = np.random.default_rng(5)
    loads = [loader(0.02 * (1 + gap), ROUGH, rng) for gap in (0.05, 0.02, 0.0, 0.03, 0.3)]
    found = FinalComparison(loads, POLICY, rng).run()
    counts = [len(s.samples.values_s) if s.samples else 0 for s in found.standings]
    assert counts[4] == min(counts)
    assert counts[4] < max(counts)
    assert found.fastest == 2


def test_turns_that_take_seconds_are_reported() -> None:
    rng, seen = np.random.default_rng(0), list[str]()
    loads = [loader(2.0, QUIET, rng), loader(2.2, QUIET, rng)]
    FinalComparison(loads, FinalPolicy(max_s=30.0), rng, computed=False, counted=True, progress=seen.append).run()
    assert [each for each in seen if "far" not in each]
    says(next(each for each in seen if "far" in each))


def test_ties_go_to_the_fewest_stages_and_no_further_than_the_tie() -> None:
    rng = np.random.default_rng(0)
    equal = FinalComparison([loader(0.02, STILL, rng), loader(0.02 * (1 + 1e-14), STILL, rng)], POLICY, rng).run()
    assert equal.exact
    assert equal.choose([39, 1], 0.01) == 1
    other = FinalComparison([loader(0.02, STILL, rng), loader(0.021, STILL, rng)], POLICY, rng).run()
    assert other.choose([39, 1], 0.01) == 0
    assert other.choose([39, 1], 0.01, allowed=[1]) == 1
    ratio = other.ratio(1, 0)
    assert ratio.value == pytest.approx(1.05)
    assert (ratio.low, ratio.high) == (ratio.value, ratio.value), "what is computed has no interval of samples"


@pytest.mark.parametrize(("lead", "tie"), [(0.013, True), (0.02, False)])
def test_a_lead_that_noise_alone_would_give_is_a_tie_once_no_rounds_follow(lead: float, tie: bool) -> None:
    noise = 0.02 * np.random.default_rng(1).standard_normal((5, 2))
    found = final_of(noise - noise.mean(axis=0) + (0.0, lead))
    assert not found.ratio(1, 0).significant
    assert found.choose([3, 1], 0.01) == int(tie)
    assert found.choose([3, 1], 0.01, ended=False) == 0


def test_a_lead_within_the_noise_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluators.measurement.final.UNDECIDED", 0.02)
    noise = 0.04 * np.random.default_rng(1).standard_normal((5, 2))
    found = final_of(noise - noise.mean(axis=0) + (0.0, 0.02))
    assert found.expected_loss(1, 0) > 0.02
    assert not found.may_lose(1, 0)
    assert found.choose([3, 1], 0.01) == 1


@pytest.mark.parametrize(("racing", "chosen", "is_open"), [((0, 1), 1, True), ((0,), 0, False)])
def test_a_lead_within_heavy_noise_is_a_tie_and_open_and_plans_that_left_are_not_asked(
    racing: tuple[int, ...], chosen: int, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluators.measurement.final.UNDECIDED", 0.02)
    noise = 0.15 * np.random.default_rng(1).standard_normal((5, 3))
    levels = noise - noise.mean(axis=0) + (0.0, 0.03, 0.3)
    levels[1:, 2] = np.nan  # left after its first round
    found = final_of(levels, racing)
    assert not found.ratio(1, 0).significant
    assert found.choose([3, 1, 2], 0.01) == chosen
    assert any(found.may_lose(chosen, i) for i in racing if i != chosen) == is_open


def test_a_plan_with_fewer_stages_that_left_the_race_is_chosen_over_a_tie_that_is_no_faster() -> None:
    noise = 0.02 * np.random.default_rng(1).standard_normal((6, 3))
    levels = noise - noise.mean(axis=0) + (0.0, 0.014, 0.012)
    found = final_of(levels, racing=(0, 1))
    assert not any(found.ratio(i, j).significant for i in range(3) for j in range(3))
    assert found.choose([3, 2, 2], 0.01) == 1, "as many stages: the one that raced to the end"
    assert found.effect(2, 1) <= 0.0
    assert found.choose([3, 2, 1], 0.01) == 2
    assert found.choose([3, 2, 1], 0.01, allowed=(0, 1)) == 1
    levels[:, 2] += 0.004
    behind = final_of(levels, racing=(0, 1))
    assert behind.effect(2, 1) > 0.0
    assert behind.choose([3, 2, 1], 0.01) == 1


def test_exchanging_two_plans_inverts_the_ratio() -> None:
    rng = np.random.default_rng(0)
    slow, fast = loader(0.03, STILL, rng), loader(0.02, STILL, rng)
    there, back = compare(slow, fast, POLICY, rng), compare(fast, slow, POLICY, rng)
    assert there.ratio.value == pytest.approx(1.5)
    assert back.ratio.value == pytest.approx(1 / 1.5)
    assert there.ratio.significant
    assert not compare(slow, slow, POLICY, rng).ratio.significant


def test_chance_decides_who_is_built_first() -> None:
    """Memory that was given back goes round, so each would get the same pages in every round if they took turns."""
    rng, built = np.random.default_rng(3), list[str]()
    one, other = (also(partial(built.append, name), loader(0.02, ROUGH, rng)) for name in "ab")
    compare(one, other, FinalPolicy(precision=1e-6, max_s=1e9, min_rounds=60, max_rounds=60), rng)
    firsts = built[::2]
    assert set(map("".join, itertools.pairwise(firsts))) == {"aa", "ab", "ba", "bb"}
    assert 15 <= firsts.count("a") <= 45


class Multiplying(Candidate):
    """Real work on this machine: products of matrices, in seconds of the processor, whatever else it does."""

    def __init__(self, products: int) -> None:
        self.matrix = np.ones((64, 64))
        self.products = products

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:  # noqa: ARG002
        took_s = []
        for _ in range(n):
            start_s = time.process_time()
            for _ in range(self.products):
                self.matrix @ self.matrix
            took_s.append(time.process_time() - start_s)
        return Batch(np.array(took_s), np.array(took_s)[:, None])


def test_real_work_on_this_machine() -> None:
    rng = np.random.default_rng(0)
    found = compare(lambda: Multiplying(80), lambda: Multiplying(40), FinalPolicy(max_s=20.0), rng)
    assert found.ratio.significant
    assert found.ratio.value == pytest.approx(2.0, rel=0.3)


@dataclass
class Throttling(Candidate):
    """A candidate of a device that gets slower by a step after some instances."""

    latency_s: float
    open: list[int]

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:  # noqa: ARG002
        latency_s = np.full(n, self.latency_s)
        return Batch(latency_s, latency_s[:, None])

    def close(self) -> None:
        self.open[0] -= 1


@dataclass
class Uneven(Throttling):
    """A candidate of two stages on a device that is slow in some runs, and for some turns."""

    rng: np.random.Generator

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        batch = super().run(n, stop_above_s)
        slow = self.rng.choice([1.0, 1.0, 3.0], n) * self.rng.choice([1.0, 1.5])
        return replace(batch, latency_s=batch.latency_s * slow, stage_s=batch.stage_s * slow[:, None] * [0.3, 0.7])


@pytest.mark.parametrize("loaded", [2, 8])
def test_stages_take_what_their_plan_takes_though_some_turns_are_slow(loaded: int) -> None:
    rng = np.random.default_rng(0)
    loads = [partial(Uneven, 0.01 * k, [99], rng) for k in range(2, 7)]
    found = FinalComparison(loads, replace(POLICY, loaded=loaded), np.random.default_rng(0)).run()
    for standing in found.standings:
        median_s = there(standing.samples).median
        assert standing.stage_s == pytest.approx((0.3 * median_s, 0.7 * median_s), rel=1e-9)


def test_stages_take_their_time_whatever_a_figure_is_that_knows_no_shares() -> None:
    rng = np.random.default_rng(0)

    @dataclass
    class Missed(Throttling):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
            batch = super().run(n, stop_above_s)
            return replace(batch, latency_s=batch.latency_s + rng.choice([0.001, 0.1], n))

    loads = [partial(Missed, 0.004, [99])] * 2
    found = FinalComparison(loads, POLICY, np.random.default_rng(0), scaled=False).run()
    for standing in found.standings:
        assert standing.stage_s == pytest.approx((0.004,), rel=1e-9)


def throttling(rng: np.random.Generator, opened: list[int], step: float) -> Load:
    count = itertools.count()

    def load() -> Throttling:
        opened[0] += 1
        factor = math.exp(0.003 * rng.standard_normal()) * (step if next(count) >= 5 else 1.0)
        return Throttling(0.02 * factor, opened)

    return load


def test_a_device_that_only_gets_slower_decides_all_the_same_and_everything_is_closed() -> None:
    rng, opened = np.random.default_rng(0), [0]
    policy = FinalPolicy(min_rounds=10)
    found = compare(throttling(rng, opened, 1.3), throttling(rng, opened, 1.3), policy, rng)
    assert found.ratio.value == pytest.approx(1.0, abs=0.01), "plans take turns, so the ratio stands"
    assert found.ratio.ci95[0] <= 1.0 <= found.ratio.ci95[1]
    assert opened == [0]


def test_rounds_that_have_nothing_in_common_give_wide_intervals_and_no_error() -> None:
    rng = np.random.default_rng(11)

    def load() -> SyntheticCandidate:
        latency_s = 0.01 * math.exp(float(rng.uniform(-12.0, 8.0)))
        return SyntheticCandidate(Timeline((Event(0, "cpu", 0.0, latency_s),)), QUIET, np.random.default_rng(1))

    short = replace(POLICY, min_rounds=2, max_rounds=2)
    for _ in range(20):
        found = FinalComparison([load] * 12, short, rng).run()
        ratios = [found.ratio(a, b) for a in found.measured for b in found.measured if a != b]
        assert all(0.0 < r.low <= r.high < math.inf for r in ratios)


def test_timers_with_coarse_resolution() -> None:
    """All runs read 15 or 16 ms: nothing is known below 1 %, and nothing is called different."""

    @dataclass
    class Ticks(Throttling):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:  # noqa: ARG002
            values = np.round(self.latency_s * (1.0 + 0.02 * RNG.standard_normal(n)), 3)
            return Batch(values, values[:, None])

    opened = [2]
    found = compare(lambda: Ticks(0.0155, opened), lambda: Ticks(0.0155, opened), POLICY, np.random.default_rng(0))
    assert not found.ratio.significant


@dataclass
class Counted(Throttling):
    """What is counted is the same in each run, though each takes some time; two models answer a request each."""

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        batch = super().run(n, stop_above_s)
        requests = tuple((Request(0.0, share * self.latency_s, rejected=False, missed=False),) for share in (0.5, 1.5))
        return replace(batch, outcome=Outcome(requests, 2.0 * self.latency_s, Timeline(())))


def test_counts_repeat_though_they_are_no_predictions() -> None:
    loads = [partial(Counted, nbytes, [9]) for nbytes in (2.0, 1.9, 1.9)]
    found = FinalComparison(loads, POLICY, np.random.default_rng(0), computed=False, counted=True).run()
    assert found.exact
    assert not found.computed
    assert found.rounds == 2
    assert found.ratio(1, 2).value == 1.0
    assert found.ratio(0, 1).low == found.ratio(0, 1).high == pytest.approx(2.0 / 1.9)
    assert not FinalComparison(loads, replace(POLICY, max_s=0.5), np.random.default_rng(0), computed=False).run().exact


def test_a_call_that_takes_long_does_not_shorten_turns() -> None:
    """As of a board far away: runs of 2 ms, each call takes 20 ms, and the first run of a call is slow."""
    calls: list[int] = []

    @dataclass
    class Far(Throttling):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
            time.sleep(0.02)
            calls.append(n)
            batch = super().run(n, stop_above_s)
            return replace(batch, latency_s=batch.latency_s * np.where(np.arange(n) == 0, 1.5, 1.0))

    loads = [partial(Far, seconds, [9]) for seconds in (0.002, 0.0021)]
    found = FinalComparison(loads, replace(POLICY, max_s=2.0), np.random.default_rng(0), computed=False).run()
    medians = [s.samples.median if s.samples else 0.0 for s in found.standings]
    assert medians == pytest.approx([0.002, 0.0021])
    assert max(calls) >= 10


def test_a_run_that_takes_longer_than_its_figure_is_a_turn() -> None:
    calls: list[int] = []

    @dataclass
    class Long(Throttling):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
            calls.append(n)
            return replace(super().run(n, stop_above_s), run_s=1.0)

    FinalComparison(
        [partial(Long, s, [9]) for s in (0.001, 0.002)], POLICY, np.random.default_rng(0), computed=False
    ).run()
    assert set(calls) == {1}


def test_what_came_of_requests_is_told_of_each_plan() -> None:
    loads = [partial(Counted, seconds, [9]) for seconds in (0.02, 0.01)]
    found = FinalComparison(loads, POLICY, np.random.default_rng(0)).run()
    for standing, ms in zip(found.standings, (20.0, 10.0), strict=True):
        assert standing.outcome["instances_ms"] == pytest.approx([0.5 * ms, 1.5 * ms])
        assert standing.outcome["mean_ms"] == pytest.approx(ms)
        assert standing.outcome["throughput_per_s"] == pytest.approx(1e3 / ms)
    assert _read(json.loads(json.dumps(plain(Final, found)))) == found


RNG = np.random.default_rng(11)


@dataclass
class Shared:
    """What some plans and the machine's counters have in common: who is disturbed when."""

    waited_ns: int = 0
    runs: int = 0
    burst: int = 1

    def counters(self) -> Counters:
        return Counters(time.monotonic(), {1: self.waited_ns})


@dataclass
class Disturbed(Throttling):
    """A third of the turns, one or more after each other, take twice as long, and the counters tell."""

    shared: Shared

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        self.shared.runs += 1
        batch = super().run(n, stop_above_s)
        if self.shared.runs // self.shared.burst % 3:
            return batch
        self.shared.waited_ns += 10**12
        return Batch(batch.latency_s * 2.0, batch.stage_s * 2.0)


class Late(Disturbed):
    """One model, which answers a request: late in turns that are disturbed."""

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        batch = super().run(n, stop_above_s)
        seconds = float(batch.latency_s[-1])
        request = Request(0.0, seconds, rejected=False, missed=seconds > 1.5 * self.latency_s)
        return replace(batch, outcome=Outcome(((request,),), seconds, Timeline(())))


def test_what_came_of_requests_in_disturbed_turns_is_left_out() -> None:
    shared = Shared(burst=4)
    loads = [partial(Late, seconds, [9], shared) for seconds in (0.02, 0.0206)]
    found = FinalComparison(loads, POLICY, np.random.default_rng(0), counters=shared.counters).run()
    assert shared.waited_ns > 0
    for standing, latency_s in zip(found.standings, (0.02, 0.0206), strict=True):
        assert standing.outcome["mean_ms"] == pytest.approx(1e3 * latency_s)
        assert not standing.outcome["misses"]


def test_turns_that_waited_for_a_core_are_repeated_and_told() -> None:
    shared, opened = Shared(), [0]

    def load(latency_s: float) -> Load:
        opened[0] += 1
        return lambda: Disturbed(latency_s, [1], shared)

    found = FinalComparison(
        [load(0.02), load(0.0206)], POLICY, np.random.default_rng(0), counters=shared.counters
    ).run()
    assert found.repeated > 0
    assert found.disturbance.waited_s > 0
    for standing, latency_s in zip(found.standings, (0.02, 0.0206), strict=True):
        assert max(there(standing.samples).values_s) <= 1.01 * latency_s, "no disturbed turn is among the samples"


def test_a_machine_that_is_always_busy_still_gives_figures() -> None:
    shared = Shared()

    def counters() -> Counters:
        shared.waited_ns += 10**9
        return shared.counters()

    rng = np.random.default_rng(0)
    policy = FinalPolicy(max_s=0.5, disturbed_s=0.5)
    found = FinalComparison([loader(0.02, ROUGH, rng), loader(0.03, ROUGH, rng)], policy, rng, counters=counters).run()
    assert found.fastest == 0
    assert found.ratio(1, 0).significant


def test_rounds_in_a_burst_count_until_there_are_enough_without() -> None:
    """Every other round falls into a burst in which one of two equal plans takes longer, now this one, now that."""
    rng, shared, opened, rounds = np.random.default_rng(0), Shared(), [0], [0, 0]

    class InABurst(Throttling):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
            batch = super().run(n, stop_above_s)
            shared.runs += n
            if self.open[0] % 2 == 0:
                return batch
            shared.waited_ns += n * 10**10
            slow = 1.0 + 0.2 * rng.random()
            return Batch(batch.latency_s * slow, batch.stage_s * slow)

    def load(which: int) -> Load:
        def made() -> Candidate:
            opened[0] += 1
            rounds[which] += 1
            return InABurst(0.02 * math.exp(0.002 * rng.standard_normal()), [rounds[which] - 1])

        return made

    def counters() -> Counters:
        return Counters(0.02 * shared.runs, {1: shared.waited_ns})

    policy = replace(POLICY, min_rounds=24, max_rounds=24, max_s=1e3)
    found = FinalComparison([load(0), load(1)], policy, rng, counters=counters, watched=lambda f: f.measured).run()
    counted = [sum(level is not None for level in standing.levels) for standing in found.standings]
    assert counted == [12, 12], "the rounds in between"
    ratio = found.ratio(0, 1)
    assert ratio.high - ratio.low < 0.01
    assert _read(plain(Final, found)).ratio(0, 1) == ratio


@pytest.mark.parametrize("when", ["load", "run"])
def test_a_plan_that_fails_leaves_the_others(when: str) -> None:
    rng, opened = np.random.default_rng(0), [0]

    class Lost(Throttling):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
            raise UnavailableError(f"adapter lost in {n} runs below {stop_above_s} s")

    def failing() -> Candidate:
        if when == "load":
            raise UnavailableError("no memory")
        opened[0] += 1
        return Lost(0.01, opened)

    good: Callable[[], Load] = lambda: throttling(rng, opened, 1.0)  # noqa: E731
    found = FinalComparison([failing, good(), good()], POLICY, rng).run()
    assert found.measured == (1, 2)
    assert found.standings[0].failure.startswith(("no memory", "adapter lost"))
    assert found.choose([1, 1, 2], 0.01) == 1
    assert opened == [0]


def test_finals_of_one_and_of_none_and_of_failures() -> None:
    rng = np.random.default_rng(5)
    found = FinalComparison(
        [loader(0.02, QUIET, rng)], POLICY, rng, conditions=lambda: {"governor": "performance"}
    ).run()
    assert found.fastest == found.choose([1], 0.01) == 0
    assert there(found.standings[0].samples).conditions == {"governor": "performance"}
    with pytest.raises(UsageError):
        FinalComparison([], POLICY, rng).run()

    def failing() -> Candidate:
        raise UnavailableError("no memory")

    with fails(UnavailableError):
        _ = FinalComparison([failing], POLICY, rng).run().fastest


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let time pass for the final: its clock stands still otherwise, however busy the machine is."""
    now_s = [0.0]

    def pass_by(seconds: float) -> None:
        now_s[0] += seconds

    clocks = dict.fromkeys(("monotonic", "process_time"), lambda: now_s[0])
    monkeypatch.setattr("evaluators.measurement.final.time", SimpleNamespace(**clocks))
    return pass_by


def test_slowly_loading_plans_keep_two_instances(spend: Callable[[float], None]) -> None:
    built = [0, 0]
    rng, opened = np.random.default_rng(0), [0]

    def slow(which: int) -> Load:
        def built_once_more() -> None:
            built[which] += 1
            spend(0.011)

        return also(built_once_more, throttling(rng, opened, 1.0))

    policy = FinalPolicy(slow_load_s=0.01, min_rounds=6, max_rounds=6)
    found = FinalComparison([slow(0), slow(1)], policy, rng, watched=lambda f: f.measured).run()
    assert found.rounds == 6
    assert built == [2, 2]
    assert opened == [0]


def test_those_between_which_is_decided_are_built_anew_though_time_is_short(spend: Callable[[float], None]) -> None:
    rng, latencies_s = np.random.default_rng(0), (0.01, 0.0101, *[0.0112] * 8)
    built = [0] * len(latencies_s)

    def slow(which: int) -> Load:
        def built_once_more() -> None:
            built[which] += 1
            spend(0.02)

        return also(built_once_more, loader(latencies_s[which], ROUGH, rng))

    # Loading and two rounds take 0.7 of this; loading is 0.2 s of it.
    policy = FinalPolicy(slow_load_s=0.01, max_s=1.0, disturbed_s=0.0, settle_s=0.0, turn_s=0.0, max_blocks=3)
    found = FinalComparison([slow(i) for i in range(len(built))], policy, rng).run()
    assert built[:2] == [2, 2]
    assert [standing.kept for standing in found.standings] == built
    assert sum(built[2:]) < 12, "others are not, or those that looked like the rival"


@pytest.mark.parametrize("noise", [0.003, 0.05])
def test_what_kept_instances_differ_by_is_in_the_intervals(noise: float) -> None:
    rng, wrong, widths = np.random.default_rng(0), 0, []
    for _ in range(100):
        instances = noise * rng.standard_normal((2, 6))
        numbers = np.array([0, 0, 1, 0, 1, 0, 1, 0])
        levels = instances[numbers] + 0.003 * rng.standard_normal((8, 6))
        standings = [
            Standing(Samples((1.0,)), tuple(map(float, levels[:, i])), kept=2, instances=tuple(map(int, numbers)))
            for i in range(6)
        ]
        final = Final(tuple(standings), tuple(range(6)))
        ratios = [final.ratio(i, 0) for i in range(1, 6)]
        wrong += sum(ratio.significant for ratio in ratios)
        widths += [math.log(ratio.high / ratio.low) / 2 for ratio in ratios]
        assert _read(plain(Final, final)) == final
    assert wrong <= 0.06 * 500
    assert float(np.median(widths)) < 4.0 * max(noise, INSTANCE_NOISE)


def test_instances_are_kept_once_there_is_room_for_those_that_are_left(spend: Callable[[float], None]) -> None:
    built = [0] * 4
    rng, opened = np.random.default_rng(0), [0]

    class Noisy(Throttling):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:  # noqa: ARG002
            latency_s = self.latency_s * np.exp(0.05 * rng.standard_normal(n))
            return Batch(latency_s, latency_s[:, None])

    def slow(which: int, latency_s: float) -> Load:
        def load() -> Candidate:
            built[which] += 1
            opened[0] += 1
            spend(0.21)
            return Noisy(latency_s, opened)

        return load

    loads = [slow(i, latency_s) for i, latency_s in enumerate((0.002, 0.002, 0.02, 0.02))]
    policy = FinalPolicy(room=2, max_s=4.0, disturbed_s=0.0, min_rounds=6, max_rounds=6, turn_s=0.002, settle_s=0.0)
    found = FinalComparison(loads, policy, rng, watched=lambda _: [0, 1]).run()
    assert found.rounds == 6
    assert built[0] == built[1] <= 4  # anew while there are four, then two that are kept
    assert opened == [0]


@pytest.mark.parametrize(("instance_nbytes", "kept"), [(100 << 20, True), (600 << 20, False)])
def test_what_instances_take_tells_how_many_are_kept(instance_nbytes: int, kept: bool) -> None:
    built, opened, memory = [0] * 4, [0], [8 << 30]
    rng = np.random.default_rng(0)

    class Large(Throttling):
        def close(self) -> None:
            super().close()
            memory[0] += instance_nbytes

        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:  # noqa: ARG002
            latency_s = self.latency_s * np.exp(0.05 * rng.standard_normal(n))
            return Batch(latency_s, latency_s[:, None])

    def large(which: int) -> Load:
        def load() -> Candidate:
            built[which] += 1
            opened[0] += 1
            memory[0] -= instance_nbytes
            time.sleep(0.11)
            return Large(0.002, opened)

        return load

    policy = FinalPolicy(
        keep_nbytes=4 << 30, max_s=4.0, disturbed_s=0.0, min_rounds=6, max_rounds=6, turn_s=0.002, settle_s=0.0
    )
    loads = [large(i) for i in range(4)]
    found = FinalComparison(
        loads, policy, rng, watched=lambda _: range(4), computed=False, free_nbytes=lambda: memory[0]
    ).run()
    if kept:
        assert max(built) <= 3  # anew in the first round, then two that are kept
    else:
        assert built == [found.rounds] * 4
    assert opened == [0]
    assert memory == [8 << 30]


@dataclass
class Predicted(Candidate):
    """A prediction: every run is the same, and says what it may be wrong about."""

    latency_s: float
    errors: tuple[float, ...]

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        del stop_above_s
        stages = np.full((n, 1), self.latency_s)
        return Batch(stages[:, 0], stages, None, np.array(self.errors))


@pytest.mark.parametrize(
    ("faster", "errors", "significant"),
    [(1.003, (0.1, 0.0), False), (1.1, (0.0, 0.1), False), (1.1, (0.1, 0.0), True), (1.5, (0.0, 0.1), True)],
    ids=["nothing differs", "another processor", "the same processor", "much faster"],
)
def test_a_prediction_is_only_as_significant_as_its_model(
    faster: float, errors: tuple[float, ...], significant: bool
) -> None:
    whole, cut = Predicted(0.01 * faster, (0.1, 0.0)), Predicted(0.01, errors)
    found = compare(lambda: whole, lambda: cut, POLICY, np.random.default_rng(0))
    assert found.ratio.significant is significant
    assert found.ratio.value == pytest.approx(faster)
    assert found.final.predicted


def test_finals_survive_a_file() -> None:
    rng = np.random.default_rng(0)
    made = FinalComparison([loader(0.02 * (1 + i / 50), ROUGH, rng) for i in range(4)], POLICY, rng).run()
    again = _read({**json.loads(json.dumps(plain(Final, made))), "later": 1})
    assert again == made
    assert again.ratio(3, 0) == made.ratio(3, 0)


@pytest.mark.parametrize("data", [None, {}, {"standings": [1]}, {"standings": "no"}])
def test_damaged_finals(data: object) -> None:
    with fails(RunFolderError):
        _read(data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"precision": 1.0},
        {"max_s": -1.0},
        {"min_rounds": 1},
        {"min_rounds": 9, "max_rounds": 8},
        {"min_blocks": 0},
        {"min_blocks": 9, "max_blocks": 8},
        {"loaded": 1},
    ],
)
def test_policies_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        FinalPolicy(**wrong)  # type: ignore[arg-type]


@dataclass
class Adapter:
    """An accelerator whose clock follows its load, with a clock of its own for what happens."""

    now_s: float = 0.0
    load: float = 1.0
    busy_until_s: float = 0.0

    def idle(self, seconds: float) -> None:
        self.load *= math.exp(-seconds / 0.3)
        self.now_s += seconds

    def work(self, seconds: float) -> float:
        took_s = seconds * (1.0 + 1.5 * (1.0 - self.load))
        self.load = 1.0 - (1.0 - self.load) * math.exp(-took_s / 0.3)
        self.now_s += took_s
        self.busy_until_s = self.now_s
        return took_s


@dataclass
class OnAdapter(Candidate):
    """A plan that loads the adapter, and warms it up where it idled, as LiteRT does; or one that does not."""

    adapter: Adapter
    latency_s: float
    loads: bool

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:  # noqa: ARG002
        adapter = self.adapter
        if not self.loads:
            adapter.idle(n * self.latency_s)
            return Batch(np.full(n, self.latency_s), np.full((n, 1), self.latency_s))
        if adapter.now_s - adapter.busy_until_s > 0.1:
            adapter.load = 1.0
        took_s = np.array([adapter.work(self.latency_s) for _ in range(n)])
        return Batch(took_s, took_s[:, None])


def test_plans_that_load_an_accelerator_take_turns_apart_from_those_that_leave_it_idle() -> None:
    truth_s = {"gpu": 0.0009, "gpu+cpu": 0.00092, "cpu": 0.001, "cpu0": 0.0011, "cpu1": 0.0012}

    def ratio_of(groups: list[str]) -> float:
        adapter = Adapter()
        loads = [lambda n=n, s=s: OnAdapter(adapter, s, n.startswith("gpu")) for n, s in truth_s.items()]
        policy = FinalPolicy(max_s=3.0)
        found = FinalComparison(
            loads, policy, np.random.default_rng(0), watched=lambda f: f.measured, groups=groups
        ).run()
        assert len(found.measured) == len(truth_s)
        return found.ratio(2, 0).value

    assert ratio_of([name[:3] for name in truth_s]) == pytest.approx(1.0 / 0.9, rel=0.01)
    assert ratio_of([]) < 1.0, "turns in between let the clock fall"


def test_a_group_whose_only_plan_fails_leaves_the_others() -> None:
    rng = np.random.default_rng(0)
    adapter = Adapter()

    class Lost(OnAdapter):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
            if self.adapter.now_s > 0.05:
                raise UnavailableError("adapter lost")
            return super().run(n, stop_above_s)

    loads = [lambda: Lost(adapter, 0.001, loads=True), loader(0.01, QUIET, rng), loader(0.0102, QUIET, rng)]
    found = FinalComparison(loads, POLICY, rng, groups=["gpu", "", ""]).run()
    assert found.standings[0].failure == "adapter lost"
    assert found.measured == (1, 2)
    assert found.fastest == 1


@pytest.mark.parametrize("tie", [0.0, 0.01], ids=["the fastest", "a tie with fewer stages"])
def test_a_final_goes_on_while_it_is_open_which_plan_is_the_fastest(
    tie: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here counters tell of no disturbance, though instances differ by 15 %."""
    monkeypatch.setattr("evaluators.measurement.final.UNDECIDED", 0.02)

    def chosen(found: Final, ended: bool = True) -> int:
        return found.choose([3, 3, 1, 3], tie, ended=ended)

    def measured(disturbed_s: float) -> Final:
        rng = np.random.default_rng(4)
        policy = FinalPolicy(max_s=2.0, disturbed_s=disturbed_s)
        loads = [loader(0.01, Noise(run=0.1, instance=0.15), rng) for _ in range(4)]
        return FinalComparison(loads, policy, rng, counters=lambda: Counters(0.0), recommended=chosen).run()

    short, long = measured(0.0), measured(60.0)
    assert any(short.may_lose(chosen(short), i) for i in short.racing)
    assert not any(long.may_lose(chosen(long), i) for i in long.racing)
    assert short.rounds < long.rounds < FinalPolicy().max_rounds


def test_a_final_goes_on_with_two_plans_where_one_looks_faster_but_not_significantly() -> None:
    """Many plans leave time for few rounds, which cannot tell a gain of 5 % on a busy machine."""

    def watched(found: Final) -> tuple[int, ...]:
        return (found.fastest, 1)

    def measured(claim_s: float) -> tuple[Final, int]:
        rng = np.random.default_rng(2)
        policy = FinalPolicy(max_s=3.0, disturbed_s=0.0, claim_s=claim_s)
        seconds = [0.01, *[0.0105] * 12]
        loads = [loader(s, Noise(run=0.03, instance=0.02), rng) for s in seconds]
        found = FinalComparison(
            loads,
            policy,
            rng,
            counters=lambda: Counters(0.0),
            recommended=lambda f, _: f.fastest,
            reference=lambda _: 1,
            watched=watched,
        ).run()
        return found, found.fastest

    (short, one), (long, two) = measured(0.0), measured(3.0)
    assert one == two == 0
    assert not short.ratio(1, 0).significant
    assert long.ratio(1, 0).significant
    rows = [s.levels for s in long.standings]
    assert sum(level is not None for level in rows[1][short.rounds :]) > 2
    assert all(level is None for row in rows[2:] for level in row[short.rounds + 1 :])


def finals(rng: np.random.Generator, noise: float) -> Final:
    """Return a final of equal plans, some of which left early and came back, in rounds of very different speed."""
    levels = 0.5 * rng.standard_normal((12, 1)) + noise * rng.standard_normal((12, 6))
    present = rng.random((12, 6)) < np.where(np.arange(12)[:, None] < 2, 1.0, 0.4)
    return final_of(np.where(present, levels, np.nan))


def test_effects_of_plans_do_not_contradict_each_other() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        final = finals(rng, 0.02)
        for a, b, c in itertools.permutations(range(6), 3):
            assert final.effect(a, c) == pytest.approx(final.effect(a, b) + final.effect(b, c), abs=1e-9)
        assert all(final.effect(i, final.fastest) >= 0.0 for i in range(6))


def test_equal_plans_that_met_others_more_often_than_each_other_are_rarely_called_different() -> None:
    rng, wrong, count = np.random.default_rng(1), 0, 200
    for _ in range(count):
        final = finals(rng, 0.02)
        wrong += any(final.ratio(i, 0).significant for i in range(1, 6))
    assert wrong <= 0.06 * count


def test_rounds_with_a_third_plan_help_to_tell_two_apart() -> None:
    """Two plans that met twice, and each of them a third one ten times."""
    rng = np.random.default_rng(2)
    levels = 0.01 * rng.standard_normal((22, 3))
    levels[2:12, 0] = levels[12:, 1] = np.nan

    def half(rounds: int) -> float:
        ratio = final_of(levels[:rounds]).ratio(0, 1)
        return math.log(ratio.high / ratio.low)

    assert half(22) < 0.7 * half(2)


def test_instances_that_rotate_in_step_are_of_one_plan() -> None:
    """A plan that left after two rounds has met first and second instances of the others in one round each."""
    rng = np.random.default_rng(3)
    levels = np.array([0.0, 0.0, 0.4]) + 3.0 * rng.standard_normal((12, 1)) + 1e-4 * rng.standard_normal((12, 3))
    for left in (1, 2, 3):
        standings = [
            Standing(
                Samples((1.0,)),
                tuple(float(v) if i < 2 or row < left else None for row, v in enumerate(levels[:, i])),
                kept=2,
                instances=tuple(row % 2 for row in range(12)),
            )
            for i in range(3)
        ]
        final = Final(tuple(standings), (0, 1))
        assert final.effect(2, 0) == pytest.approx(0.4, abs=0.01)
        assert final.effect(1, 0) == pytest.approx(0.0, abs=0.01)


def test_one_odd_round_of_kept_instances_counts_little() -> None:
    """Four rounds of two instances each, so that every pair of instances has met once."""
    levels = ((-4.6, -4.6, -4.6, -4.6), (-4.5, -4.51, -4.0, -4.49))
    standings = tuple(
        Standing(Samples((0.01,)), row, kept=2, instances=(0, 1, 0, 1) if i else (0, 0, 1, 1))
        for i, row in enumerate(levels)
    )
    found = Final(standings, (0, 1))
    assert found.ratio(1, 0).value == pytest.approx(math.exp(0.11), abs=0.02)


@pytest.mark.parametrize(("mean", "freedom"), [(0.0, 3.0), (-1.3, 3.0), (0.5, 8.0), (0.0, 1e4)])
def test_what_a_rival_may_gain_is_the_mean_of_what_is_positive(mean: float, freedom: float) -> None:
    drawn = mean + np.random.default_rng(0).standard_t(freedom, 1_000_000)
    assert _positive_part(mean, freedom) == pytest.approx(np.maximum(0.0, drawn).mean(), rel=0.02)
