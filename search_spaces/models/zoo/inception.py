"""Inception v3 as torchvision has it (Szegedy et al. 2016, arXiv:1512.00567), without the auxiliary classifier."""

from __future__ import annotations

from functools import partial

from search_spaces.models.zoo.builder import Builder, Padding, Size, Value, whole
from search_spaces.models.zoo.names import Spec

# One step of a branch: filters, kernel, stride, padding.
_Step = tuple[int, Size, int, Padding]


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add five convolutions and eleven modules of three or four parallel branches."""
    chain = partial(_chain, net, spec.width)
    x = net.input((1, *spec.size, 3))
    x = chain(x, "conv1", (32, 3, 2, "VALID"), (32, 3, 1, "VALID"), (64, 3, 1, "SAME"))
    x = net.max_pool(x, 3, 2, "pool1")
    x = chain(x, "conv2", (80, 1, 1, "SAME"), (192, 3, 1, "VALID"))
    x = net.max_pool(x, 3, 2, "pool2")
    for number, pooled in enumerate((32, 64, 64)):
        x = _module_a(net, spec.width, x, pooled, f"mixed5{'bcd'[number]}")
    name = "mixed6a"
    left = chain(x, f"{name}/a", (384, 3, 2, "VALID"))
    right = chain(x, f"{name}/b", (64, 1, 1, "SAME"), (96, 3, 1, "SAME"), (96, 3, 2, "VALID"))
    x = net.concat([left, right, net.max_pool(x, 3, 2, f"{name}/pool")], f"{name}/concat")
    for number, inner in enumerate((128, 160, 160, 192)):
        x = _module_c(net, spec.width, x, inner, f"mixed6{'bcde'[number]}")
    name = "mixed7a"
    left = chain(x, f"{name}/a", (192, 1, 1, "SAME"), (320, 3, 2, "VALID"))
    seven: tuple[_Step, ...] = ((192, 1, 1, "SAME"), (192, (1, 7), 1, "SAME"), (192, (7, 1), 1, "SAME"))
    right = chain(x, f"{name}/b", *seven, (192, 3, 2, "VALID"))
    x = net.concat([left, right, net.max_pool(x, 3, 2, f"{name}/pool")], f"{name}/concat")
    for letter in "bc":
        x = _module_e(net, spec.width, x, f"mixed7{letter}")
    return (net.softmax(net.fully_connected(net.mean(x, "pool"), 1000, "fc")),)


def _chain(net: Builder, width: float, x: Value, name: str, *steps: _Step) -> Value:
    for number, (filters, kernel, stride, padding) in enumerate(steps, 1):
        x = net.conv(
            x, whole(filters * width), kernel, f"{name}{number}", stride=stride, padding=padding, activation="RELU"
        )
    return x


def _pooled(net: Builder, width: float, x: Value, filters: int, name: str) -> Value:
    x = net.average_pool(x, 3, 1, f"{name}/pool", padding="SAME")
    return _chain(net, width, x, f"{name}/pool_conv", (filters, 1, 1, "SAME"))


def _module_a(net: Builder, width: float, x: Value, pooled: int, name: str) -> Value:
    chain = partial(_chain, net, width, x)
    branches = [
        chain(f"{name}/a", (64, 1, 1, "SAME")),
        chain(f"{name}/b", (48, 1, 1, "SAME"), (64, 5, 1, "SAME")),
        chain(f"{name}/c", (64, 1, 1, "SAME"), (96, 3, 1, "SAME"), (96, 3, 1, "SAME")),
        _pooled(net, width, x, pooled, name),
    ]
    return net.concat(branches, f"{name}/concat")


def _module_c(net: Builder, width: float, x: Value, inner: int, name: str) -> Value:
    """Add a module whose 7 by 7 filters are factored into rows and columns."""
    chain = partial(_chain, net, width, x)
    row: _Step = (inner, (1, 7), 1, "SAME")
    column: _Step = (inner, (7, 1), 1, "SAME")
    branches = [
        chain(f"{name}/a", (192, 1, 1, "SAME")),
        chain(f"{name}/b", (inner, 1, 1, "SAME"), row, (192, (7, 1), 1, "SAME")),
        chain(f"{name}/c", (inner, 1, 1, "SAME"), column, row, column, (192, (1, 7), 1, "SAME")),
        _pooled(net, width, x, 192, name),
    ]
    return net.concat(branches, f"{name}/concat")


def _module_e(net: Builder, width: float, x: Value, name: str) -> Value:
    """Add a module two of whose branches branch again."""
    chain = partial(_chain, net, width)
    three = chain(x, f"{name}/b", (384, 1, 1, "SAME"))
    double = chain(x, f"{name}/c", (448, 1, 1, "SAME"), (384, 3, 1, "SAME"))
    halves = [
        net.concat(
            [
                chain(inner, f"{name}/{letter}_row", (384, (1, 3), 1, "SAME")),
                chain(inner, f"{name}/{letter}_column", (384, (3, 1), 1, "SAME")),
            ],
            f"{name}/{letter}_concat",
        )
        for letter, inner in (("b", three), ("c", double))
    ]
    branches = [chain(x, f"{name}/a", (320, 1, 1, "SAME")), *halves, _pooled(net, width, x, 192, name)]
    return net.concat(branches, f"{name}/concat")
