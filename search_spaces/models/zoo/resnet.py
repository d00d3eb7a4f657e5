"""ResNet as torchvision has it (He et al. 2016, arXiv:1512.03385): the stride is in the 3 by 3 convolution."""

from __future__ import annotations

from search_spaces.models.zoo.builder import Builder, Value, whole
from search_spaces.models.zoo.names import Spec

# Blocks in each of the four stages.
_BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3)}


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add residual blocks: two convolutions each in ResNet18, else bottlenecks of three that widen by 4."""
    blocks = _BLOCKS[spec.name]
    block = _basic if spec.name == "resnet18" else _bottleneck
    gain = sum(blocks) ** -0.5
    x = net.input((1, *spec.size, 3))
    x = net.conv(x, whole(64 * spec.width), 7, "conv1", stride=2, padding=3, activation="RELU")
    x = net.max_pool(x, 3, 2, "pool1", padding=1)
    for stage, count in enumerate(blocks):
        filters = whole(64 * 2**stage * spec.width)
        for number in range(count):
            stride = 2 if stage and not number else 1
            x = block(net, x, filters, stride, gain, f"layer{stage + 1}_{number}")
    return (net.softmax(net.fully_connected(net.mean(x, "pool"), 1000, "fc")),)


def _basic(net: Builder, x: Value, filters: int, stride: int, gain: float, name: str) -> Value:
    y = net.conv(x, filters, 3, f"{name}/conv1", stride=stride, padding=1, activation="RELU")
    y = net.conv(y, filters, 3, f"{name}/conv2", gain=gain)
    return _join(net, x, y, stride, name)


def _bottleneck(net: Builder, x: Value, filters: int, stride: int, gain: float, name: str) -> Value:
    y = net.conv(x, filters, 1, f"{name}/conv1", activation="RELU")
    y = net.conv(y, filters, 3, f"{name}/conv2", stride=stride, padding=1, activation="RELU")
    y = net.conv(y, 4 * filters, 1, f"{name}/conv3", gain=gain)
    return _join(net, x, y, stride, name)


def _join(net: Builder, x: Value, y: Value, stride: int, name: str) -> Value:
    if x.shape != y.shape:
        x = net.conv(x, y.shape[3], 1, f"{name}/shortcut", stride=stride, padding=0)
    return net.add(x, y, f"{name}/add", activation="RELU")
