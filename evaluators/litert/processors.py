"""Processors of this machine: all cores together, each core alone, and hardware adapters.

A processor is described by plain options, which a plan file may carry to another machine; whether this machine has
what they require is checked when its worker starts (:mod:`evaluators.litert.workers`).

Workers load vendors' libraries only from folders that the user has named, on the command line or in a file.
``libraries.yaml`` in the user's configuration folder binds names, which platform files and campaigns refer to::

    libraries:
      my_npu: /opt/vendor/dispatch   # then the processor is npu:my_npu; paths are relative to this file

``PARTITION_OPTIMIZER_LIBRARIES`` names another file.
"""

from __future__ import annotations

import os
import platform as host
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from evaluators.litert.adapters import Adapter, find_adapters
from evaluators.litert.processor_names import ProcessorName, parse_processor, processor_options
from evaluators.litert.worker.openvino import computes_natively, find_devices
from evaluators.litert.worker.runtimes import LITERT, OPENVINO, PACKAGES, check_installed, package_folders
from evaluators.machine import core_quota, kernel_text
from evaluators.own_process import output_of
from search_spaces.core.allowed_code import allow, is_allowed
from search_spaces.core.errors import UnavailableError, UsageError, damage, shown
from search_spaces.core.platform import MEMORY, Platform, Processor, with_cpu
from search_spaces.core.yaml_file import Part, Word, beside, read_document

LIBRARIES = "PARTITION_OPTIMIZER_LIBRARIES"
_CPU = Path("/sys/devices/system/cpu")
_LOAD_LIMIT_S = 20.0


def local_platform() -> Platform:
    """Return the processors of this machine: the cores that this process may use, and hardware adapters.

    ``cpu`` runs a stage on all cores with one thread each; ``cpu0``, ``cpu1`` … are single cores. Cores are alike when
    the kernel reports the same capacity and the same highest clock for them. ``gpu`` is the first hardware adapter.
    Where OpenVINO is installed, ``cpu:openvino`` is all cores once more, and ``igpu:openvino`` Intel's integrated GPU.
    Where a control group limits CPU time, only as many cores are used as the quota pays for.

    Raises:
        UnavailableError: the operating system cannot pin a process to cores.
    """
    cores = fair_cores()
    names = [*(["cpu"] if len(cores) > 1 else []), *(f"cpu{core}" for core in cores)]
    found = [_cpu(name, parse_processor(name)) for name in names]
    hardware = find_adapters(software=False)
    if hardware:
        found.append(_gpu("gpu", parse_processor("gpu"), hardware[0]))
    found += _those_here(f"{names[0]}:{OPENVINO}", f"igpu:{OPENVINO}")
    return Platform(host.node() or "local", tuple(found))


def reduced_processors() -> list[Processor]:
    """Return the processors of this machine on which OpenVINO computes in bfloat16 or float16."""
    whole = "cpu" if len(fair_cores()) > 1 else f"cpu{fair_cores()[0]}"
    names = (f"{whole}:{OPENVINO}-bf16", f"{whole}:{OPENVINO}-f16", f"igpu:{OPENVINO}-f16", f"npu:{OPENVINO}")
    return _those_here(*names)


def _those_here(*names: str) -> list[Processor]:
    """Return the processors of some names, without those that this machine does not have."""
    found = []
    for name in names:
        with suppress(UnavailableError):
            found.append(make_processor(name))
    return found


def usable_cores() -> list[int]:
    """Return the cores that this process may use.

    Raises:
        UnavailableError: the operating system cannot pin a process to cores.
    """
    if sys.platform != "linux":
        raise UnavailableError(
            f"measuring requires Linux (processors are pinned to cores), this is {sys.platform}",
            "measure on a Linux machine",
        )
    return sorted(os.sched_getaffinity(0))


def fair_cores() -> list[int]:
    """Return the cores to use by default: as many as a control group's CPU quota pays for, at least one.

    Raises:
        UnavailableError: the operating system cannot pin a process to cores.
    """
    cores, quota = usable_cores(), core_quota()
    return cores if quota is None else cores[: max(1, int(quota))]


