"""Weights that several stage files hold are on disk once, and what is read back are the files that were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluators.litert import parts
from evaluators.litert.deployment import read_deployment, write_deployment
from evaluators.litert.parts import share_weights
from optimizer.files import write_json
from search_spaces.core.errors import PlanError
from search_spaces.core.plan import Plan, Share, Stage
from search_spaces.core.platform import Platform, Processor
from search_spaces.models import load
from search_spaces.rewrites.lower import Lowering
from tests.support.sentences import fails

PLATFORM = Platform(
    "two",
    tuple(Processor(f"cpu{i}", "cpu", {f"cpu{i}": 1.0}, f"cpu{i}", {"cores": (i,), "threads": 1}) for i in range(2)),
)


def written(folder: Path) -> dict[str, Any]:
    """Write a network whose first twelve operators are split by rows; return its plan."""
    graph = load("squeezenet1_1@0.5/64")
    sides = (Share("height", 0, 3), Share("height", 3, 7))
    stages = [Stage(tuple(range(12)), f"cpu{i}", share) for i, share in enumerate(sides)]
    plan = Plan(graph.digest, (*stages, Stage(tuple(range(12, len(graph.operators))), "cpu1")))
    lowered = Lowering(graph).lower(plan)
    folder.mkdir()
    write_deployment(folder, lowered.graph, lowered.plan, PLATFORM, "0" * 64)
    found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts") / "plan"
    document = written(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "LEAST_NBYTES", 1 << 10)
        share_weights({folder: document})
    write_json(folder / "plan.json", document)
    return folder


def test_filters_of_operators_split_by_rows_are_there_once(shared: Path, tmp_path: Path) -> None:
    written(tmp_path / "whole")
    before, after = read_deployment(tmp_path / "whole"), read_deployment(shared)
    assert [s.source.path.read_bytes() for s in after.stages] == [s.source.path.read_bytes() for s in before.stages]
    names = {path.name for path in shared.iterdir()}
    assert {"stage_0.tflite", "stage_1.part"} <= names
    assert "stage_1.tflite" not in names
    held = sum((shared / name).stat().st_size for name in names if name.startswith("stage_"))
    every = sum(s.source.path.stat().st_size for s in before.stages)
    weights = sum(after.stages[1].source.extents[b].nbytes for b in after.stages[1].buffers)
    assert every - held > 0.9 * weights > 0


def test_models_of_one_plan_share_what_they_have_in_common(tmp_path: Path) -> None:
    places = [tmp_path / f"model_{i}" for i in range(2)]
    plans = {place: written(place) for place in places}
    share_weights(plans)
    for place, document in plans.items():
        write_json(place / "plan.json", document)
        read_deployment(place)
    named = [part[0] for entry in plans[places[1]]["files"] for part in entry.get("parts", ())]
    assert "../model_0/stage_2.tflite" in named


def test_what_others_are_joined_from_stays(tmp_path: Path) -> None:
    places = [tmp_path / f"model_{i}" for i in range(2)]
    plans = {place: written(place) for place in places}
    share_weights(plans)
    share_weights({place: plans[place] for place in reversed(places)})  # as an export that lists the last first
    for place, document in plans.items():
        write_json(place / "plan.json", document)
        read_deployment(place)


@pytest.mark.parametrize(
    "wrong",
    [
        [["stage_0.tflite", 0]],
        [["stage_0.tflite", 0, "1e999"]],  # which stands there as a number
        [["stage_0.tflite", 0, "many"]],
        [["stage_0.tflite", -1, 8]],
        [["stage_0.tflite", 0, 1 << 60]],
        [["stage_0.tflite", 0, 8]] * 2,
        [["../../stage_0.tflite", 0, 8]],
        [["/etc/hostname", 0, 1]],
        [["stage_99.part", 0, 8]],
        [["stage_0.tflite", 0, 1 << 16]] * 99,
        [],
        7,
        {"stage_0.tflite": 0},
    ],
    ids=str,
)
def test_damaged_parts_are_one_line(wrong: Any, shared: Path) -> None:
    document = json.loads((shared / "plan.json").read_text())
    kept = (shared / "plan.json").read_bytes()
    document["files"][1]["parts"] = wrong
    try:
        (shared / "plan.json").write_text(json.dumps(document).replace('"1e999"', "1e999"))
        with fails(PlanError):
            read_deployment(shared)
    finally:
        (shared / "plan.json").write_bytes(kept)
