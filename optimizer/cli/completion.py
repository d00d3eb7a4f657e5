"""Completion of a word in a shell: commands, options, and for values names of ours, or files and folders that fit."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any

_COMPLETING = "_ARGCOMPLETE"
"""Set by a shell that requests completions: the index, from 1, of the first word that argcomplete reads."""


def completed_line() -> list[str]:
    """Return the words after the program that a shell asks to complete; empty where none does."""
    if _COMPLETING not in os.environ:
        return []
    line = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", "0") or 0)]
    words = line.split()
    return [*words[1:], ""] if line.endswith(" ") else words[1:]


def skip_command() -> None:
    """Let the shell's words begin after the command."""
    os.environ[_COMPLETING] = str(int(os.environ[_COMPLETING]) + 1)


def complete(parser: argparse.ArgumentParser, commands: Iterable[str] = ()) -> None:
    """Print the completions of a line and exit, where a shell requests them.

    Args:
        commands: words that are offered where a model is expected.
    """
    if _COMPLETING not in os.environ:
        return
    import argcomplete

    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to its options
        if (values := _VALUES.get(action.dest)) is not None:
            more = tuple(commands) if action.dest == "models" else ()
            setattr(action, "completer", values.completer(more))  # noqa: B010 - which argparse does not declare
    argcomplete.autocomplete(parser)


@dataclass(frozen=True, slots=True)
class _Values:
    """Values to offer for an option.

    Attributes:
        names: returns words.
        files: endings of files that are offered beside folders; () for any, None for no files and no folders.
        several: whether words follow each other with commas between them.
    """

    names: Callable[[], Iterable[str]] = tuple
    files: tuple[str, ...] | None = None
    several: bool = False

    def completer(self, more: Iterable[str]) -> Callable[..., list[str]]:
        """Return a completer that offers these values, and more words."""
        from argcomplete.completers import FilesCompleter

        files: Callable[[str], list[str]] = FilesCompleter(self.files) if self.files is not None else lambda _: []

        def offered(prefix: str, **_: Any) -> list[str]:
            given, comma, last = prefix.rpartition(",") if self.several else ("", "", prefix)
            words = (word for word in (*more, *self.names()) if word.startswith(last) and word not in given.split(","))
            return [*(given + comma + word for word in words), *files(prefix)]

        return offered


def _models() -> list[str]:
    from search_spaces.models.plugin import model_names
    from search_spaces.models.zoo.names import ZOO

    return [*ZOO, *model_names()]


def _call(where: str) -> Iterable[str]:
    """Return what a function returns, as ``module:function``, whose module is imported now."""
    found: Iterable[str] = resolve_name(where)()
    return found


def _objectives() -> list[str]:
    from evaluators.objectives import OBJECTIVES
    from evaluators.workload.outcome import OBJECTIVES as OF_WORKLOADS

    return list(dict.fromkeys((*OBJECTIVES, *OF_WORKLOADS)))


def _freedoms() -> list[str]:
    from search_spaces.core.plugins import entries
    from search_spaces.spaces.registry import EXACT, FREEDOMS

    return [*FREEDOMS, EXACT, *(entry.name for entry in entries("space"))]


_MODEL = _Values(_models, ())
_RUN = _Values(files=("json",))
_VALUES = {
    "models": _MODEL,
    "model": _MODEL,
    "name": _MODEL,
    "names": _Values(_models),
    "platform": _Values(partial(_call, "search_spaces.core.platform_file:platform_names"), ("yaml", "yml", "json")),
    "evaluator": _Values(partial(_call, "evaluators.registry:evaluator_names")),
    "robust": _Values(lambda: ("worst", "expected")),
    "sampler": _Values(partial(_call, "optimizer.samplers:sampler_names")),
    "objective": _Values(_objectives, several=True),
    "allow": _Values(_freedoms, several=True),
    "run": _RUN,
    "runs": _RUN,
    "plan": _RUN,
    "refine": _RUN,
    "warm_start": _RUN,
    "compare_with": _RUN,
    "file": _Values(files=("yaml", "yml", "json")),
    "figures": _Values(files=("yaml", "yml")),
}
"""Values to offer, by the option's name."""
