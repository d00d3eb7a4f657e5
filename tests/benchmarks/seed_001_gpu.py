"""Seed 001 on an NVIDIA GPU: five sets of models at once, each model with weights of its own, in eight ways.

``python -m tests.benchmarks.seed_001_gpu OUT.json --precision tf32 --minutes 9`` (needs the extra ``cuda``)

Every model asks for one inference after another (a closed loop, batch 1); the image is copied to the device and the
result back each time. The original and the decomposed models in one process each, threads that launch kernel by kernel
on streams, CUDA graphs one after another and on streams, the seed's jobs on streams, and plans that are searched by
measuring them: the ways run in turns, and each round gives a reduction against the round's own processes. With ``--mps
FOLDER``, where an MPS control daemon listens (``CUDA_MPS_PIPE_DIRECTORY=FOLDER nvidia-cuda-mps-control -d``), it is
without Tucker and threads, and processes with the same graphs take part, also as clients of MPS: what capture, kernels,
streams and the search gain each.
``--device cpu --toy`` shows on any machine that everything runs; its times say nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
import pytest

from evaluators.cuda.client import Bench
from evaluators.cuda.client import Client as GpuProcess
from evaluators.cuda.devices import platform_of
from evaluators.cuda.session import CudaEvaluator
from evaluators.cuda.workload import CudaWorkload
from evaluators.workload.host import HostedRun
from evaluators.workload.lowered import Lowerings
from optimizer.provenance import provenance
from search_spaces.core.decoded_plan import DecodedPlan, in_runs
from search_spaces.core.errors import OptimizeError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import merge
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.pools import members, with_pools
from search_spaces.core.workload import Arrival, Client, Workload
from search_spaces.spaces.workload_space import WorkloadSpace
from tests.benchmarks import seed_001_probe as probe
from tests.benchmarks.seed_001_models import SETS, Model, cuts_of, prepared
from tests.benchmarks.seed_001_processes import PIPE, QUEUES, Processes, preload

PROCESSES, TUCKER_PROCESSES = "original in processes", "Tucker in processes"
THREADS, SEQUENTIAL, STREAMS = "threads on streams", "graphs one after another", "graphs on streams"
GRAPHS, MPS, MPS_GRAPHS = "graphs in processes", "original in processes, MPS", "graphs in processes, MPS"
SEED, OURS, OURS_TUCKER = "Tucker in jobs on streams (the seed's)", "ours, searched", "ours with Tucker, searched"
JOBS = 8
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
Row = dict[str, Any]
Ways = Callable[[float], list[float]]


def tell(text: str) -> None:
    """Tell how it goes."""
    print(f"{time.monotonic() - BEGIN_S:6.1f} s  {text}", file=sys.stderr, flush=True)  # noqa: T201


BEGIN_S = time.monotonic()


class Loop:
    """A plan whose models ask in closed loops for about as long as is wanted."""

    def __init__(self, made: Graphs, plan: Plan) -> None:
        self.plan = plan
        run = made.session.load(made.joined.graph, plan)
        if not isinstance(run, HostedRun):
            raise SystemExit("the evaluator is another")
        self._run, self._bench = run, made.session._bench
        self._took_s = [0.0] * len(run._instances)
        self.latencies_s(0.0)

    def latencies_s(self, seconds: float) -> list[float]:
        """Return each instance's mean latency while all others ask too; the first request is left out."""
        found = self._run._found
        counts = [3 if not took else 3 + math.ceil(seconds / took) for took in self._took_s]
        clients = tuple(replace(client, requests=n) for client, n in zip(found.clients, counts, strict=True))
        (scheduler,) = self._bench.run(replace(found, clients=clients), self.plan.dispatch, self._run._instances)
        ends = [scheduler.requests(k)[-1][1] for k in range(len(clients))]
        means = []
        for k in range(len(clients)):
            rows = [(came, ended) for came, ended in scheduler.requests(k)[1:] if ended <= min(ends)]
            rows = rows or scheduler.requests(k)[1:2]
            means.append(statistics.fmean(ended - came for came, ended in rows) * 1e-9)
        self._took_s = means
        order = list(found.components)
        return [means[order.index(i)] for i in range(len(order))]

    def close(self) -> None:
        """Let its instances go."""
        self._run.close()


