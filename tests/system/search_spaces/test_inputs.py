"""Studies of models with state, control flow and sizes at run time."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluators.litert import PlanRunner
from optimizer.cli import main
from search_spaces.models import load
from search_spaces.models.inputs import drawn_inputs
from tests.benchmarks.operators import interpreted
from tests.search_spaces.models.test_inputs import same
from tests.support.models.operator_corpus import corpus


@pytest.mark.litert
def test_state_control_flow_and_sizes_at_run_time_survive_the_study_and_its_files(tmp_path: Path) -> None:
    wanted = ("LSTM float32", "WHILE", "TOPK_V2 k at run time float32", "WHERE float32", "SHAPE float32")
    cases = {case.name: case for case in corpus(("float32",)) if case.name in wanted}
    assert len(cases) == len(wanted)
    for name, case in cases.items():
        path = case.net().write(tmp_path / "m.tflite")
        out = tmp_path / name.replace(" ", "_")
        command = ["--model", str(path), "--processors", "cpu0", "--budget", "3", "-q", "--out", str(out)]
        assert main(command) == 0, name
        with PlanRunner(out / "best") as runner:
            found = list(runner.run_seeded().values())
        expected = interpreted(path, drawn_inputs(load(str(path)), 0))
        assert not isinstance(expected, str)
        assert same(found, expected), name
