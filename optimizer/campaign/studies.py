"""Studies of a campaign: settings, names, and the digest by which a finished study is recognised."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from evaluators.litert.processors import check_libraries
from evaluators.objectives import LATENCY
from evaluators.own_process import own_process
from evaluators.registry import make_evaluator
from optimizer.campaign.file import AXES, Campaign, CampaignFile, Settings
from optimizer.model.baselines import MEANINGS, OWN, is_asked_for, is_baseline
from optimizer.samplers import make_sampler
from optimizer.study.config import StudyConfig, check_effects, first_objective_of, option, parse_config
from search_spaces.core.errors import (
    EXIT_INTERRUPTED,
    ModelError,
    OptimizeError,
    UnavailableError,
    UnstableError,
    UsageError,
    reason_of,
)
from search_spaces.core.plugins import find_entry
from search_spaces.core.wording import did_you_mean
from search_spaces.core.workload import is_workload, names_file, workload_of
from search_spaces.core.yaml_file import Loc
from search_spaces.models.files import file_digest
from search_spaces.models.labelled import MNIST, read_labelled
from search_spaces.models.plugin import model_names
from search_spaces.models.zoo.names import is_name, nearest, parse_name
from search_spaces.rewrites.tucker_ranks import parse_rule
from search_spaces.spaces.registry import parse_freedoms

MOST_STUDIES = 10_000
INTERRUPTED = frozenset({EXIT_INTERRUPTED, -signal.SIGINT, -signal.SIGTERM})
"""Exit codes of a process that was interrupted."""
_WITHOUT_EFFECT = {
    "precision": "their latencies are predicted",
    "device": "their evaluators have no devices to choose from",
    "power": "it is for the objective energy, or max_energy",
}
_FILES = ("model", "platform", "compare_with")  # axes whose values may be files
_EXAMPLES = ("whole on cpu", "layer length K=2", "layer length K=3", "layer length K=4", "layer type K=2",
             "parameter count K=2", "parameter count K=3", "parameter count K=4", "every layer", "best")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Planned:
    """A study of a campaign.

    Attributes:
        name: unique in the campaign; also its folder, with the digest's first letters.
        axes: the value of each axis, as the file has it.
        repetition: from 1.
        config: the study's settings, without its name and folder.
        digest: of all settings of the study and the contents of its files.
        made: digest of the recipe of its model, where the campaign makes that; else "".
    """

    name: str
    axes: dict[str, Any]
    repetition: int
    config: StudyConfig
    digest: str
    made: str = ""

    @property
    def folder(self) -> str:
        """Name of the run folder."""
        return f"{self.name}-{self.digest[:8]}"


@dataclass(slots=True)
class State:
    """Outcome of a study.

    Attributes:
        status: ``pending``, ``begun`` (interrupted; its trials are kept), ``done`` or ``failed``.
        error: why it failed, or "".
        exit_code: of the study, as if it had been run alone.
        wall_s: seconds that it took; 0 if it was finished before.
    """

    planned: Planned
    status: str = "pending"
    error: str = ""
    exit_code: int = 0
    wall_s: float = 0.0

    def end(self, code: int, error: str) -> None:
        """Store how the study's process ended; an undecided study is done, with its best known plan."""
        if code in {0, UnstableError.exit_code}:
            self.status = "done"
            return
        self.status, self.error = "failed", error
        self.exit_code = EXIT_INTERRUPTED if code in INTERRUPTED else max(code, 1)

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain values."""
        asked = {
            name: getattr(self.planned, name) for name in ("name", "folder", "digest", "repetition", "axes", "made")
        }
        return asked | {name: getattr(self, name) for name in ("status", "error", "exit_code", "wall_s")}


def run_words(
    words: Sequence[str],
    started: Callable[[subprocess.Popen[bytes]], object] = lambda _: None,
    output: IO[bytes] | None = None,
) -> tuple[int, str]:
    """Run a command in a process of its own; return its exit code and its error.

    Args:
        words: of the command, without ``--json``.
        output: file for its document; None for none.
    """
    command = own_process("optimizer.cli", *words, "--json")
    process = subprocess.Popen(command, stdout=output or subprocess.DEVNULL, stderr=subprocess.PIPE)
    started(process)
    try:
        _, errors = process.communicate()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    lines = errors.decode(errors="replace").strip().splitlines()
    own = [line for line in lines if line.startswith("optimize: ")]  # what a plug-in's library prints may come later
    last = [*lines, *own][-1].removeprefix("optimize: ") if lines else f"ended with {process.returncode}"
    return process.returncode, last


def plan_studies(file: CampaignFile) -> list[Planned]:
    """Return the studies of a campaign, in the order of the file.

    Raises:
        UsageError: a study is invalid, two are the same, none is left, or a baseline is unknown; with ``file:line``.
    """
    campaign = file.content
    _check_plans(file)
    _check_models(file)
    cells = list(_matrix(file))
    for index, cell in enumerate(campaign.include):
        first = {axis: getattr(campaign.matrix, axis)[0] for axis in AXES}
        axes = {**first, **cell.values}
        if any(axes == other for other, _ in cells):
            raise file.error(
                ("include", index), "this study is already in the matrix", "leave it out, or change an axis"
            )
        cells.append((axes, ("include", index)))
    if not cells:
        raise file.error(("exclude",), "no study is left", "exclude fewer")
    varying = [axis for axis in AXES if axis == "model" or len({json.dumps(axes[axis]) for axes, _ in cells}) > 1]
    digests: dict[Path, str] = {}
    found = []
    for axes, loc in cells:
        config = _config(file, axes, loc)
        inputs = _inputs(file, axes, config, loc, digests)
        for repetition in range(1, campaign.repetitions + 1):
            text = json.dumps([inputs, repetition], sort_keys=True)
            name = _name(axes, varying) + (f"-r{repetition}" if campaign.repetitions > 1 else "")
            digest, made = hashlib.sha256(text.encode()).hexdigest(), str(inputs.get("made", ""))
            found.append(Planned(name, axes, repetition, config, digest, made))
    _check_names(file, found)
    _check_expected(file, found)
    for name, why in _WITHOUT_EFFECT.items():
        if getattr(campaign.settings, name) and not any(name in s.config.model_fields_set for s in found):
            raise file.error(("settings", name), f"{name} has no effect on any study: {why}", "leave it out")
    return found


def code_of(campaign: Campaign) -> list[str]:
    """Return the names in a campaign that can load code: samplers and processors."""
    samplers = (*campaign.matrix.sampler, *(cell.sampler for cell in campaign.include))
    processors = (*campaign.matrix.processors, *(cell.processors for cell in campaign.include))
    return [name for name in (*samplers, *",".join(filter(None, processors)).split(",")) if name]


def _matrix(file: CampaignFile) -> Iterator[tuple[dict[str, Any], Loc]]:
    campaign = file.content
    values = [getattr(campaign.matrix, axis) for axis in AXES]
    for axis, each in zip(AXES, values, strict=True):
        if len(set(each)) != len(each):
            raise file.error(("matrix", axis), f"matrix.{axis} has a value twice", "use 'repetitions' for repetitions")
    count = math.prod(map(len, values)) * campaign.repetitions
    if count > MOST_STUDIES:
        raise file.error(("matrix",), f"the matrix has {count:,} studies, more than {MOST_STUDIES:,}")
    used = [False] * len(campaign.exclude)
    for combination in itertools.product(*values):
        axes = dict(zip(AXES, combination, strict=True))
        out = [cell.values.items() <= axes.items() for cell in campaign.exclude]
        used = [a or b for a, b in zip(used, out, strict=True)]
        if not any(out):
            yield axes, ("matrix",)
    if not all(used):
        index = used.index(False)
        raise file.error(("exclude", index), "this excludes no study of the matrix", "see whether its values are in it")


def _config(file: CampaignFile, axes: dict[str, Any], loc: Loc) -> StudyConfig:
    settings = file.content.settings
    values = {**axes, **{name: value for name, value in settings if value not in (None, (), False)}}
    values["objective"] = tuple(axes["objective"].split(","))
    for name in _without_effect(values):
        values.pop(name, None)
    if made := file.content.bases(axes["model"]):
        values["model"] = file.content.models[made[-1]].model
    for axis in _FILES:
        path = file_of(file, values[axis])
        if path is not None:
            values[axis] = str(path)
    expected = [e for e in file.content.expect if e.where.values.items() <= axes.items()]
    named = (*(name for e in expected for name in (e.plan, e.over)), *filter(is_asked_for, file.content.baselines))
    compared = (values["compare_with"], *named)
    values["compare_with"] = tuple(dict.fromkeys(n for i, n in enumerate(compared) if n and (i == 0 or is_baseline(n))))
    try:
        config = parse_config(values)
    except UsageError as error:
        for name in Settings.model_fields:
            if error.what.startswith(f"{option(name)} "):
                raise file.error(("settings", name), as_keys(error.what), as_keys(error.hint)) from error
        axis = next((a for a in AXES if f"{option(a)} " in error.what), "model")
        where = _place(file, loc, axis, axes[axis])
        raise file.error(where, as_keys(error.what), as_keys(error.hint)) from error
    if config.rate is not None and not names_file(config.model):
        what = f"rate has no effect on {config.model!r}: it has no arrival times"
        raise file.error(_place(file, loc, "rate", axes["rate"]), what, "give a workload file")
    for axis, check in _CHECKS.items():
        try:
            check(getattr(config, axis))
        except UsageError as error:
            raise file.error(_place(file, loc, axis, axes[axis]), error.what, error.hint) from error
    return config


def _without_effect(values: dict[str, Any]) -> Iterator[str]:
    """Yield settings of a campaign that a study leaves out, since it would refuse them."""
    with suppress(OptimizeError):  # an unknown evaluator is reported where the settings are checked
        capabilities = make_evaluator(values["evaluator"]).capabilities
        if capabilities.predicts and not values.get("stop_when_proven"):
            yield "precision"
        if not capabilities.targets:
            yield "device"
    try:
        check_effects({name: values.get(name) for name in ("power", "objective", "max_energy")})
    except UsageError:
        yield "power"


def _check_model(name: str) -> None:
    if is_workload(name) and not names_file(name):
        for client in workload_of(name).clients:
            _check_model(client.model)
    elif is_name(name) and not name.endswith(".tflite"):
        parse_name(name)
    elif not Path(name).exists() and name not in model_names():
        raise ModelError(f"no model or file is called {name!r}", nearest(name))


def _check_sampler(name: str) -> None:
    with suppress(UnavailableError):  # only the studies that need a missing package fail
        make_sampler(name, 0, 0)


def _check_given(paths: tuple[str, ...]) -> None:
    for path in paths:
        if not (is_baseline(path) or Path(path).exists()):
            raise UsageError(f"there is no plan {path!r}", "give a file relative to the campaign's, or a run folder")


def _check_processors(names: tuple[str, ...] | None) -> None:
    for name in names or ():
        check_libraries(name)


_CHECKS: dict[str, Callable[[Any], object]] = {
    "model": cache(_check_model),
    "evaluator": cache(partial(find_entry, "evaluator")),
    "allow": cache(parse_freedoms),
    "sampler": cache(_check_sampler),
    "processors": _check_processors,
    "compare_with": _check_given,
}


def _place(file: CampaignFile, loc: Loc, axis: str, value: object) -> Loc:
    """Return the location of an axis's value in the file."""
    if loc != ("matrix",):
        return (*loc, axis)
    return "matrix", axis, getattr(file.content.matrix, axis).index(value)


