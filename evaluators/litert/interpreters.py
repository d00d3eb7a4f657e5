"""A lane's stages run by ``tflite-runtime``'s interpreters.

Each stage is an interpreter of its own that reads a file of its own. It keeps its tensors to itself, so what a stage
reads is copied in and what it gives is copied out; LiteRT's lanes work on the shared memory itself. Only lane processes
load the runtime.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

from evaluators.litert.capi import Compiled
from search_spaces.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class _Port:
    """A tensor of an interpreter: how to see it where it is now, and its size."""

    view: Callable[[], Any]
    nbytes: int

    def address(self) -> int:
        # An operator may move its output from run to run, so the place is looked up each time (1 µs).
        return int(self.view().__array_interface__["data"][0])


class Interpreters:
    """See :class:`~evaluators.litert.lane.Engine`."""

    def __init__(self) -> None:
        # NumPy, which comes along, must not start threads before the fork.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        from tflite_runtime import interpreter

        self._module: Any = interpreter

    def compile(self, header: bytes, fds: Sequence[int], signatures: int, settings: dict[str, Any]) -> Compiled:
        """See :class:`~evaluators.litert.lane.Engine`; each file is the model of a stage, and there is no header."""
        if header or len(fds) != signatures:
            raise UnavailableError("tflite-runtime takes each stage as a file")
        stages = [self._stage(fd, settings) for fd in fds]
        return Compiled(stages, tuple(stage[1:] for stage in stages), accelerated=True)

    def _stage(self, fd: int, settings: dict[str, Any]) -> tuple[Any, tuple[_Port, ...], tuple[_Port, ...]]:
        resolver = self._module.OpResolverType
        kernels = {
            "xnnpack": resolver.AUTO,
            "builtin": resolver.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
            "reference": resolver.BUILTIN_REF,
        }
        try:
            # The runtime maps the file, so it can be closed as soon as this returns.
            made = self._module.Interpreter(
                model_path=f"/proc/self/fd/{fd}",
                num_threads=settings["num_threads"],
                experimental_op_resolver_type=kernels[settings["kernels"]],
            )
            made.allocate_tensors()
        except (RuntimeError, ValueError) as error:
            raise UnavailableError(f"tflite-runtime refused: {error}") from error
        into, out = (
            tuple(_port(made, detail) for detail in side)
            for side in (made.get_input_details(), made.get_output_details())
        )
        return made, into, out

    @staticmethod
    def run_function() -> Callable[[Any, int, int, Any, int, Any], int]:
        """See :class:`~evaluators.litert.lane.Engine`."""
        copy = ctypes.memmove

        def run(handle: Any, signature: int, _n_inputs: int, inputs: Any, _n_outputs: int, outputs: Any) -> int:
            made, into, out = handle[signature]
            try:
                for port, address in zip(into, inputs, strict=True):
                    copy(port.address(), address, port.nbytes)
                made.invoke()
                for port, address in zip(out, outputs, strict=True):
                    copy(address, port.address(), port.nbytes)
            except (RuntimeError, ValueError) as error:
                raise UnavailableError(f"tflite-runtime failed: {error}") from error
            return 0

        return run

    @staticmethod
    def bind(kind: _Port, address: int, nbytes: int) -> c_void_p:
        """See :class:`~evaluators.litert.lane.Engine`."""
        if kind.nbytes != nbytes:
            raise UnavailableError(f"tflite-runtime has a tensor of {kind.nbytes} bytes where the model has {nbytes}")
        return c_void_p(address)

    def unbind(self, buffer: c_void_p) -> None:
        """See :class:`~evaluators.litert.lane.Engine`; nothing was taken."""

    def release(self, compiled: Compiled) -> None:
        """See :class:`~evaluators.litert.lane.Engine`; an interpreter goes when nobody refers to it."""


def _port(made: Any, detail: dict[str, Any]) -> _Port:
    view = made.tensor(detail["index"])
    return _Port(view, int(view().nbytes))
