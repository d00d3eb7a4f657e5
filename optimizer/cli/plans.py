"""Commands about the plan of a study: run, compare, explain, export, report, look at."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from optimizer.cli.parsing import Parser, add_common, tell
from search_spaces.allowed_code import allow
from search_spaces.errors import UnavailableError


def execute(parser: Parser, arguments: list[str]) -> int:
    """Do ``optimize execute``."""
    parser.add_argument("plan", metavar="PLAN", help="a run folder, or a plan.json")
    parser.add_argument("--input", metavar="FILE", type=Path, help="inputs: .npy, or .npz with a name for each")
    parser.add_argument("--custom-ops", metavar="LIBRARY", type=Path, help="a library with kernels of custom operators")
    parser.add_argument("--stream", action="store_true", help="stream inferences: successive ones overlap")
    add_common(parser.add_argument)
    options = parser.read(arguments)
    from optimizer.execute import execute as execute_plan

    allow(str(options.custom_ops or ""))
    found = execute_plan(
        options.plan, as_json=options.json, stream=options.stream, inputs=options.input, custom_ops=options.custom_ops
    )
    print(found.text)
    return 0 if found.accepted else UnavailableError.exit_code


def compare(parser: Parser, arguments: list[str]) -> int:
    """Do ``optimize compare``."""
    parser.add_argument("runs", metavar="RUN", nargs=2, help="a run folder, or a plan.json")
    add_common(parser.add_argument, quiet=True)
    options = parser.read(arguments)
    from optimizer.compare import compare_runs

    def progress(text: str) -> None:
        if not options.quiet:
            tell(f"optimize: {text}")

    print(compare_runs(*options.runs, as_json=options.json, progress=progress))
    return 0


def explain(parser: Parser, arguments: list[str]) -> int:
    """Do ``optimize explain``."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a study")
    add_common(parser.add_argument)
    options = parser.read(arguments)
    from optimizer.console import make_console
    from optimizer.execute_hosted import has_several
    from optimizer.explain_text import blocks, head, render

    if has_several(options.run):
        from optimizer.explain_workload import explain_workload

        several = explain_workload(options.run)
        document, title, told = (
            several.to_json(),
            f"{options.run}: {several.objective} of several models",
            several.blocks(),
        )
    else:
        from optimizer.explain import explain_run

        found = explain_run(options.run)
        document, title, told = found.to_json(), head(found), blocks(found)
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        make_console().print(render(title, told), crop=False)
    return 0


def report(parser: Parser, arguments: list[str]) -> int:
    """Do ``optimize report``."""
    parser.add_argument("run", metavar="RUN|CAMPAIGN", type=Path, help="the folder of a study or of a campaign")
    parser.add_argument("--out", metavar="DIR", type=Path, help="output folder (default: the run folder)")
    add_common(parser.add_argument, as_json=False)
    options = parser.read(arguments)
    from optimizer.report.write import report as write

    written = write(options.run, options.out)
    if written.without_png:
        print(f"optimize: {written.without_png}", file=sys.stderr)
    print(written.page)
    return 0


def dashboard(parser: Parser, arguments: list[str]) -> int:
    """Do ``optimize dashboard``."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a finished study")
    parser.add_argument("--port", metavar="N", default="8080", help="port on this machine (default 8080)")
    add_common(parser.add_argument, as_json=False)
    options = parser.read(arguments)
    if not options.port.isdecimal() or not 1 <= int(options.port) <= 65535:
        parser.error(f"--port {options.port}: must be a whole number from 1 to 65535")
    from optimizer.dashboard import serve

    serve(options.run, int(options.port), lambda at: print(f"optimize: {at}, until Ctrl-C", file=sys.stderr))
    return 0


def export(parser: Parser, arguments: list[str]) -> int:
    """Do ``optimize export``."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a finished study")
    parser.add_argument("--out", metavar="DIR", type=Path, help="output folder (default: RUN/export)")
    parser.add_argument(
        "--target",
        choices=("linux", "android", "openvino", "onnxruntime", "model-explorer"),
        default="linux",
        help="what runs it (default: linux)",
    )
    parser.add_argument("--fallback", action="store_true", help="with the whole model, for the runner to compare with")
    add_common(parser.add_argument)
    options = parser.read(arguments)
    from optimizer.export.folder import export_run

    found = export_run(
        options.run, options.out or options.run / "export", fallback=options.fallback, target=options.target
    )
    if options.json:
        fallback = None if found.fallback is None else {"processor": found.fallback}
        print(
            json.dumps({"schema_version": 1, "folder": str(found.folder), "files": found.files, "fallback": fallback})
        )
        return 0
    print(f"{found.folder}: {', '.join(found.files)}")
    print(f"time it with: python {found.folder / 'run_plan.py'}")
    if found.fallback is not None:
        print(f"compare it with the whole model on {found.fallback}: add --fallback")
    return 0
