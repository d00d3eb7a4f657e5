"""Terminal output of a campaign: two bars while it runs, the plan of a dry run, and the summary at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.console import Group
from rich.progress import TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from evaluators.registry import make_evaluator
from optimizer.campaign.table import Tables
from optimizer.report.campaign import explained, published, summary
from optimizer.report.console import make_console, progress_bar
from optimizer.report.terminal import render, table
from optimizer.study.course import final_s, foreseen
from search_spaces.core.errors import OptimizeError
from search_spaces.core.wording import did_you_mean, many, plural, seconds

if TYPE_CHECKING:
    from optimizer.campaign.file import CampaignFile
    from optimizer.campaign.run import CampaignRun
    from optimizer.campaign.studies import Planned, State
    from optimizer.study.config import StudyConfig
    from optimizer.study.course import Watcher
    from optimizer.study.folder import RunFolder
    from optimizer.study.history import History, Trial

# Rough seconds of a study before its final: profile and known plans, one trial, and all trials at most.
_REST_S, _TRIAL_S, _MOST_TRIALS_S = 15.0, 0.4, 60.0
_PREDICTED_REST_S, _PREDICTED_TRIAL_S = 2.0, 0.005
# Where there is more to choose than cuts: of a trial, and of two operators on a processor, once and in each trial.
_CHOSEN_TRIAL_S, _PAIR_S, _PAIR_OF_TRIAL_S = 0.06, 5e-5, 3e-6
_LONG_S = 120.0
_FORESEEN = ("whole on ", "layer ", "parameter count ", "one ")
"""How names of baselines begin that are known before anything is timed."""


class ProgressCampaign:
    """Shows a campaign's progress: bars for studies and trials; in a pipe, a line per study."""

    def __init__(self, studies: int, *, quiet: bool) -> None:
        self._console = make_console(stderr=True)
        self._quiet = quiet
        self._told = set[str]()
        self._progress = progress_bar(self._console, "{task.fields[unit]}", TimeElapsedColumn(), quiet=quiet)
        self._studies = self._progress.add_task("campaign", total=studies, unit="studies")
        self._trials = self._progress.add_task("", total=0, unit="trials", visible=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, planned: Planned) -> Watcher:
        """Show that a study begins; return the watcher of its progress."""
        total = planned.config.budget
        self._progress.update(self._trials, description=planned.name, completed=0, total=total, visible=True)
        return _StudyWatcher(self, planned.name)

    def making(self, text: str) -> None:
        """Show that a model is made; in a pipe, in a line."""
        self._progress.update(self._trials, description=text, completed=0, total=1, visible=True)
        if not self._quiet and not self._console.is_terminal:
            self.note(text)

    def trials(self, running: Sequence[tuple[Planned, int]]) -> None:
        """Show how many trials the studies in other processes have written."""
        total = sum(planned.config.budget for planned, _ in running)
        done = sum(min(count, planned.config.budget) for planned, count in running)
        beside = f"{len(running)} at a time"
        self._progress.update(self._trials, description=beside, completed=done, total=total, visible=True)

    def ended(self, state: State) -> None:
        """Show that a study has ended, or was finished before."""
        self._progress.advance(self._studies)
        if state.status == "failed":
            if state.error not in self._told:  # the summary lists all
                self.note(f"optimize: {state.planned.name}: {state.error}")
            self._told.add(state.error)
        elif not self._quiet and not self._console.is_terminal:
            took = f"{state.wall_s:.0f} s" if state.wall_s else "finished earlier"
            self.note(f"{state.planned.name}: {took}")

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, markup=False, soft_wrap=True)

    def measured(self, count: int, description: str) -> None:
        """Show how many plans the study of this process has tried."""
        self._progress.update(self._trials, completed=count, description=description)


class _StudyWatcher:
    """Advances the bar of trials, and prints warnings above it with the name of the study."""

    def __init__(self, campaign: ProgressCampaign, name: str) -> None:
        self._campaign = campaign
        self._name = name
        self._history: History | None = None

    def message(self, text: str) -> None:
        self._campaign.measured(self._history.measured if self._history else 0, f"{self._name}: {text}")

    def warn(self, text: str) -> None:
        self._campaign.note(f"optimize: warning: {self._name}: {text}")

    def opened(self, run: RunFolder, history: History, space_size: int) -> None:  # noqa: ARG002 - the protocol's
        self._history = history

    def trial(self, trial: Trial) -> None:
        if self._history is not None:
            self._campaign.measured(self._history.measured, f"{self._name}: {trial.origin}")


