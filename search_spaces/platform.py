"""The processors of a device, and which of them stand in each other's way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from search_spaces.errors import UsageError


@dataclass(frozen=True, slots=True)
class Processor:
    """One lane on which stages run, one after another.

    Attributes:
        name: unique on its platform (``cpu``, ``cpu0``).
        kind: ``cpu``, ``gpu`` or ``npu``.
        resources: share of each physical resource that a running stage takes (``{"core0": 1.0}``). Lanes whose
            shares of one resource add up to more than 1 exclude each other.
        like: lanes with the same value are interchangeable; a canonical plan names the first ones.
        options: what an evaluator needs to set the lane up (``cores``, ``threads``, …), plain values.
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


@dataclass(frozen=True, slots=True)
class Platform:
    """A device: its name and its processors, in the order in which a canonical plan prefers them.

    Raises:
        UsageError: there is no processor, or two have one name.
    """

    name: str
    processors: tuple[Processor, ...]

    def __post_init__(self) -> None:
        names = [p.name for p in self.processors]
        if not names:
            raise UsageError(f"platform {self.name!r} has no processor")
        if len(set(names)) != len(names):
            raise UsageError(f"platform {self.name!r}: two processors have one name: {', '.join(names)}")

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
        return self if names is None else Platform(self.name, tuple(self[name] for name in names))

    def classes(self) -> dict[str, tuple[Processor, ...]]:
        """Return the processors grouped by ``like``, in platform order."""
        groups: dict[str, list[Processor]] = {}
        for processor in self.processors:
            groups.setdefault(processor.like, []).append(processor)
        return {like: tuple(members) for like, members in groups.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the platform as plain values."""
        return {
            "name": self.name,
            "processors": [
                {
                    "name": p.name,
                    "kind": p.kind,
                    "resources": dict(p.resources),
                    "like": p.like,
                    "options": dict(p.options),
                    "slots": p.slots,
                }
                for p in self.processors
            ],
        }
