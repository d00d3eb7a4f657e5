"""Fast style transfer (Johnson et al. 2016, arXiv:1603.08155) with instance normalisation (arXiv:1607.08022).

Images of 480 by 640, as in CoDL (Jia et al., MobiSys 2022). Instance normalisation divides by the variance of each
image, so it cannot be folded into a convolution: it is made of the operators that a converter writes for it.
"""

from __future__ import annotations

from search_spaces.models.zoo.builder import Activation, Builder, Value, whole
from search_spaces.models.zoo.names import Spec

_RESIDUALS = 5


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add three convolutions down, five residual blocks, two transposed convolutions up; pixels are 0 to 255."""
    width = spec.width
    x = net.input((1, *spec.size, 3))
    for number, (filters, kernel, stride) in enumerate(((32, 9, 1), (64, 3, 2), (128, 3, 2)), 1):
        x = net.conv(x, whole(filters * width), kernel, f"down{number}", stride=stride)
        x = _instance_norm(net, x, f"down{number}", "RELU")
    for number in range(1, _RESIDUALS + 1):
        y = net.conv(x, x.shape[3], 3, f"residual{number}/conv1")
        y = _instance_norm(net, y, f"residual{number}/conv1", "RELU")
        y = _instance_norm(net, net.conv(y, x.shape[3], 3, f"residual{number}/conv2"), f"residual{number}/conv2")
        x = net.add(x, y, f"residual{number}/add")
    for number, filters in enumerate((64, 32), 1):
        x = net.transpose_conv(x, whole(filters * width), 3, f"up{number}")
        x = _instance_norm(net, x, f"up{number}", "RELU")
    x = _instance_norm(net, net.conv(x, 3, 9, "out"), "out")
    x = net.scalar("MUL", net.unary("TANH", x, "tanh"), 150.0, "contrast")
    return (net.scalar("ADD", x, 127.5, "pixels"),)


def _instance_norm(net: Builder, x: Value, name: str, activation: Activation = "NONE") -> Value:
    return net.normalised(x, (1, 2), f"{name}/norm", 1e-3, activation)
