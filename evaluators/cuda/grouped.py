"""A grouped convolution as one Triton kernel: TF32 products, with padding, bias and ReLU fused.

For the wide groups of a RegNetY at batch 1 cuDNN takes 3.5 to 9 times as long, and cuBLAS on an im2col matrix twice as
long (H200, four streams at once). Triton comes with PyTorch on Linux; this module is imported only to time its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

TILES = ((64, 128, 32), (128, 128, 32), (64, 64, 32))
"""Pixels, filters and channels that one thread block computes at a time."""


_MOVING = ["pixels", "height", "width", "out_width", "step_h", "step_w", "top", "left"]


# Channels are compile-time constants: the compiler then knows the rows' alignment, which decides how wide loads are.
@triton.jit(do_not_specialize=_MOVING)  # type: ignore[untyped-decorator, unused-ignore]
def _convolve(  # type: ignore[no-untyped-def]
    image,  # noqa: ANN001
    weight,  # noqa: ANN001
    bias,  # noqa: ANN001
    result,  # noqa: ANN001
    pixels,  # noqa: ANN001
    height,  # noqa: ANN001
    width,  # noqa: ANN001
    out_width,  # noqa: ANN001
    step_h,  # noqa: ANN001
    step_w,  # noqa: ANN001
    top,  # noqa: ANN001
    left,  # noqa: ANN001
    channels: tl.constexpr,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    relu: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    group = tl.program_id(2)
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    y, x = (m // out_width) * step_h - top, (m % out_width) * step_w - left
    filters = (group * outputs + n) * (rows * columns * inputs)
    total = tl.zeros((block_m, block_n), tl.float32)
    blocks = tl.cdiv(inputs, block_k)
    for k in range(rows * columns * blocks):
        tap = k // blocks
        row, column = tap // columns, tap % columns
        c = (k % blocks) * block_k + tl.arange(0, block_k)
        inside = (m < pixels) & (y + row >= 0) & (y + row < height) & (x + column >= 0) & (x + column < width)
        at = ((y + row) * width + x + column) * channels + group * inputs
        a = tl.load(image + at[:, None] + c[None, :], mask=inside[:, None] & (c[None, :] < inputs), other=0.0)
        there = (n[None, :] < outputs) & (c[:, None] < inputs)
        b = tl.load(weight + filters[None, :] + tap * inputs + c[:, None], mask=there, other=0.0)
        total = tl.dot(a, b, total, input_precision="tf32")
    total += tl.load(bias + group * outputs + n, mask=n < outputs, other=0.0)[None, :]
    if relu:
        total = tl.maximum(total, 0.0)
    groups = channels // inputs
    place = m[:, None] * (groups * outputs) + group * outputs + n[None, :]
    tl.store(result + place, total, mask=(m[:, None] < pixels) & (n[None, :] < outputs))


def grouped(conv: Any, tile: tuple[int, int, int]) -> Callable[..., Any]:
    """Return a function that computes a convolution of one image (:class:`~evaluators.cuda.kernels.Conv`).

    Args:
        conv: with the activation NONE or RELU, without dilation.
        tile: one of :data:`TILES`.
    """
    _, channels, height, width = conv.image
    out_h, out_w = conv.output
    filters, rows, columns, inputs = conv.weight.shape
    outputs = filters // conv.groups
    block_m, block_n, _ = tile
    grid = triton.cdiv(out_h * out_w, block_m), triton.cdiv(outputs, block_n), conv.groups
    sizes = out_h * out_w, height, width, out_w, *conv.window.stride, conv.window.sides[0], conv.window.sides[2]
    fixed = channels, inputs, outputs, rows, columns, conv.activation == "RELU"

    def run(image: Any, added: Any = None) -> Any:
        flat = image.permute(0, 2, 3, 1).contiguous()
        result = image.new_empty((1, out_h, out_w, filters))
        _convolve[grid](
            flat, conv.weight, conv.bias, result, *sizes, *fixed, *tile, num_warps=4 if block_m < 128 else 8
        )
        found = result.permute(0, 3, 1, 2)
        return found if added is None else found.add_(added)

    return run
