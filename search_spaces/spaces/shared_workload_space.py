"""The space of workloads whose models are also split, or have branches side by side on two lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import permutations
from math import prod
from typing import TYPE_CHECKING, Any

from search_spaces.core.arrangement import RankSet
from search_spaces.core.errors import PlanError
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.pools import members
from search_spaces.core.workload import Workload
from search_spaces.spaces.coexecution import CoexecutionSpace
from search_spaces.spaces.shared_parts import How, Part
from search_spaces.spaces.workload_space import Row, WorkloadSpace

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import BaseDistribution

Form = tuple[How | None, int]
"""How a part is shared, and at which step of the grid, or which branches the second lane runs; None: it runs whole."""


class SharedWorkloadSpace(WorkloadSpace):
    """All ways to cut the models of a workload into parts, and to run each whole or on two lanes.

    Parameters beside those of the queue: for the client C and each of its operators but the first ``cut_C_i``: whether
    a part begins there; ``split_C_i`` and ``share_C_i``: how it is shared; for each instance K ``on_K_i`` and
    ``with_K_i``: where. An instance runs a part whole that it cannot share as it is told.

    Args:
        splits: whether operators may be split.
        branches: whether branches may run side by side.
    """

    def __init__(
        self,
        workload: Workload,
        joined: JoinedGraph,
        platform: Platform,
        rank_sets: Sequence[Sequence[RankSet]] = (),
        *,
        splits: bool = True,
        branches: bool = True,
    ) -> None:
        super().__init__(workload, joined, platform, 1, rank_sets)
        alone = _apart(platform)
        graphs = [joined.components[self._client.index(c)].graph for c in range(len(workload.clients))]
        made: dict[int, CoexecutionSpace] = {}
        for graph in graphs:
            made.setdefault(id(graph), CoexecutionSpace(graph, alone, splits=splits, branches=branches))
        self.models: tuple[CoexecutionSpace, ...] = tuple(made[id(graph)] for graph in graphs)
        """The space of each client's model by itself; lanes that are alike are told apart."""
        pairs = list(permutations(alone.processors, 2))
        self._pairs = [(a.name, b.name) for a, b in pairs if not a.excludes(b)]

    @property
    def freedoms(self) -> tuple[str, ...]:
        """What its plans may do, beside ranks."""
        return self.models[0].freedoms

    @property
    def counts(self) -> tuple[int, ...]:
        """How many instances each client has."""
        return tuple(self._counts)

    def _row_distributions(self) -> dict[str, BaseDistribution]:
        found: dict[str, BaseDistribution] = {}
        for c, space in enumerate(self.models, 1):
            for name, distribution in space.distributions().items():
                what, _, operator = name.partition("_")
                owners = [c] if what in {"cut", "split", "share"} else self._instances(c - 1)
                found |= {f"{what}_{owner}_{operator}": distribution for owner in owners}
        return found

    def _instances(self, client: int) -> list[int]:
        """Return the numbers, from 1, of a client's instances."""
        return [k for k, c in enumerate(self._client, 1) if c == client]

    def _rows(self, params: Mapping[str, Any]) -> tuple[Row, ...]:
        rows = []
        for k, c in enumerate(self._client, 1):
            own = {}
            for name in self.models[c].distributions():
                what, _, operator = name.partition("_")
                owner = c + 1 if what in {"cut", "split", "share"} else k
                own[name] = params[f"{what}_{owner}_{operator}"]
            rows.append(self.models[c].decode(own).stages)
        return tuple(rows)

    def _row_params(self, rows: Sequence[Row]) -> dict[str, Any]:
        params: dict[str, Any] = {}
        for c, space in enumerate(self.models):
            instances = self._instances(c)
            each = self._alike(c, rows)
            forms = self._forms(c, each)
            for operator in range(len(space.graph.operators)):
                if operator:
                    params[f"cut_{c + 1}_{operator}"] = operator in {part.first for part in each[0]}
                how, step = forms.get(operator, (None, 1))
                params |= {f"split_{c + 1}_{operator}": how or "whole", f"share_{c + 1}_{operator}": step}
                for k, parts in zip(instances, each, strict=True):
                    on = next((part.on for part in parts if part.first == operator), (self._places[0],))
                    params |= {f"on_{k}_{operator}": on[0], f"with_{k}_{operator}": on[-1]}
        return params

    def _parts(self, client: int, row: Row) -> tuple[Part, ...]:
        """Return the parts of an instance; of branches, those of the first one run on the first lane."""
        space = self.models[client]
        return tuple(self._normal(space, part) for part in space.parts(Plan(space.graph.digest, row)))

    def _normal(self, space: CoexecutionSpace, part: Part) -> Part:
        if part.axis != "branches" or part.cut % 2 == 0:
            return part
        every = 2 ** len(space.groups[part.first, part.last]) - 1
        return replace(part, on=part.on[::-1], cut=every ^ part.cut)

    def _alike(self, client: int, rows: Sequence[Row]) -> list[tuple[Part, ...]]:
        """Return the parts of each instance of a client, all cut alike.

        Two stages one behind the other can be read as branches side by side; they are not where another instance has
        them otherwise.

        Raises:
            PlanError: instances are cut in different ways.
        """
        each = [self._parts(client, rows[k - 1]) for k in self._instances(client)]
        firsts = {part.first for parts in each for part in parts}
        found = []
        for parts in each:
            mine: list[Part] = []
            for part in parts:
                inside = [first for first in firsts if part.first < first < part.last]
                if not inside:
                    mine.append(part)
                    continue
                sides = self.models[client].side_operators(part) if part.axis == "branches" else ()
                runs = [tuple(range(part.first, inside[0])), tuple(range(inside[0], part.last))]
                if len(inside) > 1 or sorted(sides) != runs:
                    raise PlanError(f"instances of model {client + 1} are cut in different ways")
                on = dict(zip(sides, part.on, strict=True))
                mine += [Part(run[0], run[-1] + 1, (on[run],)) for run in runs]
            found.append(tuple(mine))
        return found

    def _forms(self, client: int, each: Sequence[tuple[Part, ...]]) -> dict[int, Form]:
        """Return how the parts that instances share are shared, by their first operators.

        Raises:
            PlanError: instances share a part in different ways.
        """
        space = self.models[client]
        found: dict[int, Form] = {}
        for part in (part for parts in each for part in parts if part.axis is not None):
            step = part.cut if part.axis == "branches" else space.step(part)
            if step is None:
                raise PlanError(f"{part.axis} {part.cut} of operator {part.last - 1} is no step of the grid")
            if found.setdefault(part.first, (part.axis, step)) != (part.axis, step):
                raise PlanError(f"instances of model {client + 1} share operator {part.first} in different ways")
        return found

    def _elsewhere(self, rows: tuple[Row, ...], rng: np.random.Generator) -> tuple[Row, ...]:
        """Move a part of an instance, all of it, or all instances of a client to a lane, or to two that share it."""
        k, reach = int(rng.integers(len(rows))), int(rng.integers(3))
        on = self._places[int(rng.integers(len(self._places)))]
        pairs = [pair for pair in self._pairs if pair[0] == on]
        to = pairs[int(rng.integers(len(pairs)))] if pairs and rng.random() < 0.5 else (on,)
        c = self._client[k]
        each = self._alike(c, rows)
        forms = self._forms(c, each)
        which = int(rng.integers(len(each[0])))
        found = list(rows)
        for i, parts in zip(self._instances(c), each, strict=True):
            if reach < 2 and i - 1 != k:
                continue
            changed = [
                self._placed(c, part, forms.get(part.first), to) if reach or number == which else part
                for number, part in enumerate(parts)
            ]
            found[i - 1] = self.models[c].plan(changed).stages
        return tuple(found)

    def _placed(self, client: int, part: Part, form: Form | None, on: tuple[str, ...]) -> Part:
        """Return a part on other lanes: shared by two where it is shared at all."""
        if form is None or form[0] is None or len(on) < 2:
            return Part(part.first, part.last, on[:1])
        return self.models[client].part(part.first, part.last, (form[0], form[1], on[0], on[1]))

    def _cut_otherwise(self, rows: tuple[Row, ...], rng: np.random.Generator) -> tuple[Row, ...]:
        """Change the parts of a client's model as its own space does; instances stay where they are."""
        k = int(rng.integers(len(rows)))
        c = self._client[k]
        space = self.models[c]
        made = self._parts(c, space.neighbour(Plan(space.graph.digest, rows[k]), rng).stages)
        found = list(rows)
        for i in self._instances(c):
            if i - 1 == k:
                found[k] = space.plan(made).stages
                continue
            old = self._parts(c, rows[i - 1])
            changed = []
            for part in made:
                before = next(p for p in old if p.first <= part.first < p.last)
                step = part.cut if part.axis == "branches" else space.step(part)
                form = (part.axis, step) if part.axis is not None and step is not None else None
                own = before.on if len(before.on) > 1 or form is None else self._with_other(before.on[0], part.on)
                changed.append(self._placed(c, part, form, own))
            found[i - 1] = space.plan(changed).stages
        return tuple(found)

    def _with_other(self, on: str, like: tuple[str, ...]) -> tuple[str, ...]:
        """Return on what an instance that is on one lane shares a part: as another one does, if that holds the lane."""
        return like if on in like else (on,)

    def _ways_of(self, client: int, first: int, last: int) -> tuple[int, list[tuple[Form, int]]]:
        """Return in how many ways the instances of a client run a part whole, and in how many in each form."""
        instances, lanes = self._counts[client], len(self._places)
        space = self.models[client]
        whole = lanes**instances
        forms: list[tuple[Form, int]] = []
        if ways := (lanes + len(self._pairs)) ** instances - whole:
            for axis in space.axes:
                forms += [((axis, step), ways) for step in space.cuts(first, last, axis)]
            sets = space.branch_sets(first, last)[1::2]  # those without the first branch; it runs on the first lane
            forms += [(("branches", which), ways) for which in sets]
        return whole, forms

    @cached_property
    def _ways(self) -> tuple[tuple[int, ...], ...]:
        """For each client, and each of its operators, in how many ways the operators from it to the end can be run."""
        found = []
        for c, space in enumerate(self.models):
            count = len(space.graph.operators)
            ways = [0] * count + [1]
            for first in reversed(range(count)):
                for last in range(first + 1, count + 1):
                    whole, forms = self._ways_of(c, first, last)
                    ways[first] += (whole + sum(size for _, size in forms)) * ways[last]
            found.append(tuple(ways))
        return tuple(found)

    def _count_rows(self) -> int:
        """Return how many stages all instances can have; counted apart where they differ in lanes that are alike."""
        return prod(ways[0] for ways in self._ways)

    def _rows_at(self, index: int, order: Sequence[int]) -> tuple[Row, ...]:  # noqa: ARG002
        found: dict[int, Row] = {}
        for c, space in enumerate(self.models):
            index, own = divmod(index, self._ways[c][0])
            parts: list[list[Part]] = [[] for _ in range(self._counts[c])]
            first, count = 0, len(space.graph.operators)
            while first < count:
                for last in range(first + 1, count + 1):
                    whole, forms = self._ways_of(c, first, last)
                    size = whole + sum(ways for _, ways in forms)
                    if own < size * self._ways[c][last]:
                        break
                    own -= size * self._ways[c][last]
                which, own = divmod(own, self._ways[c][last])
                for mine, part in zip(parts, self._part_at(c, first, last, which), strict=True):
                    mine.append(part)
                first = last
            for k, mine in zip(self._instances(c), parts, strict=True):
                found[k - 1] = space.plan(mine).stages
        return tuple(found[k] for k in range(len(self._client)))

    def _part_at(self, client: int, first: int, last: int, which: int) -> list[Part]:
        """Return how each instance of a client runs a part, by the number of :meth:`_ways_of`."""
        instances, lanes = self._counts[client], len(self._places)
        whole, forms = self._ways_of(client, first, last)
        if which < whole:
            return [Part(first, last, (self._places[which // lanes**i % lanes],)) for i in range(instances)]
        which -= whole
        for form, ways in forms:  # noqa: B007 - the one that the number falls into is wanted
            if which < ways:
                break
            which -= ways
        pairs: list[tuple[str, ...]] = list(self._pairs)
        every = [*((lane,) for lane in self._places), *pairs]
        for leader in range(instances):  # the first instance that shares the part
            after = len(every) ** (instances - 1 - leader)
            size = lanes**leader * len(pairs) * after
            if which < size:
                break
            which -= size
        which, own = divmod(which, after)
        before, pair = divmod(which, len(pairs))
        on: list[tuple[str, ...]] = [(self._places[before // lanes**i % lanes],) for i in range(leader)]
        on += [pairs[pair]]
        on += [every[own // len(every) ** i % len(every)] for i in range(instances - 1 - leader)]
        return [self._placed(client, Part(first, last, each), form, each) for each in on]


def _apart(platform: Platform) -> Platform:
    """Return a platform whose lanes are all told apart, and on which nothing runs beside a pool that it is part of."""
    found = []
    for processor in platform.processors:
        resources = {name: 1.0 for lane in members(processor) for name in platform[lane].resources}
        shared = processor.resources if members(processor) == (processor.name,) else resources
        found.append(replace(processor, like=processor.name, resources=shared))
    return replace(platform, processors=tuple(found))
