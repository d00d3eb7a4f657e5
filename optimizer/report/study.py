"""Report of a study: the answer first, the evidence after it, then the commands that repeat it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from evaluators.machine import problems, waits_for_disk
from evaluators.measurement.final import Ratio
from evaluators.objectives import LATENCY
from optimizer.exact.front import undominated
from optimizer.model.baselines import glossary
from optimizer.model.ranks_text import describe_ranks
from optimizer.report import plots
from optimizer.report.answer import (
    against_text,
    answer_text,
    bound_name,
    bound_text,
    decomposed_rows,
    figure_text,
    front_table,
    gain_text,
    objective_of,
    outcomes_table,
    same_plan,
    stages_table,
)
from optimizer.report.data import STREAMED, Bar, Point, Study, bars, best_by_stages, points, spreads
from optimizer.report.document import (
    Block,
    Code,
    Column,
    Document,
    Figure,
    Section,
    Table,
    Text,
    headed,
    listed,
    machine_facts,
    plain,
    shown,
)
from optimizer.report.graph import render_svg
from optimizer.report.svg import part_colour
from optimizer.report.viewers import node_data, trace
from optimizer.study.limits import missed
from optimizer.tools.inspect import inspect_graph
from search_spaces.core.errors import OptimizeError, plain_name
from search_spaces.core.plan import Plan
from search_spaces.core.wording import many, percent, plural

_MODEL = "predicted from the profiled operators"
_DRIFT = 0.02  # change of the machine's speed between search and final that captions mention
_LEAST_RANKED = 5  # plans for a rank correlation
_WEAK = 0.5  # rank correlation below which a model does not tell which plan is faster
_MOST_OPERATORS = 1500  # of a graph that is drawn: beyond, the picture alone would be megabytes


def study_document(study: Study) -> Document:
    """Return the report of a study."""
    found = points(study)
    drawn = bars(study)
    model = study.result["model"]
    processors = ", ".join(p.name for p in study.platform.processors if p.resources)
    files = {"viewers/trace.json": json.dumps(trace(drawn, [p.name for p in study.platform.processors]))}
    if study.graph is not None:
        layers = node_data(study, study.graph)
        files |= {f"viewers/{name}.json": json.dumps(layer, indent=1) for name, layer in layers.items()}
    sections = [
        Section("answer", "Answer", tuple(_answer(study))),
        Section("front", "Front", tuple(_front(study))),
        Section("why", "Why this plan", tuple(_why(study))),
        Section("models", "Models", tuple(_workload(study.result))),
        Section("baselines", f"Baselines, {'predicted' if study.predicted else 'measured'}", tuple(_baselines(study))),
        Section("timeline", "Timeline", tuple(_timeline(study, drawn))),
        Section("stages", "By number of stages", tuple(_stages(study, found))),
        Section("history", "The search", tuple(_history(study, found))),
        Section("model", "Predicted and measured", () if study.predicted else tuple(_predicted(study, found))),
        Section("graph", "Graph", tuple(_graph(study))),
        Section("environment", "Environment", tuple(_environment(study))),
        Section("again", "How to repeat it", tuple(_again(study))),
    ]
    return Document(
        title=f"{plain_name(model['name'])} on {plain_name(study.device_name)}",
        subtitle=f"{plural(model['operators'], 'operator')} on {processors}; {many(study.result['unique_plans'])} of "
        f"{plural(study.result['space']['plans'], 'plan')} tried; {'predicted' if study.predicted else 'measured'} by "
        f"evaluator {study.result['evaluator']}; study {study.manifest['study']}, "
        f"{str(study.manifest.get('created_utc', ''))[:16].replace('T', ' ')} UTC",
        sections=tuple(s for s in sections if s.blocks),
        files=files,
    )


def _answer(study: Study) -> Iterator[Block]:
    result = dict(study.result)
    took, late = "", None
    if (known := result["best"]["latency_ms"]) and "front" not in result and study.objective.scales:
        low, high = (end / 1e3 for end in known["ci95"])
        unit = study.objective.shown_unit
        title = study.objective.title
        verb = "It takes" if study.objective == LATENCY else f"{title[:1].upper()}{title[1:]}:"
        took = f" {verb} {figure_text(known['median'] / 1e3, (low, high), unit)}."
        if study.objective == LATENCY and (deadline := study.config.get("deadline")) is not None:
            late = missed(float(deadline) / 1e3, known["median"] / 1e3, predicted=study.predicted)
    what = f"{late.what[:1].upper()}{late.what[1:]}. It is" if late is not None else "Recommended:"
    yield Text(f"{what} {answer_text(result)}.{took if late is None else ''}", "answer")
    if result["complete"]:
        yield Text(f"Gain: {gain_text(result)}.")
    held, tried = sum(trial.number >= 0 for trial in study.trials), result["unique_plans"]
    if held < tried:
        yield Text(f"trials.jsonl is incomplete: it holds {many(held)} of {plural(tried, 'plan')}.", "note")
    if not result["complete"]:
        yield Text("The study was interrupted before its final comparison: these are the results so far.")
    if (final := result.get("final")) and final["undecided"]:
        yield Text(f"Undecided: {final['undecided']}.")
    if bound := bound_text(result):
        yield Text(f"Bound: {bound}.")
    yield from _outputs(result["best"], result.get("deployed"))
    if result.get("tolerances"):
        yield Text(f"{result['tolerances'][:1].upper()}{result['tolerances'][1:]}.")
    yield stages_table(study.result, "The recommended plan, stage by stage", study.model_of)
    if any(study.result["best"].get("stage_ms") or ()) and not study.predicted:
        yield Text(
            "Each stage's figure is a median of its own, without waiting and transfers: they need not add up to the "
            "plan's."
        )
    if study.graph is not None and (ranks := describe_ranks(study.graph, study.best)):
        yield Text(f"{ranks}.")
    yield from _quiet(study)


def _quiet(study: Study) -> Iterator[Block]:
    """Yield what else ran on the machine, and what that means for the figures."""
    found = list(study.result.get("disturbances", ()))
    if best := study.result["best"]["latency_ms"]:
        if waits := waits_for_disk(best.get("conditions") or {}):
            yield Text(f"{waits[0].upper()}{waits[1:]}.")
        found += [f"while the recommended plan was measured, {text}" for text in problems(best.get("conditions") or {})]
    if study.predicted or not found:
        return
    if study.verdict is None or len(study.verdict.final.measured) < 2:
        means = "The figures include these loads: repeat the study on a quiet machine"
    elif study.verdict.undecided or (study.verdict.speedup is not None and not study.verdict.speedup.significant):
        means = "Such loads widen the intervals: repeat the study on a quiet machine to decide between the best plans"
    else:
        means = (
            "The final comparison ran the plans in turns, so that such loads affected them alike, and its intervals "
            "include what remains; repeat the study on a quiet machine for absolute figures"
        )
    what = "; ".join(found)
    yield Text(f"How quiet the machine was: {what}. {means}.")


def _outputs(best: dict[str, Any], deployed: dict[str, Any] | None = None) -> Iterator[Block]:
    """Yield the difference of the plan's outputs from the whole model's on the CPU."""
    if best.get("identical"):
        yield Text("It computes bit for bit what the whole model does.")
    elif best.get("max_rel_error") is not None:
        each = ", ".join(f"{e['name']}: {e['largest']:.1e}, {e['mean']:.1e} on average" for e in best["outputs"])
        yield Text(
            f"Its outputs are within {best['max_rel_error']:.1e} of the whole model's on the CPU, relative to the "
            f"largest of them ({each}); {best['tolerance']:.1e} is allowed."
        )
    if deployed and deployed["top1"]:
        yield Text("The likeliest class changes for {} of {} random inputs.".format(*deployed["top1"]))


def _front(study: Study) -> Iterator[Block]:
    """Yield the plans that none beats in all objectives, and a picture of the first and the one that varies most."""
    front = study.result.get("front")
    if not front or len(front["plans"]) < 1:
        return
    table, keys = front_table(study.result), list(front["plans"][0]["values"])
    ranges = [[float(each["values"][key]) for each in front["plans"]] for key in keys]
    second = max(range(1, len(keys)), key=lambda i: (max(ranges[i]) - min(ranges[i])) / (max(ranges[i]) or 1.0))
    other = front["objectives"][second]
    values = list(zip(ranges[0], ranges[second], strict=True))
    tried = [trial for trial in study.trials if trial.measurement and other in trial.measurement.figures]
    every = [
        (study.searched_s(trial) * 1e3, trial.measurement.figures[other] * 1e3, trial.origin)
        for trial in tried
        if trial.measurement
    ]
    marked = {Plan.from_json(each["plan"]).digest for each in front["plans"]}
    others = [point for point, trial in zip(every, tried, strict=True) if trial.plan.digest not in marked]
    knee = next(i for i, each in enumerate(front["plans"]) if each["knee"])
    titles, names = [table.columns[i].name for i in (0, second)], [str(row[-2]) for row in table.rows]
    inside, between = [(every[i][:2], trial) for i, trial in enumerate(tried) if trial.params], ""
    on_it = undominated(np.array([values for values, _ in inside])) if inside else ()
    final = {plan.digest for plan in study.verdict.plans} if study.verdict is not None else set()
    compared = sum(inside[i][1].plan.digest in final for i in on_it)
    if len(front["objectives"]) == 2 and len(on_it) > compared:
        between = f" By the trials, {len(on_it)} plans are on it; the final compared {compared}, evenly spread."
    # Few runs of a search may look better than the many of the final.
    measured = "" if study.predicted else ": small marks as the search measured it, those of the line as the final did"
    yield at_two_widths(
        "front",
        partial(plots.front, values, others, titles, knee, names),
        f"Every plan that was tried, by two of its objectives{measured}. The line joins the plans that no other one "
        "beats significantly in all objectives; the largest mark is the knee, which gives up least of all of them "
        f"together.{' A mark may be better by these two, and worse by another one.' if len(keys) > 2 else ''} "
        f"Marks with names: the best plan by each of the two, and the knee.{between}",
        table,
    )


def _why(study: Study) -> Iterator[Block]:
    from optimizer.tools.explain import blocks, explain

    try:
        found = explain(study)
    except OptimizeError as error:
        yield Text(f"The plan is not explained: {error}", "note")
        return
    for block in blocks(found):
        if isinstance(block, Table) and block.caption == "Baselines":  # another table of the page has their values
            if not study.predicted and not found["best"]["why_not"]:
                yield replace(block, caption="Predictions of the baselines")
        elif isinstance(block, Table) and block.columns[0].form:
            yield _numbers_first(block)
        else:
            yield block


def _numbers_first(table: Table) -> Table:
    """Return a table whose texts come last, so that a narrow screen shows its figures."""
    order = sorted(range(len(table.columns)), key=lambda i: not table.columns[i].form)
    rows = tuple(tuple(row[i] for i in order) for row in table.rows)
    return replace(table, columns=tuple(table.columns[i] for i in order), rows=rows)


def _workload(result: Mapping[str, Any]) -> Iterator[Block]:
    """Yield tables of the outcome of each plan of several models, and of each model's own latency."""
    workload = result.get("workload")
    if not workload or not workload["outcomes"]:
        return
    outcomes, names = workload["outcomes"], workload["instances"]
    head = f"{plural(len(names), 'model')} at once; objective: {objective_of(result).title}. Figures are"
    said, source = "predicted", "predicted"
    if not result.get("predicted"):
        said, source = (
            "measured",
            "of the final comparison, or of the search, scaled to it; predictions are the simulator's",
        )
    yield Text(f"{head} {source}.")
    yield outcomes_table(result)
    if rows := tuple(decomposed_rows(result)):
        yield Table("Convolutions decomposed (Tucker-2)", headed("model; in the best plan"), rows)
    each = tuple(
        ("recommended plan" if plan == "best" else plan, *(entry["instances_ms"].get(name) for name in names))
        for plan, entry in outcomes.items()
    )
    yield Table(
        f"Each model's mean latency, {said}, ms", headed("plan", *(Column(f"{n}, ms", ".4g") for n in names)), each
    )


