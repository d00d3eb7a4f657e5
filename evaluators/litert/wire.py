"""Messages between the parent, the fork server and the lanes: a length, a JSON head, raw bytes, and open files."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct("<IQ")
_MAX_FDS = 253


def send(channel: socket.socket, head: dict[str, Any], payload: bytes = b"", fds: Sequence[int] = ()) -> None:
    """Send one message; ``fds`` arrive as duplicates in the other process."""
    text = json.dumps(head, separators=(",", ":")).encode()
    first = _HEAD.pack(len(text), len(payload))
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    # The descriptors ride on the first byte, so a receiver that has the head has them all.
    sent = channel.sendmsg([first], ancillary)
    channel.sendall(first[sent:] + text)
    if payload:
        channel.sendall(payload)


def receive(channel: socket.socket) -> tuple[dict[str, Any], bytes, list[int]]:
    """Receive one message; waits as long as the channel's timeout allows.

    Raises:
        EOFError: the other side is gone.
        TimeoutError: nothing came in time.
    """
    fds = array.array("i")
    first, ancillary, _, _ = channel.recvmsg(_HEAD.size, socket.CMSG_LEN(_MAX_FDS * fds.itemsize))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)
    if not first:
        raise EOFError
    first += _exactly(channel, _HEAD.size - len(first))
    text_nbytes, payload_nbytes = _HEAD.unpack(first)
    head = json.loads(_exactly(channel, text_nbytes))
    return head, _exactly(channel, payload_nbytes), list(fds)


def _exactly(channel: socket.socket, nbytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < nbytes:
        part = channel.recv(min(nbytes - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
