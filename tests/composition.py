"""Whether every capability goes with every other: a cell for each, run as a person would, and a table of what came.

::

    python -m tests.composition experiments/results/composition.md --evaluator cost-model litert

A cell is freedoms × one model or two × objective × evaluator. It runs a short study of small networks and looks at what
that says of itself; or it is refused at the start, in one line, for a reason that stands in :data:`REASONS`.
``--pairs`` takes cells that hold every pair of these and of :data:`EXTRAS`, which go on with the study: a second worker
on one storage, states of the platform, a warm start, limits, and the commands that read a finished study.

Without ``--pairs`` the file is the record: cells that ran are not run again, those of other evaluators and the text
before the table stay, and every cell is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

from evaluators.objectives import OBJECTIVES, find_objective
from evaluators.workload.objectives import find_workload_objective
from optimizer.cli import main as optimize
from search_spaces.spaces.registry import FREEDOMS
from tests.support.remote_agents import ROOT, agent_process

SUBSETS = [",".join(("cuts", *more)) for n in range(4) for more in combinations(FREEDOMS[1:], n)]
AIMS = [(name,) for name in OBJECTIVES] + [("latency", "memory")]
ONE = "squeezenet1_1@0.25/64+spectrum"
OTHER = "googlenet@0.25/64+spectrum"
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
ABLE = """
from evaluators.litert.session import LitertEvaluator


class Able(LitertEvaluator):
    name = "able"
"""
"""A plug-in that can do all that LiteRT's own evaluator can: whatever vanishes behind the guard is seen."""
AGENT = "AGENT_ADDRESS"
"""Stands for the address of the agent that :func:`world` starts."""
RUN_S = 300.0
EXTRAS = ("", "storage", "states", "warm start", "deadline", "max error", "commands", "campaign")
_SETTINGS = ("objective", "power", "state", "device")  # of a campaign, not of its matrix
_SLOW = {"litert": 2.0, "remote": 3.0, "cuda": 2.0, "able": 2.0}
_SLOW_SEVERAL = 2.0  # models at once

