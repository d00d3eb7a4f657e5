"""Who chooses the next plan, remembers what it cost, and tells a person: :func:`optimize` does it from Python."""

from __future__ import annotations

from optimizer.api import Options, optimize

__all__ = ["Options", "__version__", "optimize"]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("partition-optimizer")
    raise AttributeError(name)
