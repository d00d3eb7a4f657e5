"""The little language in which a person names lanes: ``cpu0-3:threads=2``, ``gpu:f32``.

::

    cpu                  all cores that this process may use and has the time of, a thread each
    cpu2                 core 2
    cpu0-3+6             cores 0 to 3 and 6
    cpu0-3:threads=2     two threads that move among these cores
    cpu1:builtin         the runtime's own kernels instead of XNNPACK's; also :reference
    cpu1:f16             XNNPACK's kernels in float16, where the processor has them
    cpu1:tflite-runtime  run by tflite-runtime instead of LiteRT
    gpu                  the first hardware adapter, computing in float16
    gpu:f32              in float32
    gpu:WORD             the adapter with this word in its name; a software adapter (swiftshader, lavapipe) only so
    npu                  the neural processor whose dispatch library the vendor's SDK brought
    npu:NAME             the one whose library lies in a folder that the user named (:mod:`evaluators.litert.libraries`)
    npu:FOLDER           the same; on the command line alone
    gpu+cpu              LiteRT's own placement: what the adapter does not take runs on the cores, which it holds too;
                         also gpu+cpu:f32, npu+cpu
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from evaluators.litert.tflite import RUNTIME
from search_spaces.errors import UsageError

Kernels = Literal["xnnpack", "builtin", "reference", "f16"]

KERNELS: tuple[Kernels, ...] = ("xnnpack", "builtin", "reference", "f16")
PRECISIONS = ("f16", "f32")
BOTH = "+cpu"
MAX_CORE = 1 << 16
_HEAD = re.compile(r"(cpu|gpu|npu)([0-9]+(?:[-+][0-9]+)*|\+cpu)?")
_HINT = "lanes are called like cpu, cpu0, cpu0-3:threads=2, cpu1:builtin, gpu, gpu:f32, gpu:swiftshader, npu"


@dataclass(frozen=True, slots=True)
class LaneName:
    """What a name asks for.

    Attributes:
        cores: for a CPU; empty for all that the process may use.
        threads: for a CPU; 0 for one per core.
        kernels: for a CPU.
        other_runtime: for a CPU whether tflite-runtime runs it.
        precision: for a GPU.
        adapter: for a GPU a word of its name, "" for the first hardware adapter.
        folder: for an NPU where its dispatch library lies, or the name of that place; "" for where the runtime looks.
        fallback: whether LiteRT places what an accelerator does not take on the CPU.
    """

    kind: Literal["cpu", "gpu", "npu"]
    cores: tuple[int, ...] = ()
    threads: int = 0
    kernels: Kernels = "xnnpack"
    other_runtime: bool = False
    precision: str = "f16"
    adapter: str = ""
    folder: str = ""
    fallback: bool = False


def parse_lane(text: str) -> LaneName:
    """Read a lane's name.

    Raises:
        UsageError: it is none; the text says what is wrong with which part.
    """
    head, *words = text.split(":")
    match = _HEAD.fullmatch(head)
    if match is None:
        raise UsageError(f"there is no processor {text!r}", _HINT)
    fallback = match[2] == BOTH
    if match[1] == "cpu" and not fallback:
        return _cpu(text, match[2] or "", words)
    if match[1] == "cpu" or (match[2] and not fallback):
        raise UsageError(f"processor {text!r}: adapters have no numbers", "name it by a word: gpu:nvidia")
    if match[1] == "npu":
        if len(words) > 1:
            raise UsageError(f"processor {text!r}: names two folders", _HINT)
        return LaneName("npu", folder=words[0] if words else "", fallback=fallback)
    precisions = [word for word in words if word in PRECISIONS]
    adapters = [word for word in words if word not in PRECISIONS]
    if len(precisions) > 1 or len(adapters) > 1 or not all(words):
        raise UsageError(f"processor {text!r}: wants at most one precision and one word of an adapter's name", _HINT)
    return LaneName(
        "gpu",
        precision=precisions[0] if precisions else "f16",
        adapter=adapters[0] if adapters else "",
        fallback=fallback,
    )


def lane_options(kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a lane that a file describes; it may not ask for what harms, such as 10,000 threads.

    Nor does a file say which library is loaded: an adapter is looked up by its name, a neural processor's library where
    the runtime keeps it.

    Raises:
        KeyError, TypeError, ValueError: an option is missing or cannot be.
    """
    cores = tuple(int(core) for core in data["cores"])
    threads = int(data["threads"])
    if not cores or len(set(cores)) != len(cores) or not 0 <= min(cores) <= max(cores) < MAX_CORE:
        raise ValueError(f"a lane on cores {reprlib.repr(data['cores'])}")
    if not 1 <= threads <= len(cores):
        raise ValueError(f"{reprlib.repr(threads)} threads on {len(cores)} cores")
    options: dict[str, Any] = {"cores": cores, "threads": threads}
    if data.get("kernels", "xnnpack") != "xnnpack":
        if data["kernels"] not in KERNELS:
            raise ValueError(f"kernels {reprlib.repr(data['kernels'])}")
        options["kernels"] = data["kernels"]
    if "runtime" in data:
        if kind != "cpu" or data["runtime"] != RUNTIME:
            raise ValueError(f"a runtime {reprlib.repr(data['runtime'])}")
        options["runtime"] = RUNTIME
    if kind == "gpu":
        if data["precision"] not in PRECISIONS or not isinstance(data["adapter"], str) or not data["adapter"]:
            raise ValueError(f"an adapter {reprlib.repr(data['adapter'])}")
        options |= {"precision": data["precision"], "adapter": data["adapter"]}
    if kind != "cpu":
        options["fallback"] = data.get("fallback") is True
    return options


def parse_cores(text: str) -> tuple[int, ...]:
    """Read ``0-3+6`` as ``(0, 1, 2, 3, 6)``.

    Raises:
        UsageError: it names no cores, or one twice.
    """
    cores: list[int] = []
    for part in text.split("+"):
        ends = part.split("-")
        if not 1 <= len(ends) <= 2 or not all(re.fullmatch("[0-9]{1,5}", end) for end in ends):
            raise UsageError(f"cores {text!r}: {part!r} is neither a core nor a range like 0-3")
        first, last = int(ends[0]), int(ends[-1])
        if not first <= last < MAX_CORE:
            raise UsageError(f"cores {text!r}: {part!r} is no range of cores")
        cores.extend(range(first, last + 1))
    if len(set(cores)) != len(cores):
        raise UsageError(f"cores {text!r} name a core twice")
    return tuple(sorted(cores))


def _cpu(text: str, cores: str, words: list[str]) -> LaneName:
    numbers = parse_cores(cores) if cores else ()
    threads, kernels, other_runtime = 0, None, False
    for word in words:
        if word == RUNTIME and not other_runtime:
            other_runtime = True
        elif word in KERNELS and kernels is None:
            kernels = word
        elif re.fullmatch("threads=[0-9]{1,5}", word) and not threads:
            threads = int(word.removeprefix("threads="))
            if not threads or (numbers and threads > len(numbers)):
                raise UsageError(f"processor {text!r}: {threads} threads on {len(numbers) or 'some'} cores", _HINT)
        else:
            known = ", ".join((*KERNELS, RUNTIME))
            raise UsageError(f"processor {text!r}: {word!r} is neither threads=N nor one of {known}")
    kernels = kernels or "xnnpack"
    if other_runtime and kernels == "f16":
        raise UsageError(f"processor {text!r}: {RUNTIME} has no kernels in float16", _HINT)
    return LaneName("cpu", cores=numbers, threads=threads, kernels=kernels, other_runtime=other_runtime)
