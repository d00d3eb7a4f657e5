"""Which operators a processor does not run, and why; nothing is left to the CPU in silence."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import count

from evaluators.litert.compiling import COMPILE_LIMIT_S, compile_stages, release_stages
from evaluators.litert.settings import reads_files
from evaluators.litert.workers import WorkerError, Workers
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.models.shapes import why_it_fails
from search_spaces.models.stages import cut_stage
from search_spaces.platform import Processor

_FILES_LIMIT_S = 60.0
_MOST_SHOWN = 8
# How the runtime ends what it says of an operator, and the place in its own sources before that.
_NODE = re.compile(r"Node number (\d+) \((.*?)\) failed to (\w+)")
_SOURCE = re.compile(r"\S+\.(?:cc|h):\d+ ")
_NONE_AT_ALL = 4  # so many operators refused without exception speak against the driver rather than the operators


class Refusals:
    """What is known of each operator of each graph on each kind of accelerator; asked once."""

    def __init__(self, workers: Workers, numbers: count[int]) -> None:
        self._workers = workers
        self._numbers = numbers
        self._taken: dict[tuple[str, str], dict[int, bool]] = {}

    def known(self, graph: Graph, processor: Processor, operators: Sequence[int]) -> list[int]:
        """Return those of ``operators`` that are known to be refused."""
        taken = self._taken.get((graph.digest, processor.like), {})
        return [o for o in operators if not taken.get(o, True)]

    def find(self, graph: Graph, processor: Processor, operators: Sequence[int]) -> list[int]:
        """Return those of ``operators`` that the processor refuses in every surrounding that is tried.

        They are asked as the accelerator would see them: together with their neighbours and the operators that compute
        their constants. One that is refused alone is asked once more beside those that it reads from and writes to.

        Raises:
            UnavailableError: the lane died, or does not answer.
        """
        taken = self._taken.setdefault((graph.digest, processor.like), {})

        def takes(some: Sequence[int]) -> bool:
            return self._takes(graph, processor, some)

        asked = [o for o in operators if o not in taken]
        alone = _refused(takes, asked)
        refused = set(alone)
        if len(operators) > 1 and not reads_files(processor):
            refused = {o for o in alone if not self._taken_beside_others(graph, processor, o, alone)}
        taken |= {o: o not in refused for o in asked}
        return self.known(graph, processor, operators)

    def _taken_beside_others(self, graph: Graph, processor: Processor, operator: int, alone: Sequence[int]) -> bool:
        readers = {r for t in graph.operators[operator].outputs for r in graph.consumers.get(t, ())}
        beside = sorted({operator, *((graph.predecessors(operator) | readers) - set(alone))})
        return len(beside) > 1 and self._takes(graph, processor, beside)

    def _takes(self, graph: Graph, processor: Processor, operators: Sequence[int]) -> bool:
        number = next(self._numbers)
        apart = reads_files(processor)  # a front end takes operators one by one; a delegate sees their neighbours
        stages = [cut_stage(graph, (o,)) for o in operators] if apart else [cut_stage(graph, operators)]
        limit_s = _FILES_LIMIT_S if apart else COMPILE_LIMIT_S
        try:
            answer = compile_stages(self._workers, processor, number, stages, None, strict=True, limit_s=limit_s)
        except WorkerError as error:
            # A front end crashes or hangs on a model; a driver does so on all of them.
            if error.fatal and not apart:
                raise
            return False
        release_stages(self._workers, processor.name, number)
        return bool(answer["accelerated"])


def refusal(graph: Graph, processor: Processor, operators: Sequence[int], refused: Sequence[int]) -> UnavailableError:
    """Return the error that tells which operators of a stage are refused."""
    where = f"the stage of operators {operators[0]} to {operators[-1]}"
    if not refused:
        return UnavailableError(
            f"{processor.name} does not support {where} together, although it supports each of them alone"
        )
    if len(refused) == len(operators) >= _NONE_AT_ALL:
        return UnavailableError(
            f"{processor.name} supports none of the operators {operators[0]} to {operators[-1]}",
            "its driver may not work with the runtime; see runtime.log in the run folder",
        )
    unseen = "" if processor.kind == "cpu" else ", or let the CPU run them: --allow-fallback"
    return UnavailableError(
        f"{processor.name} does not support operators {describe(graph, refused)} in {where}",
        f"place them on another processor{unseen}",
    )


def failure(graph: Graph, operators: Sequence[int], what: str) -> UnavailableError:
    """Return the error that names the operator for which a stage does not run on a CPU, and why.

    Args:
        what: what the lane said.
    """
    operators = list(operators)
    said = why_it_fails(cut_stage(graph, operators), graph)
    while said and len(operators) > 1 and _NODE.search(said) is None:  # the runtime died, and says nothing
        half = operators[: len(operators) // 2]
        of_half = why_it_fails(cut_stage(graph, half), graph)
        operators = half if of_half else operators[len(half) :]
        said = of_half or why_it_fails(cut_stage(graph, operators), graph)
    where = f"operators {operators[0]} to {operators[-1]}" if len(operators) > 1 else f"operator {operators[0]}"
    found = _NODE.search(said)
    if found is None:
        kinds = "" if len(operators) > 1 else f" ({graph.operators[operators[0]].kind})"
        return UnavailableError(f"{where}{kinds} cannot be run: {said or what}")
    place = _operator_at(graph, operators, int(found[1]))
    reason = " ".join(_SOURCE.sub("", said[: found.start()]).split()) or what
    if "unresolved custom op" in reason:
        return UnavailableError(
            f"operator {place} ({found[2]}) is a custom operator without a kernel",
            "give the library with its kernel: --custom-ops LIBRARY.so",
        )
    return UnavailableError(
        f"operator {place} ({found[2]}) cannot be run: {reason}",
        "give inputs that fit: --input FILE.npz"
        if found[3] == "invoke"
        else "no runtime on this machine has a kernel for it; convert the model again",
    )


def _operator_at(graph: Graph, operators: Sequence[int], node: int) -> int:
    """Return the operator of the graph that is a stage's node; those that compute constants come before the others."""
    flat = [o for o in operators for _ in graph.operators[o].flat()]
    before = len(cut_stage(graph, operators).schema.subgraphs[0].operators) - len(flat)
    return flat[max(0, min(node - before, len(flat) - 1))]


def describe(graph: Graph, operators: Sequence[int]) -> str:
    """Return ``7 (GATHER), 12 (TOPK_V2)``, at most eight of them."""
    shown = ", ".join(f"{o} ({graph.operators[o].kind})" for o in operators[:_MOST_SHOWN])
    return shown + (f" and {len(operators) - _MOST_SHOWN} more" if len(operators) > _MOST_SHOWN else "")


def _refused(takes: Callable[[Sequence[int]], bool], operators: Sequence[int]) -> list[int]:
    """Return the refused ones, by halving: few compilations where few are refused."""
    if not operators or takes(operators):
        return []
    if len(operators) == 1:
        return list(operators)
    middle = len(operators) // 2
    return _refused(takes, operators[:middle]) + _refused(takes, operators[middle:])
