"""DenseNet-121 as torchvision has it (Huang et al. 2017, arXiv:1608.06993).

Each layer normalises the concatenation of all before it. This normalisation cannot be folded into a convolution, so it
is a MUL and an ADD, with the ReLU fused into the ADD.
"""

from __future__ import annotations

from search_spaces.models.zoo.builder import Builder, Value, whole
from search_spaces.models.zoo.names import Spec

_BLOCKS = (6, 12, 24, 16)
_GROWTH = 32


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add four dense blocks; a width multiplier scales the growth."""
    growth = whole(_GROWTH * spec.width)
    x = net.input((1, *spec.size, 3))
    x = net.conv(x, whole(64 * spec.width), 7, "conv0", stride=2, padding=3, activation="RELU")
    x = net.max_pool(x, 3, 2, "pool0", padding=1)
    for block, count in enumerate(_BLOCKS, 1):
        for layer in range(1, count + 1):
            name = f"block{block}_layer{layer}"
            y = net.affine(x, f"{name}/norm", "RELU")
            y = net.conv(y, 4 * growth, 1, f"{name}/conv1", activation="RELU")
            y = net.conv(y, growth, 3, f"{name}/conv2")
            x = net.concat([x, y], f"{name}/concat")
        if block < len(_BLOCKS):
            x = net.affine(x, f"transition{block}/norm", "RELU")
            x = net.conv(x, x.shape[3] // 2, 1, f"transition{block}/conv")
            x = net.average_pool(x, 2, 2, f"transition{block}/pool")
    x = net.affine(x, "norm5", "RELU")
    return (net.softmax(net.fully_connected(net.mean(x, "pool"), 1000, "classifier")),)
