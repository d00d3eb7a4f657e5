"""MobileNet v1, v2 and v3-Large (arXiv:1704.04861, 1801.04381, 1905.02244).

Versions 1 and 2 are like their hosted ``.tflite`` files: SAME padding, 1001 classes (ImageNet's thousand, and
"background"). Version 3 has the 1000 classes of torchvision's. Channels are rounded to multiples of 8.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from search_spaces.models.zoo.builder import Builder, Value, eights
from search_spaces.models.zoo.names import Spec

# Of each pair of a depthwise and a pointwise convolution.
_V1_FILTERS = (64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024)
_V1_STRIDES = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1)
# Expansion, filters, repetitions and first stride of each sequence of inverted residuals (table 2 of the paper).
_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
# Kernel, expanded channels, filters, squeeze-and-excite, hard-swish, stride of each block (table 1 of the paper).
_V3 = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)
_CLASSES = 1001

# Gains of random weights. Hard-swish and a sigmoid halve small values, and pooling leaves mostly what all images have
# in common; with these gains the output still differs between inputs, in 8 bits too.
_AFTER_SWISH = 1.15
_AFTER_EXCITE = 1.6
_SHARPER = 3.0


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add the version of MobileNet that the name says."""
    x = net.input((1, *spec.size, 3))
    return ({"mobilenet_v1": _v1, "mobilenet_v2": _v2, "mobilenet_v3_large": _v3}[spec.name](net, x, spec.width),)


def _v1(net: Builder, x: Value, width: float) -> Value:
    x = net.conv(x, eights(32 * width), 3, "conv0", stride=2, activation="RELU6")
    for index, (filters, stride) in enumerate(zip(_V1_FILTERS, _V1_STRIDES, strict=True), 1):
        x = net.depthwise_conv(x, 3, f"conv{index}_depthwise", stride=stride, activation="RELU6")
        x = net.conv(x, eights(filters * width), 1, f"conv{index}_pointwise", activation="RELU6")
    x = net.average_pool(x, (x.shape[1], x.shape[2]), 2, "pool")
    x = net.conv(x, _CLASSES, 1, "logits", gain=_SHARPER)
    return net.softmax(net.reshape(x, (1, _CLASSES), "squeeze"))


def _v2(net: Builder, x: Value, width: float) -> Value:
    x = net.conv(x, eights(32 * width), 3, "conv0", stride=2, activation="RELU6")
    number = 0
    for expansion, filters, count, first in _V2:
        for repetition in range(count):
            number += 1
            stride = 1 if repetition else first
            x = inverted_residual(net, x, expansion, eights(filters * width), 3, stride, f"block{number}")
    # The last layer is never narrower than published.
    x = net.conv(x, eights(1280 * max(1.0, width)), 1, "conv_last", activation="RELU6")
    x = net.average_pool(x, (x.shape[1], x.shape[2]), 1, "pool")
    x = net.conv(x, _CLASSES, 1, "logits")
    return net.softmax(net.reshape(x, (1, _CLASSES), "squeeze"))


def inverted_residual(
    net: Builder, x: Value, expansion: int, filters: int, kernel: int, stride: int, name: str
) -> Value:
    """Add a pointwise expansion, a depthwise convolution and a linear projection, with a shortcut where it fits."""
    y = x
    if expansion != 1:
        y = net.conv(x, expansion * x.shape[3], 1, f"{name}/expand", activation="RELU6")
    y = net.depthwise_conv(y, kernel, f"{name}/depthwise", stride=stride, activation="RELU6")
    shortcut = stride == 1 and x.shape[3] == filters
    y = net.conv(y, filters, 1, f"{name}/project", gain=0.3 if shortcut else 1.0)
    return net.add(x, y, f"{name}/add") if shortcut else y


def _v3(net: Builder, x: Value, width: float) -> Value:
    x = _hard_swish(net, net.conv(x, eights(16 * width), 3, "conv0", stride=2, padding=1), "conv0")
    for number, (kernel, expanded, filters, excite, swish, stride) in enumerate(_V3, 1):
        name = f"block{number}"
        fused: Literal["NONE", "RELU"] = "NONE" if swish else "RELU"
        y = x
        if eights(expanded * width) != x.shape[3]:
            y = net.conv(x, eights(expanded * width), 1, f"{name}/expand", activation=fused)
            y = _hard_swish(net, y, f"{name}/expand") if swish else y
        y = net.depthwise_conv(y, kernel, f"{name}/depthwise", stride=stride, padding=kernel // 2, activation=fused)
        y = _hard_swish(net, y, f"{name}/depthwise") if swish else y
        y = _excite(net, y, f"{name}/excite") if excite else y
        shortcut = stride == 1 and x.shape[3] == eights(filters * width)
        gain = (_AFTER_EXCITE if excite else 1.0) * (_AFTER_SWISH if swish else 1.0) * (0.3 if shortcut else 1.0)
        y = net.conv(y, eights(filters * width), 1, f"{name}/project", gain=gain)
        x = net.add(x, y, f"{name}/add") if shortcut else y
    x = _hard_swish(net, net.conv(x, 6 * x.shape[3], 1, "conv_last"), "conv_last")
    x = _hard_swish(net, net.fully_connected(net.mean(x, "pool"), eights(1280 * width), "fc"), "fc")
    return net.softmax(net.fully_connected(x, 1000, "logits", gain=_SHARPER))


def _hard_swish(net: Builder, x: Value, name: str) -> Value:
    return net.unary("HARD_SWISH", x, f"{name}/hard_swish")


def _excite(net: Builder, x: Value, name: str) -> Value:
    """Scale channels by a hard sigmoid, which a converter writes as ``relu6(x + 3) · 1/6``."""
    y = net.mean(x, f"{name}/mean", keep=True)
    y = net.conv(y, eights(x.shape[3] / 4), 1, f"{name}/squeeze", activation="RELU")
    y = net.conv(y, x.shape[3], 1, f"{name}/expand")
    y = net.binary("ADD", y, net.constant(f"{name}/three", np.array(3, np.float32)), f"{name}/relu6", "RELU6")
    y = net.scalar("MUL", y, 1 / 6, f"{name}/sigmoid")
    return net.binary("MUL", x, y, f"{name}/scale")
