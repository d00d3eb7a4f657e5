"""Run an exported plan: needs the runtimes of its processors, numpy, and the files beside this one.

The runtimes are ai-edge-litert, and openvino or tflite-runtime for processors whose names say so.

::

    python run_plan.py                      # times the plan, and compares it with the times when it was found
    python run_plan.py --stream --runs 200  # inferences overlap on the processors

    from run_plan import Plan
    with Plan(".") as plan:
        outputs = plan.run(image)           # or {"name": image, …}; outputs by name
        for outputs in plan.stream(images):
            ...

    from run_plan import Models     # for a plan of several models
    with Models(".") as models:
        models.set_inputs("detector 1", image)
        seconds = models.run()      # of each request, by instance
        outputs = models.outputs("detector 1")

Each processor of the plan is a thread, pinned to its cores, with its stages in the order of the plan; a stage begins
when its inputs are there. ``drift()`` returns the ratios of the stages' times to the plan's expectation.

``Plan(folder, fallback=True)`` measures the plan against the whole model on one processor, on this device, and runs the
whole model where it is significantly faster. It requires that both compute the same outputs, bit for bit. Without
``fallback=True`` the plan always runs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import math
import os
import queue
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

Arrays = Mapping[str, "np.ndarray[Any, Any]"]
_Tensors = list["np.ndarray[Any, Any]"]
_Work = tuple[int, Mapping[str, Any], Mapping[str, Any]]  # number of a stage, its entry in the plan, its processor

_Described = tuple[tuple[int, ...], "np.dtype[Any]"]  # shape and type

XNNPACK_FLOAT16 = 0xF
"""XNNPACK's flags: compute in float16 whatever the model says, and the flags that are on by default."""

SLOWER = 1.2
"""Stages that take more than this many times as long as expected are named."""
UNPREFERRED = " (the study may have measured with priority over other processes; this run has none)"
"""What is said of them."""

CALL_MS = 0.3
"""What Python takes to call a stage, with a thread of its own for each processor: 0.05 to 0.2 ms on two cores."""

SURE_RUNS = 20
"""Number of last runs whose medians decide about drift."""

ALPHA = 0.01
"""The fallback runs where a sign test calls it faster at this level."""

MIN_PAIRS, MAX_PAIRS, PAIRS_S = 10, 100, 5.0
"""Pairs of a comparison: no new one begins after MAX_PAIRS, nor after PAIRS_S seconds and MIN_PAIRS."""

CHECKED_INPUTS = 4
"""Random inputs on which plan and fallback must compute the same outputs."""


CUSTOM_OPS = "custom_ops.so"
"""Kernels of custom operators, beside the stage files: each a ``LiteRtCustomOpKernel litert_custom_op_NAME``."""

INPUTS = "inputs.bin"
"""The inputs that the plan was measured with, as bytes one after another; missing where random ones serve."""

# Types that NumPy lacks → types of their raw bytes.
_PACKED = {"bfloat16": "uint16"} | dict.fromkeys(("int2", "int4", "uint4", "float8_e4m3fn", "float8_e5m2"), "uint8")

# LiteRT's C API: the CPU's bit, the first signature or subgraph; settings of kernels other than XNNPACK's float32.
_CPU, _FIRST, _ALIGNMENT = 1, ctypes.c_size_t(0), 64
_ACCELERATORS, _INTEGER = 24, 2  # litert_environment_options.h, litert_any.h
_SETTINGS = {"reference": "kernel_mode = 1\n", "builtin": "kernel_mode = 2\n", "f16": f"flags = {XNNPACK_FLOAT16}\n"}

_BLOCKED = '<attribute name="primitives_priority" version="0" value="cpu:jit_avx512_1x1,cpu:jit_avx512" />'
_CONVOLUTION = re.compile(r'(<layer id="\d+" name="[^"]*" type="((?:Group)?Convolution)")(.*?</layer>)', re.DOTALL)


class StartError(RuntimeError):
    """A processor of the plan, or its runtime, is missing, or does not support its stage."""


