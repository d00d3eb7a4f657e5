"""Stages run by OpenVINO, through its C API: on the CPU, and on Intel's GPUs and NPUs.

Only worker processes load the library. Importing its Python package takes longer than compiling most stages, so it is
used only for stages that OpenVINO reads in its own model format: large ones, whose weights it then reads in place, and
those with other kernels than it chooses itself.
Prototypes follow the headers under ``openvino/c`` of OpenVINO 2026.4.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import byref, c_char_p, c_int, c_int64, c_size_t, c_void_p
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from evaluators.litert.worker.capi import Compiled, Library
from evaluators.litert.worker.runtimes import OPENVINO, PACKAGES, check_installed, package_folders
from evaluators.litert.worker.shared_memory import map_joined, unmap
from evaluators.machine import kernel_text
from evaluators.own_process import output_of, own_process
from search_spaces.core.errors import OptimizeError, UnavailableError
from search_spaces.models.files import in_pages

_QUERY_LIMIT_S = 60.0
_NATIVE = {
    # Flags of /proc/cpuinfo. OpenVINO offers bfloat16 on any CPU with AVX-512, emulated where the CPU lacks these.
    "bf16": {"amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16"},
    "f16": {"amx_fp16", "avx512_fp16", "fphp"},
    "blocked": {"avx512f"},
}
# Any priority rules out the kernels for NHWC (brgconv), which OpenVINO prefers on a CPU with AVX-512.
_BLOCKED = '<attribute name="primitives_priority" version="0" value="cpu:jit_avx512_1x1,cpu:jit_avx512" />'
_CONVOLUTION = re.compile(r'(<layer id="\d+" name="[^"]*" type="((?:Group)?Convolution)")(.*?</layer>)', re.DOTALL)
_U8 = 16  # ov_common.h: ov_element_type_e
_PARAMETER = re.compile(r'name="([^"]*)" type="Parameter"([^<>]*>\s*<data [^<>]*?)\s*/>')
_NUMBERED = re.compile(rb"(?:Group)?Convolution_([0-9]{1,18})")
_MOST_ERROR = 300  # characters of OpenVINO's own message, which may hold a whole operator's attributes


class _Shape(ctypes.Structure):
    # ov_shape.h
    _fields_ = (("rank", c_int64), ("dimensions", ctypes.POINTER(c_int64)))


class _Names(ctypes.Structure):
    # ov_core.h: ov_available_devices_t
    _fields_ = (("names", ctypes.POINTER(c_char_p)), ("size", c_size_t))


class _Kernel(ctypes.Structure):
    # ov_infer_request.h: ov_profiling_info_t
    _fields_ = (
        ("status", c_int),
        ("real_us", c_int64),
        ("cpu_us", c_int64),
        ("name", c_char_p),
        ("implementation", c_char_p),
        ("kind", c_char_p),
    )


class _Kernels(ctypes.Structure):
    # ov_infer_request.h: ov_profiling_info_list_t
    _fields_ = (("kernels", ctypes.POINTER(_Kernel)), ("size", c_size_t))


@dataclass(frozen=True, slots=True)
class Device:
    """A device that OpenVINO finds.

    Attributes:
        device: OpenVINO's name: ``CPU``, ``GPU``, ``GPU.1``, ``NPU``.
        name: full product name.
        integrated: whether it shares the CPU's memory.
        precisions: supported ones: ``FP32``, ``FP16``, ``BF16``, ``INT8``.
    """

    device: str
    name: str
    integrated: bool
    precisions: tuple[str, ...]


@cache
def find_devices() -> tuple[Device, ...]:
    """Return the devices that OpenVINO finds, queried in a separate process, since drivers may crash.

    Raises:
        UnavailableError: OpenVINO is not installed, or cannot be started.
    """
    check_installed(OPENVINO)
    try:
        found = json.loads(output_of(own_process(__name__), _QUERY_LIMIT_S))
    except UnavailableError as error:
        hint = "python -c 'import openvino' shows why"
        raise UnavailableError(f"OpenVINO cannot be started: {error.what}", hint) from error
    return tuple(Device(**entry | {"precisions": tuple(entry["precisions"])}) for entry in found)


def other_versions(libraries: Iterable[Path]) -> list[str]:
    """Return those of some libraries that link with another version of OpenVINO than the installed one, as texts.

    LiteRT's dispatch library for Intel's NPUs is one.
    """
    mine = {path.name for folder in package_folders(OPENVINO) for path in folder.glob("libs/libopenvino.so.*")}
    found = []
    for library in libraries:
        wanted = {name.decode() for name in re.findall(rb"libopenvino\.so\.[0-9]+", library.read_bytes())}
        found += [f"{library.name} requires {name}" for name in sorted(wanted - mine)]
    return found


def computes_natively(precision: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this CPU has instructions for a precision (``f32``, ``f16``, ``bf16``), or for ``blocked``."""
    if precision == "f32":
        return True
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", kernel_text(cpuinfo), re.MULTILINE)
    return flags is not None and not _NATIVE[precision].isdisjoint(flags[1].split())


