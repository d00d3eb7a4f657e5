from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.cost_model.correction import Correction
from evaluators.cost_model.features import KERNELS, OperatorFeatures, operator_features
from evaluators.cost_model.kernels import TERMS, KernelModel, Tile
from evaluators.cost_model.profile import (
    STANDS_IN,
    UNSEEN_SIGMA,
    Concern,
    ContentionProfile,
    CostProfile,
    LinkProfile,
    ProcessorProfile,
    find_profile,
    from_json,
    shipped_profiles,
    to_json,
)
from search_spaces.core.errors import OptimizeError, ProfileError
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.platform_file import find_platform_file, platform_names, read_platform
from search_spaces.models.zoo import draft
from tests.support.cost_model import features
from tests.support.narrowing import there
from tests.support.sentences import fails

PRICE = st.floats(0.0, 1e-6)
MODELS = st.builds(
    KernelModel,
    prices=st.dictionaries(st.sampled_from(TERMS), PRICE),
    tile=st.builds(Tile, st.integers(1, 16), st.integers(1, 16)),
    sigma=st.floats(0.0, 1.0),
    ranges=st.just({"macs": (1.0, 1e9)}),
    correction=st.none() | st.just(Correction((1.0,) * 8, ((0.5,) * 8,), (0.25,), 0.1)),
)
PROCESSORS = st.builds(
    ProcessorProfile,
    kernels=st.fixed_dictionaries(dict.fromkeys(("conv", "elementwise"), MODELS)),
    dispatch_s=PRICE,
    invocation_s=PRICE,
    capacity_bytes=st.integers(0, 10**9),
    pressure_per_byte=st.floats(0.0, 1e-8),
    power_w=st.none() | st.floats(0.0, 10.0),
)
PROFILES = st.builds(
    CostProfile,
    name=st.just("device"),
    processors=st.fixed_dictionaries({"a": PROCESSORS, "b": PROCESSORS}),
    links=st.just((LinkProfile("a", "b", 1e-5, 1e-10, 2e-10),)),
    contention=st.just((ContentionProfile("a", "b", 1.1, 1.5),)),
    provenance=st.just({"by": "a test", "runs": 3}),
)
PLATFORM = Platform("device", tuple(Processor(n, "cpu", {n: 1.0}, n) for n in "ab"))
CONV = OperatorFeatures("conv", "CONV_2D", 10**6, 10**4, 10**3, 10**4)


def one(processor: ProcessorProfile) -> CostProfile:
    return CostProfile("device", {"cpu": processor})


PLAIN = ProcessorProfile({"conv": KernelModel({"macs": 1e-9}, sigma=0.1, ranges={"macs": (1e5, 1e7)})}, dispatch_s=1e-6)


@given(PROFILES, st.lists(features(("conv", "elementwise")), min_size=1, max_size=4))
def test_a_profile_survives_its_file(profile: CostProfile, operators: list[OperatorFeatures]) -> None:
    document = json.loads(json.dumps(to_json(profile, PLATFORM)))
    again, platform = from_json(document)
    assert platform == PLATFORM
    assert json.dumps(to_json(again, platform)) == json.dumps(to_json(profile, PLATFORM))
    for before, after in zip(profile.predict(operators, "a"), again.predict(operators, "a"), strict=True):
        assert before.tolist() == after.tolist()


@given(PROFILES, st.lists(features(("conv", "winograd", "grouped", "elementwise", "pool")), min_size=1, max_size=4))
def test_predictions_are_finite_and_not_negative(profile: CostProfile, operators: list[OperatorFeatures]) -> None:
    seconds, sigma = profile.predict(operators, "b")
    assert np.isfinite(seconds).all()
    assert (seconds >= 0).all()
    assert (sigma >= 0).all()


@given(PROFILES, st.lists(features(("conv", "elementwise")), min_size=2, max_size=6))
def test_many_at_once_are_each_alone(profile: CostProfile, operators: list[OperatorFeatures]) -> None:
    together = profile.predict(operators, "a").seconds
    assert together == pytest.approx(
        [float(profile.predict([o], "a").seconds[0]) for o in operators], rel=1e-9, abs=1e-300
    )


def test_what_is_free_or_merged_takes_no_time() -> None:
    operators = [CONV, replace(CONV, free=True), replace(CONV, kernel="elementwise")]
    seconds, sigma = one(replace(PLAIN, merged=("elementwise",))).predict(operators, "cpu")
    assert seconds.tolist() == [pytest.approx(1e-3 + 1e-6), 0.0, 0.0]
    assert sigma.tolist() == [0.1, 0.0, 0.0]


