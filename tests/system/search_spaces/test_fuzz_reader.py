"""Thousands of damaged models: each is a graph or one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fuzz_reader import Tally, corpus, examine, fuzz

CASES, PARTS = 3_000, 2


def test_what_is_damaged_is_whole_to_begin_with(tmp_path: Path) -> None:
    tally = Tally()
    for content in corpus(tmp_path):
        (tmp_path / "m.tflite").write_bytes(content)
        for memory in (False, True):  # the first one imports what it needs
            examine(tmp_path / "m.tflite", tally, memory=memory)
    assert (tally.read, tally.refused) == (12, 0)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_damaged_model_is_a_graph_or_one_line(tmp_path: Path, part: int) -> None:
    tally = fuzz(CASES // PARTS, part, keep=tmp_path / "failed.tflite")
    assert tally.refused + tally.read == CASES // PARTS
    assert min(tally.refused, tally.read) > CASES // PARTS // 10  # neither all noise nor all harmless