def file_of(file: CampaignFile, value: object) -> Path | None:
    """Return the file that a value of an axis names, relative to the campaign's; None where it names none."""
    if not isinstance(value, str) or "\0" in value:
        return None
    path = file.path.parent / value
    named = value.endswith((".tflite", ".yaml", ".yml", ".json", ".npz")) or "/" in value
    return path if named and path.is_file() else None


def recipe_digest(file: CampaignFile, name: str, seed: int) -> str:
    """Return the digest of all that a model is made of: the recipes, the contents of files, and the seed.

    Raises:
        OSError: a file cannot be read.
    """
    recipes = [file.content.models[each] for each in file.content.bases(name)]
    files = [file_of(file, value) for recipe in recipes for value in (recipe.model, recipe.data)]
    parts = [[recipe.model_dump(mode="json", exclude={"beside"}) for recipe in recipes], seed]
    parts.append([file_digest(path) for path in files if path is not None])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _inputs(
    file: CampaignFile, axes: dict[str, Any], config: StudyConfig, loc: Loc, digests: dict[Path, str]
) -> dict[str, Any]:
    """Return all that a study depends on, as plain values; files are represented by their digests."""
    inputs = config.model_dump(mode="json", exclude={"study", "out"})
    for axis in _FILES:
        path = file_of(file, axes[axis])
        if path is None:
            continue
        try:
            digests[path] = digests.get(path) or file_digest(path)
        except OSError as error:
            raise file.error((*loc, axis), f"{path}: {reason_of(error)}") from error
        inputs[axis] = digests[path]
    if axes["model"] in file.content.models:
        try:
            inputs |= {"model": axes["model"], "made": recipe_digest(file, axes["model"], axes["seed"])}
        except OSError as error:
            raise file.error(("models", axes["model"]), f"{error.filename}: {reason_of(error)}") from error
    return inputs


