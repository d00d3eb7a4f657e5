"""What a trial costs beside its measurement: storages and Dask's scheduler at 1, 2, 4 and 8 workers.

``python -m tests.benchmarks.storage_scale`` measures for about five minutes, which nobody should disturb, writes
``experiments/results/storage_scale.json``, and puts the table of it into ``experiments/scale.md``; ``--table`` only
does the latter. A worker claims plans, writes down a record of the usual size and takes up what the others found, with
nothing measured in between.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from optimizer.provenance import provenance
from optimizer.shared.storage import close_storage, open_storage
from optimizer.shared.study import SharedStudy
from optimizer.study.log import TrialLog
from tests.support.postgres import Postgres

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "experiments" / "results" / "storage_scale.json"
PAGE = ROOT / "experiments" / "scale.md"
COMMAND = "python -m tests.benchmarks.storage_scale"
BEGIN, END = "<!-- storage_scale -->\n", "<!-- end -->\n"
WORKERS = (1, 2, 4, 8)
TRIALS, MANY = 160, 1000
RECORD = {"values": [1.0], "measurement": {"latency_s": [0.001234567] * 200}, "plan": ["stage"] * 100}


def work(url: str, name: str, number: int, trials: int) -> None:
    """Be a worker: wait for the others, then share trials with them; prints the seconds of each of one's own."""
    storage = open_storage(url)
    study = SharedStudy(storage, name, f"w{number}", 10)
    known: set[str] = set()
    taken: list[float] = []
    study.fact(f"ready {number}", lambda: True)
    study.fact("begin", lambda: time.time() + 3.0)
    time.sleep(max(0.0, study.fact("begin", float) - time.time()))
    begin_s = time.perf_counter()
    plan = number
    while True:
        at_s = time.perf_counter()
        known |= {str(data["digest"]) for _, data in study.look()}
        if len(known) >= trials:
            break
        while str(plan) in known or str(plan) in study.pending:
            plan += 1
        if plan >= trials:
            plan = 0
            if len(known) + len(study.pending) >= trials:
                time.sleep(0.01)
                continue
        claim = study.claim(str(plan), "trial", {}, {}, trials)
        if claim is not None:
            study.finish(claim, {**RECORD, "digest": str(plan)})
            taken.append(time.perf_counter() - at_s)
    wall_s = time.perf_counter() - begin_s
    study.close()
    close_storage(storage)
    sys.stdout.write(json.dumps({"wall_s": wall_s, "taken_s": taken}))


def shared(url: str, workers: int, trials: int) -> dict[str, float]:
    """Return what a trial costs some workers that share a storage."""
    name = f"scale-{workers}-{time.time_ns()}"
    command = [sys.executable, "-m", "tests.benchmarks.storage_scale", "--work", url, name]
    started = [
        subprocess.Popen([*command, str(n), str(trials)], stdout=subprocess.PIPE, cwd=ROOT) for n in range(workers)
    ]
    reported = [json.loads(process.communicate(timeout=600)[0]) for process in started]
    return _row(workers, trials, max(t["wall_s"] for t in reported), [s for t in reported for s in t["taken_s"]])


def _row(workers: int, trials: int, wall_s: float, taken_s: list[float]) -> dict[str, float]:
    ordered = sorted(taken_s)
    return {
        "workers": workers,
        "trials_per_s": round(trials / wall_s, 1),
        "median_ms": round(1e3 * statistics.median(ordered), 2),
        "p95_ms": round(1e3 * ordered[int(0.95 * (len(ordered) - 1))], 2),
    }


def own_log(folder: Path, trials: int) -> dict[str, float]:
    """Return what a trial costs in our own log, which one process writes."""
    taken = []
    log, _ = TrialLog.open(folder / "trials.jsonl")
    with log:
        for _ in range(trials):
            at_s = time.perf_counter()
            log.append("trial", RECORD)
            taken.append(time.perf_counter() - at_s)
    return _row(1, trials, sum(taken), taken)


