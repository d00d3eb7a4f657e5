"""Branches and parallel-branch groups: laws on drawn graphs, then the models of seed 003 and blocks of its peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.core.graph import Graph, Operator
from search_spaces.models.zoo import draft
from search_spaces.spaces.branches import Branch, BranchGroup, branch_groups, walk
from tests.support.strategies import chain_graph, followers, graphs, tensor, vgg16_graph


def network(*edges: tuple[str, str]) -> Graph:
    """Return the graph of named operators, in the order of their first appearance.

    ``in`` and ``out`` stand for the caller; so does what is missing where an operator reads or feeds no other.
    """
    names = [n for n in dict.fromkeys(n for edge in edges for n in edge) if n not in {"in", "out"}]
    index = {name: i + 1 for i, name in enumerate(names)} | {"in": 0}
    reads: dict[str, list[int]] = {name: [] for name in names}
    outputs = {index[name] for name in names} - {index[a] for a, b in edges if b != "out"}
    for a, b in edges:
        if b == "out":
            outputs.add(index[a])
        else:
            reads[b].append(index[a])
    operators = tuple(Operator("OP", tuple(reads[name]) or (0,), (index[name],)) for name in names)
    return Graph("drawn", tuple(tensor(4, name=n) for n in ("in", *names)), operators, (0,), tuple(sorted(outputs)))


def group(entry: int | None, exit_: int | None, *branches: Sequence[int]) -> BranchGroup:
    return BranchGroup(entry, exit_, tuple(Branch(tuple(branch)) for branch in branches))


# A recipe is what a run is made of: "." is an operator, a list of recipes is a group. `build` makes the graph of a
# recipe and the groups that must be found in it.
Recipe = list["str | list[Recipe]"]


@cache
def recipes() -> st.SearchStrategy[Recipe]:
    """Runs with an operator of their own: without one, a group in a group would be one group."""

    def extended(inner: st.SearchStrategy[Recipe]) -> st.SearchStrategy[Recipe]:
        parallel = st.lists(inner, min_size=2, max_size=3)
        return st.one_of(
            st.tuples(st.just("."), parallel).map(list),
            st.tuples(parallel, st.just(".")).map(list),
            st.tuples(parallel, st.just("."), parallel).map(list),
            st.tuples(st.just("."), parallel, st.just("."), parallel, st.just(".")).map(list),
        )

    return st.recursive(st.integers(1, 3).map(lambda n: ["."] * n), extended, max_leaves=8)


class Maker:
    """Makes a graph from a recipe, with a shortcut past the operator runs that the recipe names."""

    def __init__(self, *, shortcuts: bool) -> None:
        self.edges: list[tuple[int, int]] = []
        self.count = 0
        self.shortcuts = shortcuts

    def node(self, before: Sequence[int]) -> int:
        self.edges += [(b, self.count) for b in before]
        self.count += 1
        return self.count - 1

    def run(self, recipe: Recipe, entry: int | None) -> tuple[Branch, list[int]]:
        """Add a run after ``entry``; return the branch and the operators that hand on to what follows."""
        last: list[int] = [] if entry is None else [entry]
        operators: list[int] = []
        groups: list[tuple[int | None, list[Branch]]] = []
        exits: list[int | None] = []
        for part in recipe:
            if isinstance(part, str):
                node = self.node(last)
                operators.append(node)
                if groups and len(exits) < len(groups):
                    exits.append(node)
                last = [node]
                continue
            before = last[0] if last else None
            found = [self.run(branch, before) for branch in part]
            groups.append((before, [branch for branch, _ in found]))
            last = [node for _, ends in found for node in ends]
            if self.shortcuts and before is not None:
                last = [*last, before]
        made = [BranchGroup(e, x, tuple(b)) for (e, b), x in zip(groups, [*exits, None], strict=False)]
        return Branch(tuple(operators), tuple(made)), last


def closed(branch: Branch, exit_: int | None) -> Branch:
    """Return the branch with the exit put into the group at its end, and into those at the end of its branches."""
    groups = []
    for found in branch.groups:
        end = exit_ if found.exit is None else found.exit
        groups.append(BranchGroup(found.entry, end, tuple(closed(b, end) for b in found.branches)))
    return Branch(branch.operators, tuple(groups))


def built(recipe: Recipe, *, shortcuts: bool = False) -> tuple[Graph, tuple[BranchGroup, ...]]:
    maker = Maker(shortcuts=shortcuts)
    branch, _ = maker.run(recipe, None)
    reads: dict[int, list[int]] = {node: [] for node in range(maker.count)}
    for a, b in maker.edges:
        reads[b].append(a + 1)
    operators = tuple(Operator("OP", tuple(reads[n]) or (0,), (n + 1,)) for n in reads)
    unread = set(range(1, maker.count + 1)) - {i for o in operators for i in o.inputs}
    tensors = tuple(tensor(4) for _ in range(maker.count + 1))
    return Graph("recipe", tensors, operators, (0,), tuple(sorted(unread))), closed(branch, None).groups


@given(recipes(), st.booleans())
def test_what_was_built_of_runs_and_groups_is_found(recipe: Recipe, shortcuts: bool) -> None:
    graph, expected = built([".", *recipe, "."] if shortcuts else recipe, shortcuts=shortcuts)
    assert branch_groups(graph) == expected


@given(graphs(max_operators=12))
def test_branches_have_one_entry_one_exit_and_no_path_between_them(graph: Graph) -> None:
    edges = followers(graph)
    for found in walk(branch_groups(graph)):
        members = [set(branch.members()) for branch in found.branches]
        assert len(members) >= 2
        for index, inside in enumerate(members):
            assert inside
            others = set().union(*members[:index], *members[index + 1 :])
            assert not others & inside
            assert not others & set().union(*(nx.descendants(edges, o) for o in inside))
            before = {p for o in inside for p in edges.predecessors(o)} - inside
            after = {s for o in inside for s in edges.successors(o)} - inside
            assert before == {found.entry} - {None}
            assert after == {found.exit} - {None}


@given(graphs(max_operators=12))
def test_a_branch_hands_on_from_part_to_part(graph: Graph) -> None:
    edges = followers(graph)
    for found in walk(branch_groups(graph)):
        for branch in found.branches:
            assert branch.operators == tuple(sorted(branch.operators))
            ends = [(g.entry, g.exit) for g in branch.groups]
            for a, b in ends:  # an inner group lies between operators of the run, or at its ends
                assert a in {*branch.operators, found.entry}
                assert b in {*branch.operators, found.exit}
            run = edges.subgraph(branch.members())
            path = nx.topological_sort(run)
            assert [o for o in path if o in branch.operators] == list(branch.operators)
            assert not branch.members() or nx.is_weakly_connected(
                edges.subgraph([*branch.members(), *(n for n in (found.entry, found.exit) if n is not None)])
            )


@given(graphs(max_operators=12))
def test_every_set_of_plain_runs_between_two_operators_is_in_a_group(graph: Graph) -> None:
    """The seed's definition word by word, found by following edges."""
    edges = followers(graph)
    runs: dict[tuple[int | None, int | None], list[tuple[int, ...]]] = {}
    plain = {n for n in edges if edges.in_degree(n) <= 1 and edges.out_degree(n) <= 1}
    for run in nx.weakly_connected_components(edges.subgraph(plain)):
        path = tuple(sorted(run))
        entry = next(iter(edges.predecessors(path[0])), None)
        end = next(iter(edges.successors(path[-1])), None)
        runs.setdefault((entry, end), []).append(path)
    found = {(g.entry, g.exit): [b.members() for b in g.branches] for g in walk(branch_groups(graph))}
    for ends, paths in runs.items():
        if len(paths) > 1:
            assert set(paths) <= set(found[ends])


