"""RegNetY-32GF as torchvision has it (Radosavovic et al. 2020, arXiv:2003.13678): grouped convolutions, squeeze-excite.

A width multiplier scales the width of a group, rounded to a multiple of 8; the number of groups stays.
"""

from __future__ import annotations

from search_spaces.models.zoo.builder import Builder, Value, eights, whole
from search_spaces.models.zoo.names import Spec

_GROUP = 232
_STAGES = ((2, 1), (5, 3), (12, 6), (1, 16))  # blocks, and groups of each


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add twenty bottlenecks whose middle convolution is grouped."""
    group = eights(_GROUP * spec.width)
    gain = sum(count for count, _ in _STAGES) ** -0.5
    x = net.input((1, *spec.size, 3))
    x = net.conv(x, eights(32 * spec.width), 3, "stem", stride=2, padding=1, activation="RELU")
    for stage, (count, groups) in enumerate(_STAGES, 1):
        for number in range(count):
            x = _block(net, x, groups, group, 1 if number else 2, gain, f"block{stage}_{number}")
    return (net.softmax(net.fully_connected(net.mean(x, "pool"), 1000, "fc")),)


def _block(net: Builder, x: Value, groups: int, group: int, stride: int, gain: float, name: str) -> Value:
    filters = groups * group
    y = net.conv(x, filters, 1, f"{name}/a", activation="RELU")
    y = net.conv(y, filters, 3, f"{name}/b", stride=stride, padding=1, activation="RELU", groups=groups)
    # A quarter of the block's input channels, as published, not of the squeezed ones.
    scale = net.mean(y, f"{name}/se/mean", keep=True)
    scale = net.conv(scale, whole(x.shape[3] / 4), 1, f"{name}/se/squeeze", activation="RELU")
    scale = net.conv(scale, filters, 1, f"{name}/se/expand")
    y = net.binary("MUL", y, net.unary("LOGISTIC", scale, f"{name}/se/sigmoid"), f"{name}/se/scale")
    y = net.conv(y, filters, 1, f"{name}/c", gain=2 * gain)  # the sigmoid has halved its input
    if x.shape != y.shape:
        x = net.conv(x, filters, 1, f"{name}/shortcut", stride=stride, padding=0)
    return net.add(x, y, f"{name}/add", activation="RELU")
