"""What LiteRT's Interpreter runs, we run: each builtin operator in float32 and int8, on the same inputs."""

from __future__ import annotations

import pytest

from tests.benchmarks.operators import outcomes
from tests.support.models.operator_corpus import corpus

pytestmark = pytest.mark.litert


def test_litert_and_we_run_the_same_models_alike() -> None:
    found = list(outcomes(corpus(("float32", "int8"))))
    assert not [f"{o.case.name}: LiteRT: {o.runtime or 'runs'}; we: {o.ours or 'run'}" for o in found if not o.agrees]
    assert len({o.case.kind for o in found if not o.runtime}) >= 170
    # Where neither runs a model, the line names the operator.
    assert not [o.ours for o in found if o.runtime and o.case.kind not in o.ours]
