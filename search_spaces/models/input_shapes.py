"""Shapes of inputs as a person writes them: ``name=1,224,224,3``."""

from __future__ import annotations

from collections.abc import Iterable

OPTION = "--input-shape"


def parse_input_shapes(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return name → shape; a name may hold ``=`` itself.

    Raises:
        ValueError: a text is no such thing, or names an input again.
    """
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, sizes = text.rpartition("=")
        parts = sizes.split(",")
        if not (name and all(p.isascii() and p.isdigit() and len(p) < 11 and 0 < int(p) < 1 << 31 for p in parts)):
            raise ValueError("must be a name and sizes of at least 1, as name=1,224,224,3")
        if name in found:
            raise ValueError(f"gives the input {name!r} two shapes")
        found[name] = tuple(int(p) for p in parts)
    return found
