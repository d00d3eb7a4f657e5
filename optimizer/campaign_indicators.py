"""What explains the latencies of a campaign's models: work, weights, or memory traffic, as seed 004 asks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from evaluators.cost_model.indicators import LEAST_MODELS, Indicators, explained, indicators
from evaluators.cost_model.profile import find_profile
from optimizer.report.data import Study
from search_spaces.errors import OptimizeError

Row = dict[str, Any]
GROUP = ("evaluator", "platform", "processors")
"""Axes whose values keep models apart: latencies of one device are explained together."""


def indicator_row(head: Mapping[str, Any], study: Study, machine: Mapping[str, Any]) -> Row | None:
    """Return the indicators of a study's model beside the latency of its best plan; None where there are none.

    Args:
        head: the study's axes.
        machine: that ran the campaign, as its provenance tells.
    """
    latency = study.result["best"].get("latency_ms")
    if study.graph is None or latency is None:
        return None
    cache_bytes = _cache_bytes(study, machine)
    return {
        **{axis: head[axis] for axis in ("study", "model", *GROUP)},
        "family": str(head["model"]).partition("@")[0],
        "cache_bytes": cache_bytes,
        **asdict(indicators(study.graph, cache_bytes)),
        "latency_ms": latency["median"],
    }


def explained_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Return the R² of a straight line through each indicator: by device, of all models and of each family."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        for family in ("all", row["family"]):
            groups.setdefault(json.dumps([*(row[axis] for axis in GROUP), family]), []).append(row)
    for key, each in sorted(groups.items(), key=lambda item: json.loads(item[0])[-1] != "all"):
        if len({row["model"] for row in each}) < LEAST_MODELS:
            continue
        found = [Indicators(**{name: row[name] for name in Indicators.__dataclass_fields__}) for row in each]
        told = explained(found, [row["latency_ms"] * 1e-3 for row in each])
        yield {**dict(zip((*GROUP, "family"), json.loads(key), strict=True)), "models": len(each), **told}


def _cache_bytes(study: Study, machine: Mapping[str, Any]) -> int:
    """Return the last cache of the first processor: of a profile what that says, else of a core of the machine."""
    if study.result["evaluator"] == "cost-model":
        try:
            found = find_profile(str(study.config.get("platform")))
        except OptimizeError:
            found = None
        known = found[0].processors.get(study.platform.processors[0].like) if found else None
        return known.cache_bytes if known else 0
    return int(machine.get("own_cache_bytes") or 0)
