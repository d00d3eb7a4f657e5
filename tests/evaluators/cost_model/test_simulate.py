from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.contract import check_timeline, example_graph
from evaluators.cost_model.features import KERNELS
from evaluators.cost_model.kernels import KernelModel
from evaluators.cost_model.plans import PlanSimulator, all_chains, part_costs
from evaluators.cost_model.profile import CostProfile, LinkProfile, ProcessorProfile
from evaluators.cost_model.transfers import Prices, prices
from evaluators.cost_model.transfers import one_core as driven_alike
from evaluators.objectives import peak_nbytes
from evaluators.schedule import Law, Rounds, Task, busiest_s, run_tasks, stream_period_s
from search_spaces.core.errors import ProfileError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import canonical
from search_spaces.core.platform import Platform, Processor
from search_spaces.models.zoo.builder import Builder
from search_spaces.spaces.chain import ChainSpace, chain_plan
from tests.support.sentences import fails
from tests.support.strategies import chain_graph, chains, graphs, one_core, placements, platforms, shared_platforms

FREE = Law(((), ()), (1, 1))
TURNS = Law(((1,), (0,)), (1, 1))


@st.composite
def priced(draw: st.DrawFn, graph: Graph, platform: Platform, *, contention: bool = True) -> Prices:
    """Draw prices that are not negative; alike processors may differ, which the simulator does not mind."""
    processors, count = len(platform.processors), len(graph.operators)

    def table(*shape: int, low: float = 0.0, high: float = 1.0) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        size = math.prod(shape)
        values = draw(st.lists(st.floats(low, high, allow_subnormal=False), min_size=size, max_size=size))
        return np.array(values).reshape(shape)

    slow = table(2, processors, processors, low=1.0, high=2.0) if contention else np.ones((2, processors, processors))
    latency_s = table(processors, processors)
    # A processor sleeps whenever one that excludes it transfers.
    beside = np.array([[not a.excludes(b) for b in platform.processors] for a in platform.processors])
    return Prices(
        operator_s=table(processors, count, low=0.01),
        sigma=table(processors, count),
        traffic=table(count),
        invocation_s=table(processors),
        io_s_per_byte=table(processors, high=1e-2),
        latency_s=latency_s,
        byte_s=table(processors, processors, high=1e-2),
        slow_compute=slow[0],
        slow_memory=slow[1],
        capacity_bytes=table(processors, high=20.0),
        pressure_per_byte=table(processors, high=1e-2),
        power_w=table(processors, low=0.5, high=5.0),
        cold_s=table(processors, processors) if draw(st.booleans()) else None,
        asleep_s=latency_s + beside * table(processors, processors) if draw(st.booleans()) else None,
    )


@st.composite
def simulated(draw: st.DrawFn, *, contention: bool = True) -> PlanSimulator:
    graph = draw(graphs())
    platform = draw(st.one_of(platforms(), shared_platforms()))
    return PlanSimulator(graph, platform, draw(priced(graph, platform, contention=contention)))


@settings(max_examples=40)
@given(st.data())
def test_timelines_are_lawful(data: st.DataObject) -> None:
    simulator = data.draw(simulated())
    plan = canonical(data.draw(placements(simulator.graph, simulator.platform)), simulator.graph, simulator.platform)
    check_timeline(simulator.run(plan), simulator.graph, plan, simulator.platform)


@settings(max_examples=40)
@given(st.data())
def test_one_stage_takes_what_its_operators_take(data: st.DataObject) -> None:
    simulator = data.draw(simulated())
    prices = replace(
        simulator.prices,
        io_s_per_byte=np.zeros_like(simulator.prices.io_s_per_byte),
        capacity_bytes=np.zeros_like(simulator.prices.capacity_bytes),
    )
    alone = PlanSimulator(simulator.graph, simulator.platform, prices)
    plan = chain_plan(simulator.graph, (), [simulator.platform.processors[0].name])
    expected = float(prices.operator_s[0].sum() + prices.invocation_s[0])
    assert alone.latency_s(plan) == pytest.approx(expected)


@settings(max_examples=40)
@given(st.data())
def test_it_is_monotone_in_every_price(data: st.DataObject) -> None:
    simulator = data.draw(simulated(contention=False))
    plan = canonical(data.draw(placements(simulator.graph, simulator.platform)), simulator.graph, simulator.platform)
    names = ["operator_s", "invocation_s", "io_s_per_byte", "latency_s", "byte_s", "cold_s", "asleep_s"]
    name = data.draw(st.sampled_from([name for name in names if getattr(simulator.prices, name) is not None]))
    before = getattr(simulator.prices, name)
    factor = data.draw(st.floats(1.0, 3.0))
    changed = {name: before * factor}
    if name == "latency_s" and simulator.prices.asleep_s is not None:
        changed["asleep_s"] = np.maximum(simulator.prices.asleep_s, changed[name])
    dearer = PlanSimulator(simulator.graph, simulator.platform, replace(simulator.prices, **changed))
    assert dearer.latency_s(plan) >= simulator.latency_s(plan) * (1 - 1e-9)


