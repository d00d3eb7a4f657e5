"""The benchmark of verdicts: what of it does not depend on the machine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluators.base import Batch, Candidate
from evaluators.measurement.disturbance import between
from evaluators.measurement.final import compare
from evaluators.testing import Noise, SyntheticEvaluator
from search_spaces.core.graph import Graph
from search_spaces.spaces.chain import chain_plan
from tests.benchmarks.verdicts import replay, studies
from tests.benchmarks.verdicts.accelerated import wanted
from tests.benchmarks.verdicts.cost import judge as judge_cost
from tests.benchmarks.verdicts.document import Document
from tests.benchmarks.verdicts.neighbours import neighbour
from tests.benchmarks.verdicts.networks import network
from tests.benchmarks.verdicts.replay import EQUAL, Stretch, replayed
from tests.benchmarks.verdicts.slowed import LEFT, RIGHT, SlowedCandidate, best_plan, slow_shares
from tests.benchmarks.verdicts.trace import Trace, ratio, record
from tests.support.sentences import fails

NAMES = (EQUAL, EQUAL, "2 %", "5 %")
TRUTHS = {EQUAL: 0.0, "2 %": 0.02, "5 %": 0.05}


def made_trace(rounds: int = 60, *, spread: float = 0.3, disturbed: bool = False) -> Trace:
    """Return a trace whose blocks differ by far more than its plans, which differ by 0, 2 and 5 %."""
    rng, shape = np.random.default_rng(1), (rounds, 9, 4, 9)
    level_s = 0.004 * np.exp(spread * rng.standard_normal((rounds, 9, 1, 1)))
    level_s = level_s * np.array([1 + TRUTHS[name] for name in NAMES])[None, None, :, None]
    run_s = level_s * np.exp(0.002 * rng.standard_normal(shape))
    lost = np.where(rng.random(shape[:3]) < (0.3 if disturbed else 0.0), 0.2, 0.0)
    return Trace(NAMES, run_s * (1.0 + lost[..., None]), lost, run_s[:, 0, :, 0], settle=3)


def test_a_disturbance_hits_all_replayed_candidates_alike() -> None:
    trace = made_trace()
    stretch = Stretch(trace, 0)
    rng = np.random.default_rng(0)
    found = compare(partial(stretch.build, 3), partial(stretch.build, 0), replay.POLICY, rng, counters=stretch.counters)
    assert found.ratio.value == pytest.approx(1.05, abs=0.002), (
        "blocks 30 % apart, yet plans are compared within a block"
    )
    assert not stretch.reused


def test_candidates_of_a_stretch_share_block_and_clock() -> None:
    trace = made_trace(disturbed=True)
    stretch = Stretch(trace, 5)
    slow, fast = stretch.build(3), stretch.build(0)
    assert slow.run(1).latency_s[0] == trace.first_s[5, 3]
    assert fast.run(1).latency_s[0] == trace.first_s[5, 0]
    for block in range(9):
        for candidate in (slow, fast) if block % 2 else (fast, slow):
            before = stretch.counters()
            values = np.concatenate([candidate.run(3).latency_s, candidate.run(6).latency_s])
            happened = between(before, stretch.counters())
            assert values == pytest.approx(trace.run_s[5, block, candidate.plan])
            assert happened.lasted_s == pytest.approx(values.sum())
            assert happened.lost_s == pytest.approx(trace.lost[5, block, candidate.plan] * values.sum(), abs=1e-8)
    again = stretch.build(0)
    assert stretch.round == 6, "a plan that is built again begins the next round"
    again.run(1)
    assert len(again.run(12).latency_s) == 12, "more runs than were recorded"


def test_a_repeated_turn_takes_the_next_block_and_the_others_follow() -> None:
    stretch = Stretch(made_trace(), 0)
    assert [stretch.turn(plan) for plan in (0, 0, 1, 1, 0)] == [(0, 0), (0, 1), (0, 1), (0, 2), (0, 2)]


def test_resampled_comparisons_find_what_is_true() -> None:
    rows = replayed(made_trace(disturbed=True, spread=0.01), (0,), list(TRUTHS), 30)
    found = replay.judge("random", rows, TRUTHS)
    assert found["2 %"]["slower"] == found["5 %"]["slower"] == 1.0
    assert found[EQUAL]["not_decided"] >= 0.8
    assert found[EQUAL]["turns_repeated"] > 0.0, "disturbed turns were repeated"
    assert found["5 %"]["coverage"] >= 0.8


def outcomes(pair: str, slower: int, faster: int, neither: int) -> list[dict[str, object]]:
    kinds = ((slower, 1.01, 1.03), (faster, 0.95, 0.98), (neither, 0.99, 1.03))
    common = {"pair": pair, "ratio": 1.0, "rounds": 5, "repeated": 0}
    return [{**common, "low": low, "high": high} for count, low, high in kinds for _ in range(count)]


@pytest.mark.parametrize(
    ("condition", "slower", "faster", "neither", "kept"),
    [
        ("quiet", 90, 1, 9, {"found": True, "reversed": True}),
        ("quiet", 89, 2, 9, {"found": False, "reversed": False}),
        ("bursts", 60, 0, 40, {"found": True, "reversed": True}),
        ("compiler", 59, 0, 41, {"found": False, "reversed": True}),
    ],
)
def test_true_differences_are_judged(condition: str, slower: int, faster: int, neither: int, kept: object) -> None:
    found = replay.judge(condition, outcomes("2 %", slower, faster, neither), TRUTHS)["2 %"]
    assert {name: limit["kept"] for name, limit in found["limits"].items()} == kept
    assert found["coverage"] == (slower + neither) / 100


def test_equal_plans_are_judged() -> None:
    for wrong, kept in ((6, True), (7, False)):
        found = replay.judge("random", outcomes(EQUAL, wrong - 2, 2, 100 - wrong), TRUTHS)[EQUAL]
        assert found["limits"]["different"]["kept"] is kept


def test_studies_are_judged() -> None:
    right = {"case": "small", "exit": 0, "regret": 0.01, "says_faster": False, "false_claim": False}
    found = studies.judge("quiet", [right] * 19 + [{**right, "regret": 0.03, "exit": 5}])
    assert {name: limit["kept"] for name, limit in found["limits"].items()} == {
        "within_2_percent": True,
        "false_claims": True,
        "undecided": True,
    }
    told = {"speedup": [1.03, 1.02, 1.04], "true_speedup": 1.05, "known_to": 0.005}
    hit, missed = ({**right, **told, "case": "gain3", "says_faster": says} for says in (True, False))
    assert studies.judge("quiet", [hit] * 8 + [missed] * 2)["limits"]["gains_found"]["kept"] is False
    assert studies.judge("bursts", [hit] * 6 + [missed] * 4)["limits"]["gains_found"]["kept"] is True
    assert studies.judge("quiet", [hit] * 8)["of_them_with_the_truth_outside"] == 8
    assert studies.holds_truth(hit, 0.01), "the truth is known to 1 %"
    lost = {"case": "small", "exit": 4}
    assert studies.judge("quiet", [right, lost])["limits"]["within_2_percent"]["value"] == 0.5, "no plan is no success"


def test_cost_is_judged_by_pairs() -> None:
    rows: list[dict[str, Any]] = [
        {"study": "vgg16", "seed": i, "before_s": 70.0 + i, "after_s": 85.0 + i} for i in range(3)
    ]
    found = judge_cost([*rows, {"study": "small", "seed": 0, "after_s": 41.0}])
    assert found["vgg16"]["difference_s"] == [15.0, 15.0, 15.0]
    assert found["vgg16"]["limits"]["difference_s"]["kept"]
    late = judge_cost([{**row, "after_s": row["after_s"] + 30.0, "after_final_s": 50.0} for row in rows])["vgg16"]
    assert (late["final_s"], late["limits"]["difference_s"]["kept"]) == (50.0, False)
    assert not found["small"]["limits"]["most_s"]["kept"]


def test_complete_sections_are_skipped_and_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    document = Document(path, ["--part", "cost", "--before", "/somewhere/optimize"])
    section = document.begin("live", "quiet")
    assert section is not None
    document.add(section, {"pair": EQUAL})
    again = Document(path)
    left = again.begin("live", "quiet")
    assert left is not None
    assert left["rows"] == [{"pair": EQUAL}]
    again.finish(left, pairs={})
    assert Document(path).begin("live", "quiet") is None
    assert Document(path).section("live", "quiet") is not None
    anew = Document(path).begin("live", "quiet", again=True)
    assert anew is not None
    assert not anew["rows"]
    content = json.loads(path.read_text())
    assert content["parts"]["live"]["quiet"]["machine"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert "somewhere" not in path.read_text()


def test_ratios_of_a_trace_are_within_its_blocks(tmp_path: Path) -> None:
    trace = made_trace(disturbed=True)
    for plan, name in enumerate(NAMES):
        value, half = ratio(trace, plan, 0)
        assert value == pytest.approx(math.log1p(TRUTHS[name]), abs=0.002)
        assert half < 0.002
    trace.save(tmp_path / "trace.npz")
    read = Trace.read(tmp_path / "trace.npz")
    assert read.names == NAMES
    assert read.run_s == pytest.approx(trace.run_s)


def test_what_is_recorded_tells_instances_apart_and_survives_a_plan_that_fails() -> None:
    evaluator = SyntheticEvaluator(noise=Noise(run=0.001, instance=0.002, spike_share=0.0), fails=_in_two)
    graph = _chain()
    plans = [chain_plan(graph, (), ["cpu"]), chain_plan(graph, (), ["cpu0"]), chain_plan(graph, (2,), ["cpu", "cpu"])]
    with evaluator.prepare(evaluator.platform()) as session:
        loads = [partial(session.load, graph, plan, fresh=True) for plan in plans]
        trace = record(loads, ["a", "b", "c"], None, 0.0, np.random.default_rng(0), blocks=2, least_rounds=8)
        truth = math.log(evaluator.true_latency_s(graph, plans[1]) / evaluator.true_latency_s(graph, plans[0]))
    assert trace.run_s.shape[:3] == (8, 2, 3)
    assert np.isnan(trace.run_s[:, :, 2]).all()
    assert ratio(trace, 1, 0)[0] == pytest.approx(truth, abs=0.01)
    long = studies.compared(trace, plans)
    assert [entry["plan"] for entry in long["plans"]] == [plan.digest for plan in plans[:2]]


def _in_two(plan: object) -> bool:
    return len(getattr(plan, "stages", ())) > 1


def _chain() -> Graph:
    from evaluators.testing import example_graph

    return example_graph()


def test_known_gains(tmp_path: Path) -> None:
    graph = network(0, tmp_path)
    whole = chain_plan(graph, (), (LEFT,))
    assert sum(slow_shares(graph, whole, 0.06)) == pytest.approx(0.06)
    assert sum(slow_shares(graph, chain_plan(graph, (), (RIGHT,)), 0.06)) == pytest.approx(0.06)
    assert sum(slow_shares(graph, best_plan(graph), 0.06)) == 0.0


class _Steady(Candidate):
    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:  # noqa: ARG002 - of the protocol
        return Batch(np.full(n, 0.002), np.full((n, 2), 0.001))


def test_a_slowed_run_waits_for_real_and_the_wait_counts() -> None:
    begin_s = time.perf_counter()
    found = SlowedCandidate(_Steady(), (0.0, 0.5)).run(3)
    assert time.perf_counter() - begin_s >= 3 * 0.001
    assert (found.latency_s >= 0.003).all()
    assert found.stage_s.sum(axis=1) == pytest.approx(found.latency_s)
    assert found.stage_s[:, 0] == pytest.approx(0.001)


def ended(group: int) -> bool:
    """Return whether a process group ends within some seconds."""
    end_s = time.monotonic() + 5.0
    while time.monotonic() < end_s:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_neighbours_end_with_what_needed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.benchmarks.verdicts.neighbours._BEGIN_S", 0.3)
    with neighbour("bursts") as group:
        assert group is not None
        os.killpg(group, 0)
    assert ended(group)


def test_neighbours_end_when_who_measures_is_killed() -> None:
    program = "import time\nfrom tests.benchmarks.verdicts import neighbours\nneighbours._BEGIN_S = 0.3\n"
    program += "with neighbours.neighbour('bursts') as group:\n    print(group, flush=True)\n    time.sleep(60)\n"
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root) as measuring:
        assert measuring.stdout is not None
        group = int(measuring.stdout.readline())
        os.killpg(group, 0)
        measuring.kill()
    assert ended(group)


def test_studies_of_the_gpu_part_go_by_model_or_by_seed() -> None:
    assert len(wanted([])) == 14
    assert wanted(["vgg16", "densenet121/1"]) == ["densenet121/1", "vgg16/0"]
    with fails(ValueError):
        wanted(["nothing"])
