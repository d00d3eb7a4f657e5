"""Models of plug-ins: a function writes the file, which is cached."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from search_spaces.core.errors import UnavailableError
from search_spaces.core.plugins import entries, find_entry, foreign, is_ours, load_entry, origin
from search_spaces.models.cache import cached

_VERSION = 1


def model_names() -> list[str]:
    """Return the names of the models that plug-ins offer; those of the zoo are not among them."""
    return sorted({entry.name for entry in entries("model") if not is_ours(entry)})


def built(name: str) -> Path:
    """Return the file of a plug-in's model, built unless it is cached for this version of the distribution.

    Raises:
        UsageError: there is none of this name, or the cache folder cannot be written.
        UnavailableError: the plug-in cannot be loaded, or its function failed; the text names the distribution.
    """
    entry = find_entry("model", name)
    write = load_entry("model", entry)
    what = f"model {name!r} of {origin(entry)}"

    def checked(path: Path) -> None:
        with foreign(f"{what} cannot be built"):
            write(path)
        if not path.is_file():
            raise UnavailableError(f"{what}: its function wrote no file")

    version = hashlib.sha256(f"{entry.value} {origin(entry)}".encode()).hexdigest()[:12]
    return cached(f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{version}", _VERSION, checked)
