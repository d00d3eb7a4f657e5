"""Safe reading of untrusted input: regular files of bounded size, JSON without NaN or huge numbers, typed values."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from search_spaces.core.errors import OptimizeError, damage

Built = TypeVar("Built")
MOST_NBYTES = 64 << 20
_MOST_DIGITS = 300  # every integer of this many digits fits into a float
_SHOWN = 40  # characters of a key from a file
_NO_MAPPING = "input should be a valid dictionary"  # pydantic's message for mappings, used for dataclasses too


def read_bounded(path: Path, most_nbytes: int = MOST_NBYTES) -> bytes:
    """Return the content of a file, which may be changed or replaced meanwhile.

    Raises:
        OSError: it cannot be read, is a pipe, a device or a folder, or holds more than ``most_nbytes`` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for a writer
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        content = b""
        if found.st_size <= most_nbytes:
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                content = file.read(most_nbytes + 1)  # it may grow meanwhile
        if max(len(content), found.st_size) > most_nbytes:
            raise OSError(errno.EFBIG, f"a file of this kind has at most {most_nbytes} bytes", str(path))
    finally:
        os.close(descriptor)
    return content


def parsed_json(content: str | bytes) -> Any:
    """Return the value of a JSON document.

    Raises:
        ValueError: it is not JSON, or holds NaN, an infinity, or an integer of more than 300 digits.
        RecursionError: it is nested too deeply.
    """
    try:
        return json.loads(content, parse_constant=_no_number, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON at line {error.lineno}, column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise ValueError("it is not text") from error


def built(kind: type[Built], data: object, what: str, error: type[OptimizeError]) -> Built:
    """Return a value of a type from plain values; unknown fields are ignored.

    Args:
        what: the subject of the error's sentence, as ``the job times in the log are``.

    Raises:
        OptimizeError: ``error``, where a field is missing, has the wrong type, or an invalid value.
    """
    from pydantic import ValidationError

    hashed: Any = kind
    try:
        found: Built = _adapter(hashed).validate_python(data)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        where = ".".join(each if len(each) <= _SHOWN else f"{each[:_SHOWN]}…" for each in map(str, first["loc"]))
        why = _NO_MAPPING if first["type"] == "dataclass_type" else first["msg"].lower()
        raise error(": ".join((f"{what} damaged", *filter(None, [where]), why))) from problem
    except OptimizeError as problem:
        raise error(f"{what} damaged: {problem.what}", problem.hint) from problem
    return found


def plain(kind: type[Built], value: Built) -> Any:
    """Return a value of a type as plain values, which :func:`built` takes; a twentieth of ``asdict``'s time."""
    from pydantic_core import PydanticSerializationError

    hashed: Any = kind
    try:
        return _adapter(hashed).dump_python(value)
    except PydanticSerializationError as error:  # what a field's writer raises comes wrapped, Ctrl-C too
        raise error.__cause__ or error from None


@dataclass(frozen=True, slots=True)
class Own:
    """Marks a field's type that reads its plain values itself, with ``read``, and writes them with its ``to_json``."""

    read: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, kind: object, handler: object) -> Any:
        from pydantic_core import core_schema

        def read(data: object) -> Any:
            try:
                return self.read(data)
            except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
                raise ValueError(damage(error)) from error

        written = core_schema.plain_serializer_function_ser_schema(lambda value: value.to_json())
        return core_schema.no_info_plain_validator_function(read, serialization=written)


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
