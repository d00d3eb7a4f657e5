"""Features of a choice for a policy: predicted times and the operators that it moves, without units.

Features do not depend on the meaning of a parameter. They describe how a plan changes when this choice alone is taken
in a reference plan, the middle: which operators run elsewhere or in other stages, how many more stages and transfers
there are, and how much longer the plan takes by the model. So a policy serves any graph, any freedoms, and several
models at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from search_spaces.core.errors import UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs
from search_spaces.core.plan import Plan
from search_spaces.spaces.space import SearchSpace

_Array = NDArray[np.float64]
_KINDS = ("cut", "on", "with", "processor", "share", "split", "way", "stages", "jobs", "first")
_OPERATORS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
NAMES = (
    "is taken in the middle",
    "changes nothing",
    "cannot run",
    "little longer",
    "much longer",
    "is a number",
    "how far from the middle",
    "stages more",
    "processors more",
    "edges between processors more",
    "operators moved",
    "their multiply-accumulates",
    "their bytes",
    "their arithmetic intensity",
    "their position",
    "their branching",
    *(f"are {kind}" for kind in _OPERATORS),
    *(f"is {kind}" for kind in _KINDS),
    "constant",
)
_LITTLE, _MUCH = 0.03, 0.3
_CHANGES = 2.0  # parameters per plan that an untrained policy draws different from the middle, on average
_NEVER = 50.0
_MOST_VALUES = 10_000  # of a parameter
_MOVED = 9 + len(_OPERATORS)  # number of features from "stages more" to the kinds of operators
_FLAT = 1e-6  # relative differences below this count as none
_LEAST, _MOST = 1e-3, 1.0  # limits of Choices.width


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """The problem of a policy.

    Attributes:
        predict: the model's value of a plan, in seconds or the objective's unit; infinite where it does not run.
        middle: the best plan by the model that is known.
        fits: whether a plan keeps all constraints.
    """

    space: SearchSpace
    graph: Graph
    predict: Callable[[Plan], float]
    middle: Plan
    fits: Callable[[Plan], bool] = lambda _: True


class Choices:
    """All choices of all parameters of a task, concatenated, with features relative to the middle plan.

    Args:
        at_once: choices that one call of :meth:`look` evaluates; None for all.

    Attributes:
        names: of the non-constant parameters.
        first: index of each parameter's first choice.
        features: shape ``(C, F)``.
        longer: logarithm of the predicted time relative to the middle's; infinite where the plan does not run.
        idle: whether a choice changes nothing.
        width: the difference that is worth a try; a policy starts with ``exp(-longer / width)``.
    """

    def __init__(self, task: Task, at_once: int | None = None) -> None:
        self._task, self._at_once = task, at_once
        self._fixed = {n: d for n, d in task.space.distributions().items() if d.single()}
        free = {n: d for n, d in task.space.distributions().items() if not d.single()}
        self.names = tuple(free)
        self._values = [_values(d) for d in free.values()]
        sizes = [len(values) for values in self._values]
        self.first = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
        self.of = np.repeat(np.arange(len(sizes)), sizes)
        self._operators = _Operators(task.graph)
        count = int(sum(sizes))
        self.features = np.zeros((count, len(NAMES)))
        self.features[:, -1] = 1.0
        for place, name in enumerate(self.names):
            word = re.split(r"_?\d|_", name)[0]
            where = self.of == place
            self.features[where, NAMES.index("is a number")] = isinstance(free[name], IntDistribution)
            if word in _KINDS:
                self.features[where, NAMES.index(f"is {word}")] = 1.0
        self.longer, self.idle = np.zeros(count), np.zeros(count, dtype=bool)
        self.width = _MOST
        self.middle = np.zeros(len(sizes), dtype=np.int64)
        self._left: list[int] = []
        self.centre(self.which(task.space.encode(task.middle)))
        while self._left:
            self.look()

    def which(self, params: Mapping[str, Any]) -> NDArray[np.int64]:
        """Return the choice of each parameter in a plan's parameters, as indices of all choices."""
        places = [values.index(params[name]) for name, values in zip(self.names, self._values, strict=True)]
        found: NDArray[np.int64] = self.first + np.array(places, dtype=np.int64)
        return found

    def params(self, which: Sequence[int] | NDArray[np.int64]) -> dict[str, Any]:
        """Return the parameters of choices, one for each parameter."""
        found = {
            name: values[int(w) - int(f)]
            for name, values, w, f in zip(self.names, self._values, which, self.first, strict=True)
        }
        return found | {name: _values(d)[0] for name, d in self._fixed.items()}

    def plan(self, which: Sequence[int] | NDArray[np.int64]) -> Plan:
        """Return the plan of choices, one for each parameter."""
        return self._task.space.decode(self.params(which))

    def centre(self, middle: NDArray[np.int64]) -> None:
        """Set the middle plan; the features of all choices are evaluated anew by :meth:`look`."""
        if not self._left and np.array_equal(middle, self.middle) and self.features[:, 0].any():
            return
        self.middle = middle
        self.features[:, 0] = 0.0
        self.features[middle, 0] = 1.0
        place = np.arange(len(self.of)) - self.first[self.of]
        size = np.maximum(np.bincount(self.of)[self.of] - 1, 1)
        far = np.abs(place - (middle - self.first)[self.of]) / size
        self.features[:, NAMES.index("how far from the middle")] = far * self.features[:, NAMES.index("is a number")]
        plan = self.plan(middle)
        self._base = plan, self._task.predict(plan), self._operators.of(plan)
        self._left = list(range(len(self.of)))

    def look(self) -> None:
        """Evaluate some more of the choices that have not been evaluated from the middle."""
        if not self._left:
            return
        count = len(self._left) if self._at_once is None else self._at_once
        now, self._left = self._left[:count], self._left[count:]
        base, base_s, placed = self._base
        seen: dict[str, tuple[float, list[float]]] = {base.digest: (0.0, [0.0] * _MOVED)}
        for choice in now:
            which = self.middle.copy()
            which[self.of[choice]] = choice
            plan = self.plan(which)
            if plan.digest not in seen:
                took_s = self._task.predict(plan) if self._task.fits(plan) else math.inf
                longer = math.log(took_s / base_s) if math.isfinite(took_s) and math.isfinite(base_s) else math.inf
                seen[plan.digest] = longer, self._operators.moved(base, placed, plan)
            self.longer[choice], moved = seen[plan.digest]
            self.idle[choice] = plan.digest == base.digest
            self.features[choice, 7 : 7 + len(moved)] = moved
        self.features[:, 1], self.features[:, 2] = self.idle, ~np.isfinite(self.longer)
        finite = np.where(np.isfinite(self.longer), self.longer, _NEVER)
        self.features[:, 3], self.features[:, 4] = np.tanh(finite / _LITTLE), np.tanh(finite / _MUCH)
        self.width = self._width(finite)

    @property
    def prior(self) -> _Array:
        """The logits of an untrained policy."""
        found: _Array = -np.minimum(np.where(np.isfinite(self.longer), self.longer, np.inf) / self.width, _NEVER)
        return found

    def _width(self, longer: _Array) -> float:
        """Return the width with which ``_CHANGES`` parameters that matter are drawn different from the middle."""
        matters = np.abs(longer) > _FLAT
        low, high = math.log(_LEAST), math.log(_MOST)
        for _ in range(20):
            middle = (low + high) / 2
            chance = softmax(-np.clip(longer / math.exp(middle), -_NEVER, _NEVER), self.first, self.of)
            if float(chance[matters].sum()) > _CHANGES:
                high = middle
            else:
                low = middle
        return math.exp(low)


