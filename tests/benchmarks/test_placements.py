"""The benchmark of LiteRT's own placement: its networks, and what it says of figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import chain_plan
from tests.benchmarks.placements import ODD, against, judge, opened, table, written
from tests.benchmarks.verdicts.trace import Trace
from tests.support.commands import ROOT

CPU = Platform("one", (make_processor("cpu0"),))


@pytest.mark.litert
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
@pytest.mark.parametrize("name", ODD)
def test_odd_networks_run(name: str, tmp_path: Path) -> None:
    graph = opened(written(name, tmp_path, 4))
    plan = chain_plan(graph, (), ["cpu0"])
    with LitertEvaluator().prepare(CPU) as session:
        candidate = session.load(graph, plan)
        assert (candidate.run(1).latency_s > 0.0).all()
        agreement = candidate.verify()
        assert agreement is not None
        assert agreement.identical
        candidate.close()


def test_a_plan_is_slower_only_where_the_interval_says_so(tmp_path: Path) -> None:
    graph = opened(written("selection", tmp_path, 4))
    own, cpu, best = (chain_plan(graph, (), [name]) for name in ("gpu+cpu", "cpu", "gpu"))
    row = {"exit": 0, "best": best.to_json(), "unsupported": {"SELECT_V2": 3}}
    rows = {}
    for name, takes, spread in (("faster", 2.0, 0.01), ("slower", 0.5, 0.01), ("open", 0.97, 0.3)):
        rounds = np.exp(spread * np.random.default_rng(0).standard_normal((8, 1, 3, 1)))
        run_s = 1e-3 * np.array([takes, 3.0, 1.0])[None, None, :, None] * rounds * np.ones((8, 5, 3, 9))
        names = (own.digest, cpu.digest, best.digest)
        trace = Trace(names, run_s, np.zeros((8, 5, 3)), run_s[:, 0, :, 0], settle=3)
        rows[name] = row | against(trace, row, own, cpu)
    refused = Trace(names, np.where(np.arange(3)[:, None] == 0, np.nan, run_s), trace.lost, trace.first_s, settle=3)
    rows["refused"] = row | against(refused, row, own, cpu)
    rows["nothing"] = {"exit": 5, "unsupported": {}}
    found = judge(rows)
    assert (found["faster"], found["slower"]) == (["faster"], ["slower"])
    assert found["not_compared"] == ["refused", "nothing"]
    lines = table(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert {line.count("|") for line in lines} == {7}


def test_the_page_has_the_figures_of_the_results() -> None:
    results = ROOT / "experiments" / "results"
    kept, text = json.loads((results / "placements.json").read_text()), (results / "README.md").read_text()
    assert not kept["summary"]["slower"]
    for row in kept["networks"].values():
        value, low, high = row["own_ratio"]
        figures = f"{row['best_ms']:.2f} ms | {value:.2f} [{low:.2f}, {high:.2f}] | {row['cpu_ms']:.2f} ms |"
        assert figures in text