def make_processor(text: str) -> Processor:
    """Return the processor of a name; see :mod:`evaluators.litert.processor_names`.

    Raises:
        UsageError: the text is not a processor's name, or names a core that the machine does not have.
        UnavailableError: this process may not use a core, or there is no such adapter, neural processor or runtime.
    """
    name = parse_processor(text)
    if name.kind == "cpu":
        return _cpu(text, name)
    if name.runtime == OPENVINO:
        return _openvino_device(text, name)
    if name.kind == "gpu":
        return _gpu(text, name, find_adapter(name.adapter))
    return _npu(text, name)


def with_reference(platform: Platform) -> Platform:
    """Return a platform with a processor that computes with XNNPACK, as the reference for outputs.

    One that runs ``tflite-runtime`` counts; where there is none, a core is added behind the other processors.
    """
    if any(map(computes_with_xnnpack, platform.processors)):
        return platform
    core = _cpu("reference", ProcessorName("cpu", cores=(usable_cores()[0],)))
    limit = {name: value for p in platform.processors for name, value in p.options.items() if name == MEMORY}
    core = replace(core, like="reference", options={**core.options, **limit})
    return replace(platform, processors=(*platform.processors, core))


def computes_with_xnnpack(processor: Processor) -> bool:
    """Return whether a processor computes with XNNPACK, in LiteRT or ``tflite-runtime``."""
    other = "kernels" in processor.options or processor.options.get("runtime") == OPENVINO
    return processor.kind == "cpu" and not other


def check_is_here(platform: Platform) -> None:
    """Check that a platform is of this machine; a file may also describe a device for predictions only.

    Raises:
        UsageError: a processor has unknown options.
        UnavailableError: a processor is not of this machine.
    """
    for processor in platform.processors:
        if "cores" not in processor.options:
            raise UnavailableError(
                f"processor {processor.name!r} of platform {platform.name!r} is not of this machine",
                "predict with --evaluator cost-model, or name a processor of this machine in the file",
            )
        try:
            processor_options(processor.kind, processor.options)
        except (KeyError, TypeError, ValueError) as error:
            which = f"processor {processor.name!r} of platform {platform.name!r}"
            hint = "name a processor of this machine in the file"
            raise UsageError(f"{which} has options that do not fit: {damage(error)}", hint) from error


def find_adapter(word: str) -> Adapter:
    """Return the first adapter with a word in its name, or the first hardware adapter if there is no word.

    Raises:
        UnavailableError: there is none.
    """
    found = find_adapters(software=bool(word))
    for adapter in found:
        if adapter.matches(word):
            return adapter
    if word:
        names = ", ".join(repr(a.name) for a in found) or "none at all"
        raise UnavailableError(f"there is no graphics adapter {word!r}", f"Vulkan finds: {names}")
    raise UnavailableError(
        "there is no hardware graphics adapter that Vulkan can use",
        "install its driver and libvulkan1; a software adapter is used when it is named, for example gpu:swiftshader; "
        "see optimize doctor",
    )


def npu_folder(folder: str = "") -> Path:
    """Return the folder with LiteRT's dispatch library of a neural processor.

    Args:
        folder: one that the user has named, or its name in ``libraries.yaml``; "" for the runtime's own.

    Raises:
        UsageError: the user has not named the folder.
        UnavailableError: it holds no library that can be loaded.
    """
    problem = (
        f"there is no dispatch library of a neural processor (libLiteRtDispatch_*.so) in {folder or 'the runtime'}"
    )
    vendors = list(_vendor_folders())
    if folder:
        vendors = [Path(folder) if Path(folder) in vendors else library_folder(folder)]
    for candidate in vendors:
        for library in sorted(candidate.glob("libLiteRtDispatch_*.so")):
            reason = _why_not_loaded(library)
            if not reason:
                return candidate
            problem = f"the dispatch library {library.name} cannot be loaded: {reason}"
    raise UnavailableError(
        problem,
        "install the vendor's SDK for LiteRT (Qualcomm, MediaTek, Google Tensor, Intel OpenVINO), or name the folder: "
        "npu:FOLDER on the command line",
    )


def dispatch_libraries() -> list[Path]:
    """Return LiteRT's libraries for neural processors that came with it or with a vendor's SDK."""
    return [path for folder in _vendor_folders() for path in sorted(folder.glob("libLiteRtDispatch_*.so"))]


