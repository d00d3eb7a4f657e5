"""What a study of one model is of: the network, its space, what its operators cost, and the files of its best plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from evaluators.base import Agreement, Evaluator, Session
from evaluators.measurement.final import FinalPolicy
from evaluators.objectives import LATENCY, OBJECTIVES, Objective, find_objective
from optimizer.devices import choose_model_and_platform
from optimizer.model.baselines import Baseline, baselines
from optimizer.model.bounds import Beliefs
from optimizer.model.branch_profile import branch_profile
from optimizer.model.goals import Aim, aim_of, asked, policies
from optimizer.model.profile import Profile, known_profile, profile
from optimizer.model.ranks import rank_profile
from optimizer.model.segments import segment_baselines, split_profile
from optimizer.shared.study import PROFILE
from optimizer.study.config import StudyConfig, most_stages
from optimizer.study.course import Study
from optimizer.study.deadline import missed, too_late, unreachable
from optimizer.study.feasibility import violations
from optimizer.study.folder import write_json
from optimizer.study.history import History
from optimizer.study.limits import allowed_error, expected, keeps, limits_of, none_keeps, unreachable_limit
from optimizer.study.loop import in_space
from optimizer.study.records import Record
from optimizer.study.result import Result
from optimizer.study.subjects import FINAL_S, Search
from optimizer.study.verdict import PAUSE_S, Verdict
from optimizer.study.warm import Warm, begin_warm, warm_start
from search_spaces.core.constraints import Violation
from search_spaces.core.errors import UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.rank_space import RankSpace
from search_spaces.spaces.registry import freedoms_in, make_space
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.space import EnumerableSpace

_PRECISION = 0.005
_FINAL_SHARE, _LEAST_FINAL_S, _DISTURBED_S = 0.2, 5.0, 60.0
_PAUSES = 3  # inferences after a pause, of each of two plans
_MANY_PARAMETERS = 300
_NO_OTHER = "the model's optimum"


@dataclass(slots=True)
class OneModel:
    """See :class:`~optimizer.study.subjects.Subject`.

    Attributes:
        own: processors on which the runtime places a whole network itself.
        placements: what it did with the network there.
    """

    config: StudyConfig
    evaluator: Evaluator
    graph: Graph
    platform: Platform
    space: EnumerableSpace
    own: tuple[Processor, ...]
    placements: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, config: StudyConfig, evaluator: Evaluator) -> OneModel:
        """Return what the settings ask for.

        Raises:
            UsageError: a name, a file or an option is wrong.
            UnavailableError: a processor cannot be used here.
        """
        if other := [name for name in config.objective if name not in OBJECTIVES]:
            raise UsageError(f"--objective {other[0]}: goes with several models", "see --workload, or leave it out")
        graph, platform = choose_model_and_platform(evaluator, config)
        space = make_space(config.allow, graph, platform, most_stages(config, len(graph.operators)))
        own = evaluator.own_placements(platform) if not config.state else ()
        return cls(config, evaluator, graph, platform, space, own)

    @property
    def measured_on(self) -> Platform:
        """The platform with the runtime's own placements, which no plan of the space uses."""
        return replace(self.platform, processors=(*self.platform.processors, *self.own))

    @property
    def processors(self) -> Sequence[Processor]:
        """See :class:`~optimizer.study.subjects.Subject`."""
        return self.platform.processors

    @property
    def objectives(self) -> list[Objective]:
        """The objectives."""
        return [find_objective(name) for name in self.config.objective]

    @property
    def digest(self) -> str:
        """See :class:`~optimizer.study.subjects.Subject`."""
        return self.graph.digest

    @property
    def ready(self) -> bool:
        """See :class:`~optimizer.study.subjects.Subject`."""
        return True

    def resume(self, records: Sequence[Record]) -> None:
        """See :class:`~optimizer.study.subjects.Subject`; the space is what the settings say."""

    def restore(self, history: History, records: Sequence[Record]) -> None:
        """See :class:`~optimizer.study.subjects.Subject`."""
        history.restore(tuple(records))

    def session(self, folder: Path) -> AbstractContextManager[Session]:
        """See :class:`~optimizer.study.subjects.Subject`."""
        return self.evaluator.prepare(self.measured_on, folder)

    def learn(self, study: Study, session: Session) -> Search:
        """Profile the operators; set objectives, limits and baselines."""
        config, tell = self.config, study.watcher.message
        most = most_stages(config, len(self.graph.operators))
        take = partial(warm_start, config=config, graph=self.graph, platform=self.platform)
        warm = begin_warm(config, take, session, study.run, study.history, tell, study.shared)
        told = asked(config, self.platform, session)
        if isinstance(self.space, SegmentSpace):
            tell("pricing operators that two processors can share")
        if (count := len(self.space.distributions())) > _MANY_PARAMETERS:
            tell(f"the space has {count} parameters: samplers other than auto learn little from few trials there")
        profiled = self._profile(study, told, warm)
        if isinstance(self.space, SegmentSpace):
            tell("solving for the model's optimum")
        aim = aim_of(config, self.graph, self.platform, self.space, session, profiled)
        breaks = self._constraints(aim, most)
        named, proposed = policies(config)
        optima = tuple(plan for plan in aim.believed.optima if in_space(self.space, plan))
        limits = limits_of(config)
        return Search(
            aim.session,
            aim.predict,
            (*self._named(profiled, aim.believed, breaks), *aim.more),
            breaks,
            named,
            proposed,
            lambda spent_s: self._final(spent_s, predicted=aim.priced is not None),
            replace(aim.problem(lambda plan: not breaks(plan)), optima=optima, predict=aim.predict),
            carried=warm.plans if warm is not None else (),
            bounds=aim.believed.bounds,
            priced=aim.priced,
            fits=lambda trial: keeps(limits, trial, self.objectives[0].name),
            allowed=lambda plan: len(plan.stages) <= most or in_space(self.space, plan),
            asks_all=allowed_error(config) is not None,
        )

    def _final(self, spent_s: float, *, predicted: bool) -> tuple[FinalPolicy, int]:
        """Return how the final is measured: at most 20 s or a fifth of the study; of a short one as long as it."""
        limit_s = min(max(FINAL_S, _FINAL_SHARE * spent_s), max(_LEAST_FINAL_S, spent_s))
        pauses = _PAUSES if limit_s >= FINAL_S else 1
        policy = FinalPolicy(
            precision=min(self.config.precision, _PRECISION),
            max_s=limit_s - 2 * PAUSE_S * pauses,
            disturbed_s=min(_DISTURBED_S, 2.0 * limit_s),
        )
        if predicted:  # a run takes longer than the number that it gives says
            policy = replace(policy, min_rounds=3, max_rounds=8, min_blocks=1, max_blocks=1, turn_s=0.0, settle_s=0.0)
        return policy, pauses

    def _constraints(self, aim: Aim, most: int) -> Callable[[Plan], tuple[Violation, ...]]:
        """Return the function for the constraints that a plan breaks.

        Raises:
            InfeasibleError: even the best plan in the model clearly misses the deadline, or a limit.
        """
        deadline_s, limits = self._deadline_s, limits_of(self.config)
        if (beyond := unreachable_limit(limits, aim.least)) is not None:
            raise beyond
        bounds = aim.believed.bounds if self.objectives[0] == LATENCY else None
        if bounds is not None and (hopeless := unreachable(deadline_s, bounds.space_s)) is not None:
            raise hopeless
        own = {processor.name for processor in self.own}

        def breaks(plan: Plan) -> tuple[Violation, ...]:
            if any(stage.processor in own for stage in plan.stages):  # of which no model tells anything
                return ()
            return (
                *violations(self.graph, aim.latency, most, plan),
                *too_late(deadline_s, aim.latency_s, plan),
                *expected(limits, aim.figures, plan),
                *aim.breaks(plan),
            )

        return breaks

    @property
    def _deadline_s(self) -> float:
        return math.inf if self.config.deadline is None else self.config.deadline / 1e3

    def _named(
        self, profiled: Profile, believed: Beliefs, breaks: Callable[[Plan], tuple[Violation, ...]]
    ) -> tuple[Baseline, ...]:
        """Return the baselines; where no processor can hold the model alone, the model's optimum is one."""
        fastest, inner = profiled.fastest(self.platform), self._inner
        if isinstance(inner, SegmentSpace):
            named = segment_baselines(self.graph, self.platform, inner, believed.costs, fastest)
        else:
            named = baselines(self.graph, self.platform, fastest)
        for processor in self.own:
            plan = chain_plan(self.graph, (), [processor.name])
            named = (*named, Baseline(f"LiteRT's own placement ({processor.name})", plan))
        if all(any(v.unit not in {"stages", "s", "J"} for v in breaks(b.plan)) for b in named):
            return (*named, Baseline(_NO_OTHER, believed.optima[0]))
        return named

    @property
    def _inner(self) -> EnumerableSpace:
        return self.space.chains if isinstance(self.space, RankSpace) else self.space

    def _profile(self, study: Study, session: Session, warm: Warm | None) -> Profile:
        for record in study.run.contents.records:
            if record.kind == "profile":
                return Profile.from_json(record.data)

        def find() -> Profile:
            return self._measured_profile(session, warm, study.watcher.message)

        # All workers propose by one model: that of whoever was first.
        shared = study.shared
        found = find() if shared is None else Profile.from_json(shared.fact(PROFILE, lambda: find().to_json()))
        study.run.log.append("profile", found.to_json())
        return found

    def _measured_profile(self, session: Session, warm: Warm | None, tell: Callable[[str], None]) -> Profile:
        graph, platform, inner = self.graph, self.platform, self._inner
        if session.capabilities.costs:
            found = known_profile(session.part_costs(graph), platform)
        else:
            known = warm.profile if warm is not None else None
            if warm is not None and warm.complete and known is not None:
                return known
            found = profile(session, graph, platform, tell, known)
            if isinstance(inner, SegmentSpace):
                timed = split_profile if inner.axes else branch_profile
                found = timed(session, graph, platform, inner, found, tell)
        if isinstance(self.space, RankSpace):
            return rank_profile(session, graph, platform, self.space, found, allowed_error(self.config) or 0.0, tell)
        return found

    def finish(self, study: Study, session: Session, verdict: Verdict) -> Agreement | None:
        """Write the best plan's files where the evaluator can make them run."""
        self.placements = dict(session.placements(self.graph))
        folder = study.run.path / "best"
        if session.capabilities.deploy:
            study.watcher.message("writing the stage files")
            folder.mkdir(exist_ok=True)
            return session.deploy(folder, self.graph, verdict.best)
        write_json(folder / "plan.json", verdict.best.to_json())
        return None

    def result(self, known: Mapping[str, Any], verdict: Verdict | None) -> Result:  # noqa: ARG002
        """See :class:`~optimizer.study.subjects.Subject`."""
        return Result(**known, freedoms=freedoms_in(self.space), placements=self.placements)

    def check(self, result: Result) -> None:
        """See :class:`~optimizer.study.subjects.Subject`; the result stays where the best plan misses the deadline."""
        best, took_s = result.plan, None
        samples, measured = result.samples(best), result.measurement(best)
        if samples is not None and self.objectives[0] == LATENCY:
            took_s = samples.median
        if measured is not None and LATENCY.name in measured.figures:
            took_s = measured.figures[LATENCY.name]
        if took_s is not None and (late := missed(self._deadline_s, took_s)) is not None:
            raise late
        if (broken := none_keeps(limits_of(self.config), result.history, self.objectives[0].name)) is not None:
            raise broken
