"""YAML documents that people write, read into typed parts so that every error names the file and the line."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from search_spaces.core.bounded import read_bounded
from search_spaces.core.errors import UsageError, reason_of, shown
from search_spaces.core.wording import did_you_mean

MAX_NBYTES = 256 << 10
_MAX_DEPTH = 8
_MOST_DIGITS = 4300
_MOST_SHOWN = 24  # letters of a number that a hint repeats
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str")}

Loc = tuple[str | int, ...]
"""Where a part of a document is: its keys and positions."""


def _printable(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("must be a word of text")
    return text


Word = Annotated[str, AfterValidator(_printable)]


def wrong(problem: str, hint: str = "", key: str = "") -> PydanticCustomError:
    """Return the error for a validator of a :class:`Part` to raise.

    Args:
        key: of the part, whose line is named.
    """
    return PydanticCustomError("wrong", "{problem}", {"problem": problem, "hint": hint, "key": key})


class Part(BaseModel):
    """A mapping in a document: it has no other keys than these, and its numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: object) -> object:
        keys = [field.alias or name for name, field in cls.model_fields.items()]
        if isinstance(data, dict) and (other := next((key for key in data if key not in keys), None)) is not None:
            hint = did_you_mean(other, keys, f"it may have: {', '.join(keys)}", cutoff=0.5, quoted=True)
            raise PydanticCustomError("unknown", "unknown", {"key": other, "hint": hint})
        return data


Content = TypeVar("Content", bound=Part)
Inner = TypeVar("Inner", bound=Part)


@dataclass(frozen=True, slots=True)
class Document(Generic[Content]):
    """A document and where its parts are in the file.

    Attributes:
        lines: the line of each part.
    """

    path: Path
    content: Content
    lines: Mapping[Loc, int]

    def error(self, loc: Loc, problem: str, hint: str = "") -> UsageError:
        """Return an error about a part of the document."""
        return _error(self.path, self.lines, loc, problem, hint)

    def part(self, loc: Loc, kind: type[Inner], what: str, data: object) -> Document[Inner]:
        """Return a part, of which the document has plain values, as a document of its own.

        Raises:
            UsageError: it is none.
        """
        lines = {at[len(loc) :]: line for at, line in self.lines.items() if at[: len(loc)] == loc}
        return Document(self.path, checked(self.path, kind, what, data, lines), lines)


def beside(file: Path, text: str) -> Path:
    """Return the path that a file names: relative to the file's folder, or to a home folder (``~``).

    Raises:
        UsageError: nobody has such a home folder.
    """
    try:
        return file.parent / Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{text}: there is no such home folder", "give the whole path") from error


def read_document(
    path: Path,
    kind: type[Content],
    what: str,
    empty: str = "",
    *,
    words: bool = True,
    most_nbytes: int = MAX_NBYTES,
    most_depth: int = _MAX_DEPTH,
) -> Document[Content]:
    """Read a file.

    Args:
        what: the kind of document, as ``a platform``, for the errors.
        empty: hint for a file without content.
        words: whether scalars are words, which the types of the parts convert; else what YAML takes them for.

    Raises:
        UsageError: it is missing, too large or not YAML, has aliases, is nested too deeply, or is no such document.
    """
    import yaml

    node = composed(path, what, empty or f"it must describe {what}", most_nbytes, most_depth)
    lines: dict[Loc, int] = {}
    with yaml_errors(path):
        data = _plain(path, None if words else yaml.SafeLoader(""), node, (), lines)
    return Document(path, checked(path, kind, what, data, lines), lines)


