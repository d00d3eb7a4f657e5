from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from evaluators.cost_model.fit import errors_of
from search_spaces.core.errors import UsageError
from tests.benchmarks.fit_phones import cpu_wholes, fit_gpu, platform_of, predict_cpu, predict_gpu
from tests.benchmarks.fitting import cross_validated, fit_whole_models
from tests.benchmarks.phone_tables import (
    END_TO_END,
    GPU_OPERATORS,
    PHONES,
    PhoneModel,
    family_of,
    read_phones,
)
from tests.support.sentences import fails

REFERENCE = Path(os.environ.get("PARTITION_OPTIMIZER_REFERENCE", Path(__file__).parents[4] / "shared" / "reference"))
needs_reference = pytest.mark.skipif(
    not (REFERENCE / END_TO_END).is_file(),
    reason=f"the phones' measurements are not at {REFERENCE} (PARTITION_OPTIMIZER_REFERENCE)",
)


@pytest.fixture(scope="module")
def models() -> tuple[PhoneModel, ...]:
    return read_phones(REFERENCE)


@needs_reference
def test_all_rows_are_read(models: tuple[PhoneModel, ...]) -> None:
    assert len(models) == 68
    assert sum(len(m.merged) for m in models) == 3588
    for model in models:
        assert {phone for phone, _, _ in model.end_to_end_s} == set(PHONES)
        assert all(1e-4 < seconds < 60.0 for seconds in model.end_to_end_s.values())
        assert all(len(model.merged_s[phone]) == len(model.merged) for phone in PHONES)
    kernels = Counter(f.kernel for m in models for f in m.merged)
    assert kernels["winograd"] == 114  # as many as the kernels' names in the table say
    assert kernels["fully_connected"] == 364


@needs_reference
def test_the_cpu_runs_what_the_gpu_merges(models: tuple[PhoneModel, ...]) -> None:
    densenet = next(m for m in models if m.name == "densenet169")
    kinds = Counter(f.kind for f in densenet.single)
    assert kinds["PAD"] == 83  # before each 3 by 3 convolution, and the input's
    assert len(densenet.single) > len(densenet.merged)
    resnet = next(m for m in models if m.name == "resnet10")
    assert Counter(f.kind for f in resnet.single)["ADD"] == 4


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("mobilenetv3_small_w7d20", "mobilenetv3"),
        ("mobilenetv2b_wd4", "mobilenetv2"),
        ("mobilenetb_w1", "mobilenet"),
        ("preresnetbc26b", "preresnet"),
        ("resnext26_32x4d", "resnext"),
        ("efficientnet_edge_large_b", "efficientnet"),
    ],
)
def test_families(model: str, family: str) -> None:
    assert family_of(model) == family


@needs_reference
def test_a_core_is_predicted_for_families_that_it_has_not_seen(models: tuple[PhoneModel, ...]) -> None:
    wholes = [w for w in cpu_wholes("pixel4", "1large", models) if w.features[0].dtype == "float32"]
    predicted = cross_validated(wholes, [w.family for w in wholes], fit_whole_models, predict_cpu)
    found = errors_of(predicted, [w.whole_s for w in wholes])
    assert found["within_10"] >= 0.95
    assert found["median"] <= 0.03


@needs_reference
def test_a_gpu_is_predicted_for_models_that_it_has_not_seen(models: tuple[PhoneModel, ...]) -> None:
    kept = [m for i, m in enumerate(models) if i % 4]
    out = [m for i, m in enumerate(models) if not i % 4]
    processor = fit_gpu("iphone7", kept)
    ratio = np.array([predict_gpu("iphone7", processor, m) / m.end_to_end_s["iphone7", "gpu", "float"] for m in out])
    assert np.median(np.abs(ratio - 1)) < 0.05
    assert np.mean(np.abs(ratio - 1) < 0.1) >= 0.8


def test_sets_of_cores_that_share_one_exclude_each_other() -> None:
    platform = platform_of("phone", ["1large", "1large2med", "2small"])
    assert platform["1large"].excludes(platform["1large2med"])
    assert not platform["1large"].excludes(platform["2small"])
    assert not platform["gpu"].excludes(platform["1large"])
    assert platform["1large2med"].options == {"threads": 3}


def tables(folder: Path, feature: str, model: str = "net") -> Path:
    (folder / GPU_OPERATORS).write_text(
        f'model,operation,feature,pixel4|gpu|float,pixel4|gpu|kernel\nnet,CONV_2D,"{feature}",12.5,convolution_2d_0\n'
    )
    (folder / END_TO_END).write_text(f"model,FLOPS,pixel4|gpu|float|mean\n{model},1,2000\n")
    return folder


GOOD = (
    "{'Input_shape': '8', 'Input_channel': 3, 'Output_shape': '4', 'Stride': '2', 'Kernel': '3', "
    "'Filter': '16', 'Group': '1', 'FLOPS': '1'}"
)


def test_a_small_table(tmp_path: Path) -> None:
    (model,) = read_phones(tables(tmp_path, GOOD))
    assert model.merged[0].macs == 4 * 4 * 16 * 3 * 9
    assert list(model.merged_s["pixel4"]) == pytest.approx([12.5e-6])
    assert np.isnan(model.merged_s["s10"][0])
    assert dict(model.end_to_end_s) == pytest.approx({("pixel4", "gpu", "float"): 2e-3})


@pytest.mark.parametrize(
    "feature",
    ["", "{", "[1]", "{'Input_shape': 'x'}", "__import__('os')", GOOD.replace("'8'", "'-8'"), "(" * 500, "1e999"],
)
def test_a_damaged_row_is_reported_with_its_line(tmp_path: Path, feature: str) -> None:
    with fails(UsageError):
        read_phones(tables(tmp_path, feature))


def test_a_model_without_operators(tmp_path: Path) -> None:
    with fails(UsageError):
        read_phones(tables(tmp_path, GOOD, "other"))


def test_tables_that_are_not_there(tmp_path: Path) -> None:
    with fails(UsageError):
        read_phones(tmp_path)
