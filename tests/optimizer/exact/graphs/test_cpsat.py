"""The constraint solver, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from optimizer.exact.graphs.cpsat import run_solver, solver_module

pytestmark = pytest.mark.timing


def test_ctrl_c_ends_a_solve_and_the_next_one_too() -> None:
    cp = solver_module()
    model = cp.CpModel()
    # A market split: which customers get all lines halved. No proof within any time that a test has.
    lines = np.random.default_rng(0).integers(0, 100, (6, 50)).tolist()
    chosen = [model.new_bool_var("") for _ in range(50)]
    for line in lines:
        model.add(sum(d * c for d, c in zip(line, chosen, strict=True)) == sum(line) // 2)
    small = cp.CpModel()
    small.maximize(small.new_int_var(0, 5, "x"))
    assert run_solver(small, 5.0)[1] == "found"
    for _ in range(2):
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        begin_s = time.monotonic()
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                run_solver(model, 60.0)
        finally:
            timer.cancel()
            timer.join()
        assert time.monotonic() - begin_s < 30.0
    assert not any(t.name.startswith("CP-SAT") for t in threading.enumerate())
