"""What can be said of plans without measuring them: by the evaluator itself where it computes, else by the profile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from evaluators.registry import make_evaluator
from optimizer.bounds import price_of
from optimizer.config import StudyConfig, parse_config
from optimizer.devices import choose_model_and_platform
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.least import chain_costs, least_chain
from optimizer.report.data import Study
from search_spaces.chain import chain_plan
from search_spaces.errors import InfeasibleError, OptimizeError, RunFolderError
from search_spaces.graph import Graph
from search_spaces.plan import Plan

Best = Callable[[int, int], tuple[Plan, float] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """What predicts.

    Attributes:
        name: who it is, in words.
        costs: additive, with what is not allowed as infinite.
        price: seconds that it gives a plan; infinite for one that cannot run.
        best: the best chain of so many to so many parts and its price; None where there is none.
        own: whether it is the evaluator itself, which says the same of a plan every time.
    """

    name: str
    graph: Graph
    costs: ChainCosts
    price: Callable[[Plan], float]
    best: Best
    own: bool = False


@contextmanager
def model_of(study: Study) -> Iterator[Model]:
    """Open what predicts for a study.

    Raises:
        RunFolderError: the study holds no profile, or its model cannot be read any more.
    """
    if study.graph is None:
        raise RunFolderError(f"{study.path}: {study.missing}", "an explanation needs the model")
    if study.profile is None or study.costs is None:
        raise RunFolderError(f"{study.path}: it holds no profile of the operators", "explain a finished study")
    evaluator = make_evaluator(str(study.result["evaluator"]))
    if evaluator.capabilities.measures_here:
        yield _profiled(study, study.graph, study.costs)
        return
    given = {name: study.config.get(name) for name in StudyConfig.model_fields}
    graph, platform = choose_model_and_platform(evaluator, parse_config(given))
    now = json.loads(json.dumps(platform.to_json()))
    if graph.digest != study.graph.digest or now != study.result["platform"]:
        raise RunFolderError(f"{study.path}: its model or its platform is another one now", "run the study again")
    with evaluator.prepare(platform) as session:
        if not session.capabilities.costs:
            yield _profiled(study, study.graph, study.costs)
            return
        tables, price = session.part_costs(graph), price_of(graph, session)
        least = chain_costs(platform, tables, least=True)

        def best(fewest: int, most: int) -> tuple[Plan, float] | None:
            try:
                found = least_chain(graph, least, price, most, min_stages=fewest)
            except InfeasibleError:
                return None
            return found.plan, found.cost_s

        yield Model("the evaluator's own costs", graph, chain_costs(platform, tables), price, best, own=True)


def _profiled(study: Study, graph: Graph, costs: ChainCosts) -> Model:
    def price(plan: Plan) -> float:
        try:
            found = study.predict(plan)
        except OptimizeError:
            return float("inf")
        return found.makespan_s if found is not None else float("inf")

    return Model("the profiled operators", graph, costs, price, partial(best_by_costs, graph, costs))


def best_by_costs(graph: Graph, costs: ChainCosts, fewest: int, most: int) -> tuple[Plan, float] | None:
    """Return the best chain of an additive model, or None where none fits."""
    try:
        found = best_chains(costs, most, min_stages=fewest)[0]
    except (InfeasibleError, ValueError):
        return None
    return chain_plan(graph, found.cuts, found.processors), found.cost_s
