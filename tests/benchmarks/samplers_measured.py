"""What 200 trials miss on this machine: VGG16 in at most 3 parts over ``cpu``, ``cpu0``, ``cpu1``, all plans measured.

The figures of ``experiments/results/samplers_measured.json``, made in steps, each of which takes minutes, keeps what it
has in FOLDER as it goes, and goes on where it was stopped::

    python -m tests.benchmarks.samplers_measured study FOLDER
    python -m tests.benchmarks.samplers_measured parts FOLDER --minutes 4    # again until it says that all is done
    python -m tests.benchmarks.samplers_measured sweep FOLDER --minutes 4
    python -m tests.benchmarks.samplers_measured again FOLDER --minutes 4
    python -m tests.benchmarks.samplers_measured finals FOLDER --minutes 4
    python -m tests.benchmarks.samplers_measured report FOLDER OUT.json

``study`` is the job of a user, 200 trials of ``auto``. ``parts`` times every part that a plan can have, each run of
operators on each kind of lane, within plans of many parts on one lane, where nothing is handed over between lanes:
three times on the lane of the study's best plan, once on others, after a run that warms up.
``sweep`` takes every plan in random order: where its parts took more than 1.05 times as long together, each at its
fastest, as the study's best plan then, it is done with, for the parts of a chain run one after another, and a plan is
no faster than its parts (how true that was of the plans that were run, the result tells). The others are run: once,
broken off at 1.5 times, and two more times where they took less. ``again`` runs those that came within 3 % four times
more, some time later, in another order. ``finals`` compares the ten fastest of them with the study's best in
interleaved pairs over rebuilt instances, and then the three fastest of these anew, so that the one which is called the
best was not chosen by the runs that say how good it is.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import Candidate
from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.measurement.final import FinalPolicy, compare
from optimizer.devices import choose_platform
from optimizer.provenance import provenance
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.spaces.chain import ChainSpace, chain_plan

MODEL, LANES, STAGES, BUDGET = "vgg16", ("cpu", "cpu0", "cpu1"), 3, 200
FIRST, LATER, APART, CLOSE = 1.5, 1.15, 1.05, 1.03
REFERENCE_EVERY_S, REFERENCE_RUNS, PART_RUNS, AGAIN_RUNS = 5.0, 3, 3, 4
FINALISTS, LAST = 10, 3
_PAIRED = (FinalPolicy(precision=0.004, max_s=5.0), FinalPolicy(precision=0.002, max_s=15.0, min_rounds=8))


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

    def runs(self, plan: Plan, more: int, later: float) -> list[float]:
        """Run a plan once, and ``more`` times unless the first or a later run took far longer than the reference."""
        with closing(self.load(plan)) as candidate:
            found = [float(candidate.run(1, FIRST * self.reference_s).latency_s[0])]
            while len(found) <= more and found[-1] <= (FIRST if len(found) == 1 else later) * self.reference_s:
                found.append(float(candidate.run(1, later * self.reference_s).latency_s[0]))
        return found

    def like(self, plan: Plan) -> list[tuple[int, int, str]]:
        """Return what each part of a plan is: its operators, half-open, and the kind of its lane."""
        lanes = {p.name: p.like for p in self.platform.processors}
        return [(s.operators[0], s.operators[-1] + 1, lanes[s.processor]) for s in plan.stages]


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


def tilings(count: int) -> list[tuple[int, ...]]:
    """Return the borders of a few chains among whose parts every run of ``count`` operators is."""
    left = {(a, b) for b in range(1, count + 1) for a in range(b)}
    found = []
    while left:
        gain, before = [0] * (count + 1), [0] * (count + 1)  # operators in runs that are new, up to each border
        for b in range(1, count + 1):
            gain[b], first = max((gain[a] + (b - a) * ((a, b) in left), -a) for a in range(b))
            before[b] = -first
        borders = [count]
        while borders[-1]:
            borders.append(before[borders[-1]])
        found.append(tuple(reversed(borders)))
        left -= set(pairwise(found[-1]))
    return found


def parts(folder: Path, minutes: float) -> str:
    """Time every part on every kind of lane."""
    kept = Kept(folder / "parts.jsonl")
    done = {(line["lane"], *line["borders"]) for line in kept.lines}
    with bench(folder, minutes) as of, closing(of.load(of.best, fresh=True)) as reference:
        lanes = [members[0].name for members in of.platform.classes().values()]
        chains = [(lane, borders) for lane in lanes for borders in tilings(len(of.graph.operators))]
        for number in np.random.default_rng(3).permutation(len(chains)).tolist():
            lane, borders = chains[number]
            if (lane, *borders) in done:
                continue
            if of.late:
                return f"{len(kept.lines)} of {len(chains)} plans"
            of.look(reference)
            plan = chain_plan(of.graph, borders[1:-1], [lane] * (len(borders) - 1))
            with closing(of.load(plan)) as candidate:
                candidate.run(1)
                runs = PART_RUNS if of.platform[lane].like == of.platform[of.best.stages[0].processor].like else 1
                parts_s = candidate.run(runs).stage_s.min(axis=0).tolist()
            kept.add({"lane": lane, "borders": borders, "parts_s": parts_s, "reference_s": of.reference_s})
    return f"all {len(chains)} plans are done"


def fastest_parts(folder: Path, of: Bench) -> dict[tuple[int, int, str], float]:
    """Return the least that each part took, relative to the study's best plan at that time."""
    found: dict[tuple[int, int, str], float] = {}
    for line in Kept(folder / "parts.jsonl").lines:
        like = of.platform[line["lane"]].like
        for (first, last), took_s in zip(pairwise(line["borders"]), line["parts_s"], strict=True):
            part = first, last, like
            found[part] = min(found.get(part, math.inf), took_s / line["reference_s"])
    return found


