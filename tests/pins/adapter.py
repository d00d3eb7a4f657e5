"""The product behind the pins: the only module here that imports it, and all that changes when its types do.

Cases, plans and figures are plain values. A stage of a plan is ``[instance, "first:last,…", processor]``, with
``"axis first:last"`` behind it where it is one share of a split; operators are counted from 0 within each instance's
model. A plan's ``ranks`` are ``[instance, operator, inputs, outputs]``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
from optuna.distributions import CategoricalDistribution, IntDistribution

from evaluators.base import Batch, Session
from evaluators.cost_model.session import CostModelEvaluator, CostModelSession
from evaluators.table.placement import read_placement
from evaluators.workload.host import came_of
from evaluators.workload.predicted import PredictedSession
from optimizer.devices import choose_model_and_platform
from optimizer.exact.graphs.placement import solve_placement
from optimizer.exact.graphs.placement_value import PlacementObjective
from optimizer.model.goals import study_objective
from optimizer.model.profile import Profiler, known_profile
from optimizer.model.ranks import rank_profile
from optimizer.study.config import StudyConfig, most_stages, parse_config
from optimizer.study.course import run_study
from optimizer.study.history import Trial
from optimizer.study.limits import allowed_error
from optimizer.study.log import read_log
from optimizer.study.several_models import SeveralModels
from optimizer.workload.baselines import first_plans
from optimizer.workload.limits import Memory, check
from optimizer.workload.ranks import find_variants, grids_of
from optimizer.workload.search import WorkloadProposer
from search_spaces.core.errors import OptimizeError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import LayerRanks, Plan, Share, Stage
from search_spaces.spaces.rank_space import RankSpace
from search_spaces.spaces.registry import make_space
from search_spaces.spaces.space import SearchSpace
from search_spaces.spaces.workload_space import WorkloadSpace
from tests.support.short_studies import Quiet

Plain = dict[str, Any]
ROOT = Path(__file__).parents[2]
_CUT = 0.15  # chance that a part begins at an operator, where operators may be split
_DRAWS = 60  # for each plan that is wanted


def drawn(case: Plain, count: int, seed: int) -> list[Plain]:
    """Return ``count`` different plans of a case's space that the product runs and that use the space's freedom."""
    with _opened(case) as opened:
        rng, found = np.random.default_rng(seed), dict[str, Plain]()
        for _ in range(_DRAWS * count):
            if len(found) == count:
                break
            plan = opened.space.decode(_parameters(opened.space, rng))
            plain = opened.plain(plan)
            if not _free(case, plain) or digest(plain) in found:
                continue
            try:
                opened.figures(plan)
            except OptimizeError:
                continue
            found[digest(plain)] = plain
    return list(found.values())


def predictions(case: Plain, plans: Sequence[Plain]) -> list[Plain]:
    """Return what the cost model says of plans.

    ``latency_s``: the latency, of several models the value of the case's objective; ``stage_s`` in the order of the
    plan's stages; ``sigma`` its relative uncertainty; ``period_s`` of a stream where it is known; ``instances_s`` the
    mean latency of each instance.
    """
    with _opened(case) as opened:
        return [opened.figures(opened.plan(plain)) for plain in plans]


def optimum(case: Plain) -> Plain:
    """Return the search model's best plan, its ``value`` under the evaluator, and the model's ``value`` and bound."""
    if _several(case):
        return _workload_optimum(case)
    config = _config(case)
    evaluator = CostModelEvaluator()
    graph, platform = choose_model_and_platform(evaluator, config)
    most = most_stages(config, len(graph.operators))
    space = make_space(config.allow, graph, platform, most)
    with evaluator.prepare(platform) as session:
        profiled = known_profile(session.part_costs(graph), platform)
        if isinstance(space, RankSpace):
            profiled = rank_profile(Profiler(session, graph, platform), space, profiled, allowed_error(config) or 0.0)
        objective = study_objective(config, graph, platform, space, session, profiled)
        best = objective.problem.optima[0]
        value = float(_run(objective.session, graph, best).latency_s[0])
        plan = _Shape.of(graph).plain(best)
        return {
            "value": value,
            "model": float(objective.predict(best)),
            "bound": objective.bounds.space_s,
            "plan": plan,
        }


def replay(case: Plain) -> Plain:
    """Run a study; return what it tried, as ``[digest, value]``, its best plan, and its front."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        config = _config(case, folder, out=folder / "run", sampler=case["sampler"], seed=case["seed"])
        result = run_study(config, Quiet(), ["optimize"])
        records = read_log(folder / "run" / "trials.jsonl").records
    trials = [Trial.from_json(r.data) for r in records if r.kind in {"trial", "baseline"}]
    shape = _Shape.of(result.graph) if result.joined is None else _Shape.joined(result.joined)
    best = result.best
    measured = result.measurement(best) if best is not None else None
    found: Plain = {
        "tried": [[digest(shape.plain(t.plan)), None if t.failure else t.median_s] for t in trials],
        "value": measured.median_s if measured is not None else None,
        "best": shape.plain(best) if best is not None else None,
    }
    if result.front is not None:
        found["front"] = [[digest(shape.plain(p.plan)), *p.values] for p in result.front.plans]
    return found


