"""What triples take beside the layers that they are for, by the cost model of a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evaluators.cost_model.session import CostModelEvaluator
from optimizer.devices import choose_platform
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.rewrites.tucker import outline
from search_spaces.rewrites.tucker_ranks import Choice


@dataclass(frozen=True, slots=True)
class Prices:
    """Predicted seconds, all on one lane: the one that runs the whole model as it was in the least time.

    Attributes:
        lane: its name.
        layer_s: operator of the model before → its time.
        triple_s: operator of the model before → the time of its triple.
        model_s: of all operators of the model before.
    """

    lane: str
    layer_s: dict[int, float]
    triple_s: dict[int, float]
    model_s: float


def price(graph: Graph, choices: Sequence[Choice], platform: Path) -> Prices:
    """Return what a device's profile says of layers and of the triples that were chosen for them.

    Args:
        platform: a profile's file, or the name of a known device.

    Raises:
        UsageError: there is no such profile.
        UnavailableError: no lane of the device takes the whole model, or there is no profile of it.
        ProfileError: the profile has nothing that resembles some operator.
    """
    evaluator = CostModelEvaluator()
    lanes = choose_platform(evaluator, None, platform)
    wanted = {c.layer.operator: c.ranks for c in choices if c.ranks is not None}
    made = outline(graph, wanted)
    with evaluator.prepare(lanes) as session:
        before, after = session.part_costs(graph).operator_s, session.part_costs(made).operator_s
    totals = before.sum(axis=1)
    lane = int(totals.argmin())
    if not np.isfinite(totals[lane]):
        raise UnavailableError(f"no processor of {lanes.name!r} runs the whole of {graph.name!r}")
    triple_s: dict[int, float] = defaultdict(float)
    place = 0
    for operator in range(len(graph.operators)):
        count = 3 if operator in wanted else 1
        if operator in wanted:
            triple_s[operator] = float(after[lane, place : place + count].sum())
        place += count
    layer_s = {c.layer.operator: float(before[lane, c.layer.operator]) for c in choices}
    return Prices(lanes.processors[lane].name, layer_s, dict(triple_s), float(totals[lane]))


def only_faster(choices: Sequence[Choice], prices: Prices) -> tuple[Choice, ...]:
    """Return the choices with the layers left alone whose triples are predicted to be no faster."""
    found = []
    for choice in choices:
        layer, triple = (times.get(choice.layer.operator, 0.0) for times in (prices.layer_s, prices.triple_s))
        if choice.ranks is not None and triple >= layer:
            why = f"{choice.ranks} would take {triple * 1e3:.3f} ms instead of {layer * 1e3:.3f}"
            found.append(Choice(choice.layer, None, why))
        else:
            found.append(choice)
    return tuple(found)
