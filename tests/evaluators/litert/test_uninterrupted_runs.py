"""Uninterrupted runs of stages: none is lost, processors still meet where they must, and times are written down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.litert.worker.execution import NO_LIMIT_NS, Step, on_cpu, uninterrupted_runs, without_limit
from evaluators.litert.worker.shared_memory import Semaphores
from search_spaces.core.errors import UnavailableError
from tests.support.sentences import fails

pytestmark = pytest.mark.timing


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=9), st.booleans())
def test_stretches_hold_every_step_once_and_meet_where_steps_meet(steps: list[tuple[bool, bool]], apart: bool) -> None:
    made = [Step(i, None, 0, (), (), (i,) if w else (), (i,) if s else ()) for i, (w, s) in enumerate(steps)]  # type: ignore[arg-type]
    parts: list[list[Step]] = []

    def prepare(found: object) -> object:
        parts.append(list(found))  # type: ignore[call-overload]
        return None

    found = uninterrupted_runs(made, prepare, apart=apart)  # type: ignore[arg-type]
    assert [step for part in parts for step in part] == made
    assert [e for s in found for e in s.waits] == [e for step in made for e in step.waits]
    assert [e for s in found for e in s.signals] == [e for step in made for e in step.signals]
    for part in parts:
        assert not any(step.waits for step in part[1:])
        assert not any(step.signals for step in part[:-1])
        assert len(part) == 1 or not apart


def test_times_are_written_down_and_what_takes_too_long_is_broken_off() -> None:
    ran: list[int] = []

    class Handle:
        handle = None

        @staticmethod
        def run(_handle: object, signature: int, *_: object) -> int:
            ran.append(signature)
            return signature == 7

    steps = [Step(i, Handle, signature, (), (), (), ()) for i, signature in enumerate((3, 4, 5))]  # type: ignore[arg-type]
    log = [9] + [0] * 6
    assert on_cpu(steps, log)(1, NO_LIMIT_NS)
    assert ran == [3, 4, 5]
    assert log[1:] == sorted(log[1:])
    log = [9] + [0] * 6
    assert not on_cpu(steps, log)(1, 0)
    assert ran == [3, 4, 5, 3]
    assert all(log[1:3])
    assert not any(log[3:])
    with fails(UnavailableError):
        on_cpu([steps[0], Step(1, Handle, 7, (), (), (), ())], log)(1, NO_LIMIT_NS)  # type: ignore[arg-type]


def test_a_processor_without_a_limit_writes_times_down_before_it_waits_and_at_the_end() -> None:
    class Handle:
        handle = None
        failing = -1

        @classmethod
        def run(cls, _handle: object, signature: int, *_: object) -> int:
            return int(signature == cls.failing)

    class Meeting:
        """A meeting that the other processor comes to late, or has been at."""

        def __init__(self, *, late: bool) -> None:
            self.late, self.seen = late, [0]

        def passed(self) -> bool:
            return not self.late

        def wait(self) -> None:
            self.seen = list(log)

    meetings = Semaphores(1)
    place = meetings.place(0)
    late, over = Meeting(late=True), Meeting(late=False)
    waits = [(), (over,), (late,), ()]
    steps = [Step(i, Handle, i, (), (), waits[i], (place,) if i == 2 else ()) for i in range(4)]  # type: ignore[arg-type]
    log = [9] + [0] * 8
    without_limit(steps, log)(0, 1)
    assert late.seen[1:5] == log[1:5]
    assert not any(late.seen[5:])
    assert all(log)
    assert log[1:] == sorted(log[1:])
    assert over.seen == [0]
    assert meetings.wait(0, 0.0)
    assert not meetings.wait(0, 0.0)

    Handle.failing = 2
    with fails(UnavailableError):
        without_limit(steps, log)(0, 1)
    assert not meetings.wait(0, 0.0), "nobody is told of a stage that failed"
    meetings.close()