def sweep(folder: Path, minutes: float) -> str:
    """Run every plan whose parts are not too slow."""
    kept = Kept(folder / "sweep.jsonl")
    done = {line["index"] for line in kept.lines}
    with bench(folder, minutes) as of, closing(of.load(of.best, fresh=True)) as reference:
        order = np.random.default_rng(0).permutation(of.space.cardinality()).tolist()
        fastest = fastest_parts(folder, of)
        for index in order:
            if index in done:
                continue
            plan = of.space.plan_at(index)
            together = sum(fastest.get(part, 0.0) for part in of.like(plan))
            if together > APART:
                kept.add({"index": index, "together": together})
                continue
            if of.late:
                return f"{len(kept.lines)} of {len(order)} plans"
            of.look(reference)
            runs_s = of.runs(plan, 2, LATER)
            kept.add({"index": index, "together": together, "runs_s": runs_s, "reference_s": of.reference_s})
    return f"all {len(kept.lines)} plans are done"


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
            runs_s = of.runs(of.space.plan_at(index), AGAIN_RUNS, FIRST)
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
    against = sorted(min(line["runs_s"]) / line["reference_s"] / line["together"] for line in lines)
    timed = Kept(folder / "parts.jsonl").lines
    document = {
        "schema_version": 1,
        "made_by": [f"python -m tests.benchmarks.samplers_measured {step} FOLDER" for step in STEPS],
        **provenance(),
        "study": {name: done[name] for name in ("command", "study_s", "best", "baselines", "speedup", "trials")},
        "plans": len(swept),
        "parts": {"plans_run": len(timed), "runs_of_each_on_the_best_lane": PART_RUNS},
        "left_out_by_their_parts": len(swept) - len(lines),
        "left_out_above": APART,
        "run": len(lines),
        "broken_off_in_the_first_run": sum(len(line["runs_s"]) == 1 for line in lines),
        "fastest_run_against_the_sum_of_its_parts": {
            "least": round(against[0], 3),
            "median": round(statistics.median(against), 3),
        },
        "within_3_percent": len(close),
        "seen_faster_before_the_finals": [[index, round(ratio, 4)] for ratio, index in close[:20]],
        "finals": compared,
        "best_of_all_against_the_studys_best": {"index": last["index"], **{k: last[k] for k in ("speedup", "ci95")}},
    }
    out.write_text(json.dumps(document, indent=1) + "\n")
    return f"the best of {len(swept)} plans is {last['speedup']:.4f} {last['ci95']} times as fast as the study's"


STEPS = ("study", "parts", "sweep", "again", "finals")


def main() -> None:
    """Do one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=[*STEPS, "report"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=Path("samplers_measured.json"))
    parser.add_argument("--minutes", type=float, default=4.0)
    options = parser.parse_args()
    if options.step == "study":
        told = study(options.folder)
    elif options.step == "report":
        told = report(options.folder, options.out)
    else:
        steps = {"parts": parts, "sweep": sweep, "again": again, "finals": finals}
        told = steps[options.step](options.folder, options.minutes)
    sys.stdout.write(told + "\n")


if __name__ == "__main__":
    main()
