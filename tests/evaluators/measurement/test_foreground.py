"""Processes that measure run before others, and studies of one person take turns on the same cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluators.measurement import foreground
from evaluators.measurement.foreground import Foreground

_CORE, _OTHER = ["core0"], ["core1"]


@pytest.fixture
def led() -> Iterator[int]:
    """A process that leads a session of its own."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    yield process.pid
    process.communicate(b"\n")


def a_study(folder: Path) -> Foreground:
    return Foreground(tuple, folder / "turns")


def waiter(study: Foreground, resources: list[str]) -> tuple[threading.Thread, threading.Event]:
    came = threading.Event()

    def measure() -> None:
        with study.holding(resources):
            came.set()

    thread = threading.Thread(target=measure)
    thread.start()
    return thread, came


def test_studies_measure_one_after_the_other(tmp_path: Path) -> None:
    first, second = a_study(tmp_path), a_study(tmp_path)
    with first.holding([*_CORE, *_OTHER]):
        thread, came = waiter(second, _OTHER)
        assert not came.wait(0.1)
    thread.join()
    assert came.is_set()
    assert second.queued_s >= 0.1
    assert first.queued_s < 0.1


def test_other_cores_are_free(tmp_path: Path) -> None:
    with a_study(tmp_path).holding(_CORE):
        thread, came = waiter(a_study(tmp_path), _OTHER)
        thread.join()
        assert came.is_set()


def test_what_measures_may_measure_within(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    with study.holding(_CORE), study.holding([*_CORE, *_OTHER]):
        assert study.queued_s < 1.0


def test_a_study_that_was_stopped_holds_up_nobody_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreground, "_PATIENCE_S", 0.05)
    stopped, other = a_study(tmp_path), a_study(tmp_path)
    with stopped.holding(_CORE):
        for _ in range(2):  # the second time it does not wait at all
            with other.holding(_CORE):
                pass
    assert 0.05 <= other.queued_s < 0.1, "what it waited in vain counts as well"
    with other.holding(_CORE):  # takes what is free
        thread, came = waiter(a_study(tmp_path), _CORE)
        assert not came.wait(0.02)
    thread.join()


@pytest.mark.parametrize("kind", ["link", "file", "missing"])
def test_a_folder_of_somebody_else_is_left_alone(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "turns"
    if kind == "link":
        (tmp_path / "theirs").mkdir()
        place.symlink_to(tmp_path / "theirs")
    elif kind == "file":
        place.write_text("")
    else:
        place = tmp_path / "no" / "turns"
    with Foreground(tuple, place).holding(_CORE), Foreground(tuple, place).holding(_CORE):
        pass
    assert not list(tmp_path.glob("theirs/*"))


def test_priority_is_raised_while_something_is_measured(led: int, tmp_path: Path) -> None:
    study = Foreground(lambda: [led], tmp_path / "turns")
    usual = os.getpriority(os.PRIO_PROCESS, led)
    group = Path(f"/proc/{led}/autogroup")
    before = group.read_text() if group.exists() else ""
    with study.holding(_CORE):
        raised = os.getpriority(os.PRIO_PROCESS, led)
    assert raised == (-20 if study.preferred else usual)
    assert os.getpriority(os.PRIO_PROCESS, led) == usual
    assert not before or group.read_text() == before


def test_a_study_that_was_started_with_nice_stays_behind(led: int, tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from evaluators.measurement.foreground import Foreground\n"
        f"study = Foreground(lambda: [{led}], Path(sys.argv[1]))\n"
        f"with study.holding(['core0']): print(os.getpriority(os.PRIO_PROCESS, {led}), study.preferred)"
    )
    done = subprocess.run(
        ["nice", "-n", "5", sys.executable, "-c", code, str(tmp_path / "turns")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.split() == [str(os.getpriority(os.PRIO_PROCESS, led)), "False"]


def test_an_interrupt_gives_everything_back(led: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Foreground(lambda: [led], tmp_path / "turns")
    study.preferred = True
    original, values = study._prefer, list[int]()

    def interrupted(value: int) -> None:
        values.append(value)
        original(value)
        if value:
            raise KeyboardInterrupt

    monkeypatch.setattr(study, "_prefer", interrupted)
    with pytest.raises(KeyboardInterrupt), study.holding(_CORE):
        pass
    assert values[-1] == 0
    with a_study(tmp_path).holding(_CORE):
        assert os.getpriority(os.PRIO_PROCESS, led) == 0
    monkeypatch.undo()
    with study.holding(_CORE):
        thread, came = waiter(a_study(tmp_path), _CORE)
        assert not came.wait(0.05)
    thread.join()


def test_a_file_that_cannot_be_locked_is_no_reason_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("evaluators.measurement.foreground.fcntl.flock", none_here)
    study = a_study(tmp_path)
    with study.holding(_CORE):
        pass
    assert study.queued_s < 1.0


def test_a_process_that_has_ended_is_passed_over(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    gone.wait()
    with Foreground(lambda: [gone.pid], tmp_path / "turns").holding(_CORE):
        pass
