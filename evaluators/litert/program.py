"""From a plan to each worker's program: its stages in order, where it waits for others, and where its tensors lie.

Space in shared memory is reused as soon as no stage can still need it. That keeps the working set of a cut model as
small as the whole model's; otherwise every boundary tensor would take cache lines of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform

# A worker that waits for another core's stage polls this long before it sleeps; waking costs tens of microseconds. It
# sleeps at once where a stage that needs its cores may run meanwhile: polling would take half a core from that stage.
SPIN_NS = 2_000_000
# LiteRT requires host memory aligned to 64 bytes; kernels may read a little beyond the end of a tensor.
ALIGNMENT = 64
_SLACK = 128
LOG_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Edge:
    """Stage ``after`` may start when ``before`` on another processor is done; its worker polls for ``spin_ns``."""

    before: int
    after: int
    spin_ns: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan with static dispatch, ready for its workers.

    Attributes:
        stages: processor → its stages in dispatch order; the leader, which runs stage 0, comes first.
        edges: the waits that are needed, none implied by another.
        before: for each stage, as a bit set, the stages that have certainly ended when it starts.
        sleeping: processors whose cores other stages may still use after their own last stage.
    """

    stages: Mapping[str, Sequence[int]]
    edges: tuple[Edge, ...]
    before: list[int]
    sleeping: frozenset[str] = frozenset()

    def all_edges(self) -> list[Edge]:
        """Return the plan's edges, those from the leader to other workers, and those from workers' ends to the leader.

        Stage -1 stands for the leader between two inferences. A worker whose first stage waits for another stage gets
        no edge from the leader: it would wake up while that stage uses its core.
        """
        (leader, own), *others = self.stages.items()
        starts = [Edge(-1, stages[0], self._spin_ns(name)) for name, stages in others if not self.before[stages[0]]]
        lasts = [stages[-1] for _, stages in others if not self.before[own[-1]] >> stages[-1] & 1]
        return [*self.edges, *starts, *(Edge(last, -1, self._spin_ns(leader)) for last in lasts)]

    @property
    def semaphores(self) -> int:
        """Number of semaphores: one for each edge, and one by which each worker but the leader says that it is ready.

        Without the latter, a worker that still reads its request would take a core from the first stage.
        """
        return len(self.all_edges()) + len(self.stages) - 1

    def _spin_ns(self, processor: str) -> int:
        return 0 if processor in self.sleeping else SPIN_NS

    def programs(self, bound: Binding) -> dict[str, dict[str, Any]]:
        """Return each worker's program; semaphore ``i`` is that of edge ``i`` of :meth:`all_edges`."""
        edges = list(enumerate(self.all_edges()))
        leader, *_ = self.stages

        def waits(after: int) -> list[tuple[int, int]]:
            return [(i, e.spin_ns) for i, e in edges if e.after == after and e.before >= 0]

        def posts(before: int) -> list[int]:
            return [i for i, e in edges if e.before == before]

        go = {
            name: [(i, min(e.spin_ns, self._spin_ns(name))) for i, e in edges if e.after == stages[0]]
            for name, stages in self.stages.items()
            if name != leader
        }
        ready = {name: len(edges) + i for i, name in enumerate(go)}
        leads = {
            "starts": posts(-1),
            "ends": waits(-1),
            "releases": [i for each in go.values() for i, _ in each],
            "readies": [(i, 0) for i in ready.values()],
        }
        return {
            name: {
                **ONE_FRAME,
                "steps": [bound.step(s, waits(s) if s != stages[0] else (), posts(s)) for s in stages],
                **(leads if name == leader else {"go": go[name], "ready": [ready[name]]}),
            }
            for name, stages in self.stages.items()
        }


ONE_FRAME: Mapping[str, Any] = {
    "frames": 1,
    "frame_nbytes": 0,
    "regular": True,
    "go": (),
    "starts": (),
    "ends": (),
    "releases": (),
    "ready": (),
    "readies": (),
}
"""Fields of a program that runs one inference at a time and waits for no leader."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The stages of a loaded plan.

    Attributes:
        compiled: stage → number and signature of the compiled model on its worker.
        ports: stage → its input and output tensors in the order of its model.
        copied: stage → tensors that it copies to and from an accelerator.
        layout: where tensors lie in the arena.
    """

    graph: Graph
    compiled: Mapping[int, tuple[int, int]]
    ports: Mapping[int, tuple[Sequence[int], Sequence[int]]]
    copied: Mapping[int, Copies]
    layout: Layout

    def step(self, stage: int, waits: Sequence[tuple[int, int]] = (), signals: Sequence[int] = ()) -> dict[str, Any]:
        """Return a stage's entry in its worker's program.

        Args:
            waits: semaphores that it waits for, and how long it polls each (ns).
            signals: semaphores that it posts to.
        """
        (number, signature), (inputs, outputs) = self.compiled[stage], self.ports[stage]
        copied, tensors = self.copied[stage], self.graph.tensors
        return {
            "stage": stage,
            "compiled": number,
            "signature": signature,
            "Input": [(self.layout.offsets[t], tensors[t].nbytes, t) for t in inputs],
            "Output": [(self.layout.offsets[t], tensors[t].nbytes, t) for t in outputs],
            "uploads": [i for i, t in enumerate(inputs) if t in copied.uploads],
            "downloads": [i for i, t in enumerate(outputs) if t in copied.downloads],
            "waits": waits,
            "signals": signals,
        }


