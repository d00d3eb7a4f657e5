"""How long a graphics adapter takes to fall asleep, and to wake: ``… asleep resnet50 FOLDER``.

Prints the latency (ms) under load after some idle seconds, and of three runs after a pause that is repeated four times.
With ``--turns``: in a loop, in turns of 30 ms with the CPU, and in the blocks of a final, which come one after another.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from evaluators.litert.candidate import LitertCandidate
from evaluators.litert.processors import make_processor
from evaluators.litert.runner import PlanRunner
from evaluators.litert.session import LitertEvaluator
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan

PAUSES_S = (0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 3.0)
WINDOW_S = 0.05
TURN_S, BLOCKS = 0.03, 9


def under_load(candidate: LitertCandidate, seconds: float) -> list[float]:
    """Return the median latency (ms) in windows of 50 ms."""
    end, medians = time.perf_counter() + seconds, []
    while (now := time.perf_counter()) < end:
        window: list[float] = []
        while not window or time.perf_counter() < now + WINDOW_S:
            window += candidate.run(1).latency_s.tolist()
        medians.append(round(1e3 * float(np.median(window)), 2))
    return medians


def in_turns(model: str, processor: str, seconds: float = 4.0) -> None:
    """Print the median latency (ms) on an adapter, by what the CPU does in between."""
    graph, platform = load(model), Platform("device", (make_processor("cpu"), make_processor(processor)))
    with LitertEvaluator().prepare(platform) as session:
        own, other = (session.load(graph, chain_plan(graph, (), [name]), fresh=True) for name in (processor, "cpu"))
        runs = {c: max(1, round(TURN_S / float(np.median(c.run(30).latency_s)))) for c in (own, other)}
        for how, blocks, between in (("in a loop", 1, 0), ("in turns", 1, 1), ("in blocks", BLOCKS, BLOCKS)):
            latency_s: list[float] = []
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                for _ in range(between):
                    other.run(runs[other])
                for _ in range(blocks):
                    latency_s += own.run(runs[own]).latency_s.tolist()
            sys.stdout.write(f"{how}: {1e3 * float(np.median(latency_s)):.3f}\n")


def main() -> None:
    """Print the tables; of pauses a runner is asked, since a session would wake the adapter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("plan", type=Path, help="a folder to write the plan to")
    parser.add_argument("--processor", default="gpu")
    parser.add_argument("--turns", action="store_true")
    options = parser.parse_args()
    if options.turns:
        in_turns(options.model, options.processor)
        return
    graph = load(options.model)
    options.plan.mkdir(parents=True, exist_ok=True)
    with LitertEvaluator().prepare(Platform("device", (make_processor(options.processor),))) as session:
        session.deploy(options.plan, graph, chain_plan(graph, (), [options.processor]))
    with closing(PlanRunner(options.plan)) as runner:
        runner.run_seeded()
        for idle_s in (3.0, 5.0):
            time.sleep(idle_s)
            sys.stdout.write(f"after {idle_s} s idle: {under_load(runner.candidate, 1.2)}\n")
        for pause_s in PAUSES_S:
            under_load(runner.candidate, 0.8)
            rows = []
            for _ in range(4):
                time.sleep(pause_s)
                rows.append((1e3 * runner.candidate.run(3).latency_s).round(2).tolist())
            sys.stdout.write(f"pauses of {pause_s} s: {rows}\n")


if __name__ == "__main__":
    main()
