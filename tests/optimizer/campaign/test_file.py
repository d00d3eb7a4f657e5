"""Campaign files: the studies of a matrix, and one clear line for each error in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.campaign.file import json_schema, read_campaign
from optimizer.campaign.studies import plan_studies
from optimizer.cli import main
from search_spaces.core.errors import UsageError
from tests.support.campaign_files import written
from tests.support.sentences import fails, says

ROOT = Path(__file__).parents[3]


@given(
    models=st.lists(st.sampled_from(["vgg16", "resnet18", "alexnet", "mobilenet_v1@0.5"]), min_size=1, unique=True),
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True),
    budgets=st.lists(st.integers(1, 500), min_size=1, max_size=3, unique=True),
    repetitions=st.integers(1, 3),
)
def test_a_matrix_is_every_combination_once(
    tmp_path_factory: pytest.TempPathFactory, models: list[str], seeds: list[int], budgets: list[int], repetitions: int
) -> None:
    matrix = {"model": models, "seed": seeds, "budget": budgets, "evaluator": "synthetic"}
    document = {"name": "x", "matrix": matrix, "repetitions": repetitions}
    path = written(tmp_path_factory.getbasetemp(), json.dumps(document))
    found = plan_studies(read_campaign(path))
    assert len(found) == len(models) * len(seeds) * len(budgets) * repetitions
    assert (
        len({p.digest for p in found}) == len({p.folder for p in found}) == len({p.name for p in found}) == len(found)
    )
    again = plan_studies(read_campaign(path))
    assert [p.digest for p in again] == [p.digest for p in found]


def test_include_and_exclude(tmp_path: Path) -> None:
    text = """