class FallbackError(ValueError):
    """The plan has no fallback that computes the same outputs."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The plan against its fallback, measured in pairs: the same inputs, one right after the other, in random order.

    Attributes:
        plan_s: seconds of an inference of the plan, one a pair.
        fallback_s: seconds of an inference of the fallback, one a pair.
    """

    plan_s: tuple[float, ...]
    fallback_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median over the pairs of the plan's time divided by the fallback's: above 1 the fallback is faster."""
        return statistics.median(p / f for p, f in zip(self.plan_s, self.fallback_s, strict=True))

    @property
    def p_value(self) -> float:
        """One-sided sign test: probability of as many pairs in the fallback's favour if it were no faster.

        The order within each pair is random, so the test holds however the machine is disturbed.
        """
        differences = [p - f for p, f in zip(self.plan_s, self.fallback_s, strict=True) if p != f]
        count, wins = len(differences), sum(d > 0.0 for d in differences)
        return sum(math.comb(count, k) for k in range(wins, count + 1)) / float(2**count)

    @property
    def fallback_is_faster(self) -> bool:
        """Whether the fallback is faster, significantly."""
        return self.p_value < ALPHA

    def __str__(self) -> str:
        verdict = "significant" if self.fallback_is_faster else "not significant"
        test = f", sign test p = {self.p_value:.2g}, {verdict}" if self.ratio > 1.0 else ""
        return f"{self.ratio:.3g} times as fast as the plan ({len(self.plan_s)} pairs{test})"


class Stage:
    """A stage file on its processor.

    Attributes:
        run: returns the stage's outputs, given its inputs and the descriptions of its outputs.
    """

    run: Callable[[_Tensors, Sequence[Mapping[str, Any]]], _Tensors]

    def __init__(self, folder: Path, entry: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        kind, options = processor["kind"], processor["options"]
        make: Callable[[str, str, Mapping[str, Any]], None] = self._make_by_c
        if options.get("runtime") == "openvino":
            make = self._make_openvino
        elif options.get("runtime") == "tflite-runtime" or entry.get("engine") == "interpreter":
            make = self._make_interpreter
        elif kind != "cpu":
            make = self._make_compiled
        self._custom: Sequence[tuple[str, int]] = entry.get("custom_operators", ())
        self._kernels = folder / CUSTOM_OPS
        try:
            with whole_file(folder, entry) as path:
                make(path, kind, options)
        except Exception as error:
            why = (str(error).splitlines() or [type(error).__name__])[-1]
            if isinstance(error, ModuleNotFoundError) and error.name:
                why = f"pip install {error.name.partition('.')[0].replace('_', '-')}, which is missing"
            elif make == self._make_compiled:
                why = f"LiteRT finds no {kind} that compiles it (its messages are above); run it on a device with one"
            raise StartError(f"{processor['name']} does not take {entry['file']}: {why}") from error

    def _make_openvino(self, path: str, kind: str, options: Mapping[str, Any]) -> None:
        import openvino

        config = {"PERFORMANCE_HINT": "LATENCY"}
        if kind != "npu":
            exact = options["precision"] == "f32"
            config |= {"NUM_STREAMS": "1", "INFERENCE_PRECISION_HINT": options["precision"]}
            config["EXECUTION_MODE_HINT"] = "ACCURACY" if exact else "PERFORMANCE"
        if kind == "cpu":
            config |= {"INFERENCE_NUM_THREADS": str(options.get("threads", 1)), "ENABLE_HYPER_THREADING": "YES"}
        device = "CPU" if kind == "cpu" else options["device"]
        device = f"HETERO:{device},CPU" if options.get("fallback") else device
        core = openvino.Core()
        model = _with_blocked_kernels(core, path) if options.get("kernels") == "blocked" else path
        self._request = core.compile_model(model, device, config).create_infer_request()
        self.run = self._run_openvino

    def _make_interpreter(self, path: str, _: str, options: Mapping[str, Any]) -> None:
        if options.get("runtime") == "tflite-runtime":
            from tflite_runtime import interpreter
        else:
            from ai_edge_litert import interpreter

        resolver = interpreter.OpResolverType
        others = {"builtin": resolver.BUILTIN_WITHOUT_DEFAULT_DELEGATES, "reference": resolver.BUILTIN_REF}
        kernels = others.get(options.get("kernels", ""), resolver.AUTO)
        self._interpreter = interpreter.Interpreter(
            path, num_threads=options.get("threads", 1), experimental_op_resolver_type=kernels
        )
        self._interpreter.allocate_tensors()
        self._into = [d["index"] for d in self._interpreter.get_input_details()]
        self._out = [d["index"] for d in self._interpreter.get_output_details()]
        self.run = self._run_interpreter

    def _make_compiled(self, path: str, kind: str, options: Mapping[str, Any]) -> None:
        from ai_edge_litert.compiled_model import CompiledModel
        from ai_edge_litert.hardware_accelerator import HardwareAccelerator
        from ai_edge_litert.options import CpuOptions, GpuOptions, Options

        accelerator = getattr(HardwareAccelerator, kind.upper())
        if options.get("fallback"):  # LiteRT places operators that the accelerator does not support on the CPU
            accelerator |= HardwareAccelerator.CPU
        how = Options(
            hardware_accelerators=accelerator,
            cpu_options=CpuOptions(num_threads=options.get("threads", 1)),
            gpu_options=GpuOptions(enforce_f32=options.get("precision") == "f32"),
        )
        self._model = CompiledModel.from_file(path, options=how)
        self._buffers = self._model.create_input_buffers(0), self._model.create_output_buffers(0)
        self.run = self._run_compiled

    def _make_by_c(self, path: str, _: str, options: Mapping[str, Any]) -> None:
        """Compile for a CPU by LiteRT's C API: it runs without the GIL, and supports types that NumPy lacks."""
        self._library, environment = _runtime()
        libc = ctypes.CDLL(None)
        how = self._made("CreateOptions")
        self._call("SetOptionsHardwareAccelerators", how, _CPU)
        for name, version in self._custom:
            kernels = ctypes.CDLL(str(self._kernels.absolute()))
            kernel = (ctypes.c_void_p * 4).in_dll(kernels, "litert_custom_op_" + re.sub(r"\W", "_", name))
            self._call("AddCustomOpKernelOption", how, name.encode(), int(version), kernel, None)
        settings = f"num_threads = {options.get('threads', 1)}\n{_SETTINGS.get(options.get('kernels', ''), '')}"
        libc.strdup.restype = ctypes.c_void_p
        text = ctypes.c_void_p(libc.strdup(settings.encode()))
        self._call("AddOpaqueOptions", how, self._made("CreateOpaqueOptions", b"xnnpack", text, libc.free))
        model = self._made("CreateModelFromFile", environment, path.encode())
        self._compiled = self._made("CreateCompiledModel", environment, model, how)
        subgraph = self._made("GetModelSubgraph", model, _FIRST)
        self._kinds: list[list[Any]] = []
        self._bound: list[list[tuple[ctypes.c_void_p, np.ndarray[Any, Any]]]] = []
        for side in ("Input", "Output"):
            count = ctypes.c_size_t()
            self._call(f"GetNumSubgraph{side}s", subgraph, ctypes.byref(count))
            kinds = [ctypes.create_string_buffer(72) for _ in range(count.value)]  # LiteRtRankedTensorType
            for i, kind in enumerate(kinds):
                tensor = self._made(f"GetSubgraph{side}", subgraph, ctypes.c_size_t(i))
                self._call("GetRankedTensorType", tensor, kind)
            self._kinds.append(kinds)
        self.run = self._run_by_c

    def _call(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._library, f"LiteRt{function}")(*arguments):
            raise RuntimeError(f"LiteRT refused: {function} returned status {status}")

    def _made(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        self._call(function, *arguments, ctypes.byref(found))
        return found

    def _run_by_c(self, inputs: _Tensors, outputs: Sequence[Mapping[str, Any]]) -> _Tensors:
        given = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in inputs]
        likes = [(tuple(like["shape"]), np.dtype(like["dtype"])) for like in outputs]
        if not self._bound:
            sizes = [array.nbytes for array in given], [math.prod(shape) * dtype.itemsize for shape, dtype in likes]
            pairs = zip(self._kinds, sizes, strict=True)
            self._bound = [[self._tensor(*each) for each in zip(*pair, strict=True)] for pair in pairs]
        into, out = self._bound
        for (_, memory), array in zip(into, given, strict=True):
            memory[:] = array
        lists = [(ctypes.c_void_p * len(side))(*(b.value for b, _ in side)) for side in self._bound]
        counts = [ctypes.c_size_t(len(side)) for side in self._bound]
        self._call("RunCompiledModel", self._compiled, _FIRST, counts[0], lists[0], counts[1], lists[1])
        return [
            memory.copy().view(dtype).reshape(shape) for (_, memory), (shape, dtype) in zip(out, likes, strict=True)
        ]

    def _tensor(self, kind: Any, nbytes: int) -> tuple[ctypes.c_void_p, np.ndarray[Any, Any]]:
        """Return a tensor buffer, and the array whose memory it uses."""
        room = np.zeros(nbytes + 2 * _ALIGNMENT, np.uint8)  # kernels read a little beyond the end
        first = -room.ctypes.data % _ALIGNMENT
        memory = room[first : first + nbytes]
        place = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(nbytes), None
        return self._made("CreateTensorBufferFromHostMemory", kind, *place), memory

    def _run_openvino(self, inputs: _Tensors, outputs: Sequence[Mapping[str, Any]]) -> _Tensors:
        self._request.infer(dict(enumerate(inputs)), share_inputs=True, share_outputs=True)
        return [self._request.get_output_tensor(i).data.copy() for i in range(len(outputs))]

    def _run_compiled(self, inputs: _Tensors, outputs: Sequence[Mapping[str, Any]]) -> _Tensors:
        for buffer, array in zip(self._buffers[0], inputs, strict=True):
            buffer.write(array)
        self._model.run_by_index(0, *self._buffers)
        found = []
        for buffer, like in zip(self._buffers[1], outputs, strict=True):
            count = int(np.prod(like["shape"]))
            found.append(buffer.read(count, np.dtype(like["dtype"])).reshape(like["shape"]))
        return found

    def _run_interpreter(self, inputs: _Tensors, _: Sequence[Mapping[str, Any]]) -> _Tensors:
        for index, array in zip(self._into, inputs, strict=True):
            self._interpreter.set_tensor(index, array)
        self._interpreter.invoke()
        return [self._interpreter.get_tensor(index) for index in self._out]


