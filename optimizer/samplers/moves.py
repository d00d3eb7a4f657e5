"""Plans next to a plan: a border shifted, stages merged or split, operators or a stage moved to another processor.

Moves use stages and the edges between operators, not parameters. So they serve every space whose plans are stages on
processors; the space decides whether it contains a neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from search_spaces.core.graph import Graph
from search_spaces.core.plan import Stage

_Parts = tuple[Stage, ...]
_STEPS = (1, 1, 1, 2, 2, 3, 5, 8)


def neighbour(
    graph: Graph, processors: Sequence[str], stages: Sequence[Stage], rng: np.random.Generator
) -> _Parts | None:
    """Return the plan's stages after one random move, or None where that move is not possible.

    The stages may not be in dispatch order, or may depend on each other in a cycle;
    :func:`search_spaces.core.plan.canonical` sorts them, and refuses a cycle.
    """
    moves = (_shift, _shift, _shift, _move, _move, _split, _merge, _extract)
    return moves[int(rng.integers(len(moves)))](graph, processors, tuple(stages), rng)


def _shift(graph: Graph, processors: Sequence[str], stages: _Parts, rng: np.random.Generator) -> _Parts | None:  # noqa: ARG001
    """Move some operators over the border between two stages, one of which reads from the other."""
    pair = _neighbours(graph, stages, rng)
    if pair is None:
        return None
    here, there = pair
    size = _STEPS[int(rng.integers(len(_STEPS)))]
    if rng.random() < 0.5:
        moved, left = stages[here].operators[-size:], stages[here].operators[:-size]
        new = {here: left, there: tuple(sorted((*moved, *stages[there].operators)))}
    else:
        moved, left = stages[there].operators[:size], stages[there].operators[size:]
        new = {here: tuple(sorted((*stages[here].operators, *moved))), there: left}
    found = (Stage(new.get(i, s.operators), s.processor) for i, s in enumerate(stages))
    return tuple(s for s in found if s.operators)


def _move(graph: Graph, processors: Sequence[str], stages: _Parts, rng: np.random.Generator) -> _Parts | None:  # noqa: ARG001
    """Move a stage to another processor."""
    which = int(rng.integers(len(stages)))
    others = [p for p in processors if p != stages[which].processor]
    if not others:
        return None
    chosen = Stage(stages[which].operators, others[int(rng.integers(len(others)))])
    return (*stages[:which], chosen, *stages[which + 1 :])


def _split(graph: Graph, processors: Sequence[str], stages: _Parts, rng: np.random.Generator) -> _Parts | None:  # noqa: ARG001
    """Split a stage in two; one half goes to a random processor."""
    which = int(rng.integers(len(stages)))
    operators = stages[which].operators
    if len(operators) < 2:
        return None
    border = int(rng.integers(1, len(operators)))
    names = [stages[which].processor, processors[int(rng.integers(len(processors)))]]
    if rng.random() < 0.5:
        names.reverse()
    halves = (Stage(operators[:border], names[0]), Stage(operators[border:], names[1]))
    return (*stages[:which], *halves, *stages[which + 1 :])


def _extract(graph: Graph, processors: Sequence[str], stages: _Parts, rng: np.random.Generator) -> _Parts | None:  # noqa: ARG001
    """Move a run of operators out of a stage to a random processor; the rest stays one stage, or becomes two."""
    which = int(rng.integers(len(stages)))
    operators, name = stages[which].operators, stages[which].processor
    first, last = sorted(int(i) for i in rng.integers(0, len(operators) + 1, 2))
    taken = operators[first:last]
    left = [operators[:first] + operators[last:]] if rng.random() < 0.5 else [operators[:first], operators[last:]]
    new = [Stage(taken, processors[int(rng.integers(len(processors)))]), *(Stage(part, name) for part in left)]
    return (*stages[:which], *(s for s in new if s.operators), *stages[which + 1 :])


def _merge(graph: Graph, processors: Sequence[str], stages: _Parts, rng: np.random.Generator) -> _Parts | None:  # noqa: ARG001
    """Merge two stages, one of which reads from the other, on the processor of either."""
    pair = _neighbours(graph, stages, rng)
    if pair is None:
        return None
    here, there = pair
    name = stages[pair[int(rng.integers(2))]].processor
    joined = Stage(tuple(sorted((*stages[here].operators, *stages[there].operators))), name)
    return tuple(joined if i == here else s for i, s in enumerate(stages) if i != there)


def _neighbours(graph: Graph, stages: _Parts, rng: np.random.Generator) -> tuple[int, int] | None:
    """Return two stages that are adjacent in the order, or the second of which reads from the first."""
    if len(stages) < 2:
        return None
    there = int(rng.integers(1, len(stages)))
    if rng.random() < 0.5:
        return there - 1, there
    place = {o: i for i, stage in enumerate(stages) for o in stage.operators}
    reads = sorted({place[p] for o in stages[there].operators for p in graph.predecessors(o)} - {there})
    return (reads[int(rng.integers(len(reads)))], there) if reads else (there - 1, there)