def _baselines(study: Study) -> Iterator[Block]:
    rows = []
    for name, entry in study.result["baselines"].items():
        latency = entry["latency_ms"]
        numbers: tuple[float | None, ...] = (None,) * 4
        if latency and study.objective.scales:
            low, high = latency["ci95"]
            exact = low == high
            samples = None if study.predicted else latency["samples"]
            numbers = latency["median"], None if exact else low, None if exact else high, samples
        against = entry.get("slower_than_best")
        ratio = Ratio(against["ratio"], *against["ci95"]) if against else None
        text = against_text(ratio, study.objective, racing=against["racing"]) if ratio else ""
        first = next(n for n, other in study.result["baselines"].items() if other["plan"] == entry["plan"])
        if first != name:
            text = same_plan(first)
        elif entry["plan"] == study.result["best"]["plan"]:
            text = "recommended"
        elif entry["failure"]:
            text = "failed"
        remark = entry["failure"] or ("measured in the search" if latency and latency["source"] == "search" else "")
        rows.append((name, *numbers, text, len(entry["plan"]["stages"]), remark))
    names = glossary(study.result["baselines"])
    meanings = Table("What the names mean", headed("baseline; plan"), tuple(names.items()))
    unit = study.objective.shown_unit
    word, interval = ("predicted", "model error") if study.predicted else ("median", "95 %")
    numbered = headed(f"{word}, {unit}|.4g; {interval} from|.4g; to|.4g")
    columns = headed("plan", *numbered, "samples|,d; against the recommended plan; stages|d; remark")
    yield Table("Comparison with the baselines", columns, tuple(rows))
    if names:
        yield meanings
    if measured := () if study.predicted else spreads(study):
        yield at_two_widths(
            "samples",
            partial(plots.distributions, measured, unit),
            "Every sample is a dot, the median a stroke, its 95 % interval a line. Samples of the search are scaled to "
            "the speed of the machine in the final comparison. Plans with few samples were ruled out early.",
        )


