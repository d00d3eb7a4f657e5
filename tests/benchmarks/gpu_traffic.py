"""What a GPU counts of its memory traffic, beside what we estimate from sizes (seed 004).

``python -m tests.benchmarks.gpu_traffic OUT.json [--models A,B]`` (needs torch, an NVIDIA GPU whose counters programs
may read, and ``ncu``, NVIDIA Nsight Compute)

``python -m tests.benchmarks.gpu_traffic OUT.json --latencies CAMPAIGN.json`` adds how well each of them, beside work,
explains the latencies that a campaign has measured; that needs no GPU.

Each network runs once, whole, by the kernels that the evaluator ``cuda`` chooses, in float32. Counted are bytes between
the GPU's memory and its second-level cache, and between that and the first-level caches; caches stay as they are from
one kernel to the next.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.cost_model.indicators import indicators, left_out_errors
from evaluators.cuda.devices import torch_module
from evaluators.cuda.instance import Instance, Tuning, as_function
from evaluators.cuda.lowering import Weights
from optimizer.campaign.file import read_campaign
from optimizer.provenance import provenance
from search_spaces.models import load

CAMPAIGN = Path("experiments/seed_004_gpu.yaml")
METRICS = {"dram__bytes_read.sum": 1, "dram__bytes_write.sum": 1, "lts__t_sectors_srcunit_tex.sum": 32}
"""Name of a counter → bytes of one."""
CACHES = (2 << 20, 50 << 20)
FIGURES = ("memory_estimate_mb_2", "memory_estimate_mb_50", "memory_mb", "second_level_mb")
_WORD, _LIMIT_S = 4, 240.0


def run_once(name: str) -> None:
    """Run a network three times in this process, the last time with counters."""
    torch = torch_module()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    graph = load(name)
    with torch.inference_mode():
        job = range(len(graph.operators)), Tuning("f32", 1)
        (work,) = Instance(Weights(graph, "cuda"), [job], lambda _: as_function, lambda _: None).work
        work()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        work()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def counted(name: str) -> dict[str, Any]:
    """Return what the GPU counts of one run of a network."""
    words = ["ncu", "--profile-from-start", "off", "--cache-control", "none", "--clock-control", "none", "--csv"]
    words += ["--print-units", "base", "--metrics", ",".join(METRICS)]
    words += [sys.executable, "-m", __spec__.name, "--model", name]
    run = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    rows = list(csv.DictReader(line for line in run.stdout.splitlines() if line.startswith('"')))
    if not rows:
        return {"failed": (run.stderr.strip() or run.stdout.strip())[-300:]}
    total = dict.fromkeys(METRICS, 0.0)
    for row in rows:
        total[row["Metric Name"]] += float(row["Metric Value"].replace(",", "")) * METRICS[row["Metric Name"]]
    return {"kernels": len({row["ID"] for row in rows})} | {
        "memory_mb": (total["dram__bytes_read.sum"] + total["dram__bytes_write.sum"]) / 1e6,
        "second_level_mb": total["lts__t_sectors_srcunit_tex.sum"] / 1e6,
    }


def estimated(name: str) -> dict[str, float]:
    """Return our estimates of the same, for several sizes of the cache."""
    graph = load(name)
    found = {f"memory_estimate_mb_{cache >> 20}": indicators(graph, cache).memory_accesses_estimate for cache in CACHES}
    found["first_level_estimate_mb"] = indicators(graph, CACHES[0]).l1_accesses_estimate
    return {key: value * _WORD / 1e6 for key, value in found.items()}


def agreement(rows: dict[str, dict[str, Any]], estimate: str, count: str) -> dict[str, float]:
    """Return how estimates relate to counts: the median ratio, its 90th percentile, and the correlation of logs."""
    pairs = [(row[estimate], row[count]) for row in rows.values() if count in row]
    known, seen = np.log(np.array(pairs)).T
    ratio = np.exp(np.abs(known - seen))
    return {
        "networks": len(pairs),
        "median_estimate_over_count": round(float(np.exp(np.median(known - seen))), 3),
        "times_off_median": round(float(np.median(ratio)), 3),
        "times_off_90": round(float(np.quantile(ratio, 0.9)), 3),
        "correlation_of_logs": round(float(np.corrcoef(known, seen)[0, 1]), 4),
    }


def explained(rows: dict[str, dict[str, Any]], latencies: Path) -> dict[str, Any]:
    """Return how wrong lines through work and each figure of traffic are about networks and families left out."""
    measured = {row["model"]: row["best"] for row in json.loads(latencies.read_text())["summary"]}
    names = [name for name in rows if "failed" not in rows[name]]
    families = [name.split("@")[0] for name in names]
    latency_s = [measured[name] / 1e3 for name in names]
    found: dict[str, Any] = {"latencies": latencies.name}
    for figure in FIGURES:
        plain = [indicators(load(name), CACHES[0]) for name in names]
        shown = [replace(one, memory_accesses_estimate=rows[n][figure]) for one, n in zip(plain, names, strict=True)]
        own = found.setdefault(f"work and {figure}", {})
        for family in dict.fromkeys(families):
            here = [i for i, other in enumerate(families) if other == family]
            picked = [shown[i] for i in here]
            errors = left_out_errors(picked, [latency_s[i] for i in here], [names[i] for i in here])
            own[f"each of {family}"] = errors["flops_and_memory"]
            found.setdefault("work", {})[f"each of {family}"] = errors["flops"]
        errors = left_out_errors(shown, latency_s, families)
        own["each family"], found["work"]["each family"] = errors["flops_and_memory"], errors["flops"]
    return found


def main() -> None:
    """Count each network of the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--models", default="")
    parser.add_argument(
        "--latencies", type=Path, help="summary of the campaign, as experiments/results/seed_004_gpu.json"
    )
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        run_once(options.model)
        return
    if options.latencies:
        known = json.loads(options.out.read_text())
        known["explained"] = explained(known["networks"], options.latencies)
        options.out.write_text(json.dumps(known, indent=1) + "\n")
        return
    models = options.models.split(",") if options.models else list(read_campaign(CAMPAIGN).content.matrix.model)
    rows: dict[str, dict[str, Any]] = {}
    for name in models:
        rows[name] = counted(name) | estimated(name)
        print(name, rows[name], flush=True)  # noqa: T201
        pairs = [("memory_estimate_mb_2", "memory_mb"), ("memory_estimate_mb_50", "memory_mb")]
        pairs += [("memory_estimate_mb_2", "second_level_mb"), ("first_level_estimate_mb", "second_level_mb")]
        good = {n: row for n, row in rows.items() if "failed" not in row}
        document = {
            "schema_version": 1,
            "made_by": "python -m tests.benchmarks.gpu_traffic OUT.json",
            **provenance(),
            "gpu": torch_module().cuda.get_device_name(),
            "networks": rows,
            "agreement": {f"{e} and {c}": agreement(good, e, c) for e, c in pairs} if len(good) > 1 else {},
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
