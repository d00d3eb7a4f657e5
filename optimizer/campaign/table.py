"""A campaign's results as tables: a row for each plan of each study, curves, and a summary over repetitions."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from evaluators.cost_model.indicators import LEAST_MODELS, Indicators, indicators, left_out_errors
from evaluators.cost_model.indicators import explained as explained_by
from evaluators.cost_model.profile import find_profile
from evaluators.measurement.final import Ratio
from evaluators.objectives import LATENCY, OBJECTIVES, Objective
from evaluators.workload.objectives import find_workload_objective
from optimizer.campaign.file import AXES, Campaign, Expectation
from optimizer.campaign.models import family as family_of
from optimizer.campaign.models import read_record, trained_rows
from optimizer.files import damage_of, read_document, write_atomic
from optimizer.report.answer import objective_of, slower_text
from optimizer.report.data import Study, points, read_study
from optimizer.study.config import first_objective_of
from optimizer.study.folder import RESULT
from optimizer.study.front import Front
from search_spaces.core.errors import InfeasibleError, OptimizeError, RunFolderError, printable
from search_spaces.core.wording import did_you_mean, percent, plural
from search_spaces.core.workload import names_file

SCHEMA_VERSION = 1
STATE = "campaign.json"
GROUP = ("evaluator", "platform", "processors")
"""Axes that identify a device: R² is computed over the latencies of one device."""

SUMMARIES = ("summary", "fronts", "gains", "rates", "trained", "expected", "indicators", "explained")
"""The tables, fields of :class:`Tables`, that follow from ``results`` and the models."""

COLUMNS: Mapping[str, str] = {
    "plan": "`best` is the plan that the study recommends; the others are its baselines.",
    "stages": "number of stages.",
    "value, value_low, value_high": "of the objective, in `unit`, with its 95 % interval; of several objectives, of "
    "the one that the help of `--objective` lists first. `latency_ms`, `ci_low_ms` and `ci_high_ms` are the same where "
    "that is the latency, else empty.",
    "unit": "of `value` and `bound`.",
    "samples": "how many times the plan was measured; empty for predictions.",
    "predicted": "whether the study predicts its figures.",
    "source": "of the figure: `final`, `search` (few samples, not compared with the others), or `predicted`.",
    "over_best, over_best_low, over_best_high": "how many times the recommended plan's value this one's is, with its "
    "95 % interval, where the final compared both.",
    "over_others": "the same over each other baseline of the final: ratio, low and high, as JSON.",
    "ratio, ratio_low, ratio_high": "row `best`: how many times as fast the recommended plan is as the baseline in "
    "`compared_with`, with its 95 % interval. Where that baseline is itself recommended, of the next best plan: below "
    "1, or about 1 where the two tie.",
    "compared_with": "row `best`: the best plan of one stage, or of several models the best baseline of all.",
    "significant": "row `best`: whether the interval of `ratio` leaves out 1, on either side: where `ratio` is below "
    "1, the other plan is significantly slower than the recommended baseline.",
    "gain": "row `best`: how many times as fast the recommended plan is: `ratio`, or 1 where it is the baseline.",
    "bound": "the predicted lower bound of `value`, in `unit`; `model_bound_ms` is the same where that is the latency.",
    "gap": "row `best`: how far `value` is above `bound`, relative to it; below 0 where that bound is too high.",
    "unique_plans, proposed_plans, space_plans": "distinct plans that the study tried, how many were no baselines, and "
    "how many its space has.",
    "wall_s": "seconds that the study took.",
    "failure": "why the plan has no figure.",
    "page_faults, resident_mb": "how often a run waited for the disk in the mean, since memory did not hold the model, "
    "and the memory of the processes, with all plans loaded there, MB; empty where the system does not tell.",
    "accuracy": "of a model that the campaign trained: the share of the inputs kept apart whose class it tells.",
    "terms_ms": "of a plan with stages on an accelerator, what these take, JSON: to map tensors, copy them and give "
    "them back, to queue kernels, and to wait for them.",
    "misses, requests, makespan_ms, predicted_makespan_ms": "of several models: late and all requests of the median "
    "run, and the makespan, measured and simulated.",
}
"""Columns of ``results.csv`` beside the campaign, the study and its axes, and what they hold."""

Row = dict[str, Any]
_POOLED = ("seed",)
_COUNTED, _WORD_MB = ("memory_mb", "second_level_mb"), 4e-6
MOST_LATE = 0.05  # of the requests of the median run, where a rate counts as kept
_VAGUE = 0.05  # relative half width of an interval from which on the end of a campaign says so
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a campaign.

    Attributes:
        results: tidy: a row for each named plan of each finished study; the best plan is called ``best``.
        curves: best latency so far after each plan.
        summary: a row for each cell of the matrix, over its seeds and repetitions.
        fronts: of each study with several objectives, the values of each plan of its front.
        gains: the mean gain over the models of the matrix, for each cell of its other axes.
        rates: the highest rate of each workload at which deadlines are kept, by our plans and by the best baseline.
        trained: of each model that the campaign made, its work and its accuracy, the mean over seeds.
        expected: our figures that the campaign requires, beside published ones.
        indicators: work, weights and memory traffic of each model, with the latency of its best plan.
        explained: R² of each indicator, and relative errors of models that were left out.
        missing: baselines that the campaign names and no study has.
        unreadable: study → why its folder could not be read.
        measured_on: the processors that studies ran on, as ``gpu (NVIDIA H100 80GB HBM3:f16)``; none of predictions.
    """

    results: Sequence[Row]
    curves: Sequence[Row]
    summary: Sequence[Row]
    fronts: Sequence[Row]
    gains: Sequence[Row]
    rates: Sequence[Row]
    trained: Sequence[Row]
    expected: Sequence[Row]
    indicators: Sequence[Row]
    explained: Sequence[Row]
    missing: Sequence[str]
    unreadable: Mapping[str, str]
    measured_on: Sequence[str]


