"""The fork server: it has loaded one runtime's library, so that a new worker process starts in milliseconds.

Started by :mod:`evaluators.litert.lanes` with one end of a socket pair, and the runtime's name. It serves two
operations: ``lane`` (fork a lane on the socket that comes along, pinned to cores, with environment variables of its
own) and ``reap`` (how a dead lane ended).
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from evaluators.litert import lane, wire
from evaluators.litert.adapters import vulkan_loader
from evaluators.litert.capi import Runtime
from evaluators.litert.interpreters import Interpreters
from evaluators.litert.openvino import OpenVino
from evaluators.litert.runtimes import LITERT, OPENVINO, TFLITE

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _become_lane(
    channel_fd: int, log_fd: int, start: dict[str, Any], make: Callable[[dict[str, Any]], lane.Lane]
) -> None:
    _die_with_parent()
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    # Pin before anything is compiled: thread pools inherit the affinity they are made under.
    os.sched_setaffinity(0, start["cores"])
    os.environ.update(start["environment"])
    with socket.socket(fileno=channel_fd) as channel:
        if start["environment"]:
            # A driver that brings a loader of its own needs it before the accelerator looks for one.
            vulkan_loader(start["environment"].get("VK_DRIVER_FILES", ""))
        lane.serve(channel, make(start))


def _litert() -> Callable[[dict[str, Any]], lane.Lane]:
    runtime = Runtime()
    return lambda start: lane.litert_lane(runtime, start["accelerators"], start["dispatch_folder"], start["cores"])


def _tflite_runtime() -> Callable[[dict[str, Any]], lane.Lane]:
    engine = Interpreters("tflite_runtime.interpreter")
    engine.load()  # before the fork, which the lanes then need not do
    return lambda start: lane.Lane({TFLITE: engine}, cores=start["cores"])


def _openvino() -> Callable[[dict[str, Any]], lane.Lane]:
    engine = OpenVino()
    return lambda start: lane.Lane({OPENVINO: engine}, cores=start["cores"])


_MAKERS: dict[str, Callable[[], Callable[[dict[str, Any]], lane.Lane]]] = {
    LITERT: _litert,
    TFLITE: _tflite_runtime,
    OPENVINO: _openvino,
}


def main() -> None:
    """Serve until the parent closes its end, as the system does when it dies.

    The lanes die with this process. This process must not die with the thread that started it, which may be a worker
    of a server that outlives it.
    """
    # The person's Ctrl-C is for the parent, which then ends the lanes in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    make = _MAKERS[sys.argv[2]]()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        while True:
            try:
                head, _, fds = wire.receive(control)
            except (EOFError, ConnectionError):
                return
            if head["op"] == "reap":
                _, status = os.waitpid(head["pid"], 0)
                wire.send(control, {"status": os.waitstatus_to_exitcode(status)})
                continue
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    control.close()
                    _become_lane(fds[0], fds[1], head["start"], make)
                    code = 0
                except BaseException:  # noqa: BLE001 - a defect of ours; its trace goes to the lane's log
                    traceback.print_exc()
                finally:
                    os._exit(code)
            for fd in fds:
                os.close(fd)
            wire.send(control, {"pid": pid})
