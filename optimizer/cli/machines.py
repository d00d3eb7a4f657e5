"""Commands about devices: list, check, calibrate."""

from __future__ import annotations

from pathlib import Path

from optimizer.cli.parsing import Parser, note, show
from search_spaces.core.allowed_code import allow
from search_spaces.core.errors import EXIT_INTERRUPTED, UnavailableError, UsageError


def calibrate(parser: Parser, arguments: list[str]) -> int:
    """Fit a cost model of this machine's processors, or of a device to published figures; or refine one by a study."""
    add = parser.add_argument
    add("--out", metavar="FILE", type=Path, required=True, help="profile (.json or .yaml); its log lies beside it")
    add("--processors", metavar="A,B", help="processors to calibrate (default: all found)")
    add("--minutes", metavar="M", type=float, help="minutes to spend (default 10)")
    add(
        "--refine",
        metavar="RUN",
        type=Path,
        help="do not calibrate: correct the profile FILE with the measurements of the study RUN",
    )
    add(
        "--figures",
        metavar="FILE.yaml",
        type=Path,
        help="do not measure: fit the profile of a device to latencies that were published",
    )
    add("--evaluator", metavar="NAME", help="evaluator that measures (default litert: this machine)")
    options = parser.read(arguments, quiet=True)
    allow(*(options.processors or "").split(","))
    from optimizer.tools.calibrate import calibrate, refine, render

    progress = (lambda _: None) if options.quiet else (lambda text: note(f"optimize: {text}"))
    if options.figures is not None:
        from optimizer.tools import figures

        given = (
            name for name in ("processors", "minutes", "refine", "evaluator") if getattr(options, name) is not None
        )
        if (other := next(given, None)) is not None:
            raise UsageError(f"--figures measures nothing and does not go with --{other}", f"leave out --{other}")
        fitted = figures.fit_figures(options.figures, options.out, progress)
        show(options, lambda: fitted.profile.errors, lambda: figures.render(fitted))
        return 0
    if options.refine is not None:
        found = refine(options.out, options.refine)
    else:
        found = calibrate(
            options.out,
            options.processors.split(",") if options.processors else None,
            10.0 if options.minutes is None else options.minutes,
            evaluator=options.evaluator or "litert",
            command=["optimize", "calibrate", *arguments],
            progress=progress,
        )
    show(options, lambda: found.step or found.profile.errors, lambda: render(found))
    if found.interrupted:
        note("optimize: interrupted; run the same command to resume")
        return EXIT_INTERRUPTED
    return 0


def doctor(parser: Parser, arguments: list[str]) -> int:
    """Check this machine: runtimes, processors, load, and how to fix problems."""
    parser.add_argument("--model", metavar="NAME|FILE", help="list the operators that each processor does not support")
    options = parser.read(arguments)
    from optimizer.tools.doctor import diagnose, render

    found = diagnose(options.model)
    show(options, found.to_json, lambda: render(found))
    return 0 if found.usable else UnavailableError.exit_code


def plugins(parser: Parser, arguments: list[str]) -> int:
    """List evaluators, spaces, samplers and models with the package that brings them."""
    options = parser.read(arguments)
    from optimizer.tools.plugins import list_plugins, render, to_json

    found = list_plugins()
    show(options, lambda: to_json(found), lambda: render(found))
    return UnavailableError.exit_code if any(p.problem for p in found) else 0


def devices(parser: Parser, arguments: list[str]) -> None:
    """List what plans can be searched for: processors of this machine, known devices, phones, agents."""
    options = parser.read(arguments)
    from optimizer.tools.doctor import known_devices, render_devices

    found = known_devices()
    show(options, found.to_json, lambda: render_devices(found))
