"""The names of processors on the command line: ``cpu0-3:threads=2``, ``gpu:f32``.

::

    cpu                  all cores that this process may use and has CPU time for, a thread each
    cpu2                 core 2
    cpu0-3+6             cores 0 to 3 and 6
    cpu0-3:threads=2     two threads that move among these cores
    cpu1:builtin         the runtime's own kernels instead of XNNPACK's; also :reference
    cpu1:f16             XNNPACK's kernels in float16, where the processor has them
    cpu1:tflite-runtime  run by tflite-runtime instead of LiteRT
    cpu:openvino         run by OpenVINO in float32; also cpu0-3:threads=2:openvino and any other core set
    cpu:openvino-bf16    in bfloat16; also openvino-f16; where the CPU has instructions for it
    cpu:openvino:blocked OpenVINO's kernels for blocked layouts, which it does not choose itself on a CPU with AVX-512;
                         in float32
    cpu:memory=400MB     with so much memory for the processes of all such processors; weights that do not fit are read
                         from the disk again and again
    igpu:openvino        Intel's integrated GPU, run by OpenVINO in float32; igpu:openvino-f16 in float16
    gpu:openvino         Intel's discrete GPU, likewise
    npu:openvino         Intel's NPU, run by OpenVINO; it computes in float16
    gpu                  the first hardware adapter, computing in float16
    gpu:f32              in float32
    gpu:f32:textures     with tensors in textures; also buffers; by default LiteRT chooses
    gpu:WORD             the adapter with this word in its name; software adapters (swiftshader, lavapipe) need it
    gpu4-15:swiftshader  a software adapter on these cores, so that others are left to the CPU
    npu                  the neural processor whose dispatch library the vendor's SDK brought
    npu:NAME             the one whose library lies in a folder that the user named (:mod:`.processors`)
    npu:FOLDER           the one whose library lies in this folder; only on the command line
    gpu+cpu              LiteRT's own placement: operators that the adapter does not support run on all usable cores,
                         which are part of this processor; also gpu+cpu:f32, npu+cpu, gpu4-15+cpu:swiftshader
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from evaluators.litert.worker.runtimes import LITERT, OPENVINO, PRECISIONS, TFLITE
from search_spaces.core.errors import UsageError
from search_spaces.core.platform import MEMORY, memory_word
from search_spaces.core.wording import plural

Kernels = Literal["xnnpack", "builtin", "reference", "f16", "blocked"]

KERNELS: tuple[Kernels, ...] = ("xnnpack", "builtin", "reference", "f16", "blocked")
GPU_PRECISIONS = ("f16", "f32")
STORAGES = {"buffers": 1, "textures": 2}
"""Word in a GPU's name → LiteRT's number (litert_gpu_options.h, buffer_storage_type)."""
RUNTIMES = {TFLITE: (TFLITE, ""), OPENVINO: (OPENVINO, "f32")} | {
    f"{OPENVINO}-{precision}": (OPENVINO, precision) for precision in PRECISIONS[1:]
}
"""Word in a processor's name → the runtime, and its precision."""
BOTH = "+cpu"
MAX_CORE, _LEAST_NBYTES = 1 << 16, 10**6
_HEAD = re.compile(r"(cpu|i?gpu|npu)([0-9]+(?:[-+][0-9]+)*)?(\+cpu)?")
_DEVICE = re.compile(r"(?:GPU|NPU)(?:\.[0-9]{1,3})?")
_HINT = "use names like cpu, cpu0, cpu0-3:threads=2, cpu:openvino, gpu, gpu:f32, gpu:swiftshader, npu"


@dataclass(frozen=True, slots=True)
class ProcessorName:
    """What a processor's name requests.

    Attributes:
        cores: for a CPU or a software adapter; empty for all that the process may use.
        threads: for a CPU; 0 for one per core.
        kernels: for a CPU.
        runtime: the library that runs its stages.
        precision: for a GPU, and for OpenVINO.
        integrated: for a GPU of OpenVINO.
        storage: for a GPU, where LiteRT keeps tensors; "" where it chooses.
        adapter: for a GPU, a word of its name; "" for the first hardware adapter.
        folder: for an NPU, the folder of its dispatch library, or the user's name for it; "" for the runtime's folder.
        fallback: whether LiteRT places operators that an accelerator does not support on the CPU.
        memory_nbytes: for a CPU, the memory of its process; 0 for as much as there is.
    """

    kind: Literal["cpu", "gpu", "npu"]
    cores: tuple[int, ...] = ()
    threads: int = 0
    kernels: Kernels = "xnnpack"
    runtime: str = LITERT
    precision: str = ""
    integrated: bool = False
    storage: str = ""
    adapter: str = ""
    folder: str = ""
    fallback: bool = False
    memory_nbytes: int = 0


