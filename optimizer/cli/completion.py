"""Completion of a word in a shell: commands, options, names of models, platforms, evaluators and samplers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any

_COMPLETING = "_ARGCOMPLETE"
"""Set by a shell that asks for completions: the index, from 1, of the first word that argcomplete reads."""


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
    """Print the completions of a line and exit, where a shell asks for them.

    Args:
        commands: words that are offered where a model is expected.
    """
    if _COMPLETING not in os.environ:
        return
    import argcomplete

    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to its options
        names = _NAMES.get(action.dest)
        if names is not None:
            more = tuple(commands) if action.dest == "models" else ()
            setattr(action, "completer", _offering(names, more))  # noqa: B010 - which argparse does not declare
    argcomplete.autocomplete(parser)


def _offering(names: Callable[[], Iterable[str]], more: Iterable[str]) -> Callable[..., list[str]]:
    """Return a completer that offers names and existing files."""
    from argcomplete.completers import FilesCompleter

    files = FilesCompleter()

    def offered(prefix: str, **_: Any) -> list[str]:
        return [word for word in (*more, *names(), *files(prefix)) if word.startswith(prefix)]

    return offered


def _models() -> list[str]:
    from search_spaces.models.plugin import model_names
    from search_spaces.models.zoo.names import ZOO

    return [*ZOO, *model_names()]


def _platforms() -> list[str]:
    from search_spaces.core.platform_names import platform_names

    return platform_names()


def _evaluators() -> list[str]:
    from evaluators.registry import evaluator_names

    return evaluator_names()


def _samplers() -> list[str]:
    from optimizer.samplers import sampler_names

    return sampler_names()


_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "models": _models,
    "model": _models,
    "names": _models,
    "name": _models,
    "platform": _platforms,
    "evaluator": _evaluators,
    "sampler": _samplers,
}
"""Values to offer, by the option's name."""
