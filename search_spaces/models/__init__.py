"""Models: where they come from, and how they are read and written."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from search_spaces.core.errors import ModelError, UsageError

if TYPE_CHECKING:
    from search_spaces.core.graph import Graph


INPUT_SHAPE = "--input-shape"
_MOST_BUILT_IN = 8
_BUILT_IN: OrderedDict[tuple[Path, int, int, str | None], Graph] = OrderedDict()
"""Models of the zoo that were read last, without their weights: studies of a campaign and reports share them."""


def parse_input_shapes(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return name → shape of texts ``name=1,224,224,3``; a name may contain ``=``.

    Raises:
        ValueError: a text has another form, or two name one input.
    """
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, sizes = text.rpartition("=")
        parts = sizes.split(",")
        if not (name and all(p.isascii() and p.isdigit() and len(p) < 11 and 0 < int(p) < 1 << 31 for p in parts)):
            raise ValueError("must be a name and sizes of at least 1, for example name=1,224,224,3")
        if name in found:
            raise ValueError(f"gives the input {name!r} two shapes")
        found[name] = tuple(int(p) for p in parts)
    return found


def load(
    source: str,
    input_shapes: Sequence[str] = (),
    *,
    signature: str | None = None,
    inputs: Path | None = None,
    custom_ops: Path | None = None,
) -> Graph:
    """Return a model of the zoo by its name, built unless it is cached, or the model of a ``.tflite`` file.

    Models of other frameworks are converted (:mod:`search_spaces.models.convert`). Names of the zoo
    (:mod:`search_spaces.models.zoo.names`) take precedence; ``./vgg16`` is always a file.

    Args:
        source: the name or the path.
        input_shapes: shapes of inputs with open dimensions, as ``name=1,224,224,3``; the file's own where left out.
        signature: key of the signature to run; the main subgraph where left out.
        inputs: an ``.npy`` or ``.npz`` file with inputs to run the model on; random ones where left out.
        custom_ops: a library with kernels of custom operators.

    Raises:
        ModelError: there is no such model or file, or the file is not a usable model.
        UsageError: an input cannot have the shape given, or the cache folder cannot be written.
    """
    from search_spaces.models.inputs import read_inputs
    from search_spaces.models.shapes import fix_shapes, size_outputs
    from search_spaces.models.source import check_custom_ops

    try:
        shapes = parse_input_shapes(input_shapes)
    except ValueError as error:
        raise UsageError(f"{INPUT_SHAPE} {' '.join(input_shapes)}: {error}") from None
    graph = fix_shapes(_read(source, signature), shapes)
    if graph.source is not None and (inputs is not None or custom_ops is not None):
        ports = [graph.tensors[t] for t in graph.inputs]
        given = tuple(read_inputs(inputs, ports, graph.name)) if inputs is not None else ()
        if custom_ops is not None:
            check_custom_ops(custom_ops)
            custom_ops = custom_ops.absolute()
        graph = replace(graph, source=replace(graph.source, given=given, custom_ops=custom_ops))
    return size_outputs(graph)


def is_built_in(source: str) -> bool:
    """Return whether a text means a model of the zoo.

    ``vgg16/model.tflite`` is a file in a folder named like a model, not a model with a size.
    """
    from search_spaces.models.zoo.names import is_name

    return is_name(source) and not (source.endswith(".tflite") or (os.sep in source and Path(source).is_file()))


def _read(source: str, signature: str | None) -> Graph:
    from search_spaces.core.recent import recent
    from search_spaces.models.litert import read_model
    from search_spaces.models.zoo.names import nearest, parse_name

    if is_built_in(source):
        from search_spaces.models.cache import cached
        from search_spaces.models.zoo import VERSION, write

        spec = parse_name(source)
        name = spec.canonical
        path = cached(name.replace("/", "-"), VERSION, partial(write, spec))
        status = path.stat()  # a file of the cache is replaced, never changed
        key = path, status.st_ino, status.st_mtime_ns, signature
        return recent(_BUILT_IN, key, partial(read_model, path, name, signature), _MOST_BUILT_IN)
    from search_spaces.models.convert import converted, kind_of

    if (kind := kind_of(source)) is not None:
        return read_model(converted(source, kind), source, signature)
    if source.endswith(".tflite") or os.sep in source or os.path.lexists(source):
        return read_model(Path(source), signature=signature)
    from search_spaces.models.plugin import built, model_names

    if source in model_names():
        return read_model(built(source), source, signature)
    hint = nearest(source) or "give a .tflite file, or a built-in model (see optimize models)"
    raise ModelError(f"no model or file is called {source!r}", hint)
