"""``optimize storage``: stands before a storage, so that many workers need few connections to it.

The protocol is Optuna's own; it knows neither TLS nor tokens, so this listens on the loopback address alone, and is
reached from elsewhere through ``ssh -L``. It knows no heartbeats either: workers sign by an attribute of their trial,
and this server carries the signs into Optuna's tables, where it fails the trials of those that fell silent.
"""

from __future__ import annotations

import argparse
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from search_spaces.errors import UnavailableError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

HOST = "127.0.0.1"
_THREADS = 16


def storage(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Do ``optimize storage``."""
    add = parser.add_argument
    add("url", metavar="URL", help="sqlite:///FILE or postgresql://USER@HOST/DATABASE")
    add("--port", metavar="N", default="13000", help="of this machine alone (default 13000)")
    add("--heartbeat", metavar="S", default="10", help="seconds between two signs of life of a worker (default 10)")
    add("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    if not options.port.isdecimal() or not 1 <= int(options.port) <= 65535:
        parser.error(f"--port {options.port}: must be a whole number from 1 to 65535")
    if not options.heartbeat.isdecimal() or not 1 <= int(options.heartbeat) <= 3600:
        parser.error(f"--heartbeat {options.heartbeat}: must be a whole number from 1 to 3600")
    if options.url.startswith("grpc://"):
        parser.error(f"{options.url}: is a server like this one; give what it stands before")
    from optimizer.shared_storage import open_storage

    heartbeat_s = int(options.heartbeat)
    backend = open_storage(options.url, heartbeat_s)
    server = _server(backend, int(options.port))
    ended = threading.Event()
    keeper = threading.Thread(target=_keep, args=(backend, heartbeat_s, ended), daemon=True)
    server.start()
    keeper.start()
    print(f"optimize: grpc://{HOST}:{options.port}, until Ctrl-C", file=sys.stderr, flush=True)
    try:
        server.wait_for_termination()
    finally:
        ended.set()
        server.stop(1.0).wait()
        keeper.join()
    return 0


def _server(backend: BaseStorage, port: int) -> Any:
    try:
        import grpc
        from optuna.storages._grpc.auto_generated import api_pb2_grpc
        from optuna.storages._grpc.servicer import OptunaStorageProxyService
    except ImportError as error:
        raise UnavailableError("this needs the extra 'grpc'", "pip install 'partition-optimizer[grpc]'") from error
    limit = ("grpc.max_receive_message_length", 64 << 20)
    server = grpc.server(ThreadPoolExecutor(_THREADS), options=[limit, ("grpc.so_reuseport", 0)])
    add: Any = api_pb2_grpc.add_StorageServiceServicer_to_server
    add(OptunaStorageProxyService(backend), server)
    try:
        bound = server.add_insecure_port(f"{HOST}:{port}")
    except RuntimeError:
        bound = 0
    if not bound:
        raise UnavailableError(f"{HOST}:{port} cannot be listened on", "give another --port")
    return server


def _keep(backend: BaseStorage, heartbeat_s: int, ended: threading.Event) -> None:
    """Carry the workers' signs of life into Optuna's tables, and fail the trials of the silent."""
    signs: dict[int, dict[int, object]] = {}
    while not ended.wait(heartbeat_s / 2.0):
        with suppress(Exception):  # the database may be away; the next round comes soon
            for study in backend.get_all_studies():
                number = study._study_id  # noqa: SLF001 - Optuna's own name
                carry_signs(backend, study.study_name, number, signs.setdefault(number, {}))


def carry_signs(backend: BaseStorage, name: str, study_id: int, signs: dict[int, object]) -> None:
    """Record a heartbeat for each running trial whose sign has changed, and fail those that are stale.

    Args:
        signs: the last sign of each trial; brought up to date.
    """
    from optuna.storages import fail_stale_trials
    from optuna.storages._heartbeat import BaseHeartbeat
    from optuna.study import Study
    from optuna.trial import TrialState

    from optimizer.shared import BEAT

    if not isinstance(backend, BaseHeartbeat):
        return
    running = backend.get_all_trials(study_id, deepcopy=False, states=(TrialState.RUNNING,))
    for trial in running:
        sign = trial.user_attrs.get(BEAT)
        if sign is not None and signs.get(trial._trial_id) != sign:  # noqa: SLF001
            signs[trial._trial_id] = sign  # noqa: SLF001
            backend.record_heartbeat(trial._trial_id)  # noqa: SLF001
    for gone in signs.keys() - {trial._trial_id for trial in running}:  # noqa: SLF001
        del signs[gone]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fail_stale_trials(Study(study_name=name, storage=backend))