def parse_processor(text: str) -> ProcessorName:
    """Parse a processor's name.

    Raises:
        UsageError: the name is not valid; the text says which part is wrong.
    """
    head, *words = text.split(":")
    match = _HEAD.fullmatch(head)
    if match is None:
        raise UsageError(f"there is no processor {text!r}", _HINT)
    device, numbers, fallback = match[1], match[2] or "", match[3] == BOTH
    if device == "cpu" and not fallback:
        return _cpu(text, numbers, words)
    if any(memory_word(word) is not None for word in words):
        raise UsageError(
            f"processor {text!r}: LiteRT's GPUs and NPUs have no limit of memory", "CUDA's have: --evaluator cuda"
        )
    named = any(word not in {*GPU_PRECISIONS, *STORAGES, *RUNTIMES} for word in words)
    if device == "cpu" or (numbers and not (device == "gpu" and named)):
        raise UsageError(
            f"processor {text!r}: numbers are cores, of a CPU or a software adapter",
            "name an adapter by a word: gpu:nvidia",
        )
    kind: Literal["gpu", "npu"] = "npu" if device == "npu" else "gpu"
    runtime, precision = RUNTIMES.get(words[0], (LITERT, "")) if len(words) == 1 else (LITERT, "")
    if runtime == OPENVINO:
        if kind == "npu" and words[0] != OPENVINO:
            raise UsageError(f"processor {text!r}: an NPU computes in float16", f"name it npu:{OPENVINO}")
        if precision == "bf16":
            raise UsageError(f"processor {text!r}: a GPU has no bfloat16", f"name it {head}:{OPENVINO}-f16")
        computes = "f16" if kind == "npu" else precision
        return ProcessorName(kind, runtime=runtime, precision=computes, integrated=device == "igpu", fallback=fallback)
    if device == "igpu":
        raise UsageError(f"processor {text!r}: only OpenVINO has integrated GPUs", f"name it igpu:{OPENVINO}")
    if kind == "npu":
        if len(words) > 1:
            raise UsageError(f"processor {text!r}: names two folders", _HINT)
        return ProcessorName("npu", folder="".join(words), fallback=fallback)
    precisions = [word for word in words if word in GPU_PRECISIONS]
    storages = [word for word in words if word in STORAGES]
    adapters = [word for word in words if word not in {*GPU_PRECISIONS, *STORAGES}]
    if max(map(len, (precisions, storages, adapters))) > 1 or not all(words):
        what = "takes at most one precision, one of buffers and textures, and one word of an adapter's name"
        raise UsageError(f"processor {text!r}: {what}", _HINT)
    return ProcessorName(
        "gpu",
        parse_cores(numbers) if numbers else (),
        precision="".join(precisions) or "f16",
        storage="".join(storages),
        adapter="".join(adapters),
        fallback=fallback,
    )


