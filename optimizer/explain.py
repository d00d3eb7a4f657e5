"""Why the plan of a study is what it is: what changing it would cost, what stands in the way, what else there was.

Everything that is predicted says so, and whatever of it was also measured in the study stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from evaluators.objectives import LATENCY
from optimizer.console import describe_operators
from optimizer.exact.bound import Relaxation, relax
from optimizer.exact.chain_costs import ChainCosts
from optimizer.explain_model import Model, best_by_costs, model_of
from optimizer.explanation import ByStages, Cut, Explanation, Limit, Part, Told
from optimizer.report.data import Study, read_study
from search_spaces.cuts import cut_points
from search_spaces.errors import RunFolderError
from search_spaces.plan import Plan, Stage, canonical
from search_spaces.registry import needs_any_stages
from search_spaces.wording import plural

_MOST_PARTS = 8
_HAIR = 1e-9
_SPLIT = "the model does not cover splits"


def explain_run(path: Path) -> Explanation:
    """Explain a finished study.

    Raises:
        RunFolderError: it is no finished study, or what predicts cannot be had any more.
    """
    return explain(read_study(path))


def explain(study: Study) -> Explanation:
    """Explain a study that was read; see :func:`explain_run`."""
    if study.objective != LATENCY or study.result.get("front"):
        raise RunFolderError(
            f"{study.path}: its plan was not chosen by the latency alone",
            "plans for the latency of one model are explained; optimize report shows what others were chosen by",
        )
    with model_of(study) as model:
        work = _Work(study, model)
        best = work.told(study.best)
        cuts, note = tuple(work.cuts()), ""
        if not work.is_chain:
            note = "the stages are not consecutive operators, so moving a cut has no price"
        return Explanation(
            study.path,
            model.name,
            study.best,
            best,
            cuts,
            tuple(work.parts()),
            (*work.constraints(), *work.costs(), *work.processors()),
            tuple(work.by_stages()),
            tuple((name, work.told(plan)) for name, plan in study.plans.items()),
            _least(study, model),
            study.result.get("speedup"),
            note,
        )


def _least(study: Study, model: Model) -> Relaxation:
    """Return what no plan goes below: as the study found it, by all that its plans may do, or of whole operators.

    Raises:
        RunFolderError: the result is damaged.
    """
    bounds = study.result.get("bounds")
    if not bounds:
        return relax(model.graph, model.costs)
    try:
        return Relaxation(float(bounds["critical_path_ms"]) / 1e3, float(bounds["work_ms"]) / 1e3)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{study.path}: the bounds in the result are damaged: {error!r}") from error


class _Work:
    """A study and its model, while the explanation is made."""

    def __init__(self, study: Study, model: Model) -> None:
        self._study, self._model = study, model
        self._graph, self._plan = model.graph, study.best
        sure = [t for t in study.trials if t.measurement and (model.own or not t.raced)]
        self._measured = {t.plan.digest: t.median_s for t in sure if not study.predicted}
        for entry in (study.result["best"], *study.result["baselines"].values()):
            if study.predicted:
                break
            if entry["latency_ms"] is not None:  # as the final comparison has it, where there was one
                self._measured[Plan.from_json(entry["plan"]).digest] = entry["latency_ms"]["median"] / 1e3
        most = int(study.config.get("max_stages") or 4)
        self._any_stages = needs_any_stages(str(study.config.get("allow") or "cuts"))
        self._most = min(_MOST_PARTS if self._any_stages else most, len(self._graph.operators))
        self._most = max(self._most, len(self._plan.stages) if self.is_chain else 1)
        self._known = best_by_costs(self._graph, model.costs, 1, self._most)

    @property
    def is_chain(self) -> bool:
        """Whether the plan's parts are consecutive operators, one after another."""
        return [o for s in self._plan.stages for o in s.operators] == list(range(len(self._graph.operators)))

    def told(self, plan: Plan) -> Told:
        """Return what is known of a plan."""
        measured_s = self._measured.get(plan.digest)
        refused = self._refused(plan) or ("the model does not cover triples" if plan.ranks else "")
        seconds = self._model.price(plan) if not refused else math.inf
        if math.isfinite(seconds):
            return Told(seconds, measured_s)
        split = any(stage.share is not None for stage in plan.stages)
        return Told(None, measured_s, refused or (_SPLIT if split else "not supported there"))

    def _refused(self, plan: Plan) -> str:
        costs, index = self._model.costs, {p.name: i for i, p in enumerate(self._model.costs.platform.processors)}
        kept = np.zeros(len(index))
        for stage in plan.stages:
            if stage.processor not in index:
                return f"no model covers the runtime's own placement on {stage.processor}"
            lane, operators = index[stage.processor], list(stage.operators)
            bad = next((o for o in operators if not math.isfinite(costs.operator_s[lane, o])), None)
            if bad is not None:
                return f"operator {bad} ({self._graph.operators[bad].kind}) is not supported on {stage.processor}"
            if costs.operator_nbytes is not None and costs.memory_bytes is not None:
                kept[lane] += costs.operator_nbytes[operators].sum()
                if kept[lane] > costs.memory_bytes[lane]:
                    return f"does not fit into the memory of {stage.processor}"
        return ""

    def cuts(self) -> Iterator[Cut]:
        """Yield the cuts of a chain with their neighbours."""
        if not self.is_chain:
            return
        nbytes = {point.position: point.nbytes for point in cut_points(self._graph)}
        for index, stage in enumerate(self._plan.stages[1:], 1):
            before = stage.operators[0]
            yield Cut(before, nbytes[before], self._moved(index, before - 1), self._moved(index, before + 1))

    def _moved(self, index: int, to: int) -> Told:
        """Return what is known of the plan whose part ``index`` begins at operator ``to``."""
        stages = list(self._plan.stages)
        both = (*stages[index - 1].operators, *stages[index].operators)
        if not both[0] < to <= both[-1]:
            return Told(None, None, "the stage would be empty")
        stages[index - 1] = Stage(tuple(o for o in both if o < to), stages[index - 1].processor)
        stages[index] = Stage(tuple(o for o in both if o >= to), stages[index].processor)
        return self.told(replace(self._plan, stages=tuple(stages)))

    def parts(self) -> Iterator[Part]:
        """Yield the parts, each with what the plan would take with it elsewhere."""
        stage_ms = self._study.result["best"].get("stage_ms")
        for index, stage in enumerate(self._plan.stages):
            elsewhere: list[tuple[str, Told]] = []
            others = [p.name for p in self._study.platform.processors if p.name != stage.processor]
            if stage.share is not None:
                elsewhere, others = [("–", Told(None, None, "one share of a split"))], []
            for name in others:
                stages = list(self._plan.stages)
                stages[index] = Stage(stage.operators, name)
                moved = canonical(replace(self._plan, stages=tuple(stages)), self._graph, self._study.platform)
                elsewhere.append((name, self.told(moved)))
            took_s = stage_ms[index] / 1e3 if stage_ms else None
            yield Part(describe_operators(self._graph, stage.operators), stage.processor, took_s, tuple(elsewhere))

    def constraints(self) -> Iterator[Limit]:
        """Yield what the study was not allowed to do."""
        costs = self._model.costs
        if self._most < len(self._graph.operators) and not self._any_stages:
            yield self._limit(f"at most {plural(self._most, 'stage')} (--max-stages)", costs, self._most + 1)
        deadline = self._study.config.get("deadline")
        if deadline is not None and self._known is not None:
            best = self.told(self._plan)
            spare_ms = float(deadline) - 1e3 * (best.measured_s or best.predicted_s or 0.0)
            how = f"{spare_ms:.4g} ms to spare" if spare_ms >= 0 else f"missed by {-spare_ms:.4g} ms"
            yield Limit(f"--deadline {float(deadline):g} ms: {how}", self._known[1], 0.0)
        if costs.operator_nbytes is not None and costs.memory_bytes is not None:
            yield self._limit("memory of the processors", replace(costs, memory_bytes=None, operator_nbytes=None))
        lifted = np.where(np.isfinite(costs.operator_s), costs.operator_s, costs.operator_s.min(axis=0))
        for lane, processor in enumerate(costs.platform.processors):
            count = int((~np.isfinite(costs.operator_s[lane])).sum())
            if count:
                allowed = costs.operator_s.copy()
                allowed[lane] = lifted[lane]
                what = f"{plural(count, 'operator')} not supported on {processor.name} (else as fast as elsewhere)"
                yield self._limit(what, replace(costs, operator_s=allowed))

    def costs(self) -> Iterator[Limit]:
        """Yield what parts cost beside their operators."""
        costs = self._model.costs
        if costs.hand_over_s.any():
            yield self._limit("transfers take time", replace(costs, hand_over_s=np.zeros_like(costs.hand_over_s)))
        if costs.overhead_s.any():
            yield self._limit("starting a stage takes time", replace(costs, overhead_s=np.zeros_like(costs.overhead_s)))
        if costs.beyond_s is not None and costs.beyond_s.any():
            what = "large stages slow down, and tensors that cross a cut are copied"
            yield self._limit(what, replace(costs, beyond_s=None))

    def processors(self) -> Iterator[Limit]:
        """Yield what the best chain would be without each kind of processor."""
        costs = self._model.costs
        kinds = costs.platform.classes()
        if len(kinds) < 2:
            return
        for like, members in kinds.items():
            names = {p.name for p in members}
            without = costs.operator_s.copy()
            without[[p.name in names for p in costs.platform.processors]] = np.inf
            what = f"use of {', '.join(sorted(names))}" if len(names) < 4 else f"{len(names)} processors like {like}"
            yield self._limit(what, replace(costs, operator_s=without))

    def _limit(self, what: str, costs: ChainCosts, most: int | None = None) -> Limit:
        """Return what the best chain would be under other costs, both by the additive model."""
        found = best_by_costs(self._graph, costs, 1, most or self._most)
        if found is None or self._known is None:
            return Limit(what, None, None)
        saves_s = self._known[1] - found[1]
        return Limit(what, found[1], saves_s if abs(saves_s) > _HAIR * self._known[1] else 0.0)

    def by_stages(self) -> Iterator[ByStages]:
        """Yield the best plan of each number of parts, one more than was allowed included."""
        best: dict[int, tuple[float, Plan]] = {}
        for trial in self._study.trials:
            seconds = self._measured.get(trial.plan.digest)
            count = len(trial.plan.stages)
            if seconds is not None and (count not in best or seconds < best[count][0]):
                best[count] = seconds, trial.plan
        for count in range(1, min(self._most + 1, _MOST_PARTS, len(self._graph.operators)) + 1):
            found = self._model.best(count, count)
            measured = best.get(count)
            yield ByStages(
                count,
                found[1] if found else None,
                found[0] if found else None,
                measured[0] if measured else None,
                measured[1] if measured else None,
            )
