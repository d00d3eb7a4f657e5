"""Profile: measured times of operators on each kind of processor, and the additive model of them.

The model cut before every operator gives each operator's time in its place in the network, with the caches as its
predecessor leaves them. The whole model on the same processor then gives the cost of cutting, and the operators' times
are scaled to add up to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, PlainSerializer

from evaluators.base import Batch, Candidate, PartCosts, Session, unsupported_operators
from evaluators.forwarding import ForwardingCandidate
from evaluators.samples import MOST_S, Measurement
from evaluators.sampling import SamplingPolicy, measure
from optimizer.exact.chain_costs import ChainCosts
from search_spaces.core.bounded import built, plain
from search_spaces.core.errors import DeviceLostError, RunFolderError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.wording import plural
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.cuts import every_layer

POLICY = SamplingPolicy(precision=0.02, max_s=0.3, min_runs=2, max_runs=30)
LIMIT_S = 300.0
"""Seconds of a profile where a study has no time limit."""

_TELL_S = 5.0  # seconds of a plan's runs from which they are reported


def _seconds(value: Any) -> Any:
    seconds = math.inf if value is None else value
    if isinstance(seconds, int | float) and MOST_S < seconds < math.inf:
        raise ValueError(f"{seconds:g} s is not a latency")
    return seconds


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


Seconds = Annotated[float, BeforeValidator(_seconds), PlainSerializer(_finite)]
"""A latency; infinities are None in JSON."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Times of the additive model, per kind of processor (``Processor.like``); infinite if not supported.

    Attributes:
        operator_s: like → seconds of each operator.
        overhead_s: like → seconds that each further stage adds.
        transfer_s: ``like → other like`` (as ``"a|b"``) → seconds between the end of a stage and the start of the
            next one on another processor.
        whole_s: like → seconds of the whole model.
        triple_s: like → seconds of each triple that a convolution may be decomposed into, in the order of the space's
            ``places`` (:class:`search_spaces.spaces.rank_space.RankSpace`); empty where none was measured.
        cut_short: why branches and splits were not timed, a sentence; "" where they were, or none are searched.
    """

    operator_s: Mapping[str, tuple[Seconds, ...]]
    overhead_s: Mapping[str, float]
    transfer_s: Mapping[str, float]
    whole_s: Mapping[str, Seconds]
    triple_s: Mapping[str, tuple[Seconds, ...]] = field(default_factory=dict)
    cut_short: str = ""

    def costs(self, platform: Platform) -> ChainCosts:
        """Return the additive model for the processors of a platform that were timed."""
        platform = platform.restrict([p.name for p in platform.processors if p.like in self.operator_s])
        processors, likes = platform.processors, [p.like for p in platform.processors]
        count = len(self.operator_s[likes[0]])
        pairs = [[0.0 if a is b else self.transfer_s[pair_of(a.like, b.like)] for b in processors] for a in processors]
        between = np.array(pairs)
        operator_s, overhead_s = (np.array([of[like] for like in likes]) for of in (self.operator_s, self.overhead_s))
        return ChainCosts(platform, operator_s, overhead_s, np.broadcast_to(between, (count, *between.shape)))

    def fastest(self, platform: Platform) -> str:
        """Return the name of the processor that runs the whole model fastest."""
        return min(platform.processors, key=lambda p: self.whole_s[p.like]).name

    def knows(self, platform: Platform) -> bool:
        """Return whether all processors of a platform have been timed."""
        return self.operator_s.keys() >= platform.classes().keys() and self.transfer_s.keys() >= _pairs(platform).keys()

    def of(self, likes: Mapping[str, str]) -> Profile:
        """Return the profile of some kinds of processors.

        Args:
            likes: their new names → their names here; unknown ones are left out.
        """
        known = self.operator_s.keys() & self.overhead_s.keys() & self.whole_s.keys()
        here = {new: old for new, old in likes.items() if old in known}
        pairs = {pair_of(a, b): pair_of(here[a], here[b]) for a in here for b in here}
        return Profile(
            {new: self.operator_s[old] for new, old in here.items()},
            {new: self.overhead_s[old] for new, old in here.items()},
            {new: self.transfer_s[old] for new, old in pairs.items() if old in self.transfer_s},
            {new: self.whole_s[old] for new, old in here.items()},
            {new: self.triple_s[old] for new, old in here.items() if old in self.triple_s},
            self.cut_short,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain values."""
        found: dict[str, Any] = plain(Profile, self)
        if not self.triple_s:
            del found["triple_s"]
        return found

    @classmethod
    def from_json(cls, data: object) -> Profile:
        """Build a profile from what :meth:`to_json` returned.

        Raises:
            RunFolderError: a field is missing or has the wrong type.
        """
        return built(cls, data, "the profile of the operators is", RunFolderError)


