"""An adb server with a phone behind it, as far as we speak to one: the real wire formats, a folder for its files.

What runs "on the phone" is a handful of commands; ``benchmark_model`` reads the stage file as the runtime would and
writes a profile by LiteRT's own protobuf definitions, with times by a law that a test can follow.
"""

from __future__ import annotations

import hashlib
import shlex
import socket
import socketserver
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ai_edge_litert.profiling_info_pb2 import BenchmarkProfilingData

from evaluators.remote.devices import ENVIRONMENT
from search_spaces.core.errors import ModelError
from search_spaces.models.litert import read_model

SERIAL = "8A1X0ABCD"
SPEED = {"cpu": 1e9, "gpu": 4e9}  # bytes of outputs in a second


class PhoneServer(socketserver.ThreadingTCPServer):
    """An adb server with one phone.

    Attributes:
        present: whether the phone is plugged in; without it the server says so.
        hangs: commands that never end.
        commands: that were run, in order.
        pushed: files that were sent, in order.
        tampers: whether a byte is changed in what is sent.
    """

    allow_reuse_address = True
    daemon_threads = False  # closing the server waits for its threads: none outlives its test

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Keep a defect of this double for the end of its test; that a client went away in the middle is none."""
        error = sys.exception()
        if error is not None and not isinstance(error, ConnectionError):
            self.defects.append(error)

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Client)
        self.folder = folder
        self.present = True
        self.hangs: set[str] = set()
        self.commands: list[list[str]] = []
        self.pushed: list[str] = []
        self.tampers = False
        self.ended = threading.Event()
        self.defects: list[BaseException] = []

    def file(self, there: str) -> Path:
        """Return where a file of the phone lies here."""
        return self.folder / there.lstrip("/")

    def run(self, words: list[str]) -> tuple[int, str, str]:
        """Run a command of the phone."""
        self.commands.append(words)
        if words[0] == "taskset":
            words = words[2:]
        name, *rest = words
        if name in self.hangs or Path(name).name in self.hangs:
            self.ended.wait(30.0)
            raise ConnectionAbortedError("nobody waits for a command that hangs")
        if name == "mkdir":
            self.file(rest[-1]).mkdir(parents=True, exist_ok=True)
        elif name == "mv":
            self.file(rest[0]).replace(self.file(rest[1]))
        elif name == "rm":
            self.file(rest[-1]).unlink(missing_ok=True)
        elif name == "chmod":
            self.file(rest[1]).chmod(int(rest[0], 8))
        elif name == "sha256sum":
            if not self.file(rest[0]).is_file():
                return 1, "", f"sha256sum: {rest[0]}: No such file or directory"
            return 0, f"{hashlib.sha256(self.file(rest[0]).read_bytes()).hexdigest()}  {rest[0]}\n", ""
        elif name == "getprop":
            return 0, {"ro.product.model": "Double 8", "ro.build.fingerprint": "double/8:15"}[rest[0]] + "\n", ""
        elif name == "dumpsys":
            return 0, "Current Battery Service state:\n  level: 80\n  temperature: 315\n", ""
        elif name == "cat":
            return 0, "1804800\n", ""
        elif name == "sh":
            done = subprocess.run(
                ["sh", str(self.file(rest[0])), *rest[1:]], capture_output=True, text=True, check=False
            )
            return done.returncode, done.stdout, done.stderr
        elif self.file(name).is_file():
            return self._benchmark(rest)
        else:
            return 127, "", f"/system/bin/sh: {name}: inaccessible or not found"
        return 0, "", ""

    def _benchmark(self, flags: list[str]) -> tuple[int, str, str]:
        given = dict(flag[2:].split("=", 1) for flag in flags)
        try:
            graph = read_model(self.file(given["graph"]))
        except ModelError as error:
            return 1, "", f"ERROR: {error}"
        speed = SPEED["gpu" if given.get("use_gpu") == "true" else "cpu"]
        data = BenchmarkProfilingData(model_name=given["graph"])
        main: Any = data.runtime_profile.subgraph_profiles.add(subgraph_name="main", subgraph_index=0)
        count = int(given["num_runs"])
        for order, operator in enumerate(graph.operators):
            taken_us = max(1, round(1e6 * sum(graph.tensors[t].nbytes for t in operator.outputs) / speed))
            node = main.per_op_profiles.add(node_type=operator.kind, name=f"{operator.kind}:{order}", run_order=order)
            node.times_called = 1
            stat = node.inference_microseconds
            stat.first, stat.last, stat.avg, stat.min, stat.max = (taken_us,) * 5
            stat.sum, stat.count = taken_us * count, count
        self.file(given["op_profiling_output_file"]).write_bytes(data.SerializeToString())
        return 0, "STARTING!\n", ""


class _Client(socketserver.BaseRequestHandler):
    server: PhoneServer
    request: socket.socket

    def handle(self) -> None:
        self.request.settimeout(30.0)
        try:
            transport = self._asked()
            if not transport.startswith("host:transport:"):
                self._fail(f"unknown host service '{transport}'")
                return
            if not self.server.present or transport.rpartition(":")[2] != SERIAL:
                self._fail(f"device '{transport.rpartition(':')[2]}' not found")
                return
            self.request.sendall(b"OKAY")
            service = self._asked()
            self.request.sendall(b"OKAY")
            if service == "sync:":
                self._sync()
            elif service.startswith("shell,v2,raw:"):
                self._shell(shlex.split(service.partition("raw:")[2]))
        except (ConnectionError, EOFError, TimeoutError):
            return

    def _asked(self) -> str:
        return self._exactly(int(self._exactly(4), 16)).decode()

    def _fail(self, reason: str) -> None:
        self.request.sendall(b"FAIL" + f"{len(reason):04x}{reason}".encode())

    def _exactly(self, nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes:
            piece = self.request.recv(nbytes - len(found))
            if not piece:
                raise EOFError
            found += piece
        return found

    def _shell(self, words: list[str]) -> None:
        code, out, errors = self.server.run(words)
        for kind, text in ((1, out), (2, errors)):
            content = text.encode()
            for first in range(0, len(content), 7):  # packets end anywhere
                piece = content[first : first + 7]
                self.request.sendall(struct.pack("<BI", kind, len(piece)) + piece)
        self.request.sendall(struct.pack("<BIB", 3, 1, code))

    def _sync(self) -> None:
        kind, nbytes = self._exactly(4), struct.unpack("<I", self._exactly(4))[0]
        name = self._exactly(nbytes).decode()
        if kind == b"RECV":
            path = self.server.file(name)
            if not path.is_file():
                reason = b"open failed: No such file or directory"
                self.request.sendall(b"FAIL" + struct.pack("<I", len(reason)) + reason)
                return
            content = path.read_bytes()
            for first in range(0, len(content), 1 << 16):
                piece = content[first : first + (1 << 16)]
                self.request.sendall(b"DATA" + struct.pack("<I", len(piece)) + piece)
            self.request.sendall(b"DONE" + struct.pack("<I", 0))
            return
        there, _, mode = name.rpartition(",")
        content = b""
        while (kind := self._exactly(4)) == b"DATA":
            nbytes = struct.unpack("<I", self._exactly(4))[0]
            if nbytes > 1 << 16:
                raise ConnectionError("a piece of more than 64 KiB")
            content += self._exactly(nbytes)
        self._exactly(4)
        if self.server.tampers:
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.server.pushed.append(there)
        self.server.file(there).write_bytes(content)
        self.server.file(there).chmod(int(mode) & 0o777)
        self.request.sendall(b"OKAY" + struct.pack("<I", 0))


@contextmanager
def phone_server(folder: Path) -> Iterator[PhoneServer]:
    """Serve until the end of the block."""
    folder.mkdir()
    with PhoneServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
    assert not server.defects, server.defects


FARM = """
android:
  pixel:
    serial: {serial}
    server: 127.0.0.1:{port}
    benchmark_model: benchmark_model
    processors:
      - {{name: big, kind: cpu, mask: f0, flags: [--num_threads=4]}}
      - {{name: gpu, kind: gpu, flags: [--use_gpu=true]}}
    transfer: {{bandwidth_bytes_per_s: 1.0e+9, latency_s: 1.0e-4}}
"""


@contextmanager
def phone_in_farm(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[PhoneServer]:
    """A phone that the farm file of this user names."""
    with phone_server(folder / "phone") as server:
        (folder / "benchmark_model").write_bytes(b"a program for another processor")
        farm = folder / "devices.yaml"
        farm.write_text(FARM.format(serial=SERIAL, port=server.server_address[1]))
        patch.setenv(ENVIRONMENT, str(farm))
        yield server
