"""A proxy that spoils connections: ``python -m tests.faults.chaos_proxy LISTEN TARGET FATE …``.

A fate is for one connection, in the order in which they come; the last one is for all that follow. ``slow`` delays each
piece by 2 ms, ``stall:N`` forwards N bytes and then holds everything back, ``reset:N`` ends with a reset after N bytes.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass, field

_DELAY_S = 0.002


@dataclass(slots=True)
class Spoiled:
    """A connection on its way; both directions count."""

    ends: tuple[socket.socket, socket.socket]
    fate: str
    limit: int
    passed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def forward(self, source: socket.socket, target: socket.socket) -> None:
        """Carry bytes one way until the end that was fated."""
        try:
            while piece := source.recv(16 << 10):
                time.sleep(_DELAY_S)
                with self.lock:
                    self.passed += len(piece)
                    over = self.fate != "slow" and self.passed > self.limit
                if over and self.fate == "stall":
                    threading.Event().wait()
                if over:
                    self.reset()
                    return
                target.sendall(piece)
        except OSError:
            pass
        for end in self.ends:
            end.close()

    def reset(self) -> None:
        """End both connections with a reset rather than in order."""
        for end in self.ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()


def main() -> None:
    """Serve until killed; tells the port, and each fate as it begins."""
    listen, target, *fates = sys.argv[1:]
    host, _, port = listen.rpartition(":")
    there, _, there_port = target.rpartition(":")
    with socket.create_server((host, int(port))) as server:
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        while True:
            client, _ = server.accept()
            fate, _, limit = fates[0].partition(":")
            if len(fates) > 1:
                fates.pop(0)
            sys.stdout.write(f"{fate}\n")
            sys.stdout.flush()
            try:
                board = socket.create_connection((there, int(there_port)), timeout=5.0)
            except OSError:
                client.close()
                continue
            board.settimeout(None)
            spoiled = Spoiled((client, board), fate, int(limit or 0))
            for pair in ((client, board), (board, client)):
                threading.Thread(target=spoiled.forward, args=pair, daemon=True).start()


if __name__ == "__main__":
    main()
