"""SqueezeNet 1.0 and 1.1 (Iandola et al. 2016, arXiv:1602.07360), with the layers of torchvision's."""

from __future__ import annotations

from search_spaces.models.zoo.builder import Builder, Value, whole
from search_spaces.models.zoo.names import Spec

# First convolution: filters and size. Then the fire modules after each pooling: filters of the squeeze, and of each of
# the two expanding branches.
_LAYERS = {
    "squeezenet1_0": (
        (96, 7),
        ((16, 64), (16, 64), (32, 128)),
        ((32, 128), (48, 192), (48, 192), (64, 256)),
        ((64, 256),),
    ),
    "squeezenet1_1": (
        (64, 3),
        ((16, 64), (16, 64)),
        ((32, 128), (32, 128)),
        ((48, 192), (48, 192), (64, 256), (64, 256)),
    ),
}


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add eight fire modules, poolings between them, and a convolution to 1000 classes."""
    (filters, size), *groups = _LAYERS[spec.name]
    x = net.input((1, *spec.size, 3))
    x = net.conv(x, whole(filters * spec.width), size, "conv1", stride=2, padding="VALID", activation="RELU")
    fire = 2
    for group, modules in enumerate(groups, 1):
        x = net.max_pool(x, 3, 2, f"pool{group}", padding="CEIL")
        for squeeze, expand in modules:
            x = _fire(net, x, whole(squeeze * spec.width), whole(expand * spec.width), f"fire{fire}")
            fire += 1
    x = net.conv(x, 1000, 1, "conv10", activation="RELU")
    x = net.mean(x, "pool10")
    return (net.softmax(x),)


def _fire(net: Builder, x: Value, squeeze: int, expand: int, name: str) -> Value:
    x = net.conv(x, squeeze, 1, f"{name}/squeeze1x1", activation="RELU")
    left = net.conv(x, expand, 1, f"{name}/expand1x1", activation="RELU")
    right = net.conv(x, expand, 3, f"{name}/expand3x3", activation="RELU")
    return net.concat([left, right], f"{name}/concat")
