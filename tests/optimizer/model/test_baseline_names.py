"""Every baseline's name has a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from evaluators.workload import apart
from optimizer.model import baselines, ranks, robust
from optimizer.model.baselines import MEANINGS, glossary
from optimizer.study import one_model, several_models
from optimizer.workload import baselines as of_several
from optimizer.workload import ranks as of_ranks
from tests.support.short_studies import go

NAMES = [
    *(getattr(baselines, name) for name in ("SEED_003", "SIDE_BY_SIDE", "GREEDY", "SINGLE", "CHAINS", "EVERY")),
    *(baselines.BRANCHES, baselines.CUTS, baselines.LIST, f"{baselines.OWN}mine", robust.NOMINAL),
    *(ranks.UNIFORM, ranks.CHAIN, of_ranks.PLAIN, one_model._NO_OTHER, several_models._NO_OTHER),
    *(apart.PROCESSES, apart.THREADS, of_several.SEQUENTIAL, of_several.STATIC, of_several.MAPPED),
    "LiteRT's own placement (gpu)",
]


def test_names_of_all_kinds_have_sentences_of_their_own() -> None:
    found = glossary(NAMES)
    assert len(found) == len(NAMES)
    assert len(set(found.values())) == len(NAMES)
    assert {*found.values()} <= {*MEANINGS.values()}
    assert not glossary(["a plan without a meaning"])


@pytest.mark.parametrize("more", [{"allow": "cuts"}, {"model": "squeezenet1_1@0.25/64*2"}, {}], ids=str)
def test_names_of_studies_have_sentences(tmp_path_factory: pytest.TempPathFactory, more: dict[str, Any]) -> None:
    of: dict[str, Any] = {
        "model": "squeezenet1_1@0.25/64",
        "evaluator": "cost-model",
        "platform": "pixel4",
        "budget": 60,
        **more,
    }
    result = go(tmp_path_factory.mktemp("names") / "run", **of)
    assert all(glossary([name]) for name in result.baselines)
