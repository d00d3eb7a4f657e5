"""Ten thousand inferences of a mixed workload: none may be lost, no memory may leak, outputs must stay what they are.

``python -m tests.benchmarks.soak OUT.json [N]`` deploys three models (one of them twice) on this machine's cores, lets
them be asked in closed loops, periodically and at random until N requests (default 10,000) have come, and writes how
many were answered, and the memory of every worker at the beginning and at the end. With ``--gpu`` they run on the
streams of an NVIDIA GPU (extra ``cuda``), one of them decomposed; the memory is then that of the process that computes,
and what PyTorch has taken of the device's. ``--device cpu`` shows on any machine that this runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from evaluators.base import Candidate
from evaluators.cuda.session import CudaEvaluator
from evaluators.cuda.workload import CudaWorkload
from evaluators.litert.runner import WorkloadRunner
from evaluators.litert.session import LitertEvaluator
from evaluators.workload.host import came_of
from optimizer.provenance import provenance
from optimizer.study.config import parse_config
from optimizer.study.several_models import SeveralModels
from optimizer.workload.ranks import grids_of
from search_spaces.core.decoded_plan import DecodedPlan, in_runs, joined_ranks
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Stage

WORKLOAD = """\
name: soak
models:
  - {model: squeezenet1_1, count: 2, arrival: {kind: closed, requests: 40}}
  - {model: mobilenet_v1@0.25, arrival: {kind: periodic, period_ms: 6, requests: 60}, deadline_ms: 100, priority: 1}
  - {model: mobilenet_v1@0.5, arrival: {kind: poisson, rate_per_s: 100, requests: 60}, queue: 60}
"""
GPU_WORKLOAD = """\
name: soak
models:
  - {model: squeezenet1_1, count: 2, arrival: {kind: closed, requests: 40}}
  - {model: mobilenet_v1@0.25, arrival: {kind: periodic, period_ms: 6, requests: 60}, deadline_ms: 100, priority: 1}
  - model: squeezenet1_1@0.5/64+spectrum
    arrival: {kind: poisson, rate_per_s: 100, requests: 60}
    queue: 60
    tucker: {max_error: 0.3}
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


def _rows(joined: JoinedGraph, processors: Sequence[tuple[str, ...]]) -> tuple[tuple[Stage, ...], ...]:
    """Return the stages of each instance, which is cut before operator 12 where it has two processors."""
    sizes = [len(component.graph.operators) for component in joined.components]
    return tuple(in_runs(size, (12,) * (len(on) - 1), on) for size, on in zip(sizes, processors, strict=True))


def soak_gpu(count: int, device: str) -> dict[str, Any]:
    """Run on a GPU's streams and return what came of it."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "soak.yaml"
        path.write_text(GPU_WORKLOAD)
        evaluator = CudaEvaluator(device)
        problem = SeveralModels.read(parse_config({"model": str(path), "budget": "1", "evaluator": "cuda"}), evaluator)
        names = [p.name for p in problem.space.platform.processors]
        processors = ((names[0], names[-1]), (names[1], names[-1]), (names[-1],), (names[-1],))
        grids = grids_of(problem.workload, problem.choices)
        (grid, *_) = next(iter(grids.values()))[-2:]
        rows = _rows(problem.joined, processors)
        plan = DecodedPlan("fifo", (0, 1, 2, 3), rows, ((), (), (), grid)).plan(problem.joined)
        if plan.ranks != joined_ranks(((), (), (), grid), problem.joined):
            raise SystemExit("the plan has other ranks")
        arguments = problem.workload, problem.joined, problem.platform, problem.objective
        with evaluator.host(*arguments) as session, closing(session.load(problem.joined.graph, plan)) as candidate:
            return {**_rounds(session, candidate, count), "runtime": session.facts()["facts"]}


def _rounds(session: CudaWorkload, candidate: Candidate, count: int) -> dict[str, Any]:
    """Run until so many requests have come."""
    first = _agreement(candidate)
    answered = asked = rejected = 0
    begin_s, makespans = time.monotonic(), list[float]()
    memory = _taken(session)
    pid = session._bench.client.pid
    for number in range(-(-count // EACH) + SETTLED):
        if number == SETTLED:
            memory = _taken(session)
            begin_s, answered, asked, rejected = time.monotonic(), 0, 0, 0
        found = came_of(candidate.run(1))
        makespans.append(found.makespan_s)
        answered, asked = answered + found.answered, asked + found.count
        rejected += sum(r.rejected for each in found.requests for r in each)
    seconds = round(time.monotonic() - begin_s, 1)
    last, end = _agreement(candidate), _taken(session)
    return {
        "requests": asked,
        "answered": answered,
        "lost": asked - answered - rejected,
        "rejected": rejected,
        "processes_that_died": int(session._bench.client.pid != pid),
        "outputs_off": {"at_first": first, "at_the_end": last},
        "seconds": seconds,
        "makespan_ms": round(statistics.median(makespans) * 1e3, 2),
        "taken_kib": {"after_600": memory, "at_the_end": end},
        "grown_kib": {name: end[name] - before for name, before in memory.items()},
    }


def _agreement(candidate: Candidate) -> float:
    """Return how far outputs are off, relative, the worst of all instances; more than is allowed ends the soak."""
    found = candidate.verify()
    if found is None or not found.accepted:
        raise SystemExit(f"the plan computes something else: {found}")
    return found.max_rel_error


def _taken(session: CudaWorkload) -> dict[str, int]:
    """Return the memory (KiB) of the process that computes, of this one, and of the device."""
    pid = session._bench.client.pid
    device = int(session.facts()["used_nbytes"]) // 1024
    return {"computing process": _anonymous_kib(str(pid)), "parent": _anonymous_kib("self"), "device": device}


def deploy(path: Path, folder: Path) -> None:
    """Write the plan: closed loops on one core in two jobs, the others on whichever is free."""
    evaluator = LitertEvaluator()
    config = parse_config({"model": str(path), "budget": "1"})
    problem = SeveralModels.read(config, evaluator)
    names = [p.name for p in problem.space.platform.processors]
    pool, core = names[-1], names[1 if len(names) > 1 else 0]
    processors = ((core, pool), (core, pool), (pool,), (pool,))
    decoded_plan = DecodedPlan("fifo", (0, 1, 2, 3), _rows(problem.joined, processors))
    arguments = problem.workload, problem.joined, problem.platform, problem.objective
    with evaluator.host(*arguments) as session:
        found = session.deploy(folder, problem.joined.graph, problem.space.plan(decoded_plan))
    if not found.identical:
        raise SystemExit(f"the plan computes something else: {found}")


def resident(runner: WorkloadRunner) -> dict[str, int]:
    """Return the memory (KiB) that each worker, and this process, holds and shares with nobody's file."""
    found = {}
    for name, pid in (*((f"processor {i}", p) for i, p in enumerate(runner.processes())), ("parent", "self")):
        found[name] = _anonymous_kib(str(pid))
    return found


def _anonymous_kib(pid: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def _differ(one: Any, other: Any) -> bool:
    return bool(one.tobytes() != other.tobytes())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    words = f" {options.count}" + (f" --gpu --device {options.device}" if options.gpu else "")
    document = {
        "schema_version": 1,
        "command": f"python -m tests.benchmarks.soak OUT.json{words}",
        "provenance": provenance(),
        "workload": GPU_WORKLOAD if options.gpu else WORKLOAD,
        **(soak_gpu(options.count, options.device) if options.gpu else soak(options.count)),
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