ON: Mapping[str, Sequence[str]] = {
    "litert": ("--processors", "cpu0,cpu1"),
    "cost-model": ("--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,1small,gpu"),
    "cuda": ("--evaluator", "cuda", "--processors", "stream0,stream1"),
    "remote": ("--evaluator", "remote", "--device", AGENT, "--processors", "cpu0,cpu1"),
    "table": ("--evaluator", "table"),
    "example": ("--evaluator", "example"),
    "able": ("--evaluator", "able", "--processors", "cpu0,cpu1"),
}
POWERS: Mapping[str, Sequence[str]] = {
    "litert": ("cpu0=1", "cpu1=1"),
    "cost-model": ("1large=2", "1small=0.5", "gpu=12"),
    "cuda": ("stream0=200", "stream1=200"),
    "remote": ("cpu0=1", "cpu1=1"),
    "table": ("cpu=2", "gpu=5", "npu=1"),
    "example": ("cpu=1", "dsp=1"),
    "able": ("cpu0=1", "cpu1=1"),
}
REASONS = (
    "it runs one model at a time",  # a plug-in that says nothing else
    "runs one inference at a time",  # a plug-in that says nothing of streams
    "there is nothing to decompose",  # the operators of a table have no weights
    "has no file",  # the same: no stage can be cut from it
    "needs PyTorch",
    "--state requires a cost model",  # a device is in the state in which it is
    "computes no outputs",  # so that no error of them can be limited
    "--max-error with several models requires --allow ranks",  # whose outputs nothing else changes
    "require two processors",  # and those of this device run one at a time
)
"""Why a cell may be refused; each is a fact of the evaluator, the device or the network."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What goes together."""

    allow: str
    several: bool
    aims: tuple[str, ...]
    evaluator: str
    extra: str = ""

    @property
    def models(self) -> tuple[str, ...]:
        """What is planned for."""
        every = ("table.yaml", "other.yaml") if self.evaluator == "table" else (ONE, OTHER)
        return every if self.several else every[:1]

    @property
    def words(self) -> list[str]:
        """The command line of its study."""
        model = ",".join(self.models)
        if self.several and self.extra == "deadline":
            model = "due.yaml"
        found = ["--model", model, "--allow", self.allow, "--budget", "4", *ON[self.evaluator]]
        found += [word for aim in self.aims for word in ("--objective", aim)]
        if "energy" in self.aims:
            found += [word for power in POWERS[self.evaluator] for word in ("--power", power)]
        found += ["--max-error", "0.5"] if "ranks" in self.allow or self.extra == "max error" else []
        if self.extra == "storage":
            found += ["--storage", "sqlite:///shared.db", "--study", "shared"]
        if self.extra == "states":
            names = [power.split("=")[0] for power in POWERS[self.evaluator] or ("cpu=1",)]
            alike = names if self.evaluator == "cuda" else names[:1]  # streams of one GPU take equally long
            found += ["--state", "usual:", "--state", "hot:" + ",".join(f"{name}=2" for name in alike)]
        return found + (["--deadline", "100000"] if self.extra == "deadline" and not self.several else [])

    @property
    def steps(self) -> list[list[str]]:
        """The commands, each of which must end well; the first one's document is looked at."""
        study = [*self.words, "-q", "--json"]
        if self.extra == "campaign":
            return [["run", "campaign.yaml", "--out", "run", "-q"]]
        first, other = [*study, "--out", "run"], [*study, "--out", "other"]
        more = {
            "storage": [other],
            "warm start": [[*other, "--warm-start", "run"]],
            "commands": [
                ["explain", "run", "--json"],
                ["export", "run", "--out", "exported"],
                ["compare", "run", "run", "--json", "-q"],
                ["report", "run"],
            ],
        }
        return [first, *more.get(self.extra, [])]

    def campaign(self) -> str:
        """The study as a campaign's file."""
        given: dict[str, list[str]] = {}
        for option, value in zip(self.words[::2], self.words[1::2], strict=True):
            given.setdefault(option[2:].replace("-", "_"), []).append(value)
        several: dict[str, Any] = {n: given.pop(n) for n in _SETTINGS if n in given}
        matrix: dict[str, Any] = {name: values[0] for name, values in given.items()}
        matrix["objective"], matrix["budget"] = ",".join(several.pop("objective")), int(matrix["budget"])
        matrix |= {"max_error": float(matrix["max_error"])} if "max_error" in matrix else {}
        several |= {"device": several["device"][0]} if "device" in several else {}
        return json.dumps({"name": "one", "matrix": matrix, "settings": several})


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


_PLACES = {cell: place for place, cell in enumerate(cells(list(ON)))}


def pairs(evaluators: Sequence[str], seed: int = 0) -> list[Cell]:
    """Return cells that hold every pair of two values of different kinds, chosen greedily, cheap ones first."""
    kinds: list[Sequence[Any]] = [SUBSETS, (False, True), AIMS, evaluators, EXTRAS]
    left = {((i, a), (j, b)) for (i, one), (j, other) in combinations(enumerate(kinds), 2) for a in one for b in other}
    every, found = list(product(*kinds)), list[Cell]()
    rng = random.Random(seed)
    while left:
        wanted = rng.choice(sorted(left, key=repr))
        fitting = [values for values in every if all(values[i] == value for i, value in wanted)]

        def worth(values: tuple[Any, ...], left: Any = left) -> float:
            slow = _SLOW.get(values[3], 1.0) * (_SLOW_SEVERAL if values[1] else 1.0)
            return sum(pair in left for pair in combinations(enumerate(values), 2)) / slow

        best = max(rng.sample(fitting, min(len(fitting), 60)), key=worth)
        left -= set(combinations(enumerate(best), 2))
        found.append(Cell(*best))
    return found


Run = Callable[[Sequence[str], Path], tuple[int, str, str]]
"""Runs a command in a folder; returns exit code, standard output and error."""


