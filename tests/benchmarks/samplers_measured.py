"""What 200 trials miss on this machine: VGG16 in at most 3 parts over ``cpu``, ``cpu0`` and ``cpu1``, every plan run.

The figures of ``experiments/results/samplers_measured.json``, made in steps, each of which takes minutes, keeps what it
has in FOLDER as it goes, and goes on where it was stopped::

    python -m tests.benchmarks.samplers_measured study FOLDER
    python -m tests.benchmarks.samplers_measured sweep FOLDER --minutes 4.5    # again until it says that all is done
    python -m tests.benchmarks.samplers_measured again FOLDER --minutes 4.5
    python -m tests.benchmarks.samplers_measured finals FOLDER --minutes 4.5
    python -m tests.benchmarks.samplers_measured report FOLDER OUT.json

``study`` is the job of a user, 200 trials of ``auto``. ``sweep`` takes every plan in random order. Where parts of a
plan ran in other plans before, and took more than 1.5 times as long together, at their fastest, as the study's best
plan then, it is done with. The others are run: once, broken off at the same 1.5 times, and two more times where they
took less. ``again`` runs those that came within 6 % four times more, some time later, in another order. ``finals``
compares the ten fastest of them with the study's best in interleaved pairs over rebuilt instances, and then the three
fastest of these anew, so that the one which is called the best was not chosen by the runs that say how good it is.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import Candidate
from evaluators.comparison import ComparisonPolicy, compare
from evaluators.litert.session import LitertEvaluator, LitertSession
from optimizer.devices import choose_platform
from optimizer.provenance import provenance
from search_spaces.chain import ChainSpace
from search_spaces.graph import Graph
from search_spaces.models import load
from search_spaces.plan import Plan
from search_spaces.platform import Platform

MODEL, LANES, STAGES, BUDGET = "vgg16", ("cpu", "cpu0", "cpu1"), 3, 200
FIRST, LATER, CLOSE = 1.5, 1.15, 1.06
REFERENCE_EVERY_S, REFERENCE_RUNS, AGAIN_RUNS = 5.0, 3, 4
FINALISTS, LAST = 10, 3
_PAIRED = (ComparisonPolicy(precision=0.004, max_s=5.0), ComparisonPolicy(precision=0.002, max_s=15.0, min_rounds=8))


class Kept:
    """Lines of JSON in a file, written as they are made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines()]

    def add(self, line: dict[str, Any]) -> None:
        """Keep one more."""
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass
class Bench:
    """The device, the space, and the plan that the others are measured beside.

    Attributes:
        best: the plan that the study recommends.
        until: when to stop, by ``time.monotonic``.
    """

    graph: Graph
    platform: Platform
    space: ChainSpace
    session: LitertSession
    best: Plan
    until: float
    reference_s: float = 0.0
    looked: float = 0.0

    def load(self, plan: Plan, *, fresh: bool = False) -> Candidate:
        """Load a plan."""
        return self.session.load(self.graph, plan, fresh=fresh)

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.until

    def look(self, reference: Candidate) -> None:
        """Run the study's best plan, where it was not run lately."""
        if time.monotonic() - self.looked > REFERENCE_EVERY_S:
            reference.run(1)
            self.reference_s = float(np.median(reference.run(REFERENCE_RUNS).latency_s))
            self.looked = time.monotonic()

    def runs(self, plan: Plan, more: int, later: float) -> tuple[list[float], list[float]]:
        """Run a plan once, and ``more`` times unless the first or a later run took far longer than the reference.

        Returns:
            What the runs took, and what each part took in the first one; those that it did not end are left out.
        """
        with closing(self.load(plan)) as candidate:
            batch = candidate.run(1, FIRST * self.reference_s)
            found = [float(batch.latency_s[0])]
            parts_s = [float(s) for s in batch.stage_s[0] if s > 0.0]
            if found[0] > FIRST * self.reference_s:
                parts_s = parts_s[:-1]  # it was broken off in that one
            while len(found) <= more and found[-1] <= (FIRST if len(found) == 1 else later) * self.reference_s:
                found.append(float(candidate.run(1, later * self.reference_s).latency_s[0]))
        return found, parts_s

    def like(self, plan: Plan) -> list[tuple[int, int, str]]:
        """Return what each part of a plan is: its operators, and the kind of its lane."""
        lanes = {p.name: p.like for p in self.platform.processors}
        return [(s.operators[0], s.operators[-1], lanes[s.processor]) for s in plan.stages]