def _name(axes: dict[str, Any], varying: list[str]) -> str:
    short = {"seed": "s", "budget": "b", "max_stages": "k", "max_error": "e", "rate": "x"}
    words = []
    for axis in varying:
        text = "default" if axes[axis] is None else str(axes[axis])
        text = Path(text).stem if axis in ("platform", "compare_with") or names_file(text) else text
        words.append(short.get(axis, "") + _cut(re.sub(r"[^A-Za-z0-9._]+", "_", text).strip("_."), 40))
    return _cut("-".join(words), 90)


def _cut(word: str, most: int) -> str:
    """Return a word of limited length; one that is cut ends in a digest, so that two of them stay apart."""
    if len(word) <= most:
        return word
    return f"{word[: most - 7]}-{hashlib.sha256(word.encode()).hexdigest()[:6]}"


def _check_plans(file: CampaignFile) -> None:
    """Raise if no study can have a named plan."""
    for loc, name, _ in file.content.named_plans():
        if not (name == "best" or name.startswith(OWN) or is_baseline(name)):
            known = (*_EXAMPLES, *MEANINGS)  # of some the beginnings alone
            hint = did_you_mean(name, known, f"there are: {', '.join(_EXAMPLES)}", cutoff=0.4, quoted=True)
            raise file.error(loc, f"unknown baseline {name!r}", hint)


