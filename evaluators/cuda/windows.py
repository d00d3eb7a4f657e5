"""How a window moves over an image: what SAME and VALID mean for each side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Sides = tuple[int, int, int, int]
"""Rows above and below, columns left and right."""


@dataclass(frozen=True, slots=True)
class Window:
    """A window: its size, its steps, and what is added around the image."""

    size: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    sides: Sides

    @property
    def even(self) -> bool:
        """Whether as much is added before as behind, in both directions."""
        top, bottom, left, right = self.sides
        return top == bottom and left == right

    @property
    def padding(self) -> tuple[int, int]:
        """What is added on each side, of an even window."""
        return self.sides[0], self.sides[2]


def window_of(
    options: Mapping[str, Any], size: tuple[int, int], image: tuple[int, int], more: Sides = (0, 0, 0, 0)
) -> Window:
    """Return the window of an operator.

    Args:
        size: height and width of its filter.
        image: height and width of what it reads.
        more: what an operator PAD before it adds; then the operator is VALID.
    """
    stride = int(options["stride_h"]), int(options["stride_w"])
    dilation = int(options.get("dilation_h_factor", 1)), int(options.get("dilation_w_factor", 1))
    if options["padding"] != "SAME":
        return Window(size, stride, dilation, more)
    sides = []
    for length, step, apart, taps in zip(image, stride, dilation, size, strict=True):
        missing = max(0, (-(-length // step) - 1) * step + (taps - 1) * apart + 1 - length)
        sides += [missing // 2, missing - missing // 2]
    return Window(size, stride, dilation, (sides[0], sides[1], sides[2], sides[3]))
