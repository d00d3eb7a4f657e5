"""Recommended plans against LiteRT's own placement: ``python -m tests.benchmarks.placements OUT.json [--only NAME,…]``.

Each network is searched over a CPU and a graphics adapter through the command line. Then the recommended plan, LiteRT's
own placement (one model compiled for ``GPU | CPU``) and the best other rows of the study are compared in interleaved
rounds that do not use the product's final. Networks that OUT.json holds are skipped; ``--again`` makes them anew.

Networks of :data:`ODD` are convolutions of equal work with operators between them that LiteRT's accelerator refuses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from evaluators.litert.session import LitertEvaluator, LitertSession
from optimizer.files import write_json
from optimizer.provenance import provenance
from search_spaces.core.allowed_code import allow
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.models import load
from search_spaces.models.zoo.builder import Builder, Draft, Value
from search_spaces.spaces.chain import chain_plan
from tests.benchmarks.verdicts.accelerated import PROCESSORS, platform_of
from tests.benchmarks.verdicts.studies import Row, compared, long_trace, plans_to_compare, study
from tests.benchmarks.verdicts.trace import Trace, ratio
from tests.support.models.custom_operator import kernels

SIZE, CHANNELS = 56, 128  # a convolution of 0.9 GFLOP
ZOO = ("squeezenet1_1:f16", "mobilenet_v2:f16", "resnet18:f16", "googlenet:f16", "retinaface/320:f16")
INT8 = ("mobilenet_v2:int8", "googlenet:int8")
_MOST_PLANS = 5  # of a long comparison
_MOST_NAMED = 3  # stages of a plan in the table

Between = Callable[[Builder, Value, str], Value]


def _normalised(net: Builder, x: Value, name: str) -> Value:
    options = schema.LocalResponseNormalizationOptionsT(radius=2, bias=1.0, alpha=1e-4, beta=0.75)
    return net.unary("LOCAL_RESPONSE_NORMALIZATION", x, name, options)


def _unit(net: Builder, x: Value, name: str) -> Value:
    return net.scalar("MUL", net.unary("L2_NORMALIZATION", x, f"{name}/unit", schema.L2NormOptionsT()), 10.0, name)


def _dilated(net: Builder, x: Value, name: str) -> Value:
    block = net.constant(f"{name}/block", np.array([2, 2], np.int32))
    sides = net.constant(f"{name}/sides", np.zeros((2, 2), np.int32))
    batch, height, width, channels = x.shape
    shape = (4 * batch, height // 2, width // 2, channels)
    apart = net.operator("SPACE_TO_BATCH_ND", (x, block, sides), shape, f"{name}/apart")
    made = net.conv(apart, channels, 3, f"{name}/conv", activation="RELU")
    return net.operator("BATCH_TO_SPACE_ND", (made, block, sides), x.shape, name)


def _whole_numbers(net: Builder, x: Value, name: str) -> Value:
    scaled = net.scalar("MUL", x, 1000.0, f"{name}/scale")
    whole = net.operator("CAST", (scaled,), x.shape, f"{name}/cast", schema.CastOptionsT(), "INT64")
    back = net.operator("CAST", (whole,), x.shape, f"{name}/back", schema.CastOptionsT())
    return net.scalar("MUL", back, 1e-3, name)


def _resized(net: Builder, x: Value, name: str) -> Value:
    """Halve the map, and bring it back to a size that is computed at run time."""
    size = net.operator("SHAPE", (x,), (4,), f"{name}/shape", schema.ShapeOptionsT(outType=2), "INT32")
    begin, count = (net.constant(f"{name}/{word}", np.array([n], np.int32)) for word, n in (("begin", 1), ("count", 2)))
    both = net.operator("SLICE", (size, begin, count), (2,), f"{name}/size", schema.SliceOptionsT(), "INT32")
    small = net.max_pool(x, 2, 2, f"{name}/pool")
    return net.operator("RESIZE_BILINEAR", (small, both), x.shape, name, schema.ResizeBilinearOptionsT())


def _chosen(net: Builder, x: Value, name: str) -> Value:
    zero = net.constant(f"{name}/zero", np.zeros(x.shape[-1:], np.float32))
    positive = net.operator("GREATER", (x, zero), x.shape, f"{name}/positive", schema.GreaterOptionsT(), "BOOL")
    return net.operator("SELECT_V2", (positive, x, zero), x.shape, name, schema.SelectV2OptionsT())


def _twice(net: Builder, x: Value, name: str) -> Value:
    return net.unary(_CUSTOM, x, name)  # made a custom operator once the network is whole


def _reversed(net: Builder, x: Value, name: str) -> Value:
    batch, height, width, channels = x.shape
    rows = net.reshape(x, (batch * height, width, channels), f"{name}/rows")
    lengths = net.constant(f"{name}/lengths", np.full(batch * height, width, np.int32))
    options = schema.ReverseSequenceOptionsT(seqDim=1, batchDim=0)
    back = net.operator("REVERSE_SEQUENCE", (rows, lengths), rows.shape, f"{name}/back", options)
    return net.reshape(back, x.shape, name)


_CUSTOM = "SIGN"  # stands for the custom operator while a network is built

ODD: Mapping[str, tuple[Between, int, int]] = {
    "int64 casts": (_whole_numbers, 3, 1),
    "unit vectors": (_unit, 2, 4),
    "response normalisation": (_normalised, 4, 2),
    "dilation by batches": (_dilated, 3, 1),
    "size at run time": (_resized, 4, 1),
    "selection": (_chosen, 2, 3),
    "custom operator": (_twice, 4, 1),
    "reversed rows": (_reversed, 3, 2),
}
"""Network → what stands between its blocks, convolutions of a block, how often."""

NAMES = (*ODD, *INT8, *ZOO)


def network(name: str, channels: int) -> Draft:
    """Return a network of :data:`ODD`."""
    between, length, times = ODD[name]
    net = Builder(name.replace(" ", "_"))
    x = net.conv(net.input((1, 2 * SIZE, 2 * SIZE, 3)), channels, 3, "stem", stride=2, activation="RELU")
    for block in range(times + 1):
        for i in range(length):
            x = net.conv(x, channels, 3, f"block{block}/{i}", activation="RELU")
        if block < times:
            x = between(net, x, f"between{block}")
    draft = net.finish(net.fully_connected(net.mean(x, "mean"), 100, "out"))
    for code in draft.schema.operatorCodes:
        if between is _twice and code.builtinCode == getattr(schema.BuiltinOperator, _CUSTOM):
            code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.CUSTOM
            code.customCode = "Twice"
    return draft


def written(name: str, folder: Path, channels: int) -> list[str]:
    """Return the options that name a network to the command line, whose file is written where it has none yet."""
    if name not in ODD:
        return ["--model", name]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace(' ', '_')}.tflite"
    network(name, channels).write(path)
    if ODD[name][0] is not _twice:
        return ["--model", str(path)]
    return ["--model", str(path), "--custom-ops", str(kernels(folder))]


def opened(options: Sequence[str]) -> Graph:
    """Return the network that such options name."""
    if len(options) == 2:
        return load(options[1])
    allow(options[3])
    return load(options[1], custom_ops=Path(options[3]))


def run(name: str, folder: Path, options: argparse.Namespace) -> Row:
    """Search one network, then compare its plans at length."""
    processors = options.processors.split(",")
    words = written(name, folder, options.channels)
    command = [*words, "--processors", options.processors, "--budget", str(options.budget), "--seed", "0"]
    row = study(command, os.environ)
    graph, platform = opened(words), platform_of(processors)
    own = platform.processors[-1].name
    row |= {"operators": len(graph.operators)}
    wholes = [chain_plan(graph, (), (processor,)) for processor in (own, processors[0])]
    plans = plans_to_compare([row], wholes)[:_MOST_PLANS]
    with LitertEvaluator().prepare(platform) as session:
        trace = long_trace(session, graph, plans, options.long_seconds)
        left = Counter(graph.operators[o].kind for o in session.unsupported_operators(graph, processors[-1]))
        row |= {"own_placement": placed(session, graph, wholes[0]), "unsupported": dict(left)}
    row.pop("table", None)
    return row | {"long": compared(trace, plans)} | against(trace, row, wholes[0], wholes[1])


def placed(session: LitertSession, graph: Graph, own: Plan) -> str:
    """Return what LiteRT did with a network of its own accord, or why it refuses it."""
    try:
        session.load(graph, own).close()
    except UnavailableError as error:
        return str(error)
    return session.placements(graph)[own.stages[0].processor]


def against(trace: Trace, row: Row, own: Plan, cpu: Plan) -> Row:
    """Return how many times as long LiteRT's own placement and the CPU take as the recommended plan, with intervals."""
    if "best" not in row:
        return {}
    best = trace.names.index(Plan.from_json(row["best"]).digest)
    found: Row = {}
    for name, plan in (("own", own), ("cpu", cpu)):
        other = trace.names.index(plan.digest)
        if not math.isfinite(trace.typical_s[other]):
            continue  # the runtime refuses it
        value, half = ratio(trace, other, best) if other != best else (0.0, 0.0)
        found[f"{name}_ratio"] = [math.exp(value), math.exp(value - half), math.exp(value + half)]
        found[f"{name}_ms"] = float(trace.typical_s[other]) * 1e3
    return found | {"best_ms": float(trace.typical_s[best]) * 1e3}


