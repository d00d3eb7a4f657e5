"""What ``optimize rewrite --tucker`` does: choose ranks, decompose, write, and compare what comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optimizer.provenance import provenance
from optimizer.rewrite_outputs import relative_error
from optimizer.rewrite_price import Prices, only_faster, price
from search_spaces.errors import RewriteError, UsageError
from search_spaces.graph import Graph
from search_spaces.intensity import operator_costs, parameter_total
from search_spaces.models import load
from search_spaces.models.stages import cut_stage
from search_spaces.models.zoo.names import is_name, parse_name
from search_spaces.rewrites.tucker import Ranks, TuckerGraph, decompose, find_layer, tucker_layers
from search_spaces.rewrites.tucker_ranks import MULTIPLE, Choice, Choosing, choose_ranks, parse_rule

SCHEMA_VERSION = 1

_ANOTHER = "take another rule, or give ranks with --rank"


@dataclass(frozen=True, slots=True)
class Request:
    """What a person asks for.

    Attributes:
        model: a name or a file; a name that ends in ``:int8`` is decomposed as float32 and quantised then.
        rule: as ``--tucker`` has it.
        out: the file to write.
        ranks: ``LAYER=INxOUT`` each; these layers are not asked about.
        multiple, most: what the rule's ranks are rounded to multiples of, and what none of them is above.
        even_larger: whether triples are made that need no fewer multiply-accumulates.
        platform: whose profile prices layers and triples; None for no prices.
        even_slower: whether triples that are predicted to be no faster on the platform are used all the same.
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
    """What was made.

    Attributes:
        before, after: the models, as float32.
        choices: what became of each convolution larger than 1 by 1.
        errors: operator → how far its filter is from that of its triple, relative.
        output_error: how far the outputs are apart, relative; before any quantisation.
        prices: of the device that was asked for, of the choices as they were before any was left out.
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
        """Predicted seconds of all operators, before and after; None where nothing was priced."""
        if self.prices is None:
            return None
        p, used = self.prices, [c.layer.operator for c in self.choices if c.ranks is not None]
        return p.model_s, p.model_s + sum(p.triple_s[o] - p.layer_s[o] for o in used)

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        before, after = self.macs
        seconds = self.model_s
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
            "predicted": seconds
            and {
                "platform": str(self.request.platform),
                "processor": self.prices and self.prices.lane,
                "before_ms": seconds[0] * 1e3,
                "after_ms": seconds[1] * 1e3,
            },
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


def rewrite(request: Request) -> Rewritten:
    """Decompose a model and write it.

    Raises:
        UsageError: a word cannot be understood, or the file cannot be written.
        RewriteError: a rank or a layer cannot be, the model is quantised, or nothing of it would be decomposed.
        UnavailableError: the runtime does not run the model here, or there is no profile of the platform.
    """
    if request.even_slower and request.platform is None:
        raise UsageError("--even-slower: slower on what?", "give --platform with a profile's file or a device's name")
    rule = parse_rule(request.rule)
    name, int8 = float_name(request.model)
    graph = load(name, request.input_shapes)
    _check_out(request.out, graph)
    given = given_ranks(graph, request.ranks)
    choices = choose_ranks(graph, Choosing(rule, given, request.multiple, request.most, request.even_larger))
    _check_some(choices, name, random=is_name(name) and rule.looks)
    prices = price(graph, choices, request.platform) if request.platform is not None else None
    if prices is not None and not request.even_slower:
        choices = only_faster(choices, prices)
        _check_some(choices, name, random=False, hint="take smaller ranks, or use them all the same with --even-slower")
    made = decompose(graph, {c.layer.operator: c.ranks for c in choices if c.ranks is not None})
    error = relative_error(graph, made.graph, request.seed)
    nbytes = _write(made, request.out, int8=int8)
    return Rewritten(request, graph, made.graph, choices, made.errors, error, prices, int8, nbytes)


def float_name(model: str) -> tuple[str, bool]:
    """Return the float32 model that ``NAME:int8`` of the zoo is made of, and whether it was asked for as int8."""
    if not is_name(model) or not model.endswith(":int8"):
        return model, False
    return replace(parse_name(model), variant="").canonical, True


def given_ranks(graph: Graph, words: Sequence[str]) -> dict[int, Ranks]:
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
            raise UsageError(f"--rank {word}: is not of the form LAYER=INxOUT", "as in --rank conv3_1=64x96")
        layer = find_layer(tucker_layers(graph), name)
        if layer.operator in found:
            raise UsageError(f"--rank {word}: this layer has ranks already", "give each layer once")
        found[layer.operator] = layer.check(Ranks(*map(int, numbers)))
    return found


def _check_out(out: Path, graph: Graph) -> None:
    if out.is_dir() or not out.parent.is_dir():
        raise UsageError(f"{out}: cannot be written", "give the path of a file in a folder that is there")
    if graph.source is not None and out.exists() and out.samefile(graph.source.path):
        raise UsageError(f"{out}: is the model itself", "write to another file")


def _check_some(choices: Sequence[Choice], name: str, *, random: bool, hint: str = _ANOTHER) -> None:
    """Check that something is decomposed at all.

    Args:
        random: whether the weights are random, and the rule looks at them.
        hint: what to do otherwise.
    """
    if any(choice.ranks is not None for choice in choices):
        return
    most = Counter(choice.why for choice in choices).most_common(1)[0][0]
    if random and "+spectrum" not in name:
        hint = "its weights are random numbers, which have no low rank; +spectrum behind its name gives it some that do"
    raise RewriteError(f"nothing of {name!r} would be decomposed: {most}", hint)


def _write(made: TuckerGraph, out: Path, *, int8: bool) -> int:
    if int8:
        from search_spaces.rewrites.tucker_int8 import quantise

        quantise(made.graph, out)
    else:
        cut_stage(made.graph, range(len(made.graph.operators))).write(out)
    return out.stat().st_size
