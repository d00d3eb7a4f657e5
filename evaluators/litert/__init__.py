"""Plans measured on this machine by LiteRT, each processor a process of its own."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evaluators.litert.runner import PlanRunner
    from evaluators.litert.workload_runner import WorkloadRunner

__all__ = ["PlanRunner", "WorkloadRunner"]


def __getattr__(name: str) -> Any:
    # Lanes import this package too and must stay light: NumPy comes in with the runners only.
    if name == "PlanRunner":
        from evaluators.litert.runner import PlanRunner

        return PlanRunner
    if name == "WorkloadRunner":
        from evaluators.litert.workload_runner import WorkloadRunner

        return WorkloadRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
