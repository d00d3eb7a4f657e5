"""What the benchmark of seed 001 on a GPU reckons with: borders, shares of the device, reductions, its results."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.core.plan import LayerRanks
from search_spaces.models.zoo import draft
from search_spaces.rewrites.lower import Lowering
from search_spaces.rewrites.tucker_ranks import SEED_001, choose_ranks
from tests.benchmarks.seed_001_gpu import (
    GRAPHS,
    MPS,
    MPS_GRAPHS,
    OURS,
    OURS_TUCKER,
    PROCESSES,
    SEQUENTIAL,
    STREAMS,
    summary,
)
from tests.benchmarks.seed_001_models import SETS, cuts_of

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "seed_001_gpu.json"


@pytest.mark.parametrize("name", ["vgg16", "resnet50", "inception_v3", "regnet_y_32gf"])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_no_triple_is_cut(name: str, parts: int) -> None:
    graph = draft(name).graph()
    ranks = {c.layer.operator: c.ranks for c in choose_ranks(graph, SEED_001) if c.ranks is not None}
    found = Lowering(graph).decomposed(tuple(LayerRanks(o, *both) for o, both in ranks.items()))
    made, origins = found.graph, found.origins
    cuts = cuts_of(made, parts, origins)
    assert cuts == tuple(sorted(set(cuts)))
    assert parts / 2 <= len(cuts) + 1 <= parts
    assert all(0 < cut < len(made.operators) and origins[cut] != origins[cut - 1] for cut in cuts)
    assert len(cuts_of(graph, parts)) + 1 >= parts / 2


@given(
    st.lists(st.tuples(st.floats(1e-4, 1.0), st.floats(0.05, 0.9), st.floats(0.05, 0.9)), min_size=2, max_size=8),
    st.floats(10, 90),
)
def test_reductions_are_those_of_the_rounds(rounds: list[tuple[float, float, float]], target: float) -> None:
    rows = {
        PROCESSES: [[p, p] for p, _, __ in rounds],
        OURS: [[p * a, p * a] for p, a, _ in rounds],
        OURS_TUCKER: [[p * b, p * b] for p, _, b in rounds],
    }
    found = summary(rows, target, 0.0)
    for way, column in ((OURS, 1), (OURS_TUCKER, 2)):
        each = found["ways"][way]
        middle = math.exp(sum(math.log(r[column]) for r in rounds) / len(rounds))
        assert each["reduction_percent"] == pytest.approx(100 * (middle - 1), abs=1e-6)
        low, high = each["reduction_ci95"]
        assert low <= each["reduction_percent"] + 1e-9
        assert each["reduction_percent"] <= high + 1e-9
    assert found["ways"][PROCESSES]["reduction_percent"] == pytest.approx(0.0, abs=1e-9)
    assert found["target_is_above_the_roofline"]


def test_the_committed_result_says_what_is_said_of_it() -> None:
    runs = json.loads(RESULT.read_text(encoding="utf-8"))["runs"]
    sets = runs["tf32"]["sets"]["tf32"]
    assert set(sets) == set(SETS)
    for name, row in sets.items():
        ways, target = row["ways"], -SETS[name][1]
        assert row["target_is_above_the_roofline"]
        assert ways[row["best_of_ours"]]["reduction_ci95"][1] < target
        assert ways[row["best_of_ours"]]["mean_ms"] == min(each["mean_ms"] for each in ways.values())
    assert sets[list(SETS)[-1]]["ways"][OURS]["mean_ms"] < 6.4
    in_full = runs["f32"]["sets"]["f32"] | runs["f32_mix"]["sets"]["f32"]
    assert set(in_full) == set(SETS)
    for name, row in in_full.items():
        assert row["ways"][row["best_of_ours"]]["reduction_ci95"][1] < -SETS[name][1]


def test_what_processes_with_mps_gain_stands_on_the_page() -> None:
    runs = json.loads(RESULT.read_text(encoding="utf-8"))["runs"]
    sets = runs["tf32_mps"]["sets"]["tf32"] | runs["tf32_mps_2"]["sets"]["tf32"]
    rows: dict[str, list[str]] = {}
    for name in SETS:
        ways, served = sets[name]["ways"], sets[name]["mps"]
        found = {way: ways[way] for way in (GRAPHS, SEQUENTIAL, STREAMS, OURS)}
        found |= {way: served[way][way] for way in (MPS, MPS_GRAPHS)}
        for way, each in found.items():
            rows.setdefault(way, []).append(f"{-each['reduction_percent']:.0f}")
        same_rounds = served[MPS_GRAPHS]
        assert 1.08 <= same_rounds[MPS_GRAPHS]["mean_ms"] / same_rounds[OURS]["mean_ms"] <= 1.27
        assert ways[OURS]["mean_ms"] <= 1.01 * ways[STREAMS]["mean_ms"]
    page = RESULT.with_name("README.md").read_text(encoding="utf-8")
    assert all(f"| {' | '.join(row)} |" in page for row in rows.values())
