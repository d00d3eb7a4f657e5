"""A guard around evaluators of plug-ins: each of their failures becomes one line that names the plug-in.

Their exceptions become :class:`~search_spaces.core.errors.UnavailableError`, a call that hangs is interrupted, and
batches are checked: as many latencies as runs, finite, and greater than 0.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import index
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from evaluators.base import Agreement, Batch, Evaluator, EvaluatorCapabilities, PartCosts, Session, capabilities_of
from evaluators.forwarding import (
    Forwarding,
    ForwardingCandidate,
    ForwardingSession,
    Found,
    Given,
    LoweredCandidate,
    Method,
    forwarded,
)
from evaluators.samples import LEAST_S, MOST_S
from evaluators.workload.host import WorkloadSession
from evaluators.workload.outcome import Objective
from evaluators.workload.predicted import Grids, WorkloadSimulator
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Limits, Platform
from search_spaces.core.plugins import foreign, time_limit
from search_spaces.core.states import State
from search_spaces.core.wording import plural
from search_spaces.core.workload import Workload
from search_spaces.rewrites.lower import Lowered, as_it_stands, lowering

Kind = TypeVar("Kind")

_PREPARE_S = 600.0
_CLOSE_S = 30.0
_PRICE_S = 3600.0  # all jobs of a workload are measured
_CLOCK = 1e-6
_LONGER = 100.0  # stages may be timed by a coarser clock than their run; of another unit they are 1000 times as long
_SLOW_CALL_S = 0.1  # a run that takes so much longer than its figure starts a program, or waits for a link
_LOGGER = logging.getLogger("partition_optimizer")


def _watts(found: Any) -> dict[str, float]:
    known = {str(name): float(watts) for name, watts in dict(found).items()}
    if wrong := [f"{watts:g} W for {name!r}" for name, watts in known.items() if not 0.0 <= watts < math.inf]:
        raise UnavailableError(f"it returned {wrong[0]}")
    return known


def _traffic(found: Any) -> dict[str, float]:
    known = {name: float(found[name]) for name in ("memory_mb", "second_level_mb", "kernels")}
    if wrong := [f"{name} {value:g}" for name, value in known.items() if not 0.0 <= value < math.inf]:
        raise UnavailableError(f"it returned {wrong[0]}")
    return known


def _logged(found: Any) -> Any:
    plain = json.loads(json.dumps(dict(found)))  # a log keeps it, and compares it
    try:
        json.dumps(plain, allow_nan=False)
    except ValueError:
        raise UnavailableError("it returned a number that is not finite") from None
    return plain


_PLAIN: dict[str, Callable[[Any], Any]] = {"conditions": dict, "powers_w": _watts, "figures": dict, "traffic": _traffic}
_PLAIN |= {"after_pause": float, "unsupported_operators": lambda found: [*map(index, found)], "reduced": list}
_PLAIN["fingerprint"] = _logged
"""Method → conversion of its result, which raises where the result has another type."""


def guarded(evaluator: Any, what: str) -> Evaluator:
    """Return the evaluator behind a guard, with the same capabilities.

    Args:
        evaluator: made by a plug-in.
        what: its name in errors.

    Raises:
        UnavailableError: it is not an evaluator.
    """
    for method in ("platform", "prepare"):
        if not callable(getattr(evaluator, method, None)):
            raise UnavailableError(f"{what} is not an evaluator: it lacks the method {method!r}", "see evaluators.base")
    return _Evaluator(evaluator, what)


class _Guarded(Forwarding):
    """Calls another object's methods within a time limit, and names it where they fail."""

    what: str
    hint = "see whether it hangs"

    def limit_s(self, method: str, arguments: tuple[Any, ...]) -> float:  # noqa: ARG002
        return _PREPARE_S

    @contextmanager
    def guard(self, method: str, *arguments: object) -> Iterator[None]:
        shown = ", ".join(repr(a) for a in arguments if isinstance(a, int | str))
        what = f"{self.what}: {method}({shown})"
        try:
            with foreign(what), time_limit(self.limit_s(method, arguments), what, self.hint):
                yield
        except (UnavailableError, UsageError) as error:
            if type(error) not in (UnavailableError, UsageError) or error.what.startswith(self.what):
                raise
            raise type(error)(f"{what}: {error.what}", error.hint) from error

    def call(self, method: Method[Given, Found], /, *arguments: Given.args, **options: Given.kwargs) -> Found:
        name = method.__name__
        with self.guard(name, *arguments):
            found = super().call(method, *arguments, **options)
            return _PLAIN[name](found) if name in _PLAIN else found

    def checked(self, method: str, found: Any, kind: type[Kind]) -> Kind:
        """Return what a method returned, if it is of a kind."""
        if not isinstance(found, kind):
            raise UnavailableError(f"{self.what}: {method}() returned {type(found).__name__}, no {kind.__name__}")
        return found


