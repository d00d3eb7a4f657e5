"""Campaign files: their keys, and errors at ``file:line`` with the nearest valid key.

A campaign is a matrix of studies. ``experiments/campaign.schema.json`` describes the same to an editor.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, field_validator, model_validator

from evaluators.objectives import OBJECTIVES
from evaluators.workload.outcome import OBJECTIVES as OF_WORKLOADS
from optimizer.study.config import unsafe_name
from search_spaces.core.yaml_file import Document, Loc, Part, read_document, wrong

MAX_NBYTES = 1 << 20
_MAX_DEPTH = 12
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")
_OBJECTIVES = tuple(dict.fromkeys((*OBJECTIVES, *OF_WORKLOADS)))


def _objective(value: str | None) -> str | None:
    """Return one objective, or several with commas between them, as it is."""
    if value is not None and not set(value.split(",")) <= set(_OBJECTIVES):
        raise ValueError(f"must be one or more of {', '.join(_OBJECTIVES)}")
    return value


Objective = Annotated[str, AfterValidator(_objective)]
Whole = Annotated[int, Field(strict=True, le=2**32 - 1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Error = Annotated[Number, Field(ge=0)]
Rate = Annotated[Number, Field(ge=1e-3, le=1e3)]


class Matrix(Part):
    """Values of each axis; a study for every combination. A single value may stand without a list.

    Attributes:
        model: names of built-in models, or paths of ``.tflite`` files, relative to the campaign file.
        platform: names of devices that ship with the program, or paths of files; null for what the evaluator finds.
        processors: those to use, for example ``cpu0,cpu1``; null for all.
        evaluator: ``litert`` measures this machine; ``optimize plugins`` lists the others.
        allow: freedoms of plans, for example ``cuts,branches``; null for the default of ``--allow``.
        sampler: proposes plans; null for ``auto``.
        objective: one, or several, for example ``latency,memory``; energy needs the processors' powers, or a meter.
        max_stages: stages of a plan at most; null for 4, or the model's operators where it has fewer.
        max_error: by how much outputs may differ from the whole model's, relative to its largest one.
        rate: how many times as often requests of workloads come; null for as often as they say.
        compare_with: file of a plan of one's own, relative to the campaign file, or a baseline's name; it takes part in
            the final, as the plans of ``expect`` do.
        budget: distinct plans to try.
        seed: the same seed proposes the same plans, given the same measurements.
    """

    model: tuple[str, ...] = Field(min_length=1)
    platform: tuple[str | None, ...] = Field(default=(None,), min_length=1)
    processors: tuple[str | None, ...] = Field(default=(None,), min_length=1)
    evaluator: tuple[str, ...] = Field(default=("litert",), min_length=1)
    allow: tuple[str | None, ...] = Field(default=(None,), min_length=1)
    sampler: tuple[str | None, ...] = Field(default=(None,), min_length=1)
    objective: tuple[Objective, ...] = Field(default=("latency",), min_length=1)
    max_stages: tuple[Whole | None, ...] = Field(default=(None,), min_length=1)
    max_error: tuple[Error | None, ...] = Field(default=(None,), min_length=1)
    rate: tuple[Rate | None, ...] = Field(default=(None,), min_length=1)
    compare_with: tuple[str | None, ...] = Field(default=(None,), min_length=1)
    budget: tuple[Whole, ...] = Field(default=(200,), min_length=1)
    seed: tuple[Whole, ...] = Field(default=(0,), min_length=1)

    @field_validator("*", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list | tuple) else (value,)


AXES = tuple(Matrix.model_fields)


class Cell(Part):
    """One value for some axes of the matrix. As a filter it means the studies that have all of them.

    An axis that is left out may have any value; null is a value.
    """

    model: str | None = None
    platform: str | None = None
    processors: str | None = None
    evaluator: str | None = None
    allow: str | None = None
    sampler: str | None = None
    objective: Objective | None = None
    max_stages: int | None = None
    max_error: Error | None = None
    rate: Rate | None = None
    compare_with: str | None = None
    budget: int | None = None
    seed: int | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The axes that are named, with their values."""
        return self.model_dump(exclude_unset=True)