def processor_options(kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a processor that a file describes, checked against harmful values such as 10,000 threads.

    The file cannot choose the library that is loaded: adapters are looked up by name, and a neural processor's library
    in the runtime's own folder.

    Raises:
        KeyError, TypeError, ValueError: an option is missing or not valid.
    """
    cores = tuple(int(core) for core in data["cores"])
    threads = int(data["threads"])
    if not cores or len(set(cores)) != len(cores) or not 0 <= min(cores) <= max(cores) < MAX_CORE:
        raise ValueError(f"cores {reprlib.repr(data['cores'])} are not different core numbers")
    if not 1 <= threads <= len(cores):
        raise ValueError(f"{reprlib.repr(threads)} threads on {plural(len(cores), 'core')}")
    options: dict[str, Any] = {"cores": cores, "threads": threads}

    def take(name: str, known: Collection[str], what: str) -> None:
        """Take an option that must be one of some words."""
        if data[name] not in known:
            raise ValueError(f"{what} {reprlib.repr(data[name])}")
        options[name] = data[name]

    if MEMORY in data:
        if kind != "cpu" or not isinstance(data[MEMORY], int) or data[MEMORY] < _LEAST_NBYTES:
            raise ValueError(f"memory of {reprlib.repr(data[MEMORY])} bytes")
        options[MEMORY] = data[MEMORY]
    if data.get("kernels", "xnnpack") != "xnnpack":
        take("kernels", KERNELS, "unknown kernels")
    if "runtime" in data:
        take("runtime", (TFLITE, OPENVINO) if kind == "cpu" else (OPENVINO,), "unknown runtime")
    if options.get("runtime") == OPENVINO:
        take("precision", PRECISIONS if kind == "cpu" else GPU_PRECISIONS, "unknown precision")
        if kind != "cpu":
            if not isinstance(data["device"], str) or not _DEVICE.fullmatch(data["device"]):
                raise ValueError(f"unknown device {reprlib.repr(data['device'])}")
            options |= {"device": data["device"], "adapter": str(data["adapter"])}
    elif kind == "gpu":
        if data["precision"] not in GPU_PRECISIONS or not isinstance(data["adapter"], str) or not data["adapter"]:
            raise ValueError(f"unknown adapter {reprlib.repr(data['adapter'])}")
        options |= {"precision": data["precision"], "adapter": data["adapter"]}
        if "storage" in data:
            take("storage", STORAGES, "unknown storage")
    known = {*KERNELS} - {"blocked"}
    if options.get("runtime") == OPENVINO:
        known = {"blocked"} if kind == "cpu" and options["precision"] == "f32" else set()
    if "kernels" in options and options["kernels"] not in known:
        raise ValueError(f"kernels {options['kernels']}, which its runtime does not have")
    if kind != "cpu":
        options["fallback"] = data.get("fallback") is True
    return options


def parse_cores(text: str) -> tuple[int, ...]:
    """Parse ``0-3+6`` as ``(0, 1, 2, 3, 6)``.

    Raises:
        UsageError: the text names no cores, or one twice.
    """
    cores: list[int] = []
    for part in text.split("+"):
        ends = part.split("-")
        if not 1 <= len(ends) <= 2 or not all(re.fullmatch("[0-9]{1,5}", end) for end in ends):
            raise UsageError(f"cores {text!r}: {part!r} is neither a core nor a range like 0-3")
        first, last = int(ends[0]), int(ends[-1])
        if not first <= last < MAX_CORE:
            raise UsageError(f"cores {text!r}: {part!r} is not a range of cores")
        cores.extend(range(first, last + 1))
    if len(set(cores)) != len(cores):
        raise UsageError(f"cores {text!r} name a core twice")
    return tuple(sorted(cores))


def _cpu(text: str, cores: str, words: list[str]) -> ProcessorName:
    numbers = parse_cores(cores) if cores else ()
    threads, kernels, runtime, precision, memory = 0, None, LITERT, "", 0
    for word in words:
        if word in RUNTIMES and runtime == LITERT:
            runtime, precision = RUNTIMES[word]
        elif word in KERNELS and kernels is None:
            kernels = word
        elif re.fullmatch("threads=[0-9]{1,5}", word) and not threads:
            threads = int(word.removeprefix("threads="))
            if not threads or (numbers and threads > len(numbers)):
                cores = plural(len(numbers), "core") if numbers else "all cores"
                raise UsageError(f"processor {text!r}: {plural(threads, 'thread')} on {cores}", _HINT)
        elif (nbytes := memory_word(word)) is not None and not memory:
            memory = nbytes
        elif word.startswith("memory="):
            raise UsageError(f"processor {text!r}: memory= takes one size in MB or GB, as memory=400MB, not {word!r}")
        else:
            known = ", ".join(("threads=N", "memory=400MB", *KERNELS, *RUNTIMES))
            raise UsageError(f"processor {text!r}: {word!r} is none of {known}")
    if runtime == OPENVINO and kernels not in {None, "blocked"}:
        raise UsageError(f"processor {text!r}: {runtime} has kernels of its own", _HINT)
    if kernels == "blocked" and (runtime, precision) != RUNTIMES[OPENVINO]:
        raise UsageError(
            f"processor {text!r}: only OpenVINO has blocked kernels, in float32",
            f"name it like cpu0:{OPENVINO}:blocked",
        )
    kernels = kernels or "xnnpack"
    if runtime == TFLITE and kernels == "f16":
        raise UsageError(f"processor {text!r}: {runtime} has no kernels in float16", _HINT)
    return ProcessorName(
        "cpu",
        cores=numbers,
        threads=threads,
        kernels=kernels,
        runtime=runtime,
        precision=precision,
        memory_nbytes=memory,
    )
