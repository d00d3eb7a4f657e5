"""Run damaged models that the reader admits: whatever the runtime does, the parent gets a result or one clear line.

``python -m tests.faults.fuzz_runtime --cases 2000`` prints how many processes died, of what, on which models.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

from evaluators.litert import candidate
from evaluators.litert.session import LitertEvaluator
from search_spaces.core.errors import OptimizeError, UnavailableError
from search_spaces.models.cache import ENVIRONMENT
from search_spaces.models.litert import read_model
from search_spaces.spaces.chain import chain_plan
from tests.faults.fuzz_reader import damaged, follow, runnable_corpus

_MOST_NBYTES = 64 << 20  # of activations, for the sake of those who share the machine


def run_damaged(cases: int, seed: int, folder: Path, keep: Path | None = None) -> Counter[str]:
    """Run ``cases`` damaged models that the reader admits and return how each ended, by the words of its error."""
    ends: Counter[str] = Counter()
    evaluator = LitertEvaluator()
    platform = evaluator.platform()
    platform = platform.restrict([platform.processors[0].name])
    path = folder / "case.tflite"
    left = cases
    # A loop without an end is no damage; it is given up, but not after a minute.
    with mock.patch.object(candidate, "_FIRST_LIMIT_S", 0.1), evaluator.prepare(platform, folder) as session:
        for content in damaged(runnable_corpus(folder), 100 * cases, seed):
            path.write_bytes(content)
            try:
                graph = read_model(path)
                follow(graph)
            except OptimizeError:
                continue
            if sum(graph.tensors[t].nbytes for t in graph.activation_tensors) > _MOST_NBYTES:
                continue
            left -= 1
            end = "ran"
            try:
                session.load(graph, chain_plan(graph, (), [platform.processors[0].name])).run(1)
            except UnavailableError as error:
                end = error.what.partition(":")[0] if "refused" in error.what else error.what
            ends[end] += 1
            if keep is not None and "died" in end:
                (keep / f"{seed}-{ends[end]}-{end.rpartition(' ')[2]}.tflite").write_bytes(content)
            if not left:
                break
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage models and run those that can be read.")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the cases that a processor died of")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[ENVIRONMENT] = folder
        ends = run_damaged(options.cases, options.seed, Path(folder), options.keep)
    for end, count in ends.most_common():
        sys.stdout.write(f"{count:6} {end}\n")
    sys.stdout.write(f"{ends.total()} models in {time.monotonic() - begin:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
