"""Commands about models: list, inspect, rewrite, train."""

from __future__ import annotations

from pathlib import Path

from optimizer.cli.parsing import Parser, add_shapes, note, show
from search_spaces.core.allowed_code import allow


def models(parser: Parser, arguments: list[str]) -> None:
    """List the built-in models, with their size and work."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="for example mobilenet_v1@0.5/192 (default: all)")
    options = parser.read(arguments)
    from optimizer.tools.models import render, summaries, to_json

    found = summaries(options.names)
    show(options, lambda: to_json(found), lambda: render(found))


def inspect(parser: Parser, arguments: list[str]) -> None:
    """Show a model's operators and where it can be cut."""
    add = parser.add_argument
    add("model", metavar="NAME|FILE", help="a built-in model, or a .tflite file")
    add_shapes(add)
    add("--signature", metavar="KEY", help="the model's signature to run (default: its main subgraph)")
    picture = "draw the graph with its cut points: .svg, or .html with zoom and tables"
    add("--picture", metavar="FILE", type=Path, help=picture)
    add("-o", "--out", metavar="FILE", type=Path, help="write the model as a .tflite file")
    options = parser.read(arguments)
    from optimizer.report.graph import check_picture, write_picture
    from optimizer.tools.inspect import inspect_graph, render, to_json
    from optimizer.tools.rewrite import check_out
    from search_spaces.models import load
    from search_spaces.models.stages import cut_stage

    if options.picture is not None:
        if options.picture == options.out:
            parser.error("--picture and --out name the same file")
        check_picture(options.picture)
    allow(options.model)
    graph = load(options.model, options.input_shape or (), signature=options.signature)
    found = inspect_graph(graph)
    if options.out is not None:
        check_out(options.out, graph)
        cut_stage(graph, range(len(graph.operators))).write(options.out)
        note(f"optimize: the model is in {options.out}")
    if options.picture is not None:
        write_picture(found, options.picture)
        note(f"optimize: the picture is in {options.picture}")
    show(options, lambda: to_json(found), lambda: render(found))


def rewrite(parser: Parser, arguments: list[str]) -> None:
    """Write a rewritten model."""
    add = parser.add_argument
    add("name", metavar="NAME|FILE", nargs="?", help="a built-in model, also as NAME:int8, or a .tflite file")
    add("--model", metavar="NAME|FILE", help="the same")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument(
        "--split",
        metavar="FIRST-LAST:AXIS:SHARE",
        action="append",
        help="split operators between two processors, for example 0-2:height:0.6 or 5:channels:0.5; may be repeated",
    )
    kind.add_argument(
        "--tucker",
        metavar="RULE",
        help="replace each convolution larger than 1x1 by three; ranks by ratio:SHARE (or IN,OUT) of the channels,"
        " energy:SHARE of the squared singular values, vbmf, or given by --rank alone",
    )
    add("-o", "--out", metavar="FILE", type=Path, required=True, help="output .tflite file")
    add_shapes(add)
    add = parser.add_argument_group("with --tucker").add_argument
    add("--rank", metavar="LAYER=INxOUT", action="append", help="ranks of one layer, for example conv3_1=64x96")
    add("--multiple-of", metavar="N", help="round the rule's ranks to multiples of N (default 8)")
    add("--at-most", metavar="R", help="upper limit of the rule's ranks")
    add("--even-larger", action="store_true", help="decompose even where it saves no multiply-accumulates")
    add("--platform", metavar="FILE|NAME", type=Path, help="device profile that predicts times before and after")
    add("--even-slower", action="store_true", help="decompose even where it is predicted to be slower on --platform")
    add("--seed", metavar="S", help="of the inputs on which outputs are compared (default 0)")
    options = parser.read(arguments)
    if (options.name is None) == (options.model is None):
        parser.error("give one model")
    model = options.model if options.name is None else options.name
    shapes = tuple(options.input_shape or ())
    if options.tucker is None:
        for name in ("rank", "multiple_of", "at_most", "even_larger", "platform", "even_slower", "seed"):
            if getattr(options, name):
                parser.error(f"--{name.replace('_', '-')} has no effect without --tucker")
        from optimizer.tools.rewrite import rewrite_split

        document, text = rewrite_split(model, options.split, options.out, shapes)
        show(options, lambda: document, lambda: text)
        return
    multiple = parser.whole("--multiple-of", options.multiple_of or "8", 1)
    most = parser.whole("--at-most", options.at_most, 1) if options.at_most else None
    seed = parser.whole("--seed", options.seed or "0", 0)
    from optimizer.tools.rewrite import Request, render, rewrite_tucker

    o, ranks = options, tuple(options.rank or ())
    found = rewrite_tucker(
        Request(model, o.tucker, o.out, ranks, multiple, most, o.even_larger, o.platform, o.even_slower, shapes, seed)
    )
    show(options, found.to_json, lambda: render(found))


def train(parser: Parser, arguments: list[str]) -> None:
    """Train a float32 model on labelled inputs, and measure its accuracy on those kept apart."""
    add = parser.add_argument
    add("model", metavar="NAME|FILE", help="a built-in model, whose weights are drawn again, or a .tflite file")
    add("--data", metavar="FILE|NAME", required=True, help="an .npz with 'inputs' and 'labels', or mnist_5k")
    add("-o", "--out", metavar="FILE", type=Path, help="output .tflite file")
    epochs = "how often each input is used (default 10); 0 only measures the accuracy"
    add("--epochs", metavar="N", default="10", help=epochs)
    add("--rate", metavar="R", default="0.0005", help="learning rate at the beginning (default 0.0005)")
    add(
        "--share", metavar="S", default="0.8", help="of the inputs to train on; the others are kept apart (default 0.8)"
    )
    seed = "of the parts, the order and the weights drawn again (default 0); keep it and --share to train a model on"
    add("--seed", metavar="S", default="0", help=seed)
    options = parser.read(arguments, quiet=True)
    times, number = parser.whole("--epochs", options.epochs, 0), parser.whole("--seed", options.seed, 0)
    rate, share = parser.above_0("--rate", options.rate, 1.0), parser.above_0("--share", options.share, 1.0)
    if (options.out is None) != (times == 0):
        parser.error("--out requires epochs" if times == 0 else "--out FILE is missing; or give --epochs 0")
    from evaluators.cuda.training import Training
    from optimizer.tools.train import train_model
    from search_spaces.models import is_built_in

    how = Training(times, rate, number, anew=times > 0 and is_built_in(options.model))
    told = (lambda _: None) if options.quiet else note
    found = train_model(options.model, options.data, options.out, how, share, told)
    show(options, found.to_json, found.render)
