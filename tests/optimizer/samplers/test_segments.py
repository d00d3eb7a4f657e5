"""What the sampler for co-execution proposes when measurements are not what the model says."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from evaluators.samples import Measurement, Samples
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.segment_model import SegmentModel
from optimizer.samplers.auto import Problem
from optimizer.samplers.segments import SegmentProposer
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.models.litert import read_model
from search_spaces.spaces.segment_space import SegmentSpace
from tests.support.models.split_models import Layers
from tests.support.strategies import one_core


class Case:
    """A network of convolutions on two cores, whose splits along one axis take longer than the model says."""

    def __init__(self, slow: str, operators: int = 1) -> None:
        layers = Layers((1, 32, 32, 64))
        for _ in range(operators):
            layers.conv(64)
        layers.done()
        with tempfile.TemporaryDirectory() as folder:
            graph = read_model(layers.net.write(Path(folder) / "model.tflite"))
        platform, count = Platform("two", (one_core(0), one_core(1))), len(graph.operators)
        costs = ChainCosts(platform, np.full((2, count), 1e-3), np.full(2, 1e-6), np.zeros((count, 2, 2)))
        self.space = SegmentSpace(graph, platform)
        self.model = SegmentModel(self.space, costs)
        self.proposer = SegmentProposer(Problem(graph, platform, self.space, costs), self.space, 0)
        self.slow = slow

    def axes(self, plan: Plan) -> set[str]:
        return {str(part.axis) for part in self.space.parts(plan)}

    def measured(self, plan: Plan) -> Measurement:
        shared = self.axes(plan) - {"None"}
        factor = 1.5 if self.slow in shared else 3.0 if shared and self.slow == "both" else 1.0
        each_s = 5e-4 * factor if shared else 1e-3
        seconds = tuple(each_s * len(stage.operators) for stage in plan.stages)
        return Measurement(Samples((factor * self.model.price(plan),)), seconds, (), "limit")

    def proposed(self, most: int) -> list[Plan]:
        found: list[Plan] = []
        while len(found) < most and (plan := self.proposer.propose()) is not None:
            self.proposer.observe(plan, self.measured(plan))
            found.append(plan)
        return found


@pytest.mark.parametrize("slow", ["height", "channels"])
def test_the_other_axis_is_looked_at_second(slow: str) -> None:
    case = Case(slow)
    first, _, second = case.proposed(3)  # cuts alone have every other turn
    assert case.axes(first) | case.axes(second) == {"height", "channels"}
    best = min((first, second), key=lambda plan: case.measured(plan).latency_s.median)
    assert case.axes(best) == {"height", "channels"} - {slow}


def test_all_that_is_split_is_turned_at_once_and_once_only() -> None:
    case = Case("none", operators=3)
    plans = case.proposed(6)
    split = [case.axes(plan) for plan in plans if case.axes(plan) != {"None"}]
    assert split[0] != split[1]
    assert len({plan.digest for plan in plans}) == len(plans)


@pytest.mark.parametrize("slow", ["height", "channels", "none"])
def test_what_is_proposed_follows_from_what_was_observed(slow: str) -> None:
    plans = Case(slow, operators=2).proposed(7)
    for known in range(len(plans)):
        again = Case(slow, operators=2)
        for plan in plans[:known]:
            again.proposer.observe(plan, again.measured(plan))
        found = again.proposer.propose()
        assert found is not None
        assert found.digest == plans[known].digest


def test_a_plan_that_failed_along_the_other_axis_is_not_tried_again() -> None:
    case = Case("none")
    (first,) = case.proposed(1)
    second = case.proposer.propose()
    assert second is not None
    assert case.axes(first) != case.axes(second)
    case.proposer.observe(second, None)
    third = case.proposer.propose()
    assert third is not None
    assert third.digest not in {first.digest, second.digest}


def test_cuts_alone_are_proposed_as_well_and_mostly_where_sharing_has_not_won() -> None:
    for slow, most_shared in (("none", 0.7), ("both", 0.4)):
        case = Case(slow, operators=8)
        plans = case.proposed(48)
        late = [case.axes(plan) != {"None"} for plan in plans[32:]]
        assert 0.0 < sum(late) / len(late) <= most_shared
        assert not all(plan.is_split for plan in plans[:4])
