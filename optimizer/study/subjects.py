"""The subject of a study: what studies of one model and of several models have in common, and where they differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluators.base import Agreement, Evaluator, Session
from evaluators.objectives import Objective
from evaluators.sampling import SamplingPolicy
from optimizer.model.baselines import Baseline
from optimizer.model.bounds import Bounds
from optimizer.report.data import Study as Earlier
from optimizer.samplers.auto import Problem
from optimizer.study.config import StudyConfig
from optimizer.study.folder import write_json
from optimizer.study.history import History, Trial
from optimizer.study.limits import keeps, limits_of, none_keeps
from optimizer.study.log import Record
from optimizer.study.result import Result
from optimizer.study.verdict import Verdict
from optimizer.study.warm import Known
from search_spaces.core.constraints import Violation
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.models.inputs import given_digest
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
        breaks: the violations of a plan; one with any is reported as infeasible and never run.
        named, proposed: sampling policies of the queue's plans, and of proposals.
        problem: the search as samplers see it.
        carried: plans of an earlier study, to be measured again.
        bounds: lower bounds under the model, where known.
        allowed: whether a plan may be recommended.
        asks_all: whether outputs of plans that lost their race are compared too, since the error is limited.
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
    allowed: Callable[[Plan], bool] = lambda _: True
    asks_all: bool = False


@dataclass(slots=True)
class Subject(ABC):
    """The subject of a study: one model, or several.

    Attributes:
        config: the settings, with the freedoms that ``exact`` stands for.
        graph: the network that plans are for; of several models the joined one.
        platform: the requested platform, which the run folder records.
        space: the plans that are searched; :meth:`learn` may add to it.
        objectives: all are minimised.
    """

    config: StudyConfig
    evaluator: Evaluator
    graph: Graph
    platform: Platform
    space: EnumerableSpace
    objectives: tuple[Objective, ...]

    @property
    def measured_on(self) -> Platform:
        """The platform with the processors that only baselines use."""
        return self.platform

    @property
    def processors(self) -> Sequence[Processor]:
        """The processors of the space."""
        return self.platform.processors

    @property
    def models(self) -> Sequence[Graph]:
        """The network of each model."""
        return [self.graph]

    @property
    def scaled(self) -> bool:
        """Whether values of the first objective are in proportion to the machine's slowness."""
        return self.objectives[0].scales

    @property
    def digest(self) -> str:
        """Digest of the models, and of everything that changes what a plan computes."""
        return self.graph.digest

    @property
    def inputs_digest(self) -> str:
        """Changes with the inputs that a person gave; "" without any."""
        return given_digest(self.models)

    @property
    def ready(self) -> bool:
        """Whether the space is known before :meth:`learn` is called."""
        return True

    @abstractmethod
    def checked(self, plan: Plan) -> Plan:
        """Return the canonical form of a plan that a person gives.

        Raises:
            PlanError, RewriteError: it cannot be run.
        """

    def resume(self, records: Sequence[Record]) -> None:  # noqa: B027 - mostly the settings alone define the space
        """Restore the space from an earlier session's records."""

    def restore(self, history: History, records: Sequence[Record]) -> None:
        """Add the trials of the log to the history."""
        history.restore(tuple(records))

    @abstractmethod
    def session(self, folder: Path | None = None) -> AbstractContextManager[Session]:
        """Open the session that measures or predicts plans."""

    @abstractmethod
    def ask(self, session: Session) -> Session:
        """Return the session that measures or predicts the objectives and limited figures, in all requested states.

        Raises:
            UsageError: it cannot, for want of states, outputs, powers or a meter.
            UnavailableError: it cannot measure an objective.
        """

    @abstractmethod
    def known(self, study: Earlier, same: Sequence[str]) -> Known | None:
        """Return the costs that an earlier study of the same device has measured; None where none can be used.

        Args:
            same: the names of processors that are unchanged.
        """

    @abstractmethod
    def here(self, plan: Plan, study: Earlier, same: Sequence[str]) -> Plan | None:
        """Return a plan of an earlier study as this one would measure it; None where it would not."""

    @abstractmethod
    def carried(self, study: Earlier) -> tuple[Plan, ...]:
        """Return the best plans of an earlier study as this one would measure them, the best first."""

    @abstractmethod
    def foreseen(self) -> dict[str, Any]:
        """Return what a study would search, as plain values with readable names."""

    @abstractmethod
    def learn(self, study: Study, session: Session) -> Search:
        """Measure prices, unless the log holds them, and return the inputs of the search."""

    def finish(self, study: Study, session: Session, verdict: Verdict) -> Agreement | None:
        """Write the files of the recommended plan; return the agreement of their outputs, where they were run."""
        folder = study.run.path / "best"
        if session.capabilities.deploy:
            study.watcher.message("writing the stage files")
            folder.mkdir(exist_ok=True)
            return session.deploy(folder, self.graph, verdict.best)
        write_json(folder / "plan.json", verdict.best.to_json())
        return None

    @abstractmethod
    def result_fields(self, study: Study, verdict: Verdict | None) -> dict[str, Any]:
        """Return the fields of the result so far in which subjects differ."""

    def fits(self, trial: Trial) -> bool:
        """Return whether a measured plan keeps all limits."""
        return keeps(limits_of(self.config), trial, self.objectives[0].name)

    def check(self, result: Result) -> None:
        """Check that the recommended plan keeps the limits; the written result stays.

        Raises:
            InfeasibleError: it does not.
        """
        if (broken := none_keeps(limits_of(self.config), result.history, self.objectives[0].name)) is not None:
            raise broken