@dataclass(frozen=True, slots=True)
class Copies:
    """Tensors that a stage on an accelerator copies from, and to, the shared memory of all workers."""

    uploads: frozenset[int] = frozenset()
    downloads: frozenset[int] = frozenset()


def copies(graph: Graph, plan: Plan, accelerators: Collection[str]) -> dict[int, Copies]:
    """Return the tensors that each stage copies: on an accelerator, inputs not there yet and outputs read elsewhere.

    Args:
        accelerators: names of the processors with memory of their own.
    """
    place = {operator: stage.processor for stage in plan.stages for operator in stage.operators}
    there: dict[str, set[int]] = {}
    found = {}
    for index, stage in enumerate(plan.stages):
        if stage.processor not in accelerators:
            found[index] = Copies()
            continue
        border = graph.boundary(stage.operators)
        known = there.setdefault(stage.processor, set())
        uploads = frozenset(border.inputs) - known
        downloads = frozenset(
            t
            for t in border.outputs
            if t in graph.outputs or any(place[o] != stage.processor for o in graph.consumers.get(t, ()))
        )
        known.update(border.inputs, border.outputs)
        found[index] = Copies(uploads, downloads)
    return found


def schedule(graph: Graph, plan: Plan, platform: Platform) -> Schedule:
    """Return the workers' schedule for a plan with static dispatch.

    A stage waits for the stages whose tensors it reads, and for every earlier stage on a processor that shares a
    resource with its own, since the two must not run at once.
    """
    place = {operator: i for i, stage in enumerate(plan.stages) for operator in stage.operators}
    last: dict[str, int] = {}  # processor → its latest stage
    before: list[int] = []
    edges: list[Edge] = []
    for index, stage in enumerate(plan.stages):
        previous = last.get(stage.processor)
        over = 0 if previous is None else before[previous] | 1 << previous
        shared = {i for i in range(index) if _shared(platform, plan.stages[i], stage)}
        spin_ns = SPIN_NS if all(over >> i & 1 for i in shared) else 0
        needs = ({place[b] for o in stage.operators for b in graph.predecessors(o)} | shared) - {index}
        # From the latest need backwards: one that a later need implies takes no edge of its own.
        for need in sorted(needs, reverse=True):
            if not over >> need & 1:
                edges.append(Edge(need, index, spin_ns))
                over |= before[need] | 1 << need
        before.append(over)
        last[stage.processor] = index
    sleeping = {
        name
        for name, index in last.items()
        if any(_shared(platform, plan.stages[index], later) for later in plan.stages[index + 1 :])
    }
    return Schedule(plan.by_processor(), tuple(edges), before, frozenset(sleeping))


