"""What sharing an operator between a GPU and the CPU costs, term by term (seed 002: transform, map, synchronise, max).

::

    python -m tests.benchmarks.seed_002_terms OUT.json --gpu gpu:f32 --cpu cpu

First each term alone, for tensors of 4 KiB to 16 MiB and both ways in which LiteRT keeps tensors on a GPU, buffers and
textures: to map a tensor for writing or reading, to copy it, to give it back, to wait for work that is done, to queue
a stage, and to transform a tensor into the GPU's own layout and back (what a stage of one RELU takes beyond the RELU;
one RELU is a sixteenth of what 17 take beyond one).

Then convolutions, by height in eighths: what they take whole on either, shared, how long each side took within, and
what the terms say: the longer side, with the transfers of the GPU's side.

A software adapter (``--gpu gpu:swiftshader:f32``) shows that everything runs; its times say nothing of a real one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from ctypes import c_void_p
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.litert.settings import compile_settings, worker_starts
from evaluators.litert.worker.capi import Compiled, Copy, Device, Runtime
from evaluators.sampling import SamplingPolicy, measure
from optimizer.files import write_atomic
from optimizer.provenance import provenance
from search_spaces.core.errors import OptimizeError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.models import load
from search_spaces.models.zoo.builder import Builder
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.shared_parts import Part

STORAGE = {"buffers": 1, "textures": 2}  # litert_gpu_options.h: buffer_storage_type
SHAPES = ((1, 4, 4, 64), (1, 16, 16, 64), (1, 32, 32, 64), (1, 56, 56, 96), (1, 112, 112, 84), (1, 256, 256, 64))
CONVS = {
    "64 channels of 56 x 56": (56, 64),
    "256 channels of 28 x 28": (28, 256),
    "64 channels of 224 x 224": (224, 64),
}
EIGHTHS = range(1, 8)
RELUS = (1, 17)
TRIES = 60
POLICY = SamplingPolicy(precision=0.01, max_s=2.0, min_runs=20, max_runs=400)
Row = dict[str, Any]


def relus(path: Path, shape: Sequence[int], count: int) -> None:
    """Write a model of so many RELUs one after another."""
    build = Builder("relus")
    x = build.input(shape)
    for index in range(count):
        x = build.unary("RELU" if index % 2 else "RELU6", x, f"relu{index}")
    build.finish(x).write(path)


def convolution(path: Path, size: int, channels: int) -> None:
    """Write a model of one 3 x 3 convolution."""
    build = Builder("convolution")
    x = build.input((1, size, size, channels))
    build.finish(build.conv(x, channels, 3, "conv")).write(path)


def typical_us(run: Callable[[], None], before: Callable[[], object] = lambda: None) -> float:
    """Return the median time of a call (µs)."""
    times = []
    for _ in range(TRIES):
        before()
        begin = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begin)
    return float(np.median(times)) / 1e3


class Mapped(Device):
    """Device tensors whose transfers are timed step by step."""

    def steps_us(self, copy: Copy, *, write: bool) -> Row:
        """Return the median times of mapping, copying and giving back a tensor, nothing being queued (µs)."""
        found = []
        for _ in range(TRIES):
            self.wait()
            marks = [time.perf_counter_ns()]
            place = self._locked(copy.buffer, int(write))
            marks.append(time.perf_counter_ns())
            ctypes.memmove(*((place, copy.address) if write else (copy.address, place)), copy.nbytes)
            marks.append(time.perf_counter_ns())
            self._unlocked(copy.buffer)
            marks.append(time.perf_counter_ns())
            found.append(np.diff(marks))
        return dict(zip(("map_us", "copy_us", "give_back_us"), (np.median(found, axis=0) / 1e3).tolist(), strict=True))


def compiled(runtime: Runtime, path: Path, settings: Row) -> Compiled:
    """Compile a model of one signature."""
    file = os.open(path, os.O_RDONLY)
    try:
        return runtime.compile(b"", [file], 1, settings)
    finally:
        os.close(file)


def stage(device: Device, model: Compiled) -> tuple[Callable[[], None], tuple[c_void_p, c_void_p]]:
    """Return a call that queues a model with one input and one output, and the buffers of both."""
    buffers = tuple(device.tensor(model, 0, side, 0)[0] for side in ("Input", "Output"))
    ends = [(c_void_p * 1)(buffer) for buffer in buffers]

    def queue() -> None:
        if model.run(model.handle, 0, 1, ends[0], 1, ends[1]):
            raise SystemExit("LiteRT refused to run a stage")

    return queue, (buffers[0], buffers[1])


def terms(processor: Processor, folder: Path) -> Iterator[Row]:
    """Yield the terms for each way to keep tensors and each size."""
    platform = Platform("terms", (processor,))
    start = worker_starts(platform)[processor.name]
    os.environ |= start.environment
    runtime = Runtime()
    runtime.start(start.accelerators)
    device = Mapped(runtime)
    for storage, number in STORAGE.items():
        settings = compile_settings(processor, None, strict=True)
        settings["gpu_options"] |= {"buffer_storage_type": number}
        for shape in SHAPES:
            done_us, queued_us = {}, {}
            nbytes = 4 * int(np.prod(shape))
            host = np.ones(nbytes // 4, np.float32)
            for count in RELUS:
                path = folder / f"relus{count}_{nbytes}.tflite"
                relus(path, shape, count)
                model = compiled(runtime, path, settings)
                idle_us = device.idle_wait_ns() / 1e3  # the first compilation has opened the adapter
                queue, (into, out) = stage(device, model)
                upload = Copy(into, host.ctypes.data, nbytes)
                device.upload(upload)

                def run(queue: Callable[[], None] = queue) -> None:
                    queue()
                    device.wait()

                for _ in range(TRIES):
                    run()
                done_us[count] = typical_us(run)
                queued_us[count] = typical_us(queue, device.wait)
            relu_us = (done_us[RELUS[1]] - done_us[RELUS[0]]) / (RELUS[1] - RELUS[0])
            yield {
                "storage": storage,
                "kib": nbytes / 1024,
                "write": device.steps_us(upload, write=True),
                "read": device.steps_us(replace(upload, buffer=out), write=False),
                "wait_us": idle_us,
                "queue_us": queued_us[RELUS[0]],
                "relu_us": relu_us,
                "stage_us": done_us[RELUS[0]],
            }


def taken(session: LitertSession, graph: Graph, plan: Plan) -> Row:
    """Return how long a plan and its stages take (ms), and by how much its outputs differ."""
    with closing(session.load(graph, plan)) as candidate:
        found = measure(candidate, POLICY)
        agreement = candidate.verify()
    return {
        "ms": found.latency_s.median * 1e3,
        "ci95_ms": [s * 1e3 for s in found.latency_s.ci95],
        "stage_ms": {s.processor: took * 1e3 for s, took in zip(plan.stages, found.stage_s, strict=True)},
        "relative_error": None if agreement is None else agreement.max_rel_error,
    }


def shared(processors: Sequence[Processor], folder: Path) -> Iterator[Row]:
    """Yield how long each convolution takes, whole and shared in eighths."""
    platform = Platform("shared", tuple(processors))
    gpu, cpu = (p.name for p in processors)
    with LitertEvaluator().prepare(platform) as session:
        for name, (size, channels) in CONVS.items():
            path = folder / f"conv{size}_{channels}.tflite"
            convolution(path, size, channels)
            graph = load(str(path))
            space = SegmentSpace(graph, platform)
            row: Row = {"convolution": name, "gflops": 2 * 9e-9 * (size * channels) ** 2, "shares": {}}
            for processor in (gpu, cpu):
                row[f"whole on {processor}"] = taken(session, graph, chain_plan(graph, (), [processor]))
            for eighth in EIGHTHS:
                plan = space.plan((Part(0, 1, (gpu, cpu), "height", size * eighth // 8),))
                try:
                    row["shares"][f"{eighth}/8 on {gpu}"] = taken(session, graph, plan)
                except OptimizeError as error:
                    row["shares"][f"{eighth}/8 on {gpu}"] = {"failed": str(error)}
            yield row


def main() -> None:
    """Measure both and write them; what is known is kept when something fails later."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpu", default="gpu:f32")
    parser.add_argument("--cpu", default="cpu")
    options = parser.parse_args()
    processors = (make_processor(options.gpu), make_processor(options.cpu))
    document: Row = {
        "schema_version": 1,
        "made_by": f"python -m tests.benchmarks.seed_002_terms OUT.json --gpu {options.gpu} --cpu {options.cpu}",
        **provenance(),
        "platform": Platform("terms", processors).to_json(),
    }
    with TemporaryDirectory() as folder:
        for part, rows in (
            ("shared", shared(processors, Path(folder))),
            ("terms", terms(processors[0], Path(folder))),
        ):
            document[part] = []
            for row in rows:
                print(row, flush=True)  # noqa: T201
                document[part].append(row)
                write_atomic(options.out, (json.dumps(document, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
