"""The doctor of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.cli import main

pytestmark = pytest.mark.litert


def test_this_machine(capsys: pytest.CaptureFixture[str], cache_folder: Path) -> None:
    assert main(["doctor", "--model", "squeezenet1_1@0.5/64", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    names = {finding["name"] for finding in document["findings"]}
    assert names >= {"LiteRT", "cores", "governor", "other load", "steal", "free memory", "cache folder"}
    assert names >= {
        "Vulkan loader",
        "graphics adapters",
        "software adapters",
        "neural processor",
        "tflite-runtime",
        "OpenVINO",
    }
    assert document["usable"]
    refusals = {r["processor"]: r["operators"] for r in document["refusals"]}
    assert set(refusals) == {p["name"] for p in document["platform"]["processors"]}
    assert all(not operators for operators in refusals.values())
