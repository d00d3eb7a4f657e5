"""The search, its record and its reports; :func:`optimize` is the Python interface."""

from __future__ import annotations

from optimizer.api import Options, optimize

__all__ = ["Options", "__version__", "optimize"]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("partition-optimizer")
    raise AttributeError(name)