@contextmanager
def bench(folder: Path, minutes: float) -> Iterator[Bench]:
    """Prepare the device."""
    graph, evaluator = load(MODEL), LitertEvaluator()
    platform = choose_platform(evaluator, LANES)
    best = Plan.from_json(json.loads((folder / "study.json").read_text())["best"]["plan"])
    with evaluator.prepare(platform) as session:
        space = ChainSpace(graph, platform, STAGES)
        yield Bench(graph, platform, space, session, best, time.monotonic() + 60.0 * minutes)


def study(folder: Path) -> str:
    """Do what a user does."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["--model", MODEL, "--max-stages", str(STAGES), "--processors", ",".join(LANES), "--budget", str(BUDGET)]
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "optimizer.cli", *command, "--json", "-q", "--out", str(folder / "run")],
        stdout=subprocess.PIPE,
        check=True,
    )
    document = json.loads(done.stdout) | {"command": ["optimize", *command], "study_s": time.monotonic() - begin}
    (folder / "study.json").write_text(json.dumps(document))
    return f"{document['study_s']:.0f} s; best {document['best']['latency_ms']}"


def sweep(folder: Path, minutes: float) -> str:
    """Run every plan once, and those that are not far slower two more times."""
    kept = Kept(folder / "sweep.jsonl")
    done = {line["index"] for line in kept.lines}
    with bench(folder, minutes) as of, closing(of.load(of.best, fresh=True)) as reference:
        order = np.random.default_rng(0).permutation(of.space.cardinality()).tolist()
        fastest: dict[tuple[int, int, str], float] = {}
        for line in kept.lines:
            if "runs_s" in line:
                learn(fastest, of.like(of.space.plan_at(line["index"])), line)
        for index in order:
            if index in done:
                continue
            if of.late:
                return f"{len(kept.lines)} of {len(order)} plans"
            of.look(reference)
            plan = of.space.plan_at(index)
            parts = of.like(plan)
            together = sum(fastest.get(part, 0.0) for part in parts)
            if together > FIRST:
                kept.add({"index": index, "together": together})
                continue
            runs_s, parts_s = of.runs(plan, 2, LATER)
            kept.add({"index": index, "runs_s": runs_s, "parts_s": parts_s, "reference_s": of.reference_s})
            learn(fastest, parts, kept.lines[-1])
    return f"all {len(kept.lines)} plans are done"


def learn(fastest: dict[tuple[int, int, str], float], parts: list[tuple[int, int, str]], line: dict[str, Any]) -> None:
    """Take note of what parts took, relative to the study's best plan."""
    for part, took_s in zip(parts, line["parts_s"], strict=False):
        fastest[part] = min(fastest.get(part, math.inf), took_s / line["reference_s"])


def ran(folder: Path) -> list[dict[str, Any]]:
    """Return the plans that were run in the sweep."""
    return [line for line in Kept(folder / "sweep.jsonl").lines if "runs_s" in line]


def close_ones(folder: Path) -> list[int]:
    """Return the plans whose fastest run came near the study's best, by their numbers in the space."""
    lines = ran(folder)
    return [line["index"] for line in lines if min(line["runs_s"]) <= CLOSE * line["reference_s"]]


def again(folder: Path, minutes: float) -> str:
    """Run the close plans some more, later and in another order."""
    kept = Kept(folder / "again.jsonl")
    done = {line["index"] for line in kept.lines}
    close = close_ones(folder)
    with bench(folder, minutes) as of, closing(of.load(of.best, fresh=True)) as reference:
        for index in np.random.default_rng(1).permutation(close).tolist():
            if index in done:
                continue
            if of.late:
                return f"{len(kept.lines)} of {len(close)} plans"
            of.look(reference)
            runs_s, _ = of.runs(of.space.plan_at(index), AGAIN_RUNS, FIRST)
            kept.add({"index": index, "runs_s": runs_s, "reference_s": of.reference_s})
    return f"all {len(close)} plans are done"


