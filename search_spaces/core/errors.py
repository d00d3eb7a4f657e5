"""The errors of the product, each with its exit code.

::

    OptimizeError             1  a defect of the program, unless a subclass says otherwise
    ├── UsageError            2  wrong command line or configuration
    │   ├── ModelError        2  the model is unknown, missing, not a model, or damaged
    │   ├── PlanError         2  a plan does not fit its graph, or its file is damaged
    │   ├── RewriteError      2  a rewrite cannot be made of this model
    │   ├── ProfileError      2  a cost profile is damaged, or does not fit the platform or the model
    │   └── RunFolderError    2  a run folder cannot be written, read, or belongs to another study
    ├── InfeasibleError       3  no plan satisfies the constraints
    ├── UnavailableError      4  the evaluator, the device or the runtime cannot do it here
    │   └── DeviceLostError   4  a device disconnected while it measured; repeat when it is back, or on another
    └── UnstableError         5  too disturbed to decide; the best known plan is written all the same

An interrupted command ends with 130.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from search_spaces.core.constraints import Violation

EXIT_INTERRUPTED = 130
_SHOWN_CHARACTERS = 60
# Beginnings of Python's own messages, which do not tell a user what is wrong with a file.
_OF_PYTHON = (
    "could not convert",
    "dictionary update",
    "int too large",
    "invalid literal",
    "not enough",
    "too many values",
    "tuple.index",
    "Unknown format",
)


def shown(value: object) -> str:
    """Return a value from a file for a one-line error message: quoted, escaped and shortened."""
    text = reprlib.repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


def reason_of(error: Exception) -> str:
    """Return why something failed: the system's reason, which begins with a small letter as our messages do."""
    reason = getattr(error, "strerror", None)
    return reason[:1].lower() + reason[1:] if reason else str(error) or type(error).__name__


def absent(noun: str, index: int, count: int) -> str:
    """Return ``tensor 7; there are tensors 0 to 2`` for an index that no tensor has."""
    there = f"are {noun}s 0 to {count - 1}" if count > 1 else f"is only {noun} 0" if count else "is none"
    return f"{noun} {index}; there {there}"


def plain_name(name: str) -> str:
    """Return a name from a file as it is; one with control characters as :func:`shown` does."""
    return name if name.isprintable() else shown(name)


def damage(error: Exception) -> str:
    """Return in words why a document is damaged, given the error that reading it raised."""
    if isinstance(error, OptimizeError):
        return error.what
    if isinstance(error, KeyError):
        return f"{shown(error.args[0])} is missing"
    if isinstance(error, TypeError | AttributeError):
        return "a value has the wrong type"
    if isinstance(error, IndexError):
        return "an entry is missing"
    return "a value has the wrong type" if str(error).startswith(_OF_PYTHON) else str(error)


def printable(text: str) -> str:
    """Return text with control characters, which a terminal would obey, replaced; line ends are kept."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


class OptimizeError(Exception):
    """Base of all errors raised on purpose; its text is one line for the user: what, where, what to do.

    Args:
        what: what is wrong, with the wrong value.
        hint: what the user can do about it, or "".
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what, hint)
        self.what = printable(" ".join(what.split()))
        self.hint = printable(" ".join(hint.split()))

    def __str__(self) -> str:
        return f"{self.what}; {self.hint}" if self.hint else self.what


class UsageError(OptimizeError):
    """The command line or a configuration is wrong."""

    exit_code = 2


class ModelError(UsageError):
    """A model is unknown, missing, not a model, or damaged."""


class PlanError(UsageError):
    """A plan does not fit its graph, or a plan file is damaged."""


class RewriteError(UsageError):
    """A rewrite cannot be made of this model: which operator is in the way, and why."""


class ProfileError(UsageError):
    """A cost profile is damaged, or does not fit the platform or the model."""


class RunFolderError(UsageError):
    """A run folder cannot be written or read, or belongs to another study."""


class InfeasibleError(OptimizeError):
    """No plan satisfies the constraints.

    Args:
        what, hint: as of :class:`OptimizeError`.
        violations: the constraints that contradict each other, as data; () where they are not known.
    """

    exit_code = 3

    def __init__(self, what: str, hint: str = "", violations: tuple[Violation, ...] = ()) -> None:
        super().__init__(what, hint)
        self.violations = violations


class UnavailableError(OptimizeError):
    """The evaluator, the device or the runtime cannot do it on this machine."""

    exit_code = 4


class DeviceLostError(UnavailableError):
    """A device disconnected while it measured; the work may be repeated when it is back, or on another one."""


class UnstableError(OptimizeError):
    """Measurements vary too much to decide."""

    exit_code = 5


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Turn a package that is not installed into one line that names the extra which installs it.

    Raises:
        UnavailableError: instead of ImportError.
    """
    try:
        yield
    except ImportError as error:
        hint = f"pip install 'partition-optimizer[{extra}]'"
        raise UnavailableError(f"{what} needs the extra {extra!r}", hint) from error
