"""Seed 001's baselines on a GPU: models in plain eager PyTorch, one process each, or one thread each on a stream.

Every child holds its models with weights of their own and asks for one inference after another: the image is copied to
the device, and the clock stops when the result lies in the host's memory. Nothing of the evaluator's is used but the
lowering in its plain form: NCHW, PyTorch's ordinary calls and its defaults.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np

START_S, ANSWER_S = 180.0, 120.0
PIPE, QUEUES = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_DEVICE_MAX_CONNECTIONS"
"""MPS has few hardware queues: a fourth process with captured graphs and the usual eight ran out of memory."""
Message = dict[str, Any]


def preload() -> None:
    """Have all processes to come begin with PyTorch imported; called before the first one is made."""
    modules = ["torch", "evaluators.cuda.lowering", "search_spaces.models.litert"]
    get_context("forkserver").set_forkserver_preload(modules)


def eager(path: Path, device: str) -> Callable[[], Any]:
    """Return what runs one inference of a model in plain PyTorch and waits for its result."""
    import torch

    from evaluators.cuda.lowering import Weights, lower
    from search_spaces.models.litert import read_model

    graph = read_model(path)
    job = lower(Weights(graph, device), range(len(graph.operators)), first=True)
    rng = np.random.default_rng(0)
    shapes = [graph.tensors[t].shape for t in graph.inputs]
    images = [
        torch.from_numpy(rng.uniform(-1, 1, s).astype(np.float32)).permute(0, 3, 1, 2).contiguous() for s in shapes
    ]
    images = [each.pin_memory() if device != "cpu" else each for each in images]

    def run() -> Any:
        values = {t: x.to(device, non_blocking=True) for t, x in zip(graph.inputs, images, strict=True)}
        job.run(values)
        return [values[t].cpu() for t in graph.outputs]

    return run


def child(channel: Connection, paths: Sequence[str], device: str, precision: str, mps: str | None) -> None:
    """Serve: each of some models in a thread and on a stream of its own; one alone needs neither."""
    if mps is not None:
        os.environ[PIPE] = mps  # read when CUDA starts, after PyTorch is imported
    import torch

    torch.set_grad_enabled(mode=False)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    if device == "cpu":
        torch.set_num_threads(1)
    runs = [eager(Path(path), device) for path in paths]
    streams = [torch.cuda.Stream() if device != "cpu" and len(runs) > 1 else None for _ in runs]
    found: dict[int, list[float]] = {}
    for number in range(len(runs)):
        _loop(runs[number], streams[number], 0.0, found, number)
    channel.send_bytes(b'{"ready": true}')
    while (message := json.loads(channel.recv_bytes())).get("seconds"):
        threads = [
            threading.Thread(target=_loop, args=(run, stream, message["seconds"], found, number))
            for number, (run, stream) in enumerate(zip(runs, streams, strict=True))
        ]
        if len(threads) == 1:
            _loop(runs[0], streams[0], message["seconds"], found, 0)
        else:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        channel.send_bytes(json.dumps({"took_s": [found[i] for i in range(len(runs))]}).encode())


def _loop(run: Callable[[], Any], stream: Any, seconds: float, found: dict[int, list[float]], number: int) -> None:
    import torch

    torch.set_grad_enabled(mode=False)
    took = []
    end = time.perf_counter() + seconds

    def repeat() -> None:
        while True:
            begin = time.perf_counter()
            run()
            took.append(time.perf_counter() - begin)
            if begin + took[-1] >= end and len(took) >= 3:
                return

    if stream is None:
        repeat()
    else:
        with torch.cuda.stream(stream):
            repeat()
    found[number] = took


class Processes:
    """Children that run models; use it in a ``with``.

    Args:
        groups: for each child the files of its models.
        mps: the pipe directory of an MPS control daemon whose clients they are; None without.
    """

    def __init__(self, groups: Sequence[Sequence[Path]], device: str, precision: str, mps: str | None = None) -> None:
        context = get_context("forkserver")
        self._children = []
        for group in groups:
            ours, theirs = context.Pipe()
            process = context.Process(target=child, args=(theirs, [str(p) for p in group], device, precision, mps))
            process.daemon = True
            process.start()
            theirs.close()
            self._children.append((process, ours))

    def ready(self) -> Self:
        """Wait until all models are loaded and warm."""
        for _, channel in self._children:
            _answer(channel, START_S)
        return self

    def latencies_s(self, seconds: float) -> list[float]:
        """Return the mean latency of each model while all ask for some seconds; the first inference is left out."""
        for _, channel in self._children:
            channel.send_bytes(json.dumps({"seconds": seconds}).encode())
        answers = [_answer(channel, ANSWER_S + 20 * seconds) for _, channel in self._children]
        return [float(np.mean(took[1:])) for answer in answers for took in answer["took_s"]]

    def close(self) -> None:
        """End the children."""
        for process, channel in self._children:
            with suppress(OSError):
                channel.send_bytes(b'{"seconds": 0}')
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _answer(channel: Connection, limit_s: float) -> Message:
    if not channel.poll(limit_s):
        raise SystemExit(f"a process of the baselines gave no answer within {limit_s:.0f} s")
    found: Message = json.loads(channel.recv_bytes())
    return found
