"""The seam between search and measurement.

An :class:`Evaluator` prepares a :class:`Session` on a platform; the session loads a plan as a :class:`Candidate`;
running the candidate gives a :class:`Batch`. What is done with batches (warm-up, repetition, racing, comparison) is
:mod:`evaluators.sampling`'s business, so that an evaluator need not know statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from evaluators.timeline import Timeline
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform, Processor

CONTRACT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """The result of running a plan some times in a row.

    Attributes:
        latency_s: seconds of each inference, shape ``(n,)``.
        stage_s: seconds of each stage of the plan in each inference, shape ``(n, stages)``.
        timeline: the last inference, where the evaluator can tell.
        errors: of a prediction, what one standard deviation of each thing that it may be wrong about changes the
            latency by, relative; the same things, in the same places, for all plans of a graph in one session. None
            where it was measured.
    """

    latency_s: NDArray[np.float64]
    stage_s: NDArray[np.float64]
    timeline: Timeline | None = None
    errors: NDArray[np.float64] | None = None

    @property
    def relative_sigma(self) -> float | None:
        """The relative standard deviation of a prediction; None of what was measured."""
        return None if self.errors is None else float(np.linalg.norm(self.errors))


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a plan's outputs compare with those of the whole model on the reference processor.

    Attributes:
        identical: bit for bit.
        max_abs_error: largest absolute difference over all outputs.
        max_rel_error: the same, relative to the largest absolute value of the reference.
        tolerance: the relative error up to which the evaluator accepts this plan; 0 where it must be identical.
    """

    identical: bool
    max_abs_error: float
    max_rel_error: float
    tolerance: float

    @property
    def accepted(self) -> bool:
        """Whether the plan computes what the model computes, within the tolerance."""
        return self.identical or (math.isfinite(self.max_rel_error) and self.max_rel_error <= self.tolerance)


class Candidate(Protocol):
    """A loaded plan, ready to run."""

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` inferences; end early with one that takes longer than ``stop_above_s``.

        That one may be broken off when it has taken longer; its latency is then the time until there, and stages that
        it did not reach have 0 s.

        Raises:
            UnavailableError: the device failed or did not answer in time.
        """
        ...

    def verify(self) -> Agreement | None:
        """Compare the outputs of the last run with the whole model's; runs once if none was made.

        None where there are no outputs (a prediction).
        """
        ...

    def close(self) -> None:
        """Give back what only this candidate holds."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """A candidate that can run inferences that follow each other without a pause, and overlap."""

    def stream(self, n: int) -> Batch:
        """Return ``n`` observations of the period of a full pipeline.

        Each is the mean over some inferences: ``latency_s`` holds the seconds from one result to the next, and
        ``stage_s`` those of the stages meanwhile.

        Raises:
            UnavailableError: the device failed or did not answer in time.
        """
        ...


class Session(Protocol):
    """A prepared device; several candidates may be loaded at once."""

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values."""
        ...

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        """Compile a plan; with ``fresh``, share nothing that is already loaded (a rebuilt instance).

        Raises:
            UnavailableError: the runtime refuses a stage, or there is not enough memory.
        """
        ...


@runtime_checkable
class Deployer(Protocol):
    """A session that can hand a plan over as files that run without it."""

    def deploy(self, folder: Path, graph: Graph, plan: Plan) -> Agreement:
        """Write ``plan.json`` and the stage files to ``folder``, run them from there, and compare their outputs.

        Raises:
            UsageError: the folder cannot be written, or the disk is full.
            UnavailableError: the files do not run.
        """
        ...


@runtime_checkable
class Witness(Protocol):
    """A session that can tell under what conditions it measures."""

    def conditions(self) -> dict[str, Any]:
        """Return what may have changed the last measurements (governor, load, versions, …), as plain values.

        Asked after every measurement, so it should take well below a millisecond.
        """
        ...


def conditions_of(session: Session) -> Callable[[], Mapping[str, Any]]:
    """Return what tells the conditions of a session: nothing where it cannot."""
    return session.conditions if isinstance(session, Witness) else dict


@runtime_checkable
class Refuser(Protocol):
    """A session whose processors may refuse operators."""

    def refused(self, graph: Graph, processor: str) -> Sequence[int]:
        """Return the operators that a processor does not take, ascending.

        Raises:
            UnavailableError: the device failed.
        """
        ...


@runtime_checkable
class Namer(Protocol):
    """An evaluator that knows processors beyond those that it finds by itself."""

    def processor(self, name: str) -> Processor:
        """Return the processor that a name asks for.

        Raises:
            UsageError: it is no name of a processor.
            UnavailableError: it cannot be used here.
        """
        ...


@runtime_checkable
class Targeting(Protocol):
    """An evaluator that measures elsewhere, and must be told where before it is asked anything."""

    def at(self, device: str) -> None:
        """Measure on the device of that name from now on; on any of several that are alike, with commas.

        Raises:
            UsageError: there is no such device.
        """
        ...


@runtime_checkable
class Describer(Protocol):
    """An evaluator that reads descriptions of devices of its own, beside the platform files that all know."""

    def described(self, source: str | Path) -> Platform | None:
        """Return the platform that a file or a name stands for, to be used from now on; None if it is none of its own.

        Raises:
            UsageError: it is one, but cannot be read or is damaged.
        """
        ...


class Evaluator(Protocol):
    """A way to learn what a plan costs."""

    name: str

    def platform(self) -> Platform:
        """Return the platform that this evaluator finds by itself.

        Raises:
            UnavailableError: there is none here.
        """
        ...

    def prepare(self, platform: Platform, scratch: Path | None = None) -> AbstractContextManager[Session]:
        """Open a session on a platform; leaving the context gives everything back.

        Args:
            platform: the lanes to use.
            scratch: an existing folder for logs that a person may want to read; None for nowhere.

        Raises:
            UnavailableError: the platform cannot be used here.
        """
        ...