name: x
matrix: {model: [vgg16, alexnet], sampler: [random, tpe], evaluator: synthetic}
exclude: [{model: vgg16, sampler: tpe}]
include: [{model: resnet18, budget: 7}]
"""
    found = plan_studies(read_campaign(written(tmp_path, text)))
    cells = [(p.config.model, p.config.sampler, p.config.budget) for p in found]
    assert cells == [
        ("vgg16", "random", 200),
        ("alexnet", "random", 200),
        ("alexnet", "tpe", 200),
        ("resnet18", "random", 7),
    ]


def test_the_digest_is_that_of_what_is_asked(tmp_path: Path) -> None:
    def digests(text: str) -> list[str]:
        return [p.digest for p in plan_studies(read_campaign(written(tmp_path, text)))]

    plain = digests("name: x\nmatrix: {model: vgg16}\n")
    assert digests("# another name, and a comment\nname: y\nmatrix: {model: [vgg16], seed: 0}\n") == plain
    assert digests("name: x\nmatrix: {model: vgg16, seed: 1}\n") != plain
    device = tmp_path / "device.yaml"
    device.write_text("name: one\nprocessors: [{name: a, kind: cpu}]\n")
    first = digests("name: x\nmatrix: {model: vgg16, platform: device.yaml}\n")
    device.write_text("name: two\nprocessors: [{name: a, kind: cpu}]\n")
    assert digests("name: x\nmatrix: {model: vgg16, platform: device.yaml}\n") != first


BOMB = "a: &a [x, x]\n" + "".join(
    f"{c}: &{c} [*{p}, *{p}, *{p}, *{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name: [",
        "- a\n",
        BOMB,
        "[" * 100,
        "name: x\n",
        "name: x\nmatrix: {}\n",
        "name: x\nmatrix:\n  modle: vgg16\n",
        "name: x\nmatrix: {model: vgg16}\nexpct: []\n",
        "name: x\nmatrix: {model: []}\n",
        "name: x\nmatrix:\n  model:\n  - vgg16\n  - vgg17\n",
        "name: x\nmatrix:\n  model: vgg16\n  budget: [1, twenty]\n",
        "name: x\nmatrix:\n  model: vgg16\n  budget: 0\n",
        "name: x\nmatrix:\n  model: vgg16\n  sampler: tpee\n",
        "name: x\nmatrix:\n  model: vgg16\n  evaluator: litertt\n",
        "name: x\nmatrix:\n  model: vgg16\n  allow: magic\n",
        "name: x\nmatrix:\n  model: [vgg16, vgg16]\n",
        "name: x\nmatrix:\n  model: vgg16\n  rate: [null, 2]\n",
        "name: x\nmatrix:\n  model: vgg16\n  compare_with: [null, none.json]\n",
        "name: x\nname: y\n",
        "name: ../x\nmatrix: {model: vgg16}\n",
        "name: x\nmatrix: {model: vgg16}\ninclude:\n- {model: vgg16}\n",
        "name: x\nmatrix: {model: vgg16}\nexclude:\n- {model: vgg16}\n",
        "name: x\nmatrix: {model: vgg16}\nexclude:\n- {model: vgg19}\n",
        "name: x\nmatrix: {model: vgg16}\nbaselines:\n- evry layer\n",
        "name: x\nmatrix: {model: vgg16}\nrepetitions: 0\n",
        "name: x\nmatrix: {model: vgg16}\nrepetitions: !!int ''\n",
        "name: x\nmatrix: {model: vgg16}\nrepetitions: !!bool maybe\n",
        "name: !!timestamp x\nmatrix: {model: vgg16}\n",
        "name: x\nmatrix: {model: vgg16, ? !!float much : 1}\n",
        "name: x\nmatrix: {model: vgg16}\nrepetitions: !!often 3\n",
        "name: x\nmatrix: {model: vgg16}\nschema_version: 2\n",
        "name: x\nmatrix:\n  model: vgg16\n  seed: [" + ",".join(map(str, range(10_001))) + "]\n",
        "name: x\nmatrix: {model: vgg16}\nexpect:\n- {name: a, paper: -1, source: b}\n",
        "name: x\nmatrix: {model: vgg16}\nexpect:\n- {name: a, papr: 1}\n",
        "name: x\nmatrix: {model: vgg16}\nexpect:\n- {name: a, paper: 1, source: b, metric: ratio}\n",
        "name: x\nmatrix: {model: vgg16}\nexpect:\n- {name: a, paper: 1}\n",
        "name: x\nmatrix: {model: vgg16}\nexpect:\n- {name: a, paper: 1.0e-320, source: b}\n",
        "name: x\nmatrix: {model: vgg16}\nexpect:\n- {name: a, paper: true, source: b}\n",
        "name: x\nmatrix: {model: vgg16}\nexpect:\n- {name: a, paper: '3', source: b}\n",
        "name: x\nmatrix: {model: vgg16}\nexpect:\n- {name: a, metric: speedup, plan: every layer}\n",
        "name: x\nmatrix: {model: vgg16}\nexpect:\n- {name: a, metric: speedup, over: every layer}\n",
        "name: x\nmatrix: {model: vgg16}\nexpect:\n- {name: a, over: every layer}\n",
        "name: x\nmatrix: {model: vgg16}\nexpect:\n- {name: a, where: {model: vgg19}}\n",
        "name: x\nmatrix: {model: vgg16, objective: memory}\nexpect:\n- {name: a}\n",
        "name: x\nmatrix: {model: vgg16}\nsettings: {precision: 2}\n",
        "name: x\nmatrix: {model: vgg16, evaluator: cost-model}\nsettings:\n  precision: 0.1\n",
        "name: x\nmatrix: {model: vgg16}\nsettings:\n  power: [cpu=2]\n",
        "name: x\nmatrix: {model: vgg16}\nsettings:\n  device: pi4\n",
        "name: x\nmatrix: {model: vgg16}\nrepetitions: true\n",
        "name: x\nmatrix: {model: a}\nmodels:\n  a: {model: vgg16}\n",
        "name: x\nmatrix: {model: a}\nmodels:\n  a: {model: vgg16, tucker: vbmf, epochs: 2}\n",
        "name: x\nmatrix: {model: a}\nmodels:\n  a: {model: vgg16, tucker: half}\n",
        "name: x\nmatrix: {model: a}\nmodels:\n  a: {model: vgg17, tucker: vbmf}\n",
        "name: x\nmatrix: {model: a}\nmodels:\n  a: {model: vgg16, data: none.npz}\n",
        "name: x\nmatrix: {model: a}\nmodels:\n  a: {model: vgg16, data: mnist_5k, share: 1}\n",
        "name: x\nmatrix: {model: a}\nmodels:\n  a: {model: b, tucker: vbmf}\n  b: {model: vgg16, tucker: vbmf}\n",
        "name: x\nmatrix: {model: a}\nmodels:\n  a: {model: vgg16, tucker: vbmf, beside: c}\n",
        "name: x\nmatrix: {model: a}\nmodels:\n  c: {model: b, data: d}\n  a: {model: b, tucker: vbmf, beside: c}\n",
        "name: x\nmatrix: {model: vgg16}\nmodels:\n  a: {model: vgg16, tucker: vbmf}\n",
        "name: x\nmatrix: {model: a}\nmodels:\n  a: {model: vgg16, tucker: vbmf, beside: a}\n",
        "name: x\nmatrix: {model: b}\nmodels:\n  a: {model: vgg16, data: x.npz}\n  b: {model: a, data: mnist_5k}\n",
        "name: x\nmatrix: {model: ../a}\nmodels:\n  ../a: {model: vgg16, tucker: vbmf}\n",
        "name: x\nmatrix: {model: vgg16, seed: 1\0}\n",
        f"name: x\nmatrix: {{model: vgg16}}\nrepetitions: {'7' * 5000}\n",
        f"name: x\nmatrix: {{model: vgg16}}\nsettings: {{minutes: '{'9' * 400}'}}\n",
        "name: x\nmatrix: {model: vgg16}\nsettings: {minutes: 5e-4}\n",
        "name: x\nmatrix: {model: vgg16, budget: 1e1}\n",
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = written(tmp_path, text)
    assert main(["run", str(path), "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"optimize: {path}")
    says(err)
    assert not (tmp_path / "out").exists()


def test_the_order_in_which_objectives_are_written_does_not_change_what_is_expected(tmp_path: Path) -> None:
    expect = "expect: [{name: a, paper: 2, source: b}]"
    file = read_campaign(
        written(tmp_path, f"name: x\nmatrix: {{model: vgg16, objective: 'memory,latency'}}\n{expect}\n")
    )
    (study,) = plan_studies(file)
    assert study.config.objective == ("latency", "memory")


@pytest.mark.parametrize("encoded", ["é".encode("latin-1"), b"\x80", "é".encode("utf-16")[:-1]], ids=str)
def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path, encoded: bytes) -> None:
    path = tmp_path / "campaign.yaml"
    path.write_bytes(encoded if encoded.startswith(b"\xff") else b"name: x\ndescription: " + encoded)
    with fails(UsageError):
        read_campaign(path)


def test_a_file_in_utf16_is_read(tmp_path: Path) -> None:
    path = tmp_path / "campaign.yaml"
    path.write_text("name: x\ndescription: é\nmatrix: {model: vgg16}\n", encoding="utf-16")
    assert read_campaign(path).content.description == "é"


def test_a_tag_that_is_true_of_its_value_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, "name: !!str 5\nmatrix: {model: ! vgg16, seed: !!int '3'}\n")
    campaign = read_campaign(path)
    assert campaign.content.name == "5"
    (study,) = plan_studies(campaign)
    assert (study.config.model, study.config.seed) == ("vgg16", 3)


def test_a_huge_file_a_folder_and_nothing_are_refused(tmp_path: Path) -> None:
    huge = tmp_path / "huge.yaml"
    with huge.open("wb") as file:
        file.truncate(100_000_000)
    for path in (huge, tmp_path, tmp_path / "none.yaml"):
        with fails(UsageError):
            read_campaign(path)


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_campaigns_name_their_schema_and_can_be_planned(path: Path) -> None:
    assert path.read_text().startswith("# yaml-language-server: $schema=campaign.schema.json\n")
    file = read_campaign(path)
    assert file.content.name == path.stem
    assert plan_studies(file)


def test_the_committed_schema_is_that_of_the_program() -> None:
    committed: dict[str, Any] = json.loads((ROOT / "experiments" / "campaign.schema.json").read_text())
    assert committed == json_schema()


def test_the_reference_is_that_of_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--markdown"]) == 0
    made = capsys.readouterr().out.rstrip("\n")
    assert made in (ROOT / "experiments" / "README.md").read_text()
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_two_studies_with_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a b.tflite", "a+b.tflite"):
        (tmp_path / name).write_bytes(b"a model")
    path = written(tmp_path, "name: x\nmatrix:\n  model: [a b.tflite, a+b.tflite]\n")
    assert main(["run", str(path)]) == 2
    says(capsys.readouterr().err)


def test_studies_without_use_for_a_setting_leave_it_out(tmp_path: Path) -> None:
    text = """
name: x
matrix: {model: vgg16, evaluator: [synthetic, cost-model, remote], objective: [latency, energy]}
settings: {precision: 0.05, power: [cpu=2], device: pi4}
"""
    for study in plan_studies(read_campaign(written(tmp_path, text))):
        config = study.config
        assert (config.precision == 0.05) == (config.evaluator != "cost-model")
        assert (config.power == ("cpu=2",)) == (config.objective == ("energy",))
        assert (config.device == "pi4") == (config.evaluator == "remote")


def test_null_is_a_value_of_a_filter(tmp_path: Path) -> None:
    text = """
name: x
matrix: {model: vgg16, platform: [null, exynos2200], evaluator: [litert, cost-model]}
exclude: [{evaluator: litert, platform: exynos2200}, {evaluator: cost-model, platform: null}]
"""
    found = plan_studies(read_campaign(written(tmp_path, text)))
    assert [(p.config.evaluator, p.axes["platform"]) for p in found] == [("litert", None), ("cost-model", "exynos2200")]
