"""Cost tables of a graph on a platform: each operator on each processor, each transfer between two processors.

The tables hold predictions of a profile (:mod:`evaluators.cost_model.profile`) for one graph; the simulator reads
nothing else, so that it can also run on measured tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from evaluators.cost_model.features import MERGED, OperatorFeatures, operator_features
from evaluators.cost_model.profile import CostProfile, ProcessorProfile
from search_spaces.core.errors import ProfileError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.states import State

Table = NDArray[np.float64]

_MACS_PER_BYTE = 16.0  # an operator of this intensity spends about half its time on traffic


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """Tables for P processors in platform order and n operators; times in seconds.

    Attributes:
        operator_s: shape ``(P, n)``; infinite where a processor does not support an operator.
        sigma: their relative standard deviations, the same shape.
        traffic: the share of an operator's time that is memory traffic, shape ``(n,)``.
        invocation_s: for every stage, shape ``(P,)``.
        io_s_per_byte: for the bytes that a stage reads from and returns to its caller, shape ``(P,)``.
        latency_s: from the end of a stage to the start of one that reads from it, ``[from, to]``, shape ``(P, P)``.
        byte_s: for each byte that a stage reads from another processor's stage, ``[from, to]``; part of the reader's
            time.
        cold_s: for each tensor of at least ``COLD_BYTES`` that a stage reads from another processor's stage,
            proportionally less for smaller ones; part of the reader's time; None for 0 everywhere.
        asleep_s: replaces ``latency_s`` where the reader's processor sleeps, because stages that need its cores ran
            after its last one; also from such a stage to the one that waits for it, whether or not that reads from it.
            None where transfers take the same, asleep or not.
        slow_compute, slow_memory: factors on the two parts of a time on processor ``[victim]`` while ``[other]`` is
            busy.
        capacity_bytes, pressure_per_byte: each byte of a stage's weights beyond the first (0: no limit) slows all its
            operators by the second, as a share of their time.
        power_w: while a processor runs, shape ``(P,)``; NaN where unknown.
        alone_s: for an operator that a processor fuses with others: its time where one of these is in another stage;
            0 for all others; shape ``(P, n)``, or None where there is none.
    """

    operator_s: Table
    sigma: Table
    traffic: Table
    invocation_s: Table
    io_s_per_byte: Table
    latency_s: Table
    byte_s: Table
    slow_compute: Table
    slow_memory: Table
    capacity_bytes: Table
    pressure_per_byte: Table
    power_w: Table
    alone_s: Table | None = None
    cold_s: Table | None = None
    asleep_s: Table | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            table = getattr(self, name)
            if table is not None and name != "power_w" and (np.isnan(table).any() or (table < 0).any()):
                raise ProfileError(f"{name} has an entry that is negative or no number")


def prices(profile: CostProfile, graph: Graph, platform: Platform, shares: Sequence[float] = ()) -> Prices:
    """Return a profile's tables for a graph on a platform's processors.

    Args:
        shares: as of :class:`~search_spaces.rewrites.lower.Lowered`.

    Raises:
        ProfileError: the profile lacks a processor, or a kernel similar to that of some operator.
    """
    features = operator_features(graph)
    processors = platform.processors
    keys = [profile_key(profile, processor) for processor in processors]
    known = {key: profile.predict(features, key, shares) for key in dict.fromkeys(keys)}
    interval_s = {key: float((each.seconds * np.array(shares or (1.0,))).sum()) for key, each in known.items()}
    alone = {key: _alone(profile, features, key) for key in known}
    alone_s = np.array([alone[key][0] for key in keys])
    of: list[ProcessorProfile] = [profile[key] for key in keys]
    latency_s, byte_s, cold_s = _links(profile, platform, keys)
    compute, memory = _contention(profile, platform, keys)
    return Prices(
        operator_s=np.array([known[key].seconds for key in keys]),
        sigma=np.array([np.maximum(known[key].relative_sigma, alone[key][1]) for key in keys]),
        traffic=np.array([_traffic(f) for f in features]),
        invocation_s=np.array([profile[key].call_s(interval_s[key]) for key in keys]),
        io_s_per_byte=np.array([p.io_s_per_byte for p in of]),
        latency_s=latency_s,
        byte_s=byte_s,
        slow_compute=compute,
        slow_memory=memory,
        capacity_bytes=np.array([float(p.capacity_bytes) for p in of]),
        pressure_per_byte=np.array([p.pressure_per_byte for p in of]),
        power_w=np.array([np.nan if p.power_w is None else p.power_w for p in of]),
        alone_s=alone_s if alone_s.any() else None,
        cold_s=cold_s if cold_s.any() else None,
        asleep_s=_asleep(platform, latency_s) if any(link.one_core is not None for link in profile.links) else None,
    )


def _alone(profile: CostProfile, features: Sequence[OperatorFeatures], key: str) -> tuple[Table, Table]:
    """Return what the operators that a processor fuses take alone (s), and their relative standard deviations."""
    seconds, sigma = np.zeros(len(features)), np.zeros(len(features))
    if padded := [i for i, f in enumerate(features) if f.free and f.kind in MERGED]:
        apart = profile.predict([replace(features[i], free=False) for i in padded], key)
        seconds[padded], sigma[padded] = apart.seconds, apart.relative_sigma
    if not profile[key].fuses:
        return seconds, sigma
    if fusable := [i for i, f in enumerate(features) if f.fusable]:
        unfused = CostProfile(profile.name, {key: replace(profile[key], fuses=False)})
        apart = unfused.predict(features, key)
        seconds[fusable], sigma[fusable] = apart.seconds[fusable], apart.relative_sigma[fusable]
    return seconds, sigma


def slowed(usual: Prices, state: State, platform: Platform) -> Prices:
    """Return the prices of a platform in a state."""
    factor = np.array([state.factor(p.name) for p in platform.processors])
    return replace(
        usual,
        operator_s=usual.operator_s * factor[:, None],
        invocation_s=usual.invocation_s * factor,
        io_s_per_byte=usual.io_s_per_byte * factor,
        alone_s=None if usual.alone_s is None else usual.alone_s * factor[:, None],
    )


def profile_key(profile: CostProfile, processor: Processor) -> str:
    """Return the key of a processor in a profile: its own name, or its kind's.

    Raises:
        ProfileError: the profile has neither.
    """
    for key in (processor.name, processor.like, processor.like.partition("@")[0]):
        if key in profile.processors:
            return key
    known = ", ".join(profile.processors) or "none"
    raise ProfileError(
        f"processor {processor.name!r} ({processor.like}) is not in profile {profile.name!r}",
        f"it has: {known}; choose among them with --processors, or calibrate this one",
    )


def one_core(one: Processor, other: Processor) -> bool:
    """Return whether two processors are driven from the same core, so that waking one interrupts the other."""
    first = one.cores[:1]
    return bool(first) and first == other.cores[:1]


def _links(profile: CostProfile, platform: Platform, keys: list[str]) -> tuple[Table, Table, Table]:
    latency_s, byte_s, cold_s = (np.zeros((len(keys), len(keys))) for _ in range(3))
    known = np.full(latency_s.shape, -1)  # how closely the link applied so far matches
    both = {(link.source, link.target) for link in profile.links}
    for link in profile.links:
        pairs = [(link.source, link.target)]
        if (link.target, link.source) not in both:
            pairs.append((link.target, link.source))
        for (i, a), (j, b) in permutations(enumerate(keys), 2):
            here = one_core(platform.processors[i], platform.processors[j])
            suits = 1 if link.one_core is None else 2 if link.one_core == here else 0
            if (a, b) in pairs and suits >= known[i, j]:
                known[i, j] = suits
                byte_s[i, j] = link.copy_s_per_byte + link.transform_s_per_byte
                latency_s[i, j], cold_s[i, j] = link.latency_s, link.cold_s
    return latency_s, byte_s, cold_s


def _asleep(platform: Platform, latency_s: Table) -> Table:
    """Return the time (s) to wake a processor by another one, from links of excluded processors that lie as near."""
    found = latency_s.copy()
    for (i, other), (j, processor) in permutations(enumerate(platform.processors), 2):
        if not processor.excludes(other):
            near = one_core(other, processor)
            waking = (
                latency_s[e, j]
                for e, third in enumerate(platform.processors)
                if e != j and processor.excludes(third) and one_core(third, processor) == near
            )
            found[i, j] = max(found[i, j], *waking, 0.0)
    return found


def _contention(profile: CostProfile, platform: Platform, keys: list[str]) -> tuple[Table, Table]:
    compute, memory = np.ones((len(keys), len(keys))), np.ones((len(keys), len(keys)))
    for entry in profile.contention:
        for (i, a), (j, b) in permutations(enumerate(keys), 2):
            excluded = platform.processors[i].excludes(platform.processors[j])
            if not excluded and (a, b) == (entry.victim, entry.other):
                compute[i, j], memory[i, j] = entry.compute, entry.memory
    return compute, memory


def _traffic(f: OperatorFeatures) -> float:
    """Return the assumed share of memory traffic in an operator's time: it falls with arithmetic intensity."""
    return 1.0 / (1.0 + f.intensity / _MACS_PER_BYTE)
