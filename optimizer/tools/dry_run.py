"""Dry run: what a study would search, without measuring anything."""

from __future__ import annotations

import json
import sys
import textwrap
from typing import Any

from optimizer.report.console import make_console
from optimizer.study.config import StudyConfig
from optimizer.study.course import foreseen
from search_spaces.core.wording import many


def dry_run(config: StudyConfig, *, as_json: bool) -> str:
    """Return what to print; errors are those of :func:`~optimizer.study.course.foreseen`."""
    document = foreseen(config)
    if as_json:
        return json.dumps({"schema_version": 1, **document}, indent=2)
    console = make_console()  # words stay whole on a terminal; a pipe gets a line for each name
    width = console.width if console.is_terminal else sys.maxsize
    lines = (f"{name:12}{_shown(value)}" for name, value in document.items())
    how: Any = {"subsequent_indent": " " * 12, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(line, width, **how) for line in lines)


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else many(value) if isinstance(value, int) else str(value)
