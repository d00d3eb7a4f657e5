"""The Python interface: ``from optimizer import optimize``.

::

    result = optimize("net.tflite", budget=100, processors=["cpu0", "cpu1"])
    print(result.plan)
    with result.runner() as runner:
        outputs = runner.run(inputs)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from os import PathLike, fspath
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, Unpack

from search_spaces.core.errors import UsageError, shown

if TYPE_CHECKING:
    from optimizer.study.config import StudyConfig
    from optimizer.study.history import Trial
    from optimizer.study.result import Result

Model = str | PathLike[str]


class Module(Protocol):
    """A ``torch.nn.Module``, typed without torch."""

    def eval(self) -> Any:
        """Return the module in inference mode."""
        ...


class Options(TypedDict, total=False):
    """What ``optimize`` takes beside the model: the options of the command line, with typed values.

    ``optimize --help`` and :class:`optimizer.study.config.StudyConfig` say what each one means.
    """

    minutes: float | None
    max_stages: int
    sampler: str
    evaluator: str
    allow: str | Sequence[str]
    objective: str | Sequence[str]
    seed: int
    precision: float
    study: str | None
    out: Model | None
    device: str | None
    storage: str | None
    heartbeat: int
    processors: str | Sequence[str] | None
    platform: Model | None
    allow_fallback: bool
    power: str | Sequence[str]
    state: str | Sequence[str]
    robust: Literal["worst", "expected"]
    rate: float | None
    deadline: float | None
    max_energy: float | None
    max_error: float | None
    stop_when_proven: bool
    warm_start: Model | None
    compare_with: Model | Sequence[Model]
    input_shape: str | Sequence[str]
    input: Model | Sequence[Model]
    signature: str | Sequence[str]
    custom_ops: Model | Sequence[Model]


def optimize(
    model: Model | Sequence[Model] | Module,
    *,
    budget: int = 200,
    example_inputs: Sequence[Any] | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    progress: bool = False,
    **options: Unpack[Options],
) -> Result:
    """Search for the fastest plan of a model, or of several at once, and return what was found.

    Args:
        model: name of a built-in model (``vgg16``), a ``.tflite`` file, a model that is converted (``net.onnx``,
            ``net.pt2``, ``torchvision:resnet18``), a workload's YAML file, or several of them; or, with
            ``example_inputs``, a ``torch.nn.Module``.
        example_inputs: what a module is called with, one tensor each.
        budget: distinct plans to measure at most.
        on_trial: called after each trial; an exception that it raises ends the study, which can be resumed.
        progress: whether to show a bar on stderr.
        options: see :class:`Options`.

    Returns:
        The result; where the machine was too disturbed to decide, ``result.verdict.undecided`` says what is open.

    Raises:
        OptimizeError: a setting is wrong, no plan is feasible, or a device cannot be used; ``exit_code`` says which.
        KeyboardInterrupt: the search was interrupted; the same ``study`` resumes it.
    """
    from optimizer.study.course import Interrupted, run_study

    if callable(getattr(model, "eval", None)):
        from search_spaces.models.convert import converted_module

        model = converted_module(model, example_inputs or ())
    if on_trial is not None and not callable(on_trial):
        raise UsageError(f"on_trial {shown(on_trial)}: must be a function")
    config = _config(model, budget, options)
    with _watching(config, on_trial, sys._getframe(1), progress=progress) as watcher:  # noqa: SLF001
        try:
            return run_study(config, watcher, ["optimizer.optimize"])
        except Interrupted as interrupted:
            raise KeyboardInterrupt(f"resumed by: {interrupted.resume_command}") from interrupted


def _texts(name: str, value: Any, *, several: bool) -> Any:
    """Return a name or path as text, and several as a tuple.

    Raises:
        UsageError: it is something else.
    """
    one = isinstance(value, str | PathLike) or not several
    found: tuple[object, ...] = (None,)
    with suppress(TypeError):
        found = tuple(map(fspath, (value,) if one else value))
    if not all(isinstance(each, str) for each in found):
        raise UsageError(f"{name} {shown(value)}: must be {'one text or several' if several else 'text'}")
    return found[0] if isinstance(value, str) or not several else found


def _config(model: Any, budget: int, options: Options) -> StudyConfig:
    from optimizer.study.config import check_effects, parse_config
    from search_spaces.core.allowed_code import allow, allow_libraries
    from search_spaces.core.workload import GIVEN

    given: dict[str, Any] = {**options, "model": model}
    several = ("model", "allow", "compare_with", "objective", "power", "state", "input_shape", "processors", *GIVEN)
    for name in ("out", "platform", "warm_start", "sampler", *several):
        if name == "model" or given.get(name) is not None:
            given[name] = _texts(name, given[name], several=name in several)
    models = (given["model"],) if isinstance(given["model"], str) else given["model"]
    freedoms = given.get("allow")
    if isinstance(freedoms, tuple):
        given["allow"] = ",".join(freedoms)
    libraries = given.get("custom_ops") or ()
    allow_libraries((libraries,) if isinstance(libraries, str) else libraries)
    # A caller of this function can run any code anyway.
    processors = given.get("processors") or ()
    named = processors.split(",") if isinstance(processors, str) else processors
    allow(*filter(None, [given.get("sampler"), *named, *models]))
    check_effects(given)
    return parse_config({**given, "model": models, "budget": budget}, keywords=True)


def _watching(
    config: StudyConfig, on_trial: Callable[[Trial], None] | None, caller: FrameType, *, progress: bool
) -> Any:
    import warnings

    from optimizer.report.console import ProgressWatcher

    call_back = on_trial or (lambda _: None)

    class Watching(ProgressWatcher):
        def trial(self, trial: Trial) -> None:
            super().trial(trial)
            call_back(trial)

    class Quiet:
        """Shows no progress; warnings become Python warnings."""

        def message(self, *_: object) -> None:
            return

        opened = message

        def warn(self, text: str) -> None:
            # With the line that called optimize(): a search warns from several depths.
            of = caller.f_globals.get("__name__")
            warnings.warn_explicit(text, UserWarning, caller.f_code.co_filename, caller.f_lineno, of)

        def trial(self, trial: Trial) -> None:
            call_back(trial)

    return Watching(config.budget, quiet=False, verbose=False) if progress else nullcontext(Quiet())
