"""Tensors in an accelerator's own memory: made once per plan, handed from stage to stage without a copy.

Calls to a GPU return when the work is queued. Whoever wants to read a result, or to stop a clock, has to wait: a tensor
that is locked for reading is there, and so is all that was queued before it. A fence is a tensor of 64 bytes that is
locked for nothing else.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

from evaluators.litert.capi import Compiled, Runtime
from search_spaces.errors import UnavailableError

# litert_common.h and litert_tensor_buffer_types.h
_READ, _WRITE = 0, 1
_WEBGPU_BUFFER = 20
_FLOAT32 = 1
_FENCE_NBYTES = 64
_IDLE_TRIES = 5


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor of the device and its place in the arena that all lanes share."""

    buffer: c_void_p
    address: int
    nbytes: int


class Device:
    """What one lane knows of its accelerator's memory."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = runtime.function("LiteRtLockTensorBuffer")
        self._lock.argtypes = [c_void_p, c_void_p, c_int]
        self._unlock = runtime.function("LiteRtUnlockTensorBuffer")
        self._unlock.argtypes = [c_void_p]
        self._fence: c_void_p | None = None
        self._idle_ns: int | None = None

    def tensor(self, compiled: Compiled, signature: int, side: str, index: int) -> tuple[c_void_p, tuple[int, int]]:
        """Make room for an input or output (``side``) of a stage, of the kind that the accelerator wants.

        Returns:
            The buffer, and its kind and size, which must be equal wherever the tensor is used.
        """
        kind = compiled.ports[signature][0 if side == "Input" else 1][index]
        wanted, buffer = c_void_p(), c_void_p()
        self._runtime.call(
            f"LiteRtGetCompiledModel{side}BufferRequirements",
            compiled.handle,
            c_size_t(signature),
            c_size_t(index),
            byref(wanted),
        )
        memory, nbytes = c_int(), c_size_t()
        self._runtime.call(
            "LiteRtGetTensorBufferRequirementsSupportedTensorBufferType", wanted, c_int(0), byref(memory)
        )
        self._runtime.call("LiteRtGetTensorBufferRequirementsBufferSize", wanted, byref(nbytes))
        self._runtime.call(
            "LiteRtCreateManagedTensorBufferFromRequirements",
            self._runtime.environment,
            byref(kind),
            wanted,
            byref(buffer),
        )
        return buffer, (memory.value, nbytes.value)

    def upload(self, copy: Copy) -> None:
        """Copy a tensor from the arena to the device."""
        place = self._locked(copy.buffer, _WRITE)
        ctypes.memmove(place, copy.address, copy.nbytes)
        self._unlocked(copy.buffer)

    def download(self, copy: Copy) -> None:
        """Wait for a tensor and copy it to the arena."""
        place = self._locked(copy.buffer, _READ)
        ctypes.memmove(copy.address, place, copy.nbytes)
        self._unlocked(copy.buffer)

    def wait(self) -> None:
        """Wait until everything that was queued is done."""
        if self._fence is not None:
            self._locked(self._fence, _READ)
            self._unlocked(self._fence)

    def idle_wait_ns(self) -> int:
        """Return what :meth:`wait` takes when nothing is queued; the fence is made when this is first asked."""
        if self._idle_ns is None:
            self._fence = self._make_fence()
            times = []
            for _ in range(_IDLE_TRIES):
                begin = time.perf_counter_ns()
                self.wait()
                times.append(time.perf_counter_ns() - begin)
            self._idle_ns = min(times)
        return self._idle_ns

    def _make_fence(self) -> c_void_p | None:
        kind: Any = self._runtime.tensor_type(_FLOAT32, (_FENCE_NBYTES // 4,))
        buffer = c_void_p()
        try:
            self._runtime.call(
                "LiteRtCreateManagedTensorBuffer",
                self._runtime.environment,
                c_int(_WEBGPU_BUFFER),
                byref(kind),
                c_size_t(_FENCE_NBYTES),
                byref(buffer),
            )
        except UnavailableError:
            return None  # not a GPU: its calls return when they are done
        return buffer

    def _locked(self, buffer: c_void_p, mode: int) -> int:
        place = c_void_p()
        status = self._lock(buffer, byref(place), mode)
        if status or place.value is None:
            raise UnavailableError(f"the accelerator lost a tensor: LiteRtLockTensorBuffer returned status {status}")
        return place.value

    def _unlocked(self, buffer: c_void_p) -> None:
        status = self._unlock(buffer)
        if status:
            raise UnavailableError(f"the accelerator lost a tensor: LiteRtUnlockTensorBuffer returned status {status}")
