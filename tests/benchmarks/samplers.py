"""How many plans samplers need: the figures of ``experiments/results/samplers.json``.

``python -m tests.benchmarks.samplers run OUT.json`` runs samplers on the cases of
:mod:`tests.benchmarks.sampler_cases`; ``… few OUT.json`` runs those whose proposals take seconds on twelve of them,
with 100 plans. They write curves beside OUT as they go (``OUT.run.jsonl``, ``OUT.few.jsonl``), and go on where they
were stopped, with ``--minutes`` by themselves. ``… policy OUT.json`` tells what a trained policy carries over;
``… report OUT.json`` writes the result and prints its tables. What OUT has of more studies than there are curves
stays in it.

HEBO and SMAC3 run in an environment of their own: ``--hebo /env/bin/python --smac /other/bin/python``.

A study begins with everything on one processor, for all samplers alike; then it requests plans until so many different
ones are measured. A generic sampler runs a second time with the first plan of ``auto`` before its own. Regret is what
the fastest plan so far takes more than the reference: the least that a search knowing the truth found, or any sampler.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command line has it
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads wait for each other: 15 s a proposal of GP, not 0.3

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from scipy.stats import wilcoxon

from optimizer.provenance import provenance
from optimizer.samplers import make_sampler, quiet_optuna, study_sampler
from optimizer.samplers.policy.features import Choices
from optimizer.samplers.policy.network import Weights, draw
from optimizer.samplers.policy.reinforce import sampler_of, task_of
from optimizer.samplers.policy.training import TrainingTask, pretrain
from optimizer.samplers.study import StudySampler, below
from optimizer.study.history import Trial
from search_spaces.core.plan import Plan
from tests.benchmarks.partner import PartnerSampler
from tests.benchmarks.sampler_cases import CASES, FEW, Case, Setup, kinds_of, reference, setup

BUDGETS = (1, 5, 10, 25, 50, 100, 200)
GENERIC = ("random", "tpe", "nsga2", "cmaes", "gp", "hebo", "smac")
KNOWING = ("auto", "reinforce", "frozen")
FEW_BUDGET, SEEDS = 100, 2
UNSEEN, BATCHES, DRAWS = (1, 4, 6, 8, 10, 16, 20, 22, 24, 29), 15, 25
STARTED = " from auto's first plan"
_GROUPS: Mapping[str, Callable[[Case], bool]] = {
    "one network, cuts": lambda case: not case.several and case.allow == "cuts",
    "branches, splits": lambda case: not case.several and case.allow != "cuts",
    "several networks": lambda case: case.several,
}
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """What one study came to.

    Attributes:
        best_s: of the fastest plan after each of :data:`BUDGETS`.
        seconds_each: that a proposal took.
    """

    best_s: tuple[float, ...]
    seconds_each: float


def run(found: Setup, sampler: StudySampler, budget: int, first: Plan | None, proposals: int = sys.maxsize) -> Curve:
    """Run a study of ``budget`` different plans beside the baselines, or of so many proposals where some are repeated.

    A study that ends with fewer plans keeps its last best for the budgets that it did not reach.
    """
    study, space = optuna.create_study(sampler=sampler), found.space
    distributions = dict(space.distributions())
    known: dict[str, Trial] = {}
    for plan in (*found.baselines, *([first] if first is not None else [])):
        study.enqueue_trial(space.encode(plan))
    best: list[float] = []
    best_s, spent_s, waiting = math.inf, 0.0, {p.digest for p in found.baselines}
    for _ in range(proposals):
        if len(best) == budget:
            break
        begin = time.perf_counter()
        number = len(study.get_trials(deepcopy=False))
        sampler.begin(number)
        asked = study.ask(distributions)
        plan = space.decode(asked.params)
        spent_s += time.perf_counter() - begin
        before = known.get(plan.digest)
        trial = Trial(number, plan, sampler.origin, asked.params, repeat_of=before.number if before else None)
        if before is None:
            trial = known[plan.digest] = replace(trial, measurement=found.measure(plan))
        measured = known[plan.digest].measurement
        begin = time.perf_counter()
        if measured is None:
            study.tell(asked, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(asked, measured.latency_s.median)
            best_s = min(best_s, measured.latency_s.median)
        sampler.update(trial)
        spent_s += time.perf_counter() - begin
        if before is None and plan.digest not in waiting:
            best.append(best_s)
    tried = len(best)
    best += [best_s] * (budget - tried)
    return Curve(tuple(best[b - 1] for b in BUDGETS if b <= budget), spent_s / max(1, tried))


@lru_cache(maxsize=2)
def _setup(case: Case, number: int) -> Setup:
    return setup(case, number)


def curve(case: Case, number: int, name: str, budget: int, partner: str, proposals: int = sys.maxsize) -> Curve:
    """Return what a sampler came to, by itself or started from the first plan of ``auto``."""
    quiet_optuna()
    found, plain = _setup(case, number), name.removesuffix(STARTED)
    seed = case.seed(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optional packages
        sampler = _sampler(found, plain, seed, partner)
        return run(found, sampler, budget, found.first if plain != name else None, proposals)


def _sampler(found: Setup, name: str, seed: int, partner: str) -> StudySampler:
    if partner:
        other = PartnerSampler(partner, name, seed)
        return StudySampler(name, found.space, seed, lambda _: other, predict=found.predict)
    if name == "frozen":
        policy = sampler_of(found.problem, seed, learns=False)
        return StudySampler(name, found.space, seed, partial(make_sampler, "random", seed), policy)
    return study_sampler(name, seed, found.space, found.problem, predict=found.predict)


class Kept:
    """Lines of JSON that are written as they are made, so that a run that was stopped goes on where it was.

    Args:
        path: a file, which may exist.
        until: when to begin no more, by ``time.monotonic``.
    """

    def __init__(self, path: Path, until: float = math.inf) -> None:
        self._path, self._until = path, until
        lines = path.read_text().splitlines() if path.exists() else []
        self.found: dict[str, Any] = dict(map(json.loads, lines))

    def get(self, wanted: Mapping[str, Callable[[], Any]], jobs: int) -> None:
        """Make what is missing."""
        missing = {key: make for key, make in wanted.items() if key not in self.found}
        workers = ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=None)
        with workers as pool:
            tasks = iter(missing.items())
            running = {pool.submit(make): key for key, make in _first(tasks, 2 * jobs)}
            while running:
                done = next(as_completed(running))
                self._add(running.pop(done), done.result())
                if time.monotonic() < self._until:
                    running |= {pool.submit(make): key for key, make in _first(tasks, 1)}
        sys.stderr.write(f"{len(self.found)} of {len(wanted)} are in {self._path}\n")

    def _add(self, key: str, made: Any) -> None:
        self.found[key] = [made.best_s, made.seconds_each] if isinstance(made, Curve) else made
        with self._path.open("a") as file:
            file.write(json.dumps([key, self.found[key]]) + "\n")


def _first(tasks: Iterator[Any], count: int) -> list[Any]:
    return [task for _, task in zip(range(count), tasks, strict=False)]


def refer(case: Case) -> dict[str, Any]:
    """Return the figures of a case's best plan."""
    found = setup(case, 0)
    best_s, best = reference(found)
    return {
        "reference_s": best_s,
        "gain": min(map(found.truth, found.baselines)) / best_s - 1.0,
        "stages": len(best.stages),
        "processors": sorted(kinds_of(found, best)),
        "bound_s": found.bound_s,
        "parameters": sum(not d.single() for d in found.space.distributions().values()),
    }


