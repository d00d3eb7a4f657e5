import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution

from search_spaces.core.errors import PlanError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage, canonical
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.chain import ChainSpace, chain_plan
from tests.support.sentences import fails
from tests.support.strategies import chain_graph, chains, graphs, parameters, platforms


@st.composite
def spaces(draw: st.DrawFn, max_operators: int = 6) -> tuple[ChainSpace, Graph, Platform, int]:
    graph, platform = draw(graphs(max_operators=max_operators)), draw(platforms())
    max_stages = draw(st.integers(1, min(3, len(graph.operators))))
    return ChainSpace(graph, platform, max_stages), graph, platform, max_stages


def _brute_force(graph: Graph, platform: Platform, max_stages: int) -> set[Plan]:
    names = [p.name for p in platform.processors]
    return {
        canonical(chain_plan(graph, cuts, word), graph, platform)
        for parts in range(1, max_stages + 1)
        for cuts in itertools.combinations(range(1, len(graph.operators)), parts - 1)
        for word in itertools.product(names, repeat=parts)
    }


@given(spaces(), st.data())
def test_decode_is_total_and_canonical(drawn: tuple[ChainSpace, Graph, Platform, int], data: st.DataObject) -> None:
    space, graph, platform, _ = drawn
    params = data.draw(parameters(space.distributions()))
    plan = space.decode(params)
    plan.validate(graph, platform)
    assert len(plan.stages) == params["stages"]
    assert canonical(plan, graph, platform) == plan
    assert space.decode(params) == plan


@given(spaces(), st.data())
def test_encode_goes_back(drawn: tuple[ChainSpace, Graph, Platform, int], data: st.DataObject) -> None:
    space, *_ = drawn
    plan = space.plan_at(data.draw(st.integers(0, space.cardinality() - 1)))
    params = space.encode(plan)
    assert space.decode(params) == plan
    assert params.keys() == space.distributions().keys()
    assert all(d._contains(d.to_internal_repr(params[name])) for name, d in space.distributions().items())


@given(spaces(), st.data())
def test_any_chain_is_encoded_as_its_canonical_plan(
    drawn: tuple[ChainSpace, Graph, Platform, int], data: st.DataObject
) -> None:
    space, graph, platform, max_stages = drawn
    plan = data.draw(chains(graph, platform))
    if len(plan.stages) <= max_stages:
        assert space.decode(space.encode(plan)) == canonical(plan, graph, platform)
        return
    with pytest.raises(PlanError):
        space.encode(plan)


@settings(max_examples=40)
@given(spaces(max_operators=5))
def test_plan_at_numbers_exactly_the_plans_there_are(drawn: tuple[ChainSpace, Graph, Platform, int]) -> None:
    space, graph, platform, max_stages = drawn
    every = _brute_force(graph, platform, max_stages)
    numbered = [space.plan_at(i) for i in range(space.cardinality())]
    assert len(numbered) == len(every)
    assert set(numbered) == every
    assert len({plan.digest for plan in numbered}) == len(every)
    with pytest.raises(IndexError):
        space.plan_at(len(every))
    with pytest.raises(IndexError):
        space.plan_at(-1)


def test_vgg16_on_three_processors_has_5313_chains_of_up_to_three_parts() -> None:
    platform = Platform("p", tuple(Processor(n, "cpu", {}, n) for n in ("a", "b", "c")))
    sizes = [ChainSpace(chain_graph(22), platform, k).cardinality() for k in (1, 2, 3)]
    assert sizes == [3, 3 + 21 * 9, 3 + 21 * 9 + 210 * 27]
    assert ChainSpace(chain_graph(21), platform, 3).cardinality() == 5313


def test_alike_processors_collapse() -> None:
    platform = Platform("p", tuple(Processor(f"c{i}", "cpu", {}, "cpu") for i in range(8)))
    space = ChainSpace(chain_graph(9), platform, 4)
    assert space.distributions()["processor_1"] == CategoricalDistribution(["c0", "c1", "c2", "c3"])
    assert space.cardinality() == 1 + 8 * 2 + 28 * 5 + 56 * 15  # Bell numbers


def test_the_space_says_what_it_cannot_be() -> None:
    platform = Platform("p", (Processor("a", "cpu", {}, "a"),))
    with fails(UsageError):
        ChainSpace(chain_graph(2), platform, 0)
    with fails(UsageError):
        ChainSpace(chain_graph(2), platform, 3)


def test_encode_refuses_what_is_not_in_the_space() -> None:
    graph, platform = chain_graph(4), Platform("p", (Processor("a", "cpu", {}, "a"),))
    space = ChainSpace(graph, platform, 2)
    with fails(PlanError):
        space.encode(Plan(graph.digest, (Stage((0, 1), "a"),)))
    with fails(PlanError):
        space.encode(chain_plan(graph, [], ["b"]))
    with fails(PlanError):
        space.encode(chain_plan(chain_graph(5), [], ["a"]))
