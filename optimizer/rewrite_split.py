"""What ``optimize rewrite --split`` does: a model with chains of operators split, as a ``.tflite`` file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces.errors import UsageError, shown
from search_spaces.graph import Graph
from search_spaces.models import load
from search_spaces.models.stages import cut_stage
from search_spaces.rewrites.splits import Axis, Split, extent, split_operators

_SPLIT = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?:(height|channels):(\d*\.?\d+(?:,\d*\.?\d+)*)")
_HINT = "give FIRST-LAST:height:SHARE or FIRST-LAST:channels:SHARE, as 0-2:height:0.6"
_TILE = 8  # channels that kernels compute together


@dataclass(frozen=True, slots=True)
class SplitModel:
    """What was written.

    Attributes:
        before, after: number of operators.
        sha256: of the file.
    """

    model: str
    path: Path
    splits: tuple[Split, ...]
    before: int
    after: int
    nbytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        return {
            "schema_version": 1,
            "model": self.model,
            "file": str(self.path),
            "splits": [{"operators": [s.first, s.last], "axis": s.axis, "cuts": list(s.cuts)} for s in self.splits],
            "operators": {"before": self.before, "after": self.after},
            "nbytes": self.nbytes,
            "sha256": self.sha256,
        }

    def render(self, *, as_json: bool) -> str:
        """Return what the command prints."""
        if as_json:
            return json.dumps(self.to_json(), indent=2)
        lines = [f"{self.model}: {split}" for split in self.splits]
        return "\n".join([*lines, f"{self.before} operators became {self.after}: {self.path} ({self.nbytes} bytes)"])


def parse_split(graph: Graph, text: str) -> Split:
    """Return a split as a person writes it: ``0-2:height:0.6``, the last operator included.

    Cuts between channels lie at multiples of 8 where there are enough of them, as kernels compute them.

    Raises:
        UsageError: it is not written like that, or there are no such operators.
    """
    found = _SPLIT.fullmatch(text)
    if found is None:
        raise UsageError(f"--split {shown(text)}: is not a split", _HINT)
    first = int(found[1])
    last = int(found[2]) + 1 if found[2] is not None else first + 1
    axis: Axis = "height" if found[3] == "height" else "channels"
    shares = [float(share) for share in found[4].split(",")]
    if not all(0.0 < share < 1.0 for share in shares):
        raise UsageError(f"--split {shown(text)}: a share lies between 0 and 1", "leave the operators whole instead")
    length = extent(graph, first, last, axis)
    tile = _TILE if axis == "channels" and length >= 2 * _TILE else 1
    cuts = tuple(min(max(round(share * length / tile), 1) * tile, max(length - 1, 1)) for share in shares)
    return Split(first, last, axis, cuts)


def rewrite_split(model: str, splits: Sequence[str], out: Path, input_shapes: Sequence[str] = ()) -> SplitModel:
    """Write a model with operators split.

    Raises:
        UsageError: a split cannot be made, or the file cannot be written.
    """
    graph = load(model, input_shapes)
    wanted = tuple(parse_split(graph, text) for text in splits)
    made = split_operators(graph, wanted).graph
    digest = cut_stage(made, range(len(made.operators))).write(out)
    return SplitModel(graph.name, out, wanted, len(graph.operators), len(made.operators), out.stat().st_size, digest)
