"""AlexNet as torchvision has it (Krizhevsky 2014, arXiv:1404.5997): one tower, five convolutions."""

from __future__ import annotations

from search_spaces.models.zoo.builder import Builder, Value, whole
from search_spaces.models.zoo.names import Spec


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add five convolutions, three fully connected layers (a width multiplier scales two of them) and a softmax."""
    x = net.input((1, *spec.size, 3))
    x = net.conv(x, whole(64 * spec.width), 11, "conv1", stride=4, padding=2, activation="RELU")
    x = net.max_pool(x, 3, 2, "pool1")
    x = net.conv(x, whole(192 * spec.width), 5, "conv2", activation="RELU")
    x = net.max_pool(x, 3, 2, "pool2")
    for layer, filters in enumerate((384, 256, 256), 3):
        x = net.conv(x, whole(filters * spec.width), 3, f"conv{layer}", activation="RELU")
    x = net.max_pool(x, 3, 2, "pool5")
    for layer in (6, 7):
        x = net.fully_connected(x, whole(4096 * spec.width), f"fc{layer}", activation="RELU")
    return (net.softmax(net.fully_connected(x, 1000, "fc8")),)