@dataclass(frozen=True, slots=True, eq=False)
class Profiler:
    """Times a network on the processors of a platform.

    Attributes:
        progress: called with what is timed next, and with the runs of slow plans.
        limit_s: seconds since ``begin_s``, by :func:`time.monotonic`, after which only what is needed is timed.
    """

    session: Session
    graph: Graph
    platform: Platform
    progress: Callable[[str], None] = lambda _: None
    limit_s: float = math.inf
    begin_s: float = field(default_factory=time.monotonic)

    @property
    def first(self) -> dict[str, str]:
        """The name of the first processor of each kind."""
        return {like: members[0].name for like, members in self.platform.classes().items()}

    @property
    def spent_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begin_s

    def check_time(self) -> None:
        """Check that there is time for what is not needed.

        Raises:
            ProfileTimeError: there is none.
        """
        if self.spent_s > self.limit_s:
            why = f"a quarter of --minutes, at least 10 s; without it {LIMIT_S:g} s"
            raise ProfileTimeError(f"timing operators ends after {self.limit_s:g} s ({why})")

    def load(self, plan: Plan, *, needed: bool = False) -> Candidate:
        """Compile a plan; unless it is needed, it runs only as long as there is time.

        Raises:
            ProfileTimeError: there is none, now or at a run.
        """
        if not needed:
            self.check_time()
        return _Watched(self.session.load(self.graph, plan), len(plan.stages), self, needed=needed)

    def time(self, plan: Plan, *, needed: bool = False) -> Measurement:
        """Measure a plan as operators are timed. Raises as :meth:`load`."""
        with closing(self.load(plan, needed=needed)) as candidate:
            return measure(candidate, POLICY)

    def time_apart(self, names: Sequence[str], *, needed: bool = False) -> Measurement:
        """Measure a plan in which each operator is a stage, given the processor of each. Raises as :meth:`load`."""
        return self.time(chain_plan(self.graph, every_layer(self.graph), names), needed=needed)

    def refused(self, name: str) -> frozenset[int]:
        """Return the operators that a processor does not support."""
        return frozenset(unsupported_operators(self.session, self.graph, name))


class ProfileTimeError(UnavailableError):
    """The time for what is not needed of a profile is over."""


