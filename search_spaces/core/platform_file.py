"""Platforms from YAML files, with errors at ``file:line``.

::

    name: my laptop
    processors:
      - name: big                    # how plans and tables call it
        processor: cpu0-3:threads=2  # as in --processors; default: the name
        resources: {memory: 0.6}     # shares of common resources, besides its cores or GPU
      - name: gpu:f32
        resources: {memory: 0.5}     # 0.6 + 0.5 > 1: the two do not run at the same time
      - name: dsp                    # with a kind it need not exist here, for evaluators that predict
        kind: npu
        like: dsp v68
        options: {clock_hz: 1.2e+9}
    links:
      - between: [big, dsp]
        bandwidth_bytes_per_s: 4.0e+9
        latency_s: 2.0e-5
    limits: {load_s: 60, run_s: 5}

Those that ship with the product have names: ``--platform NAME`` is ``experiments/platforms/NAME.yaml``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.core.errors import OptimizeError, UsageError, shown
from search_spaces.core.platform import Limits, Link, Platform, Processor
from search_spaces.core.wording import did_you_mean
from search_spaces.core.yaml_file import MAX_NBYTES, Value, parsed

__all__ = ["MAX_NBYTES", "find_platform_file", "platform_names", "read_platform"]

SHIPPED = Path(__file__).parents[2] / "experiments" / "platforms"
_SUFFIXES = (".yaml", ".yml", ".json")
_KINDS = ("cpu", "gpu", "npu")


def read_platform(path: Path, find: Callable[[str], Processor] | None) -> Platform:
    """Read a platform.

    Args:
        find: returns the processor with a given name; None where the evaluator names none.

    Raises:
        UsageError: the file is missing, no platform, or wrong; the text begins with ``file:line``.
        UnavailableError: a processor cannot be used here.
    """
    root = parsed(path, "a platform")
    known, missing = ("name", "processors", "links", "limits"), "a platform must have processors"
    fields = root.fields("a platform", known, processors=missing)
    name = fields["name"].text("the platform's name") if "name" in fields else path.stem
    entries = fields["processors"].each("processors")
    processors = tuple(_processor(entry, find) for entry in entries)
    links = tuple(_link(entry) for entry in fields["links"].each("links")) if "links" in fields else ()
    limits = _limits(fields["limits"]) if "limits" in fields else Limits()
    try:
        return Platform(name, processors, links, limits)
    except UsageError as error:
        raise fields["processors"].error(error.what, error.hint) from error


def _processor(entry: Value, find: Callable[[str], Processor] | None) -> Processor:
    if entry.node.id == "scalar" and entry.node.value:
        name = entry.text("a processor")
        raise entry.error("a processor must be a mapping of keys to values", f"write {{name: {name}}} for {name}")
    keys = ("name", "processor", "kind", "like", "resources", "options")
    fields = entry.fields("a processor", keys, name="a processor must have a name")
    name = fields["name"].text("the processor's name")
    shares = {}
    if "resources" in fields:
        shares = {
            key.text("a resource"): value.number(f"the share of {key.text('a resource')!r}", most=1.0)
            for key, value in fields["resources"].items("resources")
        }
    if "kind" in fields:
        return _described(name, shares, fields)
    for key in ("options", "like"):
        if key in fields:
            raise fields[key].error(f"{key!r} goes with a 'kind'; a processor found on this machine has its own")
    known = fields.get("processor", fields["name"])
    if find is None:
        raise known.error(f"processor {name!r} must have a kind", "one of cpu, gpu, npu")
    try:
        found = find(known.text("the processor"))
    except OptimizeError as error:
        raise type(error)(known.error(error.what).what, error.hint) from error
    like = found.like + "".join(f"+{key}={share:g}" for key, share in sorted(shares.items()))
    return replace(found, name=name, like=like, resources={**found.resources, **shares})


def _described(name: str, shares: Mapping[str, float], fields: Mapping[str, Value]) -> Processor:
    kind: Any = fields["kind"].text("the kind")
    if kind not in _KINDS:
        raise fields["kind"].error(f"unknown kind of processor {kind!r}", f"one of {', '.join(_KINDS)}")
    if "processor" in fields:
        raise fields["processor"].error("a processor has a 'processor' or a 'kind', not both")
    like = fields["like"].text("like") if "like" in fields else name
    options = {}
    if "options" in fields:
        options = {key.text("an option"): value.plain() for key, value in fields["options"].items("options")}
    return Processor(name, kind, shares or {name: 1.0}, like, options)


def _link(entry: Value) -> Link:
    needed = {key: f"a link must say {key!r}" for key in ("between", "bandwidth_bytes_per_s")}
    fields = entry.fields("a link", (*needed, "latency_s"), **needed)
    ends = [end.text("an end of a link") for end in fields["between"].each("between")]
    if len(ends) != 2:
        raise fields["between"].error("a link is between two processors")
    bandwidth = fields["bandwidth_bytes_per_s"].number("the bandwidth", above=1.0)
    latency = fields["latency_s"].number("the latency") if "latency_s" in fields else 0.0
    return Link((ends[0], ends[1]), bandwidth, latency)


def _limits(entry: Value) -> Limits:
    fields = entry.fields("limits", ("load_s", "run_s"))
    return Limits(**{key: value.number(key, above=0.01, most=86_400.0) for key, value in fields.items()})


def platform_names() -> list[str]:
    """Return the names of the platforms that ship with the product."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_platform_file(source: Path) -> Path:
    """Return the file that a path or a name stands for.

    An existing file takes precedence over a name. What looks like a path is returned as it is, and reading it reports
    what is wrong.

    Raises:
        UsageError: it is neither a file nor a name; the text lists similar names, or all of them.
    """
    name = str(source)
    if source.name != name or source.suffix in _SUFFIXES or _exists(source):
        return source
    known = platform_names()
    if name in known:
        return SHIPPED / f"{name}.yaml"
    hint = did_you_mean(name, known, f"platforms are: {', '.join(known)}", most=3, cutoff=0.5)
    raise UsageError(f"no platform or file is called {shown(name)}", hint)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is longer than any file's
        return False