class _Evaluator(_Guarded, Evaluator):
    def __init__(self, inner: Any, what: str) -> None:
        self.inner, self.what = inner, what
        self.name = str(getattr(inner, "name", ""))
        with foreign(what):
            self.capabilities = capabilities_of(inner, EvaluatorCapabilities)

    def platform(self) -> Platform:
        return self.checked("platform", self.call(Evaluator.platform), Platform)

    @contextmanager
    def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[_Session]:
        with self._opened(platform.limits, "prepare", platform, scratch) as session:
            yield session

    @contextmanager
    def host(
        self,
        workload: Workload,
        joined: JoinedGraph,
        platform: Platform,
        objective: Objective,
        scratch: Path | None = None,
    ) -> Iterator[_Session]:
        with self._opened(platform.limits, "host", workload, joined, platform, objective, scratch) as session:
            yield session

    @contextmanager
    def _opened(self, limits: Limits, method: str, *arguments: object) -> Iterator[_Session]:
        with ExitStack() as stack:
            with self.guard(method):
                context = getattr(self.inner, method)(*arguments)
                inner = context.__enter__()
            stack.push(lambda *error: self._leave(context, *error))
            with foreign(self.what):
                session = _Session(inner, self.what, limits)
            yield session

    def _leave(self, context: Any, *error: Any) -> bool:
        """Leave a session; if that fails, what was measured counts all the same."""
        try:
            with foreign(what := f"{self.what}: leaving the session"), time_limit(_PREPARE_S, what):
                return bool(context.__exit__(*error))
        except UnavailableError as problem:
            if problem is error[1]:
                raise
            _LOGGER.warning("%s", problem)
            return False

    own_placements = forwarded(Evaluator.own_placements)
    apart = forwarded(Evaluator.apart)
    processor = forwarded(Evaluator.processor)
    reduced = forwarded(Evaluator.reduced)
    described = forwarded(Evaluator.described)
    at = forwarded(Evaluator.at)
    graph_of = forwarded(Evaluator.graph_of)


class _Session(_Guarded, ForwardingSession):
    inner: Any

    def __init__(self, inner: Any, what: str, limits: Limits) -> None:
        self.what, self._limits = what, limits
        self.hint = _hint(limits)
        super().__init__(inner)

    def limit_s(self, method: str, arguments: tuple[Any, ...]) -> float:  # noqa: ARG002
        if method == "price":
            return _PRICE_S
        short = method in {"fingerprint", "conditions", "counters", "powers_w"}
        return self._limits.run_s if short else self._limits.load_s

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> _Candidate:
        lowered = self._lowered(graph, plan)
        inner: Any = self.call(Session.load, lowered.graph, lowered.plan, fresh=fresh)
        with self.guard("load"):
            if not callable(getattr(inner, "run", None)):
                raise UnavailableError(f"{self.what}: load() returned {type(inner).__name__}, no Candidate")
        if lowered.rewritten:
            comparable = lowered.keeps != "approximation"
            inner = LoweredCandidate(inner, len(plan.stages), lowered.stage_of, comparable=comparable)
        timed = not self.capabilities.computed
        return _Candidate(inner, self.what, len(plan.stages), self._limits, timed=timed)

    def unsupported_operators(self, graph: Graph, processor: str) -> Sequence[int]:
        found = self.call(Session.unsupported_operators, graph, processor)
        if wrong := [o for o in found if o not in range(len(graph.operators))]:
            what = f"{self.what}: unsupported_operators({processor!r}) returned {wrong[0]}"
            raise UnavailableError(what, f"the model has operators 0 to {len(graph.operators) - 1}")
        return found

    def part_costs(self, graph: Graph) -> PartCosts:
        return self.checked("part_costs", self.call(Session.part_costs, graph), PartCosts)

    def deploy(self, folder: Path, graph: Graph, plan: Plan) -> Agreement:
        lowered = self._lowered(graph, plan)
        return self.checked("deploy", self.call(Session.deploy, folder, lowered.graph, lowered.plan), Agreement)

    def _lowered(self, graph: Graph, plan: Plan) -> Lowered:
        """Return a plan lowered, unless the inner session takes rewrites."""
        if self.capabilities.rewrites or plan.dispatch != "static":
            return as_it_stands(graph, plan)
        return lowering(graph).lower(plan)

    def in_state(self, state: State) -> _Session:
        return _Session(self.call(Session.in_state, state), self.what, self._limits)

    @property
    def simulator(self) -> WorkloadSimulator:
        with self.guard("simulator"):
            found: WorkloadSimulator = self.inner.simulator
            return found

    def price(
        self, known: Mapping[str, Any] | None, progress: Callable[[str], None], grids: Grids = MappingProxyType({})
    ) -> Mapping[str, Any]:
        return self.call(WorkloadSession.price, known, progress, *([grids] if grids else []))


