"""What a model's outputs should be: LiteRT's, of the whole model on a core of this machine."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.chain import chain_plan
from search_spaces.graph import Graph
from search_spaces.platform import Platform

Outputs = list[NDArray[np.generic]]


class References:
    """Outputs of models for the inputs that sessions make from a seed; each is computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Outputs] = {}

    def outputs(self, graph: Graph) -> Outputs:
        """Return a model's outputs.

        Raises:
            UnavailableError: LiteRT cannot run here.
        """
        from evaluators.litert.processors import make_processor, usable_cores
        from evaluators.litert.session import LitertEvaluator

        key = graph.digest, graph.source.content_digest() if graph.source is not None else ""
        if key not in self._known:
            core = make_processor(f"cpu{usable_cores()[0]}")
            with LitertEvaluator().prepare(Platform("reference", (core,))) as session:
                loaded: Any = session.load(graph, chain_plan(graph, (), [core.name]))
                with closing(loaded) as candidate:
                    candidate.run(1)
                    self._known[key] = [np.array(each) for each in candidate.outputs()]
        return self._known[key]
