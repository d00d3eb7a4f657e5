"""LiteRT's C API through ctypes: runs without Python's global lock (GIL), on memory that the caller provides.

Only worker processes import this module; the parent never loads the runtime. Prototypes follow the headers under
``litert/c`` of LiteRT 2.3. ``CompiledModel.run_by_index`` of the Python wrapper would hold the GIL while it runs.
"""

from __future__ import annotations

import ctypes
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluators.litert.worker.runtimes import LITERT, PACKAGES, kernel_symbol, package_folders
from evaluators.litert.worker.shared_memory import map_joined, unmap
from search_spaces.core.errors import OptimizeError, UnavailableError

_MAX_RANK = 8
# litert_environment_options.h
_TAG_COMPILER_FOLDER, _TAG_DISPATCH_FOLDER, _TAG_RUNTIME_FOLDER, _TAG_ACCELERATORS = 0, 1, 22, 24
# litert_any.h
_INTEGER, _STRING = 2, 8
# litert_common.h and litert_tensor_buffer_types.h
_READ, _WRITE = 0, 1
_WEBGPU_BUFFER = 20
_FLOAT32 = 1
_FENCE_NBYTES = 64
_IDLE_TRIES = 5


class _Any(ctypes.Structure):
    # litert_any.h: 16 bytes; the value is a union.
    _fields_ = (("kind", c_int), ("value", ctypes.c_uint64))


class _EnvironmentOption(ctypes.Structure):
    # litert_environment_options.h: 24 bytes.
    _fields_ = (("tag", c_int), ("any", _Any))


class _Layout(ctypes.Structure):
    # litert_layout.h: rank is the low 7 bits of the first word, has_strides the 8th; 68 bytes.
    _fields_ = (("bits", c_uint32), ("dimensions", c_int32 * _MAX_RANK), ("strides", c_uint32 * _MAX_RANK))


class _RankedTensorType(ctypes.Structure):
    # litert_model_types.h: 72 bytes.
    _fields_ = (("element_type", c_int32), ("layout", _Layout))


def library_path() -> Path:
    """Return the path of the runtime's shared library, without importing its Python package.

    Raises:
        UnavailableError: the runtime is not installed.
    """
    for folder in package_folders(PACKAGES[LITERT].module):
        if (path := folder / "libLiteRt.so").exists():
            return path
    raise UnavailableError("the LiteRT runtime is not installed", "run: pip install ai-edge-litert")


