"""PoseNet as CoDL measured it: a convolutional pose machine (Wei et al. 2016, arXiv:1602.00134) for a hand's 21 points.

VGG19's first ten convolutions and five more make features; three stages refine a heat map of each point. The sizes
are those of the operators that CoDL's benchmark lists (Jia et al., MobiSys 2022).
"""

from __future__ import annotations

from search_spaces.models.zoo.builder import Builder, Value, whole
from search_spaces.models.zoo.names import Spec

_GROUPS = ((64, 64), (128, 128), (256, 256, 256, 256), (512, 512, 256, 256, 256, 256, 128))
_POINTS = 21
_STAGES = 3


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add the features, a first guess, and two stages of 7 by 7 convolutions that read both."""
    x = net.input((1, *spec.size, 3))
    for group, layers in enumerate(_GROUPS, 1):
        if group > 1:
            x = net.max_pool(x, 2, 2, f"pool{group - 1}")
        for layer, filters in enumerate(layers, 1):
            x = net.conv(x, whole(filters * spec.width), 3, f"conv{group}_{layer}", activation="RELU")
    maps = net.conv(x, whole(512 * spec.width), 1, "stage1/conv1", activation="RELU")
    maps = net.conv(maps, _POINTS, 1, "stage1/maps")
    width = whole(128 * spec.width)
    for stage in range(2, _STAGES + 1):
        y = net.concat([x, maps], f"stage{stage}/concat")
        for layer in range(1, 6):
            y = net.conv(y, width, 7, f"stage{stage}/conv{layer}", activation="RELU")
        y = net.conv(y, width, 1, f"stage{stage}/conv6", activation="RELU")
        maps = net.conv(y, _POINTS, 1, f"stage{stage}/maps")
    return (maps,)
