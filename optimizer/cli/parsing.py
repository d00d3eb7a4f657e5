"""Shared parts of all commands' parsers: errors in one line, common options."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from optimizer.cli.completion import complete
from search_spaces.core.errors import UsageError, printable, shown
from search_spaces.core.wording import did_you_mean

Add = Callable[..., object]
Work = Callable[["Parser", list[str]], int | None]
"""A command: takes its parser and the words after its name, and returns its exit code, or None for 0.

Its docstring is the description in its help.
"""

_MOST_NUMBER = 2**31 - 1


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, and completes words for a shell."""

    commands: Sequence[str] = ()
    """Words that are offered where a model is expected."""

    def error(self, message: str) -> NoReturn:
        """Raise the error instead of printing the usage."""
        _, _, unknown = message.partition("unrecognized arguments: ")
        if unknown.startswith("--"):
            word = unknown.split()[0].partition("=")[0]
            hint = did_you_mean(word, self._option_string_actions, f"see {self.prog} --help")
            raise UsageError(f"there is no option {shown(word)}", hint)
        raise UsageError(message, f"see {self.prog} --help")

    def read(self, arguments: Sequence[str], *, quiet: bool = False, as_json: bool = True) -> argparse.Namespace:
        """Return the options of a command, those that commands have in common too."""
        add_common(self.add_argument, quiet=quiet, as_json=as_json)
        return self.parsed(arguments)

    def parsed(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options, at any place among the other words."""
        complete(self, self.commands)
        options = self.parse_intermixed_args(arguments)
        # Notes are about models and their inputs: commands that read a finished run leave them out.
        show_notes(on="input_shape" in options and not getattr(options, "quiet", False))
        return options

    def whole(self, option: str, text: str, least: int, most: int | None = None) -> int:
        """Return an option's value, a whole number from ``least`` to ``most``.

        Raises:
            UsageError: it is not a whole number, or out of range.
        """
        if not text.isdecimal() or not least <= int(text) <= (most or _MOST_NUMBER):
            self.error(f"{option} {text}: must be a whole number from {least}{f' to {most}' if most else ''}")
        return int(text)

    def above_0(self, option: str, text: str, most: float) -> float:
        """Return an option's value, a number above 0 and at most ``most``.

        Raises:
            UsageError: it is not a number, or out of range.
        """
        try:
            found = float(text)
        except ValueError:
            found = 0.0
        if not 0.0 < found <= most:
            self.error(f"{option} {text}: must be a number above 0, at most {most:g}")
        return found


def add_common(add: Add, *, quiet: bool = False, as_json: bool = True) -> None:
    """Add the options that commands have in common."""
    if as_json:
        add("--json", action="store_true", help="print one JSON document")
    if quiet:
        add("-q", "--quiet", action="store_true", help="no progress")
    add("--debug", action="store_true", help="a traceback with every error")


def add_shapes(add: Add) -> None:
    """Add the option with the sizes of a model's inputs."""
    shapes = "sizes of an input that the model leaves open (default: as in the file)"
    add("--input-shape", metavar="NAME=D,D,…", action="append", help=shapes)


def add_given(add: Add, *names: str) -> None:
    """Add options for inputs, signatures and custom operators; ``MODEL=…`` is for one of several models."""
    helps = {
        "input": ("FILE", "inputs to run on: .npy, or .npz with a name for each"),
        "signature": ("KEY", "the model's signature to run (default: its main subgraph)"),
        "custom_ops": ("LIBRARY", "a library with kernels of custom operators"),
    }
    for name in names:
        metavar, text = helps[name]
        of_one = f"{text}; MODEL={metavar} for one of several models"
        add(f"--{name.replace('_', '-')}", metavar=metavar, action="append", default=None, help=of_one)


def show(options: argparse.Namespace, document: Callable[[], object], text: Callable[[], Any]) -> None:
    """Print a result: as JSON with ``--json``, else as text or a Rich renderable."""
    if options.json:
        print(json.dumps(document(), indent=2))
    elif isinstance(shown := text(), str):
        print(shown)
    else:
        from optimizer.report.console import make_console

        make_console().print(shown, crop=False)


def show_notes(*, on: bool) -> None:
    """Write notes of the product to stderr, beside its warnings."""
    logging.getLogger("partition_optimizer").setLevel(logging.INFO if on else logging.NOTSET)


def note(text: str) -> None:
    """Print to stderr, which may be closed; stdout is for data."""
    if sys.stderr is not None:
        print(printable(text), file=sys.stderr)
