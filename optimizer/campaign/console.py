"""Terminal output of a campaign: two bars while it runs, the plan of a dry run, and the summary at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.console import Group
from rich.progress import TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from evaluators.registry import make_evaluator
from optimizer.campaign.table import (
    AGAINST,
    Tables,
    against_baseline,
    cell_text,
    explained_text,
    front_text,
    fronts_of,
    gain_text,
    group_text,
    how_known,
    makespan_text,
    named,
    rate_text,
    shown_axes,
    vague_text,
)
from optimizer.report.console import make_console, progress_bar
from optimizer.report.terminal import table
from optimizer.study.course import foreseen
from search_spaces.core.errors import OptimizeError
from search_spaces.core.wording import many, percent, seconds

if TYPE_CHECKING:
    from optimizer.campaign.run import CampaignRun
    from optimizer.campaign.studies import Planned, State
    from optimizer.study.config import StudyConfig
    from optimizer.study.course import Watcher
    from optimizer.study.folder import RunFolder
    from optimizer.study.history import History, Trial

# Rough seconds of a study: profile and known plans, one trial, all trials at most, and the final comparison.
_REST_S, _TRIAL_S, _MOST_TRIALS_S = 15.0, 0.4, 60.0
_FINAL_OF_TRIAL_S, _LEAST_FINAL_S, _MOST_FINAL_S = 0.5, 5.0, 20.0
_PREDICTED_REST_S, _PREDICTED_TRIAL_S = 2.0, 0.005
_PAIR_S, _PAIR_OF_TRIAL_S = 1e-4, 5e-6  # of two operators on a processor, where there is more to choose than cuts
_LONG_S = 120.0
_FORESEEN = ("whole on ", "layer ", "parameter count ", "one ")
"""How names of baselines begin that are known before anything is timed."""


class ProgressCampaign:
    """Shows a campaign's progress: bars for studies and trials; in a pipe, a line per study."""

    def __init__(self, studies: int, *, quiet: bool) -> None:
        self._console = make_console(stderr=True)
        self._quiet = quiet
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
            self.note(f"optimize: {state.planned.name}: {state.error}")
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
    names: dict[str, None] = {}
    for planned, status in ((state.planned, state.status) for state in run.states):
        config = run.config(planned)
        found: dict[str, Any] = {}
        problem, seconds, exit_code = "", 0.0, 0
        try:
            found = foreseen(config)
        except OptimizeError as error:
            problem, exit_code = str(error), error.exit_code
        else:
            names |= dict.fromkeys(found["baselines"])
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
    document = {"schema_version": 1, "name": run.file.campaign.name, "folder": str(run.folder), "studies": studies}
    unknown = [name for name in run.file.campaign.baselines if name.startswith(_FORESEEN) and name not in names]
    return document | {
        "expected_s": sum(s["expected_s"] for s in studies),
        "unknown_baselines": unknown if names else [],
        "baselines": list(names),
    }


def _expected_s(config: StudyConfig, found: Mapping[str, Any]) -> float:
    """Return about how long a study takes, from what :func:`foreseen` returned."""
    trials = min(config.budget, int(found["plans"]))
    if not make_evaluator(config.evaluator).capabilities.measures_here:
        cuts_alone = str(found["allow"]) == "cuts"
        size = 0 if cuts_alone else int(found["operators"]) ** 2 * len(found["processors"])
        return _PREDICTED_REST_S + size * _PAIR_S + trials * (_PREDICTED_TRIAL_S + size * _PAIR_OF_TRIAL_S)
    final_s = min(_MOST_FINAL_S, max(_LEAST_FINAL_S, _FINAL_OF_TRIAL_S * config.budget))
    return _REST_S + min(trials * _TRIAL_S, _MOST_TRIALS_S) + final_s


