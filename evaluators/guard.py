"""A guard around evaluators that others wrote: whatever they do wrong is one line that names them.

Their exceptions become :class:`~search_spaces.errors.UnavailableError`, a call that hangs is broken off, and what they
return is checked: as many times as runs, finite, and greater than 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from evaluators.base import (
    Agreement,
    Batch,
    Candidate,
    Deployer,
    Describer,
    Evaluator,
    Namer,
    Refuser,
    Session,
    Witness,
)
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Limits, Platform, Processor
from search_spaces.plugins import foreign, time_limit

_PREPARE_S = 600.0
_CLOSE_S = 30.0
_CLOCK = 1e-6


def guarded(evaluator: Any, what: str) -> Evaluator:
    """Return the evaluator behind a guard, with the same optional abilities (naming, describing, refusing, deploying).

    Args:
        evaluator: made by a plug-in.
        what: how errors call it.

    Raises:
        UnavailableError: it is no evaluator.
    """
    for method in ("platform", "prepare"):
        if not callable(getattr(evaluator, method, None)):
            raise UnavailableError(f"{what} is no evaluator: it has no method {method!r}", "see evaluators.base")
    kind = _with_abilities(_Evaluator, {Namer: _Naming, Describer: _Describing}, evaluator)
    return cast("Evaluator", kind(evaluator, what))


def _with_abilities(base: type, abilities: dict[Any, type], inner: object) -> type:
    """Return the class with a mixin for each protocol that the inner object keeps."""
    mixins = tuple(mixin for protocol, mixin in abilities.items() if isinstance(inner, protocol))
    return type(base.__name__, (*mixins, base), {}) if mixins else base


@contextmanager
def _call(what: str, limit_s: float) -> Iterator[None]:
    with foreign(what), time_limit(limit_s, what):
        yield


class _Evaluator:
    def __init__(self, inner: Any, what: str) -> None:
        self._inner = inner
        self._what = what
        self.name = str(getattr(inner, "name", ""))
        self.measures_here = bool(getattr(inner, "measures_here", True))

    def platform(self) -> Platform:
        with _call(f"{self._what}: platform()", _PREPARE_S):
            found = self._inner.platform()
        if not isinstance(found, Platform):
            raise UnavailableError(f"{self._what}: platform() returned {type(found).__name__}, no Platform")
        return found

    @contextmanager
    def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[Session]:
        with ExitStack() as stack:
            with _call(f"{self._what}: prepare()", _PREPARE_S):
                context = self._inner.prepare(platform, scratch)
                inner = context.__enter__()
            stack.push(lambda *error: self._leave(context, *error))
            kind = _with_abilities(_Session, {Refuser: _Refusing, Deployer: _Deploying, Witness: _Witnessing}, inner)
            yield kind(inner, self._what, platform.limits)

    def _leave(self, context: Any, *error: Any) -> bool:
        with _call(f"{self._what}: leaving the session", _PREPARE_S):
            return bool(context.__exit__(*error))


class _Naming:
    def processor(self: Any, name: str) -> Processor:
        with _call(f"{self._what}: processor({name!r})", _PREPARE_S):
            return cast("Processor", self._inner.processor(name))


class _Describing:
    def described(self: Any, source: str | Path) -> Platform | None:
        with _call(f"{self._what}: described({str(source)!r})", _PREPARE_S):
            return cast("Platform | None", self._inner.described(source))


class _Session:
    def __init__(self, inner: Any, what: str, limits: Limits) -> None:
        self._inner = inner
        self._what = what
        self._limits = limits

    def fingerprint(self) -> dict[str, Any]:
        with _call(f"{self._what}: fingerprint()", self._limits.run_s):
            return dict(self._inner.fingerprint())

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        with _call(f"{self._what}: load()", self._limits.load_s):
            inner = self._inner.load(graph, plan, fresh=fresh)
        return _Candidate(inner, self._what, len(plan.stages), self._limits.run_s)


class _Refusing:
    def refused(self: Any, graph: Graph, processor: str) -> Sequence[int]:
        with _call(f"{self._what}: refused()", self._limits.load_s):
            return cast("Sequence[int]", self._inner.refused(graph, processor))


class _Witnessing:
    def conditions(self: Any) -> dict[str, Any]:
        with _call(f"{self._what}: conditions()", self._limits.run_s):
            return dict(self._inner.conditions())


class _Deploying:
    def deploy(self: Any, folder: Path, graph: Graph, plan: Plan) -> Agreement:
        with _call(f"{self._what}: deploy()", self._limits.load_s):
            return cast("Agreement", self._inner.deploy(folder, graph, plan))


@dataclass(slots=True)
class _Candidate:
    inner: Any
    what: str
    stages: int
    run_s: float

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        with _call(f"{self.what}: run({n})", self.run_s * (n + 1)):
            batch = self.inner.run(n, stop_above_s)
            problem = wrong_batch(batch, n, self.stages, stop_above_s)
        if problem:
            raise UnavailableError(f"{self.what}: run({n}) returned {problem}")
        return cast("Batch", batch)

    def verify(self) -> Agreement | None:
        with _call(f"{self.what}: verify()", self.run_s * 4):
            return cast("Agreement | None", self.inner.verify())

    def close(self) -> None:
        with _call(f"{self.what}: close()", _CLOSE_S):
            self.inner.close()


def wrong_batch(batch: Any, n: int, stages: int, stop_above_s: float) -> str:
    """Return what is wrong with the batch that running ``n`` times gave, or ""."""
    latency_s, stage_s = np.asarray(batch.latency_s, dtype=float), np.asarray(batch.stage_s, dtype=float)
    if latency_s.ndim != 1 or not 1 <= len(latency_s) <= n:
        return f"latencies of shape {latency_s.shape} for {n} runs"
    if stage_s.shape != (len(latency_s), stages):
        return f"stage times of shape {stage_s.shape} for {len(latency_s)} runs of {stages} stages"
    bad = latency_s[~(np.isfinite(latency_s) & (latency_s > 0.0))]
    if len(bad):
        return f"a latency of {bad[0]} s"
    bad = stage_s[~(np.isfinite(stage_s) & (stage_s >= 0.0))]
    if len(bad):
        return f"a stage time of {bad[0]} s"
    if len(latency_s) < n and not latency_s[-1] >= stop_above_s * (1.0 - _CLOCK):
        return f"{len(latency_s)} latencies for {n} runs"
    return ""
