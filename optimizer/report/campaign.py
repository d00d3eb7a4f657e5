"""What the report of a campaign says: the summary first, published figures beside ours, then every study."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.campaign_file import AXES
from optimizer.campaign_run import SCHEMA_VERSION, STATE
from optimizer.campaign_table import Row, Tables, gather
from optimizer.files import disk_errors
from optimizer.report.document import Block, Cell, Code, Column, Document, Figure, Section, Table, Text
from optimizer.report.indicators import indicator_blocks
from optimizer.report.plots import forest
from optimizer.report.svg import Plot, around
from search_spaces.bounded import parsed_json, read_bounded
from search_spaces.errors import RunFolderError
from search_spaces.wording import percent, plural

_WIDTH = 920.0
_AT = (10, 25, 50, 100, 200, 400)


def read_state(folder: Path) -> dict[str, Any]:
    """Return the document of a campaign's folder.

    Raises:
        RunFolderError: it is no campaign, damaged, or written by a newer version.
    """
    file = folder / STATE
    with disk_errors(file):
        content = read_bounded(file)
    try:
        state = dict(parsed_json(content))
        version = int(state["schema_version"])
        complete = {"studies", "name", "campaign"} <= state.keys()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunFolderError(f"{file}: damaged: {error}", "run the campaign again: what is finished is kept") from error
    if not complete:
        raise RunFolderError(f"{file}: not the state of a campaign", "give the folder of a campaign")
    if version > SCHEMA_VERSION:
        raise RunFolderError(
            f"{file}: schema_version is {version}, and this version reads up to {SCHEMA_VERSION}", "update the program"
        )
    return state


def campaign_document(folder: Path) -> Document:
    """Return the report of a campaign; what is not finished is left out and said.

    Raises:
        RunFolderError: see :func:`read_state`.
    """
    state = read_state(folder)
    tables = gather(folder, state)
    explained = Section("explained", "What explains latency", tuple(indicator_blocks(tables)))
    sections = [
        explained,
        Section("summary", "Summary", tuple(_summary(state, tables))),
        Section("paper", "Published and measured", tuple(_paper(tables))),
        Section("curves", "Best latency against plans tried", tuple(_curves(tables))),
        Section("studies", "Studies", tuple(_studies(state, tables))),
        Section("plans", "All plans", tuple(_plans(tables))),
        Section("environment", "Environment", tuple(_environment(state))),
        Section("again", "How to have it again", tuple(_again(state))),
    ]
    return Document(
        title=str(state["name"]),
        subtitle=str(state.get("description") or "") or f"{len(state['studies'])} studies",
        sections=tuple(s for s in sections if s.blocks),
        files={},
    )


def _summary(state: Mapping[str, Any], tables: Tables) -> Iterator[Block]:
    done = sum(s["status"] == "done" for s in state["studies"])
    failed = [s for s in state["studies"] if s["status"] == "failed"]
    compared = [r for r in tables.summary if r["ratio"] is not None]
    faster = sum(bool(r["significant"]) and r["ratio"] > 1.0 for r in compared)
    count = f"{faster or 'none'} of {plural(len(compared), 'cell')}"
    text = f"The best plan is significantly faster than the best known plan in {count}."
    if compared or not tables.summary:
        yield Text(text if tables.summary else "No study is finished yet.", "answer")
    by = ", ".join(dict.fromkeys(_short(r["evaluator"]) for r in tables.summary))
    told = f"{done} of {len(state['studies'])} studies are done"
    yield Text(f"{told}{f', {len(failed)} failed' if failed else ''}{f'; evaluator {by}' if by else ''}.")
    if not tables.summary:
        return
    axes = _shown_axes(tables.summary)
    names = [" · ".join(_short(row[a]) for a in axes) for row in tables.summary]
    head = (*(Column(a.replace("_", " ")) for a in axes), Column("studies", "d"), Column("best", ".4g"), Column("unit"))
    ratio = (Column("times as fast", ".4f"), Column("95 % from", ".4f"), Column("to", ".4f"), Column("significant"))
    rows = tuple(
        (*(_short(r[a]) for a in axes), r["studies"], r["best"], r["unit"], *(_ratio(r) if compared else ()))
        for r in tables.summary
    )
    yield Table("Summary", (*head, *(ratio if compared else ())), rows, group=len(axes))
    drawn = [
        (n, float(r["ratio"]), float(r["ratio_low"]), float(r["ratio_high"]))
        for n, r in zip(names, tables.summary, strict=True)
        if r["ratio"] is not None
    ]
    if drawn:
        yield Figure(
            "ratios",
            forest(drawn, "times as fast as the best known plan"),
            "How many times as fast as the best known plan the best other plan is, with the 95 % interval: over seeds "
            "and repetitions where there are several, else that of the study's final comparison.",
        )


def _ratio(row: Row) -> tuple[Cell, ...]:
    verdict = "" if row["ratio"] is None else "yes" if row["significant"] else "no"
    return row["ratio"], row["ratio_low"], row["ratio_high"], verdict


def _paper(tables: Tables) -> Iterator[Block]:
    if not tables.expected:
        return
    yield Text("Published figures beside ours; other machines give other times, so ratios tell more than milliseconds.")
    columns = (Column("what"), Column("paper", ".4g"), Column("ours", ".4g"), Column("least", ".4g"),
               Column("most", ".4g"), Column("ours / paper", ".3f"), Column("tolerance", ".0%"), Column("within"),
               Column("source"))  # fmt: skip
    yield Table(
        "Published and measured",
        columns,
        tuple(
            (r["name"], r["paper"], r["ours"], r["ours_low"], r["ours_high"], r["ratio"], r["tolerance"],
             "not measured" if r["within"] is None else "yes" if r["within"] else "no", r["source"])
            for r in tables.expected
        ),
    )  # fmt: skip


def _curves(tables: Tables) -> Iterator[Block]:
    """Compare samplers by how far above the best plan known of a model they are after so many plans."""
    samplers = list(dict.fromkeys(_short(r["sampler"]) for r in tables.curves))
    if len(samplers) < 2:
        return
    curves = mean_excess(tables.curves)
    last = max(len(c) for c in curves.values())
    at = [n for n in _AT if n <= last] or [last]
    height = 360.0
    description = "; ".join(f"{s}: {percent(c[-1], 2)} after {len(c)}" for s, c in curves.items())
    plot = Plot("curves", "Mean excess over the best plan known", description, _WIDTH, height)
    x = around([1, last], 70, _WIDTH - 130, margin=0.0)
    y = around([v * 100 for c in curves.values() for v in c[min(5, len(c) - 1) :]], height - 44, 40, zero=True)
    plot.axis_y(y, 70, _WIDTH - 130, "% above the best")
    plot.axis_x(x, height - 44, 40, "different plans tried, known ones included")
    ends: list[float] = []
    for i, (sampler, curve) in enumerate(curves.items()):
        line = [(x(n), max(y(v * 100), y.end)) for n, v in enumerate(curve, 1)]
        plot.line(line, f"series c{i % 5}", sampler)
        below = line[-1][1]
        while any(abs(below - e) < 14 for e in ends):
            below -= 7
        ends.append(below)
        plot.text(line[-1][0] + 10, below + 4, sampler)
    columns = (Column("sampler"), *(Column(f"after {n}", ".2%") for n in at))
    rows: tuple[tuple[Cell, ...], ...] = tuple((s, *(c[min(n, len(c)) - 1] for n in at)) for s, c in curves.items())
    yield Figure(
        "curves",
        plot.svg(),
        "How far the best plan so far is above the best that any study of this model on this platform found, mean over "
        "models and seeds. Known plans come first in every study.",
        Table("Mean excess", columns, rows),
    )


def mean_excess(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return sampler → mean over studies of ``best so far / best known − 1`` after 1, 2, … plans."""
    best: dict[str, float] = {}
    studies: dict[tuple[str, str, int], tuple[str, list[Row]]] = {}
    for row in rows:
        cell = json.dumps([row[a] for a in ("model", "platform", "evaluator", "processors", "objective")])
        best[cell] = min(best.get(cell, math.inf), row["best"])
        key = (_short(row["sampler"]), row["study"], row["repetition"])
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


