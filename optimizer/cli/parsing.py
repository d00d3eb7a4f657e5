"""What the parsers of all commands share: errors in one line, common options, completion in a shell."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from search_spaces.core.errors import UsageError, printable, shown

Add = Callable[..., object]
Work = Callable[["Parser", list[str]], int]
"""Does a command, given its parser and the words behind its name; its docstring is what its own help says."""

_MOST_NUMBER = 2**31 - 1
_COMPLETING = "_ARGCOMPLETE"
"""What the shell sets while it asks for completions: how many words of the line, less one, belong to the program."""


class Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line, as all our errors, and completes words for a shell that asks."""

    def error(self, message: str) -> NoReturn:
        """Raise the error instead of printing the usage."""
        _, _, unknown = message.partition("unrecognized arguments: ")
        if unknown.startswith("--"):
            word = unknown.split()[0].partition("=")[0]
            near = difflib.get_close_matches(word, self._option_string_actions, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            raise UsageError(f"there is no option {shown(word)}", hint)
        raise UsageError(message, f"see {self.prog} --help")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options, wherever they stand among the other words."""
        if _COMPLETING in os.environ:
            import argcomplete

            argcomplete.autocomplete(self)
        return self.parse_intermixed_args(arguments)

    def whole(self, option: str, text: str, least: int, most: int | None = None) -> int:
        """Return an option's whole number between two others.

        Raises:
            UsageError: it is none.
        """
        if not text.isdecimal() or not least <= int(text) <= (most or _MOST_NUMBER):
            self.error(f"{option} {text}: must be a whole number from {least}{f' to {most}' if most else ''}")
        return int(text)


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


def add_common(add: Add, *, quiet: bool = False, as_json: bool = True) -> None:
    """Add the options that commands have in common."""
    if as_json:
        add("--json", action="store_true", help="print one JSON document")
    if quiet:
        add("-q", "--quiet", action="store_true", help="no progress")
    add("--debug", action="store_true", help="a traceback with every error")


def add_model(add: Add) -> None:
    """Add the options that say which part of a model's file is meant."""
    shapes = "sizes of an input that the model leaves open (default: as in the file)"
    add("--input-shape", metavar="NAME=D,D,…", action="append", help=shapes)
    add("--signature", metavar="NAME", help="the model's signature to run (default: its main subgraph)")


def show(options: argparse.Namespace, document: Callable[[], object], text: Callable[[], Any]) -> None:
    """Print what was found: as JSON with ``--json``, else as a text or what Rich makes one of."""
    if options.json:
        print(json.dumps(document(), indent=2))
    elif isinstance(shown := text(), str):
        print(shown)
    else:
        from optimizer.report.console import make_console

        make_console().print(shown, crop=False)


def tell(text: str) -> None:
    """Print to stderr; where that is closed, nowhere: what is no data must not get among the data."""
    if sys.stderr is not None:
        print(printable(text), file=sys.stderr)
