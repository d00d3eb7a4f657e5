"""``optimize calibrate --figures``: fit a device's profile to published latencies, and tell its errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.text import Text

from evaluators.cost_model.figures import (
    DIGITS,
    Convolution,
    Figures,
    Latency,
    linked,
    read_figures,
)
from evaluators.cost_model.figures_fit import FiguresFit, Fitted
from evaluators.cost_model.fit import errors_of
from evaluators.cost_model.profile import CostProfile, from_json, to_json
from optimizer.model.baselines import baselines, read_plan
from optimizer.report.terminal import table
from optimizer.tools.calibrate import check_out, write_profile
from search_spaces.core.errors import OptimizeError, PlanError, ProfileError, UsageError, damage, reason_of, shown
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.wording import did_you_mean, plural
from search_spaces.core.yaml_file import Document, Loc, beside
from search_spaces.models import is_built_in, load
from search_spaces.models.zoo import draft
from search_spaces.models.zoo.builder import Builder
from search_spaces.models.zoo.names import parse_name
from search_spaces.rewrites.lower import Lowered, lowering

_LEAST_SIGMA, _MOST_SIGMA = 0.1, 10.0
_FAR_OFF = 0.5
_VARIES = 1e-3  # relative difference of predictions that is reported
_UNKNOWN_SIGMA = 1.0  # of a processor whose errors nothing tells

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FittedFigures:
    """A profile that was fitted to figures.

    Attributes:
        profile: whose errors hold a row for each figure (``figures``) and each parameter (``parameters``).
        out: its file.
    """

    profile: CostProfile
    out: Path


def fit_figures(path: Path, out: Path, progress: Callable[[str], None] = lambda _: None) -> FittedFigures:
    """Fit a profile to a document of figures, and write it to ``out``.

    Raises:
        UsageError: the document is wrong, or has more numbers to fit than figures.
        RunFolderError: the profile cannot be written.
    """
    check_out(out)
    if out.exists() and path.exists() and out.samefile(path):
        raise UsageError(f"--out {out}: is the file of the figures", "give another name")
    read, fit, on = prepared(path)
    document, platform = fit.document, fit.document.platform
    fitted = [number for number, figure in enumerate(document.figures) if figure.fitted]
    progress(f"fitting {_counted(document)}")
    whole, others = fit.fit(), {}
    for place, number in enumerate(fitted, 1):
        progress(f"fitting all figures but {document.figures[number].title}, {place} of {len(fitted)}")
        others[number] = fit.fit(without=number, starts=[whole.values])
    whole = fit.fit(starts=[other.values for other in others.values()])
    others = {n: min(o, fit.fit(without=n, starts=[whole.values]), key=lambda f: f.loss) for n, o in others.items()}
    rows = _rows(fit, whole, others)
    errors = {
        name: _errors([row for row, of in zip(rows, on, strict=True) if name in of]) for name in document.processors
    }
    sigmas = {name: _sigma(of.sigma, errors[name].get("deviation")) for name, of in document.processors.items()}
    profile = replace(
        document.profile(whole.values, sigmas, DIGITS),
        provenance={
            "fitted_by": f"optimize calibrate --figures {path.name if path.is_absolute() else path.as_posix()}",
            "source": document.source,
            "fitted_to": _counted(document),
        },
        errors={f"each figure on {name} in turn": found for name, found in errors.items() if found}
        | {"figures": rows, "parameters": _parameters(document, whole, others)},
    )
    platform = linked(platform, profile)
    try:
        from_json(to_json(profile, platform))
    except ProfileError as error:
        raise read.error(
            ("processors",), f"the fitted prices cannot be a device's: {error.what}", "see their ranges"
        ) from error
    write_profile(out, profile, platform, indent=None)
    return FittedFigures(profile, out)


def prepared(path: Path) -> tuple[Document[Figures], FiguresFit, list[set[str]]]:
    """Return a document, the fit of it, and the processors on which each figure's plans run.

    Raises:
        UsageError: the document is wrong, or has more numbers to fit than figures.
    """
    read, graphs = read_figures(path), dict[object, Graph]()
    document = read.content
    plans = [_plans(read, number, graphs) for number in range(len(document.figures))]
    on = [{stage.processor for side in pair if side for stage in side.plan.stages} for pair in plans]
    fitted = [of for of, figure in zip(on, document.figures, strict=True) if figure.fitted]
    document = document.completed({name: sum(name in of for of in fitted) for name in document.processors})
    _check_count(read, document, [of for of, figure in zip(on, document.figures, strict=True) if not figure.check])
    try:
        return read, FiguresFit(document, plans), on
    except OptimizeError as error:
        raise read.error(("processors",), error.what, "give a price to 'all others', too") from error


def _errors(rows: Sequence[Row]) -> dict[str, float]:
    """Return the errors of the figures that were left out, as far as they are known.

    ``deviation`` is the root mean square of the logarithms of predicted over published times.
    """
    known = [(r["left_out_ms"], r["published_ms"]) for r in rows if r["use"] == "fitted" and r["error"] is not None]
    if not known:
        return {}
    predicted, published = np.array(known).T
    off = np.log(np.maximum(predicted, 1e-9 * published) / published)
    found = errors_of(predicted, published) | {"deviation": round(float(np.sqrt((off**2).mean())), DIGITS)}
    return {name: value for name, value in found.items() if isfinite(value)}


def _sigma(given: float | None, deviation: float | None) -> float:
    """Return the relative deviation of a processor's predictions, of which the document or left-out errors tell."""
    if given is not None:
        return given
    return _UNKNOWN_SIGMA if deviation is None else min(max(_LEAST_SIGMA, deviation), _MOST_SIGMA)


def _counted(document: Figures) -> str:
    figures, bounds = (sum(getattr(f, kind) for f in document.figures) for kind in ("fitted", "bound"))
    bounded = f" and {plural(bounds, 'bound')}" if bounds else ""
    names = f" ({', '.join(document.parameters)})" if document.parameters else ""
    return f"{plural(figures, 'figure')}{bounded} with {plural(len(document.parameters), 'parameter')}{names}"


def _check_count(read: Document[Figures], document: Figures, on: Sequence[set[str]]) -> None:
    """Check that there are figures for all parameters, and for those of each processor alone.

    Args:
        on: the processors of each figure and bound.
    """
    of = {name: {a.parameter for a in p.amounts() if a.parameter} for name, p in document.processors.items()}
    cases: list[tuple[set[str], int, str, Loc]] = [(set(document.parameters), len(on), "", ("figures",))]
    for name, mine in of.items():
        others = {parameter for other, used in of.items() if other != name for parameter in used}
        if document.processors[name].sigma is not None:
            continue  # who gives it knows what the figures do not say
        count = sum(name in each for each in on)
        cases.insert(0, (mine if not count else mine - others, count, f" on {shown(name)}", ("processors", name)))
    for parameters, count, where, loc in cases:
        if len(parameters) > count:
            names = f"{plural(len(parameters), 'parameter')} ({', '.join(sorted(parameters))})"
            what = f"{names} cannot be fitted to {plural(count, 'figure')}{where}, bounds included"
            raise read.error(loc, what, "give numbers for some of them, or more figures")


def _graph(latency: Latency) -> Graph:
    if latency.operator is not None:
        return _convolution(latency.operator, latency.words)
    source = str(latency.model)
    # Weights take no part; VGG16's have 0.5 GB.
    return draft(source).graph() if is_built_in(source) and not parse_name(source).variant else load(source)


def _convolution(of: Convolution, name: str) -> Graph:
    net = Builder(name)
    return net.finish(net.conv(net.input((1, *of.input)), of.channels, of.kernel, "conv", stride=of.stride)).graph()


def _plans(read: Document[Figures], number: int, graphs: dict[object, Graph]) -> tuple[Lowered, Lowered | None]:
    """Return the plan of a figure, and that of what is subtracted."""
    figure = read.content.figures[number]
    minus = _plan(read, ("figures", number, "minus"), figure.minus, graphs) if figure.minus else None
    return _plan(read, ("figures", number), figure, graphs), minus


def _plan(read: Document[Figures], loc: Loc, of: Latency, graphs: dict[object, Graph]) -> Lowered:
    """Return a baseline by its name, or the plan of a file, lowered."""
    key, prefix = "model", f"{shown(of.model)}: "
    try:
        if of.model and not is_built_in(of.model) and beside(read.path, of.model).is_file():
            of = of.model_copy(update={"model": str(beside(read.path, of.model))})
        graph = graphs.get(of.model or of.operator) or graphs.setdefault(of.model or of.operator, _graph(of))
        key, prefix = "plan", f"{shown(of.plan)}: "
        file = beside(read.path, of.plan)
        is_file = of.plan.endswith(".json") or file.is_dir()
        plan = read_plan(file) if is_file else _baseline(of.plan, graph, read.content.platform)
        plan.validate(graph, read.content.platform)
        return lowering(graph).lower(plan)
    except OSError as error:
        raise read.error((*loc, key), f"{prefix}{reason_of(error)}", "files lie beside the document") from error
    except OptimizeError as error:
        raise read.error((*loc, key), f"{prefix * (key == 'plan')}{error.what}", error.hint) from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise read.error((*loc, key), f"{prefix}not a {key}: {damage(error)}", "give a plan.json") from error


def _baseline(name: str, graph: Graph, platform: Platform) -> Plan:
    """Return the plan of a baseline's name; ``on PROCESSOR`` follows it where there are several."""
    names = [p.name for p in platform.processors]
    criterion, on = name, names[0]
    if not name.startswith("whole on "):
        criterion, told, on = name.partition(" on ")
        if not told and len(names) > 1:
            raise PlanError("the processor is missing", f"write '{name} on {names[0]}'")
    found = {b.name: b.plan for b in baselines(graph, platform, platform[on or names[0]].name, (criterion,))}
    if criterion not in found:
        raise PlanError("there is no such plan", did_you_mean(criterion, found, f"plans are: {', '.join(found)}"))
    return found[criterion]


def _rows(fit: FiguresFit, whole: Fitted, others: Mapping[int, Fitted]) -> list[Row]:
    """Return a row for each figure: published, by the profile, and by a fit that has not seen it."""
    rows = []
    ends = [{name: end} for name, pair in whole.allowed.items() for end in pair]
    every = np.array([fit.predict_ms(whole.values | end)[0] for end in ({}, *ends)])
    for number, figure in enumerate(fit.figures):
        fitted_ms, left_out = float(every[0, number]), None
        if figure.fitted and others[number].determines(number):
            left_out = float(fit.predict_ms(others[number].values)[0][number])
        row: Row = {"name": figure.title, "published_ms": figure.ms}
        row |= {n: v for n in ("at_least_ms", "at_most_ms") if (v := getattr(figure, n)) is not None}
        row |= {"use": "fitted" if figure.fitted else "bound", "fitted_ms": _ms(fitted_ms)}
        row["fitted_error"] = (
            _rounded(round(fitted_ms / figure.ms - 1.0, 9)) if figure.ms and not figure.check else None
        )
        if figure.check:
            left_out = fitted_ms
            row |= {"use": "checked", "fitted_ms": None}
            if np.ptp(every[:, number]) > _VARIES * abs(fitted_ms):
                row["range_ms"] = [_ms(float(end(every[:, number]))) for end in (np.min, np.max)]
        error = left_out / figure.ms - 1.0 if figure.ms and left_out is not None else None
        rows.append(row | {"left_out_ms": _ms(left_out), "error": _rounded(error)})
    return rows


def _ms(value: float | None) -> float | None:
    return None if value is None else round(float(f"{value:.{DIGITS}g}"), 9) + 0.0  # 1e-13 is 0, and no -0.0


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _parameters(document: Figures, whole: Fitted, others: Mapping[int, Fitted]) -> dict[str, Row]:
    """Return each parameter's value, its range over the fits without one figure, and what does not determine it."""
    found = {}
    for name, value in whole.values.items():
        each = [o.values[name] for o in others.values() if name not in {*o.allowed, *o.entangled}]
        row: Row = {"value": _rounded(value), "left_out": [_rounded(min(each)), _rounded(max(each))] if each else None}
        if name in whole.allowed:
            row["allowed"] = [_rounded(end) for end in whole.allowed[name]]
        if name in whole.entangled:
            row["entangled"] = True
        least, most = document.parameters[name].least, document.parameters[name].most
        if most is not None and (value >= (1 - _VARIES) * most or 0 < value <= (1 + _VARIES) * least):
            row["at_the_end_of"] = [least, most]
        found[name] = row
    return found


def render(found: FittedFigures) -> Group:
    """Return the figures and the parameters as tables."""
    errors, profile = found.profile.errors, found.profile
    fitted_to = profile.provenance["fitted_to"].partition(" (")[0]
    head = Text(f"{found.out}: {', '.join(profile.processors)} of {profile.name}, fitted to {fitted_to}")
    figures = table(
        ("figure", ">published, ms", ">fitted, ms", ">error", ">left out, ms", ">its error", "note"),
        map(_cells, errors["figures"]),
    )
    parameters = table(
        ("parameter", ">value", ">each figure left out", "note"),
        (
            (name, f"{row['value']:.4g}", _range(row["left_out"]), _determined(row))
            for name, row in errors["parameters"].items()
        ),
    )
    return Group(head, Text(), figures, Text(), parameters)


def _cells(row: Row) -> tuple[str, ...]:
    published = row["published_ms"]
    told = "" if published is None else f"{published:.4g}"
    for name, sign in (("at_least_ms", "≥"), ("at_most_ms", "≤")):
        told = f"{sign} {row[name]:.4g}" if name in row else told
    note = "not fitted" if row["use"] == "checked" else ""
    least, most = row.get("at_least_ms", 0.0), row.get("at_most_ms", inf)
    if row["use"] == "bound" and not (1 - _VARIES) * least <= row["fitted_ms"] <= (1 + _VARIES) * most:
        note = "the bound is broken"
    note += f": could be {_range(row['range_ms'])}" if "range_ms" in row else ""
    if row["use"] == "fitted" and row["left_out_ms"] is None:
        note = "not determined by the others"
    if abs(row["fitted_error"] or 0.0) > _FAR_OFF:
        note = "far off: is this figure right?"
    fitted, left_out = ("" if row[n] is None else f"{row[n]:.4g}" for n in ("fitted_ms", "left_out_ms"))
    return row["name"], told, fitted, _percent(row["fitted_error"]), left_out, _percent(row["error"]), note


def _percent(error: float | None) -> str:
    return "" if error is None else f"{round(100.0 * error, 1) + 0.0:+.1f} %".replace("-", "−")


def _range(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.4g} to {ends[1]:.4g}"


def _determined(row: Row) -> str:
    if "allowed" in row:
        return f"not determined: the middle of {_range(row['allowed'])}"
    if "at_the_end_of" in row:
        return f"at the end of its range, {_range(row['at_the_end_of'])}"
    return "not determined apart from others" if "entangled" in row else ""