def judge(rows: Mapping[str, Row]) -> Row:
    """Return in how many networks the recommended plan is significantly slower or faster than LiteRT's placement."""
    known = {name: row["own_ratio"] for name, row in rows.items() if "own_ratio" in row}
    return {
        "networks": len(rows),
        "with_unsupported": sum(bool(row["unsupported"]) for row in rows.values()),
        "slower": [name for name, (_, _, high) in known.items() if high < 1.0],
        "faster": [name for name, (_, low, _) in known.items() if low > 1.0],
        "not_compared": [name for name in rows if name not in known],
    }


def table(rows: Mapping[str, Row]) -> str:
    """Return the networks as a Markdown table."""
    head = ("network", "not supported on the GPU", "LiteRT's own placement", "the plan", "times as fast", "CPU alone")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, row in rows.items():
        left = ", ".join(f"{count} {kind}" for kind, count in row["unsupported"].items()) or "–"
        own = f"{row['own_ms']:.2f} ms" if "own_ms" in row else "refused"
        cells = [name, left, own, f"exit code {row['exit']}", "–", "–"]
        if "best_ms" in row:
            stages = [stage.processor for stage in Plan.from_json(row["best"]).stages]
            where = ", ".join(stages) if len(stages) <= _MOST_NAMED else f"{len(stages)} stages"
            ratios = row.get("own_ratio", [])
            faster = f"{ratios[0]:.2f} [{ratios[1]:.2f}, {ratios[2]:.2f}]" if ratios else "–"
            cells[3:] = [f"{where}: {row['best_ms']:.2f} ms", faster, f"{row['cpu_ms']:.2f} ms"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Search and compare the networks, write what came, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path)
    add("--only", metavar="NAME,…", help=f"of {', '.join(NAMES)}, or other models")
    add("--again", action="store_true", help="make anew what is there")
    add("--budget", type=int, default=10, help="of a study (default 10)")
    add("--long-seconds", type=float, default=12.0, help="of a long comparison (default 12)")
    add("--seconds", type=float, default=math.inf, help="begin no network later")
    add("--processors", default=",".join(PROCESSORS), help="a CPU, and an adapter (default cpu,gpu)")
    add("--channels", type=int, default=CHANNELS, help=f"of the odd networks' convolutions (default {CHANNELS})")
    add("--beside", default="", help="what else the machine does meanwhile: noted in the results")
    options = parser.parse_args()
    begin_s = time.monotonic()
    content: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"schema_version": 1}
    given = (f"--{word}={getattr(options, word.replace('-', '_'))}" for word in ("budget", "long-seconds", "channels"))
    command = shlex.join(["python", "-m", "tests.benchmarks.placements", "OUT.json", *given])
    rows: dict[str, Row] = content.setdefault("networks", {})
    save = partial(write_json, options.out, content)
    for name in options.only.split(",") if options.only else NAMES:
        if (name in rows and not options.again) or time.monotonic() - begin_s > options.seconds:
            continue
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {name}\n")
        row = run(name, options.out.with_suffix(".models").absolute(), options)
        rows[name] = {"command": command, "beside": options.beside, **row}
        content |= {"made_by": "python -m tests.benchmarks.placements OUT.json", **provenance(), "summary": judge(rows)}
        save()
    sys.stdout.write(table(rows))


if __name__ == "__main__":
    main()