class Library(ABC):
    """A shared library whose functions return a status."""

    @abstractmethod
    def call(self, function: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            UnavailableError: its status is not 0.
        """

    def made(self, function: str, *arguments: Any, kind: type[Any] = c_void_p) -> Any:
        """Call a function, and return the value of type ``kind`` that it writes to its last argument."""
        found = kind()
        self.call(function, *arguments, byref(found))
        return found


class Runtime(Library):
    """The loaded library and one environment, to which everything compiled in a worker belongs."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(str(library_path()))
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.restype = c_void_p
        self._libc.malloc.argtypes = [c_size_t]
        self.environment = c_void_p()
        self._run = self.function("LiteRtRunCompiledModel")
        self._run.argtypes = [c_void_p, c_size_t, c_size_t, c_void_p, c_size_t, c_void_p]

    def start(self, accelerators: int, dispatch_folder: str = "") -> None:
        """Create the environment; called after the fork and after the worker is pinned.

        Args:
            accelerators: bit set of those to look for; a driver is loaded when something is compiled for it.
            dispatch_folder: folder of a neural processor's dispatch library.
        """
        texts = {_TAG_RUNTIME_FOLDER: str(library_path().parent), _TAG_DISPATCH_FOLDER: dispatch_folder}
        if dispatch_folder and (compiler := Path(dispatch_folder).parent / "compiler").is_dir():
            texts[_TAG_COMPILER_FOLDER] = str(compiler)
        kept = {tag: c_char_p(text.encode()) for tag, text in texts.items() if text}
        options = [_EnvironmentOption(_TAG_ACCELERATORS, _Any(_INTEGER, accelerators))]
        for tag, text in kept.items():
            options.append(_EnvironmentOption(tag, _Any(_STRING, ctypes.cast(text, c_void_p).value or 0)))
        array = (_EnvironmentOption * len(options))(*options)
        self.call("LiteRtCreateEnvironment", c_int(len(options)), array, byref(self.environment))

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function that returns a ``LiteRtStatus``.

        Raises:
            UnavailableError: the status is not 0; the text names the function and the status.
        """
        status = getattr(self._lib, function)(*arguments)
        if status != 0:
            raise UnavailableError(f"LiteRT refused: {function} returned status {status}")

    def function(self, name: str) -> Any:
        """Return a function of the library, for hot paths that check the status themselves."""
        return getattr(self._lib, name)

    def options(self, settings: dict[str, Any]) -> c_void_p:
        """Return compilation options.

        Args:
            settings: ``accelerators``, a bit set, and the settings of each accelerator under the name of its options
                (``xnnpack``: ``num_threads``, ``kernel_mode``, …; ``gpu_options``: ``precision``, …). ``custom_ops``:
                a ``library``, and names and versions of the ``operators`` whose kernels it holds.
        """
        options: c_void_p = self.made("LiteRtCreateOptions")
        self.call("LiteRtSetOptionsHardwareAccelerators", options, c_int(settings["accelerators"]))
        for name, values in settings.items():
            if name == "custom_ops":
                self._add_custom_ops(options, values)
            if name in {"accelerators", "custom_ops"}:
                continue
            # litert_cpu_options.cc and litert_gpu_options.cc read TOML, whose strings are written as in JSON.
            lines = (f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())
            payload = "".join(lines).encode() + b"\0"
            memory = self._libc.malloc(len(payload))
            ctypes.memmove(memory, payload, len(payload))
            free = ctypes.cast(self._libc.free, c_void_p)
            opaque = self.made("LiteRtCreateOpaqueOptions", c_char_p(name.encode()), c_void_p(memory), free)
            self.call("LiteRtAddOpaqueOptions", options, opaque)
        return options

    def _add_custom_ops(self, options: c_void_p, wanted: dict[str, Any]) -> None:
        """Register kernels: the library exports a ``LiteRtCustomOpKernel litert_custom_op_NAME`` for each operator."""
        ctypes.CDLL(str(library_path()), ctypes.RTLD_GLOBAL)  # the library calls its functions
        path = wanted["library"]
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise UnavailableError(f"{path} cannot be loaded: {str(error).removeprefix(f'{path}: ')}") from None
        for name, version in wanted["operators"]:
            symbol = kernel_symbol(name)
            try:
                kernel = (c_void_p * 4).in_dll(library, symbol)
            except ValueError:
                raise UnavailableError(f"{path} exports no {symbol}") from None
            arguments = (c_char_p(name.encode()), c_int(version), byref(kernel), None)
            self.call("LiteRtAddCustomOpKernelOption", options, *arguments)

    def compile(self, header: bytes, fds: Sequence[int], signatures: int, settings: dict[str, Any]) -> Compiled:
        """Compile the model that a header and files make when concatenated.

        The first ``signatures`` signatures of the model must be its first subgraphs, in the same order.

        Raises:
            UnavailableError: the runtime refuses it.
        """
        memory = map_joined(header, fds)
        try:
            return self._compile(memory, signatures, settings)
        except OptimizeError:
            unmap(*memory)
            raise

    def _compile(self, memory: tuple[int, int], signatures: int, settings: dict[str, Any]) -> Compiled:
        address, nbytes = memory
        model = self.made("LiteRtCreateModelFromBuffer", self.environment, c_void_p(address), c_size_t(nbytes))
        options = self.options(settings)
        try:
            compiled = self.made("LiteRtCreateCompiledModel", self.environment, model, options)
        except UnavailableError:
            self._lib.LiteRtDestroyModel(model)
            raise
        finally:
            self._lib.LiteRtDestroyOptions(options)
        ports = []
        for index in range(signatures):
            subgraph = self.made("LiteRtGetModelSubgraph", model, c_size_t(index))
            ports.append((self._tensor_types(subgraph, "Input"), self._tensor_types(subgraph, "Output")))
        whole = self.made("LiteRtCompiledModelIsFullyAccelerated", compiled, kind=ctypes.c_bool)
        return Compiled(self, self._run, compiled, tuple(ports), whole.value, model, memory)

    def _tensor_types(self, subgraph: c_void_p, side: str) -> tuple[_RankedTensorType, ...]:
        count = self.made(f"LiteRtGetNumSubgraph{side}s", subgraph, kind=c_size_t)
        found = (self.made(f"LiteRtGetSubgraph{side}", subgraph, c_size_t(i)) for i in range(count.value))
        return tuple(self.made("LiteRtGetRankedTensorType", tensor, kind=_RankedTensorType) for tensor in found)

    @staticmethod
    def tensor_type(element_type: int, shape: tuple[int, ...]) -> _RankedTensorType:
        """Return the runtime's description of a tensor type."""
        kind = _RankedTensorType(element_type)
        kind.layout.bits = len(shape)
        kind.layout.dimensions[: len(shape)] = shape
        return kind

    def bind(self, kind: _RankedTensorType, address: int, nbytes: int) -> c_void_p:
        """Return a tensor buffer over the caller's memory (64-byte aligned)."""
        place = c_void_p(address), c_size_t(nbytes), None
        buffer: c_void_p = self.made("LiteRtCreateTensorBufferFromHostMemory", byref(kind), *place)
        return buffer

    def unbind(self, buffer: c_void_p) -> None:
        """Release a tensor buffer, but not its memory."""
        self._lib.LiteRtDestroyTensorBuffer(buffer)

    def release(self, compiled: Compiled) -> None:
        """Release a compiled model."""
        self._lib.LiteRtDestroyCompiledModel(compiled.handle)
        self._lib.LiteRtDestroyModel(compiled.model)
        unmap(*compiled.memory)


@dataclass(frozen=True, slots=True)
class Compiled:
    """Compiled stages.

    Attributes:
        engine: the engine that compiled them.
        run: runs a stage: (handle, signature, count, inputs, count, outputs) → status; 0 means success.
        handle: first argument of ``run``.
        ports: for each signature the types of its inputs and outputs in the order of its subgraph.
        accelerated: whether the accelerator runs all operators.
        model, memory: released with it: LiteRT's model, and address and size of the mapping of its bytes.
    """

    engine: Any
    run: Callable[..., int]
    handle: Any
    ports: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]
    accelerated: bool
    model: Any = None
    memory: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor on the device and its place in the arena that all workers share."""

    buffer: c_void_p
    address: int
    nbytes: int


class Device:
    """Tensors in an accelerator's own memory: made once per plan, passed from stage to stage without a copy.

    Calls to a GPU return when the work is queued. To read a result, or to stop a clock, the caller must wait: locking
    a tensor for reading waits for it and for all work that was queued before. The fence is a tensor of 64 bytes that is
    only used for such waits.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = runtime.function("LiteRtLockTensorBuffer")
        self._lock.argtypes = [c_void_p, c_void_p, c_int]
        self._unlock = runtime.function("LiteRtUnlockTensorBuffer")
        self._unlock.argtypes = [c_void_p]
        self._fence: c_void_p | None = None
        self._idle_ns: int | None = None

    def tensor(self, compiled: Compiled, signature: int, side: str, index: int) -> tuple[c_void_p, tuple[int, int]]:
        """Make a buffer for an input or output (``side``) of a stage, of the kind that the accelerator requires.

        Returns:
            The buffer, and its kind and size, which must be equal wherever the tensor is used.
        """
        made, kind = self._runtime.made, compiled.ports[signature][0 if side == "Input" else 1][index]
        place = c_size_t(signature), c_size_t(index)
        wanted = made(f"LiteRtGetCompiledModel{side}BufferRequirements", compiled.handle, *place)
        needs = "LiteRtGetTensorBufferRequirements"
        memory = made(f"{needs}SupportedTensorBufferType", wanted, c_int(0), kind=c_int)
        nbytes = made(f"{needs}BufferSize", wanted, kind=c_size_t)
        given = self._runtime.environment, byref(kind), wanted
        return made("LiteRtCreateManagedTensorBufferFromRequirements", *given), (memory.value, nbytes.value)

    def upload(self, *copies: Copy) -> tuple[int, int, int]:
        """Copy tensors from the arena to the device; return the time (ns) to map them, copy, and give them back."""
        return self._moved(copies, _WRITE)

    def download(self, *copies: Copy) -> tuple[int, int, int]:
        """Wait for tensors and copy them to the arena; return the time (ns) to map them, copy, and give them back."""
        return self._moved(copies, _READ)

    def _moved(self, copies: Sequence[Copy], mode: int) -> tuple[int, int, int]:
        clock = time.perf_counter_ns
        mapped_ns = copied_ns = given_back_ns = 0
        for copy in copies:
            begin = clock()
            place = self._locked(copy.buffer, mode)
            mapped = clock()
            ctypes.memmove(*((place, copy.address) if mode == _WRITE else (copy.address, place)), copy.nbytes)
            copied = clock()
            self._unlocked(copy.buffer)
            mapped_ns, copied_ns = mapped_ns + mapped - begin, copied_ns + copied - mapped
            given_back_ns += clock() - copied
        return mapped_ns, copied_ns, given_back_ns

    def wait(self) -> None:
        """Wait until all queued work is done."""
        if self._fence is not None:
            self._locked(self._fence, _READ)
            self._unlocked(self._fence)

    def idle_wait_ns(self) -> int:
        """Return how long :meth:`wait` takes when nothing is queued (ns); the first call makes the fence."""
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
        wanted = self._runtime.environment, c_int(_WEBGPU_BUFFER), byref(kind), c_size_t(_FENCE_NBYTES)
        try:
            buffer: c_void_p = self._runtime.made("LiteRtCreateManagedTensorBuffer", *wanted)
        except UnavailableError:
            return None  # not a GPU: calls return when the work is done
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
