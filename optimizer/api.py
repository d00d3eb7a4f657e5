"""The Python interface: ``from optimizer import optimize``.

::

    result = optimize("net.tflite", budget=100, processors=["cpu0", "cpu1"])
    print(result.plan)
    with result.runner() as runner:
        outputs = runner.run(inputs)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from os import PathLike, fspath
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, Unpack

from search_spaces.core.errors import UsageError

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
    count_traffic: bool
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

    if on_trial is not None and not callable(on_trial):
        raise UsageError(f"on_trial {on_trial!r}: must be a function of a trial")
    if not isinstance(model, str | PathLike | Sequence):
        from search_spaces.models.convert import converted_module

        if not callable(getattr(model, "eval", None)):
            raise UsageError(f"model {model!r}: must be a name, a file, several of these, or a torch.nn.Module")

        model = converted_module(model, example_inputs or ())
    config = _config(model, budget, options)
    with _watching(config, on_trial, sys._getframe(1), progress=progress) as watcher:  # noqa: SLF001
        try:
            return run_study(config, watcher, ["optimizer.optimize"])
        except Interrupted as interrupted:
            raise KeyboardInterrupt(f"resumed by: {interrupted.resume_command}") from interrupted


def _config(model: Model | Sequence[Model], budget: int, options: Options) -> StudyConfig:
    from optimizer.study.config import check_effects, parse_config
    from search_spaces.core.allowed_code import allow, allow_libraries

    models = [model] if isinstance(model, str | PathLike) else list(model)
    given = {name: _as_text(value) for name, value in options.items()}
    if isinstance(freedoms := given.get("allow"), tuple):
        given["allow"] = ",".join(map(str, freedoms))
    check_effects(given)
    config = parse_config({**given, "model": tuple(map(_as_text, models)), "budget": budget}, keywords=True)
    # A caller of this function can run any code anyway.
    allow_libraries(config.custom_ops)
    allow(config.sampler, *(config.processors or ()), *map(str, models))
    return config


def _as_text(value: Any) -> Any:
    """Return paths as text and several values as a tuple; other values are checked as those of the command line."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) != 0:
        return tuple(map(_as_text, value))
    return fspath(value) if isinstance(value, PathLike) else value


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