class _Operators:
    """Properties of a graph's operators, to describe what moves between two plans."""

    def __init__(self, graph: Graph) -> None:
        costs = operator_costs(graph)
        macs = np.array([float(c.macs) for c in costs])
        nbytes = np.array([float(c.read_bytes + c.written_bytes) for c in costs])
        self._shares = np.stack((macs / max(macs.sum(), 1.0), nbytes / max(nbytes.sum(), 1.0)))
        self._intense = np.log1p(macs / np.maximum(nbytes, 1.0)) / 5.0
        self._kinds = np.array([[float(o.kind == kind) for o in graph.operators] for kind in _OPERATORS])
        self._edges = [(b, o) for o in range(len(graph.operators)) for b in graph.predecessors(o)]
        reads = np.zeros(len(graph.operators))
        np.add.at(reads, [b for b, _ in self._edges], 1.0)
        self._forks = (reads > 1.0).astype(float)

    def of(self, plan: Plan) -> list[tuple[Any, ...]]:
        """Return for each operator its processor, the first operator of its stage, and its share."""
        found: list[tuple[Any, ...]] = [()] * len(self._forks)
        for stage in plan.stages:
            first = stage.operators[0]
            for o in stage.operators:
                found[o] = (*found[o], (stage.processor, first, stage.share))
        return found

    def moved(self, base: Plan, placed: list[tuple[Any, ...]], plan: Plan) -> list[float]:
        """Return the differences of a plan from ``base``: features 7 to 15 and the kinds of the operators."""
        there = self.of(plan)
        which = np.flatnonzero([a != b for a, b in zip(placed, there, strict=True)])
        stages = math.log(len(plan.stages) / len(base.stages))
        processors = len({s.processor for s in plan.stages}) - len({s.processor for s in base.stages})
        edges = self._crossing(there) - self._crossing(placed)
        if not len(which):
            return [stages, processors, math.tanh(edges / 4.0), *[0.0] * (_MOVED - 3)]
        own = [len(which) / len(placed), *self._shares[:, which].sum(axis=1), self._intense[which].mean()]
        own += [float(which.mean()) / len(placed), self._forks[which].mean(), *self._kinds[:, which].mean(axis=1)]
        return [stages, processors, math.tanh(edges / 4.0), *map(float, own)]

    def _crossing(self, placed: list[tuple[Any, ...]]) -> int:
        return sum(placed[a][0][0] != placed[b][0][0] for a, b in self._edges if placed[a] and placed[b])


def softmax(logits: _Array, first: NDArray[np.int64], of: NDArray[np.int64]) -> _Array:
    """Return the probability of each choice among those of its parameter."""
    raised = np.exp(logits - np.maximum.reduceat(logits, first)[of])
    found: _Array = raised / np.add.reduceat(raised, first)[of]
    return found


def _values(distribution: BaseDistribution) -> list[Any]:
    if isinstance(distribution, IntDistribution):
        if distribution.high - distribution.low > _MOST_VALUES:
            raise UsageError(
                f"reinforce weighs every value of a parameter, and one has {distribution.high:.3g} of them",
                "use --sampler auto, or --allow cuts",
            )
        return list(range(distribution.low, distribution.high + 1, distribution.step))
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    raise TypeError(f"a policy has no choice for {type(distribution).__name__}")
