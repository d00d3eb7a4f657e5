"""Weights that several stage files hold are on disk once, and what is read back are the files that were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluators.litert import deployment, parts
from evaluators.litert.deployment import read_deployment, write_deployment
from evaluators.litert.parts import share_weights
from optimizer.files import write_json
from search_spaces.core.errors import PlanError
from search_spaces.core.plan import Plan, Share, Stage
from search_spaces.core.platform import Platform, Processor
from search_spaces.models import load
from search_spaces.rewrites.lower import Lowering
from tests.support.narrowing import there
from tests.support.sentences import fails

PLATFORM = Platform(
    "two",
    tuple(Processor(f"cpu{i}", "cpu", {f"cpu{i}": 1.0}, f"cpu{i}", {"cores": (i,), "threads": 1}) for i in range(2)),
)


ROWS = (Share("height", 0, 3), Share("height", 3, 7))
CHANNELS = (Share("channels", 0, 16), Share("channels", 16, 32))


def written(folder: Path, sides: tuple[Share, ...] = ROWS) -> dict[str, Any]:
    """Write a network whose first twelve operators are split by rows, or its first one by channels; return its plan."""
    graph = load("squeezenet1_1@0.5/64")
    split = 1 if sides is CHANNELS else 12 if sides else 0
    stages = [Stage(tuple(range(split)), f"cpu{i}", share) for i, share in enumerate(sides)]
    plan = Plan(graph.digest, (*stages, Stage(tuple(range(split, len(graph.operators))), "cpu1")))
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


@pytest.mark.parametrize("cuts", [(CHANNELS, ()), ((), CHANNELS), (CHANNELS, ROWS)], ids=str)
def test_a_filter_split_by_channels_is_rows_of_the_whole_one(
    cuts: tuple[tuple[Share, ...], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "LEAST_NBYTES", 1 << 10)
    monkeypatch.setattr(deployment, "share_weights", lambda _: None)  # all are shared at once, as of several models
    plans = {tmp_path / f"model_{i}": written(tmp_path / f"model_{i}", sides) for i, sides in enumerate(cuts)}
    share_weights(plans)
    runs = {}
    for place, document in plans.items():
        write_json(place / "plan.json", document)
        runs[place] = [stage.source.path.read_bytes() for stage in read_deployment(place).stages]
    filters = load("squeezenet1_1@0.5/64")
    whole = there(filters.source).buffer_bytes(filters.tensors[filters.operators[0].inputs[1]].buffer)
    held = [path.read_bytes() for place in plans for path in place.glob("stage_*")]
    rows = [whole[first : first + 4 * 108] for first in range(0, len(whole), 4 * 108)]
    assert [sum(row in content for content in held) for row in rows] == [1] * len(rows)
    assert sum(row in content for row in rows for each in runs.values() for content in each) >= 2 * len(rows)


def test_what_is_joined_again_stays_as_it_is_for_who_has_it(shared: Path) -> None:
    first = read_deployment(shared).stages[1].source.path
    with first.open("rb") as file:
        read_deployment(shared)
        assert file.read() == first.read_bytes()


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
