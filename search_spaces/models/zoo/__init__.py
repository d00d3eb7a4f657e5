"""Models that are built on demand: one module a family, imported when one of its models is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from search_spaces.models.zoo.builder import Draft

VERSION = 1  # raise it when any model's file changes, so that files in caches are built anew

# Name of the model → module, and function in it, that drafts the model of that name.
ZOO: Mapping[str, tuple[str, str]] = {
    "mobilenet_v1": ("mobilenet", "mobilenet_v1"),
    "squeezenet1_1": ("squeezenet", "squeezenet1_1"),
    "vgg11": ("vgg", "vgg"),
    "vgg16": ("vgg", "vgg"),
    "vgg19": ("vgg", "vgg"),
}


def draft(name: str) -> Draft:
    """Return the structure of a model; its weights are made when it is written.

    Raises:
        KeyError: the zoo has no such model.
    """
    module, function = ZOO[name]
    drafted: Draft = getattr(import_module(f"{__name__}.{module}"), function)(name)
    return drafted
