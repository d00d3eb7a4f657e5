from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.cost_model.features import OperatorFeatures, operator_features
from evaluators.cost_model.fit import TimedModel, errors_of, nonnegative_prices
from evaluators.cost_model.kernels import KernelModel, Tile
from search_spaces.core.errors import ProfileError
from search_spaces.models.zoo import draft
from tests.benchmarks.fitting import cross_validated, fit_operators, fit_overheads, fit_whole_models, sum_of_kernels
from tests.support.sentences import fails

NAMES = [f"{name}@{width}" for name in ("squeezenet1_1", "mobilenet_v1", "vgg11") for width in (0.25, 0.5, 0.75, 1)]


def zoo() -> list[TimedModel]:
    found = []
    for name in NAMES:
        features = operator_features(draft(name).graph())
        found.append(TimedModel(name, name.partition("@")[0], features, 1.0))
    return found


MODELS = zoo()
OPERATORS = [f for m in MODELS for f in m.features if not f.free]


def planted_s(feature: OperatorFeatures) -> float:
    mac_s = {"depthwise": 4e-10, "fully_connected": 2e-10}.get(feature.kernel, 1e-10)
    return 3e-6 + mac_s * feature.macs + 5e-11 * (feature.read_bytes + feature.written_bytes + feature.weight_bytes)


def whole_s(model: TimedModel) -> float:
    return 1e-4 + sum(planted_s(f) for f in model.features if not f.free)


@given(
    st.lists(st.floats(0.01, 10.0), min_size=3, max_size=3),
    st.integers(0, 1000),
)
@settings(max_examples=25)
def test_planted_prices_are_found_again(prices: list[float], seed: int) -> None:
    table = np.random.default_rng(seed).uniform(0.5, 2.0, (30, 3))
    found = nonnegative_prices(table, table @ np.array(prices))
    assert (found >= 0).all()
    assert table @ found == pytest.approx(table @ np.array(prices), rel=0.02)


def test_a_few_rows_far_off_do_not_matter() -> None:
    table = np.random.default_rng(0).uniform(0.5, 2.0, (60, 2))
    seconds = table @ np.array([1.0, 3.0])
    seconds[:5] *= 4.0
    assert nonnegative_prices(table, seconds) == pytest.approx([1.0, 3.0], rel=0.1)


def test_operators_that_were_fitted_are_predicted() -> None:
    times = np.array([planted_s(f) for f in OPERATORS])
    kernels = fit_operators(OPERATORS, times)
    assert set(kernels) == {f.key for f in OPERATORS}
    for key, model in kernels.items():
        where = [i for i, f in enumerate(OPERATORS) if f.key == key]
        assert model.samples == len(where)
        assert all(price >= 0 for price in model.prices.values())
    profile = fit_overheads(kernels, [replace(m, whole_s=whole_s(m)) for m in MODELS])
    predicted = [sum_of_kernels(profile, m) for m in MODELS]
    assert errors_of(predicted, [whole_s(m) - 1e-4 for m in MODELS])["median"] < 0.02


def test_the_tile_that_fits_is_chosen() -> None:
    picked = [f for f in OPERATORS if f.kernel == "pointwise"]
    tile = Tile(pixels=8, channels=32)
    rows = KernelModel({"macs": 1e-9}, tile)
    from evaluators.cost_model.features import columns

    found = fit_operators(
        picked,
        rows.base_s(columns(picked)),
        terms={"pointwise": ("macs",)},
        tiles={"pointwise": (Tile(), Tile(4, 4), tile, Tile(16, 16))},
        correct=False,
    )
    assert found["pointwise"].tile == tile
    assert found["pointwise"].prices["macs"] == pytest.approx(1e-9, rel=1e-3)