class _Candidate(_Guarded, ForwardingCandidate):
    inner: Any

    def __init__(self, inner: Any, what: str, stages: int, limits: Limits, *, timed: bool) -> None:
        super().__init__(inner)
        self.what, self._stages, self._run_s, self._timed = what, stages, limits.run_s, timed
        self.hint = _hint(limits)

    def limit_s(self, method: str, arguments: tuple[Any, ...]) -> float:
        if method == "close":
            return _CLOSE_S
        more = {"run": 1, "stream": 1, "after_pause": 1 / self._run_s, "verify": 0, "figures": 0, "traffic": 0}[method]
        return self._run_s * (1 + more * arguments[0] if more else 4)

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        begin_s = time.monotonic()
        found = self._checked("run", super().run(n, stop_above_s), n, stop_above_s)
        run_s = (time.monotonic() - begin_s) / len(found.latency_s)
        stage_s, latency_s = np.median(found.stage_s, axis=0).max(initial=0.0), np.median(found.latency_s)
        if stage_s > _LONGER * latency_s and found.outcome is None:
            what = f"{self.what}: run({n}) returned a stage of {stage_s:g} s in a run of {latency_s:g} s"
            raise UnavailableError(what, "give both in seconds: no stage is longer than its run")
        slow = self._timed and run_s > float(np.mean(found.latency_s)) + _SLOW_CALL_S
        return replace(found, run_s=run_s) if slow and found.run_s is None else found

    def stream(self, n: int) -> Batch:
        return self._checked("stream", super().stream(n), n, math.inf)

    def verify(self) -> Agreement | None:
        found = super().verify()
        return None if found is None else self.checked("verify", found, Agreement)

    def _checked(self, method: str, batch: Batch, n: int, stop_above_s: float) -> Batch:
        with foreign(f"{self.what}: {method}({n})"):
            problem = wrong_batch(batch, n, self._stages, stop_above_s)
        if problem:
            raise UnavailableError(f"{self.what}: {method}({n}) returned {problem}")
        errors = None if batch.errors is None else np.asarray(batch.errors, float)
        return replace(  # a plug-in may return lists
            batch, latency_s=np.asarray(batch.latency_s, float), stage_s=np.asarray(batch.stage_s, float), errors=errors
        )


def _hint(limits: Limits) -> str:
    longer = f"limits=Limits(load_s=…, run_s=…), now {limits.load_s:g} and {limits.run_s:g} s"
    return f"see whether it hangs; if it is only slow, give Platform longer {longer}"


def wrong_batch(batch: Any, n: int, stages: int, stop_above_s: float) -> str:
    """Return what is wrong with a batch of ``n`` runs, or ""."""
    if not isinstance(batch, Batch):
        return f"{type(batch).__name__}, no Batch"
    latency_s, stage_s = np.asarray(batch.latency_s), np.asarray(batch.stage_s)
    errors = np.asarray(() if batch.errors is None else batch.errors)
    for what, values in (("latencies", latency_s), ("stage times", stage_s), ("errors", errors)):
        if values.dtype.kind not in "iuf":
            return f"{what} of type {values.dtype}, not real numbers"
    latency_s, stage_s = latency_s.astype(float), stage_s.astype(float)  # of float16 the limits would be 0 and inf
    if latency_s.ndim != 1 or not 1 <= len(latency_s) <= n:
        return f"latencies of shape {latency_s.shape} for {plural(n, 'run')}"
    if stage_s.shape != (len(latency_s), stages):
        return f"stage times of shape {stage_s.shape} for {len(latency_s)} runs of {stages} stages"
    for what, values, least_s in (("latency", latency_s, LEAST_S), ("stage time", stage_s, 0.0)):
        if len(bad := values[~((least_s <= values) & (values <= MOST_S))]):
            return f"a {what} of {bad[0]} s"
    if len(latency_s) < n and not latency_s[-1] >= stop_above_s * (1.0 - _CLOCK):
        return f"{plural(len(latency_s), 'latency')} for {plural(n, 'run')}"
    return batch.outcome.problem if batch.outcome is not None else ""