def checked(path: Path, kind: type[Content], what: str, data: object, lines: Mapping[Loc, int]) -> Content:
    """Return a document, or a part of one, from plain values.

    Raises:
        UsageError: it is none, in one line with file and line.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # A misspelled key is often why another one is missing.
        worst = next((e for e in found if e["type"] == "unknown"), found[0])
        raise _explained(path, what, lines, worst) from None


def plain_value(value: Any) -> Any:
    """Return a word as a number, a truth value or text, and a list of them as a list."""
    if isinstance(value, list):
        return [plain_value(each) for each in value]
    for convert in (int, float):
        try:
            return convert(value)
        except (TypeError, ValueError):
            continue
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _error(path: Path, lines: Mapping[Loc, int], loc: Loc, problem: str, hint: str = "") -> UsageError:
    known = next(loc[:n] for n in range(len(loc), -1, -1) if loc[:n] in lines)
    return UsageError(f"{path}:{lines[known]}: {problem}", hint)


def _explained(path: Path, what: str, lines: Mapping[Loc, int], error: ErrorDetails) -> UsageError:
    loc: Loc = tuple(error["loc"])
    while loc and loc not in lines and error["type"] != "missing":
        loc = loc[:-1]  # pydantic also names the branch of a union
    context = error.get("ctx", {})
    if error["type"] == "unknown":
        parent = next((str(part) for part in reversed(loc) if isinstance(part, str)), what)
        parent = f"an entry of {parent}" if loc and isinstance(loc[-1], int) else parent
        return _error(path, lines, (*loc, context["key"]), f"{parent} has no {shown(context['key'])}", context["hint"])
    if error["type"] == "wrong":
        loc = (*loc, *filter(None, [context["key"]]))
        return _error(path, lines, loc, context["problem"], context["hint"])
    where = ".".join(str(part) for part in loc)
    if error["type"] == "missing":
        return _error(path, lines, loc, f"{where} is missing")
    bounds = {key: f"{value:,.10g}" for key, value in context.items() if key in ("gt", "ge", "lt", "le")}
    problem = {
        "too_short": "must have at least one value",
        "too_long": f"must have at most {context.get('max_length')} values",
        **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
        **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "must be a number"),
        **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
        "string_type": "must be text",
        "literal_error": f"must be {context.get('expected')}",
        "greater_than": f"must be above {bounds.get('gt')}",
        "greater_than_equal": f"must be at least {bounds.get('ge')}",
        "less_than": f"must be below {bounds.get('lt')}",
        "less_than_equal": f"must be at most {bounds.get('le')}",
        "value_error": str(context.get("error")),
        **dict.fromkeys(("model_type", "dict_type"), "must be a mapping of keys to values"),
        **dict.fromkeys(("tuple_type", "list_type"), "must be a list"),
    }.get(error["type"], error["msg"][:1].lower() + error["msg"][1:])
    given = "" if not where or isinstance(error["input"], dict | list | tuple) else f" {shown(error['input'])}"
    # YAML takes 5e-4 for text.
    text = error["input"] if isinstance(error["input"], str) and len(error["input"]) <= _MOST_SHOWN else ""
    is_text = error["type"] in ("float_type", "int_type") and text
    number = plain_value(text) if is_text else None
    number = int(number) if isinstance(number, float) and number.is_integer() else number
    hint = f"write {number}" if isinstance(number, int | float) and math.isfinite(number) else ""
    return _error(path, lines, loc, f"{where or what}{given}: {problem}", hint)


def _plain(path: Path, loader: Any, node: Any, loc: Loc, lines: dict[Loc, int]) -> Any:
    """Return a node as plain values, and note the line of each part; a key that is there twice is an error.

    Args:
        loader: of PyYAML, which converts scalars; None where they are words.
    """
    lines[loc] = node.start_mark.line + 1
    if node.id == "sequence":
        return [_plain(path, loader, child, (*loc, i), lines) for i, child in enumerate(node.value)]
    if node.id == "scalar":
        return node.value if loader is None else _scalar(path, loader, node)
    found: dict[str, Any] = {}
    for key, value in node.value:
        name = str(key.value) if key.id == "scalar" else ""
        if name in found:
            raise UsageError(f"{path}:{key.start_mark.line + 1}: {shown(name)} is there twice", "keep one of the two")
        found[name] = _plain(path, loader, value, (*loc, name), lines)
        lines[*loc, name] = key.start_mark.line + 1
    return found


def _scalar(path: Path, loader: Any, node: Any) -> Any:
    if node.tag not in _PLAIN_TAGS:
        return node.value  # a date is text
    try:
        return loader.construct_object(node)
    except ValueError as error:  # as Python reads integers of at most 4300 digits
        what = "has too many digits" if len(node.value) > _MOST_DIGITS else "is not a number"
        raise UsageError(f"{path}:{node.start_mark.line + 1}: {shown(node.value)} {what}") from error


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings that a run folder keeps, as plain values that are not checked yet.

    Raises:
        UsageError: as of :func:`read_document`, or the document is not a mapping.
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
        what: the kind of document, as ``a platform``, for the errors.
        empty: hint for a file without content.

    Raises:
        UsageError: as of :func:`read_document`.
    """
    import yaml

    hint = f"give the path of a YAML file of {what}"
    try:
        content = read_bounded(path, most_nbytes)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {reason_of(error)}", hint) from error
    text = _text(path, content)
    with yaml_errors(path):
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            # A few lines of anchors can expand to gigabytes, and a few of brackets take minutes.
            where = path if event.start_mark is None else f"{path}:{event.start_mark.line + 1}"
            if isinstance(event, yaml.AliasEvent):
                raise UsageError(f"{where}: aliases (*{event.anchor}) are not read", "write the value out")
            if isinstance(event, yaml.ScalarEvent) and event.tag not in {None, "!"}:
                _check_tagged(event, str(where))
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > most_depth:
                raise UsageError(f"{where}: is nested more than {most_depth} deep")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        raise UsageError(f"{path}:1: the file is empty", empty)
    return root


def _text(path: Path, content: bytes) -> str:
    """Return the text of a file, whose characters YAML allows.

    Raises:
        UsageError: it is not UTF-8, or UTF-16 with a byte order mark, or has other characters.
    """
    import yaml

    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if wide else "utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: is not text in UTF-8", "save the file as UTF-8") from error
    if other := yaml.reader.Reader.NON_PRINTABLE.search(text):
        line = text[: other.start()].count("\n") + 1
        raise UsageError(f"{path}:{line}: has the character {other[0]!r}, which YAML does not allow", "remove it")
    return text


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
