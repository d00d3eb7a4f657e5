"""A client's end of the wire: calls with a deadline, and what their failures mean."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from evaluators.remote import wire
from evaluators.remote.agent import pieces_of
from evaluators.remote.credentials import channel_to, grpc_module, metadata_of
from evaluators.remote.devices import Device
from search_spaces.errors import DeviceLostError, UnavailableError
from search_spaces.models.files import replacing

_OPTIONS = (
    *wire.OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_STALLED_S = 60.0
_MOST_FETCHED_NBYTES = 16 << 30


class BusyElsewhereError(UnavailableError):
    """The device measures for somebody else now."""


class Connection:
    """A channel to a device's agent; made without a word on the wire, which the first call says.

    Raises:
        UnavailableError: gRPC is not installed.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._grpc = grpc_module()
        self._channel = channel_to(self._grpc, device.address, device.credentials, _OPTIONS)
        self._metadata = metadata_of(device.credentials)

    def close(self) -> None:
        """Give the channel back; calls in flight end."""
        with suppress(Exception):
            self._channel.close()

    def call(self, method: str, data: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Ask, and return the answer.

        Raises:
            DeviceLostError: the device did not answer in time, or has forgotten us.
            BusyElsewhereError: it measures for somebody else.
            UsageError, UnavailableError: what went wrong there, or it refused access.
        """
        ask = self._channel.unary_unary(f"/{wire.SERVICE}/{method}")
        try:
            content = ask(wire.packed(data), timeout=limit_s, metadata=self._metadata)
        except self._grpc.RpcError as error:
            raise self._failure(error) from error
        return self._told(content)

    def send(self, path: Path, announced: Mapping[str, Any]) -> None:
        """Send a model.

        Raises:
            DeviceLostError: the device went away meanwhile.
            UnavailableError: it does not take the model.
        """
        nbytes = path.stat().st_size

        def messages() -> Iterator[bytes]:
            yield wire.packed({**announced, "nbytes": nbytes})
            yield from pieces_of(path)

        ask = self._channel.stream_unary(f"/{wire.SERVICE}/Store")
        limit_s = _STALLED_S + nbytes / 1e5  # slower than 100 kB/s is as good as none
        try:
            content = ask(messages(), timeout=limit_s, metadata=self._metadata)
        except self._grpc.RpcError as error:
            raise self._failure(error) from error
        self._told(content)

    def fetch(self, folder: Path, client: str, told: Mapping[str, Any]) -> Path:
        """Fetch a file that the device has deployed; its name, size and digest are checked here too.

        Raises:
            DeviceLostError: the device went away meanwhile.
            UnavailableError: it gives another file than it said.
            UsageError: the folder cannot be written.
        """
        name, digest = wire.text(told, "name", wire.FILE_NAME), wire.text(told, "sha256", wire.DIGEST)
        nbytes = wire.whole(told, "nbytes", 1, _MOST_FETCHED_NBYTES)
        ask = self._channel.unary_stream(f"/{wire.SERVICE}/Fetch")
        found, took = hashlib.sha256(), 0
        try:
            with replacing(folder / name) as file:
                request = wire.packed({"client": client, "name": name})
                for piece in ask(request, timeout=_STALLED_S + nbytes / 1e5, metadata=self._metadata):
                    if not piece.startswith(b"F"):
                        self._told(piece[1:])
                    took += len(piece) - 1
                    if took > nbytes:
                        break
                    found.update(piece[1:])
                    file.write(piece[1:])
                if took != nbytes or found.hexdigest() != digest:
                    raise UnavailableError(f"{self.device.name}: {name} did not come as it was announced")
        except self._grpc.RpcError as error:
            raise self._failure(error) from error
        return folder / name

    def _told(self, content: bytes) -> dict[str, Any]:
        answer = wire.unpacked(content)
        if answer.get("lapsed") is True:
            raise DeviceLostError(f"device {self.device.name}: it ended this study, or was restarted")
        if answer.get("busy") is True:
            raise BusyElsewhereError(f"device {self.device.name} is {answer['error']['what']}")
        wire.raise_told(answer, f"device {self.device.name}")
        return answer

    def _failure(self, error: Any) -> UnavailableError:
        """Return what a failed call means: come again, or look at your credentials."""
        code, name, where = error.code(), self.device.name, self.device.address
        status = self._grpc.StatusCode
        details = " ".join(str(error.details()).split())[:200]
        if code == status.UNAUTHENTICATED:
            return UnavailableError(f"device {name} refused access: {details}", "check the token and the certificate")
        if code == status.UNIMPLEMENTED:
            return UnavailableError(f"{where} is not an agent of this version", "install the same version there")
        if code == status.UNAVAILABLE and any(word in details.lower() for word in ("ssl", "certificate", "handshake")):
            return UnavailableError(
                f"device {name}: the certificates do not go together: {details}", "check authority, certificate and key"
            )
        return DeviceLostError(f"device {name} at {where} does not answer ({code.name.lower().replace('_', ' ')})")


def new_client() -> str:
    """Return a name for a client that nobody else can guess; whoever knows it holds its lease."""
    return hashlib.sha256(secrets.token_bytes(32) + os.urandom(8)).hexdigest()
