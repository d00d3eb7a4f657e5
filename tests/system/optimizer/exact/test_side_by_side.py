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
from optimizer.cli import main
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.segment_model import SegmentModel
from optimizer.exact.side_by_side import Timed, placed_s, side_by_side, words_of
from optimizer.model.baselines import LIST
from optimizer.model.segments import segment_estimate
from optimizer.tools.solve import table_costs
from search_spaces.core.errors import UsageError
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.segment_space import SegmentSpace
from tests.search_spaces.spaces.test_segments import spaces
from tests.support.commands import printed
from tests.support.sentences import fails, says
from tests.support.strategies import one_core

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


def test_an_operator_that_nothing_reads_does_not_hide_crossing_edges(tmp_path: Path) -> None:
    _, known = table(tmp_path, 30, 2)  # some operators have no readers, so the whole network reduces to a few runs
    (segment,) = SegmentSpace(known.graph(), known.platform(), splits=False).branching
    assert max(len(run) for run in segment.runs) < 8


def test_neighbours_of_very_many_placements(tmp_path: Path) -> None:
    _, known = table(tmp_path, 100, 1)
    space = SegmentSpace(known.graph(), known.platform(), splits=False)
    rng = np.random.default_rng(0)
    assert max(len(segment.runs) for segment in space.branching) > 63
    for _ in range(60):
        plan = space.neighbour(space.plan_at(0), rng)
        assert space.decode(space.encode(plan)) == plan


def test_more_processors_are_never_worse_where_some_exclude_each_other(tmp_path: Path) -> None:
    _, known = table(tmp_path, 30, 4)
    graph, given = known.graph(), table_costs(known, known.platform())
    wide = Processor("cpu", "cpu", {"core0": 1.0, "core1": 1.0}, "cpu")
    gpu = Processor("gpu", "gpu", {"gpu": 1.0}, "gpu")
    slow = [one_core(0), one_core(1)]
    found = []
    for processors, scale in (((wide, gpu), (1.0, 1.1)), ((wide, *slow, gpu), (1.0, 4.0, 4.0, 1.1))):
        platform = Platform("p", processors)
        operator_s = given.operator_s[0] * np.array(scale)[:, None]
        count = len(processors)
        costs = ChainCosts(platform, operator_s, np.zeros(count), np.zeros((len(operator_s[0]), count, count)))
        found.append(SegmentModel(SegmentSpace(graph, platform, splits=False), costs).best().cost_s)
    assert found[1] <= found[0] * (1 + 1e-9)


def test_a_policy_refuses_parameters_of_very_many_values(tmp_path: Path) -> None:
    path, _ = table(tmp_path, 30, 3)
    with fails(UsageError):
        optimize(path, evaluator="table", sampler="reinforce", budget=4, out=tmp_path / "run")


def test_operators_that_take_no_time(tmp_path: Path) -> None:
    data = crossing(30, 1)
    for operator in data["networks"][0]["operators"]:
        operator["times"]["gpu"] = 0.0
    data["devices"] = [{"kind": kind} for kind in KINDS]
    path = tmp_path / "free.yaml"
    path.write_text(yaml.safe_dump(data))
    known = read_table(path)
    costs = table_costs(known, known.platform())
    assert SegmentModel(SegmentSpace(known.graph(), known.platform(), splits=False), costs).best().cost_s == 0.0


def test_two_models_whose_edges_cross(tmp_path: Path) -> None:
    path, _ = table(tmp_path, 40, 1)
    result = optimize(f"{path}*2", evaluator="table", budget=4, out=tmp_path / "run")
    assert result.best is not None


def test_a_bound_that_is_that_of_any_plan_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = table(tmp_path, 20, 1)
    text = printed(
        ["-q"], capsys, "--model", str(path), "--evaluator", "table", "--budget", "4", "--out", str(tmp_path / "run")
    )
    says(text)
    assert "any plan" not in text
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.md").read_text()
    says(page)
    assert page.count("any plan") == 1  # beside the path that the bound is of


def test_a_study_of_a_table_is_never_worse_than_list_scheduling(tmp_path: Path) -> None:
    path, _ = table(tmp_path, 30, 3)
    result = optimize(path, evaluator="table", budget=10, out=tmp_path / "run")
    assert result.best is not None
    known = result.history.known
    assert known[result.best.digest].median_s <= known[result.baselines[LIST].digest].median_s + 1e-12
    assert len({stage.processor for stage in result.best.stages}) > 1