def carried() -> dict[str, Any]:
    """Return what draws of a policy come to on networks and devices that it was not trained on.

    It is trained on twenty cases and tried on the others but those with splits, which take long to price.
    """
    held = [case for number, case in enumerate(CASES) if number in UNSEEN]
    tasks = []
    for case in (case for case in CASES if case not in held and "splits" not in case.allow):
        found = setup(case, 0)
        tasks.append(TrainingTask(Choices(task_of(found.problem)), found.truth))
    trained = pretrain(Weights.new(0), tasks, BATCHES * len(tasks), 0)
    rows: dict[str, list[list[float]]] = {}
    for case, number in product(held, range(SEEDS)):
        found, rng = setup(case, number), np.random.default_rng(number)
        choices, count = Choices(task_of(found.problem)), found.space.cardinality()
        plans = {
            "random plans": [found.space.plan_at(below(count, rng)) for _ in range(DRAWS)],
            "the model's optimum": [found.first],
        }
        for name, weights in (("not trained", Weights.new(0)), ("trained", trained)):
            logits = choices.prior + weights.scores(choices.features)
            plans[name] = [choices.plan(which) for which in draw(logits, choices, DRAWS, rng)]
        best_s = reference(found)[0]
        for name, each in plans.items():
            regret = [100.0 * (found.truth(plan) / best_s - 1.0) for plan in each]
            rows.setdefault(name, []).append([float(np.mean(regret)), min(regret[:10]), min(regret)])
    names = ("mean", "best_of_10", f"best_of_{DRAWS}")
    reported = {
        name: dict(zip(names, np.mean(each, axis=0).round(2).tolist(), strict=True)) for name, each in rows.items()
    }
    return {"learned_on": len(tasks), "studies": SEEDS * len(held), "held_out": [str(c) for c in held], **reported}


