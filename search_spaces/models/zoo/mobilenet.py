"""MobileNet v1 (Howard et al. 2017, arXiv:1704.04861), as its hosted ``.tflite`` has it: 1001 classes, 31 operators."""

from __future__ import annotations

from search_spaces.models.zoo.builder import Builder, Draft

# Filters and stride of each pair of a depthwise and a pointwise convolution.
_PAIRS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    (512, 1),
    (512, 1),
    (512, 1),
    (512, 1),
    (512, 1),
    (1024, 2),
    (1024, 1),
)
_CLASSES = 1001  # ImageNet's thousand, and "background"


def mobilenet_v1(name: str) -> Draft:
    """Return MobileNet v1 of width 1.0 for images of 224 by 224."""
    net = Builder(name)
    x = net.input((1, 224, 224, 3))
    x = net.conv(x, 32, 3, "conv0", stride=2, activation="RELU6")
    for index, (filters, stride) in enumerate(_PAIRS, 1):
        x = net.depthwise_conv(x, 3, f"conv{index}_depthwise", stride=stride, activation="RELU6")
        x = net.conv(x, filters, 1, f"conv{index}_pointwise", activation="RELU6")
    x = net.average_pool(x, x.shape[1], 2, "pool")
    x = net.conv(x, _CLASSES, 1, "logits")
    x = net.reshape(x, (1, _CLASSES), "squeeze")
    return net.finish(net.softmax(x))
