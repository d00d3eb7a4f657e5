"""What it costs two processors to meet: from the end of the slower branch to the start of the stage that reads both."""

from contextlib import closing

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from evaluators.litert.processors import usable_cores
from evaluators.litert.session import LitertEvaluator
from optimizer.model.segments import waits_s
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.spaces.segment_space import SegmentSpace

LIMIT_S = 5e-6


@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
def test_a_join_of_two_processors(benchmark: BenchmarkFixture) -> None:
    """At most 5 us: SqueezeNet's eight groups, the small branch on the other core, 200 inferences in rows of five."""
    graph, evaluator = load("squeezenet1_1"), LitertEvaluator()
    names = [f"cpu{core}" for core in usable_cores()[:2]]
    platform = Platform("two cores", tuple(evaluator.processor(name) for name in names))
    space = SegmentSpace(graph, platform, splits=False)
    on = [names[0]] * len(graph.operators)
    for segment in space.branching:
        on[segment.runs[0][0]] = names[1]
    plan = space.plan(space.placed(on))
    exits = {segment.joint for segment in space.branching}
    joins: list[float] = []
    with evaluator.prepare(platform) as session, closing(session.load(graph, plan)) as candidate:
        candidate.run(10)

        def infer() -> None:
            timeline = candidate.run(5).timeline
            assert timeline is not None
            events = {event.stage: event for event in timeline.events}
            for index, stage in enumerate(plan.stages):
                if stage.operators[0] in exits:
                    joins.append(events[index].start_s - max(events[index - 1].end_s, events[index - 2].end_s))
            forks.extend(waits_s(graph, plan, timeline))

        forks: list[float] = []
        benchmark.pedantic(infer, rounds=40)  # type: ignore[no-untyped-call]
    found = {"join_us": joins, "fork_us": forks}
    benchmark.extra_info |= {
        name: {"median": float(np.median(s)) * 1e6, "p90": float(np.quantile(s, 0.9)) * 1e6}
        for name, s in found.items()
    }
    assert np.median(joins) <= LIMIT_S
