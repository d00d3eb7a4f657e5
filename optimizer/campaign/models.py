"""Models that a campaign makes: convolutions decomposed, weights trained; each for every seed of its studies."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optimizer.campaign.file import AXES, Campaign, CampaignFile, MadeModel
from optimizer.campaign.studies import INTERRUPTED, Planned, State, file_of, recipe_digest, run_words
from optimizer.files import disk_errors, write_atomic
from search_spaces.core.bounded import read_bounded
from search_spaces.core.wording import plural

if TYPE_CHECKING:
    from optimizer.campaign.console import ProgressCampaign
    from optimizer.campaign.run import CampaignRun

FOLDER = "models"
_MOST_NBYTES = 64 << 20
_DECOMPOSED = ".tucker.tflite"  # before it is trained on

Row = dict[str, Any]
Share = Annotated[float, Field(ge=0, le=1)]


class Record(BaseModel):
    """Work and accuracy of a model that was made.

    Attributes:
        recipe: digest of all that it was made of.
        before, after: accuracy before training and after it; None without training.
        ci95: interval of ``after``, as the inputs kept apart are a sample.
        kept_apart: inputs that the accuracy is measured by.
        trained_by: the library and the device that trained it; "" without training.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)
    recipe: str
    macs: int = Field(ge=1, le=1 << 62)
    parameters: int = Field(ge=0, le=1 << 62)
    before: Share | None = None
    after: Share | None = None
    ci95: tuple[Share, Share] | None = None
    kept_apart: int = 0
    trained_by: str = ""


def model_file(folder: Path, name: str, seed: int, digest: str) -> Path:
    """Return where a campaign's folder has a model.

    Args:
        digest: of its recipe (:func:`~optimizer.campaign.studies.recipe_digest`).
    """
    return folder / FOLDER / f"{name}-s{seed}-{digest[:8]}.tflite"


def read_record(folder: Path, name: str, seed: int, digest: str) -> Record | None:
    """Return the record of a model; None if it was not made, or its record is damaged."""
    try:
        path = model_file(folder, name, seed, digest).with_suffix(".json")
        found = Record.model_validate_json(read_bounded(path, _MOST_NBYTES))
    except (OSError, ValidationError):
        return None
    return found if found.recipe == digest else None


def make_models(run: CampaignRun, waiting: Sequence[State], watcher: ProgressCampaign) -> list[State]:
    """Make the models that are missing; return the states of studies that have theirs, and end the others.

    Raises:
        KeyboardInterrupt: it was interrupted; models that are made are kept.
        RunFolderError: the folder cannot be written.
    """
    failed: dict[tuple[str, int], tuple[int, str]] = {}
    ready = []
    for state in waiting:
        keys = [(name, int(state.planned.axes["seed"])) for name in run.file.content.bases(state.planned.axes["model"])]
        for name, seed in reversed(keys):
            digest = recipe_digest(run.file, name, seed)
            there = model_file(run.folder, name, seed, digest).is_file()
            if (there and read_record(run.folder, name, seed, digest)) or any(key in failed for key in keys):
                continue
            watcher.making(f"making {name}, seed {seed}")
            code, error = _make(run, name, seed, digest)
            if code in INTERRUPTED:
                raise KeyboardInterrupt
            if code:
                failed[name, seed] = code, f"the model {name} cannot be made: {error}"
        if why := next((failed[key] for key in keys if key in failed), None):
            state.end(*why)
            watcher.ended(state)
        else:
            ready.append(state)
    return ready


def _make(run: CampaignRun, name: str, seed: int, digest: str) -> tuple[int, str]:
    """Make a model and write its record; return the exit code, and why it failed."""
    recipe, out = run.file.content.models[name], model_file(run.folder, name, seed, digest)
    with disk_errors(out.parent):
        out.parent.mkdir(exist_ok=True)
        out.with_suffix(".json").unlink(missing_ok=True)
    base, known = _base(run, recipe, seed), dict[str, Any]()
    for words, made in _commands(run.file, recipe, base, seed, out):
        with TemporaryFile() as output:
            code, error = run_words([*words, "--out", str(made)], output=output)
            if code:
                return code, error
            output.seek(0)
            known |= json.loads(output.read(_MOST_NBYTES))
        base = str(made)
    macs, parameters = known["macs"], known["parameters"]  # of a rewrite before and after it
    accuracy, data = known.get("accuracy", {}), known.get("data", {})
    record = Record(
        recipe=digest,
        macs=macs["after"] if isinstance(macs, dict) else macs,
        parameters=parameters["after"] if isinstance(parameters, dict) else parameters,
        kept_apart=data.get("kept_apart", 0),
        trained_by=known.get("trained_by", ""),
        **accuracy,
    )
    out.with_suffix(_DECOMPOSED).unlink(missing_ok=True)
    write_atomic(out.with_suffix(".json"), record.model_dump_json(indent=1).encode())
    return 0, ""


def _base(run: CampaignRun, recipe: MadeModel, seed: int) -> str:
    if recipe.model in run.file.content.models:
        digest = recipe_digest(run.file, recipe.model, seed)
        return str(model_file(run.folder, recipe.model, seed, digest).absolute())
    path = file_of(run.file, recipe.model)
    return recipe.model if path is None else str(path.absolute())


