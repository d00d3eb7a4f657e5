"""``optimize rewrite``: a model with operators split between two sides, or with convolutions as Tucker-2 triples."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.console import Group
from rich.text import Text

from evaluators.cost_model.session import CostModelEvaluator
from evaluators.litert.candidate import LitertCandidate
from evaluators.litert.processors import local_platform
from evaluators.litert.session import LitertEvaluator
from evaluators.litert.tensors import model_inputs
from optimizer.devices import choose_platform
from optimizer.provenance import provenance
from optimizer.report.terminal import table
from optimizer.tools.inspect import human_count, printable
from search_spaces.core.errors import RewriteError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs, parameter_total
from search_spaces.core.wording import human_bytes, percent
from search_spaces.models import load
from search_spaces.models.stages import cut_stage
from search_spaces.models.zoo.names import is_name, parse_name
from search_spaces.rewrites.splits import parse_split, split_operators
from search_spaces.rewrites.tucker import Layer, Ranks, decompose, find_layer, outline, tucker_layers
from search_spaces.rewrites.tucker_ranks import MULTIPLE, Choice, Choosing, choose_ranks, parse_rule
from search_spaces.spaces.chain import chain_plan

SCHEMA_VERSION = 1
_ANOTHER = "take another rule, or give ranks with --rank"


def rewrite_split(
    model: str, splits: Sequence[str], out: Path, input_shapes: Sequence[str] = ()
) -> tuple[dict[str, Any], str]:
    """Write a model with operators split; return the document of ``--json``, and the text.

    Raises:
        UsageError: a split cannot be made, or the file cannot be written.
    """
    graph = load(model, input_shapes)
    check_out(out, graph)
    wanted = tuple(parse_split(graph, text) for text in splits)
    made = split_operators(graph, wanted).graph
    digest = cut_stage(made, range(len(made.operators))).write(out)
    before, after, nbytes = len(graph.operators), len(made.operators), out.stat().st_size
    text = [*(f"{graph.name}: {s}" for s in wanted), f"{before} operators became {after}: {out} ({nbytes} bytes)"]
    return {
        "schema_version": SCHEMA_VERSION,
        "model": graph.name,
        "file": str(out),
        "splits": [{"operators": [s.first, s.last], "axis": s.axis, "cuts": list(s.cuts)} for s in wanted],
        "operators": {"before": before, "after": after},
        "nbytes": nbytes,
        "sha256": digest,
    }, "\n".join(text)


@dataclass(frozen=True, slots=True)
class Prices:
    """Predicted seconds, all on one processor: the one that runs the whole model as it was in the least time.

    Attributes:
        processor: its name.
        layer_s: operator of the model before → its time.
        triple_s: operator of the model before → the time of its triple.
        model_s: of all operators of the model before.
    """

    processor: str
    layer_s: dict[int, float]
    triple_s: dict[int, float]
    model_s: float


@dataclass(frozen=True, slots=True)
class Request:
    """The options of a rewrite.

    Attributes:
        model: a name or a file; a name that ends in ``:int8`` is decomposed as float32 and quantised then.
        rule: the value of ``--tucker``.
        out: the file to write.
        ranks: ``LAYER=INxOUT`` each; the rule does not apply to these layers.
        multiple, most: the rule's ranks are rounded to multiples of the first, and are at most the second.
        even_larger: whether triples are made that need no fewer multiply-accumulates.
        platform: the device whose profile prices layers and triples; None for no prices.
        even_slower: whether triples are used that are predicted to be no faster on the platform.
        input_shapes: of inputs that the model leaves open.
        seed: of the inputs on which outputs are compared.
    """

    model: str
    rule: str
    out: Path
    ranks: Sequence[str] = ()
    multiple: int = MULTIPLE
    most: int | None = None
    even_larger: bool = False
    platform: Path | None = None
    even_slower: bool = False
    input_shapes: Sequence[str] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A rewritten model.

    Attributes:
        before, after: the models, as float32.
        choices: the ranks of each convolution larger than 1 by 1, or why it has none.
        errors: operator → relative difference of its filter and that of its triple.
        output_error: relative difference of the outputs, before any quantisation.
        prices: on the requested device, of all choices before slower ones were left out.
        int8: whether the file was quantised.
        nbytes: of the file.
    """

    request: Request
    before: Graph
    after: Graph
    choices: tuple[Choice, ...]
    errors: Mapping[int, float]
    output_error: float
    prices: Prices | None
    int8: bool
    nbytes: int

    @property
    def macs(self) -> tuple[int, int]:
        """Multiply-accumulates of one inference, before and after."""
        before, after = (sum(c.macs for c in operator_costs(g)) for g in (self.before, self.after))
        return before, after

    @property
    def model_s(self) -> tuple[float, float] | None:
        """Predicted seconds of all operators, before and after; None if nothing was priced."""
        if self.prices is None:
            return None
        p, used = self.prices, [c.layer.operator for c in self.choices if c.ranks is not None]
        return p.model_s, p.model_s + sum(p.triple_s[o] - p.layer_s[o] for o in used)

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        before, after = self.macs
        predicted = None
        if self.prices is not None and self.model_s is not None:
            predicted = {
                "platform": str(self.request.platform),
                "processor": self.prices.processor,
                "before_ms": self.model_s[0] * 1e3,
                "after_ms": self.model_s[1] * 1e3,
            }
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.before.name,
            "rewrite": "tucker",
            "rule": str(parse_rule(self.request.rule)),
            "multiple_of": self.request.multiple,
            "at_most": self.request.most,
            "file": str(self.request.out),
            "nbytes": self.nbytes,
            "int8": self.int8,
            "macs": {"before": before, "after": after, "reduction": 1 - after / before},
            "parameters": {"before": parameter_total(self.before), "after": parameter_total(self.after)},
            "output_relative_error": {"value": self.output_error, "seed": self.request.seed},
            "predicted": predicted,
            "layers": [self._layer(choice) for choice in self.choices],
            "provenance": provenance(),
        }

    def _layer(self, choice: Choice) -> dict[str, Any]:
        layer, ranks = choice.layer, choice.ranks
        found: dict[str, Any] = {
            "operator": layer.operator,
            "name": layer.name,
            "kernel": list(layer.kernel),
            "groups": layer.groups,
            "channels": list(layer.full),
            "ranks": None if ranks is None else list(ranks),
            "why_not": choice.why or None,
            "macs": {"before": layer.macs(), "after": layer.macs(ranks)},
            "filter_relative_error": self.errors.get(layer.operator),
        }
        if self.prices is not None:
            triple_s = self.prices.triple_s.get(layer.operator)
            found["predicted_ms"] = {
                "layer": self.prices.layer_s[layer.operator] * 1e3,
                "triple": None if triple_s is None else triple_s * 1e3,
            }
        return found


