"""Settings of a processor: for the runtime, for its worker process, and the tolerance of its outputs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from evaluators.litert.adapters import driver_environment
from evaluators.litert.packed import machine_digest
from evaluators.litert.processor_names import STORAGES
from evaluators.litert.processors import check_cores, check_kernels, computes_with_xnnpack, find_adapter, npu_folder
from evaluators.litert.worker.runtimes import LITERT, OPENVINO, check_installed, runtime_of, version
from search_spaces.core.graph import Graph
from search_spaces.core.platform import MEMORY, Platform, Processor
from search_spaces.models.cache import cache_dir, private_folder, prune

_LOGGER = logging.getLogger("partition_optimizer")
# litert_common.h: one bit for each accelerator.
CPU, GPU, NPU = 1, 2, 4
ACCELERATORS = {"cpu": CPU, "gpu": GPU, "npu": NPU}
# litert_cpu_options.h; XNNPACK is the default.
_KERNEL_MODES = {"reference": 1, "builtin": 2}
# xnnpack_delegate.h: 0x4 forces float16, whatever the model says; the others are the defaults (int8, uint8, dynamically
# quantised layers).
_FLOAT16 = 0x4 | 0x1 | 0x2 | 0x8
# litert_gpu_options.h: float16 is the default.
_PRECISION_F32 = 2
# Errors, relative to the largest value of an output, up to which outputs of unlike processors count as equal: other
# kernels sum float32 numbers in another order; float16 has 11 bits, and errors grow from layer to layer. On an NVIDIA
# H200 the zoo's CNNs are off by 8e-4 to 2.7e-2 (VGG16, whose sums are the longest); with a wrong kernel, by 0.98.
# bfloat16 has 8 bits: on a CPU with AMX, OpenVINO's outputs of the same networks are off by 9e-3 to 6e-2.
TOLERANCE_F32, TOLERANCE_F16, TOLERANCE_BF16 = 1e-4, 5e-2, 1e-1
# Kernels that round the same sum differently are off by 1/128 in an 8-bit tensor, as in MobileNet's outputs.
TOLERANCE_INT8 = 2e-2
# A compiled stage on disk is as large as its weights. Reading one back saves a third of the time to compile a stage of
# 5 MB and a tenth for 550 MB (2.6 s); writing the latter takes another 1.4 s.
_CACHED_NBYTES, _CACHE_NBYTES = 64 << 20, 2 << 30


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """How a worker process is started.

    Attributes:
        cores: it is pinned to these.
        environment: variables that are set before the runtime loads a driver.
        accelerators: those that the runtime looks for, as a bit set.
        dispatch_folder: folder of a neural processor's library.
        runtime: the library that it runs stages with.
        limited: whether its memory is limited.
    """

    cores: tuple[int, ...]
    accelerators: int = CPU
    environment: dict[str, str] = field(default_factory=dict)
    dispatch_folder: str = ""
    runtime: str = LITERT
    limited: bool = False


def worker_starts(platform: Platform) -> dict[str, WorkerStart]:
    """Return how to start the worker of each processor of a platform.

    Raises:
        UnavailableError: this process may not use a core, or an adapter, a neural processor's library or another
            runtime is missing.
    """
    return {processor.name: _start(processor) for processor in platform.processors}


def _start(processor: Processor) -> WorkerStart:
    cores = tuple(processor.options["cores"])
    check_cores(processor.name, cores)
    check_kernels(processor.name, processor.options.get("kernels", ""))
    limited = MEMORY in processor.options
    start = WorkerStart(cores, accelerators_of(processor), runtime=runtime_of(processor), limited=limited)
    if start.runtime != LITERT:
        check_installed(start.runtime)
    elif processor.kind == "gpu":
        file = find_adapter(processor.options["adapter"]).driver_file
        return replace(start, environment=driver_environment(file))
    elif processor.kind == "npu":
        folder = str(npu_folder(processor.options.get("folder", "")))
        libraries = ", ".join(path.name for path in sorted(Path(folder).glob("libLiteRtDispatch_*.so")))
        _LOGGER.warning("processor %s: a process of its own loads %s from %s", processor.name, libraries, folder)
        return replace(start, dispatch_folder=folder)
    return start


def accelerators_of(processor: Processor) -> int:
    """Return the bit set of LiteRT's accelerators for a stage; other runtimes count as CPU: they use shared memory."""
    if runtime_of(processor) != LITERT:
        return CPU
    return ACCELERATORS[processor.kind] | (CPU if processor.options.get("fallback") else 0)


