"""Limits on the outputs' error where they are measured."""

from __future__ import annotations

import json

import pytest

from optimizer.cli import main

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.litert
def test_outputs_that_differ_too_much_are_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "mobilenet_v1@0.25/128", "--processors", "cpu0,cpu0:builtin", "--max-stages", "2"]
    words += ["--budget", "6", "-q", "--json", "--max-error"]
    assert main([*words, "0", "--out", "exact"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["identical"]
    assert best["identical"] is True  # on float32 alone, or where float16 changes nothing, as in a pool


@pytest.mark.litert
def test_precision_is_chosen_stage_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "mobilenet_v1@0.25/128", "--processors", "cpu0,cpu0:f16", "--max-stages", "2"]
    words += ["--budget", "6", "-q", "--json", "--max-error"]
    code = main([*words, "0.05", "--out", "loose"])
    output = capsys.readouterr()
    if code == 4:
        pytest.skip(f"this processor has no float16: {output.err}")
    tried = json.loads(output.out)["baselines"]
    assert tried["whole on cpu0:f16"]["identical"] is False
    assert main([*words, "1e-9", "--out", "exact"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["identical"] is True  # on float32 alone, or where float16 changes nothing, as in a pool
