"""Extrapolation warnings: one line for each model, once."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np
import pytest

from evaluators.cost_model.profile import Concern, extrapolation_warning, find_profile
from evaluators.cost_model.session import CostModelSession
from search_spaces.models import load
from search_spaces.spaces.segment_space import SegmentSpace
from tests.support.narrowing import there
from tests.support.sentences import says


def far(kernel: str, beyond: float, *operators: int) -> Concern:
    return Concern(operators, kernel, beyond)


def test_all_processors_share_a_line() -> None:
    concerns = {
        "gpu": [far("mean", 8.0, 3), far("winograd", math.inf, 5)],
        "1large": [far("mean", 2.0, 3), far("conv", 26.24, 0, 1)],
        "1med": [far("mean", 2.0, 3), far("conv", 26.24, 0, 1)],
    }
    says(extrapolation_warning("phone", concerns) or "")


def test_one_operator_and_many_processors() -> None:
    processors = {f"processor{i}": [far("softmax", math.inf, 7)] if i else [] for i in range(5)}
    says(extrapolation_warning("phone", processors) or "")
    assert extrapolation_warning("phone", {"cpu": []}) is None
    says(extrapolation_warning("phone", {"cpu": [far("mean", 1500.2, 7)]}) or "")


def test_a_model_is_told_once_however_it_is_split(caplog: pytest.LogCaptureFixture) -> None:
    found = there(find_profile("pixel4"))
    profile, whole = found
    platform = replace(whole, processors=(whole["1large"], whole["gpu"]))
    graph = load("googlenet@0.25/64")
    space = SegmentSpace(graph, platform)
    session = CostModelSession(profile, platform)
    with caplog.at_level(logging.WARNING):
        for index in np.random.default_rng(0).integers(0, 2**60, 5):
            session.load(graph, space.plan_at(int(index)))
    (told,) = caplog.messages
    says(told)
