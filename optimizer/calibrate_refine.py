"""Correct a profile with what a study measured on the real device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.cost_model.fit import errors_of, nonnegative_prices
from evaluators.cost_model.plans import PlanSimulator
from evaluators.cost_model.profile import CostProfile, ProcessorProfile, profile_digest, read_profile
from evaluators.cost_model.transfers import prices, profile_key
from optimizer.calibrate import Calibration, write_profile
from optimizer.history import Trial
from optimizer.run import CONFIG, LOG, read_manifest
from optimizer.storage import read_log
from search_spaces.errors import PlanError, ProfileError, RunFolderError, UsageError
from search_spaces.graph import Graph
from search_spaces.models import load
from search_spaces.platform import Platform
from search_spaces.yaml_file import read_settings

LEAST_STAGES = 6

Rows = dict[str, list[tuple[float, float]]]
"""Processor of the profile → predicted seconds without the invocation, and measured seconds, of each stage."""


def refine(file: Path, run: Path) -> Calibration:
    """Scale each processor's prices, and set its cost of a stage, by the stages that a study measured on it.

    Raises:
        ProfileError: the profile does not know the study's processors, or the study measured too little.
        RunFolderError: there is no run in that folder.
        UsageError: a file cannot be read.
    """
    profile, platform = read_profile(file)
    graph, trials = _run(run)
    before = _predictions(profile, platform, graph, trials)
    rows = _stages(profile, platform, graph, trials)
    if not any(len(of) >= LEAST_STAGES for of in rows.values()):
        raise ProfileError(
            f"{run}: measured {max(map(len, rows.values()), default=0)} stages on a processor of the profile",
            f"{LEAST_STAGES} or more are needed: give the study a larger --budget",
        )
    processors = dict(profile.processors)
    for key, of in rows.items():
        if len(of) >= LEAST_STAGES:
            processors[key] = _scaled(processors[key], of)
    refined = replace(profile, processors=processors)
    after = _predictions(refined, platform, graph, trials)
    measured = [t.measurement.median_s for t in trials if t.measurement]
    step = {
        "run": run.name,
        "model": graph.name,
        "profile_digest": profile_digest(profile),
        "plans": len(measured),
        "before": errors_of(before, measured),
        "after": errors_of(after, measured),
    }
    known: Any = profile.provenance.get("refined", ())
    refined = replace(
        refined,
        provenance={**profile.provenance, "refined": [*known, step]},
        errors={**profile.errors, "study": step["after"]},
    )
    write_profile(file, refined, platform)
    return Calibration(refined, platform, file)


def _run(run: Path) -> tuple[Graph, list[Trial]]:
    if read_manifest(run) is None:
        raise RunFolderError(f"{run}: there is no run in this folder", "give the folder that optimize --out made")
    config = _settings(run / CONFIG)
    if config.get("evaluator") == "cost-model":
        raise UsageError(f"{run}: this study was predicted, not measured", "give a run that measured the device")
    graph = load(str(config["model"]), tuple(config.get("input_shape") or ()), signature=config.get("signature"))
    trials = [Trial.from_json(r.data) for r in read_log(run / LOG).records if r.kind in {"trial", "baseline"}]
    kept = [t for t in trials if t.measurement is not None and not t.raced and t.measurement.cold == 1.0]
    return graph, kept


def _settings(file: Path) -> Mapping[str, Any]:
    found = read_settings(file)
    if "model" not in found:
        raise RunFolderError(f"{file}: is damaged: it names no model")
    return found


def _predictions(profile: CostProfile, platform: Platform, graph: Graph, trials: Sequence[Trial]) -> list[float]:
    simulator = PlanSimulator(graph, platform, prices(profile, graph, platform))
    return [simulator.latency_s(t.plan) for t in trials if t.measurement]


def _stages(profile: CostProfile, platform: Platform, graph: Graph, trials: Sequence[Trial]) -> Rows:
    simulator = PlanSimulator(graph, platform, prices(profile, graph, platform))
    found: Rows = {}
    for trial in trials:
        if trial.measurement is None:
            continue
        try:
            trial.plan.validate(graph, platform)
        except PlanError as error:
            raise ProfileError(f"the study's plans are not for the profile's platform: {error.what}") from error
        for stage, task, measured in zip(
            trial.plan.stages, simulator.tasks(trial.plan), trial.measurement.stage_s, strict=True
        ):
            key = profile_key(profile, platform[stage.processor])
            if measured > 0:
                found.setdefault(key, []).append((task.work_s - profile[key].invocation_s, measured))
    return found


def _scaled(processor: ProcessorProfile, rows: Sequence[tuple[float, float]]) -> ProcessorProfile:
    """Return a processor whose stages take what was measured, as nearly as one factor and one constant allow."""
    predicted, measured = np.array(rows).T
    table = np.stack([predicted, np.ones_like(predicted)], axis=1)
    factor, invocation = nonnegative_prices(table, measured)
    if factor <= 0:
        return processor
    kernels = {
        key: replace(model, prices={name: price * float(factor) for name, price in model.prices.items()})
        for key, model in processor.kernels.items()
    }
    return replace(
        processor,
        kernels=kernels,
        dispatch_s=processor.dispatch_s * float(factor),
        io_s_per_byte=processor.io_s_per_byte * float(factor),
        invocation_s=float(invocation),
    )
