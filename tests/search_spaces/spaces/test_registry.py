"""Which freedoms a study has where nobody names them."""

from __future__ import annotations

from typing import Any

import pytest

from optimizer.study.config import parse_config, with_freedoms
from search_spaces.core.errors import UsageError
from search_spaces.core.platform import Platform, Processor
from search_spaces.models import load
from search_spaces.spaces.registry import offered, parse_freedoms
from tests.support.strategies import one_core

TWO = Platform("two", (one_core(0), one_core(1)))
TAKING_TURNS = Platform("turns", tuple(Processor(n, "cpu", {"board": 1.0}, like=n) for n in ("a", "b")))


def test_exact_stands_for_what_model_and_processors_offer() -> None:
    chain, branchy = load("mobilenet_v1@0.25/64"), load("squeezenet1_1@0.25/64")
    assert offered("exact", [chain], TWO) == "cuts,splits"
    assert offered("exact", [branchy], TWO) == "cuts,branches,splits"
    assert offered("exact", [chain, branchy], TWO) == "cuts,branches,splits"
    assert offered("exact,ranks", [chain], TWO) == "cuts,splits,ranks"
    assert offered("exact", [branchy], TAKING_TURNS) == "cuts"
    assert offered("cuts,ranks", [branchy], TWO) == "cuts,ranks"


def test_exact_is_a_word_of_its_own() -> None:
    assert parse_freedoms("exact") == "exact"
    assert parse_freedoms("ranks, exact ,cuts") == "exact,ranks"
    with pytest.raises(UsageError):
        parse_freedoms("exact,magic")


@pytest.mark.parametrize(
    ("more", "allow"),
    [
        ({}, "cuts,branches,splits"),
        ({"objective": "latency-p99"}, "cuts,branches,splits"),
        ({"objective": ("latency", "memory")}, "cuts,branches,splits"),
        ({"objective": "worst"}, "cuts,branches,splits"),
        ({"objective": "throughput"}, "cuts"),
        ({"objective": ("memory", "energy")}, "cuts"),
        ({"max_stages": 4}, "cuts"),
        ({"max_stages": 40, "allow": "exact"}, "cuts,branches,splits"),
        ({"objective": "memory", "allow": "cuts,branches"}, "cuts,branches"),
    ],
)
def test_what_is_asked_decides_what_plans_may_do(more: dict[str, Any], allow: str) -> None:
    config = parse_config({"model": "squeezenet1_1@0.25/64", "budget": 3, **more})
    assert with_freedoms(config, [load(config.model)], TWO).allow == allow