def _with_blocked_kernels(core: Any, path: str) -> Any:
    """Return a model of OpenVINO in which convolutions take kernels for blocked layouts where these are fast."""
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        text, constants = Path(folder, "stage.xml"), Path(folder, "stage.bin")
        openvino.serialize(core.read_model(path), text, constants)
        own = {"encoding": "utf-8", "errors": "surrogateescape"}  # names of tensors are arbitrary bytes
        text.write_text(with_blocked_kernels(text.read_text(**own)), **own)
        return core.read_model(text, constants)


def with_blocked_kernels(model: str) -> str:
    """Return a model in OpenVINO's format whose convolutions require kernels for blocked layouts, where fast."""
    if 'type="FakeQuantize"' in model:
        return model

    def with_priority(layer: re.Match[str]) -> str:
        head, kind, body = layer.groups()
        dilations = re.search(r'dilations="([^"]*)"', body)
        ports = re.findall(r"<port [^<>]*>(.*?)</port>", body, re.DOTALL)
        shape = [int(size) for size in re.findall(r"<dim>(\d+)</dim>", ports[1])] if len(ports) > 1 else []
        depthwise = kind == "GroupConvolution" and shape[1:3] == [1, 1]
        fills = kind == "Convolution" and len(shape) == 4 and (shape[1] <= 4 or shape[1] % 8 == 0)
        if not (depthwise or fills) or dilations is None or set(dilations[1].split(", ")) != {"1"}:
            return layer[0]
        if "<rt_info>" in body:
            return f"{head}{body}".replace("<rt_info>", f"<rt_info>{_BLOCKED}", 1)
        return f"{head}{body}".replace("<input>", f"<rt_info>{_BLOCKED}</rt_info><input>", 1)

    return _CONVOLUTION.sub(with_priority, model)


