"""The wall time of whole studies, alone or interleaved with those of an older checkout."""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.verdicts.document import judged
from tests.benchmarks.verdicts.studies import MODELS
from tests.benchmarks.verdicts.trace import student

STUDIES = {
    "vgg16": (["--model", MODELS["vgg16"]], 200),
    "vgg16 cuts": (["--model", MODELS["vgg16"], "--allow", "cuts"], 200),
    "small": (["--model", MODELS["small"]], 40),
}
"""Study → options of the model, budget; the older command searches cuts alone, and does not know ``--allow``."""

SMALL_S = 40.0
_FINAL_S, _FINAL_SHARE = 20.0, 0.2  # what a final may take: seconds, or a share of the study

Row = dict[str, Any]


def run(name: str, seed: int, before: str | None, budget: int | None = None) -> Row:
    """Time one study, and the same one by the older command, in an order that alternates with the seed."""
    commands = {"after_s": [sys.executable, "-m", "optimizer.cli"]}
    if before:
        commands["before_s"] = shlex.split(before)
    row: Row = {"study": name, "seed": seed}
    for which in sorted(commands, reverse=bool(seed % 2)):
        options, usual = STUDIES[name]
        known = options if which == "after_s" else options[:2]
        with tempfile.TemporaryDirectory() as folder:
            words = [*known, "--budget", str(budget or usual), "--seed", str(seed)]
            begin_s = time.monotonic()
            code, final_s = _run([*commands[which], *words, "--out", str(Path(folder) / "run")])
            row[which] = round(time.monotonic() - begin_s, 2)
            row[which.replace("_s", "_exit")] = code
            if which == "after_s":
                row["after_final_s"] = round(final_s, 2)
    return row


def _run(command: Sequence[str]) -> tuple[int, float]:
    """Run a study; return its exit code, and the seconds of its final by what it says of its progress."""
    begin_s = end_s = 0.0
    study = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with study as running:
        for line in running.stderr or ():
            if "final comparison" in line and not begin_s:
                begin_s = time.monotonic()
            if begin_s and not end_s and "stage files" in line:
                end_s = time.monotonic()
    return running.returncode, end_s - begin_s if end_s else 0.0


def judge(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the wall times of each study against the limits, and the paired difference where there is one."""
    found: dict[str, Any] = {}
    for name in STUDIES:
        own = [row for row in rows if row["study"] == name]
        if not own:
            continue
        after = [row["after_s"] for row in own]
        reported: dict[str, Any] = {"median_s": float(np.median(after)), "most_s": max(after), "limits": {}}
        pairs = [row for row in own if "before_s" in row]
        if pairs:
            differences = np.array([row["after_s"] - row["before_s"] for row in pairs])
            before_s = float(np.median([row["before_s"] for row in pairs]))
            mean, half = float(differences.mean()), _half(differences)
            interval_s = [mean - half, mean + half] if math.isfinite(half) else [None, None]  # of one pair
            reported |= {"before_median_s": before_s, "difference_s": [mean, *interval_s]}
            if name != "small":
                usual_s = max(_FINAL_S, _FINAL_SHARE * before_s)
                finals_s = [row["after_final_s"] for row in pairs if row.get("after_final_s")]
                reported["final_s"] = float(np.median(finals_s)) if finals_s else None
                reported["limits"]["difference_s"] = judged(mean, usual_s, most=True)
        if name == "small":
            reported["limits"]["most_s"] = judged(max(after), SMALL_S, most=True)
        found[name] = reported
    return found


def _half(values: np.ndarray[Any, Any]) -> float:
    """Return the half width of the 95 % interval of a mean."""
    if len(values) < 2:
        return math.inf
    return student(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