class Graphs:
    """Models captured as CUDA graphs in a process of the evaluator."""

    def __init__(self, models: Sequence[tuple[str, Graph, int]], platform: Platform, bench: Bench) -> None:
        clients = tuple(Client(n, n, k, Arrival("closed", 3), own_weights=True) for n, _, k in models)
        self.workload = Workload("set", clients)
        graphs = {name: graph for name, graph, _ in models}
        parts = [(i.name, graphs[clients[i.client].model]) for i in self.workload.instances]
        self.graphs = graphs
        self.joined = merge("set", parts)
        self.platform = platform
        self.space = WorkloadSpace(self.workload, self.joined, self.platform, 4)
        self.session = CudaWorkload(Lowerings(self.workload, self.joined, platform), "mean", bench)

    def plan(self, processors: Callable[[int], str], cuts: Mapping[str, tuple[int, ...]] | None = None) -> Plan:
        """Return the plan in which instance ``k`` is on ``processors(k)``, its model cut as asked."""
        names = [self.workload.client_of(k).model for k in range(len(self.joined.components))]
        mine = [(cuts or {}).get(name, ()) for name in names]
        sizes = [len(component.graph.operators) for component in self.joined.components]
        rows = (in_runs(sizes[k], c, [processors(k)] * (len(c) + 1)) for k, c in enumerate(mine))
        return self.space.plan(DecodedPlan("fifo", tuple(range(len(names))), tuple(rows)))

    @property
    def pool(self) -> str:
        """The name of all streams together."""
        return next(p.name for p in self.platform.processors if len(members(p)) > 1)

    def stream(self, number: int) -> str:
        """The name of a stream."""
        return self.platform.processors[number].name

    def static(self, streams: int) -> Plan:
        """Return the plan in which instances take turns on so many streams, each always on the same one."""
        return self.plan(lambda k: self.stream(k % streams))

    def starts(self) -> list[Plan]:
        """Return the plans that a search begins with."""
        count = len(self.joined.components)
        plans = [self.static(n) for n in sorted({1, 2, 3, 4, 6, count}) if n <= count]
        for parts in (1, 2, 4):
            cuts = {name: cuts_of(graph, parts) for name, graph in self.graphs.items()}
            plans.append(self.plan(lambda _: self.pool, cuts))
        return list({plan.digest: plan for plan in plans}.values())


class Alone:
    """Models captured as CUDA graphs in a process of the evaluator each, which all ask at once.

    Args:
        models: name and network of each.
        mps: the pipe directory of an MPS control daemon; None without.
    """

    def __init__(
        self, models: Sequence[tuple[str, Graph]], benches: Benches, device: str, mps: str | None = None
    ) -> None:
        self._stack = ExitStack()
        try:
            with served_by(mps), ThreadPoolExecutor(len(models) if mps is None else 1) as pool:
                self._loops = list(pool.map(lambda model: self._loop(model[0], model[1], benches, device), models))
        except BaseException:
            self.close()
            raise

    def _loop(self, name: str, graph: Graph, benches: Benches, device: str) -> Loop:
        bench = self._stack.enter_context(closing(benches.another(device)))
        made = Graphs([(name, graph, 1)], benches.platform, bench)
        return self._stack.enter_context(closing(Loop(made, made.static(1))))

    def latencies_s(self, seconds: float) -> list[float]:
        """Return each model's mean latency while all ask for some seconds."""
        with ThreadPoolExecutor(len(self._loops)) as pool:
            return [found for (found,) in pool.map(lambda loop: loop.latencies_s(seconds), self._loops)]

    def close(self) -> None:
        """End the processes."""
        self._stack.close()


@contextmanager
def served_by(mps: str | None) -> Iterator[None]:
    """Let processes that start meanwhile be clients of an MPS control daemon, given its pipe directory."""
    with pytest.MonkeyPatch.context() as patch:
        if mps is not None:
            patch.setenv(PIPE, mps)
            patch.setenv(QUEUES, "1")
        yield


