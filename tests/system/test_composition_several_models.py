"""Every pair of freedoms, objectives and states in studies of several models."""

from __future__ import annotations

import pytest

from tests.composition import AIMS, SUBSETS, Cell, here, pairs, passes, shown, tried

pytestmark = pytest.mark.usefixtures("elsewhere", "few_steps")


@pytest.mark.parametrize("cell", [c for c in pairs(["cost-model", "table"]) if c.several], ids=shown)
def test_every_pair_goes_together_or_is_refused_for_a_reason_that_is_listed(cell: Cell) -> None:
    passes(cell)


@pytest.mark.litert
@pytest.mark.parametrize("which", [3])
def test_two_models_with_every_freedom_are_measured(which: int) -> None:
    cell = Cell(SUBSETS[-1], several=True, aims=AIMS[which], evaluator="litert")
    came = tried(cell, here)
    assert came.how == "runs", came.why