def _studies(state: Mapping[str, Any], tables: Tables) -> Iterator[Block]:
    best = {r["study"]: r for r in tables.results if r["plan"] == "best"}
    columns = (Column("study"), Column("state"), Column("best", ".4g"), Column("95 % from", ".4g"),
               Column("to", ".4g"), Column("unit"), Column("K", "d"),
               Column("gap to the model", "+.1%"), Column("remark"))  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for study in state["studies"]:
        row = best.get(study["name"], {})
        remark = study["error"] or tables.unreadable.get(study["name"], "")
        numbers = (
            row.get("value"),
            row.get("value_low"),
            row.get("value_high"),
            row.get("unit"),
            row.get("stages"),
            row.get("gap"),
        )
        rows.append((study["name"], study["status"], *numbers, remark))
    yield Table("Studies", columns, tuple(rows))


def _plans(tables: Tables) -> Iterator[Block]:
    if not tables.results:
        return
    columns = (Column("study"), Column("plan"), Column("stages", "d"), Column("median", ".4g"),
               Column("95 % from", ".4g"), Column("to", ".4g"), Column("unit"), Column("samples", "d"))  # fmt: skip
    rows = tuple(
        (r["study"], r["plan"], r["stages"], r["value"], r["value_low"], r["value_high"], r["unit"], r["samples"])
        for r in tables.results
    )
    yield Table("All plans", columns, rows, group=1)
    yield Text(
        "results.csv (and results.parquet) hold the same with every axis; curves.csv the course of each study.", "note"
    )


def _environment(state: Mapping[str, Any]) -> Iterator[Block]:
    parts = {**dict(state.get("machine", {})), "Python": state.get("python"), **dict(state.get("packages", {}))}
    rows = [("time", str(state.get("created_utc", "")))]
    rows += [(str(k), v if isinstance(v, str) else json.dumps(v)) for k, v in parts.items()]
    yield Table("Environment", (Column("what"), Column("value")), tuple(rows))


def _again(state: Mapping[str, Any]) -> Iterator[Block]:
    yield Code(shlex.join(str(word) for word in state.get("command", [])))
    yield Text("Studies that are finished are not run again, unless their options changed.", "note")


def _shown_axes(rows: Sequence[Row]) -> list[str]:
    return [a for a in AXES if a != "seed" and (a == "model" or len({json.dumps(r[a]) for r in rows}) > 1)]


def _short(value: object) -> str:
    return "default" if value is None else str(value)
