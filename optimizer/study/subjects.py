"""The subject of a study: the protocol that studies of one model and of several models implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from evaluators.base import Agreement, Session
from evaluators.objectives import Objective, Priced
from evaluators.sampling import SamplingPolicy
from optimizer.model.baselines import Baseline
from optimizer.model.bounds import Bounds
from optimizer.samplers.auto import Problem
from optimizer.study.config import StudyConfig
from optimizer.study.history import History, Trial
from optimizer.study.records import Record
from optimizer.study.result import Result
from optimizer.study.verdict import Verdict
from optimizer.study.warm import Warm
from search_spaces.core.constraints import Violation
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.space import EnumerableSpace

if TYPE_CHECKING:
    from optimizer.study.course import Study


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """Inputs of the loop and the final, once prices are known.

    Attributes:
        session: measures or predicts the objective of plans.
        predict: the model's value of a plan, in the objective's unit.
        baselines: plans with a name; those outside the space are measured too.
        breaks: the violations of a plan.
        named, proposed: sampling policies of named plans, and of proposals.
        problem: the search as samplers see it.
        carried: plans of an earlier study, to be measured again.
        bounds: lower bounds under the model, where known.
        priced: the session, where it returns several objectives.
        fits: whether a measured plan keeps all limits.
        allowed: whether a plan may be recommended.
        asks_all: whether outputs of plans that lost their race are compared too.
    """

    session: Session
    predict: Callable[[Plan], float]
    baselines: tuple[Baseline, ...]
    breaks: Callable[[Plan], Sequence[Violation]]
    named: SamplingPolicy
    proposed: SamplingPolicy
    problem: Problem | None = None
    carried: tuple[Plan, ...] = ()
    bounds: Bounds | None = None
    priced: Priced | None = None
    fits: Callable[[Trial], bool] = lambda _: True
    allowed: Callable[[Plan], bool] = lambda _: True
    asks_all: bool = False


class Subject(Protocol):
    """The subject of a study: one model, or several."""

    @property
    def config(self) -> StudyConfig:
        """The settings, with the freedoms that ``exact`` stands for."""
        ...

    @property
    def graph(self) -> Graph:
        """The network that plans are for; of several models the joined one."""
        ...

    @property
    def space(self) -> EnumerableSpace:
        """The plans that are searched; :meth:`learn` may add to it."""
        ...

    @property
    def platform(self) -> Platform:
        """The requested platform, which the run folder records."""
        ...

    @property
    def measured_on(self) -> Platform:
        """That platform with the processors that only baselines use."""
        ...

    @property
    def processors(self) -> Sequence[Processor]:
        """The processors of the space."""
        ...

    @property
    def objectives(self) -> Sequence[Objective]:
        """The objectives; all are minimised."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the models, and of everything that changes what a plan computes."""
        ...

    @property
    def inputs_digest(self) -> str:
        """Changes with the inputs that a person gave; "" without any."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the space is known before :meth:`learn` is called."""
        ...

    def checked(self, plan: Plan) -> Plan:
        """Return the canonical form of a plan that a person gives.

        Raises:
            PlanError, RewriteError: it cannot be run.
        """
        ...

    def resume(self, records: Sequence[Record]) -> None:
        """Restore the space from an earlier session's records."""
        ...

    def restore(self, history: History, records: Sequence[Record]) -> None:
        """Add the trials of the log to the history."""
        ...

    def session(self, folder: Path) -> AbstractContextManager[Session]:
        """Open the session that measures or predicts plans."""
        ...

    def ask(self, session: Session) -> Session:
        """Return the session that measures or predicts the objectives and limited figures.

        Raises:
            UsageError: it cannot, for want of states, outputs, powers or a meter.
            UnavailableError: it cannot measure an objective.
        """
        ...

    def taken(self, run: Path, fingerprint: Mapping[str, Any]) -> Warm:
        """Return what an earlier study has measured for this one.

        Args:
            fingerprint: from :func:`~optimizer.study.warm.fingerprint_of`.

        Raises:
            RunFolderError: there is no finished study in the folder.
        """
        ...

    def foreseen(self) -> dict[str, Any]:
        """Return what a study would search, as plain values with readable names."""
        ...

    def learn(self, study: Study, session: Session) -> Search:
        """Measure prices, unless the log holds them, and return the inputs of the search."""
        ...

    def finish(self, study: Study, session: Session, verdict: Verdict) -> Agreement | None:
        """Write the files of the recommended plan; return the agreement of their outputs, where they were run."""
        ...

    def result(self, known: Mapping[str, Any], verdict: Verdict | None) -> Result:
        """Return the result so far.

        Args:
            known: the fields that results of all studies share.
        """
        ...

    def check(self, result: Result) -> None:
        """Check that the recommended plan keeps the deadline and the limits.

        Raises:
            InfeasibleError: it does not.
        """
        ...