@settings(max_examples=40)
@given(st.data())
def test_contention_never_makes_a_plan_faster(data: st.DataObject) -> None:
    simulator = data.draw(simulated())
    ones = np.ones_like(simulator.prices.slow_compute)
    quiet = PlanSimulator(
        simulator.graph, simulator.platform, replace(simulator.prices, slow_compute=ones, slow_memory=ones)
    )
    plan = data.draw(chains(simulator.graph, simulator.platform))
    if len(plan.stages) == 1:
        assert simulator.latency_s(plan) == pytest.approx(quiet.latency_s(plan))
    assert simulator.latency_s(plan) <= 4.0 ** len(simulator.platform.processors) * quiet.latency_s(plan) + 1e-9


@settings(max_examples=40)
@given(st.data())
def test_the_event_driven_law_is_the_plain_one_where_nothing_slows(data: st.DataObject) -> None:
    simulator = data.draw(simulated(contention=False))
    plan = data.draw(chains(simulator.graph, simulator.platform))
    tasks = simulator.tasks(plan)
    processors = len(simulator.platform.processors)
    slowed = [replace(task, slowed=(1.0,) * processors) for task in tasks]
    for plain, event in zip(run_tasks(tasks, simulator.law), run_tasks(slowed, simulator.law), strict=True):
        assert event == pytest.approx(plain, abs=1e-9)


@settings(max_examples=40)
@given(st.data())
def test_a_stream_is_bounded_by_its_busiest_processor_and_by_one_inference(data: st.DataObject) -> None:
    simulator = data.draw(simulated(contention=False))
    plan = data.draw(chains(simulator.graph, simulator.platform))
    tasks = simulator.tasks(plan)
    busy: dict[int, float] = {}
    for task in tasks:
        busy[task.processor] = busy.get(task.processor, 0.0) + task.work_s
    period = simulator.stream_period_s(plan)
    assert period >= max(busy.values()) * (1 - 1e-6)
    assert period <= (simulator.latency_s(plan) + sum(d for t in tasks for _, d in t.needs)) * (1 + 1e-6)


def test_processors_that_run_at_once_slow_each_other_for_as_long_as_they_do() -> None:
    tasks = [Task(0, 1.0, slowed=(1.0, 1.5)), Task(1, 2.0, slowed=(2.0, 1.0))]
    first, second = run_tasks(tasks, FREE)
    assert first == pytest.approx((0.0, 1.5))  # 1.5 times as long beside the other
    assert second == pytest.approx((0.0, 1.5 + 1.25))  # 0.75 done by then


def test_processors_that_exclude_each_other_take_turns_in_the_order_of_the_plan() -> None:
    tasks = [Task(0, 1.0), Task(1, 1.0), Task(0, 1.0)]
    assert run_tasks(tasks, TURNS) == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]


def test_a_processor_with_two_slots_runs_two_stages() -> None:
    law = Law(((),), (2,))
    tasks = [Task(0, 1.0), Task(0, 2.0), Task(0, 1.0)]
    assert run_tasks(tasks, law) == [(0.0, 1.0), (0.0, 2.0), (1.0, 2.0)]


def test_a_processor_with_two_slots_is_half_as_busy() -> None:
    law = Law(((),), (2,))
    tasks = [Task(0, 1.0), Task(0, 1.0)]
    assert busiest_s(tasks, law) == 1.0
    assert stream_period_s(tasks, law, Rounds((0, 0))) == pytest.approx(1.0)
    assert busiest_s(tasks, Law(((),), (1,))) == 2.0


@pytest.mark.parametrize("nothing", [0, None, "0-3", "0", {}, ()])
def test_only_a_list_of_cores_says_what_a_processor_is_driven_from(nothing: object) -> None:
    listed, same, other = (Processor("a", "cpu", {}, "a", {"cores": cores}) for cores in ([0, 1], (0,), [1]))
    strange = Processor("b", "cpu", {}, "b", {"cores": nothing})
    assert driven_alike(listed, same)
    assert not driven_alike(listed, other)
    assert not driven_alike(strange, listed)
    assert not driven_alike(listed, strange)
    assert not driven_alike(strange, strange)
    assert not driven_alike(Processor("c", "cpu", {}, "c"), listed)


