"""What runs of branches and joins cost, as a device shows it: the model agrees with all that was run in turns."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from hypothesis import assume, given, settings
from optimizer.model.branches import predictor

from evaluators.testing import Noise, SyntheticEvaluator, SyntheticSession
from optimizer.model.branch_profile import _root, branch_profile
from optimizer.model.profile import profile
from search_spaces.core.plan import Plan, Stage
from search_spaces.spaces.chain import chain_plan
from tests.search_spaces.spaces.test_branches import Recipe, built, recipes
from tests.search_spaces.spaces.test_segments import CORES


def took_s(session: SyntheticSession, space: BranchSpace, plan: Plan) -> float:
    with closing(session.load(space.runs.graph, plan)) as candidate:
        return float(candidate.run(2).latency_s[1])


@given(recipes())
@settings(max_examples=40)
def test_the_model_is_right_about_what_was_run_in_turns(recipe: Recipe) -> None:
    graph, groups = built(recipe)
    assume(groups)
    space = BranchSpace(graph, CORES, 10_000)
    with SyntheticEvaluator(noise=Noise(run=0.0)).prepare(CORES) as session:
        known = profile(session, graph, CORES)
        found = branch_profile(session, graph, CORES, space, known, lambda _: None)
        (like,) = found.whole_s
        price = predictor(graph, space, found.costs(CORES))
        whole = chain_plan(graph, (), [CORES.processors[0].name])
        whole_s = took_s(session, space, whole)
        assert price(whole) == pytest.approx(whole_s)
        apart = Plan(graph.digest, tuple(Stage(run, CORES.processors[0].name) for run in space.runs.runs))
        if found.overhead_s[like] > 0:
            assert price(apart) / price(whole) == pytest.approx(took_s(session, space, apart) / whole_s)
        names = [CORES.processors[0].name] * len(space.runs.runs)
        for group in space.runs.groups:
            for number, branch in enumerate(space.runs.branches(group)):
                for run in branch:
                    names[run] = CORES.processors[number % 2].name
        plan = space.plan(names)
        join_s = found.hand_over_s[f"{like}|{like}"]
        if 0.0 < join_s < found.whole_s[like]:
            assert price(plan) / price(whole) == pytest.approx(took_s(session, space, plan) / whole_s, rel=1e-4)


def test_a_root_that_lies_outside_is_the_nearer_end() -> None:
    assert _root(lambda x: x + 1.0, 3.0) == 0.0
    assert _root(lambda x: x - 9.0, 3.0) == 3.0
    assert np.isclose(_root(lambda x: x - 2.0, 3.0), 2.0)
