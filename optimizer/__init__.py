"""The search, its record and its reports; :func:`optimize` is the Python interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optimizer.api import Options, optimize

if TYPE_CHECKING:
    from optimizer.study.result import Result as Result  # is heavy to import

__all__ = ["Options", "Result", "__version__", "optimize"]


def __getattr__(name: str) -> Any:
    if name == "Result":
        from optimizer.study.result import Result

        return Result
    if name == "__version__":
        from importlib.metadata import version

        return version("partition-optimizer")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
