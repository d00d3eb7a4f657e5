"""SqueezeNet 1.1 (Iandola et al. 2016, arXiv:1602.07360), with the layers of torchvision's ``squeezenet1_1``."""

from __future__ import annotations

from search_spaces.models.zoo.builder import Builder, Draft, Value

# Fire modules between two poolings: filters that squeeze, and that expand on each of the two branches.
_GROUPS = (
    ((16, 64), (16, 64)),
    ((32, 128), (32, 128)),
    ((48, 192), (48, 192), (64, 256), (64, 256)),
)


def squeezenet1_1(name: str) -> Draft:
    """Return SqueezeNet 1.1 for images of 224 by 224 and 1000 classes."""
    net = Builder(name)
    x = net.input((1, 224, 224, 3))
    x = net.conv(x, 64, 3, "conv1", stride=2, padding="VALID", activation="RELU")
    fire = 2
    for group, modules in enumerate(_GROUPS, 1):
        x = net.max_pool(x, 3, 2, f"pool{group}")
        for squeeze, expand in modules:
            x = _fire(net, x, squeeze, expand, f"fire{fire}")
            fire += 1
    x = net.conv(x, 1000, 1, "conv10", activation="RELU")
    x = net.mean(x, "pool10")
    return net.finish(net.softmax(x))


def _fire(net: Builder, x: Value, squeeze: int, expand: int, name: str) -> Value:
    x = net.conv(x, squeeze, 1, f"{name}/squeeze1x1", activation="RELU")
    left = net.conv(x, expand, 1, f"{name}/expand1x1", activation="RELU")
    right = net.conv(x, expand, 3, f"{name}/expand3x3", activation="RELU")
    return net.concat([left, right], f"{name}/concat")
