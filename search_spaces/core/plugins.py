"""Plug-ins: what installed distributions add to the product by entry points; built-ins other than spaces do so, too.

====================================  ==============================================================================
group                                 what an entry names
====================================  ==============================================================================
``partition_optimizer.evaluators``    a class of evaluators whose constructor has no arguments
``partition_optimizer.spaces``        a function of graph, platform and maximum of stages that returns a search space
``partition_optimizer.samplers``      a class of Optuna samplers that takes ``seed=``
``partition_optimizer.models``        a function of a path that writes a ``.tflite`` file there
====================================  ==============================================================================

An entry may also name a mapping of names to such things, as ours do for samplers and models. A plug-in says which
version of the contract it keeps by an attribute ``contract_version``; without one it is version 1.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import FrameType
from typing import Any

from search_spaces.core.errors import OptimizeError, UnavailableError, UsageError
from search_spaces.core.wording import did_you_mean

PREFIX = "partition_optimizer."
KINDS = {"evaluator": "evaluators", "space": "spaces", "sampler": "samplers", "model": "models"}
CONTRACT_VERSION = 1
OURS = "partition-optimizer"
IMPORT_S = 30.0
_SHOWN_CHARACTERS = 200
_NOT_OF_PLUGINS = {"search_spaces", "evaluators", "optimizer", "contextlib"}
_NOT_OF_PLUGINS |= {"importlib", "importlib_metadata", "_frozen_importlib"}


class _TimeUp(BaseException):
    """Not an ``Exception``, so that a plug-in that swallows those does not swallow this one."""


def entries(kind: str) -> list[EntryPoint]:
    """Return the entry points of a kind of plug-in (a key of ``KINDS``), by name."""
    found = {(e.name, e.value, origin(e)): e for e in entry_points(group=PREFIX + KINDS[kind])}
    return [found[key] for key in sorted(found)]


def origin(entry: EntryPoint) -> str:
    """Return name and version of the distribution that an entry point comes from, or its value where none is known."""
    return " ".join(_named(entry.dist)) if entry.dist else entry.value


def is_ours(entry: EntryPoint) -> bool:
    """Tell whether an entry point is a built-in."""
    return entry.dist is not None and _named(entry.dist)[0] == OURS


@lru_cache(maxsize=16)
def _named(distribution: Distribution) -> tuple[str, str]:
    """Return name and version of a distribution, whose metadata is parsed anew each time that it is asked."""
    return distribution.name, distribution.version


def find_entry(kind: str, name: str) -> EntryPoint:
    """Return the entry point of a name.

    Raises:
        UsageError: there is none, or two distributions have one.
    """
    every = entries(kind)
    found = [e for e in every if e.name == name]
    if len(found) > 1:
        raise UsageError(
            f"{kind} {name!r} is in {' and in '.join(origin(e) for e in found)}", "uninstall one of the two"
        )
    if not found:
        names = sorted(e.name for e in every)
        hint = did_you_mean(name, names, f"installed are: {', '.join(names)}", most=3, cutoff=0.5)
        raise UsageError(f"there is no {kind} {name!r}", hint)
    return found[0]


def load_entry(kind: str, entry: EntryPoint, limit_s: float = IMPORT_S) -> Any:
    """Return what an entry point names.

    Raises:
        UnavailableError: it cannot be imported, takes longer than ``limit_s`` seconds for that, or is written for
            another version of the contract; the text names the distribution and the cause.
    """
    what = f"{kind} {entry.name!r} of {origin(entry)}"
    with foreign(f"{what} cannot be loaded"), time_limit(limit_s, f"{what}: importing it"):
        loaded = entry.load()
    version = contract_version(loaded)
    if version != CONTRACT_VERSION:
        raise UnavailableError(
            f"{what} is written for version {version} of the contract, and this program has {CONTRACT_VERSION}",
            "install versions that go together",
        )
    return loaded


def contract_version(loaded: object) -> object:
    """Return which version of the contract a plug-in says that it keeps."""
    return getattr(loaded, "contract_version", CONTRACT_VERSION)


class _Printed:
    """Sends what Python prints while a plug-in is called to the standard error: the standard output holds results."""

    def __init__(self) -> None:
        self._lock, self._running, self._ours = threading.Lock(), 0, sys.stdout

    def __enter__(self) -> None:
        with self._lock:
            if not self._running:
                self._ours, sys.stdout = sys.stdout, sys.stderr
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._running -= 1
            if not self._running and sys.stdout is sys.stderr:  # else something else took its place meanwhile
                sys.stdout = self._ours


_PRINTED = _Printed()


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """Turn whatever a plug-in raises into one line that begins with ``what``; OptimizeErrors and interrupts pass.

    What it prints goes to the standard error.

    Raises:
        UnavailableError: instead of any other exception, ``SystemExit`` among them.
    """
    try:
        with _PRINTED:
            yield
    except (OptimizeError, KeyboardInterrupt, GeneratorExit, _TimeUp):
        raise
    except BaseException as error:
        text = " ".join(str(error).split())
        short = text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
        shown = f"{type(error).__name__}{': ' if short else ''}{short}{place_of(error)}"
        raise UnavailableError(f"{what}: {shown}") from error


def place_of(error: BaseException) -> str:
    """Return where a plug-in's own code raised, as `` (file.py:12)``; "" where none of it ran."""
    frames = [
        (str(frame.f_globals.get("__name__")).partition(".")[0], frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    others = [found for found in frames if found[0] not in _NOT_OF_PLUGINS]
    own = [(frame, line) for package, frame, line in others if package == others[0][0]]
    return f" ({Path(own[-1][0].f_code.co_filename).name}:{own[-1][1]})" if own else ""


@contextmanager
def time_limit(seconds: float, what: str, hint: str = "see whether it hangs") -> Iterator[None]:
    """Interrupt what takes longer; there is no limit outside the main thread, which alone receives signals.

    A nested limit is no longer than what is left of the outer one, which continues afterwards.

    Raises:
        UnavailableError: the time was up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    begin_s = time.monotonic()
    outer_s, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)
    before = signal.getsignal(signal.SIGALRM)

    def ring(number: int, frame: FrameType | None) -> None:
        if 0.0 < outer_s < seconds and callable(before):
            before(number, frame)  # the outer limit has expired, not this one
        raise _TimeUp

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, outer_s or seconds))
    try:
        yield
    except _TimeUp:
        limit_s = min(seconds, outer_s or seconds)
        raise UnavailableError(f"{what} took longer than {limit_s:g} s", hint) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if outer_s:
            signal.setitimer(signal.ITIMER_REAL, max(outer_s - (time.monotonic() - begin_s), 1e-3))
