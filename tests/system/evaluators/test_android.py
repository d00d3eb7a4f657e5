"""The phone's way of the guide: a study behind an adb server, its plan in a folder, and one command that runs it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from evaluators.android.adb import Phone
from tests.support.adb_server import SERIAL, phone_in_farm
from tests.support.commands import answered, tells
from tests.support.sentences import says

THERE = "/data/local/tmp/plan"


def test_from_a_phone_to_a_plan_that_runs_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "squeezenet1_1@0.25/64", "--budget", "5", "--max-stages", "2", "--evaluator", "adb"]
    run, plan = tmp_path / "run", tmp_path / "plan"
    with phone_in_farm(tmp_path, monkeypatch) as server:
        result = answered(capsys, [*words, "--device", "pixel", "--out", str(run), "-q"])
        assert result["unique_plans"] == 5
        assert {s["processor"] for s in result["best"]["plan"]["stages"]} <= {"big", "gpu"}
        tells(capsys, "execute", str(run))
        tells(capsys, "export", str(run), "--target", "android", "--out", str(plan))
        for name in ("run_plan", "libLiteRt.so"):
            (plan / name).touch()
        found = answered(capsys, ["export", str(run), "--target", "android", "--out", str(plan)])
        assert found["missing"] == []  # what was built is kept
        for name in ("run_plan", "libLiteRt.so"):
            (plan / name).unlink()

        phone = Phone(SERIAL, "127.0.0.1", server.server_address[1])
        server.run(["mkdir", "-p", THERE])
        for file in plan.iterdir():  # what adb push does
            phone.push(file, f"{THERE}/{file.name}")
        code, _, errors = phone.shell(["sh", f"{THERE}/run.sh"])
        assert code == 4
        says(errors.decode())
        # A stand-in for what the NDK builds: it tells what it was called with, and what it has beside it.
        stand_in = tmp_path / "run_plan"
        stand_in.write_text('#!/bin/sh\necho "$@" "$LD_LIBRARY_PATH"; grep -c "^stage " "$1/plan.txt"\n')
        phone.push(stand_in, f"{THERE}/run_plan")
        phone.push(stand_in, f"{THERE}/libLiteRt.so")
        code, out, _ = phone.shell(["sh", f"{THERE}/run.sh", "20"])
        assert code == 0
        assert out.decode().splitlines() == [
            f". 20 .:{os.environ.get('LD_LIBRARY_PATH', '')}",
            str(len(result["best"]["plan"]["stages"])),
        ]
        # What Debian's compiler builds for Linux brings its C library along, whose loader starts it.
        server.run(["mkdir", "-p", f"{THERE}/glibc"])
        stand_in.write_text('#!/bin/sh\necho "$0" "$@"\n')
        phone.push(stand_in, f"{THERE}/glibc/ld-linux-aarch64.so.1")
        code, out, _ = phone.shell(["sh", f"{THERE}/run.sh", "20"])
        assert code == 0
        says(out.decode())
    processors = {
        p["name"]: p["options"] for p in json.loads((plan / "plan.json").read_text())["platform"]["processors"]
    }
    assert processors.get("big", {"cores": [4, 5, 6, 7]})["cores"] == [4, 5, 6, 7]  # its mask is f0
    assert processors.get("gpu", {"precision": "f16"})["precision"] == "f16"
