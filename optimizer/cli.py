"""The command ``optimize``: parse, call, print. Data goes to stdout, progress to stderr."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from optimizer import commands
from search_spaces.allowed_code import allow
from search_spaces.errors import (
    EXIT_INTERRUPTED,
    OptimizeError,
    UnavailableError,
    UnstableError,
    UsageError,
    printable,
    shown,
)

if TYPE_CHECKING:
    from optimizer.config import StudyConfig

_EXIT_CODES = """exit codes: 0 a plan was found, 1 a defect of ours, 2 usage, 3 no feasible plan, 4 evaluator or device
unavailable, 5 too disturbed to decide (the best known plan is written), 130 interrupted (what was measured is saved)"""


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line, as all our errors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see {self.prog} --help")


class _Warnings(logging.Handler):
    """Writes to what stderr is at that moment, so that a progress bar can step aside."""

    def emit(self, record: logging.LogRecord) -> None:
        _tell(self.format(record))


def _tell(text: str) -> None:
    """Print to stderr; where that is closed, nowhere: what is no data must not get among the data."""
    if sys.stderr is not None:
        print(printable(text), file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    logging.basicConfig(handlers=[_Warnings()], format="optimize: %(message)s", level=logging.WARNING, force=True)
    signal.signal(signal.SIGTERM, _interrupt)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would compete with what is measured
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks “…”, or a path that is no text
    try:
        command = COMMANDS.get(arguments[0]) if arguments else None
        code = command[1](arguments[1:]) if command else _optimize(arguments)
        if sys.stdout is not None:  # as after ">&-"
            sys.stdout.flush()
    except OptimizeError as error:
        if debug:
            raise
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug:
            raise
        return _fail(f"{error.filename or 'output'}: {(error.strerror or str(error)).lower()}", UsageError.exit_code)
    except Exception as error:
        if debug:
            raise
        return _fail(f"a defect of ours: {type(error).__name__}: {error}; run again with --debug and report it", 1)
    return code


def _no_command(word: str) -> UsageError:
    import difflib

    near = difflib.get_close_matches(word, COMMANDS, n=1)
    known = f"a model is given as --model NAME|FILE; commands are: {', '.join(COMMANDS)}"
    return UsageError(f"there is no command {shown(word)}", f"did you mean optimize {near[0]}?" if near else known)


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put off an interrupt: raised within the import of a compiled module it can become that module's panic."""
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _fail(text: str, code: int) -> int:
    _tell(f"optimize: {' '.join(text.split())}")
    return code


def _add_model(add: Callable[..., object]) -> None:
    """Add the options that say which part of a model's file is meant."""
    shapes = "sizes of an input that the model leaves open (default: as in the file)"
    add("--input-shape", metavar="NAME=D,D,…", action="append", help=shapes)
    add("--signature", metavar="NAME", help="the model's signature to run (default: its main subgraph)")


def _add_aims(add: Callable[..., object]) -> None:
    """Add the options that say what is made small."""
    add(
        "--objective",
        metavar="NAME",
        action="append",
        help="latency (default), latency-p99, throughput, energy, memory, occupancy; give it again for a front of"
        " several; of several models: mean latency, worst, makespan, misses, throughput",
    )
    add("--power", metavar="LANE=WATTS", action="append", help="what a lane draws while it runs; repeat for others")
    add("--warm-start", metavar="RUN", help="take over what a finished study knows, or its best plans")
    add("--max-energy", metavar="MJ", help="millijoules that one inference may take (default: any)")
    add("--max-error", metavar="E", help="how far outputs may be from the whole model's, relative to its largest")
    add("--state", metavar="NAME:LANE=FACTOR,…", action="append", help="a state of the platform; repeat for others")
    add("--robust", metavar="HOW", help="over all --state: worst (default), or expected")