@dataclass(slots=True)
class _Stage:
    """A compiled stage, the memory of its weights, and the tensors to which its request is bound."""

    model: c_void_p
    request: c_void_p
    memory: tuple[int, int] | None = None
    inputs: Any = None
    outputs: Any = None


@dataclass(frozen=True, slots=True)
class _Port:
    """Element type and shape of an input or output."""

    kind: int
    shape: tuple[int, ...]


class OpenVino(Library):
    """OpenVINO as an engine of a worker; only the library is loaded before the fork."""

    def __init__(self) -> None:
        found = sorted(path for folder in package_folders(OPENVINO) for path in folder.glob("libs/libopenvino_c.so*"))
        if not found:
            raise UnavailableError("openvino is installed without libopenvino_c.so", PACKAGES[OPENVINO].install)
        self._lib = ctypes.CDLL(str(found[0]))
        self._lib.ov_get_last_err_msg.restype = c_char_p
        self._set = {}
        for side in ("input", "output"):
            self._set[side] = getattr(self._lib, f"ov_infer_request_set_{side}_tensor_by_index")
            self._set[side].argtypes = [c_void_p, c_size_t, c_void_p]
        self._core = c_void_p()
        self._run = self._run_function()

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function that returns an ``ov_status_e``.

        Raises:
            UnavailableError: the status is not 0; the text is OpenVINO's own.
        """
        if getattr(self._lib, function)(*arguments):
            message = (self._lib.ov_get_last_err_msg() or b"").decode(errors="replace")
            raise UnavailableError(f"OpenVINO refused: {_reason(message)}")

    def core(self) -> c_void_p:
        """Return OpenVINO's core; the first call, which must come after the fork, makes it."""
        if not self._core:
            self._core = self.made("ov_core_create")
        return self._core

    def devices(self) -> list[Device]:
        """Return the devices that OpenVINO finds."""
        names = self.made("ov_core_get_available_devices", self.core(), kind=_Names)
        found = []
        for index in range(names.size):
            device = (names.names[index] or b"").decode()
            precisions = self._property(device, "OPTIMIZATION_CAPABILITIES").split()
            integrated = self._property(device, "DEVICE_TYPE") == "integrated"
            found.append(Device(device, self._property(device, "FULL_DEVICE_NAME"), integrated, tuple(precisions)))
        self._lib.ov_available_devices_free(byref(names))
        return found

    def _property(self, device: str, name: str) -> str:
        text = self.made("ov_core_get_property", self.core(), device.encode(), name.encode())
        found = ctypes.string_at(text).decode(errors="replace") if text.value else ""
        self._lib.ov_free(text)
        return found

    def compile(self, _header: bytes, fds: Sequence[int], _signatures: int, settings: dict[str, Any]) -> Compiled:
        """Compile stages from one file each, followed by a file of weights where there is one; no header is used."""
        stages: list[_Stage] = []
        ports, files = [], iter(fds)
        try:
            for weights in settings.get("weights", [{}] * len(fds)):
                stages.append(self._stage(next(files), next(files) if weights else -1, weights, settings))
                ports.append((self._ports(stages[-1], "input"), self._ports(stages[-1], "output")))
        except OptimizeError:
            self._free(stages)
            raise
        return Compiled(self, self._run, stages, tuple(ports), accelerated=True)

    def _stage(self, fd: int, source: int, weights: Mapping[str, Sequence[int]], settings: Mapping[str, Any]) -> _Stage:
        properties = dict(settings["properties"])
        nbytes = os.fstat(fd).st_size + sum(size for _, size in weights.values())
        if "cache" in settings and nbytes <= settings["cached_nbytes"]:
            properties["CACHE_DIR"] = settings["cache"]
        model, memory = c_void_p(), None
        try:
            with tempfile.TemporaryDirectory() as folder:
                link = Path(folder) / "stage.tflite"  # OpenVINO recognises formats by the file name
                link.symlink_to(f"/proc/self/fd/{fd}")
                if weights or settings.get("kernels"):
                    text, own = _as_ir(link, weights, blocked=settings.get("kernels") == "blocked")
                    memory = map_joined(own, [source] if weights else [])
                    self._read(text, memory, model)
                else:
                    self.call("ov_core_read_model", self.core(), str(link).encode(), None, byref(model))
            return self._compiled(model, settings["device"], properties, memory)
        except UnavailableError:
            if memory is not None:
                unmap(*memory)
            raise
        finally:
            self._lib.ov_model_free(model)

    def _compiled(
        self, model: c_void_p, device: str, properties: Mapping[str, str], memory: tuple[int, int] | None
    ) -> _Stage:
        compiled = c_void_p()
        texts = [c_char_p(text.encode()) for pair in properties.items() for text in pair]
        count = c_size_t(len(texts))
        self.call("ov_core_compile_model", self.core(), model, device.encode(), count, byref(compiled), *texts)
        try:
            request = self.made("ov_compiled_model_create_infer_request", compiled)
        except UnavailableError:
            self._lib.ov_compiled_model_free(compiled)
            raise
        return _Stage(compiled, request, memory)

    def _read(self, text: bytes, memory: tuple[int, int], model: c_void_p) -> None:
        """Read a model whose constants lie in ``memory``, where they stay."""
        address, nbytes = memory
        tensor = self._tensor(_U8, (nbytes,), address)
        try:
            found = c_char_p(text), c_size_t(len(text)), tensor, byref(model)
            self.call("ov_core_read_model_from_memory_buffer", self.core(), *found)
        finally:
            self.unbind(tensor)

    def _ports(self, stage: _Stage, side: str) -> tuple[_Port, ...]:
        count = self.made(f"ov_compiled_model_{side}s_size", stage.model, kind=c_size_t)
        found = []
        for index in range(count.value):
            port = self.made(f"ov_compiled_model_{side}_by_index", stage.model, c_size_t(index))
            try:
                kind = self.made("ov_port_get_element_type", port, kind=c_int)
                shape = self.made("ov_const_port_get_shape", port, kind=_Shape)
                found.append(_Port(kind.value, tuple(shape.dimensions[: shape.rank])))
                self._lib.ov_shape_free(byref(shape))
            finally:
                self._lib.ov_output_const_port_free(port)
        return tuple(found)

    def _run_function(self) -> Callable[[Any, int, int, Any, int, Any], int]:
        """Return a function that runs a stage, bound to the given tensors (:class:`~.capi.Compiled`)."""
        infer = self._lib.ov_infer_request_infer
        infer.argtypes = [c_void_p]
        bind = self._bind

        def run(handle: Sequence[_Stage], signature: int, _n: int, inputs: Any, _m: int, outputs: Any) -> int:
            stage = handle[signature]
            bound = stage.inputs is inputs and stage.outputs is outputs
            if not bound and (status := bind(stage, inputs, outputs)):
                return status
            return int(infer(stage.request))

        return run

    def _bind(self, stage: _Stage, inputs: Any, outputs: Any) -> int:
        stage.inputs = stage.outputs = None
        for side, tensors in (("input", inputs), ("output", outputs)):
            for index, tensor in enumerate(tensors):
                if status := self._set[side](stage.request, index, tensor):
                    return int(status)
        stage.inputs, stage.outputs = inputs, outputs
        return 0

    def bind(self, kind: _Port, address: int, nbytes: int) -> c_void_p:
        """Return the argument of ``Compiled.run`` for a tensor at ``address``; ``kind`` is in ``Compiled.ports``.

        It is a tensor over the memory, without a copy.
        """
        tensor = self._tensor(kind.kind, kind.shape, address)
        size = self.made("ov_tensor_get_byte_size", tensor, kind=c_size_t)
        if size.value != nbytes:
            self.unbind(tensor)
            raise UnavailableError(f"OpenVINO has a tensor of {size.value} bytes where the model has {nbytes}")
        return tensor

    def _tensor(self, kind: int, shape: Sequence[int], address: int) -> c_void_p:
        given = _Shape(len(shape), (c_int64 * len(shape))(*shape))
        tensor: c_void_p = self.made("ov_tensor_create_from_host_ptr", c_int(kind), given, c_void_p(address))
        return tensor

    def unbind(self, buffer: c_void_p) -> None:
        """Release what :meth:`bind` returned, but not its memory."""
        self._lib.ov_tensor_free(buffer)

    def kernels(self, compiled: Compiled) -> list[tuple[str, float]]:
        """Return kind and mean time (s) of each kernel in all runs of the first stage, compiled with ``PERF_COUNT``.

        Convolutions are in the model's order, the others in that of execution.
        """
        found = self.made("ov_infer_request_get_profiling_info", compiled.handle[0].request, kind=_Kernels)
        try:
            kernels = found.kernels[: found.size]
            return [
                ((kernels[i].kind or b"").decode(), kernels[i].real_us * 1e-6)
                for i in in_model_order([k.name or b"" for k in kernels])
            ]
        finally:
            self._lib.ov_profiling_info_list_free(byref(found))

    def release(self, compiled: Compiled) -> None:
        """Release compiled stages."""
        self._free(compiled.handle)

    def _free(self, stages: Sequence[_Stage]) -> None:
        for stage in stages:
            self._lib.ov_infer_request_free(stage.request)
            self._lib.ov_compiled_model_free(stage.model)
            if stage.memory is not None:
                unmap(*stage.memory)


