"""Streams: processors never overlap, outputs come in order, and the law gives the load of the busiest one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.energy import find_meter
from evaluators.litert import PlanRunner
from evaluators.litert.deployment import write_deployment
from evaluators.litert.processors import local_platform
from evaluators.litert.session import LitertEvaluator
from evaluators.schedule import Law, Rounds, Task, arcs, in_rounds, needs_of, rounds, run_tasks, stream_period_s
from evaluators.testing import SyntheticEvaluator
from optimizer.cli import main
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage
from search_spaces.spaces.chain import chain_plan
from tests.support.commands import SEARCHED, tells
from tests.support.models.litert_loading import loaded, single_cores, three_stages
from tests.support.narrowing import there
from tests.support.sentences import fails

PLATFORM = SyntheticEvaluator().platform()
PROCESSORS = [p.name for p in PLATFORM.processors]
MACHINE = local_platform()
SINGLES = single_cores(MACHINE)
WORK = st.floats(1e-4, 1e-2)


def how_of(processors: Sequence[str]) -> Rounds:
    """Return how stages that each read the one before overlap."""
    stages = tuple(Stage((i,), processor) for i, processor in enumerate(processors))
    return rounds(Plan("", stages), PLATFORM, [{i - 1} if i else set() for i in range(len(stages))])


def tasks_of(chain: Sequence[tuple[float, str]]) -> list[Task]:
    """Return the stages' tasks, given seconds and processor of each."""
    reads = [((i - 1, 0.0),) if i else () for i in range(len(chain))]
    return [Task(PROCESSORS.index(on), w, needs) for (w, on), needs in zip(chain, reads, strict=True)]


@given(st.lists(st.tuples(WORK, st.sampled_from(PROCESSORS)), min_size=1, max_size=6), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_processors_take_one_stage_at_a_time_and_every_stage_its_inputs(
    chain: list[tuple[float, str]], count: int
) -> None:
    law = Law.of(PLATFORM)
    ordered, whose = in_rounds(tasks_of(chain), how_of([processor for _, processor in chain]), count)
    assert len(ordered) == count * len(chain)
    spans = run_tasks(ordered, law)
    for processor in range(len(PROCESSORS)):
        together = {processor, *law.excluded[processor]}
        busy = sorted(s for s, t in zip(spans, ordered, strict=True) if t.processor == processor)
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(busy))
        for other in together - {processor}:
            both = sorted(s for s, t in zip(spans, ordered, strict=True) if t.processor in (processor, other))
            assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(both))
    ends = [max(end for (_, end), w in zip(spans, whose, strict=True) if w == i) for i in range(count)]
    assert all(a <= b for a, b in pairwise(ends))


@given(st.lists(st.tuples(WORK, st.sampled_from(["cpu0", "cpu1"])), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_full_pipeline_is_as_fast_as_its_busiest_processor(chain: list[tuple[float, str]]) -> None:
    how = how_of([processor for _, processor in chain])
    load = [sum(w for w, on in chain if on == processor) for processor in PROCESSORS]
    assert math.isclose(stream_period_s(tasks_of(chain), Law.of(PLATFORM), how), max(load), rel_tol=1e-9)


def test_a_stage_lags_where_its_processor_can_work_beside_the_one_before() -> None:
    assert how_of(["cpu0", "cpu1", "cpu0", "cpu"]).lag == (0, 1, 2, 2)
    assert how_of(["cpu"] * 4).depth == 0


def test_a_synthetic_session_runs_no_streams(squeezenet: Graph) -> None:
    with SyntheticEvaluator().prepare(PLATFORM) as session:
        assert not session.capabilities.stream
        with fails(UnavailableError):
            session.load(squeezenet, chain_plan(squeezenet, (), ["cpu"])).stream(1)


@pytest.fixture(scope="module")
def runner(squeezenet: Graph, folder: Path) -> Iterator[PlanRunner]:
    with PlanRunner(three_stages(folder, squeezenet, MACHINE)) as opened:
        yield opened


@pytest.mark.litert
def test_outputs_of_a_stream_are_those_of_single_runs_in_order(runner: PlanRunner) -> None:
    ((name, (shape, dtype)),) = runner.inputs.items()
    (output,) = runner.outputs
    rng = np.random.default_rng(2)
    images = [rng.standard_normal(shape).astype(dtype) for _ in range(12)]
    wanted = [runner.run(image)[output] for image in images]
    for count in (0, 1, 2, 12):
        found = [each[output] for each in runner.stream({name: image} for image in images[:count])]
        assert len(found) == count
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=False))
    assert runner.run(images[0])[output].tobytes() == wanted[0].tobytes()


