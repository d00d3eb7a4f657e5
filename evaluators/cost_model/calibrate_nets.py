"""Small random networks for calibration: random walks through the shapes that networks are made of.

An operator's time depends on what runs before it, since that fills the caches; so operators are timed as parts of
small networks, not one by one. A walk starts from an image or from a map of some size and adds operators of random
kinds and widths while they stay affordable. Some walks use two kinds of operators only: what a core ran just before
affects the next operator (:mod:`evaluators.cost_model.features`), which cannot be seen where all kinds are mixed.
Others repeat one kind of block at falling sizes and even widths, as published networks do. Some of these take tens of
milliseconds, so that caches forget the weights from one inference to the next; and some have half or a quarter of the
rows, as the sides of a split network have; without them, many weights would always come with many pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from search_spaces.core.intensity import operator_costs
from search_spaces.models.zoo.builder import Activation, Builder, Draft, Padding, Value
from search_spaces.models.zoo.transformer import attention

GENERATOR = 5
"""Version of the generator; increase it with every change after which a seed draws another network.

A log of timings identifies networks by their seeds, so it is of no use with another version.
"""

TURNS = 10  # kinds of networks return after so many seeds
DEEP = frozenset({3, 8})  # turns of deep ones
MOST_MACS = 400_000_000
MOST_WEIGHTS = 6_000_000
MOST_HELD = 16_000_000  # weights of all blocks of a network: 64 MB, which boards have
MOST_ELEMENTS = 3_300_000  # of an activation: 13 MB, as in the first layers of VGG
_WIDEST = 2048

Rng = np.random.Generator


@dataclass(slots=True)
class _Walk:
    """A network under construction.

    Attributes:
        x: the current value, which the next operator reads.
        seen: earlier values by shape, for sums and concatenations.
    """

    net: Builder
    rng: Rng
    x: Value
    seen: dict[tuple[int, ...], list[Value]] = field(default_factory=dict)
    count: int = 0

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def activation(self) -> Activation:
        return ("NONE", "RELU", "RELU6")[int(self.rng.integers(3))]

    def channels(self, most: float) -> int:
        """Draw a number of channels, log-uniform from 4 on; three times in four a multiple of 8."""
        drawn = int(np.exp(self.rng.uniform(math.log(4.0), math.log(max(5.0, min(most, _WIDEST))))))
        return max(8, drawn // 8 * 8) if self.rng.random() < 0.75 else max(1, drawn)

    def step(self, value: Value) -> None:
        self.x = value
        self.seen.setdefault(value.shape, []).append(value)


def random_network(name: str, rng: Rng, operators: int = 24, *, kinds: Collection[str] = ()) -> Draft:
    """Return a network of about ``operators`` operators; the same seed draws the same one.

    Args:
        kinds: steps that it is made of, beside a first convolution; all where none is named.
    """
    net = Builder(name)
    image = rng.random() < 0.35
    size = int(np.exp(rng.uniform(math.log(96.0 if image else 4.0), math.log(300.0 if image else 150.0))))
    x = net.input((1, size, size, 3 if image else 1))
    walk = _Walk(net, rng, x)
    if not image:
        most = MOST_ELEMENTS / size**2
        widened = walk.channels(most)
        walk.x = net.input((1, size, size, widened), "map")
        walk.step(net.binary("MUL", walk.x, x, "gate"))
    while walk.count < operators:
        before = walk.count
        steps = ["conv"] if walk.x.shape[3] == 3 else [k for k in _STEPS if not kinds or k in kinds]
        weights = np.array([_STEPS[k][1] for k in steps])
        _STEPS[steps[int(rng.choice(len(steps), p=weights / weights.sum()))]][0](walk)
        if walk.count == before:  # the step was too expensive: narrow the network, which never is
            _pointwise(walk, most=64)
    _head(walk)
    return net.finish(walk.x)


def random_blocks(name: str, rng: Rng) -> Draft:
    """Return a network that repeats one kind of block in at least three stages of falling size and mostly rising width.

    All of its blocks together have at most :data:`MOST_MACS`.
    """
    while True:  # until one is drawn of which each stage can begin
        size = 16 * int(rng.integers(6, 17))
        unit = int(rng.choice([8, 8, 16]))
        width = unit * int(rng.integers(1, 3))
        net = Builder(name)
        x = net.input((1, size, size, 3))
        if (found := _in_stages(net, rng, x, unit, width, (1.2, 2.0), 4, MOST_MACS)) is not None:
            return found


def random_deep(name: str, rng: Rng) -> Draft:
    """Return such a network as deep and wide as published ones are; half of them have fewer rows than columns.

    All of its blocks together have at most eight times :data:`MOST_MACS`, and :data:`MOST_HELD` weights.
    """
    while True:
        size = 32 * int(rng.integers(4, 8))
        rows, growth = int(size * rng.choice([1.0, 1.0, 0.5, 0.25])), rng.uniform(1.5, 2.1)
        net = Builder(name)
        x = net.input((1, rows, size, 3))
        width, steady = 16 * int(rng.integers(2, 5)), (0.9 * growth, 1.1 * growth)
        if (found := _in_stages(net, rng, x, 16, width, steady, 7, 8 * MOST_MACS)) is not None:
            return found


def _in_stages(
    net: Builder, rng: Rng, x: Value, unit: int, width: int, growth: tuple[float, float], most: int, left: int
) -> Draft | None:
    """Return a network of one kind of block in stages; None where one of them cannot begin within the limits.

    Args:
        unit: widths are multiples of it.
        width: of the first operator.
        growth: least and greatest factor from one stage's width to the next.
        most: blocks of a stage.
        left: multiply-accumulates of all blocks.
    """
    x = net.conv(x, width, 3, "stem", stride=2, activation="RELU6")
    block = _BLOCKS[int(rng.integers(len(_BLOCKS)))]
    expansion, kernel = int(rng.choice([2, 3, 4, 6])), int(rng.choice([3, 3, 5]))
    expansion = max(1, min(expansion, MOST_ELEMENTS // (2 * math.prod(x.shape))))
    stages, held = int(rng.integers(3, 6)), 0
    for stage in range(stages):
        width = max(unit, int(width * rng.uniform(*growth)) // unit * unit)
        for repetition in range(int(rng.integers(1, most + 1))):
            stride = 2 if repetition == 0 and x.shape[2] >= 8 else 1
            alone = Builder("block")
            added = block(alone, alone.input(x.shape), width, expansion, kernel, stride, "block")
            graph = alone.finish(added).graph()
            cost = sum(each.macs for each in operator_costs(graph))
            weights = [t.nbytes // 4 for t in graph.tensors if t.constant]
            elements = x.shape[1] * x.shape[2] * expansion * max(width, x.shape[3])
            much = cost > min(left / (stages - stage), MOST_MACS) or max(weights, default=0) > MOST_WEIGHTS
            if much or elements > MOST_ELEMENTS or held + sum(weights) > MOST_HELD:
                if repetition == 0:
                    return None
                break
            left -= cost
            held += sum(weights)
            x = block(net, x, width, expansion, kernel, stride, f"block{stage}_{repetition}")
    widest = min(4 * width, MOST_MACS // (2 * math.prod(x.shape)), MOST_WEIGHTS // x.shape[3])
    x = net.conv(x, max(8, widest // 8 * 8), 1, "last", activation="RELU6")
    x = net.mean(x, "head_mean", keep=True)
    return net.finish(net.softmax(net.fully_connected(x, 1000, "head")))


def _inverted(net: Builder, x: Value, width: int, expansion: int, kernel: int, stride: int, name: str) -> Value:
    """Add an expansion, a depthwise convolution and a linear projection, and the block's input where it fits."""
    y = net.conv(x, expansion * x.shape[3], 1, f"{name}/expand", activation="RELU6")
    y = net.depthwise_conv(y, kernel, f"{name}/depth", stride=stride, activation="RELU6")
    y = net.conv(y, width, 1, f"{name}/project")
    return net.add(x, y, f"{name}/add") if x.shape == y.shape else y


