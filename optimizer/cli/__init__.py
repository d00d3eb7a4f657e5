"""The command ``optimize``: parse, call, print. Data goes to stdout, progress to stderr."""

from __future__ import annotations

import io
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType

from optimizer.cli import study
from optimizer.cli.campaigns import pretrain, run, schema, solve
from optimizer.cli.completion import complete, completed_line, skip_command
from optimizer.cli.machines import calibrate, devices, doctor, plugins
from optimizer.cli.models import inspect, models, rewrite, train
from optimizer.cli.parsing import Parser, Work, note, show_notes
from optimizer.cli.plans import compare, dashboard, execute, explain, export, report
from optimizer.cli.serving import agent, storage
from search_spaces.core.errors import EXIT_INTERRUPTED, OptimizeError, UsageError, reason_of, shown

_AGAIN_S, _MOST_LATE_S = 0.05, 1.0  # an interrupt during an import is tried again after so long, for so long


class _Warnings(logging.Handler):
    """Writes to the current ``sys.stderr``, which a progress bar replaces while it runs.

    No warning comes twice in a row: two sessions of one command say the same of a profile. No note comes twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last, self._notes = "", set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if line != self._last and line not in self._notes:
            note(line)
        self._last = line
        if record.levelno < logging.WARNING:
            self._notes.add(line)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if argv is None:
        _keep_output()
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    logging.basicConfig(handlers=[_Warnings()], format="optimize: %(message)s", level=logging.WARNING, force=True)
    show_notes(on=False)
    interrupt = _Interrupts()
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would compete with what is measured
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks “…”, or a path that is not text
    try:
        code = _run(arguments)
        if sys.stdout is not None:  # None if closed by ">&-"
            sys.stdout.flush()
    except OptimizeError as error:
        return _fail(str(error), error.exit_code, traced=debug)
    except KeyboardInterrupt as error:
        what = str(error) or "this run saved nothing, and the same command starts it again"
        return _fail(f"interrupted; {what}", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _drop_output()  # the reader of our pipe has ended
        return 0
    except OSError as error:
        _drop_output()
        text = f"{error.filename or 'output'}: {reason_of(error)}"
        return _fail(text, UsageError.exit_code, traced=debug)
    except Exception as error:  # noqa: BLE001 - a defect ends with one line and its exit code, too
        text = f"a defect of the program: {type(error).__name__}: {error}; run again with --debug and report it"
        return _fail(text, 1, traced=debug)
    return code


class _Interrupts:
    """Raises KeyboardInterrupt, up to a second late during an import, where it may be lost or become another error."""

    def __init__(self) -> None:
        self._since_s = math.inf  # when the one that waits came

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        self._since_s = min(self._since_s, now_s)
        while frame is not None and frame.f_code is not main.__code__ and now_s < self._since_s + _MOST_LATE_S:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                again = threading.Timer(_AGAIN_S, signal.pthread_kill, [threading.main_thread().ident, number])
                again.daemon = True
                again.start()
                return
            frame = frame.f_back
        self._since_s = math.inf
        raise KeyboardInterrupt


def _keep_output() -> None:
    """Keep the standard output for results; programs that a plug-in starts write to the standard error instead."""
    with suppress(OSError, AttributeError):  # either may be closed
        if sys.stdout.fileno() == 1 and os.fstat(2):
            results = os.dup(1)
            os.dup2(2, 1)
            sys.stdout = os.fdopen(results, "w", encoding=sys.stdout.encoding)


def _drop_output() -> None:
    """Drop what cannot be written, so that the interpreter does not report it again at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    if len(completed := completed_line()) > 1 and completed[0] in COMMANDS:
        skip_command()
        return COMMANDS[completed[0]][1]([])
    if len(completed) > 1 and completed[0] == "help":
        skip_command()
        asked = Parser(prog="optimize help", add_help=False)
        asked.add_argument("command", choices=sorted(COMMANDS))
        complete(asked)
    match arguments:
        case ["help"]:
            arguments = ["--help"]
        case ["help", name, *_]:
            if name not in COMMANDS:
                raise UsageError(f"there is no command {shown(name)}", f"commands are: {', '.join(sorted(COMMANDS))}")
            return COMMANDS[name][1](["--help"])
        case [name, *words] if name in COMMANDS:
            return COMMANDS[name][1](words)
    width = max(map(len, COMMANDS))
    summaries = "\n".join(f"  {name:{width}}  {text}" for name, (text, _) in sorted(COMMANDS.items()))
    return study.optimize(arguments, COMMANDS, summaries)


def _fail(text: str, code: int, *, traced: bool = False) -> int:
    if traced:
        note(traceback.format_exc())
    note(f"optimize: {' '.join(text.split())}")
    return code


def _parsed(work: Work, arguments: list[str]) -> int:
    return work(Parser(prog=f"optimize {work.__name__}", description=work.__doc__), arguments) or 0


_ALL: tuple[tuple[Work, str], ...] = (
    (agent, "serve this machine as a device for --evaluator remote"),
    (calibrate, "fit a cost model of this machine's processors"),
    (compare, "compare the plans of two runs: which is faster, by how much"),
    (devices, "list processors here, known devices, phones and agents"),
    (doctor, "check this machine (runtimes, processors, load) and suggest fixes"),
    (execute, "run a plan, or the plan of a study, and print its latency"),
    (inspect, "show a model's operators and where it can be cut"),
    (models, "list the built-in models"),
    (dashboard, "open a study in optuna-dashboard"),
    (explain, "explain a study's plan: costs of changes, and the limits that bind"),
    (export, "write a study's plan as a folder that runs without this program"),
    (plugins, "list installed plug-ins, and which of them fail to load"),
    (pretrain, "train a policy for --sampler reinforce on cost models"),
    (report, "write the report of a study or campaign as a web page"),
    (rewrite, "write a model with split operators or decomposed convolutions"),
    (run, "run a campaign of studies from a YAML file"),
    (schema, "print the JSON Schema of campaign files"),
    (storage, "serve a shared study database, for --storage grpc://"),
    (train, "train a model on labelled inputs, and measure its accuracy"),
    (solve, "solve a table of times, or a placement instance, to optimality"),
)
COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    work.__name__: (summary, partial(_parsed, work)) for work, summary in _ALL
}
"""All commands but ``optimize MODEL``: a summary for the help, and the function that runs the command."""