# Counted by hand in the papers' figures and tables: branches of the outermost groups → how many such groups, and groups
# within those. ResNets: projected shortcuts. Inception v3: 3 blocks A, 4 C and 2 E of four branches, B and D of three;
# the two blocks E split 3x3 in two branches each.
@pytest.mark.parametrize(
    ("name", "outer", "within"),
    [
        ("squeezenet1_0", {2: 8}, {}),
        ("googlenet", {4: 9}, {}),
        ("inception_v3", {4: 9, 3: 2}, {2: 4}),
        ("resnet18", {2: 3}, {}),
        ("resnet50", {2: 4}, {}),
        ("resnet152", {2: 4}, {}),
        ("regnet_y_32gf", {2: 4}, {}),
        ("densenet121", {}, {}),
        ("mobilenet_v2", {}, {}),
    ],
)
def test_models_of_the_seeds(name: str, outer: dict[int, int], within: dict[int, int]) -> None:
    groups = branch_groups(draft(name).graph())
    assert Counter(len(g.branches) for g in groups) == Counter(outer)
    assert Counter(len(g.branches) for g in walk(groups)) == Counter(outer) + Counter(within)


def test_a_chain_has_none(mobilenet: Graph) -> None:
    assert branch_groups(mobilenet) == branch_groups(vgg16_graph()) == branch_groups(chain_graph(3)) == ()


