"""Tables of an explanation."""

from __future__ import annotations

from optimizer.tools.explain import _limits
from tests.support.sentences import says


def test_processors_that_no_plan_needs_share_a_row() -> None:
    limits = [
        {"what": f"no stage on {name}", "binds": False, "without_ms": 5.0 + more, "saves_ms": -more}
        for name, more in (("gpu", 2.0), ("cpu0", 0.0), ("cpu1", 0.0))
    ]
    table = _limits({"limits": limits, "best_predicted": None, "plan": None, "unit": "ms", "amount": "time"})
    says("\n".join(str(row[0]) for row in table.rows))
