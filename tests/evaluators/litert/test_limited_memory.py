"""Processors whose memory is limited: control groups, and candidates of which one at a time is loaded."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from evaluators.base import Batch, Candidate
from evaluators.litert.memory_group import MemoryGroup
from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator
from evaluators.litert.workers import Workers
from evaluators.machine import MEMBERSHIP, MOUNT, own_groups
from evaluators.measurement.disturbance import RunFilter
from evaluators.sampling import SamplingPolicy, measure
from evaluators.turns import Turns
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform, memory_limit_nbytes
from search_spaces.models.litert import read_model
from search_spaces.models.zoo.builder import Builder
from search_spaces.spaces.chain import chain_plan
from tests.support.narrowing import there
from tests.support.sentences import fails

NBYTES = 1 << 20


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluators.litert.memory_group._END_LIMIT_S", 0.0)


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    ("member", "place", "limit", "events"),
    [
        ("4:memory:/a/b\n", "memory/a/b", "memory.limit_in_bytes", "memory.oom_control"),
        ("0::/a/b\n", "a", "memory.max", "memory.events"),
        ("0::/\n", ".", "memory.max", "memory.events"),
    ],
)
def test_a_group_of_either_version(tmp_path: Path, member: str, place: str, limit: str, events: str) -> None:
    for folder in ("memory/a/b", "a/b"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("memory")
    (tmp_path / "membership").write_text(member)
    (tmp_path / place / "partition-optimizer-999999999-0").mkdir()  # of a program that was killed
    with closing(MemoryGroup(NBYTES, tmp_path, tmp_path / "membership")) as group:
        (made,) = (tmp_path / place).glob("partition-optimizer-*")
        assert (made / limit).read_text() == str(NBYTES)
        group.add(123)
        assert (made / "cgroup.procs").read_text() == "123"
        assert group.ended == 0
        (made / events).write_text("low 0\noom_kill 2\n")
        assert group.ended == 2


def test_without_permission_or_groups(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("4:memory:/a\n")
    (tmp_path / "memory").write_text("no folder")
    with fails(UnavailableError):
        MemoryGroup(NBYTES, tmp_path, tmp_path / "membership")
    (tmp_path / "membership").write_text("")
    with fails(UnavailableError):
        MemoryGroup(NBYTES, tmp_path, tmp_path / "membership")


def test_all_of_a_platform_have_the_same_memory() -> None:
    limited, other = make_processor("cpu0:memory=64MB"), make_processor("cpu0:memory=65MB")
    assert memory_limit_nbytes([limited]) == 64_000_000
    assert memory_limit_nbytes([make_processor("cpu0")]) is None
    for second in (other, make_processor("cpu0")):
        with fails(UsageError):
            Workers(Platform("p", (limited, second)))


class _Counted(Candidate):
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls
        calls.append(f"load {name}")

    def run(self, n: int, stop_above_s: float = 0.0) -> Batch:  # noqa: ARG002
        self.calls.append(f"run {self.name} {n}")
        return Batch(np.ones(n), np.ones((n, 1)))

    def close(self) -> None:
        self.calls.append(f"close {self.name}")


def test_one_candidate_at_a_time_is_loaded() -> None:
    calls: list[str] = []
    turns = Turns(lambda: calls.append("end"), lambda: len(calls))
    a, b = (turns.load(lambda name=name: _Counted(name, calls)) for name in "ab")  # type: ignore[misc]
    a.run(2)
    a.run(3)
    b.close()
    a.close()
    a.close()
    b.run(1)
    assert calls == ["load a", "close a", "end", "load b", "close b", "end", "load a", "run a 1", "run a 2", "run a 3",
                     "close a", "end", "load b", "run b 1", "run b 1"]  # fmt: skip
    assert turns.waits == 4  # two for each time that one was loaded again


@pytest.fixture(scope="module")
def _memory() -> None:
    try:
        MemoryGroup(64 * NBYTES).close()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    build = Builder("wide")
    x = build.input((1, 1024))
    for layer in range(12):  # 4 MiB each
        x = build.fully_connected(x, 1024, f"dense{layer}")
    path = tmp_path_factory.mktemp("wide") / "wide.tflite"
    build.finish(x).write(path)
    return read_model(path, "wide")


@pytest.mark.litert
@pytest.mark.usefixtures("_memory")
def test_what_others_have_in_memory_does_not_help(graph: Graph) -> None:
    free, limited = (Platform("here", (make_processor(name),)) for name in ("cpu0", "cpu0:memory=24MB"))
    with (
        LitertEvaluator().prepare(free) as other,
        LitertEvaluator().prepare(limited) as session,
        closing(other.load(graph, chain_plan(graph, (), ["cpu0"]))) as beside,
    ):
        beside.run(2)
        with closing(session.load(graph, chain_plan(graph, (), ["cpu0:memory=24MB"]))) as candidate:
            found = measure(candidate, SamplingPolicy(max_s=0.2), runs=RunFilter(session.counters))
    assert found.latency_s.conditions["page_faults"] > 0


@pytest.mark.litert
@pytest.mark.usefixtures("_memory")
def test_a_process_that_cannot_join_does_not_run(monkeypatch: pytest.MonkeyPatch, graph: Graph) -> None:
    platform = Platform("here", (make_processor("cpu0:memory=64MB"),))
    with LitertEvaluator().prepare(platform) as session:
        monkeypatch.setattr(MemoryGroup, "add", lambda *_: (_ for _ in ()).throw(UnavailableError("no")))
        for _ in range(2):
            with pytest.raises(UnavailableError, match="no"):
                session.load(graph, chain_plan(graph, (), ["cpu0:memory=64MB"])).run(1)
        assert not session._workers.processes()


@pytest.mark.litert
@pytest.mark.usefixtures("_memory")
def test_kernels_other_than_the_references_are_limited_too(graph: Graph) -> None:
    platform = Platform("here", (make_processor("cpu0:builtin:memory=90MB"),))
    plan = chain_plan(graph, (), [platform.processors[0].name])
    with LitertEvaluator().prepare(platform) as session, closing(session.load(graph, plan)) as candidate:
        candidate.run(1)
        assert there(candidate.verify()).accepted


@pytest.mark.litert
@pytest.mark.usefixtures("_memory")
def test_a_failing_start_leaves_no_group() -> None:
    before = groups()
    with pytest.raises(FileNotFoundError):
        Workers(Platform("p", (make_processor("cpu0:memory=64MB"),)), Path("/nowhere/log"))
    assert groups() == before


def groups() -> int:
    (own, version), *more = own_groups("memory", MOUNT, MEMBERSHIP)
    place = more[0][0] if version == 2 and more else own
    return len(list(place.glob(f"partition-optimizer-{os.getpid()}-*")))


@pytest.mark.litert
@pytest.mark.usefixtures("_memory")
def test_weights_that_do_not_fit_are_read_again(graph: Graph) -> None:
    faults = {}
    for size in ("24MB", "300MB"):
        platform = Platform("here", (make_processor(f"cpu0:memory={size}"),))
        with LitertEvaluator().prepare(platform) as session:
            for cuts in ((), (5,)):
                plan = chain_plan(graph, cuts, [platform.processors[0].name] * (len(cuts) + 1))
                with closing(session.load(graph, plan)) as candidate:
                    found = measure(candidate, SamplingPolicy(max_s=0.2), runs=RunFilter(session.counters))
                    agreement = candidate.verify()
                assert there(agreement).identical
                faults[size, cuts] = found.latency_s.conditions["page_faults"]
    assert min(faults["24MB", cuts] for cuts in ((), (5,))) > max(faults["300MB", cuts] for cuts in ((), (5,))) == 0
