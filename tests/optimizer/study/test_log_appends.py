"""Appending to a log that is in use: a full disk, other processes and a kill at any moment lose nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from optimizer.study.log import Record, TrialLog, read_log
from search_spaces.core.errors import OptimizeError, RunFolderError
from tests.support.disks import small_disk
from tests.support.sentences import fails, says
from tests.support.trial_logs import TRIALS, written


@pytest.mark.parametrize("taken", [0, 1, 50])
@pytest.mark.parametrize("stop", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_append_that_fails_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int, stop: BaseException
) -> None:
    path = tmp_path / "trials.jsonl"
    whole = written(path)
    write, left = os.write, [taken]

    def full(descriptor: int, content: bytes) -> int:
        if not left[0]:
            raise stop
        part = min(left[0], 7)
        left[0] -= part
        return write(descriptor, bytes(content)[:part])

    log, _ = TrialLog.open(path)
    with log:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises((RunFolderError, KeyboardInterrupt)) as caught:
                log.append("trial", {"lost": "x" * 100})
        if isinstance(stop, OSError):
            says(str(caught.value))
        assert path.read_bytes() == whole
        assert log.append("trial", {"a": 1}).n == 4
    assert len(read_log(path).records) == 4
    assert not read_log(path).damage


def test_a_file_size_limit_is_one_line(tmp_path: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from optimizer.study.log import TrialLog
from search_spaces.core.errors import OptimizeError
log, _ = TrialLog.open(Path(sys.argv[1]))
log.append("trial", {"a": "x" * 1000})
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    for i in range(5):
        log.append("trial", {"a": "x" * 1000})
except OptimizeError as error:
    print(i, error.exit_code, error)
"""
    path = tmp_path / "trials.jsonl"
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    says(done.stdout)
    assert len(done.stdout.splitlines()) == 1
    contents = read_log(path)
    assert len(contents.records) == 2
    assert not contents.damage


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        path = disk / "trials.jsonl"
        log, _ = TrialLog.open(path)
        appended: list[Record] = []
        with log, fails(RunFolderError):
            appended.extend(log.append("trial", {"a": "x" * 3000}) for _ in range(100))
        contents = read_log(path)
        assert contents.records == tuple(appended)
        assert len(appended) > 10
        assert not contents.damage
        with path.open("r+b") as file:
            file.seek(100)
            file.write(b"?")
        with fails(RunFolderError):  # mending needs room, and says so
            TrialLog.open(path)
        assert len(read_log(path).records) == len(appended) - 1


def test_a_second_process_is_kept_out_and_told_by_whom(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    program = """
import os, sys, time
from pathlib import Path
from optimizer.study.log import TrialLog
log, _ = TrialLog.open(Path(sys.argv[1]))
if os.fork() == 0:  # a worker that outlives its parent
    print("open", flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, path], stdout=subprocess.PIPE, start_new_session=True
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"open\n"
            with fails(RunFolderError):
                TrialLog.open(path)
            os.kill(other.pid, signal.SIGKILL)
            other.wait()
            log, _ = TrialLog.open(path)
            log.close()
            with log, contextlib.suppress(OptimizeError):
                log.append("trial", {})
        finally:
            os.killpg(other.pid, signal.SIGKILL)


def test_opening_twice_in_one_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    log, _ = TrialLog.open(path)
    with log, fails(RunFolderError):
        TrialLog.open(path)
    TrialLog.open(path)[0].close()


@pytest.mark.parametrize("change", ["remove", "replace"])
def test_a_log_mended_by_another_process_while_this_one_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = tmp_path / "trials.jsonl"
    whole = written(path)
    lock, opened = fcntl.flock, [0]

    def late(descriptor: int, operation: int) -> None:
        if not opened[0]:
            path.rename(tmp_path / "old")
            if change == "replace":
                path.write_bytes(whole)
        opened[0] += 1
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    log, contents = TrialLog.open(path)
    with log:
        assert len(contents.records) == (len(TRIALS) if change == "replace" else 0)
        log.append("trial", {})
    assert len(read_log(path).records) == len(contents.records) + 1
    assert (tmp_path / "old").read_bytes() == whole


@pytest.mark.parametrize("change", ["remove", "replace", "truncate", "extend"])
def test_a_log_changed_by_others_is_noticed(tmp_path: Path, change: str) -> None:
    path = tmp_path / "trials.jsonl"
    whole = written(path)
    log, _ = TrialLog.open(path)
    if change in {"remove", "replace"}:
        path.unlink()
    if change != "remove":
        path.write_bytes({"replace": whole, "truncate": whole[:-9], "extend": whole + b"hello\n"}[change])
    with log, fails(RunFolderError):
        log.append("trial", {})


def test_killed_at_any_moment_no_returned_record_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    program = """
import sys
from pathlib import Path
from optimizer.study.log import TrialLog
log, contents = TrialLog.open(Path(sys.argv[1]))
for i in range(10000):
    print(log.append("trial", {"a": "x" * 2000}).n, flush=True)
"""
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            lines = [other.stdout.readline() for _ in range(20)]
            other.kill()
            lines += other.stdout.readlines()
        reported = max(int(line) for line in lines if line.endswith(b"\n"))
        contents = read_log(path)
        assert reported <= len(contents.records) <= reported + 1
        assert [r.n for r in contents.records] == list(range(1, len(contents.records) + 1))
