"""Commands whose work is done elsewhere: their options, and what becomes of them.

The command line hands each a parser of its own, so that all of them tell what is wrong in the same way.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from optimizer.agent import agent
from optimizer.export.command import export
from optimizer.storage_server import storage
from search_spaces.errors import UnavailableError


def run(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Do ``optimize run``."""
    add = parser.add_argument
    add("file", metavar="FILE.yaml", type=Path, help="the campaign")
    add("--out", metavar="DIR", type=Path, help="folder of the campaign (default runs/NAME)")
    add("--jobs", metavar="N", default="1", help="studies at a time, where none measures this machine")
    add("--scheduler", metavar="URL", default="", help="a Dask cluster that runs the studies (default: this machine)")
    add("--allow-code", action="store_true", help="its samplers and libraries may be code; for a file that you trust")
    add("--dry-run", action="store_true", help="list the studies, their sizes and the time expected")
    add("--json", action="store_true", help="print one JSON document")
    add("-q", "--quiet", action="store_true", help="no progress")
    add("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    if not options.jobs.isdecimal() or not 1 <= int(options.jobs) <= 1024:
        parser.error(f"--jobs {options.jobs}: must be a whole number from 1 to 1024")
    from optimizer.campaign_main import run_file

    return run_file(
        options.file,
        options.out,
        int(options.jobs),
        ["optimize", "run", *arguments],
        dry=options.dry_run,
        as_json=options.json,
        quiet=options.quiet,
        scheduler=options.scheduler,
        allow_code=options.allow_code,
    )


def dashboard(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Do ``optimize dashboard``."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a finished study")
    parser.add_argument("--port", metavar="N", default="8080", help="of this machine alone (default 8080)")
    parser.add_argument("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    if not options.port.isdecimal() or not 1 <= int(options.port) <= 65535:
        parser.error(f"--port {options.port}: must be a whole number from 1 to 65535")
    from optimizer.dashboard import serve

    serve(options.run, int(options.port), lambda at: print(f"optimize: {at}, until Ctrl-C", file=sys.stderr))
    return 0


def pretrain(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Do ``optimize pretrain``."""
    add = parser.add_argument
    add("--model", metavar="NAME|FILE", action="append", required=True, help="to learn on; may be given several times")
    add(
        "--platform",
        metavar="FILE|NAME",
        type=Path,
        action="append",
        required=True,
        help="a device's profile, a file or a name; may be given several times",
    )
    add("--out", metavar="FILE", type=Path, required=True, help="the policy, a .npz file")
    add("--max-stages", metavar="K", type=int, default=4, help="parts of a plan at most (default 4)")
    add("--batches", metavar="N", type=int, default=0, help="batches of plans to draw (default 40 a model and device)")
    add("--seed", metavar="S", type=int, default=0, help="the same seed gives the same policy (default 0)")
    add("--json", action="store_true", help="print one JSON document")
    add("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed {options.seed}: must be 0 or more")
    from optimizer.pretrain import render, train

    found = train(
        options.model,
        options.platform,
        options.out,
        max_stages=options.max_stages,
        batches=options.batches,
        seed=options.seed,
    )
    print(json.dumps(found.to_json(), indent=2) if options.json else render(found))
    return 0


def report(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Do ``optimize report``."""
    parser.add_argument("run", metavar="RUN|CAMPAIGN", type=Path, help="the folder of a study or of a campaign")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write (default: that folder itself)")
    parser.add_argument("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    from optimizer.report.write import report

    written = report(options.run, options.out)
    if written.without_png:
        print(f"optimize: {written.without_png}", file=sys.stderr)
    print(written.page)
    return 0


def schema(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Do ``optimize schema``."""
    parser.add_argument("--markdown", action="store_true", help="the reference for people instead of the JSON Schema")
    parser.add_argument("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    from optimizer.campaign_file import json_schema
    from optimizer.campaign_reference import reference

    print(reference() if options.markdown else json.dumps(json_schema(), indent=2, ensure_ascii=False))
    return 0


def plugins(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Do ``optimize plugins``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    from optimizer.console import make_console
    from optimizer.plugins import list_plugins, render, to_json

    found = list_plugins()
    if options.json:
        print(json.dumps(to_json(found), indent=2))
    else:
        make_console().print(render(found))
    return UnavailableError.exit_code if any(p.problem for p in found) else 0


def explain(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Do ``optimize explain``."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a study")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    from optimizer.explain import explain_run

    found = explain_run(options.run)
    if options.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        from optimizer.console import make_console
        from optimizer.explain_text import render

        make_console().print(render(found), crop=False)
    return 0


def solve(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Do ``optimize solve``."""
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="a table of times (YAML), or a published placement instance (JSON)")
    add("--objective", metavar="NAME", help="latency or period, the load of the busiest device (default: the file's)")
    add("--time-limit", metavar="S", type=float, default=30.0, help="seconds to search and prove (default 30)")
    add("--json", action="store_true", help="print one JSON document")
    add("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    from optimizer.solve import render, solve_file

    found = solve_file(options.file, options.objective, options.time_limit)
    print(json.dumps(found.to_json(), indent=2) if options.json else render(found))
    return 0


def rewrite(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Do ``optimize rewrite``."""
    add = parser.add_argument
    add("name", metavar="NAME|FILE", nargs="?", help="a built-in model, also as NAME:int8, or a .tflite file")
    add("--model", metavar="NAME|FILE", help="the same")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument(
        "--split",
        metavar="FIRST-LAST:AXIS:SHARE",
        action="append",
        help="operators that two sides compute, as 0-2:height:0.6 or 5:channels:0.5; may be given several times",
    )
    kind.add_argument(
        "--tucker",
        metavar="RULE",
        help="three convolutions for each larger than 1x1, of ranks by ratio:SHARE (or IN,OUT) of the channels,"
        " energy:SHARE of the squared singular values, vbmf, or given by --rank alone",
    )
    add("-o", "--out", metavar="FILE", type=Path, required=True, help="the new .tflite file")
    add("--input-shape", metavar="NAME=D,D,…", action="append", help="sizes of an input that the model leaves open")
    tucker = parser.add_argument_group("with --tucker")
    add = tucker.add_argument
    add("--rank", metavar="LAYER=INxOUT", action="append", help="ranks of one layer, as conv3_1=64x96")
    add("--multiple-of", metavar="N", help="round the rule's ranks to multiples of N (default 8)")
    add("--at-most", metavar="R", help="no rank of the rule's is above R")
    add("--even-larger", action="store_true", help="also where the three need no fewer multiply-accumulates")
    add("--platform", metavar="FILE|NAME", type=Path, help="a device's profile, which predicts times before and after")
    add("--even-slower", action="store_true", help="also where the three are predicted to be slower on --platform")
    add("--seed", metavar="S", help="of the inputs on which outputs are compared (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    if (options.name is None) == (options.model is None):
        parser.error("give one model")
    model = options.model if options.name is None else options.name
    if options.tucker is not None:
        return _tucker(parser, options, model)
    for name in ("rank", "multiple_of", "at_most", "even_larger", "platform", "even_slower", "seed"):
        if getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} goes with --tucker")
    from optimizer.rewrite_split import rewrite_split

    split = rewrite_split(model, options.split, options.out, options.input_shape or ())
    print(split.render(as_json=options.json))
    return 0


def _tucker(parser: argparse.ArgumentParser, options: argparse.Namespace, model: str) -> int:
    numbers = {}
    for name, least, default in (("multiple_of", 1, "8"), ("at_most", 1, str(2**31 - 1)), ("seed", 0, "0")):
        text = getattr(options, name) or default
        if not text.isdecimal() or not least <= int(text) < 2**31:
            parser.error(f"--{name.replace('_', '-')} {text}: must be a whole number from {least}")
        numbers[name] = int(text)
    from optimizer.rewrite_tucker import Request, rewrite

    found = rewrite(
        Request(
            model,
            options.tucker,
            options.out,
            tuple(options.rank or ()),
            numbers["multiple_of"],
            numbers["at_most"] if options.at_most else None,
            options.even_larger,
            options.platform,
            options.even_slower,
            tuple(options.input_shape or ()),
            numbers["seed"],
        )
    )
    if options.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        from optimizer.console import make_console
        from optimizer.rewrite_text import render

        make_console().print(render(found), crop=False)
    return 0


Work = Callable[[argparse.ArgumentParser, list[str]], int]

TABLE: dict[str, tuple[str, str, Work]] = {
    "agent": ("measure for others: the device's end of --evaluator remote", "Measure for others, until Ctrl-C.", agent),
    "dashboard": ("open a study in optuna-dashboard", "Open a finished study in optuna-dashboard.", dashboard),
    "explain": (
        "tell why a study's plan is the best: what changing it would cost, and what binds",
        "Tell why the plan of a study is what it is.",
        explain,
    ),
    "export": (
        "write a study's plan as a folder that runs without this product",
        "Write a study's plan, with runners in Python and C++, as a folder of its own.",
        export,
    ),
    "plugins": (
        "list what is installed beside the built-ins, and what is broken",
        "List evaluators, spaces, samplers and models by where from.",
        plugins,
    ),
    "pretrain": (
        "train a policy for the sampler reinforce on cost models, at no device time",
        "Train a policy for --sampler reinforce@FILE.",
        pretrain,
    ),
    "report": (
        "write what a study or a campaign found, for a browser",
        "Write what a study or a campaign found, for a browser.",
        report,
    ),
    "rewrite": (
        "write a model with operators split, or convolutions decomposed",
        "Write a rewritten model.",
        rewrite,
    ),
    "run": (
        "run a campaign of studies from a YAML file",
        "Run a campaign: a matrix of studies, described in a YAML file.",
        run,
    ),
    "schema": ("print what may stand in a campaign's file", "Print the JSON Schema of campaign files.", schema),
    "storage": (
        "stand before a storage that many workers share, for --storage grpc://",
        "Serve a storage to many workers, until Ctrl-C.",
        storage,
    ),
    "solve": (
        "prove the best placement of a table of times, or of a published instance",
        "Prove the best placement of a table of times.",
        solve,
    ),
}
"""What each does, in a few words for the list and in a sentence for its own help."""
