"""Counts of memory traffic, by a stand-in for NVIDIA's ncu."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluators.cuda.traffic import counted, counts_here
from search_spaces.core.errors import UnavailableError
from tests.support.commands import tells
from tests.support.sentences import fails

ROWS = """==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","gemm","dram__bytes_read.sum","byte","1,000,000"
"0","gemm","dram__bytes_write.sum","byte","500,000"
"0","gemm","lts__t_sectors_srcunit_tex.sum","sector","100,000"
"1","relu","dram__bytes_read.sum","byte","250,000"
"1","relu","dram__bytes_write.sum","byte","0"
"1","relu","lts__t_sectors_srcunit_tex.sum","sector","25,000"
"""


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not counts_here()
    return tmp_path / "ncu"


def says(ncu: Path, text: str, code: int = 0) -> None:
    ncu.with_name("said").write_text(text)
    ncu.write_text(f'#!/bin/sh\nwhile read -r line; do echo "$line"; done < {ncu.with_name("said")}\nexit {code}\n')
    ncu.chmod(0o755)


def test_counters_of_all_kernels_are_summed(ncu: Path) -> None:
    says(ncu, ROWS)
    assert counts_here()
    assert counted({"path": "m", "jobs": []}) == {"memory_mb": 1.75, "second_level_mb": 4.0, "kernels": 2}


@pytest.mark.parametrize(
    "text",
    ["==ERROR== ERR_NVGPUCTRPERM: no permission\n", '"ID","Metric Name"\n"0","x"\n', ""],
    ids=["refused", "other", "nothing"],
)
def test_what_is_no_count_is_an_error(ncu: Path, text: str) -> None:
    says(ncu, text, 1)
    with fails(UnavailableError):
        counted({"path": "m", "jobs": []})


def test_an_evaluator_without_counters_refuses_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "mobilenet_v1@0.25/32", "--evaluator", "cost-model", "--platform", "pixel4", "--count-traffic"]
    for more in ((), ("--dry-run",)):
        tells(capsys, *words, "-q", *more, code=2)