def in_model_order(names: Sequence[bytes]) -> list[int]:
    """Return the indices of layers, with convolutions in the order in which the front end has numbered them.

    It numbers them as it reads the model; OpenVINO runs a short branch before a longer one that precedes it.
    """
    numbers = {i: int(found[1]) for i, name in enumerate(names) if (found := _NUMBERED.fullmatch(name))}
    places = dict(zip(numbers, sorted(numbers, key=numbers.__getitem__), strict=True))
    return [places.get(i, i) for i in range(len(names))]


def _reason(text: str) -> str:
    """Return the reason in an error message of OpenVINO, without its source positions."""
    lines = map(str.strip, text.splitlines())
    reasons = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return (reasons[0] if reasons else "it gives no reason")[:_MOST_ERROR]


@cache
def _python_core() -> Any:
    import openvino  # takes a quarter of a second

    return openvino.Core()


def _as_ir(path: Path, weights: Mapping[str, Sequence[int]], *, blocked: bool) -> tuple[bytes, bytes]:
    """Return a model in OpenVINO's own format (IR), with some of its inputs replaced by constants.

    Args:
        weights: name of an input → offset and size in a file that is mapped behind the constants.
        blocked: require kernels for blocked layouts (nChw16c) where they are fast.

    Returns:
        The XML text, and the model's other constants, padded to whole pages.
    """
    text, constants = path.with_name("stage.xml"), path.with_name("stage.bin")
    try:
        import openvino

        openvino.serialize(_python_core().read_model(path), text, constants)
    except (ImportError, RuntimeError) as error:
        raise UnavailableError(f"OpenVINO refused: {_reason(str(error))}") from error
    own = constants.read_bytes()
    own = own.ljust(max(in_pages(len(own)), in_pages(1)), b"\0")
    at = {name: f'offset="{len(own) + first}" size="{nbytes}"' for name, (first, nbytes) in weights.items()}

    def as_constant(found: re.Match[str]) -> str:
        name, data = found.groups()
        return f'name="{name}" type="Const"{data} {at[name]} />' if name in at else found[0]

    found = text.read_text(encoding="utf-8", errors="surrogateescape")  # names of tensors are arbitrary bytes
    found = _PARAMETER.sub(as_constant, with_blocked_kernels(found) if blocked else found)
    return found.encode(errors="surrogateescape"), own