def test_a_pipeline_of_two_processors_gives_a_result_per_slower_stage() -> None:
    tasks = [Task(0, 1.0), Task(1, 2.0, ((0, 0.5),))]
    assert stream_period_s(tasks, FREE, Rounds((0, 1))) == pytest.approx(2.0)
    assert stream_period_s(tasks, TURNS, Rounds((0, 0))) == pytest.approx(3.5)  # handing over takes the turn's time


def test_a_stage_that_its_processor_refuses_is_reported() -> None:
    with fails(UnavailableError):
        run_tasks([Task(0, math.inf)], FREE)


def test_prices_that_are_no_prices_are_refused() -> None:
    good = PlanSimulatorParts.prices()
    with fails(ProfileError):
        replace(good, operator_s=np.full_like(good.operator_s, np.nan))
    with fails(ProfileError):
        replace(good, latency_s=good.latency_s - 1.0)
    with fails(ProfileError):
        replace(good, asleep_s=good.latency_s - 1.0)


def cores() -> Platform:
    """Return two cores, and both of them as one processor that is driven from the first."""
    return Platform(
        "cores",
        (
            Processor("both", "cpu", {"core0": 1.0, "core1": 1.0}, "both", options={"cores": [0, 1]}),
            *(Processor(f"core{i}", "cpu", {f"core{i}": 1.0}, "core", options={"cores": [i]}) for i in (0, 1)),
        ),
    )


def test_handing_over_depends_on_the_core_that_a_processor_is_driven_from_and_on_whether_it_sleeps() -> None:
    platform, graph = cores(), example_graph()
    kernels = {name: KernelModel({"macs": 1e-12, "read": 1e-12, "weight": 1e-12, "written": 1e-12}) for name in KERNELS}
    profile = CostProfile(
        "cores",
        {"both": ProcessorProfile(kernels), "core": ProcessorProfile(kernels)},
        (
            LinkProfile("both", "core", 4e-3, one_core=True),
            LinkProfile("core", "both", 5e-3, one_core=True),
            LinkProfile("both", "core", 6e-3, one_core=False),
            LinkProfile("core", "both", 7e-3, one_core=False),
            LinkProfile("core", "core", 1e-3),
        ),
    )
    simulator = PlanSimulator(graph, platform, prices(profile, graph, platform))

    def gaps_ms(*processors: str) -> list[float]:
        cuts = range(2, 2 * len(processors), 2)
        events = sorted(simulator.run(chain_plan(graph, cuts, list(processors))).events, key=lambda e: e.stage)
        return [round((b.start_s - a.end_s) * 1e3, 3) for a, b in pairwise(events)]

    assert gaps_ms("both", "core0") == [4.0]
    assert gaps_ms("both", "core1", "both") == [6.0, 7.0]
    assert gaps_ms("core0", "core1", "core0") == [1.0, 1.0]
    # Polling would take the core from the stage on both of them, so the second core sleeps and is woken from afar.
    assert gaps_ms("both", "core0", "core1") == [4.0, 6.0]


def test_a_tensor_from_another_cores_cache_costs_up_to_a_limit() -> None:
    platform = Platform("two", tuple(Processor(name, "cpu", {name: 1.0}, name) for name in "ab"))

    def handing_s(side: int) -> float:
        net = Builder("maps")
        x = net.input((1, side, side, 64))
        graph = net.finish(net.unary("LOGISTIC", net.unary("LOGISTIC", x, "first"), "second")).graph()
        table = replace(PlanSimulatorParts.prices(2), cold_s=np.full((2, 2), 1.0))
        simulator = PlanSimulator(graph, platform, table)
        plan = chain_plan(graph, (1,), ["a", "b"])
        return simulator.latency_s(plan) - 3.0

    assert handing_s(16) == pytest.approx(0.25)
    assert handing_s(32) == handing_s(64) == pytest.approx(1.0)


def test_the_memory_of_a_plan_and_how_sure_its_latency_is() -> None:
    simulator = PlanSimulatorParts.simulator()
    graph = simulator.graph
    plan = chain_plan(graph, (4,), ["a", "b"])
    one = graph.tensors[0].nbytes
    assert peak_nbytes(graph, plan)["a"] == (0, 3 * one)  # the branch is kept, one is read and one written
    assert peak_nbytes(graph, chain_plan(graph, (), ["a"])) == {"a": (0, 3 * one)}
    assert 0 < float(np.linalg.norm(simulator.errors(plan))) < 0.1


