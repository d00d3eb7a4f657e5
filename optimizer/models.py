"""What ``optimize models`` prints: the zoo, with the size and the work of each model, none of which is built for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from optimizer.console import make_console
from search_spaces.errors import ModelError
from search_spaces.intensity import operator_costs, parameter_total
from search_spaces.models.zoo import draft
from search_spaces.models.zoo.names import GRAMMAR, VARIANTS, WHOLE, WIDTHS, ZOO, parse_name
from search_spaces.wording import human_bytes

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
    """Return what a model of the zoo is made of; its weights are not made.

    Raises:
        ModelError: the zoo has no such model, or the name asks for a variant.
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


def print_models(names: Sequence[str], *, as_json: bool) -> None:
    """Print some models, or the whole zoo where no names are given.

    Raises:
        ModelError: a name is not of the zoo.
    """
    found = [summarise(name) for name in names or ZOO]
    if as_json:
        document = {"schema_version": SCHEMA_VERSION, "models": [_plain(summary) for summary in found]}
        print(json.dumps(document, indent=2))  # noqa: T201 - printing is its work
    else:
        make_console().print(_render(found))


def _plain(summary: ModelSummary) -> dict[str, Any]:
    return {field: getattr(summary, field) for field in summary.__slots__}


def _render(found: Sequence[ModelSummary]) -> Group:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("model", no_wrap=True)
    table.add_column("input")
    for name in ("file", "MACs", "weights", "ops"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("variants", no_wrap=True)
    table.add_column("source")
    for model in found:
        shape = "×".join(str(n) for n in model.inputs[0][1:])
        table.add_row(
            model.name,
            shape if len(model.inputs) == 1 else f"{len(model.inputs)} of {shape}",
            human_bytes(model.nbytes),
            _millions(model.macs),
            _millions(model.parameters),
            str(model.operators),
            " ".join(f":{v}" for v in model.variants),
            model.source,
        )
    return Group(table, Text(), *(Text(line) for line in _notes(found)))


def _notes(found: Sequence[ModelSummary]) -> list[str]:
    low, high = WIDTHS
    lines = [
        f"{GRAMMAR}, as in mobilenet_v1@0.5/192:int8.",
        f"WIDTH is {low:g} to {high:g} and multiplies channels, rounded {WHOLE} but for:",
    ]
    others: dict[str, list[str]] = {}
    for model in found:
        if model.widths != WHOLE:
            others.setdefault(model.widths, []).append(model.name)
    return [*lines, *(f"  {rule}: {', '.join(names)}" for rule, names in others.items())]


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.1f} M"