def _key(case: Case, number: int, name: str) -> str:
    return f"{case} | {number} | {name}"


def regrets(curves: Mapping[str, Any], name: str, studies: Sequence[tuple[Case, int]]) -> _Array:
    """Return the regrets of a sampler, ``(studies, budgets)``, in per cent."""
    rows = []
    for case, number in studies:
        least = min([curves[str(case)]["reference_s"], *_least(curves, case)])
        rows.append([100.0 * (s / least - 1.0) for s in curves[_key(case, number, name)][0]])
    length = min(map(len, rows), default=0)
    return np.array([row[:length] for row in rows])


def common(curves: Mapping[str, Any], names: Sequence[str], cases: Sequence[Case]) -> list[tuple[Case, int]]:
    """Return the studies that all of some samplers did."""
    every = product(cases, range(SEEDS))
    return [(case, n) for case, n in every if all(_key(case, n, name) in curves for name in names)]


def _least(curves: Mapping[str, Any], case: Case) -> Iterator[float]:
    return (value[0][-1] for key, value in curves.items() if key.startswith(f"{case} |"))


def summary(rows: _Array) -> dict[str, Any]:
    """Return mean regret and half its 95 % interval, in per cent, after so many plans."""
    half = 1.96 * rows.std(axis=0, ddof=1) / math.sqrt(len(rows)) if len(rows) > 1 else np.zeros(rows.shape[1])
    return {
        str(b): [round(float(m), 3), round(float(h), 3)]
        for b, m, h in zip(BUDGETS, rows.mean(axis=0), half, strict=False)
    }


