"""Errors of outputs on processors of less precision: measured, and a model of them.

Rounding errors of different operators are nearly independent, so their squares add up. The whole network is run on each
kind of processor; if its error exceeds the limit, groups of its operators are run there one by one, with all others on
the most exact kind. Squares are additive, as seconds are: with a multiplier that turns them into seconds, dynamic
programming finds the fastest chains for an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from evaluators.base import Evaluator
from evaluators.sampling import measure
from evaluators.workload.prices import Size
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts, chain_cost
from optimizer.model.profile import POLICY, Profile, Profiler
from search_spaces.core.bounded import built
from search_spaces.core.errors import InfeasibleError, RunFolderError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.chain import chain_plan

GROUPS = 8
"""Consecutive groups of operators, of about equal time, whose errors are measured one by one."""

TOLERANCES = (0.01, 0.05)
_MULTIPLIERS = np.geomspace(2.0**-8, 2.0**8, 33)
_MOST_SCALE = 4.0  # of the groups' squares, so that they add up to the whole network's


@dataclass(frozen=True, slots=True)
class ErrorProfile:
    """What each operator adds to the squared error of the outputs, relative, on each kind of processor.

    Attributes:
        squares: like → one value for each operator.
    """

    squares: Mapping[str, tuple[Size, ...]]

    def expected(self, platform: Platform, plan: Plan) -> float:
        """Return the expected relative error of a plan's outputs."""
        on = ((self.squares.get(platform[stage.processor].like, ()), stage.operators) for stage in plan.stages)
        return math.sqrt(sum(squares[o] for squares, operators in on if squares for o in operators))

    def optima(self, graph: Graph, costs: ChainCosts, most_error: float, most_stages: int) -> list[Plan]:
        """Return chains that the model finds fast and whose expected error is allowed, fastest first."""
        rows = np.array([self.squares.get(p.like, (0.0,) * len(graph.operators)) for p in costs.platform.processors])
        if rows.sum(axis=1).max() <= most_error**2:
            return []
        whole_s = float(np.min(costs.operator_s.sum(axis=1)))
        found: dict[str, tuple[float, Plan]] = {}
        for multiplier in _MULTIPLIERS:
            priced = replace(costs, operator_s=costs.operator_s + multiplier * whole_s / most_error**2 * rows)
            try:
                chain = best_chains(priced, most_stages)[0]
            except InfeasibleError:
                return []
            plan = chain.plan(graph)
            if self.expected(costs.platform, plan) <= most_error:
                found[plan.digest] = chain_cost(costs, plan), plan
        return [plan for _, plan in sorted(found.values(), key=lambda each: each[0])]

    @classmethod
    def from_json(cls, data: object) -> ErrorProfile:
        """Build it from its field as plain values.

        Raises:
            RunFolderError: the field is missing or has the wrong type.
        """
        return built(cls, data, "the errors of the operators are", RunFolderError)


def error_profile(of: Profiler, profiled: Profile, most_error: float) -> ErrorProfile:
    """Measure the errors of the kinds of processors that support the whole network."""
    count, names = len(of.graph.operators), of.first
    whole = {like: error_of(of, [name] * count) for like, name in names.items()}
    known = {like: error for like, error in whole.items() if error is not None}
    squares = {like: (error**2 / count,) * count for like, error in known.items()}
    exact = min(known, key=lambda like: known[like], default=None)
    for like, error in known.items():
        if exact is None or error <= most_error:
            continue
        of.progress(f"measuring the errors of {names[like]}")
        each = np.zeros(count)
        for begin, end in _groups(profiled.operator_s[like]):
            found = error_of(of, [names[like] if begin <= o < end else names[exact] for o in range(count)])
            each[begin:end] = (error if found is None else found) ** 2 / (end - begin)
        scale = np.clip(error**2 / max(each.sum(), 1e-30), 1.0 / _MOST_SCALE, _MOST_SCALE)
        squares[like] = tuple((each * scale).tolist())
    return ErrorProfile(squares)


def error_of(of: Profiler, processors: list[str]) -> float | None:
    """Return the relative error of the outputs, given each operator's processor; None if that cannot be run."""
    cuts = [o for o in range(1, len(processors)) if processors[o] != processors[o - 1]]
    plan = chain_plan(of.graph, cuts, [processors[o] for o in (0, *cuts)])
    try:
        with closing(of.session.load(of.graph, plan)) as candidate:
            agreement = candidate.verify()
    except UnavailableError:
        return None
    return agreement.max_rel_error if agreement is not None and math.isfinite(agreement.max_rel_error) else None


def tolerance_line(evaluator: Evaluator, graph: Graph, processors: Sequence[Processor]) -> str:
    """Return in a sentence which processors of less precision ``TOLERANCES`` allow, by the whole model's errors."""
    measured: list[tuple[float, str, float]] = []
    with evaluator.prepare(Platform("of less precision", tuple(processors))) as session:
        for processor in processors:
            try:
                with closing(session.load(graph, chain_plan(graph, (), [processor.name]))) as candidate:
                    seconds = measure(candidate, POLICY).latency_s.median
                    agreement = candidate.verify()
            except UnavailableError:
                continue
            if agreement is not None:
                measured.append((agreement.max_rel_error, processor.name, seconds))
    if not measured:
        return ""
    notes, before = [], 0.0
    for most in TOLERANCES:
        allowed = [
            f"{name} (whole model {s * 1e3:.3g} ms, error {e:.2g})" for e, name, s in measured if before <= e <= most
        ]
        notes.append(f"{most:g} would allow {', '.join(allowed) or 'no other processor'}")
        before = most
    beyond = [f"{name} has an error of {error:.2g}" for error, name, _ in measured if not error <= before]
    return f"only float32 is used; --max-error {'; '.join(notes + beyond)}"


def _groups(operator_s: tuple[float, ...]) -> Iterator[tuple[int, int]]:
    """Yield where groups of about equal time begin and end."""
    ends = np.cumsum(operator_s)
    if not np.isfinite(ends[-1]):
        ends = np.arange(1.0, len(operator_s) + 1)
    cuts = sorted({0, len(operator_s), *(np.searchsorted(ends, ends[-1] * np.arange(1, GROUPS) / GROUPS) + 1).tolist()})
    cuts = [cut for cut in cuts if cut <= len(operator_s)]
    yield from pairwise(cuts)
