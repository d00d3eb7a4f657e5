"""Whether every capability goes with every other: a cell for each, run as a person would, and a table of what came.

::

    python -m tests.composition experiments/results/composition.md --evaluator cost-model litert

A cell is freedoms × one model or two × objective × evaluator. It runs a short study of small networks and looks at what
that says of itself; or it is refused at the start, in one line, for a reason that stands in :data:`REASONS`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

from evaluators.objectives import OBJECTIVES
from search_spaces.registry import FREEDOMS

SUBSETS = [",".join(("cuts", *more)) for n in range(4) for more in combinations(FREEDOMS[1:], n)]
AIMS = [(name,) for name in OBJECTIVES] + [("latency", "memory")]
ONE = "squeezenet1_1@0.25/64+spectrum"
SEVERAL = f"{ONE},googlenet@0.25/64+spectrum"
TABLE = """
name: branches
unit: ms
objective: latency
devices: [{kind: cpu}, {kind: gpu, overhead: 0.4}, {kind: npu, overhead: 0.2}]
transfers:
  - {from: cpu, to: gpu, takes: 0.5, bandwidth_bytes_per_s: 4.0e+9}
  - {from: gpu, to: cpu, takes: 0.8, bandwidth_bytes_per_s: 4.0e+9}
  - {from: cpu, to: npu, takes: 0.3, bandwidth_bytes_per_s: 1.0e+9}
  - {from: npu, to: cpu, takes: 0.3, bandwidth_bytes_per_s: 1.0e+9}
  - {from: gpu, to: npu, takes: 1.1, bandwidth_bytes_per_s: 1.0e+9}
  - {from: npu, to: gpu, takes: 1.1, bandwidth_bytes_per_s: 1.0e+9}
networks:
  - name: net
    operators:
      - {name: stem, times: {cpu: 6.0, gpu: 2.0, npu: 1.0}, output_bytes: 4.0e+5}
      - {name: left, reads: [stem], times: {cpu: 9.0, gpu: 2.5, npu: 1.2}, output_bytes: 2.0e+5}
      - {name: right, reads: [stem], times: {cpu: 8.0, gpu: 2.2, npu: 1.1}, output_bytes: 1.0e+5}
      - {name: join, reads: [left, right], times: {cpu: 0.4, gpu: 0.3, npu: 0.2}, output_bytes: 1.0e+5}
"""
RUN_S = 300.0

ON: Mapping[str, Sequence[str]] = {
    "litert": ("--processors", "cpu0,cpu1"),
    "cost-model": ("--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,1small,gpu"),
    "cuda": ("--evaluator", "cuda", "--processors", "stream0,stream1"),
    "remote": ("--evaluator", "remote"),
    "table": ("--evaluator", "table"),
    "example": ("--evaluator", "example"),
}
POWERS: Mapping[str, Sequence[str]] = {
    "litert": ("cpu0=1", "cpu1=1"),
    "cost-model": ("1large=2", "1small=0.5", "gpu=12"),
    "cuda": ("stream0=200", "stream1=200"),
    "remote": ("cpu0=1", "cpu1=1"),
    "table": ("cpu=2", "gpu=5", "npu=1"),
    "example": (),
}
REASONS = (
    "it runs one model at a time",  # a table, a board behind an agent, a plug-in that says nothing else
    "runs one inference at a time",  # the same: there is no stream to tell the throughput of
    "there is nothing to decompose",  # the operators of a table have no weights
    "needs PyTorch",
)
"""Why a cell may be refused; each is a fact of the evaluator, the device or the network."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What goes together."""

    allow: str
    several: bool
    aims: tuple[str, ...]
    evaluator: str

    @property
    def words(self) -> list[str]:
        """The command line."""
        model = SEVERAL if self.several else "table.yaml" if self.evaluator == "table" else ONE
        found = ["--model", model, "--allow", self.allow, "--budget", "4", *ON[self.evaluator]]
        found += [word for aim in self.aims for word in ("--objective", aim)]
        if "energy" in self.aims:
            found += [word for power in POWERS[self.evaluator] for word in ("--power", power)]
        return found + (["--max-error", "0.5"] if "ranks" in self.allow else [])


@dataclass(frozen=True, slots=True)
class Came:
    """What came of a cell.

    Attributes:
        how: ``runs``, ``refused`` or ``wrong``.
        why: it was refused, or is wrong.
    """

    cell: Cell
    how: str
    why: str
    took_s: float


def cells(evaluators: Sequence[str]) -> Iterator[Cell]:
    """Yield the base cells of some evaluators."""
    for evaluator, several, allow, aims in product(evaluators, (False, True), SUBSETS, AIMS):
        yield Cell(allow, several, aims, evaluator)


