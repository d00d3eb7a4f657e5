"""Limits that several models keep together."""

from __future__ import annotations

import pytest

from search_spaces.core.plan import Plan
from tests.system.optimizer.workload.test_limits import memory_of, sparing_nbytes, study, two_clients


@pytest.mark.usefixtures("elsewhere")
def test_a_limit_that_is_kept_only_where_all_that_share_weights_are_decomposed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    memory, sets = memory_of((0.4, 0.4))
    least, plain = sparing_nbytes(memory, sets), memory.nbytes()
    assert least < plain < min(memory.nbytes([ranks, ()]) for ranks in sets[0])
    words = ("--workload", two_clients((0.4, 0.4), (least + plain) / 2), "--budget", "8")
    best = Plan.from_json(study(capsys, *words)["best"]["plan"])
    assert memory.of_plan(best) <= (least + plain) / 2
