"""Samples and measurements: what they refuse, what follows from them, and that nothing is lost on the way to a file."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.base import Agreement, OutputError
from evaluators.samples import RUN_NOISE, Measurement, Samples
from evaluators.schedule import Event, Timeline
from search_spaces.core.bounded import built
from search_spaces.core.errors import RunFolderError, UnavailableError
from tests.support.sentences import fails

LATENCIES = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=40).map(tuple)
PLAIN = st.dictionaries(
    st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=5), max_size=3
)
TIMELINES = st.lists(st.builds(Event, st.integers(0, 9), st.text(max_size=5), st.floats(0, 1), st.floats(1, 2))).map(
    lambda events: Timeline(tuple(events))
)
AGREEMENTS = st.builds(Agreement, st.booleans(), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
SAMPLES = st.builds(Samples, LATENCIES, PLAIN)
MEASUREMENTS = st.builds(
    Measurement,
    SAMPLES,
    LATENCIES,
    LATENCIES,
    st.sampled_from(("precision", "limit", "raced", "single-run")),
    st.none() | TIMELINES,
    st.none() | AGREEMENTS,
    st.floats(0.5, 3.0),
    st.booleans(),
)


@given(SAMPLES)
def test_samples_survive_a_file(samples: Samples) -> None:
    assert Samples.from_json(json.loads(json.dumps(samples.to_json()))) == samples


@given(MEASUREMENTS)
def test_measurements_survive_a_file(measurement: Measurement) -> None:
    data = json.loads(json.dumps(measurement.to_json()))
    assert Measurement.from_json({**data, "from a later version": 1}) == measurement


@given(LATENCIES)
def test_the_interval_holds_the_median(values_s: tuple[float, ...]) -> None:
    samples = Samples(values_s)
    low, high = samples.ci95
    assert min(values_s) <= samples.median <= max(values_s)
    assert low <= samples.median <= high
    if len(values_s) >= 6:
        assert low in values_s
        assert high in values_s
    else:
        assert low <= min(values_s)
        assert max(values_s) <= high


@given(LATENCIES, st.floats(1e-3, 1e3))
def test_the_unit_does_not_matter(values_s: tuple[float, ...], factor: float) -> None:
    scaled = Samples(tuple(v * factor for v in values_s))
    assert scaled.ci95 == pytest.approx([end * factor for end in Samples(values_s).ci95])


@given(LATENCIES, st.sampled_from((math.nan, math.inf, -math.inf, -1.0, 0.0)), st.integers(0, 40))
def test_what_is_no_latency_is_refused(values_s: tuple[float, ...], wrong: float, at: int) -> None:
    with pytest.raises(UnavailableError):
        Samples((*values_s[:at], wrong, *values_s[at:]))


def test_no_samples_are_refused() -> None:
    with fails(UnavailableError):
        Samples(())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 10, 25, 100])
def test_the_interval_covers_the_true_median(count: int) -> None:
    rng = np.random.default_rng(count)
    runs_s = 0.1 * np.exp(RUN_NOISE * rng.standard_normal((4000, count)))
    hits = [low <= 0.1 <= high for low, high in (Samples(tuple(map(float, row))).ci95 for row in runs_s)]
    assert np.mean(hits) >= 0.94


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (20, 6), (100, 40)])
def test_order_statistics_as_in_the_tables(count: int, rank: int) -> None:
    assert Samples(tuple(float(v) for v in range(1, count + 1))).ci95 == (rank, count + 1 - rank)


def test_a_single_spike_does_not_spoil_nine_samples() -> None:
    assert Samples((1.0,) * 8 + (2.0,)).precision == 0.0


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"values_s": [], "conditions": {}},
        {"values_s": ["fast"], "conditions": {}},
        {"values_s": [math.nan], "conditions": {}},
        {"values_s": 1.0, "conditions": {}},
    ],
)
def test_damaged_samples(data: object) -> None:
    with fails(RunFolderError):
        Samples.from_json(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [("stopped", "tired"), ("stage_s", None), ("timeline", [{}]), ("timeline", 1), ("agreement", {}), ("latency_s", 1)],
)
def test_damaged_measurements(name: str, value: object) -> None:
    good = Measurement(Samples((1.0,)), (1.0,), (), "limit").to_json()
    with fails(RunFolderError):
        Measurement.from_json({**good, name: value})
    if name in {"latency_s", "stage_s", "stopped"}:
        with fails(RunFolderError):
            Measurement.from_json({key: v for key, v in good.items() if key != name})


def test_errors_that_are_no_numbers_are_written_as_none() -> None:
    found = Agreement(False, math.inf, math.inf, 0.1, (OutputError("x", math.inf, math.inf),), (3, 100))
    written = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert written["max_rel_error"] is None
    assert built(Agreement, written, "an agreement is", RunFolderError) == found
    assert not found.accepted
