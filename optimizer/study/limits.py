"""Which plans may be run and recommended: limits on their figures, the deadline, memory and supported operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from evaluators.samples import Measurement
from optimizer.exact.chain_costs import ChainCosts
from optimizer.study.config import StudyConfig
from optimizer.study.history import History, Trial
from search_spaces.core.constraints import Violation, infeasible
from search_spaces.core.errors import InfeasibleError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.wording import plural
from search_spaces.core.workload import RANKED_ERROR
from search_spaces.spaces.registry import freedoms_of

TRUST = 1.1
"""Plans are not run if the model predicts more than this multiple of a limit or deadline: models are no more exact."""


_NONE = "no plan meets --deadline {bound}: the best one "
_LEVER = "allow a longer --deadline, more stages or more --processors"


@dataclass(frozen=True, slots=True)
class Limit:
    """An upper limit of a figure of a plan.

    Attributes:
        name: of the figure: an objective, or ``error``.
        what: the figure in words.
        lever: what to change so that plans keep it.
    """

    name: str
    what: str
    most: float
    unit: str
    lever: str

    def violation(self, value: float, what: str) -> tuple[Violation, ...]:
        """Return the violation of a value, or (); ``what``: the figure in words, predicted or found."""
        if value <= self.most:
            return ()
        sentence = f"--max-{self.name} {{bound}}: the {what} is {{demand}}"
        return (Violation(what, value, self.most, self.unit, self.lever, sentence),)


def allowed_error(config: StudyConfig) -> float | None:
    """Return the allowed relative error of outputs; None for what the precision of processors explains."""
    if config.max_error is None and "ranks" in freedoms_of(config.allow):
        return RANKED_ERROR
    return config.max_error


def limits_of(config: StudyConfig) -> tuple[Limit, ...]:
    """Return the limits of a study, without the deadline."""
    found = []
    if config.max_energy is not None:
        lever = "allow a higher --max-energy, more --max-stages, or --processors that draw less"
        found.append(Limit("energy", "energy of an inference", config.max_energy / 1e3, "J", lever))
    if (most_error := allowed_error(config)) is not None:
        lever = "allow a larger --max-error, or leave out --processors of lower precision"
        found.append(Limit("error", "largest error of the outputs", most_error, "relative", lever))
    return tuple(found)


def figure(measurement: Measurement, name: str, objective: str) -> float | None:
    """Return a figure of a plan, or None where it is unknown.

    Args:
        objective: name of the objective that the samples are of.
    """
    if name == "error":
        return measurement.agreement.max_rel_error if measurement.agreement is not None else None
    return measurement.median_s if name == objective else measurement.figures.get(name)


def expected(limits: Sequence[Limit], predict: Mapping[str, Callable[[Plan], float]], plan: Plan) -> list[Violation]:
    """Return the limits that a plan clearly exceeds under the model."""
    found: list[Violation] = []
    for limit in limits:
        if limit.name in predict and (value := predict[limit.name](plan)) > TRUST * limit.most:
            found += limit.violation(value, f"predicted {limit.what}")
    return found


def keeps(limits: Sequence[Limit], trial: Trial, objective: str) -> bool:
    """Return whether a measured plan keeps all limits; a missing figure violates none."""
    if trial.measurement is None:
        return False
    values = [(limit, figure(trial.measurement, limit.name, objective)) for limit in limits]
    return all(value is None or value <= limit.most for limit, value in values)


def none_keeps(limits: Sequence[Limit], history: History, objective: str) -> InfeasibleError | None:
    """Return the error for a study where no measured plan keeps all limits, with the nearest figures."""
    trials = [t for t in history.known.values() if t.measurement is not None]
    if not limits or any(keeps(limits, t, objective) for t in trials):
        return None
    found: list[Violation] = []
    for limit in limits:
        values = [
            v for t in trials if t.measurement and (v := figure(t.measurement, limit.name, objective)) is not None
        ]
        if values:
            found += limit.violation(min(values), f"{limit.what} of the best plan found")
    if not found:  # some plan keeps each limit, but none keeps all
        names = " and ".join(f"--max-{limit.name}" for limit in limits)
        return InfeasibleError(f"no plan found keeps {names} together", limits[0].lever)
    return infeasible(found[0], *found[1:])


def unreachable_limit(limits: Sequence[Limit], least: Mapping[str, float]) -> InfeasibleError | None:
    """Return the error for limits that the best plan under the model clearly exceeds.

    Args:
        least: lower bounds under the model, by the name of the limit.
    """
    found: list[Violation] = []
    for limit in limits:
        if limit.name in least and least[limit.name] > TRUST * limit.most:
            found += limit.violation(least[limit.name], f"predicted {limit.what} of the best plan")
    return infeasible(found[0], *found[1:]) if found else None


def too_late(deadline_s: float, predict: Callable[[Plan], float], plan: Plan) -> tuple[Violation, ...]:
    """Return the violation of a plan that clearly misses a deadline under the model; () for any other."""
    expected_s = predict(plan)
    if expected_s <= TRUST * deadline_s:
        return ()
    sentence = "misses --deadline {bound}: {demand} predicted"
    return (Violation("predicted latency", expected_s, deadline_s, "s", _LEVER, sentence),)


def unreachable(deadline_s: float, bound_s: float) -> InfeasibleError | None:
    """Return the error for a deadline that the best plan under the model clearly misses."""
    if bound_s <= TRUST * deadline_s:
        return None
    sentence = f"{_NONE}is predicted to take {{demand}}"
    return infeasible(Violation("predicted latency of the best plan", bound_s, deadline_s, "s", _LEVER, sentence))


def missed(deadline_s: float, best_s: float, *, predicted: bool) -> InfeasibleError | None:
    """Return the error for a deadline that the best plan of a finished study misses."""
    if best_s <= deadline_s:
        return None
    sentence = f"{_NONE}found {'is predicted to take' if predicted else 'takes'} {{demand}}"
    return infeasible(Violation("latency of the best plan found", best_s, deadline_s, "s", _LEVER, sentence))


def violations(graph: Graph, costs: ChainCosts, max_stages: int, plan: Plan) -> tuple[Violation, ...]:
    """Return a plan's violations: unsupported operators, a processor's memory, and the number of stages.

    Args:
        costs: infinite if a processor does not support an operator.
        max_stages: stages of a plan at most.
    """
    index = {p.name: i for i, p in enumerate(costs.platform.processors)}
    found = []
    parts = len({stage.operators for stage in plan.stages})  # both sides of a split count as one stage
    if parts > max_stages:
        found.append(Violation("stages of a plan", parts, max_stages, "stages", "give more --max-stages"))
    for name, stages in plan.by_processor().items():
        processor = index[name]
        operators = [o for i in stages for o in plan.stages[i].operators]
        refused = [o for o in operators if not math.isfinite(costs.operator_s[processor, o])]
        if refused:
            kind = graph.operators[refused[0]].kind
            what = f"not supported on {name!r} (the first is {refused[0]}, {kind})"
            lever = f"leave {name!r} out of --processors"
            sentence = f"{plural(len(refused), 'operator')} {what}"
            found.append(Violation(f"operators {what}", len(refused), 0, "operators", lever, sentence))
        if costs.operator_nbytes is not None and costs.memory_bytes is not None:
            demand, bound = float(costs.operator_nbytes[operators].sum()), float(costs.memory_bytes[processor])
            if demand > bound:
                found.append(Violation(f"memory of {name!r}", demand, bound, "B", "allow more --max-stages"))
    return tuple(found)
