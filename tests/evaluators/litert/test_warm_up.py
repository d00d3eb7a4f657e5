"""An adapter that fell asleep is woken before it is measured, and one that is awake is not kept waiting."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.litert import candidate as waking
from search_spaces.core.platform import Platform, Processor, with_cpu

pytestmark = pytest.mark.timing


class Sleeper:
    """An adapter that is slow until it has been busy for a time, on a clock of its own."""

    def __init__(self, latency_s: float, asleep: float, ramp_s: float) -> None:
        self.now_s = 100.0
        self.busy_s = 0.0
        self.latency_s, self.asleep, self.ramp_s = latency_s, asleep, ramp_s

    def run(self) -> float:
        taken_s = self.latency_s * (1.0 if self.awake else self.asleep)
        self.busy_s += taken_s
        self.now_s += taken_s
        return taken_s

    @property
    def awake(self) -> bool:
        return self.busy_s >= self.ramp_s

    def wake(self) -> int:
        return waking.wake(["it"], self.run, lambda: self.now_s)


@pytest.fixture(autouse=True)
def nothing_ran_yet() -> None:
    waking._busy_until_s.clear()


@given(st.floats(1e-4, 5.0), st.floats(1.1, 5.0), st.floats(0.0, 0.35))
def test_it_is_awake_afterwards(latency_s: float, asleep: float, ramp_s: float) -> None:
    waking._busy_until_s.clear()
    it = Sleeper(latency_s, asleep, ramp_s)
    assert it.wake() >= 1
    assert it.awake
    assert it.now_s - 100.0 <= waking.MOST_S + 0.1 + latency_s * asleep


@given(st.floats(0.0, 1.0))
def test_only_who_idled_is_woken(idle_s: float) -> None:
    it = Sleeper(0.001, 3.0, 0.2)
    waking.were_busy(["it"], lambda: it.now_s)
    it.now_s += idle_s
    assert (it.wake() == 0) == (it.now_s - 100.0 < waking.IDLE_S or it.busy_s == 0.0)


def test_software_adapters_do_not_sleep() -> None:
    hard = Processor("gpu", "gpu", {}, "H200:f16", {"adapter": "H200"})
    soft = Processor("soft", "gpu", {}, "Soft:f32", {"adapter": "Soft", "software": True})
    core = Processor("cpu0", "cpu", {}, "core", {"cores": (0,), "threads": 1})
    assert waking.throttled_adapters([core, soft]) == ()
    assert waking.throttled_adapters([hard, core, hard]) == ("H200",)


def test_accelerators_are_what_is_no_cpu() -> None:
    kinds: tuple[Literal["cpu", "gpu", "npu"], ...] = ("cpu", "gpu", "npu")
    cpu, gpu, npu = (Processor(kind, kind, {}, kind) for kind in kinds)
    device = Platform("device", (cpu, gpu, with_cpu(gpu), npu))
    assert device.accelerators(["cpu", "a pool"]) == frozenset()
    assert device.accelerators(["cpu", "gpu"]) == device.accelerators(["gpu+cpu"]) == {"gpu"}
    assert device.accelerators(p.name for p in device.processors) == {"gpu", "npu"}
