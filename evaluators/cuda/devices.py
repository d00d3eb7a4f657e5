"""What GPU there is, found out in a process of its own: the parent never loads PyTorch or the driver."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from typing import Any

from evaluators.cuda.settings import EXTRA, HINT, MAX_STREAMS, PRECISIONS, STREAMS, Precision, stream
from evaluators.own_process import own_process
from search_spaces.errors import UnavailableError, UsageError
from search_spaces.platform import Platform, Processor

_LIMIT_S = 120.0
_NAMES = "stream0, stream1, … in TF32, or stream0:f32, …"


def main() -> None:
    """Print what GPU PyTorch finds; this is the process that looks."""
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
    command = own_process("evaluators.cuda.devices")
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"PyTorch did not tell within {_LIMIT_S:g} s whether there is a GPU") from error
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        reason = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        raise UnavailableError(f"PyTorch cannot be loaded: {reason}", HINT)
    found = json.loads(lines[-1])
    if "name" not in found:
        built = f"is built for CUDA {found['cuda']}" if found["cuda"] else "is built without CUDA"
        raise UnavailableError(
            f"there is no CUDA device (torch.cuda.is_available() is false; PyTorch {found['torch']} {built})",
            "run on a machine with an NVIDIA GPU and its driver, or measure with --evaluator litert",
        )
    return str(found["name"])


def platform_of(device: str, precision: Precision = "tf32", streams: int = STREAMS) -> Platform:
    """Return the lanes of a GPU: alike, and none excludes another.

    Args:
        device: its name.
    """
    return Platform(device, tuple(stream(number, device, precision) for number in range(streams)))


def parse_stream(text: str, device: str) -> Processor:
    """Return the lane that ``streamN`` or ``streamN:PRECISION`` names.

    Raises:
        UsageError: the text is no such name.
    """
    word, colon, wanted = text.partition(":")
    number = word.removeprefix("stream")
    precision = next((p for p in PRECISIONS if p == (wanted if colon else "tf32")), None)
    known = word.startswith("stream") and number.isascii() and number.isdigit() and str(int(number)) == number
    if not known or precision is None or int(number) >= MAX_STREAMS:
        raise UsageError(f"processor {text!r} is none of evaluator {EXTRA}", f"there are {_NAMES}")
    return stream(int(number), device, precision)


def check_streams(platform: Platform) -> None:
    """Check that all lanes are streams of a GPU.

    Raises:
        UnavailableError: one is not.
    """
    for processor in platform.processors:
        if not processor.like.startswith(f"{EXTRA}:"):
            raise UnavailableError(
                f"processor {processor.name!r} of platform {platform.name!r} is not a stream of a GPU",
                f"evaluator {EXTRA} has {_NAMES}",
            )