def placement(path: Path, objective: str, limit_s: float) -> Plain:
    """Return value and bound of the best placement of a published instance."""
    found = solve_placement(read_placement(path), cast("PlacementObjective", objective), limit_s)
    return {"value": found.value, "bound": found.bound, "proven": found.proven}


def digest(plain: Plain) -> str:
    """Return what stands for a plain plan in a sequence of many."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What ties plain plans to plans of a graph: its digest, and the first operator and the end of each instance."""

    digest: str
    instances: tuple[range, ...]

    @classmethod
    def of(cls, graph: Graph) -> _Shape:
        return cls(graph.digest, (range(len(graph.operators)),))

    @classmethod
    def joined(cls, joined: JoinedGraph) -> _Shape:
        return cls(joined.graph.digest, tuple(c.operators for c in joined.components))

    def plain(self, plan: Plan) -> Plain:
        found: Plain = {"stages": [self._stage(stage) for stage in plan.stages]}
        if plan.ranks:
            found["ranks"] = [[*self._own(r.operator), r.inputs, r.outputs] for r in plan.ranks]
        if plan.dispatch != "static":
            found["dispatch"] = plan.dispatch
        return found

    def plan(self, plain: Plain) -> Plan:
        ranks = (LayerRanks(self.instances[i].start + o, *rest) for i, o, *rest in plain.get("ranks", ()))
        stages = tuple(self._read(*stage) for stage in plain["stages"])
        return Plan(self.digest, stages, plain.get("dispatch", "static"), tuple(ranks))

    def _own(self, operator: int) -> tuple[int, int]:
        instance = next(i for i, own in enumerate(self.instances) if operator in own)
        return instance, operator - self.instances[instance].start

    def _stage(self, stage: Stage) -> list[Any]:
        own = [self._own(o) for o in stage.operators]
        runs = [[o for _, (_, o) in run] for _, run in groupby(enumerate(own), key=lambda at: at[1][1] - at[0])]
        share = [f"{stage.share.axis} {stage.share.first}:{stage.share.last}"] if stage.share is not None else []
        return [own[0][0], ",".join(f"{r[0]}:{r[-1] + 1}" for r in runs), stage.processor, *share]

    def _read(self, instance: int, runs: str, processor: str, share: str = "") -> Stage:
        begin = self.instances[instance].start
        pairs = [tuple(map(int, run.split(":"))) for run in runs.split(",")]
        operators = tuple(begin + o for first, last in pairs for o in range(first, last))
        if not share:
            return Stage(operators, processor)
        axis, _, sides = share.partition(" ")
        first, last = map(int, sides.split(":"))
        return Stage(operators, processor, Share("height" if axis == "height" else "channels", first, last))


@dataclass(frozen=True, slots=True)
class _Opened:
    """A case made ready: its space, and what the cost model says of a plan."""

    shape: _Shape
    space: SearchSpace
    figures: Callable[[Plan], Plain]

    def plain(self, plan: Plan) -> Plain:
        return self.shape.plain(plan)

    def plan(self, plain: Plain) -> Plan:
        return self.shape.plan(plain)


@contextmanager
def _opened(case: Plain) -> Iterator[_Opened]:
    evaluator = CostModelEvaluator()
    if _several(case):
        with _problem(case, evaluator) as (problem, session, joint):
            graph = problem.joined.graph

            def value(plan: Plan) -> Plain:
                with closing(session.load(graph, plan)) as candidate:
                    batch = candidate.run(1)
                    return _figures(batch) | {"instances_s": list(came_of(batch).latencies_s)}

            yield _Opened(_Shape.joined(problem.joined), joint, value)
        return
    config = _config(case)
    graph, platform = choose_model_and_platform(evaluator, config)
    space = make_space(config.allow, graph, platform, most_stages(config, len(graph.operators)))
    with evaluator.prepare(platform) as alone:
        yield _Opened(_Shape.of(graph), space, lambda plan: _alone(alone, graph, plan))