class PlanSimulatorParts:
    """Two processors that do not exclude each other, ``a`` twice as fast as ``b``."""

    @staticmethod
    def prices(count: int = 8) -> Prices:
        two, pairs = np.zeros(2), np.zeros((2, 2))
        return Prices(
            operator_s=np.array([[1.0] * count, [2.0] * count]),
            sigma=np.full((2, count), 0.1),
            traffic=np.zeros(count),
            invocation_s=two,
            io_s_per_byte=two,
            latency_s=pairs,
            byte_s=pairs,
            slow_compute=pairs + 1,
            slow_memory=pairs + 1,
            capacity_bytes=two,
            pressure_per_byte=two,
            power_w=np.array([5.0, 3.0]),
        )

    @classmethod
    def simulator(cls) -> PlanSimulator:
        processors = tuple(Processor(name, "cpu", {name: 1.0}, name) for name in "ab")
        return PlanSimulator(example_graph(), Platform("two", processors), cls.prices())


def test_a_padding_is_free_unless_it_is_cut_from_what_it_pads() -> None:
    net = Builder("padded")
    x = net.pad(net.input((1, 8, 8, 4)), ((0, 0), (1, 1), (1, 1), (0, 0)), "pad")
    graph = net.finish(net.conv(x, 4, 3, "conv", padding="VALID")).graph()
    kernels = {"copy": KernelModel({"launch": 1e-6}), "conv": KernelModel({"launch": 1e-4})}
    platform = Platform("p", (one_core(0), one_core(1)))
    profile = CostProfile("p", {platform.processors[0].like: ProcessorProfile(kernels, invocation_s=1e-7)})
    simulator = PlanSimulator(graph, platform, prices(profile, graph, platform))
    processor = platform.processors[0].name
    assert simulator.latency_s(chain_plan(graph, (), [processor])) == pytest.approx(1.001e-4)
    assert simulator.latency_s(chain_plan(graph, (1,), [processor, processor])) == pytest.approx(1.012e-4)


def test_a_sum_is_free_where_it_is_fused_unless_it_is_cut_from_what_it_adds() -> None:
    net = Builder("sum")
    shortcut = net.conv(net.input((1, 8, 8, 4)), 4, 3, "first")
    y = net.add(net.conv(shortcut, 4, 3, "second"), shortcut, "add")
    graph = net.finish(net.unary("LOGISTIC", y, "gate")).graph()
    kernels = {"elementwise": KernelModel({"launch": 1e-6}), "conv": KernelModel({"launch": 1e-4})}
    platform = Platform("p", (one_core(0), one_core(1)))
    like, name = platform.processors[0].like, platform.processors[0].name

    def taken_s(*cuts: int, fuses: bool) -> float:
        profile = CostProfile("p", {like: ProcessorProfile(kernels, fuses=fuses)})
        simulator = PlanSimulator(graph, platform, prices(profile, graph, platform))
        plan = chain_plan(graph, cuts, [name] * (len(cuts) + 1))
        table, borders = part_costs(simulator), (0, *cuts, 4)
        parts = (table.operator_s[0, a:b].sum() + table.beyond_s[0, a, b] for a, b in pairwise(borders))
        assert sum(parts) == pytest.approx(simulator.latency_s(plan))
        return simulator.latency_s(plan)

    assert taken_s(fuses=False) == pytest.approx(2.02e-4)
    assert taken_s(fuses=True) == pytest.approx(2e-4)
    assert taken_s(1, fuses=True) == pytest.approx(2.01e-4)  # the gate is fused with the sum then
    assert taken_s(2, fuses=True) == pytest.approx(2.01e-4)
    assert taken_s(3, fuses=True) == pytest.approx(2.01e-4)


def test_what_plans_share_does_not_make_it_uncertain_which_is_faster() -> None:
    graph, platform = chain_graph(6), Platform("p", (one_core(0), one_core(1)))
    kernels = {kernel: KernelModel({"launch": 1e-4}, sigma=0.3) for kernel in KERNELS}
    profile = CostProfile("p", {platform.processors[0].like: ProcessorProfile(kernels, invocation_s=1e-6)})
    simulator = PlanSimulator(graph, platform, prices(profile, graph, platform))
    whole, cut = (simulator.errors(chain_plan(graph, at, ["cpu0"] * (len(at) + 1))) for at in ((), (3,)))
    assert np.linalg.norm(whole) > 0.1
    assert np.linalg.norm(whole - cut) < 0.01


def test_all_chains_are_the_points_of_the_chain_space() -> None:
    platform = Platform("p", (one_core(0), one_core(1), Processor("gpu", "gpu", {"gpu": 1.0}, "gpu")))
    graph, names = chain_graph(6), [p.name for p in platform.processors]
    space = ChainSpace(graph, platform, 3)
    ours = {
        chain_plan(graph, [int(c) for c in cut], [names[i] for i in processor]).digest
        for cuts, processors in all_chains(6, platform, 3)
        for cut, processor in zip(cuts, processors, strict=True)
    }
    assert ours == {space.plan_at(i).digest for i in range(space.cardinality())}
