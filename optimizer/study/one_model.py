"""The subject of a study of one model: the network, its space, its model estimate and the files of its best plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from evaluators.base import Agreement, Evaluator, Session
from evaluators.objectives import LATENCY, OBJECTIVES, find_objective
from optimizer.devices import choose_model_and_platform, unused_precisions
from optimizer.model.baselines import Baseline, baselines
from optimizer.model.branch_profile import branch_profile
from optimizer.model.errors import ErrorProfile, error_profile, tolerance_line
from optimizer.model.goals import StudyObjective, asked, policies, study_objective
from optimizer.model.profile import LIMIT_S, Profile, Profiler, ProfileTimeError, known_profile, profile
from optimizer.model.ranks import rank_profile
from optimizer.model.segments import segment_baselines, split_profile
from optimizer.report.data import Study as Earlier
from optimizer.samplers.auto import Problem
from optimizer.shared.study import ERRORS, PROFILE
from optimizer.study.config import StudyConfig, most_stages, space_of, with_freedoms
from optimizer.study.course import Study
from optimizer.study.history import History
from optimizer.study.limits import (
    allowed_error,
    expected,
    limits_of,
    missed,
    too_late,
    unreachable,
    unreachable_limit,
    violations,
)
from optimizer.study.result import Result
from optimizer.study.subjects import Search, Subject
from optimizer.study.verdict import Verdict
from optimizer.study.warm import Known, Warm, begin_warm, carried, earlier_times, moved_here
from search_spaces.core.constraints import Violation
from search_spaces.core.errors import PlanError, UsageError
from search_spaces.core.plan import Plan, canonical
from search_spaces.core.platform import Platform, Processor
from search_spaces.rewrites.lower import lowering
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.rank_space import RankSpace
from search_spaces.spaces.registry import freedoms_in
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.space import EnumerableSpace, in_space

_MANY_PARAMETERS = 300
_LEAST_PROFILE_S = 10.0
_NO_OTHER = "the model's optimum"


@dataclass(slots=True)
class OneModel(Subject):
    """A study of one model.

    Attributes:
        own: processors on which the runtime places a whole network itself.
        placements: how the runtime placed the network there.
        tolerances: which processors an error limit would allow, in a sentence.
    """

    own: tuple[Processor, ...]
    placements: Mapping[str, str] = field(default_factory=dict)
    tolerances: str = ""

    @classmethod
    def read(cls, config: StudyConfig, evaluator: Evaluator) -> OneModel:
        """Return the subject that the settings describe.

        Raises:
            UsageError: a name, a file or an option is wrong.
            UnavailableError: a processor cannot be used here.
        """
        if other := [name for name in config.objective if name not in OBJECTIVES]:
            raise UsageError(f"--objective {other[0]}: requires several models", "give --workload, or leave it out")
        if config.rate is not None:
            raise UsageError(
                "--rate has no effect on a single model", "give a --workload with periodic or random requests"
            )
        graph, platform = choose_model_and_platform(evaluator, config)
        config = with_freedoms(config, [graph], platform)
        space = space_of(config, graph, platform)
        places = evaluator.capabilities.places and not config.state
        own = evaluator.own_placements(platform) if places else ()
        objectives = tuple(map(find_objective, config.objective))
        return cls(config, evaluator, graph, platform, space, objectives, own)

    @property
    def measured_on(self) -> Platform:
        """The platform with the runtime's own placements, which no plan of the space uses."""
        return replace(self.platform, processors=(*self.platform.processors, *self.own))

    def checked(self, plan: Plan) -> Plan:
        """Return the canonical form of a plan that a person gives."""
        plan.validate(self.graph, self.measured_on)
        if plan.dispatch != "static":
            raise PlanError(f"the plan has the dispatch {plan.dispatch!r} of several models", "give one of this model")
        found = canonical(plan, self.graph, self.measured_on)
        if plan.ranks and not in_space(self.space, found):
            raise PlanError("the plan has ranks that this study does not search", "give --allow with ranks")
        lowering(self.graph).lower(found)
        return found

    def session(self, folder: Path | None = None) -> AbstractContextManager[Session]:
        """Open the session that measures or predicts plans."""
        return self.evaluator.prepare(self.measured_on, folder)

    def ask(self, session: Session) -> Session:
        """Return the session in all states of the platform that are asked for."""
        return asked(self.config, self.platform, self.space, session)

    def known(self, study: Earlier, same: Sequence[str]) -> Known | None:
        """Return the operators' times on unchanged processors."""
        return earlier_times(study, same, self.config, self.graph, self.platform)

    def here(self, plan: Plan, study: Earlier, same: Sequence[str]) -> Plan | None:
        """Return a plan on processors of this study; None where it has none like it."""
        return moved_here(plan, study, same, self.config, self.graph, self.platform)

    def carried(self, study: Earlier) -> tuple[Plan, ...]:
        """Return the best plans of an earlier study, of this model or another one."""
        return carried(study, self.graph, self.platform)

    def foreseen(self) -> dict[str, Any]:
        """Return what would be searched; the fastest processor, and so what criteria are for, is not known yet."""
        processors = self.platform.processors
        return {
            "model": self.graph.name,
            "operators": len(self.graph.operators),
            "processors": [p.name for p in processors],
            "allow": self.config.allow,
            "plans": self.space.cardinality(),
            "budget": self.config.budget,
            "baselines": [b.name for b in self._usual(processors[0].name)],
            "later": "further baselines, once the operators are timed",
        }

    def learn(self, study: Study, session: Session) -> Search:
        """Profile the operators; set objectives, limits and baselines."""
        config, progress = self.config, study.watcher.message
        most = most_stages(config, len(self.graph.operators))
        warm = begin_warm(study, session)
        priced = self.ask(session)
        if isinstance(self.space, SegmentSpace):
            progress("pricing operators that two processors can share")
        if (count := len(self.space.distributions())) > _MANY_PARAMETERS:
            progress(f"the space has {count} parameters: samplers other than auto learn little from few trials there")
        profiled = study.fact(PROFILE, lambda: self._profile(priced, warm, progress).to_json(), Profile.from_json)
        if profiled.cut_short:
            progress(f"branches and splits are predicted from the times of operators alone: {profiled.cut_short}")
        if isinstance(self.space, SegmentSpace):
            progress("solving for the model's optimum")
        objective = study_objective(config, self.graph, self.platform, self.space, session, profiled)
        errors = self._errors(study, session, profiled)
        near: list[Plan] = []
        if errors is not None:
            figures: dict[str, Callable[[Plan], float]] = {"error": partial(errors.expected, self.platform)}
            objective = replace(objective, figures=figures | dict(objective.figures))
            near = errors.optima(self.graph, objective.latency, config.max_error or 0.0, most)
        breaks = self._constraints(objective, most)
        optima = tuple(plan for plan in (*near, *objective.problem.optima) if in_space(self.space, plan))
        named, proposed = policies(config)
        return Search(
            objective.session,
            objective.predict,
            (*self._named(profiled, objective.problem, study.history, breaks), *objective.more),
            breaks,
            named,
            proposed,
            replace(objective.problem, fits=lambda plan: not breaks(plan), optima=optima, predict=objective.predict),
            carried=warm.plans if warm is not None else (),
            bounds=objective.bounds,
            allowed=lambda plan: len(plan.stages) <= most or in_space(self.space, plan),
            asks_all=allowed_error(config) is not None,
        )

    def _constraints(self, objective: StudyObjective, most: int) -> Callable[[Plan], tuple[Violation, ...]]:
        """Return the function of a plan's violations.

        Raises:
            InfeasibleError: even the best plan under the model clearly misses the deadline, or a limit.
        """
        deadline_s, limits = self._deadline_s, limits_of(self.config)
        if (beyond := unreachable_limit(limits, objective.least)) is not None:
            raise beyond
        refusal = unreachable(deadline_s, objective.bounds.space_s) if self.objectives[0] == LATENCY else None
        if refusal is not None:
            raise refusal
        own = {processor.name for processor in self.own}

        def breaks(plan: Plan) -> tuple[Violation, ...]:
            if any(stage.processor in own for stage in plan.stages):  # no model predicts these
                return ()
            return (
                *violations(self.graph, objective.latency, most, plan),
                *too_late(deadline_s, objective.latency_s, plan),
                *expected(limits, objective.figures, plan),
                *objective.breaks(plan),
            )

        return breaks

    @property
    def _deadline_s(self) -> float:
        return math.inf if self.config.deadline is None else self.config.deadline / 1e3

    def _named(
        self, profiled: Profile, of: Problem, history: History, breaks: Callable[[Plan], tuple[Violation, ...]]
    ) -> tuple[Baseline, ...]:
        """Return the baselines; if no processor can hold the model alone, the cost model's optimum is one."""
        fastest, inner = profiled.fastest(self.platform), self._inner
        if isinstance(inner, SegmentSpace):
            named = segment_baselines(self.graph, self.platform, inner, of.model, fastest, self.config.compare_with)
            wholes = sum(len(b.plan.stages) == 1 for b in named)
            most = max(wholes, self.config.budget // 2)  # the other half is for proposals
            kept = {*self.config.compare_with, *(trial.origin for trial in history.known.values())}
            named = tuple(b for i, b in enumerate(named) if i < most or b.name in kept)
        else:
            named = self._usual(fastest)
        for processor in self.own:
            plan = chain_plan(self.graph, (), [processor.name])
            named = (*named, Baseline(f"LiteRT's own placement ({processor.name})", plan))
        if all(any(v.unit not in {"stages", "s", "J"} for v in breaks(b.plan)) for b in named):
            return (*named, Baseline(_NO_OTHER, of.optima[0]))
        return named

    def _usual(self, fastest: str) -> tuple[Baseline, ...]:
        """Return the baselines of cuts; where a plan has one stage only, nobody asks what cuts cost."""
        single = most_stages(self.config, len(self.graph.operators)) == 1
        found = baselines(self.graph, self.platform, fastest, self.config.compare_with)
        return tuple(b for b in found if len(b.plan.stages) == 1 or not single)

    @property
    def _inner(self) -> EnumerableSpace:
        return self.space.chains if isinstance(self.space, RankSpace) else self.space

    def _errors(self, study: Study, session: Session, profiled: Profile) -> ErrorProfile | None:
        """Return what operators add to the error of the outputs, if that is limited and kinds may differ in it."""
        most = self.config.max_error
        kinds = len(self.platform.classes())
        if not most or kinds < 2 or not session.capabilities.outputs or isinstance(self.space, RankSpace):
            return None

        of = Profiler(session, self.graph, self.platform, study.watcher.message)

        def find() -> dict[str, Any]:
            return asdict(error_profile(of, profiled, most))

        return study.fact(ERRORS, find, ErrorProfile.from_json)

    def _profile(self, session: Session, warm: Warm | None, progress: Callable[[str], None]) -> Profile:
        minutes, inner = self.config.minutes, self._inner
        limit_s = LIMIT_S if minutes is None else max(_LEAST_PROFILE_S, 60.0 * minutes / 4)
        of = Profiler(session, self.graph, self.platform, progress, limit_s)
        if session.capabilities.costs:
            found = known_profile(session.part_costs(self.graph), self.platform)
        else:
            known = warm.known if warm is not None else None
            if known is not None and known.complete and known.profile is not None and not known.profile.cut_short:
                return known.profile
            found = profile(of, known.profile if known is not None else None)
            if isinstance(inner, SegmentSpace):
                try:
                    found = split_profile(of, inner, found) if inner.axes else branch_profile(of, inner, found)
                except ProfileTimeError as error:
                    found = replace(found, cut_short=str(error))
        if isinstance(self.space, RankSpace):
            return rank_profile(of, self.space, found, allowed_error(self.config) or 0.0)
        return found

    def finish(self, study: Study, session: Session, verdict: Verdict) -> Agreement | None:
        """Write the best plan's files where the evaluator can run them."""
        if session.capabilities.placements:
            self.placements = dict(session.placements(self.graph))
        if less := unused_precisions(self.evaluator, self.config):
            study.watcher.message("measuring what a tolerance would allow")
            self.tolerances = tolerance_line(self.evaluator, self.graph, less)
        # Not super(): @dataclass(slots=True) makes a new class, which super() here does not know.
        return Subject.finish(self, study, session, verdict)

    def result_fields(self, study: Study, verdict: Verdict | None) -> dict[str, Any]:  # noqa: ARG002
        """Return the fields of the result so far in which subjects differ."""
        return {
            "freedoms": freedoms_in(self.space),
            "placements": self.placements,
            "tolerances": self.tolerances,
        }

    def check(self, result: Result) -> None:
        """Check that the recommended plan keeps the deadline and the limits; the written result stays."""
        best, took_s = result.plan, None
        samples, measured = result.samples(best), result.measurement(best)
        if samples is not None and self.objectives[0] == LATENCY:
            took_s = samples.median
        if measured is not None and LATENCY.name in measured.figures:
            took_s = measured.figures[LATENCY.name]
        if took_s is not None and (late := missed(self._deadline_s, took_s, predicted=result.predicted)) is not None:
            raise late
        Subject.check(self, result)
