"""Commands about devices: what there is, what is wrong, how fast it is."""

from __future__ import annotations

import json
from pathlib import Path

from optimizer.cli.parsing import Parser, add_common, tell
from search_spaces.allowed_code import allow
from search_spaces.errors import EXIT_INTERRUPTED, UnavailableError


def calibrate(parser: Parser, arguments: list[str]) -> int:
    """Do ``optimize calibrate``."""
    add = parser.add_argument
    add("--out", metavar="FILE", type=Path, required=True, help="the profile, a .json file; its log lies beside it")
    add("--processors", metavar="A,B", help="processors to calibrate (default: all found)")
    add("--minutes", metavar="M", type=float, default=10.0, help="minutes to spend (default 10)")
    add("--refine", metavar="RUN", type=Path, help="correct the profile FILE with what a study measured instead")
    add("--evaluator", metavar="NAME", default="litert", help="what measures (default litert: this machine)")
    add_common(add, quiet=True)
    options = parser.read(arguments)
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
            tell=(lambda _: None) if options.quiet else (lambda text: tell(f"optimize: {text}")),
        )
    print(json.dumps(found.profile.errors, indent=2) if options.json else render_calibration(found))
    if found.interrupted:
        tell("optimize: interrupted; run the same command to resume")
        return EXIT_INTERRUPTED
    return 0


def doctor(parser: Parser, arguments: list[str]) -> int:
    """Do ``optimize doctor``."""
    parser.add_argument("--model", metavar="NAME|FILE", help="list the operators that each processor does not support")
    add_common(parser.add_argument)
    options = parser.read(arguments)
    from optimizer.doctor import diagnose, render

    found = diagnose(options.model)
    print(json.dumps(found.to_json(), indent=2) if options.json else render(found))
    return 0 if found.usable else UnavailableError.exit_code


def plugins(parser: Parser, arguments: list[str]) -> int:
    """Do ``optimize plugins``."""
    add_common(parser.add_argument)
    options = parser.read(arguments)
    from optimizer.console import make_console
    from optimizer.plugins import list_plugins, render, to_json

    found = list_plugins()
    if options.json:
        print(json.dumps(to_json(found), indent=2))
    else:
        make_console().print(render(found))
    return UnavailableError.exit_code if any(p.problem for p in found) else 0


def devices(parser: Parser, arguments: list[str]) -> int:
    """Do ``optimize devices``."""
    add_common(parser.add_argument)
    options = parser.read(arguments)
    from optimizer.known_devices import known_devices, render

    found = known_devices()
    print(json.dumps(found.to_json(), indent=2) if options.json else render(found))
    return 0
