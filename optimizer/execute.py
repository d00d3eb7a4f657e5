"""Run a plan as ``optimize execute`` does: from its files, or where this machine cannot run any, by its evaluator."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from evaluators.litert.deployment import is_workload_plan, runs_here
from evaluators.litert.runner import PlanRunner
from evaluators.objectives import OBJECTIVES, Objective, PricedCandidate, Pricing
from evaluators.samples import Measurement
from evaluators.sampling import SamplingPolicy, measure
from optimizer.console import interval_ms
from optimizer.execute_hosted import execute_hosted, has_several, reloaded, study_of, told_outputs
from optimizer.execute_workload import Executed, execute_workload, outputs_lines
from search_spaces.errors import UsageError, shown
from search_spaces.models.source import check_custom_ops

_POLICY = SamplingPolicy(max_s=3.0, min_runs=10, max_runs=1000)
_STREAM_POLICY = SamplingPolicy(
    max_s=3.0, min_runs=5, max_runs=12, warmup_max=2
)  # each run is a stream of 0.2 s or more


def plan_of(run: str) -> Path:
    """Return where the plan of a run folder is; any other path stands for itself."""
    path = Path(run)
    return path / "best" if (path / "best" / "plan.json").exists() else path


def execute(
    plan: str, *, as_json: bool, stream: bool = False, inputs: Path | None = None, custom_ops: Path | None = None
) -> Executed:
    """Measure a plan from its files, or that of a study without files from its models.

    Args:
        inputs: a file with the inputs to run on; those that the search measured with where left out.
        custom_ops: a library with kernels of custom operators.
        stream: run inferences that follow each other without a pause and overlap, instead of one at a time.

    Raises:
        PlanError: the plan or a stage file is missing or damaged.
        UnavailableError: this machine cannot run it.
    """
    path = plan_of(plan)
    files = is_workload_plan(path)
    study = None if files or runs_here(path) else study_of(path)
    if files or (study is not None and has_several(study)):
        if stream:
            raise UsageError("--stream: a plan of several models has its own arrivals", "leave it out")
        if inputs is not None or custom_ops is not None:
            raise UsageError("--input and --custom-ops: a plan of several models draws its inputs", "leave them out")
        if study is None:
            return Executed(execute_workload(path, as_json=as_json))
        return execute_hosted(study, as_json=as_json)
    objective = OBJECTIVES["throughput" if stream else "latency"]
    policy = _STREAM_POLICY if stream else _POLICY
    if study is not None:
        if inputs is not None or custom_ops is not None:
            raise UsageError("--input and --custom-ops: the plan has no files for this machine", "leave them out")
        with reloaded(study) as again, closing(again.session.load(again.graph, again.plan)) as candidate:
            if stream and not again.session.capabilities.stream:
                raise UsageError("--stream: the evaluator of this study runs one inference at a time", "leave it out")
            how = (Pricing(objective, again.platform, {}),)
            found = measure(PricedCandidate(candidate, again.plan, how, lambda: 0), policy)
            agreement = candidate.verify()
        processors = [stage.processor for stage in again.plan.stages]
        text = _told(
            again.graph.name, objective, found, processors, as_json=as_json, more=told_outputs(study, agreement)
        )
        return Executed(text, agreement is None or agreement.accepted)
    if custom_ops is not None:
        check_custom_ops(custom_ops)
    with PlanRunner(path, custom_ops=custom_ops) as runner:
        runner.run_seeded() if inputs is None else runner.run(runner.read(inputs))
        deployed = runner.deployment
        how = (Pricing(objective, deployed.platform, {}),)
        found = measure(PricedCandidate(runner.candidate, deployed.plan, how, lambda: 0), policy)
        flying = {"in_flight": runner.in_flight} if stream else {}
    processors = [stage.processor for stage in deployed.plan.stages]
    return Executed(_told(deployed.graph.name, objective, found, processors, as_json=as_json, more=flying))


def _told(
    name: str,
    objective: Objective,
    found: Measurement,
    processors: Sequence[str],
    *,
    as_json: bool,
    more: Mapping[str, Any],
) -> str:
    """Return what to print of a plan of one model.

    Args:
        more: of the JSON document; ``in_flight`` and ``outputs`` are told in words, too.
    """
    samples = found.latency_s
    if as_json:
        document = {
            "schema_version": 1,
            "model": name,
            **more,
            objective.key: {
                "median": samples.median * 1e3,
                "ci95": [x * 1e3 for x in samples.ci95],
                "samples": len(samples.values_s),
                "values": [x * 1e3 for x in samples.values_s],
            },
            "stages": [
                {"processor": processor, "ms": seconds * 1e3}
                for processor, seconds in zip(processors, found.stage_s, strict=True)
            ],
        }
        return json.dumps(document, indent=2)
    told = f"{interval_ms(samples)}, {len(samples.values_s)} runs"
    if objective.law == "period":
        flying = f", {more['in_flight']} in flight" if "in_flight" in more else ""
        told = f"a result every {interval_ms(samples)}, {1.0 / samples.median:.4g} a second{flying}"
    # The name comes from a file, and may hold what commands a terminal.
    lines = [f"{name if name.isprintable() else shown(name)}: {told}"]
    lines += [
        f"stage {i} on {processor}: {t * 1e3:.2f} ms"
        for i, (processor, t) in enumerate(zip(processors, found.stage_s, strict=True))
    ]
    return "\n".join([*lines, *outputs_lines(more)])
