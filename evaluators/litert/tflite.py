"""``tflite-runtime``, the predecessor of LiteRT, as the runtime of a CPU lane.

Its last release (2.14) has wheels up to CPython 3.11 and needs NumPy 1. Only lane processes import it.
"""

from __future__ import annotations

import importlib.metadata
import sys

from search_spaces.errors import UnavailableError
from search_spaces.platform import Processor

RUNTIME = "tflite-runtime"
"""The name of the evaluator, of the extra, of the distribution, and of the word in a lane's name."""

_INSTALL = f"in an environment of Python 3.11: pip install 'partition-optimizer[{RUNTIME}]'"


def runs(processor: Processor) -> bool:
    """Return whether a lane runs its stages with ``tflite-runtime``."""
    return processor.options.get("runtime") == RUNTIME


def version() -> str:
    """Return the installed version.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        return importlib.metadata.version(RUNTIME)
    except importlib.metadata.PackageNotFoundError:
        found = f"this is Python {sys.version_info.major}.{sys.version_info.minor}"
        raise UnavailableError(f"{RUNTIME} is not installed ({found})", _INSTALL) from None


def check_installed() -> None:
    """Check that the runtime is there and can work.

    Raises:
        UnavailableError: it is not installed, or NumPy is too new for it.
    """
    mine = version()
    numpy = importlib.metadata.version("numpy")
    if int(numpy.split(".", maxsplit=1)[0]) >= 2:
        raise UnavailableError(f"{RUNTIME} {mine} does not work with NumPy {numpy}", _INSTALL)
