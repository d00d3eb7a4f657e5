"""Models of other frameworks as ``.tflite`` files: of PyTorch (``.pt2``, torchvision, timm), ONNX and TensorFlow.

A converter runs in its own process, without network, with limits of time and memory. Its model's outputs are compared
with the source framework's on seeded inputs. Results are cached by the digests of the source and of the versions.

::

    net.pt2              of torch.export.save; only if named on the command line, since torch evaluates parts of it
    net.onnx             by onnx2tf
    folder               a SavedModel, which holds saved_model.pb; by TensorFlow; only if named on the command
                         line, since its operators may read and write files
    torchvision:resnet18, timm:resnet18    the architecture with seeded weights
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.core.allowed_code import is_allowed
from search_spaces.core.errors import ModelError, UnavailableError, reason_of
from search_spaces.models.cache import cached
from search_spaces.models.files import file_digest

TOLERANCE = 1e-4
"""Largest error of an output, relative to its largest value."""

LIMIT_S = 900
_VERSION = 1
_MEMORY_SHARE = 0.75
_FILE_NBYTES = 16 << 30
_NAMED = re.compile(r"(torchvision|timm):([A-Za-z0-9_.]+)")
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000

Array = NDArray[Any]
Reference = Callable[[Sequence[Array]], list[Array]]
"""Runs the source framework on inputs in the order of the converted model."""


@dataclass(frozen=True, slots=True)
class Converter:
    """The converter of one kind of source.

    Attributes:
        packages: distributions that it needs, besides ai-edge-litert.
        program: a command that they install; if it is on the PATH, its environment is used.
        install: the command that installs them.
        command: to convert by hand, with ``{source}`` for the model, quoted for a shell.
        file: what the command writes; ``{stem}`` is the source's name without its suffix.
    """

    packages: tuple[str, ...]
    program: str
    install: str
    command: str
    file: str = "net.tflite"


_EXTRA = "pip install 'partition-optimizer[torch]'"
_BY_TORCH = (
    'python -c "import sys, torch, litert_torch; p = torch.export.load(sys.argv[1]); '
    "litert_torch.convert(p.module(), p.example_inputs[0]).export('net.tflite')\" {source}"
)
_BY_NAME = (
    'python -c "import torch, {library}, litert_torch; m = {library}.{make}({name!r}).eval(); '
    "litert_torch.convert(m, (torch.randn(1, *{shape}),)).export('net.tflite')\""
)
_CONVERTERS = {
    "pt2": Converter(("litert-torch", "torch"), "", _EXTRA, _BY_TORCH),
    "torchvision": Converter(("litert-torch", "torch", "torchvision"), "", _EXTRA, _BY_NAME),
    "timm": Converter(("litert-torch", "torch", "timm"), "", f"{_EXTRA} timm", _BY_NAME),
    # It requires one version of ai-edge-litert, hence an environment of its own.
    "onnx": Converter(
        ("onnx2tf", "onnxruntime"),
        "onnx2tf",
        "with Python 3.12, in an environment of its own whose commands are on the PATH: pip install onnx2tf",
        "onnx2tf -i {source} -o converted",
        "converted/{stem}_float32.tflite",
    ),
    "savedmodel": Converter(
        ("tensorflow",),
        "saved_model_cli",
        "pip install tensorflow ai-edge-litert, here or where its commands are on the PATH",
        "python -c \"import sys, tensorflow as tf; open('net.tflite', 'wb').write("
        'tf.lite.TFLiteConverter.from_saved_model(sys.argv[1]).convert())" {source}',
    ),
}
_MAKE = {"torchvision": "models.get_model", "timm": "create_model"}
_VERSIONS = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"


def kind_of(source: str) -> str | None:
    """Return the kind of foreign model of a name or path; None for what needs no converter."""
    if match := _NAMED.fullmatch(source):
        return match[1]
    if source.endswith((".pt2", ".onnx")):
        return source.rpartition(".")[2]
    return "savedmodel" if (Path(source) / "saved_model.pb").is_file() else None


def converted(source: str, kind: str) -> Path:
    """Return the ``.tflite`` file of a foreign model, converted unless it is cached.

    Raises:
        UnavailableError: the converter is not installed, or took too long.
        ModelError: there is no such model, it cannot be converted, its outputs differ, or the user has not named a
            ``.pt2`` or SavedModel.
        UsageError: the cache folder cannot be written.
    """
    converter, digest = _CONVERTERS[kind], _digest(source, kind)
    found = _environment(converter)
    if found is None:
        by_hand = _by_hand(source, kind)
        here = f"this is Python {sys.version_info.major}.{sys.version_info.minor}"
        raise UnavailableError(
            f"{source}: is no .tflite file, and its converter {converter.packages[0]} is not installed ({here})",
            f"{converter.install}; or convert it yourself: {by_hand}",
        )
    python, versions = found
    key = hashlib.sha256(f"{digest} {versions}".encode()).hexdigest()[:32]
    return cached(f"{kind}-{key}", _VERSION, lambda path: _convert(source, kind, python, path))


def _by_hand(source: str, kind: str) -> str:
    """Return the shell commands that convert a model and optimize the result."""
    library, _, name = source.partition(":")
    shape = "m.default_cfg['input_size']" if kind == "timm" else _shape(name)
    named = {"library": library, "name": name, "make": _MAKE.get(kind), "shape": shape}
    command = _CONVERTERS[kind].command.format(source=shlex.quote(source), **named)
    file = _CONVERTERS[kind].file.format(stem=Path(source).stem)
    return f"{command} && optimize {shlex.quote(file)}"


def _environment(converter: Converter) -> tuple[str, str] | None:
    """Return the interpreter of an environment that has a converter, this one first, and the versions there."""
    program = shutil.which(converter.program) if converter.program else None
    for python in (sys.executable, *([str(Path(program).with_name("python"))] if program else [])):
        command = [python, "-P", "-c", _VERSIONS, *converter.packages, "ai-edge-litert"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return python, done.stdout.strip()
    return None


def converted_module(module: Any, example_inputs: Sequence[Any]) -> Path:
    """Return the ``.tflite`` file that a ``torch.nn.Module`` was converted to.

    Raises:
        UnavailableError, ModelError: as :func:`converted`.
    """
    import torch

    with TemporaryDirectory() as folder:
        path = Path(folder) / "module.pt2"
        try:
            torch.export.save(torch.export.export(module.eval(), tuple(example_inputs)), path)
        except Exception as error:
            raise ModelError(f"torch.export does not take the module: {_first_line(error)}") from error
        from search_spaces.core.allowed_code import allow

        allow(str(path))  # the caller can run any code anyway
        return converted(str(path), "pt2")


def _digest(source: str, kind: str) -> str:
    """Return the files that a conversion reads with their digests; an ONNX file may keep weights in others."""
    if kind in {"torchvision", "timm"}:
        return source
    path = Path(source)
    try:
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        if not files:
            raise ModelError(f"there is no file {source!r}", "give the path of a model")
        if kind == "onnx" and path.stat().st_size:
            with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                named = (p for p in path.parent.iterdir() if p != path and content.find(os.fsencode(p.name)) >= 0)
                files += sorted(p for p in named if p.is_file())
        return " ".join(f"{os.path.relpath(file, path)} {file_digest(file)}" for file in files)
    except OSError as error:
        raise ModelError(f"{source}: {reason_of(error)}") from error


def _convert(source: str, kind: str, python: str, path: Path) -> None:
    """Run a converter in its own process, confined to this package and its limits."""
    if kind in {"pt2", "savedmodel"} and not is_allowed(source):
        raise ModelError(f"{source}: converting it can run code", "name it on the command line, not in a file or study")
    with TemporaryDirectory() as folder:
        work = Path(folder)
        words = [kind, source if kind in {"torchvision", "timm"} else str(Path(source).absolute()), str(path)]
        command = [python, "-P", "-m", __name__, *words]
        environment = os.environ | {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
        code = work / "code"  # only this package: others installed beside it may be for another Python
        code.mkdir()
        (code / __name__.partition(".")[0]).symlink_to(Path(__file__).absolute().parents[1])
        environment |= {"PYTHONPATH": str(code), "HOME": folder}
        try:
            done = subprocess.run(
                command, cwd=work, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"{source}: was not converted within {LIMIT_S} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = next((line.removeprefix(_SAID) for line in reversed(lines) if line.startswith(_SAID)), "")
        why = why or (lines[-1] if lines else f"the converter ended with {done.returncode}")
        raise ModelError(f"{source}: cannot be converted: {why[:300]}")


_SAID = "convert: "


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _confine() -> None:
    """Limit this process: memory, size of files, and no network, where the system permits."""
    import ctypes

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, most in (
        (resource.RLIMIT_DATA, int(_MEMORY_SHARE * total)),
        (resource.RLIMIT_FSIZE, _FILE_NBYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    ctypes.CDLL(None).unshare(_CLONE_NEWUSER | _CLONE_NEWNET)

    def refuse(event: str, _: object) -> None:
        if event in {"socket.connect", "socket.getaddrinfo", "socket.sendto"}:
            raise PermissionError("a converter has no network")

    sys.addaudithook(refuse)


def main() -> int:
    """Convert a model, as ``python -m search_spaces.models.convert KIND SOURCE FILE``."""
    kind, source, path = sys.argv[1:4]
    _confine()
    try:
        convert: dict[str, Callable[[str, str, Path], tuple[list[Array], Reference]]]
        convert = {"pt2": _from_torch, "torchvision": _from_torch, "timm": _from_torch}
        convert |= {"onnx": _from_onnx, "savedmodel": _from_savedmodel}
        inputs, reference = convert[kind](kind, source, Path(path))
        _compare(Path(path), inputs, reference)
    except Exception as error:  # noqa: BLE001 - converters raise anything
        sys.stderr.write(f"{_SAID}{_first_line(error)}\n")
        return 1
    return 0


def _from_torch(kind: str, source: str, path: Path) -> tuple[list[Array], Reference]:
    """Convert a module by litert-torch; return example inputs, and the module as a function."""
    import litert_torch
    import torch

    torch.manual_seed(0)
    if kind == "pt2":
        program = torch.export.load(source)
        module, (inputs, _) = program.module(), program.example_inputs
    else:
        module, shape = _architecture(source)
        inputs = (torch.randn(1, *shape),)
    litert_torch.convert(module, inputs).export(str(path))

    def run(arrays: Sequence[Array]) -> list[Array]:
        with torch.no_grad():
            found = module(*(torch.from_numpy(array) for array in arrays))
        return [tensor.numpy() for tensor in _flat(found)]

    return [tensor.numpy() for tensor in inputs], run


def _architecture(source: str) -> tuple[Any, tuple[int, ...]]:
    """Return a network of torchvision or timm with seeded weights, and the shape of an image for it."""
    library, _, name = source.partition(":")
    if library == "timm":
        import timm

        module = timm.create_model(name, pretrained=False)
        return _seeded(module), tuple(module.default_cfg["input_size"])
    import torchvision

    module = torchvision.models.get_model(name, weights=None)
    return _seeded(module), _shape(name)


def _shape(name: str) -> tuple[int, ...]:
    """Return the shape of an image for a network of torchvision."""
    return (3, 299, 299) if name == "inception_v3" else (3, 224, 224)


def _seeded(module: Any) -> Any:
    """Return a network whose all-zero weights are redrawn: a converter would fold away what they multiply."""
    import torch

    for name, weights in module.named_parameters():
        if name.endswith("weight") and not weights.any():
            torch.nn.init.uniform_(weights, 0.5, 1.5)
    return module.eval()


def _flat(found: Any) -> Iterator[Any]:
    """Yield the tensors of what a module returned."""
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, list | tuple):
        for each in found:
            yield from _flat(each)
    else:
        yield found


def _from_onnx(_: str, source: str, path: Path) -> tuple[list[Array], Reference]:
    """Convert by onnx2tf; the reference is ONNX Runtime, whose inputs keep the model's order of axes."""
    import onnx2tf
    import onnxruntime

    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    ports = session.get_inputs()
    names = [port.name for port in ports]
    onnx2tf.convert(
        input_onnx_file_path=source,
        output_folder_path="converted",
        keep_shape_absolutely_input_names=names,
        batch_size=1,
        non_verbose=True,
    )
    made = sorted(Path("converted").glob("*_float32.tflite"))
    if not made:
        raise ValueError("onnx2tf wrote no float32 model")
    path.write_bytes(made[0].read_bytes())
    rng = np.random.default_rng(0)
    kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}
    inputs = [
        rng.standard_normal([d if isinstance(d, int) else 1 for d in port.shape]).astype(kinds[port.type])
        for port in ports
    ]
    return inputs, lambda arrays: list(session.run(None, dict(zip(names, arrays, strict=True))))


