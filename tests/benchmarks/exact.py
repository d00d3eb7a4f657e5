"""Measure the exact solvers: published placement instances, and networks with branches on three processors.

python -m tests.benchmarks.exact placement REFERENCE OUT
    solves every instance of REFERENCE/placement (they are not part of this repository), both objectives
python -m tests.benchmarks.exact graphs OUT
    solves networks with branches on three processors of a phone by its profile (transfers as that has them, and made
    cheaper, so that branches do run side by side), and VGG16 cut into at most four parts

OUT is a JSON file; what is in it is replaced.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.cost_model.profile import find_profile
from evaluators.cost_model.transfers import prices
from evaluators.table.placement import read_placement
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.graphs.cpsat import WORKERS
from optimizer.exact.graphs.dag import best_plan
from optimizer.exact.graphs.graph_costs import GraphCosts
from optimizer.exact.graphs.placement import solve_placement
from optimizer.exact.graphs.placement_value import PlacementObjective
from optimizer.files import write_json
from optimizer.provenance import provenance
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform
from search_spaces.models import load

LIMIT_S = 30.0
DEVICE, PROCESSORS = "s10", ("gpu", "2large", "2med")
_USAGE = {"placement": "placement REFERENCE OUT", "graphs": "graphs OUT"}
MODELS = ("squeezenet1_1", "googlenet", "inception_v3", "resnet152")


def phone_costs(graph: Graph, *, cheaper: float = 1.0) -> tuple[Platform, GraphCosts]:
    """Return a graph's costs on three processors of a phone that run side by side.

    Args:
        cheaper: by what factor starts and transfers are made cheaper.
    """
    found = find_profile(DEVICE)
    if found is None:
        raise SystemExit(f"there is no profile {DEVICE!r}")
    platform = found[1].restrict(PROCESSORS)
    table = prices(found[0], graph, platform)
    nbytes = np.array([t.nbytes for t in graph.tensors])[:, None, None]
    apart = 1.0 - np.eye(len(PROCESSORS))
    # The profile has no links: what a start costs is taken for a transfer, and memory of 5 GB/s.
    transfer_s = apart * (table.invocation_s[None, :, None] + nbytes / 5e9) / cheaper
    return platform, GraphCosts(platform, table.operator_s, table.invocation_s / cheaper, transfer_s)


def graphs() -> dict[str, Any]:
    """Return what solving each network took and proved."""
    rows = []
    for model in MODELS:
        graph = load(model, ())
        for cheaper in (1.0, 100.0):
            platform, costs = phone_costs(graph, cheaper=cheaper)
            found = best_plan(graph, costs, LIMIT_S)
            whole_s = float((costs.operator_s.sum(axis=1) + costs.overhead_s).min())
            rows.append(
                {
                    "model": model,
                    "operators": len(graph.operators),
                    "processors": [p.name for p in platform.processors],
                    "transfers_cheaper": cheaper,
                    "makespan_ms": found.value * 1e3,
                    "bound_ms": found.bound * 1e3,
                    "gap": found.gap,
                    "proven": found.proven,
                    "wall_s": found.wall_s,
                    "stages": len(found.best.stages),
                    "best_alone_ms": whole_s * 1e3,
                }
            )
            sys.stderr.write(f"{model} / {cheaper:g}: {found.wall_s:.2f} s, gap {found.gap:.3%}\n")
    return {"time_limit_s": LIMIT_S, "device": DEVICE, "networks": rows, "vgg16_chain": _chain()}


def _chain() -> dict[str, Any]:
    graph = load("vgg16", ())
    platform, costs = phone_costs(graph)
    cuts = costs.transfer_s[[o.inputs[0] for o in graph.operators]]
    chain = ChainCosts(platform, costs.operator_s, costs.overhead_s, cuts)
    took_s = []
    for _ in range(20):
        begin_s = time.perf_counter()
        found = best_chains(chain, 4)
        took_s.append(time.perf_counter() - begin_s)
    return {"max_stages": 4, "cost_ms": found[0].cost_s * 1e3, "solve_ms": float(np.median(took_s)) * 1e3}


def placement(reference: Path) -> dict[str, Any]:
    """Return what solving each published instance took and proved."""
    rows = []
    for path in sorted((reference / "placement").glob("*.json")):
        problem = read_placement(path)
        row: dict[str, Any] = {"instance": path.stem, "nodes": len(problem.names)}
        objectives: tuple[PlacementObjective, ...] = ("period", "latency")
        for objective in objectives:
            found = solve_placement(problem, objective, LIMIT_S)
            row[objective] = {
                "value": found.value,
                "bound": found.bound,
                "gap": found.gap,
                "proven": found.proven,
                "wall_s": found.wall_s,
            }
            sys.stderr.write(f"{path.stem} {objective}: {found.value:.4f}, {found.wall_s:.2f} s, gap {found.gap:.3%}\n")
        rows.append(row)
    if not rows:
        raise SystemExit(f"{reference}/placement: there are no instances")
    totals = {o: sum(row[o]["wall_s"] for row in rows) for o in ("period", "latency")}
    return {"time_limit_s": LIMIT_S, "unit": "of the instances, ms", "instances": rows, "wall_s": totals}


def main() -> None:
    """Do what the module says."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.exact", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("placement")
    one.add_argument("reference", type=Path)
    one.add_argument("out", type=Path)
    other = commands.add_parser("graphs")
    other.add_argument("out", type=Path)
    options = parser.parse_args()
    found = placement(options.reference) if options.command == "placement" else graphs()
    head = {
        "schema_version": 1,
        "made_by": f"python -m tests.benchmarks.exact {_USAGE[options.command]}",
        **provenance(),
        "solver": {"ortools": version("ortools"), "workers": WORKERS},
    }
    write_json(options.out, head | found)


if __name__ == "__main__":
    main()
