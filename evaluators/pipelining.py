"""How inferences that follow each other overlap on the lanes: the law that the runner keeps and the simulator computes.

Lanes go in rounds. In each round a lane runs each of its stages once, in the order of the plan, and each for another
inference: a stage lags as many rounds behind the first one as there are changes of lanes on the way to it. So nothing
that a lane does in a round has to wait for another lane in that round, and the period of a full pipeline is what the
busiest lane does in a round (software pipelining by lanes: Rau and Glaeser 1981, with the plan's order as schedule).
Lanes that exclude each other take turns within a round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from evaluators.cost_model.simulate import Law, Task, busiest_s, run_tasks
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform

SPARE_FRAMES = 2
"""Inferences in flight beyond those that the lags need: what lets a lane that was held up catch up again."""

_STEADY = 8


@dataclass(frozen=True, slots=True)
class Rounds:
    """A plan as it is run for a stream of inferences.

    Attributes:
        lag: of each stage: in round ``r`` it runs for inference ``r - lag``.
    """

    lag: tuple[int, ...]

    @property
    def depth(self) -> int:
        """How many rounds after its first stage an inference is finished."""
        return max(self.lag)

    @property
    def frames(self) -> int:
        """How many inferences are in flight at most; each has memory of its own."""
        return self.depth + 1 + SPARE_FRAMES


@dataclass(frozen=True, slots=True)
class Arc:
    """A stage that waits for another one, in every round.

    Attributes:
        before, after: stages; ``after`` waits.
        tokens: in how many rounds it does not wait: it waits for what ``before`` did that many rounds ago.
    """

    before: int
    after: int
    tokens: int


def needs_of(graph: Graph, plan: Plan) -> list[frozenset[int]]:
    """Return for each stage the other stages that it reads from."""
    place = {operator: i for i, stage in enumerate(plan.stages) for operator in stage.operators}
    return [
        frozenset(place[b] for o in stage.operators for b in graph.predecessors(o)) - {i}
        for i, stage in enumerate(plan.stages)
    ]


def rounds(plan: Plan, platform: Platform, needs: Sequence[Collection[int]]) -> Rounds:
    """Return how a plan is run for a stream; ``needs`` as :func:`needs_of` returns them."""
    meet = _apart(plan, platform)
    lag: list[int] = []
    for index, stage in enumerate(plan.stages):
        least = 0
        for other in range(index):
            same = plan.stages[other].processor == stage.processor
            turns = not same and not meet(other, index)
            if other in needs[index] and not same and not turns:
                least = max(least, lag[other] + 1)
            elif other in needs[index] or same or turns:
                least = max(least, lag[other])
        lag.append(least)
    return Rounds(tuple(lag))


def arcs(plan: Plan, platform: Platform, needs: Sequence[Collection[int]], how: Rounds) -> list[Arc]:
    """Return who waits for whom between lanes: for what it reads, for its turn, and for the memory of an inference."""
    lag, stages = how.lag, plan.stages
    found = [
        Arc(before, after, lag[after] - lag[before])
        for after in range(len(stages))
        for before in sorted(needs[after])
        if stages[before].processor != stages[after].processor
    ]
    lanes = list(plan.by_processor())
    for number, one in enumerate(lanes):
        for other in lanes[number + 1 :]:
            if platform[one].excludes(platform[other]):
                turns = [i for i, s in enumerate(stages) if s.processor in (one, other)]
                found += [
                    Arc(a, b, int(b <= a))
                    for a, b in zip(turns, [*turns[1:], turns[0]], strict=True)
                    if stages[a].processor != stages[b].processor
                ]
    read = {before for each in needs for before in each}
    for last in (i for i in range(len(stages)) if i not in read):
        for first in (i for i in range(len(stages)) if not needs[i]):
            if stages[last].processor != stages[first].processor:
                found.append(Arc(last, first, how.frames - lag[last] + lag[first]))
    least: dict[tuple[int, int], int] = {}
    for arc in found:
        key = arc.before, arc.after
        least[key] = min(arc.tokens, least.get(key, arc.tokens))
    return [Arc(before, after, tokens) for (before, after), tokens in least.items()]


def in_rounds(tasks: Sequence[Task], how: Rounds, inferences: int) -> tuple[list[Task], list[int]]:
    """Return the tasks of several inferences in the order in which lanes run them, and whose each is.

    Args:
        tasks: of one inference, task ``i`` for stage ``i``.
    """
    place: dict[tuple[int, int], int] = {}
    found: list[Task] = []
    whose: list[int] = []
    read = {before for task in tasks for before, _ in task.needs}
    sinks = [i for i in range(len(tasks)) if i not in read]
    for turn in range(inferences + how.depth):
        for index, task in enumerate(tasks):
            inference = turn - how.lag[index]
            if not 0 <= inference < inferences:
                continue
            needs = [(place[inference, before], delay) for before, delay in task.needs]
            if not task.needs and inference >= how.frames:
                needs += [(place[inference - how.frames, sink], 0.0) for sink in sinks]
            place[inference, index] = len(found)
            found.append(Task(task.lane, task.work_s, tuple(needs), task.slowed, task.release_s))
            whose.append(inference)
    return found, whose


def stream_period_s(tasks: Sequence[Task], law: Law, how: Rounds) -> float:
    """Return the seconds from one result to the next while the pipeline is full.

    Raises:
        UnavailableError: a task can never start, or a time is no number.
    """
    count = how.frames + _STEADY
    # What drains the pipeline at the end is no part of a stream.
    ordered, whose = in_rounds(tasks, how, 2 * count + how.depth)
    ends = [0.0] * (2 * count + how.depth)
    for inference, (_, end) in zip(whose, run_tasks(ordered, law), strict=True):
        ends[inference] = max(ends[inference], end)
    # Where lanes are nearly as busy as each other, a steady state is far away.
    return max((ends[2 * count - 1] - ends[count - 1]) / count, busiest_s(tasks, law))


def _apart(plan: Plan, platform: Platform) -> Callable[[int, int], bool]:
    """Return what tells whether two stages may run at the same time."""
    lanes = {name: platform[name] for name in plan.by_processor()}

    def meet(a: int, b: int) -> bool:
        one, other = plan.stages[a].processor, plan.stages[b].processor
        return one != other and not lanes[one].excludes(lanes[other])

    return meet
