"""A lane's share of a stream of inferences: round after round, as :mod:`evaluators.schedule` lays down.

Every stage waits for its edges, runs for the inference that is due, and tells its edges, in every round, whether an
inference is due or not; so waiting and telling stay in step at the beginning and at the end of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass

from evaluators.litert.edges import Edge, tell
from evaluators.litert.stretches import NO_LIMIT_NS, Log


@dataclass(frozen=True, slots=True)
class Turn:
    """What a lane does for one stage in a round.

    Attributes:
        lag: by how many rounds the stage is behind.
        waits: what it waits for.
        frames: for each frame of memory what runs the stage there, given where the log's entries of the inference
            begin, and a limit in ns.
        signals: whom it tells.
    """

    lag: int
    waits: tuple[Edge, ...]
    frames: tuple[Callable[[int, int], bool], ...]
    signals: tuple[c_void_p, ...]


def go_round(turns: Sequence[Turn], log: Log, stages: int, kept: int, depth: int) -> None:
    """Run rounds until the stream is over.

    Args:
        log: its first entry says how many inferences there will be; it may be lowered, or set, while the rounds run.
        kept: of how many inferences the log has room for times; the next ones write over those of the first.
        depth: rounds from the first stage of an inference to its last.
    """
    turn = 0
    while True:
        for step in turns:
            for edge in step.waits:
                edge.wait()
            inference = turn - step.lag
            if 0 <= inference < log[0]:
                at = 1 + 2 * stages * (inference % kept)
                step.frames[inference % len(step.frames)](at, NO_LIMIT_NS)
            for told in step.signals:
                tell(told)
        turn += 1
        if turn >= log[0] + depth:
            return
