"""Built-in models, built on demand: one module per family, imported when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from search_spaces.core.errors import ModelError
from search_spaces.models.zoo.names import ZOO, Spec, parse_name

if TYPE_CHECKING:
    from search_spaces.models.zoo.builder import Builder, Draft, Value

__all__ = ["VERSION", "ZOO", "draft", "write"]

VERSION = 3  # raise it when any model's file changes, so that files in caches are built anew


def draft(name: str | Spec) -> Draft:
    """Return the float32 structure of a model by its name; weights are made when it is written.

    Raises:
        ModelError: the zoo has no such model.
    """
    from search_spaces.models.zoo.builder import Builder

    spec = parse_name(name) if isinstance(name, str) else name
    build: Callable[[Builder, Spec], tuple[Value, ...]] = import_module(f"{__name__}.{ZOO[spec.name].module}").build
    net = Builder(spec.weights_name, low_rank=spec.spectrum)
    return net.finish(*build(net, spec))


def write(spec: Spec, path: Path) -> None:
    """Build the model in the requested variant, and write it; the same bytes each time on one machine.

    Raises:
        ModelError: the model would not fit into one file.
        UnavailableError: the runtime cannot calibrate an ``:int8`` model here.
        UsageError: the folder cannot be written, or the disk is full.
    """
    from search_spaces.models.flatbuffer import MAX_NBYTES

    drafted = draft(spec)
    if spec.variant == "f16":
        from search_spaces.models.zoo.float16 import with_float16_weights

        drafted = with_float16_weights(drafted)
    if drafted.nbytes > MAX_NBYTES:  # an int8 model is made from a float32 file
        raise ModelError(
            f"{spec.canonical}: the model would take {drafted.nbytes:,} bytes; one file holds {MAX_NBYTES:,}",
            "give a smaller width or size",
        )
    if spec.variant == "int8":
        from search_spaces.models.zoo.int8 import write_int8

        write_int8(drafted, path)
    else:
        drafted.write(path)
