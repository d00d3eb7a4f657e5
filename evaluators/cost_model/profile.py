"""A device as the cost model knows it: prices of its kernels, of hand-overs, of standing in each other's way."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from evaluators.cost_model.columns import Array, columns
from evaluators.cost_model.features import OperatorFeatures
from evaluators.cost_model.kernels import KernelModel
from evaluators.cost_model.recent import with_duties
from search_spaces.errors import ProfileError

TOLERATED = 1.5  # an operator this many times beyond the fitted range is told of
UNSEEN_SIGMA = 1.0
_LONG_S, _PASSES, _ROUGH_S_PER_MAC = 0.1, 3, 2e-11

COLD_BYTES = 256 << 10
"""So much of a tensor lies in the cache of the core that wrote it, and is missed in that of another; see ``cold_s``."""

# Which kernel stands in for one that a processor's fit has not seen: the first that is there.
STANDS_IN: Mapping[str, tuple[str, ...]] = {
    "winograd": ("conv", "pointwise"),
    "pointwise": ("conv", "winograd"),
    "conv": ("winograd", "pointwise", "grouped"),
    "grouped": ("conv", "winograd"),
    "depthwise": ("grouped", "conv"),
    "fully_connected": ("pointwise", "matmul"),
    "matmul": ("pointwise", "fully_connected"),
    "transpose_conv": ("conv", "winograd"),
    "pool": ("mean", "elementwise", "copy", "concat"),
    "mean": ("pool", "elementwise", "copy", "concat"),
    "elementwise": ("copy", "concat", "pool", "other"),
    "concat": ("copy", "elementwise", "pool"),
    "copy": ("concat", "elementwise", "pool"),
    "softmax": ("elementwise", "mean", "pool", "concat"),
    "other": ("elementwise", "copy", "concat", "pool"),
}


class OutsideFitWarning(UserWarning):
    """A prediction was asked for where the profile was not fitted."""


class Prediction(NamedTuple):
    """Times of n operators: ``seconds`` and ``relative_sigma`` (standard deviation over time), shape ``(n,)``."""

    seconds: Array
    relative_sigma: Array


@dataclass(frozen=True, slots=True)
class Concern:
    """Why predictions of some operators are to be doubted.

    Attributes:
        reason: one line for a person.
        operators: their indices among the features asked for.
        kernel: theirs.
        beyond: how many times outside the range of the fit the farthest lies; infinity for a kernel that the fit has
            not seen.
    """

    reason: str
    operators: tuple[int, ...]
    kernel: str
    beyond: float


@dataclass(frozen=True, slots=True)
class ProcessorProfile:
    """One processor.

    Attributes:
        kernels: :attr:`OperatorFeatures.key` → its model.
        dispatch_s: for every operator that is not free, beside what its kernel takes.
        invocation_s: for every stage, to enter and leave the runtime.
        io_s_per_byte: for what a stage reads from and hands back to its caller.
        cache_bytes: last-level cache; 0 where unknown.
        capacity_bytes: weights of one stage beyond which all of it slows down (seed 000); 0 where none is known.
        pressure_per_byte: how much each byte beyond ``capacity_bytes`` slows all operators of the stage, as a share of
            their time: convolutions are slow together with large fully connected layers, and each is fast alone.
        power_w: while it runs, above idle; None where unknown.
        merged: kernels that the runtime makes part of the operator before them: their time is in that one's.
        errors: of the fit on what was kept out of it: ``median``, ``p90``, ``within_5``, ``within_10``, ….
    """

    kernels: Mapping[str, KernelModel]
    dispatch_s: float = 0.0
    invocation_s: float = 0.0
    io_s_per_byte: float = 0.0
    cache_bytes: int = 0
    capacity_bytes: int = 0
    pressure_per_byte: float = 0.0
    power_w: float | None = None
    merged: tuple[str, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """What handing a tensor from one processor to another costs, in both directions unless both are listed.

    Attributes:
        source, target: names of processors.
        latency_s: per hand-over, whatever its size: synchronise, map and unmap together.
        copy_s_per_byte: to copy.
        transform_s_per_byte: to change the layout (an image for a buffer; seed 002).
        cold_s: what the reader takes longer since a tensor lies in the caches of another core: all of it for one of
            :data:`COLD_BYTES` or more, in proportion for smaller ones.
        one_core: whether it is about processors that are driven from the same core; None: about all of these kinds.
    """

    source: str
    target: str
    latency_s: float = 0.0
    copy_s_per_byte: float = 0.0
    transform_s_per_byte: float = 0.0
    cold_s: float = 0.0
    one_core: bool | None = None


@dataclass(frozen=True, slots=True)
class ContentionProfile:
    """How much longer a stage takes on ``victim`` while ``other`` is busy.

    Attributes:
        compute: factor of the part that is not traffic, at least 1.
        memory: factor of the part that is traffic, at least 1.
    """

    victim: str
    other: str
    compute: float = 1.0
    memory: float = 1.0


@dataclass(frozen=True, slots=True)
class CostProfile:
    """One device.

    Attributes:
        name: of the device.
        processors: name (or ``like``) of a processor → its profile.
        links, contention: see there; what is not listed costs nothing.
        provenance: who measured what, when, where, with which versions; plain values.
        errors: of whole models and plans that were kept out of the fit.
    """

    name: str
    processors: Mapping[str, ProcessorProfile]
    links: tuple[LinkProfile, ...] = ()
    contention: tuple[ContentionProfile, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, processor: str) -> ProcessorProfile:
        """Return the profile of a processor.

        Raises:
            ProfileError: it has none.
        """
        try:
            return self.processors[processor]
        except KeyError:
            known = ", ".join(self.processors) or "none"
            raise ProfileError(f"profile {self.name!r} has no processor {processor!r}", f"it has: {known}") from None

    def predict(self, features: Sequence[OperatorFeatures], processor: str, *, warn: bool = True) -> Prediction:
        """Return how long each operator takes on a processor, dispatch included.

        Args:
            warn: whether doubts (:meth:`concerns`) become an :class:`OutsideFitWarning`.

        Raises:
            ProfileError: there is no such processor, or nothing that resembles one of the kernels.
        """
        if warn:
            for concern in self.concerns(features, processor):
                warnings.warn(concern.reason, OutsideFitWarning, stacklevel=2)
        # How soon weights are used again, and what runs when, depends on the result: begin with what takes long.
        seconds, pace_s = np.array([_ROUGH_S_PER_MAC * f.macs for f in features]), _LONG_S
        for _ in range(_PASSES if any(kernel.remembers for kernel in self[processor].kernels.values()) else 1):
            paced = [f if f.interval_s else replace(f, interval_s=pace_s) for f in features]
            found = self._predict(with_duties(paced, seconds), processor)
            seconds, pace_s = found.seconds, float(found.seconds.sum())
        return found

    def _predict(self, features: Sequence[OperatorFeatures], processor: str) -> Prediction:
        model = self[processor]
        rows = columns(features)
        seconds, sigma = np.zeros(len(features)), np.zeros(len(features))
        for key, where in _by_key(features, model).items():
            kernel, seen = self._kernel(processor, key)
            picked = rows[where]
            kernel_s, doubt = kernel.predict(picked)
            seconds[where] = kernel_s + model.dispatch_s
            beyond = np.log(kernel.outside(picked))
            sigma[where] = np.hypot(doubt if seen else np.maximum(doubt, UNSEEN_SIGMA), 0.5 * beyond)
        return Prediction(seconds, sigma)

    def predict_whole(self, features: Sequence[OperatorFeatures], processor: str, *, io_bytes: float = 0.0) -> float:
        """Return how long operators that are loaded as one stage take together, in seconds; no doubts are told."""
        model = self[processor]
        total = float(self.predict(features, processor, warn=False).seconds.sum())
        held = sum(f.weight_bytes for f in features)
        beyond = max(0.0, held - model.capacity_bytes) if model.capacity_bytes else 0.0
        slowed = total * (1.0 + beyond * model.pressure_per_byte)
        return slowed + model.invocation_s + io_bytes * model.io_s_per_byte

    def concerns(self, features: Sequence[OperatorFeatures], processor: str) -> tuple[Concern, ...]:
        """Return which predictions are guesses: kernels that the fit has not seen, shapes far outside its range."""
        found = []
        rows = columns(features)
        for key, where in _by_key(features, self[processor]).items():
            kernel, seen = self._kernel(processor, key)
            if not seen:
                found.append(
                    Concern(
                        f"profile {self.name!r} has seen no {key} on {processor}; {len(where)} predictions are guesses",
                        tuple(int(i) for i in where),
                        key,
                        math.inf,
                    )
                )
                continue
            beyond = kernel.outside(rows[where])
            far = where[beyond > TOLERATED]
            if far.size:
                found.append(
                    Concern(
                        f"{far.size} {key} operators lie up to {beyond.max():.1f} times outside the range in which "
                        f"{processor} of profile {self.name!r} was fitted",
                        tuple(int(i) for i in far),
                        key,
                        float(beyond.max()),
                    )
                )
        return tuple(found)

    def _kernel(self, processor: str, key: str) -> tuple[KernelModel, bool]:
        kernels = self[processor].kernels
        if key in kernels:
            return kernels[key], True
        name, _, dtype = key.partition(":")
        suffix = f":{dtype}" if dtype else ""
        for other in (*(f"{k}{suffix}" for k in STANDS_IN.get(name, ())), name, *STANDS_IN.get(name, ())):
            if other in kernels:
                return kernels[other], False
        raise ProfileError(
            f"profile {self.name!r} does not cover {key} on {processor}",
            "calibrate it with a model that has such operators, or leave this processor out",
        )


def _by_key(
    features: Sequence[OperatorFeatures], model: ProcessorProfile
) -> dict[str, np.ndarray[Any, np.dtype[np.intp]]]:
    found: dict[str, list[int]] = {}
    tells = any(key.endswith(("+pixels", "+channels")) for key in model.kernels)
    for index, feature in enumerate(features):
        if not feature.free and feature.kernel not in model.merged:
            fine = feature.fine if tells else feature.fine_once
            key = fine if fine in model.kernels else feature.key
            found.setdefault(key, []).append(index)
    return {key: np.asarray(where, dtype=np.intp) for key, where in found.items()}
