"""GoogLeNet as torchvision has it (Szegedy et al. 2015, arXiv:1409.4842).

With batch normalisation, without the auxiliary classifiers, and with 3 by 3 filters where the paper has 5 by 5.
"""

from __future__ import annotations

from search_spaces.models.zoo.builder import Builder, Value, whole
from search_spaces.models.zoo.names import Spec

# Filters of the four branches of each module: 1x1; 3x3 reduced, 3x3; second 3x3 reduced, second 3x3; after pooling.
_GROUPS = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add nine inception modules of four parallel branches each."""
    width = spec.width
    x = net.input((1, *spec.size, 3))
    x = net.conv(x, whole(64 * width), 7, "conv1", stride=2, padding=3, activation="RELU")
    x = net.max_pool(x, 3, 2, "pool1", padding="CEIL")
    x = net.conv(x, whole(64 * width), 1, "conv2", activation="RELU")
    x = net.conv(x, whole(192 * width), 3, "conv3", activation="RELU")
    for group, modules in enumerate(_GROUPS, 3):
        x = net.max_pool(x, 2 if group == 5 else 3, 2, f"pool{group - 1}", padding="CEIL")
        for letter, filters in zip("abcde", modules, strict=False):
            x = _module(net, x, [whole(f * width) for f in filters], f"inception{group}{letter}")
    return (net.softmax(net.fully_connected(net.mean(x, "pool5"), 1000, "fc")),)


def _module(net: Builder, x: Value, filters: list[int], name: str) -> Value:
    one, three_reduced, three, last_reduced, last, pooled = filters
    a = net.conv(x, one, 1, f"{name}/branch1", activation="RELU")
    b = net.conv(x, three_reduced, 1, f"{name}/branch2/reduce", activation="RELU")
    b = net.conv(b, three, 3, f"{name}/branch2", activation="RELU")
    c = net.conv(x, last_reduced, 1, f"{name}/branch3/reduce", activation="RELU")
    c = net.conv(c, last, 3, f"{name}/branch3", activation="RELU")
    d = net.max_pool(x, 3, 1, f"{name}/branch4/pool", padding="SAME")
    d = net.conv(d, pooled, 1, f"{name}/branch4", activation="RELU")
    return net.concat([a, b, c, d], f"{name}/concat")
