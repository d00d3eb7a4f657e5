"""How near predictions of random plans come: what :mod:`tests.benchmarks.cost_model_plans` measured is evaluated.

All visits are brought to one pace by what was visited just before and after; a plan's time is the median of its visits.
Three predictions are compared with it. Transfers and contention are those that were measured beside the plans; what
differs is where the operators' times come from:

- ``families_kept_out``: a fit that holds no model of the families that a plan's models are of;
- ``families_known``: a fit that holds all families;
- ``operators_measured``: what each operator took within its own model in CPU_DATA, as a study profiles the operators of
  its model before it searches; brought to what the whole model took on each kind of processor beside the plans. Target
  4 is about plans: this tells how near the simulator comes where operators are known.

CPU_DATA is of another hour: what whole models of other families took in both says how much slower a processor was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.cost_model.fit import TimedModel, errors_of, fit_processor
from evaluators.cost_model.plans import PlanSimulator
from evaluators.cost_model.profile import ContentionProfile, CostProfile, LinkProfile, ProcessorProfile
from evaluators.cost_model.transfers import prices
from optimizer.provenance import provenance
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform
from tests.benchmarks.cost_model_cpu import GENERATED, family, timed_models
from tests.benchmarks.cost_model_plans import (
    KINDS,
    SINGLE,
    beside_and_apart,
    drawn,
    here,
    made,
    models,
    two_at_once,
)
from tests.benchmarks.fitting import slowness

Seconds = NDArray[np.float64]
MODES = ("families_kept_out", "families_known", "operators_measured")


@dataclass(frozen=True, slots=True)
class Visited:
    """Everything that was visited in turns, at one pace.

    Attributes:
        latency_s: what was visited → the median of its visits.
        noise: what was visited → half of how far the medians of its odd and its even visits differ, relative.
        pace_sd: how much the machine's pace varied.
    """

    latency_s: Mapping[str, float]
    noise: Mapping[str, float]
    pace_sd: float
    visits: int


def visited(rows: Sequence[Mapping[str, Any]]) -> Visited:
    """Bring all visits to one pace."""
    of = [row for row in rows if "visit" in row]
    names = np.array([row["visit"] for row in of])
    seconds = np.array([row["latency_s"] for row in of])
    slower = slowness(list(names), list(seconds))
    own = np.log(seconds) - slower
    each = {str(name): own[names == name] for name in dict.fromkeys(names)}
    return Visited(
        {name: float(np.exp(np.median(v))) for name, v in each.items()},
        {n: float(abs(np.median(v[::2]) - np.median(v[1::2]))) / 2 for n, v in each.items() if len(v) > 1},
        float(slower.std()),
        min(map(len, each.values())),
    )


@dataclass(frozen=True, slots=True)
class Fits:
    """What predictions are made from: models timed on each kind of processor, and how pairs slow each other."""

    platform: Platform
    timed: Mapping[str, Sequence[TimedModel]]
    generated: Mapping[str, ProcessorProfile]
    known: Mapping[str, ProcessorProfile]
    found: Visited
    links: tuple[LinkProfile, ...]
    contention: tuple[ContentionProfile, ...]

    def slower(self, processor: str, families: set[str]) -> float:
        """Return how much slower a processor was beside the plans than in CPU_DATA, by models of other families."""
        took, known = self.found.latency_s, {m.name: m.whole_s for m in self.timed[processor]}
        others = [name for name in SINGLE if family(name) not in families and f"whole {name} {processor}" in took]
        return float(np.median([took[f"whole {name} {processor}"] / known[name] for name in others]))

    def simulator(self, graph: Graph, names: Sequence[str], mode: str) -> PlanSimulator:
        """Return a simulator of the plans of some models in one file."""
        families = {family(name) for name in names}
        fitted = dict(self.known)
        if mode == "families_kept_out":
            fitted = {
                processor: fit_processor([m for m in of if m.family not in families], self.generated[processor].kernels)
                for processor, of in self.timed.items()
            }
        return self.simulator_of(graph, names, fitted, measured=mode == "operators_measured")

    def simulator_of(
        self, graph: Graph, names: Sequence[str], fitted: Mapping[str, ProcessorProfile], *, measured: bool = False
    ) -> PlanSimulator:
        """Return a simulator on some processors' profiles, at the pace of the plans' run."""
        likes = {processor: self.platform[processor].like for processor in KINDS}
        profile = CostProfile(
            "here", {likes[processor]: of for processor, of in fitted.items()}, self.links, self.contention
        )
        table = prices(profile, graph, self.platform)
        families = {family(name) for name in names}
        kinds = [next(processor for processor in KINDS if likes[processor] == p.like) for p in self.platform.processors]
        slower = np.array([self.slower(kind, families) for kind in kinds])
        operator_s, invocation_s = table.operator_s * slower[:, None], table.invocation_s * slower
        if measured:
            for row, kind in enumerate(kinds):
                operator_s[row] = self._measured_s(names, kind, operator_s[row], float(invocation_s[row]), slower[row])
        return PlanSimulator(graph, self.platform, replace(table, operator_s=operator_s, invocation_s=invocation_s))

    def _measured_s(
        self, names: Sequence[str], kind: str, predicted_s: Seconds, invocation_s: float, slower: float
    ) -> Seconds:
        """Return what operators took in CPU_DATA, each model brought to what it took as a whole beside the plans."""
        found, first = predicted_s.copy(), 0
        for name in names:
            model = next(m for m in self.timed[kind] if m.name == name)
            rows = slice(first, first + len(model.features))
            first = rows.stop
            own = np.where(
                np.isnan(model.operator_s), found[rows] * model.whole_s / found[rows].sum(), model.operator_s
            )
            own[[f.free for f in model.features]] = 0.0
            whole_s = self.found.latency_s.get(f"whole {name} {kind}", model.whole_s * slower)
            found[rows] = own * (whole_s - invocation_s) / own.sum()
        return found


def fits(rows: Sequence[dict[str, Any]], cpu_data: Path) -> Fits:
    """Return what predictions are made from."""
    timed = {processor: timed_models(cpu_data, processor) for processor in KINDS}
    generated = {processor: fit_processor([m for m in of if m.family == GENERATED]) for processor, of in timed.items()}
    known = {processor: fit_processor(of, generated[processor].kernels) for processor, of in timed.items()}
    links = _medians(LinkProfile, [r["link"] for r in rows if "link" in r], ("source", "target", "one_core"))
    contention = _medians(ContentionProfile, [r["contention"] for r in rows if "contention" in r], ("victim", "other"))
    return Fits(here(), timed, generated, known, visited(rows), tuple(links), tuple(contention))


def _medians(kind: Any, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Any]:
    """Return one profile for each pair of processors that was timed, some of them several times."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return [
        kind(**{name: v if name in names else float(np.median([r[name] for r in of])) for name, v in of[0].items()})
        for of in groups.values()
    ]


