"""What a proposal takes after 200 trials, in a space of 8 parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from optimizer.samplers import SAMPLERS, make_sampler, quiet_optuna
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.chain import ChainSpace
from tests.support.strategies import chain_graph

if TYPE_CHECKING:
    import optuna

_LIMIT_S = 0.004
_PLATFORM = Platform("p", tuple(Processor(n, "cpu", {}, n) for n in ("cpu", "gpu", "npu")))


@pytest.mark.parametrize("name", [name for name, kind in SAMPLERS.items() if not kind.requires])
def test_a_proposal(benchmark: BenchmarkFixture, name: str) -> None:
    import optuna

    quiet_optuna()
    study = optuna.create_study()
    distributions = dict(ChainSpace(chain_graph(22), _PLATFORM, 4).distributions())

    def propose() -> optuna.Trial:
        study.sampler = make_sampler(name, 0, len(study.get_trials(deepcopy=False)))
        return study.ask(distributions)

    def value(trial: optuna.Trial) -> float:
        return float(sum(i * trial.params[f"cut_{i}"] for i in (1, 2, 3)))

    for _ in range(200):
        trial = propose()
        study.tell(trial, value(trial))
    benchmark.pedantic(propose, rounds=20)  # type: ignore[no-untyped-call]
    assert benchmark.stats is not None
    assert benchmark.stats.stats.median < _LIMIT_S
