"""Trial logs to damage, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimizer.study.log import TrialLog

TRIALS: list[dict[str, Any]] = [{"parts": i, "latency_s": [0.1 / (i + 1)], "note": 'é\n{"n":1'} for i in range(3)]


def written(path: Path, data: list[dict[str, Any]] = TRIALS) -> bytes:
    """Write a log with these trials and return its content."""
    log, _ = TrialLog.open(path)
    with log:
        for entry in data:
            log.append("trial", entry)
    return path.read_bytes()