def at_two_widths(name: str, draw: Callable[..., str], caption: str, table: Table | None = None) -> Figure:
    """Return a figure that is drawn for broad and for narrow screens."""
    return Figure(name, draw(), caption, table, narrow=draw(width=plots.NARROW))


def _of_search(study: Study) -> str:
    """Return where figures of the search come from, and why they differ from the answer's."""
    if study.predicted:
        return ""
    text = " Figures are medians of the search, which measures each plan in few runs"
    slowness = study.verdict.slowness if study.verdict else 1.0
    if abs(slowness - 1.0) >= _DRIFT:
        change = f"{percent(max(slowness, 1.0 / slowness) - 1.0)} {'slower' if slowness > 1.0 else 'faster'}"
        text += f", scaled to the speed of the machine in the final comparison ({change})"
    return text + ("; the answer is the median of the final comparison." if study.verdict else ".")


def _timeline(study: Study, drawn: tuple[Bar, ...]) -> Iterator[Block]:
    if not drawn:
        return
    kinds = [plain_name(o.kind) for o in study.graph.operators] if study.graph is not None else []
    rows = [
        (bar.name, bar.source, e.stage, e.processor, e.start_s * 1e3, e.end_s * 1e3)
        for bar in drawn
        for e in bar.timeline.events
    ]
    columns = headed("plan; source; stage|d; processor; start, ms|.4f; end, ms|.4f")
    known = {bar.name for bar in drawn if bar.source == "measured"}
    without = ", ".join(dict.fromkeys(f"“{bar.name}”" for bar in drawn if bar.name not in known))
    unseen = f" No measured timeline of {without} was kept."
    unseen = unseen if without and not study.predicted else ""
    sources = dict.fromkeys(bar.source for bar in drawn)
    source = " and ".join(s if study.predicted or s == "measured" else f"{_MODEL} (dashed)" for s in sources)
    what = "Stages by processor"
    if any(bar.inferences for bar in drawn):
        what = f"Stages by processor, of {STREAMED} inferences that follow each other (stage·inference)"
    yield at_two_widths(
        "timeline",
        partial(plots.timelines, drawn, kinds, several=study.joined is not None),
        f"{what}; {source}; on one scale. viewers/trace.json holds the same for ui.perfetto.dev.{unseen}"
        + (
            ""
            if "measured" not in sources
            else " Measured is a single run of each plan, scaled to its median or to the machine's speed in the final."
        ),
        Table("Timelines", columns, tuple(rows), group=2),
    )


