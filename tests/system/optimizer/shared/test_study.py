"""A study that several workers share: one claim a plan, nothing lost with the dead, nothing there twice."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage

from optimizer.cli import main
from optimizer.shared.storage import check_url, close_storage, open_storage
from optimizer.shared.study import SETTINGS, Claim, SharedStudy, placed
from optimizer.shared.study import joined as settings_joined
from optimizer.study.config import parse_config
from search_spaces.core.errors import UnavailableError, UsageError
from tests.faults.shared_chaos import MODEL
from tests.support.sentences import fails, says
from tests.support.shared_workers import closed_at_the_end, joined, record


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shared.db'}"


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    with closed_at_the_end():
        yield


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
    assert workers[0].look() == []  # each is returned once


def test_the_budget_is_kept_to_the_trial(url: str) -> None:
    first, second = joined(url, "a"), joined(url, "b")
    claims = [
        study.claim(f"plan {n}", "trial", {}, {}, room=3) for n, study in enumerate((first, second, first, second))
    ]
    assert [claim is not None for claim in claims] == [True, True, True, False]
    assert first.claim("a baseline", "baseline", {}, {}) is not None  # costs none


def test_a_server_that_goes_away_at_any_question_costs_nothing() -> None:
    """Every call to the storage fails now and then, as often with the question carried out as before it."""
    rng, kept = random.Random(0), InMemoryStorage()
    away = Counter[str]()

    def forwarding(name: str) -> Callable[..., Any]:
        def call(_: BaseStorage, *args: Any, **options: Any) -> Any:
            drawn = rng.random()
            if drawn < 0.3 and name != "remove_session":
                away[name] += 1
                if drawn < 0.15:
                    getattr(kept, name)(*args, **options)
                raise StorageInternalError("the server was killed")
            return getattr(kept, name)(*args, **options)

        return call

    names = [name for name in BaseStorage.__dict__ if not name.startswith("_")]
    flaky: BaseStorage = type("Flaky", (BaseStorage,), {name: forwarding(name) for name in names})()
    for worker in range(8):
        study = SharedStudy(flaky, "s", f"worker {worker}", 60)
        study.fact("profile", lambda: {"a": 1})
        claim = study.claim(f"plan {worker}", "trial", {}, {})
        assert claim is not None
        given_up = study.claim(f"other {worker}", "trial", {}, {})
        assert given_up is not None
        study.give_up(given_up)
        study.finish(claim, record(claim.digest))
        assert [data["digest"] for _, data in study.look()] == [f"plan {n}" for n in range(worker + 1)]
        study.close()
    asked = {"create_new_study", "get_study_id_from_name", "get_study_directions", "create_new_trial", "get_all_trials"}
    assert asked <= set(away)


def test_facts_are_everybodys(url: str) -> None:
    first, second = joined(url, "a"), joined(url, "b")
    assert first.fact("profile", lambda: {"a": 1}) == {"a": 1}
    assert second.fact("profile", lambda: {"a": 2}) == {"a": 1}


def test_a_worker_joins_by_name(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["--study", "s", "--storage", url]
    begin = ["--model", MODEL, "--budget", "12", "--evaluator", "synthetic", "--max-stages", "2", "-q", "--json"]
    assert main([*shared, "--out", str(tmp_path / "none"), "-q"]) == 2
    says(capsys.readouterr().err)
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
        says(capsys.readouterr().err)
    begin[begin.index("--max-stages") + 1] = "3"
    assert main([*begin, *shared, "--out", str(tmp_path / "c")]) == 2
    says(capsys.readouterr().err)


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
        with fails(UsageError):
            check_url(wrong)
    with fails(UsageError):
        check_url("postgresql://me:secret@h/d")
    with fails(UsageError):
        check_url("postgresql://me@h/d?password=secret")
    with fails(UsageError):
        placed(parse_config({"model": "m", "budget": 1, "storage": "sqlite:///x.db"}))
    with fails(UnavailableError):
        open_storage("postgresql://nobody@127.0.0.1:9/d", 1, patience_s=0.2)


def test_a_file_that_sqlite_cannot_use_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, but words. " * 99)
    for wrong in ("missing/x.db", "text", "."):
        with fails(UnavailableError):
            open_storage(f"sqlite:///{tmp_path / wrong}")
