"""Modules of this package in a separate process, with the same code as here."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from search_spaces.core.errors import UnavailableError

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


def output_of(command: Sequence[str], limit_s: float) -> str:
    """Return what a command writes to its standard output.

    Raises:
        UnavailableError: it cannot be started, fails, or takes longer than ``limit_s``; the text is the reason alone.
    """
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"it did not end within {limit_s:g} s") from error
    except OSError as error:
        raise UnavailableError(str(error)) from error
    if run.returncode:
        lines = run.stderr.strip().splitlines()
        raise UnavailableError(lines[-1] if lines else f"exit code {run.returncode}")
    return run.stdout


def connected_process(
    module: str, *arguments: str, log: int, own_session: bool
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start ``main()`` of a module with one end of a socket pair; return the process and the other end.

    Args:
        arguments: ``sys.argv[2:]``; ``sys.argv[1]`` is the file descriptor of the process's end.
        log: file descriptor of its output.
        own_session: whether the process leads a session of its own, which Ctrl-C does not reach.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                own_process(module, str(theirs.fileno()), *arguments),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=own_session,
            )
    except BaseException:
        ours.close()
        raise
    return process, ours