def report(curves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result; of a run that was stopped, on the studies that are there of all samplers."""
    names = sorted({key.split(" | ")[2] for key in curves if " | " in key}, key=_place)
    quick = [name for name in names if name.removesuffix(STARTED) in (*KNOWING, *GENERIC[:4])]
    studies = common(curves, quick, CASES)
    cases = list(dict.fromkeys(case for case, _ in studies))
    found: dict[str, Any] = {
        "cases": {str(c): _said(curves, c) for c in cases},
        "all": {name: summary(regrets(curves, name, studies)) for name in quick} | {"studies": len(studies)},
    }
    for group, holds in _GROUPS.items():
        own = [(case, n) for case, n in studies if holds(case)]
        if own:
            rows = {name: summary(regrets(curves, name, own)) for name in quick}
            found.setdefault("groups", {})[group] = rows | {"studies": len(own)}
    for name in names:
        if name not in quick and (own := common(curves, [name, *quick], FEW)):
            rows = {n: summary(regrets(curves, n, own)) for n in (name, "tpe", "tpe" + STARTED, "reinforce", "auto")}
            found.setdefault("few", {})[name] = rows | {"studies": len(own)}
    learned, frozen = (regrets(curves, name, studies) for name in ("reinforce", "frozen"))
    pairs = [(b, learned[:, i], frozen[:, i]) for i, b in enumerate(BUDGETS) if (learned[:, i] != frozen[:, i]).any()]
    found["learning_against_frozen_p"] = {str(b): float(f"{wilcoxon(x, y).pvalue:.2g}") for b, x, y in pairs}
    found["policy"] = curves.get("policy")
    found["proposal_ms"] = {
        name: round(1e3 * float(np.mean([v[1] for k, v in curves.items() if k.endswith(f"| {name}")])), 2)
        for name in names
    }
    return found


def merged(found: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result, with what an earlier one has of more studies."""
    kept = dict(found)
    if before.get("all", {}).get("studies", 0) > found["all"]["studies"]:
        kept |= {name: before[name] for name in ("cases", "all", "groups", "learning_against_frozen_p", "policy")}
    more = before.get("few", {})
    few = {
        name: max((rows[name] for rows in (found.get("few", {}), more) if name in rows), key=lambda row: row["studies"])
        for name in sorted({*found.get("few", {}), *more}, key=_place)
    }
    return kept | {"few": few, "proposal_ms": {**before.get("proposal_ms", {}), **found["proposal_ms"]}}


def _place(name: str) -> tuple[int, bool]:
    plain = name.removesuffix(STARTED)
    return (*KNOWING, *GENERIC).index(plain), plain != name


def _said(curves: Mapping[str, Any], case: Case) -> dict[str, Any]:
    known = dict(curves[str(case)])
    least = min([known["reference_s"], *_least(curves, case)])
    known["above_bound"] = round(least / known.pop("bound_s") - 1.0, 3)
    known["reference_beaten_by"] = round(known.pop("reference_s") / least - 1.0, 5)
    return known | {"gain": round(known["gain"], 4)}


def table(found: Mapping[str, Any]) -> str:
    """Return regrets as a Markdown table."""
    shown = ("25", "50", "100", "200")
    lines = [f"| | {' | '.join(shown)} |", "|---" + "|---:" * len(shown) + "|"]
    for name, row in found.items():
        if name == "studies":
            continue
        cells = [f"{row[b][0]:.2f} ± {row[b][1]:.2f}" if b in row else "" for b in shown]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the samplers, or write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["run", "few", "policy", "report"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--samplers", default="")
    parser.add_argument("--budget", type=int, default=0)
    parser.add_argument("--proposals", type=int, default=sys.maxsize, help="that end a study, repeated plans included")
    parser.add_argument("--jobs", type=int, default=1, help="studies at once")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no study after that: run it again")
    parser.add_argument("--match", default="", help="only cases with this in their names")
    for name in ("hebo", "smac"):
        parser.add_argument(f"--{name}", default="", help="an interpreter that has it")
    options = parser.parse_args()
    kept = Kept(options.out.with_suffix(f".{options.part}.jsonl"), time.monotonic() + 60.0 * options.minutes)
    if options.part == "policy":
        kept.get({"policy": carried}, 1)
        return
    if options.part == "report":
        for part in ("run", "few", "policy"):
            kept.found |= Kept(options.out.with_suffix(f".{part}.jsonl")).found
        before = json.loads(options.out.read_text()) if options.out.exists() else {}
        found = merged(report(kept.found), before)
        head = {"schema_version": 2, "made_by": "python -m tests.benchmarks.samplers run|few|report samplers.json"}
        options.out.write_text(json.dumps({**head, **provenance(), **found}, indent=1) + "\n")
        tables = [found["all"], *found.get("groups", {}).values(), *found.get("few", {}).values()]
        sys.stdout.write("\n\n".join(f"{each['studies']} studies\n{table(each)}" for each in tables) + "\n")
        return
    cases = [c for c in (CASES if options.part == "run" else FEW) if options.match in str(c)]
    usual = (*KNOWING, *GENERIC[:4]) if options.part == "run" else GENERIC[4:]
    names = options.samplers.split(",") if options.samplers else list(usual)
    budget = options.budget or (BUDGETS[-1] if options.part == "run" else FEW_BUDGET)
    wanted: dict[str, Callable[[], Any]] = {str(c): partial(refer, c) for c in cases} if options.part == "run" else {}
    for ending, case, number, name in product(("", STARTED), cases, range(SEEDS), names):
        if not ending or name in GENERIC:
            partner = getattr(options, name) if name in {"hebo", "smac"} else ""
            make = partial(curve, case, number, name + ending, budget, partner, options.proposals)
            wanted[_key(case, number, name + ending)] = make
    kept.get(wanted, options.jobs)


if __name__ == "__main__":
    main()
