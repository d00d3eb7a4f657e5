"""For what the types say may be missing, though a test has made it."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def there(value: T | None) -> T:
    """Return a value that must be there."""
    assert value is not None
    return value
