"""The watcher of a study's progress, and the early end of a study."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from evaluators.base import Agreement
from optimizer.model.baselines import Baseline
from optimizer.study.folder import RESULT, RunFolder, write_json
from optimizer.study.front import Front
from optimizer.study.history import History, Trial
from optimizer.study.result import Result
from optimizer.study.verdict import Verdict
from search_spaces.core.errors import OptimizeError

_KINDS = ("trial", "baseline", "verdict")  # a verdict covers the trials before it, and no later one


class Watcher(Protocol):
    """Watches a study's progress, as :mod:`optimizer.report.console` does."""

    def message(self, text: str) -> None:
        """Report the current step."""
        ...

    def warn(self, text: str) -> None:
        """Report a warning, which is always shown."""
        ...

    def opened(self, run: RunFolder, history: History, space_size: int) -> None:
        """Report that the run folder is open and what it held."""
        ...

    def trial(self, trial: Trial) -> None:
        """Report a finished trial."""
        ...


class Interrupted(Exception):  # noqa: N818 - it is no error
    """The person ended a study early; everything measured is in the run folder.

    Attributes:
        result: the result so far, or None where nothing was measured.
        resume_command: resumes the study.
    """

    def __init__(self, result: Result | None, resume_command: str) -> None:
        super().__init__(resume_command)
        self.result = result
        self.resume_command = resume_command


class Underway(Protocol):
    """A study whose run folder is open.

    Attributes:
        run: its folder, open.
        own: plans of ``--compare-with``.
        restored: how many plans the log knew when the run folder was opened.
    """

    run: RunFolder
    history: History
    own: tuple[Baseline, ...]
    restored: int

    def result(self, verdict: Verdict | None, deployed: Agreement | None) -> Result:
        """Return the result so far."""
        ...


def kept_verdict(study: Underway) -> Verdict | None:
    """Return the verdict that the log holds; None where it is undecided, or lacks plans that were measured since."""
    last = next((r for r in reversed(study.run.contents.records) if r.kind in _KINDS), None)
    if last is None or last.kind != "verdict" or len(study.history.known) != study.restored:
        return None
    found = Verdict.from_json(last.data)
    known = study.history.known
    given = [b.plan for b in study.own if b.plan.digest in known and known[b.plan.digest].measurement is not None]
    return None if found.undecided or any(plan not in found.plans for plan in given) else found


def kept_front(run: RunFolder) -> Front | None:
    """Return the front of several objectives that the log holds with its verdict.

    Raises:
        RunFolderError: it is damaged.
    """
    last = next((r for r in reversed(run.contents.records) if r.kind == "verdict"), None)
    data: Any = last.data.get("front") if last is not None else None
    return None if data is None else Front.from_json(data)


def tell_of_damage(run: RunFolder, watcher: Watcher) -> None:
    """Report damage of the run folder's log, and what has changed since the study began."""
    for damage in run.contents.damage:
        watcher.warn(f"trial log: {damage}")
    if run.contents.original is not None:
        watcher.warn(f"trial log: the damaged file is kept as {run.contents.original}")
    for change in run.changes:
        watcher.warn(change)


@contextmanager
def kept_at_the_end(study: Underway) -> Iterator[None]:
    """Save the result so far if a study ends early; one that was finished before keeps its result.

    Raises:
        Interrupted: the person pressed Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        result = study.result(None, None) if study.history.known else None
        with suppress(OptimizeError):
            if result is not None and kept_verdict(study) is None:
                write_json(study.run.path / RESULT, result.to_json())
        raise Interrupted(result, study.run.resume_command) from None
