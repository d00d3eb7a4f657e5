"""What reads the command's output: pipes that are closed, full devices, terminals without Unicode."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.commands import ROOT, SYNTHETIC, command, one_line
from tests.support.sentences import says

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_a_reader_that_goes_away_is_no_error() -> None:
    for arguments in ([*SYNTHETIC, "--dry-run"], [*SYNTHETIC, "--dry-run", "--json"], ["models"]):
        read, write = os.pipe()
        os.close(read)
        run = command(arguments, stdout=write)
        os.close(write)
        assert (run.returncode, run.stderr) == (0, "")


def test_output_that_cannot_be_written_is_one_line() -> None:
    for arguments in ([*SYNTHETIC, "--budget", "2", "--out", "run", "--json"], ["models"]):
        with Path("/dev/full").open("w") as full:
            run = command(arguments, stdout=full, env={"PYTHONUNBUFFERED": ""})
        run.stdout = ""
        says(one_line(run, 2))


def test_an_interrupt_during_an_import_is_an_interrupt(tmp_path: Path) -> None:
    hook = """
import os, signal, sys

class Interrupts:
    def __set_name__(self, owner, name):  # before CPython 3.12 its KeyboardInterrupt becomes a RuntimeError
        os.kill(os.getpid(), signal.SIGINT)

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == "optimizer.study.course":
            type("Made", (), {"field": Interrupts()})

sys.meta_path.insert(0, Hook())
"""
    (tmp_path / "sitecustomize.py").write_text(hook)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    run = command([*SYNTHETIC, "--budget", "2000", "--out", "run"], env=env, cwd=tmp_path)
    assert run.returncode == 130, run.stderr
    assert "Traceback" not in run.stderr


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    run = command([*SYNTHETIC, "--budget", "12", "--out", "größe/run"], env={"PYTHONIOENCODING": "ascii"})
    assert (run.returncode, run.stderr) == (0, "")
    assert "whole on cpu" in run.stdout
