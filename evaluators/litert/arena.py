"""Where the tensors of a plan lie in shared memory: space is reused as soon as no stage can still need it.

Reuse keeps the working set of a cut model as small as that of the whole one; without it every boundary would leave its
own trail through the caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
        offsets: tensor index → offset of every tensor that crosses a stage's border.
        log: offset of the lanes' time stamps (``LOG_NBYTES`` long).
        nbytes: size of the arena.
    """

    offsets: Mapping[int, int]
    log: int
    nbytes: int


def layout(graph: Graph, plan: Plan, before: list[int]) -> Layout:
    """Lay out the border tensors of a plan.

    Inputs of the model come first, in the same place for every plan of a graph, and keep their space, because every
    inference reads them again. Two other tensors share space when all stages that touch the one are done, in every
    order that the lanes allow, before the one that writes the other starts.

    Args:
        before: for each stage the stages that are certainly over when it starts, as a bit set (see ``program.order``).
    """
    offsets: dict[int, int] = {}
    top = 0
    for tensor in graph.inputs:
        offsets[tensor] = top
        top += _space(graph, tensor)
    log = top
    top += LOG_NBYTES

    place = {operator: i for i, stage in enumerate(plan.stages) for operator in stage.operators}
    writer: dict[int, int] = {}
    users: dict[int, int] = {}
    for index, stage in enumerate(plan.stages):
        for tensor in graph.boundary(stage.operators).outputs:
            writer[tensor] = index
            readers = {place[o] for o in graph.consumers.get(tensor, ())}
            users[tensor] = sum(1 << s for s in readers | {index})
    kept = set(graph.outputs)

    def may_share(a: int, b: int) -> bool:
        """Whether ``a`` is dead before ``b`` is written."""
        return a not in kept and users[a] & ~before[writer[b]] == 0

    placed: list[int] = []
    end = top
    for tensor in sorted(writer, key=lambda t: (-graph.tensors[t].nbytes, t)):
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
    return Layout(offsets, log, end + _SLACK)


def largest(graph: Graph) -> int:
    """Return a size that holds the layout of every plan of a graph."""
    return LOG_NBYTES + _SLACK + sum(_space(graph, t) for t in graph.activation_tensors)


def _space(graph: Graph, tensor: int) -> int:
    return max(1, -(-graph.tensors[tensor].nbytes // ALIGNMENT)) * ALIGNMENT
