"""A sample of :mod:`tests.faults.fuzz_files`, and pipes, devices and links in the place of each file."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.faults.fuzz_files import PLACES, cases, in_place, made_hostile, prepared, tried

FILES = ("predicted/manifest.json", "predicted/result.json", "predicted/trials.jsonl", "predicted/config.yaml",
         "platform.yaml", "profile.json", "workload.yaml", "table.yaml", "model.tflite", "policy.npz", "c.yaml",
         "campaign/campaign.json")  # fmt: skip


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean")
    prepared(folder)
    return folder


@pytest.mark.litert
@pytest.mark.parametrize("seed", range(24))
def test_hostile_files_end_with_a_documented_exit_code(seed: int, clean: Path, tmp_path: Path) -> None:
    chance = random.Random(seed)
    folder = tmp_path / "now"
    shutil.copytree(clean, folder)
    file, words = chance.choice(cases(folder, tmp_path / "out"))
    how = made_hostile(folder / file, chance)
    found = tried(words)
    assert not found.problem, f"{file} {how}: {words}: {found.err}"


@pytest.mark.litert
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_file_ends_in_one_line(file: str, clean: Path, tmp_path: Path) -> None:
    for kind in PLACES:
        folder = tmp_path / kind
        shutil.copytree(clean, folder)
        words = next(words for name, words in cases(folder, tmp_path / "out") if name == file)
        in_place(folder / file, kind)
        found = tried(words, 30.0)
        assert not found.problem, f"{kind}: {words}: {found.err}"
        if found.code:
            assert len(found.err.splitlines()) == 1, found.err
        shutil.rmtree(folder)
