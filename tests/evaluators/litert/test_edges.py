"""Edges between processes: nothing told is lost, whether the other one polls or sleeps."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evaluators.litert.worker.shared_memory import SLOT_NBYTES, Semaphore, Semaphores, map_file, post, unmap

pytestmark = pytest.mark.timing


@contextmanager
def edges(count: int, spin_ns: int, *, regular: bool = False) -> Iterator[list[Semaphore]]:
    from ctypes import c_void_p

    memory = Semaphores(count)
    base = map_file(memory.fd, memory.nbytes, write=True)
    memory.close()
    try:
        yield [Semaphore(c_void_p(base + i * SLOT_NBYTES), spin_ns, regular) for i in range(count)]
    finally:
        unmap(base, memory.nbytes)


@pytest.mark.parametrize("spin_ns", [0, 1_000_000_000], ids=["sleeping", "polling"])
def test_two_processes_take_turns(spin_ns: int) -> None:
    turns = 200
    with edges(2, spin_ns) as (there, back):
        child = os.fork()
        if child == 0:
            for _ in range(turns):
                there.wait()
                post(back.address)
            os._exit(0)
        for _ in range(turns):
            post(there.address)
            back.wait()
        assert os.waitpid(child, 0)[1] == 0


def asleep(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_a_long_wait_is_slept_through_but_for_its_end() -> None:
    turns, each_s = 12, 0.02
    with edges(1, 2_000_000, regular=True) as (edge,):
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            for _ in range(turns):
                while not asleep(parent):  # on a busy machine it may come to its wait late
                    time.sleep(0.001)
                time.sleep(each_s)
                post(edge.address)
            os._exit(0)
        begin, used = time.perf_counter(), time.thread_time()
        for _ in range(turns):
            edge.wait()
        took_s, worked_s = time.perf_counter() - begin, time.thread_time() - used
        assert os.waitpid(child, 0)[1] == 0
        assert took_s >= 0.9 * turns * each_s
        assert worked_s < 0.5 * took_s
        assert edge.usual_ns > edge.spin_ns


def test_a_wait_that_is_short_again_is_polled_again() -> None:
    with edges(1, 1_000_000_000, regular=True) as (edge,):
        edge.usual_ns = 10_000_000_000
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            while not asleep(parent):  # a token that is there before it waits takes no time
                time.sleep(0.001)
            post(edge.address)
            os._exit(0)
        edge.wait()
        os.waitpid(child, 0)
        assert edge.usual_ns < edge.spin_ns


def test_what_was_reported_before_is_kept_and_counted() -> None:
    with edges(300, 0) as many:
        for _ in range(3):
            post(many[299].address)
        for _ in range(3):
            many[299].wait()
        begin = time.perf_counter()
        child = os.fork()
        if child == 0:
            time.sleep(0.05)
            post(many[299].address)
            os._exit(0)
        many[299].wait()
        assert time.perf_counter() - begin >= 0.04
        os.waitpid(child, 0)


def test_the_memory_is_whole_pages() -> None:
    for count in (0, 1, 64, 65):
        memory = Semaphores(count)
        assert os.fstat(memory.fd).st_size == memory.nbytes >= max(1, count * SLOT_NBYTES)
        assert memory.nbytes % mmap.PAGESIZE == 0
        memory.close()
