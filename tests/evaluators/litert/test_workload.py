"""Several models at once on this machine's processors: outputs, arrivals, models that crash or hang, files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evaluators.litert.processors import local_platform, make_processor
from evaluators.litert.runner import WorkloadRunner
from evaluators.litert.session import LitertEvaluator
from evaluators.litert.workload import LitertWorkload
from evaluators.workload.apart import on_cores
from evaluators.workload.host import came_of
from optimizer.workload.baselines import workload_baselines
from search_spaces.core.errors import PlanError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import merge
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Limits, Platform
from search_spaces.core.pools import with_pools
from search_spaces.core.workload import Arrival, Client, Workload
from search_spaces.spaces.workload_space import WorkloadSpace
from tests.support.narrowing import there
from tests.support.sentences import fails

pytestmark = [pytest.mark.litert, pytest.mark.timing]


def processors(run_s: float = 60.0) -> Platform:
    found = local_platform()
    names = [p.name for p in found.processors if p.kind == "cpu"][:3]
    return replace(found, processors=tuple(make_processor(n) for n in names), limits=Limits(run_s=run_s))


@contextmanager
def opened(
    graphs: list[Graph], *clients: Client, run_s: float = 60.0
) -> Iterator[tuple[LitertWorkload, WorkloadSpace]]:
    """Open a session of one instance a graph, and return its space."""
    workload = Workload("test", clients)
    joined = merge("test", [(i.name, g) for i, g in zip(workload.instances, graphs, strict=True)])
    space = WorkloadSpace(workload, joined, with_pools(processors(run_s)), 3)
    _, platform = workload_baselines(space, on_cores(space.platform, len(space.joined.components), threads=True))
    with LitertEvaluator().host(workload, joined, platform, "mean") as session:
        yield session, space


def two(arrival: Arrival | None = None) -> tuple[Client, Client]:
    arrival = arrival or Arrival()
    return Client("a", "squeezenet1_1", 1, arrival), Client("b", "mobilenet_v1", 1, arrival)


def plan_of(space: WorkloadSpace, **params: object) -> Plan:
    """Return a plan of two models, the first one in two jobs."""
    names = [p.name for p in space.platform.processors]
    first, second = names[-1], names[1]
    base = {"dispatch": "fifo", "jobs_1": 2, "cut_1_1": 11, "cut_1_2": 1, "jobs_2": 1, "cut_2_1": 1, "cut_2_2": 1}
    base |= {"first_1": 1, "first_2": 2, "on_1_1": first, "on_1_2": second, "on_1_3": first}
    return space.decode({**base, "on_2_1": second, "on_2_2": first, "on_2_3": first, **params})


def test_models_at_once_compute_what_they_compute_alone(squeezenet: Graph, mobilenet: Graph) -> None:
    with opened([squeezenet, mobilenet], *two(Arrival("closed", 3))) as (session, space):
        plans = [
            plan_of(space),
            *(
                b.plan
                for b in workload_baselines(
                    space, on_cores(space.platform, len(space.joined.components), threads=True)
                )[0]
            ),
        ]
        for plan in plans:
            with closing(session.load(space.joined.graph, plan)) as candidate:
                batch = candidate.run(2)
                assert batch.latency_s.shape == (2,)
                assert batch.stage_s.shape == (2, len(plan.stages))
                assert (batch.stage_s > 0.0).all()
                assert came_of(batch).answered == 6
                assert there(candidate.verify()).identical


def test_requests_come_when_they_are_due(squeezenet: Graph, mobilenet: Graph) -> None:
    clients = (
        Client("a", "squeezenet1_1", 1, Arrival("periodic", 4, 0.05)),
        Client("b", "mobilenet_v1", 1, Arrival("poisson", 3, 0.03)),
    )
    with (
        opened([squeezenet, mobilenet], *clients) as (session, space),
        closing(session.load(space.joined.graph, plan_of(space))) as candidate,
    ):
        outcome = came_of(candidate.run(1))
        periodic, _ = outcome.requests
        assert [r.came_s for r in periodic] == pytest.approx([0.0, 0.05, 0.1, 0.15])
        assert outcome.answered == 7
        assert outcome.makespan_s > 0.15


def test_a_plan_runs_from_its_files(squeezenet: Graph, mobilenet: Graph, tmp_path: Path) -> None:
    with opened([squeezenet, mobilenet], *two(Arrival("closed", 2))) as (session, space):
        found = session.deploy(tmp_path, session.joined.graph, plan_of(space))
        assert found.identical
        inputs = session.inputs(squeezenet)
    with WorkloadRunner(tmp_path) as runner:
        assert sorted(runner.names) == ["a", "b"]
        before = runner.outputs("a")
        runner.set_inputs("a", [np.negative(array) for array in inputs])
        assert runner.run().answered == 4
        assert not runner.failures
        assert before[0].tobytes() != runner.outputs("a")[0].tobytes()
        with fails(UsageError):
            runner.outputs("c")
        with fails(UsageError):
            runner.set_inputs("a", [])
    with fails(UsageError):
        runner.run()
    document = json.loads((tmp_path / "plan.json").read_text())
    changes: tuple[dict[str, object], ...] = (
        {"kind": "?"},
        {"schema_version": 9},
        {"dispatch": "static"},
        {"clients": [{}]},
        {"platform": 3},
    )
    for change in changes:
        (tmp_path / "plan.json").write_text(json.dumps({**document, **change}))
        with pytest.raises(PlanError):
            WorkloadRunner(tmp_path)
