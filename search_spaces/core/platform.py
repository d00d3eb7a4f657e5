"""The processors of a device, and which of them exclude each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from search_spaces.core.errors import UsageError

MEMORY = "memory_nbytes"
"""Option of a processor with limited memory, which all of its kind share (bytes)."""
BESIDE = "beside"
"""Option of a processor that differs from others beside busy ones alone: the part of ``like`` that tells them apart."""
_MEMORY, _UNITS = re.compile("memory=([1-9][0-9]{0,5})(MB|GB)"), {"MB": 10**6, "GB": 10**9}


def memory_word(word: str) -> int | None:
    """Return the bytes of a word such as ``memory=400MB`` in a processor's name; None where it is another word."""
    found = _MEMORY.fullmatch(word)
    return None if found is None else int(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True, slots=True)
class Processor:
    """One processor on which stages run, one after another.

    Attributes:
        name: unique on its platform (``cpu``, ``cpu0``).
        kind: ``cpu``, ``gpu`` or ``npu``.
        resources: share of each physical resource that a running stage takes (``{"core0": 1.0}``). Processors whose
            shares of one resource add up to more than 1 exclude each other.
        like: processors with the same value are interchangeable; a canonical plan names the first ones.
        options: what an evaluator needs to set the processor up (``cores``, ``threads``, …), plain values.
        slots: how many stages may run on it at once.
    """

    name: str
    kind: Literal["cpu", "gpu", "npu"]
    resources: Mapping[str, float]
    like: str
    options: Mapping[str, Any] = field(default_factory=dict)
    slots: int = 1

    def excludes(self, other: Processor) -> bool:
        """Return whether a stage here and one on ``other`` cannot run at the same time."""
        return any(share + other.resources.get(name, 0.0) > 1.0 for name, share in self.resources.items())

    @property
    def timed_as(self) -> str:
        """The kind of processors on which, where nothing else runs, stages take as long as on this one."""
        return self.like.replace(str(self.options.get(BESIDE, "")), "", 1)

    @property
    def cores(self) -> tuple[Any, ...]:
        """The cores that its options list, the one that drives it first; none where they hold no list."""
        found = self.options.get("cores")
        return tuple(found) if isinstance(found, list | tuple) else ()


def with_cpu(processor: Processor) -> Processor:
    """Return an accelerator with CPU fallback: LiteRT runs unsupported operators on CPU cores, which it occupies."""
    if processor.kind == "cpu" or processor.options.get("fallback"):
        return processor
    head, colon, words = processor.name.partition(":")
    name = f"{head}+cpu{colon}{words}"
    resources = {**processor.resources, **{f"core{core}": 1.0 for core in processor.cores}}
    options = {**processor.options, "fallback": True, "threads": max(1, len(processor.cores))}
    return replace(processor, name=name, resources=resources, like=f"{processor.like}+cpu", options=options)


@dataclass(frozen=True, slots=True)
class Link:
    """Cost of a transfer between two processors, in either direction, as a user or a calibration gives it."""

    between: tuple[str, str]
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a plan may take before it counts as failed.

    Attributes:
        load_s: to compile the stages of one processor.
        run_s: for one inference, before the plan has been timed.
    """

    load_s: float = 300.0
    run_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Platform:
    """A device: its name and its processors, in the order in which a canonical plan prefers them.

    Raises:
        UsageError: there is no processor, two have one name, or a link ends at none of them.
    """

    name: str
    processors: tuple[Processor, ...]
    links: tuple[Link, ...] = ()
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        names = [p.name for p in self.processors]
        if not names:
            raise UsageError(f"platform {self.name!r} has no processor")
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise UsageError(f"platform {self.name!r}: two processors are called {twice!r}")
        for link in self.links:
            for end in link.between:
                self[end]

    def __getitem__(self, name: str) -> Processor:
        """Return the processor called ``name``.

        Raises:
            UsageError: there is none.
        """
        for processor in self.processors:
            if processor.name == name:
                return processor
        known = ", ".join(p.name for p in self.processors)
        raise UsageError(f"platform {self.name!r} has no processor {name!r}", f"it has: {known}")

    def restrict(self, names: Sequence[str] | None) -> Platform:
        """Return the platform with only the named processors, in that order; None keeps all.

        Raises:
            UsageError: there is no processor of that name, or it is named twice.
        """
        if names is None:
            return self
        links = tuple(link for link in self.links if set(link.between) <= set(names))
        return replace(self, processors=tuple(self[name] for name in names), links=links)

    def accelerators(self, names: Iterable[str]) -> frozenset[str]:
        """Return the kinds, other than CPU, of the named processors; the clocks of these follow their load."""
        own = set(names)
        return frozenset(p.kind for p in self.processors if p.name in own and p.kind != "cpu")

    def classes(self) -> dict[str, tuple[Processor, ...]]:
        """Return the processors grouped by ``like``, in platform order."""
        groups: dict[str, list[Processor]] = {}
        for processor in self.processors:
            groups.setdefault(processor.like, []).append(processor)
        return {like: tuple(members) for like, members in groups.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the platform as plain values; limits are left out, as measurements do not depend on them."""
        links = [asdict(link) | {"between": list(link.between)} for link in self.links]
        found = {"name": self.name, "processors": [asdict(processor) for processor in self.processors]}
        return ({"links": links} if links else {}) | found


def tell_apart(processors: Sequence[Processor]) -> tuple[Processor, ...]:
    """Return the processors with ``like`` changed where two of one value are not interchangeable on this platform.

    Interchangeable processors exclude the same others, and either all of them exclude each other or none does.
    """
    groups: dict[str, list[Processor]] = {}
    for each in processors:
        groups.setdefault(each.like, []).append(each)
    found = []
    for each in processors:
        outside = [p.name for p in processors if p.like != each.like and p.excludes(each)]
        mine = groups[each.like]
        others = [[p.name for p in processors if p.like != m.like and p.excludes(m)] for m in mine]
        within = {a.excludes(b) for a in mine for b in mine if a is not b}
        if len(within) > 1:
            found.append(replace(each, like=f"{each.like}@{each.name}"))
        elif any(o != outside for o in others):
            found.append(replace(each, like=f"{each.like}@{'+'.join(outside)}"))
        else:
            found.append(each)
    return tuple(found)


def memory_limit_nbytes(processors: Iterable[Processor]) -> int | None:
    """Return the memory that processors share; None where it is not limited.

    Raises:
        UsageError: they have different limits, or only some have one.
    """
    every = list(processors)
    limits = {p.options.get(MEMORY) for p in every}
    if len(limits) > 1:
        names = ", ".join(p.name for p in every)
        raise UsageError(f"{names} need the same memory=, or none", "they share the memory of one device")
    found: int | None = next(iter(limits), None)
    return found
