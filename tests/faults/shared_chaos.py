"""Workers that share a study, some of which are killed, and the server with them: what must hold in the end.

As a program: ``python -m tests.faults.shared_chaos WORKERS TRIALS`` prints what was seen, with a real PostgreSQL.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from optuna.storages import BaseStorage

from evaluators.testing import SyntheticEvaluator
from optimizer.shared.storage import close_storage, open_storage, patiently
from search_spaces.core.plan import Plan
from search_spaces.models import load
from search_spaces.spaces.chain import ChainSpace

ROOT = Path(__file__).parents[2]
MODEL = "squeezenet1_1@0.25/64"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a storage held in the end.

    Attributes:
        finished: plans with a measurement.
        twice: plans that have two.
        unfinished: trials whose state nobody set.
        given_up: claims of the dead, and of who came second.
        optimum: whether the fastest plan is the fastest of all that were to be tried.
        killed, outages: workers and servers that were killed.
        wall_s: from the first worker's start to the last one's end.
    """

    finished: int
    twice: int
    unfinished: int
    given_up: int
    optimum: bool
    killed: int
    outages: int
    wall_s: float


def worker(url: str, folder: Path, number: int, options: list[str]) -> subprocess.Popen[bytes]:
    """Start a worker; its messages go to a file."""
    command = [sys.executable, "-m", "optimizer.cli", *options, "--study", "chaos", "--storage", url]
    command += ["--heartbeat", "1", "--out", str(folder / f"worker-{number}"), "-q", "--json"]
    with (folder / f"worker-{number}.err").open("wb") as errors:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, cwd=ROOT)


def run(
    url: str,
    folder: Path,
    workers: int,
    trials: int,
    *,
    kills: int = 0,
    outages: int = 0,
    outage: Callable[[], None] = lambda: None,
    seed: int = 0,
) -> Seen:
    """Have some workers measure so many plans, kill some of them, and return what is there in the end."""
    rng, storage = random.Random(seed), open_storage(url, 1)
    begin = ["--model", MODEL, "--budget", str(trials), "--evaluator", "synthetic", "--sampler", "brute-force"]
    begun_s = time.monotonic()
    alive = [worker(url, folder, 0, [*begin, "--max-stages", "3"])]
    number, killed, out = workers, 0, 0
    try:
        _begun(storage, alive[0])
        alive += [worker(url, folder, n, []) for n in range(1, workers)]
        while any(process.poll() is None for process in alive):
            done = _finished(storage)
            if killed < kills and done > trials * (killed + 1) // (kills + 1):
                victim = rng.randrange(len(alive))
                alive[victim].send_signal(rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
                alive[victim].wait()
                alive[victim] = worker(url, folder, number, [])
                number, killed = number + 1, killed + 1
            if out < outages and done > trials * (2 * out + 1) // (2 * outages):
                outage()
                out += 1
            time.sleep(0.1)
        problems = [p.returncode for p in alive if p.returncode]
        assert not problems, [path.read_text()[-500:] for path in sorted(folder.glob("*.err")) if path.stat().st_size]
        return _seen(storage, trials, killed, out, time.monotonic() - begun_s)
    finally:
        for process in alive:
            process.kill()
            process.wait()
        close_storage(storage)


def _begun(storage: BaseStorage, first: subprocess.Popen[bytes]) -> None:
    while first.poll() is None:
        if _finished(storage) > 0:
            return
        time.sleep(0.2)


def _finished(storage: BaseStorage) -> int:
    def count() -> int:
        try:
            study = storage.get_study_id_from_name("chaos")
        except KeyError:
            return 0
        return sum(t.state.is_finished() for t in storage.get_all_trials(study, deepcopy=False))

    return patiently(count, "the storage")


def _seen(storage: BaseStorage, trials: int, killed: int, out: int, wall_s: float) -> Seen:
    found = storage.get_all_trials(storage.get_study_id_from_name("chaos"), deepcopy=False)
    whole = [t for t in found if "record" in t.user_attrs and t.user_attrs["kind"] == "trial"]
    times = Counter(t.user_attrs["plan"] for t in whole)
    records = [json.loads(t.user_attrs["record"]) for t in whole]
    graph, device = load(MODEL), SyntheticEvaluator()
    best = min((r for r in records if r["values"] is not None), key=lambda r: r["values"][0])
    tried = {r["digest"]: device.true_latency_s(graph, Plan.from_json(r["plan"])) for r in records}
    ranks = sorted(tried.values())
    space = ChainSpace(graph, device.platform(), 3)
    assert trials <= space.cardinality()
    return Seen(
        finished=len(times),
        twice=sum(count > 1 for count in times.values()),
        unfinished=sum(not t.state.is_finished() for t in found),
        given_up=sum("record" not in t.user_attrs for t in found),
        optimum=tried[best["digest"]] <= 1.01 * ranks[0],
        killed=killed,
        outages=out,
        wall_s=round(wall_s, 1),
    )


def main() -> None:
    """Run with a server of our own, which is killed three times, and twelve kills of workers."""
    from tests.support.postgres import Postgres

    workers, trials = int(sys.argv[1]), int(sys.argv[2])
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)  # the server is somebody else
        server = Postgres(Path(name) / "postgres")

        def outage() -> None:
            server.kill()
            time.sleep(2.0)
            server.start()

        try:
            seen = run(server.url, Path(name), workers, trials, kills=12, outages=3, outage=outage)
        finally:
            server.close()
    sys.stdout.write(
        json.dumps({"workers": workers, "trials": trials, "cores": os.cpu_count(), **asdict(seen)}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