def _alone(session: CostModelSession, graph: Graph, plan: Plan) -> Plain:
    with closing(session.load(graph, plan)) as candidate:
        found = _figures(candidate.run(1))
        try:
            return found | {"period_s": float(candidate.stream(1).latency_s[0])}
        except UnavailableError:
            return found


def _run(session: Session, graph: Graph, plan: Plan) -> Batch:
    with closing(session.load(graph, plan)) as candidate:
        return candidate.run(1)


def _figures(batch: Batch) -> Plain:
    return {"latency_s": float(batch.latency_s[0]), "sigma": batch.relative_sigma, "stage_s": batch.stage_s[0].tolist()}


def _several(case: Plain) -> bool:
    return "models" in case


def _free(case: Plain, plain: Plain) -> bool:
    """Return whether a plan uses the last freedom of a case, where splits or ranks are free."""
    last = case["allow"][-1]
    return {"splits": any(len(s) > 3 for s in plain["stages"]), "ranks": "ranks" in plain}.get(last, True)


def _parameters(space: SearchSpace, rng: np.random.Generator) -> Plain:
    found: Plain = {}
    rare = "on_0" in space.distributions()  # each segment may begin a block
    for name, each in space.distributions().items():
        if rare and name.startswith("cut_"):
            found[name] = bool(rng.random() < _CUT)
        elif isinstance(each, CategoricalDistribution):
            found[name] = each.choices[int(rng.integers(len(each.choices)))]
        else:
            assert isinstance(each, IntDistribution)
            found[name] = int(rng.integers(each.low, each.high + 1))
    return found


def _config(case: Plain, folder: Path | None = None, **more: Any) -> StudyConfig:
    """Return the settings of a case; those of several models are written to a file in the folder."""
    source = case.get("model", "")
    if _several(case):
        assert folder is not None
        source = str(folder / "workload.yaml")
        Path(source).write_text(json.dumps({"name": "pins", "models": case["models"], "seed": 1}))
    platform = case.get("platform")
    beside = (Path(__file__).with_name(f"{platform}{suffix}") for suffix in (".yaml", ".json"))
    platform = next((str(path) for path in beside if path.exists()), platform)
    known = {n: case[n] for n in ("processors", "objective", "max_stages", "power", "max_error") if n in case}
    last = case["allow"][-1] if "allow" in case else "cuts"
    allow = "cuts,branches,splits" if last == "splits" else last  # as the pins were recorded
    if source.endswith(".yaml") and not _several(case):
        source = str(ROOT / source)
    values = {"model": source, "budget": case.get("budget", 1), "evaluator": case.get("evaluator", "cost-model")}
    return parse_config(values | known | {"allow": allow, "platform": platform} | more)


@contextmanager
def _problem(
    case: Plain, evaluator: CostModelEvaluator
) -> Iterator[tuple[SeveralModels, PredictedSession, WorkloadSpace]]:
    """Open a case of several models; its space holds the ranks that a study would find."""
    with TemporaryDirectory() as folder:
        config = _config(case, Path(folder))
        problem = SeveralModels.read(config, evaluator)
    with evaluator.host(problem.workload, problem.joined, problem.platform, problem.objective) as session:
        space = problem.space
        if problem.choices:
            grids = grids_of(problem.workload, problem.choices)
            found = find_variants(session, problem.workload, space.platform, problem.choices, grids, lambda _: None)
            problem.variants = found
            space = WorkloadSpace(problem.workload, problem.joined, space.platform, config.max_stages, found.sets)
        yield problem, session, space


def _workload_optimum(case: Plain) -> Plain:
    """Return the best plan that annealing finds; the bound is the mean of the least latencies, each alone."""
    with _problem(case, CostModelEvaluator()) as (problem, session, space):
        memory = Memory(problem.workload, problem.joined)

        def predict(plan: Plan) -> float:
            try:
                return session.simulator.run(plan, known=True).value_s(problem.objective)
            except UnavailableError:
                return math.inf

        best = WorkloadProposer(space, predict, [b.plan for b in first_plans(space)], 0).ranking(1)[0]
        sets = problem.variants.sets if problem.variants is not None else ()
        least = check(session.simulator, memory, sets)
        each = [least[problem.workload.clients[i.client].name].latency_s for i in problem.workload.instances]
        with closing(session.load(problem.joined.graph, best)) as candidate:
            value = float(candidate.run(1).latency_s[0])
        plan = _Shape.joined(problem.joined).plain(best)
        return {"value": value, "model": predict(best), "bound": float(np.mean(each)), "plan": plan}
