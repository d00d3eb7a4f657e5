"""VGG (Simonyan and Zisserman 2014, arXiv:1409.1556), configurations A, D and E."""

from __future__ import annotations

from search_spaces.models.zoo.builder import Builder, Draft

# Convolutions in each of the five blocks.
_BLOCKS = {
    "vgg11": (1, 1, 2, 2, 2),
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
}
_FILTERS = (64, 128, 256, 512, 512)


def vgg(name: str) -> Draft:
    """Return the configuration ``name``: 3 by 3 convolutions, 2 by 2 pooling, three fully connected layers, softmax."""
    net = Builder(name)
    x = net.input((1, 224, 224, 3))
    for block, (count, filters) in enumerate(zip(_BLOCKS[name], _FILTERS, strict=True), 1):
        for layer in range(1, count + 1):
            x = net.conv(x, filters, 3, f"conv{block}_{layer}", activation="RELU")
        x = net.max_pool(x, 2, 2, f"pool{block}")
    x = net.fully_connected(x, 4096, "fc6", activation="RELU")
    x = net.fully_connected(x, 4096, "fc7", activation="RELU")
    x = net.fully_connected(x, 1000, "fc8")
    return net.finish(net.softmax(x))
