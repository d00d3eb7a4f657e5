"""What Tucker triples take in the place of their convolutions: measured on each kind of lane, many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from evaluators.litert.workload_prices import Alone, PriceTable, first_of_kinds, operators_s, whole_s_on
from evaluators.workload.hosted import Rewriter
from evaluators.workload.predicted import Grids
from search_spaces.graph import Graph
from search_spaces.platform import Processor


def with_triples(
    table: PriceTable,
    graphs: Sequence[Graph],
    grids: Grids,
    rewriter: Rewriter,
    lanes: Sequence[Processor],
    alone: Alone,
    progress: Callable[[str], None],
) -> PriceTable:
    """Return a table that also knows what each triple of some sets of ranks takes.

    A model is decomposed by each set as a whole, and run operator by operator.

    Raises:
        UnavailableError: a lane failed.
        RewriteError, ModelError: the weights cannot be read.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for graph in graphs:
        for number, ranks in enumerate(grids.get(graph.digest, ()), 1):
            progress(f"timing {len(ranks)} convolutions of {graph.name} as triples, choice {number}")
            made, origins = rewriter.whole(graph, ranks)
            for kind, lane in first_of_kinds(lanes).items():
                each, _ = operators_s(made, lane, lanes, alone, whole_s_on(made, lane, lanes, alone))
                known = found.setdefault(graph.digest, {}).setdefault(kind, {})
                for layer in ranks:
                    took_s = sum(t for t, origin in zip(each, origins, strict=True) if origin == layer.operator)
                    known.setdefault(str(layer), took_s)
    return replace(table, triple_s=found)
