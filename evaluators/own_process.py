"""Commands that run modules of this package in a separate process, with the same code as here."""

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

    The current folder is not searched for modules, as it may hold untrusted files. ``main()`` returns the exit code.

    Args:
        module: full name of the module.
        arguments: ``sys.argv[1:]`` for ``main()``.
    """
    return [sys.executable, "-P", "-c", _PROGRAM, _ROOT, module, *arguments]
