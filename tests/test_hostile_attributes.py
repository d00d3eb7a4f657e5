"""No sampler reads a pickle from a log or a storage; names of code in them load nothing."""

from __future__ import annotations

import importlib.util
import json
import pickle
from pathlib import Path

import pytest

from optimizer.cli import main
from optimizer.history import plain_attributes
from optimizer.records import encode, header
from optimizer.samplers import SAMPLERS
from optimizer.shared import SETTINGS
from optimizer.shared_storage import close_storage, open_storage
from search_spaces import allowed_code
from tests.commands import SEARCHED
from tests.hostile_attributes import Bomb, hostile
from tests.short_studies import records

MODEL = "squeezenet1_1@0.25/64"
BEGIN = ["--model", MODEL, "--evaluator", "synthetic", "--max-stages", "2", "-q"]
THEIRS = ["optuna.samplers:CmaEsSampler", "optuna.samplers:NSGAIIISampler"]


@pytest.fixture(autouse=True)
def _nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowed_code, "_allowed", set())


def needed(sampler: str) -> None:
    package = "cmaes" if "Cma" in sampler else SAMPLERS[sampler].requires if sampler in SAMPLERS else ""
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")


def test_the_pickle_is_live(tmp_path: Path) -> None:
    pickle.loads(bytes.fromhex(hostile(tmp_path / "ran")["cma:optimizer:0"])).close()
    assert (tmp_path / "ran").exists()
    assert plain_attributes(hostile(tmp_path / "ran") | {"constraints:stages": 2}) == {"constraints:stages": 2.0}
    assert isinstance(Bomb(tmp_path).mark, Path)


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
    told = [line for line in capfd.readouterr().err.splitlines() if "which is not read" in line]
    assert len(told) == 1
    later = [r.data["attributes"] for r in records(run)[len(lines) - 1 :] if r.kind == "trial"]
    assert later
    assert all(attributes == plain_attributes(attributes) for attributes in later)


@pytest.mark.parametrize("sampler", [*sorted(SAMPLERS), *THEIRS])
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
    assert sum("which is not read" in line for line in err.splitlines()) == 1


def poison(database: Path, mark: Path) -> None:
    """Do to a storage what whoever reaches it can: attributes of samplers in every trial and in its record."""
    import sqlite3

    with sqlite3.connect(database) as base:
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


@pytest.mark.parametrize("name", ["evil_module:Sampler", "os:system", "optuna.samplers:CmaEsSampler"])
def test_a_sampler_that_is_code_comes_from_the_command_line_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "evil_module.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    shared = ["--study", "s", "--storage", url, "-q"]
    assert main([*BEGIN, *shared, "--budget", "3", "--out", str(tmp_path / "a")]) == 0
    storage = open_storage(url)
    study = storage.get_study_id_from_name("s")
    settings = storage.get_study_user_attrs(study)[SETTINGS]
    storage.set_study_user_attr(study, SETTINGS, settings | {"config": settings["config"] | {"sampler": name}})
    close_storage(storage)
    campaign = tmp_path / "c.yaml"
    campaign.write_text(f"name: c\nmatrix: {{model: {MODEL}, evaluator: synthetic, budget: 3, sampler: '{name}'}}\n")
    for words in (
        [*shared, "--out", str(tmp_path / "b")],
        ["run", str(campaign), "--out", str(tmp_path / "c"), "-q"],
        ["run", str(campaign), "--dry-run"],
    ):
        capfd.readouterr()
        assert main(words) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert f"sampler {name!r} is code, which a file or a shared study may not load" in line
        assert not mark.exists()


def test_a_campaign_that_is_trusted_says_so_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    campaign = tmp_path / "c.yaml"
    matrix = f"{{model: {MODEL}, evaluator: synthetic, budget: 3, sampler: [tpe, 'optuna.samplers:RandomSampler']}}"
    campaign.write_text(f"name: c\nmatrix: {matrix}\n")
    assert main(["run", str(campaign), "--out", str(tmp_path / "c"), "-q", "--allow-code"]) == 0, capfd.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [None, 7, [], {}, {"config": {}, "agreed": []}, {"config": {"evaluator": 3}, "agreed": {}},
     {"config": {"model": "x", "what": 1}, "agreed": {}}],
)  # fmt: skip
def test_settings_of_a_storage_that_are_none_are_one_line(
    settings: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    shared = ["--study", "s", "--storage", url, "-q"]
    assert main([*BEGIN, *shared, "--budget", "3", "--out", str(tmp_path / "a")]) == 0
    storage = open_storage(url)
    storage.set_study_user_attr(storage.get_study_id_from_name("s"), SETTINGS, settings)
    close_storage(storage)
    capfd.readouterr()
    assert main([*shared, "--out", str(tmp_path / "b")]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "record",
    ["", "[", "[]", "null", '{"values": [1]}', '{"values": ["x"]}', '{"values": [1e999]}', "[" * 100_000,
     '{"values": [1, 2]}', '{"values": null, "number": 1, "plan": {}}'],
)  # fmt: skip
def test_records_of_a_storage_that_are_none_are_one_line(
    record: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    shared = ["--study", "s", "--storage", url, "-q"]
    assert main([*BEGIN, *shared, "--budget", "3", "--out", str(tmp_path / "a")]) in SEARCHED
    from optuna.trial import TrialState, create_trial

    storage = open_storage(url)
    attributes = {"kind": "trial", "record": record}
    storage.create_new_trial(
        storage.get_study_id_from_name("s"), create_trial(state=TrialState.FAIL, user_attrs=attributes)
    )
    close_storage(storage)
    capfd.readouterr()
    assert main([*shared, "--out", str(tmp_path / "b")]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1
