"""VGG (Simonyan and Zisserman 2014, arXiv:1409.1556), configurations A, D and E.

A width multiplier scales the fully connected layers too (seed 004 goes from 0.125 to 1). The size of
images determines the number of inputs of the first of them.
"""

from __future__ import annotations

from search_spaces.models.zoo.builder import Builder, Value, whole
from search_spaces.models.zoo.names import Spec

# Convolutions in each of the five blocks.
_BLOCKS = {"vgg11": (1, 1, 2, 2, 2), "vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4)}
_FILTERS = (64, 128, 256, 512, 512)


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add 3 by 3 convolutions with 2 by 2 pooling, three fully connected layers and a softmax."""
    x = net.input((1, *spec.size, 3))
    for block, (count, filters) in enumerate(zip(_BLOCKS[spec.name], _FILTERS, strict=True), 1):
        for layer in range(1, count + 1):
            x = net.conv(x, whole(filters * spec.width), 3, f"conv{block}_{layer}", activation="RELU")
        x = net.max_pool(x, 2, 2, f"pool{block}")
    for layer in (6, 7):
        x = net.fully_connected(x, whole(4096 * spec.width), f"fc{layer}", activation="RELU")
    return (net.softmax(net.fully_connected(x, 1000, "fc8")),)
