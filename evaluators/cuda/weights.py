"""A model's constants as PyTorch tensors: read from its file, and copied on the device for instances of their own."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from evaluators.cuda.settings import torch_module
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.models.constants import integers
from search_spaces.models.stages import Mapped


def float_constant(graph: Graph, tensor: int) -> bool:
    """Return whether a tensor is a plain float32 constant whose values stand in the model's file."""
    held = graph.tensors[tensor]
    if graph.source is None or not held.constant or held.dtype != "float32" or tensor in graph.source.recipes:
        return False
    return graph.source.schema.subgraphs[0].tensors[tensor].sparsity is None


class Weights:
    """The constants of one instance of a model, in the layout of the file (filters OHWI, matrices OI).

    Args:
        graph: with a file.
        device: ``cuda`` or ``cpu``.
        like: other weights of the model; those that it has are copied on the device instead of read again.
    """

    def __init__(self, graph: Graph, device: str, like: Weights | None = None) -> None:
        self.graph, self.device = graph, device
        self._like = like
        self._known: dict[int, Any] = {}
        self._arranged: dict[tuple[int, tuple[int, ...]], Any] = {}

    def __getitem__(self, tensor: int) -> Any:
        """Return a float32 constant.

        Raises:
            UnavailableError: it is none.
            ModelError: the file is gone or has changed.
        """
        if tensor not in self._known:
            if self._like is not None and tensor in self._like._known:  # noqa: SLF001 - of the same class
                self._known[tensor] = self._like[tensor].clone()
            else:
                self._known[tensor] = torch_module().from_numpy(self._read(tensor)).to(self.device)
        return self._known[tensor]

    def arranged(self, tensor: int, order: tuple[int, ...]) -> Any:
        """Return a constant with its axes in another order, in memory too; made once and kept.

        A captured graph holds addresses, not tensors: what it reads must be somebody's for as long as it is replayed.

        Args:
            order: which axis of the file each one is.

        Raises:
            UnavailableError: the tensor is no float32 constant.
            ModelError: the file is gone or has changed.
        """
        key = tensor, order
        if key not in self._arranged:
            self._arranged[key] = self[tensor].permute(order).contiguous()
        return self._arranged[key]

    @property
    def nbytes(self) -> int:
        """Bytes that it holds on the device."""
        return sum(int(t.numel()) * 4 for held in (self._known, self._arranged) for t in held.values())

    def whole_numbers(self, tensor: int) -> list[int]:
        """Return a constant of whole numbers (axes, paddings, shapes).

        Raises:
            UnavailableError: it is none.
        """
        found = integers(self.graph, tensor)
        if found is None:
            raise UnavailableError(f"tensor {self.graph.tensors[tensor].name!r} is not a constant of whole numbers")
        return found

    def _read(self, tensor: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        graph, held = self.graph, self.graph.tensors[tensor]
        if graph.source is None or not float_constant(graph, tensor):
            raise UnavailableError(f"tensor {held.name!r} is not a constant of float32 numbers")
        extent = graph.source.extents.get(held.buffer)
        count = prod(held.shape)
        if extent is None:
            data = bytes(np.asarray(graph.source.schema.buffers[held.buffer].data, np.uint8))
            return np.frombuffer(data, np.float32, count).reshape(held.shape).copy()
        with Mapped(graph.source) as file, file[extent.offset : extent.offset + extent.nbytes] as part:
            return np.frombuffer(part, np.float32, count).reshape(held.shape).copy()
