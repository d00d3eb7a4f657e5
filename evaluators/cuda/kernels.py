"""The variants by which PyTorch can compute a convolution or matrix product; the fastest one is found by timing.

Activations are ``(N, C, H, W)`` tensors whose memory is NHWC (``channels_last``), so filters as they lie in a
``.tflite`` file (OHWI) are PyTorch's own in that layout, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from evaluators.cuda.devices import torch_module

Sides = tuple[int, int, int, int]
"""Padding: rows above and below, columns left and right."""


@dataclass(frozen=True, slots=True)
class Window:
    """Size, stride, dilation and padding of an operator's window, in pixels (height, width)."""

    size: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    sides: Sides

    @property
    def even(self) -> bool:
        """Whether padding is symmetric in both directions."""
        top, bottom, left, right = self.sides
        return top == bottom and left == right

    @property
    def around(self) -> tuple[int, int, int, int]:
        """Padding left, right, above and below: PyTorch names the last dimension first."""
        top, bottom, left, right = self.sides
        return left, right, top, bottom

    @property
    def padding(self) -> tuple[int, int]:
        """Padding on each side of both directions, where it is symmetric."""
        return self.sides[0], self.sides[2]


def window_of(
    options: Mapping[str, Any], size: tuple[int, int], image: tuple[int, int], more: Sides = (0, 0, 0, 0)
) -> Window:
    """Return the window of an operator.

    Args:
        size: height and width of its filter.
        image: height and width of its input.
        more: padding by an operator PAD before it; the operator itself is then VALID.
    """
    stride = int(options["stride_h"]), int(options["stride_w"])
    dilation = int(options.get("dilation_h_factor", 1)), int(options.get("dilation_w_factor", 1))
    if options["padding"] != "SAME":
        return Window(size, stride, dilation, more)
    sides = []
    for length, step, apart, taps in zip(image, stride, dilation, size, strict=True):
        missing = max(0, (-(-length // step) - 1) * step + (taps - 1) * apart + 1 - length)
        sides += [missing // 2, missing - missing // 2]
    return Window(size, stride, dilation, (sides[0], sides[1], sides[2], sides[3]))


Call = Callable[..., Any]
ACTIVATIONS = ("NONE", "RELU", "RELU6", "TANH")
PLAIN = "plain"
_NARROWEST = 16  # fewest channels of a group that Triton can multiply
_MOST_COLUMNS_NBYTES = 64 << 20  # of an im2col matrix


def activate(value: Any, name: str) -> Any:
    """Apply a fused activation in place."""
    if name == "RELU":
        return value.relu_()
    if name == "RELU6":
        return value.clamp_(0.0, 6.0)
    return value.tanh_() if name == "TANH" else value


@dataclass(frozen=True, slots=True)
class Conv:
    """One convolution, with all that decides how it can be computed.

    Attributes:
        weight: ``(O, H, W, I of a group)``.
        bias: ``(O,)``.
        image: shape of its input, ``(N, C, H, W)``.
        first: returns the filters laid out as NCHW, ``(O, I of a group, H, W)``; their owner keeps them alive.
        adds: whether a second value is added before the activation (the end of a residual block).
    """

    weight: Any
    bias: Any
    window: Window
    groups: int
    activation: str
    image: tuple[int, ...]
    first: Callable[[], Any]
    adds: bool = False

    @property
    def signature(self) -> str:
        """Key that is equal for convolutions of equal cost."""
        w = self.window
        shape = tuple(self.weight.shape)
        return (
            f"conv {shape} {w.stride} {w.dilation} {w.sides} {self.groups} {self.activation} {self.image} {self.adds}"
        )

    @property
    def output(self) -> tuple[int, int]:
        """Height and width of its output."""
        w, sides = self.window, self.window.sides
        rows, columns = (
            (length + before + behind - (taps - 1) * apart - 1) // step + 1
            for length, before, behind, taps, apart, step in zip(
                self.image[2:], sides[::2], sides[1::2], w.size, w.dilation, w.stride, strict=True
            )
        )
        return rows, columns

    def variants(self, *, gpu: bool) -> Mapping[str, Call]:
        """Return its variants by name; each is called with the image, and the value to add."""
        found: dict[str, Call] = {PLAIN: _conv(self)}
        if not gpu:
            return found
        if self.activation == "RELU":
            found["fused"] = _fused(self)
        # cuDNN's float32 kernels that do not use tensor cores are made for NCHW.
        if self.image[1] <= 4 or not torch_module().backends.cudnn.allow_tf32:
            found["nchw"] = _channels_first(self)
        if self.window.size == (1, 1) and self.groups == 1 and not any(self.window.sides):
            found["product"] = _product(self)
            if self.image[0] * prod(self.image[2:]) == 1:
                found["vector"] = _vector(self)
        elif 4 * self.image[0] * self.image[1] * prod(self.output) * prod(self.window.size) <= _MOST_COLUMNS_NBYTES:
            found["columns"] = _columns(self)
        if self.groups > 1 and self.image[0] == 1 and not self.adds and self.weight.shape[3] >= _NARROWEST:
            found |= _in_triton(self)
        return found


@dataclass(frozen=True, slots=True)
class Dense:
    """One matrix product with bias.

    Attributes:
        weight: ``(O, I)``.
        bias: ``(O,)``.
        rows: number of vectors that it is applied to.
    """

    weight: Any
    bias: Any
    activation: str
    rows: int

    @property
    def signature(self) -> str:
        """Key that is equal for products of equal cost."""
        return f"dense {tuple(self.weight.shape)} {self.rows} {self.activation}"

    def variants(self, *, gpu: bool) -> Mapping[str, Call]:
        """Return its variants by name; each is called with ``(rows, I)``."""
        torch = torch_module()
        weight, bias, activation = self.weight, self.bias, self.activation
        turned = weight.t()
        found: dict[str, Call] = {PLAIN: lambda x: activate(torch.addmm(bias, x, turned), activation)}
        if gpu and activation == "RELU":
            found["fused"] = lambda x: torch._addmm_activation(bias, x, turned)  # noqa: SLF001 - of cuBLASLt
        if gpu and self.rows == 1:
            found["vector"] = lambda x: activate(torch.addmv(bias, weight, x[0]), activation)[None]
        return found


def _finish(conv: Conv, value: Any, added: Any) -> Any:
    return activate(value if added is None else value.add_(added), conv.activation)


def _padded(conv: Conv, image: Any) -> Any:
    return torch_module().nn.functional.pad(image, conv.window.around)


def _conv(conv: Conv, weight: Any = None) -> Call:
    conv2d, window = torch_module().nn.functional.conv2d, conv.window
    weight = conv.weight.permute(0, 3, 1, 2) if weight is None else weight
    even, padding = window.even, window.padding if window.even else (0, 0)

    def run(image: Any, added: Any = None) -> Any:
        image = image if even else _padded(conv, image)
        found = conv2d(image, weight, conv.bias, window.stride, padding, window.dilation, conv.groups)
        return _finish(conv, found, added)

    return run


def _fused(conv: Conv) -> Call:
    torch, window = torch_module(), conv.window
    weight = conv.weight.permute(0, 3, 1, 2)
    even, padding = window.even, window.padding if window.even else (0, 0)
    rest = window.stride, padding, window.dilation, conv.groups

    def run(image: Any, added: Any = None) -> Any:
        image = image if even else _padded(conv, image)
        if added is None:
            return torch.cudnn_convolution_relu(image, weight, conv.bias, *rest)
        return torch.cudnn_convolution_add_relu(image, weight, added, 1.0, conv.bias, *rest)

    return run


def _channels_first(conv: Conv) -> Call:
    torch = torch_module()

    def run(image: Any, added: Any = None) -> Any:
        inner = _conv(conv, conv.first())
        found = inner(image.contiguous(), None if added is None else added.contiguous())
        return found.contiguous(memory_format=torch.channels_last)

    return run


def _product(conv: Conv) -> Call:
    torch = torch_module()
    step_h, step_w = conv.window.stride
    outputs, inputs = conv.weight.shape[0], conv.weight.shape[3]
    turned = conv.weight.view(outputs, inputs).t()
    shape = (conv.image[0], *conv.output, outputs)

    def run(image: Any, added: Any = None) -> Any:
        pixels = image[:, :, ::step_h, ::step_w].permute(0, 2, 3, 1).reshape(-1, inputs)
        if added is None and conv.activation == "RELU":
            found = torch._addmm_activation(conv.bias, pixels, turned)  # noqa: SLF001 - the bias and ReLU of cuBLASLt
            return found.view(shape).permute(0, 3, 1, 2)
        return _finish(conv, torch.addmm(conv.bias, pixels, turned).view(shape).permute(0, 3, 1, 2), added)

    return run


def _vector(conv: Conv) -> Call:
    torch = torch_module()
    outputs, inputs = conv.weight.shape[0], conv.weight.shape[3]
    matrix = conv.weight.view(outputs, inputs)
    shape = (1, outputs, 1, 1)

    def run(image: Any, added: Any = None) -> Any:
        return _finish(conv, torch.addmv(conv.bias, matrix, image.reshape(inputs)).view(shape), added)

    return run


def _in_triton(conv: Conv) -> dict[str, Call]:
    """Return this package's Triton kernels, where Triton is installed and TF32 is allowed."""
    allowed = torch_module().backends.cuda.matmul.allow_tf32
    simple = conv.activation in {"NONE", "RELU"} and conv.window.dilation == (1, 1) and conv.window.size != (1, 1)
    if not (allowed and simple):
        return {}
    try:
        from evaluators.cuda.grouped import TILES, grouped
    except ImportError:
        return {}
    return {f"triton {'x'.join(map(str, tile))}": grouped(conv, tile) for tile in TILES}


def _columns(conv: Conv) -> Call:
    """Return the product of an im2col matrix and the filters, for each group."""
    torch = torch_module()
    batch, channels = conv.image[:2]
    outputs, rows, columns, inputs = conv.weight.shape
    out_h, out_w = conv.output
    (step_h, step_w), (apart_h, apart_w) = conv.window.stride, conv.window.dilation
    turned = conv.weight.view(conv.groups, outputs // conv.groups, rows * columns * inputs).transpose(1, 2)
    bias = conv.bias.view(conv.groups, 1, outputs // conv.groups)

    def run(image: Any, added: Any = None) -> Any:
        padded = _padded(conv, image).permute(0, 2, 3, 1).contiguous()
        height, width = padded.shape[1:3]
        line = width * channels
        size = (conv.groups, batch, out_h, out_w, rows, columns, inputs)
        strides = (inputs, height * line, step_h * line, step_w * channels, apart_h * line, apart_w * channels, 1)
        written = padded.as_strided(size, strides).reshape(conv.groups, batch * out_h * out_w, rows * columns * inputs)
        if conv.groups == 1 and added is None and conv.activation == "RELU":
            found = torch._addmm_activation(conv.bias, written[0], turned[0])  # noqa: SLF001
            return found.view(batch, out_h, out_w, outputs).permute(0, 3, 1, 2)
        found = torch.baddbmm(bias, written, turned)
        # (group, pixel, channel) → (pixel, group, channel), which is NHWC.
        found = found.view(conv.groups, batch, out_h, out_w, -1).permute(1, 2, 3, 0, 4)
        found = found.reshape(batch, out_h, out_w, outputs).permute(0, 3, 1, 2)
        return _finish(conv, found, added)

    return run
