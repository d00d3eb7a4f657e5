"""Rounding of a number of channels under a width multiplier."""

from __future__ import annotations


def whole(channels: float) -> int:
    """Return the nearest whole number of channels, at least 1; halves go up."""
    return max(1, int(channels + 0.5))


def eights(channels: float) -> int:
    """Return the nearest multiple of 8, at least 8 and not more than 10 % below.

    The rule of MobileNet v2 and v3 and of EfficientNet. MobileNet v1 truncates instead, which is the same for
    multiples of 0.25.
    """
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded
