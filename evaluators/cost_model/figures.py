"""Cost profiles fitted to latencies that were measured elsewhere: the document of figures.

::

    name: exynos2200
    source: "seed 000, Tables 1 to 3"
    parameters:                        # to fit: a range, or values of which the best is taken
      mac_s: {least: 1.0e-14, most: 1.0e-10}
      capacity: {choices: [20.0e6, 58.0e6]}
    processors:
      gpu:
        kind: gpu
        kernels:                       # kernels -> term -> a number, a parameter, or {parameter: mac_s, times: 0.5}
          conv, winograd: {macs: mac_s}
          all others: {read: 1.95e-11, written: 1.95e-11}
        capacity_bytes: capacity
    figures:
      - {model: vgg16, plan: whole on gpu, ms: 97}
      - {model: own.tflite, plan: plan.json, ms: 66, check: true}  # files beside this one; compared, not fitted
      - {model: vgg16, plan: every layer, at_least_ms: 200}        # a bound, or at_most_ms; counts where it is broken
      - {model: vgg16, plan: whole on gpu, minus: {model: alexnet, plan: whole on gpu}, ms: 80}
      - {operator: {kernel: [3, 3], input: [56, 56, 64], channels: 64}, plan: whole on gpu, ms: 0.4}

Prices are seconds for each multiply-accumulate (``macs``), each byte of activations (``read``, ``written``), each byte
of weights (``weight``), each operator (``launch``), …: the terms of :mod:`~evaluators.cost_model.kernels`, for the
kernels of :mod:`~evaluators.cost_model.features`, whatever their precision, so that all figures of a processor are of
one. A processor may also have ``dispatch_s``, ``invocation_s``, ``io_s_per_byte``, ``cache_bytes``,
``pressure_per_byte``, and ``sigma``, the relative deviation of its predictions, which otherwise follows from the errors
of figures that are left out. ``links`` have ``between``, ``latency_s``, ``copy_s_per_byte`` and
``transform_s_per_byte``; without one, a transfer is a guess. A timed convolution has the image's size as its output,
divided by its ``stride``.

Without ``kernels`` a processor has one price for each multiply-accumulate, one for each byte, and from
:data:`LEAST_FOR_DISPATCH` figures on one for each operator; all are fitted (:mod:`evaluators.cost_model.figures_fit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from evaluators.cost_model.features import KERNELS
from evaluators.cost_model.kernels import TERMS, KernelModel, Logarithm, Number
from evaluators.cost_model.profile import CostProfile, LinkProfile, ProcessorProfile
from search_spaces.core.errors import shown
from search_spaces.core.platform import Link, Platform, Processor
from search_spaces.core.platform_file import Kind
from search_spaces.core.wording import did_you_mean
from search_spaces.core.yaml_file import Document, Part, Word, read_document, wrong

LEAST_FOR_DISPATCH = 4
OTHERS = "all others"
_MOST_FIGURES, _MOST_PARAMETERS, _MOST_COMBINATIONS = 100, 16, 32
DIGITS = 5  # more would be noise
_MOST_BANDWIDTH = 1e12
_FREE_MOST = {"mac_s": 1e-6, "byte_s": 1e-6, "dispatch_s": 1.0}  # ranges of the numbers of a processor without kernels


def _kernels(value: dict[str, dict[str, Amount]]) -> dict[str, dict[str, Amount]]:
    for key, terms in value.items():
        for name in key.split(","):
            if sum(name.strip() == other.strip() for each in value for other in each.split(",")) > 1:
                raise wrong(f"kernel {shown(name.strip())} is there twice", "keep one of the two", key)
            if name.strip() not in (*KERNELS, OTHERS):
                hint = did_you_mean(name.strip(), KERNELS, f"kernels are {', '.join(KERNELS)}, and '{OTHERS}'")
                raise wrong(f"there is no kernel {shown(name.strip())}", hint, key)
        if (other := next((term for term in terms if term not in TERMS), None)) is not None:
            hint = did_you_mean(other, TERMS, f"terms are {', '.join(TERMS)}")
            raise wrong(f"kernels have no term {shown(other)}", hint, key)
    return value


class Amount(Part):
    """A number, or a parameter times a number."""

    parameter: Word | None = None
    times: Number = 1.0

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: object) -> object:
        if not isinstance(data, str):
            return data
        try:
            float(data)
        except ValueError:
            return {"parameter": data}
        return {"times": data}

    def value(self, values: Mapping[str, float]) -> float:
        """Return the number, given those of the parameters."""
        return self.times if self.parameter is None else self.times * values[self.parameter]


class Parameter(Part):
    """A number to fit: in a range, or one of some values."""

    least: Number = 0.0
    most: Annotated[Number, Field(ge=1e-18)] | None = None
    choices: Annotated[tuple[Number, ...], Field(min_length=1, max_length=_MOST_COMBINATIONS)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.most is None) == (self.choices is None):
            raise wrong("a parameter has 'most' or 'choices', and not both", "write {least: 0, most: 1.0e-9}")
        if self.most is not None and self.least >= self.most:
            raise wrong("'least' must be below 'most'", key="least")
        return self

    @property
    def start(self) -> float:
        """Where a fit begins: the geometric middle of the range."""
        return sqrt(max(self.least, 1e-6 * (self.most or 0.0)) * (self.most or 0.0))


class PricedProcessor(Part):
    """A processor; names as in :class:`~evaluators.cost_model.profile.ProcessorProfile`."""

    kind: Kind
    kernels: Annotated[dict[Word, dict[Word, Amount]], AfterValidator(_kernels)] | None = None
    dispatch_s: Amount | None = None
    invocation_s: Amount = Amount(times=0.0)
    io_s_per_byte: Amount = Amount(times=0.0)
    cache_bytes: Amount = Amount(times=0.0)
    capacity_bytes: Amount = Amount(times=0.0)
    pressure_per_byte: Amount = Amount(times=0.0)
    sigma: Logarithm | None = None

    def amounts(self) -> list[Amount]:
        """Return all its numbers."""
        own = (self.dispatch_s, self.invocation_s, self.io_s_per_byte, self.cache_bytes)
        priced = [amount for terms in (self.kernels or {}).values() for amount in terms.values()]
        return [*priced, *filter(None, own), self.capacity_bytes, self.pressure_per_byte]


class PricedLink(Part):
    """What a transfer costs; names as in :class:`~evaluators.cost_model.profile.LinkProfile`."""

    between: tuple[Word, Word]
    latency_s: Amount = Amount(times=0.0)
    copy_s_per_byte: Amount = Amount(times=0.0)
    transform_s_per_byte: Amount = Amount(times=0.0)


Size = Annotated[int, Field(ge=1, le=1 << 16)]


class Convolution(Part):
    """A convolution that was timed alone: sizes of its filter and input, and its output channels."""

    kernel: tuple[Size, Size]
    input: tuple[Size, Size, Size]
    channels: Size
    stride: Size = 1


class Latency(Part):
    """One inference of a model, or of one operator, by a plan."""

    model: Word | None = None
    operator: Convolution | None = None
    plan: Word

    @model_validator(mode="after")
    def _of_one(self) -> Self:
        if (self.model is None) == (self.operator is None):
            raise wrong("what was timed is a 'model' or an 'operator'")
        return self

    @property
    def words(self) -> str:
        """The model or operator, and the plan."""
        what = self.model
        if self.operator is not None:
            sizes = (self.operator.kernel, self.operator.input)
            what = f"convolution {' of '.join('×'.join(map(str, s)) for s in sizes)} to {self.operator.channels}"
        return f"{what}, {self.plan}"


Milliseconds = Annotated[float, Field(ge=0, le=1e9)] | None


class Figure(Latency):
    """A published latency, or its difference to another one, or a bound, which counts where it is broken."""

    name: Word | None = None
    minus: Latency | None = None
    ms: Milliseconds = None
    at_least_ms: Milliseconds = None
    at_most_ms: Milliseconds = None
    check: bool = False

    @model_validator(mode="after")
    def _tells_one(self) -> Self:
        told = [value for value in (self.ms, self.at_least_ms, self.at_most_ms) if value is not None]
        if len(told) > 1 or not (told or self.check):
            raise wrong("a figure has one of 'ms', 'at_least_ms' and 'at_most_ms'", "only checks may have none")
        key = next((k for k in ("ms", "at_least_ms", "at_most_ms") if getattr(self, k) == 0), "")
        if key and self.minus is None:
            raise wrong(f"{key!r} must be above 0", "only differences may be 0", key)
        if self.minus is not None and self.minus.words == self.words:
            raise wrong("what is subtracted is the same", "give another model or plan", "minus")
        return self

    @property
    def fitted(self) -> bool:
        """Whether the profile is fitted to it."""
        return self.ms is not None and not self.check

    @property
    def bound(self) -> bool:
        """Whether it bounds the fit."""
        return self.ms is None and not self.check

    @property
    def title(self) -> str:
        """Its name, or what was timed."""
        return self.name or self.words + (f" minus {self.minus.words}" if self.minus else "")


class Figures(Part):
    """The document."""

    schema_version: Literal["1"] = "1"
    name: Word
    source: Word
    parameters: Annotated[dict[Word, Parameter], Field(max_length=_MOST_PARAMETERS)] = Field(default_factory=dict)
    processors: Annotated[dict[Word, PricedProcessor], Field(min_length=1, max_length=16)]
    links: Annotated[tuple[PricedLink, ...], Field(max_length=100)] = ()
    figures: Annotated[tuple[Figure, ...], Field(min_length=1, max_length=_MOST_FIGURES)]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        amounts = [amount for processor in self.processors.values() for amount in processor.amounts()]
        amounts += [a for e in self.links for a in (e.latency_s, e.copy_s_per_byte, e.transform_s_per_byte)]
        used = {amount.parameter for amount in amounts} - {None}
        if unknown := sorted(str(name) for name in used - self.parameters.keys()):
            hint = did_you_mean(unknown[0], self.parameters, "list it in 'parameters'")
            raise wrong(f"there is no parameter {shown(unknown[0])}", hint, "processors")
        if unused := sorted(self.parameters.keys() - used):
            raise wrong(f"parameter {shown(unused[0])} is not used", "remove it from 'parameters'", "parameters")
        titles = [(f.words, f.minus.words if f.minus else "") for f in self.figures if f.fitted]
        if twice := next((words for words, minus in titles if titles.count((words, minus)) > 1), None):
            raise wrong(f"{shown(twice)} is timed twice", "keep one, or give their mean", "figures")
        pairs = [frozenset(link.between) for link in self.links]
        for pair in pairs:
            if other := next((end for end in pair if end not in self.processors), None):
                raise wrong(
                    f"there is no processor {shown(other)}", f"there are: {', '.join(self.processors)}", "links"
                )
            if len(pair) < 2 or pairs.count(pair) > 1:
                raise wrong(
                    f"a link of {' and '.join(sorted(pair))} is there twice, or has one end", "keep one", "links"
                )
        made = {f"{name} {what}" for name, p in self.processors.items() if p.kernels is None for what in _FREE_MOST}
        if taken := sorted(made & self.parameters.keys()):
            hint = "call it otherwise, or give that processor 'kernels'"
            raise wrong(f"parameter {shown(taken[0])} has the name of one that is made", hint, "parameters")
        if np.prod([len(p.choices or (0,)) for p in self.parameters.values()]) > _MOST_COMBINATIONS:
            raise wrong(f"choices have more than {_MOST_COMBINATIONS} combinations", "leave some out", "parameters")
        return self

    @property
    def platform(self) -> Platform:
        """The processors; links have no costs yet."""
        processors = tuple(Processor(n, p.kind, {n: 1.0}, n) for n, p in self.processors.items())
        return Platform(self.name, processors)

    def completed(self, uses: Mapping[str, int]) -> Figures:
        """Return the document with numbers to fit for each processor without kernels.

        Args:
            uses: processor → how many figures it has a part in.
        """
        processors, parameters = dict(self.processors), dict(self.parameters)
        for name, processor in self.processors.items():
            if processor.kernels is not None:
                continue
            free = {what: f"{name} {what}" for what in _FREE_MOST}
            if processor.dispatch_s is not None or uses.get(name, 0) < LEAST_FOR_DISPATCH:
                del free["dispatch_s"]
            parameters |= {key: Parameter(most=_FREE_MOST[what]) for what, key in free.items()}
            mac, byte = (Amount(parameter=free[what]) for what in ("mac_s", "byte_s"))
            kernels = {OTHERS: {"macs": mac, "read": byte, "written": byte, "weight": byte}}
            dispatch = Amount(parameter=free["dispatch_s"]) if "dispatch_s" in free else processor.dispatch_s
            processors[name] = processor.model_copy(update={"kernels": kernels, "dispatch_s": dispatch})
        return self.model_copy(update={"processors": processors, "parameters": parameters})

    def profile(self, values: Mapping[str, float], sigmas: Mapping[str, float], digits: int = 17) -> CostProfile:
        """Return the profile with some values of the parameters.

        Args:
            sigmas: processor → relative deviation of its predictions.
            digits: to which numbers that depend on parameters are rounded.
        """

        def number(amount: Amount) -> float:
            value = amount.value(values)
            return value if amount.parameter is None else float(f"{value:.{digits}g}")

        processors = {}
        for name, of in self.processors.items():
            named = {n.strip(): terms for key, terms in (of.kernels or {}).items() for n in key.split(",")}
            others = {kernel: named[OTHERS] for kernel in KERNELS if OTHERS in named}
            priced = {kernel: terms for kernel, terms in (others | named).items() if kernel != OTHERS}
            kernels = {
                kernel: KernelModel(
                    {term: number(a) for term, a in terms.items() if number(a) > 0}, sigma=sigmas.get(name, 0.3)
                )
                for kernel, terms in priced.items()
            }
            processors[name] = ProcessorProfile(
                kernels,
                number(of.dispatch_s) if of.dispatch_s else 0.0,
                number(of.invocation_s),
                number(of.io_s_per_byte),
                round(number(of.cache_bytes)),
                round(number(of.capacity_bytes)),
                number(of.pressure_per_byte),
            )
        links = tuple(
            LinkProfile(*e.between, number(e.latency_s), number(e.copy_s_per_byte), number(e.transform_s_per_byte))
            for e in self.links
        )
        return CostProfile(self.name, processors, links)


def linked(platform: Platform, profile: CostProfile) -> Platform:
    """Return a platform with the links of a profile."""
    links = []
    for each in profile.links:
        byte_s = max(each.copy_s_per_byte + each.transform_s_per_byte, 1.0 / _MOST_BANDWIDTH)
        links.append(Link((each.source, each.target), float(f"{1.0 / byte_s:.3e}"), each.latency_s))
    return replace(platform, links=tuple(links))


def read_figures(path: Path) -> Document[Figures]:
    """Read a document of figures.

    Raises:
        UsageError: it is missing or wrong, in one line with file and line.
    """
    return read_document(path, Figures, "figures of a device")
