"""RetinaFace as CoDL measured it (Deng et al. 2020, arXiv:1905.00641): ResNet-50, a feature pyramid, five heads.

The sizes are those of the operators that CoDL's benchmark lists (Jia et al., MobiSys 2022): the backbone is slim's
ResNet v1, whose stages halve the map in their last block, and each head has three anchors. The coarsest level is a
3 by 3 convolution of the backbone's output, as in the paper.
"""

from __future__ import annotations

from search_spaces.models.zoo.builder import Builder, Value, whole
from search_spaces.models.zoo.names import Spec

_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # filters and blocks
_PYRAMID = 256
_ANCHORS = 3


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add the backbone, the pyramid and the heads; the outputs are boxes and the two classes' probabilities."""
    *finer, top = _backbone(net, net.input((1, *spec.size, 3)), spec.width)
    filters = whole(_PYRAMID * spec.width)
    x = net.conv(top, filters, 1, "pyramid4/lateral")
    levels = [net.conv(top, filters, 3, "pyramid5", stride=2, padding=1, activation="RELU"), x]
    for number, feature in reversed(list(enumerate(finer, 1))):
        lateral = net.conv(feature, filters, 1, f"pyramid{number}/lateral")
        x = net.add(net.resize_nearest(x, 2, f"pyramid{number}/up"), lateral, f"pyramid{number}/add")
        x = net.conv(x, filters, 3, f"pyramid{number}", activation="RELU", gain=2**-0.5)
        levels.append(x)
    heads = [_head(net, level, f"head{number}") for number, level in enumerate(reversed(levels), 1)]
    boxes = net.concat([box for box, _ in heads], "boxes", axis=1)
    classes = net.concat([scores for _, scores in heads], "scores", axis=1)
    return boxes, net.softmax(classes, "classes")


def _backbone(net: Builder, x: Value, width: float) -> list[Value]:
    """Return the feature maps at strides 4, 8, 16 and 32; the first is taken before stage 1 halves it."""
    gain = sum(count for _, count in _STAGES) ** -0.5
    x = net.conv(x, whole(64 * width), 7, "conv1", stride=2, padding=3, activation="RELU")
    x = net.max_pool(x, 2, 2, "pool1")
    features = []
    for stage, (filters, count) in enumerate(_STAGES, 1):
        for number in range(1, count + 1):
            halve = number == count and stage < len(_STAGES)
            if halve and stage == 1:
                features.append(x)
            x = _bottleneck(net, x, whole(filters * width), 2 if halve else 1, gain, f"stage{stage}_{number}")
        if stage != 3:
            features.append(x)
    return features


def _bottleneck(net: Builder, x: Value, filters: int, stride: int, gain: float, name: str) -> Value:
    y = net.conv(x, filters, 1, f"{name}/conv1", activation="RELU")
    y = net.conv(y, filters, 3, f"{name}/conv2", stride=stride, padding=1, activation="RELU")
    y = net.conv(y, 4 * filters, 1, f"{name}/conv3", gain=gain)
    if x.shape[3] != 4 * filters:
        x = net.conv(x, 4 * filters, 1, f"{name}/shortcut")
    elif stride > 1:
        x = net.max_pool(x, 1, stride, f"{name}/shortcut")
    return net.add(x, y, f"{name}/add", activation="RELU")


def _head(net: Builder, x: Value, name: str) -> tuple[Value, Value]:
    """Return boxes (1, anchors, 4) and scores (1, anchors, 2) of one level."""
    filters = x.shape[3]
    context = [
        net.conv(x, share, 3, f"{name}/context{number}", activation="RELU")
        for number, share in enumerate((filters // 2, filters // 4, filters // 4), 1)
    ]
    x = net.conv(net.concat(context, f"{name}/concat"), filters, 3, f"{name}/conv", activation="RELU")
    anchors = _ANCHORS * x.shape[1] * x.shape[2]
    boxes = net.conv(x, 4 * _ANCHORS, 3, f"{name}/boxes")
    scores = net.conv(x, 2 * _ANCHORS, 3, f"{name}/scores")
    return (
        net.reshape(boxes, (1, anchors, 4), f"{name}/boxes_flat"),
        net.reshape(scores, (1, anchors, 2), f"{name}/scores_flat"),
    )