def _commands(
    file: CampaignFile, recipe: MadeModel, base: str, seed: int, out: Path
) -> Iterator[tuple[Sequence[str], Path]]:
    """Yield the commands that make a model, and the file that each writes."""
    if recipe.tucker is not None:
        made = out.with_suffix(_DECOMPOSED) if recipe.data else out
        yield ("rewrite", base, "--tucker", recipe.tucker), made
        base = str(made)
    if recipe.data is not None:
        how = {"epochs": recipe.epochs, "rate": recipe.rate, "share": recipe.share, "seed": seed}
        words = [word for name, value in how.items() for word in (f"--{name}", str(value))]
        data = str(file_of(file, recipe.data) or recipe.data)
        yield ("train", base, "--quiet", "--data", data, *words), out


def used_model(folder: Path, planned: Planned) -> str | None:
    """Return the file of a study's model where the campaign has made it."""
    if not planned.made:
        return None
    path = model_file(folder, planned.axes["model"], planned.axes["seed"], planned.made)
    return str(path) if path.is_file() else None


def trained_rows(
    folder: Path, campaign: Campaign, studies: Sequence[Mapping[str, Any]], results: Sequence[Row]
) -> list[Row]:
    """Return a row for each model that the campaign made and that studies use: the mean over its seeds.

    Args:
        studies: as the state of the campaign has them.
    """
    best = [row for row in results if row["plan"] == "best"]
    known: dict[str, dict[int, Record]] = {name: {} for name in campaign.models}
    for study in studies:
        name, seed = str(study["axes"]["model"]), study["axes"]["seed"]
        if study["status"] == "done" and (found := read_record(folder, name, seed, str(study.get("made", "")))):
            known[name][seed] = found
    rows = []
    for name, records in known.items():
        if not records:
            continue
        each, recipe = list(records.values()), campaign.models[name]
        mine = [row for row in best if row["model"] == name]
        alike = len({json.dumps([row.get(axis) for axis in AXES if axis != "seed"]) for row in mine}) == 1
        latencies = [row["latency_ms"] for row in mine if row["latency_ms"] and alike]
        other = known.get(recipe.beside or "", {})
        both = [(record, other[seed]) for seed, record in records.items() if seed in other]
        both = [(ours, theirs) for ours, theirs in both if ours.after is not None and theirs.after is not None]
        less = [(ours.after or 0.0) - (theirs.after or 0.0) for ours, theirs in both]
        wide = [math.hypot(*(r.ci95[1] - r.ci95[0] for r in pair if r.ci95)) / 2 for pair in both]
        after = [record.after for record in each if record.after is not None]
        before = [record.before for record in each if record.before is not None]
        half = [(r.ci95[1] - r.ci95[0]) / 2 for r in each if r.ci95 is not None]
        rows.append(
            {"model": name, "family": family(campaign, name), "tucker": recipe.tucker, "seeds": len(records)}
            | {"macs": round(statistics.mean(r.macs for r in each)), "parameters": each[0].parameters}
            | {"trained_by": ", ".join(sorted({record.trained_by for record in each}))}
            | {"latency_ms": statistics.median(latencies) if latencies else None}
            | {"accuracy_before": statistics.mean(before) if before else None}
            | _mean("accuracy", after, statistics.median(half) if half else 0.0)
            | (
                dict(zip(("accuracy_low", "accuracy_high"), each[0].ci95, strict=True))
                if len(each) == 1 and each[0].ci95
                else {}
            )
            | {"beside": recipe.beside}
            | _mean("difference", less, statistics.median(wide) if wide else 0.0, least=-1.0)
        )
    return rows


def family(campaign: Campaign, model: str) -> str:
    """Return the name of the network that a model is, or is made of, without its width."""
    made = campaign.bases(model)
    return (campaign.models[made[-1]].model if made else model).partition("@")[0]


def _mean(name: str, values: Sequence[float], half: float, *, least: float = 0.0) -> Row:
    """Return the mean and its 95 % interval by Student's t, at least as wide as the inputs allow, as they are a sample.

    Args:
        half: half the width of the interval of a single value.
        least: of such a value.
    """
    if not values:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    mean, half = statistics.mean(values), half / math.sqrt(len(values))
    if len(values) > 1:
        from scipy.stats import t

        between = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
        half = max(half, between)
    return {name: mean, f"{name}_low": max(mean - half, least), f"{name}_high": min(mean + half, 1.0)}


def share_text(row: Row, name: str) -> str:
    """Return a share of a row in per cent, or a difference in points, with its interval; "" where there is none."""
    values, sign = [row[name], row[f"{name}_low"], row[f"{name}_high"]], "+" if name == "difference" else ""
    shown = [f"{round(100.0 * v, 1) + 0.0:{sign}.1f}".replace("-", "−") for v in values if v is not None]
    if not shown:
        return ""
    return shown[0] + (f" [{shown[1]}, {shown[2]}]" if len(shown) == 3 else "")


def accuracy_text(rows: Sequence[Row]) -> str:
    """Return how many models are less accurate than those beside them, in a sentence; "" where none were compared."""
    compared = [row for row in rows if row["difference"] is not None]
    if not compared:
        return ""
    less = ", ".join(row["model"] for row in compared if row["difference_high"] < 0.0)
    more = ", ".join(row["model"] for row in compared if row["difference_low"] > 0.0)
    found = [f"significantly {how} accurate: {names}" for how, names in (("less", less), ("more", more)) if names]
    return (
        f"Of {plural(len(compared), 'model')} beside another one, {'; '.join(found) or 'none differs significantly'}."
    )