@pytest.mark.litert
def test_a_stream_takes_no_more_inputs_than_are_in_flight(runner: PlanRunner) -> None:
    ((shape, dtype),) = runner.inputs.values()
    taken = 0

    def images() -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        nonlocal taken
        while True:
            taken += 1
            yield np.zeros(shape, dtype)

    stream = runner.stream(images())
    for number in range(1, 6):
        next(stream)
        assert taken <= number + runner.in_flight
    with fails(UsageError):
        runner.run_seeded()
    stream.close()
    runner.run_seeded()


@pytest.mark.litert
def test_an_input_that_does_not_fit_ends_the_stream_only(runner: PlanRunner) -> None:
    ((shape, dtype),) = runner.inputs.values()
    images = [np.zeros(shape, dtype), np.zeros((1, 2), dtype)]
    with fails(UsageError):
        list(runner.stream(images))
    runner.run_seeded()


@pytest.mark.litert
@pytest.mark.parametrize("processors", [(0, -1), (-1, -1), (0, -1, 0)])
def test_a_session_measures_periods(squeezenet: Graph, processors: tuple[int, ...]) -> None:
    names = [SINGLES[i] for i in processors]
    cuts = [11, 25][: len(processors) - 1]
    with LitertEvaluator().prepare(MACHINE) as session:
        candidate = loaded(session, squeezenet, chain_plan(squeezenet, cuts, names))
        for _ in range(50):  # on a busy machine some runs are held up
            one, found = candidate.run(5), candidate.stream(3)
            assert found.latency_s.shape == (3,)
            assert found.stage_s.shape == (3, len(processors))
            if (found.latency_s < 1.5 * np.median(one.latency_s)).all():
                break
        else:
            pytest.fail("periods are longer than latencies")
        assert there(candidate.verify()).accepted
        candidate.close()


@pytest.mark.litert
def test_processors_that_exclude_each_other_take_turns(squeezenet: Graph) -> None:
    whole = next(p.name for p in MACHINE.processors if len(p.options["cores"]) > 1)
    plan = chain_plan(squeezenet, [11, 25], [whole, SINGLES[0], whole])
    with LitertEvaluator().prepare(MACHINE) as session:
        candidate = loaded(session, squeezenet, plan)
        assert candidate.pipeline().how.lag == (0, 0, 0)
        assert (candidate.stream(2).latency_s > 0).all()
        assert there(candidate.verify()).accepted
        candidate.close()


@pytest.mark.litert
def test_a_worker_that_dies_in_a_stream_is_reported(squeezenet: Graph, tmp_path: Path) -> None:
    import os
    import signal

    plan = chain_plan(squeezenet, [25], [SINGLES[0], SINGLES[-1]])
    write_deployment(tmp_path, squeezenet, plan, MACHINE, there(squeezenet.source).content_digest())
    with PlanRunner(tmp_path) as runner:
        ((shape, dtype),) = runner.inputs.values()
        stream = runner.stream(np.zeros(shape, dtype) for _ in range(1000))
        next(stream)
        os.kill(runner.processes()[0], signal.SIGKILL)
        with fails(UnavailableError):
            list(stream)


def test_arcs_carry_what_is_under_way(squeezenet: Graph) -> None:
    plan = chain_plan(squeezenet, [11, 25], ["cpu0", "cpu1", "cpu0"])
    needs = needs_of(squeezenet, plan)
    how = rounds(plan, PLATFORM, needs)
    found = {(a.before, a.after): a.tokens for a in arcs(plan, PLATFORM, needs, how)}
    assert found == {(0, 1): 1, (1, 2): 1}


@pytest.mark.timing
@pytest.mark.litert
def test_energy_of_this_machine_is_reported_or_said_to_be_unknown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "mobilenet_v1@0.25/128", "--objective", "energy", "--processors", "cpu0", "-q", "--json"]
    words += ["--max-stages", "1", "--budget", "1"]
    try:
        find_meter()
    except UsageError:
        tells(capsys, *words, code=2)
    assert main([*words, "--power", "cpu0=3", "--out", "powers"]) in SEARCHED
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["energy_mj"]["median"] == pytest.approx(sum(best["stage_mj"]), rel=0.01)
