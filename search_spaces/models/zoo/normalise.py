"""Normalisations with a variance computed at run time, in the operators that a converter writes for them."""

from __future__ import annotations

from collections.abc import Sequence

from search_spaces.models.zoo.builder import BIAS_STD, Activation, Builder, Value


def normalised(
    net: Builder, x: Value, axes: Sequence[int], name: str, epsilon: float, activation: Activation = "NONE"
) -> Value:
    """Return ``(x − mean) / sqrt(variance + epsilon) · gamma + beta``, mean and variance taken over ``axes``.

    Layer normalisation takes the last axis, instance normalisation height and width. It is written as
    ``x · scale + (beta − mean · scale)`` with ``scale = gamma · rsqrt(variance + epsilon)``.
    """
    gamma = net.weight(f"{name}/gamma", x.shape[-1:], 0.1, 1.0)
    beta = net.weight(f"{name}/beta", x.shape[-1:], BIAS_STD)
    mean = net.mean(x, f"{name}/mean", axes, keep=True)
    squares = net.squared_difference(x, mean, f"{name}/squared_difference")
    variance = net.mean(squares, f"{name}/variance", axes, keep=True)
    inverse = net.unary("RSQRT", net.scalar("ADD", variance, epsilon, f"{name}/epsilon"), f"{name}/rsqrt")
    scale = net.binary("MUL", inverse, gamma, f"{name}/scale")
    scaled = net.binary("MUL", x, scale, f"{name}/scaled")
    shift = net.binary("SUB", beta, net.binary("MUL", mean, scale, f"{name}/scaled_mean"), f"{name}/shift")
    return net.binary("ADD", scaled, shift, name, activation)
