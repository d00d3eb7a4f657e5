"""Candidates of which one at a time is in memory, so that each has all of a limited memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from evaluators.base import Candidate
from evaluators.forwarding import ForwardingCandidate, Found, Given, Method
from search_spaces.core.errors import UnavailableError


class Turns:
    """Loads candidates; one that runs is loaded again where another was loaded meanwhile.

    Args:
        end: ends the processes that have run a candidate.
        faults: returns how often processes have waited for the disk.

    Attributes:
        waits: how many of these waits were for loading.
    """

    def __init__(self, end: Callable[[], None], faults: Callable[[], int]) -> None:
        self.loaded: TakingTurns | None = None
        self.waits = 0
        self._end, self.faults = end, faults

    def load(self, make: Callable[[], Candidate]) -> Candidate:
        """Return a candidate that is made by ``make``, each time that its turn comes."""
        self.unload()
        return TakingTurns(self, make)

    def unload(self) -> None:
        """Close the candidate that is loaded, and let go of its memory."""
        if (candidate := self.loaded) is not None:
            self.loaded = None
            with suppress(UnavailableError):
                candidate.inner.close()
            del candidate.inner
            self._end()


class TakingTurns(ForwardingCandidate):
    """A candidate that is loaded when it runs, and may be unloaded afterwards."""

    def __init__(self, turns: Turns, make: Callable[[], Candidate]) -> None:
        super().__init__(make())
        self._turns, self._make = turns, make
        turns.loaded = self

    def call(self, method: Method[Given, Found], /, *arguments: Given.args, **options: Given.kwargs) -> Found:
        """Call the inner object's method of that name, once it is loaded and has run."""
        if self._turns.loaded is not self:
            self._turns.unload()
            before = self._turns.faults()
            try:
                self.inner = self._make()
                self._turns.loaded = self
                self.inner.run(1)  # reads what other candidates' runs have pushed out of memory
            finally:
                self._turns.waits += self._turns.faults() - before
        return super().call(method, *arguments, **options)

    def close(self) -> None:
        """Release what this candidate holds."""
        if self._turns.loaded is self:
            self._turns.unload()
