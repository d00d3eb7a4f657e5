"""Settings of a study, validated, with errors in the words of the command line.

Importing this imports pydantic: the command line does so only after it has parsed its arguments.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from evaluators.objectives import OBJECTIVES
from evaluators.workload.outcome import OBJECTIVES as OF_WORKLOADS
from optimizer.shared.storage import check_url
from search_spaces.core.errors import UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform
from search_spaces.core.workload import GIVEN
from search_spaces.models import parse_input_shapes
from search_spaces.spaces.registry import EXACT, make_space, needs_any_stages, offered, parse_freedoms
from search_spaces.spaces.space import EnumerableSpace

_STUDY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHOWN_CHARACTERS = 60
_MOST_DIGITS = 300  # longer numbers may overflow a float
_MOST = 10**_MOST_DIGITS
# Options that may be given several times.
_REPEATED = ("compare_with", "input_shape", "objective", "power", "state", *GIVEN)


def _order(name: str) -> int:
    """Return the position of an objective among all."""
    return list(OBJECTIVES).index(name) if name in OBJECTIVES else len(OBJECTIVES)


def separated(value: object) -> object:
    """Return the words of texts with commas between them, as ``("latency,memory",)``; other values as they are."""
    words = (value,) if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return value
    return tuple(name.strip() for word in words for name in word.split(","))


def unsafe_name(name: str, most: int) -> str:
    """Return why a name cannot be that of a file, and a similar one that can where there is one."""
    better = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")[:most]
    rule = f"may contain only letters, digits, '.', '_' and '-' (no spaces), at most {most}"
    return f"{rule}, and must begin with a letter or digit{f'; try {better}' if better else ''}"


def parse_powers(words: Sequence[str]) -> dict[str, float]:
    """Return the watts that words like ``cpu0=2.5`` give to processors.

    Raises:
        ValueError: a word is not ``processor=watts``.
    """
    found: dict[str, float] = {}
    for word in words:
        processor, _, watts = word.rpartition("=")
        if not processor or not re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", watts) or not 0.0 < float(watts) < 1e5:
            raise ValueError("must be a processor and its watts, for example cpu0=2.5")
        found[processor] = float(watts)
    return found


def _one_text(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def _texts(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _split(value: object) -> object:
    return tuple(value.split(",")) if isinstance(value, str) else value


def _whole(value: object) -> object:
    # pydantic accepts "2.0", "1_000" and true as whole numbers; here they are errors.
    if isinstance(value, bool | float) or (isinstance(value, str) and not re.fullmatch(r"[+-]?[0-9]+", value)):
        raise ValueError("must be a whole number")
    if len(value) > _MOST_DIGITS if isinstance(value, str) else isinstance(value, int) and value >= _MOST:
        raise ValueError("is too large")
    return value


def _check_name(name: str) -> None:
    if not _STUDY.fullmatch(name):
        raise ValueError(unsafe_name(name, 100))


def _check_distinct(names: tuple[str, ...]) -> None:
    if not names or not all(names) or len(set(names)) != len(names):
        raise ValueError("must be different names separated by commas")


def first_objective_of(text: str) -> str:
    """Return the name of the first objective of a study; the order in which they are written changes nothing."""
    return min((word.strip() for word in text.split(",")), key=_order)


def _known_objectives(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the objectives in one order: that on the command line changes nothing."""
    for name in names:
        if name not in OF_WORKLOADS and name not in OBJECTIVES:
            near = difflib.get_close_matches(name, OBJECTIVES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"must be one or more of {', '.join(OBJECTIVES)}{hint}")
    if len(set(names)) != len(names):
        raise ValueError("an objective is named twice")
    return tuple(sorted(names, key=_order))


def _checked(check: Callable[[Any], object]) -> AfterValidator:
    """Return a validator that keeps a value unless ``check`` raises a ValueError."""

    def kept(value: Any) -> Any:
        check(value)
        return value

    return AfterValidator(kept)


