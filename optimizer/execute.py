"""Run a plan as ``optimize execute`` does: from its files, or where several models have none from the models."""

from __future__ import annotations

import json
from pathlib import Path

from evaluators.litert.runner import PlanRunner
from evaluators.litert.workload_files import is_workload_plan
from evaluators.objectives import OBJECTIVES, PricedCandidate, Pricing
from evaluators.sampling import SamplingPolicy, measure
from optimizer.console import interval_ms
from optimizer.execute_hosted import execute_hosted, study_of
from optimizer.execute_workload import Executed, execute_workload
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
    study = None if files else study_of(path)
    if files or study is not None:
        if stream:
            raise UsageError("--stream: a plan of several models has its own arrivals", "leave it out")
        if inputs is not None or custom_ops is not None:
            raise UsageError("--input and --custom-ops: a plan of several models draws its inputs", "leave them out")
        if study is None:
            return Executed(execute_workload(path, as_json=as_json))
        return execute_hosted(study, as_json=as_json)
    if custom_ops is not None:
        check_custom_ops(custom_ops)
    with PlanRunner(path, custom_ops=custom_ops) as runner:
        runner.run_seeded() if inputs is None else runner.run(runner.read(inputs))
        deployed = runner.deployment
        objective = OBJECTIVES["throughput" if stream else "latency"]
        how = (Pricing(objective, deployed.platform, {}),)
        policy = _STREAM_POLICY if stream else _POLICY
        found = measure(PricedCandidate(runner.candidate, deployed.plan, how, lambda: 0), policy)
        in_flight = runner.in_flight if stream else 1
        stages = runner.deployment.plan.stages
        name = runner.deployment.graph.name
    samples = found.latency_s
    if as_json:
        document = {
            "schema_version": 1,
            "model": name,
            **({"in_flight": in_flight} if stream else {}),
            objective.key: {
                "median": samples.median * 1e3,
                "ci95": [x * 1e3 for x in samples.ci95],
                "samples": len(samples.values_s),
                "values": [x * 1e3 for x in samples.values_s],
            },
            "stages": [
                {"processor": stage.processor, "ms": seconds * 1e3}
                for stage, seconds in zip(stages, found.stage_s, strict=True)
            ],
        }
        return Executed(json.dumps(document, indent=2))
    # The name comes from a file, and may hold what commands a terminal.
    told = f"{interval_ms(samples)}, {len(samples.values_s)} runs"
    if stream:
        told = f"a result every {interval_ms(samples)}, {1.0 / samples.median:.4g} a second, {in_flight} in flight"
    lines = [f"{name if name.isprintable() else shown(name)}: {told}"]
    lines += [
        f"stage {i} on {s.processor}: {t * 1e3:.2f} ms"
        for i, (s, t) in enumerate(zip(stages, found.stage_s, strict=True))
    ]
    return Executed("\n".join(lines))
