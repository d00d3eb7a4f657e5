"""Plans measured on this machine by LiteRT, with a process for each processor."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evaluators.litert.runner import PlanRunner, WorkloadRunner

__all__ = ["PlanRunner", "WorkloadRunner"]


def __getattr__(name: str) -> Any:
    # Workers import this package, too, and must start fast: only the runners import NumPy.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from evaluators.litert import runner

    return getattr(runner, name)
