"""What a processor's options mean: to the runtime, to the process of its lane, and for how exact its outputs are."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evaluators.litert import tflite
from evaluators.litert.adapters import driver_environment
from evaluators.litert.processors import check_cores, find_adapter, npu_folder
from search_spaces.platform import Platform, Processor

INTERPRETER = "interpreter"
LITERT = "litert"
_LOGGER = logging.getLogger("partition_optimizer")
# litert_common.h: one bit for each accelerator.
CPU, GPU, NPU = 1, 2, 4
ACCELERATORS = {"cpu": CPU, "gpu": GPU, "npu": NPU}
# litert_cpu_options.h; XNNPACK is the default.
_KERNEL_MODES = {"reference": 1, "builtin": 2}
# xnnpack_delegate.h: float16 is computed with, whatever the model says; the others are what is on by itself (int8,
# uint8, dynamically quantised layers).
_FLOAT16 = 0x4 | 0x1 | 0x2 | 0x8
# litert_gpu_options.h: float16 is the default.
_PRECISION_F32 = 2
# Errors relative to the largest value of an output, up to which outputs of unlike processors count as the same: other
# kernels add float32 numbers up in another order; float16 has 11 bits, and errors grow from layer to layer. On an
# NVIDIA H200 the zoo's CNNs are off by 8e-4 to 2.7e-2 (VGG16, whose sums are the longest), and a wrong kernel by 0.98.
TOLERANCE_F32, TOLERANCE_F16 = 1e-4, 5e-2


@dataclass(frozen=True, slots=True)
class LaneStart:
    """What the process of a lane is started with.

    Attributes:
        cores: it is pinned to these.
        environment: variables set before the runtime sees any driver.
        accelerators: what the runtime looks for, as a bit set.
        dispatch_folder: where a neural processor's library lies.
        runtime: the library that it runs stages with.
    """

    cores: tuple[int, ...]
    accelerators: int = CPU
    environment: dict[str, str] = field(default_factory=dict)
    dispatch_folder: str = ""
    runtime: str = LITERT

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def lane_starts(platform: Platform) -> dict[str, LaneStart]:
    """Return how to start each lane of a platform.

    Raises:
        UnavailableError: this process may not use a core, or an adapter, a neural processor's library or the other
            runtime is not there.
    """
    starts = {}
    for processor in platform.processors:
        cores = tuple(processor.options["cores"])
        check_cores(processor.name, cores)
        accelerators = accelerators_of(processor)
        if processor.kind == "gpu":
            file = find_adapter(processor.options["adapter"]).driver_file
            starts[processor.name] = LaneStart(cores, accelerators, driver_environment(file))
        elif processor.kind == "npu":
            folder = str(npu_folder(processor.options.get("folder", "")))
            libraries = ", ".join(path.name for path in sorted(Path(folder).glob("libLiteRtDispatch_*.so")))
            _LOGGER.warning("processor %s: a process of its own loads %s from %s", processor.name, libraries, folder)
            starts[processor.name] = LaneStart(cores, accelerators, dispatch_folder=folder)
        elif tflite.runs(processor):
            tflite.check_installed()
            starts[processor.name] = LaneStart(cores, runtime=tflite.RUNTIME)
        else:
            starts[processor.name] = LaneStart(cores)
    return starts


def accelerators_of(processor: Processor) -> int:
    """Return the bit set of the accelerators that a stage may run on."""
    return ACCELERATORS[processor.kind] | (CPU if processor.options.get("fallback") else 0)


def compile_settings(processor: Processor, packed: Path | None, engine: str = LITERT) -> dict[str, Any]:
    """Return the runtime's options for a lane; packed weights are XNNPACK's, other kernels do not know them."""
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
    settings: dict[str, Any] = {"accelerators": accelerators_of(processor), "xnnpack": cpu}
    if processor.kind == "gpu":
        settings["gpu_options"] = {"preferred_device_substr": processor.options["adapter"]}
        if processor.options["precision"] == "f32":
            settings["gpu_options"]["precision"] = _PRECISION_F32
    return settings


def packs_weights(processor: Processor) -> bool:
    """Return whether a lane computes with LiteRT's XNNPACK, whose packed weights are kept."""
    return computes_with_xnnpack(processor) and not tflite.runs(processor)


def computes_with_xnnpack(processor: Processor) -> bool:
    """Return whether a lane computes with XNNPACK, of whichever runtime."""
    return processor.kind == "cpu" and processor.options.get("kernels", "xnnpack") == "xnnpack"


def tolerance(used: Iterable[Processor], reference: Processor) -> float:
    """Return the relative error that is accepted of a plan: none where all its processors compute like the reference.

    Otherwise 1e-4 where all compute in float32, and 5e-2 where one computes in float16.
    """
    found = 0.0
    for processor in used:
        if "f16" in (_arithmetic(processor), _arithmetic(reference)):
            return TOLERANCE_F16
        if _arithmetic(processor) != _arithmetic(reference):
            found = TOLERANCE_F32
    return found


def _arithmetic(processor: Processor) -> str:
    if processor.kind == "gpu":
        precision: str = processor.options["precision"]
        return precision if precision == "f16" else f"gpu {precision}"
    if processor.kind == "npu":
        return "f16"  # most compute in 16 bits or fewer
    kernels = str(processor.options.get("kernels", "xnnpack"))
    return f"{tflite.RUNTIME} {kernels}" if tflite.runs(processor) else kernels
