"""The product from Python: one function, typed options, a typed result."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import optimizer
from optimizer import Options, optimize
from optimizer.study.config import StudyConfig
from optimizer.study.history import Trial
from search_spaces.core.errors import InfeasibleError, UnavailableError, UsageError
from tests.support.sentences import fails

SMALL_MODEL = "squeezenet1_1@0.25/64"


def test_every_setting_is_an_option() -> None:
    assert set(get_type_hints(Options)) == set(StudyConfig.model_fields) - {"model", "budget"}


def test_a_study_from_python_gives_a_typed_result(tmp_path: Path) -> None:
    seen: list[Trial] = []
    result = optimize(
        SMALL_MODEL, budget=4, evaluator="synthetic", out=tmp_path / "run", objective=["latency"], on_trial=seen.append
    )
    assert len(seen) >= 4
    rows = result.table()
    assert [row.plan for row in rows if row.recommended] == [result.plan]
    assert len({row.name for row in rows}) == len(rows)
    best = next(row for row in rows if row.recommended)
    assert best.value is not None
    assert best.low is not None
    assert best.high is not None
    assert best.low <= best.value <= best.high
    assert best.unit == "ms"
    assert "recommended" in str(result)
    assert re.search("<pre.*<span style=.*recommended", result._repr_html_(), re.DOTALL)
    assert str(result.plan).endswith(result.plan.stages[-1].processor)
    for wrong in (3, "report.html", __file__):
        with fails(UsageError):
            result.report(wrong)  # type: ignore[arg-type]
    page = result.report(tmp_path / "report")
    assert page.read_text().startswith("<!doctype html>")


def test_a_result_is_one_line(tmp_path: Path) -> None:
    found = optimize(SMALL_MODEL, budget=2, evaluator="synthetic", out=tmp_path / "run")
    assert isinstance(found, optimizer.Result)
    assert re.fullmatch(rf"<Result {SMALL_MODEL}: [^,]+, [0-9.]+ ms>", repr(found))
    where = Options(evaluator="cost-model", platform="pixel4", processors=["gpu", "1large"], out=tmp_path / "several")
    several = optimize([f"{SMALL_MODEL}*2"], budget=4, **where)
    assert re.fullmatch(r"<Result [^\n]{10,80}: [^\n]+, [0-9.]+ ms>", repr(several))
    one = rf"{SMALL_MODEL} \d \[(\w+|[\d–]+(\|[\d–]+)* \w+(, .+)?)\]"
    proposed = [name for name, _ in several.rows() if name.startswith("plan ")]
    assert all(re.fullmatch(rf"plan \d+ \((fifo|priority|edf)\): {one}, ({one}|…).*", name) for name in proposed)
    assert proposed


def test_a_warning_comes_with_the_line_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(_: object, watcher: Any, __: object) -> None:
        watcher.warn("slow machine")

    monkeypatch.setattr("optimizer.study.course.run_study", warned)
    with pytest.warns(UserWarning, match="slow machine") as caught:
        optimize(SMALL_MODEL)
    assert [warning.filename for warning in caught] == [__file__]


def test_a_study_ends_when_its_time_is_up(tmp_path: Path) -> None:
    result = optimize(SMALL_MODEL, budget=10_000, minutes=0.001, evaluator="synthetic", out=tmp_path / "run")
    assert result.history.measured < 20


def test_baselines_that_are_asked_for_are_tried_when_the_time_is_up(tmp_path: Path) -> None:
    name = "layer length K=3"
    for asked, tried in (((), False), ((name,), True)):
        out = tmp_path / str(tried)
        result = optimize(SMALL_MODEL, minutes=1e-9, compare_with=asked, evaluator="synthetic", out=out)
        assert (result.baselines[name].digest in result.history.known) is tried
        assert result.to_json()["proposed_plans"] == 0


def test_a_data_frame_needs_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    result = optimize(SMALL_MODEL, budget=2, evaluator="synthetic", out=tmp_path / "run")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with fails(UnavailableError):
        result.to_dataframe()


def test_wrong_options_are_reported() -> None:
    with fails(UsageError):
        optimize(SMALL_MODEL, budget=0)
    with fails(UsageError):
        optimize(SMALL_MODEL, bugdet=3)  # type: ignore[call-arg]
    with fails(UsageError):
        optimize(SMALL_MODEL, budget="3")  # type: ignore[arg-type]
    with fails(UsageError):
        optimize(SMALL_MODEL, deadline="3")  # type: ignore[arg-type]
    with fails(UsageError):
        optimize(SMALL_MODEL, allow_fallback="yes")  # type: ignore[arg-type]
    with fails(UsageError):
        optimize(SMALL_MODEL, deadline=True)
    with fails(UsageError):
        optimize(SMALL_MODEL, objective=3)  # type: ignore[arg-type]
    with fails(UsageError):
        optimize(SMALL_MODEL, minutes=-1.0)
    for name in ("on_trial", "processors", "allow", "out", "compare_with", "custom_ops"):
        with fails(UsageError):
            optimize(SMALL_MODEL, **{name: 3})  # type: ignore[arg-type]
    with fails(UsageError):
        optimize(3)  # type: ignore[arg-type]
    with fails(UsageError):
        optimize(SMALL_MODEL, power="cpu=3")
    with pytest.raises(InfeasibleError):
        optimize(SMALL_MODEL, budget=2, evaluator="synthetic", deadline=1e-9)


@pytest.mark.parametrize("name", ["model", "budget", "on_trial", *get_type_hints(Options)])
def test_a_value_of_a_wrong_type_is_reported(name: str) -> None:
    of_others = {"heartbeat": {"storage": "sqlite:///x"}, "robust": {"state": "hot:cpu=2"}}
    values: dict[str, Any] = {"model": SMALL_MODEL, **of_others.get(name, {})}
    with pytest.raises(UsageError):
        optimize(**values | {name: [3.5]})


def test_the_version_is_reported() -> None:
    assert optimizer.__version__.count(".") == 2
    with pytest.raises(AttributeError):
        _ = optimizer.nothing
