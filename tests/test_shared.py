"""A study that several workers share: one claim a plan, nothing lost with the dead, nothing there twice."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from optuna.storages import BaseStorage

from optimizer.cli import main
from optimizer.config import parse_config
from optimizer.shared import RECORD, SETTINGS, Claim, SharedStudy
from optimizer.shared_storage import check_url, close_storage, open_storage
from optimizer.sharing import joined as settings_joined
from optimizer.sharing import placed
from search_spaces.errors import UnavailableError, UsageError
from tests import shared_chaos
from tests.postgres import Postgres
from tests.shared_chaos import MODEL, ROOT


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shared.db'}"


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _open:
        study, storage = _open.pop()
        study.close()
        close_storage(storage)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Postgres]:
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)  # the server is somebody else
    made = Postgres(tmp_path / "postgres")
    yield made
    made.close()


_open: list[tuple[SharedStudy, BaseStorage]] = []


def joined(url: str, worker: str) -> SharedStudy:
    storage = open_storage(url, 1)
    _open.append((SharedStudy(storage, "s", worker, 1), storage))
    return _open[-1][0]


def record(digest: str, value_s: float | None = 1.0) -> dict[str, object]:
    return {"digest": digest, "values": None if value_s is None else [value_s]}


def test_of_many_claims_of_a_plan_one_stands(url: str) -> None:
    """Threads with a connection each, as processes have; every plan is claimed by all of them at once."""
    workers = [joined(url, f"w{i}") for i in range(4)]
    won: list[Claim] = []
    barrier = threading.Barrier(len(workers))

    def claim_all(study: SharedStudy) -> None:
        for plan in range(6):
            barrier.wait()
            claim = study.claim(f"plan {plan}", "trial", {}, {})
            if claim is not None:
                won.append(claim)
                study.finish(claim, record(claim.digest))

    threads = [threading.Thread(target=claim_all, args=(study,)) for study in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(c.digest for c in won) == {f"plan {plan}": 1 for plan in range(6)}
    found = workers[0].look()
    assert sorted(str(data["digest"]) for _, data in found) == [f"plan {plan}" for plan in range(6)]
    assert workers[0].look() == []  # each is told once


def test_the_budget_is_kept_to_the_trial(url: str) -> None:
    first, second = joined(url, "a"), joined(url, "b")
    claims = [
        study.claim(f"plan {n}", "trial", {}, {}, room=3) for n, study in enumerate((first, second, first, second))
    ]
    assert [claim is not None for claim in claims] == [True, True, True, False]
    assert first.claim("a baseline", "baseline", {}, {}) is not None  # costs none


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


def test_facts_are_everybodys(url: str) -> None:
    first, second = joined(url, "a"), joined(url, "b")
    assert first.fact("profile", lambda: {"a": 1}) == {"a": 1}
    assert second.fact("profile", lambda: {"a": 2}) == {"a": 1}


def test_a_worker_joins_by_name(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["--study", "s", "--storage", url]
    begin = ["--model", MODEL, "--budget", "12", "--evaluator", "synthetic", "--max-stages", "2", "-q", "--json"]
    assert main([*shared, "--out", str(tmp_path / "none"), "-q"]) == 2
    assert "the storage has no such study" in capsys.readouterr().err
    assert main([*begin, *shared, "--out", str(tmp_path / "a")]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["unique_plans"] == 12
    assert main([*shared, "--out", str(tmp_path / "b"), "-q", "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["unique_plans"] == 12  # all of them the first one's: nothing is measured again
    assert second["best"]["plan"] == first["best"]["plan"]
    assert main([*shared, "--out", str(tmp_path / "b"), "-q", "--json", "--seed", "0", "--max-stages", "2"]) == 0
    capsys.readouterr()
    for other in (["--objective", "memory"], ["--seed", "1"], ["--sampler", "tpe"]):  # which would not be heeded
        assert main([*shared, "--out", str(tmp_path / "d"), *other]) == 2
        assert f"{other[0]} is " in capsys.readouterr().err
    begin[begin.index("--max-stages") + 1] = "3"
    assert main([*begin, *shared, "--out", str(tmp_path / "c")]) == 2
    assert "--max-stages is 2 there and 3 here" in capsys.readouterr().err


@pytest.mark.parametrize("hostile", ["out", "device", "warm_start"])
def test_a_storage_does_not_choose_where_a_worker_writes_or_measures(tmp_path: Path, hostile: str) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    words = ["--model", MODEL, "--budget", "2", "--evaluator", "synthetic", "--max-stages", "2", "-q"]
    assert main([*words, "--study", "s", "--storage", url, "--out", str(tmp_path / "a")]) == 0
    storage = open_storage(url)
    try:
        number = storage.get_study_id_from_name("s")
        settings = storage.get_study_user_attrs(number)[SETTINGS]
        settings["config"][hostile] = str(tmp_path / "victim")
        storage.set_study_user_attr(number, SETTINGS, settings)
    finally:
        close_storage(storage)
    found = settings_joined({"study": "s", "storage": url})
    assert getattr(found, hostile) is None
    assert not (tmp_path / "victim").exists()


def test_urls_are_checked(tmp_path: Path) -> None:
    for wrong in ("mysql://h/d", "postgresql:///d", "sqlite://", "sqlite:///", "study.db", "grpc://"):
        with pytest.raises(UsageError, match="--storage"):
            check_url(wrong)
    with pytest.raises(UsageError, match="PGPASSWORD"):
        check_url("postgresql://me:secret@h/d")
    with pytest.raises(UsageError, match="PGPASSWORD"):
        check_url("postgresql://me@h/d?password=secret")
    with pytest.raises(UsageError, match="give --study"):
        placed(parse_config({"model": "m", "budget": 1, "storage": "sqlite:///x.db"}))
    with pytest.raises(UnavailableError, match="does not answer"):
        open_storage("postgresql://nobody@127.0.0.1:9/d", 1, patience_s=0.2)


def test_a_file_that_sqlite_cannot_use_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, but words. " * 99)
    for wrong in ("missing/x.db", "text", "."):
        with pytest.raises(UnavailableError, match=r"cannot be used: (unable to open|file is not)"):
            open_storage(f"sqlite:///{tmp_path / wrong}")


def test_through_a_server_workers_share_and_the_dead_are_found(url: str, tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="grpc:// needs the extra 'grpc'")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "optimizer.cli", "storage", url, "--listen", f"127.0.0.1:{port}"]
    command += ["--heartbeat", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stderr is not None
            assert b"grpc://127.0.0.1" in process.stderr.readline()
            through = f"grpc://127.0.0.1:{port}"
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
    """The large one is ``python -m tests.shared_chaos 8 2000``."""

    def outage() -> None:
        server.kill()
        time.sleep(1.0)
        server.start()

    seen = shared_chaos.run(server.url, tmp_path, 3, 60, kills=2, outages=1, outage=outage)
    assert (seen.finished, seen.twice, seen.unfinished) == (60, 0, 0)
    assert seen.optimum
    assert (seen.killed, seen.outages) == (2, 1)