def test_a_kernel_that_was_not_seen_is_a_guess_and_says_so() -> None:
    operators = [CONV, replace(CONV, kernel="winograd")]
    seconds, sigma = one(PLAIN).predict(operators, "cpu")
    assert seconds[0] == seconds[1]
    assert sigma[1] >= UNSEEN_SIGMA > sigma[0]
    assert one(PLAIN).concerns(operators, "cpu") == (Concern((1,), "winograd", math.inf),)


def test_a_shape_far_outside_the_fit_is_reported() -> None:
    far = replace(CONV, macs=10**8)
    _, sigma = one(PLAIN).predict([CONV, far], "cpu")
    assert sigma[1] > 10 * sigma[0]
    assert one(PLAIN).concerns([CONV, far], "cpu") == (Concern((1,), "conv", 10.0),)
    assert not one(PLAIN).concerns([CONV], "cpu")


def test_nothing_like_it_is_an_error() -> None:
    with fails(ProfileError):
        one(PLAIN).predict([replace(CONV, kernel="softmax")], "cpu")
    with fails(ProfileError):
        one(PLAIN).predict([CONV], "npu")


def test_a_stage_that_holds_too_much_is_slow_as_a_whole() -> None:
    crowded = replace(PLAIN, capacity_bytes=1500, pressure_per_byte=1e-3, invocation_s=0.5)
    alone = one(crowded).predict_whole([CONV], "cpu") - 0.5
    assert one(crowded).predict_whole([CONV, CONV], "cpu") - 0.5 == pytest.approx(2 * alone * 1.5)


def mutated(draw: st.DrawFn, value: Any) -> Any:
    """Change one place of a document."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: mutated(draw, value[key])}
    if isinstance(value, list) and value and draw(st.booleans()):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], mutated(draw, value[index]), *value[index + 1 :]]
    return draw(
        st.sampled_from([None, -1, 1e308, "", "x", [], {}, [[]], {"a": {}}, True, 2**70, -0.5, [1, 2, 3], ["a", "b"]])
    )


@given(st.data())
@settings(max_examples=150)
def test_hostile_documents_end_in_one_line(data: st.DataObject) -> None:
    document = data.draw(st.composite(lambda draw: mutated(draw, copy.deepcopy(HEALTHY)))())
    message = ""
    try:
        profile, platform = from_json(document)
        for name in profile.processors:
            profile.predict([CONV], name)
        to_json(profile, platform)
    except OptimizeError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1000


HEALTHY = json.loads(
    json.dumps(
        to_json(
            CostProfile(
                "device",
                {
                    "a": replace(
                        PLAIN,
                        kernels={
                            "conv": KernelModel(
                                {"macs": 1e-9}, correction=Correction((1.0,) * 8, ((0.5,) * 8,), (0.25,), 0.1)
                            )
                        },
                    ),
                    "b": PLAIN,
                },
                links=(LinkProfile("a", "b", 1e-5),),
            ),
            PLATFORM,
        )
    )
)


DESCRIBED = [operator_features(draft(model).graph()) for model in ("squeezenet1_1", "mobilenet_v1")]


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_shipped_profile_predicts_models_and_says_where_it_is_from(name: str) -> None:
    found = there(find_profile(name))
    profile, platform = found
    assert profile.name == platform.name == name
    assert profile.provenance["fitted_by"]
    for processor in platform.processors:
        for described in DESCRIBED:
            assert 1e-4 < profile.predict_whole(described, processor.name) < 10.0
    assert profile.errors or all(p.errors for p in profile.processors.values())


@pytest.mark.parametrize("name", sorted(set(shipped_profiles()) & set(platform_names())))
def test_a_shipped_platform_is_that_of_its_profile(name: str) -> None:
    platform = read_platform(find_platform_file(Path(name)), None)
    found = there(find_profile(name))
    assert [p.name for p in platform.processors] == [p.name for p in found[1].processors]
    assert [dict(p.resources) for p in platform.processors] == [dict(p.resources) for p in found[1].processors]


def test_each_kernel_has_others_that_stand_in() -> None:
    assert set(STANDS_IN) == set(KERNELS)
    assert all(set(others) <= set(KERNELS) - {kernel} for kernel, others in STANDS_IN.items())
