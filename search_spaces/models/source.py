"""Location of a model's bytes: the file, and the extent of each weight buffer in it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.core.allowed_code import is_allowed
from search_spaces.core.errors import ModelError, UsageError, reason_of
from search_spaces.core.workload import by_name
from search_spaces.models.files import file_digest

_LOGGER = logging.getLogger("partition_optimizer")


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes in a file.

    Attributes:
        offset: of the first data byte.
        nbytes: number of bytes.
        inline: whether they are a vector of the flatbuffer, with the length (``uint32``) in the 4 bytes before them;
            data behind the flatbuffer, in models of more than 2 GB, has no length there.
    """

    offset: int
    nbytes: int
    inline: bool = True


def check_custom_ops(library: Path) -> None:
    """Check that a library of custom operators may be loaded: the user has named it, and it is a file.

    Raises:
        UsageError: it may not be loaded.
    """
    if not is_allowed(str(library.absolute())):
        raise UsageError(f"--custom-ops {library}: it runs code", "name it on the command line, not in a file or study")
    if not library.is_file():
        raise UsageError(f"--custom-ops {library}: there is no such file", "give a library, for example libops.so")
    _tell_of(library.absolute())


@cache
def _tell_of(library: Path) -> None:
    _LOGGER.warning("processes of their own load %s, which has kernels of custom operators", library)


def libraries_of(texts: Sequence[str], models: Sequence[str]) -> dict[str, Path]:
    """Return model → library of ``--custom-ops`` texts in the form of :func:`~search_spaces.core.workload.by_name`.

    Raises:
        UsageError: there is no such model, or a library may not be loaded.
    """
    found = {name: Path(file).absolute() for name, file in by_name("--custom-ops", texts, models).items()}
    for library in dict.fromkeys(found.values()):
        check_custom_ops(library)
    return found


class DeferredBytes:
    """Data of a buffer that is computed once, on the first access, such as the factors of a filter.

    So the cost of a rewritten model can be predicted without its weights.

    Args:
        nbytes: number of bytes.
        compute: returns them; called on the first access.
    """

    def __init__(self, nbytes: int, compute: Callable[[], NDArray[np.uint8]]) -> None:
        self._nbytes = nbytes
        self._compute = compute

    def __len__(self) -> int:
        return self._nbytes

    def __bytes__(self) -> bytes:
        return self._found.tobytes()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._found, dtype, copy=copy)

    @cached_property
    def _found(self) -> NDArray[np.uint8]:
        found = self._compute()
        if found.nbytes != self._nbytes:
            raise ModelError(f"a buffer was to have {self._nbytes} bytes, and has {found.nbytes}")
        return found


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A ``.tflite`` file on disk whose weights are read in place, never copied into Python.

    Attributes:
        path: the file.
        nbytes: its size when it was read.
        schema: the unpacked ``ModelT`` without weight data; stage files are cut from it.
        extents: buffer index → extent of its data in the file; empty buffers are absent.
        operators: for each operator of the graph, its operators of the main subgraph, in the order of execution; empty
            where both have the same operators.
        recipes: tensor → operator of the main subgraph that computes it from constants alone.
        fixed: whether open dimensions were given sizes, or operators rewritten, so that the structure differs from the
            file's. Buffers with data but no extent were made then.
        rewritten: description of the rewrites; empty where there are none.
        given: inputs that the user gave, in the order of the model's; empty where there are none.
        signature: key of the signature whose subgraph is the main one here; "" for the file's own.
        custom_ops: a library with kernels of custom operators; only processes that run the model load it.
    """

    path: Path
    nbytes: int
    schema: Any
    extents: Mapping[int, Extent]
    operators: tuple[tuple[int, ...], ...] = ()
    recipes: Mapping[int, int] = field(default_factory=dict)
    fixed: bool = False
    rewritten: str = ""
    given: tuple[NDArray[Any], ...] = field(default=(), compare=False)
    signature: str = ""
    custom_ops: Path | None = None

    def file_operators(self, operators: Iterable[int]) -> list[int]:
        """Return the operators of the main subgraph for operators of the graph, in their order."""
        return [i for o in operators for i in self.operators[o]] if self.operators else list(operators)

    def read(self, extent: Extent) -> bytes:
        """Return the bytes of an extent.

        Raises:
            ModelError: the file is gone or unreadable.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(extent.offset)
                return file.read(extent.nbytes)
        except OSError as error:
            raise ModelError(f"{self.path}: {reason_of(error)}") from error

    def buffer_bytes(self, buffer: int) -> bytes:
        """Return the data of a buffer, in memory or in the file; raises what :meth:`read` raises."""
        extent = self.extents.get(buffer)
        return bytes(np.asarray(self.schema.buffers[buffer].data, np.uint8)) if extent is None else self.read(extent)

    def content_digest(self) -> str:
        """Return the SHA-256 (hex) of the whole file, weights included (about 0.4 s for 553 MB).

        Sizes given to open dimensions, and rewrites, are included.

        Raises:
            ModelError: the file is gone, unreadable, or no longer has the size it had.
        """
        try:
            if self.path.stat().st_size != self.nbytes:
                raise ModelError(f"{self.path}: the file changed while it was in use", "start again")
            digest = file_digest(self.path)
        except OSError as error:
            raise ModelError(f"{self.path}: {reason_of(error)}") from error
        if not self.fixed:
            return digest
        sizes = [list(t.shape) for t in self.schema.subgraphs[0].tensors]
        return hashlib.sha256(f"{digest} {sizes}{self.rewritten}{self.signature}".encode()).hexdigest()
