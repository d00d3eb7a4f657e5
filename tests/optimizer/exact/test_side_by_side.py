"""Runs on several processors at once: one placement priced alone and among many, and graphs whose edges cross."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evaluators.table.table import Table, read_table
from optimizer import optimize
from optimizer.exact.chain import best_chains
from optimizer.exact.segment_model import SegmentModel
from optimizer.exact.side_by_side import Timed, placed_s, side_by_side, words_of
from optimizer.model.segments import LIST, segment_estimate
from optimizer.tools.solve import table_costs
from search_spaces.spaces.segment_space import SegmentSpace
from tests.search_spaces.spaces.test_segments import spaces

KINDS = ("cpu", "gpu", "npu")


def crossing(count: int, seed: int) -> dict[str, Any]:
    """Return a table of operators that read some of the six before them."""
    rng = random.Random(seed)
    operators: list[dict[str, Any]] = []
    for i in range(count):
        reads = rng.sample(range(max(0, i - 6), i), min(i, rng.choice((1, 1, 2, 3))))
        times = {kind: round(rng.uniform(0.3, 4.0), 3) for kind in KINDS}
        each = {"name": f"o{i}", "times": times, "output_bytes": 1e5}
        operators.append(each | ({"reads": [f"o{r}" for r in reads]} if reads else {}))
    moved = [{"from": a, "to": b, "takes": 0.2, "bandwidth_bytes_per_s": 4e9} for a in KINDS for b in KINDS if a != b]
    return {
        "name": "crossing",
        "unit": "ms",
        "objective": "latency",
        "devices": [{"kind": kind, "overhead": 0.05} for kind in KINDS],
        "transfers": moved,
        "networks": [{"name": "net", "operators": operators}],
    }


def table(folder: Path, count: int, seed: int) -> tuple[Path, Table]:
    """Write a table of a graph whose edges cross, and read it."""
    path = folder / "crossing.yaml"
    path.write_text(yaml.safe_dump(crossing(count, seed)))
    return path, read_table(path)


@given(spaces(), st.integers(0, 2**32 - 1))
def test_one_placement_takes_what_it_takes_among_many(drawn: tuple[SegmentSpace, list[str]], seed: int) -> None:
    space, _ = drawn
    rng = np.random.default_rng(seed)
    processors, count = len(space.platform.processors), len(space.graph.operators)
    for segment in space.branching:
        runs = len(segment.runs)
        word = tuple(int(block) for block in rng.integers(processors, size=runs))
        ends = segment.joint == segment.last
        transfer_s = rng.uniform(0.0, 1.0, (count + 1, processors, processors))
        transfer_s[:, range(processors), range(processors)] = 0.0
        timed = Timed(
            rng.uniform(0.1, 1.0, (processors, runs)),
            rng.uniform(0.0, 0.1, processors),
            transfer_s,
            rng.uniform(0.0, 1.0, 1 if ends else processors),
        )
        every = words_of(segment, [word], processors)
        costs = table_free_costs(space, timed)
        total = side_by_side(segment, costs).all_s(every, np.arange(processors)[None], timed, 0)
        for after in [None] if ends else range(processors):
            alone = placed_s(segment, word, timed, 0, after)
            assert alone == pytest.approx(float(total[0, 0, after or 0]))


def table_free_costs(space: SegmentSpace, timed: Timed) -> Any:
    """Return costs with the overheads and transfers of some times."""
    from optimizer.exact.chain_costs import ChainCosts

    count, processors = len(space.graph.operators), len(space.platform.processors)
    return ChainCosts(space.platform, np.ones((processors, count)), timed.overhead_s, timed.transfer_s[:count])


@pytest.mark.parametrize("seed", [1, 2])
def test_a_graph_whose_edges_cross_is_placed_run_by_run(tmp_path: Path, seed: int) -> None:
    _, known = table(tmp_path, 40, seed)
    platform, graph = known.platform(), known.graph()
    costs, space = table_costs(known, platform), SegmentSpace(graph, platform, splits=False)
    (large,) = space.branching
    assert len(large.runs) > 20
    found = SegmentModel(space, costs).best()
    assert found.cost_s < 0.8 * best_chains(costs, 6)[0].cost_s
    assert not segment_estimate(graph, costs, space).bounds.proven  # not all placements are tried
    plan = space.plan(found.parts)
    assert space.decode(space.encode(plan)) == plan


def test_a_study_of_a_table_is_never_worse_than_list_scheduling(tmp_path: Path) -> None:
    path, _ = table(tmp_path, 30, 3)
    result = optimize(path, evaluator="table", budget=10, out=tmp_path / "run")
    assert result.best is not None
    known = result.history.known
    assert known[result.best.digest].median_s <= known[result.baselines[LIST].digest].median_s + 1e-12
    assert len({stage.processor for stage in result.best.stages}) > 1
