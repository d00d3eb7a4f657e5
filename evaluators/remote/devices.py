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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evaluators.remote.credentials import ClientCredentials, is_loopback, read_pem, read_token, split_address
from evaluators.remote.wire import DEFAULT_PORT
from search_spaces.core.errors import UsageError
from search_spaces.core.yaml_file import Value, parsed

ENVIRONMENT = "PARTITION_OPTIMIZER_DEVICES"
WAIT_S = 60.0
_KEYS = ("authority", "certificate", "key", "token_file", "server_name", "wait_s")
STORAGE_PORT = 13000
SECTIONS = ("devices", "android", "storages")


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
    known = _servers(path, "storages", "server", STORAGE_PORT) if path.exists() else {}
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
    return _servers(path, "devices", "agent", DEFAULT_PORT)


def _servers(path: Path, section: str, address: str, port: int) -> Mapping[str, Device]:
    root = parsed(path, "devices")
    fields = root.fields("a file of devices", SECTIONS)
    if section not in fields:
        return {}
    entries = [(key.text("a name"), value) for key, value in fields[section].items(section)]
    what = section.removesuffix("s")
    return {name: _server(f"{what} {name!r}", name, value, path.parent, address, port) for name, value in entries}


def _server(what: str, name: str, entry: Value, folder: Path, address: str, default_port: int) -> Device:
    fields = entry.fields(f"a {what.partition(' ')[0]}", (address, *_KEYS))
    if address not in fields:
        raise entry.error(f"{what} must say where its {address} is", f"{address}: HOST:PORT")

    def at(key: str) -> Path | None:
        return folder / Path(fields[key].text(key)).expanduser() if key in fields else None

    try:
        host, port = split_address(fields[address].text(address), default_port)
        credentials = ClientCredentials(
            read_pem(at("authority"), "certificates"),
            read_pem(at("certificate"), "a certificate"),
            read_pem(at("key"), "a key"),
            read_token(at("token_file")),
            fields["server_name"].text("server_name") if "server_name" in fields else "",
        )
    except UsageError as error:
        raise entry.error(f"{what}: {error.what}", error.hint) from error
    if bool(credentials.certificate) != bool(credentials.key):
        raise entry.error(f"{what}: a certificate and its key go together")
    if not credentials.authority and not is_loopback(host):
        raise entry.error(f"{what}: another machine requires TLS", "give its authority")
    if not credentials.authority and credentials.certificate:
        raise entry.error(f"{what}: a certificate is shown over TLS alone", "give its authority")
    wait_s = fields["wait_s"].number("wait_s", most=86_400.0) if "wait_s" in fields else WAIT_S
    return Device(name, f"{host}:{port}", credentials, wait_s)
