"""The evaluator ``synthetic``, which needs no device, and the contract tests of evaluators, for tests.

It computes the time of a plan by a formula (below) and adds noise that depends only on the seed, the plan, the instance
and the number of the run, so the same study gives the same measurements on every machine.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import (
    CONTRACT_VERSION,
    Batch,
    Candidate,
    Capabilities,
    ClosableSession,
    Evaluator,
    EvaluatorCapabilities,
)
from evaluators.contract import EvaluatorContract, check_timeline, example_graph
from evaluators.schedule import Event, Law, Task, Timeline, run_tasks, timeline
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor

__all__ = [
    "EvaluatorContract",
    "Noise",
    "SyntheticCandidate",
    "SyntheticEvaluator",
    "SyntheticSession",
    "check_timeline",
    "example_graph",
    "schedule",
]

OPERATOR_S = 2e-6  # to start one operator
TRANSFER_S = 3e-6  # to start a stage with a tensor of another stage
CORE_BYTES_PER_S = 4e9  # of one core, weights and activations together
LINK_BYTES_PER_S = 5e9  # tensors that change the processor


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise of runs; all values are relative.

    Attributes:
        run: standard deviation from run to run.
        instance: standard deviation from instance to instance, the same in all runs of one.
        spike_share: share of disturbed runs, which take 5 to 100 % longer.
        cold: additional time of the first run of an instance.
    """

    run: float = 0.01
    instance: float = 0.0
    spike_share: float = 0.0
    cold: float = 0.1


