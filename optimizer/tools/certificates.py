"""Certificates for agents and their clients, made by OpenSSL's own program."""

from __future__ import annotations

import ipaddress
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from search_spaces.core.errors import UnavailableError, UsageError

_DAYS = "825"  # longest validity of a leaf that browsers and libraries accept
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}")


def make_certificates(folder: Path, hosts: Sequence[str]) -> list[Path]:
    """Make an authority, a certificate for an agent and one for a client; return the files.

    ``agent.pem`` and ``agent.key`` go to the device with ``ca.pem``, ``client.pem`` and ``client.key`` to whoever
    measures there; ``ca.key`` signs more of them and stays where it is.

    Args:
        folder: created if it is missing; an authority that is in it is not replaced.
        hosts: names and addresses by which the agent is reached.

    Raises:
        UsageError: there are no hosts, one is invalid, or the folder holds an authority.
        UnavailableError: there is no OpenSSL, or it fails.
    """
    if not hosts:
        raise UsageError("--certificates requires the names of the agent", "give --hosts pi4.local,192.168.1.20")
    names = ",".join(_name(host) for host in hosts)
    if (folder / "ca.pem").exists():
        raise UsageError(f"{folder / 'ca.pem'}: exists already", "give another folder")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = ("-subj", "/CN=partition-optimizer", "-addext", "basicConstraints=critical,CA:TRUE")
    _openssl(folder, "req", "-x509", *_CURVE, "-days", "3650", *authority, "-keyout", "ca.key", "-out", "ca.pem")
    for who, usage, extra in (
        ("agent", "serverAuth", ("-addext", f"subjectAltName={names}")),
        ("client", "clientAuth", ()),
    ):
        files = ("-keyout", f"{who}.key", "-out", f"{who}.pem")
        subject = ("-subj", f"/CN=partition-optimizer {who}", "-addext", f"extendedKeyUsage={usage}", *extra)
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
        _openssl(folder, "req", "-x509", *_CURVE, "-days", _DAYS, *subject, *signed, *files)
    found = [folder / name for name in ("ca.pem", "ca.key", "agent.pem", "agent.key", "client.pem", "client.key")]
    for key in found[1::2]:
        key.chmod(0o600)
    return found


def _name(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        if not _HOST.fullmatch(host):
            raise UsageError(f"--hosts {host}: is neither a name nor an address") from None
        return f"DNS:{host}"


def _openssl(folder: Path, *words: str) -> None:
    try:
        done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError("certificates are made by openssl, which is not here", "install openssl") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise UnavailableError(f"openssl failed: {lines[-1]}", "OpenSSL 3 is needed")
