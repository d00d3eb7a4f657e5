"""How far the statistics can be trusted, tried on real runs: the figures in ``experiments/results/measurement.json``.

``python -m tests.benchmarks.evidence OUT.json`` compares a model with itself (equal plans must be called equal, and the
interval must hold 1), then with itself plus a delay of 1 and 2 % of each run (which must be found), first on the
machine as it is, then beside a process that loads another core at random. One core runs the model. An hour; ``--part``
runs one of the two series and keeps what the file holds of the other, and ``--equals 0`` or ``--delayed 0`` keeps what
it holds of that.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import Agreement, Batch, Candidate
from evaluators.comparison import Comparison, ComparisonPolicy, compare
from evaluators.litert.session import LitertEvaluator
from optimizer.provenance import provenance
from search_spaces.chain import chain_plan
from search_spaces.models import load

# Of runs as short as these, five make one of a pair: ten rounds of three pairs.
THIRTY_PAIRS = ComparisonPolicy(
    precision=1e-6, max_s=1e9, min_rounds=10, max_rounds=10, min_pairs=15, max_pairs=15, pair_s=0.1
)
PARTS = ("quiet", "busy")
# Rounds of a tenth of a second each: the seconds end it, not their number.
FIVE_SECONDS = ComparisonPolicy(precision=0.002, max_s=5.0, max_rounds=100)


@dataclass(frozen=True, slots=True)
class Delayed:
    """A candidate whose every inference is followed by a wait of a known share of it, which counts."""

    inner: Candidate
    share: float

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        latency_s = []
        batch = self.inner.run(1, stop_above_s)
        for index in range(n):
            if index:
                batch = self.inner.run(1, stop_above_s)
            begin = time.perf_counter()
            while time.perf_counter() - begin < self.share * batch.latency_s[0]:
                pass
            latency_s.append(float(batch.latency_s[0]) + time.perf_counter() - begin)
        return Batch(np.array(latency_s), np.repeat(batch.stage_s, n, axis=0), batch.timeline)

    def verify(self) -> Agreement | None:
        return self.inner.verify()

    def close(self) -> None:
        self.inner.close()


def neighbour(core: int) -> None:
    """Load a core at random, as long as the parent lives: busy and idle spells of 1 to 200 ms."""
    os.sched_setaffinity(0, [core])
    source, parent = random.Random(0), os.getppid()
    while os.getppid() == parent:
        end = time.perf_counter() + source.uniform(0.001, 0.2)
        while time.perf_counter() < end:
            pass
        time.sleep(source.uniform(0.001, 0.2))


@contextmanager
def busy(core: int) -> Iterator[None]:
    """Have a neighbour on ``core`` meanwhile."""
    process = multiprocessing.get_context("spawn").Process(target=neighbour, args=(core,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def repeated(
    plain: Callable[[], Candidate], other: Callable[[], Candidate], policy: ComparisonPolicy, times: int
) -> list[Comparison]:
    """Compare two candidates again and again."""
    return [compare(plain, other, policy, np.random.default_rng([times, i])) for i in range(times)]


def equals(found: Sequence[Comparison]) -> dict[str, Any]:
    """Summarise comparisons of equals."""
    ratios = [c.speedup for c in found]
    return {
        "comparisons": len(found),
        "pairs_each": len(found[0].baseline.values_s),
        "ratio_sd": float(np.std(ratios, ddof=1)),
        "ratio_mean": float(np.mean(ratios)),
        "called_different": sum(c.significant for c in found) / len(found),
        "interval_holds_1": sum(c.ci95[0] <= 1.0 <= c.ci95[1] for c in found) / len(found),
        "called_unstable": sum(c.unstable for c in found) / len(found),
        "ratios": ratios,
        "intervals": [list(c.ci95) for c in found],
    }


def differences(found: Sequence[Comparison], share: float, wall_s: float) -> dict[str, Any]:
    """Summarise comparisons with a delayed candidate, which took ``wall_s`` together."""
    return {
        "comparisons": len(found),
        "true_slowdown": share,
        "found": sum(c.significant and c.speedup < 1.0 for c in found) / len(found),
        "interval_holds_truth": sum(c.ci95[0] <= 1 / (1 + share) <= c.ci95[1] for c in found) / len(found),
        "wall_s_each": round(wall_s / len(found), 2),  # with loading, which the five seconds are without
        "intervals": [list(c.ci95) for c in found],
    }


def series(model: str, same: int, delayed: int) -> dict[str, Any]:
    """Run all comparisons on the last core."""
    graph, evaluator = load(model), LitertEvaluator()
    lane = evaluator.platform().processors[-1].name
    plan = chain_plan(graph, (), [lane])
    with evaluator.prepare(evaluator.platform()) as session:

        def plain() -> Candidate:
            return session.load(graph, plan, fresh=True)

        first = plain()
        latency_s = float(np.median(first.run(50).latency_s))
        first.close()
        document: dict[str, Any] = {"model": model, "lane": lane, "latency_s": latency_s}
        if same:
            document["equals"] = equals(repeated(plain, plain, THIRTY_PAIRS, same)) | {"provenance": provenance()}
        for share in (0.01, 0.02) if delayed else ():

            def slower(share: float = share) -> Candidate:
                return Delayed(plain(), share)

            begin_s = time.monotonic()
            tried = repeated(plain, slower, FIVE_SECONDS, delayed)
            found = differences(tried, share, time.monotonic() - begin_s)
            document[f"slower by {share:.0%}"] = found | {"provenance": provenance()}
        return document


def main() -> None:
    """Run both series and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--equals", type=int, default=200)
    parser.add_argument("--delayed", type=int, default=40)
    parser.add_argument("--part", choices=PARTS)
    options = parser.parse_args()
    command = "python -m tests.benchmarks.evidence OUT.json"
    document: dict[str, Any] = {"schema_version": 1, "made_by": command, "parts": {}}
    if options.part and options.out.exists():
        document["parts"] = json.loads(options.out.read_text())["parts"]
    for part in [options.part] if options.part else PARTS:
        with busy(min(os.sched_getaffinity(0))) if part == "busy" else nullcontext():
            found = series("mobilenet_v1", options.equals, options.delayed)
        document["parts"][part] = document["parts"].get(part, {}) | found
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