@contextlib.contextmanager
def whole_file(folder: Path, entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the path of a stage file; one that has weights in common with others is joined, until it is loaded."""
    if not entry.get("parts"):
        path = folder / entry["file"]
        # A runtime crashes on what is left of a file.
        if "sha256" in entry and hashlib.sha256(np.memmap(path, np.uint8, "r").data).hexdigest() != entry["sha256"]:
            raise ValueError(f"{path.name} is not the file that plan.json describes: copy it again")
        yield str(path)
        return
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "stage.tflite")
        with path.open("wb") as file:
            for name, first, nbytes in entry["parts"]:
                file.write(np.memmap(folder / name, np.uint8, "r", first, (nbytes,)).data)
        yield str(path)


class _Option(ctypes.Structure):
    # litert_environment_options.h: a tag, the type of its value, the value; 24 bytes.
    _fields_ = (("tag", ctypes.c_uint64), ("kind", ctypes.c_uint64), ("value", ctypes.c_uint64))


@functools.cache
def _runtime() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """Return LiteRT's library, and the environment in which it compiles for a CPU."""
    import ai_edge_litert

    path = Path(str(ai_edge_litert.__file__)).with_name("libLiteRt.so")
    library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)  # kernels of custom operators call it
    environment = ctypes.c_void_p()
    option = _Option(_ACCELERATORS, _INTEGER, _CPU)  # so that it does not look for other accelerators
    if status := library.LiteRtCreateEnvironment(1, ctypes.byref(option), ctypes.byref(environment)):
        raise RuntimeError(f"LiteRT refused: CreateEnvironment returned status {status}")
    return library, environment