def searched(made: Graphs, seconds: float, look_s: float) -> tuple[Plan, Row]:
    """Return the plan with the least mean latency: known ones first, then neighbours of the best, then a final."""
    rng = np.random.default_rng(1)
    end_s = time.monotonic() + seconds
    values: dict[str, tuple[float, Plan]] = {}

    def look(plan: Plan) -> None:
        if plan.digest in values:
            return
        loop = Loop(made, plan)
        values[plan.digest] = statistics.fmean(loop.latencies_s(look_s)), plan
        loop.close()

    for plan in made.starts():
        look(plan)
    while time.monotonic() < end_s:
        ranking = sorted(values.values(), key=lambda v: v[0])
        look(made.space.neighbour(ranking[int(rng.integers(min(2, len(ranking))))][1], rng))
    finalists = [plan for _, plan in sorted(values.values(), key=lambda v: v[0])[:4]]
    loops = [Loop(made, plan) for plan in finalists]
    finals: list[list[float]] = [[] for _ in loops]
    for _ in range(3):
        for times, loop in zip(finals, loops, strict=True):
            times.append(statistics.fmean(loop.latencies_s(2 * look_s)))
    for loop in loops:
        loop.close()
    best = min(range(len(loops)), key=lambda i: statistics.median(finals[i]))
    return finalists[best], {"plans_measured": len(values), "plan": finalists[best].to_json()["stages"]}


def roofline(models: Sequence[tuple[Model, int]], ceilings: Mapping[str, float]) -> Row:
    """Return what no schedule goes below: of each inference the larger of its bytes and its products.

    Models that ask in closed loops share the device, so the shares of time ``t / latency`` add up to 1 at most; the
    mean latency is then at least ``(sum of the square roots of t) ** 2 / n``, which is ``n t`` where all are alike.
    """
    roots, rows = 0.0, {}
    count = sum(n for _, n in models)
    for model, n in models:
        bytes_s = model.weight_nbytes / ceilings["read_bytes_per_s"]
        products_s = 2 * model.macs / ceilings["flop_per_s"]
        roots += n * max(bytes_s, products_s) ** 0.5
        rows[model.name] = {"weights_ms": bytes_s * 1e3, "products_ms": products_s * 1e3}
    return {"models": rows, "least_mean_latency_ms": roots**2 / count * 1e3}


def summary(rounds: Mapping[str, list[list[float]]], target: float, floor_ms: float) -> Row:
    """Return the latency of each way, and its reduction against the processes of the same round."""
    means = {way: [statistics.fmean(row) for row in rows] for way, rows in rounds.items()}
    found: Row = {}
    for way, rows in rounds.items():
        logs = [math.log(a / b) for a, b in zip(means[way], means[PROCESSES], strict=True)]
        middle = statistics.fmean(logs)
        spread = statistics.stdev(logs) / len(logs) ** 0.5 * T95[len(logs)] if len(logs) > 1 else math.inf
        ends = [100 * (math.exp(middle + sign * spread) - 1) if math.isfinite(spread) else None for sign in (-1, 1)]
        found[way] = {
            "mean_ms": statistics.fmean(means[way]) * 1e3,
            "rounds_ms": [round(m * 1e3, 4) for m in means[way]],
            "instances_ms": [round(statistics.fmean(column) * 1e3, 4) for column in zip(*rows, strict=True)],
            "reduction_percent": 100 * (math.exp(middle) - 1),
            "reduction_ci95": ends,
        }
    wanted_ms = found[PROCESSES]["mean_ms"] * (1 - target / 100)
    best = min((w for w in found if w in {OURS, OURS_TUCKER}), key=lambda w: found[w]["mean_ms"])
    return {
        "ways": found,
        "target_percent": -target,
        "target_ms": wanted_ms,
        "best_of_ours": best,
        "reached": found[best]["mean_ms"] <= wanted_ms,
        "target_is_above_the_roofline": wanted_ms > floor_ms,
    }


