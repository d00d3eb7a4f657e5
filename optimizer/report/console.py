"""Terminal output of a study: progress on stderr while it runs, the answer on stdout at the end."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from evaluators.machine import problems
from evaluators.objectives import LATENCY, OBJECTIVES, Objective
from optimizer.model.ranks_text import describe_ranks
from optimizer.report.terminal import table, tried_text
from optimizer.study.history import WARM
from optimizer.study.result import PROPOSED, Result, WorkloadResult
from optimizer.study.verdict import REACH, Verdict
from search_spaces.core.decoded_plan import jobs_of
from search_spaces.core.errors import printable
from search_spaces.core.plan import runs_of
from search_spaces.core.wording import human_bytes, many, percent, plural

if TYPE_CHECKING:
    from evaluators.measurement.final import Ratio
    from evaluators.samples import Samples
    from optimizer.study.folder import RunFolder
    from optimizer.study.front import Front
    from optimizer.study.history import History, Trial
    from search_spaces.core.graph import Graph
    from search_spaces.core.plan import Plan, Stage

_MOST_STAGES_SHOWN = 12
_MOST_FRONT = 16
_MOST_NAMED = 4
_TIMES = 2.0  # larger ratios are shown as factors, not in per cent
UNDECIDED = "not decided"
_VAGUE = (UNDECIDED, "about ")
_TELLING = 25.0  # per cent: a wider interval decides nothing
_VAGUE_RATIO = 0.25  # an interval wider than this, and than the difference, tells only that there is one
_TIE = 1.0  # per cent: plans that differ by no more, and not significantly, are called equal
_NOISE = 0.01  # smaller relative differences are noise of the machine
_COARSE = 0.03  # a wider interval of the final gets a note
_CHANGE = 0.05  # a difference between two blocks of runs that is more than noise
_PIPE_WIDTH = 110
_NARROWEST = 40
_LABEL = 12  # width of the labels before the lines of the answer
_NUMBER = re.compile(r"\b[0-9]+\b")  # what only counts on
_EVERY_S = 10.0
_MOST_JOBS = 24  # of the models of a plan that are listed
_OUTCOMES = (("mean", "mean_ms"), ("worst", "worst_ms"), ("makespan", "makespan_ms"), ("per s", "throughput_per_s"))
_ORDERS = {
    "fifo": "first come, first served",
    "priority": "by priority, then the oldest request first",
    "edf": "the earliest deadline first",
    "static": "in a fixed order",
}


class _PlainConsole(Console):
    """A console that shows control characters in names as text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments, with escape sequences of Rich only."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def make_console(*, stderr: bool = False, record: bool = False) -> Console:
    """Return a console; into a pipe it writes lines of ``COLUMNS`` characters, or of a fixed width."""
    file = io.StringIO() if record else None  # what is recorded is exported, and not shown
    console = _PlainConsole(file=file, stderr=stderr, record=record, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        asked = os.environ.get("COLUMNS", "")
        console.width = max(_NARROWEST, int(asked)) if asked.isdecimal() and len(asked) < 5 else _PIPE_WIDTH
    return console


def progress_bar(console: Console, unit: str, clock: ProgressColumn, *first: ProgressColumn, quiet: bool) -> Progress:
    """Return a bar with counts done and in all, shown on a terminal only and removed at the end."""
    done = TextColumn("{task.completed:.0f}/{task.total:.0f} " + unit)
    bar = (TextColumn("{task.description}"), BarColumn(bar_width=24), done)
    hidden = quiet or not console.is_terminal
    return Progress(*first, *bar, clock, console=console, disable=hidden, transient=True)


class Steps:
    """Chooses the steps that are written as lines: new ones, and every few seconds one that differs in numbers only."""

    def __init__(self) -> None:
        self._step, self._written_s = "", -math.inf

    def is_due(self, text: str) -> bool:
        """Return whether a step is to be written now."""
        step, now_s = _NUMBER.sub("", text), time.monotonic()
        due = step != self._step or now_s >= self._written_s + _EVERY_S
        if due:
            self._step, self._written_s = step, now_s
        return due


class ProgressWatcher:
    """Shows a bar with trials, best so far, distinct plans and time left."""

    def __init__(self, budget: int, *, quiet: bool, verbose: bool) -> None:
        self._console = make_console(stderr=True)
        self._budget = budget
        self._quiet = quiet
        self._verbose = verbose
        self._history: History | None = None
        self._unit = "ms"
        self._steps, self._failed = Steps(), False
        clock = TimeRemainingColumn(compact=True)
        self._progress = progress_bar(self._console, "plans {task.fields[best]}", clock, SpinnerColumn(), quiet=quiet)
        self._task = self._progress.add_task("starting", total=budget, best="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def message(self, text: str) -> None:
        """Show the current step; into a pipe, a step that differs in numbers only is written every few seconds."""
        self._progress.update(self._task, description=text)
        if self._history is not None and self._history.measured >= self._budget:  # room for the rounds of the final
            self._progress.update(self._task, best="")
        shown = not self._console.is_terminal and not self._quiet
        if self._verbose or (shown and self._steps.is_due(text)):
            self._console.print(text, style="dim", markup=False)

    def warn(self, text: str) -> None:
        """Print a warning above the bar."""
        self._console.print(f"optimize: warning: {text}", markup=False, soft_wrap=True)

    def opened(self, run: RunFolder, history: History, space_size: int) -> None:
        """Show the state of the run folder, and that a study is resumed."""
        self._history = history
        self._unit = OBJECTIVES.get(run.config.objective[0], LATENCY).shown_unit
        self._progress.update(self._task, completed=history.measured)
        if run.resumed:
            failed = sum(bool(t.broke) for t in history.known.values())
            baselines = sum(t.origin != WARM and t.measurement is not None for t in history.outside)
            tried = f"{plural(history.measured + baselines, 'plan')} tried"
            also = f", {many(failed)} failed" if failed else ""
            self.message(f"resuming study {run.study}: {tried} so far{also}")
        if self._verbose:
            self._console.print(
                f"run folder {run.path}, {plural(space_size, 'plan')} in the space", style="dim", markup=False
            )

    def trial(self, trial: Trial) -> None:
        """Advance the bar, and print the trial with --verbose."""
        if self._history is None:
            return
        ranking = self._history.ranking()
        best = ""
        if ranking and ranking[0].measurement:
            best = f"best {interval_ms(ranking[0].measurement.latency_s, self._unit)}, {self._history.repeats} repeats"
        self._progress.update(self._task, completed=self._history.measured, best=best, description=trial.origin)
        if trial.broke and not self._failed:
            self._failed = True  # the answer counts the others
            which = f"plan {trial.number}" if trial.number >= 0 else f"“{trial.origin}”"
            self.warn(f"{which} failed: {trial.broke.splitlines()[0].rstrip('.')}")
        if self._verbose:
            samples = trial.measurement.latency_s if trial.measurement else None
            found = trial.failure or (interval_ms(samples, self._unit) if samples else "known")
            self._console.print(f"#{trial.number} {trial.origin}: {found}", style="dim", markup=False)


def interval_ms(samples: Samples, unit: str = "ms") -> str:
    """Return ``12.34 ms [12.30, 12.41]``: the median and its 95 % interval, in thousandths of the samples' unit."""
    return figure_text(samples.median, samples.ci95, unit)


def render(result: Result) -> Group:
    """Return the answer: baselines, the best plan stage by stage, speed-up, bound, and what to do next."""
    front: list[Text | Table] = (
        [Text(), _front(result.front, predicted=result.predicted)] if result.front is not None else []
    )
    parts: list[Text | Table | _Line] = []
    if isinstance(result, WorkloadResult):
        parts += [_workload_head(result), Text(), _outcomes(result), *front]
        parts += [Text(), _models(result), *_tucker(result)]
    else:
        parts += [_head(result), Text(), _baselines(result), *front]
        if result.best is not None:
            parts += [Text(), _stages(result, result.best)]
            if ranks := describe_ranks(result.graph, result.best):
                parts.append(Text(ranks))
    parts += [Text(), *_conclusions(result), Text(), *_next(result)]
    for part in parts:
        if isinstance(part, Text):  # the terminal breaks these lines, so that commands can be copied
            part.no_wrap, part.overflow = True, "ignore"
    return Group(*parts)


def _head(result: Result) -> Text:
    names = ", ".join(p.name for p in result.platform.processors)
    return Text(
        f"{result.graph.name}: {plural(len(result.graph.operators), 'operator')} on {names}; {tried_text(result)}"
    )


def _baselines(result: Result) -> Table:
    intervals = (result.interval(plan) for _, plan in result.rows())
    wide = any(interval is not None and interval[0] < interval[1] for interval in intervals)
    what = f"{'predicted ' if result.predicted else ''}{result.objective.title}{' [95 %]' if wide else ''}"
    against = "" if result.verdict is None else "difference"
    made = table(("plan", what, against, ">stages"))
    names: dict[str, str] = {}
    for name, plan in result.rows():
        style = "bold" if result.verdict is not None and plan == result.verdict.best else ""
        shown_name = f"{name}: {_borders(plan)}" if name == PROPOSED else name
        first = names.setdefault(plan.digest, name)
        difference = _against(result, plan) if first == name else same_plan(first)
        cells = (shown_name, _figure(result, plan), difference, str(len(plan.stages)))
        made.add_row(*map(Text, cells), style=style)
    return made


def _borders(plan: Plan) -> str:
    """Return the stages of a plan, shortened: ``0–12 gpu, 13–40|41–82 cpu0``."""
    runs = groupby(plan.stages[:_MOST_NAMED], lambda stage: stage.processor)
    found = [f"{'|'.join(f'{s.operators[0]}–{s.operators[-1]}' for s in run)} {name}" for name, run in runs]
    return ", ".join(found) + (", …" if len(plan.stages) > _MOST_NAMED else "")


def _figure(result: Result, plan: Plan) -> str:
    """Return a plan's figure with its interval, or why it has none."""
    samples, interval = result.samples(plan), result.interval(plan)
    if samples is None or interval is None:
        trial = result.history.known.get(plan.digest)
        return trial.failure if trial else "not tried (budget)"
    unit = result.objective.shown_unit
    text = figure_text(samples.median, interval, unit)
    measured = result.measurement(plan)
    if result.verdict is not None and not result.in_final(plan) and not result.predicted:
        early = measured is not None and measured.stopped == "raced"
        text = f"about {text.partition(' [')[0]} ({'stopped early' if early else 'search'})"
    elif result.in_final(plan) and not result.predicted and _against(result, plan).startswith(_VAGUE):
        text = text.partition(" [")[0]  # its own runs agree better than those of other instances would
    return text


def _against(result: Result, plan: Plan) -> str:
    """Return how a plan compares with the recommended one."""
    if result.verdict is None:
        return ""
    if plan == result.verdict.best:
        return "recommended"
    ratio = result.against_best(plan)
    if ratio is None:
        return "not in the final" if result.predicted and result.samples(plan) is not None else ""
    return against_text(ratio, result.objective, racing=result.verdict.still_racing(plan))


def same_plan(name: str) -> str:
    """Return what stands in place of a comparison where a plan has two names."""
    return f"the same plan as “{name}”"


def against_text(ratio: Ratio, objective: Objective, *, racing: bool) -> str:
    """Return how a plan compares with the recommended one; ``racing``: the final compared it to the end."""
    text = slower_text(ratio, objective)
    vague = ratio.high - ratio.low > max(_VAGUE_RATIO, ratio.value - 1.0)  # after few rounds
    if vague and not racing and ratio.low >= 1.0 + _NOISE and ratio.value < _TIMES:
        return f"at least {percent(ratio.low - 1.0)} {objective.larger}"
    early = text == UNDECIDED and not racing and ratio.value > 1.0  # after too few rounds for an interval
    return f"about {percent(ratio.value - 1.0)} {objective.larger}" if early else text


def figure_text(value: float, interval: tuple[float, float], unit: str) -> str:
    """Return ``12.34 ms [12.30, 12.41]``, in thousandths of the value's unit; no interval where it has no width."""
    digits = 1 if value >= 0.1 else 2 if value >= 0.01 else 3
    low, high = (f"{end * 1e3:.{digits}f}" for end in interval)
    return f"{value * 1e3:.{digits}f} {unit}" + ("" if interval[0] == interval[1] else f" [{low}, {high}]")


def slower_text(ratio: Ratio, objective: Objective = LATENCY) -> str:
    """Return how much slower, or faster, a plan is than another, or that they are equal or not decided.

    Of other objectives than times, how much more or less energy or memory it takes.
    """
    low, value, high = ((x - 1.0) * 100 for x in (ratio.low, ratio.value, ratio.high))
    ends = f"[{_brief(low if value > 0 else -high)}, {_brief(high if value > 0 else -low)}]"
    if not ratio.significant:
        far = max(-low, high)
        if low == high or far > _TELLING:
            return "equal" if low == high else UNDECIDED
        if abs(value) <= _TIE:
            return f"equal within {_brief(far)} %"
    if low == high:
        return f"{_brief(abs(value))} % {objective.larger if value > 0 else objective.smaller}"
    if ratio.low > _TIMES:
        much = "long" if objective.is_time else "much"
        return f"{ratio.value:.3g} times as {much} [{ratio.low:.3g}, {ratio.high:.3g}]"
    return f"{_brief(abs(value))} % {objective.larger if value > 0 else objective.smaller} {ends}"


def _brief(number: float) -> str:
    text = f"{number:.0f}" if abs(number) >= 9.95 else f"{number:.1f}"
    return "0.0" if text == "-0.0" else text.replace("-", "−")


def _front(front: Front, *, predicted: bool) -> Table:
    title = f"front: {plural(len(front.plans), 'plan')} that no other plan beats significantly"
    source = "predicted " if predicted else ""
    figures = (f">{source}{o.title}, {o.shown_unit}" for o in front.objectives)
    made = table((*figures, ">stages", "plan"), title=title)
    for index in _spread(len(front.plans), front.knee):
        each = front.plans[index]
        placed = each.name or ", ".join(
            f"{s.operators[0]} to {s.operators[-1]} {s.processor}" for s in each.plan.stages
        )
        style = "bold green" if index == front.knee else ""
        values = (f"{value * 1e3:.4g}" for value in each.values)
        shown_plan = Text(f"{placed}  ← knee" if index == front.knee else placed)
        made.add_row(*values, str(len(each.plan.stages)), shown_plan, style=style)
    return made


def _spread(count: int, knee: int) -> list[int]:
    """Return which of many plans to show: the ends, the knee, and others evenly between."""
    if count <= _MOST_FRONT:
        return list(range(count))
    return sorted({round(i * (count - 1) / (_MOST_FRONT - 1)) for i in range(_MOST_FRONT)} | {knee})


def _stages(result: Result, plan: Plan) -> Table:
    samples, stage_s, interval = result.samples(plan), result.stage_s(plan), result.interval(plan)
    unit = result.objective.shown_unit
    kind = "recommended plan, predicted" if result.predicted else "recommended plan"
    title = f"{kind}: {figure_text(samples.median, interval, unit)}" if samples and interval else kind
    if samples and result.objective.aggregation == "busiest":
        title += f", {1.0 / samples.median:.4g} results a second"
    rows, measured = [], result.measurement(plan)
    events = measured.timeline.events if measured and measured.timeline and not plan.is_chain else ()  # some overlap
    begins = {e.stage: f"{e.start_s * 1e3:.4g}" for e in sorted(events, key=lambda e: -e.start_s)}
    for index, stage in enumerate(plan.stages):
        if index == _MOST_STAGES_SHOWN and len(plan.stages) > _MOST_STAGES_SHOWN + 1:
            rows.append(("…", plural(len(plan.stages) - index, "more stage"), "", "", *([""] if begins else []), ""))
            break
        stage_ms = f"{stage_s[index] * 1e3:.4g}" if stage_s else ""
        what = describe_operators(result.graph, stage.operators)
        crosses = crossing(result.graph, stage.operators) or "–"
        begin = [begins.get(index, "")] if begins else []
        rows.append((str(index), what, stage.processor, stage_ms, *begin, crosses))
    heads = ("processor", f">{result.objective.stage_unit}", *([">begins at, ms"] if begins else []), ">transfers")
    return table((">stage", "operators", *heads), rows, title)


def _workload_head(result: WorkloadResult) -> Text:
    """Return what was searched, and for what."""
    count = len(result.workload.instances)
    names = ", ".join(p.name for p in result.platform.processors if p.resources)
    return Text(
        f"{result.workload.name}: {count} models at once on {names}, for the {result.objective.title}; "
        f"{tried_text(result)}"
    )


def _outcomes(result: WorkloadResult) -> Table:
    """Return latencies, makespan and throughput of the best plan and of each baseline."""
    late, objective = result.workload.deadlines, result.objective
    own = objective.name not in {"mean", "worst", "makespan", "misses", "throughput"}
    heads = [name if name == "per s" else f"{name}, ms" for name, _ in _OUTCOMES]
    heads += [*(["missed"] if late else []), *([f"{objective.name}, {objective.shown_unit}"] if own else [])]
    if not result.predicted:
        heads.append(f"predicted, {objective.shown_unit}")
    made = table(("plan, predicted" if result.predicted else "plan", *(f">{head}" for head in heads)))
    for name, entry in result.outcomes.items():
        row = [_number(entry[key]) for _, key in _OUTCOMES]
        if late:
            row.append(f"{entry['misses']:.0f} of {entry['requests']:.0f}")
        plan = result.best if name == "best" else result.baselines[name]
        if own:
            samples = result.samples(plan) if plan is not None else None
            row.append(_number(samples.median * 1e3 if samples else None))
        if not result.predicted:
            predicted = entry.get("predicted")
            row.append(_number(predicted["objective"]) if predicted else "")
        made.add_row(Text(name, style="bold" if name == "best" else ""), *row)
    for name, plan in result.baselines.items():
        trial = result.history.known.get(plan.digest)
        if name not in result.outcomes:
            made.add_row(Text(name), Text(trial.failure if trial else "not tried (budget)"))
    return made


def _models(result: WorkloadResult) -> Table:
    """Return the best plan, model by model in the order in which they go first."""
    plan = result.best
    title = "best plan" if plan is None else f"best plan: requests are served {_ORDERS[plan.dispatch]}"
    listed: list[tuple[str, ...]] = []
    times: dict[str, Any] = result.outcomes.get("best", {}).get("instances_ms", {})
    shown = list(jobs_of(plan, result.joined).items()) if plan is not None else []
    for place, (index, stages) in enumerate(shown[:_MOST_JOBS], 1):
        component = result.joined.components[index]
        rows = (
            (replace(plan.stages[s], operators=component.own(plan.stages[s].operators)) for s in stages) if plan else ()
        )
        listed.append((str(place), component.name, _jobs(rows), _number(times.get(component.name))))
    if len(shown) > _MOST_JOBS:
        listed.append(("…", f"{len(shown) - _MOST_JOBS} more models", "", ""))
    return table((">order", "model", "stages: operators on processor", ">ms"), listed, title)


def _jobs(stages: Iterable[Stage]) -> str:
    """Return stages in words; sides of a split, which follow each other, are one job on two processors."""
    found: list[str] = []
    split: tuple[int, ...] = ()
    for stage in stages:
        where = stage.processor if stage.share is None else f"{stage.processor} ({stage.share})"
        if stage.share is not None and stage.operators == split:
            found[-1] += f" and {where}"
            continue
        split = stage.operators if stage.share is not None else ()
        runs = (
            f"{first} to {last - 1}" if last - first > 1 else f"{first}" for first, last in runs_of(stage.operators)
        )
        found.append(f"{', '.join(runs)} on {where}")
    return "; ".join(found)


def _tucker(result: WorkloadResult) -> list[Text]:
    """Return a line for each model that might be decomposed: how far it is in the best plan."""
    lines = []
    for name, entry in result.tucker.items():
        allowed = f"{entry['max_error']:g} allowed"
        if entry["ranks"]:
            count = len(entry["ranks"])
            what = f"{count} convolution{'s run' if count > 1 else ' runs'} as Tucker-2 triples"
            known = "off by" if entry["error_measured"] else "expected to be off by"
            off = "" if entry["error"] is None else f", outputs {known} {entry['error']:.2g}"
            saved = f"{what}: {entry['macs_saved']:.1%} fewer multiply-accumulates{off}"
            lines.append(Text(f"{name}: {saved} ({allowed})"))
        elif not entry["decomposable"]:
            lines.append(Text(f"{name}: as it is, it cannot be decomposed"))
        elif entry["variants"]:
            lines.append(Text(f"{name}: as it is, {entry['variants']} ways to decompose it were searched ({allowed})"))
        else:
            lines.append(Text(f"{name}: as it is, no way to decompose it saves time within its error ({allowed})"))
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _conclusions(result: Result) -> list[_Line]:
    """Return labelled lines: the answer, its gain, the bound, and notes."""
    lines = []
    verdict = result.verdict
    if verdict is not None and result.front is not None:
        others = " and ".join(o.name for o in result.front.objectives)
        rest = "; --json has the whole front" if len(result.front.plans) > _MOST_FRONT else ""
        lines.append(
            _Line("answer", f"{_called(verdict, verdict.best)}: the knee, the best compromise of {others}{rest}")
        )
    elif verdict is not None:
        good = verdict.challenger == verdict.best and verdict.speedup is not None and verdict.speedup.significant
        lines.append(_Line("answer", answer(result), "bold green" if good else "bold"))
        if text := _gain(result):
            lines.append(_Line("gain", text))
    if bound := _bound(result):
        lines.append(_Line("bound", bound))
    notes = [*_evidence(result), *_disturbances(result)]
    compared = result.deployed or any(result.agreement(trial.plan) for trial in result.history.known.values())
    if verdict is not None and not compared and not result.predicted:
        notes.append(f"outputs were not compared with the whole model's: {result.evaluator} returns none")
    if result.deployed is not None:
        notes.append(f"outputs of the written stage files: {result.deployed}")
    if result.tolerances:
        notes.append(result.tolerances)
    return lines + [_Line("notes" if i == 0 else "", note) for i, note in enumerate(notes)]


@dataclass(frozen=True, slots=True)
class _Line:
    """A labelled sentence: on a terminal its words wrap beside the label, in a pipe it is one line."""

    label: str
    text: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        """Yield the line."""
        whole = Text(f"{self.label:{_LABEL}}", no_wrap=True, overflow="ignore").append(self.text, style=self.style)
        if not console.is_terminal or options.max_width <= 2 * _LABEL:
            yield whole
            return
        for i, part in enumerate(Text(self.text, style=self.style).wrap(console, options.max_width - _LABEL)):
            yield Text(f"{'' if i else self.label:{_LABEL}}").append_text(part)


def answer(result: Result) -> str:
    """Return in a few words which plan to use."""
    verdict = result.verdict
    if verdict is None:
        return ""
    predicted = ", predicted" if result.predicted else ""
    if verdict.challenger == verdict.best:
        return _called(verdict, verdict.best) + predicted
    faster, better = "", result.objective.better
    if verdict.speedup is not None:
        sure = verdict.speedup.inverse.significant
        faster = f": {no_better(better, sure=sure, all_tried=result.exhausted)}"
    return f"“{verdict.reference.name}”{faster}{predicted}"


def no_better(better: str, *, sure: bool, all_tried: bool) -> str:
    """Return the answer where no other plan won.

    Args:
        better: the comparative, as ``faster``.
        sure: whether the next best plan is significantly worse.
        all_tried: whether no plan of the space is left.
    """
    if not sure:
        return f"no significantly {better} plan was found"
    return f"no plan is {better}" if all_tried else f"no {better} plan was found"


def _called(verdict: Verdict, plan: Plan) -> str:
    """Return the name of a plan, or what it is."""
    if name := verdict.named(plan):
        return f"“{name}”"
    processors = ", ".join(dict.fromkeys(s.processor for s in plan.stages))
    return f"a plan of {plural(len(plan.stages), 'stage')} on {processors}"


def _gain(result: Result) -> str:
    """Return what the recommended plan gains against the best one-stage plan and the best cut criterion."""
    verdict = result.verdict
    if verdict is None:
        return ""
    name, ratio = verdict.reference.name, verdict.speedup
    if ratio is None or verdict.challenger is None:
        return f"no other plan {'is in the space' if result.exhausted else 'was tried'}"
    if not result.objective.scales and isinstance(result, WorkloadResult):
        gains = verdict.challenger == verdict.best
        missed = missed_text(result.outcomes, name if gains else "", sure=ratio.significant)
        return missed if gains else f"none: {missed}"
    if verdict.challenger == verdict.best:
        kind = "the best one-stage plan" if len(verdict.reference.plan.stages) == 1 else "the best baseline"
        than = f"“{name}”, {kind}"
        if result.objective.is_time:
            low_high = "" if ratio.low == ratio.high else f" (95 %: {ratio.low:.3f} to {ratio.high:.3f})"
            text = f"{ratio.value:.3f} times as fast as {than}{low_high}"
        else:
            text = slower_than(ratio.inverse, result.objective, than)
        text += "" if ratio.significant else "; not significant"
    elif (slower := slower_than(ratio.inverse, result.objective)) == UNDECIDED:
        text = "not decided against the next best plan"
    else:
        other = f"the next best plan, {_called(verdict, verdict.challenger)}"
        text = f"none: {other}, is {slower}" if result.objective.is_time else f"none: {other}: {slower}"
        if not (ratio.significant or slower.startswith("equal")):
            simpler = len(verdict.best.stages) < len(verdict.challenger.stages)
            why = ", so the plan of fewer stages is recommended" if ratio.value > 1.0 and simpler else ""
            text += f"; not significant{why}"
    criterion = verdict.criterion
    if criterion is not None and criterion[0] not in {verdict.named(verdict.best), verdict.named(verdict.challenger)}:
        text += f"; best cut criterion, “{criterion[0]}”: {slower_than(criterion[1], result.objective)}"
    return text


def missed_text(outcomes: Mapping[str, Any], baseline: str, *, sure: bool) -> str:
    """Return how many requests of a typical run miss their deadlines with the recommended plan.

    Args:
        outcomes: of the recommended plan ("best") and of baselines.
        baseline: the best one; "" where it is recommended.
        sure: whether plans differ significantly.
    """
    ours, theirs = outcomes["best"], outcomes.get(baseline)
    text = f"{ours['misses']:.0f} of {ours['requests']:.0f} requests of a typical run miss their deadlines"
    if not baseline:
        return f"{text}; no plan with {'' if sure else 'significantly '}fewer was found"
    if theirs is not None:
        text += f", {theirs['misses']:.0f} with “{baseline}”, the best baseline"
        if ours["misses"] == theirs["misses"]:
            text += f"; the mean latency is {ours['mean_ms']:.4g} ms instead of {theirs['mean_ms']:.4g} ms"
    return text if sure else f"{text}; not significant"


def slower_than(ratio: Ratio, objective: Objective, than: str = "") -> str:
    """Return :func:`slower_text` for a sentence: ``4.7 % slower than “whole on cpu” (95 %: 1.7 to 7.9 %)``."""
    figure, bracket, interval = slower_text(ratio, objective).partition(" [")
    if than:
        equal, times = figure.startswith("equal"), "times as" in figure
        word = "against" if figure == UNDECIDED else "to" if equal else "as" if times else "than"
        figure += f" {word} {than}"
    if not bracket:
        return figure
    low, high = interval.removesuffix("]").split(", ")
    unit = " %" if "%" in figure else ""
    return f"{figure} (95 %: {low} to {high}{unit})"


def _evidence(result: Result) -> list[str]:
    """Return notes of the final: faster plans that break a limit, inferences after a pause, plans left out."""
    verdict = result.verdict
    if verdict is None or result.front is not None:
        return []
    found = []
    for index in verdict.final.measured:
        beyond = verdict.ratio(verdict.plans[index], verdict.best)
        if index not in verdict.eligible and beyond is not None and beyond.high < 1.0:
            name, how = _called(verdict, verdict.plans[index]), slower_than(beyond, result.objective)
            found.append(f"{name}: {how}, but it has too many stages or breaks a limit")
    if verdict.undecided:
        found.append(f"undecided: {verdict.undecided}")
    if not result.predicted and verdict.precision > _COARSE:
        half = percent(verdict.precision, 1)
        found.append(f"the final ended with ±{half} between the best plans: smaller differences are not decided")
    failed = [t.broke for t in result.history.known.values() if t.broke]
    if failed:
        why = failed[0].splitlines()[0].rstrip(".")
        found.append(f"{plural(len(failed), 'plan')} of {many(len(result.history.known))} failed; the first: {why}")
    after = verdict.after_pause_s.get(verdict.best.digest)
    if after is not None:
        text = f"an inference after a pause of 1 s takes {after * 1e3:.3g} ms"
        other = verdict.after_pause_s.get(verdict.reference.plan.digest)
        if other is not None and verdict.reference.plan != verdict.best:
            text += f" (“{verdict.reference.name}”: {other * 1e3:.3g} ms)"
        found.append(text)
    if not result.exhausted and result.history.known.keys() <= {p.digest for p in result.baselines.values()}:
        found.append("the whole budget went into baselines: give a larger --budget for proposed plans")
    if verdict.left_out and not result.predicted:
        plans, were = plural(verdict.left_out, "more plan"), "was" if verdict.left_out == 1 else "were"
        found.append(f"{plans} within {percent(REACH)} of the best {were} not measured again")
    return found


def _bound(result: Result) -> str:
    """Return how far the best plan can be from the best possible one, by the model."""
    bounds, gap = result.bounds, result.gap
    if bounds is None or gap is None:
        return ""
    least = f"{bounds.space_s * 1e3:.4g} {result.objective.shown_unit}"
    model = "this cost model" if bounds.own else "the operators' profiled times"
    if gap < -_NOISE:
        wrong = percent(-gap / (1.0 + gap), 1)
        text = (
            f"none: {model} predict{'s' if bounds.own else ''} at best {least}, at least {wrong} above what was found"
        )
    elif gap >= _NOISE:
        most, at_least = ("", "") if bounds.proven else ("at most ", " at least")
        than = f"{most}{percent(gap, 1)} {result.objective.larger} than the optimum of this space"
        text = f"{than}, which takes{at_least} {least} by {model}"
    elif bounds.proven and bounds.own:
        text = f"optimal under this cost model: {least}"
    else:
        text = f"within {percent(_NOISE)} of the optimum of this space, {least} by {model}"
    if result.front is not None:
        text = f"{result.objective.name}: {text}"
    if result.objective == LATENCY and gap >= -_NOISE and bounds.all_plans.latency_s < bounds.space_s:
        text += f"; lower bound for any plan: {bounds.all_plans.latency_s * 1e3:.4g} ms"
    return text


def _disturbances(result: Result) -> list[str]:
    """Return notes about the runtime's placements and disturbances of the machine."""
    found = [*(f"{name}: {text}" for name, text in result.placements.items()), *result.disturbances]
    verdict = result.verdict
    if verdict is not None and not result.predicted and abs(math.log(verdict.scale)) > math.log1p(_CHANGE):
        scale = verdict.scale
        what = f"{percent(scale - 1.0)} slower" if scale > 1.0 else f"{percent(1.0 / scale - 1.0)} faster"
        found.append(f"the machine ran {what} during the final comparison; earlier figures are scaled to it")
    samples = result.samples(result.best) if result.best is not None else None
    bad = problems(samples.conditions) if samples is not None else []
    if bad:
        first = "measurements run first where the system allows it, and an application is slower beside such work"
        found.append(f"measured while {', '.join(bad)}: {first}; optimize doctor says what to do")
    return found


def _next(result: Result) -> list[Text]:
    if result.verdict is None:
        return []
    folder = Text("run folder  ").append(str(result.run_dir))
    if result.deployed is None or not any("cores" in p.options for p in result.platform.processors):
        again = shlex.join(["optimize", "execute", str(result.run_dir)])  # no files for this machine
        return [folder, Text("run it      ").append(again, style="cyan")]
    plan = str(result.run_dir / "best" / "plan.json")
    runner = "WorkloadRunner" if isinstance(result, WorkloadResult) else "PlanRunner"
    made = f"runner = {runner}({json.dumps(plan, ensure_ascii=False)})"
    run = "runner.run()" if runner == "WorkloadRunner" else f"outputs = runner.run({_inputs(result.graph)})"
    return [
        folder,
        Text("run it      ").append(f"optimize execute {shlex.quote(plan)}", style="cyan"),
        Text("in Python   ").append(f"from evaluators.litert import {runner}; {made}; {run}", style="cyan"),
    ]


def _inputs(graph: Graph) -> str:
    """Return what a runner of one model takes, in Python: an array, or several by name."""
    names = [graph.tensors[index].name for index in graph.inputs]
    if len(names) == 1:
        return "inputs"
    if len(names) > _MOST_NAMED or len(set(names)) < len(names):
        return "inputs_by_name"  # many names make no line to be copied; runner.inputs has them
    return f"{{{', '.join(f'{json.dumps(name, ensure_ascii=False)}: …' for name in names)}}}"


def crossing(graph: Graph, operators: Sequence[int]) -> str | None:
    """Return the bytes that some operators transfer to others; None where there are no others."""
    border = graph.boundary(operators)
    later = [t for t in border.outputs if t not in graph.outputs or graph.consumers.get(t)]
    return human_bytes(sum(graph.tensors[t].nbytes for t in later)) if later else None


def describe_operators(graph: Graph, operators: Sequence[int]) -> str:
    """Return ``0 to 9: 7 CONV_2D, 3 MAX_POOL_2D``; both ends are included."""
    counts = Counter(graph.operators[index].kind for index in operators)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common(3)) + (", …" if len(counts) > 3 else "")
    first, last = operators[0], operators[-1]
    where = str(first) if first == last else f"{first} to {last}"
    return f"{where}: {kinds}"
