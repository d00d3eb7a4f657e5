"""What the report of a study of several models says beside that of one: plans against each other, model by model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from optimizer.report.data import objective_of
from optimizer.report.document import Block, Column, Table, Text

_FIGURES = (
    ("mean, ms", "mean_ms"),
    ("worst, ms", "worst_ms"),
    ("longest, ms", "longest_ms"),
    ("makespan, ms", "makespan_ms"),
    ("requests a second", "throughput_per_s"),
    ("missed", "misses"),
    ("turned away", "rejected"),
)


def workload_blocks(result: Mapping[str, Any]) -> Iterator[Block]:
    """Yield tables of what came of each plan, and of each model's own latency; nothing for a single model."""
    workload = result.get("workload")
    if not workload or not workload["outcomes"]:
        return
    outcomes: Mapping[str, Any] = workload["outcomes"]
    yield Text(
        f"{len(workload['instances'])} models at once; the objective is the {objective_of(result).title}. Medians over "
        "some runs after the search; predicted is the objective by the simulator."
    )
    rows = tuple(
        (name, *(entry[key] for _, key in _FIGURES), (entry.get("predicted") or {}).get("objective"))
        for name, entry in outcomes.items()
    )
    columns = (
        Column("plan"),
        *(Column(name, ".4g") for name, _ in _FIGURES),
        Column(f"predicted, {objective_of(result).shown}", ".4g"),
    )
    yield Table("What came of each plan", columns, rows)
    each = tuple(
        (name, *(entry["instances_ms"].get(name) for entry in outcomes.values())) for name in workload["instances"]
    )
    if tucker := workload.get("tucker"):
        found = tuple(
            (name, e["max_error"], e["variants"], len(e["ranks"]), e["macs_saved"], e["error"], _known_by(e))
            for name, e in tucker.items()
        )
        heads = (
            Column("model"),
            Column("error allowed", ".4g"),
            Column("ways searched", "d"),
            Column("triples in the best plan", "d"),
            Column("multiply-accumulates saved", ".1%"),
            Column("outputs off by", ".2g"),
            Column("how that is known"),
        )
        yield Table("Convolutions decomposed (Tucker-2)", heads, found)
    yield Table("Each model's mean latency, ms", (Column("model"), *(Column(n, ".4g") for n in outcomes)), each)


def _known_by(entry: Mapping[str, Any]) -> str:
    """Return in a word how it is known how far a decomposed model's outputs are off."""
    if not entry.get("decomposable", True):
        return "it cannot be decomposed"
    if entry["error"] is None:
        return ""
    return "measured" if entry.get("error_measured") else "expected from its filters"