class _Watched(ForwardingCandidate):
    """A candidate that keeps the profile's time limit unless it is needed, and reports runs that take long."""

    def __init__(self, inner: Candidate, stages: int, of: Profiler, *, needed: bool) -> None:
        super().__init__(inner)
        self._stages, self._of, self._needed = stages, of, needed
        self._runs, self._spent_s = 0, 0.0

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` inferences, fewer where one takes longer than ``stop_above_s``."""
        if not self._needed:
            self._of.check_time()
        begin_s = time.monotonic()
        found = super().run(n, stop_above_s)
        self._runs += len(found.latency_s)
        self._spent_s += time.monotonic() - begin_s
        if self._spent_s >= _TELL_S:
            runs, stages = plural(self._runs, "run"), plural(self._stages, "stage")
            self._of.progress(f"{runs} of {stages} so far, {self._spent_s / self._runs:.2g} s each")
        return found


def known_profile(tables: PartCosts, platform: Platform) -> Profile:
    """Return the profile of a session that computes its latencies; nothing is timed.

    A model that does not fit into a processor's memory takes infinitely long there.
    """
    processor = {p.name: i for i, p in enumerate(platform.processors)}
    first = {like: processor[members[0].name] for like, members in platform.classes().items()}
    whole_s = tables.operator_s.sum(axis=1) + tables.overhead_s + tables.beyond_s[:, 0, -1]
    if tables.operator_nbytes is not None and tables.memory_bytes is not None:
        whole_s = np.where(tables.operator_nbytes.sum() > tables.memory_bytes, np.inf, whole_s)
    between = tables.transfer_s[1:] if len(tables.transfer_s) > 1 else tables.transfer_s
    transfer_s = {
        pair: float(between[:, [processor[a], processor[b]], [processor[b], processor[a]]].mean())
        for pair, (a, b) in _pairs(platform).items()
    }
    return Profile(
        {like: tuple(tables.operator_s[i].tolist()) for like, i in first.items()},
        {like: float(tables.overhead_s[i]) for like, i in first.items()},
        transfer_s,
        {like: float(whole_s[i]) for like, i in first.items()},
    )


def profile(of: Profiler, known: Profile | None = None) -> Profile:
    """Time every operator on one processor of each kind, and every kind of transfer.

    An operator that is not supported takes infinitely long. A transfer includes the gap between two stages and their
    copies between the memories of processors.

    Args:
        known: earlier times of this model on this device, which are not measured again.

    Raises:
        UnavailableError: the device failed, or no processor supports some operator.
    """
    known = known or Profile({}, {}, {}, {})
    operator_s: dict[str, tuple[float, ...]] = {}
    overhead_s: dict[str, float] = {}
    whole_s: dict[str, float] = {}
    transfer_s: dict[str, float] = {}
    count = len(of.graph.operators)
    refused: dict[str, frozenset[int]] = {}
    timings: dict[str, _Timing] = {}
    for like, name in of.first.items():
        refused[name] = of.refused(name)
        if like in known.operator_s:
            operator_s[like], overhead_s[like] = known.operator_s[like], known.overhead_s[like]
            whole_s[like] = known.whole_s[like]
            continue
        of.progress(f"timing {plural(count - len(refused[name]), 'operator')} on {name}")
        if not refused[name]:
            timings[like] = _timing(of, name)
    for like, timing in timings.items():
        # Kinds are compared by their times, so a busy spell during one of them must not count.
        again = len(operator_s.keys() | timings.keys()) > 1 and of.spent_s <= of.limit_s / 2
        quiet = replace(of, progress=lambda _: None)
        sure = timing.lesser(_timing(quiet, of.first[like])) if again else timing
        each_s, overhead_s[like], whole_s[like] = sure.scaled()
        operator_s[like] = _pooled(of.graph, each_s)
    stand_in = next((n for n in refused if not refused[n]), None)
    for like, name in of.first.items():
        if like not in operator_s:
            overhead_s[like], whole_s[like] = 0.0, math.inf
            operator_s[like] = _pooled(of.graph, _with_help(of, name, refused[name], stand_in))
    for pair, (here, there) in _pairs(of.platform).items():
        if pair in known.transfer_s:
            transfer_s[pair] = known.transfer_s[pair]
            continue
        of.progress(f"timing transfers between {here} and {there}")
        plan = _handing_over(of.graph, here, there, refused)
        if plan is None:
            transfer_s[pair] = max(transfer_s.values(), default=0.0)
            continue
        try:
            found = of.time(plan, needed=True)
        except UnavailableError as error:
            if isinstance(error, DeviceLostError) or all(timing.one_by_one for timing in timings.values()):
                raise
            of.progress(f"transfers are taken as free: {error}")
            transfer_s[pair] = 0.0
            continue
        copied = sum(event.copied_s for event in found.timeline.events) if found.timeline else 0.0
        transfer_s[pair] = max(0.0, found.latency_s.median - sum(found.stage_s)) + copied
    return Profile(operator_s, overhead_s, transfer_s, whole_s, known.triple_s)


@dataclass(frozen=True, slots=True)
class _Timing:
    """Seconds of a whole model on one processor, and of its operators as stages of their own.

    Attributes:
        one_by_one: whether the operators were timed; else their shares of the whole are by multiply-accumulates.
    """

    whole_s: float
    apart_s: float
    stage_s: tuple[float, ...]
    one_by_one: bool = True

    def lesser(self, other: _Timing) -> _Timing:
        """Return the smaller times of two measurements."""
        apart = min(self, other, key=lambda timing: (not timing.one_by_one, timing.apart_s))
        return _Timing(min(self.whole_s, other.whole_s), apart.apart_s, apart.stage_s, apart.one_by_one)

    def scaled(self) -> tuple[tuple[float, ...], float, float]:
        """Return the operators' times, the overhead of a stage, and the time of the whole model."""
        count = len(self.stage_s)
        overhead = max(0.0, (self.apart_s - self.whole_s) / (count - 1)) if count > 1 else 0.0
        alone = np.maximum(np.array(self.stage_s) - overhead, 0.0)
        total = float(alone.sum())
        even = np.full(count, self.whole_s / count)
        scaled = alone * (max(0.0, self.whole_s - overhead) / total) if total > 0 else even
        return tuple(scaled.tolist()), overhead, self.whole_s


_WITH_WEIGHTS = frozenset({"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV"})
_INDICES = frozenset(
    {"int32", "int64"}
)  # dtypes of permutations, axes and shapes, and of the biases of quantised weights


def _pooled(graph: Graph, operator_s: tuple[float, ...]) -> tuple[float, ...]:
    """Give all operators of one kind, options and shapes their mean time.

    Where stages are many and short, their times less the overhead of a stage are mostly noise: those of MobileBERT's 24
    equal blocks grew by three times from the first to the last. A constant of indices, such as a permutation, must be
    the same tensor; groups and custom operators, whose options are not known, are not pooled.
    """
    alike: dict[Hashable, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        tensors = [graph.tensors[t] if t >= 0 else None for t in (*operator.inputs, -1, *operator.outputs)]
        shapes = tuple(
            t
            if t is None or (t.constant and t.dtype in _INDICES and operator.kind not in _WITH_WEIGHTS)
            else (t.shape, t.dtype)
            for t in tensors
        )
        own = index if operator.parts or not operator.options else -1
        key = operator.kind, repr(sorted(operator.options.items())), shapes, own, math.isfinite(operator_s[index])
        alike.setdefault(key, []).append(index)
    found = np.array(operator_s)
    for members in alike.values():
        found[members] = found[members].mean()
    return tuple(found.tolist())


def _timing(of: Profiler, name: str) -> _Timing:
    """Time the operators in a plan of one stage each; where that fails, share the whole model's time out among them."""
    whole_s = of.time(chain_plan(of.graph, (), [name]), needed=True).latency_s.median
    try:
        apart = of.time_apart([name] * len(of.graph.operators))
    except DeviceLostError:
        raise
    except UnavailableError as error:
        of.progress(
            f"operators cannot be timed one by one on {name}; its time is shared out by multiply-accumulates: {error}"
        )
        work = [1 + cost.macs for cost in operator_costs(of.graph)]
        return _Timing(whole_s, whole_s, tuple(whole_s * each / sum(work) for each in work), one_by_one=False)
    return _Timing(whole_s, apart.latency_s.median, apart.stage_s)


def _with_help(of: Profiler, name: str, refused: frozenset[int], stand_in: str | None) -> tuple[float, ...]:
    """Return the operators' times on a processor that does not support all of them."""
    count = len(of.graph.operators)
    if len(refused) == count or stand_in is None:
        return (math.inf,) * count
    names = [stand_in if o in refused else name for o in range(count)]
    found = of.time_apart(names, needed=True)
    copied = {e.stage: e.copied_s for e in found.timeline.events} if found.timeline else {}
    return tuple(math.inf if o in refused else max(0.0, found.stage_s[o] - copied.get(o, 0.0)) for o in range(count))


def _handing_over(graph: Graph, here: str, there: str, refused: Mapping[str, frozenset[int]]) -> Plan | None:
    """Return a plan of two stages that both processors support, cut near the middle; None if there is none."""
    count = len(graph.operators)
    for cut in sorted(range(1, count), key=lambda c: abs(c - count // 2)):
        for first, second in ((here, there), (there, here)):
            before, after = refused.get(first, frozenset()), refused.get(second, frozenset())
            if not any(o < cut for o in before) and not any(o >= cut for o in after):
                return chain_plan(graph, (cut,), [first, second])
    return None


def _pairs(platform: Platform) -> dict[str, tuple[str, str]]:
    """Return one pair of processors for each pair of kinds, and for each kind that has two processors."""
    classes = list(platform.classes().items())
    found = {}
    for i, (like, members) in enumerate(classes):
        if len(members) > 1:
            found[pair_of(like, like)] = (members[0].name, members[1].name)
        for other, others in classes[i + 1 :]:
            found[pair_of(like, other)] = (members[0].name, others[0].name)
    return found


def pair_of(a: str, b: str) -> str:
    """Return the key of two kinds in ``Profile.transfer_s``."""
    return "|".join(sorted((a, b)))
