"""Runs a campaign: an interrupted study resumes, and a finished one is not run again.

::

    runs/NAME/
    ├── campaign.yaml   the file, as it was
    ├── campaign.json   each study: digest, state, error; provenance
    ├── results.csv     a row for each plan of each study (results.parquet where the extra "parquet" is installed)
    ├── curves.csv      best latency so far against plans tried
    ├── fronts.csv      of each study with several objectives, each plan of its front
    ├── summary.csv     a row for each cell of the matrix, seeds and repetitions together
    ├── summary.json    the same with provenance, and published figures beside ours: the file to keep
    └── STUDY-DIGEST/   run folders
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluators.registry import make_evaluator
from optimizer.campaign.cluster import run_on_cluster
from optimizer.campaign.console import ProgressCampaign, dry_run, render_dry_run, render_summary
from optimizer.campaign.file import CampaignFile, read_campaign
from optimizer.campaign.models import make_models, used_model
from optimizer.campaign.studies import Planned, State, code_of, plan_studies, run_words
from optimizer.campaign.table import (
    SCHEMA_VERSION,
    STATE,
    SUMMARIES,
    DamagedStateError,
    Tables,
    gather,
    mean_excess,
    read_state,
    write_tables,
)
from optimizer.files import disk_errors, write_atomic, write_json
from optimizer.provenance import provenance
from optimizer.report.console import make_console
from optimizer.report.write import report
from optimizer.study.config import StudyConfig, command_line
from optimizer.study.course import Interrupted, run_study
from optimizer.study.folder import MANIFEST, RESULT
from search_spaces.core.allowed_code import allow
from search_spaces.core.bounded import parsed_json, read_bounded
from search_spaces.core.errors import EXIT_INTERRUPTED, OptimizeError, RunFolderError, UsageError
from search_spaces.core.wording import plural

_AT = (10, 25, 50, 100, 200)  # plans after which summary.json has the mean excess
_POLL_S = 0.2
_MOST_NBYTES = 1 << 30


@dataclass(slots=True)
class CampaignRun:
    """A campaign and its folder.

    Attributes:
        file: the campaign's file.
        folder: the campaign's folder.
        states: one for each study, in the order of the file.
        interrupted: whether Ctrl-C or SIGTERM ended it.
        begun: where and when it was begun, and which other machines resumed it.
    """

    file: CampaignFile
    folder: Path
    states: list[State]
    command: Sequence[str] = ()
    interrupted: bool = False
    begun: Mapping[str, Any] = field(default_factory=provenance)

    @property
    def exit_code(self) -> int:
        """0 where every study is done, else that of the first that failed."""
        return next((s.exit_code for s in self.states if s.status == "failed"), 0)

    def save(self) -> None:
        """Write the campaign's state.

        Raises:
            RunFolderError: it cannot be written.
        """
        campaign = self.file.content
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
        model = used_model(self.folder, planned) or planned.config.model
        return planned.config.model_copy(update={"out": self.path(planned), "study": planned.folder, "model": model})


@contextmanager
def opened(
    file: CampaignFile, studies: Sequence[Planned], folder: Path, command: Sequence[str]
) -> Iterator[CampaignRun]:
    """Open a campaign's folder, or make it, and lock it against other processes.

    Raises:
        RunFolderError: it cannot be written, is in use, or holds something else.
    """
    with disk_errors(folder, "give --out a folder that you can write to"):
        folder.mkdir(parents=True, exist_ok=True)
        check_folder(folder, file.content.name)
        lock = (folder / ".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(f"{folder}: another process runs this campaign", "wait for it") from None
        missing = not all(is_finished(folder / planned.folder) for planned in studies)
        begun = _begun(_earlier(folder, file.content.name), resumes=missing)
        run = CampaignRun(file, folder, [State(p) for p in studies], command, begun=begun)
        write_atomic(folder / "campaign.yaml", read_bounded(file.path))
        run.save()
        yield run


def run_campaign(run: CampaignRun, watcher: ProgressCampaign, jobs: int = 1, scheduler: str = "") -> None:
    """Run what is not finished; a study that fails does not end the others.

    Args:
        jobs: how many studies at a time, where no evaluator measures this machine.
        scheduler: address of a Dask cluster that runs the studies; "" for this machine.

    Raises:
        UsageError: several at a time, but an evaluator measures this machine, or there are fewer boards.
        RunFolderError: the state cannot be written.
    """
    if jobs > 1 and not scheduler:
        _check_jobs(run, jobs)
    waiting = []
    for state in run.states:
        if is_finished(run.path(state.planned)):
            state.status = "done"
            watcher.ended(state)
        else:
            waiting.append(state)
    run.save()
    try:
        waiting = make_models(run, waiting, watcher)
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
            if state.exit_code == EXIT_INTERRUPTED:  # its process got our Ctrl-C
                state.error, state.exit_code = "", 0
            if state.status != "done" and not state.exit_code:
                state.status = status_of(run.path(state.planned))
    run.save()


def status_of(folder: Path) -> str:
    """Return whether the study of a run folder is ``done``, has ``begun``, or is ``pending``."""
    return "done" if is_finished(folder) else "begun" if _records(folder) else "pending"


def is_finished(folder: Path) -> bool:
    """Return whether a run folder holds a completed study."""
    try:
        result = parsed_json(read_bounded(folder / RESULT, _MOST_NBYTES))
        return bool(result["complete"]) and (folder / MANIFEST).is_file()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _one(run: CampaignRun, state: State, watcher: ProgressCampaign) -> None:
    """Run a study in this process."""
    begin_s = time.monotonic()
    config = run.config(state.planned)
    try:
        run_study(config, watcher.started(state.planned), shlex.split(command_line(config)))
        state.status = "done"
    except Interrupted:
        raise KeyboardInterrupt from None
    except OptimizeError as error:
        state.end(error.exit_code, str(error))
    except Exception as error:  # noqa: BLE001 - a defect in one study must not end the others
        state.end(1, f"a defect of the program: {type(error).__name__}: {' '.join(str(error).split())}")
    state.wall_s = time.monotonic() - begin_s


def _beside_each_other(run: CampaignRun, waiting: list[State], watcher: ProgressCampaign, jobs: int) -> None:
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with ThreadPoolExecutor(jobs) as pool:
            futures = {pool.submit(_elsewhere, run, state, processes): state for state in waiting}
            pending = set(futures)
            try:
                while pending:
                    done, pending = wait(pending, _POLL_S, FIRST_COMPLETED)
                    running = [s.planned for s in run.states if s.planned.name in processes]
                    watcher.trials([(planned, _records(run.path(planned))) for planned in running])
                    for future in done:
                        future.result()
                        watcher.ended(futures[future])
                        run.save()
            except BaseException:
                for future in futures:
                    future.cancel()
                for process in list(processes.values()):
                    process.terminate()
                raise
    finally:
        for process in list(processes.values()):
            process.wait()


def _elsewhere(run: CampaignRun, state: State, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Run a study in a process of its own."""
    begin_s, planned = time.monotonic(), state.planned
    words = shlex.split(command_line(run.config(planned)))[1:]
    code, error = run_words([*words, "--quiet"], lambda process: processes.update({planned.name: process}))
    del processes[planned.name]
    state.wall_s = time.monotonic() - begin_s
    state.end(code, error)


