"""List of plug-ins for ``optimize plugins``: evaluators, spaces, samplers and models, and which of them are broken.

Each plug-in that is not ours is loaded in a process of its own, so that one that crashes or hangs is reported in its
row of the table. ``python -m optimizer.tools.plugins KIND NAME SECONDS`` is that process.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint
from typing import Any

from rich.table import Table
from rich.text import Text

from evaluators.own_process import own_process
from evaluators.registry import make_evaluator
from optimizer.report.terminal import table
from search_spaces.core.errors import OptimizeError
from search_spaces.core.plugins import (
    CONTRACT_VERSION,
    IMPORT_S,
    KINDS,
    contract_version,
    entries,
    find_entry,
    is_ours,
    load_entry,
    origin,
    time_limit,
)

SCHEMA_VERSION = 1
_START_S = 10.0  # for the interpreter of the process that tries a plug-in


@dataclass(frozen=True, slots=True)
class Plugin:
    """One row of the table.

    Attributes:
        kind: a key of :data:`search_spaces.core.plugins.KINDS`.
        distribution: name and version of the package that it comes from.
        contract: version of the contract that it declares; None if it could not be loaded.
        problem: why it cannot be used, or "".
        processors: names of an evaluator's, where it is not ours.
        absent: why it names no processors now, or "".
    """

    kind: str
    name: str
    distribution: str
    contract: int | None
    problem: str
    processors: tuple[str, ...] = ()
    absent: str = ""

    @property
    def note(self) -> str:
        """What is to be said of it."""
        if self.problem:
            return f"broken: {self.problem}"
        return f"not available now: {self.absent}" if self.absent else ", ".join(self.processors)


def list_plugins(limit_s: float = IMPORT_S) -> list[Plugin]:
    """Return what is installed, by kind and name; a plug-in that does not import within ``limit_s`` is broken."""
    return [row for kind in KINDS for entry in entries(kind) for row in _rows(kind, entry, limit_s)]


def other_evaluators(limit_s: float = IMPORT_S) -> list[Plugin]:
    """Return the installed evaluators that are not ours, by name."""
    return [_tried("evaluator", entry, limit_s) for entry in entries("evaluator") if not is_ours(entry)]


def to_json(found: list[Plugin]) -> dict[str, Any]:
    """Return the document that ``optimize plugins --json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "contract_version": CONTRACT_VERSION,
        "plugins": [asdict(plugin) for plugin in found],
    }


def render(found: list[Plugin]) -> Table:
    """Return the table for a terminal."""
    rows = []
    for plugin in found:
        contract = "–" if plugin.contract is None else str(plugin.contract)
        note = Text(plugin.note, style="bold red" if plugin.problem else "")
        rows.append((plugin.kind, plugin.name, plugin.distribution, contract, note))
    return table(("kind", "name", "distribution", ">contract", "processors"), rows)


def _rows(kind: str, entry: EntryPoint, limit_s: float) -> list[Plugin]:
    if not is_ours(entry):
        return [_tried(kind, entry, limit_s)]
    try:
        loaded = load_entry(kind, entry)
    except OptimizeError as error:
        return [Plugin(kind, entry.name, origin(entry), None, error.what)]
    names = sorted(loaded) if isinstance(loaded, Mapping) else [entry.name]
    return [Plugin(kind, name, origin(entry), CONTRACT_VERSION, "") for name in names]


def _tried(kind: str, entry: EntryPoint, limit_s: float) -> Plugin:
    command = own_process(__name__, kind, entry.name, str(limit_s))
    doing = "loading it, or naming its processors," if kind == "evaluator" else "loading it"
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=2 * limit_s + _START_S)
        if done.returncode == 0:
            version, problem, processors, absent = json.loads(done.stdout.splitlines()[-1])
            return Plugin(kind, entry.name, origin(entry), version, problem, tuple(processors), absent)
        version, problem = None, f"{doing} {_end(done)}"
    except subprocess.TimeoutExpired:
        version, problem = None, f"{doing} took longer than {limit_s:g} s"
    except (ValueError, IndexError, TypeError):
        version, problem = None, "the process that imported it gave no readable answer"
    return Plugin(kind, entry.name, origin(entry), version, problem)


def _end(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode < 0:
        return f"ended the process with {signal.Signals(-done.returncode).name}"
    return f"ended the process with exit code {done.returncode}"


def _try(kind: str, name: str, limit_s: float) -> tuple[int | None, str, list[str], str]:
    """Return the contract version of a plug-in, what is wrong with it, its processors, and why it names none now."""
    try:
        loaded = load_entry(kind, find_entry(kind, name), limit_s)
    except OptimizeError as error:
        return None, error.what, [], ""
    found = contract_version(loaded)
    version = found if isinstance(found, int) else None
    if not callable(loaded):
        return None, f"it is {type(loaded).__name__}, which cannot be called", [], ""
    if kind != "evaluator":
        return version, "", [], ""
    try:
        evaluator = make_evaluator(name)
    except OptimizeError as error:
        return version, error.what, [], ""
    try:
        with time_limit(limit_s, "naming its processors"):
            return version, "", [p.name for p in evaluator.platform().processors], ""
    except OptimizeError as error:  # its device may be away
        return version, "", [], error.what


def main() -> None:
    """Import the plug-in that the arguments name, and print the result for the parent process."""
    print(json.dumps(_try(sys.argv[1], sys.argv[2], float(sys.argv[3]))))  # noqa: T201 - the other process reads it
