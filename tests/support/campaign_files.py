"""Campaign files, and the tables that campaigns end with, for tests."""

from __future__ import annotations

import csv
from pathlib import Path

MODEL = "squeezenet1_1@0.25/64"


def written(folder: Path, text: str) -> Path:
    """Write a campaign file and return its path."""
    path = folder / "campaign.yaml"
    path.write_text(text)
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table, a mapping from columns to text each."""
    with path.open() as file:
        return list(csv.DictReader(file))


def answers(folder: Path) -> list[list[str]]:
    """Return what the studies of a campaign found: the name, the best plan and its latency of each."""
    return [[row[name] for name in ("study", "plan", "latency_ms")] for row in rows_of(folder / "results.csv")]
