"""A study whose worker processes are killed at random moments; ``python -m tests.faults.worker_kills KILLS SEED``."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from optimizer.study.log import read_log
from tests.support.commands import SEARCHED

ROOT = Path(__file__).parents[2]
DOCUMENTED = {0, 2, 3, 4, 5}


@dataclass(slots=True)
class Seen:
    """What became of the study.

    Attributes:
        kills: worker processes that were killed.
        starts: how often the study was begun or resumed.
        codes: exit codes, with how often they came.
        lost: records that were in the log once and were not later.
        damaged: whether the log was damaged at the end.
        failed, measured: trials of each kind at the end.
        lines: the most lines that a start wrote to stderr.
    """

    kills: int = 0
    starts: int = 0
    codes: dict[int, int] = field(default_factory=dict)
    lost: int = 0
    damaged: bool = False
    failed: int = 0
    measured: int = 0
    lines: int = 0


def workers_of(process: int) -> list[int]:
    """Return the processes below a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [process]
    while waiting:
        below = parents.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def run(folder: Path, kills: int, seed: int, budget: int = 200) -> Seen:
    """Run a study to its end, and kill so many of its worker processes meanwhile."""
    chance, seen = random.Random(seed), Seen()
    command = [sys.executable, "-m", "optimizer.cli", "--model", "squeezenet1_1@0.25/64", "--budget", str(budget)]
    command += ["--processors", "cpu0,cpu1", "--max-stages", "3", "-q", "--out", str(folder)]
    known: set[str] = set()
    while True:
        seen.starts += 1
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT) as study:
            while study.poll() is None:
                time.sleep(chance.uniform(0.05, 0.8))
                below = workers_of(study.pid)
                if seen.kills < kills and below:
                    with suppress(ProcessLookupError):
                        os.kill(chance.choice(below), signal.SIGKILL)
                        seen.kills += 1
            _, err = study.communicate()
        code = study.returncode
        seen.codes[code] = seen.codes.get(code, 0) + 1
        seen.lines = max(seen.lines, len(err.splitlines()))
        if code not in DOCUMENTED or "Traceback" in err:
            raise RuntimeError(f"exit code {code}: {err}")
        if (folder / "trials.jsonl").exists():
            contents = read_log(folder / "trials.jsonl")
            now = {json.dumps([r.n, r.kind, r.data]) for r in contents.records}
            seen.lost += len(known - now)
            known = now
            seen.damaged = bool(contents.damage)
        if code in SEARCHED or seen.starts > 3 * kills:
            break
    trials = [r.data for r in contents.records if r.kind == "trial"]
    seen.failed = sum(bool(t["failure"]) for t in trials)
    seen.measured = sum(t["measurement"] is not None for t in trials)
    return seen


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        sys.stdout.write(
            json.dumps(asdict(run(Path(name) / "run", int(sys.argv[1]), int(sys.argv[2]))), indent=2) + "\n"
        )