def evaluate(data: Path, cpu_data: Path) -> dict[str, Any]:
    """Return how well plans are predicted, all together and by model."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    fitted = fits(rows, cpu_data)
    graphs = {name: made(names).graph() for name, names in models().items()}
    simulators = {
        name: [fitted.simulator(graph, models()[name], mode) for mode in MODES] for name, graph in graphs.items()
    }
    table: list[list[Any]] = []
    for number, (name, plan) in enumerate(drawn(graphs)):
        measured_s = fitted.found.latency_s.get(f"plan {number}")
        if measured_s is None:
            continue
        predicted_s = [simulator.latency_s(plan) for simulator in simulators[name]]
        processors = " ".join(s.processor for s in plan.stages)
        table.append([name, processors, *(round(s * 1e3, 4) for s in (*predicted_s, measured_s))])
    return {
        "schema_version": 2,
        "made_by": "python -m tests.benchmarks.cost_model_plans evaluate DATA CPU_DATA OUT",
        "protocol": (__doc__ or "").strip(),
        **provenance(),
        "all": _errors(table),
        "at_once": _errors([t for t in table if len(models()[t[0]]) > 1]),
        "several_processors": _errors([t for t in table if len(set(t[1].split())) > 1]),
        "slowdown_by_contention": _slowdowns(rows, fitted),
        "by_model": {name: _errors([t for t in table if t[0] == name]) for name in graphs},
        "machine_drift": {
            "visits_to_each": fitted.found.visits,
            "pace_sd": round(fitted.found.pace_sd, 4),
            "median_is_off_by": [round(float(np.percentile(list(fitted.found.noise.values()), q)), 4) for q in (50, 90)]
            if fitted.found.noise
            else [],
        },
        "slower_than_in_cpu_data": {processor: round(fitted.slower(processor, set()), 4) for processor in KINDS},
        "links": [asdict(link) for link in fitted.links],
        "contention": [asdict(c) for c in fitted.contention],
        "columns": ["model", "processors", *(f"{mode}_ms" for mode in MODES), "measured_ms"],
        "plans": table,
    }


def _errors(table: Sequence[Sequence[Any]]) -> dict[str, Any]:
    return {mode: errors_of([t[2 + i] for t in table], [t[-1] for t in table]) for i, mode in enumerate(MODES)}


def _slowdowns(rows: Sequence[dict[str, Any]], fitted: Fits) -> dict[str, Any]:
    """Return how well it is predicted how much longer each of two models takes beside the other."""
    table: list[list[Any]] = []
    pairs = {tuple(row["beside"]): [] for row in rows if "beside" in row}  # type: dict[tuple[str, ...], list[list[float]]]
    for row in (r for r in rows if "beside" in r):
        pairs[tuple(row["beside"])].append(row["slowdown"])
    for names, ratios in pairs.items():
        graph = two_at_once(names).graph()
        simulator = fitted.simulator_of(graph, names, fitted.generated)
        beside, apart = (
            {e.stage: e.end_s - e.start_s for e in simulator.run(p).events} for p in beside_and_apart(graph)
        )
        for stage, name in enumerate(names):
            measured = float(np.median([ratio[stage] for ratio in ratios]))
            table.append([name, names[1 - stage], beside[stage] / apart[stage], measured])
    if not table:
        return {}
    error = np.abs([t[2] / t[3] - 1.0 for t in table])
    return {
        "median": round(float(np.median(error)), 4),
        "most": round(float(error.max()), 4),
        "within_5": round(float(np.mean(error <= 0.05)), 4),
        "columns": ["model", "beside", "predicted", "measured"],
        "cases": [[a, b, round(p, 4), round(m, 4)] for a, b, p, m in table],
    }
