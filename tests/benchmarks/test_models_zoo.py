"""The zoo: listing all of it takes at most 2 s; what building costs, per variant; what a spectrum costs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from optimizer.tools.models import summarise
from search_spaces.models.zoo import ZOO, write
from search_spaces.models.zoo.names import parse_name


def test_list_the_zoo(benchmark: BenchmarkFixture) -> None:
    listed = benchmark(lambda: [summarise(name) for name in ZOO])
    assert len(listed) == len(ZOO)
    assert _timed(benchmark).stats.stats.max < 2


@pytest.mark.parametrize("name", ["mobilebert", "densenet121", "retinaface@1.5"])
def test_draft(benchmark: BenchmarkFixture, name: str) -> None:
    """Structure alone: the largest number of operators, and the least regular ones."""
    assert benchmark(summarise, name).operators > 100


@pytest.mark.parametrize("suffix", ["", "+spectrum", ":f16", ":int8"])
def test_build_resnet50(benchmark: BenchmarkFixture, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    spec = parse_name(f"resnet50{suffix}")
    _timed(benchmark).pedantic(partial(write, spec, path), rounds=1)
    benchmark.extra_info["nbytes"] = path.stat().st_size
    path.unlink()  # pytest keeps the folder
    assert _timed(benchmark).stats.stats.max < 30


def _timed(benchmark: Any) -> Any:
    """Return the fixture itself; its ``pedantic`` and ``stats`` have no types."""
    return benchmark
