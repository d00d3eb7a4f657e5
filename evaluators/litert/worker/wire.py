"""Messages between the parent, the fork server and the workers: a length, a JSON head, raw bytes, and open files."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct("<IQ")
_MAX_FDS = 253


def send(channel: socket.socket, head: dict[str, Any], payload: bytes = b"", fds: Sequence[int] = ()) -> None:
    """Send one message; ``fds`` arrive as duplicates in the other process.

    Raises:
        OSError: the other side is gone, or there are more than about 3,000 descriptors.
    """
    text = json.dumps(head, separators=(",", ":")).encode()
    first = _HEAD.pack(len(text), len(payload))
    # The descriptors are attached to the first bytes, to each as many as the kernel allows, so that a receiver of the
    # whole head has them all.
    rides = -(-len(fds) // _MAX_FDS)
    if rides > len(first):
        raise OSError(errno.E2BIG, f"{len(fds)} descriptors do not fit into one message")
    for i in range(rides):
        socket.send_fds(channel, [first[i : i + 1]], fds[i * _MAX_FDS : (i + 1) * _MAX_FDS])
    channel.sendall(first[rides:] + text)
    if payload:
        channel.sendall(payload)


def receive(channel: socket.socket) -> tuple[dict[str, Any], bytes, list[int]]:
    """Receive one message; waits as long as the channel's timeout allows.

    Raises:
        EOFError: the other side is gone.
        TimeoutError: nothing came in time.
    """
    fds: list[int] = []
    first = b""
    while len(first) < _HEAD.size:
        part, some, _, _ = socket.recv_fds(channel, _HEAD.size - len(first), _MAX_FDS)
        if not part:
            raise EOFError
        first += part
        fds += some
    for fd in fds:
        os.set_inheritable(fd, False)
    text_nbytes, payload_nbytes = _HEAD.unpack(first)
    head = json.loads(exactly(channel, text_nbytes))
    return head, exactly(channel, payload_nbytes), fds


def exactly(channel: socket.socket, nbytes: int) -> bytes:
    """Return the next ``nbytes`` bytes; raises EOFError where the other side closes before."""
    parts = bytearray()
    while len(parts) < nbytes:
        part = channel.recv(min(nbytes - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