def _from_savedmodel(_: str, source: str, path: Path) -> tuple[list[Array], Reference]:
    """Convert a SavedModel's serving signature by TensorFlow."""
    import tensorflow as tf

    path.write_bytes(tf.lite.TFLiteConverter.from_saved_model(source).convert())
    call = tf.saved_model.load(source).signatures["serving_default"]
    ports = sorted(call.structured_input_signature[1].items())
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal([d or 1 for d in s.shape]).astype(s.dtype.as_numpy_dtype) for _, s in ports]

    def run(arrays: Sequence[Array]) -> list[Array]:
        found = call(**{name: tf.constant(a) for (name, _), a in zip(ports, arrays, strict=True)})
        return [found[name].numpy() for name in sorted(found)]

    return inputs, run


def _compare(path: Path, inputs: Sequence[Array], reference: Reference) -> None:
    """Check that LiteRT computes the same outputs as the source framework.

    Raises:
        ValueError: an output differs by more than TOLERANCE, or has no counterpart.
    """
    from ai_edge_litert.interpreter import Interpreter

    wanted = reference(inputs)
    interpreter = Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    rest = list(inputs)
    for detail in interpreter.get_input_details():
        shape, dtype = tuple(detail["shape"]), detail["dtype"]
        place = next((i for i, a in enumerate(rest) if a.shape == shape and a.dtype == dtype), None)
        if place is None:
            raise ValueError(f"the converted model has an input of shape {shape} that the source has not")
        interpreter.set_tensor(detail["index"], rest.pop(place))
    interpreter.invoke()
    found = [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]
    for mine in found:
        # onnx2tf keeps the axes of inputs, and moves the channels of outputs to the end.
        moved = [np.moveaxis(w, 1, -1) for w in wanted if w.ndim > 2]
        alike = [w for w in (*wanted, *moved) if w.shape == mine.shape]
        off = min((_off(mine, w) for w in alike), default=np.inf)
        if not off <= TOLERANCE:
            raise ValueError(f"an output of shape {mine.shape} is off by {off:.1e} of its largest value")


def _off(mine: Array, wanted: Array) -> float:
    apart = np.abs(mine.astype(np.float64) - wanted.astype(np.float64)).max(initial=0.0)
    largest = np.abs(wanted.astype(np.float64)).max(initial=0.0)
    return float(apart / largest) if largest else float(apart)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
