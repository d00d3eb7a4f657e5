"""Terminal output of a study: progress on stderr while it runs, the answer on stdout at the end."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from evaluators.machine import problems, waits_for_disk
from evaluators.objectives import LATENCY, OBJECTIVES
from optimizer.model.ranks_text import describe_ranks
from optimizer.report.answer import (
    HOSTED,
    UNDECIDED,
    against_text,
    answer_text,
    as_latencies,
    bound_name,
    bound_text,
    called,
    decomposed_rows,
    figure_text,
    front_table,
    gain_text,
    interval_ms,
    model_of,
    outcomes_table,
    same_plan,
    slower_than,
    stages_table,
)
from optimizer.report.terminal import table, table_of, tried_text
from optimizer.study.history import WARM
from optimizer.study.result import Result
from optimizer.study.verdict import REACH
from search_spaces.core.errors import printable
from search_spaces.core.wording import many, percent, plural

if TYPE_CHECKING:
    from optimizer.study.folder import RunFolder
    from optimizer.study.history import History, Trial
    from search_spaces.core.graph import Graph
    from search_spaces.core.plan import Plan

_MOST_STAGES_SHOWN = 24
_MOST_FRONT = 16
_MOST_NAMED = 4
_VAGUE = (UNDECIDED, "about ")
_COARSE = 0.03  # a wider interval of the final gets a note
_CHANGE = 0.05  # a difference between two blocks of runs that is more than noise
_PIPE_WIDTH = 110
_NARROWEST = 40
_LABEL = 12  # width of the labels before the lines of the answer
_NUMBER = re.compile(r"\b[0-9]+\b")  # what only counts on
_EVERY_S = 10.0


class _PlainConsole(Console):
    """A console that shows control characters in names as text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments, with escape sequences of Rich only."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """Leave a pipe whose reader has ended to the command line, as of other output."""
        raise BrokenPipeError


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
        self._step, self._written_s = "", time.monotonic()

    @property
    def silent(self) -> bool:
        """Whether no step has been written for some seconds."""
        return time.monotonic() >= self._written_s + _EVERY_S

    def is_due(self, text: str) -> bool:
        """Return whether a step is to be written now."""
        step, now_s = _NUMBER.sub("", text), time.monotonic()
        due = step != self._step or self.silent
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
            which = f"plan {self._history.number(trial.plan)}" if trial.number >= 0 else f"“{trial.origin}”"
            self.warn(f"{which} failed: {trial.broke.splitlines()[0].rstrip('.')}")
        if self._verbose:
            samples = trial.measurement.latency_s if trial.measurement else None
            found = trial.failure or (interval_ms(samples, self._unit) if samples else "known")
            self._console.print(
                f"plan {self._history.number(trial.plan)}, {trial.origin}: {found}", style="dim", markup=False
            )
        elif self._steps.silent and not self._console.is_terminal and not self._quiet:
            self.message(", ".join(filter(None, [f"{self._history.measured} of {self._budget} plans", best])))


def render(result: Result) -> Group:
    """Return the answer: baselines, the best plan stage by stage, speed-up, bound, and what to do next."""
    document = as_latencies(result.to_json())
    several = result.workload is not None
    parts: list[Text | Table | _Line] = [_head(result), Text()]
    parts.append(_baselines(result))
    parts += [Text(), table_of(outcomes_table(document))] if several else []
    parts += [Text(), _front(document)] if result.front is not None else []
    if result.best is not None:
        parts += [Text(), _stages(result, result.best, document)]
        if not several and (ranks := describe_ranks(result.graph, result.best)):
            parts.append(Text(ranks))
    parts += [Text(f"{name}: {what}") for name, what in decomposed_rows(document)]
    parts += [Text(), *_conclusions(result, document), Text(), *_next(result)]
    for part in parts:
        if isinstance(part, Text):  # the terminal breaks these lines, so that commands can be copied
            part.no_wrap, part.overflow = True, "ignore"
    return Group(*parts)


def _head(result: Result) -> Text:
    """Return what was searched, and for what."""
    name, what, aim = result.graph.name, plural(len(result.graph.operators), "operator"), ""
    if result.workload is not None:
        name, what = result.workload.name, f"{plural(len(result.workload.instances), 'model')} at once"
        aim = f", for the {result.objective.title}"
    names = ", ".join(p.name for p in result.platform.processors if p.resources or not aim)
    of = "" if result.evaluator in HOSTED else f" of {result.platform.name}"
    return Text(f"{name}: {what} on {names}{of}{aim}; {tried_text(result)}")


def _baselines(result: Result) -> Table:
    intervals = (result.interval(plan) for _, plan in result.rows())
    wide = any(interval is not None and interval[0] < interval[1] for interval in intervals)
    what = f"{'predicted ' if result.predicted else ''}{result.objective.title}{' [95 %]' if wide else ''}"
    against = "" if result.verdict is None else "difference"
    shows = result.objective.scales  # otherwise a table of its own has what the figure sums
    made = table(("plan", *((what,) if shows else ()), against, ">stages"))
    names: dict[str, str] = {}
    for name, plan in result.rows():
        style = "bold" if result.verdict is not None and plan == result.verdict.best else ""
        first = names.setdefault(plan.digest, name)
        difference = _against(result, plan) if first == name else same_plan(first)
        cells = (name, *((_figure(result, plan),) if shows else ()), difference, str(len(plan.stages)))
        made.add_row(*map(Text, cells), style=style)
    return made


def _figure(result: Result, plan: Plan) -> str:
    """Return a plan's figure with its interval, or why it has none."""
    samples, interval = result.samples(plan), result.interval(plan)
    if samples is None or interval is None:
        trial = result.history.known.get(plan.digest)
        return trial.failure if trial else "not tried"
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
    return against_text(ratio, result.objective, racing=result.verdict.still_racing(plan)) if ratio is not None else ""