@contextmanager
def proxy(url: str) -> Iterator[str]:
    """A server that stands before a storage."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "optimizer.cli", "storage", url, "--listen", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT) as process:
        if process.stderr is None or b"grpc://" not in process.stderr.readline():
            raise RuntimeError("the server did not start")
        try:
            yield f"grpc://127.0.0.1:{port}"
        finally:
            process.terminate()


def scheduler(workers: int, tasks: int = 500) -> dict[str, float]:
    """Return what a task costs Dask's scheduler, from submission to result, one after another in each worker."""
    from distributed import Client, LocalCluster

    options: dict[str, Any] = {"processes": True, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(n_workers=workers, **options) as cluster, Client(cluster) as client:
        client.gather([client.submit(int, n, pure=False) for n in range(50)])
        at_s = time.perf_counter()
        client.gather([client.submit(int, n, pure=False) for n in range(tasks)])
        wall_s = time.perf_counter() - at_s
        single = []
        for n in range(50):
            at_s = time.perf_counter()
            client.submit(int, n, pure=False).result()
            single.append(time.perf_counter() - at_s)
    return _row(workers, tasks, wall_s, single)


def measure(trials: int, many: int) -> dict[str, Any]:
    """Return what a trial costs, by where it is written down; a row for each number of workers."""
    found: dict[str, Any] = {}
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL's server is somebody else
        found["trial log"] = [own_log(folder, trials)]
        found["SQLite"] = [shared(f"sqlite:///{folder / 'scale.db'}", n, trials // 2) for n in WORKERS]
        server = Postgres(folder / "postgres")
        stack.callback(server.close)
        found["PostgreSQL"] = [shared(server.url, n, trials) for n in WORKERS]
        with proxy(server.url) as url:
            found["optimize storage before PostgreSQL"] = [shared(url, n, trials) for n in WORKERS]
        found[f"PostgreSQL, {many:,} trials"] = [shared(server.url, 4, many)]
    found["Dask's scheduler"] = [scheduler(n) for n in WORKERS]
    return found


def table(document: dict[str, Any]) -> str:
    """Return the part of the page that the numbers make."""
    heads = [f"{n} worker{'s' * (n > 1)}" for n in WORKERS]
    lines = [
        f"By `{COMMAND}` on {document['cores']} cores, {document['created_utc'][:10]};",
        "milliseconds of a trial, median (95th percentile), and trials a second of all workers together:",
        "",
        f"| written down in | {' | '.join(heads)} |",
        f"|---|{'---|' * len(WORKERS)}",
    ]
    for name, rows in document["found"].items():
        by = {row["workers"]: row for row in rows}
        cells = [_cell(by[n]) if n in by else "–" for n in WORKERS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, float]) -> str:
    return f"{_short(row['median_ms'])} ({_short(row['p95_ms'])}), {_short(row['trials_per_s'])} /s"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100.0 else f"{value:.0f}"


def put_into_page(document: dict[str, Any]) -> None:
    """Replace the table of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{table(document)}{END}{after}")


def main() -> None:
    """Measure all, write it down and into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs=4, metavar=("URL", "NAME", "NUMBER", "TRIALS"), help="be a worker")
    parser.add_argument("--trials", type=int, default=TRIALS, help=f"of all workers together (default {TRIALS})")
    parser.add_argument("--table", action="store_true", help="only put what was measured into the page")
    parser.add_argument("--out", type=Path, help="where to write instead; the page stays as it is")
    options = parser.parse_args()
    if options.work:
        url, name, number, trials = options.work
        work(url, name, int(number), int(trials))
        return
    if not options.table:
        begin_s = time.monotonic()
        many = MANY if options.trials == TRIALS else options.trials
        document = {"command": COMMAND, **provenance(), "cores": os.cpu_count(), "trials": options.trials}
        document["found"] = measure(options.trials, many)
        document["wall_s"] = round(time.monotonic() - begin_s)
        (options.out or RESULT).write_text(json.dumps(document, indent=2) + "\n")
    if options.out is None:
        put_into_page(json.loads(RESULT.read_text()))


if __name__ == "__main__":
    main()
