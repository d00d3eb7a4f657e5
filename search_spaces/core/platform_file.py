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

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from search_spaces.core.errors import OptimizeError, UsageError, shown
from search_spaces.core.platform import Limits, Link, Platform, Processor
from search_spaces.core.wording import did_you_mean
from search_spaces.core.yaml_file import MAX_NBYTES, Document, Part, Word, plain_value, read_document, wrong

__all__ = ["MAX_NBYTES", "find_platform_file", "platform_names", "read_platform"]

SHIPPED = Path(__file__).parents[2] / "experiments" / "platforms"
_SUFFIXES = (".yaml", ".yml", ".json")

Kind = Literal["cpu", "gpu", "npu"]
Share = Annotated[float, Field(ge=0, le=1)]
Bandwidth = Annotated[float, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]
_Limit = Annotated[float, Field(ge=0.01, le=86_400)] | None


class _Processor(Part):
    name: Word
    processor: Word | None = None
    kind: Kind | None = None
    like: Word | None = None
    resources: dict[Word, Share] = Field(default_factory=dict)
    options: dict[Word, Word | list[Word]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _mapping(cls, data: object) -> object:
        if isinstance(data, str) and data:
            hint = f"write {{name: {data}}} for {data}"
            raise wrong("a processor must be a mapping of keys to values", hint)
        return data

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.kind is not None and self.processor is not None:
            raise wrong("a processor has a 'processor' or a 'kind', not both", key="processor")
        for key in ("options", "like"):
            if self.kind is None and key in self.model_fields_set:
                raise wrong(f"{key!r} goes with a 'kind'; a processor found on this machine has its own", key=key)
        return self


class _Link(Part):
    between: tuple[Word, Word]
    bandwidth_bytes_per_s: Bandwidth
    latency_s: Seconds = 0.0


class _Limits(Part):
    load_s: _Limit = None
    run_s: _Limit = None


class _Platform(Part):
    name: Word | None = None
    processors: Annotated[tuple[_Processor, ...], Field(min_length=1)]
    links: tuple[_Link, ...] = ()
    limits: _Limits = _Limits()

    @model_validator(mode="before")
    @classmethod
    def _is_no_other(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("kind") == "cost profile":
            raise wrong("is a cost profile", "add --evaluator cost-model", "kind")
        if isinstance(data, dict) and "figures" in data:
            raise wrong(
                "holds figures of a device", "first: optimize calibrate --figures FILE --out PROFILE", "figures"
            )
        return data


def read_platform(path: Path, find: Callable[[str], Processor] | None) -> Platform:
    """Read a platform.

    Args:
        find: returns the processor with a given name; None where the evaluator names none.

    Raises:
        UsageError: the file is missing, no platform, or wrong; the text begins with ``file:line``.
        UnavailableError: a processor cannot be used here.
    """
    document = read_document(path, _Platform, "a platform")
    found = document.content
    processors = tuple(_processor(document, number, find) for number in range(len(found.processors)))
    links = tuple(Link(link.between, link.bandwidth_bytes_per_s, link.latency_s) for link in found.links)
    limits = Limits(**found.limits.model_dump(exclude_none=True))
    try:
        return Platform(found.name or path.stem, processors, links, limits)
    except UsageError as error:
        raise document.error(("processors",), error.what, error.hint) from error


def _processor(document: Document[_Platform], number: int, find: Callable[[str], Processor] | None) -> Processor:
    entry = document.content.processors[number]
    if entry.kind is not None:
        options = {key: plain_value(value) for key, value in entry.options.items()}
        return Processor(
            entry.name, entry.kind, entry.resources or {entry.name: 1.0}, entry.like or entry.name, options
        )
    where = "processors", number, "processor" if entry.processor else "name"
    if find is None:
        raise document.error(where, f"processor {entry.name!r} must have a kind", "one of cpu, gpu, npu")
    try:
        found = find(entry.processor or entry.name)
    except OptimizeError as error:
        raise type(error)(document.error(where, error.what).what, error.hint) from error
    like = found.like + "".join(f"+{key}={share:g}" for key, share in sorted(entry.resources.items()))
    return replace(found, name=entry.name, like=like, resources={**found.resources, **entry.resources})


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
