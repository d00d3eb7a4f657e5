"""Compile stages on a lane: their structure goes through its channel, their weights as open files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from evaluators.litert import tflite
from evaluators.litert.lanes import Lanes, Request
from evaluators.litert.settings import ACCELERATORS, INTERPRETER, LITERT, compile_settings
from search_spaces.errors import UnavailableError
from search_spaces.models.flattened import flattened
from search_spaces.models.joined import JoinedModel
from search_spaces.models.shapes import needs_interpreter
from search_spaces.platform import Processor

_CUSTOM = schema.BuiltinOperator.CUSTOM


def compile_stages(
    lanes: Lanes,
    processor: Processor,
    number: int,
    joined: JoinedModel,
    packed: Path | None,
    *,
    strict: bool = False,
    limit_s: float = 300.0,
) -> dict[str, Any]:
    """Compile stages on a processor's lane, which will know them by ``number``; return its answer.

    Args:
        packed: packed weights, for XNNPACK.
        strict: nothing may be left to the CPU, even where the processor's options allow that.
        limit_s: a lane that takes longer is given up.

    Raises:
        UnavailableError: the runtime refuses them, or a file that holds their weights is gone.
    """
    signatures = len(joined.schema.signatureDefs or ())
    engine = engine_of(processor, joined.schema)
    settings = compile_settings(processor, packed, engine)
    library = joined.sources[0].custom_ops
    custom = [[c.customCode, c.version] for c in joined.schema.operatorCodes if c.builtinCode == _CUSTOM]
    if library is not None and custom and engine == LITERT:
        operators = [[name.decode(errors="replace"), int(version)] for name, version in custom if name]
        settings["custom_ops"] = {"library": str(library), "operators": operators}
    if strict:
        settings["accelerators"] = ACCELERATORS[processor.kind]
    if processor.kind == "gpu":
        joined = replace(joined, schema=flattened(joined.schema))
    head = {"op": "compile", "id": number, "signatures": signatures, "settings": settings, "engine": engine}
    with ExitStack() as stack:
        if engine != LITERT:
            return lanes.ask(processor.name, Request(head, fds=[_written(stack, joined)]), limit_s)
        files = _opened(stack, [source.path for source in joined.sources])
        return lanes.ask(processor.name, Request(head, joined.view(), files), limit_s)


def engine_of(processor: Processor, model: Any) -> str:
    """Return what runs a stage, the schema's ``ModelT``, on a processor: compiled models where they can."""
    if tflite.runs(processor):
        return tflite.RUNTIME
    return INTERPRETER if processor.kind == "cpu" and needs_interpreter(model) else LITERT


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
