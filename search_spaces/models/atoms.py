"""Grouping of operators that must be placed together, and operators that only compute constants.

Operators are grouped where a plan that separates them would not compute what the model computes:

- they read or write one state: a variable tensor, a resource variable of one name, a hash table;
- one passes the other a tensor whose size is unknown before it runs: a string, a resource, an open dimension;
- one lies on a path between two of a group, so that no order of stages could run it elsewhere.

Operators that read only constants compute constants. Each stage that reads one gets a copy of them, so they are
neither placed nor transferred.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from search_spaces.core.graph import Graph, Operator
from search_spaces.models.dtypes import has_fixed_size
from search_spaces.models.source import ModelSource

GROUP = "GROUP"

# Operators whose result does not depend on their inputs alone, or must not be copied.
IMPURE = frozenset(
    """
    ASSIGN_VARIABLE CALL CALL_ONCE CUSTOM DELEGATE HASHTABLE HASHTABLE_FIND HASHTABLE_IMPORT HASHTABLE_LOOKUP
    HASHTABLE_SIZE IF MULTINOMIAL RANDOM_STANDARD_NORMAL RANDOM_UNIFORM READ_VARIABLE STABLEHLO_CASE
    STABLEHLO_CUSTOM_CALL STABLEHLO_RNG_BIT_GENERATOR STABLEHLO_WHILE VAR_HANDLE WHILE
    """.split()  # noqa: SIM905 - a list of quoted names is harder to read
)


def arrange(raw: Graph, states: Sequence[frozenset[str]], builtin: Collection[str], source: ModelSource) -> Graph:
    """Return the graph of the placed operators, with a source that maps each operator to those of the file.

    Args:
        raw: every operator of the main subgraph, in the file's order.
        states: for each of its operators, the resources that it, or a subgraph that it calls, refers to.
        builtin: the kinds that the schema defines.
    """
    recipes = _constant_operators(raw, states, builtin)
    placed = [i for i in range(len(raw.operators)) if i not in set(recipes.values())]
    atoms = _ordered(raw, _atoms(raw, placed, states))
    if not recipes and all(len(atom) == 1 for atom in atoms):
        return raw
    tensors = tuple(replace(t, constant=True) if i in recipes else t for i, t in enumerate(raw.tensors))
    operators = tuple(raw.operators[a[0]] if len(a) == 1 else _group(raw, a) for a in atoms)
    where = replace(source, operators=tuple(atoms), recipes=recipes)
    return Graph(raw.name, tensors, operators, raw.inputs, raw.outputs, where)


def _constant_operators(raw: Graph, states: Sequence[frozenset[str]], builtin: Collection[str]) -> dict[int, int]:
    """Return tensor → the operator that computes it, for all tensors that depend only on constants.

    An operator that computes an output of the model is placed, since some stage must write that.
    """
    found: dict[int, int] = {}
    wanted = set(raw.outputs)
    for index, operator in enumerate(raw.operators):
        reads = [t for t in operator.inputs if t != -1]
        if (
            reads
            and operator.kind in builtin
            and operator.kind not in IMPURE
            and not states[index]
            and all(raw.tensors[t].constant or t in found for t in reads)
            and wanted.isdisjoint(operator.outputs)
        ):
            found |= dict.fromkeys(operator.outputs, index)
    return found


def _atoms(raw: Graph, placed: Sequence[int], states: Sequence[frozenset[str]]) -> list[tuple[int, ...]]:
    """Return the groups of operators that are placed together, each ascending."""
    bound: dict[str | int, list[int]] = {}
    for index in placed:
        operator = raw.operators[index]
        bonds: set[str | int] = {*states[index]}
        bonds |= {t for t in (*operator.inputs, *operator.outputs) if t != -1 and _binds(raw, t)}
        for bond in bonds:
            bound.setdefault(bond, []).append(index)
    if all(len(members) == 1 for members in bound.values()):
        return [(index,) for index in placed]
    import networkx as nx
    from networkx.utils import UnionFind

    joined = UnionFind(placed)
    for members in bound.values():
        joined.union(*members)
    # Atoms that form a cycle become one: operators on a path between two of a group join it.
    quotient: nx.DiGraph[int] = nx.DiGraph()
    quotient.add_nodes_from(joined[index] for index in placed)
    known = set(placed)
    quotient.add_edges_from((joined[b], joined[i]) for i in placed for b in raw.predecessors(i) if b in known)
    part_of = {leader: n for n, part in enumerate(nx.strongly_connected_components(quotient)) for leader in part}
    atoms: dict[int, list[int]] = {}
    for index in placed:
        atoms.setdefault(part_of[joined[index]], []).append(index)
    return [tuple(atom) for atom in atoms.values()]


def _binds(raw: Graph, tensor: int) -> bool:
    """Return whether a tensor is a state, or cannot be transferred since its size is unknown."""
    found = raw.tensors[tensor]
    unsized = not has_fixed_size(found.dtype) or any(d < 0 for d in found.shape)
    return found.variable or (tensor in raw.producer and unsized)


def _ordered(raw: Graph, atoms: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the atoms in the topological order that is nearest to the file's."""
    if all(len(atom) == 1 for atom in atoms):
        return sorted(atoms)
    import networkx as nx

    place = {operator: number for number, atom in enumerate(atoms) for operator in atom}
    edges = ((place[b], n) for n, a in enumerate(atoms) for o in a for b in raw.predecessors(o) if b in place)
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(range(len(atoms)))
    order.add_edges_from((one, other) for one, other in edges if one != other)
    return [atoms[n] for n in nx.lexicographical_topological_sort(order, key=lambda n: atoms[n][0])]


def _group(raw: Graph, atom: Sequence[int]) -> Operator:
    inside = set(atom)
    parts = tuple(raw.operators[i] for i in atom)
    written = dict.fromkeys(t for part in parts for t in part.outputs)
    read = dict.fromkeys(t for part in parts for t in part.inputs if t != -1 and t not in written)
    outputs = set(raw.outputs)
    leaving = [t for t in written if t in outputs or any(c not in inside for c in raw.consumers.get(t, ()))]
    return Operator(GROUP, tuple(read), tuple(leaving), parts=parts)