def _stages(study: Study, found: tuple[Point, ...]) -> Iterator[Block]:
    best = best_by_stages(found)
    if len(best) < 2:
        return
    counts = {k: sum(1 for p in found if p.stages == k) for k in best}
    rows = tuple((k, counts[k], s * 1e3) for k, s in best.items())
    columns = headed(f"stages|d; plans|,d; best {_how(study)}|.4g")
    yield at_two_widths(
        "stages",
        partial(plots.by_stages, found, best, _how(study)),
        "Each plan by its number of stages, points of one number side by side; lines join the best of neighbouring "
        f"numbers.{_of_search(study)}",
        Table("By number of stages", columns, rows),
    )


def _history(study: Study, found: tuple[Point, ...]) -> Iterator[Block]:
    if not found:
        return
    bound = study.result["model_bound_ms"]
    unit = study.objective.shown_unit
    columns = headed(f"plan|d; proposed by; stages|d; {_how(study)}|.4g; best so far, {unit}|.4g")
    columns += () if study.predicted else headed(f"predicted from its operators, {unit}|.4g")
    rows = []
    for p in found:
        row = (p.number, p.origin, p.stages, p.latency_s * 1e3, p.best_s * 1e3)
        rows.append(row if study.predicted else (*row, p.predicted_s * 1e3 if p.predicted_s else None))
    name = bound_name(study.result)
    dashed = f" The dashed line is the {name} of this space, {shown(bound, '.4g')} {unit}." if bound else ""
    below = [p.latency_s * 1e3 for p in found if bound and p.latency_s * 1e3 < bound * (1.0 - 1e-6)]
    if below and not study.predicted:
        wrong = percent(1.0 - min(below) / (bound or 1.0), 1)
        plans, was = plural(len(below), "plan"), "was" if len(below) == 1 else "were"
        dashed += f" It is no limit: predictions have an error, and {plans} {was} measured below it, by up to {wrong}."
    yield at_two_widths(
        "history",
        partial(plots.optimisation, found, bound / 1e3 if bound else None, _how(study), name),
        f"Plans in the order in which they were tried.{_of_search(study)}{dashed}",
        Table("The search", columns, tuple(rows)),
    )
    failures = [t for t in study.trials if t.failure]
    if failures:
        yield Text(f"{plural(len(failures), 'plan')} could not be measured; the first: {failures[0].failure}")


