"""The verdict of a study: a final between all plans that may be the best, and the recommended plan."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from evaluators.base import Agreement, Candidate, Session, conditions_of, counters_of, verified
from evaluators.machine import available_nbytes
from evaluators.measurement.disturbance import in_words
from evaluators.measurement.final import Final, FinalComparison, FinalPolicy, Ratio, Standing
from evaluators.samples import Samples
from optimizer.model.baselines import Baseline
from optimizer.study.history import History, Trial
from search_spaces.core.bounded import Own, built, plain
from search_spaces.core.errors import RunFolderError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.wording import percent

REACH = 0.15
"""A plan is measured again when its interval reaches within this share of the best one."""

LEAST_FINALISTS, MOST_FINALISTS = 10, 64
FAR = 0.5
"""Plans of several stages that are clearly slower than the best one by more than this do not fill up the final: they
cost large networks the rounds that decide between the others."""
_WIDEST = 2.0  # a wider interval of the ratio is useless
_MEMORY_SHARE = 0.5  # of the free memory, for instances that stay loaded

CRITERIA = ("layer length", "layer type", "parameter count")
"""Starts of the names of the cut criteria of Gaddam et al. (IJCNN 2024)."""

_WHOLES = 2  # plans that cut no model, and baselines, that are always finalists
PAUSE_S = 1.0
_SCALE_SIGMA = 0.01  # least relative uncertainty of the machine's state between search and final


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the final.

    Attributes:
        best: the recommended plan: the fastest, or one with fewer stages that is not significantly slower.
        plans, names: the finalists, and their names in tables ("" for a proposal).
        final: their measurements.
        reference: the best one-stage plan, or of the best baseline where no plan has one stage.
        scale: the machine's slowness in the final, relative to the search.
        scale_sigma: relative standard deviation of ``scale`` from plan to plan.
        after_pause_s: digest → seconds of an inference after a pause of 1 s, median of a few.
        undecided: the open question where measurements were too disturbed to decide, or "".
        eligible: the finalists that may be recommended: within the most stages and all limits.
        left_out: how many plans within reach were not measured again, for lack of time.
        cores: how many the measurements used.
        compared: digest → agreement of outputs that only the final compared.
        traffic: memory traffic of the recommended plan, as of :meth:`~evaluators.base.Candidate.traffic`; {} where
            nobody asked for it.
        uncounted: why it could not be counted, or "".
    """

    best: Annotated[Plan, Own(Plan.from_json)]
    plans: tuple[Annotated[Plan, Own(Plan.from_json)], ...]
    names: tuple[str, ...]
    final: Final
    reference: Baseline
    scale: float = 1.0
    scale_sigma: float = _SCALE_SIGMA
    after_pause_s: Mapping[str, float] = field(default_factory=dict)
    undecided: str = ""
    eligible: tuple[int, ...] = ()
    left_out: int = 0
    cores: int = 1
    compared: Mapping[str, Agreement] = field(default_factory=dict)
    traffic: Mapping[str, float] = field(default_factory=dict)
    uncounted: str = ""

    def standing(self, plan: Plan) -> Standing | None:
        """Return the final's measurement of a plan; None where it has none."""
        index = self._index(plan)
        found = None if index is None else self.final.standings[index]
        return found if found is not None and found.samples is not None and not found.failure else None

    def ratio(self, plan: Plan, other: Plan) -> Ratio | None:
        """Return the ratio of two plans' times; None unless both were in the final."""
        if self.standing(plan) is None or self.standing(other) is None:
            return None
        one, two = self._index(plan), self._index(other)
        return None if one is None or two is None else self.final.ratio(one, two)

    @property
    def slowness(self) -> float:
        """The factor from figures at the start of the study to the machine's state in the final; counts have none."""
        return 1.0 if self.final.exact or self.final.predicted else self.scale

    def instance_half(self, plan: Plan) -> float:
        """Return the relative half width of a plan's interval that comes from differences between its instances."""
        index, fastest = self._index(plan), self.final.fastest
        others = [i for i in self.final.measured if i != index]
        if index is None or not others or len([1 for x in self.final.standings[index].levels if x is not None]) < 3:
            return 0.0
        other = fastest if fastest != index else min(others, key=lambda i: self.final.effect(i, index))
        ratio = self.final.ratio(index, other)
        return math.log(ratio.high / ratio.low) / 2.0 / math.sqrt(2.0)

    def still_racing(self, plan: Plan) -> bool:
        """Return whether a plan was still compared at the end of the final."""
        return self._index(plan) in self.final.racing

    @property
    def challenger(self) -> Plan | None:
        """The plan compared with the reference: the recommended one, or else the fastest other finalist."""
        if self.best != self.reference.plan:
            return self.best
        return self.next_best

    @property
    def next_best(self) -> Plan | None:
        """The fastest other eligible finalist; None where there is none."""
        others = [i for i in self.final.measured if self.plans[i] != self.best and i in self.eligible]
        next_best = _fastest(self.final, others)
        return None if next_best is None else self.plans[next_best]

    @property
    def speedup(self) -> Ratio | None:
        """The ratio of the reference's time to the challenger's."""
        other = self.challenger
        return None if other is None else self.ratio(self.reference.plan, other)

    @property
    def criterion(self) -> tuple[str, Ratio] | None:
        """The best cut criterion, and the ratio of its time to the recommended plan's."""
        best = _fastest(self.final, _criteria(self.final, self.names))
        ratio = None if best is None else self.ratio(self.plans[best], self.best)
        return None if best is None or ratio is None else (self.names[best], ratio)

    @property
    def least_certain(self) -> tuple[Plan, float] | None:
        """The rival of which least is known, and the half width of its ratio's interval; None without rivals."""
        chosen = self._index(self.best)
        rivals = [i for i in self.final.racing if i != chosen]
        if chosen is None or not rivals:
            return None
        ratios = {i: self.final.ratio(i, chosen) for i in rivals}
        widths = {i: (r.high - r.low) / (2.0 * r.value) for i, r in ratios.items()}
        widest = max(widths, key=lambda i: widths[i])
        return self.plans[widest], widths[widest]

    @property
    def precision(self) -> float:
        """The largest half width of the intervals of rivals' ratios."""
        return self.least_certain[1] if self.least_certain is not None else 0.0

    @property
    def disturbances(self) -> list[str]:
        """Disturbances of the final, in sentences."""
        return in_words(self.final.disturbance, self.final.repeated, self.cores)

    def _index(self, plan: Plan) -> int | None:
        return next((i for i, each in enumerate(self.plans) if each == plan), None)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain values."""
        found: dict[str, Any] = plain(Verdict, self)
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """Build a verdict from what :meth:`to_json` returned.

        Raises:
            RunFolderError: a field is missing or has the wrong type.
        """
        return built(cls, data, "the verdict in the log is", RunFolderError)


@dataclass(frozen=True, slots=True)
class FinalSettings:
    """Settings of the final.

    Attributes:
        graph, policy, seed: of the final.
        progress: called with what is being measured.
        fits: whether a plan keeps the limits; if none does, the fastest is recommended.
        allowed: whether a plan may be recommended (within the most stages).
        cores: how many the measurements use.
        pauses: inferences after a pause, of the recommended plan and of the reference.
        platform: with the accelerators that plans load; None without any.
        counted: whether the figures are counts, see :func:`~evaluators.measurement.final.FinalComparison`.
        scaled: whether the figures are in proportion to the machine's slowness; those of missed deadlines are not.
        asked: digests of plans that a person gave or named, which always take part.
        traffic: whether to count the memory traffic of the recommended plan.
    """

    graph: Graph
    policy: FinalPolicy
    seed: int
    progress: Callable[[str], None] = lambda _: None
    fits: Callable[[Trial], bool] = lambda _: True
    allowed: Callable[[Plan], bool] = lambda _: True
    cores: int = 1
    pauses: int = 3
    platform: Platform | None = None
    counted: bool = False
    scaled: bool = True
    asked: frozenset[str] = frozenset()
    traffic: bool = False

    def loaded_by(self, plan: Plan) -> frozenset[str]:
        """Return the kinds of accelerators that a plan loads."""
        return self.platform.accelerators(s.processor for s in plan.stages) if self.platform else frozenset()


def decide(
    session: Session,
    history: History,
    baselines: Mapping[str, Plan],
    how: FinalSettings,
    ranking: Sequence[Plan] = (),
    *,
    trials: Sequence[Trial] | None = None,
    choose: Callable[[Final, Sequence[int]], int] | None = None,
) -> Verdict:
    """Compare every plan that may be the best with the others, and choose.

    Args:
        baselines: name → plan; those that were not measured are left out.
        ranking: measured plans by the estimate from all measurements, the best first.
        trials: the finalists; by default those that may be the best.
        choose: returns the plan to recommend from the eligible ones; by default the fastest, ties to fewer stages.

    Raises:
        UnavailableError: no plan could be measured.
    """
    names = {plan.digest: name for name, plan in reversed(list(baselines.items()))}
    beyond = 0
    if trials is None:
        trials, beyond = finalists(history, names, ranking, how.fits, how.asked, how.allowed)
    if not trials:
        raise UnavailableError("no plan could be measured", "see the failures in the trial log")
    plans = tuple(t.plan for t in trials)
    titles = tuple(names.get(p.digest, "") for p in plans)
    stages = [len(p.stages) for p in plans]
    eligible = [i for i, t in enumerate(trials) if how.allowed(t.plan) and how.fits(t)]
    eligible = eligible or [i for i, t in enumerate(trials) if how.fits(t)] or list(range(len(trials)))

    # A plan that lost its race in the search has unchecked outputs, and may win here.
    looked = session.capabilities.outputs
    unseen = {t.plan.digest for t in trials if looked and t.measurement and t.measurement.agreement is None}
    compared: dict[str, Agreement] = {}

    def checked(candidate: Candidate, plan: Plan) -> Candidate:
        """Return a candidate whose outputs agree with the whole model's.

        Raises:
            UnavailableError: it computes something else.
        """
        if plan.digest not in unseen:
            return candidate
        try:
            candidate.run(1)
            agreement = verified(candidate)
        except UnavailableError:
            candidate.close()
            raise
        unseen.discard(plan.digest)
        if agreement is not None:
            compared[plan.digest] = agreement
        return candidate

    def load(plan: Plan, *, fresh: bool = True) -> Callable[[], Candidate]:
        return lambda: checked(session.load(how.graph, plan, fresh=fresh), plan)

    def chosen(final: Final, ended: bool) -> int:
        among = [i for i in eligible if i in final.measured] or list(final.measured)
        if choose is not None:
            return choose(final, among)
        return final.choose(stages, how.policy.tie, among, ended=ended)

    def reference(final: Final) -> int | None:
        return _reference(final, stages, titles)

    def watched(final: Final) -> Iterator[int]:
        """Yield the plans that the verdict names, whose ratios must be known."""
        if len(final.measured) < 2:
            return
        yield chosen(final, False)
        yield from (i for i in (reference(final), _fastest(final, _criteria(final, titles))) if i is not None)
        yield from (i for i in final.measured if plans[i].digest in how.asked)

    free_nbytes = conditions_of(session)().get("memory_free_nbytes")
    room, most = _room(how, free_nbytes), how.policy.loaded
    policy = replace(
        how.policy,
        room=room,
        keep_nbytes=int(_MEMORY_SHARE * (free_nbytes or 0)),
        loaded=max(2, min(most, 2 * room)) if free_nbytes else most,
    )
    loads_s = [t.measurement.load_s if t.measurement else 0.0 for t in trials]
    least_s = policy.loads_slowly_s(loads_s)
    slow = [i for i, load_s in enumerate(loads_s) if load_s > least_s]
    final = FinalComparison(
        [load(p) for p in plans],
        policy,
        np.random.default_rng([how.seed, 1]),
        reuse={i: load(plans[i], fresh=False) for i in slow},
        conditions=conditions_of(session),
        counters=counters_of(session),
        watched=watched,
        computed=session.capabilities.computed,
        counted=how.counted,
        scaled=how.scaled,
        progress=how.progress,
        groups=[how.loaded_by(p) for p in plans],
        recommended=chosen,
        reference=reference,
        free_nbytes=available_nbytes if counters_of(session) is not None else lambda: None,
    ).run()
    _ = final.fastest  # raises with the reasons where all plans have failed
    best = chosen(final, True)
    scale, sigma = _scale(final, trials) if how.scaled else (1.0, _SCALE_SIGMA)
    left_out = beyond + sum(s.samples is None and not s.failure for s in final.standings)
    compared_with = reference(final)
    if compared_with is None:
        raise UnavailableError("no plan could be measured in the final", "see the failures in the trial log")
    named = next((n for n, p in baselines.items() if p == plans[compared_with]), "the fastest plan")
    after = {}
    if session.capabilities.pause:
        how.progress("timing inferences after a pause")
        after = _after_pause([plans[best], plans[compared_with]], load, how.pauses)
    traffic: Mapping[str, float] = {}
    uncounted = ""
    if how.traffic:
        how.progress("counting memory traffic")
        try:
            with closing(load(plans[best])()) as candidate:
                traffic = candidate.traffic()
        except UnavailableError as error:  # an extra figure; the final has measured the plan
            uncounted = str(error)
    rivals = [i for i in final.racing if i in eligible and i != best and not (final.predicted or final.exact)]
    rival = max(rivals, key=lambda i: final.expected_loss(best, i), default=best)
    undecided = final.may_lose(best, rival)
    return Verdict(
        plans[best],
        plans,
        titles,
        final,
        Baseline(titles[compared_with] or named, plans[compared_with]),
        scale,
        sigma,
        after,
        _open(final, best, rival, titles[rival], history.number(plans[rival])) if undecided else "",
        tuple(eligible),
        left_out,
        how.cores,
        compared,
        traffic,
        uncounted,
    )


def _room(how: FinalSettings, free_nbytes: int | None) -> int:
    """Return the number of plans of which two instances fit into memory.

    A runtime holds weights twice: as in the file, and packed for its kernels.
    """
    weights_nbytes = sum(t.nbytes for t in how.graph.tensors if t.constant)
    return int(_MEMORY_SHARE * (free_nbytes or 0) / max(1, 4 * weights_nbytes))


def finalists(
    history: History,
    names: Mapping[str, str],
    ranking: Sequence[Plan],
    fits: Callable[[Trial], bool],
    asked: frozenset[str] = frozenset(),
    allowed: Callable[[Plan], bool] = lambda _: True,
) -> tuple[list[Trial], int]:
    """Return the plans that may be the best, the most promising first, and how many more there are.

    A plan may be the best if its interval, widened by the drift of the machine, reaches within :data:`REACH` of that of
    the best one that is ``allowed``. At least ten plans take part if there are as many that are not slower by more than
    :data:`FAR`; those whose digests are ``asked`` for always do.
    """
    own = history.ranking()
    if not own:
        return [], 0
    kept = [t for t in own if fits(t)] or own
    widest = {t.plan.digest: _interval_s(t, history) for t in kept}
    recommendable = [t for t in kept if allowed(t.plan)] or kept
    limit_s = (1.0 + REACH) * min(widest[t.plan.digest][1] for t in recommendable)
    # The verdict names the best plan that cuts no model, the best baseline and the best criterion, so they always take
    # part: the machine may have been slower when the search measured them. A plan that cuts no model has a stage for
    # each, the fewest there are.
    fewest = min(len(t.plan.stages) for t in kept)
    wholes = [t for t in kept if len(t.plan.stages) == fewest][:_WHOLES]
    wholes += [t for t in kept if t.plan.digest in names][:_WHOLES]
    criteria = [t for t in kept if names.get(t.plan.digest, "").startswith(CRITERIA)][:1]
    far_s = limit_s * (1.0 + FAR) / (1.0 + REACH)
    first = [t for t in kept[:LEAST_FINALISTS] if widest[t.plan.digest][0] <= far_s or len(t.plan.stages) == fewest]
    given = [t for t in own if t.plan.digest in asked]
    kept = [*kept, *(t for t in given if t not in kept)]  # even those that break a limit
    always = {t.plan.digest for t in (*first, *recommendable[:1], *wholes, *criteria, *given)}
    near = [t for t in kept if t.plan.digest in always or widest[t.plan.digest][0] <= limit_s]
    place = {plan.digest: i for i, plan in enumerate(ranking)}
    last = len(own)
    merit = {t.plan.digest: min(i, place.get(t.plan.digest, last)) for i, t in enumerate(kept)}
    # Baselines are in the table, so they come before the long tail of proposals.
    ordered = sorted(
        near, key=lambda t: (t.plan.digest not in always, t.plan.digest not in names, merit[t.plan.digest])
    )
    return ordered[:MOST_FINALISTS], max(0, len(ordered) - MOST_FINALISTS)


def _interval_s(trial: Trial, history: History) -> tuple[float, float]:
    """Return the interval of a trial's latency in the state of the machine at the study's start, in seconds."""
    if trial.measurement is None:
        return math.inf, math.inf
    low, high = trial.measurement.latency_s.ci95
    widen = 1.0 + history.uncertainty(trial)
    factor = trial.measurement.cold * trial.speed
    return low / (factor * widen), high / factor * widen


def _fastest(final: Final, group: Sequence[int]) -> int | None:
    """Return the fastest of some finalists; None of none."""
    return min(group, key=lambda i: final.effect(i, final.fastest), default=None)


def _criteria(final: Final, names: Sequence[str]) -> list[int]:
    return [i for i in final.measured if names[i].startswith(CRITERIA)]


def _reference(final: Final, stages: Sequence[int], names: Sequence[str]) -> int | None:
    """Return the best one-stage plan; else the best baseline, else the fastest plan; None where none was measured."""
    groups = (
        [i for i in final.measured if stages[i] == 1],
        [i for i in final.measured if names[i]],
        list(final.measured),
    )
    return _fastest(final, next((g for g in groups if g), ()))


def _scale(final: Final, trials: Sequence[Trial]) -> tuple[float, float]:
    """Return the machine's slowness in the final, relative to the search, and its relative standard deviation."""
    logs = [
        math.log(s.samples.median / t.median_s)
        for s, t in zip(final.standings, trials, strict=True)
        if s.samples is not None
    ]
    middle = statistics.median(logs)
    spread = 1.4826 * statistics.median(abs(x - middle) for x in logs)
    return math.exp(middle), max(_SCALE_SIGMA, spread)