def tried(cell: Cell, run: Run) -> Came:
    """Run a cell."""
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "table.yaml").write_text(TABLE)
        (folder / "other.yaml").write_text(TABLE.replace("name: net", "name: other").replace("6.0", "12.0"))
        (folder / "campaign.yaml").write_text(cell.campaign())
        due = [f"  - {{model: '{model}', deadline_ms: 100000}}\n" for model in cell.models]
        (folder / "due.yaml").write_text(f"models:\n{''.join(due)}")
        how, why = "runs", ""
        for number, words in enumerate(cell.steps):
            code, out, err = run(words, folder)
            if cell.extra == "campaign" and code == 0:
                out = next((folder / "run").rglob("result.json")).read_text()
            how, why = _judged(cell, code, out, err) if not number else _ended(code, err)
            if how != "runs":
                break
        if how == "runs" and cell.extra in {"storage", "warm start"}:
            why = _other(cell, *(json.loads((folder / run / "result.json").read_text()) for run in ("run", "other")))
            how = "wrong" if why else how
    return Came(cell, how, why, time.monotonic() - begin_s)


def started(environment: Mapping[str, str], words: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Run a command in a process of its own."""
    address, campaign = environment.get(AGENT, ""), folder / "campaign.yaml"
    campaign.write_text(campaign.read_text().replace(AGENT, address))
    command = [sys.executable, "-m", "optimizer.cli", *(address if word == AGENT else word for word in words)]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=RUN_S, check=False, env=dict(environment)
        )
    except subprocess.TimeoutExpired:
        return -1, "", f"no end within {RUN_S:g} s"
    return done.returncode, done.stdout, done.stderr


def here(words: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with chdir(folder), redirect_stdout(out), redirect_stderr(err):
        code = optimize(list(words))
    return code, out.getvalue(), err.getvalue()


def passes(cell: Cell) -> None:
    """Hold that a cell of the cost model or a table runs, or is refused where it cannot be otherwise."""
    came = tried(cell, here)
    assert came.how in {"runs", "refused"}, came.why
    of_table = cell.evaluator == "table" and ("ranks" in cell.allow or cell.extra in {"commands", "deadline"})
    assert came.how == "runs" or of_table or cell.extra == "max error", came.why


def shown(cell: Cell) -> str:
    """Return the name of a cell among tests."""
    return f"{cell.evaluator} {cell.allow} {'+'.join(cell.aims)} {cell.several} {cell.extra}"


def _ended(code: int, err: str) -> tuple[str, str]:
    """Return what came of a command that reads a study."""
    return ("runs", "") if code in (0, 5) else _refused(code, err)


def _refused(code: int, err: str) -> tuple[str, str]:
    """Return whether a command said in a line why it cannot be, and the line."""
    lines = err.strip().splitlines() or [f"exit code {code}"]
    known = next((line for line in lines if any(reason in line for reason in REASONS)), None)
    return ("refused", known) if known is not None and "Traceback" not in err else ("wrong", lines[-1])


def _other(cell: Cell, first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Return what a second worker's, or a warmly started, study should not say of itself, or ""."""
    if cell.extra == "storage" and first["unique_plans"] != second["unique_plans"]:
        return (
            f"the budget of all workers is {first['unique_plans']} for one and {second['unique_plans']} for the other"
        )
    return _wrong(cell, second)


def _judged(cell: Cell, code: int, out: str, err: str) -> tuple[str, str]:
    if code not in (0, 5):
        return _refused(code, err)
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
    if found["predicted"] and (worse := _beaten(found)):
        return worse
    off = next((each["max_rel_error"] for each in compared if each["max_rel_error"] > each["tolerance"]), None)
    return "" if off is None else f"outputs are off by {off:g}"


def _beaten(found: Mapping[str, Any]) -> str:
    """Return which law a predicted plan breaks: no baseline is better, and it is not below the bound."""
    make = find_workload_objective if "workload" in found else find_objective
    objective = make(found["objective"])
    best = found["best"][objective.key]["median"]
    stages = len(found["best"]["plan"]["stages"])  # of plans that a model cannot tell apart, the fewest count
    others = {n: e for n, e in found["baselines"].items() if e[objective.key] and len(e["plan"]["stages"]) <= stages}
    better = [n for n, e in others.items() if e[objective.key]["median"] < best * (1 - 1e-9)]
    if better and "front" not in found:
        return f"{better[0]} is better than the best plan"
    least = found[f"model_bound_{objective.shown_unit.lower()}"]
    return f"it is below the bound of {least}" if least is not None and least > best * (1 + 1e-6) else ""


_ROW = re.compile(r"\| (?P<evaluator>\S+) \| (?P<models>one|two) \| (?P<allow>\S+) \| (?P<marks>.*) \|")
_MARK = re.compile(r"(?P<how>runs|refused|wrong)(?: \((?P<note>\d+)\))?")


def table(came: Sequence[Came]) -> str:
    """Return a table for people; :func:`known` reads it."""
    lines = ["| evaluator | models | freedoms | " + " | ".join("+".join(a) for a in AIMS) + " |"]
    lines.append("|" + " --- |" * (3 + len(AIMS)))
    rows: dict[tuple[str, bool, str], dict[tuple[str, ...], str]] = {}
    notes: dict[str, int] = {}
    for each in sorted(came, key=lambda c: _PLACES[c.cell]):
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
    return "\n".join(lines).rstrip() + "\n"


def known(text: str) -> tuple[str, dict[Cell, Came]]:
    """Return what stands before the table of :func:`table`, and the cells in it."""
    head, _, rest = text.partition("| evaluator |")
    notes = dict(re.findall(r"^(\d+)\. (.*)$", rest, re.MULTILINE))
    found = {}
    for row in _ROW.finditer(rest):
        for aims, word in zip(AIMS, row["marks"].split(" | "), strict=True):
            if (mark := _MARK.fullmatch(word)) is not None:
                cell = Cell(row["allow"], row["models"] == "two", aims, row["evaluator"])
                found[cell] = Came(cell, mark["how"], notes.get(mark["note"], ""), 0.0)
    return head, found


def listed(came: Sequence[Came]) -> str:
    """Return a list of cells of :func:`pairs` for people."""
    lines = ["| evaluator | models | freedoms | objective | with | what came |", "|" + " --- |" * 6]
    for each in came:
        cell = each.cell
        words = (cell.evaluator, "two" if cell.several else "one", cell.allow, "+".join(cell.aims), cell.extra)
        lines.append(f"| {' | '.join(words)} | {each.how}{': ' + each.why if each.why else ''} |")
    return "\n".join(lines) + "\n"


@contextmanager
def world(evaluators: Sequence[str]) -> Iterator[dict[str, str]]:
    """Provide what evaluators need, and give the environment of commands: an agent, the example of a plug-in."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        paths = [str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        if "example" in evaluators:
            install_example(folder)
        if "able" in evaluators:
            (folder / "able.py").write_text(ABLE)
            _install(folder, "able", {"partition_optimizer.evaluators": {"able": "able:Able"}})
        if "remote" in evaluators:
            _, address = stack.enter_context(agent_process(folder / "agent", "litert"))
            found[AGENT] = address
        yield found


def install_example(folder: Path) -> None:
    """Put the example of a plug-in where commands find it, as pip would."""
    source = ROOT / "experiments" / "example_evaluator"
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    shutil.copytree(source / "example_evaluator", folder / "example_evaluator")
    _install(folder, project["name"], project["entry-points"])


def _install(folder: Path, name: str, entries: Mapping[str, Mapping[str, str]]) -> None:
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in each.items()) for group, each in entries.items()
    )
    (info / "entry_points.txt").write_text("\n".join(lines))


def main() -> None:
    """Try cells, print each, and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--evaluator", nargs="+", default=list(ON), choices=list(ON))
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; their latencies mean less (default 1)")
    parser.add_argument("--pairs", action="store_true", help="cells that hold every pair, and go on with their studies")
    options = parser.parse_args()
    head, came = "", dict[Cell, Came]()
    if options.file.is_file() and not options.pairs:
        head, came = known(options.file.read_text())
    made = pairs if options.pairs else cells
    wanted = [cell for cell in made(options.evaluator) if cell not in came or came[cell].how != "runs"]
    with world(options.evaluator) as environment, ThreadPoolExecutor(options.jobs) as pool:
        for last in pool.map(lambda cell: tried(cell, partial(started, environment)), wanted):
            came[last.cell] = last
            sys.stdout.write(
                f"{last.how:8} {last.took_s:5.1f} s  {' '.join(last.cell.words)} {last.cell.extra}  {last.why}\n"
            )
            sys.stdout.flush()
            found = list(came.values())
            options.file.write_text(listed(found) if options.pairs else head + table(found))


if __name__ == "__main__":
    main()
