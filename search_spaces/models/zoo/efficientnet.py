"""EfficientNet-Lite0 (Tan and Le 2019, arXiv:1905.11946): B0 without squeeze-and-excite, with ReLU6.

A width multiplier scales the blocks; the first and the last convolution are fixed, as in all Lite models.
"""

from __future__ import annotations

from search_spaces.models.zoo.builder import Builder, Value, eights
from search_spaces.models.zoo.mobilenet import inverted_residual
from search_spaces.models.zoo.names import Spec

# Expansion, filters, repetitions, first stride and kernel of each sequence of inverted residuals.
_SEQUENCES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add sixteen inverted residuals between two fixed convolutions."""
    x = net.input((1, *spec.size, 3))
    x = net.conv(x, 32, 3, "stem", stride=2, activation="RELU6")
    number = 0
    for expansion, filters, count, first, kernel in _SEQUENCES:
        for repetition in range(count):
            number += 1
            stride, width = 1 if repetition else first, eights(filters * spec.width)
            x = inverted_residual(net, x, expansion, width, kernel, stride, f"block{number}")
    x = net.conv(x, 1280, 1, "head", activation="RELU6")
    x = net.average_pool(x, (x.shape[1], x.shape[2]), 1, "pool")
    x = net.reshape(x, (1, 1280), "squeeze")
    return (net.softmax(net.fully_connected(x, 1000, "fc")),)
