"""A lease on one of some like devices: taken, kept alive, lost, and taken again."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from evaluators.base import Capabilities
from evaluators.energy import OPTION
from evaluators.remote import wire
from evaluators.remote.connection import BusyElsewhereError, Connection, new_client
from evaluators.remote.devices import Device
from evaluators.remote.models import Sendable
from search_spaces.errors import DeviceLostError, OptimizeError, UnavailableError
from search_spaces.platform import Platform

_LOGGER = logging.getLogger("partition_optimizer")
SHORT_S = 10.0
SLACK_S = 30.0
_POLL_S = 0.5
_MOVES = 3

Found = TypeVar("Found")


class Link:
    """A connection that has a device's lease.

    Args:
        devices: that are alike, in the order of preference.
        platform: what to measure on; every device must have these processors.
        names: that processors were asked for by.

    Attributes:
        generation: counts the connections; what was loaded over an earlier one is gone.
        capabilities, powers_w: of the session on the first device.
        fingerprint, conditions: what it told last.
    """

    def __init__(self, devices: Sequence[Device], platform: Platform, names: Sequence[str]) -> None:
        self.platform = platform
        self.generation = 0
        self.capabilities = Capabilities()
        self.powers_w: dict[str, float] = {}
        self.fingerprint: dict[str, Any] = {}
        self.conditions: dict[str, Any] = {}
        self.client = new_client()
        self._devices = tuple(devices)
        self._names = list(dict.fromkeys(names))
        self._connection: Connection | None = None
        self._sent: set[str] = set()
        self._lease_s = 30.0
        self._closed = threading.Event()
        self._beat = threading.Thread(target=self._keep_lease, name="lease", daemon=True)

    def connect(self) -> None:
        """Take a lease on the first device that is free, and wait for one where none is.

        Raises:
            UnavailableError: none was in time, or one is there but cannot be used.
        """
        self._drop()
        if self._closed.is_set():
            raise UnavailableError("the session is closed", "load candidates inside the `with` block of prepare()")
        waited(self._devices, self._open)

    def _open(self, device: Device) -> None:
        connection = Connection(device)
        try:
            # Preparing takes long; whether anybody is there is found out sooner.
            version = connection.call("Describe", {}, SHORT_S).get("version")
            _check_version(device, version)
            request = {
                "client": self.client,
                "study": self.platform.name,
                "platform": wire.platform_to_json(_unpriced(self.platform)),
                "names": self._names,
            }
            answer = connection.call("Open", request, 2 * self.platform.limits.load_s + SLACK_S)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self._sent.clear()
        self.fingerprint = {"evaluator": "remote", "device": device.name, "there": answer.get("fingerprint")}
        self.conditions = _plain(answer.get("conditions"))
        self._lease_s = max(1.0, float(answer.get("lease_s", 30.0)))
        if not self.generation:
            self.capabilities = wire.capabilities_from_json(answer.get("capabilities"))
            told = _plain(answer.get("powers_w")).items()
            self.powers_w = {k: float(v) for k, v in told if isinstance(v, int | float) and 0.0 <= v < math.inf}
        self.generation += 1
        if not self._beat.is_alive():
            self._beat.start()

    def _keep_lease(self) -> None:
        while not self._closed.wait(self._lease_s / 3.0):
            connection = self._connection
            if connection is not None:
                with suppress(OptimizeError, ValueError):  # the next question will find out
                    connection.call("Renew", {"client": self.client}, self._lease_s / 3.0)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Give the lease back and end the connection."""
        self._closed.set()
        if self._connection is not None:
            with suppress(OptimizeError):
                self._connection.call("Leave", {"client": self.client}, SHORT_S)
        self._drop()

    def ask(self, method: str, data: dict[str, Any], limit_s: float, model: Sendable | None = None) -> dict[str, Any]:
        """Ask over the present connection, and send the model before, once.

        Raises:
            DeviceLostError: there is no connection any more.
            UsageError, UnavailableError: what went wrong on the device.
        """
        connection = self._connection
        if connection is None:
            raise DeviceLostError(f"device {self._devices[0].name}: the connection is lost")
        request = {**data, "client": self.client}
        try:
            if model is not None:
                request |= {"model": model.digest, "name": model.name}
                self._send(connection, model)
            answer = connection.call(method, request, limit_s)
        except DeviceLostError:
            self._drop()
            raise
        if "conditions" in answer:
            self.conditions = _plain(answer["conditions"])
        return answer

    def fetch(self, folder: Path, told: Any) -> Path:
        """Fetch a file that the device has told of; see :meth:`~evaluators.remote.connection.Connection.fetch`."""
        if self._connection is None or not isinstance(told, dict):
            raise DeviceLostError(f"device {self._devices[0].name}: the connection is lost")
        return self._connection.fetch(folder, self.client, told)

    def _send(self, connection: Connection, model: Sendable) -> None:
        if model.digest in self._sent:
            return
        announced = {"client": self.client, "model": model.digest}
        if connection.call("Has", {**announced, "nbytes": model.path.stat().st_size}, SHORT_S).get("has") is not True:
            connection.send(model.path, announced)
        self._sent.add(model.digest)

    def moved(self, ask: Callable[[], Found]) -> Found:
        """Return what a question gives that may as well be put to another device, or to the same one later.

        Raises:
            UnavailableError: no device came back in time, or they come and go.
        """
        for attempt in range(_MOVES):
            try:
                if self._connection is None:
                    self.connect()
                return ask()
            except DeviceLostError:
                self._drop()
                if attempt == _MOVES - 1:
                    raise
        raise DeviceLostError("the devices come and go")


def waited(devices: Sequence[Device], ask: Callable[[Device], Found]) -> Found:
    """Return what the first of some like devices answers that is there and free; wait for one where none is.

    Raises:
        UnavailableError: none was in time, or one is there but cannot be used.
    """
    wait_s = max(device.wait_s for device in devices)
    end_s, told = time.monotonic() + wait_s, False
    while True:
        problems: list[UnavailableError] = []
        for device in devices:
            try:
                return ask(device)
            except (DeviceLostError, BusyElsewhereError) as error:
                problems.append(error)
        if time.monotonic() >= end_s:
            hint = "start `optimize agent` there, and check that its port can be reached"
            raise UnavailableError(f"{problems[0].what}; waited for {wait_s:g} s", hint)
        if not told:
            _LOGGER.warning("%s; waiting for up to %g s", problems[0].what, wait_s)
            told = True
        time.sleep(_POLL_S)


def _check_version(device: Device, version: object) -> None:
    if version != wire.VERSION:
        raise UnavailableError(f"device {device.name} speaks version {version}", "install the same version there")


def _unpriced(platform: Platform) -> Platform:
    """Return a platform as the device knows it: what power its lanes draw was said here."""
    lanes = (replace(p, options={k: v for k, v in p.options.items() if k != OPTION}) for p in platform.processors)
    return replace(platform, processors=tuple(lanes))


def _plain(conditions: Any) -> dict[str, Any]:
    """Return conditions as they may stand in a log: what a device tells is not trusted to be small."""
    if not isinstance(conditions, dict):
        return {}
    kinds = (str, int, float, bool)
    small = {str(k)[:64]: v[:200] if isinstance(v, str) else v for k, v in list(conditions.items())[:64]}
    versions = small.get("versions")
    kept: dict[str, Any] = {k: v for k, v in small.items() if isinstance(v, kinds)}
    if isinstance(versions, dict):
        kept["versions"] = {str(k)[:64]: str(v)[:64] for k, v in list(versions.items())[:16]}
    return kept