class Settings(Part):
    """What all studies have in common; precision, device and power are given only to studies that they affect.

    Attributes:
        precision: target half width of the 95 % interval, relative to the median.
        device: the device of an evaluator that measures elsewhere; a name, or those of identical devices with
            commas (``pi4,pi5``).
        allow_fallback: whether an accelerator may leave operators to the CPU.
        input_shape: sizes of inputs that models leave open, for example ``name=1,224,224,3``.
        power: what processors draw while they run, in watts, for example ``cpu0=2.5``; for energy.
        state: states of the platform to consider, for example ``hot:gpu=2``; cost models only.
        robust: whether the worst of these states counts, or their mean.
        deadline: milliseconds that one inference may take.
        max_energy: millijoules that one inference may take.
        minutes: the search of each study ends after so long; baselines that are named here are tried all the same.
        stop_when_proven: whether to end once the best plan is within ``precision`` of the predicted lower bound.
        count_traffic: whether to count the memory traffic of each recommended plan, by the GPU's own counters; with
            ``indicators``, counts stand beside the estimates.
    """

    precision: Number | None = Field(default=None, gt=0, lt=1)
    device: str | None = Field(default=None, min_length=1, max_length=1000)
    allow_fallback: bool = False
    input_shape: tuple[str, ...] = ()
    power: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    robust: Literal["worst", "expected"] | None = None
    deadline: Number | None = Field(default=None, gt=0)
    max_energy: Number | None = Field(default=None, gt=0)
    minutes: Number | None = Field(default=None, gt=0)
    stop_when_proven: bool = False
    count_traffic: bool = False


class MadeModel(Part):
    """A model that the campaign makes itself, for each seed of the studies that use it.

    Attributes:
        model: a built-in model, a file relative to the campaign's, or one of these models that stands above.
        tucker: rule of the ranks by which its convolutions are decomposed, for example ``ratio:0.5``.
        data: labelled inputs to train it on: ``mnist_5k``, or an ``.npz`` with ``inputs`` and ``labels``. Weights of a
            built-in model are drawn by the seed first.
        epochs: how often each input is used.
        rate: learning rate at the beginning.
        share: of the inputs to train on, drawn by the seed; accuracy is measured by the others.
        beside: the model of this list with whose accuracy its own is compared, seed by seed.
    """

    model: str = Field(min_length=1)
    tucker: str | None = None
    data: str | None = Field(default=None, min_length=1)
    epochs: Whole = Field(default=10, ge=1)
    rate: Number = Field(default=5e-4, gt=0, le=1)
    share: Number = Field(default=0.8, gt=0, lt=1)
    beside: str | None = None

    @model_validator(mode="after")
    def _changes(self) -> Self:
        if self.tucker is None and self.data is None:
            raise wrong("a model is made by decomposing or training another one", "add 'tucker' or 'data'")
        if self.data is None and (given := self.model_fields_set & {"epochs", "rate", "share"}):
            raise wrong(f"{min(given)} is for training", "add 'data', or leave it out", min(given))
        return self


class Expectation(Part):
    """A figure to be shown, beside a published one where there is one; it never decides whether a campaign succeeds.

    Attributes:
        name: as the table shows it.
        where: the studies that it is about.
        metric: ``latency_ms`` of ``plan``, of several models the mean of their latencies; ``ratio`` of its value to
            that of ``over``, for every objective; ``speedup`` of the best plan over the best one of one stage, or of
            several models over the best baseline; 1 where that is recommended.
        plan: ``best``, or the name of a baseline.
        over: the plan whose value divides a ratio: ``best``, or the name of a baseline.
        paper: the published value; null where none was published.
        tolerance: relative difference up to which ours counts as equal.
        fitted: whether the profile that predicts ours was fitted to this figure, so that agreement says nothing.
        left_out: relative error of our figure where the profile is fitted without this one, so far as that is known.
        source: where ``paper`` was published.
    """

    name: str = Field(min_length=1)
    where: Cell = Cell()
    metric: Literal["latency_ms", "ratio", "speedup"] = "latency_ms"
    plan: str = "best"
    over: str | None = None
    paper: Number | None = Field(default=None, ge=1e-9, le=1e12)
    tolerance: Number = Field(default=0.1, ge=0)
    fitted: bool = False
    left_out: Number | None = None
    source: str = ""

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.paper and not self.source.strip():
            raise ValueError("a published figure needs its source")
        if self.left_out is not None and not self.fitted:
            raise wrong("left_out is of a figure that the profile was fitted to", "add 'fitted: true'", "left_out")
        if self.metric == "ratio" and self.over is None:
            raise wrong("a ratio needs a plan to compare with", "add 'over'")
        if self.metric != "ratio" and self.over is not None:
            raise wrong(f"{self.metric} is not of two plans", "leave 'over' out, or give 'metric: ratio'", "over")
        if self.metric == "speedup" and self.plan != "best":
            raise wrong("speedup is of the best plan", "leave 'plan' out, or give 'metric: ratio'", "plan")
        return self