def _predicted(study: Study, found: tuple[Point, ...]) -> Iterator[Block]:
    errors = sorted(abs(p.predicted_s / p.latency_s - 1.0) for p in found if p.predicted_s and not p.raced)
    if not errors:
        return
    within = sum(e <= 0.1 for e in errors)
    yield Text(
        f"The profiled operators predict {within} of {plural(len(errors), 'fully measured plan')} within 10 % of their "
        f"medians in the search; the median error is {percent(errors[len(errors) // 2], 1)}."
    )
    if text := _ranking([(p.predicted_s, p.latency_s) for p in found if p.predicted_s and not p.raced]):
        yield Text(text)
    yield at_two_widths(
        "predicted",
        partial(plots.predicted, found),
        "Plans on the dotted line are predicted right. Plans beyond the scale are not drawn; the table of the search "
        f"has all. Predictions are sums of operators that were profiled before the search.{_of_search(study)}",
    )


def _ranking(pairs: Sequence[tuple[float, float]]) -> str:
    """Return how well predictions tell which plan is faster, from pairs of predicted and measured latencies."""
    if len(pairs) < _LEAST_RANKED:
        return ""
    spreads = [
        float(np.subtract(*np.percentile(side, [75, 25])) / np.median(side)) for side in zip(*pairs, strict=True)
    ]
    if len({round(predicted, 9) for predicted, _ in pairs}) == 1:
        return f"The predictions do not rank these plans: they are the same for all {len(pairs)} of them."
    from scipy.stats import spearmanr  # a quarter of a second, which most reports do not need

    rho = float(spearmanr(*zip(*pairs, strict=True)).statistic)
    text = f"The rank correlation of predictions and measurements is {shown(rho, '.2f')} (1: the same order)"
    if rho < _WEAK:
        text += ": the predictions do not tell which of these plans is faster"
    if spreads[0] < spreads[1] / 3.0:
        near, far = percent(spreads[0], 1), percent(spreads[1], 1)
        text += f". The predictions hardly differ: their middle half spans {near}, that of the measurements {far}"
    return f"{text}."