class DamagedStateError(RunFolderError):
    """The state of a campaign cannot be read."""


def read_state(folder: Path, needed: Collection[str] = ("studies", "name", "campaign")) -> dict[str, Any]:
    """Return the document of a campaign's folder.

    Raises:
        DamagedStateError: it cannot be read.
        RunFolderError: it is no campaign, or written by a newer version.
    """
    file, hint = folder / STATE, "run the campaign again: what is finished is kept"
    state = read_document(file, SCHEMA_VERSION, hint, damaged=DamagedStateError)
    if not state.keys() >= set(needed):
        raise DamagedStateError(f"{file}: not the state of a campaign", "give the folder of a campaign")
    return state


def gather(folder: Path, state: Mapping[str, Any]) -> Tables:
    """Read the finished studies of a campaign.

    Args:
        state: the document ``campaign.json``.
    """
    results: list[Row] = []
    curves: list[Row] = []
    fronts: list[Row] = []
    unreadable: dict[str, str] = {}
    measured: list[Row] = []
    processors: set[str] = set()
    campaign = Campaign.model_validate(state["campaign"])
    shown = {"best", *(name for _, name, _ in campaign.named_plans())} if campaign.baselines else set[str]()
    for study in state["studies"]:
        if study["status"] != "done":
            continue
        head = {
            "campaign": state["name"],
            "study": study["name"],
            **{axis: study["axes"][axis] for axis in AXES},
            "repetition": study["repetition"],
        }
        path = folder / study["folder"]
        try:
            read = read_study(path)
            with damage_of(path / RESULT, "run the study again"):
                plans, front, curve = _plans(head, read.result), list(_front(head, read.result)), points(read)
        except OptimizeError as error:
            unreadable[study["name"]] = str(error)
            continue
        on = None if read.predicted else read.manifest["fixed"].get("measured_on")
        processors |= set(map(str, on if isinstance(on, list) else []))
        if campaign.indicators and (row := _indicator_row(head, family_of(campaign, head["model"]), read)):
            measured.append(row)
        made = read_record(folder, head["model"], head["seed"], str(study.get("made", "")))
        plans = [{**row, "accuracy": made.after if made else None} for row in plans]
        results += [row for row in plans if not shown or row["plan"] in shown]
        fronts += front
        curves += [
            {
                **head,
                "plans": p.number,
                **_in_ms(read.objective, latency_ms=p.latency_s * 1e3, best_ms=p.best_s * 1e3),
                "value": p.latency_s * 1e3,
                "best": p.best_s * 1e3,
                "unit": read.objective.shown_unit,
            }
            for p in curve
        ]
    expected = [_expected(e, results) for e in campaign.expect]
    explained = list(_explained_rows(measured))
    missing = sorted(set(campaign.baselines) - {row["plan"] for row in results}) if results else []
    summary, gains, ran_on = _summary(results), mean_gains(results), sorted(processors)
    never = [study["axes"] for study in state["studies"] if study["exit_code"] == InfeasibleError.exit_code]
    rates, trained = _rates(results, never), trained_rows(folder, campaign, state["studies"], results)
    return Tables(
        results,
        curves,
        summary,
        fronts,
        gains,
        rates,
        trained,
        expected,
        measured,
        explained,
        missing,
        unreadable,
        ran_on,
    )


