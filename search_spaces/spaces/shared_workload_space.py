"""The space of workloads whose models may also be split, or run branches side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any

from search_spaces.core.decoded_plan import DecodedPlan, RankSet
from search_spaces.core.errors import PlanError
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.pools import members
from search_spaces.core.workload import Workload
from search_spaces.spaces.processor_words import located
from search_spaces.spaces.segment_space import Block, Numbering, SegmentSpace, Way
from search_spaces.spaces.workload_space import Row, WorkloadSpace

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import BaseDistribution

Form = tuple[Way, int]
"""Way and share of a :class:`~search_spaces.spaces.segment_space.Block`."""

_WHOLE: Form = ("whole", 1)
_OF_CLIENT = ("cut", "way", "share")  # parameters that the instances of a client have in common


class SharedWorkloadSpace(WorkloadSpace):
    """All ways to cut the models of a workload into blocks, and to run each whole or on several processors.

    Besides those of the queue, its parameters are those of
    :class:`~search_spaces.spaces.segment_space.SegmentSpace`: ``cut_C_S``, ``way_C_S`` and ``share_C_S`` for client C;
    ``on_K_S`` and ``with_K_S`` for instance K. A block that cannot be split as its parameters say runs whole.

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
        made: dict[int, SegmentSpace] = {}
        for graph in graphs:
            made.setdefault(id(graph), SegmentSpace(graph, alone, splits=splits, branches=branches))
        self.models: tuple[SegmentSpace, ...] = tuple(made[id(graph)] for graph in graphs)
        """The space of each client's own model; interchangeable processors are distinct in it."""
        instances = max(self.counts) > 1
        self._may_rename = branches and instances and any(len(names) > 3 for names in self._classes)
        self._pairs = self.models[0].all_pairs

    @property
    def freedoms(self) -> tuple[str, ...]:
        """The freedoms of its plans besides ranks."""
        return self.models[0].freedoms

    def _row_distributions(self) -> dict[str, BaseDistribution]:
        found: dict[str, BaseDistribution] = {}
        for c, space in enumerate(self.models):
            for name, distribution in space.distributions().items():
                found |= {_parameter(name, c, k): distribution for k in self._instances(c)}
        return found

    def _instances(self, client: int) -> list[int]:
        """Return the numbers, from 1, of a client's instances."""
        return [k for k, c in enumerate(self._client, 1) if c == client]

    def _rows(self, params: Mapping[str, Any]) -> tuple[Row, ...]:
        rows = []
        for k, c in enumerate(self._client, 1):
            own = {name: params[_parameter(name, c, k)] for name in self.models[c].distributions()}
            rows.append(self.models[c].decode(own).stages)
        return tuple(rows)

    def _row_params(self, rows: Sequence[Row]) -> dict[str, Any]:
        params: dict[str, Any] = {}
        for c, space in enumerate(self.models):
            each = self._alike(c, rows)
            forms = self._forms(c, each)
            for k, blocks in zip(self._instances(c), each, strict=True):
                common = [self._in_common(block, forms[block.first]) for block in blocks]
                params |= {_parameter(name, c, k): value for name, value in space.encode_blocks(common).items()}
        return params

    def _canonical(self, found: DecodedPlan) -> DecodedPlan:
        """Return the canonical form of a plan, or the plan itself where that form is not in the space.

        The number that places branches counts processors in the platform's order. Where four or more are
        interchangeable, other names for these can ask for another number in each instance of a model.
        """
        made = super()._canonical(found)
        if not self._may_rename:
            return made
        try:
            for client, count in enumerate(self.counts):
                if count > 1:
                    self._forms(client, self._alike(client, made.stages))
        except PlanError:
            return found
        return made

    def _in_common(self, block: Block, form: Form) -> Block:
        """Return a block with the common way and share of the client's instances; a whole one is shared with itself."""
        return replace(block, way=form[0], share=form[1], other=block.other or block.on)

    def _blocks(self, client: int, row: Row) -> tuple[Block, ...]:
        """Return the blocks of an instance."""
        space = self.models[client]
        return space.blocks(Plan(space.graph.digest, row))

    def _row(self, client: int, blocks: Sequence[Block]) -> Row:
        space = self.models[client]
        return space.plan(space.expand(blocks)).stages

    def _alike(self, client: int, rows: Sequence[Row]) -> list[tuple[Block, ...]]:
        """Return the blocks of each instance of a client, which must have the same cuts.

        Raises:
            PlanError: instances are cut in different ways.
        """
        each = [self._blocks(client, rows[k - 1]) for k in self._instances(client)]
        if len({tuple(block.first for block in blocks) for blocks in each}) > 1:
            raise PlanError(f"instances of model {client + 1} are cut in different ways")
        alike = [self._in_the_same_words(client, blocks) for blocks in zip(*each, strict=True)]
        return list(zip(*alike, strict=True))

    def _in_the_same_words(self, client: int, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return the blocks of the same operators in all instances, re-encoded with one way and share if possible."""
        if len({(block.way, block.share) for block in blocks if block.way == "branches"}) < 2:
            return blocks
        words = [
            {block.share: block for block in self.models[client].same(each)} if each.way == "branches" else None
            for each in blocks
        ]
        common = set[int].intersection(*(set(found) for found in words if found is not None))
        if not common:
            return blocks
        share = min(common)
        return [each if found is None else found[share] for each, found in zip(blocks, words, strict=True)]

    def _forms(self, client: int, each: Sequence[tuple[Block, ...]]) -> dict[int, Form]:
        """Return the common way and share of each block, by its first operator.

        Raises:
            PlanError: instances split a block in different ways.
        """
        found = {block.first: _WHOLE for block in each[0]}
        for block in (block for blocks in each for block in blocks if block.way != "whole"):
            form = block.way, block.share
            if found[block.first] not in (_WHOLE, form):
                raise PlanError(f"instances of model {client + 1} share operator {block.first} in different ways")
            found[block.first] = form
        return found

    def _elsewhere(self, rows: tuple[Row, ...], rng: np.random.Generator) -> tuple[Row, ...]:
        """Move one block, one instance or all instances of a client to a processor, or to two that share it."""
        k, reach = int(rng.integers(len(rows))), int(rng.integers(3))
        on = self._places[int(rng.integers(len(self._places)))]
        pairs = [pair for pair in self._pairs if pair[0] == on]
        to = pairs[int(rng.integers(len(pairs)))] if pairs and rng.random() < 0.5 else (on,)
        c = self._client[k]
        each = self._alike(c, rows)
        forms = self._forms(c, each)
        which = int(rng.integers(len(each[0])))
        found = list(rows)
        for i, blocks in zip(self._instances(c), each, strict=True):
            if reach < 2 and i - 1 != k:
                continue
            changed = [
                _placed(block, forms[block.first], to) if reach or number == which else block
                for number, block in enumerate(blocks)
            ]
            found[i - 1] = self._row(c, changed)
        return tuple(found)

    def _cut_otherwise(self, rows: tuple[Row, ...], rng: np.random.Generator) -> tuple[Row, ...]:
        """Change the blocks of a client's model as its own space does; instances keep their processors."""
        k = int(rng.integers(len(rows)))
        c = self._client[k]
        space = self.models[c]
        row = space.neighbour(Plan(space.graph.digest, rows[k]), rng).stages
        made = self._blocks(c, row)
        found = list(rows)
        found[k] = row
        for i in self._instances(c):
            if i - 1 == k:
                continue
            old = self._blocks(c, rows[i - 1])
            changed = []
            for block in made:
                before = next(b for b in old if b.first <= block.first < b.last)
                own: tuple[str, ...] = (before.on, before.other) if before.way != "whole" else (before.on,)
                if before.way == "whole" and before.on in (block.on, block.other) and block.way != "whole":
                    own = block.on, block.other
                changed.append(_placed(block, (block.way, block.share), own))
            found[i - 1] = self._row(c, changed)
        return tuple(found)

    def _ways_of(self, client: int, first: int, last: int) -> tuple[int, int, list[tuple[Way, int]]]:
        """Return the numbers of placements of a block with all instances whole, and of those with some shared.

        The third value is :meth:`SegmentSpace.shares`; each share there has the second number of placements.
        """
        instances, processors, space = self.counts[client], len(self._places), self.models[client]
        if not space.may_follow(first, last):
            return 0, 0, []
        whole = processors**instances
        return whole, (processors + len(self._pairs)) ** instances - whole, space.shares(first, last)

    def _size_of(self, client: int, first: int, last: int) -> int:
        whole, ways, shares = self._ways_of(client, first, last)
        return whole + ways * sum(count for _, count in shares)

    @cached_property
    def _numbers(self) -> tuple[Numbering, ...]:
        """For each client, the numbers of the ways to run its instances."""
        return tuple(Numbering(partial(self._size_of, c), space.graph) for c, space in enumerate(self.models))

    def _count_rows(self) -> int:
        """Return the number of choices of all instances' stages; interchangeable processors count separately."""
        return prod(numbers.total for numbers in self._numbers)

    def _rows_at(self, index: int, order: Sequence[int]) -> tuple[Row, ...]:  # noqa: ARG002
        found: dict[int, Row] = {}
        for c, numbers in enumerate(self._numbers):
            index, own = divmod(index, numbers.total)
            alike = [self._block_at(c, *block) for block in numbers.at(own)]
            for k, blocks in zip(self._instances(c), zip(*alike, strict=True), strict=True):
                found[k - 1] = self._row(c, blocks)
        return tuple(found[k] for k in range(len(self._client)))

    def _block_at(self, client: int, first: int, last: int, which: int) -> list[Block]:
        """Return how each instance of a client runs a block, by the number of :meth:`_size_of`."""
        instances, processors = self.counts[client], len(self._places)
        whole, ways, shares = self._ways_of(client, first, last)
        if which < whole:
            on = [self._places[which // processors**i % processors] for i in range(instances)]
            return [Block(first, last, "whole", name) for name in on]
        number, which = divmod(which - whole, ways)
        way, number = located(number, shares)
        form = way, self.models[client].share_at(first, last, way, number)
        pairs: list[tuple[str, ...]] = list(self._pairs)
        every = [*((processor,) for processor in self._places), *pairs]
        after = [len(every) ** (instances - 1 - k) for k in range(instances)]
        sizes = ((k, processors**k * len(pairs) * after[k]) for k in range(instances))
        leader, which = located(which, sizes)  # the first instance that shares the block
        which, own = divmod(which, after[leader])
        before, pair = divmod(which, len(pairs))
        places: list[tuple[str, ...]] = [(self._places[before // processors**i % processors],) for i in range(leader)]
        places += [pairs[pair]]
        places += [every[own // len(every) ** i % len(every)] for i in range(instances - 1 - leader)]
        return [_placed(Block(first, last, "whole", each[0]), form, each) for each in places]


def _parameter(name: str, client: int, instance: int) -> str:
    """Return the parameter that stands for one of a model's own space; clients count from 0, instances from 1."""
    what, _, operator = name.partition("_")
    owner = client + 1 if what in _OF_CLIENT else instance
    return f"{what}_{owner}_{operator}"


def _placed(block: Block, form: Form, on: tuple[str, ...]) -> Block:
    """Return a block on other processors: shared by two where it is shared at all."""
    if form == _WHOLE or len(on) < 2:
        return Block(block.first, block.last, "whole", on[0])
    return Block(block.first, block.last, form[0], on[0], on[1], form[1])


def _apart(platform: Platform) -> Platform:
    """Return a platform without interchangeable processors, where pools and their members exclude each other."""
    found = []
    for processor in platform.processors:
        resources = {name: 1.0 for name in members(processor) for name in platform[name].resources}
        shared = processor.resources if members(processor) == (processor.name,) else resources
        found.append(replace(processor, like=processor.name, resources=shared))
    return replace(platform, processors=tuple(found))
