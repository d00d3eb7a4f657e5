"""Cost profiles of devices: prices of kernels, transfers and contention; read from and written to files.

A file is one JSON document with a device's processors, their prices, and provenance. It is given by its path, or by its
name if it ships with the product (``experiments/profiles/NAME.json``). JSON is YAML, so a profile may also be called
``.yaml``, as platforms are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evaluators.cost_model.correction import Process
from evaluators.cost_model.features import Array, OperatorFeatures, columns, fused, matrix_shares, products
from evaluators.cost_model.kernels import Count, KernelModel, Number, Price
from search_spaces.core.bounded import built, parsed_json, plain, read_bounded
from search_spaces.core.errors import ProfileError, UsageError, reason_of, shown
from search_spaces.core.platform import Platform
from search_spaces.core.wording import plural

TOLERATED = 1.5  # operators further beyond the fitted range than this factor are reported
UNSEEN_SIGMA = 1.0
_LONG_S, _PASSES, _ROUGH_S_PER_MAC = 0.1, 3, 2e-11
_CALL_NEAR_S = 3e-3  # after it, half of the runtime's state is forgotten

COLD_BYTES = 256 << 10
"""Tensor size from which the extra time to read it from another core's cache is constant (``cold_s``)."""

# Kernel → kernels that replace it where a processor's fit does not have it: the first that it has.
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


class Prediction(NamedTuple):
    """Times of n operators: ``seconds`` and ``relative_sigma`` (standard deviation over time), shape ``(n,)``."""

    seconds: Array
    relative_sigma: Array


@dataclass(frozen=True, slots=True)
class Concern:
    """Operators whose predictions are extrapolated.

    Attributes:
        operators: their indices among the given features.
        kernel: the key of their kernel.
        beyond: how many times outside the fitted range the farthest lies; infinity for a kernel that is missing in the
            fit.
    """

    operators: tuple[int, ...]
    kernel: str
    beyond: float


def forgotten(interval_s: float) -> float:
    """Return which share of a runtime's state caches forget from one inference to the next.

    Where this was measured, a stage call costs 2.3 µs every millisecond, 4 µs every three, and 6 µs every ten.
    """
    return 1.0 - 1.0 / (1.0 + (interval_s / _CALL_NEAR_S) ** 2)


