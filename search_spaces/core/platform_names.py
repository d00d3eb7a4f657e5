"""Platform files that ship with the product, by name: ``--platform NAME`` is ``experiments/platforms/NAME.yaml``."""

from __future__ import annotations

from pathlib import Path

from search_spaces.core.errors import UsageError, shown
from search_spaces.core.wording import did_you_mean

SHIPPED = Path(__file__).parents[2] / "experiments" / "platforms"
_SUFFIXES = (".yaml", ".yml", ".json")


def platform_names() -> list[str]:
    """Return the names of the platforms that ship with the product."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_platform_file(source: Path) -> Path:
    """Return the file that a path or a name stands for.

    An existing file takes precedence over a name. What looks like a path is returned as it is, and reading it reports
    what is wrong.

    Raises:
        UsageError: it is neither a file nor a name; the text lists similar names, or all of them.
    """
    name = str(source)
    if source.name != name or source.suffix in _SUFFIXES or _exists(source):
        return source
    known = platform_names()
    if name in known:
        return SHIPPED / f"{name}.yaml"
    hint = did_you_mean(name, known, f"platforms are: {', '.join(known)}", most=3, cutoff=0.5)
    raise UsageError(f"no platform or file is called {shown(name)}", hint)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is longer than any file's
        return False