_WHOLE = BeforeValidator(_whole)
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
"""One text or several."""


class StudyConfig(BaseModel):
    """The settings of one study. Values may be given as text, as the command line has them.

    Attributes:
        model: name of a built-in model, or path of a ``.tflite`` file; several as ``NAME*4,NAME``, or a workload's
            YAML file (:mod:`search_spaces.core.workload`).
        budget: distinct plans to measure at most.
        minutes: the search ends after so long, but not before the plans of ``compare_with`` are tried; the final
            comparison follows. None for no limit.
        max_stages: most stages of a plan; None for the space's own limit.
        sampler, evaluator: names in their registries.
        allow: freedoms of plans, for example ``cuts,branches``; ``exact`` for all but ranks that model and
            processors offer (:func:`with_freedoms`); or a plug-in's space.
        objective: what is minimised; several give their front. Of several models ``latency`` is the mean of theirs.
        seed: the same seed proposes the same plans, given the same measurements.
        precision: target half width of the confidence interval, relative to the median.
        study: name of the study, a safe file name; None for a new one.
        out: the run folder; None for ``runs/<study>``.
        processors: the processors to use, in order; None for all that are found.
        device: the device of an evaluator that measures elsewhere; a name, or several of identical devices.
        storage: URL of a storage that several workers share; None for a trial log of our own.
        heartbeat: seconds between heartbeats of such a worker; one that is silent four times as long counts as dead.
        platform: a file that describes the processors, or the name of one that ships with the product.
        allow_fallback: whether an accelerator may leave operators to the CPU.
        state: ``name:processor=factor,…`` for each state of the platform to optimise for; cost models only.
        robust: whether the worst of these states counts, or their mean.
        power: ``processor=watts`` for each processor, or for one of those that are alike.
        rate: how many times as often periodic and random requests of a workload come; None for as it says.
        deadline: milliseconds that one inference may take; None for any. Plans that the model expects to take clearly
            longer are not run, and a study whose best plan takes longer fails.
        max_energy: millijoules that one inference may take; None for any.
        max_error: by how much outputs may differ from the whole model's, relative to its largest one; None for as much
            as the precision of the processors explains.
        warm_start: folder of a finished study; its measurements of this model on this device are reused, and
            its best plans are tried on another one.
        compare_with: plans that are always in the final: files as ``plan.json`` or run folders of studies, whose plans
            are measured first, and names of baselines, for example ``whole on cpu``.
        stop_when_proven: whether to end once the best plan is within ``precision`` of the predicted lower bound.
        count_traffic: whether to count the memory traffic of the recommended plan, by the GPU's own counters.
        input_shape: ``name=1,224,224,3`` for inputs of the model that have open dimensions; as in the file by default.
        input: an ``.npy`` or ``.npz`` file with the inputs to measure and verify with; drawn ones by default. Of one
            of several models ``name=file``; so are the next two.
        signature: key of the model's signature to run; its main subgraph by default.
        custom_ops: a library with kernels of custom operators.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[str, Field(min_length=1), BeforeValidator(_one_text)]
    budget: Annotated[int, Field(ge=1), _WHOLE]
    minutes: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_stages: Annotated[int, Field(ge=1), _WHOLE] = 4
    sampler: str = Field(default="auto", min_length=1)
    evaluator: str = Field(default="litert", min_length=1)
    allow: Annotated[str, Field(min_length=1), AfterValidator(parse_freedoms)] = EXACT
    objective: Annotated[
        tuple[str, ...], Field(min_length=1), BeforeValidator(separated), AfterValidator(_known_objectives)
    ] = ("latency",)
    seed: Annotated[int, Field(ge=0, le=2**32 - 1), _WHOLE] = 0
    precision: float = Field(default=0.01, gt=0, lt=1, allow_inf_nan=False)
    study: Annotated[str, _checked(_check_name)] | None = None
    out: Path | None = None
    device: str | None = Field(default=None, min_length=1, max_length=1000)
    storage: Annotated[str, AfterValidator(check_url)] | None = None
    heartbeat: Annotated[int, Field(ge=1, le=3600), _WHOLE] = 10
    processors: Annotated[tuple[str, ...], BeforeValidator(_split), _checked(_check_distinct)] | None = None
    platform: Path | None = None
    allow_fallback: bool = False
    power: Annotated[Texts, _checked(parse_powers)] = ()
    state: Texts = ()
    robust: Literal["worst", "expected"] = "worst"
    rate: float | None = Field(default=None, ge=1e-3, le=1e3)
    deadline: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_energy: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_error: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    stop_when_proven: bool = False
    warm_start: Path | None = None
    compare_with: Texts = ()
    count_traffic: bool = False
    input_shape: Annotated[Texts, _checked(parse_input_shapes)] = ()
    input: Texts = ()
    signature: Annotated[tuple[Annotated[str, Field(max_length=1000)], ...], BeforeValidator(_texts)] = ()
    custom_ops: Texts = ()

    @property
    def given(self) -> Mapping[str, Sequence[str]]:
        """Inputs, signatures and custom operators, for :func:`search_spaces.core.workload.with_given`."""
        return {name: getattr(self, name) for name in GIVEN}

    @field_validator("out", "platform", "warm_start", "compare_with", "input", "custom_ops", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        if value == "" or (isinstance(value, list | tuple) and "" in value):  # the current folder
            raise ValueError("must not be empty")
        return value

    @field_validator("model", "out", "platform", "warm_start", "compare_with", "input", "custom_ops", mode="after")
    @classmethod
    def _path(cls, value: str | Path | tuple[str, ...] | None) -> str | Path | tuple[str, ...] | None:
        if any("\0" in str(path) for path in (value if isinstance(value, tuple) else (value,))):
            raise ValueError("a path cannot hold a NUL character")
        return value


def most_stages(config: StudyConfig, operators: int) -> int:
    """Return the most stages of a plan of a model; a given limit is kept even if the model has fewer operators."""
    if "max_stages" in config.model_fields_set:
        return config.max_stages
    return operators if needs_any_stages(config.allow) else min(config.max_stages, operators)


def with_freedoms(config: StudyConfig, graphs: Iterable[Graph], platform: Platform) -> StudyConfig:
    """Return the settings with the freedoms that ``exact`` stands for on a platform.

    Without ``allow``, a given ``max_stages`` means cuts alone. So do objectives of which none depends on a latency,
    as throughput, energy and memory: sharing work between processors does not reduce it.
    """
    unsaid = "allow" not in config.model_fields_set
    known = {OBJECTIVES[o].aggregation for o in config.objective if o in OBJECTIVES}
    plain = unsaid and ("max_stages" in config.model_fields_set or (known and known.isdisjoint(("path", "run"))))
    allow = "cuts" if plain else offered(config.allow, graphs, platform)
    return config if allow == config.allow else config.model_copy(update={"allow": allow})


def space_of(config: StudyConfig, graph: Graph, platform: Platform) -> EnumerableSpace:
    """Return the plans of one model that settings from :func:`with_freedoms` ask for; errors are its space's."""
    return make_space(config.allow, graph, platform, most_stages(config, len(graph.operators)))


