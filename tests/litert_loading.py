"""What tests of LiteRT share."""

from __future__ import annotations

from evaluators.litert.candidate import LitertCandidate
from evaluators.litert.session import LitertSession
from search_spaces.graph import Graph
from search_spaces.plan import Plan


def loaded(session: LitertSession, graph: Graph, plan: Plan, *, fresh: bool = False) -> LitertCandidate:
    """Load a plan without split stages, whose candidate can be looked into."""
    candidate = session.load(graph, plan, fresh=fresh)
    assert isinstance(candidate, LitertCandidate)
    return candidate