def dry_run(run: CampaignRun) -> dict[str, Any]:
    """Return a campaign's studies, their sizes and their expected seconds, without measuring."""
    studies: list[dict[str, Any]] = []
    has: list[tuple[Mapping[str, Any], Sequence[str]]] = []
    for planned, status in ((state.planned, state.status) for state in run.states):
        config = run.config(planned)
        found: dict[str, Any] = {}
        problem, seconds, exit_code = "", 0.0, 0
        try:
            found = foreseen(config)
        except OptimizeError as error:
            problem, exit_code = str(error), error.exit_code
        else:
            has.append((planned.axes, found["baselines"]))
            seconds = _expected_s(config, found)
        studies.append(
            {
                "study": planned.name,
                "operators": found.get("operators"),
                "plans": found.get("plans"),
                "budget": config.budget,
                "expected_s": 0.0 if status == "done" else seconds,
                "state": "will fail" if problem else status,
                "problem": problem,
                "exit_code": exit_code,
            }
        )
    return {
        "schema_version": 1,
        "name": run.file.content.name,
        "folder": str(run.folder),
        "studies": studies,
        "expected_s": sum(s["expected_s"] for s in studies),
        "unknown_baselines": list(_unknown_baselines(run.file, has)),
        "baselines": list(dict.fromkeys(name for _, names in has for name in names)),
    }


def _unknown_baselines(file: CampaignFile, has: Sequence[tuple[Mapping[str, Any], Sequence[str]]]) -> Iterator[str]:
    """Yield a line for each baseline of a campaign's file that no study of those that it is about has.

    Args:
        has: axes of each study, and its baselines that are known before anything is timed.
    """
    for loc, name, where in file.content.named_plans():
        there = dict.fromkeys(n for axes, names in has if where.items() <= axes.items() for n in names)
        if there and name.startswith(_FORESEEN) and name not in there:
            hint = did_you_mean(name, there, f"there are: {', '.join(there)}", quoted=True)
            yield str(file.error(loc, f"no study has the baseline {name!r}", hint))


def _expected_s(config: StudyConfig, found: Mapping[str, Any]) -> float:
    """Return about how long a study takes, from what :func:`foreseen` returned."""
    trials = min(config.budget, int(found["plans"]))
    if not make_evaluator(config.evaluator).capabilities.measures_here:
        if str(found["allow"]) == "cuts":
            return _PREDICTED_REST_S + trials * _PREDICTED_TRIAL_S
        size = int(found["operators"]) ** 2 * len(found["processors"])
        return _PREDICTED_REST_S + size * _PAIR_S + trials * (_CHOSEN_TRIAL_S + size * _PAIR_OF_TRIAL_S)
    return _REST_S + min(trials * _TRIAL_S, _MOST_TRIALS_S) + final_s(config)


def render_dry_run(document: Mapping[str, Any]) -> Group:
    """Return the table of a dry run."""
    rows = []
    for study in document["studies"]:
        sizes = [many(study[k]) if study[k] is not None else "–" for k in ("operators", "plans", "budget")]
        about = f"{study['expected_s']:.0f} s" if study["expected_s"] else "–"
        rows.append((study["study"], *sizes, about, study["state"]))
    known = 6 if any(row[-1] != "pending" for row in rows) else 5  # a new campaign has no states
    listed = table(("study", ">operators", ">plans", ">budget", ">about", "state")[:known], (r[:known] for r in rows))
    took, count = document["expected_s"], plural(len(rows), "study")
    about = seconds(took) if took < _LONG_S else f"{took / 60:.0f} minutes"
    ends = f"{count}{f', about {about} where nothing else runs' if took else ''}, into {document['folder']}"
    parts: list[Table | Text] = [listed, Text(), Text(ends)]
    problems = Counter(study["problem"] for study in document["studies"] if study["problem"])
    parts += [Text(f"{plural(n, 'study')} will fail: {problem}") for problem, n in problems.items()]
    return Group(*parts, *map(Text, document["unknown_baselines"]))


def render_summary(state: Mapping[str, Any], tables: Tables) -> Group:
    """Return what the report of a campaign says first, of the state that its folder has."""
    return render(str(state["name"]), (*explained(tables), *summary(state, tables, times=False), *published(tables)))
