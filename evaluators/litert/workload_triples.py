"""What Tucker triples take in the place of their convolutions: measured on each kind of lane, many at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from evaluators.litert.workload_prices import Alone, PriceTable, first_of_kinds, operators_s, whole_s_on
from evaluators.workload.lowered import Lowerings
from evaluators.workload.predicted import Grids
from search_spaces.arrangement import RankSet
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.platform import Processor


def with_triples(
    table: PriceTable,
    graphs: Sequence[Graph],
    grids: Grids,
    lowerings: Lowerings,
    lanes: Sequence[Processor],
    alone: Alone,
    progress: Callable[[str], None],
    forget: Callable[[Graph], None],
) -> PriceTable:
    """Return a table that also knows what each triple of some sets of ranks takes; what it knows already stays.

    A model is decomposed by each set as a whole, and run operator by operator. Where a kind of lane does not run it,
    the table has no times of the set's triples there, which stands for never.

    Args:
        forget: called with each decomposed model once it was timed.

    Raises:
        RewriteError, ModelError: the weights cannot be read.
    """
    found = {model: {kind: dict(of) for kind, of in each.items()} for model, each in table.triple_s.items()}
    for graph in graphs:
        known = table.triple_s.get(graph.digest, {})
        for number, ranks in enumerate(grids.get(graph.digest, ()), 1):
            if _all_known(ranks, known):
                continue
            progress(f"timing {len(ranks)} convolutions of {graph.name} as triples, choice {number}")
            made, origins = lowerings.whole(graph, ranks)
            for kind, lane in first_of_kinds(lanes).items():
                try:
                    each, _ = operators_s(made, lane, lanes, alone, whole_s_on(made, lane, lanes, alone))
                except UnavailableError as error:
                    progress(f"{lanes[lane].name} does not run choice {number} of {graph.name}: {error.what}")
                    continue
                times = found.setdefault(graph.digest, {}).setdefault(kind, {})
                for layer, took_s in _by_layer(ranks, each, origins).items():
                    times.setdefault(layer, took_s)
            forget(made)
    return replace(table, triple_s=found)


def _all_known(ranks: RankSet, known: Mapping[str, Mapping[str, float]]) -> bool:
    """Return whether each triple has a time on some kind of lane: all kinds are timed together, as far as they can."""
    return all(any(str(layer) in times for times in known.values()) for layer in ranks)


def _by_layer(ranks: RankSet, each: Sequence[float], origins: Sequence[int]) -> dict[str, float]:
    """Return what the operators of each triple take together."""
    return {
        str(layer): sum(t for t, origin in zip(each, origins, strict=True) if origin == layer.operator)
        for layer in ranks
    }
