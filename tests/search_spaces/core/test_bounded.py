"""Plain values of documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from search_spaces.core.bounded import Own, plain


class _Interrupted:
    def to_json(self) -> int:
        raise KeyboardInterrupt


@dataclass
class _Inner:
    each: Annotated[_Interrupted, Own(lambda _: _Interrupted())]


@dataclass
class _Outer:
    inner: list[_Inner]


def test_an_interrupt_while_a_value_is_written_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        plain(_Outer, _Outer([_Inner(_Interrupted())]))