def _records(folder: Path) -> int:
    try:
        return read_bounded(folder / "trials.jsonl", _MOST_NBYTES).count(b'"kind":"trial"')
    except OSError:
        return 0


def _check_jobs(run: CampaignRun, jobs: int) -> None:
    for name in {state.planned.config.evaluator for state in run.states}:
        if make_evaluator(name).capabilities.measures_here:
            raise UsageError(
                f"--jobs: evaluator {name!r} measures this machine, so studies run one after another",
                "leave --jobs out, or take an evaluator that predicts",
            )
    device = run.file.content.settings.device or ""
    boards = len(device.split(","))
    if device and jobs > boards:
        raise UsageError(f"--jobs {jobs}: device {device!r} names {plural(boards, 'board')}", f"give --jobs {boards}")


def check_folder(folder: Path, name: str) -> None:
    """Raise unless a folder may hold the campaign of this name: it is missing, empty, or holds that campaign.

    Raises:
        RunFolderError: the folder is of something else, or a newer version wrote it.
    """
    with disk_errors(folder, "give --out another folder"):
        if folder.exists() and any(folder.iterdir()) and not any((folder / file).exists() for file in (STATE, ".lock")):
            what = "holds a study" if (folder / MANIFEST).exists() else "is not empty, and is not a campaign"
            raise RunFolderError(f"{folder}: {what}", "give another --out")
    _earlier(folder, name)


