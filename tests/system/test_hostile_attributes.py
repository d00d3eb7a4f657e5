"""Studies of every sampler whose logs and storages hold what runs code when it is unpickled."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from optimizer.cli import main
from optimizer.samplers import SAMPLERS
from optimizer.shared.storage import close_storage, open_storage
from optimizer.shared.study import SETTINGS
from optimizer.study.history import plain_attributes
from optimizer.study.log import encode, header
from search_spaces.core import allowed_code
from tests.faults.hostile_attributes import hostile
from tests.laws.test_hostile_attributes import BEGIN
from tests.support.sentences import says
from tests.support.short_studies import records

THEIRS = ["optuna.samplers:CmaEsSampler", "optuna.samplers:NSGAIIISampler"]


@pytest.fixture(autouse=True)
def _nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowed_code, "_allowed", set())


def needed(sampler: str) -> None:
    package = "cmaes" if "Cma" in sampler else SAMPLERS[sampler].requires if sampler in SAMPLERS else ""
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")


@pytest.mark.parametrize("sampler", [*sorted(SAMPLERS), *THEIRS])
def test_a_hostile_log_runs_nothing(sampler: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    needed(sampler)
    run, mark = tmp_path / "run", tmp_path / "ran"
    words = [*BEGIN, "--sampler", sampler, "--out", str(run)]
    assert main([*words, "--budget", "8"]) == 0
    log = run / "trials.jsonl"
    lines = [header()]
    for record in records(run):
        data = dict(record.data)
        if "attributes" in data:
            data["attributes"] = data["attributes"] | hostile(mark)
        lines.append(encode(record.n, record.kind, data))
    log.write_bytes(b"".join(lines))
    capfd.readouterr()
    assert main([*words, "--budget", "20"]) == 0
    assert not mark.exists()
    (reported,) = [line for line in capfd.readouterr().err.splitlines() if "is ignored" in line]
    says(reported)
    later = [r.data["attributes"] for r in records(run)[len(lines) - 1 :] if r.kind == "trial"]
    assert later
    assert all(attributes == plain_attributes(attributes) for attributes in later)


@pytest.mark.parametrize("sampler", ["auto", "cmaes", "reinforce", *THEIRS])
def test_a_hostile_storage_runs_nothing(sampler: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    needed(sampler)
    mark, url = tmp_path / "ran", f"sqlite:///{tmp_path / 'shared.db'}"
    shared = ["--study", "s", "--storage", url, "-q"]
    assert main([*BEGIN, *shared, "--sampler", sampler, "--budget", "8", "--out", str(tmp_path / "a")]) == 0
    storage = open_storage(url)
    study = storage.get_study_id_from_name("s")
    settings = storage.get_study_user_attrs(study)[SETTINGS]
    storage.set_study_user_attr(study, SETTINGS, settings | {"config": settings["config"] | {"budget": 14}})
    close_storage(storage)
    poison(tmp_path / "shared.db", mark)
    capfd.readouterr()
    own = ["--sampler", sampler] if sampler in THEIRS else []
    assert main([*shared, *own, "--out", str(tmp_path / "b"), "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["unique_plans"] == 14
    assert not mark.exists()
    (reported,) = [line for line in err.splitlines() if "is ignored" in line]
    says(reported)


def poison(database: Path, mark: Path) -> None:
    """Do to a storage what whoever reaches it can: attributes of samplers in every trial and in its record."""
    import sqlite3

    with sqlite3.connect(database) as base:
        keys = {key for (key,) in base.execute("select key from trial_system_attributes")}
        assert all(key.startswith("constraints:") for key in keys)  # samplers keep their state out of it
        for number, text in base.execute("select trial_id, value_json from trial_user_attributes where key='record'"):
            record = json.loads(json.loads(text))
            record["attributes"] = (record.get("attributes") or {}) | hostile(mark)
            changed = json.dumps(json.dumps(record))
            base.execute(
                "update trial_user_attributes set value_json=? where trial_id=? and key='record'", (changed, number)
            )
            base.executemany(
                "insert or replace into trial_system_attributes (trial_id, key, value_json) values (?, ?, ?)",
                [(number, key, json.dumps(value)) for key, value in hostile(mark).items()],
            )
    base.close()
