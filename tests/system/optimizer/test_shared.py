"""Workers of a shared study that die: on SQLite, behind a server, on PostgreSQL."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from optimizer.shared.study import RECORD
from tests.faults import shared_chaos
from tests.faults.shared_chaos import ROOT
from tests.support.postgres import Postgres, postgres_server
from tests.support.shared_workers import closed_at_the_end, joined, record


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shared.db'}"


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    with closed_at_the_end():
        yield


@pytest.fixture
def server() -> Iterator[Postgres]:
    with postgres_server() as started:
        yield started


def test_what_the_dead_claimed_is_free_and_what_they_had_written_is_kept(url: str) -> None:
    dead, other = joined(url, "dead"), joined(url, "other")
    lost = dead.claim("lost", "trial", {}, {})
    assert lost is not None
    dead.close()  # no more signs of life
    late = joined(url, "late")
    written = late.claim("written", "trial", {}, {})
    assert written is not None
    late._storage.set_trial_user_attr(written.trial_id, RECORD, json.dumps(record("written")))
    late.close()
    assert [data["digest"] for _, data in other.look()] == ["written"]
    assert "lost" in other.pending
    assert other.claim("lost", "trial", {}, {}) is None
    end_s = time.monotonic() + 30.0
    while "lost" in other.pending and time.monotonic() < end_s:
        time.sleep(0.5)
        other.look()
    again = other.claim("lost", "trial", {}, {})
    assert again is not None
    other.finish(again, record("lost"))
    dead.finish(lost, record("lost"))  # it was only asleep, and comes too late
    assert dead.lost == 1
    fresh = joined(url, "fresh")
    assert sorted(str(data["digest"]) for _, data in fresh.look()) == ["lost", "written"]


def test_through_a_server_workers_share_and_the_dead_are_found(url: str, tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="grpc:// needs the extra 'grpc'")
    command = [sys.executable, "-m", "optimizer.cli", "storage", url, "--listen", "127.0.0.1:0", "--heartbeat", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stderr is not None
            reported = re.search(rb"grpc://127\.0\.0\.1:\d+", process.stderr.readline())
            assert reported
            through = reported[0].decode()
            dead, other = joined(through, "dead"), joined(through, "other")
            assert dead.claim("plan", "trial", {}, {}) is not None
            assert other.claim("plan", "trial", {}, {}) is None
            time.sleep(6.0)
            other.look()
            assert "plan" in other.pending  # it gives signs of life, and they arrive
            dead.close()
            end_s = time.monotonic() + 30.0
            while "plan" in other.pending and time.monotonic() < end_s:
                time.sleep(0.5)
                other.look()
            again = other.claim("plan", "trial", {}, {})
            assert again is not None
            other.finish(again, record("plan"))
        finally:
            process.terminate()
            process.communicate(timeout=30)


def test_workers_and_the_server_are_killed_at_random(server: Postgres, tmp_path: Path) -> None:
    """The large one is ``python -m tests.faults.shared_chaos 8 2000``."""

    def outage() -> None:
        server.kill()
        time.sleep(1.0)
        server.start()

    seen = shared_chaos.run(server.url, tmp_path, 3, 40, kills=2, outages=1, outage=outage)
    assert (seen.finished, seen.twice, seen.unfinished) == (40, 0, 0)
    assert seen.optimum
    assert (seen.killed, seen.outages) == (2, 1)