@dataclass(frozen=True, slots=True)
class ProcessorProfile:
    """Prices of one processor.

    Attributes:
        kernels: :attr:`OperatorFeatures.key` → its model.
        dispatch_s: for every operator that is not free, beside its kernel's time.
        invocation_s: for every stage, to enter and leave the runtime.
        far_call_s: what a stage costs in addition where caches forgot the runtime's state (:func:`forgotten`).
        io_s_per_byte: for the bytes that a stage reads from and returns to its caller.
        cache_bytes: last-level cache; 0 where unknown.
        capacity_bytes: weights of one stage beyond which the whole stage slows down (seed 000); 0 where unknown.
        pressure_per_byte: slowdown of all operators of the stage by each byte beyond ``capacity_bytes``, as a share of
            their time: convolutions are slow together with large fully connected layers, and each is fast alone.
        power_w: while it runs, above idle; None where unknown.
        merged: kernels that the runtime fuses with the operator before them, whose time includes theirs.
        fuses: whether the runtime runs operators that are ``fusable``
            (:class:`~evaluators.cost_model.features.OperatorFeatures`) in the kernels of others.
        errors: of the fit on what was kept out of it: ``median``, ``p90``, ``within_5``, ``within_10``, ….
    """

    kernels: Mapping[str, KernelModel]
    dispatch_s: Price = 0.0
    invocation_s: Price = 0.0
    io_s_per_byte: Price = 0.0
    cache_bytes: Count = 0
    capacity_bytes: Count = 0
    pressure_per_byte: Number = 0.0
    power_w: Number | None = None
    merged: tuple[str, ...] = ()
    fuses: bool = False
    far_call_s: Price = 0.0
    errors: Mapping[str, float] = field(default_factory=dict)

    def call_s(self, interval_s: float) -> float:
        """Return the cost of a stage (s) where one inference begins ``interval_s`` after the other."""
        return self.invocation_s + self.far_call_s * forgotten(interval_s)


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Cost of a transfer of a tensor between two processors, in both directions unless both are listed.

    Attributes:
        source, target: names of processors.
        latency_s: per transfer, whatever its size: synchronise, map and unmap together.
        copy_s_per_byte: to copy.
        transform_s_per_byte: to change the layout (an image for a buffer; seed 002).
        cold_s: extra time of the reader because a tensor of :data:`COLD_BYTES` or more lies in another core's caches;
            proportionally less for smaller ones.
        one_core: whether it applies to processors that are driven from the same core; None: to all of these kinds.
    """

    source: str
    target: str
    latency_s: Price = 0.0
    copy_s_per_byte: Price = 0.0
    transform_s_per_byte: Price = 0.0
    cold_s: Price = 0.0
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
    compute: Number = 1.0
    memory: Number = 1.0


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Prices of one device.

    Attributes:
        name: of the device.
        processors: name (or ``like``) of a processor → its profile.
        links, contention: of pairs of processors; pairs that are not listed cost nothing.
        provenance: who measured what, when, where, with which versions; plain values.
        errors: of whole models and plans that were kept out of the fit, and how much the machine's speed changed
            meanwhile.
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
            ProfileError: there is none.
        """
        try:
            return self.processors[processor]
        except KeyError:
            known = ", ".join(self.processors) or "none"
            raise ProfileError(f"profile {self.name!r} has no processor {processor!r}", f"it has: {known}") from None

    def predict(self, features: Sequence[OperatorFeatures], processor: str, shares: Sequence[float] = ()) -> Prediction:
        """Return the time of each operator on a processor, dispatch included.

        Args:
            shares: as of :class:`~search_spaces.rewrites.lower.Lowered`; an inference takes so much of an operator's
                time, less than all of a split operator's sides, which run at once.

        Raises:
            ProfileError: there is no such processor, or no kernel similar to one of the operators'.
        """
        model, rows = self[processor], columns(features)
        keys = [(*self._kernel(processor, key), where) for key, where in _by_key(features, model).items()]
        # How soon weights are used again, and what ran before, depend on the result: iterate from a rough estimate.
        seconds, interval_s, busy = _ROUGH_S_PER_MAC * rows.macs, _LONG_S, products(features)
        known_s, share = rows.interval, np.array(shares or (1.0,))
        for _ in range(_PASSES if any(kernel.remembers for kernel in model.kernels.values()) else 1):
            interval = np.where(known_s > 0.0, known_s, interval_s)
            rows = replace(rows, interval=interval, matrix_share=matrix_shares(busy, seconds * share))
            seconds, sigma = np.zeros(len(features)), np.zeros(len(features))
            for kernel, _, where in keys:
                kernel_s, sigma[where] = kernel.predict(rows[where])
                seconds[where] = kernel_s + model.dispatch_s
            interval_s = float((seconds * share).sum())
        for kernel, seen, where in keys:
            spread, beyond = sigma[where], np.log(kernel.outside(rows[where]))
            sigma[where] = np.hypot(spread if seen else np.maximum(spread, UNSEEN_SIGMA), 0.5 * beyond)
        return Prediction(seconds, sigma)

    def predict_whole(self, features: Sequence[OperatorFeatures], processor: str) -> float:
        """Return the time of operators that are loaded as one stage (s)."""
        model = self[processor]
        total = float(self.predict(features, processor).seconds.sum())
        held = sum(f.weight_bytes for f in features)
        beyond = max(0.0, held - model.capacity_bytes) if model.capacity_bytes else 0.0
        slowed = total * (1.0 + beyond * model.pressure_per_byte)
        io_bytes = features[0].read_bytes + features[-1].written_bytes if features else 0
        return slowed + model.call_s(total) + io_bytes * model.io_s_per_byte

    def concerns(self, features: Sequence[OperatorFeatures], processor: str) -> tuple[Concern, ...]:
        """Return the extrapolated predictions: kernels missing in the fit, and shapes far outside its range."""
        found = []
        rows = columns(features)
        for key, where in _by_key(features, replace(self[processor], fuses=False)).items():  # each may be cut off
            kernel, seen = self._kernel(processor, key)
            beyond = kernel.outside(rows[where]) if seen else np.full(len(where), np.inf)
            far = where[beyond > TOLERATED]
            if far.size:
                found.append(Concern(tuple(int(i) for i in far), key, float(beyond.max())))
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
    fine_keys = any(key.endswith(("+pixels", "+channels")) for key in model.kernels)
    for index, feature in enumerate(fused(features) if model.fuses else features):
        if not feature.free and feature.kernel not in model.merged:
            fine = feature.fine if fine_keys else feature.fine_once
            key = fine if fine in model.kernels else feature.key
            found.setdefault(key, []).append(index)
    return {key: np.asarray(where, dtype=np.intp) for key, where in found.items()}


