"""Which operators an accelerator refuses, found by compiling operators alone; nothing is left to the CPU in silence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from evaluators.litert.compiling import COMPILE_LIMIT_S, compile_stages, release_stages
from evaluators.litert.lanes import LaneError, Lanes
from evaluators.litert.settings import reads_files
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.models.stages import cut_stage
from search_spaces.platform import Processor

_FILES_LIMIT_S = 60.0
_MOST_SHOWN = 8
_NONE_AT_ALL = 4  # so many operators refused without exception speak against the driver rather than the operators


class Refusals:
    """What is known of each operator of each graph on each kind of accelerator; asked once."""

    def __init__(self, lanes: Lanes, numbers: count[int]) -> None:
        self._lanes = lanes
        self._numbers = numbers
        self._taken: dict[tuple[str, str], dict[int, bool]] = {}

    def known(self, graph: Graph, processor: Processor, operators: Sequence[int]) -> list[int]:
        """Return those of ``operators`` that are known to be refused."""
        taken = self._taken.get((graph.digest, processor.like), {})
        return [o for o in operators if not taken.get(o, True)]

    def find(self, graph: Graph, processor: Processor, operators: Sequence[int]) -> list[int]:
        """Return those of ``operators`` that the processor refuses when they are compiled alone.

        Raises:
            UnavailableError: the lane died, or does not answer.
        """
        taken = self._taken.setdefault((graph.digest, processor.like), {})

        def takes(some: Sequence[int]) -> bool:
            return self._takes(graph, processor, some)

        asked = [o for o in operators if o not in taken]
        refused = set(_refused(takes, asked))
        taken |= {o: o not in refused for o in asked}
        return self.known(graph, processor, operators)

    def _takes(self, graph: Graph, processor: Processor, operators: Sequence[int]) -> bool:
        number = next(self._numbers)
        stages = [cut_stage(graph, (o,)) for o in operators]
        limit_s = _FILES_LIMIT_S if reads_files(processor) else COMPILE_LIMIT_S
        try:
            answer = compile_stages(self._lanes, processor, number, stages, None, strict=True, limit_s=limit_s)
        except LaneError as error:
            # A front end crashes or hangs on a model; a driver does so on all of them.
            if error.fatal and not reads_files(processor):
                raise
            return False
        release_stages(self._lanes, processor.name, number)
        return bool(answer["accelerated"])


def refusal(graph: Graph, processor: Processor, operators: Sequence[int], refused: Sequence[int]) -> UnavailableError:
    """Return the error that tells which operators of a stage are refused."""
    where = f"the stage of operators {operators[0]} to {operators[-1]}"
    if not refused:
        return UnavailableError(f"{processor.name} refuses {where}, although it takes each of them alone")
    if len(refused) == len(operators) >= _NONE_AT_ALL:
        return UnavailableError(
            f"{processor.name} takes none of the operators {operators[0]} to {operators[-1]}",
            "its driver may not work with the runtime: runtime.log in the run folder tells more",
        )
    unseen = "" if processor.kind == "cpu" else ", or let the CPU run them unseen by the search: --allow-fallback"
    return UnavailableError(
        f"{processor.name} refuses {where}: it does not take {describe(graph, refused)}",
        f"place them on another processor{unseen}",
    )


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
