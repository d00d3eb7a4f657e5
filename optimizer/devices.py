"""Model and platform of a study; processors are detected, named, or described in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from evaluators.base import Evaluator
from evaluators.energy import OPTION
from search_spaces.core.errors import UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform, Processor, tell_apart, with_cpu
from search_spaces.core.platform_file import find_platform_file, read_platform
from search_spaces.core.states import parse_states
from search_spaces.core.workload import Client, is_workload, names_several, with_given
from search_spaces.core.workload_file import is_workload_file
from search_spaces.spaces.registry import freedoms_of

if TYPE_CHECKING:
    from optimizer.study.config import StudyConfig


def choose_model_and_platform(evaluator: Evaluator, config: StudyConfig) -> tuple[Graph, Platform]:
    """Return the model and the platform of a study.

    An evaluator that supplies models is asked for the model before the platform.

    Raises:
        UsageError: a name or a file is wrong.
        UnavailableError: a processor cannot be used here.
    """
    go_to(evaluator, config)
    (client,) = with_given((Client(config.model, config.model),), config.given)
    brought = model_of(evaluator, client, config) if evaluator.capabilities.graphs else None
    platform = choose_platform(
        evaluator,
        config.processors,
        config.platform,
        allow_fallback=config.allow_fallback,
        reduced=bool(config.max_error) and "ranks" not in freedoms_of(config.allow),  # with ranks the limit is for them
    )
    platform = as_told(platform, config, evaluator)
    return brought or model_of(evaluator, client, config), platform


def model_of(evaluator: Evaluator, client: Client, config: StudyConfig) -> Graph:
    """Return a model of a study, from the evaluator if that supplies models.

    Raises:
        UsageError: a name or a file is wrong.
    """
    from search_spaces.models import load

    if not evaluator.capabilities.measures_here and (client.input or client.custom_ops):
        option = f"--input {client.input}" if client.input else f"--custom-ops {client.custom_ops}"
        raise UsageError(
            f"{option}: evaluator {config.evaluator!r} does not run {client.name} on this machine", "leave it out"
        )
    if evaluator.capabilities.graphs:
        return evaluator.graph_of(client.model)
    files = {name: Path(file) for name, file in (("inputs", client.input), ("custom_ops", client.custom_ops)) if file}
    return load(client.model, config.input_shape, signature=client.signature, **files)


def go_to(evaluator: Evaluator, config: StudyConfig) -> None:
    """Select the device of ``--device`` on an evaluator.

    Raises:
        UsageError: it measures on this machine alone, or there is no such device.
    """
    if config.device is not None:
        if not evaluator.capabilities.targets:
            why = (
                "measures on this machine" if evaluator.capabilities.measures_here else "has no devices to choose from"
            )
            raise UsageError(f"--device {config.device}: evaluator {config.evaluator!r} {why}", "leave it out")
        evaluator.at(config.device)


def unused_precisions(evaluator: Evaluator, config: StudyConfig) -> Sequence[Processor]:
    """Return the processors of less precision that a study leaves out because no error was allowed."""
    chosen = config.processors is not None or config.platform is not None or config.max_error is not None
    return () if chosen or not evaluator.capabilities.reduced else evaluator.reduced()


def asks_for_several(evaluator: Evaluator, config: StudyConfig) -> bool:
    """Return whether a study is about several models; an evaluator's own file, as a table of times, is one model."""
    if evaluator.capabilities.graphs and Path(config.model).is_file():
        return is_workload_file(Path(config.model))
    return names_several(config.model) if evaluator.capabilities.graphs else is_workload(config.model)


def as_told(platform: Platform, config: StudyConfig, evaluator: Evaluator) -> Platform:
    """Return a platform whose processors have the watts of ``--power``, which also apply to processors of that kind.

    Raises:
        UsageError: ``--power`` or ``--state`` names no processor, or a state is wrong.
    """
    from optimizer.study.config import parse_powers

    if evaluator.capabilities.predicts:  # a session that measures has no states to be right or wrong about
        parse_states(config.state, platform)
    powers = parse_powers(config.power)
    known = {name for p in platform.processors for name in (p.name, p.like)}
    for name in powers:
        if name not in known:
            names = ", ".join(p.name for p in platform.processors)
            raise UsageError(f"--power {name}: unknown processor", f"there are: {names}")
    alike = {p.like: powers[p.name] for p in platform.processors if p.name in powers}
    processors = []
    for each in platform.processors:
        watts = powers.get(each.name, powers.get(each.like, alike.get(each.like)))
        processors.append(each if watts is None else replace(each, options={**each.options, OPTION: watts}))
    return replace(platform, processors=tuple(processors))


def choose_platform(
    evaluator: Evaluator,
    names: Sequence[str] | None = None,
    file: Path | None = None,
    *,
    allow_fallback: bool = False,
    reduced: bool = False,
    several: bool = False,
) -> Platform:
    """Return the platform to search on.

    Args:
        names: of the processors to use, in order of preference; None for all. The evaluator may support names that
            it does not detect, as the core set ``cpu0-3`` or a software adapter.
        file: a platform file, or the name of one that ships with the product, in place of detected processors.
        allow_fallback: accelerators may leave operators to the CPU; they are then called ``gpu+cpu``.
        reduced: if no names are given, also use processors that compute in less than float32.
        several: if no names are given, also use processors that differ from others beside busy ones alone.

    Raises:
        UsageError: a name or the file is wrong.
        UnavailableError: a processor cannot be used here.
    """
    names_more = evaluator.capabilities.names
    if allow_fallback and not names_more:
        raise UsageError("--allow-fallback has no effect: the evaluator has no accelerators")
    described = evaluator.described(file) if file is not None and evaluator.capabilities.descriptions else None
    if described is not None:
        platform = described.restrict(names)
    elif file is not None:
        found = find_platform_file(file)
        platform = read_platform(found, evaluator.processor if names_more else None).restrict(names)
    else:
        platform = evaluator.platform()
        if names is not None:
            platform = _named(platform, names, evaluator) if names_more else platform.restrict(names)
        elif not several:
            platform = platform.restrict([p.name for p in platform.processors if p.timed_as == p.like])
        if names is None and reduced and evaluator.capabilities.reduced:
            platform = replace(platform, processors=(*platform.processors, *evaluator.reduced()))
    if allow_fallback:
        processors = tuple(map(with_cpu, platform.processors))
        if processors == platform.processors:
            raise UsageError(
                "--allow-fallback has no effect: no accelerator is among the processors", "name one with --processors"
            )
        platform = replace(platform, processors=processors)
    return replace(platform, processors=tell_apart(platform.processors))


def _named(found: Platform, names: Sequence[str], evaluator: Evaluator) -> Platform:
    known = {p.name: p for p in found.processors}
    return replace(found, processors=tuple(known.get(name) or evaluator.processor(name) for name in names))
