"""The constraint solver CP-SAT of OR-Tools, an optional dependency: imported where it is used."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Literal

from search_spaces.core.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from ortools.sat.python import cp_model as cp

WORKERS = 2
Outcome = Literal["found", "infeasible", "no time"]
"""A solution exists; it is proven that none exists; or neither is known."""


def solver_module() -> Any:
    """Return the module ``ortools.sat.python.cp_model``.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UnavailableError(
            "exact solutions of graphs need OR-Tools, which is not installed",
            "install the extra: pip install 'partition-optimizer[exact]'",
        ) from error
    return cp_model


def check_time_limit(seconds: float) -> float:
    """Return a solver's time limit.

    Raises:
        UsageError: it is not more than 0.
    """
    if not 0 < seconds < math.inf:
        raise UsageError(f"--time-limit {seconds:g}: must be more than 0 seconds", "a proof takes time; try 10")
    return seconds


def run_solver(model: cp.CpModel, time_limit_s: float, *, workers: int = WORKERS) -> tuple[cp.CpSolver, Outcome]:
    """Solve a model; return the solver, which holds values and bound, and its status.

    Raises:
        RuntimeError: the model is none that the solver takes, for instance since its integers are too large.
        KeyboardInterrupt: Ctrl-C, or another exception of a signal's handler; the solver is stopped first.
    """
    module = solver_module()
    solver = module.CpSolver()
    solver.parameters.max_time_in_seconds = max(time_limit_s, 1e-3)
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 0
    # The solver's own handler would swallow Ctrl-C, and the next one would end the process with nothing saved.
    solver.parameters.catch_sigint_signal = False
    # Python runs signal handlers in the main thread between two instructions; a solve is one instruction.
    with ThreadPoolExecutor(1, thread_name_prefix="CP-SAT") as pool:
        solved = pool.submit(solver.solve, model)
        try:
            status = solved.result()
        finally:
            while not solved.done():
                solver.stop_search()
                wait([solved], 0.05)
    if status in (module.OPTIMAL, module.FEASIBLE):
        return solver, "found"
    if status == module.MODEL_INVALID:
        raise RuntimeError(f"the solver refuses the model: {model.validate()}")
    return solver, "infeasible" if status == module.INFEASIBLE else "no time"
