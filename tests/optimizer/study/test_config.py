"""Settings: what is accepted, and one line in the words of the command line for what is not."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from optimizer.study.config import StudyConfig, command_line, most_stages, option, parse_config
from search_spaces.core.errors import UsageError
from search_spaces.core.workload import GIVEN
from tests.support.sentences import fails, says

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
configs = st.builds(
    StudyConfig,
    model=words,
    budget=st.integers(1, 10**9),
    max_stages=st.integers(1, 50),
    sampler=words,
    evaluator=words,
    seed=st.integers(0, 2**32 - 1),
    precision=st.floats(0, 1, exclude_min=True, exclude_max=True),
    study=st.none() | names,
    out=st.none() | words.map(Path),
    input=st.lists(words, max_size=2).map(tuple),
    custom_ops=st.lists(words, max_size=2).map(tuple),
    processors=st.none() | st.lists(names, min_size=1, max_size=3, unique=True).map(tuple),
    input_shape=st.dictionaries(words, st.lists(st.integers(1, 2**31 - 1), min_size=1), max_size=3).map(
        lambda shapes: tuple(f"{name}={','.join(map(str, shape))}" for name, shape in shapes.items())
    ),
)


def parsed(line: str) -> dict[str, str | list[str]]:
    """Read a command line as the shell and argparse would."""
    values: dict[str, str | list[str]] = {}
    lists: dict[str, list[str]] = {"input_shape": [], **{field: [] for field in GIVEN}}
    _, *rest = shlex.split(line)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        text = value if equals else rest.pop(0)
        field = name.removeprefix("--").replace("-", "_")
        if field in lists:
            lists[field].append(text)
        else:
            values[field] = text
    return values | {field: texts for field, texts in lists.items() if texts}


@given(configs)
def test_the_command_line_asks_for_the_same_study(config: StudyConfig) -> None:
    assert parse_config(parsed(command_line(config))) == config


def test_defaults() -> None:
    config = parse_config({"model": "vgg16", "budget": "200", "seed": None})
    assert config == StudyConfig(model="vgg16", budget=200)
    assert (config.max_stages, config.sampler, config.evaluator, config.seed) == (4, "auto", "litert", 0)
    cuts = config.model_copy(update={"allow": "cuts"})
    assert [most_stages(cuts, operators) for operators in (1, 3, 9)] == [1, 3, 4]
    assert most_stages(parse_config({"model": "m", "budget": 1, "max_stages": 4, "allow": "cuts"}), 1) == 4
    says(command_line(config))
    assert option("max_stages") == "--max-stages"
    with pytest.raises(ValidationError):
        config.budget = 3


def test_the_command_line_is_quoted() -> None:
    config = parse_config({"model": "-my model.tflite", "budget": 3, "processors": "cpu0,cpu1", "out": "a'b"})
    says(command_line(config))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("budget", value) for value in ("-1", "0", 0, "abc", "", "2.0", 2.5, True, "1_000", "٣", [1])),
        pytest.param("budget", "9" * 5000, id="budget-99999"),
        ("max_stages", "0"),
        ("seed", "-3"),
        *(("precision", value) for value in ("0", "1", "nan", "wide")),
        ("objective", "speed"),
        *(("model", value) for value in ("", 7, "a\0b")),
        *(("processors", value) for value in ("", "cpu0,cpu0")),
        *(("input_shape", value) for value in ("x", ["x=1,0"], ["x=1", "x=2"])),
        ("max_stage", "3"),
        ("zzz", "3"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_option(name: str, value: object) -> None:
    with fails(UsageError):
        parse_config({"model": "vgg16", "budget": "200", name: value})


def test_what_is_missing_is_named() -> None:
    with fails(UsageError):
        parse_config({"model": "vgg16"})


@pytest.mark.parametrize("study", ["", ".", "..", "../a", "a/b", "/a", "-a", "a b", "a\n", "a\0", "ä", "x" * 101, ".a"])
def test_a_study_is_a_safe_file_name(study: str) -> None:
    with fails(UsageError) as caught:
        parse_config({"model": "vgg16", "budget": 1, "study": study})
    assert "\n" not in str(caught.value)


@given(st.dictionaries(st.sampled_from([*StudyConfig.model_fields, "other"]), st.text() | st.integers() | st.floats()))
def test_any_values_give_settings_or_one_line(values: dict[str, Any]) -> None:
    complaint = "--"
    try:
        parse_config(values)
    except UsageError as error:
        complaint = str(error)
    assert complaint.startswith("--")
    assert len(complaint.splitlines()) == 1
