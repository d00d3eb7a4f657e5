"""Studies of a campaign on the workers of a Dask cluster.

A task is the command line of one study; the worker runs it in a process of its own and returns the run folder. If a
worker dies, its study starts again on another one. Studies that measure go to workers that were started with
``--resources "device=1"``, one at a time, so that none disturbs another.

Dask's workers run whatever a client sends them: whoever reaches the scheduler can run anything on them. So a cluster
belongs behind TLS (``tls://``, with the certificates in Dask's own configuration) or on one machine. A board that only
measures runs ``optimize agent`` instead.
"""

from __future__ import annotations

import io
import logging
import shlex
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from evaluators.registry import make_evaluator
from optimizer.campaign.studies import State, run_words
from optimizer.study.config import command_line
from search_spaces.core.errors import RunFolderError, UnavailableError, UsageError, needs_extra

if TYPE_CHECKING:
    from optimizer.campaign.console import ProgressCampaign
    from optimizer.campaign.run import CampaignRun

_LOGGER = logging.getLogger("partition_optimizer")
_CONNECT_S = 15.0
_RETRIES = 3
_MOST_NBYTES = 256 << 20
_MOST_FILES = 10_000
_NOT_SENT = {".tflite", ".part", ".log"}  # stage files are made again from the plan, wherever that is
DEVICE = "device"


def run_on_cluster(run: CampaignRun, waiting: Sequence[State], watcher: ProgressCampaign, address: str) -> None:
    """Run studies on the workers of a cluster, and store their run folders here.

    Raises:
        UsageError: the address is invalid, or a study measures and no worker has the resource ``device``.
        UnavailableError: Dask is not installed, or the scheduler does not answer.
        KeyboardInterrupt: it was interrupted; studies that have begun run on, and their results are lost.
    """
    client = _connect(address)
    try:
        names = {s.planned.config.evaluator for s in waiting}
        measuring = {name: make_evaluator(name).capabilities.measures_here for name in names}
        _check_resources(client, [name for name, measures in measuring.items() if measures])
        futures = {}
        for state in waiting:
            config = run.config(state.planned)
            words = shlex.split(command_line(config.model_copy(update={"out": None})))[1:]
            wants = {DEVICE: 1} if measuring[config.evaluator] else {}
            future = client.submit(study_there, words, resources=wants, retries=_RETRIES, pure=False)
            futures[future] = state
        _collect(client.loop, run, futures, watcher)
    finally:
        client.close()


def _connect(address: str) -> Any:
    parts = urlsplit(address)
    if parts.scheme not in ("tcp", "tls") or not parts.hostname or not parts.port:
        raise UsageError(f"--scheduler {address}: is not an address", "use for example tls://host:8786")
    with needs_extra("--scheduler", "cluster"):
        from distributed import Client
    if parts.scheme == "tcp" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        _LOGGER.warning("%s is not encrypted: whoever is on that network can run anything on its workers", address)
    try:
        return Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise UnavailableError(f"scheduler {address} does not answer", "start it with: dask scheduler") from error


def _check_resources(client: Any, measuring: Sequence[str]) -> None:
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    if measuring and workers and not any(DEVICE in worker["resources"] for worker in workers):
        raise UsageError(
            f"--scheduler: evaluator {measuring[0]!r} measures, but no worker has the resource {DEVICE!r}",
            f'start workers with: dask worker ADDRESS --nthreads 1 --resources "{DEVICE}=1"',
        )


def _collect(loop: Any, run: CampaignRun, futures: dict[Any, State], watcher: ProgressCampaign) -> None:
    from distributed import as_completed

    begun_s = time.monotonic()
    try:
        for future in as_completed(list(futures), loop=loop):
            state = futures[future]
            state.wall_s = time.monotonic() - begun_s
            _take(run, state, future)
            future.release()
            run.save()
            watcher.ended(state)
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _take(run: CampaignRun, state: State, future: Any) -> None:
    """Store the result of a worker."""
    if future.status != "finished":
        state.end(UnavailableError.exit_code, f"its workers died: {' '.join(str(future.exception()).split())[:300]}")
        return
    answer = future.result()
    state.wall_s = float(answer["wall_s"])
    if answer["folder"] is not None:
        unpack(answer["folder"], run.path(state.planned))
    state.end(int(answer["code"]), str(answer["error"])[:2000])


def study_there(words: Sequence[str]) -> dict[str, Any]:
    """Run a study on this worker in a process of its own; return its exit code and its run folder, packed."""
    begun_s = time.monotonic()
    with TemporaryDirectory(prefix="study-") as name:
        folder = Path(name) / "run"
        code, error = run_words([*words, "--quiet", "--out", str(folder)])
        content = pack(folder) if folder.is_dir() else None
        return {"code": code, "error": error, "folder": content, "wall_s": time.monotonic() - begun_s}


def pack(folder: Path) -> bytes:
    """Return a run folder as a zip archive, without its stage files."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink() and path.suffix not in _NOT_SENT:
                archive.write(path, path.relative_to(folder).as_posix())
    return content.getvalue()


def unpack(content: bytes, folder: Path) -> None:
    """Write a packed run folder.

    Raises:
        RunFolderError: it is damaged, too large, or holds a path outside of the folder.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if len(entries) > _MOST_FILES or sum(e.file_size for e in entries) > _MOST_NBYTES:
                raise RunFolderError(f"{folder}: the result of a worker is too large")
            for entry in entries:
                path = PurePosixPath(entry.filename)
                if path.is_absolute() or ".." in path.parts or "\\" in entry.filename or entry.is_dir():
                    raise RunFolderError(f"{folder}: the result of a worker holds a file called {entry.filename!r}")
            for entry in entries:
                target = folder / entry.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as file:
                    target.write_bytes(file.read(_MOST_NBYTES))
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as error:
        raise RunFolderError(f"{folder}: the result of a worker cannot be stored: {error}") from error
