"""A model as it is sent: its file, whatever was done to the graph since it was read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.models.litert import read_model
from search_spaces.models.stages import cut_stage
from search_spaces.plan import Plan


@dataclass(frozen=True, slots=True)
class Sendable:
    """A file that holds a graph.

    Attributes:
        path: the file.
        digest: its SHA-256.
        name: of the model, as it may go over the wire.
        structure: digest of the graph that is read from the file.
    """

    path: Path
    digest: str
    name: str
    structure: str

    def plan(self, plan: Plan) -> Plan:
        """Return a plan of the graph as one of the graph in the file, which has the same operators."""
        return replace(plan, graph_digest=self.structure)


def sendable(graph: Graph, folder: Path) -> Sendable:
    """Return a file that holds a graph: its own, or one in ``folder`` where sizes were given or operators rewritten.

    Raises:
        ModelError: the model's file is gone or has changed.
        UnavailableError: there is no file, or a file cannot say what the graph is.
        UsageError: the folder cannot be written.
    """
    if graph.source is None:
        raise UnavailableError(f"model {graph.name!r} has no file, and devices are sent files", "measure it here")
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-@") else "_" for c in graph.name)[:80]
    name = name if name[:1].isalnum() else f"m{name}"
    if not graph.source.fixed:
        return Sendable(graph.source.path, graph.source.content_digest(), name, graph.digest)
    path = folder / f"{graph.digest}.tflite"
    digest = cut_stage(graph, range(len(graph.operators))).write(path)
    written = read_model(path, graph.name)
    if [o.kind for o in written.operators] != [o.kind for o in graph.operators]:
        raise UnavailableError(f"model {graph.name!r}, as it was rewritten, is not a file that a device could be sent")
    return Sendable(path, digest, name, written.digest)
