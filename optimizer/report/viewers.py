"""A study's plans for other viewers: node data for Model Explorer, timelines for Perfetto and Chrome."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optimizer.report.data import Bar, Study
from optimizer.report.svg import COLOURS, PARTS
from search_spaces.core.graph import Graph

_SCALE = ("#eff3ff", "#bdd7e7", "#6baed6", "#3182bd", "#08519c")  # a factor of 4 each, up to the slowest operator


def node_data(study: Study, graph: Graph) -> dict[str, dict[str, Any]]:
    """Return file → layer of Model Explorer for a study's plan; operators go by the name of their first output.

    ``model-explorer m.tflite --node_data_paths=partition.json,…`` shows them.

    ``partition`` has stage and processor of each operator, with the milliseconds of both: of stages as measured and as
    the operators' times predict them. Where the times of single operators are known there is a layer of them for each
    processor, all on one scale of colours. They were profiled one by one, or are predictions.
    """
    of_stage, of_operator = ("predicted", "predicted") if study.predicted else ("measured", "profiled")
    plan, costs = study.best, study.costs
    stage_ms = study.result["best"]["stage_ms"] or ()
    foreseen = None if study.predicted else study.predict(plan)
    foreseen_ms = {e.stage: 1e3 * (e.end_s - e.start_s) for e in foreseen.events} if foreseen is not None else {}
    names = {
        o: graph.tensors[operator.outputs[0]].name for o, operator in enumerate(graph.operators) if operator.outputs
    }
    index = {p.name: i for i, p in enumerate(costs.platform.processors)} if costs is not None else {}
    partition: dict[str, dict[str, str]] = {}
    for number, stage in enumerate(plan.stages):
        label = f"{stage.processor} · stage {number}"
        if len(stage_ms) == len(plan.stages):
            label += f" · {stage_ms[number]:.4g} ms {of_stage}"
            label += f", {foreseen_ms[number]:.4g} ms predicted" if number in foreseen_ms else ""
        for operator in stage.operators:
            own = ""
            if costs is not None and stage.processor in index:
                own = f" · operator {costs.operator_s[index[stage.processor], operator] * 1e3:.4g} ms {of_operator}"
            if operator in names:
                other = partition.get(names[operator], {"value": ""})["value"]  # of the other side of a split
                value = f"{other} | {label}{own}" if other else f"{label}{own}"
                partition[names[operator]] = {"value": value, "bgColor": COLOURS[f"p{number % PARTS}"][0]}
    layers: dict[str, dict[str, Any]] = {"partition": {"name": "partition", "results": partition}}
    if costs is None:
        return layers
    most_ms = max((1e3 * s for s in costs.operator_s.flat if math.isfinite(s)), default=0.0)
    for processor, number in index.items():
        times = {name: 1e3 * float(costs.operator_s[number, o]) for o, name in names.items()}
        layers[f"partition_{''.join(c if c.isalnum() else '_' for c in processor)}"] = {
            "name": f"{of_operator} ms per operator on {processor}",
            "results": {name: {"value": ms} for name, ms in times.items() if math.isfinite(ms)},
            "thresholds": [
                {"value": most_ms / 4 ** (len(_SCALE) - 1 - step), "bgColor": colour}
                for step, colour in enumerate(_SCALE)
            ],
        }
    return layers


def trace(bars: Sequence[Bar], platform: Sequence[str]) -> dict[str, Any]:
    """Return the Trace Event Format document of timelines.

    Args:
        platform: names of the processors, in their order.
    """
    events: list[dict[str, Any]] = []
    for process, bar in enumerate(bars, 1):
        events.append(_name("process_name", process, 0, f"{bar.name}, {bar.source}"))
        start_s = min(e.start_s for e in bar.timeline.events)
        for thread, processor in enumerate(platform, 1):
            if any(e.processor == processor for e in bar.timeline.events):
                events.append(_name("thread_name", process, thread, processor))
        for event, inference in zip(
            bar.timeline.events, bar.inferences or (0,) * len(bar.timeline.events), strict=True
        ):
            operators = bar.plan.stages[event.stage].operators
            # Both ends on one grid of nanoseconds, which is Perfetto's: spans that follow each other cannot overlap.
            begin_ns, end_ns = (round((at_s - start_s) * 1e9) for at_s in (event.start_s, event.end_s))
            events.append(
                {
                    "name": f"stage {event.stage}",
                    "cat": bar.source,
                    "ph": "X",
                    "ts": begin_ns / 1e3,
                    "dur": (end_ns - begin_ns) / 1e3,
                    "pid": process,
                    "tid": platform.index(event.processor) + 1,
                    "args": {
                        "inference": inference,
                        "operators": " to ".join(map(str, dict.fromkeys((operators[0], operators[-1])))),
                        "copied_us": event.copied_s * 1e6,
                    },
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schema_version": 1}}


def _name(what: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}}
