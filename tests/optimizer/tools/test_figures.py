"""Profiles that are fitted to published figures: the document, the estimator and the command."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.cost_model.figures import read_figures
from evaluators.cost_model.profile import CostProfile, find_profile
from evaluators.cost_model.session import CostModelSession
from optimizer.cli import main
from optimizer.tools.figures import fit_figures, prepared
from search_spaces.core.errors import UsageError
from search_spaces.models.zoo import draft
from search_spaces.spaces.chain import chain_plan
from tests.support.commands import answered, tells
from tests.support.narrowing import there
from tests.support.sentences import fails

NETS = ("squeezenet1_1@0.25/64", "mobilenet_v1@0.25/128", "alexnet@0.25", "resnet18@0.25/64", "vgg11@0.25/32")
WHOLE = [{"model": net, "plan": "whole on cpu"} for net in NETS]
TRUE = {"mac": 3e-11, "byte": 2e-10, "stage": 2e-4}
PARAMETERS = {"mac": {"most": 1e-8}, "byte": {"most": 1e-8}, "stage": {"most": 1.0}}
KERNELS = {"all others": {"macs": "mac", "read": "byte", "written": "byte", "weight": "byte"}}
CPU = {"kind": "cpu", "kernels": KERNELS, "invocation_s": "stage"}
KINDS = {"ms", "at_least_ms", "at_most_ms"}
HOSTILE = "hostile.yaml"


def document(**changes: Any) -> dict[str, Any]:
    return {
        "name": "a",
        "source": "b",
        "parameters": PARAMETERS,
        "processors": {"cpu": CPU},
        "figures": WHOLE,
    } | changes


def written(folder: Path, content: Mapping[str, Any], name: str = "figures.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False))
    return path


def told(folder: Path, content: Mapping[str, Any], values: Mapping[str, float]) -> Path:
    """Write a document whose figures are what some values of its parameters predict."""
    asked = [figure if KINDS & figure.keys() else figure | {"ms": 1.0} for figure in content["figures"]]
    _, fit, _ = prepared(written(folder, {**content, "figures": asked}))
    figures = []
    for figure, ms in zip(content["figures"], fit.predict_ms(values)[0], strict=True):
        figures.append(figure if KINDS & figure.keys() else figure | {"ms": float(ms)})
    return written(folder, {**content, "figures": figures})


def fitted(path: Path) -> CostProfile:
    return fit_figures(path, path.with_suffix(".json")).profile


def parameters(profile: CostProfile) -> dict[str, Any]:
    return dict(profile.errors["parameters"])


# The estimator


def test_one_wrong_figure_does_not_spoil_the_others(tmp_path: Path) -> None:
    path = told(tmp_path, document(), TRUE)
    content = read_figures(path).content
    for wrong in (0.1, 10.0):
        times = [(figure.ms or 0.0) * (wrong if n == 1 else 1.0) for n, figure in enumerate(content.figures)]
        figures = [{**of, "ms": ms} for of, ms in zip(WHOLE, times, strict=True)]
        rows = fitted(written(tmp_path, document(figures=figures))).errors["figures"]
        assert all(abs(row["fitted_error"]) < 0.02 for n, row in enumerate(rows) if n != 1)


def test_a_broken_bound_and_the_end_of_a_range_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = PARAMETERS | {"mac": {"least": 1e-9, "most": 2e-9}}
    figures = [*(figure | {"ms": 1.0} for figure in WHOLE), {**WHOLE[0], "at_most_ms": 1e-3}]
    written(tmp_path, document(parameters=of, figures=figures))
    monkeypatch.chdir(tmp_path)
    tells(capsys, "calibrate", "--figures", "figures.yaml", "--out", "out.json", "-q")
    found = json.loads((tmp_path / "out.json").read_text())["profile"]["errors"]["parameters"]
    assert found["mac"]["at_the_end_of"] == [1e-9, 2e-9]


def test_one_wrong_bound_does_not_spoil_the_figures(tmp_path: Path) -> None:
    content = read_figures(told(tmp_path, document(), TRUE)).content
    figures = [{**of, "ms": figure.ms} for of, figure in zip(WHOLE, content.figures, strict=True)]
    bound = {**WHOLE[4], "at_most_ms": (content.figures[4].ms or 0.0) / 20}
    rows = fitted(written(tmp_path, document(figures=[*figures, bound]))).errors["figures"]
    assert all(abs(row["fitted_error"]) < 0.02 for row in rows[:5])


def test_a_profile_does_not_replace_its_document(tmp_path: Path) -> None:
    path = told(tmp_path, document(), TRUE)
    before = path.read_text()
    with fails(UsageError):
        fit_figures(path, path)
    assert path.read_text() == before


def test_known_prices_are_found_again_and_predict_figures_that_are_left_out(tmp_path: Path) -> None:
    found = fitted(told(tmp_path, document(), TRUE))
    assert {name: row["value"] for name, row in parameters(found).items()} == pytest.approx(TRUE, rel=2e-3)
    assert all(abs(figure["error"]) < 0.02 for figure in found.errors["figures"])
    assert found.errors["each figure on cpu in turn"]["cases"] == len(NETS)
    assert found["cpu"].kernels["conv"].sigma == 0.1


def test_figures_are_predicted_as_studies_are(tmp_path: Path) -> None:
    figures = [*WHOLE, {"model": NETS[0], "plan": "layer length K=3"}, {"model": NETS[1], "plan": "every layer"}]
    path = told(tmp_path, document(figures=figures), TRUE)
    fitted(path)
    profile, platform = there(find_profile(path.with_suffix(".json")))
    graph = draft(NETS[1]).graph()
    plan = chain_plan(graph, range(1, len(graph.operators)), ["cpu"] * len(graph.operators))
    took_s = CostModelSession(profile, platform).load(graph, plan).one.latency_s[0]
    assert took_s * 1e3 == pytest.approx(profile.errors["figures"][-1]["fitted_ms"], rel=1e-4)


def test_an_outlier_counts_less(tmp_path: Path) -> None:
    path = told(tmp_path, document(figures=[*WHOLE, *({**w, "plan": "layer length K=2"} for w in WHOLE)]), TRUE)
    content = yaml.safe_load(path.read_text())
    content["figures"][2]["ms"] *= 3.0
    found = parameters(fitted(written(tmp_path, content)))
    assert {name: row["value"] for name, row in found.items()} == pytest.approx(TRUE, rel=0.02)


def test_of_choices_the_best_is_taken(tmp_path: Path) -> None:
    cpu = CPU | {"capacity_bytes": "capacity", "pressure_per_byte": 1e-7}
    of = PARAMETERS | {"capacity": {"choices": [1e5, 1e6, 5e6]}}
    figures = [*WHOLE, *({**net, "plan": "layer length K=2"} for net in WHOLE)]
    path = told(tmp_path, document(parameters=of, processors={"cpu": cpu}, figures=figures), TRUE | {"capacity": 1e6})
    _, fit, _ = prepared(path)
    found = fit.fit()
    assert found.values == pytest.approx(TRUE | {"capacity": 1e6}, rel=2e-3)
    assert found.loss < 1e-4


def test_bounds_count_where_they_are_broken(tmp_path: Path) -> None:
    # One network's time does not determine both prices; a bound on another one's chooses among them.
    of = {"mac": {"most": 1e-8}, "byte": {"most": 1e-8}}
    cpu = {"kind": "cpu", "kernels": KERNELS, "sigma": 0.3}
    true = {"mac": 3e-11, "byte": 2e-10}
    for kind in ("at_least_ms", "at_most_ms"):
        bounds = [{"model": NETS[4], "plan": "whole on cpu", kind: 1.0}]
        path = told(tmp_path, document(parameters=of, processors={"cpu": cpu}, figures=[WHOLE[0], *bounds]), true)
        content = yaml.safe_load(path.read_text())
        free = fitted(path).errors["figures"][1]["fitted_ms"]
        content["figures"][1][kind] = free * (1.1 if kind == "at_least_ms" else 0.95)
        row = fitted(written(tmp_path, content)).errors["figures"][1]
        assert row["fitted_ms"] == pytest.approx(row[kind], rel=0.02)
        assert row["use"] == "bound"


def test_differences_are_fitted_relative_to_the_times_they_are_of(tmp_path: Path) -> None:
    of, true = {"mac": {"most": 1e-8}}, {"mac": 3e-11}
    cpu = {"kind": "cpu", "kernels": {"all others": {"macs": "mac", "read": 2e-10, "written": 2e-10}}}
    figures = [{**WHOLE[3], "minus": WHOLE[0]}, {**WHOLE[1], "minus": WHOLE[4]}]
    found = fitted(told(tmp_path, document(parameters=of, processors={"cpu": cpu}, figures=figures), true))
    assert parameters(found)["mac"]["value"] == pytest.approx(3e-11, rel=2e-3)
    assert [figure["fitted_ms"] for figure in found.errors["figures"]] == pytest.approx(
        [figure["published_ms"] for figure in found.errors["figures"]], rel=1e-2
    )


def test_checks_are_predicted_by_fits_that_have_not_seen_them(tmp_path: Path) -> None:
    operator = {"kernel": [1, 1], "input": [52, 52, 256], "channels": 128}
    checks: list[dict[str, Any]] = [{**WHOLE[0], "ms": 1e6, "check": True}]
    checks.append({"operator": operator, "plan": "whole on cpu", "check": True})
    path = told(tmp_path, document(figures=[*WHOLE, *checks]), TRUE)
    content = yaml.safe_load(path.read_text())
    del content["figures"][-1]["ms"]
    found = fitted(written(tmp_path, content))
    *_, check, alone = found.errors["figures"]
    assert parameters(found)["mac"]["value"] == pytest.approx(TRUE["mac"], rel=2e-3)
    assert (check["use"], check["fitted_ms"]) == ("checked", None)
    assert check["error"] == pytest.approx(-1.0, abs=1e-3)
    pixels = 52 * 52
    expected_s = pixels * 256 * 128 * TRUE["mac"] + 4 * (pixels * 384 + 257 * 128) * TRUE["byte"] + TRUE["stage"]
    assert alone["left_out_ms"] == pytest.approx(expected_s * 1e3, rel=5e-3)
    assert alone["error"] is None


def test_what_no_figure_determines_is_named_and_keeps_the_middle(tmp_path: Path) -> None:
    processors = {"cpu": CPU, "npu": {"kind": "npu", "kernels": {"all others": {"macs": "other"}}, "sigma": 0.3}}
    of = PARAMETERS | {"other": {"least": 1e-12, "most": 3e-12}}
    figures = [*WHOLE, {**WHOLE[0], "plan": "whole on npu", "check": True}]
    content = document(parameters=of, processors=processors, figures=figures)
    found = fitted(told(tmp_path, content, TRUE | {"other": 2e-12}))
    low, high = found.errors["figures"][-1]["range_ms"]
    assert high == pytest.approx(3 * low)
    assert parameters(found)["other"] == {"value": 2e-12, "left_out": None, "allowed": [1e-12, 3e-12]}
    assert found["npu"].kernels["conv"].sigma == 0.3


def test_prices_that_only_occur_together_are_not_told_apart(tmp_path: Path) -> None:
    kernels = {"all others": {"macs": "mac"}, "conv": {"macs": "mac"}}
    cpu = {"kind": "cpu", "kernels": kernels, "invocation_s": "one", "sigma": 0.3}
    of = {"mac": {"most": 1e-8}, "one": {"most": 1.0}, "two": {"most": 1.0}}
    twice = cpu | {"dispatch_s": "two"}
    figures = [WHOLE[0], WHOLE[1], {**WHOLE[1], "minus": WHOLE[0]}]
    content = document(parameters=of, processors={"cpu": twice}, figures=figures)
    found = fitted(told(tmp_path, content, {"mac": 3e-11, "one": 1e-3, "two": 1e-5}))
    assert all(row["entangled"] for row in parameters(found).values())
    assert all(row["left_out_ms"] == pytest.approx(row["fitted_ms"]) for row in found.errors["figures"])


@pytest.mark.parametrize("count", [3, 4])
def test_without_kernels_there_is_a_price_for_work_bytes_and_from_four_figures_on_operators(
    count: int, tmp_path: Path
) -> None:
    figures = [{**figure, "ms": 5.0 + place} for place, figure in enumerate(WHOLE[:count])]
    content = {"name": "a", "source": "b", "processors": {"cpu": {"kind": "cpu"}}, "figures": figures}
    found = fitted(written(tmp_path, content))
    assert len(parameters(found)) == (2 if count == 3 else 3)
    assert set(found["cpu"].kernels["conv"].prices) <= {"macs", "read", "written", "weight"}


def test_plans_and_models_lie_beside_the_document(tmp_path: Path) -> None:
    graph = draft(NETS[0]).graph()
    (tmp_path / "plan.json").write_text(json.dumps(chain_plan(graph, (3,), ["cpu", "cpu"]).to_json()))
    draft(NETS[2]).write(tmp_path / "own.tflite")
    figures = [*WHOLE, {"model": NETS[0], "plan": "plan.json"}, {"model": "own.tflite", "plan": "whole on cpu"}]
    found = fitted(told(tmp_path, document(figures=figures), TRUE))
    assert found.errors["figures"][-1]["published_ms"] == pytest.approx(found.errors["figures"][2]["published_ms"])
    assert parameters(found)["stage"]["value"] == pytest.approx(TRUE["stage"], rel=5e-3)


# What is wrong with a document


def changed(*path: str | int, to: object) -> dict[str, Any]:
    """Return the document with another value in one place."""
    content = json.loads(json.dumps(document(figures=[{**figure, "ms": 10.0} for figure in WHOLE])))
    place: Any = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return dict(content)


@pytest.mark.parametrize(
    "content",
    [
        changed("figures", 0, "ms", to="nan"),
        changed("figures", 0, "ms", to="1e999"),
        changed("figures", 0, "ms", to=-1),
        changed("figures", 0, "ms", to=0),
        changed("figures", 0, "ms", to=[1]),
        changed("figures", 0, "at_least_ms", to=3),
        changed("figures", 0, "model", to="vgg17"),
        changed("figures", 0, "model", to="gone.tflite"),
        changed("figures", 0, "model", to="x" * 5000 + ".tflite"),
        changed("figures", 0, "plan", to="layer size K=2"),
        changed("figures", 0, "plan", to="whole on gpu"),
        changed("figures", 0, "plan", to="every layer on gpu"),
        changed("figures", 0, "plan", to="gone.json"),
        changed("figures", 0, "plan", to="other.json"),
        changed("figures", 0, "plan", to=f"../{HOSTILE}/../x.json"),
        changed("figures", 0, "operator", to={"kernel": [1, 1], "input": [5, 5, 3], "channels": 2}),
        changed("figures", 0, "minus", to={"plan": "whole on cpu"}),
        changed("figures", 0, to={"plan": "whole on cpu", "ms": 3, "operator": {"kernel": [0, 1]}}),
        changed("figures", to=[{**WHOLE[0], "ms": 10.0}]),
        changed("figures", to=[]),
        changed("figures", to=[{**WHOLE[0], "ms": 10.0} for _ in range(101)]),
        changed("parameters", "mac", to={"most": "inf"}),
        changed("parameters", "mac", to={"least": 2, "most": 1}),
        changed("parameters", "mac", to={"least": 2}),
        changed("parameters", "mac", to={"choices": list(range(33))}),
        changed("parameters", "more", to={"most": 1}),
        changed("parameters", to={}),
        changed("processors", "cpu", "kind", to="tpu"),
        changed("processors", "cpu", "dispatch_s", to="stagee"),
        changed("processors", "cpu", "kernels", to={"convolution": {"macs": "mac"}}),
        changed("processors", "cpu", "kernels", "all others", to={"mac": "mac", "read": "byte"}),
        changed("processors", "cpu", "kernels", "all others", to={"macs": {"times": -1}, "read": "byte"}),
        changed("processors", "cpu", "kernels", to={"pool": {"macs": "mac", "read": "byte"}}),
        changed("processors", "cpu", "kernels", to={"conv, pool": {"macs": "mac"}, "pool": {"read": "byte"}}),
        changed("processors", "cpu", "sigma", to=11),
        changed("processors", "gpu", to={"kind": "gpu"}) | {"figures": [{**WHOLE[0], "plan": "every layer", "ms": 1}]},
        changed("links", to=[{"between": ["cpu", "dsp"]}]),
        changed("schema_version", to=2),
        changed("name", to="two\nlines"),
        changed("figure", to=[]),
        document(processors={"cpu": CPU, "gpu": {"kind": "gpu"}}, figures=[{**figure, "ms": 10.0} for figure in WHOLE]),
        document(processors={"cpu": {"kind": "cpu", "dispatch_s": "cpu mac_s"}}, parameters={"cpu mac_s": {"most": 1}}),
        changed("parameters", "mac", to={"most": 1e-300}),
        changed("links", to=[{"between": ["cpu", "cpu"]}]),
        changed("figures", 0, to={**WHOLE[0], "minus": WHOLE[0], "ms": 5}),
        changed("figures", 0, to={**WHOLE[0], "at_most_ms": 0}),
        changed("figures", 0, to={**WHOLE[1], "ms": 20.0}),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_document_is_told_in_a_line(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps(chain_plan(draft("vgg11").graph(), (), ["cpu"]).to_json()))
    with fails(UsageError):
        fit_figures(written(tmp_path, content), tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("text", ["", "[", "a: &a [*a]", "name: a", "a" * 10_000_000, "\0", "- " * 300])
def test_files_that_are_no_document(text: str, tmp_path: Path) -> None:
    (path := tmp_path / HOSTILE).write_text(text)
    with fails(UsageError):
        fit_figures(path, tmp_path / "out.json")


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for name in ("gone.yaml", ".", "pipe.yaml"):
        with fails(UsageError):
            fit_figures(tmp_path / name, tmp_path / "out.json")


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["mac", "cpu"])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
PLACES: Sequence[tuple[str | int, ...]] = (
    ("name",), ("parameters",), ("parameters", "mac"), ("parameters", "mac", "most"), ("processors",), ("links",),
    ("processors", "cpu"), ("processors", "cpu", "kernels"), ("processors", "cpu", "kernels", "all others", "macs"),
    ("figures",), ("figures", 0), ("figures", 0, "ms"), ("figures", 0, "minus"), ("figures", 0, "plan"),
    ("figures", 0, "model"), ("figures", 0, "operator"), ("schema_version",), ("source",),
)  # fmt: skip


@given(place=st.sampled_from(PLACES), value=VALUES)
@settings(max_examples=60, deadline=None)
def test_any_value_anywhere_is_read_or_told_in_a_line(
    place: tuple[str | int, ...], value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    problem = ""
    try:
        prepared(written(folder, changed(*place, to=value)))
    except UsageError as error:
        problem = str(error)
    assert "\n" not in problem


# The command


@pytest.mark.usefixtures("elsewhere")
def test_the_command_prints_tables_or_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [*WHOLE[:4], {**WHOLE[4], "check": True}]
    told(Path(), document(figures=figures, parameters=PARAMETERS | {"mac": {"choices": [3e-11]}}), TRUE)
    words = ["calibrate", "--figures", "figures.yaml", "--out", "out.json", "-q"]
    tells(capsys, *words)
    found = answered(capsys, words)
    assert [row["use"] for row in found["figures"]] == ["fitted"] * 4 + ["checked"]
    content = json.loads(Path("out.json").read_text())
    assert content["profile"]["errors"] == found
    assert content["profile"]["provenance"]["fitted_by"] == "optimize calibrate --figures figures.yaml"
    assert str(tmp_path) not in json.dumps(content)
    assert main(["squeezenet1_1@0.25/64", "--platform", "out.json", "--evaluator", "cost-model", "--budget", "3"]) == 0


@pytest.mark.parametrize(
    "words", [["--minutes", "3"], ["--processors", "cpu0"], ["--refine", "run"], ["--evaluator", "litert"]]
)
def test_options_that_measure_do_not_go_with_figures(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    tells(capsys, "calibrate", "--figures", "figures.yaml", "--out", "out.json", *words, code=2)


def test_the_profile_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = told(tmp_path, document(), TRUE)
    for name in ("out.txt", "gone/out.json", "."):
        with fails(UsageError):
            fit_figures(path, tmp_path / name)