AGAINST = "best other plan against the best baseline"
"""Heading of :func:`against_baseline`."""


def against_baseline(row: Row) -> str:
    """Return how the best other plan of a row of the summary compares with the best baseline; "" where none did."""
    if row["ratio"] is None:
        return ""
    ratio = Ratio(row["ratio"], row["ratio_low"], row["ratio_high"])
    if len({f"{figure:.3f}" for figure in (ratio.low, ratio.value, ratio.high)}) == 1:  # one figure, but for rounding
        ratio = Ratio(*(round(ratio.value, 3),) * 3)
    return slower_text(ratio.inverse, first_objective(row))


def ratio_heading(rows: Iterable[Row]) -> str:
    """Return the heading of the ratios of a summary."""
    times = all(first_objective(row).is_time for row in rows)
    return (
        "best other plan, times as fast as the best baseline"
        if times
        else "best baseline's value over the best other plan's"
    )


def better_word(rows: Iterable[Row]) -> str:
    """Return what a better plan of a summary is: faster, or better where amounts are minimised."""
    return "faster" if all(first_objective(row).is_time for row in rows) else "better"


def first_objective(row: Row) -> Objective:
    """Return the objective of a study, of several the first."""
    name = first_objective_of(str(row.get("objective") or LATENCY.name))
    return OBJECTIVES.get(name) or find_workload_objective(name)


def how_known(tables: Tables) -> str:
    """Return ``predicted`` and a space before figures that are all predicted, or ""."""
    return "predicted " if tables.summary and all(row["predicted"] for row in tables.summary) else ""


def vague_text(results: Sequence[Row]) -> str:
    """Return how many best plans are known only vaguely, in a sentence; "" without any."""
    best = [r for r in results if r["plan"] == "best" and not r["predicted"] and r["value"] and r["value_high"]]
    wide = {row["study"]: (row["value_high"] - row["value_low"]) / 2 / row["value"] for row in best}
    vague = [study for study, width in wide.items() if width > _VAGUE]
    if not vague:
        return ""
    widest = max(vague, key=lambda study: wide[study])
    return (
        f"The 95 % interval of {len(vague)} of {plural(len(wide), 'best plan')} that were measured is wider than "
        f"± {percent(_VAGUE)}, for example because of other processes; the widest: ± {percent(wide[widest])} ({widest})"
    )


def cell_text(row: Row, axes: Sequence[str]) -> str:
    """Return what tells a row from the others in a line; an axis that is left to its default is not named."""
    words = [
        f"{axis.replace('_', ' ')} {row[axis]:g}" if isinstance(row[axis], int | float) else named(row[axis])
        for axis in axes
        if row[axis] is not None
    ]
    return " · ".join(words)


def explained_text(rows: Sequence[Row]) -> str:
    """Return how much of the variance of latencies work explains where it explains least, in a sentence."""
    measured = [r for r in rows if r["evaluator"] != "cost-model"]
    worst = min(measured or rows, key=lambda r: float(r["flops"]))
    return (
        f"A straight line through the work of the models explains {percent(worst['flops'], 1)} of the variance of "
        f"their latencies where it explains least ({group_text(worst)}); with memory accesses it is "
        f"{percent(worst['flops_and_memory'], 1)}."
    )


def device_text(row: Row) -> str:
    """Return the device of a row in words, as ``measured here on cpu0``."""
    known = [str(row[axis]) for axis in GROUP if row[axis] is not None]
    return "measured here on " + known[-1] if known[0] == "litert" and len(known) > 1 else " · ".join(known)


def group_text(row: Row) -> str:
    """Return the models and the device of a row of ``explained`` in words."""
    return f"{'all models' if row['family'] == 'all' else row['family']}, {device_text(row)}"


def shown_axes(rows: Sequence[Row]) -> list[str]:
    """Return the axes that a table of the summary shows: the model, and those of several values."""
    return [a for a in AXES if a == "model" or (a not in _POOLED and len({json.dumps(r[a]) for r in rows}) > 1)]


def columns_reference() -> str:
    """Return a table of the columns of ``results.csv``."""
    rows = (f"| {', '.join(f'`{n}`' for n in names.split(', '))} | {meaning} |" for names, meaning in COLUMNS.items())
    head = "Beside the campaign, the study, its repetition and the axes of the matrix:"
    return "\n".join(("### `results.csv`", "", head, "", "| column | meaning |", "|---|---|", *rows))


