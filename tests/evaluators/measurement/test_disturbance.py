"""What kept the measuring threads off their cores: read from the kernel, told in words, and never guessed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.measurement import disturbance
from evaluators.measurement.disturbance import (
    QUIET,
    Counters,
    Disturbance,
    RunFilter,
    TaskCounters,
    between,
    in_words,
)
from tests.support.sentences import says

pytestmark = pytest.mark.timing


@pytest.fixture(autouse=True)
def quick_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a file may take long to read, and is then read rarely."""
    monkeypatch.setattr(disturbance, "_SLOW_S", math.inf)


def fake_proc(folder: Path, waited_ns: int, steal: int, switches: int = 3) -> Path:
    task = folder / "41" / "task" / "42"
    task.mkdir(parents=True, exist_ok=True)
    (task / "schedstat").write_text(f"1000 {waited_ns} 7\n")
    (task / "status").write_text(f"Name:\tx\nvoluntary_ctxt_switches:\t9\nnonvoluntary_ctxt_switches:\t{switches}\n")
    lines = [f"cpu  0 0 0 0 0 0 0 {9 * steal} 0 0", f"cpu0 0 0 0 0 0 0 0 {steal} 0 0", "cpu1 0 0 0 0 0 0 0 5 0 0"]
    (folder / "stat").write_text("\n".join([*lines, "intr 1 2 3", ""]))
    return folder


def test_counters_are_read_and_subtracted(tmp_path: Path) -> None:
    reader = TaskCounters([0], lambda: [41], fake_proc(tmp_path, 1_000_000, 10))
    before = reader.read()
    fake_proc(tmp_path, 6_000_000, 30, switches=5)
    found = between(before, reader.read())
    assert found.waited_s == pytest.approx(0.005)
    assert found.stolen_s == pytest.approx(20 / os.sysconf("SC_CLK_TCK")), "of core 0 alone"
    assert found.switches == 2


def test_processes_that_are_gone_and_files_that_are_no_counters(tmp_path: Path) -> None:
    reader = TaskCounters([0], lambda: [41, 99], fake_proc(tmp_path, 5, 1))
    before = reader.read()
    (tmp_path / "41" / "task" / "42" / "schedstat").write_text("")
    (tmp_path / "41" / "task" / "42" / "status").write_bytes(b"\xff\x00nonvoluntary_ctxt_switches: many")
    assert between(before, reader.read()).waited_s == 0.0
    assert not TaskCounters([0], lambda: [41], tmp_path).works


def grouped(proc: Path, groups: Path, ticks: int, name: str, text: str) -> Path:
    """Write how long cores were busy: the whole machine in ticks, a control group in a text of its own."""
    stat = proc / "stat"
    stat.write_text(f"cpu  {ticks} 0 0 900 0 0 0 0 0 0\ncpu0 {ticks} 0 0 900 0 0 0 0 0 0\nintr 1\n")
    (groups / name).parent.mkdir(parents=True, exist_ok=True)
    (groups / name).write_text(text)
    return groups


def since(reader: TaskCounters, proc: Path, groups: Path, name: str, text: str) -> Disturbance:
    """Return what happened while thread 42 ran for 3 ms and waited for 5 ms."""
    before = reader.read()
    (proc / "41" / "task" / "42" / "schedstat").write_text("3001000 5000000 7\n")
    (groups / name).write_text(text)
    return between(before, reader.read())


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("cpuacct/cpuacct.usage_percpu", "70000000000 30000000000", "70005000000 99000000000"),
        ("cpu.stat", "usage_usec 100000000\nuser_usec 1", "usage_usec 100005000\nuser_usec 1"),
    ],
)
def test_plans_whose_processes_wait_for_each_other_are_not_disturbed(
    name: str, begin: str, end: str, tmp_path: Path
) -> None:
    """The measured core was busy for 5 ms, 3 of them with the thread itself: nobody else had it for longer than 2."""
    proc = fake_proc(tmp_path / "proc", 0, 0)
    groups = grouped(proc, tmp_path / "groups", 100 * os.sysconf("SC_CLK_TCK"), name, begin)
    reader = TaskCounters([0], lambda: [41], proc, groups=groups)
    assert 0.0 <= since(reader, proc, groups, name, end).waited_s <= 0.002


