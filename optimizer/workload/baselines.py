"""Baselines of several models (seed 001's processes among them), as plans and the processors that they use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

from evaluators.workload.apart import Apart
from evaluators.workload.prices import first_of_kinds
from optimizer.model.baselines import Baseline
from search_spaces.core.decoded_plan import DecodedPlan, in_runs
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.pools import members
from search_spaces.spaces.workload_space import WorkloadSpace

SEQUENTIAL, STATIC = "one after another", "one processor per model"
MAPPED = "whole models, each on the best processor"
_MOST_MAPPINGS = 64


def workload_baselines(space: WorkloadSpace, apart: Sequence[Apart] = ()) -> tuple[tuple[Baseline, ...], Platform]:
    """Return the baselines, which run every model whole, and the space's platform with processors that only they use.

    Models that run apart; ``one after another`` on each kind of processor; ``one processor per model``, in turns, if
    several can run at once. Processors that differ from others beside busy ones alone are left out.

    Args:
        apart: the ways to run models apart.
    """
    count = len(space.joined.components)
    found = [Baseline(each.name, _whole(space, [p.name for p in each.processors]).plan(space.joined)) for each in apart]
    processors = space.platform.processors
    usual = {processors[number].name for number in first_of_kinds(processors).values()}
    for group in space.platform.classes().values():
        first = group[0]
        if members(first)[0] not in usual:
            continue
        if len(members(first)) > 1:
            names = members(first)
            found.append(Baseline(STATIC, space.plan(_whole(space, [names[k % len(names)] for k in range(count)]))))
        else:
            found.append(Baseline(f"{SEQUENTIAL} on {first.name}", space.plan(_whole(space, [first.name] * count))))
    more = {p.name: p for each in apart for p in (*each.processors, *each.hosts)}
    return tuple(found), replace(space.platform, processors=(*space.platform.processors, *more.values()))


def mapped(space: WorkloadSpace, predict: Callable[[Plan], float]) -> Baseline:
    """Return the best way to give each instance, whole, a processor of its own choice, by prediction.

    All ways are tried where there are few; otherwise instances move one after another while that is better, from the
    two best ways to have all on one processor.

    Args:
        predict: the objective of a plan.
    """
    names, count = [p.name for p in space.platform.processors], len(space.joined.components)

    @cache
    def value(way: tuple[str, ...]) -> float:
        return predict(space.plan(_whole(space, way)))

    def improved(way: tuple[str, ...]) -> tuple[str, ...]:
        before = None
        while way != before:
            before = way
            for k in range(count):
                way = min((way, *((*way[:k], name, *way[k + 1 :]) for name in names)), key=value)
        return way

    ways: list[tuple[str, ...]]
    if len(names) ** count <= _MOST_MAPPINGS:
        ways = list(product(names, repeat=count))
    else:
        ways = [improved(way) for way in sorted(((name,) * count for name in names), key=value)[:2]]
    best = min(ways, key=value)
    return Baseline(MAPPED, space.plan(_whole(space, best)))


def first_plans(space: WorkloadSpace) -> list[Baseline]:
    """Return plans to try before any search: all models whole, from one queue, on each pool or processor."""
    count = len(space.joined.components)
    return [
        Baseline(
            f"{dispatch} on {processor.name}",
            space.plan(replace(_whole(space, [processor.name] * count), dispatch=dispatch)),
        )
        for processor in space.platform.processors
        for dispatch in space.dispatches
    ]


def _whole(space: WorkloadSpace, processors: Sequence[str]) -> DecodedPlan:
    models = [component.graph for component in space.joined.components]
    rows = (in_runs(len(graph.operators), (), [processor]) for graph, processor in zip(models, processors, strict=True))
    return DecodedPlan("fifo", tuple(range(len(processors))), tuple(rows))
