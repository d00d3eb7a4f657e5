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
from typing import Any

from evaluators.android.adb import PORT, Phone
from evaluators.remote.credentials import split_address
from evaluators.remote.devices import SECTIONS, devices_file
from search_spaces.core.errors import UsageError
from search_spaces.core.platform import Link, Platform, Processor
from search_spaces.core.yaml_file import Value, parsed

_FLAG = re.compile(r"--[a-z][a-z0-9_]{0,63}=[A-Za-z0-9_.,:/-]{0,200}")
_OURS = ("graph", "num_runs", "min_secs", "warmup", "op_profiling", "enable_op_profiling", "max_secs")
_KINDS = ("cpu", "gpu", "npu")


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


def find_handset(name: str) -> Handset:
    """Return the phone of a name.

    Raises:
        UsageError: there is none, or the file is not valid; the text begins with ``file:line``.
    """
    path = devices_file()
    if not path.exists():
        raise UsageError(f"there is no phone {name!r}", f"describe it in {path}")
    fields = parsed(path, "devices").fields("a file of devices", SECTIONS)
    listed = fields["android"].items("android") if "android" in fields else ()
    entries = {key.text("a phone"): entry for key, entry in listed}
    if name not in entries:
        raise UsageError(f"there is no phone {name!r}", f"{path} has: {', '.join(entries) or 'none'}")
    return _handset(name, entries[name], path.parent)


def _handset(name: str, entry: Value, folder: Path) -> Handset:
    needed = ("serial", "benchmark_model", "processors", "transfer")
    fields = entry.fields("a phone", (*needed, "server"), **{key: f"phone {name!r} must say {key!r}" for key in needed})
    server = split_address(fields["server"].text("server"), PORT) if "server" in fields else ("127.0.0.1", PORT)
    benchmark = folder / Path(fields["benchmark_model"].text("benchmark_model")).expanduser()
    if not benchmark.is_file():
        raise fields["benchmark_model"].error(
            f"{benchmark} is not a file", "get benchmark_model for the phone's processor"
        )
    processors = tuple(_processor(each) for each in fields["processors"].each("processors"))
    must = "transfer must say 'bandwidth_bytes_per_s'"
    over = fields["transfer"].fields("transfer", ("bandwidth_bytes_per_s", "latency_s"), bandwidth_bytes_per_s=must)
    bandwidth = over["bandwidth_bytes_per_s"].number("the bandwidth", above=1.0)
    latency_s = over["latency_s"].number("the latency") if "latency_s" in over else 0.0
    pairs = itertools.combinations(sorted({p.name for p in processors}), 2)
    links = tuple(Link(pair, bandwidth, latency_s) for pair in pairs)
    try:
        platform = Platform(name, processors, links)
    except UsageError as error:
        raise fields["processors"].error(error.what, error.hint) from error
    return Handset(name, Phone(fields["serial"].text("serial"), *server), benchmark, platform)


def _processor(entry: Value) -> Processor:
    needed = {key: f"a processor must have a {key}" for key in ("name", "kind")}
    fields = entry.fields("a processor", (*needed, "mask", "flags", "resources"), **needed)
    name, kind = fields["name"].text("the name"), fields["kind"].text("the kind")
    if kind not in _KINDS:
        raise fields["kind"].error(f"unknown kind of processor {kind!r}", f"one of {', '.join(_KINDS)}")
    flags = tuple(flag.text("a flag") for flag in fields["flags"].each("flags")) if "flags" in fields else ()
    for flag in flags:
        if not _FLAG.fullmatch(flag) or flag[2:].startswith(_OURS):
            hint = "write --use_gpu=true; the evaluator sets the number of runs"
            raise fields["flags"].error(f"{flag!r} is not a flag", hint)
    options: dict[str, Any] = {"flags": flags}
    if "mask" in fields:
        mask = fields["mask"].text("the mask")
        if not re.fullmatch("[0-9a-f]{1,16}", mask):
            raise fields["mask"].error("the mask of cores must be hexadecimal", "write for example f0 for cores 4 to 7")
        options["mask"] = mask
    resources = {name: 1.0}
    if "resources" in fields:
        shares = fields["resources"].items("resources")
        resources = {key.text("a resource"): share.number("a share", most=1.0) for key, share in shares}
    return Processor(name, kind, resources, name, options)  # type: ignore[arg-type] # checked above
