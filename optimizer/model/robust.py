"""Plans for a platform in several states: the optimum over all of them, and that of the usual state."""

from __future__ import annotations

from evaluators.base import Session
from evaluators.cost_model.session import StatesSession
from optimizer.exact.bound import relax
from optimizer.exact.front import pareto_chains, summed
from optimizer.exact.least import chain_costs, cheapest, least_chain
from optimizer.model.bounds import Bounds, ModelEstimate, price_of
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.states import Robust, parse_states
from search_spaces.spaces.chain import chain_plan

NOMINAL = "the nominal plan"
"""The plan that is best in the platform's usual state."""


def in_states(session: Session, platform: Platform, words: tuple[str, ...], robust: Robust) -> StatesSession:
    """Return the session that prices plans in all states.

    Raises:
        UsageError: the session supports only the present state of the device, or a state is invalid.
    """
    if not session.capabilities.states:
        raise UsageError(
            "--state requires a cost model",
            "give --evaluator cost-model and a profile; optimize calibrate makes one of this machine",
        )
    return StatesSession(session, parse_states(words, platform), robust)


def nominal_plan(graph: Graph, session: Session, platform: Platform, most: int) -> Plan:
    """Return the fastest plan in the usual state."""
    costs = chain_costs(platform, session.part_costs(graph), least=True)
    return least_chain(graph, costs, price_of(graph, session), most).best


def robust_estimate(graph: Graph, session: StatesSession, platform: Platform, most: int) -> ModelEstimate:
    """Return the best plan over all states, from the front of all chains with one objective for each state.

    Exact where each stage reads from the one before it. Where stages may overlap, it is the best chain of that front,
    and the bound is that of the mean over the states.

    Raises:
        InfeasibleError: no plan fits.
    """
    tables = session.tables(graph)
    mean = chain_costs(platform, session.part_costs(graph))
    relaxed = relax(graph, mean)
    price = price_of(graph, session)
    least = [chain_costs(platform, table, least=True) for table in tables]
    in_turn = all(graph.predecessors(o) == {o - 1} for o in range(1, len(graph.operators)))
    try:
        chains = pareto_chains(list(map(summed, least)), platform, most)
    except UnavailableError:  # too many states for labels: the mean is a bound of the worst
        found = least_chain(graph, chain_costs(platform, session.part_costs(graph), least=True), price, most)
        return ModelEstimate(mean, (found.best,), Bounds(found.bound, found.proven, relaxed, own=True))
    ordered = sorted(chains, key=lambda chain: session.value_s(chain.values))
    plans = [(session.value_s(c.values), chain_plan(graph, c.cuts, c.processors)) for c in ordered]
    best, bound_s = cheapest(plans, price, len(plans))
    if best is None:
        raise UnavailableError("no chain was found")
    bound_s = min(best[0], bound_s) if in_turn else min(best[0], relaxed.latency_s)
    proven = in_turn and best[0] <= bound_s * (1 + 1e-9)
    return ModelEstimate(mean, (best[1],), Bounds(bound_s, proven, relaxed, own=True))
