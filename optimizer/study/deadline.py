"""The deadline of one inference: plans that the model rules out, and the errors where no plan meets it."""

from __future__ import annotations

from collections.abc import Callable

from search_spaces.core.constraints import Violation, infeasible
from search_spaces.core.errors import InfeasibleError
from search_spaces.core.plan import Plan

TRUST = 1.1
"""Plans are not run if the model predicts more than this multiple of the deadline: models are no more exact."""

_NONE = "no plan meets --deadline {bound}: the best one "
_LEVER = "allow a longer --deadline, more stages or more --processors"


def too_late(deadline_s: float, predict: Callable[[Plan], float], plan: Plan) -> tuple[Violation, ...]:
    """Return the violation of a plan that clearly misses a deadline under the model; () for any other."""
    expected_s = predict(plan)
    if expected_s <= TRUST * deadline_s:
        return ()
    sentence = "misses --deadline {bound}: {demand} predicted"
    return (Violation("predicted latency", expected_s, deadline_s, "s", _LEVER, sentence),)


def unreachable(deadline_s: float, bound_s: float) -> InfeasibleError | None:
    """Return the error for a deadline that the best plan under the model clearly misses."""
    if bound_s <= TRUST * deadline_s:
        return None
    sentence = f"{_NONE}takes {{demand}} in the model"
    return infeasible(Violation("latency of the best plan in the model", bound_s, deadline_s, "s", _LEVER, sentence))


def missed(deadline_s: float, best_s: float) -> InfeasibleError | None:
    """Return the error for a deadline that the best plan of a finished study misses."""
    if best_s <= deadline_s:
        return None
    sentence = f"{_NONE}found takes {{demand}}"
    return infeasible(Violation("latency of the best plan found", best_s, deadline_s, "s", _LEVER, sentence))
