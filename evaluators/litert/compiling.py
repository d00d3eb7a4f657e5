"""Compile stages on a lane: their structure goes through its channel, their weights as open files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from evaluators.litert.lanes import Lanes, Request
from evaluators.litert.runtimes import INTERPRETER, LITERT, runtime_of
from evaluators.litert.settings import cache_settings, compile_settings, reads_files
from search_spaces.errors import UnavailableError
from search_spaces.models.shapes import needs_interpreter
from search_spaces.models.stages import JoinedModel, StageModel, flattened, join
from search_spaces.platform import Processor

COMPILE_LIMIT_S, _RELEASE_LIMIT_S = 300.0, 60.0
_CUSTOM = schema.BuiltinOperator.CUSTOM


def compile_stages(
    lanes: Lanes,
    processor: Processor,
    number: int,
    stages: Sequence[StageModel],
    packed: Path | None,
    *,
    strict: bool = False,
    limit_s: float = COMPILE_LIMIT_S,
) -> dict[str, Any]:
    """Compile stages on a processor's lane, which will know them by ``number``; return its answer.

    Args:
        packed: packed weights, for XNNPACK.
        strict: nothing may be left to the CPU, even where the processor's options allow that.
        limit_s: a lane that takes longer is given up.

    Raises:
        UnavailableError: the runtime refuses them, or a file that holds their weights is gone.
    """
    engine = engine_of(processor, stages)
    settings = compile_settings(processor, packed, engine, strict=strict)
    if not strict:  # an operator alone is only asked about
        settings |= cache_settings(processor)
    head = {"op": "compile", "id": number, "signatures": len(stages), "settings": settings, "engine": engine}
    with ExitStack() as stack:
        if engine != LITERT:
            files = [_written(stack, join([stage])) for stage in stages]
            return lanes.ask(processor.name, Request(head, fds=files), limit_s)
        joined = join(stages)
        library = joined.sources[0].custom_ops
        custom = [[c.customCode, c.version] for c in joined.schema.operatorCodes if c.builtinCode == _CUSTOM]
        if library is not None and custom:
            operators = [[name.decode(errors="replace"), int(version)] for name, version in custom if name]
            settings["custom_ops"] = {"library": str(library), "operators": operators}
        if processor.kind == "gpu":
            joined = replace(joined, schema=flattened(joined.schema))
        files = _opened(stack, [source.path for source in joined.sources])
        return lanes.ask(processor.name, Request(head, joined.view(), files), limit_s)


def engine_of(processor: Processor, stages: Sequence[StageModel]) -> str:
    """Return what runs stages that are compiled together on a processor: compiled models where they can."""
    if reads_files(processor):
        return runtime_of(processor)
    alone = processor.kind == "cpu" and any(needs_interpreter(stage.schema) for stage in stages)
    return INTERPRETER if alone else LITERT


def pack_weights(lanes: Lanes, processor: Processor, number: int, model: StageModel, path: Path) -> None:
    """Have LiteRT write its packed weights of a model to ``path``.

    Raises:
        UnavailableError: the runtime refuses the model.
    """
    joined = JoinedModel(model.schema, (model.source,), dict.fromkeys(model.buffers, 0))
    settings = compile_settings(processor, path, LITERT)
    head = {"op": "compile", "id": number, "signatures": 0, "settings": settings, "engine": LITERT}
    with ExitStack() as stack:
        files = _opened(stack, [model.source.path])
        lanes.ask(processor.name, Request(head, joined.view(), files), COMPILE_LIMIT_S)
    release_stages(lanes, processor.name, number)


def release_stages(lanes: Lanes, lane: str, number: int) -> None:
    """Have a lane forget what it knows by ``number``."""
    lanes.ask(lane, Request({"op": "release", "id": number}), _RELEASE_LIMIT_S)


def _written(stack: ExitStack, joined: JoinedModel) -> int:
    """Return a file in memory that holds the whole model, for a runtime that can read it no other way."""
    try:
        descriptor = os.memfd_create("stage", os.MFD_CLOEXEC)
        file = stack.enter_context(os.fdopen(descriptor, "wb"))
        joined.write_into(file)
        file.flush()
    except OSError as error:
        raise UnavailableError(f"no memory for a stage of {joined.sources[0].path}: {error}") from error
    return descriptor


def _opened(stack: ExitStack, paths: Sequence[Path]) -> list[int]:
    try:
        return [stack.enter_context(path.open("rb")).fileno() for path in paths]
    except OSError as error:
        raise UnavailableError(f"{error.filename}: {(error.strerror or str(error)).lower()}") from error