def _graph(study: Study) -> Iterator[Block]:
    graph = study.joined.graph if study.joined is not None else study.graph
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
    rules += ".graph .n .m{fill:var(--ink)}"  # muted words are hard to read on the colours of stages
    rules += ".graph{background:none}.graph>.s{fill:none}"  # the page's own background shows that it scrolls
    svg = render_svg(inspect_graph(graph)).replace("</style>", f"{rules}</style>", 1)
    legend = "; ".join(f"stage {i} on {s.processor}" for i, s in enumerate(study.best.stages[:12]))
    more = ", …" if len(study.best.stages) > 12 else ""
    viewers = " viewers/partition*.json colour it in Model Explorer, by stage or by ms of each operator."
    yield Figure(
        "graph",
        svg,
        f"The model, coloured by stage of the recommended plan ({legend}{more}). The bars on the left are bytes that "
        f"cross a cut.{'' if study.joined is not None else viewers}",
        stages_table(study.result, "The recommended plan, stage by stage", study.model_of),
        wide=True,
    )


def _environment(study: Study) -> Iterator[Block]:
    manifest, product = study.manifest, dict(study.manifest.get("product", {}))
    facts = {
        "time": manifest.get("created_utc", ""),
        **machine_facts(dict(manifest.get("machine", {}))),
        "Python": manifest.get("python", ""),
        product.get("name", "product"): product.get("version", ""),
        **dict(manifest.get("packages", {})),
        **{
            f"processor {p.name}": ", ".join([p.kind, *(f"{k} {plain(v)}" for k, v in p.options.items())])
            for p in study.platform.processors
        },
        **dict(study.result.get("placements", {})),
        "model digest": study.result["model"]["digest"],
    }
    yield listed("Environment", ("what", "value"), facts)


_PLACES = {"--out", "--study", "--storage", "--heartbeat"}


def _elsewhere(command: Sequence[str]) -> list[str]:
    """Return a command line without the run folder and the shared storage that it names."""
    kept: list[str] = []
    words = iter(command)
    for word in words:
        if word in _PLACES:
            next(words, None)
        elif word.partition("=")[0] not in _PLACES:
            kept.append(word)
    return kept


def _again(study: Study) -> Iterator[Block]:
    command = [str(word) for word in study.manifest.get("command", [])]
    yield Text("The study again, from the beginning, in a new run folder:")
    yield Code(shlex.join(_elsewhere(command)))
    lines = [f"optimize {command} {shlex.quote(str(study.path))}" for command in ("execute", "report")]
    yield Text("The recommended plan again, and this report:")
    yield Code("\n".join(lines))
    settings = {k: v for k, v in study.config.items() if v not in (None, "", [], ()) and k != "schema_version"}
    yield listed("Settings", ("setting", "value"), settings)
    yield Text(
        "trials.jsonl in the run folder holds every sample; the same seed proposes the same plans, given the same "
        "measurements.",
        "note",
    )


def _how(study: Study) -> str:
    """Return the heading of plans' numbers, with their unit."""
    return f"{'predicted' if study.predicted else 'median'}, {study.objective.shown_unit}"