def _front(document: Mapping[str, Any]) -> Table:
    found = front_table(document)
    knee = next(i for i, row in enumerate(found.rows) if row[-1])
    shown = _spread(len(found.rows), knee)
    made = table_of(replace(found, rows=tuple(found.rows[i] for i in shown)))
    made.rows[shown.index(knee)].style = "bold green"
    return made


def _spread(count: int, knee: int) -> list[int]:
    """Return which of many plans to show: the ends, the knee, and others evenly between."""
    if count <= _MOST_FRONT:
        return list(range(count))
    return sorted({round(i * (count - 1) / (_MOST_FRONT - 1)) for i in range(_MOST_FRONT)} | {knee})


def _stages(result: Result, plan: Plan, document: Mapping[str, Any]) -> Table:
    samples, interval = result.samples(plan), result.interval(plan)
    joined = result.joined
    kind = "recommended plan, predicted" if result.predicted else "recommended plan"
    figure = figure_text(samples.median, interval, result.objective.shown_unit) if samples and interval else ""
    title = kind if joined is not None or not figure else f"{kind}: {figure}"
    if samples and result.objective.aggregation == "busiest" and joined is None:
        title += f", {1.0 / samples.median:.4g} results a second"
    measured = result.measurement(plan)
    overlaps = not plan.is_chain and joined is None
    events = measured.timeline.events if measured and measured.timeline and overlaps else ()
    # One run of the search: as a share of it they hold for the median latency, too.
    latency = samples is not None and bool(events) and result.objective.aggregation == "path"
    scale = samples.median / max(e.end_s for e in events) if samples and latency else 1.0
    begins_s = {e.stage: e.start_s * scale for e in sorted(events, key=lambda e: -e.start_s)}
    found = stages_table(document, title, lambda stage: model_of(stage, result.graph, joined), begins_s)
    if joined is not None:  # numbers suffice beside the name of the model
        rows = (tuple(str(c).partition(":")[0] if i == 6 else c for i, c in enumerate(row)) for row in found.rows)
        found = replace(found, rows=tuple(rows))
    if (more := len(found.rows) - _MOST_STAGES_SHOWN) > 1:
        rest = ("…", None, None, "", None, "", plural(more, "more stage"), None)
        found = replace(found, rows=(*found.rows[:_MOST_STAGES_SHOWN], rest))
    return table_of(found)


