"""What a stream's options mean: its precision, how exact its outputs are, and where PyTorch comes from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

from search_spaces.errors import UnavailableError, UsageError
from search_spaces.platform import Processor

Precision = Literal["tf32", "f32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
PRECISION = "precision"
"""Option of a lane: ``tf32`` multiplies with 10 bits of mantissa on tensor cores, ``f32`` with all 23 of float32."""

EXTRA = "cuda"
HINT = "pip install 'partition-optimizer[cuda]'"
STREAMS = 8
MAX_STREAMS = 32
MAX_INSTANCES = 32
"""Instances that may run at once: each is captured on a stream of its own, and PyTorch has as many."""

# Relative to the largest value of an output, against LiteRT's on the CPU: float32 sums in another order, as of any GPU
# (evaluators.litert.settings.TOLERANCE_F32, with room for 152 layers); TF32 rounds each factor to 2^-11.
_TOLERANCES: dict[str, float] = {"f32": 1e-3, "tf32": 5e-2}


def torch_module() -> Any:
    """Return PyTorch; only the processes that compute ask for it.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise UnavailableError("the evaluator cuda needs PyTorch, which is not installed", HINT) from error
    return torch


def precision_of(processor: Processor) -> Precision:
    """Return the precision of a lane.

    Raises:
        UsageError: it has none that there is.
    """
    found = processor.options.get(PRECISION, "tf32")
    if found not in PRECISIONS:
        raise UsageError(
            f"processor {processor.name!r}: its precision {found!r} is none", f"one of {', '.join(PRECISIONS)}"
        )
    return PRECISIONS[PRECISIONS.index(found)]


def tolerance(used: Iterable[Processor]) -> float:
    """Return the relative error that is accepted of what some lanes compute: 1e-3 in float32, 5e-2 in TF32."""
    return max((_TOLERANCES[precision_of(p)] for p in used), default=_TOLERANCES["f32"])


def stream(number: int, device: str, precision: Precision) -> Processor:
    """Return the lane of a stream; streams of one precision are alike, and none excludes another.

    Args:
        device: the GPU's name.
    """
    name = f"stream{number}" if precision == "tf32" else f"stream{number}:{precision}"
    like = f"{EXTRA}:{device}:{precision}"
    return Processor(name, "gpu", {f"stream {number}": 1.0}, like, {PRECISION: precision, "device": device})
