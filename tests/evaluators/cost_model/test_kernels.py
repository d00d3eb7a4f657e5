from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.cost_model.features import OperatorFeatures, columns
from evaluators.cost_model.kernels import TERMS, KernelModel, Tile, term
from tests.benchmarks.fitting import fit_correction
from tests.support.cost_model import features
from tests.support.narrowing import there

PRICES = st.dictionaries(st.sampled_from(TERMS), st.floats(0.0, 1.0), min_size=1)
TILES = st.builds(
    Tile,
    *(st.integers(1, 32),) * 3,
    narrow=st.just(0),
    near_s=st.sampled_from([0.0, 3e-3]),
    cache_bytes=st.sampled_from([0.0, 1e6]),
)
NARROW = st.builds(Tile, st.integers(1, 32), st.integers(1, 64), narrow=st.integers(1, 16), near_s=st.just(1e-3))


@given(st.lists(features(), min_size=1, max_size=5), PRICES, TILES | NARROW)
def test_times_are_never_negative(operators: list[OperatorFeatures], prices: dict[str, float], tile: Tile) -> None:
    assert (KernelModel(prices, tile).base_s(columns(operators)) >= 0).all()


@given(features(), PRICES, TILES | NARROW, st.sampled_from(["macs", "read_bytes", "written_bytes", "weight_bytes"]))
def test_more_work_or_traffic_never_takes_less(
    operator: OperatorFeatures, prices: dict[str, float], tile: Tile, field: str
) -> None:
    model = KernelModel(prices, tile)
    more = replace(operator, **{field: getattr(operator, field) * 2 + 1})
    less, greater = model.base_s(columns([operator, more]))
    assert less <= greater


@given(features(), TILES)
def test_a_last_tile_counts_whole(operator: OperatorFeatures, tile: Tile) -> None:
    rows = columns([operator])
    exact, tiled = term("macs", rows, Tile())[0], term("macs", rows, tile)[0]
    assert tiled >= exact * (1 - 1e-12)
    full = replace(operator, input=(1, 1, tile.depth), output=(tile.pixels, 1, tile.channels * operator.groups))
    assert term("macs", columns([full]), tile)[0] == pytest.approx(operator.macs)


@given(features(), NARROW)
def test_either_wide_or_narrow_tiles_are_computed(operator: OperatorFeatures, tile: Tile) -> None:
    rows = columns([operator])
    wide, narrow = (term(name, rows, tile)[0] for name in ("macs", "narrow"))
    assert min(wide, narrow) == 0.0
    assert wide + narrow >= operator.macs * (1 - 1e-12)
    assert (operator.output[2] / operator.groups < tile.channels) or narrow == 0.0


@given(features(), st.floats(1e-4, 1.0))
def test_weights_come_from_nearby_or_afar(operator: OperatorFeatures, interval_s: float) -> None:
    rows = columns([replace(operator, interval_s=interval_s)])
    far, near = (term(name, rows, Tile(near_s=3e-3))[0] for name in ("far_weight", "near_weight"))
    assert far + near == pytest.approx(operator.weight_bytes)
    assert far <= near or interval_s >= 3e-3
    assert term("near_weight", rows, Tile())[0] == 0.0


def test_what_ran_before_slows_a_kernel_that_it_sways() -> None:
    operators = [replace(grid()[0], matrix_share=matrix_share) for matrix_share in (0.0, 0.1, 1.0)]
    plain, history = (KernelModel({"macs": 1e-9}, history=s).base_s(columns(operators)) for s in (0.0, 0.1))
    assert len(set(plain)) == 1
    assert plain[0] == pytest.approx(history[0])
    assert history[0] < history[1] < history[2]
    assert history[2] / history[0] == pytest.approx(np.exp(0.1), rel=1e-2)
    assert KernelModel({}, history=0.1).remembers
    assert not KernelModel({"macs": 1.0}).remembers


@given(features(), st.floats(0.1, 10.0))
def test_a_faster_clock_shortens_all_in_proportion(operator: OperatorFeatures, factor: float) -> None:
    rows = columns([operator])
    slow, fast = ({"macs": 1e-9 * f, "read": 2e-9 * f, "launch": 1e-6 * f} for f in (1.0, 1.0 / factor))
    assert KernelModel(fast).base_s(rows)[0] == pytest.approx(KernelModel(slow).base_s(rows)[0] / factor)


def grid() -> list[OperatorFeatures]:
    return [
        OperatorFeatures(
            "pointwise",
            "CONV_2D",
            side * side * a * b,
            side * side * a * 4,
            a * b * 4,
            side * side * b * 4,
            (side, side, a),
            (side, side, b),
        )
        for side in (7, 14, 28, 56)
        for a in (16, 32, 64, 128)
        for b in (24, 48, 96)
    ]


def test_a_correction_learns_what_is_smooth_and_fades_far_away() -> None:
    rows = columns(grid())
    planted = 0.4 * np.sin(np.log(rows.pixels)) + 0.1 * np.log(rows.channels)
    found = there(fit_correction(rows, planted))
    learned, support = found.apply(rows)
    assert np.abs(learned - planted).max() < 0.25 * np.abs(planted).max()
    assert support.min() > 0.5
    far = OperatorFeatures("pointwise", "CONV_2D", 10**12, 10**11, 10**9, 10**11, (9999, 9999, 3), (9999, 9999, 9999))
    exponent, near = found.apply(columns([far]))
    assert abs(exponent[0]) < 0.02
    assert near[0] < 0.02


def test_a_correction_keeps_to_its_support() -> None:
    rows = columns(grid())
    found = there(fit_correction(rows, np.log(rows.pixels) - np.log(rows.pixels).mean(), most=10))
    assert len(found.support) == len(found.weights) == 10


def test_too_little_or_nothing_to_learn() -> None:
    rows = columns(grid())
    assert fit_correction(rows[np.arange(5)], np.arange(5.0)) is None
    assert fit_correction(rows, np.zeros(len(rows.macs))) is None


def test_doubt_grows_with_the_distance_from_what_was_measured() -> None:
    rows = columns(grid())
    model = KernelModel({"macs": 1e-9}, sigma=0.05, correction=fit_correction(rows, np.sin(np.log(rows.macs))))
    near = model.predict(rows)[1]
    far = model.predict(columns([replace(grid()[0], output=(5000, 5000, 4096), macs=10**13)]))[1]
    assert near.max() < far[0]
    assert KernelModel({"macs": 1e-9}, sigma=0.05).predict(rows)[1].tolist() == [0.05] * len(rows.macs)


def test_how_far_outside() -> None:
    model = KernelModel({"macs": 1.0}, ranges={"macs": (100.0, 1000.0)})
    operators = [replace(grid()[0], macs=m) for m in (100, 1000, 4000, 10, 0)]
    assert model.outside(columns(operators)).tolist() == [1.0, 1.0, 4.0, 10.0, 100.0]