def _optimize(arguments: list[str]) -> int:
    if arguments and arguments[0][:1].isalpha():
        raise _no_command(arguments[0])
    parser = _Parser(
        prog="optimize",
        usage="optimize --model NAME|FILE [--budget N] [options]\n       optimize COMMAND …",
        description="Find the fastest way to run a .tflite model on the processors of this machine, by measuring it.",
        epilog="commands: "
        + "; ".join(f"{name} – {text}" for name, (text, _) in COMMANDS.items())
        + ". "
        + _EXIT_CODES,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model",
        metavar="NAME|FILE",
        action="append",
        help="a built-in model, as vgg16 (see optimize models), or a .tflite file; several at once as NAME×COUNT,NAME,"
        " or by giving this again",
    )
    add("--workload", metavar="FILE", action="append", dest="model", help="several models, described in a YAML file")
    _add_model(add)
    add("--input", metavar="FILE", help="inputs to measure and verify with: .npy, or .npz with a name for each")
    add("--custom-ops", metavar="LIBRARY", help="a library with kernels of custom operators")
    add("--budget", metavar="N", default="200", help="distinct plans to measure (default 200)")
    add("--max-stages", metavar="K", help="parts of a plan at most (default 4)")
    add("--processors", metavar="A,B", help="lanes to use: cpu, cpu0-3:threads=2, gpu:f32, … (default: all)")
    add(
        "--platform",
        metavar="FILE|NAME",
        help="a YAML file that describes the lanes, instead of those that are found; or the name of a known device",
    )
    add("--allow-fallback", action="store_true", default=None, help="an accelerator may leave operators to the CPU")
    _add_aims(add)
    _add_search(add)
    add("--out", metavar="DIR", help="run folder (default runs/STUDY)")
    add("--json", action="store_true", help="print one JSON document instead of tables")
    add("--dry-run", action="store_true", help="tell what would be searched, and measure nothing")
    add("-q", "--quiet", action="store_true", help="no progress")
    add("-v", "--verbose", action="store_true", help="a line per trial")
    add("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    if options.model is None and (options.study is None or options.storage is None):
        parser.error("--model is missing")
    config = _config(options)
    if options.dry_run:
        from optimizer.dry_run import dry_run

        print(dry_run(config, as_json=options.json))
        return 0
    return _study(config, arguments, as_json=options.json, quiet=options.quiet, verbose=options.verbose)


def _add_search(add: Callable[..., object]) -> None:
    """Add what the search is: who proposes, who measures, how long, and with whom."""
    add("--sampler", metavar="NAME", help="who proposes plans: auto (default), reinforce, tpe, …, or module:Class")
    add("--deadline", metavar="MS", help="milliseconds that one inference may take (default: any)")
    add("--stop-when-proven", action="store_true", default=None, help="end within --precision of the model's bound")
    freedoms = (
        "what plans may do: some of cuts,branches,splits,ranks (default cuts; ranks within --max-error, then 0.1)"
    )
    add("--allow", metavar="A,B", help=freedoms)
    add("--evaluator", metavar="NAME", help="who measures (default litert: this machine)")
    add("--device", metavar="NAME", help="where --evaluator remote measures; several that are alike with commas")
    add("--precision", metavar="P", help="aim at a 95 %% interval within this share of the median (default 0.01)")
    add("--seed", metavar="S", help="the same seed proposes the same plans, given the same measurements (default 0)")
    add("--study", metavar="NAME", help="name of the study; an existing one is gone on with")
    add("--storage", metavar="URL", help="share the study with other workers: sqlite:///…, postgresql://…, grpc://…")
    add("--heartbeat", metavar="S", help="seconds between signs of life of a worker that shares (default 10)")


def _config(options: argparse.Namespace) -> StudyConfig:
    with _uninterrupted():
        from optimizer.config import StudyConfig, parse_config

    given = {name: getattr(options, name, None) for name in StudyConfig.model_fields}
    allow(
        *filter(None, [options.sampler, options.custom_ops, *(options.processors or "").split(",")])
    )  # typed, so that they may load code
    if options.model is not None:
        return parse_config(given)
    from optimizer.sharing import joined

    return joined(given)


def _study(config: StudyConfig, arguments: list[str], *, as_json: bool, quiet: bool, verbose: bool) -> int:
    from optimizer.console import ProgressWatcher, make_console, render
    from optimizer.study import run_study
    from optimizer.study_ends import Interrupted

    try:
        with ProgressWatcher(config.budget, quiet=quiet, verbose=verbose) as watcher:
            result = run_study(config, watcher, ["optimize", *arguments])
    except Interrupted as interrupted:
        if interrupted.result is not None and as_json:
            print(json.dumps(interrupted.result.to_json(), indent=2))
        _tell(f"optimize: interrupted; go on with: {interrupted.resume_command}")
        return EXIT_INTERRUPTED
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        make_console().print(render(result), crop=False)
    if result.verdict is not None and result.verdict.undecided:
        _tell("optimize: undecided; to go on, give the same --study again when the machine is quiet")
        return UnstableError.exit_code
    return 0


def _execute(arguments: list[str]) -> int:
    parser = _Parser(
        prog="optimize execute",
        description="Run a plan from its files and tell its latency; that of a study of several models that wrote no "
        "files from the models. Exit code 4, too, where outputs are not what they should be.",
    )
    parser.add_argument("plan", metavar="PLAN", help="a run folder, or a plan.json")
    parser.add_argument("--input", metavar="FILE", type=Path, help="inputs: .npy, or .npz with a name for each")
    parser.add_argument("--custom-ops", metavar="LIBRARY", type=Path, help="a library with kernels of custom operators")
    parser.add_argument("--stream", action="store_true", help="inferences follow each other and overlap")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    from optimizer.execute import execute

    allow(str(options.custom_ops or ""))
    found = execute(
        options.plan, as_json=options.json, stream=options.stream, inputs=options.input, custom_ops=options.custom_ops
    )
    print(found.text)
    return 0 if found.accepted else UnavailableError.exit_code


def _models(arguments: list[str]) -> int:
    parser = _Parser(prog="optimize models", description="List the built-in models, with their size and work.")
    parser.add_argument("names", metavar="NAME", nargs="*", help="as mobilenet_v1@0.5/192 (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    from optimizer.models import print_models

    print_models(options.names, as_json=options.json)
    return 0


def _compare(arguments: list[str]) -> int:
    parser = _Parser(prog="optimize compare", description="Tell which of two runs' plans is faster, and by how much.")
    parser.add_argument("runs", metavar="RUN", nargs=2, help="a run folder, or a plan.json")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    from optimizer.compare import compare_runs

    quiet = options.json or not sys.stderr.isatty()
    tell = (lambda _: None) if quiet else (lambda text: _tell(f"optimize: {text}"))
    print(compare_runs(*options.runs, as_json=options.json, progress=tell))
    return 0


def _inspect(arguments: list[str]) -> int:
    parser = _Parser(prog="optimize inspect", description="Tell what a model is made of and where it can be cut.")
    add = parser.add_argument
    add("model", metavar="NAME|FILE", help="a built-in model, or a .tflite file")
    _add_model(add)
    add(
        "--picture",
        metavar="FILE",
        type=Path,
        help="draw the graph with its cut points: .svg, or .html with zoom and tables",
    )
    add("--json", action="store_true", help="print one JSON document")
    add("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    from optimizer.graph_picture import check_picture, write_picture
    from optimizer.inspect import inspect_graph, to_json
    from search_spaces.models import load

    if options.picture is not None:
        check_picture(options.picture)
    found = inspect_graph(load(options.model, options.input_shape or (), signature=options.signature))
    if options.picture is not None:
        write_picture(found, options.picture)
        _tell(f"optimize: the picture is in {options.picture}")
    if options.json:
        print(json.dumps(to_json(found), indent=2))
    else:
        from optimizer.console import make_console
        from optimizer.inspect_text import render_inspection

        console = make_console()
        console.print(render_inspection(found, console.width))
    return 0


def _calibrate(arguments: list[str]) -> int:
    parser = _Parser(
        prog="optimize calibrate",
        description="Fit a cost model of this machine's processors, or refine one with what a study measured.",
    )
    add = parser.add_argument
    add("--out", metavar="FILE", type=Path, required=True, help="the profile, a .json file; its log lies beside it")
    add("--processors", metavar="A,B", help="lanes to calibrate (default: all found)")
    add("--minutes", metavar="M", type=float, default=10.0, help="time to spend (default 10)")
    add("--refine", metavar="RUN", type=Path, help="correct the profile FILE with what a study measured instead")
    add("--evaluator", metavar="NAME", default="litert", help="who times (default litert: this machine)")
    add("--json", action="store_true", help="print one JSON document")
    add("-q", "--quiet", action="store_true", help="no progress")
    add("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    allow(*(options.processors or "").split(","))
    from optimizer.calibrate import calibrate
    from optimizer.calibrate_refine import refine
    from optimizer.calibrate_text import render_calibration

    if options.refine is not None:
        found = refine(options.out, options.refine)
    else:
        found = calibrate(
            options.out,
            options.processors.split(",") if options.processors else None,
            options.minutes,
            evaluator=options.evaluator,
            command=["optimize", "calibrate", *arguments],
            tell=(lambda _: None) if options.quiet else (lambda text: _tell(f"optimize: {text}")),
        )
    print(json.dumps(found.profile.errors, indent=2) if options.json else render_calibration(found))
    if found.interrupted:
        _tell("optimize: interrupted; the same command goes on from here")
        return EXIT_INTERRUPTED
    return 0


def _doctor(arguments: list[str]) -> int:
    parser = _Parser(
        prog="optimize doctor", description="Tell what this machine offers, and what to do about problems."
    )
    parser.add_argument("--model", metavar="NAME|FILE", help="tell which of its operators each processor refuses")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    from optimizer.doctor import diagnose, render

    found = diagnose(options.model)
    print(json.dumps(found.to_json(), indent=2) if options.json else render(found))
    return 0 if found.usable else UnavailableError.exit_code


Command = Callable[[list[str]], int]


def _from_table(name: str) -> tuple[str, Command]:
    summary, description, work = commands.TABLE[name]
    return summary, lambda words: work(_Parser(prog=f"optimize {name}", description=description), words)


COMMANDS: dict[str, tuple[str, Command]] = {
    "calibrate": ("fit a cost model of this machine's processors", _calibrate),
    "compare": ("tell which of two runs' plans is faster", _compare),
    "doctor": ("tell what this machine offers, and what to do about problems", _doctor),
    "execute": ("run a plan, or the plan of a study, and tell its latency", _execute),
    "inspect": ("tell what a model is made of and where it can be cut", _inspect),
    "models": ("list the built-in models", _models),
    **{name: _from_table(name) for name in commands.TABLE},
}

if __name__ == "__main__":
    sys.exit(main())
