"""Stages run by an ``Interpreter``: LiteRT's, or that of ``tflite-runtime``.

Each stage is an interpreter of its own that reads a file of its own. It keeps its tensors in its own memory, so inputs
are copied in and outputs are copied out; compiled models work on the shared memory itself, but do not run every model
that an interpreter runs (:func:`~search_spaces.models.shapes.needs_interpreter`). Only worker processes load the
runtime.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

from evaluators.litert.worker.capi import Compiled
from search_spaces.core.errors import UnavailableError


@dataclass(slots=True)
class _Port:
    """A tensor of an interpreter, and its size (bytes) once it is bound."""

    made: Any
    index: int
    nbytes: int = 0

    def fill(self, address: int) -> None:
        """Copy the tensor in."""
        held = self._view()
        ctypes.memmove(held.__array_interface__["data"][0], address, self.nbytes)
        if not held.ndim:  # the runtime returns scalars as copies only
            self.made.set_tensor(self.index, held)

    def empty(self, address: int) -> None:
        """Copy the tensor out."""
        ctypes.memmove(address, self._view().__array_interface__["data"][0], self.nbytes)

    def _view(self) -> Any:
        """Return the tensor as a view; in any run an operator may move or resize its output, so look it up (1 µs)."""
        held = self.made.tensor(self.index)()
        if not held.ndim:  # NumPy turns arrays without dimensions into scalars, which are copies
            import numpy as np

            held = np.array(held)
        if held.nbytes != self.nbytes:
            raise UnavailableError(
                f"a tensor has {held.nbytes} bytes where the plan has room for {self.nbytes}: its size depends on the "
                "inputs"
            )
        return held


class Interpreters:
    """TensorFlow Lite interpreters as an engine of a worker."""

    def __init__(self, module: str) -> None:
        self._name = module

    def load(self) -> Any:
        """Return the runtime's module."""
        # NumPy, which the runtime imports, must not start threads before a fork.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        return importlib.import_module(self._name)

    def compile(self, _header: bytes, fds: Sequence[int], _signatures: int, settings: dict[str, Any]) -> Compiled:
        """Compile stages from one file each; the header is not used."""
        stages = [self._stage(fd, settings) for fd in fds]
        ports = tuple((into, out) for _, into, out in stages)
        return Compiled(self, _run, stages, ports, accelerated=True)

    def _stage(self, fd: int, settings: dict[str, Any]) -> tuple[Any, tuple[_Port, ...], tuple[_Port, ...]]:
        module = self.load()
        resolver = module.OpResolverType
        kernels = {
            "xnnpack": resolver.AUTO,
            "f16": resolver.AUTO,
            "builtin": resolver.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
            "reference": resolver.BUILTIN_REF,
        }
        try:
            # The runtime maps the file, so it can be closed as soon as this returns.
            made = module.Interpreter(
                model_path=f"/proc/self/fd/{fd}",
                num_threads=settings["num_threads"],
                experimental_op_resolver_type=kernels[settings["kernels"]],
            )
            made.allocate_tensors()
        except (RuntimeError, ValueError) as error:
            raise UnavailableError(" ".join(str(error).split())) from error
        into, out = (
            tuple(_Port(made, int(detail["index"])) for detail in side)
            for side in (made.get_input_details(), made.get_output_details())
        )
        return made, into, out

    @staticmethod
    def bind(kind: _Port, address: int, nbytes: int) -> c_void_p:
        """Return the argument of ``Compiled.run`` for a tensor at ``address``; ``kind`` is in ``Compiled.ports``."""
        kind.nbytes = nbytes
        return c_void_p(address)

    def unbind(self, buffer: c_void_p) -> None:
        """Release what :meth:`bind` returned: nothing here."""

    def release(self, compiled: Compiled) -> None:
        """Release compiled stages: nothing here, since interpreters are garbage-collected."""


def _run(handle: Any, signature: int, _n_inputs: int, inputs: Any, _n_outputs: int, outputs: Any) -> int:
    """Copy the inputs in, invoke, and copy the outputs out."""
    made, into, out = handle[signature]
    try:
        for port, address in zip(into, inputs, strict=True):
            port.fill(address)
        made.invoke()
        for port, address in zip(out, outputs, strict=True):
            port.empty(address)
    except (RuntimeError, ValueError) as error:
        raise UnavailableError(" ".join(str(error).split())) from error
    return 0
