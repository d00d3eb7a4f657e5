"""What is read of the machine: limits of control groups, and the conditions that measurements are taken under."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators import machine
from evaluators.litert import processors
from evaluators.machine import Conditions, available_nbytes, core_quota, memory_left_nbytes, throttled_s
from optimizer.tools import doctor
from tests.support.narrowing import there
from tests.support.sentences import says


def write(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)


@pytest.fixture
def membership(tmp_path: Path) -> Path:
    return tmp_path / "membership"


def test_the_least_limit_on_the_way_to_the_root_counts(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/outer/inner\n")
    write(tmp_path, cgroup__controllers="cpu memory")
    write(tmp_path / "outer", memory__max="1000\n", memory__current="400\n", memory__stat="anon 1\ninactive_file 50\n")
    write(tmp_path / "outer/inner", memory__max="max\n", memory__current="300\n", cpu__max="max 100000\n")
    assert memory_left_nbytes(tmp_path, membership) == 650
    assert core_quota(tmp_path, membership) is None
    write(tmp_path / "outer", cpu__max="250000 100000\n")
    write(tmp_path / "outer/inner", memory__max="500\n", cpu__max="400000 100000\n")
    assert memory_left_nbytes(tmp_path, membership) == 200
    assert core_quota(tmp_path, membership) == 2.5
    write(tmp_path / "outer/inner", memory__current="600\n")  # the limit was lowered below what is in use
    assert memory_left_nbytes(tmp_path, membership) == 0


def test_version_1_and_a_path_that_only_the_host_has(tmp_path: Path, membership: Path) -> None:
    membership.write_text("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n")
    files = {"memory.limit_in_bytes": "2000", "memory.usage_in_bytes": "500", "memory.stat": "total_inactive_file 100"}
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / "memory" / name).write_text(text)
    write(tmp_path / "cpu", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert memory_left_nbytes(tmp_path, membership) == 1600
    assert core_quota(tmp_path, membership) == 1.5
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712")
    write(tmp_path / "cpu", cpu__cfs_quota_us="-1")
    assert memory_left_nbytes(tmp_path, membership) is None
    assert core_quota(tmp_path, membership) is None


def test_the_time_that_a_quota_took_is_read(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/inner\n")
    write(tmp_path, cgroup__controllers="cpu")
    assert throttled_s(tmp_path, membership) == 0.0
    write(tmp_path / "inner", cpu__stat="usage_usec 9000000\nnr_throttled 3\nthrottled_usec 1500000\n")
    assert throttled_s(tmp_path, membership) == 1.5
    membership.write_text("3:cpu,cpuacct:/\n")
    write(tmp_path / "cpu", cpu__stat="nr_throttled 2\nthrottled_time 250000000\n")
    assert throttled_s(tmp_path, membership) == 0.25


@given(st.binary(max_size=200), st.binary(max_size=60))
def test_whatever_the_files_hold(tmp_path_factory: pytest.TempPathFactory, groups: bytes, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    write(folder, cgroup__controllers="memory cpu")
    (folder / "membership").write_bytes(groups + b"\n0::/\n")
    for name in ("memory.max", "memory.current", "memory.stat", "cpu.max"):
        (folder / name).write_bytes(content)
    left, quota = memory_left_nbytes(folder, folder / "membership"), core_quota(folder, folder / "membership")
    assert left is None or left >= 0
    assert quota is None or quota > 0


def test_a_quota_is_no_more_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "usable_cores", lambda: [0, 2, 3, 5])
    for quota, cores in ((None, [0, 2, 3, 5]), (2.9, [0, 2]), (0.3, [0]), (16.0, [0, 2, 3, 5])):
        monkeypatch.setattr(processors, "core_quota", lambda quota=quota: quota)
        assert processors.fair_cores() == cores
    monkeypatch.setattr(doctor, "core_quota", lambda: 0.5)
    found = next(f for f in doctor._cpu() if f.name == "core time")
    says(found.value)
    assert found.problem
    assert found.advice


def test_memory_is_what_is_left_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_nbytes() is not None
    monkeypatch.setattr(machine, "memory_left_nbytes", lambda: 12_345)
    assert available_nbytes() == 12_345
    monkeypatch.setattr(machine, "memory_left_nbytes", lambda: 1 << 60)
    now = there(available_nbytes())
    assert now < 1 << 60


@pytest.fixture
def busy() -> Iterator[int]:
    """A process that uses one core."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process.pid
        process.kill()


@pytest.mark.timing
def test_load_is_what_others_use(busy: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    theirs, mine = Conditions(cores, list), Conditions(cores, lambda: [busy], {"runtime": "1.2"})
    for conditions in (theirs, mine):
        assert "load" not in conditions.now()  # there is no time before the first answer
    found, without = {}, {}
    for _ in range(60):  # where asking took long, the next answer comes late
        time.sleep(machine.EVERY_S + 0.3)
        found, without = theirs.now(), mine.now()
        if "load" in found and "load" in without:
            break
    assert without["runtime"] == "1.2"
    assert 0.0 <= without["load"] < found["load"]
    assert 0.0 <= found["steal"] <= 1.0


def test_conditions_are_read_for_a_five_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, reading_s = [0.0], []

    def read(_: object) -> list[int]:
        now_s[0] += 0.1
        reading_s.append(0.1)
        return [1, 2, 3, 4]

    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(machine, "_times", read)
    conditions = Conditions(os.sched_getaffinity(0), list)
    while now_s[0] < 1000.0:
        conditions.now()
        now_s[0] += 0.01
    assert 10 <= len(reading_s) <= 1000.0 / 500 / 0.1 + 1