def _check_models(file: CampaignFile) -> None:
    """Raise if a model cannot be made, or no study uses it."""
    campaign = file.content
    named = (*campaign.matrix.model, *(cell.model for cell in campaign.include if cell.model is not None))
    checked = cache(read_labelled)
    used = {base for name in named for base in campaign.bases(name)}
    for name, made in campaign.models.items():
        if name not in used:
            raise file.error(("models", name), f"no study uses the model {name!r}", "add it to matrix.model")
        if made.beside is not None and made.beside not in named:
            what = f"no study uses the model {made.beside!r} beside {name!r}"
            raise file.error(("models", name, "beside"), what, "add it to matrix.model")
        try:
            if made.tucker is not None:
                parse_rule(made.tucker)
            if made.model not in campaign.models:
                _check_model(str(file_of(file, made.model) or made.model))
        except OptimizeError as error:
            raise file.error(("models", name), error.what.removeprefix("--"), error.hint) from error
        data = file_of(file, made.data)
        if made.data is not None and made.data != MNIST and data is None:
            hint = f"give an .npz file relative to the campaign's, or {MNIST}"
            raise file.error(("models", name, "data"), f"there are no data {made.data!r}", hint)
        if data is not None:
            try:
                checked(str(data))
            except UsageError as error:
                raise file.error(("models", name, "data"), error.what.removeprefix("--data "), error.hint) from error


def _check_names(file: CampaignFile, found: list[Planned]) -> None:
    names: dict[str, Planned] = {}
    for study in found:
        other = names.setdefault(study.name, study)
        if other is not study:
            raise file.error(("matrix",), f"two studies have one name, {study.name!r}", "change one of them")


def _check_expected(file: CampaignFile, found: Sequence[Planned]) -> None:
    """Raise if no study can have a figure that is expected."""
    for i, expected in enumerate(file.content.expect):
        wanted = expected.where.values.items()
        mine = [study for study in found if wanted <= study.axes.items()]
        if not mine:
            raise file.error(("expect", i, "where"), "no study has these values", "see whether they are in the matrix")
        others = [o for o in (first_objective_of(s.axes["objective"]) for s in mine) if o not in {LATENCY.name, "mean"}]
        if expected.metric == "latency_ms" and len(others) == len(mine):
            problem = f"latency_ms is of the objectives latency and mean, not of {others[0]}"
            raise file.error(("expect", i), problem, "give 'metric: ratio'")


def as_keys(text: str) -> str:
    """Return a text about options with the keys of a campaign file: ``--max-stages`` → ``max_stages``."""
    keys = {option(name): name for name in StudyConfig.model_fields}
    return re.sub(r"--[a-z-]+", lambda found: keys.get(found[0], found[0]), text)
