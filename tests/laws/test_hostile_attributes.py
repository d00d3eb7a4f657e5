"""No sampler reads a pickle from a log or a storage; names of code in them load nothing."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from optimizer.cli import main
from optimizer.shared.storage import close_storage, open_storage
from optimizer.shared.study import SETTINGS
from optimizer.study.history import plain_attributes
from search_spaces.core import allowed_code
from tests.faults.hostile_attributes import Bomb, hostile
from tests.support.commands import SEARCHED
from tests.support.sentences import says

MODEL = "squeezenet1_1@0.25/64"
BEGIN = ["--model", MODEL, "--evaluator", "synthetic", "--max-stages", "2", "-q"]


@pytest.fixture(autouse=True)
def _nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowed_code, "_allowed", set())


def test_the_pickle_is_live(tmp_path: Path) -> None:
    pickle.loads(bytes.fromhex(hostile(tmp_path / "ran")["cma:optimizer:0"])).close()
    assert (tmp_path / "ran").exists()
    assert plain_attributes(hostile(tmp_path / "ran") | {"constraints:stages": 2}) == {"constraints:stages": 2.0}
    assert isinstance(Bomb(tmp_path).mark, Path)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of a shared study of three trials; tests spoil copies of it."""
    folder = tmp_path_factory.mktemp("begun")
    url = f"sqlite:///{folder / 'shared.db'}"
    words = ["--study", "s", "--storage", url, "-q", "--budget", "3", "--out", str(folder / "a")]
    assert main([*BEGIN, *words]) in SEARCHED
    return folder / "shared.db"


@pytest.fixture
def url(begun: Path, tmp_path: Path) -> str:
    """A copy of it."""
    return f"sqlite:///{shutil.copy(begun, tmp_path / 'shared.db')}"


@pytest.mark.parametrize("name", ["evil_module:Sampler", "os:system", "optuna.samplers:CmaEsSampler"])
def test_a_sampler_that_is_code_comes_from_the_command_line_alone(
    name: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "evil_module.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    shared = ["--study", "s", "--storage", url, "-q"]
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
        says(line)
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
    settings: object, url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shared = ["--study", "s", "--storage", url, "-q"]
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
    record: str, url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shared = ["--study", "s", "--storage", url, "-q"]
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