def _shared(platform: Platform, one: Stage, other: Stage) -> bool:
    """Return whether two stages on different processors need the same core or device."""
    return one.processor != other.processor and platform[one.processor].excludes(platform[other.processor])


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets in an arena.

    Attributes:
        offsets: tensor index → offset of every tensor that a stage reads from the arena or writes there.
        log: offset of the workers' time stamps (``LOG_NBYTES`` long).
        nbytes: size of the arena.
    """

    offsets: Mapping[int, int]
    log: int
    nbytes: int


def layout(
    graph: Graph, plan: Plan, before: Sequence[int], outputs: Mapping[int, Sequence[int]] | None = None
) -> Layout:
    """Lay out the tensors that the stages of a plan write.

    Inputs of the model come first, in the same place for every plan of a graph, and keep their space, because every
    inference reads them again. Two other tensors share space when all stages that use the one have certainly ended
    before the other is written, in every order that the workers and the runtime allow. Tensors that several stages
    write, each a part, lie so that their second parts begin at the same byte where that takes no more space: processors
    that split operators alike then write where they wrote before, and fetch no cache lines from another core.

    Args:
        before: for each stage, as a bit set, the stages that have certainly ended when it starts (:class:`Schedule`).
        outputs: for each stage the tensors that it writes; by default those that cross its border. In a stage that
            writes more, operators count one by one: only those that depend on an operator certainly run after it.
    """
    offsets: dict[int, int] = {}
    top = 0
    for tensor in graph.inputs:
        offsets[tensor] = top
        top += _space(graph, tensor)
    log = top
    top += LOG_NBYTES

    borders = {i: graph.boundary(stage.operators).outputs for i, stage in enumerate(plan.stages)}
    outputs = borders if outputs is None else outputs
    apart = {i for i, border in borders.items() if len(outputs[i]) > len(border)}
    moment, read, earlier = _moments(graph, plan, before, {i: frozenset(outputs[i]) for i in apart})
    over: dict[int, int] = {}  # tensor → the moments that are certainly over when it is first written
    users: dict[int, int] = {}
    for tensor in (t for index in borders for t in outputs[index]):
        writer = moment[graph.producer[tensor]]
        root = graph.views.get(tensor, (tensor, 0))[0]  # a view shares space and lifetime of its tensor
        over[root] = over.get(root, earlier[writer]) & earlier[writer]
        users[root] = users.get(root, 0) | 1 << writer
        for reader in graph.consumers.get(tensor, ()):
            users[root] |= read[reader]
    kept = set(graph.outputs)

    def may_share(a: int, b: int) -> bool:
        """Return whether ``a`` is dead before ``b`` is written."""
        return a not in kept and users[a] & ~over[b] == 0

    second: dict[int, int] = {}  # tensor that several stages write → where its second part begins
    for tensor, (root, first) in graph.views.items():
        if first and tensor in graph.producer:
            second[root] = min(first, second.get(root, first))
    placed: list[int] = []
    parted: list[int] = []  # offsets at which a second part begins
    end = top
    for tensor in sorted(over, key=lambda t: (-graph.tensors[t].nbytes, t)):
        size = _space(graph, tensor)
        conflicts = sorted(
            (offsets[o], offsets[o] + _space(graph, o))
            for o in placed
            if not (may_share(tensor, o) or may_share(o, tensor))
        )
        offset = top
        for first, last in conflicts:
            if offset + size <= first:
                break
            offset = max(offset, last)
        if tensor in second:
            most = max(end, offset + size)
            for at in (begin - second[tensor] for begin in parted):
                if top <= at <= most - size and all(at + size <= first or last <= at for first, last in conflicts):
                    offset = at
                    break
            else:
                parted.append(offset + second[tensor])
        offsets[tensor] = offset
        placed.append(tensor)
        end = max(end, offset + size)
    offsets |= {tensor: offsets[root] + first for tensor, (root, first) in graph.views.items()}
    return Layout(offsets, log, end + _SLACK)


def _moments(
    graph: Graph, plan: Plan, before: Sequence[int], apart: Mapping[int, frozenset[int]]
) -> tuple[dict[int, int], dict[int, int], Sequence[int]]:
    """Return when operators write and read; a stage is one moment, unless its operators are scheduled one by one.

    A runtime may run operators in any order that their data allow, and fuse those that pass each other a tensor inside
    the stage: inputs of the first one may then be read as late as the last one runs.

    Args:
        apart: stages whose operators are scheduled one by one, and the tensors that they write.

    Returns:
        For each operator its moment; for each operator, as a bit set, the moments during which its inputs may be read;
        for each moment those that are certainly over when it begins.
    """
    moment = {o: i for i, stage in enumerate(plan.stages) for o in stage.operators}
    if not apart:
        return moment, {o: 1 << i for o, i in moment.items()}, before
    read: dict[int, int] = {}
    earlier: list[int] = []
    during: list[int] = []  # for each stage its moments
    for index, stage in enumerate(plan.stages):
        over = sum(during[other] for other in range(index) if before[index] >> other & 1)
        first = len(earlier)
        if index not in apart:
            moment |= dict.fromkeys(stage.operators, first)
            read |= dict.fromkeys(stage.operators, 1 << first)
            earlier.append(over)
        else:
            inside = set(stage.operators)
            for o in stage.operators:
                moment[o] = len(earlier)
                sources = graph.predecessors(o) & inside
                earlier.append(reduce(or_, (earlier[moment[s]] | 1 << moment[s] for s in sources), over))
            for o in reversed(stage.operators):
                kept = set(graph.operators[o].outputs) - apart[index]
                fused = {c for tensor in kept for c in graph.consumers.get(tensor, ()) if c in inside}
                read[o] = reduce(or_, (read[c] for c in fused), 1 << moment[o])
        during.append((1 << len(earlier)) - (1 << first))
    return moment, read, earlier


def largest(graph: Graph) -> int:
    """Return a size that holds the layout of every plan of a graph."""
    return LOG_NBYTES + _SLACK + sum(_space(graph, t) for t in graph.activation_tensors)


def _space(graph: Graph, tensor: int) -> int:
    return max(1, -(-graph.tensors[tensor].nbytes // ALIGNMENT)) * ALIGNMENT
