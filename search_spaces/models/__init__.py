"""Models: where they come from, and how they are read and written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from search_spaces.errors import ModelError

if TYPE_CHECKING:
    from search_spaces.graph import Graph


def load(source: str) -> Graph:
    """Return a model of the zoo by its name, built where it is not in the cache yet, or read a ``.tflite`` file.

    A name of the zoo comes first; ``./vgg16`` is always a file.

    Raises:
        ModelError: there is neither such a model nor such a file, or the file is no usable model.
        UsageError: the cache folder cannot be written.
    """
    from search_spaces.models.litert import read_model
    from search_spaces.models.zoo import VERSION, ZOO, draft

    if source in ZOO:
        from search_spaces.models.cache import cached

        return read_model(cached(source, VERSION, draft(source).write), source)
    if _looks_like_path(source):
        return read_model(Path(source))
    from difflib import get_close_matches

    near = get_close_matches(source.lower(), ZOO, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"give a .tflite file, or one of: {', '.join(sorted(ZOO))}"
    raise ModelError(f"there is no model and no file called {source!r}", hint)


def _looks_like_path(source: str) -> bool:
    return source.endswith(".tflite") or os.sep in source or os.path.lexists(source)