class _Memory:
    """The tensors of one inference by number; some are views: rows of others."""

    def __init__(self, document: Mapping[str, Any], inputs: Sequence[np.ndarray[Any, Any]]) -> None:
        self._entries: list[dict[str, Any]] = document["tensors"]
        self._outputs: list[int] = document["outputs"]
        # View → its tensor, and its first byte there.
        self._views = {t: (root, first) for t, root, first in document.get("views", ())}
        self._held: dict[int, np.ndarray[Any, Any]] = dict(zip(document["inputs"], inputs, strict=True))
        for root in {root for root, _ in self._views.values()} - set(self._held):
            self._held[root] = np.empty(self._entries[root]["shape"], self._entries[root]["dtype"])

    def __getitem__(self, tensor: int) -> np.ndarray[Any, Any]:
        if tensor not in self._views:
            return self._held[tensor]
        root, first = self._views[tensor]
        entry = self._entries[tensor]
        rows: np.ndarray[Any, Any] = self._held[root].reshape(-1).view(np.uint8)[first : first + entry["nbytes"]]
        found: np.ndarray[Any, Any] = rows.view(entry["dtype"]).reshape(entry["shape"])
        return found

    def __setitem__(self, tensor: int, array: np.ndarray[Any, Any]) -> None:
        if tensor in self._views:
            self[tensor][...] = array
        else:
            self._held[tensor] = array

    def outputs(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the outputs by name."""
        names = _port_names([self._entries[t] for t in self._outputs])
        return {name: self[t] for name, t in zip(names, self._outputs, strict=True)}

    def run(self, stage: Stage, entry: Mapping[str, Any]) -> None:
        """Run a stage of the plan."""
        like = [self._entries[t] for t in entry["outputs"]]
        outputs = stage.run([self[t] for t in entry.get("reads", entry["inputs"])], like)
        for tensor, array in zip(entry["outputs"], outputs, strict=True):
            self[tensor] = array


class _Inference:
    """The tensors of one inference, and events for the ends of its stages."""

    def __init__(self, tensors: _Memory, stages: int) -> None:
        self.tensors = tensors
        self.done = [threading.Event() for _ in range(stages)]
        self.spent_s = [0.0] * stages
        self.begin_s = time.perf_counter()
        self.end_s = 0.0
        self.error: BaseException | None = None


class _Worker(threading.Thread):
    """The thread of a processor: runs inferences or jobs one after another.

    Args:
        work: called in the thread; loads the processor's stages and returns the function that runs one item.
    """

    def __init__(
        self, name: str, processors: Iterable[Mapping[str, Any]], work: Callable[[], Callable[[Any], None]]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._cores, self._work = {core for p in processors for core in p["options"].get("cores", ())}, work
        self._ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.start()
        if (error := self._ready.get()) is not None:
            raise error

    def run(self) -> None:
        try:
            if self._cores and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, self._cores & os.sched_getaffinity(0) or os.sched_getaffinity(0))
            work = self._work()
        except BaseException as error:
            self._ready.put(error)
            return
        self._ready.put(None)
        while (thing := self.todo.get()) is not None:
            work(thing)

    def close(self) -> None:
        """End the thread once its queue is empty."""
        self.todo.put(None)
        self.join()


class _Threads:
    """The threads of a loaded plan, one for each group of processors."""

    _workers: list[_Worker]

    def close(self) -> None:
        """End the threads."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Plan(_Threads):
    """A loaded plan; close it, or use it in a ``with`` statement.

    Args:
        folder: holds plan.json and its stage files.
        fallback: measure the plan against the whole model on one processor, and run the faster one. This takes up to
            PAIRS_S seconds, or MIN_PAIRS pairs where these take longer.

    Raises:
        FallbackError: ``fallback`` is set, and no whole model that computes the same outputs was exported.
    """

    def __init__(self, folder: str | Path = ".", *, fallback: bool = False) -> None:
        self._folder = Path(folder)
        self.document = _document(self._folder)
        self.expected: dict[str, Any] = self.document.get("expected", {})
        self._files: list[dict[str, Any]] = self.document["files"]
        self._tensors: list[dict[str, Any]] = self.document["tensors"]
        self._writer = {t: i for i, entry in enumerate(self._files) for t in entry["outputs"]}
        self._whole: _Worker | None = None
        self.comparison: Comparison | None = None
        self.runs: list[tuple[float, list[float]]] = []
        processors = {p["name"]: p for p in self.document["platform"]["processors"]}
        # Processors that share cores share a thread, and so run in the order of the plan.
        group = _groups(processors)
        mine: dict[str, list[_Work]] = {}
        for index, (stage, entry) in enumerate(zip(self.document["stages"], self._files, strict=True)):
            if (name := stage["processor"]) not in group:
                raise ValueError(f"plan.json is damaged: stage {index} is on {name!r}, which is none of its processors")
            mine.setdefault(group[name], []).append((index, entry, processors[name]))
        self._workers = []
        try:
            for name, works in mine.items():
                self._workers.append(_Worker(name, [processor for _, _, processor in works], self._loader(works)))
            if fallback:
                self.compare_with_fallback()
        except BaseException:
            self.close()
            raise

    def _loader(self, works: Sequence[_Work]) -> Callable[[], Callable[[_Inference], None]]:
        def load() -> Callable[[_Inference], None]:
            made = [Stage(self._folder, entry, processor) for _, entry, processor in works]

            def work(inference: _Inference) -> None:
                for stage, (index, entry, _) in zip(made, works, strict=True):
                    try:
                        self._run_stage(stage, index, entry, inference)
                    except BaseException as error:
                        inference.error = error
                    finally:
                        inference.done[index].set()

            return work

        return load

    def _run_stage(self, stage: Stage, index: int, entry: Mapping[str, Any], inference: _Inference) -> None:
        for tensor in entry["inputs"]:
            if tensor in self._writer:
                inference.done[self._writer[tensor]].wait()
        if inference.error is not None:
            return
        begin = time.perf_counter()
        inference.tensors.run(stage, entry)
        inference.end_s = time.perf_counter()
        inference.spent_s[index] = inference.end_s - begin

    @property
    def inputs(self) -> dict[str, _Described]:
        """Shape and type of each input by name."""
        return _described(self._tensors[i] for i in self.document["inputs"])

    @property
    def fallen_back(self) -> bool:
        """Whether ``run`` runs the whole model on one processor instead of the plan."""
        return self._whole is not None

    def run(self, inputs: np.ndarray[Any, Any] | Arrays) -> dict[str, np.ndarray[Any, Any]]:
        """Run once and return the outputs by name."""
        if self._whole is not None:
            return self._end(self._begin(inputs, self._whole))
        inference = self._begin(inputs)
        found = self._end(inference)
        self.runs.append((inference.end_s - inference.begin_s, inference.spent_s))
        return found

    def stream(self, inputs: Iterable[np.ndarray[Any, Any] | Arrays]) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        """Run the plan for each of the inputs; inferences overlap on the processors, and outputs come in order.

        The fallback is never used here: it was compared for single inferences.
        """
        under_way: list[_Inference] = []
        for each in inputs:
            under_way.append(self._begin(each))
            if len(under_way) > len(self._workers) + 1:
                yield self._end(under_way.pop(0))
        while under_way:
            yield self._end(under_way.pop(0))

    def compare_with_fallback(self) -> Comparison:
        """Measure the plan against the whole model on one processor, and let ``run`` run the faster one from now on.

        The plan stays unless the whole model is significantly faster; a line on stderr says when it is.

        Raises:
            FallbackError: no whole model was exported, or it does not compute the plan's outputs bit for bit.
        """
        entry = _exported_fallback(self._folder, self.document)
        self._close_whole()
        one_stage = entry | {side: self.document[side] for side in ("inputs", "outputs")}
        whole = _Worker("fallback", [entry["processor"]], self._loader([(0, one_stage, entry["processor"])]))
        try:
            self.comparison = found = self._compare(whole, entry["processor"]["name"])
        except BaseException:
            whole.close()
            raise
        if found.fallback_is_faster:
            self._whole = whole
            self.runs.clear()
            print(f"run_plan: {self.advice()}", file=sys.stderr)
        else:
            whole.close()
        return found

    def _compare(self, whole: _Worker, name: str) -> Comparison:
        rng = np.random.default_rng(0)
        inputs = self.inputs.items()
        samples = [{key: _random(rng, *like) for key, like in inputs} for _ in range(CHECKED_INPUTS)]
        wanted = [self._end(self._begin(sample)) for sample in samples]

        def timed(index: int, worker: _Worker | None) -> float:
            begin_s = time.perf_counter()
            outputs = self._end(self._begin(samples[index], worker))
            took_s = time.perf_counter() - begin_s
            for key, value in wanted[index].items():
                if outputs[key].tobytes() != value.tobytes():
                    raise FallbackError(
                        f"{self._folder}: output {key!r} of the whole model on {name} is not bit for bit that of the "
                        "plan. Run the plan without fallback=True"
                    )
            return took_s

        for index in range(CHECKED_INPUTS):
            timed(index, whole)
        took_s: dict[_Worker | None, list[float]] = {None: [], whole: []}
        end_s = time.monotonic() + PAIRS_S
        while (count := len(took_s[None])) < MIN_PAIRS or (count < MAX_PAIRS and time.monotonic() < end_s):
            first: list[_Worker | None] = [None, whole]
            for worker in first if rng.random() < 0.5 else reversed(first):
                timed(count % CHECKED_INPUTS, worker)  # warms caches for the run that counts
                took_s[worker].append(timed(count % CHECKED_INPUTS, worker))
        return Comparison(tuple(took_s[None]), tuple(took_s[whole]))

    def _begin(self, inputs: np.ndarray[Any, Any] | Arrays, whole: _Worker | None = None) -> _Inference:
        """Start an inference: of the plan, or of the whole model on its thread."""
        arrays = _in_order(inputs, self.inputs)
        stages = len(self._files) if whole is None else 1
        inference = _Inference(_Memory(self.document, arrays), stages)
        for worker in self._workers if whole is None else (whole,):
            worker.todo.put(inference)
        return inference

    def _end(self, inference: _Inference) -> dict[str, np.ndarray[Any, Any]]:
        for event in inference.done:
            event.wait()
        if inference.error is not None:
            raise inference.error
        return inference.tensors.outputs()

    def drift(self) -> list[float]:
        """Return the ratio of each stage's time to the expected one, by the medians of the last runs."""
        expected_s = [ms / 1e3 for ms in self.expected.get("stage_ms", ())]
        recent = [spent for _, spent in self.runs[-SURE_RUNS:]]
        if not recent or len(expected_s) != len(recent[0]):
            return []
        took = [statistics.median(column) for column in zip(*recent, strict=True)]
        return [t / e if e > 0.0 else 1.0 for t, e in zip(took, expected_s, strict=True)]

    def advice(self) -> str:
        """Return a sentence about latency and drift, or about the fallback where it runs."""
        if self._whole is not None:
            name = self.document["fallback"]["processor"]["name"]
            return f"the whole model on {name} runs instead of the plan: it is {self.comparison}"
        drift = self.drift()
        slow = [f"stage {i} takes {d:.2f} times as long as expected" for i, d in enumerate(drift) if d > SLOWER]
        if not self.runs:
            return "nothing was run yet"
        took_ms = statistics.median(total for total, _ in self.runs[-SURE_RUNS:]) * 1e3
        text = f"{took_ms:.2f} ms per inference"
        if "latency_ms" in self.expected:
            text += f" (expected {self.expected['latency_ms']:.2f} ms)"
        if slow:
            return f"{text}; {', '.join(slow)}{UNPREFERRED}"
        expected_ms, stages = self.expected.get("latency_ms", took_ms), len(self._files)
        if stages > 1 and SLOWER * expected_ms < took_ms < expected_ms + CALL_MS * stages:
            return f"{text}; {stages} calls from Python take longer than those of run_plan.cc and `optimize execute`"
        return f"{text}; no stage takes more than {SLOWER:g} times as long as expected" if drift else text

    def close(self) -> None:
        """End the threads."""
        super().close()
        self._close_whole()

    def _close_whole(self) -> None:
        if self._whole is not None:
            self._whole.close()
        self._whole = None


class _Instance:
    """One model of a plan of several: its tensors and its entry in the plan.

    Attributes:
        document: the model's plan.json.
        inputs: shape and type of each input by name.
        tensors: those of the last request.
    """

    def __init__(self, folder: Path, client: Mapping[str, Any]) -> None:
        self.folder, self.client = folder, client
        self.document = _document(folder)
        self.inputs = _described(self.document["tensors"][i] for i in self.document["inputs"])
        self.give(_usual_inputs(folder, self.document))

    def give(self, inputs: Sequence[np.ndarray[Any, Any]]) -> None:
        """Set the inputs of all later requests, which reuse the same tensors."""
        self.tensors = _Memory(self.document, inputs)


class Models(_Threads):
    """A loaded plan of several models; close it, or use it in a ``with`` statement.

    Requests arrive as the plan says; ``scheduler.py`` beside this file decides which job runs next.
    Each processor is a thread. A model that fails is left out from then on; ``failures`` says why.

    Args:
        folder: holds plan.json and a folder for each model.
    """

    def __init__(self, folder: str | Path = ".") -> None:
        self.document = _document(Path(folder))
        self.expected: dict[str, Any] = self.document.get("expected", {})
        self.failures: dict[str, str] = {}
        processors = self.document["platform"]["processors"]
        self._names = [p["name"] for p in processors]
        clients = self.document["clients"]
        self._instances = [_Instance(Path(folder) / f"model_{int(client['model'])}", client) for client in clients]
        self._law = threading.Condition()
        self._scheduler = _scheduler(self.document, self._names, processors)
        self._workers = []
        try:
            for number, processor in enumerate(processors):
                self._workers.append(_Worker(processor["name"], [processor], self._loader(number, processor)))
        except BaseException:
            self.close()
            raise

    @property
    def inputs(self) -> dict[str, dict[str, _Described]]:
        """Shape and type of each input by name, of each instance by name."""
        return {each.client["name"]: each.inputs for each in self._instances}

    def set_inputs(self, name: str, inputs: np.ndarray[Any, Any] | Arrays) -> None:
        """Set the inputs of an instance's requests: one array, or a mapping by name."""
        instance = self._instance(name)
        instance.give(_in_order(inputs, instance.inputs))

    def outputs(self, name: str) -> dict[str, np.ndarray[Any, Any]]:
        """Return the outputs of an instance's last request by name."""
        return self._instance(name).tensors.outputs()

    def run(self) -> dict[str, list[float | None]]:
        """Run all requests once; return latencies (s) by instance, None for requests that were rejected or failed."""
        scheduler = self._scheduler
        with self._law:
            scheduler.begin(time.perf_counter_ns())
            for number, instance in enumerate(self._instances):
                if instance.client["name"] in self.failures:
                    scheduler.fail(number)
            while True:
                self._step()
                if scheduler.over:
                    break
                left_s = (scheduler.next_arrival_ns() - time.perf_counter_ns()) * 1e-9
                self._law.wait(min(max(left_s, 0.0), 60.0))
        return {
            each.client["name"]: [(ended - came) * 1e-9 if ended > 0 else None for came, ended in scheduler.requests(k)]
            for k, each in enumerate(self._instances)
        }

    def _step(self) -> None:
        """Admit requests that have arrived, and assign jobs to free processors."""
        now_ns = time.perf_counter_ns()
        self._scheduler.arrive(now_ns)
        for number, worker in self._scheduler.start(now_ns):
            self._workers[worker].todo.put(number)

    def _loader(self, number: int, processor: Mapping[str, Any]) -> Callable[[], Callable[[int], None]]:
        def load() -> Callable[[int], None]:
            made = self._loaded(processor)

            def work(number_of_job: int) -> None:
                who, job = self._scheduler.whose(number_of_job)
                each, problem = self._instances[who], ""
                try:
                    each.tensors.run(made[int(each.client["model"]), job], each.document["files"][job])
                except BaseException as error:
                    problem = str(error) or type(error).__name__
                with self._law:
                    if problem:
                        self.failures[each.client["name"]] = problem
                        self._scheduler.fail(who)
                    self._scheduler.finish(number, time.perf_counter_ns())
                    self._step()
                    if self._scheduler.over:
                        self._law.notify()

            return work

        return load

    def _loaded(self, processor: Mapping[str, Any]) -> dict[tuple[int, int], Stage]:
        """Return the stages that a processor may run, by model and job; instances of a model share them."""
        made: dict[tuple[int, int], Stage] = {}
        for instance in self._instances:
            for job, names in enumerate(instance.client["processors"]):
                key = int(instance.client["model"]), job
                if processor["name"] in names and key not in made:
                    made[key] = Stage(instance.folder, instance.document["files"][job], processor)
        return made

    def _instance(self, name: str) -> _Instance:
        return next(each for each in self._instances if each.client["name"] == name)


def _scheduler(document: Mapping[str, Any], names: list[str], processors: Sequence[Mapping[str, Any]]) -> Any:
    """Return the job scheduler of a plan of several models, from the file that was exported beside this one."""
    spec = importlib.util.spec_from_file_location("scheduler", Path(__file__).with_name("scheduler.py"))
    if spec is None or spec.loader is None:
        raise ImportError("scheduler.py is missing beside run_plan.py")
    law = importlib.util.module_from_spec(spec)
    sys.modules["scheduler"] = law  # its dataclasses look up their module
    spec.loader.exec_module(law)
    excluded = [sum(1 << j for j, b in enumerate(processors) if excludes(a, b)) for a in processors]
    clients = [
        law.QueueClient(
            tuple(tuple(names.index(name) for name in job) for job in client["processors"]),
            tuple(client["releases_ns"]),
            client["requests"],
            **{key: client[key] for key in ("closed", "priority", "deadline_ns", "queue")},
            after=tuple(client["after"]),
        )
        for client in document["clients"]
    ]
    return law.Scheduler(clients, excluded, document["dispatch"])


def excludes(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two processors cannot run at the same time: some resource does not suffice for both."""
    shared = (share + other["resources"].get(name, 0.0) > 1.0 for name, share in one["resources"].items())
    return one["name"] == other["name"] or any(shared)


def _exported_fallback(folder: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan's entry of the fallback, which must use the same kernels as each stage of the plan."""
    found: dict[str, Any] | None = document.get("fallback")
    if found is None:
        raise FallbackError(
            f"{folder}: the plan has no fallback. A fallback requires a plan of several stages that all use the "
            "same kernels, and a study that minimised latency and measured the whole model with these kernels"
        )
    whole = found["processor"]
    processors = {p["name"]: p for p in document["platform"]["processors"]}
    for index, stage in enumerate(document["stages"]):
        if kernels(processors[stage["processor"]]) != kernels(whole):
            raise FallbackError(
                f"{folder}: stage {index} on {stage['processor']} uses other kernels than the whole model on "
                f"{whole['name']}: their outputs differ. Run the plan without fallback=True"
            )
    return found


def kernels(processor: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of a processor that determine its outputs bit for bit: all but cores and threads."""
    options = processor["options"]
    names = ("adapter", "fallback", "kernels", "precision", "runtime")
    known = {name: options[name] for name in names if name in options}
    return {"kind": processor["kind"], "kernels": "xnnpack", **known}


def _document(folder: Path) -> dict[str, Any]:
    """Read a plan.json; tensors of types that NumPy lacks become rows of bytes."""
    try:
        found: dict[str, Any] = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"plan.json is damaged: {error}") from error
    for t in found.get("tensors", ()):
        if t["dtype"] in _PACKED:
            dtype = np.dtype(_PACKED[t["dtype"]])
            t |= {"dtype": dtype.name, "shape": [t["nbytes"] // dtype.itemsize]}
        if np.dtype(t["dtype"]).hasobject:
            raise ValueError(f"plan.json has a tensor of {t['dtype']!r}")
    return found


def _described(entries: Iterable[Mapping[str, Any]]) -> dict[str, _Described]:
    """Return shape and type of inputs or outputs by name."""
    ports = list(entries)
    kinds = ((tuple(t["shape"]), np.dtype(t["dtype"])) for t in ports)
    return dict(zip(_port_names(ports), kinds, strict=True))


def _port_names(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of inputs or outputs; a repeated name is followed by ``:`` and its position."""
    found: list[str] = []
    for position, t in enumerate(entries):
        found.append(f"{t['name']}:{position}" if t["name"] in found else t["name"])
    return found


def _in_order(inputs: np.ndarray[Any, Any] | Arrays, kinds: Mapping[str, _Described]) -> _Tensors:
    """Return the arrays in the order of their names, of which each may lack what follows its last ``:``.

    Args:
        kinds: shape and type of each by name.
    """
    names = list(kinds)
    if not isinstance(inputs, Mapping):
        inputs = {names[0] if names else "": inputs}
    short = {name.rpartition(":")[0]: name for name in names if ":" in name}
    given = {name if name in names else short.get(name, name): array for name, array in inputs.items()}
    if given.keys() != set(names) or len(given) != len(inputs):
        raise ValueError(f"the inputs are {', '.join(map(repr, names))}, not {', '.join(map(repr, inputs))}")
    for name, (shape, dtype) in kinds.items():
        if not isinstance(given[name], np.ndarray | np.generic):
            raise TypeError(f"input {name!r} is a {type(given[name]).__name__}, not an array of NumPy")
        if (array := given[name]).shape != shape or array.dtype != dtype:
            raise ValueError(f"input {name!r} has shape {array.shape} and type {array.dtype}, not {shape} {dtype}")
    return [given[name] for name in names]


def _usual_inputs(folder: Path, document: Mapping[str, Any]) -> _Tensors:
    """Return the inputs that a model was measured with, or random ones where these serve."""
    entries = [document["tensors"][i] for i in document["inputs"]]
    if not (folder / INPUTS).exists():
        rng = np.random.default_rng(0)
        return [_random(rng, *kind) for kind in _described(entries).values()]
    content, found, first = (folder / INPUTS).read_bytes(), [], 0
    for t in entries:
        last = first + t["nbytes"]
        found.append(np.frombuffer(bytearray(content[first:last]), t["dtype"]).reshape(t["shape"]))
        first = last
    return found


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return values that any model accepts: wider integers may be indices into a table, so they are 0 or 1."""
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    high = np.iinfo(dtype).max if dtype in {np.dtype(np.int8), np.dtype(np.uint8)} else 1
    return rng.integers(0, high, shape, endpoint=True).astype(dtype)


def _groups(processors: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return for each processor the first one of its group, in which resources are shared directly or indirectly."""
    group = {name: name for name in processors}
    for a, one in processors.items():
        for b, other in processors.items():
            if a != b and excludes(one, other):
                old, new = group[b], group[a]
                group = {name: new if root == old else root for name, root in group.items()}
    return group


def main() -> int:
    """Time the plan on the inputs that it was measured with."""
    parser = argparse.ArgumentParser(description="Time an exported plan, and compare it with what was expected.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    parser.add_argument("--runs", type=int, default=50, help="at least 1")
    parser.add_argument("--stream", action="store_true", help="inferences overlap")
    whole = "measure the whole model on one processor too, and run the faster"
    parser.add_argument("--fallback", action="store_true", help=whole)
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs {options.runs}: give at least 1")
    if options.fallback and options.stream:
        parser.error("--fallback is not supported with --stream: it compares single inferences")
    try:
        document = _document(options.folder)
        if "clients" not in document:
            return _time_plan(options.folder, options.runs, stream=options.stream, fallback=options.fallback)
        if options.fallback or options.stream:
            parser.error("--stream and --fallback are not supported with a plan of several models")
        return _time_models(options.folder, options.runs)
    except FallbackError as error:
        parser.error(f"--fallback: {error}")
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        said = repr(error) if isinstance(error, LookupError) else error
        print(f"run_plan: {options.folder}: {said}", file=sys.stderr)
        return 4


def _time_plan(folder: Path, runs: int, *, stream: bool, fallback: bool) -> int:
    """Time a plan of one model."""
    with Plan(folder, fallback=fallback) as plan:
        if plan.comparison is not None and not plan.fallen_back:
            print(f"the whole model on one processor is {plan.comparison}: the plan runs")
        usual = dict(zip(plan.inputs, _usual_inputs(folder, plan.document), strict=True))
        for _ in range(3):
            plan.run(usual)
        plan.runs.clear()
        if stream:
            begin = time.perf_counter()
            count = sum(1 for _ in plan.stream(usual for _ in range(runs)))
            each_ms = (time.perf_counter() - begin) / count * 1e3
            print(f"a result every {each_ms:.2f} ms, {1e3 / each_ms:.4g} a second")
            return 0
        for _ in range(runs):
            plan.run(usual)
        print(plan.advice())
        for index, drift in enumerate(plan.drift()):
            stage = plan.document["stages"][index]
            print(f"stage {index} on {stage['processor']}: {drift:.2f} times as long as expected")
    return 0


def _time_models(folder: Path, runs: int) -> int:
    """Time a plan of several models."""
    took: dict[str, list[float]] = {}
    with Models(folder) as models:
        models.run()
        for _ in range(runs):
            for name, seconds in models.run().items():
                took.setdefault(name, []).extend(s for s in seconds if s is not None)
        for name, known in took.items():
            latency = f"{statistics.mean(known) * 1e3:.2f} ms" if known else "no request was answered"
            expected_ms = models.expected.get("instances_ms", {}).get(name)
            more = f" (expected {expected_ms:.2f} ms)" if expected_ms else ""
            print(f"{name}: {models.failures.get(name) or latency + more}")
    return 1 if models.failures else 0


if __name__ == "__main__":
    sys.exit(main())
