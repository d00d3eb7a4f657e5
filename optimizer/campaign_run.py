"""Running a campaign: study after study, each resumable, none run again once it is finished.

::

    runs/NAME/
    ├── campaign.yaml   the file, as it was
    ├── campaign.json   each study: digest, state, error; who ran it
    ├── results.csv     a row for each plan of each study (results.parquet where the extra "parquet" is installed)
    ├── curves.csv      best latency so far against plans tried
    ├── summary.csv     a row for each cell of the matrix, seeds and repetitions together
    ├── summary.json    the same with who made it, and published figures beside ours: the file to keep
    └── STUDY-DIGEST/   run folders
"""

from __future__ import annotations

import fcntl
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from evaluators.own_process import own_process
from evaluators.registry import make_evaluator
from optimizer.campaign import Planned
from optimizer.campaign_cluster import run_on_cluster
from optimizer.campaign_file import CampaignFile
from optimizer.config import StudyConfig, command_line
from optimizer.files import disk_errors, write_atomic, write_json
from optimizer.provenance import provenance
from optimizer.study import run_study
from optimizer.study_ends import Interrupted, Watcher
from search_spaces.bounded import parsed_json, read_bounded
from search_spaces.errors import EXIT_INTERRUPTED, OptimizeError, RunFolderError, UnstableError, UsageError

SCHEMA_VERSION = 1
STATE = "campaign.json"
_POLL_S = 0.2
_MOST_NBYTES = 1 << 30