def check_effects(values: Mapping[str, Any]) -> None:
    """Check that each given option has an effect.

    Raises:
        UsageError: one has none.
    """
    objectives: Any = separated(values.get("objective") or ())
    if not isinstance(objectives, tuple | list) or not all(isinstance(each, str) for each in objectives):
        objectives = ()  # told where the values are read
    need_powers = [name for name, known in OBJECTIVES.items() if known.of_powers]
    of_powers = not set(need_powers).isdisjoint(objectives)
    for name, needed, what in (
        ("power", of_powers or values.get("max_energy"), f"--objective {' or '.join(need_powers)} or --max-energy"),
        ("robust", values.get("state"), "--state"),
        ("heartbeat", values.get("storage"), "--storage"),
    ):
        if values.get(name) is not None and not needed:
            raise UsageError(f"--{name} has no effect without {what}", "see optimize --help")


def parse_config(values: Mapping[str, Any], *, keywords: bool = False) -> StudyConfig:
    """Return the settings; options that are None or absent get their defaults.

    Args:
        keywords: whether the values are those of keywords in Python, where a number is no text.

    Raises:
        UsageError: a value is wrong; the message names the option as on the command line, or the keyword.
    """
    for name in StudyConfig.model_fields if keywords else ():
        kind = StudyConfig.model_fields[name].annotation
        kinds = {int, float, bool}.intersection(get_args(kind) or (kind,))
        value = values.get(name)
        if kinds and (isinstance(value, str) or (isinstance(value, bool) and bool not in kinds)):
            wanted = "True or False" if bool in kinds else "a number"
            raise UsageError(f"{name} {value!r:.{_SHOWN_CHARACTERS}}: must be {wanted}")
    try:
        return StudyConfig.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0], str if keywords else option) from None


