"""``optimize models``: the zoo, with the size and the work of each model, without building any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from optimizer.report.console import make_console
from optimizer.report.terminal import table
from search_spaces.core.errors import ModelError
from search_spaces.core.intensity import operator_costs, parameter_total
from search_spaces.core.wording import human_bytes
from search_spaces.models.zoo import draft
from search_spaces.models.zoo.names import GRAMMAR, VARIANTS, WHOLE, WIDTHS, ZOO, parse_name

_WIDE = 97  # columns of the whole table
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One model of the zoo, as float32.

    Attributes:
        name: canonical.
        inputs: shape of each input.
        nbytes: of its file.
        macs: multiply-accumulates of one inference.
        parameters: weights, biases included.
        operators: number of them.
        variants: what may follow a colon.
        widths: how channels are rounded under a width multiplier.
        source: paper, and whose implementation it follows.
    """

    name: str
    inputs: tuple[tuple[int, ...], ...]
    nbytes: int
    macs: int
    parameters: int
    operators: int
    variants: tuple[str, ...]
    widths: str
    source: str


def summarise(name: str) -> ModelSummary:
    """Return the summary of a model of the zoo; its weights are not made.

    Raises:
        ModelError: the zoo has no such model, or the name is that of a variant.
    """
    spec = parse_name(name)
    if spec.variant:
        raise ModelError(f"{name}: models are listed as float32", f"give {spec.weights_name}")
    entry, drafted = ZOO[spec.name], draft(spec)
    graph = drafted.graph()
    return ModelSummary(
        name=spec.canonical,
        inputs=tuple(graph.tensors[i].shape for i in graph.inputs),
        nbytes=drafted.nbytes,
        macs=sum(cost.macs for cost in operator_costs(graph)),
        parameters=parameter_total(graph),
        operators=len(graph.operators),
        variants=tuple(v for v in VARIANTS if v != "int8" or not entry.int8),
        widths=entry.rounding,
        source=entry.source,
    )


def summaries(names: Sequence[str]) -> list[ModelSummary]:
    """Return some models, or the whole zoo where no names are given.

    Raises:
        ModelError: a name is not of the zoo.
    """
    return [summarise(name) for name in names or ZOO]


def to_json(found: Sequence[ModelSummary]) -> dict[str, Any]:
    """Return the document of ``--json``."""
    return {"schema_version": SCHEMA_VERSION, "models": [asdict(summary) for summary in found]}


def render(found: Sequence[ModelSummary]) -> Group:
    """Return the models as a table, with notes on their names."""
    rows = []
    for model in found:
        shape = "×".join(str(n) for n in model.inputs[0][1:])
        inputs = shape if len(model.inputs) == 1 else f"{len(model.inputs)} of {shape}"
        sizes = (human_bytes(model.nbytes), _millions(model.macs), _millions(model.parameters), str(model.operators))
        rows.append((model.name, inputs, *sizes, " ".join(f":{v}" for v in model.variants), model.source))
    columns = ("model", "input", ">file", ">MACs", ">weights", ">ops", "variants", "source")
    shown = len(columns) if make_console().width >= _WIDE else -1  # the source does not fit into 80 columns
    listed = table(columns[:shown], (row[:shown] for row in rows))
    return Group(listed, Text(), *(Text(line) for line in _notes(found)))


def _notes(found: Sequence[ModelSummary]) -> list[str]:
    low, high = WIDTHS
    lines = [
        f"{GRAMMAR}, for example mobilenet_v1@0.5/192:int8.",
        f"WIDTH is {low:g} to {high:g} and multiplies channels, rounded {WHOLE} except:",
    ]
    others: dict[str, list[str]] = {}
    for model in found:
        if model.widths != WHOLE:
            others.setdefault(model.widths, []).append(model.name)
    return [*lines, *(f"  {rule}: {', '.join(names)}" for rule, names in others.items())]


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.1f} M"