def write_tables(tables: Tables, folder: Path) -> None:
    """Write each table that has rows as CSV, and the first also as Parquet where the extra ``parquet`` is installed.

    Raises:
        RunFolderError: a file cannot be written.
    """
    for name in ("results", "curves", *SUMMARIES):
        rows: Sequence[Row] = getattr(tables, name)
        if rows:
            write_atomic(folder / f"{name}.csv", to_csv(rows).encode())
        else:  # of a run with other settings
            (folder / f"{name}.csv").unlink(missing_ok=True)
    parquet = folder / "results.parquet"
    parquet.unlink(missing_ok=True)  # it may not be written again here
    if not tables.results:
        return
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return
    table = pa.Table.from_pylist([{k: _scalar(v) for k, v in row.items()} for row in tables.results])
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    write_atomic(parquet, sink.getvalue().to_pybytes())


def to_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV with a header; unknown values are empty, and text cannot become a spreadsheet formula."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _cell(_scalar(v)) for k, v in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _scalar(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict | tuple) else value


def _in_ms(objective: Objective, **numbers: Any) -> Row:
    """Return columns that are in milliseconds of latency, empty for other objectives."""
    return {name: value if objective == LATENCY else None for name, value in numbers.items()}


def _plans(head: Row, result: Mapping[str, Any]) -> list[Row]:
    objective, rows = objective_of(result), []
    workload = result.get("workload", {})
    outcomes, due = workload.get("outcomes", {}), any(c.get("deadline_s") for c in workload.get("clients", ()))
    for name, entry in {"best": result["best"], **result["baselines"]}.items():
        found = entry["latency_ms"] or {}  # in the objective's unit, whatever the key says
        low, high = found.get("ci95", (None, None))
        if low == high:  # of a single prediction
            low = high = None
        mine = result if name == "best" else {}
        speedup = mine.get("speedup") or {}
        ratio_low, ratio_high = speedup.get("ci95", (None, None))
        slower = entry.get("slower_than_best") or {}
        over_low, over_high = slower.get("ci95", (None, None))
        is_baseline = speedup.get("plan") != entry["plan"]
        rows.append(
            {
                **head,
                "plan": name,
                "stages": len(entry["plan"]["stages"]),
                **_in_ms(objective, latency_ms=found.get("median"), ci_low_ms=low, ci_high_ms=high),
                "samples": None if found.get("source") == "predicted" else found.get("samples"),
                "predicted": bool(result.get("predicted")),
                "source": found.get("source"),
                "over_best": slower.get("ratio"),
                "over_best_low": over_low,
                "over_best_high": over_high,
                "over_others": {other: [r["ratio"], *r["ci95"]] for other, r in entry.get("against", {}).items()},
                "ratio": speedup.get("ratio"),
                "ratio_low": ratio_low,
                "ratio_high": ratio_high,
                "gain": None if not speedup else 1.0 if is_baseline else speedup["ratio"],
                "significant": speedup.get("significant"),
                "compared_with": speedup.get("baseline"),
                **_in_ms(objective, model_bound_ms=result["model_bound_ms"] or None),
                "gap": mine.get("gap"),
                "unique_plans": result["unique_plans"],
                "proposed_plans": result.get("proposed_plans"),
                "space_plans": float(min(result["space"]["plans"], 1e308)),
                "wall_s": result["wall_s"],
                "failure": entry["failure"],
                **_of_memory(found.get("conditions") or {}),
                "terms_ms": entry.get("terms_ms"),
                **_of_requests(outcomes.get(name, {}), due=due),
                "value": found.get("median"),
                "value_low": low,
                "value_high": high,
                "bound": result["model_bound_ms"] or None,  # 0: none was found in time
                "unit": objective.shown_unit,
            }
        )
    return rows


def _of_memory(conditions: Mapping[str, Any]) -> Row:
    resident = conditions.get("resident_nbytes")
    return {
        "page_faults": conditions.get("page_faults"),
        "resident_mb": round(resident / 1e6, 1) if isinstance(resident, int) else None,
    }


def _of_requests(outcome: Mapping[str, Any], *, due: bool) -> Row:
    """Return the usual figures of several models; None of one model, and of misses where nothing was due."""
    return {
        "misses": outcome.get("misses") if due else None,
        "requests": outcome.get("requests") if due else None,
        "makespan_ms": outcome.get("makespan_ms"),
        "predicted_makespan_ms": (outcome.get("predicted") or {}).get("makespan_ms"),
    }