def _earlier(folder: Path, name: str) -> Mapping[str, Any]:
    """Return the state that a folder has, where it has one; a damaged one is replaced.

    Raises:
        RunFolderError: the folder is that of another campaign, or a newer version wrote it.
    """
    if not (folder / STATE).exists():
        return {}
    try:
        there = read_state(folder, ("name",))
    except DamagedStateError:
        return {}
    if (found := str(there["name"])) != name:
        raise RunFolderError(f"{folder} holds another campaign, {found!r}", "give another --out")
    return there


def _begun(earlier: Mapping[str, Any], *, resumes: bool) -> dict[str, Any]:
    """Return where and when a campaign was begun, and which other machines resumed it."""
    here = provenance()
    resumed = earlier.get("resumed_on", [])
    like = all(isinstance(earlier.get(name), type(value)) for name, value in here.items())
    if not like or not isinstance(resumed, list) or not all(isinstance(each, dict) for each in resumed):
        return here
    here_too = {name: here[name] for name in ("created_utc", "machine")}
    known = [earlier["machine"], *(each.get("machine") for each in resumed)]
    more = [here_too] if resumes and here["machine"] not in known else []
    return {**{name: earlier.get(name) for name in here}, "resumed_on": [*resumed, *more]}


def _summary_json(saved: Mapping[str, Any], tables: Tables, path: Path) -> dict[str, Any]:
    """Return the document ``summary.json``: provenance and results of a campaign."""
    kept = ("schema_version", "name", "description", "created_utc", "product", "python", "packages", "machine")
    return {
        **{name: saved.get(name) for name in kept},
        **({"resumed_on": saved["resumed_on"]} if saved.get("resumed_on") else {}),
        "command": shlex.join(["optimize", "run", str(path)]),
        "measured_on": tables.measured_on,
        "failed": {s["name"]: s["error"] for s in saved["studies"] if s["status"] == "failed"},
        **{name: getattr(tables, name) for name in SUMMARIES if name != "indicators"},
        "mean_excess": {
            sampler: {n: curve[min(n, len(curve)) - 1] for n in _AT if n <= len(curve)}
            for sampler, curve in mean_excess(tables.curves).items()
        },
    }


def run_file(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run a campaign from its file, write tables and report, print the summary, and return the exit code.

    Args:
        options: of ``optimize run``.

    Raises:
        UsageError: the file or an option is wrong.
        RunFolderError: the campaign's folder cannot be used.
    """
    file = read_campaign(options.file)
    if options.allow_code:
        allow(*code_of(file.content))
    studies = plan_studies(file)
    folder = options.out or Path("runs", file.content.name)
    if options.dry_run:
        check_folder(folder, file.content.name)
        planned = CampaignRun(file, folder, [State(p) for p in studies], command)
        for state in planned.states:
            state.status = status_of(planned.path(state.planned))
        document = dry_run(planned)
        if options.json:
            print(json.dumps(document, indent=2))
        else:
            make_console().print(render_dry_run(document), crop=False)
        return next((s["exit_code"] for s in document["studies"] if s["exit_code"]), 0)
    with opened(file, studies, folder, command) as run:
        with ProgressCampaign(len(studies), quiet=options.quiet) as watcher:
            run_campaign(run, watcher, options.jobs, options.scheduler)
        saved = read_state(folder)
        tables = gather(folder, saved)
        write_tables(tables, folder)
        notes = [
            f"baseline {name!r} is in no study; optimize report of one lists what it has" for name in tables.missing
        ]
        notes += [
            str(file.error(("expect", i), f"{row['name']!r} has no figure of ours: {row['missing']}"))
            for i, row in enumerate(tables.expected)
            if row["missing"]
        ]
        write_json(folder / "summary.json", _summary_json(saved, tables, options.file))
        page = report(folder)
    if options.json:
        rows = {name: getattr(tables, name) for name in ("results", *SUMMARIES)}
        print(json.dumps({**saved, **rows}, indent=2))
    else:
        make_console().print(render_summary(saved, tables), crop=False)
        print(page)
    for note in notes:
        print(f"optimize: {note}", file=sys.stderr)
    if run.interrupted:
        print(f"optimize: interrupted; what was tried is kept; resume with: {shlex.join(command)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return run.exit_code