class Campaign(Part):
    """A campaign.

    Attributes:
        schema_version: version of this format.
        name: name of the campaign and its folder: letters, digits, ``.``, ``_`` and ``-``.
        description: which question it answers.
        matrix: the studies.
        include: studies beside those of the matrix; axes that are left out have the first value of the matrix.
        exclude: studies of the matrix that are left out.
        repetitions: independent runs of each study.
        baselines: baselines that the tables show beside the best plan and those of ``expect``; all if empty.
        indicators: whether to report how well work, weights and memory traffic of the models explain the latency of
            their best plans.
        settings: what all studies have in common.
        models: models that the campaign makes, by the names that ``matrix.model`` has for them.
        expect: published figures to show beside ours.
    """

    schema_version: Literal[1] = 1
    name: str
    description: str = ""
    matrix: Matrix
    include: tuple[Cell, ...] = ()
    exclude: tuple[Cell, ...] = ()
    repetitions: int = Field(default=1, strict=True, ge=1, le=1000)
    baselines: tuple[str, ...] = ()
    indicators: bool = False
    settings: Settings = Settings()
    models: dict[str, MadeModel] = Field(default_factory=dict)
    expect: tuple[Expectation, ...] = ()

    def named_plans(self) -> Iterator[tuple[Loc, str, Mapping[str, Any]]]:
        """Yield each plan that the file names: where, its name, and the axes of the studies that it is about."""
        for i, name in enumerate(self.baselines):
            yield ("baselines", i), name, {}
        for i, expected in enumerate(self.expect):
            for key, plan in (("plan", expected.plan), ("over", expected.over)):
                if plan is not None:
                    yield ("expect", i, key), plan, expected.where.values

    def bases(self, model: str) -> list[str]:
        """Return the model itself and those that it is made of, if the campaign makes them."""
        found = []
        while model in self.models:
            found.append(model)
            model = self.models[model].model
        return found

    @field_validator("models", mode="after")
    @classmethod
    def _ordered(cls, value: dict[str, MadeModel]) -> dict[str, MadeModel]:
        above = set[str]()
        for name, made in value.items():
            if not _NAME.fullmatch(name) or name.endswith(".tflite"):
                raise wrong(f"the name of model {name!r} {unsafe_name(name, 61)}", key=name)
            if made.model in value and made.model not in above:
                raise wrong(
                    f"model {made.model!r} is not above {name!r}", "list models after what they are made of", name
                )
            if made.beside is not None and (made.beside not in value or made.beside == name):
                raise wrong(f"there is no model {made.beside!r} beside {name!r}", "give another one of this list", name)
            if made.beside is not None and not (made.data and value[made.beside].data):
                raise wrong(f"{name!r} and {made.beside!r} do not both have an accuracy", "add 'data'", name)
            others, base = [value[made.beside]] if made.beside else [], made.model
            while base in value:
                others.append(value[base])
                base = value[base].model
            if any(
                made.data and other.data and (made.data, made.share) != (other.data, other.share) for other in others
            ):
                problem = f"{name!r} would be measured by inputs that another model of it was trained on"
                raise wrong(
                    problem, "give models that are made of or compared with each other the same data and share", name
                )
            above.add(name)
        return value

    @field_validator("name", mode="after")
    @classmethod
    def _safe(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(unsafe_name(value, 61))
        return value


_HEADINGS = {
    "Matrix": "matrix",
    "Cell": "include, exclude, where",
    "Settings": "settings",
    "MadeModel": "models",
    "Expectation": "expect",
}
_KINDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
_BOUNDS = {"minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}


CampaignFile = Document[Campaign]


def read_campaign(path: Path) -> CampaignFile:
    """Read a campaign file.

    Raises:
        UsageError: the file is missing, not YAML, or invalid; the message begins with ``file:line``.
    """
    empty = "a campaign has a name and a matrix"
    return read_document(
        path, Campaign, "a campaign", empty, words=False, most_nbytes=MAX_NBYTES, most_depth=_MAX_DEPTH
    )


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of campaign files; axes may hold a single value instead of a list."""
    schema = Campaign.model_json_schema()
    for part in (Campaign, Matrix, Cell, Settings, MadeModel, Expectation):
        place = schema if part is Campaign else schema["$defs"][part.__name__]
        about, texts = _documented(part if part is not Cell else Matrix)
        if part is not Cell:
            place["description"] = about
        for name, value in place["properties"].items():
            value.pop("title", None)
            value["description"] = texts[name]
    for axis in schema["$defs"]["Matrix"]["properties"].values():
        many = {key: axis.pop(key) for key in ("type", "items", "minItems") if key in axis}
        axis["anyOf"] = [many, many["items"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _documented(part: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """Return the summary of a class's docstring, and the description of each attribute."""
    about, _, rest = (inspect.getdoc(part) or "").partition("\n\nAttributes:\n")
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in rest.splitlines():
        if not line.startswith("     "):
            names = line.strip().partition(": ")[0].split(", ")
        text = line.strip().removeprefix(f"{', '.join(names)}: ").replace("``", "`")
        for name in names:
            texts[name] = f"{texts.get(name, '')} {text}".strip()
    return " ".join(about.split()).replace("``", "`"), texts


def reference() -> str:
    """Return a table of keys for the file and for each part of it."""
    schema = json_schema()
    parts = ["### The file", "", *_table(schema)]
    for name, key in _HEADINGS.items():
        part = schema["$defs"][name]
        about = " ".join(part["description"].split())
        parts += ["", f"### `{key}`", "", about]
        if name != "Cell":  # its keys are those of the matrix
            parts += ["", *_table(part)]
    return "\n".join(parts) + "\n"


def _table(part: Mapping[str, Any]) -> Iterator[str]:
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    required = part.get("required", ())
    for name, value in part["properties"].items():
        left_out = "required" if name in required else _default(value)
        yield f"| `{name}` | {_kind(value)} | {left_out} | {value['description'].replace('|', chr(92) + '|')} |"


def _default(value: Mapping[str, Any]) -> str:
    default = value.get("default")
    if default == [] or isinstance(default, dict) or "default" not in value:
        return "none"
    if isinstance(default, list) and len(default) == 1:  # of an axis
        default = default[0]
    return f"`{json.dumps(default)}`"


def _kind(value: Mapping[str, Any]) -> str:
    """Return the values that a key may have, in words."""
    if "$ref" in value:
        return f"a mapping, see `{_HEADINGS[value['$ref'].rpartition('/')[2]].rpartition(' ')[2]}`"
    if "additionalProperties" in value:
        return f"names, and for each {_kind(value['additionalProperties'])}"
    if "enum" in value:
        return " or ".join(f"`{v}`" for v in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if "anyOf" in value:
        kinds = [_kind(each) for each in value["anyOf"]]
        many = [k for k in kinds if k.startswith("a list of ")]
        return f"{kinds[-1]}, or a list" if many else " or ".join(kinds)
    if value["type"] == "array":
        return f"a list of {_kind(value['items']).replace('a mapping', 'mappings')}"
    bounds = [f"{word} {value[key]:.12g}" for key, word in _BOUNDS.items() if key in value]
    return f"{_KINDS[value['type']]}{', ' if bounds else ''}{', '.join(bounds)}"
