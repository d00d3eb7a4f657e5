"""Small networks in PyTorch that are trained, decomposed by our own factors, and trained on; needs the extra ``train``.

A network is a stem, blocks and a head; blocks of the ResNet-like one are added to what they read. Images are 8 by 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from search_spaces.rewrites.tucker import Layer, Ranks, factor

CLASSES = 10
SIDE = 8

Choose = Callable[[Layer], Ranks | None]
"""Returns the ranks of a layer, or None to leave it alone."""


@dataclass(frozen=True, slots=True)
class Data:
    """Images ``(n, 1, 8, 8)`` and what they show."""

    train: tuple[Any, Any]
    test: tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Network:
    """Modules, and how they are put together.

    Attributes:
        modules: a list of three: stem, blocks, head.
        adds: whether what a block reads is added to what it computes.
    """

    modules: Any
    adds: bool

    def __call__(self, images: Any) -> Any:
        stem, blocks, head = self.modules
        value = stem(images)
        for block in blocks:
            value = torch.relu(block["way"](value) + block["beside"](value)) if self.adds else block["way"](value)
        return head(value)


def digits(seed: int, train_share: float) -> Data:
    """Return scikit-learn's digits, parted at random, as many of each digit on both sides as there are."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, shows = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 1, SIDE, SIDE)
    parts = train_test_split(images, shows, train_size=train_share, random_state=seed, stratify=shows)
    train, test, train_shows, test_shows = map(torch.from_numpy, parts)
    return Data((train, train_shows), (test, test_shows))


def vgg(width: int) -> Network:
    """Return four convolutions, two of ``width`` and two of twice that, with pooling after each two."""
    wide = 2 * width
    blocks = [
        [*_conv(width, width), nn.ReLU(), nn.MaxPool2d(2)],
        [*_conv(width, wide), nn.ReLU()],
        [*_conv(wide, wide), nn.ReLU(), nn.MaxPool2d(2)],
    ]
    ways = nn.ModuleList([nn.ModuleDict({"way": nn.Sequential(*block)}) for block in blocks])
    head = nn.Sequential(nn.Flatten(), nn.Linear(wide * 4, 2 * wide), nn.ReLU(), nn.Linear(2 * wide, CLASSES))
    return Network(nn.ModuleList([nn.Sequential(*_conv(1, width), nn.ReLU()), ways, head]), adds=False)


def resnet(width: int) -> Network:
    """Return two stages of two residual blocks of two convolutions each, of ``width`` and of twice that."""
    wide = 2 * width
    blocks = nn.ModuleList([_residual(*shape) for shape in ((width, width, 1), (width, width, 1), (width, wide, 2))])
    blocks.append(_residual(wide, wide, 1))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, CLASSES))
    return Network(nn.ModuleList([nn.Sequential(*_conv(1, width), nn.ReLU()), blocks, head]), adds=True)


def train(network: Network, data: Data, epochs: int, rate: float, seed: int) -> None:
    """Train with Adam, batches of 32, and a rate that falls to zero as a cosine."""
    images, shows = data.train
    order = torch.Generator().manual_seed(seed)
    steps = epochs * ceil(len(images) / 32)
    optimiser = torch.optim.Adam(network.modules.parameters(), rate)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    network.modules.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=order).split(32):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(images[batch]), shows[batch]).backward()
            optimiser.step()
            falling.step()


def accuracy(network: Network, data: Data) -> float:
    """Return the share of test images that are classified correctly."""
    images, shows = data.test
    network.modules.eval()
    with torch.no_grad():
        return float((network(images).argmax(1) == shows).float().mean())


def layers(network: Network) -> list[tuple[Any, Layer | None]]:
    """Return the modules that multiply, in order; of convolutions larger than 1 by 1 also their shape."""
    found: list[tuple[Any, Layer | None]] = []

    def take(module: Any, read: Any, written: Any) -> None:
        found.append((module, _layer(module, read[0], written, len(found))))

    multiply = [m for m in network.modules.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    hooks = [module.register_forward_hook(take) for module in multiply]
    network.modules.eval()
    with torch.no_grad():
        network(torch.zeros(1, 1, SIDE, SIDE))
    for hook in hooks:
        hook.remove()
    return found


def macs(network: Network) -> int:
    """Return the multiply-accumulates of one image."""
    total = 0
    for module, layer in layers(network):
        total += module.weight.numel() if layer is None else layer.macs()
    return total


def decompose(network: Network, choose: Choose) -> dict[str, Ranks]:
    """Put triples in the place of convolutions; return the ranks by the names of the modules."""
    shapes = {id(module): layer for module, layer in layers(network)}
    names = {id(module): name for name, module in network.modules.named_modules()}
    found: dict[str, Ranks] = {}
    for parent in list(network.modules.modules()):
        for name, child in list(parent.named_children()):
            layer = shapes.get(id(child))
            if layer is None or layer.kernel == (1, 1) or (ranks := choose(layer)) is None:
                continue
            setattr(parent, name, _triple(child, layer.check(ranks)))
            found[names[id(child)]] = ranks
    return found


def equal_macs(build: Callable[[int], Network], wanted: int, most: int) -> Network:
    """Return the network of the width whose multiply-accumulates are the nearest to what is wanted."""
    return build(min(range(1, most), key=lambda width: abs(macs(build(width)) - wanted)))


def outputs(network: Network, images: Any) -> NDArray[np.float32]:
    """Return what a network computes."""
    network.modules.eval()
    with torch.no_grad():
        found: NDArray[np.float32] = network(images).numpy()
    return found


def _conv(inputs: int, filters: int, stride: int = 1) -> Sequence[Any]:
    return nn.Conv2d(inputs, filters, 3, stride, padding=1, bias=False), nn.BatchNorm2d(filters)


def _residual(inputs: int, filters: int, stride: int) -> Any:
    way = nn.Sequential(*_conv(inputs, filters, stride), nn.ReLU(), *_conv(filters, filters))
    beside: Any = nn.Identity()
    if stride > 1 or inputs != filters:
        beside = nn.Sequential(nn.Conv2d(inputs, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))
    return nn.ModuleDict({"way": way, "beside": beside})


def _layer(module: Any, read: Any, written: Any, index: int) -> Layer | None:
    """Return the shape of a convolution."""
    if not isinstance(module, nn.Conv2d):
        return None
    height, width = module.kernel_size
    pixels = read[0, 0].numel(), written[0, 0].numel()
    return Layer(index, str(index), (height, width), 1, module.in_channels, module.out_channels, pixels)


def _triple(conv: Any, ranks: Ranks) -> Any:
    """Return the three convolutions that take the place of one."""
    kernel = conv.weight.detach().numpy().astype(np.float64).transpose(0, 2, 3, 1)
    found = factor(kernel, ranks.inputs, ranks.outputs)
    first = nn.Conv2d(conv.in_channels, ranks.inputs, 1, bias=False)
    core = nn.Conv2d(
        ranks.inputs, ranks.outputs, conv.kernel_size, conv.stride, conv.padding, conv.dilation, bias=False
    )
    last = nn.Conv2d(ranks.outputs, conv.out_channels, 1, bias=conv.bias is not None)
    with torch.no_grad():
        first.weight.copy_(torch.from_numpy(found.first[:, :, None, None]))
        core.weight.copy_(torch.from_numpy(np.ascontiguousarray(found.core.transpose(0, 3, 1, 2))))
        last.weight.copy_(torch.from_numpy(found.last[:, :, None, None]))
        if conv.bias is not None:
            last.bias.copy_(conv.bias)
    return nn.Sequential(first, core, last)