def tried(cell: Cell, environment: Mapping[str, str] | None = None) -> Came:
    """Run a cell."""
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "table.yaml").write_text(TABLE)
        command = [sys.executable, "-m", "optimizer.cli", *cell.words, "--out", "run", "-q", "--json"]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=RUN_S,
                check=False,
                env=environment and dict(environment),
            )
            code, out, err = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            code, out, err = -1, "", f"no end within {RUN_S:g} s"
    how, why = _judged(cell, code, out, err)
    return Came(cell, how, why, time.monotonic() - begin_s)


def _judged(cell: Cell, code: int, out: str, err: str) -> tuple[str, str]:
    last = (err.strip().splitlines() or [f"exit code {code}"])[-1]
    if code in (2, 4) and err.count("\n") == 1:
        return ("refused", last) if any(reason in last for reason in REASONS) else ("wrong", last)
    if code not in (0, 5):
        return "wrong", last
    problem = _wrong(cell, json.loads(out))
    return ("wrong", problem) if problem else ("runs", "")


def _wrong(cell: Cell, found: Mapping[str, Any]) -> str:
    """Return what a study's result says that it should not, or "" where all is well."""
    first = found["objective"]
    if first.replace("mean", "latency") != min(cell.aims, key=list(OBJECTIVES).index):
        return f"the objective is {first}"
    if len(cell.aims) > 1 and len(found["front"]["objectives"]) != len(cell.aims):
        return "there is no front"
    if sorted(found["space"]["freedoms"]) != sorted(cell.allow.split(",")):
        return f"the space has {found['space']['freedoms']}"
    if ("workload" in found) != cell.several:
        return "it is about another number of models"
    compared = [each for each in (found["best"], found["deployed"]) if each and each["max_rel_error"] is not None]
    if not found["predicted"] and not compared and cell.evaluator != "table":
        return "outputs were not compared"
    off = next((each["max_rel_error"] for each in compared if each["max_rel_error"] > each["tolerance"]), None)
    return "" if off is None else f"outputs are off by {off:g}"


def table(came: Sequence[Came]) -> str:
    """Return a table for people."""
    lines = ["| evaluator | models | freedoms | " + " | ".join("+".join(a) for a in AIMS) + " |"]
    lines.append("|" + " --- |" * (3 + len(AIMS)))
    rows: dict[tuple[str, bool, str], dict[tuple[str, ...], str]] = {}
    notes: dict[str, int] = {}
    for each in came:
        cell = each.cell
        mark = "runs" if each.how == "runs" else f"{each.how} ({notes.setdefault(each.why, len(notes) + 1)})"
        rows.setdefault((cell.evaluator, cell.several, cell.allow), {})[cell.aims] = mark
    for (evaluator, several, allow), row in rows.items():
        lines.append(
            f"| {evaluator} | {'two' if several else 'one'} | {allow} | "
            + " | ".join(row.get(a, "") for a in AIMS)
            + " |"
        )
    counts = Counter((each.cell.evaluator, each.how) for each in came)
    lines += ["", *(f"- {evaluator}: {count} {how}" for (evaluator, how), count in sorted(counts.items()))]
    lines += ["", *(f"{number}. {why}" for why, number in notes.items())]
    return "\n".join(lines) + "\n"


def _read(log: Path) -> list[Came]:
    found = []
    for each in json.loads(log.read_text()):
        cell = each.pop("cell")
        found.append(Came(Cell(**{**cell, "aims": tuple(cell["aims"])}), **each))
    return found


def main() -> None:
    """Try cells, print each, write the table and what came as JSON; what ran before is not run again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--evaluator", nargs="+", default=list(ON), choices=list(ON))
    parser.add_argument("--every", type=int, default=1, help="try each Nth cell only")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; their latencies mean less (default 1)")
    options = parser.parse_args()
    log = options.file.with_suffix(".json")
    known = {each.cell: each for each in (_read(log) if log.is_file() else ()) if each.how != "wrong"}
    came: list[Came] = []
    wanted = list(cells(options.evaluator))[:: options.every]
    with ThreadPoolExecutor(options.jobs) as pool:
        for last in pool.map(lambda cell: known.get(cell) or tried(cell), wanted):
            came.append(last)
            sys.stdout.write(f"{last.how:8} {last.took_s:5.1f} s  {' '.join(last.cell.words)}  {last.why}\n")
            sys.stdout.flush()
            log.write_text(json.dumps([asdict(each) for each in came], indent=1))
    options.file.write_text(table(came))


if __name__ == "__main__":
    main()
