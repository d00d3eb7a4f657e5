"""The command line as tests call it: within the test, or as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from optimizer.cli import main
from optimizer.study.log import Record, encode, header, read_log
from tests.support.sentences import says

ROOT = Path(__file__).parents[2]
SYNTHETIC = ["--model", "squeezenet1_1", "--evaluator", "synthetic", "--max-stages", "2", "--sampler", "random", "-q"]


SEARCHED = {0, 5}
"""Exit codes of a search that measured on this machine: beside other work it may end undecided, with a plan."""


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


def printed(on: Sequence[str], capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Return what a command prints that ends with a code: its data, or where it does not end well what it tells.

    Args:
        on: words that follow all others, as to where it runs.
    """
    capsys.readouterr()
    assert main([*words, *on]) == code
    out, err = capsys.readouterr()
    return out if code == 0 else err


def tells(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> None:
    """Check what a command prints that ends with a code."""
    says(printed((), capsys, *words, code=code))


def studied(on: Sequence[str], capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the document of a study that ends well; ``on`` as for :func:`printed`."""
    return answered(capsys, [*words, *on])


def tried(folder: str) -> list[str]:
    """Return the digests of the plans of a study's trials, in their order."""
    return [r.data["digest"] for r in read_log(Path(folder) / "trials.jsonl").records if r.kind == "trial"]


def rewrite_log(folder: str, keep: Callable[[Record], bool]) -> None:
    """Leave a study a log that has lost some of its records, as if they had been damaged."""
    log = Path(folder) / "trials.jsonl"
    kept = [r for r in read_log(log).records if keep(r)]
    log.write_bytes(header() + b"".join(encode(n, r.kind, r.data) for n, r in enumerate(kept, 1)))