def _separable(net: Builder, x: Value, width: int, _expansion: int, kernel: int, stride: int, name: str) -> Value:
    """Add a depthwise convolution and one by 1x1."""
    y = net.depthwise_conv(x, kernel, f"{name}/depth", stride=stride, activation="RELU6")
    return net.conv(y, width, 1, f"{name}/point", activation="RELU6")


def _bottleneck(net: Builder, x: Value, width: int, expansion: int, kernel: int, stride: int, name: str) -> Value:
    """Add a narrow convolution between two of 1x1, and the block's input where it fits."""
    inner = max(8, width // 4)
    y = net.conv(x, inner, 1, f"{name}/narrow", activation="RELU")
    y = net.conv(y, inner, kernel, f"{name}/conv", stride=stride, activation="RELU")
    fits = stride == 1 and x.shape[3] == expansion * inner
    y = net.conv(y, expansion * inner, 1, f"{name}/widen", activation="NONE" if fits else "RELU")
    return net.add(x, y, f"{name}/add", activation="RELU") if fits else y


def _growing(net: Builder, x: Value, width: int, expansion: int, kernel: int, stride: int, name: str) -> Value:
    """Add two convolutions to what is there, as in dense blocks, after a narrower map of half the size where asked."""
    if stride == 2:
        x = net.average_pool(net.conv(x, width, 1, f"{name}/narrow", activation="RELU"), 2, 2, f"{name}/pool")
    for layer in range(2):
        y = net.affine(x, f"{name}/norm{layer}", "RELU")
        y = net.conv(y, expansion * 16, 1, f"{name}/point{layer}", activation="RELU")
        x = net.concat([x, net.conv(y, 16, kernel, f"{name}/conv{layer}")], f"{name}/concat{layer}")
    return x


_BLOCKS = (_inverted, _inverted, _separable, _bottleneck, _growing)
"""What adds a block; the first is drawn twice as often."""


def random_dense(name: str, rng: Rng) -> Draft:
    """Return a network of fully connected layers, matrix products and normalisations, as in transformers."""
    net = Builder(name)
    if rng.random() < 0.4:
        return _classifier(net, rng)
    tokens, width = int(np.exp(rng.uniform(1.5, 5.6))), 8 * int(np.exp(rng.uniform(1.5, 4.8)))
    x = net.input((1, tokens, width))
    for layer in range(4):
        inner = 8 * int(np.exp(rng.uniform(1.5, 5.2)))
        y = net.fully_connected(x, inner, f"up{layer}", keep=True, activation="RELU" if layer % 2 else "NONE")
        if rng.random() < 0.5:
            y = net.unary("GELU", y, f"gelu{layer}")
        y = net.fully_connected(y, width, f"down{layer}", keep=True)
        x = net.add(x, y, f"sum{layer}")
        if rng.random() < 0.5:
            x = net.affine(x, f"norm{layer}")
        if rng.random() < 0.5:
            x = net.softmax(x, f"softmax{layer}")
    return net.finish(x)


def random_attention(name: str, rng: Rng) -> Draft:
    """Return a network of attention layers between fully connected ones, as in transformers."""
    net = Builder(name)
    heads, size = int(rng.choice([1, 2, 3, 4, 6, 8])), 8 * int(rng.integers(2, 9))
    tokens, width = int(np.exp(rng.uniform(2.5, 5.6))), heads * size
    x = net.input((1, tokens, width))
    for layer in range(3):
        query, key, value = (net.fully_connected(x, width, f"{which}{layer}", keep=True) for which in "qkv")
        y = attention(net, query, key, value, heads, f"attention{layer}", None)
        y = net.fully_connected(y, width, f"out{layer}", keep=True)
        x = net.affine(net.add(x, y, f"sum{layer}"), f"norm{layer}")
    return net.finish(x)


def _classifier(net: Builder, rng: Rng) -> Draft:
    x = net.input((1, 4 * int(np.exp(rng.uniform(2.0, 7.2)))))
    for layer in range(5):
        most = min(4096.0, 26_000_000 / x.shape[1])
        x = net.fully_connected(
            x, max(4, int(np.exp(rng.uniform(2.5, math.log(most))))), f"fc{layer}", activation="RELU"
        )
    return net.finish(net.softmax(x))


def _affordable(pixels: int, filters: int, depth: int) -> bool:
    weights = filters * depth
    return pixels * weights <= MOST_MACS and weights <= MOST_WEIGHTS and pixels * filters <= MOST_ELEMENTS


def _conv(walk: _Walk) -> None:
    rng, x = walk.rng, walk.x
    first = x.shape[3] == 3
    size = int(rng.choice([3, 3, 5, 7, 7, 9, 11] if first else [3, 3, 3, 3, 3, 5, 5, 7, 2]))
    shape = rng.random()
    kernel = (1, size) if shape < 0.08 and not first else (size, 1) if shape < 0.16 and not first else (size, size)
    stride = int(rng.choice([1, 2, 2, 4] if first else [1, 1, 1, 2])) if x.shape[1] >= 16 else 1
    # An earlier kernel of one row or column may have left a map that is not square.
    valid = x.shape[1] > size and rng.random() < 0.15 and x.shape[2] >= kernel[1]
    padding: Padding = "VALID" if valid else "SAME"
    depth = kernel[0] * kernel[1] * x.shape[3]
    pixels = math.ceil(x.shape[1] / stride) * math.ceil(x.shape[2] / stride)
    filters = walk.channels(min(MOST_MACS / (pixels * depth), MOST_WEIGHTS / depth, MOST_ELEMENTS / pixels))
    if first:
        filters = walk.channels(96)
    if _affordable(pixels, filters, depth):
        name = walk.name("conv")
        walk.step(walk.net.conv(x, filters, kernel, name, stride=stride, padding=padding, activation=walk.activation()))


def _pointwise(walk: _Walk, most: float = math.inf) -> None:
    x, pixels = walk.x, walk.x.shape[1] * walk.x.shape[2]
    most = min(most, MOST_MACS / (pixels * x.shape[3]), MOST_WEIGHTS / x.shape[3], MOST_ELEMENTS / pixels)
    filters = walk.channels(most)
    stride = 2 if x.shape[1] >= 8 and walk.rng.random() < 0.05 else 1
    walk.step(walk.net.conv(x, filters, 1, walk.name("point"), stride=stride, activation=walk.activation()))


def _grouped(walk: _Walk) -> None:
    x, groups = walk.x, int(walk.rng.choice([2, 4, 8]))
    pixels, each = x.shape[1] * x.shape[2], walk.channels(128)
    if x.shape[3] % groups or not _affordable(pixels, each * groups, 9 * x.shape[3] // groups):
        return
    name = walk.name("group")
    walk.step(walk.net.conv(x, each * groups, 3, name, groups=groups, activation=walk.activation()))


def _depthwise(walk: _Walk) -> None:
    rng, x = walk.rng, walk.x
    size = int(rng.choice([3, 3, 3, 3, 5, 5, 5, 7]))
    stride = 2 if x.shape[1] >= 8 and rng.random() < 0.3 else 1
    walk.step(walk.net.depthwise_conv(x, size, walk.name("depth"), stride=stride, activation=walk.activation()))


def _add(walk: _Walk) -> None:
    others = walk.seen.get(walk.x.shape, [])
    other = others[int(walk.rng.integers(len(others)))] if others else walk.x
    walk.step(walk.net.add(walk.x, other, walk.name("add"), activation=walk.activation()))


def _concat(walk: _Walk) -> None:
    x = walk.x
    fitting = [v for shape, values in walk.seen.items() for v in values if shape[:3] == x.shape[:3]]
    count = min(len(fitting), int(walk.rng.integers(1, 4)))
    chosen = [fitting[int(i)] for i in walk.rng.choice(len(fitting), count, replace=False)] if fitting else []
    channels = x.shape[3] + sum(v.shape[3] for v in chosen)
    if chosen and channels * x.shape[1] * x.shape[2] <= MOST_ELEMENTS and channels <= _WIDEST:
        walk.step(walk.net.concat([x, *chosen], walk.name("concat")))


def _pool(walk: _Walk) -> None:
    rng, x = walk.rng, walk.x
    size, stride = ((2, 2), (3, 2), (3, 1), (3, 1), (5, 1))[int(rng.integers(5))]
    if x.shape[1] < 4 * stride:
        return
    pool = walk.net.max_pool if rng.random() < 0.7 else walk.net.average_pool
    walk.step(pool(x, size, stride, walk.name("pool"), "SAME"))


def _pad(walk: _Walk) -> None:
    amount = (1, 1) if walk.rng.random() < 0.5 else (0, 1)
    walk.step(walk.net.pad(walk.x, ((0, 0), amount, amount, (0, 0)), walk.name("pad")))


def _squeeze(walk: _Walk) -> None:
    """Squeeze and excitation: the mean of each channel, two small products, and a gate."""
    x, net = walk.x, walk.net
    inner = max(8, x.shape[3] // 4)
    y = net.mean(x, walk.name("mean"), keep=True)
    y = net.conv(y, inner, 1, walk.name("squeeze"), activation="RELU")
    y = net.conv(y, x.shape[3], 1, walk.name("excite"))
    y = net.unary("LOGISTIC", y, walk.name("gate"))
    walk.step(net.binary("MUL", x, y, walk.name("scale")))


def _unary(walk: _Walk) -> None:
    kind = ("LOGISTIC", "HARD_SWISH", "TANH", "RELU", "HARD_SWISH")[int(walk.rng.integers(5))]
    walk.step(walk.net.unary(kind, walk.x, walk.name("map")))


def _affine(walk: _Walk) -> None:
    walk.step(walk.net.affine(walk.x, walk.name("affine"), walk.activation()))


def _resize(walk: _Walk) -> None:
    if 4 * math.prod(walk.x.shape) <= MOST_ELEMENTS:
        walk.step(walk.net.resize_nearest(walk.x, 2, walk.name("resize")))


def _head(walk: _Walk) -> None:
    net = walk.net
    if walk.rng.random() < 0.5 and walk.x.shape[1] > 1:
        walk.x = net.average_pool(walk.x, (walk.x.shape[1], walk.x.shape[2]), 1, "head_pool")
    else:
        walk.x = net.mean(walk.x, "head_mean", keep=True)
    units = int(walk.rng.choice([10, 100, 1000, 1001]))
    walk.x = net.softmax(net.fully_connected(walk.x, units, "head"))


# Kind → the function that adds such an operator, and its relative frequency.
_STEPS: Mapping[str, tuple[Callable[[_Walk], None], float]] = {
    "conv": (_conv, 8.0),
    "pointwise": (_pointwise, 6.0),
    "grouped": (_grouped, 0.7),
    "depthwise": (_depthwise, 4.0),
    "add": (_add, 2.0),
    "concat": (_concat, 2.0),
    "pool": (_pool, 1.5),
    "pad": (_pad, 0.5),
    "squeeze": (_squeeze, 0.5),
    "unary": (_unary, 0.7),
    "affine": (_affine, 0.3),
    "resize": (_resize, 0.1),
}

_FEW = (
    *(("conv", "pool"), ("conv", "add"), ("conv", "depthwise"), ("conv", "grouped")),
    *(("pointwise", "depthwise"), ("pointwise", "add"), ("pointwise", "concat"), ("pointwise", "unary")),
)


def network(name: str, seed: int) -> Draft:
    """Return the network of a seed.

    In each ten seeds four repeat blocks, two of them as deep as published networks, two use few kinds of operators, and
    two have dense layers.
    """
    return drawn(name, np.random.default_rng([seed, 0]), seed)


def drawn(name: str, rng: Rng, turn: int) -> Draft:
    """Return the network that comes at a turn of every ten."""
    if turn % 5 == 4:
        return random_attention(name, rng) if turn % 10 == 9 else random_dense(name, rng)
    if turn % TURNS in DEEP:
        return random_deep(name, rng)
    if turn % 5 == 1:
        return random_blocks(name, rng)
    return random_network(name, rng, kinds=_FEW[int(rng.integers(len(_FEW)))] if turn % 2 else ())