def compile_settings(
    processor: Processor, packed: Path | None, engine: str = "", *, strict: bool = False
) -> dict[str, Any]:
    """Return a runtime's options for a processor.

    Args:
        packed: packed weights; only XNNPACK uses them.
        engine: the library that runs the stages; by default the processor's runtime.
        strict: allow no fallback to the CPU, even where the processor's options do.
    """
    engine = engine or runtime_of(processor)
    if engine == OPENVINO:
        return _openvino_settings(processor, strict=strict)
    cpu: dict[str, Any] = {"num_threads": processor.options["threads"]}
    kernels = processor.options.get("kernels", "xnnpack")
    if engine != LITERT:
        return {**cpu, "kernels": kernels}
    if kernels == "f16":
        cpu["flags"] = _FLOAT16
    elif kernels != "xnnpack":
        cpu["kernel_mode"] = _KERNEL_MODES[kernels]
    elif packed is not None and processor.kind == "cpu":
        cpu["weight_cache_file_path"] = str(packed)
    accelerators = ACCELERATORS[processor.kind] if strict else accelerators_of(processor)
    settings: dict[str, Any] = {"accelerators": accelerators, "xnnpack": cpu}
    if processor.kind == "gpu":
        settings["gpu_options"] = {"preferred_device_substr": processor.options["adapter"]}
        if processor.options["precision"] == "f32":
            settings["gpu_options"]["precision"] = _PRECISION_F32
        if storage := processor.options.get("storage"):
            settings["gpu_options"]["buffer_storage_type"] = STORAGES[storage]
    return settings


def _openvino_settings(processor: Processor, *, strict: bool) -> dict[str, Any]:
    """Return the device, and the properties for compiling a stage, by OpenVINO's names."""
    options, cpu = processor.options, processor.kind == "cpu"
    device = str(options.get("device", "CPU"))
    if options.get("fallback") and not strict:
        device = f"HETERO:{device},CPU"
    properties = {"PERFORMANCE_HINT": "LATENCY"}
    if processor.kind != "npu":
        properties |= {"NUM_STREAMS": "1", "INFERENCE_PRECISION_HINT": options["precision"]}
        # Performance mode (the default) also quantises the activations of layers with int8 weights.
        properties["EXECUTION_MODE_HINT"] = "ACCURACY" if options["precision"] == "f32" else "PERFORMANCE"
    if cpu:
        properties |= {"INFERENCE_NUM_THREADS": str(options["threads"]), "ENABLE_HYPER_THREADING": "YES"}
    kernels = {"kernels": options["kernels"]} if "kernels" in options else {}
    return {"device": device, "properties": properties, **kernels}


def cache_settings(processor: Processor) -> dict[str, Any]:
    """Return the folder for a processor's compiled stages, and the largest size to keep; empty where none are kept."""
    if runtime_of(processor) != OPENVINO:
        return {}
    words = (processor.options[name] for name in ("precision", "kernels") if name in processor.options)
    if (folder := _cache_folder(cache_dir(), *words)) is None:
        return {}
    # Accelerators take seconds to compile even the smallest stage.
    return {"cache": str(folder), "cached_nbytes": _CACHED_NBYTES if processor.kind == "cpu" else 1 << 62}


@cache
def _cache_folder(root: Path, *words: str) -> Path | None:
    """Return the folder where OpenVINO keeps compiled stages of a precision and kernels, or None if it cannot be used.

    OpenVINO's file names depend on the stage alone, neither on the CPU nor on the precision: hence a folder for each.
    """
    top = private_folder(root / OPENVINO)
    if top is None:
        return None
    prune(top, "*/*.blob", _CACHE_NBYTES)
    return private_folder(top / machine_digest(version(OPENVINO), *words))


def reads_files(processor: Processor) -> bool:
    """Return whether a processor reads each stage as a model in a file of its own."""
    return runtime_of(processor) != LITERT


def may_refuse(processor: Processor) -> bool:
    """Return whether there may be operators that a processor does not support."""
    return processor.kind != "cpu" or runtime_of(processor) == OPENVINO


def packs_weights(processor: Processor) -> bool:
    """Return whether a processor computes with LiteRT's XNNPACK, whose packed weights are kept."""
    return computes_with_xnnpack(processor) and runtime_of(processor) == LITERT


def tolerance(used: Iterable[Processor], reference: Processor, graph: Graph | None = None) -> float:
    """Return the relative error that is accepted of a plan: 0 where all its processors compute like the reference.

    Otherwise 1e-4 where all compute in float32, 5e-2 where one computes in float16, 1e-1 where one does in bfloat16;
    at least 2e-2 for a graph with 8-bit integers.
    """
    reduced = {_arithmetic(reference): 0.0, "f16": TOLERANCE_F16, "bf16": TOLERANCE_BF16}
    unlike = TOLERANCE_INT8 if graph is not None and _is_quantised(graph) else TOLERANCE_F32
    return max((reduced.get(_arithmetic(processor), unlike) for processor in used), default=0.0)


def _is_quantised(graph: Graph) -> bool:
    return any(graph.tensors[t].dtype in {"int8", "uint8"} for t in graph.producer)


def _arithmetic(processor: Processor) -> str:
    if processor.kind == "npu":
        return "f16"  # most compute in 16 bits or fewer
    runtime = runtime_of(processor)
    if processor.kind == "gpu" or runtime == OPENVINO:
        precision: str = processor.options["precision"]
        own = f"{processor.kind} {runtime} {precision} {processor.options.get('kernels', '')}"
        return own if precision == "f32" else precision
    kernels = str(processor.options.get("kernels", "xnnpack"))
    return kernels if kernels == "f16" or runtime == LITERT else f"{runtime} {kernels}"