class SyntheticCandidate(Candidate):
    """A loaded plan with a known latency.

    Args:
        timeline: one inference without noise; event ``i`` is stage ``i`` of the plan.
        noise: of its runs.
        rng: random numbers of this instance.
        scale: factor on all times; NaN makes an evaluator that returns no numbers.
    """

    def __init__(self, timeline: Timeline, noise: Noise, rng: np.random.Generator, scale: float = 1.0) -> None:
        self._timeline = timeline
        self._stage_s = np.array([e.end_s - e.start_s for e in sorted(timeline.events, key=lambda e: e.stage)])
        self._noise = noise
        self._rng = rng
        self._scale = scale * math.exp(noise.instance * rng.standard_normal())
        self._cold = 1.0 + noise.cold
        self.runs = 0

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` inferences, fewer where one takes longer than ``stop_above_s``; takes no time."""
        scales: list[float] = []
        makespan_s = self._timeline.makespan_s
        while len(scales) < n and not (scales and scales[-1] * makespan_s > stop_above_s):
            scales.append(self._draw())
        factors = np.array(scales)
        events = self._timeline.events
        last = tuple(Event(e.stage, e.processor, e.start_s * scales[-1], e.end_s * scales[-1]) for e in events)
        return Batch(makespan_s * factors, factors[:, None] * self._stage_s, Timeline(last))

    def _draw(self) -> float:
        normal = self._rng.standard_normal()
        chance, height = self._rng.random(2)
        spike = 1.05 + 0.95 * height if chance < self._noise.spike_share else 1.0
        cold = self._cold if self.runs == 0 else 1.0
        self.runs += 1
        return self._scale * math.exp(self._noise.run * normal) * spike * cold


@dataclass(slots=True)
class SyntheticEvaluator(Evaluator):
    """Computes times of plans by a formula instead of a device.

    An operator takes :data:`OPERATOR_S` and its bytes (inputs, outputs, weights) at a rate that depends on its kind
    and on the processor; a processor of several cores gains more on some kinds than on others. A stage takes the sum of
    its operators and a transfer for each tensor of another stage, longer where that stage is on another processor.
    Stages run in the plan's order as soon as their inputs and their processor (and all processors that exclude it) are
    free.

    Attributes:
        seed: of the noise.
        noise: of runs. The n-th run of the k-th fresh instance of a plan is always the same; instances that are not
            fresh are all the same one.
        interaction: returns a factor on all times of a plan, which the formula does not contain.
        fails: plans for which loading raises :class:`~search_spaces.core.errors.UnavailableError`.
        returns_nan: plans whose latencies are NaN.
    """

    seed: int = 0
    noise: Noise = field(default_factory=Noise)
    interaction: Callable[[Plan], float] | None = None
    fails: Callable[[Plan], bool] | None = None
    returns_nan: Callable[[Plan], bool] | None = None
    name: str = "synthetic"
    capabilities: EvaluatorCapabilities = field(default=EvaluatorCapabilities(measures_here=False))

    def platform(self) -> Platform:
        """Return a machine of two cores: both together (``cpu``), and each as its own processor."""
        both = {"cores": (0, 1), "threads": 2}
        processors = [Processor("cpu", "cpu", {"core0": 1.0, "core1": 1.0}, "cpu", both)]
        processors += [
            Processor(f"cpu{i}", "cpu", {f"core{i}": 1.0}, "core", {"cores": (i,), "threads": 1}) for i in (0, 1)
        ]
        return Platform("synthetic", tuple(processors))

    def prepare(self, platform: Platform, scratch: Path | None = None) -> AbstractContextManager[SyntheticSession]:  # noqa: ARG002
        """Open a session on any platform; nothing is written to ``scratch``."""
        return closing(SyntheticSession(self, platform))

    def true_latency_s(self, graph: Graph, plan: Plan, platform: Platform | None = None) -> float:
        """Return the seconds of a plan without noise, with ``interaction``."""
        factor = 1.0 if self.interaction is None else self.interaction(plan)
        return factor * schedule(graph, plan, platform or self.platform()).makespan_s


class SyntheticSession(ClosableSession):
    """A session of :class:`SyntheticEvaluator`."""

    capabilities = Capabilities(computed=True)

    def __init__(self, evaluator: SyntheticEvaluator, platform: Platform) -> None:
        self._evaluator = evaluator
        self._platform = platform
        self._fresh: Counter[str] = Counter()

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values.

        Functions are given by name.
        """
        evaluator = self._evaluator
        hooks = {name: getattr(evaluator, name) for name in ("interaction", "fails", "returns_nan")}
        return {
            "evaluator": evaluator.name,
            "contract_version": CONTRACT_VERSION,
            "platform": self._platform.to_json(),
            "seed": evaluator.seed,
            "noise": [*astuple(evaluator.noise)],
            **{
                name: None if hook is None else getattr(hook, "__qualname__", type(hook).__name__)
                for name, hook in hooks.items()
            },
        }

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> SyntheticCandidate:
        """Compile a plan; with ``fresh``, share nothing that is already loaded (a rebuilt instance).

        Raises:
            PlanError: the plan is not for this graph.
            UsageError: the plan names a processor that the platform lacks.
            UnavailableError: the plan is one that fails, or the session is over.
        """
        self.check_open()
        plan.validate(graph, self._platform)
        evaluator = self._evaluator
        if evaluator.fails is not None and evaluator.fails(plan):
            raise UnavailableError(f"plan {plan.digest[:12]} is made to fail")
        self._fresh[plan.digest] += fresh
        instance = self._fresh[plan.digest] if fresh else 0
        timeline = schedule(graph, plan, self._platform)
        factor = 1.0 if evaluator.interaction is None else evaluator.interaction(plan)
        if evaluator.returns_nan is not None and evaluator.returns_nan(plan):
            factor = math.nan
        rng = np.random.default_rng([evaluator.seed, int(plan.digest[:16], 16), instance])
        return SyntheticCandidate(timeline, evaluator.noise, rng, factor)


def schedule(graph: Graph, plan: Plan, platform: Platform) -> Timeline:
    """Return when each stage runs by the formula of :class:`SyntheticEvaluator`, without noise."""
    place = {operator: index for index, stage in enumerate(plan.stages) for operator in stage.operators}
    processors = {p.name: i for i, p in enumerate(platform.processors)}
    tasks = []
    for stage in plan.stages:
        processor = platform[stage.processor]
        needs = [(place[graph.producer[t]], t) for t in graph.boundary(stage.operators).inputs if t in graph.producer]
        took_s = sum(_operator_s(graph, operator, processor) for operator in stage.operators)
        for before, tensor in needs:
            moved = graph.tensors[tensor].nbytes if plan.stages[before].processor != processor.name else 0
            took_s += TRANSFER_S + moved / LINK_BYTES_PER_S
        tasks.append(Task(processors[processor.name], took_s, tuple((before, 0.0) for before, _ in needs)))
    return timeline(run_tasks(tasks, Law.of(platform)), [stage.processor for stage in plan.stages])


def _operator_s(graph: Graph, index: int, processor: Processor) -> float:
    operator = graph.operators[index]
    nbytes = sum(graph.tensors[t].nbytes for t in (*operator.inputs, *operator.outputs) if t != -1)
    effort = 0.5 + 1.5 * _share(operator.kind)
    speed = 1.0 + (max(1.0, sum(processor.resources.values())) - 1.0) * (
        0.4 + 0.6 * _share(operator.kind, processor.kind)
    )
    return OPERATOR_S + nbytes * effort / (CORE_BYTES_PER_S * speed)


def _share(*words: str) -> float:
    """Return a number in [0, 1) that depends on the words alone."""
    return int.from_bytes(hashlib.sha256("/".join(words).encode()).digest()[:4], "big") / 2**32
