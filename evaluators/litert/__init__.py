"""Plans measured on this machine by LiteRT, each processor a process of its own."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evaluators.litert.runner import PlanRunner

__all__ = ["PlanRunner"]


def __getattr__(name: str) -> Any:
    # Lanes import this package too and must stay light: NumPy comes in with the runner only.
    if name == "PlanRunner":
        from evaluators.litert.runner import PlanRunner

        return PlanRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
