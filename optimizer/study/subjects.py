"""What a study is of: the seam between the one course of every study, and what differs with one model or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from evaluators.base import Agreement, Session
from evaluators.measurement.final import FinalPolicy
from evaluators.objectives import Objective, Priced
from evaluators.sampling import SamplingPolicy
from optimizer.model.baselines import Baseline
from optimizer.model.bounds import Bounds
from optimizer.samplers.auto import Problem, Proposer
from optimizer.study.history import History, Trial
from optimizer.study.records import Record
from optimizer.study.result import Result
from optimizer.study.verdict import Verdict
from search_spaces.core.constraints import Violation
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.space import EnumerableSpace

if TYPE_CHECKING:
    from optimizer.study.course import Study

FINAL_S = 20.0
"""The final takes so long at most, or a fifth of the study."""


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """What the loop and the final work with, once it is known what plans cost.

    Attributes:
        session: tells the objective of plans.
        predict: what the model says of a plan, in the objective's unit.
        baselines: plans with a name; those outside the space are measured too.
        breaks: which constraints a plan breaks.
        named, proposed: how hard to measure plans with a name, and those that are proposed.
        final: given how long the study has taken, in seconds, returns how the final is measured, and how many
            inferences after a pause of each of two plans.
        problem: what samplers may know of the search.
        proposer: the model that the sampler ``auto`` goes by, instead of one that ``problem`` would make.
        carried: plans of an earlier study that are measured anew.
        bounds: what no plan goes below in the model, where that is known.
        priced: the session, where it tells several objectives.
        fits: whether a measured plan keeps all limits.
        allowed: whether a plan may be recommended.
        asks_all: whether outputs are also compared of plans that lost their race.
    """

    session: Session
    predict: Callable[[Plan], float]
    baselines: tuple[Baseline, ...]
    breaks: Callable[[Plan], Sequence[Violation]]
    named: SamplingPolicy
    proposed: SamplingPolicy
    final: Callable[[float], tuple[FinalPolicy, int]]
    problem: Problem | None = None
    proposer: Proposer | None = None
    carried: tuple[Plan, ...] = ()
    bounds: Bounds | None = None
    priced: Priced | None = None
    fits: Callable[[Trial], bool] = lambda _: True
    allowed: Callable[[Plan], bool] = lambda _: True
    asks_all: bool = False


class Subject(Protocol):
    """One model, or several.

    Attributes:
        graph: the network that plans are for; of several models the joined one.
        space: the plans that are searched; it may grow while :meth:`learn` finds out what plans may have.
        platform: what the person asked for, and what the run folder tells of.
        measured_on: with processors that only baselines use.
        processors: those of the space.
        objectives: all are minimised.
        digest: changes with the model, and with all that changes what a plan computes.
        ready: whether the space is known before anything was learnt.
    """

    @property
    def graph(self) -> Graph:
        """See above."""
        ...

    @property
    def space(self) -> EnumerableSpace:
        """See above."""
        ...

    @property
    def platform(self) -> Platform:
        """See above."""
        ...

    @property
    def measured_on(self) -> Platform:
        """See above."""
        ...

    @property
    def processors(self) -> Sequence[Processor]:
        """See above."""
        ...

    @property
    def objectives(self) -> Sequence[Objective]:
        """See above."""
        ...

    @property
    def digest(self) -> str:
        """See above."""
        ...

    @property
    def ready(self) -> bool:
        """See above."""
        ...

    def resume(self, records: Sequence[Record]) -> None:
        """Take up what an earlier session of the study has learnt of the space."""
        ...

    def restore(self, history: History, records: Sequence[Record]) -> None:
        """Take up the trials of the log."""
        ...

    def session(self, folder: Path) -> AbstractContextManager[Session]:
        """Open the session that measures or predicts plans."""
        ...

    def learn(self, study: Study, session: Session) -> Search:
        """Learn what plans cost, unless the log knows, and return what is searched."""
        ...

    def finish(self, study: Study, session: Session, verdict: Verdict) -> Agreement | None:
        """Write the files of the recommended plan; return how their outputs compare, where they were run."""
        ...

    def result(self, known: Mapping[str, Any], verdict: Verdict | None) -> Result:
        """Return what is known so far.

        Args:
            known: the fields of a result that every study knows.
        """
        ...

    def check(self, result: Result) -> None:
        """Check that the recommended plan keeps what was demanded of it.

        Raises:
            InfeasibleError: it does not.
        """
        ...
