"""GPUs of this machine and options of their streams; the parent never loads PyTorch or the driver."""

from __future__ import annotations

import importlib.util
import json
import os
import reprlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from evaluators.own_process import output_of, own_process
from evaluators.workload import apart
from evaluators.workload.prices import first_of_kinds
from evaluators.workload.setting import RUNS_AS
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.platform import BESIDE, MEMORY, Platform, Processor, memory_word

Precision = Literal["tf32", "f32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
PRECISION = "precision"
"""Option of a processor: ``tf32`` multiplies with 10-bit mantissas on tensor cores, ``f32`` with 23-bit ones."""

PRIORITY, MOST_PRIORITY = "priority", 3
"""Option of a processor, at most 3: while kernels of a stream wait, none of streams with a lower priority begins."""

GRAPHS, KERNELS, THREADS = "process", "process of kernels", "threads"
"""How models run apart (:data:`~evaluators.workload.setting.RUNS_AS`): in a process each, as captured graphs or kernel
by kernel; or in threads of one process, kernel by kernel."""
APART = {
    GRAPHS: apart.PROCESSES,
    KERNELS: f"{apart.PROCESSES}, kernel by kernel",
    THREADS: f"{apart.THREADS}, kernel by kernel",
}
"""How models run apart → the baseline's name."""

MPS = "CUDA_MPS_PIPE_DIRECTORY"
"""Environment variable: where a server listens that lets processes compute at once; it takes them one at a time."""
_MPS_USUALLY = Path("/tmp/nvidia-mps")  # noqa: S108 - where that server listens if the variable is not set

EXTRA = "cuda"
HINT = "pip install 'partition-optimizer[cuda]'"
STREAMS = 8
MORE_STREAMS = {1: 4, 2: 4}
"""Priority → streams of it, for several models."""
MAX_STREAMS = 32
MAX_INSTANCES = 32
"""Instances that may run at once: each is captured on a stream of its own, and PyTorch has 32."""

# Relative to the largest value of an output, against LiteRT's on the CPU: float32 sums in another order, as on any GPU
# (evaluators.litert.settings.TOLERANCE_F32, with room for 152 layers); TF32 rounds each factor to 2^-11.
_TOLERANCES: dict[str, float] = {"f32": 1e-3, "tf32": 5e-2}


def torch_module() -> Any:
    """Return PyTorch's module; only computing processes call this.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise UnavailableError("the evaluator cuda needs PyTorch, which is not installed", HINT) from error
    return torch


def precision_of(processor: Processor) -> Precision:
    """Return the precision of a processor.

    Raises:
        UsageError: its precision is unknown.
    """
    found = processor.options.get(PRECISION, "tf32")
    if found not in PRECISIONS:
        raise UsageError(
            f"processor {processor.name!r}: unknown precision {found!r}", f"one of {', '.join(PRECISIONS)}"
        )
    return PRECISIONS[PRECISIONS.index(found)]


def priority_of(processor: Processor) -> int:
    """Return the priority of a processor over those with a lower one."""
    return int(processor.options.get(PRIORITY, 0))


def tolerance(used: Iterable[Processor]) -> float:
    """Return the relative error that is accepted of some processors' outputs: 1e-3 in float32, 5e-2 in TF32."""
    return max((_TOLERANCES[precision_of(p)] for p in used), default=_TOLERANCES["f32"])


def stream(number: int, device: str, precision: Precision, memory_nbytes: int = 0, priority: int = 0) -> Processor:
    """Return the processor of a stream; streams of one precision and priority are alike, and none excludes another.

    Args:
        device: the GPU's name.
        memory_nbytes: memory for the weights of a model; 0 for as much as there is.
        priority: over streams with a lower one.
    """
    name = f"stream{number}" if precision == "tf32" else f"stream{number}:{precision}"
    like, resource = f"{EXTRA}:{device}:{precision}", f"stream {number}"
    options: dict[str, Any] = {PRECISION: precision, "device": device}
    if memory_nbytes:
        name, like = f"{name}:memory={memory_nbytes // 10**6}MB", f"{like}:memory={memory_nbytes}"
        options |= {MEMORY: memory_nbytes}
    if priority:
        word = f":{PRIORITY}={priority}"
        options |= {PRIORITY: priority, BESIDE: word}
        name, like, resource = name + word, like + word, resource + word
    return Processor(name, "gpu", {resource: 1.0}, like, options)


_LIMIT_S = 120.0
_NAMES = "stream0, stream1, … in TF32, or stream0:f32, stream0:priority=1 (to 3), stream0:memory=400MB, …"


def main() -> None:
    """Print, as JSON, the GPU that PyTorch finds; runs in a process of its own."""
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found["name"] = torch.cuda.get_device_name(0)
    print(json.dumps(found))  # noqa: T201 - the parent reads it


def find_gpu() -> str:
    """Return the name of the first GPU that PyTorch can use.

    Raises:
        UnavailableError: PyTorch is missing or broken, or there is no such GPU.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError("the evaluator cuda needs PyTorch, which is not installed", HINT)
    try:
        lines = output_of(own_process("evaluators.cuda.devices"), _LIMIT_S).splitlines()
    except UnavailableError as error:
        raise UnavailableError(f"PyTorch cannot be loaded: {error.what}", HINT) from error
    found = json.loads(lines[-1])
    if "name" not in found:
        built = f"is built for CUDA {found['cuda']}" if found["cuda"] else "is built without CUDA"
        raise UnavailableError(
            f"there is no CUDA device (torch.cuda.is_available() is false; PyTorch {found['torch']} {built})",
            "run on a machine with an NVIDIA GPU and its driver, or measure with --evaluator litert",
        )
    return str(found["name"])


def platform_of(device: str, precision: Precision = "tf32", streams: int = STREAMS) -> Platform:
    """Return the streams of a GPU as processors: those of one priority are alike, and none excludes another.

    Args:
        device: its name.
        streams: without priority.
    """
    numbered = [(0, n) for n in range(streams)] + [(p, n) for p, count in MORE_STREAMS.items() for n in range(count)]
    return Platform(device, tuple(stream(n, device, precision, priority=p) for p, n in numbered))


def under_mps() -> bool:
    """Return whether processes that start now become clients of a server that they share (MPS)."""
    return MPS in os.environ or _MPS_USUALLY.exists()


def runs_apart(platform: Platform, count: int) -> list[apart.Apart]:
    """Return the ways to run ``count`` models apart, in each precision of the streams."""
    found = []
    kinds = [platform.processors[number] for number in first_of_kinds(platform.processors).values()]
    for base in kinds:
        for how, name in APART.items():
            told = f"{name}, {precision_of(base)}" if len(kinds) > 1 else name
            each = replace(base, options={**base.options, RUNS_AS: how})
            found.append(apart.Apart(told, apart.numbered(told, each, count)))
    return found


def parse_stream(text: str, device: str) -> Processor:
    """Return the processor of a name: ``streamN`` and words such as ``f32``, ``priority=1`` and ``memory=400MB``.

    Raises:
        UsageError: the text is not such a name.
    """
    word, *wanted = text.split(":")
    number = word.removeprefix("stream")
    levels = {f"{PRIORITY}={level}": level for level in range(1, MOST_PRIORITY + 1)}
    precisions = [p for w in wanted for p in PRECISIONS if p == w]
    memory = [nbytes for w in wanted if (nbytes := memory_word(w)) is not None]
    priority = [levels[w] for w in wanted if w in levels]
    known = word.startswith("stream") and number.isascii() and number.isdigit() and str(int(number)) == number
    counts = len(precisions), len(memory), len(priority)
    if not known or max(counts) > 1 or sum(counts) < len(wanted) or int(number) >= MAX_STREAMS:
        raise UsageError(f"evaluator {EXTRA} has no processor {text!r}", f"it has {_NAMES}")
    return stream(int(number), device, (precisions or ["tf32"])[0], *memory or [0], *priority or [0])


def check_streams(platform: Platform) -> None:
    """Check that all processors are streams of a GPU.

    Raises:
        UnavailableError: one is not.
        UsageError: its memory is no number of bytes, or its priority none from 0 to 3.
    """
    for processor in platform.processors:
        if (priority := processor.options.get(PRIORITY, 0)) not in range(MOST_PRIORITY + 1):
            what = f"processor {processor.name!r}: unknown priority {reprlib.repr(priority)}"
            raise UsageError(what, f"give 0 to {MOST_PRIORITY}")
        nbytes = processor.options.get(MEMORY, 1)
        if not isinstance(nbytes, int) or nbytes < 1:
            raise UsageError(f"processor {processor.name!r}: memory of {reprlib.repr(nbytes)} bytes", f"give {_NAMES}")
        if not processor.like.startswith(f"{EXTRA}:"):
            raise UnavailableError(
                f"processor {processor.name!r} of platform {platform.name!r} is not a stream of a GPU",
                f"evaluator {EXTRA} has {_NAMES}",
            )