def option(field: str) -> str:
    """Return the command line's name of a setting: ``max_stages`` → ``--max-stages``."""
    return "--" + field.replace("_", "-")


def command_line(config: StudyConfig) -> str:
    """Return the command of this study, quoted for a POSIX shell; defaults are left out."""
    words = ["optimize"]
    for name, field in StudyConfig.model_fields.items():
        value = getattr(config, name)
        if value is None or (value == field.default and not field.is_required()):
            continue
        if value is True:
            words.append(option(name))
            continue
        # Shapes have commas of their own: that option is repeated.
        texts = value if name in _REPEATED else [",".join(value) if isinstance(value, tuple) else str(value)]
        for text in texts:
            # "--model -x" would be read as two options.
            words += [f"{option(name)}={text}"] if text.startswith("-") else [option(name), text]
    return shlex.join(words)


def _explain(error: ErrorDetails, named: Callable[[str], str]) -> UsageError:
    """Return the error in words; ``named`` returns how a setting is called where it was given."""
    name = str(error["loc"][0]) if error["loc"] else "configuration"
    if error["type"] == "missing":
        return UsageError(f"{named(name)} is missing")
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, StudyConfig.model_fields, n=1)
        return UsageError(f"{named(name)}: there is no such option", f"did you mean {named(near[0])}?" if near else "")
    context = error.get("ctx", {})
    problem = {
        "greater_than_equal": f"must be at least {context.get('ge')}",
        "greater_than": f"must be greater than {context.get('gt', 0):g}",
        "less_than": f"must be less than {context.get('lt', 0):g}",
        "less_than_equal": f"must be at most {context.get('le', 0)}",
        "bool_type": "must be true or false",
        "bool_parsing": "must be true or false",
        "tuple_type": "must be text, or several texts",
        "path_type": "must be a path",
        "int_parsing_size": "is too large",
        "int_type": "must be a whole number",
        "int_parsing": "must be a whole number",
        "float_parsing": "must be a number",
        "float_type": "must be a number",
        "finite_number": "must be a number",
        "string_type": "must be text",
        "string_too_short": "must not be empty",
        "literal_error": f"must be {context.get('expected')}",
        "value_error": str(context.get("error")),
    }.get(error["type"], error["msg"])
    given = error["input"]
    several = isinstance(given, tuple) or (name in {*_REPEATED, "model"} and isinstance(given, list))
    text = " ".join(map(str, given)) if several else str(given)
    shown = " ".join(text.split()) or "''"
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[: _SHOWN_CHARACTERS - 1]}…"
    return UsageError(f"{named(name)} {shown}: {problem}")
