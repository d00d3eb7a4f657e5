"""Where the tensors of a plan lie in shared memory: space is reused as soon as no stage can still need it.

Reuse keeps the working set of a cut model as small as that of the whole one; without it every boundary would leave its
own trail through the caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from search_spaces.graph import Graph
from search_spaces.plan import Plan

# LiteRT wants host memory aligned to 64 bytes; kernels may read a little beyond the end of a tensor.
ALIGNMENT = 64
_SLACK = 128
LOG_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets in an arena.

    Attributes:
        offsets: tensor index → offset of every tensor that a stage reads from the arena or writes there.
        log: offset of the lanes' time stamps (``LOG_NBYTES`` long).
        nbytes: size of the arena.
    """

    offsets: Mapping[int, int]
    log: int
    nbytes: int


def layout(
    graph: Graph, plan: Plan, before: Sequence[int], outputs: Mapping[int, Sequence[int]] | None = None
) -> Layout:
    """Lay out the tensors that the stages of a plan write.

    Inputs of the model come first, in the same place for every plan of a graph, and keep their space, because every
    inference reads them again. Two other tensors share space when all that touches the one is done, in every order
    that the lanes and the runtime allow, before what writes the other starts.

    Args:
        before: for each stage the stages that are certainly over when it starts, as a bit set (see ``program.order``).
        outputs: for each stage what it writes; by default what crosses its border. Of a stage that writes more, its
            operators are told apart, and only what depends on an operator is taken to come after it.
    """
    offsets: dict[int, int] = {}
    top = 0
    for tensor in graph.inputs:
        offsets[tensor] = top
        top += _space(graph, tensor)
    log = top
    top += LOG_NBYTES

    borders = {i: graph.boundary(stage.operators).outputs for i, stage in enumerate(plan.stages)}
    outputs = borders if outputs is None else outputs
    apart = {i for i, border in borders.items() if len(outputs[i]) > len(border)}
    moment, read, earlier = _moments(graph, plan, before, {i: frozenset(outputs[i]) for i in apart})
    over: dict[int, int] = {}  # by what is certainly over when it is first written
    users: dict[int, int] = {}
    for tensor in (t for index in borders for t in outputs[index]):
        writer = moment[graph.producer[tensor]]
        root = graph.views.get(tensor, (tensor, 0))[0]  # what lies in a tensor shares its space, and its fate
        over[root] = over.get(root, earlier[writer]) & earlier[writer]
        users[root] = users.get(root, 0) | 1 << writer
        for reader in graph.consumers.get(tensor, ()):
            users[root] |= read[reader]
    kept = set(graph.outputs)

    def may_share(a: int, b: int) -> bool:
        """Whether ``a`` is dead before ``b`` is written."""
        return a not in kept and users[a] & ~over[b] == 0

    placed: list[int] = []
    end = top
    for tensor in sorted(over, key=lambda t: (-graph.tensors[t].nbytes, t)):
        size = _space(graph, tensor)
        conflicts = sorted(
            (offsets[o], offsets[o] + _space(graph, o))
            for o in placed
            if not (may_share(tensor, o) or may_share(o, tensor))
        )
        offset = top
        for first, last in conflicts:
            if offset + size <= first:
                break
            offset = max(offset, last)
        offsets[tensor] = offset
        placed.append(tensor)
        end = max(end, offset + size)
    offsets |= {tensor: offsets[root] + first for tensor, (root, first) in graph.views.items()}
    return Layout(offsets, log, end + _SLACK)


def _moments(
    graph: Graph, plan: Plan, before: Sequence[int], apart: Mapping[int, frozenset[int]]
) -> tuple[dict[int, int], dict[int, int], Sequence[int]]:
    """Return when operators write and read; a stage is one moment, unless its operators are told apart.

    A runtime may run operators in any order that their data allow, and fuse those between which a tensor stays inside:
    what the first one reads may then be read as late as the last one runs.

    Args:
        apart: stages whose operators are told apart, and what they write.

    Returns:
        For each operator its moment; for each operator the moments after which its inputs are certainly read, as a bit
        set; for each moment those that are certainly over when it begins.
    """
    moment = {o: i for i, stage in enumerate(plan.stages) for o in stage.operators}
    if not apart:
        return moment, {o: 1 << i for o, i in moment.items()}, before
    read: dict[int, int] = {}
    earlier: list[int] = []
    during: list[int] = []  # for each stage its moments
    for index, stage in enumerate(plan.stages):
        over = sum(during[other] for other in range(index) if before[index] >> other & 1)
        first = len(earlier)
        if index not in apart:
            moment |= dict.fromkeys(stage.operators, first)
            read |= dict.fromkeys(stage.operators, 1 << first)
            earlier.append(over)
        else:
            inside = set(stage.operators)
            for o in stage.operators:
                moment[o] = len(earlier)
                sources = graph.predecessors(o) & inside
                earlier.append(reduce(or_, (earlier[moment[s]] | 1 << moment[s] for s in sources), over))
            for o in reversed(stage.operators):
                kept = set(graph.operators[o].outputs) - apart[index]
                fused = {c for tensor in kept for c in graph.consumers.get(tensor, ()) if c in inside}
                read[o] = reduce(or_, (read[c] for c in fused), 1 << moment[o])
        during.append((1 << len(earlier)) - (1 << first))
    return moment, read, earlier


def largest(graph: Graph) -> int:
    """Return a size that holds the layout of every plan of a graph."""
    return LOG_NBYTES + _SLACK + sum(_space(graph, t) for t in graph.activation_tensors)


def _space(graph: Graph, tensor: int) -> int:
    return max(1, -(-graph.tensors[tensor].nbytes // ALIGNMENT)) * ALIGNMENT
