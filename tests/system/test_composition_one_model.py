"""Every pair of freedoms, objectives and states in studies of one model."""

from __future__ import annotations

import pytest

from tests.composition import Cell, pairs, passes, shown

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize("cell", [c for c in pairs(["cost-model", "table"]) if not c.several], ids=shown)
def test_every_pair_goes_together_or_is_refused_for_a_reason_that_is_listed(cell: Cell) -> None:
    passes(cell)