def _conclusions(result: Result, document: Mapping[str, Any]) -> list[_Line]:
    """Return labelled lines: the answer, its gain, the bound, and notes."""
    lines, verdict = [], result.verdict
    if verdict is not None:
        good = verdict.challenger == verdict.best and verdict.speedup is not None and verdict.speedup.significant
        rest = "; --json has the whole front" if result.front and len(result.front.plans) > _MOST_FRONT else ""
        lines.append(_Line("answer", answer_text(document) + rest, "bold green" if good else "bold"))
        lines.append(_Line("gain", gain_text(document)))
    if bound := bound_text(document):
        lines.append(_Line("bound", bound))
    notes = [*_evidence(result, document), *_disturbances(result)]
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


def _evidence(result: Result, document: Mapping[str, Any]) -> list[str]:
    """Return notes of the final: faster plans that break a limit, inferences after a pause, plans left out."""
    verdict = result.verdict
    if verdict is None or result.front is not None:
        return []
    found = []
    for index in verdict.final.measured:
        beyond = verdict.ratio(verdict.plans[index], verdict.best)
        if index not in verdict.eligible and beyond is not None and beyond.high < 1.0:
            plan, how = verdict.plans[index], slower_than(beyond, result.objective)
            name = called(document, plan.to_json(), result.history.number(plan))
            found.append(f"{name}: {how}, but it has too many stages or breaks a limit")
    if verdict.undecided:
        found.append(f"undecided: {verdict.undecided}")
    if not result.predicted and (rival := verdict.least_certain) is not None and rival[1] > _COARSE:
        name = called(document, rival[0].to_json(), result.history.number(rival[0]))
        found.append(f"the least certain of the plans that may be the best is {name}, within ±{percent(rival[1], 1)}")
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
    if traffic := verdict.traffic:
        found.append(
            f"the {plural(int(traffic['kernels']), 'kernel')} of an inference move {traffic['memory_mb']:.4g} MB to "
            f"and from memory, {traffic['second_level_mb']:.4g} MB between the caches, as the device counts"
        )
    if verdict.uncounted:
        found.append(f"memory traffic was not counted: {verdict.uncounted}")
    if result.proven and not result.exhausted:
        tried = plural(result.history.measured, "plan")
        found.append(f"the search ended after {tried}: the best is within --precision of the {bound_name(document)}")
    elif not result.exhausted and result.history.known.keys() <= {p.digest for p in result.baselines.values()}:
        found.append("only baselines were tried: give a larger --budget, or more --minutes, for proposed plans")
    if verdict.left_out and not result.predicted:
        plans, were = plural(verdict.left_out, "more plan"), "was" if verdict.left_out == 1 else "were"
        found.append(f"{plans} within {percent(REACH)} of the best {were} not measured again")
    return found


def _disturbances(result: Result) -> list[str]:
    """Return notes about the runtime's placements and disturbances of the machine."""
    found = [*(f"{name}: {text}" for name, text in result.placements.items()), *result.disturbances]
    verdict = result.verdict
    if verdict is not None and not result.predicted and abs(math.log(verdict.scale)) > math.log1p(_CHANGE):
        scale = verdict.scale
        what = f"{percent(scale - 1.0)} slower" if scale > 1.0 else f"{percent(1.0 / scale - 1.0)} faster"
        found.append(f"the machine ran {what} during the final comparison; earlier figures are scaled to it")
    samples = result.samples(result.best) if result.best is not None else None
    if samples is not None and (waits := waits_for_disk(samples.conditions)):
        found.append(waits)
    bad = problems(samples.conditions) if samples is not None else []
    if bad:
        first = "measurements have priority over other processes where the system allows it, applications may be slower"
        where = "" if result.evaluator in HOSTED else " there"
        found.append(f"measured while {', '.join(bad)}; {first}; optimize doctor{where} says what to do")
    return found


def _next(result: Result) -> list[Text]:
    if result.verdict is None:
        return []
    folder = Text("run folder  ").append(str(result.run_dir))
    if result.deployed is None or not any("cores" in p.options for p in result.platform.processors):
        again = shlex.join(["optimize", "execute", str(result.run_dir)])  # no files for this machine
        return [folder, Text("run it      ").append(again, style="cyan")]
    plan = str(result.run_dir / "best" / "plan.json")
    runner = "PlanRunner" if result.workload is None else "WorkloadRunner"
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
