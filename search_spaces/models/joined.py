"""Several stages of one model as one model in memory, a signature each.

Stages that are compiled together stay separate calls, but the runtime gives them one workspace and one pool of threads.
Compiled apart, each would leave its own trail of scratch memory through the caches, and the idle threads of one would
be in the way of the next: MobileNet in eight parts was 6.5 % slower than whole that way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO

from ai_edge_litert import schema_py_generated as schema

from search_spaces.errors import ModelError
from search_spaces.models.pages import in_pages
from search_spaces.models.source import ModelSource
from search_spaces.models.stages import MAX_INSIDE_NBYTES, Mapped, StageModel
from search_spaces.models.subgraphs import renumbered
from search_spaces.models.writer import pack_header, point_at, point_outside, write_into


@dataclass(frozen=True, slots=True)
class JoinedModel:
    """Stages whose signatures ``stage_0``, ``stage_1`` … are in the order in which they were given.

    Attributes:
        schema: the schema's ``ModelT``, without weights.
        sources: the files that hold the weights.
        buffers: number of a buffer → the source that holds it, as a position in ``sources``.
    """

    schema: Any
    sources: tuple[ModelSource, ...]
    buffers: Mapping[int, int]

    def view(self) -> bytes:
        """Return a header such that header and files, one behind the other in memory, are the model.

        The header is a whole number of pages long and each file begins on a page, so that the files can be mapped
        and no weight is copied.
        """
        outside = {b for b, s in self.buffers.items() if not self.sources[s].extents[b].inline}
        header, fields = pack_header(self.schema, self.buffers.keys(), outside)
        begins = [in_pages(len(header))]
        for source in self.sources:
            begins.append(begins[-1] + in_pages(source.nbytes))
        for buffer, field in fields.items():
            which = self.buffers[buffer]
            extent = self.sources[which].extents[buffer]
            if buffer in outside:
                point_outside(header, field, begins[which] + extent.offset, extent.nbytes)
            else:
                point_at(header, field, begins[which] + extent.offset - 4)
        return bytes(header).ljust(begins[0], b"\0")

    def write_into(self, file: BinaryIO) -> None:
        """Write the model, the weights that it reads included, to an open, empty file.

        Raises:
            ModelError: a file that holds weights is gone or has changed.
            OSError: the file cannot be written.
        """
        nbytes = sum(self.sources[s].extents[b].nbytes for b, s in self.buffers.items())
        with ExitStack() as stack:
            weights = [stack.enter_context(Mapped(source)) for source in self.sources]
            blobs = _Blobs(self, weights)
            write_into(file, self.schema, blobs, self.sources[0].path.name, outside=nbytes > MAX_INSIDE_NBYTES)


class _Blobs(Mapping[int, memoryview]):
    """Weights by buffer number, sliced when they are asked for, so that no slice outlives its file's mapping."""

    def __init__(self, joined: JoinedModel, weights: Sequence[memoryview]) -> None:
        self._joined = joined
        self._weights = weights

    def __getitem__(self, buffer: int) -> memoryview:
        which = self._joined.buffers[buffer]
        extent = self._joined.sources[which].extents[buffer]
        return self._weights[which][extent.offset : extent.offset + extent.nbytes]

    def __iter__(self) -> Iterator[int]:
        return iter(self._joined.buffers)

    def __len__(self) -> int:
        return len(self._joined.buffers)


def join(stages: Sequence[StageModel]) -> JoinedModel:
    """Join stages that were cut from one model, or read from stage files of one model.

    Raises:
        ModelError: they are not of one model.
    """
    by_id = {id(stage.source): stage.source for stage in stages}
    sources = tuple(by_id.values())
    number_of = {key: i for i, key in enumerate(by_id)}
    joined = copy.copy(stages[0].schema)
    joined.metadata = joined.metadataBuffer = None
    joined.operatorCodes, joined.signatureDefs = [], []
    mains: list[Any] = []
    bodies: list[Any] = []
    codes: dict[tuple[Any, ...], int] = {}
    for index, stage in enumerate(stages):
        code_of = {}
        for number, code in enumerate(stage.schema.operatorCodes):
            key = (code.builtinCode, code.deprecatedBuiltinCode, code.customCode, code.version)
            if key not in codes:
                codes[key] = len(codes)
                joined.operatorCodes.append(code)
            code_of[number] = codes[key]
        main, *called = stage.schema.subgraphs
        numbers = {i: len(stages) + len(bodies) + i - 1 for i in range(1, len(called) + 1)}
        for subgraph, found in ((main, mains), *((body, bodies) for body in called)):
            moved = copy.copy(subgraph)
            moved.operators = [renumbered(o, code_of, numbers) for o in subgraph.operators or ()]
            found.append(moved)
        signature = schema.SignatureDefT(signatureKey=b"stage_%d" % index, subgraphIndex=index)
        signature.inputs = [schema.TensorMapT(name=b"i%d" % i, tensorIndex=int(t)) for i, t in enumerate(main.inputs)]
        signature.outputs = [schema.TensorMapT(name=b"o%d" % i, tensorIndex=int(t)) for i, t in enumerate(main.outputs)]
        joined.signatureDefs.append(signature)
    joined.subgraphs = [*mains, *bodies]
    longest: list[Any] = max((stage.schema.buffers for stage in stages), key=len)
    joined.buffers = list(longest)
    buffers: dict[int, int] = {}
    for stage in stages:
        for buffer, held in enumerate(stage.schema.buffers if stage.source.fixed else ()):
            if held.data is not None:  # no file has it: see ModelSource.fixed
                joined.buffers[buffer] = held
        for buffer in stage.buffers:
            holder = sources[buffers.setdefault(buffer, number_of[id(stage.source)])]
            if holder.extents[buffer].nbytes != stage.source.extents[buffer].nbytes:
                raise ModelError(f"{holder.path} and {stage.source.path} are no stages of one model")
    return JoinedModel(joined, sources, buffers)