def _why_not_loaded(library: Path) -> str:
    """Return why a library cannot be loaded, or ""; tried in a separate process, since vendors' code may crash."""
    command = [sys.executable, "-I", "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", str(library)]
    try:
        output_of(command, _LOAD_LIMIT_S)
    except UnavailableError as error:
        return error.what
    return ""


def _vendor_folders() -> Iterator[Path]:
    for folder in package_folders(PACKAGES[LITERT].module):
        yield from sorted(folder.glob("vendors/*/dispatch"))


def _cpu(text: str, name: ProcessorName) -> Processor:
    mine = usable_cores()
    cores = name.cores or tuple(fair_cores())
    absent = [core for core in cores if not (_CPU / f"cpu{core}").exists() and core not in mine]
    if absent:
        raise UsageError(
            f"processor {text!r}: this machine has no core {absent[0]}",
            f"this process may use: {', '.join(map(str, mine))}",
        )
    check_cores(text, cores)
    threads = name.threads or len(cores)
    options: dict[str, Any] = {"cores": cores, "threads": min(threads, len(cores))}
    like = f"core:{_speed(cores[0])}" if len(cores) == 1 else f"cores:{','.join(sorted(map(_speed, cores)))}"
    if threads != len(cores):
        like += f":threads={threads}"
    check_kernels(text, name.kernels)
    if name.kernels != "xnnpack":
        options["kernels"] = name.kernels
        like += f":{name.kernels}"
    if name.memory_nbytes:
        options[MEMORY] = name.memory_nbytes
        like += f":memory={name.memory_nbytes}"
    if name.runtime != LITERT:
        check_installed(name.runtime)
        options["runtime"] = name.runtime
        like += f":{name.runtime}"
    if name.runtime == OPENVINO:
        _check_precision(text, name.precision)
        options["precision"] = name.precision
        like += f"-{name.precision}"
    return Processor(text, "cpu", {f"core{core}": 1.0 for core in cores}, like, options)


def check_kernels(text: str, kernels: str) -> None:
    """Check that this machine's CPU has the instructions of a processor's kernels.

    Raises:
        UnavailableError: it has not.
    """
    if kernels == "blocked" and not computes_natively(kernels):
        raise UnavailableError(
            f"processor {text!r}: this CPU has no AVX-512, which these kernels need",
            "leave out its kernels, :blocked",
        )


def check_cores(text: str, cores: Sequence[int]) -> None:
    """Check that this process may use the cores of a processor.

    Raises:
        UnavailableError: it may not; the text names them.
    """
    mine = usable_cores()
    missing = [core for core in cores if core not in mine]
    if missing:
        raise UnavailableError(
            f"processor {text!r} runs on cores that this process may not use: {', '.join(map(str, missing))}",
            f"it may use: {', '.join(map(str, mine))}",
        )


def _accelerator(text: str, name: ProcessorName, resources: dict[str, float], like: str, **options: Any) -> Processor:
    """Return a processor that is not a CPU; its worker may use any core."""
    all_options = {"cores": tuple(usable_cores()), "threads": 1, **options}
    made = Processor(text, name.kind, resources, like, all_options)
    return replace(with_cpu(made), name=text) if name.fallback else made


def _gpu(text: str, name: ProcessorName, adapter: Adapter) -> Processor:
    options: dict[str, Any] = {
        "adapter": adapter.name,
        "driver_version": adapter.driver_version,
        "precision": name.precision,
    }
    resources, like = {f"adapter {adapter.name}": 1.0}, f"{adapter.name}:{name.precision}"
    if name.storage:
        options["storage"] = name.storage
        like += f":{name.storage}"
    if adapter.kind == "software":  # it computes on cores, so it excludes processors that use them
        check_cores(text, name.cores)
        options |= {"software": True, "cores": name.cores or tuple(usable_cores())}
        resources |= {f"core{core}": 1.0 for core in options["cores"]}
        like += f":{len(name.cores)} cores" if name.cores else ""
    elif name.cores:
        raise UsageError(f"processor {text!r}: {adapter.name} does not compute on cores", f"name it gpu:{name.adapter}")
    return _accelerator(text, name, resources, like, **options)


