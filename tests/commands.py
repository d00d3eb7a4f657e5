"""The command line as tests call it: within the test, or as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from optimizer.cli import main

ROOT = Path(__file__).parents[1]
SYNTHETIC = ["--model", "squeezenet1_1", "--evaluator", "synthetic", "--max-stages", "2", "--sampler", "random", "-q"]


def answered(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> dict[str, Any]:
    """Return the document of a study that ends well."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def command(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    return subprocess.run(
        [sys.executable, "-m", "optimizer.cli", *arguments],
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=env,
        timeout=120,
        **options,
    )


def one_line(run: subprocess.CompletedProcess[str], code: int) -> str:
    assert run.returncode == code, run.stderr
    assert not run.stdout
    assert run.stderr.startswith("optimize: ")
    assert run.stderr.count("\n") == 1
    return run.stderr.strip()
