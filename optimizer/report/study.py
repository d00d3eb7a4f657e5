"""What the report of a study says: the answer first, the evidence after it, then how to have it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from evaluators.measurement.final import Ratio
from evaluators.objectives import LATENCY
from optimizer.console import describe_operators, human_bytes, slower_text
from optimizer.graph_picture import render_svg
from optimizer.inspect import inspect_graph
from optimizer.ranks_text import describe_ranks
from optimizer.report import plots
from optimizer.report.data import Bar, Point, Study, bars, best_by_stages, objective_of, points, spreads
from optimizer.report.document import Block, Code, Column, Document, Figure, Section, Table, Text
from optimizer.report.explorer import node_data
from optimizer.report.svg import part_colour
from optimizer.report.trace import trace
from optimizer.report.workload import workload_blocks
from search_spaces.errors import OptimizeError, shown
from search_spaces.plan import Plan

_MOST_OPERATORS = 1500  # of a graph that is drawn: beyond, the picture alone would be megabytes


def study_document(study: Study) -> Document:
    """Return the report of a study."""
    found = points(study)
    drawn = bars(study)
    model = study.result["model"]
    lanes = ", ".join(p.name for p in study.platform.processors if p.resources)
    files = {"best/trace.json": json.dumps(trace(drawn, [p.name for p in study.platform.processors]))}
    if study.graph is not None:
        files["best/partition.json"] = json.dumps(node_data(study.graph, study.best), indent=1)
    sections = [
        Section("answer", "Answer", tuple(_answer(study))),
        Section("front", "Front", tuple(_front(study))),
        Section("why", "Why this plan", tuple(_why(study))),
        Section("models", "Models", tuple(workload_blocks(study.result))),
        Section("baselines", "Known plans", tuple(_baselines(study))),
        Section("timeline", "Timeline", tuple(_timeline(study, drawn))),
        Section("stages", "By number of stages", tuple(_stages(study, found))),
        Section("history", "The search", tuple(_history(study, found))),
        Section("model", "Predicted and measured", () if study.predicted else tuple(_predicted(found))),
        Section("graph", "Graph", tuple(_graph(study))),
        Section("environment", "Environment", tuple(_environment(study))),
        Section("again", "How to have it again", tuple(_again(study))),
    ]
    return Document(
        title=f"{_printable(model['name'])} on {lanes}",
        subtitle=f"{model['operators']} operators, {study.result['unique_plans']:,} of "
        f"{study.result['space']['plans']:,} plans tried, evaluator {study.result['evaluator']}, "
        f"study {study.manifest['study']}, {study.manifest.get('created_utc', '')}",
        sections=tuple(s for s in sections if s.blocks),
        files=files,
    )


def verdict_text(result: dict[str, Any]) -> str:
    """Return the answer in a sentence, from the document of ``--json``."""
    speedup, best = result["speedup"], result["best"]["latency_ms"]
    unit = objective_of(result).shown
    predicted = bool(result.get("predicted"))
    took = "not measured"
    if best:
        low, high = best["ci95"]
        took = f"{best['median']:.4g} {unit}" + ("" if low == high else f" [{low:.4g}, {high:.4g}]")
    verb = "is predicted to take" if predicted else "takes"
    if speedup is None:
        return f"The recommended plan {verb} {took}; it is a known one."
    ratio = Ratio(speedup["ratio"], *speedup["ci95"])
    if speedup["plan"] == result["best"]["plan"]:
        low_high = "" if ratio.low == ratio.high else f" (95 %: {ratio.low:.3f} to {ratio.high:.3f})"
        sure = "" if ratio.significant else "; the difference is not significant"
        how = f"{ratio.value:.3f} times as fast as “{speedup['baseline']}”{low_high}{sure}"
        return f"The recommended plan {verb} {took}: {how}."
    other = slower_text(ratio.inverse)
    faster = "No plan is faster" if ratio.inverse.significant else "No plan was found to be faster"
    return f"{faster} than “{speedup['baseline']}”, which {verb} {took}; the next best one: {other}."


def _answer(study: Study) -> Iterator[Block]:
    result = dict(study.result)
    yield Text(verdict_text(result), "answer")
    if not result["complete"]:
        yield Text("The study was interrupted before its final: this is what was known then.")
    if (final := result.get("final")) and final["undecided"]:
        yield Text(f"Undecided: {final['undecided']}.")
    for text in result.get("disturbances", ()):
        yield Text(f"{text[:1].upper()}{text[1:]}.")
    yield from _bound(result)
    yield from _outputs(result["best"])
    yield _plan_table(study, study.best)
    if study.graph is not None and (ranks := describe_ranks(study.graph, study.best)):
        yield Text(f"{ranks}.")


def _outputs(best: dict[str, Any]) -> Iterator[Block]:
    """Yield how far the plan's outputs are from the whole model's on the CPU; earlier versions did not tell."""
    if best.get("identical"):
        yield Text("It computes bit for bit what the whole model does.")
    elif best.get("max_rel_error") is not None:
        yield Text(
            f"Its outputs are within {best['max_rel_error']:.1e} of the whole model's on the CPU, relative to the "
            f"largest of them ({best['output']}: {best['mean_rel_error']:.1e} on average); {best['tolerance']:.1e} is "
            "allowed."
        )


def _front(study: Study) -> Iterator[Block]:
    """Yield the plans that none beats in all objectives, and a picture of the first two."""
    front = study.result.get("front")
    if not front or len(front["plans"]) < 1:
        return
    aims = [objective_of({**study.result, "objective": name}) for name in front["objectives"]]
    rows = []
    for each in front["plans"]:
        values = [each["values"][aim.key] for aim in aims]
        stages = each["plan"]["stages"]
        lanes = ", ".join(s["processor"] for s in stages)
        rows.append((*values, len(stages), each["name"] or lanes, "knee" if each["knee"] else ""))
    columns = (*(Column(f"{aim.title}, {aim.shown}", ".4g") for aim in aims), Column("stages", "d"), Column("plan"),
               Column("remark"))  # fmt: skip
    table = Table("The front", columns, tuple(rows))
    every = [
        (trial.median_s * 1e3, trial.measurement.figures[aims[1].name] * 1e3, trial.origin)
        for trial in study.trials
        if trial.measurement is not None and aims[1].name in trial.measurement.figures
    ]
    yield Figure(
        "front",
        plots.front([tuple(row[:2]) for row in rows], every, [f"{a.title}, {a.shown}" for a in aims[:2]],
                    next(i for i, each in enumerate(front["plans"]) if each["knee"])),
        "Every plan that was measured, by its first two objectives. The line joins the plans that no other one beats "
        "in all objectives; the largest mark is the knee, which gives up least of all of them together.",
        table,
    )  # fmt: skip


def _bound(result: dict[str, Any]) -> Iterator[Block]:
    """Yield how far the plan can be from the best one; a result of an earlier version has fewer fields."""
    bound, gap, more = result["model_bound_ms"], result["gap"], result.get("bounds") or {}
    if bound is None or gap is None:
        return
    own = more.get("model") == "the evaluator's own"
    whose = "By the evaluator's own costs" if own else "By the model of single operators"
    unit = objective_of(result).shown
    text = f"{whose}, no plan of this space takes less than {bound:.4g} {unit}; gap {max(gap, 0.0):.1%}."
    if gap < -1e-9:
        text = f"{whose}, no plan of this space takes less than {bound:.4g} {unit}. "
        text += f"This one was measured {-gap:.1%} below: by that much at least the model is wrong."
    elif more.get("proven") is False:
        text += " That it could be reached is not proven."
    yield Text(text)
    if "all_plans_ms" in more and unit == "ms":
        yield Text(f"Whatever the cuts and overlaps, none takes less than {more['all_plans_ms']:.4g} ms in that model.")


def _plan_table(study: Study, plan: Plan) -> Table:
    entry = study.result["best"]
    times = entry.get("stage_ms") or [None] * len(plan.stages)
    rows = []
    for index, (stage, took_ms) in enumerate(zip(plan.stages, times, strict=True)):
        handed = None
        if study.graph is not None:
            outputs = study.graph.boundary(stage.operators).outputs
            handed = human_bytes(sum(study.graph.tensors[t].nbytes for t in outputs))
        where = f"{stage.operators[0]} to {stage.operators[-1]}"
        what = describe_operators(study.graph, stage.operators) if study.graph is not None else where
        rows.append((index, what, stage.processor, took_ms, handed))
    columns = (
        Column("stage", "d"),
        Column("operators"),
        Column("processor"),
        Column(study.objective.shown if study.objective.law != "memory" else "ms", ".4g"),
        Column("transfers"),
    )
    return Table("The best plan, stage by stage", columns, tuple(rows))


def _why(study: Study) -> Iterator[Block]:
    from optimizer.explain import explain
    from optimizer.explain_text import blocks

    if study.objective != LATENCY or study.result.get("front"):
        yield Text("Why a plan is the best is explained for the latency only.", "note")
        return
    try:
        found = explain(study)
    except OptimizeError as error:
        yield Text(f"The plan is not explained: {error}", "note")
        return
    yield from blocks(found)


def _baselines(study: Study) -> Iterator[Block]:
    rows = []
    for name, entry in study.result["baselines"].items():
        latency = entry["latency_ms"]
        numbers = (latency["median"], *latency["ci95"], latency["samples"]) if latency else (None,) * 4
        against = entry.get("slower_than_best")
        text = slower_text(Ratio(against["ratio"], *against["ci95"])) if against else ""
        remark = entry["failure"] or ("scaled from the search" if latency and latency["source"] == "search" else "")
        rows.append((name, *numbers, text, len(entry["plan"]["stages"]), remark))
    unit = study.objective.shown
    numbered = (Column(f"median, {unit}", ".4g"), Column("95 % from", ".4g"), Column("to", ".4g"))
    columns = (Column("plan"), *numbered, Column("samples", ",d"),
               Column("against the recommended plan"), Column("stages", "d"), Column("remark"))  # fmt: skip
    table = Table("Known plans", columns, tuple(rows))
    named = () if study.predicted else spreads(study)
    if not named:
        yield table
        return
    yield Figure(
        "samples",
        plots.distributions(named, unit),
        "Every sample as a dot, the median as a stroke, its 95 % interval as a line, in the state of the machine "
        "during the final. Plans with few samples were measured only well enough to see that they are no candidates.",
        table,
    )


def _timeline(study: Study, drawn: tuple[Bar, ...]) -> Iterator[Block]:
    if not drawn:
        return
    kinds = [_printable(o.kind) for o in study.graph.operators] if study.graph is not None else []
    rows = [
        (bar.name, bar.source, e.stage, e.lane, e.start_s * 1e3, e.end_s * 1e3)
        for bar in drawn
        for e in bar.timeline.events
    ]
    columns = (Column("plan"), Column("source"), Column("stage", "d"), Column("lane"), Column("start, ms", ".4f"),
               Column("end, ms", ".4f"))  # fmt: skip
    known = {bar.name for bar in drawn if bar.source == "measured"}
    without = ", ".join(dict.fromkeys(f"“{bar.name}”" for bar in drawn if bar.name not in known))
    unseen = f" No measured timeline of {without} was kept: it was stopped early, or the evaluator has none."
    unseen = unseen if without and not study.predicted else ""
    told = "as predicted" if study.predicted else "measured and as the model of single operators predicts them"
    yield Figure(
        "timeline",
        plots.timelines(drawn, kinds),
        f"Processors over time, {told}, on one scale. best/trace.json holds the same for ui.perfetto.dev.{unseen}",
        Table("Timelines", columns, tuple(rows)),
    )


def _stages(study: Study, found: tuple[Point, ...]) -> Iterator[Block]:
    best = best_by_stages(found)
    if len(best) < 2:
        return
    counts = {k: sum(1 for p in found if p.stages == k) for k in best}
    rows = tuple((k, counts[k], s * 1e3) for k, s in best.items())
    columns = (Column("K", "d"), Column("plans", ",d"), Column(f"best median, {study.objective.shown}", ".4g"))
    yield Figure(
        "stages",
        plots.by_stages(found, best, study.objective.shown),
        "Each plan by its number of stages; the line joins the best of each. "
        + ("" if study.predicted else "These are medians of the search; the answer comes from the final."),
        Table("By number of stages", columns, rows),
    )


def _history(study: Study, found: tuple[Point, ...]) -> Iterator[Block]:
    if not found:
        return
    bound = study.result["model_bound_ms"]
    unit = study.objective.shown
    columns = (Column("plan", "d"), Column("proposed by"), Column("K", "d"), Column(f"median, {unit}", ".4g"),
               Column(f"best so far, {unit}", ".4g"), Column(f"predicted, {unit}", ".4g"))  # fmt: skip
    rows = tuple(
        (
            p.number,
            p.origin,
            p.stages,
            p.latency_s * 1e3,
            p.best_s * 1e3,
            p.predicted_s * 1e3 if p.predicted_s else None,
        )
        for p in found
    )
    yield Figure(
        "history",
        plots.optimisation(found, bound / 1e3 if bound else None, unit),
        "Plans in the order in which they were tried. The dashed line is the optimum of the model of single operators.",
        Table("The search", columns, rows),
    )
    failures = [t for t in study.trials if t.failure]
    if failures:
        yield Text(f"{len(failures)} plans could not be measured; the first: {failures[0].failure}")


def _predicted(found: tuple[Point, ...]) -> Iterator[Block]:
    errors = sorted(abs(p.predicted_s / p.latency_s - 1.0) for p in found if p.predicted_s and not p.raced)
    if not errors:
        return
    within = sum(e <= 0.1 for e in errors) / len(errors)
    yield Text(
        f"Of {len(errors)} plans that were measured in full, the model of single operators predicts {within:.0%} "
        f"within 10%; the median error is {errors[len(errors) // 2]:.1%}."
    )
    yield Figure(
        "predicted",
        plots.predicted(found),
        "Plans on the dotted line are predicted right. Those stopped early are shown by their few first runs. "
        "The numbers are in the table of the search.",
    )


def _graph(study: Study) -> Iterator[Block]:
    graph = study.graph
    if graph is None:
        yield Text(f"The graph is not drawn: {study.missing}", "note")
        return
    if len(graph.operators) > _MOST_OPERATORS:
        yield Text(f"The graph is not drawn: it has {len(graph.operators):,} operators.", "note")
        return
    rules = "".join(
        f"{','.join(f'#op-{o} rect.f' for o in stage.operators)}{{fill:{part_colour(index)}}}"
        for index, stage in enumerate(study.best.stages)
    )
    svg = render_svg(inspect_graph(graph)).replace("</style>", f"{rules}</style>", 1)
    legend = "; ".join(f"stage {i} on {s.processor}" for i, s in enumerate(study.best.stages[:12]))
    more = ", …" if len(study.best.stages) > 12 else ""
    yield Figure(
        "graph",
        svg,
        f"The model, coloured by stage of the best plan ({legend}{more}). The bars on the left are bytes that cross "
        "a cut. best/partition.json colours it in Model Explorer.",
        _plan_table(study, study.best),
        wide=True,
    )


def _environment(study: Study) -> Iterator[Block]:
    manifest = study.manifest
    rows: list[tuple[str, str]] = [("time", str(manifest.get("created_utc", "")))]
    rows += [(str(k), _plain(v)) for k, v in dict(manifest.get("machine", {})).items()]
    rows.append(("Python", str(manifest.get("python", ""))))
    product = dict(manifest.get("product", {}))
    rows.append((str(product.get("name", "product")), str(product.get("version", ""))))
    rows += [(str(k), _plain(v)) for k, v in dict(manifest.get("packages", {})).items()]
    rows += [(f"lane {p.name}", f"{p.kind}, {_plain(dict(p.options))}") for p in study.platform.processors]
    rows += [(name, text) for name, text in dict(study.result.get("placements", {})).items()]
    rows.append(("model digest", str(study.result["model"]["digest"])))
    yield Table("Environment", (Column("what"), Column("value")), tuple(rows))


def _again(study: Study) -> Iterator[Block]:
    command = [str(word) for word in study.manifest.get("command", [])]
    yield Text("The study, from the beginning, with a new --out:")
    yield Code(shlex.join(command))
    lines = [f"optimize {command} {shlex.quote(str(study.path))}" for command in ("execute", "report")]
    yield Text("The best plan again, and this report:")
    yield Code("\n".join(lines))
    settings = {k: v for k, v in study.config.items() if v not in (None, "", [], ()) and k != "schema_version"}
    yield Table("Settings", (Column("setting"), Column("value")), tuple((k, _plain(v)) for k, v in settings.items()))
    yield Text(
        "trials.jsonl in the run folder holds every sample; the same seed proposes the same plans, given the same "
        "measurements.",
        "note",
    )


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _printable(text: str) -> str:
    return text if text.isprintable() else shown(text)
