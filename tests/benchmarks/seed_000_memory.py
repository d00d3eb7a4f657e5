"""Seed 000's own reading of its result, tried: is VGG16 in parts faster than whole where memory is short?

``python -m tests.benchmarks.seed_000_memory OUT.json`` (as root: it makes control groups)

A plan runs in a control group whose memory is limited to a part of the model's weights beside what its processes need.
Weights are mapped from disk (XNNPACK's packed copy), so that a page that does not stay is read again when it is needed.
Each plan is loaded under each limit, in random order, several times; beside the times stand page faults that had to
wait for the disk, and how much of the weights lay in memory at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator
from evaluators.samples import Samples
from optimizer.model.baselines import baselines
from optimizer.provenance import provenance
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.models.cache import cache_dir

MODEL = "vgg16"
SHARES = (None, 1.5, 1.0, 0.7, 0.4)
"""Of the weights; None: as much as there is."""
PLANS = ("whole", "layer type K=2", "parameter count K=2", "parameter count K=3", "parameter count K=4", "every layer")
WARM, RUNS = 2, 10
_MARGIN_NBYTES, _LIMIT_S = 8 << 20, 300.0


@contextmanager
def group_of(nbytes: int | None) -> Iterator[Path]:
    """Make a control group within this process's, of version 1 or 2."""
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    first = "memory" in groups
    top = Path("/sys/fs/cgroup/memory" if first else "/sys/fs/cgroup") / groups["memory" if first else ""].lstrip("/")
    group = top / f"seed_000_{os.getpid()}"
    group.mkdir()
    try:
        if nbytes is not None:
            (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(nbytes))
        yield group
    finally:
        end = time.monotonic() + 10.0
        while (group / "cgroup.procs").read_text().strip() and time.monotonic() < end:
            time.sleep(0.05)
        group.rmdir()


def stat(group: Path) -> dict[str, int]:
    """Return what a control group counts: bytes and page faults, by the names of version 1."""
    found = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    names = {"cache": "file", "mapped_file": "file_mapped", "rss": "anon", "pgmajfault": "pgmajfault"}
    return {name: int(found.get(f"total_{name}", found.get(other, 0))) for name, other in names.items()}


def forget_files() -> None:
    """Have the system forget cached models and packed weights, so that whoever reads them next is charged for them."""
    os.sync()
    for path in cache_dir().rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plans_of(graph: Graph, platform: Platform) -> dict[str, Plan]:
    """Return the plans that are timed, by their names."""
    found = baselines(graph, platform, "cpu")
    return {name: b.plan for name in PLANS for b in found if b.name == name or b.name.startswith(f"{name} on ")}


def timed(name: str, group: Path) -> dict[str, Any]:
    """Load a plan and run it, in this process, which is in a control group."""
    graph, platform = load(MODEL), Platform("here", (make_processor("cpu"),))
    with (
        LitertEvaluator().prepare(platform) as session,
        closing(session.load(graph, plans_of(graph, platform)[name])) as candidate,
    ):
        candidate.run(WARM)
        before = stat(group)
        found = candidate.run(RUNS)
        after = stat(group)
    faults = {"major_faults_a_run": (after["pgmajfault"] - before["pgmajfault"]) / RUNS}
    mib = {f"{name}_mib": round(after[name] / 2**20, 1) for name in ("cache", "mapped_file", "rss")}
    return {"ms": [round(float(s) * 1e3, 3) for s in found.latency_s]} | faults | mib


def timed_apart(name: str, nbytes: int | None) -> dict[str, Any]:
    """Return what :func:`timed` does in a process whose memory is limited, and that of all that it starts."""
    forget_files()
    with group_of(nbytes) as group:
        enter = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -m {__spec__.name} --plan '{name}' {group}"
        run = subprocess.run(["sh", "-c", enter], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    lines = run.stdout.splitlines()
    if run.returncode or not lines:
        reason = (run.stderr.strip().splitlines() or [""])[-1]
        return {"failed": f"exit code {run.returncode}: {reason}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the loads of one plan under one limit, and of all runs."""
    good = [row for row in rows if "failed" not in row]
    if not good:
        return {"failed": rows[0]["failed"], "loads": len(rows)}
    every = Samples(tuple(ms for row in good for ms in row["ms"]))
    names = [name for name in good[0] if name != "ms"]
    middle = {name: round(float(np.median([row[name] for row in good])), 2) for name in names}
    return {
        "median_ms": round(every.median, 2),
        "ci95_ms": [round(x, 2) for x in every.ci95],
        "loads": len(good),
        "failed_loads": len(rows) - len(good),
    } | middle


def main() -> None:
    """Time each plan under each limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--loads", type=int, default=3, help="of each plan under each limit")
    parser.add_argument("--plan", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan:
        sys.stdout.write(json.dumps(timed(options.plan, options.out)) + "\n")
        return
    graph = load(MODEL)
    weights = sum(tensor.nbytes for tensor in graph.tensors if tensor.constant)
    own_nbytes = max(int(timed_apart(name, None)["rss_mib"] * 2**20) for name in PLANS) + _MARGIN_NBYTES
    rows: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    rng = np.random.default_rng(0)
    for number in range(options.loads):
        pairs = [(name, share) for name in PLANS for share in SHARES]
        for index in rng.permutation(len(pairs)):
            name, share = pairs[index]
            nbytes = None if share is None else own_nbytes + int(share * weights)
            rows.setdefault((name, share), []).append(timed_apart(name, nbytes))
            print(number, name, share, rows[name, share][-1], flush=True)  # noqa: T201
        document = {
            "schema_version": 1,
            "made_by": "python -m tests.benchmarks.seed_000_memory OUT.json",
            **provenance(),
            "weights_mib": round(weights / 2**20, 1),
            "memory_beside_weights_mib": round(own_nbytes / 2**20, 1),
            "limits": {
                "none" if share is None else f"{share:g} of the weights": {n: summary(rows[n, share]) for n in PLANS}
                for share in SHARES
            },
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
