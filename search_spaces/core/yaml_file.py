"""YAML files that people write, read so that every error names the file and the line."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces.core.bounded import read_bounded
from search_spaces.core.errors import UsageError
from search_spaces.core.wording import did_you_mean

MAX_NBYTES = 256 << 10
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Value:
    """A node of the file and where it stands.

    Attributes:
        node: of PyYAML.
        path: of the file.
    """

    node: Any
    path: Path

    def error(self, problem: str, hint: str = "") -> UsageError:
        """Return the error for a problem here."""
        return UsageError(f"{self.path}:{self.node.start_mark.line + 1}: {problem}", hint)

    def fields(self, what: str, known: Collection[str], **needed: str) -> dict[str, Value]:
        """Return the values of a mapping whose keys must be among ``known``.

        Args:
            needed: key that must be there → the problem where it is not.
        """
        found: dict[str, Value] = {}
        for key, value in self.items(what):
            if key.text("a key") not in known:
                hint = did_you_mean(key.text("a key"), known, f"it may have: {', '.join(known)}", quoted=True)
                raise key.error(f"{what} has no {key.text('a key')!r}", hint)
            if key.text("a key") in found:
                raise key.error(f"{what} has {key.text('a key')!r} twice")
            found[key.text("a key")] = value
        if missing := next((problem for key, problem in needed.items() if key not in found), ""):
            raise self.error(missing)
        return found

    def items(self, what: str) -> Iterator[tuple[Value, Value]]:
        """Yield keys and values of what must be a mapping."""
        if self.node.id != "mapping":
            raise self.error(f"{what} must be a mapping of keys to values")
        for key, value in self.node.value:
            yield Value(key, self.path), Value(value, self.path)

    def each(self, what: str) -> list[Value]:
        """Return the entries of what must be a list that is not empty."""
        if self.node.id != "sequence" or not self.node.value:
            raise self.error(f"{what} must be a list with at least one entry")
        return [Value(node, self.path) for node in self.node.value]

    def text(self, what: str) -> str:
        """Return a scalar that must be printable."""
        if self.node.id != "scalar" or not self.node.value or not self.node.value.isprintable():
            raise self.error(f"{what} must be a word of text")
        return str(self.node.value)

    def number(self, what: str, *, above: float = 0.0, most: float = math.inf) -> float:
        """Return a scalar that must be a finite number of at least ``above`` and at most ``most``."""
        try:
            found = float(self.node.value)
        except (TypeError, ValueError):
            found = math.nan
        if not above <= found <= most or not math.isfinite(found):
            limits = f"from {above:g} to {most:,.10g}" if math.isfinite(most) else f"of at least {above:g}"
            raise self.error(f"{what} must be a number {limits}")
        return found

    def plain(self) -> Any:
        """Return a scalar as a number, a truth value or text, and a list of them as a list."""
        if self.node.id == "sequence":
            return [Value(node, self.path).plain() for node in self.node.value]
        text = self.text("an option")
        for convert in (int, float):
            try:
                return convert(text)
            except ValueError:
                continue
        return {"true": True, "false": False}.get(text, text)


def parsed(path: Path, what: str) -> Value:
    """Read a file.

    Args:
        what: the kind of document, as ``a platform``, for the errors.

    Raises:
        UsageError: it is missing, too large or not YAML, has aliases, or is nested too deeply.
    """
    return Value(composed(path, what, f"it must describe {what}"), path)


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings that a run folder keeps, as plain values that are not checked yet.

    Raises:
        UsageError: as of :func:`parsed`, or the document is not a mapping.
    """
    import yaml

    node = composed(path, "settings", "give a run folder that is whole")
    with yaml_errors(path):
        found = yaml.SafeLoader("").construct_document(node)
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UsageError(f"{path}: holds no settings", "give a run folder that is whole")
    return found


def composed(path: Path, what: str, empty: str, most_nbytes: int = MAX_NBYTES, most_depth: int = _MAX_DEPTH) -> Any:
    """Return the root node of a file, whose scalars are not converted yet.

    Args:
        what: as of :func:`parsed`.
        empty: hint for a file without content.

    Raises:
        UsageError: as of :func:`parsed`.
    """
    import yaml

    hint = f"give the path of a YAML file of {what}"
    try:
        content = read_bounded(path, most_nbytes)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path}: {reason.lower()}", hint) from error
    with yaml_errors(path):
        depth = 0
        for event in yaml.parse(content, Loader=yaml.SafeLoader):
            # A few lines of anchors can expand to gigabytes, and a few of brackets take minutes.
            where = path if event.start_mark is None else f"{path}:{event.start_mark.line + 1}"
            if isinstance(event, yaml.AliasEvent):
                raise UsageError(f"{where}: aliases (*{event.anchor}) are not read", "write the value out")
            if isinstance(event, yaml.ScalarEvent) and event.tag not in {None, "!"}:
                _check_tagged(event, str(where))
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > most_depth:
                raise UsageError(f"{where}: is nested more than {most_depth} deep")
        root = yaml.compose(content, Loader=yaml.SafeLoader)
    if root is None:
        raise UsageError(f"{path}:1: the file is empty", empty)
    return root


def _check_tagged(event: Any, where: str) -> None:
    """Check that a scalar is what its tag says (``!!int ""`` is not), where PyYAML raises all kinds of errors.

    Raises:
        UsageError: it is not.
        yaml.YAMLError: there is no such tag.
    """
    import yaml

    loader = yaml.SafeLoader("")
    try:
        loader.construct_object(yaml.ScalarNode(event.tag, event.value, event.start_mark))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind = event.tag.rpartition(":")[2]
        raise UsageError(f"{where}: {event.value[:40]!r} is not of type {kind}", "leave the tag out") from error


@contextmanager
def yaml_errors(path: Path) -> Iterator[None]:
    """Turn what the parser of YAML raises into one line.

    Raises:
        UsageError: with the line of the file ``path`` where it is known.
    """
    import yaml

    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = path if mark is None else f"{path}:{mark.line + 1}"
        raise UsageError(f"{where}: is not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"{path}: is not YAML: {str(error) or type(error).__name__}") from error
