"""The doctor tells what was found, and what to do about each problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluators.machine import MachineState, machine_state
from optimizer.cli import main
from optimizer.tools import doctor
from optimizer.tools.doctor import Diagnosis, Finding, diagnose, render
from tests.support.sentences import says

pytestmark = pytest.mark.litert


def test_what_the_kernel_tells_is_possible() -> None:
    state = machine_state([0], watch_s=0.2)
    for share in (state.busy, state.steal):
        assert share is None or 0 <= share <= 1
    assert state.memory_free_nbytes is None or state.memory_free_nbytes > 0
    assert all(1e8 < hz < 1e10 for hz in state.clocks_hz)


def test_every_problem_comes_with_advice() -> None:
    slow = MachineState(("powersave",), (1e9,), 3e9, 95.0, 0.5, 0.1, 1 << 20)
    findings = list(doctor._state(slow))
    assert [f.name for f in findings if f.problem] == ["governor", "temperature", "other load", "steal"]
    assert all(f.advice for f in findings if f.problem)
    well = MachineState(("performance",), (3e9,), 3e9, 45.0, 0.0, 0.0, 1 << 40)
    assert not any(f.problem or f.advice for f in doctor._state(well))
    silent = MachineState((), (), None, None, None, None, None)
    assert not any(f.problem for f in doctor._state(silent))


def test_the_text_holds_every_finding(cache_folder: Path) -> None:
    found = diagnose()
    text = " ".join(render(found).split())  # long lines are wrapped
    for finding in found.findings:
        assert finding.name in text
        assert finding.advice in text
    assert found.platform is not None
    assert all(p.name in text for p in found.platform.processors)


def test_a_machine_that_cannot_measure_ends_with_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Diagnosis(
        (Finding("LiteRT", "missing", "not installed", "pip install ai-edge-litert", blocks=True),), None
    )
    monkeypatch.setattr(doctor, "diagnose", lambda _: broken)
    assert main(["doctor"]) == 4
    says(capsys.readouterr().out)


def test_a_model_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "vgg1600"]) == 2
    assert capsys.readouterr().out == ""
