"""Studies of a campaign side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluators.remote.devices import ENVIRONMENT
from optimizer.cli import main
from tests.support.sentences import says


def test_no_more_studies_at_once_than_boards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "devices.yaml").write_text("devices:\n  pi4: {agent: 127.0.0.1:1}\n  pi5: {agent: 127.0.0.1:2}\n")
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "devices.yaml"))
    path = tmp_path / "campaign.yaml"
    matrix = "{model: squeezenet1_1, evaluator: remote, seed: [0, 1, 2]}"
    path.write_text(f'schema_version: 1\nname: boards\nmatrix: {matrix}\nsettings: {{device: "pi4,pi5"}}\n')
    assert main(["run", str(path), "--out", str(tmp_path / "out"), "-q", "--jobs", "3"]) == 2
    says(capsys.readouterr().err)
