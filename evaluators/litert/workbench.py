"""Stages compiled on the lanes of a crew, kept while somebody uses them, and a while longer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from evaluators.litert.compiling import compile_stages, engine_of, pack_weights, release_stages
from evaluators.litert.crew import Crew
from evaluators.litert.inner import opened
from evaluators.litert.runtimes import INTERPRETER
from evaluators.workload.setting import HOST
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.models.stages import StageModel, packing_model
from search_spaces.platform import Platform
from search_spaces.rewrites.views import Viewed

_KEPT = 24

Key = tuple[str, str, tuple[tuple[int, ...], ...], str]


@dataclass(frozen=True, slots=True)
class Jobs:
    """An instance's model, cut into jobs.

    Attributes:
        graph: whose operators the jobs are.
        operators: of each job.
        stages: the jobs as models.
        viewed: the same without what moves nothing, for where tensors lie.
        before: of each job a bit set of those that are certainly over when it starts.
        digest: of the model's file.
        packed: its packed weights; None where an instance packs, and keeps, weights of its own.
        owner: the instance that has compiled stages for itself alone; "" where instances share them.
    """

    graph: Graph
    operators: tuple[tuple[int, ...], ...]
    stages: tuple[StageModel, ...]
    viewed: Viewed
    before: Sequence[int]
    digest: str
    packed: Path | None
    owner: str = ""


@dataclass(slots=True)
class Compiled:
    """Jobs compiled on a lane: its number for them, and inputs and outputs of each, by the number of the job."""

    number: int
    ports: Mapping[int, tuple[Sequence[int], Sequence[int]]]
    birth: int
    users: int = field(default=1)


class Workbench:
    """Compiles jobs on lanes; the least recently used that nobody holds go first."""

    def __init__(self, crew: Crew, platform: Platform) -> None:
        self._crew, self._platform = crew, platform
        self._numbers = count(1)
        self._entries: OrderedDict[tuple[str, Key], Compiled] = OrderedDict()

    def process(self, lane: str) -> str:
        """Return the name of the process that a lane is, or is a thread of."""
        return str(self._platform[lane].options.get(HOST, lane))

    def take(self, lane: str, jobs: Jobs, which: Sequence[int]) -> Compiled:
        """Return jobs compiled on a lane; :meth:`give_back` must be called.

        Args:
            which: of the jobs, those that may run there.

        Raises:
            UnavailableError: the runtime refuses them, or the lane died.
        """
        process = self.process(lane)
        operators = tuple(jobs.operators[job] for job in which)
        stages = [jobs.stages[job] for job in which]
        key = (process, (jobs.graph.digest, jobs.digest, operators, jobs.owner))
        found = self._entries.get(key)
        if found is not None and found.birth == self._crew.births.get(process, 0):
            self._entries.move_to_end(key)
            found.users += 1
            return found
        processor = replace(self._platform[lane], name=process)
        limit_s = self._platform.limits.load_s
        if len(jobs.stages) > 1 and engine_of(processor, stages) == INTERPRETER:
            raise UnavailableError(
                f"{jobs.graph.name!r} has state, or sizes known only at run time: of several models it runs whole",
                "give --max-stages 1, or search it alone",
            )
        models = opened(jobs.graph, processor, operators, stages)
        number = next(self._numbers)
        compile_stages(self._crew, processor, number, models, jobs.packed, limit_s=limit_s)
        ports = {job: (m.inputs, m.outputs) for job, m in zip(which, models, strict=True)}
        made = self._entries[key] = Compiled(number, ports, self._crew.births.get(process, 0))
        self._shrink()
        return made

    def pack(self, lane: str, graph: Graph, path: Path) -> None:
        """Have the runtime write its packed weights of a whole model.

        Raises:
            UnavailableError: it refuses.
        """
        pack_weights(self._crew, self._platform[lane], next(self._numbers), packing_model(graph), path)

    def give_back(self, found: Compiled) -> None:
        """Tell that jobs are no longer needed."""
        found.users -= 1
        self._shrink()

    def _shrink(self) -> None:
        for key, entry in list(self._entries.items()):
            process = key[0]
            gone = entry.birth != self._crew.births.get(process, 0)
            if gone or (entry.users == 0 and (key[1][3] or len(self._entries) > _KEPT)):
                del self._entries[key]
                if not gone:
                    release_stages(self._crew, process, entry.number)