def makespan_text(results: Sequence[Row]) -> str:
    """Return how far the simulator's makespans are off those that were measured, in a sentence; "" without any."""
    simulated = [row for row in results if row["predicted_makespan_ms"] and row["plan"] != "best"]
    known = [row for row in simulated if row["makespan_ms"] and not row["predicted"]]
    if not known:
        return ""
    off = [abs(row["predicted_makespan_ms"] / row["makespan_ms"] - 1.0) for row in known]
    near = sum(error <= 0.1 for error in off)
    return (
        f"predicted makespans are {percent(statistics.median(off))} off in the median of "
        f"{plural(len(off), 'baseline')}, {near} of them within 10 %"
    )


def _front(head: Row, result: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for each plan of a study's front and each objective."""
    if not result.get("front"):
        return
    front = Front.from_json(result["front"])
    for number, each in enumerate(front.plans):
        about = {"number": number + 1, "plan": each.name, "stages": len(each.plan.stages), "knee": number == front.knee}
        for objective, value in zip(front.objectives, each.values, strict=True):
            yield head | about | {"of": objective.name, "value": value * 1e3, "unit": objective.shown_unit}


def fronts_of(tables: Tables) -> Iterator[tuple[str, Sequence[Row]]]:
    """Yield the name of each study with several objectives, and the rows of its front."""
    for study in dict.fromkeys(row["study"] for row in tables.fronts):
        yield study, [row for row in tables.fronts if row["study"] == study]


def front_text(rows: Sequence[Row]) -> str:
    """Return the front of one study in a sentence."""
    ranges, knee = [], []
    for of, unit in dict.fromkeys((row["of"], row["unit"]) for row in rows):
        values = [row["value"] for row in rows if row["of"] == of]
        ranges.append(f"{of} {min(values):.4g} to {max(values):.4g} {unit}")
        knee += [f"{of} {row['value']:.4g} {unit}" for row in rows if row["of"] == of and row["knee"]]
    if (count := rows[-1]["number"]) == 1:
        return f"front of 1 plan: {', '.join(knee)}"
    return f"front of {plural(count, 'plan')}: {', '.join(ranges)}; its knee, which is recommended: {', '.join(knee)}"


def _grouped(rows: Iterable[Row], columns: Sequence[str]) -> list[list[Row]]:
    """Return the rows in groups that have the same values in some columns."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(json.dumps([row[column] for column in columns]), []).append(row)
    return list(found.values())


def _summary(results: Sequence[Row]) -> list[Row]:
    axes, found = [axis for axis in AXES if axis not in _POOLED], []
    for rows in _grouped((row for row in results if row["plan"] == "best"), axes):
        missed = not first_objective(rows[0]).scales  # a ratio of such values says nothing
        ratio, low, high = (None, None, None) if missed else _pooled(rows)
        key = "misses" if missed else "value"
        values = [r[key] for r in rows if r["value"] and r[key] is not None]
        best = statistics.median(values) if values else None
        latency = rows[0]["objective"] == LATENCY.name
        found.append(
            {
                **{axis: rows[0][axis] for axis in axes},
                "studies": len(rows),
                "predicted": all(row["predicted"] for row in rows),
                "best_ms": best if latency else None,
                "ratio": ratio,
                "ratio_low": low,
                "ratio_high": high,
                "significant": low is not None and high is not None and not low <= 1.0 <= high,
                "model_bound_ms": rows[0]["model_bound_ms"],
                "best": best,
                "bound": None if missed else rows[0]["bound"],
                "unit": "requests missed" if missed else rows[0]["unit"],
            }
        )
    return found


def mean_gains(results: Sequence[Row]) -> list[Row]:
    """Return how many times as fast as the best baseline plans are, in the mean over the models of each cell."""
    axes, found = [axis for axis in AXES if axis not in {"model", *_POOLED}], []
    compared = (row for row in results if row["gain"] is not None and first_objective(row).scales)
    for rows in _grouped(compared, axes):
        if len(models := {row["model"] for row in rows}) > 1:
            equal = {"ratio_low": 1.0, "ratio_high": 1.0}
            pooled = [row | {"ratio": row["gain"]} | (equal if row["gain"] == 1.0 else {}) for row in rows]
            names = ("gain", "gain_low", "gain_high")
            found.append(
                {axis: rows[0][axis] for axis in axes}
                | {"models": len(models), "studies": len(rows), "of_baselines": sum(row["gain"] == 1.0 for row in rows)}
                | {"only_baselines": sum(row["proposed_plans"] == 0 for row in rows)}
                | dict(zip(names, _pooled(pooled), strict=True))
            )
    return found


def gain_text(row: Row) -> str:
    """Return a row of the gains in a sentence."""
    objective = first_objective(row)
    how = "as fast as" if objective.is_time else f"as good by {objective.name} as"
    none = row["only_baselines"] and f"; in {row['only_baselines']} only baselines were tried: give a larger budget"
    if row["of_baselines"] == row["studies"]:
        return f"no gain over the best baseline, which is recommended in each of {row['studies']} studies{none or ''}"
    return (
        f"geometric mean over {row['models']} models: {row['gain']:.3f} times {how} the best baseline "
        f"(95 %: {row['gain_low']:.3f} to {row['gain_high']:.3f}); in {row['of_baselines']} of "
        f"{row['studies']} studies a baseline is recommended, which counts as 1{none or ''}"
    )


def _rates(results: Sequence[Row], never: Sequence[Row] = ()) -> list[Row]:
    """Return the highest rate that each workload is run at and up to which a plan of a kind keeps its deadlines.

    It keeps them where the median run misses at most one in twenty: single requests are late through others' work.

    Args:
        never: axes of studies that ended since no plan can keep the deadlines.
    """
    axes, found = [axis for axis in AXES if axis not in {"rate", *_POOLED}], []
    for rows in _grouped((row for row in results if row["rate"] is not None and row["misses"] is not None), axes):
        over = [each["rate"] for each in never if all(each[axis] == rows[0][axis] for axis in axes)]
        tried = sorted({*(row["rate"] for row in rows), *(rate for rate in over if rate is not None)})
        kept, sums = {}, {}
        for each in _grouped(rows, ("plan",)):
            sums[each[0]["plan"]] = sum(row["value"] or 0.0 for row in each)
            late = min((r["rate"] for r in each if r["misses"] > MOST_LATE * r["requests"]), default=math.inf)
            kept[each[0]["plan"]] = max((row["rate"] for row in each if row["rate"] < late), default=None)
        ours = kept.pop("best", None)
        known = {plan: rate for plan, rate in kept.items() if rate is not None}
        other = max(known, key=lambda plan: (known[plan], -sums[plan]), default=None)  # of those that tie, the fastest
        theirs = known.get(other or "")
        head = {axis: rows[0][axis] for axis in axes} | {"lowest": tried[0], "highest": tried[-1]}
        gain = ours / theirs if ours and theirs else None
        found.append(head | {"best": ours, "baseline": other, "baseline_rate": theirs, "gain": gain})
    return found


def rate_text(row: Row, axes: Sequence[str]) -> str:
    """Return a row of the rates in a sentence.

    Args:
        axes: that tell rows apart, as of :func:`shown_axes`.
    """

    def kept(rate: float | None) -> str:
        at_least = "at least " if rate == row["highest"] else ""
        return f"below {row['lowest']:g}" if rate is None else f"{at_least}{rate:g}"

    which = ", ".join(named(row[axis]) for axis in axes if axis != "rate")
    by = f"the best baseline ({row['baseline']})" if row["baseline"] else "every baseline"
    ends = f"{kept(row['best'])} for the recommended plan, {kept(row['baseline_rate'])} for {by}"
    what = f"highest request rate at which the median run meets {percent(1.0 - MOST_LATE)} of its deadlines"
    return f"{which}: {what}, as a multiple of the workload file's rate: {ends}"


def _pooled(rows: Sequence[Row]) -> tuple[float | None, float | None, float | None]:
    """Return the geometric mean of the ratios and its 95 % interval; of a single study, its own ratio and interval."""
    known = [r for r in rows if r["ratio"]]
    if not known:
        return None, None, None
    if len(known) == 1:
        return known[0]["ratio"], known[0]["ratio_low"], known[0]["ratio_high"]
    from scipy.stats import t

    logs = [math.log(r["ratio"]) for r in known]
    mean = statistics.mean(logs)
    # Few studies may agree by chance, so the interval is at least as wide as their own intervals imply.
    within = statistics.median(math.log(r["ratio_high"] / r["ratio_low"]) / 2 for r in known) / math.sqrt(len(logs))
    between = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    half = max(within, between)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def _expected(expected: Expectation, results: Sequence[Row]) -> Row:
    """Return our figure beside a published one: the median over the studies that it is about.

    Its range is the 95 % interval of one study where that has one, otherwise from the least to the most of the studies.
    """
    wanted = expected.where.values
    rows = [r for r in results if all(r[axis] == value for axis, value in wanted.items())]
    by_study: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_study.setdefault(row["study"], {})[row["plan"]] = row
    values: list[_Range] = []
    known, in_final, missing = set(), True, "no finished study has these axes"
    for plans in by_study.values():
        plan, over = plans.get(expected.plan), plans.get(expected.over or "")
        if absent := next((n for n in (expected.plan, expected.over) if n and n not in plans), None):
            missing = f"no plan {absent!r}"
            if near := did_you_mean(absent, plans, "", quoted=True):
                missing += f": {near}"
            continue
        found = None
        if expected.metric == "latency_ms" and plan:
            found, missing = _range(plan, "value", "value_low", "value_high"), "not measured"
            if first_objective(plan).name not in {LATENCY.name, "mean"}:
                found, missing = None, f"latency_ms is of the objectives latency and mean, not of {plan['objective']}"
        elif expected.metric == "speedup":
            found, missing = _range(plans["best"], "ratio", "ratio_low", "ratio_high"), "not compared with a baseline"
            found = _SAME if plans["best"]["gain"] == 1.0 else found  # a baseline: the ratio is of the next best plan
        elif plan and over:
            found, missing = _over(plan, over), "not measured"
        if plan and found:
            values.append(found)
            known.add(("fitted" if expected.fitted else "predicted") if plan["predicted"] else "measured")
            in_final = in_final and plan["source"] != "search" and (over is None or over["source"] != "search")
    ours, low, high = values[0] if len(values) == 1 else (None, None, None)
    if len(values) > 1:
        every = [value for value, _, _ in values]
        ours, low, high = statistics.median(every), min(every), max(every)
    ratio = ours / expected.paper if ours is not None and expected.paper else None
    judged = ratio is not None and "fitted" not in known
    return {
        **{name: getattr(expected, name) for name in ("name", "metric", "plan", "over", "paper", "left_out")},
        "ours": ours,
        "ours_low": low,
        "ours_high": high,
        "studies": len(values),
        "known": ", ".join(sorted(known)),
        "missing": "" if values else missing,
        "in_final": in_final,
        "ratio": ratio,
        "tolerance": expected.tolerance,
        "within": abs(ratio - 1.0) <= expected.tolerance if ratio is not None and judged else None,
        "source": expected.source,
        "fit": "; ".join(
            filter(None, (fit_text(name) for name in dict.fromkeys(r["platform"] for r in rows if r["predicted"])))
        ),
    }


@cache
def fit_text(platform: str | None) -> str:
    """Return what the profile of a platform was fitted to, in a sentence; "" where it does not say so."""
    try:
        found = find_profile(str(platform))
    except OptimizeError:
        found = None
    fitted_to = found[0].provenance.get("fitted_to") if found else None
    if found is None or not fitted_to:
        return ""
    errors = [f"{percent(e['median'])} ({what})" for what, e in found[0].errors.items() if "median" in e]
    left_out = f"; median errors when left out: {', '.join(errors)}" if errors else ""
    return f"profile {found[0].name} is fitted to {fitted_to}{left_out}"


_Range = tuple[float, float | None, float | None]  # a figure, and its interval where it has one
_SAME: _Range = (1.0, 1.0, 1.0)


def _range(row: Row, *names: str) -> _Range | None:
    """Return a figure of a row with its interval; None where it has no figure."""
    value, low, high = (row[name] for name in names)
    return (value, low, high) if value else None


def _over(plan: Row, over: Row) -> _Range | None:
    """Return how many times another plan's value a plan's is: as the final found it, or else of the two medians.

    None where one of them has no value. The interval is known where the final compared both.
    """
    if not plan["value"] or not over["value"]:
        return None
    if found := plan["over_others"].get(over["plan"]):
        ratio, low, high = found
        return ratio, low, high
    names = ("over_best", "over_best_low", "over_best_high")
    one, other = (_SAME if row["plan"] == "best" else _range(row, *names) for row in (plan, over))
    if one is not None and other == _SAME:
        return one
    if other is not None and one == _SAME:
        ratio, low, high = other
        return 1.0 / ratio, high and 1.0 / high, low and 1.0 / low
    return float(plan["value"] / over["value"]), None, None


def mean_excess(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return sampler → mean over studies of ``best so far / best known − 1`` after 1, 2, … plans."""
    best: dict[str, float] = {}
    studies: dict[tuple[str, str, int], tuple[str, list[Row]]] = {}
    for row in rows:
        cell = json.dumps([row[a] for a in ("model", "platform", "evaluator", "processors", "objective")])
        best[cell] = min(best.get(cell, math.inf), row["best"])
        key = (named(row["sampler"]), row["study"], row["repetition"])
        studies.setdefault(key, (cell, []))[1].append(row)
    curves: dict[str, list[list[float]]] = {}
    for (sampler, _, _), (cell, each) in studies.items():
        curve: list[float] = []
        for row in sorted(each, key=lambda r: int(r["plans"])):
            curve += [curve[-1] if curve else row["best"] / best[cell] - 1.0] * (row["plans"] - len(curve) - 1)
            curve.append(row["best"] / best[cell] - 1.0)
        curves.setdefault(sampler, []).append(curve)
    return {
        sampler: [sum(c[min(n, len(c) - 1)] for c in each) / len(each) for n in range(max(map(len, each)))]
        for sampler, each in curves.items()
    }


def _indicator_row(head: Mapping[str, Any], family: str, study: Study) -> Row | None:
    """Return the indicators of a study's model beside the latency of its best plan; None where there are none.

    Args:
        head: the study's axes.
        family: of the study's model.
    """
    latency = study.result["best"].get("latency_ms")
    if study.graph is None or latency is None:
        return None
    cache_bytes = _cache_bytes(study)
    return {
        **{axis: head[axis] for axis in ("study", "model", *GROUP)},
        "family": family,
        "cache_bytes": cache_bytes,
        **asdict(indicators(study.graph, cache_bytes)),
        **{f"{name}_counted": (study.result.get("final") or {}).get("traffic", {}).get(name) for name in _COUNTED},
        "latency_ms": latency["median"],
        **dict(zip(("ci_low_ms", "ci_high_ms"), latency["ci95"], strict=True)),
    }


def _explained_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Return the R² of a straight line through each indicator: by device, of all models and of each family.

    Beside it stand the relative errors of models that were left out: one after another in a family, or of a family
    that the others predict.
    """
    groups = [("all", each) for each in _grouped(rows, GROUP)]
    groups += [(each[0]["family"], each) for each in _grouped(rows, (*GROUP, "family"))]
    for family, each in groups:
        if len({row["model"] for row in each}) < LEAST_MODELS:
            continue
        found = [Indicators(**{name: row[name] for name in Indicators.__dataclass_fields__}) for row in each]
        latency_s = [row["latency_ms"] * 1e-3 for row in each]
        head = {axis: each[0][axis] for axis in GROUP} | {"family": family}
        left_out = [str(row["family" if family == "all" else "model"]) for row in each]
        errors = left_out_errors(found, latency_s, left_out)
        counts: Row = {}
        for name in _COUNTED:
            counted = [row[f"{name}_counted"] for row in each]
            if all(counted):  # in place of the estimate
                shown = [replace(f, memory_accesses_estimate=mb) for f, mb in zip(found, counted, strict=True)]
                known = left_out_errors(shown, latency_s, left_out)
                errors |= {f"flops_and_{name}_counted": parts for parts in [known.get("flops_and_memory")] if parts}
                counts |= _against_counts([f.memory_accesses_estimate for f in found], counted, name)
        wrong = {f"{name}_error_{part}": value for name, parts in errors.items() for part, value in parts.items()}
        yield {**head, "models": len(each), **explained_by(found, latency_s), **wrong, **counts}


def _against_counts(estimates: Sequence[float], counted_mb: Sequence[float], name: str) -> Row:
    """Return how estimates of memory accesses relate to counts: the median ratio, and the correlation of logarithms."""
    logs = [math.log(elements * _WORD_MB) for elements in estimates], [math.log(mb) for mb in counted_mb]
    varied = all(len(set(each)) > 1 for each in logs)
    off = statistics.median(a - b for a, b in zip(*logs, strict=True))
    return {
        f"estimate_over_{name}_counted": round(math.exp(off), 3),
        f"correlation_with_{name}_counted": round(statistics.correlation(*logs), 4) if varied else None,
    }


def _cache_bytes(study: Study) -> int:
    """Return the first processor's cache bytes, by its profile, or those of a core where the study ran."""
    if study.result["evaluator"] == "cost-model":
        try:
            found = find_profile(str(study.config.get("platform")))
        except OptimizeError:
            found = None
        known = found[0].processors.get(study.platform.processors[0].like) if found else None
        return known.cache_bytes if known else 0
    ran_on = study.manifest.get("machine")
    own = ran_on.get("own_cache_bytes") if isinstance(ran_on, dict) else None
    return own if isinstance(own, int) else 0


def named(value: object) -> str:
    """Return the value of an axis as text, a workload's file by its name."""
    return "default" if value is None else Path(str(value)).stem if names_file(str(value)) else str(value)