def ranked(folder: Path) -> list[tuple[float, int]]:
    """Return the close plans by what they took relative to the study's best, the fastest first."""
    seen: dict[int, list[float]] = {}
    for lines in (ran(folder), Kept(folder / "again.jsonl").lines):
        for line in lines:
            seen.setdefault(line["index"], []).extend(s / line["reference_s"] for s in line["runs_s"][1:])
    found = [(statistics.median(seen[index]), index) for index in close_ones(folder) if seen[index]]
    return sorted(found)


def finals(folder: Path, minutes: float) -> str:
    """Compare the fastest with the study's best, then the fastest of these anew."""
    kept = Kept(folder / "finals.jsonl")
    with bench(folder, minutes) as of:
        number = {of.space.plan_at(index).digest: index for _, index in ranked(folder)[: 2 * FINALISTS]}
        chosen = [index for digest, index in number.items() if digest != of.best.digest][:FINALISTS]
        for turn, policy in enumerate(_PAIRED):
            if turn:
                first = sorted((line for line in kept.lines if not line["turn"]), key=lambda line: -line["speedup"])
                chosen = [line["index"] for line in first[:LAST]]
            for index in chosen:
                if any(line["index"] == index and line["turn"] == turn for line in kept.lines):
                    continue
                if of.late:
                    return f"{len(kept.lines)} comparisons"
                plan = of.space.plan_at(index)
                loads = (partial(of.load, of.best, fresh=True), partial(of.load, plan, fresh=True))
                found = compare(*loads, policy, np.random.default_rng([2, index]))
                kept.add(
                    {
                        "turn": turn,
                        "index": index,
                        "plan": plan.to_json()["stages"],
                        "speedup": found.speedup,
                        "ci95": found.ci95,
                        "rounds": found.rounds,
                        "best_ms": found.baseline.median * 1e3,
                        "candidate_ms": found.candidate.median * 1e3,
                        "unstable": found.unstable,
                    }
                )
    return "all comparisons are done"


def report(folder: Path, out: Path) -> str:
    """Write the result."""
    done = json.loads((folder / "study.json").read_text())
    swept, lines = Kept(folder / "sweep.jsonl").lines, ran(folder)
    compared = Kept(folder / "finals.jsonl").lines
    last = max((line for line in compared if line["turn"]), key=lambda line: float(line["speedup"]))
    close = ranked(folder)
    firsts = [line["runs_s"][0] / min(line["runs_s"]) for line in lines if len(line["runs_s"]) == 3]
    document = {
        "schema_version": 1,
        "made_by": [f"python -m tests.benchmarks.samplers_measured {step} FOLDER" for step in STEPS],
        **provenance(),
        "study": {name: done[name] for name in ("command", "study_s", "best", "baselines", "speedup", "trials")},
        "plans": len(swept),
        "left_out_by_their_parts": len(swept) - len(lines),
        "run": len(lines),
        "broken_off_in_the_first_run": sum(len(line["runs_s"]) == 1 for line in lines),
        "within_6_percent": len(close),
        "first_run_against_the_fastest": {
            "median": round(statistics.median(firsts), 3),
            "most": round(max(firsts), 3),
            "broken_off_above": FIRST,
        },
        "seen_faster_before_the_finals": [[index, round(ratio, 4)] for ratio, index in close[:20]],
        "finals": compared,
        "best_of_all_against_the_studys_best": {"index": last["index"], **{k: last[k] for k in ("speedup", "ci95")}},
    }
    out.write_text(json.dumps(document, indent=1) + "\n")
    return f"the best of {len(swept)} plans is {last['speedup']:.4f} {last['ci95']} times as fast as the study's"


STEPS = ("study", "sweep", "again", "finals")


def main() -> None:
    """Do one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=[*STEPS, "report"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=Path("samplers_measured.json"))
    parser.add_argument("--minutes", type=float, default=4.5)
    options = parser.parse_args()
    if options.step == "study":
        told = study(options.folder)
    elif options.step == "report":
        told = report(options.folder, options.out)
    else:
        told = {"sweep": sweep, "again": again, "finals": finals}[options.step](options.folder, options.minutes)
    sys.stdout.write(told + "\n")


if __name__ == "__main__":
    main()
