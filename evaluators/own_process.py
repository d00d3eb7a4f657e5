"""Functions of this package in a process of their own, with the very code that runs here."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])
_PROGRAM = """
import sys
from importlib import import_module
root, module = sys.argv.pop(1), sys.argv.pop(1)
if root not in sys.path:
    sys.path.insert(0, root)
sys.exit(import_module(module).main())
"""


def own_process(module: str, *arguments: str) -> list[str]:
    """Return the command that runs ``main()`` of a module, wherever this package was imported from.

    The current folder is not searched for modules: it may hold files of others. ``main()`` returns the exit code.

    Args:
        module: by its full name.
        arguments: what ``main()`` finds in ``sys.argv[1:]``.
    """
    return [sys.executable, "-P", "-c", _PROGRAM, _ROOT, module, *arguments]