def test_whole_models_alone_tell_the_prices() -> None:
    timed = [replace(m, whole_s=whole_s(m)) for m in MODELS]
    processor = fit_whole_models(timed)
    found = [
        sum_of_kernels(processor, m)
        + processor.dispatch_s * sum(not f.free for f in m.features)
        + processor.invocation_s
        for m in timed
    ]
    assert errors_of(found, [m.whole_s for m in timed])["p90"] < 0.03


def test_overheads_are_told_from_kernels() -> None:
    kernels = fit_operators(OPERATORS, [planted_s(f) for f in OPERATORS], folds=0)
    sums = [sum(planted_s(f) for f in m.features if not f.free) for m in MODELS]
    counts = [sum(not f.free for f in m.features) for m in MODELS]
    timed = [replace(m, whole_s=2e-3 + 1e-5 * n + 1.3 * s) for m, n, s in zip(MODELS, counts, sums, strict=True)]
    found = fit_overheads(kernels, timed, sums)
    assert found.invocation_s == pytest.approx(2e-3, rel=0.05)
    assert found.kernels["conv"].prices["macs"] == pytest.approx(1.3 * kernels["conv"].prices["macs"], rel=0.05)


SHORT = """0.0044 0.0235  0.0058 0.0296  0.0205 0.0629  0.0205 0.0635  0.0227 0.0586  0.0235 0.0619  0.0405 0.0751
0.0431 0.0543  0.0536 0.0850  0.0588 0.0931  0.0616 0.1107  0.0633 0.1262  0.0840 0.1631  0.0939 0.1554  0.0961 0.1658
0.1154 0.1511  0.1391 0.1849  0.1685 0.1598  0.2154 0.1665  0.2478 0.2307  0.2659 0.2286  0.3077 0.2370"""
"""Networks on two threads of a Xeon: the whole less a stage call, and the sum of its operators timed one by one, ms."""


def test_networks_shorter_than_a_stage_call_do_not_scale_the_others() -> None:
    kernels = fit_operators(OPERATORS, [planted_s(f) for f in OPERATORS], folds=0)
    times = np.array([float(number) for number in SHORT.split()]).reshape(-1, 2) / 1e3
    long_s = np.random.default_rng(0).uniform(5e-4, 2e-2, 54)
    factors = np.random.default_rng(1).normal(1.05, 0.04, 54)
    whole, sums = np.concatenate([times, np.stack([long_s * factors, long_s], axis=1)]).T
    timed = [replace(MODELS[0], whole_s=float(s)) for s in whole]
    found = fit_overheads(kernels, timed, [float(s) for s in sums])
    assert found.kernels["conv"].prices["macs"] == pytest.approx(1.05 * kernels["conv"].prices["macs"], rel=0.02)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(bad: float) -> None:
    times = [planted_s(f) for f in OPERATORS]
    times[7] = bad
    with fails(ProfileError):
        fit_operators(OPERATORS, times)
    with fails(ProfileError):
        fit_whole_models([replace(m, whole_s=bad) for m in MODELS])


def test_too_little_to_fit_is_reported() -> None:
    with fails(ProfileError):
        fit_operators([f for f in OPERATORS if f.kernel == "pool"][:2], [1.0, 1.0])
    with fails(ProfileError):
        fit_whole_models(MODELS[:3])
    with fails(ProfileError):
        fit_overheads({}, MODELS[:2])
    with fails(ProfileError):
        fit_operators(OPERATORS, [1.0])


def test_what_is_predicted_was_not_seen() -> None:
    rows, groups = list(range(12)), [str(i % 4) for i in range(12)]
    found = cross_validated(rows, groups, set, lambda seen, row: float(not {r for r in seen if r % 4 == row % 4}))
    assert found.tolist() == [1.0] * 12


def test_errors() -> None:
    found = errors_of([1.0, 2.08, 2.7, 8.0], [1.0, 2.0, 3.0, 4.0])
    assert found == {
        "median": 0.07,
        "p90": 0.73,
        "within_5": 0.5,
        "within_10": 0.75,
        "mean": 0.235,
        "kendall": 1.0,
        "cases": 4.0,
    }