def rewrite_tucker(request: Request) -> Rewritten:
    """Decompose a model and write it.

    Raises:
        UsageError: an option is wrong, or the file cannot be written.
        RewriteError: a rank or a layer is wrong, the model is quantised, or nothing of it would be decomposed.
        UnavailableError: the runtime does not run the model here, or there is no profile of the platform.
    """
    if request.even_slower and request.platform is None:
        raise UsageError("--even-slower requires a device", "give --platform with a profile's file or a device's name")
    rule = parse_rule(request.rule)
    name, int8 = _float_name(request.model)
    graph = load(name, request.input_shapes)
    check_out(request.out, graph)
    given = _given_ranks(graph, request.ranks)
    choices = choose_ranks(graph, Choosing(rule, given, request.multiple, request.most, request.even_larger))
    _check_some(choices, name, random=is_name(name) and rule.looks)
    prices = _price(graph, choices, request.platform) if request.platform is not None else None
    if prices is not None and not request.even_slower:
        choices = _only_faster(choices, prices)
        _check_some(choices, name, random=False, hint="use smaller ranks, or force them with --even-slower")
    made = decompose(graph, {c.layer.operator: c.ranks for c in choices if c.ranks is not None})
    error = relative_error(graph, made.graph, request.seed)
    if int8:
        from search_spaces.rewrites.tucker_int8 import quantise

        quantise(made.graph, request.out)
    else:
        cut_stage(made.graph, tuple(range(len(made.graph.operators)))).write(request.out)
    nbytes = request.out.stat().st_size
    return Rewritten(request, graph, made.graph, choices, made.errors, error, prices, int8, nbytes)