@dataclass(slots=True)
class State:
    """What became of a study.

    Attributes:
        status: ``pending``, ``done`` or ``failed``.
        error: why it failed, or "".
        exit_code: that the study alone would have ended with.
        wall_s: seconds that it took in the end; 0 where it was finished before.
    """

    planned: Planned
    status: str = "pending"
    error: str = ""
    exit_code: int = 0
    wall_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain values."""
        planned = self.planned
        return {
            "name": planned.name,
            "folder": planned.folder,
            "digest": planned.digest,
            "repetition": planned.repetition,
            "axes": planned.axes,
            "status": self.status,
            "error": self.error,
            "exit_code": self.exit_code,
            "wall_s": self.wall_s,
        }


class CampaignWatcher(Protocol):
    """Who is told how a campaign goes; see :mod:`optimizer.campaign_console`."""

    def started(self, planned: Planned) -> Watcher:
        """Tell that a study begins; what is returned is told how it goes."""
        ...

    def trials(self, running: Sequence[tuple[Planned, int]]) -> None:
        """Tell how many trials the studies in other processes have written."""
        ...

    def ended(self, state: State) -> None:
        """Tell that a study has ended, or was finished before."""
        ...


@dataclass(slots=True)
class CampaignRun:
    """A campaign and its folder.

    Attributes:
        file: what is asked.
        folder: of the campaign.
        states: of each study, in the order of the file.
        interrupted: whether a person ended it early.
    """

    file: CampaignFile
    folder: Path
    states: list[State]
    command: Sequence[str] = ()
    interrupted: bool = False
    begun: dict[str, Any] = field(default_factory=provenance)

    @property
    def exit_code(self) -> int:
        """0 where every study is done, else that of the first that failed."""
        return next((s.exit_code for s in self.states if s.status == "failed"), 0)

    def save(self) -> None:
        """Write the campaign's state.

        Raises:
            RunFolderError: it cannot be written.
        """
        campaign = self.file.campaign
        document = {
            "schema_version": SCHEMA_VERSION,
            "name": campaign.name,
            "description": campaign.description,
            "file": str(self.file.path),
            "command": list(self.command),
            **self.begun,
            "campaign": campaign.model_dump(mode="json", exclude_unset=True),
            "studies": [state.to_json() for state in self.states],
        }
        write_json(self.folder / STATE, document)

    def path(self, planned: Planned) -> Path:
        """Return the run folder of a study."""
        return self.folder / planned.folder

    def config(self, planned: Planned) -> StudyConfig:
        """Return the settings of a study, with its folder."""
        return planned.config.model_copy(update={"out": self.path(planned), "study": planned.folder})


@contextmanager
def opened(
    file: CampaignFile, studies: Sequence[Planned], folder: Path, command: Sequence[str]
) -> Iterator[CampaignRun]:
    """Open a campaign's folder, or make it; nobody else runs it meanwhile.

    Raises:
        RunFolderError: it cannot be written, is in use, or holds something else.
    """
    with disk_errors(folder, "give --out a folder that you can write to"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / STATE).exists() and not (folder / ".lock").exists():
            raise RunFolderError(f"{folder}: is not empty, and is not a campaign", "give another --out")
        lock = (folder / ".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(f"{folder}: another process runs this campaign", "wait for it") from None
        _check_state(folder, file.campaign.name)
        run = CampaignRun(file, folder, [State(p) for p in studies], command)
        write_atomic(folder / "campaign.yaml", read_bounded(file.path))
        run.save()
        yield run


def run_campaign(run: CampaignRun, watcher: CampaignWatcher, jobs: int = 1, scheduler: str = "") -> None:
    """Run what is not finished; a study that fails does not end the others.

    Args:
        jobs: how many studies at a time, where no evaluator measures this machine.
        scheduler: address of a Dask cluster that runs the studies; "" for this machine.

    Raises:
        UsageError: several at a time, but an evaluator measures this machine.
        RunFolderError: the state cannot be written.
    """
    if jobs > 1 and not scheduler:
        _check_jobs(run)
    waiting = []
    for state in run.states:
        if is_finished(run.path(state.planned)):
            state.status = "done"
            watcher.ended(state)
        else:
            waiting.append(state)
    run.save()
    try:
        if scheduler:
            run_on_cluster(run, waiting, watcher, scheduler)
        elif jobs > 1:
            _beside_each_other(run, waiting, watcher, jobs)
        else:
            for state in waiting:
                _one(run, state, watcher)
                run.save()
                watcher.ended(state)
    except KeyboardInterrupt:
        run.interrupted = True
        for state in run.states:
            if state.exit_code == EXIT_INTERRUPTED:  # with us, in a process of its own
                state.status, state.error, state.exit_code = "pending", "", 0
    run.save()


def is_finished(folder: Path) -> bool:
    """Tell whether a run folder holds a study that has its verdict."""
    try:
        result = parsed_json(read_bounded(folder / "result.json", _MOST_NBYTES))
        return bool(result["complete"]) and (folder / "manifest.json").is_file()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _one(run: CampaignRun, state: State, watcher: CampaignWatcher) -> None:
    """Run a study in this process."""
    begin_s = time.monotonic()
    config = run.config(state.planned)
    try:
        run_study(config, watcher.started(state.planned), shlex.split(command_line(config)))
        state.status = "done"
    except Interrupted:
        raise KeyboardInterrupt from None
    except OptimizeError as error:
        state.status, state.error, state.exit_code = "failed", str(error), error.exit_code
    except Exception as error:  # noqa: BLE001 - a defect that one study shows must not cost the others
        state.status, state.exit_code = "failed", 1
        state.error = f"a defect of ours: {type(error).__name__}: {' '.join(str(error).split())}"
    state.wall_s = time.monotonic() - begin_s


def _beside_each_other(run: CampaignRun, waiting: list[State], watcher: CampaignWatcher, jobs: int) -> None:
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with ThreadPoolExecutor(jobs) as pool:
            futures = {pool.submit(_elsewhere, run, state, processes): state for state in waiting}
            try:
                _follow(run, futures, processes, watcher)
            except BaseException:
                for future in futures:
                    future.cancel()
                for process in list(processes.values()):
                    process.terminate()
                raise
    finally:
        for process in processes.values():
            process.wait()


def _follow(
    run: CampaignRun, futures: dict[Future[None], State], processes: dict[str, Any], watcher: CampaignWatcher
) -> None:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, _POLL_S, FIRST_COMPLETED)
        watcher.trials([(s.planned, _records(run.path(s.planned))) for s in run.states if s.planned.name in processes])
        for future in done:
            future.result()
            watcher.ended(futures[future])
            run.save()


def _elsewhere(run: CampaignRun, state: State, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Run a study in a process of its own."""
    begin_s, planned = time.monotonic(), state.planned
    words = command_line(run.config(planned))
    command = own_process("optimizer.cli", *shlex.split(words)[1:], "--json", "--quiet")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    processes[planned.name] = process
    _, errors = process.communicate()
    del processes[planned.name]
    state.wall_s = time.monotonic() - begin_s
    if process.returncode in {0, UnstableError.exit_code}:  # undecided: the study has its best known plan
        state.status = "done"
        return
    lines = errors.decode(errors="replace").strip().splitlines()
    ended = process.returncode in {EXIT_INTERRUPTED, -signal.SIGINT, -signal.SIGTERM}
    state.status, state.exit_code = "failed", EXIT_INTERRUPTED if ended else max(process.returncode, 1)
    state.error = lines[-1].removeprefix("optimize: ") if lines else f"ended with {process.returncode}"


def _records(folder: Path) -> int:
    try:
        return max(0, read_bounded(folder / "trials.jsonl", _MOST_NBYTES).count(b"\n") - 2)
    except OSError:
        return 0


def _check_jobs(run: CampaignRun) -> None:
    for name in {state.planned.config.evaluator for state in run.states}:
        if make_evaluator(name).capabilities.measures_here:
            raise UsageError(
                f"--jobs: evaluator {name!r} measures this machine, so studies run one after another",
                "leave --jobs out, or take an evaluator that predicts",
            )


def _check_state(folder: Path, name: str) -> None:
    """Raise where the folder is that of another campaign, or a newer version wrote it; a damaged state is made anew."""
    file = folder / STATE
    if not file.exists():
        return
    try:
        state = parsed_json(read_bounded(file))
        version, there = int(state["schema_version"]), str(state["name"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    if version > SCHEMA_VERSION:
        raise RunFolderError(
            f"{file}: schema_version is {version}, and this version reads up to {SCHEMA_VERSION}", "update the program"
        )
    if there != name:
        raise RunFolderError(f"{folder} holds another campaign, {there!r}", "give another --out")
