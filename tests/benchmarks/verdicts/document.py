"""The results file: one section for each part and condition, written atomically as soon as something is known."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.files import write_json
from optimizer.provenance import provenance

SCHEMA_VERSION = 1
_PRIVATE = frozenset({"--before"})  # options whose value names paths of one machine
_BESIDE = "--beside"  # its value stands in each section

Section = dict[str, Any]


class Document:
    """The results file.

    Args:
        path: of the file; sections that it holds already are kept.
        arguments: of the command line, noted in every section without paths.
        beside: what else the machine did, noted in every section.
    """

    def __init__(self, path: Path, arguments: Sequence[str] = (), beside: str = "") -> None:
        self.path = path
        self._beside = {"beside": beside} if beside else {}
        self._command = shlex.join(["python", "-m", "tests.benchmarks.verdicts", "OUT.json", *_public(arguments)])
        self.content: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "parts": {}}
        if path.exists():
            self.content = json.loads(path.read_text())

    def begin(self, part: str, key: str, *, again: bool = False, rows: int | None = None) -> Section | None:
        """Return a section to fill, with the rows of an interrupted run; None where it is complete.

        Args:
            again: make it anew.
            rows: how many it is to have; one that has fewer is not complete.
        """
        sections = self.content["parts"].setdefault(part, {})
        section: Section = {} if again else sections.get(key, {})
        if section.get("complete") and len(section["rows"]) >= (rows or 0):
            return None
        section = {"command": self._command, **provenance(), **self._beside, "rows": [], **section, "complete": False}
        sections[key] = section
        return section

    def section(self, part: str, key: str) -> Section | None:
        """Return a complete section; None where there is none."""
        found: Section = self.content["parts"].get(part, {}).get(key, {})
        return found if found.get("complete") else None

    def sections(self, part: str) -> Mapping[str, Section]:
        """Return all sections of a part, complete or not."""
        found: dict[str, Section] = self.content["parts"].get(part, {})
        return found

    def add(self, section: Section, row: Mapping[str, Any]) -> None:
        """Append a row to a section and write the file."""
        section["rows"].append(dict(row))
        self.save()

    def finish(self, section: Section, **found: Any) -> None:
        """Write a section's results and mark it as complete."""
        section.update(found, complete=True)
        self.save()

    def save(self) -> None:
        """Replace the file; a reader sees the old content or the new."""
        write_json(self.path, self.content)


def judged(value: float, limit: float, *, most: bool) -> dict[str, Any]:
    """Return a value with its limit, and whether it keeps it."""
    return {"value": value, "limit": limit, "kept": value <= limit if most else value >= limit}


def _public(arguments: Sequence[str]) -> list[str]:
    hidden = {i + 1 for i, word in enumerate(arguments) if word in _PRIVATE}
    noted = {j for i, word in enumerate(arguments) if word == _BESIDE for j in (i, i + 1)}
    return ["COMMAND" if i in hidden else word for i, word in enumerate(arguments) if i not in noted]