def extrapolation_warning(name: str, concerns: Mapping[str, Iterable[Concern]]) -> str | None:
    """Return a line about extrapolated operators; None where there are none.

    Args:
        name: of the profile.
        concerns: processor → its extrapolated operators.
    """
    processors: dict[tuple[str, bool], list[str]] = {}
    worst: dict[tuple[str, bool], Concern] = {}
    indices: set[int] = set()
    for processor, found in concerns.items():
        for concern in found:
            what = concern.kernel, math.isinf(concern.beyond)
            indices.update(concern.operators)
            processors.setdefault(what, []).append(processor)
            if what not in worst or concern.beyond > worst[what].beyond:
                worst[what] = concern
    if not processors:
        return None
    far = [
        f"{kernel} (up to {_times(worst[kernel, unseen].beyond)} times{_where(processors[kernel, unseen], concerns)})"
        for kernel, unseen in sorted(processors, key=lambda what: -worst[what].beyond)
        if not unseen
    ]
    never = [f"{kernel}{_where(found, concerns)}" for (kernel, unseen), found in processors.items() if unseen]
    parts = [f"larger or smaller than in its fit: {', '.join(far)}"] if far else []
    parts += [f"not in its fit: {', '.join(never)}"] if never else []
    return f"profile {name!r} extrapolates {plural(len(indices), 'operator')}; {'; '.join(parts)}; errors may be large"


def _times(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _where(processors: list[str], every: Mapping[str, object]) -> str:
    """Return the processors as words, "" for all processors."""
    if len(processors) == len(every):
        return ""
    return (
        f" on {', '.join(processors)}" if len(processors) <= 2 else f" on {len(processors)} of {len(every)} processors"
    )


SCHEMA_VERSION = 1
KIND = "cost profile"
SHIPPED = Path(__file__).parents[2] / "experiments" / "profiles"
SUFFIXES = (".json", ".yaml", ".yml")
_MAX_NBYTES, _HEAD_NBYTES = 64 << 20, 256


def find_profile(source: str | Path) -> tuple[CostProfile, Platform] | None:
    """Return the profile at a path or with a shipped name; None where it is neither.

    Raises:
        ProfileError: the file is a damaged profile.
        UsageError: the file cannot be read.
    """
    name, path = str(source), Path(source)
    if path.suffix != ".json" and not _begins_as_profile(path):
        path = SHIPPED / f"{name}.json"
        if "/" in name or "\0" in name or not path.is_file():
            return None
    return read_profile(path)


def _begins_as_profile(path: Path) -> bool:
    """Return whether a YAML file is a profile rather than a platform."""
    if path.suffix not in SUFFIXES:
        return False
    try:
        head = read_bounded(path, _MAX_NBYTES)[:_HEAD_NBYTES]
    except OSError:
        return False
    return head.lstrip().startswith(b"{") and KIND.encode() in head


def shipped_profiles() -> list[str]:
    """Return the names of the profiles that ship with the product."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def to_json(profile: CostProfile, platform: Platform) -> dict[str, Any]:
    """Return a profile and its processors as plain values."""
    content = plain(CostProfile, profile)
    return {"schema_version": SCHEMA_VERSION, "kind": KIND, "platform": platform.to_json(), "profile": content}


def profile_digest(profile: CostProfile) -> str:
    """Return the SHA-256 (hex) of all values that a profile predicts with, without provenance and errors."""
    content = {
        name: value for name, value in plain(CostProfile, profile).items() if name not in {"provenance", "errors"}
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_profile(path: Path) -> tuple[CostProfile, Platform]:
    """Read a profile; unknown fields are ignored.

    Raises:
        ProfileError: the file is not a profile, of a newer version, damaged, or has a price that is not valid.
        UsageError: the file cannot be read.
    """
    try:
        if not path.is_file():
            raise UsageError(f"{path}: there is no such file", "optimize calibrate --out FILE makes a profile")
        content = parsed_json(read_bounded(path, _MAX_NBYTES))
    except OSError as error:
        raise UsageError(f"{path}: {reason_of(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: is not a JSON document: {error}") from error
    try:
        return from_json(content)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error.what}", error.hint or "calibrate the device again") from error


def from_json(content: object) -> tuple[CostProfile, Platform]:
    """Build a profile and its processors from what :func:`to_json` returned; unknown fields are ignored.

    Raises:
        ProfileError: a field is missing or has the wrong type, or a price is negative or not finite.
    """
    if not isinstance(content, Mapping) or content.get("kind") != KIND:
        raise ProfileError("is not a cost profile", "optimize calibrate --out FILE makes one")
    version = content.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        reason = f"schema_version is {version}, and this version reads up to {SCHEMA_VERSION}"
        raise ProfileError(f"a newer version of the program wrote it: {reason}", "update the program")
    if type(version) is not int or version < 1:
        raise ProfileError(f"has schema_version {shown(version)}; this version reads 1 to {SCHEMA_VERSION}")
    platform = built(Platform, content.get("platform"), "the profile is", ProfileError)
    profile = built(CostProfile, content.get("profile"), "the profile is", ProfileError)
    for processor in profile.processors.values():
        for key, kernel in processor.kernels.items():
            if isinstance(kernel.correction, Process) and not kernel.correction.fits():
                raise ProfileError(f"{key} was fitted by another version of this program", "calibrate the device again")
    return profile, platform
