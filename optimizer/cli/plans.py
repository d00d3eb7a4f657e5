"""Commands about the plan of a study: run, compare, explain, export, report, look at."""

from __future__ import annotations

import json
from pathlib import Path

from optimizer.cli.parsing import Parser, add_given, note, show
from search_spaces.core.allowed_code import allow_libraries
from search_spaces.core.errors import UnavailableError


def execute(parser: Parser, arguments: list[str]) -> int:
    """Run a plan from its files and print its latency. Exit code 4 if its outputs are wrong."""
    add = parser.add_argument
    add("plan", metavar="PLAN", help="a run folder, or a plan.json")
    add_given(add, "input", "custom_ops")
    add("--stream", action="store_true", help="stream inferences: successive ones overlap")
    options = parser.read(arguments)
    from optimizer.tools.execute import execute

    given = options.input or (), options.custom_ops or ()
    allow_libraries(given[1])
    found = execute(options.plan, stream=options.stream, inputs=given[0], custom_ops=given[1])
    show(options, lambda: found.document, lambda: found.text)
    return 0 if found.accepted else UnavailableError.exit_code


def compare(parser: Parser, arguments: list[str]) -> None:
    """Compare the latencies of the plans of two runs: which is faster, and by how much."""
    parser.add_argument("runs", metavar="RUN", nargs=2, help="a run folder, or a plan.json")
    add_given(parser.add_argument, "custom_ops")
    options = parser.read(arguments, quiet=True)
    from optimizer.report.console import Steps
    from optimizer.tools.compare import compare_runs

    steps = Steps()

    def progress(text: str) -> None:
        if not options.quiet and steps.is_due(text):
            note(f"optimize: {text}")

    libraries = options.custom_ops or ()
    allow_libraries(libraries)
    document, text = compare_runs(*options.runs, custom_ops=libraries, progress=progress)
    show(options, lambda: document, lambda: text)


def explain(parser: Parser, arguments: list[str]) -> None:
    """Explain a study's plan: the cost of every change, and which limits cost time."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a study")
    options = parser.read(arguments, quiet=True)
    from optimizer.files import damage_of
    from optimizer.report.console import make_console
    from optimizer.report.data import read_study
    from optimizer.report.terminal import render
    from optimizer.study.folder import RESULT
    from optimizer.tools.explain import blocks, explain, head

    with damage_of(options.run / RESULT, "explain another run"):
        study, console = read_study(options.run), make_console(stderr=True)
        console.quiet = options.quiet
        with console.status("computing the best plans") as status:  # on a terminal
            found = explain(study, status.update)
        show(options, lambda: found, lambda: render(head(found), blocks(found)))


def report(parser: Parser, arguments: list[str]) -> None:
    """Write the report of a study or campaign as a web page."""
    parser.add_argument("run", metavar="RUN|CAMPAIGN", type=Path, help="the folder of a study or of a campaign")
    parser.add_argument("--out", metavar="DIR", type=Path, help="output folder (default: the run folder)")
    options = parser.read(arguments, as_json=False)
    from optimizer.report.write import report

    print(report(options.run, options.out))


def dashboard(parser: Parser, arguments: list[str]) -> None:
    """Open a finished study in optuna-dashboard."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a finished study")
    parser.add_argument("--port", metavar="N", default="8080", help="port on this machine (default 8080)")
    options = parser.read(arguments, as_json=False)
    port = parser.whole("--port", options.port, 1, 65535)
    from optimizer.tools.dashboard import serve

    serve(options.run, port, lambda at: note(f"optimize: {at}, until Ctrl-C"))


def export(parser: Parser, arguments: list[str]) -> None:
    """Write a study's plan, with runners in Python and C++, as a folder of its own."""
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the folder of a finished study")
    add("--out", metavar="DIR", type=Path, help="output folder (default: RUN/export)")
    targets = ("linux", "android", "openvino", "onnxruntime", "model-explorer")
    runs = f"the system or runtime that runs it: {', '.join(targets)} (default: linux)"
    add("--target", choices=targets, metavar="TARGET", default="linux", help=runs)
    add("--fallback", action="store_true", help="include the whole model, so that the runner can fall back to it")
    options = parser.read(arguments)
    from optimizer.export.folder import export_run
    from optimizer.files import damage_of
    from optimizer.study.folder import RESULT

    out = options.out or options.run / "export"
    with damage_of(options.run / RESULT, "export another run"):
        found = export_run(options.run, out, fallback=options.fallback, target=options.target)
    print(json.dumps(found.to_json()) if options.json else found.text)
