"""``optimize MODEL``: search for the best plan of a model, or of several."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimizer.cli.parsing import Parser, add_common, add_given, add_shapes, note, show
from search_spaces.core.allowed_code import allow, allow_libraries
from search_spaces.core.errors import EXIT_INTERRUPTED, InfeasibleError, OptimizeError, UnstableError, UsageError, shown
from search_spaces.core.wording import many
from search_spaces.core.workload import GIVEN

if TYPE_CHECKING:
    from optimizer.study.config import StudyConfig

EXIT_CODES = """exit codes:
  0 a plan was found, 1 a defect of the program (please report it),
  2 wrong use or input, 3 no feasible plan,
  4 evaluator or device unavailable (execute: or wrong outputs),
  5 too disturbed to decide (the best known plan is written),
  130 interrupted (everything measured is saved)"""


_BUDGET = 200  # distinct plans, where none is given


def optimize(arguments: list[str], commands: Collection[str], summaries: str) -> int:
    """Do ``optimize MODEL``.

    Args:
        commands: the names of all commands, to suggest one for a mistyped word.
        summaries: a line for each command, for the help.
    """
    parser = make_parser(summaries)
    parser.commands = [*commands, "help"]
    options = parser.parsed(arguments)
    if options.version:
        from importlib.metadata import version

        print(f"optimize {version('partition-optimizer')}")
        return 0
    if options.quiet and options.verbose:
        parser.error("-q and -v exclude each other")
    models = [*options.models, *(options.model or ())]
    if options.models and not options.model:
        _check_models(options.models[0], commands)
    if not models and (options.study is None or options.storage is None):
        parser.error("no model is given")
    options.model = models or None
    config = _config(options)
    if options.dry_run:
        from optimizer.study.course import foreseen

        document = foreseen(config)
        show(options, lambda: {"schema_version": 1, **document}, lambda: _foreseen(document))
        return 0
    return _study(config, arguments, options)


def make_parser(summaries: str = "") -> Parser:
    """Return the parser of the options."""
    parser = Parser(
        prog="optimize",
        usage="optimize MODEL [MODEL …] [--budget N] [options]\n       optimize COMMAND …",
        description="Find the fastest way to run a .tflite model on the processors of a device.",
        epilog=f"commands (see optimize help COMMAND):\n{summaries}\n\n{EXIT_CODES}",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    add = parser.add_argument_group("model").add_argument
    add(
        "models",
        metavar="MODEL",
        nargs="*",
        help="a built-in model, for example vgg16 (see optimize models), a .tflite file, one to convert (.onnx, .pt2, a"
        " SavedModel's folder, torchvision:NAME, timm:NAME), or the YAML file of a workload or of a table of times;"
        " several run at once: NAME*4 is four copies",
    )
    add("--model", metavar="MODEL", action="append", help="the same; may be given several times")
    add("--workload", metavar="FILE", action="append", dest="model", help="the same, for a workload's YAML file")
    rate = "requests of a workload come X times as often as its file says, with the same deadlines"
    add("--rate", metavar="X", help=rate)
    add_shapes(add)
    add_given(add, *GIVEN)
    add = parser.add_argument_group("device").add_argument
    add("--processors", metavar="A,B", help="processors to use: cpu, cpu0-3:threads=2, gpu:f32, … (default: all)")
    add("--platform", metavar="NAME|FILE", help="a known device (see optimize devices), or a file that describes one")
    add("--evaluator", metavar="NAME", help="evaluator that measures or predicts (default litert: measures here)")
    add("--device", metavar="NAME", help="device of --evaluator remote or adb; several identical ones with commas")
    fallback = "let an accelerator run unsupported operators on the CPU"
    add("--allow-fallback", action="store_true", default=None, help=fallback)
    add("--power", metavar="NAME=WATTS", action="append", help="power of a busy processor; may be repeated")
    states = "a state of the device, for example hot:gpu=1.5 (the GPU takes 1.5 times as long); may be repeated"
    add("--state", metavar="NAME:P=FACTOR,…", action="append", help=states)
    add("--robust", metavar="HOW", help="value over all --state: worst (default), or expected (their mean)")
    add = parser.add_argument_group("search").add_argument
    add(
        "--budget",
        metavar="N",
        help="measure at most N distinct plans of the space (default 200, or the resumed study's)",
    )
    add("--minutes", metavar="M", help="end the search after M minutes; the final comparison follows")
    freedoms = (
        "what plans may do: cuts,branches,splits,ranks (default exact: all but ranks that the model and the processors"
        " support; cuts alone if --max-stages is given); with ranks, --max-error is 0.1 by default"
    )
    add("--allow", metavar="A,B", help=freedoms)
    add(
        "--objective",
        metavar="A,B",
        action="append",
        help="latency (default), latency-p99, throughput, energy, memory, occupancy; several give their Pareto"
        " front. Of several models latency is the mean, and there are also worst, makespan and misses",
    )
    add("--max-stages", metavar="K", help="stages of a plan at most (default 4 for cuts alone)")
    add("--sampler", metavar="NAME", help="proposes plans: auto (default), reinforce, tpe, …, or module:Class")
    add(
        "--precision",
        metavar="P",
        help="half width of the 95 %% interval that measurements reach, relative (default 0.01)",
    )
    proven = "stop once a plan is within --precision of the predicted lower bound"
    add("--stop-when-proven", action="store_true", default=None, help=proven)
    add("--warm-start", metavar="RUN", help="reuse the measurements of a finished study, or its best plans")
    own = "a plan for the final comparison: a plan.json, a run folder, or a baseline's name; may be repeated"
    add("--compare-with", metavar="PLAN", action="append", help=own)
    traffic = "count the memory traffic of the recommended plan (--evaluator cuda, by NVIDIA's ncu)"
    add("--count-traffic", action="store_true", default=None, help=traffic)
    add("--seed", metavar="S", help="seed of the proposals (default 0)")
    add = parser.add_argument_group("limits of a plan").add_argument
    add("--deadline", metavar="MS", help="latency limit of one inference, ms")
    add("--max-energy", metavar="MJ", help="energy limit of one inference, mJ")
    add("--max-error", metavar="E", help="error limit of the outputs, relative to the whole model's largest")
    add = parser.add_argument_group("output").add_argument
    add("--study", metavar="NAME", help="name of the study; resumes if it exists")
    add("--out", metavar="DIR", help="run folder (default runs/STUDY)")
    add("--storage", metavar="URL", help="share the study with other workers: sqlite:///…, postgresql://…, grpc://…")
    add("--heartbeat", metavar="S", help="seconds between heartbeats of a worker (default 10)")
    add("--dry-run", action="store_true", help="print what would be searched, and measure nothing")
    add("-v", "--verbose", action="store_true", help="a line per trial")
    add_common(add, quiet=True)
    add("--version", action="store_true", help="print the version")
    add("-h", "--help", action="help", help="print this")
    return parser


def _check_models(word: str, commands: Collection[str]) -> None:
    """Check that a word is not a mistyped command.

    Raises:
        UsageError: it resembles a command, and is neither a file nor a model.
    """
    near = difflib.get_close_matches(word, commands, n=1, cutoff=0.75)
    if not near or not word.isalpha() or Path(word).exists():
        return
    from search_spaces.models import load

    try:
        load(word)
    except OptimizeError:
        raise UsageError(f"there is no command or model {shown(word)}", f"did you mean optimize {near[0]}?") from None


def _config(options: argparse.Namespace) -> StudyConfig:
    from optimizer.study.config import StudyConfig, check_effects, parse_config
    from optimizer.study.folder import kept_budget

    given = {name: getattr(options, name, None) for name in StudyConfig.model_fields}
    check_effects(given)
    if options.budget is None:
        given["budget"] = kept_budget(options.out, options.study) or _BUDGET
    typed = [options.sampler, *(options.model or ()), *(options.processors or "").split(",")]
    allow(*map(str, filter(None, typed)))  # so that they may load code
    allow_libraries(options.custom_ops or ())
    if options.model is not None:
        return parse_config(given)
    from optimizer.shared.study import joined

    return joined(given)


def _foreseen(document: Mapping[str, Any]) -> str:
    """Return what a study would search as text."""
    from optimizer.report.console import make_console

    console = make_console()  # words stay whole on a terminal; a pipe gets a line for each name
    width = console.width if console.is_terminal else sys.maxsize
    lines = (f"{name:12}{_shown(value)}" for name, value in document.items())
    how: Any = {"subsequent_indent": " " * 12, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(line, width, **how) for line in lines)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ("; " if any(", " in each for each in value) else ", ").join(value)
    return many(value) if isinstance(value, int) else str(value)


def _study(config: StudyConfig, arguments: Sequence[str], options: argparse.Namespace) -> int:
    from optimizer.report.console import ProgressWatcher, render
    from optimizer.study.course import Interrupted, run_study

    try:
        with ProgressWatcher(config.budget, quiet=options.quiet, verbose=options.verbose) as watcher:
            result = run_study(config, watcher, ["optimize", *arguments])
    except InfeasibleError as error:
        if options.json:
            found = [violation.to_json() for violation in error.violations]
            document = {"schema_version": 1, "complete": False, "feasible": False, "reason": error.what}
            print(json.dumps({**document, "hint": error.hint, "violations": found}, indent=2))
        raise
    except Interrupted as interrupted:
        if interrupted.result is not None and options.json:
            print(json.dumps(interrupted.result.to_json(), indent=2))
        note(f"optimize: interrupted; resume with: {interrupted.resume_command}")
        return EXIT_INTERRUPTED
    show(options, result.to_json, lambda: render(result))
    if result.verdict is not None and result.verdict.undecided:
        note("optimize: undecided; resume with the same --study when the machine is quiet")
        return UnstableError.exit_code
    return 0