def with_blocked_kernels(model: str) -> str:
    """Return an IR whose convolutions require kernels for blocked layouts, where these are fast.

    None is fast for dilated convolutions, groups of more than one channel, and channels that do not fill vectors;
    8-bit kernels have layouts of their own.
    """
    if 'type="FakeQuantize"' in model:
        return model

    def with_priority(layer: re.Match[str]) -> str:
        head, kind, body = layer.groups()
        dilations = re.search(r'dilations="([^"]*)"', body)
        ports = re.findall(r"<port [^<>]*>(.*?)</port>", body, re.DOTALL)
        shape = [int(size) for size in re.findall(r"<dim>(\d+)</dim>", ports[1])] if len(ports) > 1 else []
        # (groups,) channels out, channels in, height, width
        depthwise = kind == "GroupConvolution" and shape[1:3] == [1, 1]
        fills = kind == "Convolution" and len(shape) == 4 and (shape[1] <= 4 or shape[1] % 8 == 0)
        if not (depthwise or fills) or dilations is None or set(dilations[1].split(", ")) != {"1"}:
            return layer[0]
        if "<rt_info>" in body:
            return f"{head}{body}".replace("<rt_info>", f"<rt_info>{_BLOCKED}", 1)
        return f"{head}{body}".replace("<input>", f"<rt_info>{_BLOCKED}</rt_info><input>", 1)

    return _CONVOLUTION.sub(with_priority, model)


def main() -> int:
    """Write the devices to standard output as JSON."""
    try:
        found = [asdict(device) for device in OpenVino().devices()]
    except OptimizeError as error:
        sys.stderr.write(error.what)
        return 1
    sys.stdout.write(json.dumps(found))
    return 0
