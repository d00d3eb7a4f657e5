"""The runtimes that can run a processor's stages: LiteRT, its predecessor ``tflite-runtime``, and OpenVINO.

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
"""LiteRT's interpreter, for stages that LiteRT cannot run as compiled models; not a runtime of a processor."""

PRECISIONS = ("f32", "f16", "bf16")
"""Precisions of OpenVINO's processors; float32 is the default."""


@dataclass(frozen=True, slots=True)
class RuntimePackage:
    """How a runtime is installed.

    Attributes:
        distribution: its name on the package index.
        module: the module that a process imports.
        install: the hint where it is missing.
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
    """Return the folders of an installed package, without importing it; none where it is not installed."""
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
    """Check that a runtime is installed and works with the installed NumPy.

    Raises:
        UnavailableError: it is not installed, or NumPy is too new for it.
    """
    mine = version(runtime)
    numpy = importlib.metadata.version("numpy")
    if runtime == TFLITE and int(numpy.split(".", maxsplit=1)[0]) >= 2:
        raise UnavailableError(f"{runtime} {mine} does not work with NumPy {numpy}", PACKAGES[runtime].install)


def kernel_symbol(name: str) -> str:
    """Return the symbol under which a library of ``--custom-ops`` exports the kernel of a custom operator."""
    return "litert_custom_op_" + re.sub(r"\W", "_", name)