class Benches:
    """The evaluator's processes, one for each form of the models, kept from set to set; use it in a ``with``."""

    def __init__(self, gpu: str, device: str, precision: str, chosen: dict[str, str]) -> None:
        self.platform = with_pools(platform_of(gpu, "tf32" if precision == "tf32" else "f32"))
        self._known = None if device == "cpu" else chosen
        self.plain, self.seeds, self.quick = (self.another(device) for _ in range(3))

    def another(self, device: str) -> Bench:
        """Return another process, which takes the kernels that are known; a caller closes it."""
        return Bench(GpuProcess(device, probe.BUSY, self._known), self.platform.limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for bench in (self.plain, self.seeds, self.quick):
            bench.close()


def measured(models: Sequence[tuple[Model, int]], given: argparse.Namespace, benches: Benches, precision: str) -> Row:
    """Measure one set."""
    row: Row = {"kept_triples": {m.name: [m.kept, len(m.ranks)] for m, _ in models}}
    paths = [m.path for m, n in models for _ in range(n)]
    with ExitStack() as stack:

        def graphs(pick: Callable[[Model], Graph], bench: Bench) -> Graphs:
            return Graphs([(m.name, pick(m), n) for m, n in models], benches.platform, bench)

        def loop(made: Graphs, plan: Plan) -> Ways:
            return stack.enter_context(closing(Loop(made, plan))).latencies_s

        plain = graphs(lambda m: m.graph, benches.plain)
        ways = {SEQUENTIAL: loop(plain, plain.static(1)), STREAMS: loop(plain, plain.plan(plain.stream))}
        groups = {PROCESSES: [[p] for p in paths]}
        if given.mps is None:
            seeds = graphs(lambda m: m.tucker.graph, benches.seeds)
            quick = graphs(lambda m: m.quick.graph if m.quick is not None else m.graph, benches.quick)
            cuts = {m.name: cuts_of(m.tucker.graph, JOBS, m.tucker.origins) for m, _ in models}
            ways[SEED] = loop(seeds, seeds.plan(lambda _: seeds.pool, cuts))
            groups |= {TUCKER_PROCESSES: [[m.tucker_path] for m, n in models for _ in range(n)], THREADS: [paths]}
        tell("  processes")  # not before the kernels are timed
        groups_of_processes = {
            name: stack.enter_context(Processes(group, given.device, precision)) for name, group in groups.items()
        }
        for processes in groups_of_processes.values():
            processes.ready()
        tell("  search")
        plan, row["search"] = searched(plain, given.search, given.look)
        ways[OURS] = loop(plain, plan)
        if given.mps is None:
            plan, row["search_tucker"] = searched(quick, given.search, given.look)
            ways[OURS_TUCKER] = loop(quick, plan)
        tell("  rounds")
        ways |= {name: processes.latencies_s for name, processes in groups_of_processes.items()}
        if given.mps is None:
            row["rounds"] = _rounds(ways, given)
        else:
            each = [(m.name, m.graph) for m, n in models for _ in range(n)]
            row["rounds"], row["mps_rounds"] = _with_processes(ways, each, paths, given, benches, precision)
        row["device"] = plain.session.facts()["facts"]
    return row


def _with_processes(
    ways: dict[str, Ways],
    each: Sequence[tuple[str, Graph]],
    paths: Sequence[Path],
    given: argparse.Namespace,
    benches: Benches,
    precision: str,
) -> tuple[Row, Row]:
    """Return the rounds with the same graphs in processes, and those with clients of MPS, or why there are none."""
    with closing(Alone(each, benches, given.device)) as alone:
        first = _rounds({**ways, GRAPHS: alone.latencies_s}, given)
    served: Row = {}
    for name in (MPS, MPS_GRAPHS):  # one after the other, since there is room for few clients
        tell(f"  rounds: {name}")
        with ExitStack() as stack:
            try:
                if name == MPS:
                    others = stack.enter_context(
                        Processes([[p] for p in paths], given.device, precision, given.mps)
                    ).ready()
                    latencies_s = others.latencies_s
                else:
                    graphs = Alone(each, benches, given.device, given.mps)
                    latencies_s = stack.enter_context(closing(graphs)).latencies_s
                served[name] = _rounds({PROCESSES: ways[PROCESSES], OURS: ways[OURS], name: latencies_s}, given)
            except (OptimizeError, OSError, RuntimeError, SystemExit) as error:
                served[name] = str(error)
    return first, served


def look_at(models: Mapping[str, Model], given: argparse.Namespace, gpu: str, precision: str) -> tuple[Row, Row]:
    """Return what the device can do at most, and what convolutions take in each way; keep the triples that pay."""
    questions = [q for model in models.values() for q in model.questions()]
    asked = {"device": given.device, "precision": precision, "ceilings": True, "seconds": given.probe}
    try:
        answer = probe.ask({**asked, "models": questions})
    except SystemExit as error:
        tell(f"no triple is looked at: {error}")
        return probe.ask(asked)["ceilings"], {}
    if given.device == "cpu":
        for model in models.values():
            model.quick = model.tucker
    else:
        CudaEvaluator._chosen.setdefault(gpu, {}).update(answer["chosen"])
        for i, model in enumerate(models.values()):
            model.choose(precision, answer["seconds"][2 * i : 2 * i + 2])
    return answer["ceilings"], answer.get("times_s", {})


def _rounds(ways: Mapping[str, Callable[[float], list[float]]], given: argparse.Namespace) -> Row:
    names = list(ways)
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(given.rounds):
        for i in range(len(names)):
            name = names[(i + number) % len(names)]
            found[name].append(ways[name](given.seconds))
    return found


def main() -> None:
    """Measure as many sets as the time allows; the file is written behind each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--precision", default="tf32", help="tf32, f32, or both with a comma")
    parser.add_argument("--sets", default=",".join(map(str, range(1, len(SETS) + 1))), help="numbers, from 1")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.35, help="of each way in each round")
    parser.add_argument("--search", type=float, default=10.0, help="seconds of each search")
    parser.add_argument("--look", type=float, default=0.1, help="seconds for each plan of a search")
    parser.add_argument("--probe", type=float, default=70.0, help="seconds for the timing of triples")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mps", help="pipe directory of an MPS control daemon, whose clients processes are too")
    parser.add_argument("--toy", action="store_true")
    given = parser.parse_args()
    gpu = CudaEvaluator(given.device)._gpu()
    chosen = [list(SETS)[int(n) - 1] for n in given.sets.split(",")]
    names = list(dict.fromkeys(name for which in chosen for name, _ in SETS[which][0]))
    document: Row = {
        "schema_version": 1,
        "command": "python -m tests.benchmarks.seed_001_gpu " + " ".join(sys.argv[1:]),
        "provenance": provenance(),
        "gpu": gpu,
        "sets": {},
        "left_out": [],
    }
    longest_s = 0.0
    CudaEvaluator._chosen.setdefault(gpu, {})
    preload()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        tell("building and decomposing the models")
        models = prepared(names, Path(folder), toy=given.toy)
        for precision in given.precision.split(","):
            tell(f"{precision}: what the device can do, and which triples are quicker than their convolutions")
            ceilings, times = look_at(models, given, gpu, precision)
            document.setdefault("ceilings", {})[precision] = ceilings
            given.out.with_suffix(".kernels").write_text(json.dumps(times, indent=0), encoding="utf-8")
            benches = stack.enter_context(Benches(gpu, given.device, precision, CudaEvaluator._chosen[gpu]))
            for which in chosen:
                one_s = time.monotonic()
                if given.minutes * 60 - (one_s - BEGIN_S) < longest_s:
                    document["left_out"].append([precision, which])
                    continue
                tell(f"{precision}, {which}")
                mine = [(models[name], 1 if given.toy else count) for name, count in SETS[which][0]]
                try:
                    row = measured(mine, given, benches, precision)
                except (OptimizeError, OSError, RuntimeError, SystemExit) as error:  # the other sets are still to come
                    tell(f"  failed: {error}")
                    document["left_out"].append([precision, which, str(error)])
                    continue
                row["roofline"] = roofline(mine, ceilings)
                floor_ms = row["roofline"]["least_mean_latency_ms"]
                for way, served in row.pop("mps_rounds", {}).items():
                    failed = isinstance(served, str)
                    known = served if failed else summary(served, SETS[which][1], floor_ms)["ways"]
                    row.setdefault("mps", {})[way] = known
                    tell(f"  {way}: {served}" if failed else f"  {way}: {known[way]['reduction_percent']:+.1f} %")
                row |= summary(row.pop("rounds"), SETS[which][1], floor_ms)
                document["sets"].setdefault(precision, {})[which] = row
                for way, each in row["ways"].items():
                    tell(f"  {way:40} {each['mean_ms']:8.3f} ms  {each['reduction_percent']:+7.1f} %")
                tell(f"  target {row['target_ms']:.3f} ms, roofline {floor_ms:.3f} ms")
                longest_s = max(longest_s, time.monotonic() - one_s)
                given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
