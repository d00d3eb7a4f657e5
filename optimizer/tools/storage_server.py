"""``optimize storage``: a server in front of a storage, so that many workers need few connections to it.

The protocol is Optuna's own, over the agent's transport (:func:`evaluators.remote.server.listen`): beyond the loopback
address there is TLS, and clients show a token or a certificate. It has no heartbeats: workers change an attribute of
their trial, and this server records a heartbeat in Optuna's tables, and fails the trials of workers that fell silent.
"""

from __future__ import annotations

import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from search_spaces.core.errors import needs_extra

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

    from evaluators.remote.credentials import ServerCredentials
    from evaluators.remote.server import Served

_THREADS = 16
MOST_NBYTES = 32 << 20
"""Of one request: twice the largest record of a log (:mod:`optimizer.study.log`)."""
MOST_CALLS_PER_S = 1000.0
"""Of all workers together; eight workers on two cores make 330."""


def serve_storage(url: str, heartbeat_s: int, host: str, port: int, credentials: ServerCredentials) -> None:
    """Serve a shared storage until an interrupt.

    Raises:
        UnavailableError: an extra is missing, or the storage cannot be opened.
    """
    from evaluators.remote.credentials import grpc_module
    from optimizer.shared.storage import open_storage

    grpc = grpc_module("shared storages by grpc://", "grpc")
    backend = open_storage(url, heartbeat_s)
    server = _server(grpc, backend, host, port, credentials)
    ended = threading.Event()
    keeper = threading.Thread(target=_keep, args=(backend, heartbeat_s, ended), daemon=True)
    keeper.start()
    print(f"optimize: grpc://{server.address}, until Ctrl-C", file=sys.stderr, flush=True)
    try:
        server.wait()
    finally:
        ended.set()
        server.close()
        keeper.join()


def _server(grpc: Any, backend: BaseStorage, host: str, port: int, credentials: ServerCredentials) -> Served:
    from evaluators.remote.server import listen

    with needs_extra("this", "grpc"):
        from optuna.storages._grpc.auto_generated import api_pb2_grpc
        from optuna.storages._grpc.servicer import OptunaStorageProxyService
    add: Any = api_pb2_grpc.add_StorageServiceServicer_to_server
    limits = (("grpc.max_receive_message_length", MOST_NBYTES),)
    service = OptunaStorageProxyService(backend)
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="storage")
    return listen(grpc, host, port, credentials, lambda server: add(service, server), threads, limits, MOST_CALLS_PER_S)


def _keep(backend: BaseStorage, heartbeat_s: int, ended: threading.Event) -> None:
    """Record the workers' heartbeats in Optuna's tables, and fail the trials of silent workers."""
    signs: dict[int, dict[int, object]] = {}
    while not ended.wait(heartbeat_s / 2.0):
        with suppress(Exception):  # the database may not answer; the next round comes soon
            for study in backend.get_all_studies():
                number = study._study_id  # noqa: SLF001 - Optuna's own name
                carry_signs(backend, study.study_name, number, signs.setdefault(number, {}))


def carry_signs(backend: BaseStorage, name: str, study_id: int, signs: dict[int, object]) -> None:
    """Record a heartbeat for each running trial whose attribute has changed, and fail those that are stale.

    Args:
        signs: the last value of each trial's attribute, by trial id; updated.
    """
    from optuna.storages import fail_stale_trials
    from optuna.storages._heartbeat import BaseHeartbeat
    from optuna.study import Study
    from optuna.trial import TrialState

    from optimizer.shared.study import BEAT

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
    with warnings.catch_warnings(action="ignore"):
        fail_stale_trials(Study(study_name=name, storage=backend))
