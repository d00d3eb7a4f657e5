"""Thousands of damaged models: each is a graph or one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fuzz_reader import fuzz

CASES, PARTS = 3_000, 2


@pytest.mark.parametrize("part", range(PARTS))
def test_every_damaged_model_is_a_graph_or_one_line(tmp_path: Path, part: int) -> None:
    tally = fuzz(CASES // PARTS, part, keep=tmp_path / "failed.tflite")
    assert tally.refused + tally.read == CASES // PARTS
    assert min(tally.refused, tally.read) > CASES // PARTS // 10  # neither all noise nor all harmless