def render_dry_run(document: Mapping[str, Any]) -> Group:
    """Return the table of a dry run."""
    rows = []
    for study in document["studies"]:
        sizes = [many(study[k]) if study[k] is not None else "–" for k in ("operators", "plans", "budget")]
        about = f"{study['expected_s']:.0f} s" if study["expected_s"] else "–"
        rows.append((study["study"], *sizes, about, study["state"]))
    listed = table(("study", ">operators", ">plans", ">budget", ">about", "state"), rows)
    for column in listed.columns:
        column.overflow = "fold"
    took, count = document["expected_s"], _studies(len(rows))
    about = seconds(took) if took < _LONG_S else f"{took / 60:.0f} minutes"
    ends = f"{count}{f', about {about} where nothing else runs' if took else ''}, into {document['folder']}"
    parts: list[Table | Text] = [listed, Text(), Text(ends)]
    problems = Counter(study["problem"] for study in document["studies"] if study["problem"])
    parts += [Text(f"{_studies(n)} will fail: {problem}") for problem, n in problems.items()]
    if unknown := document["unknown_baselines"]:
        there = ", ".join(document["baselines"])
        parts.append(Text(f"no study has the baseline {', '.join(map(repr, unknown))}; there are: {there}"))
    return Group(*parts)


def _studies(count: int) -> str:
    return f"{many(count)} {'study' if count == 1 else 'studies'}"


def render_summary(run: CampaignRun, tables: Tables) -> Group:
    """Return the tables of a campaign's results."""
    axes = shown_axes(tables.summary)
    units = {row["unit"] for row in tables.summary} or {"ms"}
    one = next(iter(units)) if len(units) == 1 else ""
    some = len({row["predicted"] for row in tables.summary}) > 1
    rows = []
    for row in tables.summary:
        best = "–" if row["best"] is None else f"{row['best']:.4g}" if one else f"{row['best']:.4g} {row['unit']}"
        best += " (predicted)" if some and row["predicted"] else ""
        rows.append((cell_text(row, axes), str(row["studies"]), best, against_baseline(row) or "–"))
    predicted = how_known(tables)
    compared = any(row["ratio"] is not None for row in tables.summary)
    heads = (">studies", f">{predicted}best, {one}" if one else f">{predicted}best", *([AGAINST] if compared else []))
    parts: list[Table | Text] = [table(("study", *heads), [row[: 1 + len(heads)] for row in rows])]
    parts += [Text(f"{study}: {front_text(rows)}") for study, rows in fronts_of(tables)]
    for row in tables.gains:
        which = ", ".join(named(row[axis]) for axis in axes if axis != "model")
        parts.append(Text(f"{which}: {gain_text(row)}" if which else gain_text(row)))
    parts += [Text(rate_text(row, axes)) for row in tables.rates]
    parts += [Text(text)] if (text := makespan_text(tables.results)) else []
    if tables.explained:
        left_out = ("90 % of errors below, with work", "with memory accesses too")
        heads = ("models", ">R² with work alone", ">with memory accesses too", *(f">{each}" for each in left_out))
        parts += [Text(), Text(explained_text(tables.explained)), table(heads, map(_explained, tables.explained))]
    if tables.expected:
        heads = ("published", ">paper", ">ours", ">least to most", ">ours / paper", "")
        parts += [Text(), table(heads, map(_expected, tables.expected))]
    parts += [Text(text)] if (text := vague_text(tables.results)) else []
    done, failed, begun = (sum(s.status == status for s in run.states) for status in ("done", "failed", "begun"))
    rest = f"{f', {failed} failed' if failed else ''}{f', {begun} begun: its trials are kept' if begun == 1 else ''}"
    rest += f", {begun} begun: their trials are kept" if begun > 1 else ""
    parts += [Text(), Text(f"{done} of {len(run.states)} studies are done{rest}")]
    return Group(*parts)


def _expected(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["ours"] is None:
        return row["name"], f"{row['paper']:.4g}", "–", "–", "–", "not measured"
    within = f"{'' if row['within'] else 'not '}within {percent(row['tolerance'])}"
    ends = f"{row['ours_low']:.4g} to {row['ours_high']:.4g}" if row["studies"] > 1 else ""
    remark = f"{within}{'' if row['in_final'] else '; not in the final'}"
    return row["name"], f"{row['paper']:.4g}", f"{row['ours']:.4g}", ends, f"{row['ratio']:.3f}", remark


def _explained(row: dict[str, Any]) -> tuple[str, ...]:
    errors = [row.get(f"{name}_error_p90") for name in ("flops", "flops_and_memory")]
    left_out = ("–" if error is None else percent(error) for error in errors)
    return group_text(row), f"{row['flops']:.4f}", f"{row['flops_and_memory']:.4f}", *left_out