def relative_error(before: Graph, after: Graph, seed: int = 0) -> float:
    """Return the norm of the difference of two models' outputs on this machine, over the norm of the first one's.

    Args:
        seed: of the inputs, uniform in [-1, 1).

    Raises:
        UnavailableError: the runtime does not run a model here.
        ModelError: a model's file is gone.
    """
    inputs, found = model_inputs(before, seed), []
    platform = local_platform()
    with LitertEvaluator().prepare(platform) as session:
        for graph in (before, after):
            whole = chain_plan(graph, (), [platform.processors[0].name])
            with closing(cast("LitertCandidate", session.load(graph, whole))) as candidate:
                candidate.set_inputs(inputs)
                candidate.run(1)
                found.append(np.concatenate([output.ravel().astype(np.float64) for output in candidate.outputs()]))
    norm, apart = float(np.linalg.norm(found[0])), float(np.linalg.norm(found[1] - found[0]))
    return apart / norm if norm else apart


def _float_name(model: str) -> tuple[str, bool]:
    """Return the float32 model that ``NAME:int8`` of the zoo is made of, and whether it was asked for as int8."""
    if not is_name(model) or not model.endswith(":int8"):
        return model, False
    return replace(parse_name(model), variant="").canonical, True


def _given_ranks(graph: Graph, words: Sequence[str]) -> dict[int, Ranks]:
    """Return operator → ranks of ``LAYER=INxOUT`` each; a layer is the name of its output or its operator's number.

    Raises:
        UsageError: a word is not of that form, or a layer occurs twice.
        RewriteError: there is no such layer, or a rank is 0 or above its channels.
    """
    found: dict[int, Ranks] = {}
    for word in words:
        name, _, text = word.rpartition("=")
        numbers = text.split("x")
        if not name or len(numbers) != 2 or not all(n.isascii() and n.isdecimal() for n in numbers):
            raise UsageError(f"--rank {word}: is not of the form LAYER=INxOUT", "give for example conv3_1=64x96")
        layer = find_layer(tucker_layers(graph), name)
        if layer.operator in found:
            raise UsageError(f"--rank {word}: this layer has ranks already", "give each layer once")
        found[layer.operator] = layer.check(Ranks(*map(int, numbers)))
    return found


def check_out(out: Path, graph: Graph) -> None:
    """Check that a file can be written, and that it is not the model's own.

    Raises:
        UsageError: it cannot, or is.
    """
    other = out.is_dir() or (out.exists() and not out.is_file())
    if other or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise UsageError(f"{out}: cannot be written", "give the path of a file in a folder that you can write to")
    if graph.source is not None and out.exists() and out.samefile(graph.source.path):
        raise UsageError(f"{out}: is the model itself", "write to another file")


def _check_some(choices: Sequence[Choice], name: str, *, random: bool, hint: str = _ANOTHER) -> None:
    """Check that at least one layer is decomposed.

    Args:
        random: whether the weights are random, and the rule reads them.
        hint: what to do otherwise.
    """
    if any(choice.ranks is not None for choice in choices):
        return
    usual = max(choices, key=lambda choice: sum(other.why == choice.why for other in choices))
    if random and "+spectrum" not in name:
        hint = "append +spectrum to the name: the built-in model has random weights, which have no low rank"
    what = f"for example {printable(usual.layer.name, 40)}: {usual.why}"
    raise RewriteError(f"nothing of {name!r} would be decomposed; {what}", hint)


