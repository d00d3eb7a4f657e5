"""Several models on LiteRT: prices measured once, models that crash or hang."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evaluators.litert.processors import local_platform, make_processor
from evaluators.litert.session import LitertEvaluator
from evaluators.litert.workload import LitertWorkload
from evaluators.workload.host import HostedRun, came_of
from evaluators.workload.prices import PriceTable
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import merge
from search_spaces.core.pools import with_pools
from search_spaces.core.workload import Arrival, Client, workload_of
from search_spaces.models import load
from search_spaces.spaces.shared_workload_space import SharedWorkloadSpace
from tests.evaluators.litert.test_workload import opened, plan_of, processors, two
from tests.support.narrowing import there
from tests.support.sentences import fails

pytestmark = pytest.mark.litert


def process_of(candidate_processor: str, session: LitertWorkload) -> int:
    return there(session.process(candidate_processor))


def signalled_once_it_works(process: int, how: signal.Signals) -> None:
    """Send a process a signal as soon as it has worked for some hundredths of a second from now on."""

    def ticks() -> int:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def send(before: int) -> None:
        while ticks() < before + 0.05 * os.sysconf("SC_CLK_TCK"):
            time.sleep(0.001)
        os.kill(process, how)

    threading.Thread(target=send, args=[ticks()], daemon=True).start()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_model_that_crashes_or_hangs_does_not_stop_the_others(
    squeezenet: Graph, mobilenet: Graph, how: signal.Signals
) -> None:
    clients = (
        Client("a", "squeezenet1_1", 1, Arrival("closed", 40)),
        Client("b", "mobilenet_v1", 1, Arrival("closed", 60)),
    )
    names = [p.name for p in processors().processors]
    if len(names) < 3:
        pytest.skip("needs two cores")
    with opened([squeezenet, mobilenet], *clients, run_s=5.0) as (session, space):
        plan = plan_of(space, jobs_1=1, on_1_1=names[1], on_2_1=names[2])
        with closing(session.load(space.joined.graph, plan)) as candidate:
            assert isinstance(candidate, HostedRun)
            candidate.executor.run()
            assert not candidate.executor.failures
            signalled_once_it_works(process_of(names[2], session), how)
            begin_s = time.monotonic()
            found = candidate.executor.run()
            assert time.monotonic() - begin_s < 30.0
            first, second = found.requests
            assert all(r.latency_s is not None for r in first)
            assert [r.latency_s is None for r in second].count(True) > 0
            assert list(candidate.executor.failures) == [1]
            again = candidate.executor.run()  # without it
            assert all(r.latency_s is not None for r in again.requests[0])
            with fails(UnavailableError):
                candidate.run(1)
        with closing(session.load(space.joined.graph, plan)) as candidate:  # the processor is there again
            assert came_of(candidate.run(1)).answered == 100


def test_prices_are_measured_once_and_kept(squeezenet: Graph, mobilenet: Graph) -> None:
    with opened([squeezenet, mobilenet], *two()) as (session, space):
        with fails(UnavailableError):
            _ = session.simulator
        data = json.loads(json.dumps(session.price(None, lambda _: None)))
        predicted = session.simulator.run(plan_of(space))
        assert predicted.answered == 2
        session.price(data, lambda _: pytest.fail("measured again"))
        assert session.simulator.run(plan_of(space)).makespan_s == pytest.approx(predicted.makespan_s)
        table = PriceTable.from_json(data)
        for graph in (squeezenet, mobilenet):
            for kind, each in table.operator_s[graph.digest].items():
                assert sum(each) <= table.whole_s[graph.digest][kind] * 1.001
                assert min(each) > 0.0


def test_models_that_are_split_and_have_branches_side_by_side_compute_what_they_compute_alone(tmp_path: Path) -> None:
    models = ["googlenet@0.25/64", "squeezenet1_1@0.25/64"]
    workload = workload_of(",".join(models))
    graphs = [load(name) for name in models]
    joined = merge("test", [(i.name, g) for i, g in zip(workload.instances, graphs, strict=True)])
    names = [p.name for p in local_platform().processors if p.kind == "cpu" and "runtime" not in p.options]
    platform = with_pools(replace(local_platform(), processors=tuple(make_processor(n) for n in names[:3])))
    space = SharedWorkloadSpace(workload, joined, platform)
    rng = np.random.default_rng(11)
    kinds: set[str] = set()
    with LitertEvaluator().host(workload, joined, platform, "mean") as session:
        for number in range(4):
            plan = space.plan_at(int.from_bytes(rng.bytes(200), "little") % space.cardinality())
            kinds |= {stage.share.axis for stage in plan.stages if stage.share is not None}
            with closing(session.load(joined.graph, plan)) as candidate:
                batch = candidate.run(2)
                assert batch.stage_s.shape == (2, len(plan.stages))
                found = there(candidate.verify())
                assert found.accepted
            if number == 0:
                found = session.deploy(tmp_path, joined.graph, plan)
                assert found.accepted
    assert kinds == {"height", "channels"}