def test_the_group_of_a_container_says_nothing_of_others(tmp_path: Path) -> None:
    proc, name = fake_proc(tmp_path / "proc", 0, 0), "cpu.stat"
    groups = grouped(proc, tmp_path / "groups", 100 * os.sysconf("SC_CLK_TCK"), name, "usage_usec 2000000")
    reader = TaskCounters([0], lambda: [41], proc, groups=groups)
    assert since(reader, proc, groups, name, "usage_usec 2000000").waited_s == pytest.approx(0.005)


def test_a_thread_that_waits_for_a_core_is_seen_here() -> None:
    """Two threads of one process on one core: each waits while the other runs, whatever else the machine does."""
    reader = TaskCounters(os.sched_getaffinity(0), lambda: [os.getpid()])
    if not reader.works:
        pytest.skip("the kernel does not count how long threads wait")
    core = min(os.sched_getaffinity(0))

    def spin() -> None:
        os.sched_setaffinity(threading.get_native_id(), {core})
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            sum(b"x" * 100_000)
        readings.append(reader.read())  # of a thread that has ended nothing can be read

    # A process of its own, so that no interpreter lock orders the two.
    busy = f"import os, time; os.sched_setaffinity(0, {{{core}}}); print(1, flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
        if other.stdout is not None:
            other.stdout.readline()
        readings = [reader.read()]
        here = threading.Thread(target=spin)
        here.start()
        here.join()
        other.kill()
    found = between(*readings)
    assert found.waited_s > 0.05
    assert found.lasted_s >= 0.3


class Clock:
    """Counters that say for each reading how long threads have waited so far, and how late it is."""

    def __init__(self, shares: list[float]) -> None:
        self.shares, self.now, self.waited_ns, self.begun = shares, 0.0, 0, False

    def read(self) -> Counters:
        if self.begun:
            share = self.shares.pop(0) if self.shares else 0.0
            self.now += 1.0
            self.waited_ns += int(share * 1e9)
        self.begun = not self.begun
        return Counters(self.now, {1: self.waited_ns})


def test_disturbed_runs_are_repeated_and_the_least_disturbed_counts() -> None:
    results = iter("abcdef")
    runs = RunFilter(Clock([0.5, 0.2, 0.0]).read)
    assert runs.run(lambda: next(results)) == ("c", 0.0)
    assert runs.repeated == 2
    assert runs.total.waited_s == pytest.approx(0.7)


def test_repeating_ends_where_it_never_helps() -> None:
    clock = Clock([0.5] * 1000)
    runs = RunFilter(clock.read)
    for _ in range(100):
        runs.run(lambda: None)
    assert runs.repeated <= 30, "16 until it is clear, then one of ten"


def test_repeating_begins_again_when_the_machine_calms_down() -> None:
    clock = Clock([0.5] * 400)
    runs = RunFilter(clock.read)
    while len(clock.shares) > 50:
        runs.run(lambda: None)
    clock.shares = [0.5, 0.0] * 200
    for _ in range(100):
        _, lost = runs.run(lambda: None)
    assert lost == 0.0


def test_without_counters_nothing_is_repeated() -> None:
    runs = RunFilter()
    assert runs.run(lambda: 7) == (7, 0.0)
    assert runs.repeated == 0


seconds = st.floats(0.0, 1e4)


@given(seconds, seconds, st.integers(0, 10**6), seconds, seconds)
def test_disturbances_survive_a_file_and_add_up(a: float, b: float, c: int, d: float, e: float) -> None:
    found = Disturbance(a, b, c, d, e)
    again = Disturbance.from_json(found.to_json())
    assert again.waited_s == pytest.approx(found.waited_s, abs=1e-6)
    assert again.switches == c
    assert (found + found).lost_s == pytest.approx(2.0 * found.lost_s)


def test_what_disturbed_is_reported_and_what_did_not_is_not() -> None:
    says("\n".join(in_words(Disturbance(12.0, 8.16, 400), 3, 2)))
    says("\n".join(in_words(Disturbance(12.0, 0.0, 0, 1.0, 2.0), 0, 1)))
    assert in_words(Disturbance(12.0, QUIET / 10), 1, 2) == []
    assert in_words(Disturbance(), 0, 2) == []