def _price(graph: Graph, choices: Sequence[Choice], platform: Path) -> Prices:
    """Return the predicted seconds of layers and of the triples that were chosen for them, on a device.

    Raises:
        UsageError: there is no such profile.
        UnavailableError: no processor of the device runs the whole model, or there is no profile of it.
        ProfileError: the profile has no prices for some operator.
    """
    evaluator = CostModelEvaluator()
    device = choose_platform(evaluator, None, platform)
    wanted = {c.layer.operator: c.ranks for c in choices if c.ranks is not None}
    with evaluator.prepare(device) as session:
        before = session.part_costs(graph).operator_s
        after = session.part_costs(outline(graph, wanted)).operator_s
    totals = before.sum(axis=1)
    best = int(totals.argmin())
    if not np.isfinite(totals[best]):
        raise UnavailableError(f"no processor of {device.name!r} runs the whole of {graph.name!r}")
    # A triple takes its layer's place; each earlier triple has added two operators.
    places = {operator: operator + 2 * i for i, operator in enumerate(sorted(wanted))}
    triple_s = {operator: float(after[best, at : at + 3].sum()) for operator, at in places.items()}
    layer_s = {c.layer.operator: float(before[best, c.layer.operator]) for c in choices}
    return Prices(device.processors[best].name, layer_s, triple_s, float(totals[best]))


def _only_faster(choices: Sequence[Choice], prices: Prices) -> tuple[Choice, ...]:
    """Return the choices with the layers left alone whose triples are predicted to be no faster."""
    found = []
    for choice in choices:
        layer, triple = (times.get(choice.layer.operator, 0.0) for times in (prices.layer_s, prices.triple_s))
        if choice.ranks is not None and triple >= layer:
            why = f"ranks {choice.ranks} would take {triple * 1e3:.3f} ms instead of {layer * 1e3:.3f}"
            found.append(Choice(choice.layer, None, why))
        else:
            found.append(choice)
    return tuple(found)


def render(found: Rewritten) -> Group:
    """Return layers with their ranks, then work, outputs, times and the file."""
    columns = (">op", "layer", ">filter", ">ranks", ">MACs", ">fewer", ">filter error")
    layers = table(
        columns + ((">predicted",) if found.prices is not None else ()), (_row(found, c) for c in found.choices)
    )
    for column in layers.columns[1:]:
        column.no_wrap = True
    kept = [c for c in found.choices if c.ranks is None]
    lines = [f"as it was: {printable(c.layer.name, 40)}: {c.why}" for c in kept[:8]]
    lines += [f"… and {len(kept) - 8} more"] if len(kept) > 8 else []
    return Group(layers, Text(), *(Text(line) for line in [*lines, *_sums(found)]))


def _row(found: Rewritten, choice: Choice) -> list[str]:
    layer, ranks = choice.layer, choice.ranks
    before, after = layer.macs(), layer.macs(ranks)
    error = found.errors.get(layer.operator)
    row = [
        str(layer.operator),
        printable(layer.name, 40),
        _filter(layer),
        "as it was" if ranks is None else f"{ranks.inputs}×{ranks.outputs}",
        human_count(before) if ranks is None else f"{human_count(before)} → {human_count(after)}",
        "" if ranks is None else percent(1 - after / before),
        "" if error is None else f"{error:.2g}",
    ]
    if found.prices is not None:
        triple_s = found.prices.triple_s.get(layer.operator)
        layer_ms = f"{found.prices.layer_s[layer.operator] * 1e3:.3f}"
        row.append(f"{layer_ms} ms" if triple_s is None else f"{layer_ms} → {triple_s * 1e3:.3f} ms")
    return row


def _filter(layer: Layer) -> str:
    groups = f"{layer.groups} groups of " if layer.groups > 1 else ""
    return f"{groups}{layer.kernel[0]}×{layer.kernel[1]}, {layer.inputs}→{layer.outputs}"


def _sums(found: Rewritten) -> list[str]:
    before, after = found.macs
    lines = [
        f"MACs {human_count(before)} → {human_count(after)}, {percent(1 - after / before, 1)} fewer",
        f"outputs differ by {found.output_error:.2g} of their norm on inputs of seed {found.request.seed}"
        + (", before quantisation" if found.int8 else ""),
    ]
    if found.prices is not None and found.model_s is not None:
        first, second = found.model_s
        lines.append(f"predicted for {found.prices.processor}: {first * 1e3:.2f} → {second * 1e3:.2f} ms")
    return [*lines, f"{found.request.out}: {human_bytes(found.nbytes)}"]
