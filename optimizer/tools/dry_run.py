"""Dry run: what a study would search, without measuring anything."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from optimizer.report.console import make_console
from search_spaces.core.wording import many


def render(document: Mapping[str, Any]) -> str:
    """Return what :func:`~optimizer.study.course.foreseen` returned as text."""
    console = make_console()  # words stay whole on a terminal; a pipe gets a line for each name
    width = console.width if console.is_terminal else sys.maxsize
    lines = (f"{name:12}{_shown(value)}" for name, value in document.items())
    how: Any = {"subsequent_indent": " " * 12, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(line, width, **how) for line in lines)


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else many(value) if isinstance(value, int) else str(value)