def _check_precision(text: str, precision: str) -> None:
    cpu = next((device for device in find_devices() if device.device == "CPU"), None)
    if cpu is None:
        raise UnavailableError(f"processor {text!r}: OpenVINO does not support this CPU")
    listed = {"f32": "FP32", "f16": "FP16", "bf16": "BF16"}[precision]
    if listed not in cpu.precisions or not computes_natively(precision):
        raise UnavailableError(
            f"processor {text!r}: this CPU has no instructions for {precision}; OpenVINO would emulate it, slowly",
            "use the same processor in float32: cpu:openvino",
        )


def _openvino_device(text: str, name: ProcessorName) -> Processor:
    """Return a GPU or NPU of OpenVINO; its stages share memory with other processors' by copies that OpenVINO makes."""
    wanted = name.kind.upper()
    devices = [d for d in find_devices() if d.device.partition(".")[0] == wanted]
    found = next((d for d in devices if name.kind == "npu" or d.integrated == name.integrated), None)
    if found is None:
        listed = ", ".join(f"{d.device} ({d.name})" for d in find_devices())
        raise UnavailableError(
            f"processor {text!r}: OpenVINO finds no such device", f"it finds: {listed}; install the device's driver"
        )
    like = f"{found.name}:{OPENVINO}-{name.precision}"
    # Vulkan's name of the same adapter differs in the part in parentheses.
    maker = found.name.partition(" (")[0]
    same = (a.name for a in find_adapters(software=False) if a.name.partition(" (")[0] == maker)
    resource = f"adapter {next(same, found.name)}" if name.kind == "gpu" else f"npu {found.name}"
    options = {"runtime": OPENVINO, "precision": name.precision, "device": found.device, "adapter": found.name}
    return _accelerator(text, name, {resource: 1.0}, like, **options)


def _npu(text: str, name: ProcessorName) -> Processor:
    named = str(library_folder(name.folder, text)) if name.folder else ""
    if is_allowed(text):
        allow(named)  # the folder itself is what its worker is started with
    folder = npu_folder(named)
    vendor = next(folder.glob("libLiteRtDispatch_*.so")).stem.removeprefix("libLiteRtDispatch_")
    return _accelerator(text, name, {f"npu {vendor}": 1.0}, f"npu {vendor}", folder=str(folder))


def _speed(core: int) -> str:
    """Return the capacity and highest clock of a core, as far as the kernel reports them, to tell big from little."""
    files = (_CPU / f"cpu{core}" / name for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"))
    return "/".join(kernel_text(file) or "?" for file in files)


def libraries_file() -> Path:
    """Return the path of the file that binds names to folders; it need not exist."""
    if chosen := os.environ.get(LIBRARIES):
        return Path(chosen)
    from platformdirs import user_config_path

    return user_config_path("partition-optimizer") / "libraries.yaml"


class _Libraries(Part):
    libraries: dict[Word, Word] = Field(default_factory=dict)


def bound_folders() -> Mapping[str, Path]:
    """Return the folders that the user has bound, by name.

    Raises:
        UsageError: the file is not valid; the text begins with ``file:line``.
    """
    path = libraries_file()
    if not path.exists():
        return {}
    found = read_document(path, _Libraries, "a file of libraries").content.libraries
    return {name: beside(path, folder) for name, folder in found.items()}


def library_folder(word: str, text: str = "") -> Path:
    """Return the folder that a name, or a path, stands for.

    Args:
        word: from a processor's name or its options.
        text: the whole name of the processor; it counts as permission if the user typed it.

    Raises:
        UsageError: the user has allowed neither.
    """
    bound = bound_folders()
    if word in bound:
        return bound[word]
    if Path(word) in bound.values() or is_allowed(word) or (text and is_allowed(text)):
        return Path(word)
    raise UsageError(
        f"processor {shown(text or word)}: the library {shown(word)} would run code, and no user here has allowed it",
        f"name it in {libraries_file()}, or give --processors npu:FOLDER",
    )


def check_libraries(processor: str) -> None:
    """Check that the user has allowed the library that a processor's name requests, if any.

    Raises:
        UsageError: the user has not.
    """
    if processor.startswith("npu:") and (folder := parse_processor(processor).folder):
        library_folder(folder, processor)