def _after_pause(
    plans: Sequence[Plan], load: Callable[[Plan], Callable[[], Candidate]], pauses: int
) -> dict[str, float]:
    """Return the median seconds of an inference after a pause of 1 s, of each plan."""
    found: dict[str, float] = {}
    for plan in {p.digest: p for p in plans}.values():
        try:
            with closing(load(plan)()) as candidate:
                candidate.run(1)
                found[plan.digest] = statistics.median(candidate.after_pause(PAUSE_S) for _ in range(pauses))
        except UnavailableError:
            continue  # an extra figure; the final has measured the plan
    return found


def _open(final: Final, best: int, rival: int, name: str, number: int) -> str:
    """Return a sentence that names the plan that may still be faster than the best known one."""
    plan = f"“{name}”" if name else f"plan {number}"
    ratio = final.ratio(best, rival)
    if ratio.high > _WIDEST:
        return f"{plan} may be faster than the best known plan: {final.rounds} rounds were too few to decide"
    return (
        f"{plan} may be up to {percent(ratio.high - 1.0)} faster or {percent(1.0 / ratio.low - 1.0)} slower than the "
        "best known plan: the machine was too disturbed to decide"
    )


def shown_scale(verdict: Verdict | None, trial: Trial) -> float:
    """Return the factor from a figure of the search to the state of the machine in the final; counts have none."""
    if verdict is not None and verdict.final.exact:
        return 1.0
    cold = trial.measurement.cold if trial.measurement is not None else 1.0
    return (verdict.slowness / trial.speed if verdict is not None else 1.0) / cold


def shown_samples(verdict: Verdict | None, trial: Trial | None, plan: Plan) -> Samples | None:
    """Return the samples to report of a plan: the final's, or the search's scaled to the final."""
    if verdict is not None and (standing := verdict.standing(plan)) is not None:
        return standing.samples
    if trial is None or trial.measurement is None:
        return None
    samples, scale = trial.measurement.latency_s, shown_scale(verdict, trial)
    if scale == 1.0:
        return samples
    return Samples(tuple(value * scale for value in samples.values_s), samples.conditions)
