"""Weights that a limited memory of the GPU does not hold: they are copied to it again and again, ahead of their use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evaluators.cuda.devices import torch_module
from evaluators.cuda.kernels import Call
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.wording import human_bytes

TILE_NBYTES = 32 << 20
"""Of the weights that are copied at a time; products with larger matrices are computed part by part."""
_BUFFERS = 2
_LEAST_SHARE = 1 / 16


def rows_held(graph: Graph, room_nbytes: int) -> dict[int, int]:
    """Return how many rows (outputs) of matrices and filters stay on the GPU; of others all do.

    Operators before others come first. A convolution's filters stay whole or not at all.

    Raises:
        UnavailableError: the room does not suffice for anything.
    """
    matrices = {o.inputs[1]: o.kind for o in graph.operators if o.kind in {"CONV_2D", "FULLY_CONNECTED"}}
    large = {t for t, kind in matrices.items() if kind == "CONV_2D" and graph.tensors[t].nbytes > TILE_NBYTES}
    constants = (t for t, tensor in enumerate(graph.tensors) if tensor.constant)
    always = sum(graph.tensors[t].nbytes for t in constants if t not in matrices or t in large)
    least = always + _BUFFERS * TILE_NBYTES
    if room_nbytes < least:
        raise UnavailableError(
            f"{human_bytes(room_nbytes)} for weights are too few for {graph.name!r}, which needs {human_bytes(least)}",
            "give more memory=",
        )
    left, found = room_nbytes - least, {}
    for tensor, kind in matrices.items():
        if tensor in large:
            continue
        rows = graph.tensors[tensor].shape[0]
        each = max(1, graph.tensors[tensor].nbytes // rows)
        fitting = min(rows, left // each)
        few = kind == "CONV_2D" or fitting < _LEAST_SHARE * rows  # not worth a product of their own
        found[tensor] = 0 if fitting < rows and few else fitting
        left -= found[tensor] * each
    return found


class Staging:
    """Two buffers on the GPU through which weights pass: while one is used, the other is filled.

    Jobs of one owner use it, of which none run at the same time.
    """

    def __init__(self, device: str) -> None:
        torch = torch_module()
        self._buffers = [torch.empty(TILE_NBYTES // 4, device=device) for _ in range(_BUFFERS)]
        self._copies = torch.cuda.Stream() if device != "cpu" else None
        self._free: list[Any] = []  # events after which each may be filled
        self._next = 0

    def begin(self) -> None:
        """Begin a job: both buffers are free once the work before it is done."""
        if self._copies is not None:
            self._free = [torch_module().cuda.current_stream().record_event()] * _BUFFERS

    def through(self, host: Any, make: Callable[[Any], Call]) -> Call:
        """Return a call whose weights are copied from the host's memory first.

        Args:
            host: the weights, pinned.
            make: returns the call, given the weights on the GPU.
        """
        which, self._next = self._next, (self._next + 1) % _BUFFERS
        place = self._buffers[which][: host.numel()].view(host.shape)
        inner = make(place)

        def run(*given: Any) -> Any:
            if self._copies is None:
                place.copy_(host)
                return inner(*given)
            cuda = torch_module().cuda
            self._copies.wait_event(self._free[which])
            with cuda.stream(self._copies):
                place.copy_(host, non_blocking=True)
            cuda.current_stream().wait_event(self._copies.record_event())
            found = inner(*given)
            self._free[which] = cuda.current_stream().record_event()
            return found

        return run
