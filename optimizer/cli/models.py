"""Commands about models: list, inspect, rewrite."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from optimizer.cli.parsing import Parser, add_common, add_model, tell
from search_spaces.allowed_code import allow


def models(parser: Parser, arguments: list[str]) -> int:
    """Do ``optimize models``."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="as mobilenet_v1@0.5/192 (default: all)")
    add_common(parser.add_argument)
    options = parser.read(arguments)
    from optimizer.models import print_models

    print_models(options.names, as_json=options.json)
    return 0


def inspect(parser: Parser, arguments: list[str]) -> int:
    """Do ``optimize inspect``."""
    add = parser.add_argument
    add("model", metavar="NAME|FILE", help="a built-in model, or a .tflite file")
    add_model(add)
    add(
        "--picture",
        metavar="FILE",
        type=Path,
        help="draw the graph with its cut points: .svg, or .html with zoom and tables",
    )
    add_common(add)
    options = parser.read(arguments)
    from optimizer.graph_picture import check_picture, write_picture
    from optimizer.inspect import inspect_graph, to_json
    from search_spaces.models import load

    if options.picture is not None:
        check_picture(options.picture)
    allow(options.model)
    found = inspect_graph(load(options.model, options.input_shape or (), signature=options.signature))
    if options.picture is not None:
        write_picture(found, options.picture)
        tell(f"optimize: the picture is in {options.picture}")
    if options.json:
        print(json.dumps(to_json(found), indent=2))
    else:
        from optimizer.console import make_console
        from optimizer.inspect_text import render_inspection

        console = make_console()
        console.print(render_inspection(found, console.width))
    return 0


def rewrite(parser: Parser, arguments: list[str]) -> int:
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
    add("-o", "--out", metavar="FILE", type=Path, required=True, help="output .tflite file")
    add("--input-shape", metavar="NAME=D,D,…", action="append", help="sizes of an input that the model leaves open")
    tucker = parser.add_argument_group("with --tucker")
    add = tucker.add_argument
    add("--rank", metavar="LAYER=INxOUT", action="append", help="ranks of one layer, as conv3_1=64x96")
    add("--multiple-of", metavar="N", help="round the rule's ranks to multiples of N (default 8)")
    add("--at-most", metavar="R", help="upper limit of the rule's ranks")
    add("--even-larger", action="store_true", help="decompose even where it saves no multiply-accumulates")
    add("--platform", metavar="FILE|NAME", type=Path, help="device profile that predicts times before and after")
    add("--even-slower", action="store_true", help="decompose even where it is predicted to be slower on --platform")
    add("--seed", metavar="S", help="of the inputs on which outputs are compared (default 0)")
    add_common(parser.add_argument)
    options = parser.read(arguments)
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


def _tucker(parser: Parser, options: argparse.Namespace, model: str) -> int:
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
