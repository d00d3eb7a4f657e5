"""Messages between processes arrive whole, with their open files, or not at all."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.litert.worker import wire

HEADS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20) | st.none(), max_size=4)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    theirs.settimeout(5)
    with ours, theirs:
        yield ours, theirs


def same_file(a: int, b: int) -> bool:
    return os.path.samestat(os.fstat(a), os.fstat(b))


@given(st.lists(st.tuples(HEADS, st.binary(max_size=3000), st.integers(0, 5)), min_size=1, max_size=4))
def test_messages_in_a_row_come_one_by_one_with_their_own_files(messages: list[tuple[Any, bytes, int]]) -> None:
    made: list[list[int]] = [[os.memfd_create("m") for _ in range(n)] for _, _, n in messages]
    came: list[int] = []
    try:
        with pair() as (ours, theirs):
            for (head, payload, _), fds in zip(messages, made, strict=True):
                wire.send(ours, head, payload, fds)
            for (head, payload, _), fds in zip(messages, made, strict=True):
                got_head, got_payload, got = wire.receive(theirs)
                came += got
                assert (got_head, got_payload, len(got)) == (head, payload, len(fds))
                assert all(same_file(a, b) for a, b in zip(fds, got, strict=True))
                assert not any(os.get_inheritable(fd) for fd in got)
    finally:
        for fd in [*(fd for fds in made for fd in fds), *came]:
            os.close(fd)


@pytest.mark.parametrize("count", [1, 253, 254, 700])
def test_any_number_of_files(count: int) -> None:
    fd = os.memfd_create("m")
    with pair() as (ours, theirs):
        wire.send(ours, {"op": "x"}, b"payload", [fd] * count)
        head, payload, got = wire.receive(theirs)
    try:
        assert (head, payload, len(got)) == ({"op": "x"}, b"payload", count)
        assert all(same_file(fd, other) for other in got)
    finally:
        for one in (fd, *got):
            os.close(one)


def test_large_payloads_come_whole() -> None:
    payload = os.urandom(5_000_000)
    with pair() as (ours, theirs):
        sender = threading.Thread(target=wire.send, args=(ours, {"n": 1}, payload))
        sender.start()
        assert wire.receive(theirs)[:2] == ({"n": 1}, payload)
        sender.join()


def test_a_sender_that_dies_in_the_middle_is_noticed_at_every_byte() -> None:
    with pair() as (ours, theirs):
        wire.send(ours, {"op": "run"}, b"12345")
        whole = theirs.recv(1000)
    for cut in range(len(whole)):
        with pair() as (ours, theirs):
            ours.sendall(whole[:cut])
            ours.close()
            with pytest.raises(EOFError):
                wire.receive(theirs)


def test_silence_ends_with_the_timeout() -> None:
    with pair() as (_, theirs):
        theirs.settimeout(0.01)
        with pytest.raises(TimeoutError):
            wire.receive(theirs)
