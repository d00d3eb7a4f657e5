"""The runtimes that a processor's stages can be run by: LiteRT, its predecessor ``tflite-runtime``, and OpenVINO.

Only worker processes load them. All but LiteRT read each stage as a model of its own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from search_spaces.core.errors import UnavailableError
from search_spaces.core.platform import Processor

LITERT, TFLITE, OPENVINO = "litert", "tflite-runtime", "openvino"
INTERPRETER = "interpreter"
"""LiteRT's interpreter, for stages that its compiled models do not run; the others are runtimes of a processor."""

PRECISIONS = ("f32", "f16", "bf16")
"""What a processor of OpenVINO can compute in; float32 is the default."""


@dataclass(frozen=True, slots=True)
class RuntimePackage:
    """What a runtime is installed as.

    Attributes:
        distribution: its name on the package index.
        module: what a process imports of it.
        install: what to do where it is missing.
    """

    distribution: str
    module: str
    install: str


PACKAGES = {
    LITERT: RuntimePackage("ai-edge-litert", "ai_edge_litert", "pip install ai-edge-litert"),
    # Its last release (2.14) has wheels up to CPython 3.11 and needs NumPy 1.
    TFLITE: RuntimePackage(
        "tflite-runtime",
        "tflite_runtime.interpreter",
        "in an environment of Python 3.11: pip install 'partition-optimizer[tflite-runtime]'",
    ),
    OPENVINO: RuntimePackage("openvino", "openvino", "pip install 'partition-optimizer[openvino]'"),
}


def package_folders(module: str) -> list[Path]:
    """Return where a package is installed, without importing it; nothing where it is not."""
    spec = importlib.util.find_spec(module)
    return [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]


def runtime_of(processor: Processor) -> str:
    """Return the runtime that runs a processor's stages."""
    return str(processor.options.get("runtime", LITERT))


def version(runtime: str) -> str:
    """Return the installed version.

    Raises:
        UnavailableError: it is not installed.
    """
    package = PACKAGES[runtime]
    try:
        return importlib.metadata.version(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        found = f"this is Python {sys.version_info.major}.{sys.version_info.minor}"
        raise UnavailableError(f"{package.distribution} is not installed ({found})", package.install) from None


def check_installed(runtime: str) -> None:
    """Check that a runtime is there and can work.

    Raises:
        UnavailableError: it is not installed, or NumPy is too new for it.
    """
    mine = version(runtime)
    numpy = importlib.metadata.version("numpy")
    if runtime == TFLITE and int(numpy.split(".", maxsplit=1)[0]) >= 2:
        raise UnavailableError(f"{runtime} {mine} does not work with NumPy {numpy}", PACKAGES[runtime].install)


def kernel_symbol(name: str) -> str:
    """Return what a library of ``--custom-ops`` calls its ``LiteRtCustomOpKernel`` of a custom operator."""
    return "litert_custom_op_" + re.sub(r"\W", "_", name)
