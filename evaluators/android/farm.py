"""Phones that are plugged in: the section ``android`` of ``devices.yaml`` (:mod:`evaluators.remote.devices`).

::

    android:
      pixel:
        serial: 8A1X0ABCD                 # as `adb devices` shows it; server: host:port where it is not 127.0.0.1:5037
        benchmark_model: tools/arm64/benchmark_model
        processors:
          - {name: big, kind: cpu, mask: f0, flags: [--num_threads=4, --use_xnnpack=true]}
          - {name: gpu, kind: gpu, flags: [--use_gpu=true]}
        transfer: {bandwidth_bytes_per_s: 4.0e+9, latency_s: 5.0e-5}   # between any two of them
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from evaluators.android.adb import PORT, Phone
from evaluators.remote.credentials import split_address
from evaluators.remote.devices import devices_file, read_devices
from search_spaces.core.errors import UsageError
from search_spaces.core.platform import Link, Platform, Processor
from search_spaces.core.platform_file import Bandwidth, Kind, Seconds, Share
from search_spaces.core.yaml_file import Part, Word, beside, wrong

_FLAG = re.compile(r"--[a-z][a-z0-9_]{0,63}=[A-Za-z0-9_.,:/-]{0,200}")
_OURS = ("graph", "num_runs", "min_secs", "warmup", "op_profiling", "enable_op_profiling", "max_secs")


@dataclass(frozen=True, slots=True)
class Handset:
    """A phone and how it is measured.

    Attributes:
        benchmark: LiteRT's ``benchmark_model`` for the phone, a file of this machine.
        platform: its processors; their options are the flags that select each, and the cores it is pinned to.
    """

    name: str
    phone: Phone
    benchmark: Path
    platform: Platform


class _Processor(Part):
    name: Word
    kind: Kind
    mask: str | None = None
    flags: tuple[Word, ...] = ()
    resources: dict[Word, Share] = Field(default_factory=dict)

    @field_validator("mask", mode="before")
    @classmethod
    def _hexadecimal(cls, mask: object) -> object:
        if not isinstance(mask, str) or not re.fullmatch("[0-9a-f]{1,16}", mask):
            raise wrong("the mask of cores must be hexadecimal", "write for example f0 for cores 4 to 7")
        return mask

    @field_validator("flags", mode="after")
    @classmethod
    def _flags(cls, flags: tuple[str, ...]) -> tuple[str, ...]:
        for flag in flags:
            if not _FLAG.fullmatch(flag) or flag[2:].startswith(_OURS):
                hint = "write --use_gpu=true; the evaluator sets the number of runs"
                raise wrong(f"{flag!r} is not a flag", hint)
        return flags


class _Transfer(Part):
    bandwidth_bytes_per_s: Bandwidth
    latency_s: Seconds = 0.0


class _Phone(Part):
    serial: Word
    server: Word | None = None
    benchmark_model: Word
    processors: Annotated[tuple[_Processor, ...], Field(min_length=1)]
    transfer: _Transfer


def find_handset(name: str) -> Handset:
    """Return the phone of a name.

    Raises:
        UsageError: there is none, or the file is not valid; the text begins with ``file:line``.
    """
    path = devices_file()
    if not path.exists():
        raise UsageError(f"there is no phone {name!r}", f"describe it in {path}")
    file = read_devices(path)
    phones = file.content.android
    if name not in phones:
        raise UsageError(f"there is no phone {name!r}", f"{path} has: {', '.join(phones) or 'none'}")
    document = file.part(("android", name), _Phone, f"phone {name!r}", phones[name])
    found = document.content
    server = split_address(found.server, PORT) if found.server else ("127.0.0.1", PORT)
    try:
        benchmark = beside(path, found.benchmark_model)
    except UsageError as error:
        raise document.error(("benchmark_model",), error.what, error.hint) from error
    if not benchmark.is_file():
        hint = "get benchmark_model for the phone's processor"
        raise document.error(("benchmark_model",), f"{benchmark} is not a file", hint)
    processors = tuple(map(_processor, found.processors))
    pairs = itertools.combinations(sorted({p.name for p in processors}), 2)
    links = tuple(Link(pair, found.transfer.bandwidth_bytes_per_s, found.transfer.latency_s) for pair in pairs)
    try:
        platform = Platform(name, processors, links)
    except UsageError as error:
        raise document.error(("processors",), error.what, error.hint) from error
    return Handset(name, Phone(found.serial, *server), benchmark, platform)


def _processor(entry: _Processor) -> Processor:
    options: dict[str, Any] = {"flags": entry.flags}
    if entry.mask is not None:
        options["mask"] = entry.mask
    return Processor(entry.name, entry.kind, entry.resources or {entry.name: 1.0}, entry.name, options)
