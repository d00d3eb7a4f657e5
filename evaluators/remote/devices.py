"""Devices to measure on, and shared storages on other machines, by name: ``devices.yaml`` in the configuration folder.

::

    devices:
      pi4:
        agent: 192.168.1.20:7450
        authority: certs/ca.pem        # paths are relative to this file
        certificate: certs/laptop.pem  # or token_file: certs/pi4.token
        key: certs/laptop.key
        wait_s: 120                    # how long to wait for it while it is busy or does not answer (default 60)
      bench:
        agent: 127.0.0.1:7450          # through ssh -L; the loopback address needs no certificate
    storages:
      lab:                             # --storage grpc://lab
        server: 192.168.1.5:13000      # of optimize storage
        authority: certs/ca.pem
        token_file: certs/lab.token

``PARTITION_OPTIMIZER_DEVICES`` names another file. A loopback address may be given instead of a name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from evaluators.remote.credentials import ClientCredentials, is_loopback, read_pem, read_token, split_address
from evaluators.remote.wire import DEFAULT_PORT
from search_spaces.core.errors import UsageError
from search_spaces.core.yaml_file import Document, Part, Word, beside, read_document

ENVIRONMENT = "PARTITION_OPTIMIZER_DEVICES"
WAIT_S = 60.0
STORAGE_PORT = 13000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Device:
    """A device that an agent measures on.

    Attributes:
        name: the user's name for it.
        address: ``host:port`` of its agent.
        credentials: for its agent.
        wait_s: how long to wait for it while it is busy or does not answer.
    """

    name: str
    address: str
    credentials: ClientCredentials = field(default_factory=ClientCredentials)
    wait_s: float = WAIT_S


def devices_file() -> Path:
    """Return the path of the file of devices; it need not exist."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen:
        return Path(chosen)
    from platformdirs import user_config_path

    return user_config_path("partition-optimizer") / "devices.yaml"


def find_devices(names: str) -> tuple[Device, ...]:
    """Return the devices that ``--device`` names: one, or several that are alike, separated by commas.

    Raises:
        UsageError: a device is unknown, or the file is not valid.
    """
    found = tuple(_find(name.strip()) for name in names.split(","))
    if len({device.name for device in found}) != len(found):
        raise UsageError(f"--device {names}: names a device twice")
    return found


def _find(name: str) -> Device:
    path = devices_file()
    known = agents(path) if path.exists() else {}
    if name in known:
        return known[name]
    if ":" in name:
        host, port = split_address(name, DEFAULT_PORT)
        if is_loopback(host):
            return Device(name, f"{host}:{port}")
        raise UsageError(
            f"--device {name}: an agent on another machine requires certificates", f"describe it in {path}"
        )
    hint = f"{path} has: {', '.join(known)}" if known else f"describe it in {path}, or give HOST:PORT of this machine"
    raise UsageError(f"there is no device {name!r}", hint)


def find_storage(place: str) -> Device:
    """Return address and credentials of a shared storage.

    Args:
        place: a name under ``storages``, or ``host:port``.

    Raises:
        UsageError: it is on another machine and not in the file, or the file is not valid.
    """
    path = devices_file()
    known = _servers(path, "storages") if path.exists() else {}
    if place in known:
        return known[place]
    host, port = split_address(place, STORAGE_PORT)
    same = next((device for device in known.values() if device.address == f"{host}:{port}"), None)
    if same is not None or is_loopback(host):
        return same or Device(place, f"{host}:{port}")
    raise UsageError(
        f"--storage grpc://{place}: a storage on another machine requires TLS",
        f"describe it in {path} under storages, or reach it through ssh -L",
    )


def agents(path: Path) -> Mapping[str, Device]:
    """Return the devices of a file that have an agent.

    Raises:
        UsageError: the file is not valid; the text begins with ``file:line``.
    """
    return _servers(path, "devices")


def _servers(path: Path, section: str) -> Mapping[str, Device]:
    file = read_devices(path)
    return {name: _server(file, section, name) for name in getattr(file.content, section)}


class DevicesFile(Part):
    """The sections of ``devices.yaml``, whose entries are read by those who need them."""

    devices: dict[Word, Any] = Field(default_factory=dict)
    android: dict[Word, Any] = Field(default_factory=dict)
    storages: dict[Word, Any] = Field(default_factory=dict)


class _Server(Part):
    authority: Word | None = None
    certificate: Word | None = None
    key: Word | None = None
    token_file: Word | None = None
    server_name: Word | None = None
    wait_s: Annotated[float, Field(ge=0, le=86_400)] = WAIT_S


class _Agent(_Server):
    address: Word = Field(alias="agent")


class _Storage(_Server):
    address: Word = Field(alias="server")


def read_devices(path: Path) -> Document[DevicesFile]:
    """Read a file of devices.

    Raises:
        UsageError: the file is not valid; the text begins with ``file:line``.
    """
    return read_document(path, DevicesFile, "a file of devices")


def _server(file: Document[DevicesFile], section: str, name: str) -> Device:
    kind: type[_Agent | _Storage] = _Agent if section == "devices" else _Storage
    usual = DEFAULT_PORT if section == "devices" else STORAGE_PORT
    what = f"{section.removesuffix('s')} {name!r}"
    document = file.part((section, name), kind, what, getattr(file.content, section)[name])
    found = document.content

    def read(key: str, content: Callable[[], T]) -> T:
        try:
            return content()
        except UsageError as error:
            raise document.error((key,), f"{what}: {error.what}", error.hint) from error

    def pem(key: str, kind: str) -> bytes:
        return read(key, lambda: read_pem(at(getattr(found, key)), kind))

    def at(text: str | None) -> Path | None:
        return None if text is None else beside(file.path, text)

    host, port = read("agent" if section == "devices" else "server", lambda: split_address(found.address, usual))
    credentials = ClientCredentials(
        pem("authority", "certificates"),
        pem("certificate", "a certificate"),
        pem("key", "a key"),
        read("token_file", lambda: read_token(at(found.token_file))),
        found.server_name or "",
    )
    if bool(credentials.certificate) != bool(credentials.key):
        raise document.error((), f"{what}: a certificate and its key go together")
    if not credentials.authority and not is_loopback(host):
        raise document.error((), f"{what}: another machine requires TLS", "give its authority")
    if not credentials.authority and credentials.certificate:
        raise document.error((), f"{what}: a certificate is shown over TLS alone", "give its authority")
    return Device(name, f"{host}:{port}", credentials, found.wait_s)