def test_a_plain_shortcut_is_no_branch_and_a_projected_one_is() -> None:
    plain = network(("in", "a"), ("a", "b"), ("b", "c"), ("a", "c"), ("c", "out"))
    assert branch_groups(plain) == ()
    projected = network(("in", "a"), ("a", "b"), ("b", "c"), ("a", "p"), ("c", "sum"), ("p", "sum"), ("sum", "out"))
    assert branch_groups(projected) == (group(0, 4, (1, 2), (3,)),)


def test_branches_share_a_group_though_their_entry_feeds_others_too() -> None:
    graph = network(("x", "a"), ("x", "b"), ("x", "far"), ("a", "sum"), ("b", "sum"), ("sum", "y"), ("y", "z"),
                    ("far", "y"), ("far", "z"))  # fmt: skip
    assert branch_groups(graph) == (group(0, 4, (1,), (2,)),)


def test_layers_that_read_all_earlier_ones_are_no_branches() -> None:
    edges = [(f"l{i}", f"l{j}") for j in range(6) for i in range(j)]
    assert branch_groups(network(*edges)) == ()


def test_branches_between_the_models_inputs_and_outputs() -> None:
    heads = network(("in", "x"), ("x", "a"), ("x", "b"), ("a", "out"), ("b", "out"))
    assert branch_groups(heads) == (group(0, None, (1,), (2,)),)
    towers = network(("in", "a"), ("in", "b"), ("a", "sum"), ("b", "sum"), ("sum", "out"))
    assert branch_groups(towers) == (group(None, 2, (0,), (1,)),)
    models = network(("in", "a"), ("a", "b"), ("in", "c"), ("b", "out"), ("c", "out"))
    assert branch_groups(models) == (group(None, None, (0, 1), (2,)),)


def test_handing_an_activation_to_the_caller_does_not_end_its_branch() -> None:
    graph = network(("in", "x"), ("x", "a"), ("x", "b"), ("a", "sum"), ("b", "sum"), ("a", "out"), ("sum", "out"))
    assert branch_groups(graph) == (group(0, 3, (1,), (2,)),)


def test_groups_within_groups_to_any_depth() -> None:
    edges: list[tuple[str, str]] = []
    for level in range(2000):
        edges += [(f"in{level}", f"in{level + 1}"), (f"in{level}", f"side{level}")]
    edges += [("in2000", "out2000")]
    for level in range(1999, -1, -1):
        edges += [(f"out{level + 1}", f"out{level}"), (f"side{level}", f"out{level}")]
    groups = branch_groups(network(*edges))
    assert len(groups) == 1
    assert sum(1 for _ in walk(groups)) == 2000
    assert len(groups[0].members()) == 3 * 2000
