"""Ten thousand inferences of a mixed workload: none may be lost, no memory may leak, outputs must stay what they are.

``python -m tests.benchmarks.soak OUT.json [N]`` deploys three models (one of them twice) on this machine's cores, lets
them be asked in closed loops, periodically and at random until N requests (default 10,000) have come, and writes how
many were answered, and the memory of every lane at the beginning and at the end.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evaluators.litert.session import LitertEvaluator
from evaluators.litert.workload_runner import WorkloadRunner
from optimizer.config import parse_config
from optimizer.provenance import provenance
from optimizer.workload_study import read_problem
from search_spaces.arrangement import Arrangement

WORKLOAD = """\
name: soak
models:
  - {model: squeezenet1_1, count: 2, arrival: {kind: closed, requests: 40}}
  - {model: mobilenet_v1@0.25, arrival: {kind: periodic, period_ms: 6, requests: 60}, deadline_ms: 100, priority: 1}
  - {model: mobilenet_v1@0.5, arrival: {kind: poisson, rate_per_s: 100, requests: 60}, queue: 60}
"""
EACH = 2 * 40 + 60 + 60
SETTLED = 3  # runs after which memory is looked at for the first time


def soak(count: int) -> dict[str, Any]:
    """Run and return what came of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "soak.yaml"
        path.write_text(WORKLOAD)
        deploy(path, folder)
        with WorkloadRunner(folder) as runner:
            first = {instance: runner.outputs(instance) for instance in runner.names if runner.run()}
            answered = asked = rejected = 0
            begin_s, makespans = time.monotonic(), list[float]()
            memory = resident(runner)
            for number in range(-(-count // EACH) + SETTLED):
                if number == SETTLED:
                    memory = resident(runner)
                    begin_s, answered, asked, rejected = time.monotonic(), 0, 0, 0
                found = runner.run()
                makespans.append(found.makespan_s)
                answered, asked = answered + found.answered, asked + found.count
                rejected += sum(r.rejected for each in found.requests for r in each)
            changed = [n for n in runner.names if any(map(_differ, runner.outputs(n), first[n]))]
            return {
                "requests": asked,
                "answered": answered,
                "lost": asked - answered - rejected,
                "rejected": rejected,
                "failures": runner.failures,
                "outputs_changed": changed,
                "seconds": round(time.monotonic() - begin_s, 1),
                "makespan_ms": round(statistics.median(makespans) * 1e3, 2),
                "resident_kib": {"after_600": memory, "at_the_end": resident(runner)},
            }


def deploy(path: Path, folder: Path) -> None:
    """Write the plan: closed loops on one core in two jobs, the others on whichever is free."""
    evaluator = LitertEvaluator()
    config = parse_config({"model": str(path), "budget": "1"})
    problem = read_problem(config, evaluator)
    names = [p.name for p in problem.space.platform.processors]
    pool, core = names[-1], names[1 if len(names) > 1 else 0]
    lanes = ((core, pool), (core, pool), (pool,), (pool,))
    arrangement = Arrangement("fifo", (0, 1, 2, 3), ((12,), (12,), (), ()), lanes)
    arguments = problem.workload, problem.joined, problem.platform, problem.objective
    with evaluator.host(*arguments) as session:
        found = session.deploy(folder, problem.space.plan(arrangement))
    if found is None or not found.identical:
        raise SystemExit(f"the plan computes something else: {found}")


def resident(runner: WorkloadRunner) -> dict[str, int]:
    """Return the memory (KiB) that each lane, and this process, holds and shares with nobody's file."""
    found = {}
    for name, pid in (*((f"lane {i}", p) for i, p in enumerate(runner.processes())), ("parent", "self")):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found[name] = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    return found


def _differ(one: Any, other: Any) -> bool:
    return bool(one.tobytes() != other.tobytes())


if __name__ == "__main__":
    total = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    document = {
        "schema_version": 1,
        "command": f"python -m tests.benchmarks.soak OUT.json {total}",
        "provenance": provenance(),
        "workload": WORKLOAD,
        **soak(total),
    }
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
