"""An independent clock for a model on an accelerator: LiteRT's own Python interface writes, runs and reads.

``python -m tests.benchmarks.completion vgg16 --lane gpu`` prints our median of the whole model, and that of this loop,
which stops its clock when the output has been read into NumPy. They should agree within 3 %.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from contextlib import closing

import numpy as np

from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator
from evaluators.sampling import SamplingPolicy, measure
from search_spaces.chain import chain_plan
from search_spaces.models import load
from search_spaces.platform import Platform

RUNS = 200


def independent(path: str, shape: tuple[int, ...], outputs_count: int) -> float:
    """Return the median seconds of write, run and read; this process loads the runtime."""
    from ai_edge_litert.compiled_model import CompiledModel
    from ai_edge_litert.hardware_accelerator import HardwareAccelerator
    from ai_edge_litert.options import Options

    compiled = CompiledModel.from_file(path, options=Options(hardware_accelerators=HardwareAccelerator.GPU))
    inputs, outputs = compiled.create_input_buffers(0), compiled.create_output_buffers(0)
    image = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    taken_s = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        inputs[0].write(image)
        compiled.run_by_index(0, inputs, outputs)
        outputs[0].read(outputs_count, np.float32)
        taken_s.append(time.perf_counter() - begin)
    return statistics.median(taken_s[RUNS // 10 :])


def main() -> None:
    """Print both medians, alternating three times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lane", default="gpu")
    parser.add_argument("--independent", action="store_true")
    options = parser.parse_args()
    graph = load(options.model)
    if graph.source is None:
        raise ValueError(options.model)
    if options.independent:
        shape, count = graph.tensors[graph.inputs[0]].shape, math.prod(graph.tensors[graph.outputs[0]].shape)
        sys.stdout.write(json.dumps(independent(str(graph.source.path), shape, count)) + "\n")
        return
    platform = Platform("device", (make_processor(options.lane),))
    ours, theirs = [], []
    for _ in range(3):
        with (
            LitertEvaluator().prepare(platform) as session,
            closing(session.load(graph, chain_plan(graph, (), [options.lane]))) as candidate,
        ):
            ours.append(measure(candidate, SamplingPolicy(precision=1e-6, max_s=30.0, max_runs=RUNS)).latency_s.median)
        command = [sys.executable, "-m", "tests.benchmarks.completion", options.model, "--independent"]
        theirs.append(float(subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()[-1]))
    document = {"model": options.model, "ours_ms": [s * 1e3 for s in ours], "independent_ms": [s * 1e3 for s in theirs]}
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
