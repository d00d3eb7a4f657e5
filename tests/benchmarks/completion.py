"""An independent clock: LiteRT's own Python interface in a process of its own, run by run, against ours.

``python -m tests.benchmarks.completion OUT.json --processors gpu,gpu:f32 --models vgg16,resnet50,squeezenet1_1`` lets
both take turns of some 30 ms in random order, on fresh instances, and gives how many times as long ours takes. Both
should agree within 3 %.

The other clock starts before the input is written and stops when the output has been read into NumPy; on a CPU, where
our inputs lie in place, it starts behind the writing. Taking turns matters: a graphics adapter that idled needs seconds
to raise its clock, so two loops one after the other compare its clocks rather than ours.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from scipy import stats

from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator
from evaluators.litert.settings import worker_starts
from optimizer.provenance import provenance
from search_spaces.core.errors import OptimizeError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform, Processor
from search_spaces.models import load
from search_spaces.models.stages import cut_stage, flattened
from search_spaces.spaces.chain import chain_plan

TURN_S = 0.03
LIMIT = 0.03


def serve(path: str, settings: dict[str, Any]) -> None:
    """Answer each number ``n`` on standard input with ``n`` times of write, run and read, in seconds."""
    os.sched_setaffinity(0, settings["cores"])  # before the runtime makes its threads
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the runtime writes to standard output, too
    from ai_edge_litert.compiled_model import CompiledModel
    from ai_edge_litert.cpu_options import CpuOptions
    from ai_edge_litert.gpu_options import GpuOptions
    from ai_edge_litert.hardware_accelerator import HardwareAccelerator
    from ai_edge_litert.options import Options

    gpu = settings["kind"] == "gpu"
    options = Options(hardware_accelerators=HardwareAccelerator.GPU if gpu else HardwareAccelerator.CPU)
    if gpu:
        options = Options(options.hardware_accelerators, gpu_options=GpuOptions(enforce_f32=settings["f32"]))
    else:
        options = Options(options.hardware_accelerators, cpu_options=CpuOptions(num_threads=settings["threads"]))
    compiled = CompiledModel.from_file(path, options=options)
    inputs, outputs = compiled.create_input_buffers(0), compiled.create_output_buffers(0)
    image = np.random.default_rng(0).uniform(-1, 1, settings["shape"]).astype(np.float32)
    inputs[0].write(image)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            if gpu:
                inputs[0].write(image)
            wrote = time.perf_counter()
            compiled.run_by_index(0, inputs, outputs)
            ran = time.perf_counter()
            outputs[0].read(settings["count"], np.float32)
            read = time.perf_counter()
            times.append((read - begin, wrote - begin, ran - wrote, read - ran))
        answers.write(json.dumps(times) + "\n")
        answers.flush()


@contextmanager
def other_clock(graph: Graph, processor: Processor, path: Path) -> Iterator[Callable[[int], Any]]:
    """Start the other process; the function that is given makes ``n`` runs there: total, write, run, read."""
    start = worker_starts(Platform("device", (processor,)))[processor.name]
    settings = {
        "kind": processor.kind,
        "cores": start.cores,
        "threads": processor.options["threads"],
        "f32": processor.options.get("precision") == "f32",
        "shape": graph.tensors[graph.inputs[0]].shape,
        "count": math.prod(graph.tensors[graph.outputs[0]].shape),
    }
    command = [sys.executable, "-m", __spec__.name, "--serve", str(path), json.dumps(settings)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | start.environment,
    ) as child:
        if child.stdin is None or child.stdout is None:
            raise ValueError(command)
        asked, answered = child.stdin, child.stdout

        def runs(n: int) -> Any:
            asked.write(f"{n}\n")
            asked.flush()
            return np.array(json.loads(answered.readline()))

        yield runs
        asked.close()


def instance(
    graph: Graph, processor: Processor, path: Path, turns: int, warm_s: float, rng: np.random.Generator
) -> dict[str, Any]:
    """Return what both clocks saw of one pair of fresh instances."""
    with (
        LitertEvaluator().prepare(Platform("device", (processor,))) as session,
        closing(session.load(graph, chain_plan(graph, (), [processor.name]))) as candidate,
        other_clock(graph, processor, path) as theirs,
    ):
        clocks: list[Callable[[int], Any]] = [lambda n: candidate.run(n).latency_s, theirs]
        end = time.monotonic() + warm_s
        latency_s = 1.0
        while latency_s == 1.0 or time.monotonic() < end:
            latency_s = max(float(np.median(candidate.run(3).latency_s)), 1e-6)
            theirs(3)
        n = max(1, round(TURN_S / latency_s))
        seen: list[list[Any]] = [[], []]
        for _ in range(turns):
            for which in rng.permutation(2):
                seen[which].append(clocks[which](n))
    ours = np.array([np.median(block) for block in seen[0]])
    others = np.array([np.median(block, axis=0) for block in seen[1]])
    return {
        "turns": turns,
        "runs_per_turn": n,
        "ours_ms": float(np.median(ours)) * 1e3,
        "independent_ms": float(np.median(others[:, 0])) * 1e3,
        "independent_write_run_read_ms": [float(x) * 1e3 for x in np.median(others[:, 1:], axis=0)],
        "ratio": float(np.exp(np.median(np.log(ours / others[:, 0])))),
    }


def agreement(model: str, processor: Processor, *, instances: int, turns: int, warm_s: float) -> dict[str, Any]:
    """Return the ratio of our clock to the other over rebuilt instances, with a 95 % interval (Student)."""
    graph = load(model)
    rng = np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        # The very file that a processor of this kind is given.
        stage = cut_stage(graph, range(len(graph.operators)))
        (replace(stage, schema=flattened(stage.schema)) if processor.kind == "gpu" else stage).write(path)
        pairs = [instance(graph, processor, path, turns, warm_s, rng) for _ in range(instances)]
    logs = np.log([pair["ratio"] for pair in pairs])
    half = float(stats.t.ppf(0.975, instances - 1) * logs.std(ddof=1) / math.sqrt(instances)) if instances > 1 else 0.0
    mean = float(logs.mean())
    return {
        "model": model,
        "processor": Platform("device", (processor,)).to_json()["processors"][0],
        "ratio": math.exp(mean),
        "ci95": [math.exp(mean - half), math.exp(mean + half)],
        "within_3_percent": abs(math.exp(mean) - 1) <= LIMIT,
        "instances": pairs,
    }


def main() -> None:
    """Compare both clocks for each processor and model, or be the other clock."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--processors", default="gpu")
    parser.add_argument("--models", default="vgg16,resnet50,squeezenet1_1")
    parser.add_argument("--instances", type=int, default=5)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--warm-s", type=float, default=2.0)
    parser.add_argument("--serve", nargs=2, metavar=("FILE", "SETTINGS"))
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], json.loads(options.serve[1]))
        return
    document: dict[str, Any] = {
        "schema_version": 2,
        "made_by": f"python -m tests.benchmarks.completion OUT --processors {options.processors} "
        f"--models {options.models} --instances {options.instances} --turns {options.turns} --warm-s {options.warm_s}",
        **provenance(),
        "models": [],
    }
    for processor in options.processors.split(","):
        for model in options.models.split(","):
            try:
                row = agreement(
                    model,
                    make_processor(processor),
                    instances=options.instances,
                    turns=options.turns,
                    warm_s=options.warm_s,
                )
            except OptimizeError as error:
                row = {"model": model, "processor": processor, "failed": str(error)}
            document["models"].append(row)
            sys.stdout.write(f"{processor} {model} {row.get('ratio')} {row.get('ci95', row.get('failed'))}\n")
            sys.stdout.flush()
            if options.out:
                options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
