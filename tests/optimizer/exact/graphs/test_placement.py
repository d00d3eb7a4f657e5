"""Published placement instances, and small ones against brute force."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.table.placement import PlacementProblem, read_placement
from optimizer.cli import main
from optimizer.exact.graphs.placement import solve_placement
from optimizer.exact.graphs.placement_latency import improve, lower_bound
from optimizer.exact.graphs.placement_merge import merge
from optimizer.exact.graphs.placement_value import CPU, PlacementObjective, loads, value
from optimizer.tools.solve import solve_file
from search_spaces.core.errors import InfeasibleError, UsageError
from tests.support.sentences import fails, says

ROOT = Path(__file__).parents[4]
REFERENCE = Path(os.environ.get("PARTITION_OPTIMIZER_REFERENCE", ROOT.parent / "shared" / "reference")) / "placement"
# The largest load, as a model made for comparison proved it.
PUBLISHED = {"l_bert24": 17.7899, "l_gnmt": 32.9106, "o_bert_l-3": 27.9186, "o_bert_l-6": 29.3826}


@st.composite
def problems(draw: st.DrawFn) -> PlacementProblem:
    count = draw(st.integers(1, 5))
    costs = st.sampled_from((0.0, 1.0, 2.0, 5.0))
    edges = [(a, b) for b in range(count) for a in range(b) if draw(st.booleans())]
    never = draw(st.lists(st.sampled_from((0, 0, 0, 1, 2)), min_size=count, max_size=count))
    return PlacementProblem(
        "drawn",
        tuple(map(str, range(count))),
        tuple(float("inf") if n == 1 else draw(costs) for n in never),
        tuple(float("inf") if n == 2 else draw(costs) for n in never),
        tuple(draw(costs) for _ in range(count)),
        tuple(draw(costs) for _ in range(count)),
        tuple(tuple(b for a, b in edges if a == node) for node in range(count)),
        tuple(draw(st.lists(st.integers(0, count), min_size=count, max_size=count))),
        2,
        draw(st.sampled_from((3.0, 6.0, 100.0))),
        draw(st.integers(1, 2)),
    )


def _best(problem: PlacementProblem, objective: PlacementObjective) -> float:
    devices = range(-problem.cpus, problem.accelerators)
    return min(value(problem, d, objective) for d in product(devices, repeat=len(problem.names)))


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from(("period", "latency")))
def test_the_best_placement_is_the_one_that_brute_force_finds(
    problem: PlacementProblem, objective: PlacementObjective
) -> None:
    best = _best(problem, objective)
    if best == float("inf"):
        with pytest.raises(InfeasibleError):
            solve_placement(problem, objective, 10.0)
        return
    found = solve_placement(problem, objective, 10.0)
    assert found.value == value(problem, found.best, objective) == pytest.approx(best, rel=1e-6)
    assert found.bound <= best * (1 + 1e-9)
    assert found.proven


@settings(max_examples=60, deadline=None)
@given(problems(), st.booleans())
def test_what_is_merged_is_together_in_every_better_solution(problem: PlacementProblem, parallel: bool) -> None:
    objective: PlacementObjective = "latency" if parallel else "period"
    devices = range(-problem.cpus, problem.accelerators)
    every = sorted((value(problem, d, objective), d) for d in product(devices, repeat=len(problem.names)))
    known = every[len(every) // 3][0]
    if known == float("inf"):
        return
    clusters = merge(problem, known, parallel_cpu=parallel)
    better = [d for v, d in every if v < known]
    kept = [
        d
        for d in better
        if all(d[v] == d[c] for v, c in enumerate(clusters.of))
        and all(d[c] >= 0 for c in clusters.of if c in clusters.on_accelerator)
    ]
    assert not better or min(value(problem, d, objective) for d in kept) == every[0][0]


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 3))
def test_no_placement_goes_below_the_bound_of_its_paths(problem: PlacementProblem, seed: int) -> None:
    best = _best(problem, "latency")
    starts = list(product(range(CPU, problem.accelerators), repeat=len(problem.names)))
    start = starts[len(starts) * seed // 4]
    assert lower_bound(problem, start) <= best * (1 + 1e-9)
    if value(problem, start, "latency") < float("inf"):
        clusters = merge(problem, float("inf"), parallel_cpu=True)
        found = improve(problem, clusters, start, 0.02, seed)
        assert best <= value(problem, found, "latency") * (1 + 1e-9)
        assert value(problem, found, "latency") <= value(problem, start, "latency")


def test_several_cpus_share_the_load(tmp_path: Path) -> None:
    nodes = [{"id": i, "cpuLatency": 1.0, "fpgaLatency": 1.0, "size": 1.0, "supportedOnFpga": 0} for i in range(5)]
    path = _file(tmp_path, _instance(maxCPUs=3, nodes=nodes, edges=[]))
    found = solve_file(path, "period", 5.0)
    assert (found.value, found.proven) == (2.0, True)
    assert {p.device for p in found.parts} == {"cpu0", "cpu1", "cpu2"}
    side_by_side = solve_file(path, "latency", 5.0)
    assert side_by_side.value == 1.0
    assert [p.device for p in side_by_side.parts] == ["cpus"]


def _instance(**changes: Any) -> dict[str, Any]:
    nodes = [{"id": i, "cpuLatency": 10.0, "fpgaLatency": 1.0, "size": 1.0, "supportedOnFpga": 1} for i in range(4)]
    edges = [{"sourceId": i, "destId": i + 1, "cost": 0.25} for i in range(3)]
    return {"maxSizePerFPGA": 100.0, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges} | changes


def _file(folder: Path, data: Any) -> Path:
    path = folder / "instance.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_chain_is_cut_in_the_middle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, _instance())
    problem = read_placement(path)
    found = solve_placement(problem)
    assert found.value == 2.25
    assert loads(problem, found.best) == {CPU: 0.0, 0: 2.25, 1: 2.25}
    assert solve_placement(problem, "latency").value == 4.0
    assert main(["solve", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["value"], document["proven"], document["objective"]) == (2.25, True, "period")
    assert [p["nodes"] for p in document["parts"]] == [["0", "1"], ["2", "3"]]
    assert main(["solve", str(path)]) == 0
    says(capsys.readouterr().out)


@pytest.mark.parametrize(
    "data",
    [
        "{",
        [],
        _instance(nodes=[]),
        _instance(edges=None),
        _instance(maxCPUs=1.5),
        _instance(maxFPGAs=-1),
        _instance(edges=[{"sourceId": 0, "destId": 9, "cost": 1}]),
        _instance(edges=[{"sourceId": 0, "destId": 1, "cost": -1}]),
        _instance(edges=[{"sourceId": 0, "destId": 1}]),
        _instance(edges=[{"sourceId": a, "destId": 1 - a, "cost": 1} for a in (0, 1)]),
        _instance(edges=[{"sourceId": 0, "destId": b, "cost": b} for b in (1, 2)]),
        _instance(nodes=[_instance()["nodes"][0]] * 2),
    ],
)
def test_wrong_instances_are_reported(tmp_path: Path, data: Any) -> None:
    path = _file(tmp_path, data)
    with fails(UsageError) as error:
        read_placement(path)
    says(str(error.value))


def test_wrong_commands_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, _instance(maxCPUs=0, maxSizePerFPGA=1.0))
    for words, code in (
        ([str(path)], 3),
        ([str(path), "--time-limit", "0"], 2),
        ([str(path), "--time-limit", "x"], 2),
        ([str(path), "--objective", "speed"], 2),
        ([str(tmp_path / "none.json")], 2),
        ([], 2),
    ):
        assert main(["solve", *words]) == code
        says(capsys.readouterr().err)


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="the published instances are not here")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_instances_are_proven(name: str) -> None:
    problem = read_placement(REFERENCE / f"{name}_inference.json")
    found = solve_placement(problem, "period", 60.0)
    assert found.proven
    assert found.value == pytest.approx(PUBLISHED[name], abs=1.1e-4)
    assert found.value == value(problem, found.best, "period")
