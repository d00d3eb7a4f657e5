"""What runs of branches and joins cost, as a device shows it: the model agrees with all that was run in turns."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from hypothesis import assume, given, settings

from evaluators.testing import Noise, SyntheticEvaluator, SyntheticSession
from optimizer.exact.chain_costs import chain_cost
from optimizer.model.branch_profile import _root, branch_profile
from optimizer.model.profile import Profiler, profile
from optimizer.model.segments import segment_price
from search_spaces.core.plan import Plan, Stage
from search_spaces.spaces.branch_runs import BranchRuns
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.segments import segments_of
from tests.search_spaces.spaces.test_branches import Recipe, built, recipes
from tests.search_spaces.spaces.test_segments import CORES


def took_s(session: SyntheticSession, space: SegmentSpace, plan: Plan) -> float:
    with closing(session.load(space.graph, plan)) as candidate:
        return float(candidate.run(2).latency_s[1])


@given(recipes())
@settings(max_examples=40)
def test_the_model_is_right_about_what_was_run_in_turns(recipe: Recipe) -> None:
    graph, _ = built(recipe)
    assume(any(segment.runs for segment in segments_of(graph)))
    space = SegmentSpace(graph, CORES, splits=False)
    runs = BranchRuns.of(graph).runs
    with SyntheticEvaluator(noise=Noise(run=0.0)).prepare(CORES) as session:
        of = Profiler(session, graph, CORES)
        known = profile(of)
        found = branch_profile(of, space, known)
        (like,) = found.whole_s
        costs = found.costs(CORES)
        price = segment_price(space, costs)
        whole = chain_plan(graph, (), [CORES.processors[0].name])
        whole_s = took_s(session, space, whole)
        assert price(whole) == pytest.approx(whole_s)
        apart = Plan(graph.digest, tuple(Stage(run, CORES.processors[0].name) for run in runs))
        if found.overhead_s[like] > 0:
            assert chain_cost(costs, apart) / price(whole) == pytest.approx(took_s(session, space, apart) / whole_s)
        names = [CORES.processors[0].name] * len(graph.operators)
        for segment in space.branching:
            for number, run in enumerate(segment.runs):
                for operator in run:
                    names[operator] = CORES.processors[number % 2].name
        plan = space.plan(space.placed(names))
        join_s = found.transfer_s[f"{like}|{like}"]
        if 0.0 < join_s < found.whole_s[like]:
            assert price(plan) / price(whole) == pytest.approx(took_s(session, space, plan) / whole_s, rel=1e-4)


def test_a_root_that_lies_outside_is_the_nearer_end() -> None:
    assert _root(lambda x: x + 1.0, 3.0) == 0.0
    assert _root(lambda x: x - 9.0, 3.0) == 3.0
    assert np.isclose(_root(lambda x: x - 2.0, 3.0), 2.0)
