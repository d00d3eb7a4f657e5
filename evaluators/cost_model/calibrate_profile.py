"""Calibration: choice of the next timing, and a profile from the timings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from evaluators.cost_model.calibrate_nets import TURNS, network
from evaluators.cost_model.calibrate_time import Timed
from evaluators.cost_model.correction import shape_features
from evaluators.cost_model.features import Array, OperatorFeatures, columns, operator_features
from evaluators.cost_model.fit import USUAL_ERROR, awake, errors_of, fit_processor, waited_s
from evaluators.cost_model.profile import ContentionProfile, CostProfile, LinkProfile, ProcessorProfile, forgotten
from search_spaces.core.errors import ProfileError
from search_spaces.core.platform import Platform

MOST_NETS = 240
SPACE_FILLING = 24  # this many networks are spread over the shapes; later ones go where the fit is least certain
_CANDIDATES = 12
_REFIT_EVERY = 6
_MOST_OF_A_TURN = 0.2  # share of the timed networks
_ROUNDS = 8

Fits = MutableMapping[str, tuple[int, CostProfile]]
"""Kind of processor → the number of its networks in the last fit, and that fit."""

KEPT_OUT = (
    "squeezenet1_1",
    "mobilenet_v1@0.5",
    "resnet18@0.5",
    "mobilenet_v2",
    "googlenet@0.5",
    "vgg11@0.25",
    "efficientnet_lite0@0.5",
    "densenet121@0.5",
    "mobilenet_v3_large@0.75",
    "resnet50@0.5",
)
"""Models that are timed to determine the profile's errors, and never fitted."""


def usual_reference_s(timed: Sequence[Timed]) -> float:
    """Return the reference time (s) to which all timings are scaled."""
    return float(np.median([t.reference_s for t in timed]))


def next_network(timed: Sequence[Timed], refused: int = 0, fits: Fits | None = None) -> int:
    """Return the seed of the next network to time, on the kind of processor of ``timed``.

    The first networks are spread over the space of shapes: of some candidates the one whose operators lie farthest from
    all that were timed. Later ones are those for whose operators the fit is least certain, but no turn of every ten has
    more than a fifth: of some operators, as those of transformers in OpenVINO, no fit ever becomes certain.

    Args:
        refused: number of networks that the processor did not support.
        fits: last fit of each kind, kept from call to call while ``timed`` only grows; none by default.
    """
    first = (len(timed) + refused) * _CANDIDATES
    seeds = range(first, first + _CANDIDATES)
    drawn = [operator_features(network(f"net{seed}", seed).graph()) for seed in seeds]
    if len(timed) < SPACE_FILLING:
        scores = _novelty(drawn, [f for t in timed for f in t.features])
    else:
        scores = _doubt(drawn, timed[: len(timed) // _REFIT_EVERY * _REFIT_EVERY], {} if fits is None else fits)
        turns = Counter(t.seed % TURNS for t in timed if t.seed is not None)
        much = [turns[seed % TURNS] > _MOST_OF_A_TURN * len(timed) for seed in seeds]
        scores = [-math.inf if each else score for each, score in zip(much, scores, strict=True)]
    return seeds[int(np.argmax(scores))]


def _novelty(drawn: Sequence[Sequence[OperatorFeatures]], known: Sequence[OperatorFeatures]) -> list[float]:
    """Return the mean distance of each network's operators to the nearest known one of the same kernel."""
    if not known:
        return [float(len({f.fine for f in features})) for features in drawn]
    places = _places(known)
    scores = []
    for features in drawn:
        total = 0.0
        for key, mine in _places(features).items():
            if key not in places:
                total += 4.0 * len(mine)
                continue
            squares = ((mine[:, None, :] - places[key][None]) ** 2).sum(axis=2)
            total += float(np.sqrt(squares.min(axis=1)).clip(max=4.0).sum())
        scores.append(total / len(features))
    return scores


def _places(features: Sequence[OperatorFeatures]) -> dict[str, Array]:
    """Return the positions of operators in the space of shapes, by the key of their kernel."""
    keys = {f.key for f in features}
    return {key: shape_features(columns([f for f in features if f.key == key])) for key in keys}


def _doubt(drawn: Sequence[Sequence[OperatorFeatures]], timed: Sequence[Timed], fits: Fits) -> list[float]:
    """Return the mean relative standard deviation of each network's operators."""
    kind, count = timed[0].like, len(timed)
    if kind not in fits or fits[kind][0] != count:
        usual = usual_reference_s(timed)
        fitted = CostProfile("so far", {"it": _fitted(timed, usual, tune=False)})
        fits[kind] = count, fitted
    profile = fits[kind][1]
    return [float(profile.predict(features, "it").relative_sigma.mean()) for features in drawn]


def _fitted(timed: Sequence[Timed], usual_s: float, **options: Any) -> ProcessorProfile:
    """Return what is fitted to timings at one reference time; options as of :func:`fit_processor`."""
    fitted = fit_processor([t.model(usual_s) for t in timed], **options)
    return replace(fitted, fuses=any(t.fuses for t in timed))


def build_profile(
    platform: Platform,
    timed: Sequence[Timed],
    links: Sequence[LinkProfile] = (),
    contention: Sequence[ContentionProfile] = (),
) -> CostProfile:
    """Fit every kind of processor from the generated networks that were timed on it.

    Raises:
        ProfileError: too few networks were timed on one of them.
    """
    found: dict[str, ProcessorProfile] = {}
    for like, members in platform.classes().items():
        mine = [t for t in timed if t.like == like and t.seed is not None]
        if len(mine) < 3:
            raise ProfileError(
                f"{len(mine)} networks were timed on {members[0].name}, which is too few to fit",
                "give it more --minutes; what was timed is kept",
            )
        usual = usual_reference_s([t for t in timed if t.like == like])
        call_s, far_s, byte_s = cut_costs(mine, usual)
        found[like] = replace(_fitted(mine, usual, invocation_s=call_s), far_call_s=far_s, io_s_per_byte=byte_s)
    return CostProfile(platform.name, found, tuple(links), tuple(contention))


def cut_costs(timed: Sequence[Timed], usual_s: float) -> tuple[float, float, float]:
    """Return the cost of a stage (s), what it costs in addition where caches forgot the runtime (s), and of a byte (s).

    They explain what operators take longer as stages of their own than within their networks, as shares of these times.
    Bytes are those that a stage reads from and leaves to others. Of runtimes that tell no times of kernels, operators
    are timed as stages alone, and all calls cost the same. Where all networks take about as long, the first two costs
    are hardly told apart; their sum is right for inferences of that length.

    Args:
        usual_s: reference time (s) to which all timings are scaled.
    """
    from scipy.optimize import nnls

    rows = [np.zeros((4, 0))]
    for t in timed:
        if t.stage_s is not None:
            scale, nbytes = usual_s / t.reference_s, [f.read_bytes + f.written_bytes for f in t.features]
            far = np.full(len(nbytes), forgotten(t.whole_s * scale))
            rows.append(np.stack([t.operator_s * scale, far, np.array(nbytes, dtype=np.float64), t.stage_s * scale]))
    known = np.concatenate(rows, axis=1)
    own_s, far, nbytes, stage_s = known[:, np.isfinite(known).all(axis=0)]
    if not own_s.size:
        return 0.0, 0.0, 0.0
    table = np.stack([np.ones_like(far), far, nbytes], axis=1) / stage_s[:, None]
    size, left = table.max(axis=0), 1.0 - own_s / stage_s
    weight = np.ones_like(left)
    for _ in range(_ROUNDS):  # outliers count less
        costs = nnls(table / size * weight[:, None], left * weight)[0] / size
        weight = 1.0 / np.sqrt(1.0 + ((table @ costs - left) / USUAL_ERROR) ** 2)
    call_s, far_s, byte_s = map(float, costs)
    return call_s, far_s, byte_s


def errors_on_models(profile: CostProfile, timed: Sequence[Timed]) -> dict[str, Any]:
    """Return a profile's errors on each kind of processor: on operators and on whole models kept out of the fit.

    ``regret``: by how much the processor that the profile would choose for a model is slower than the fastest one, on
    average and at most.
    """
    found: dict[str, Any] = {}
    chosen: dict[str, dict[str, tuple[float, float]]] = {}
    for like in profile.processors:
        mine = [t for t in timed if t.like == like]
        usual = usual_reference_s(mine) if mine else 1.0
        kept = [t.model(usual) for t in mine if t.seed is None]
        if not kept:
            continue
        predicted = [profile.predict_whole(m.features, like) for m in kept]
        each = [profile.predict(m.features, like).seconds for m in kept]
        wait_s = waited_s([t.model(usual) for t in mine if t.seed is not None], profile[like].invocation_s)
        alone = [awake(m, wait_s).operator_s for m in kept]
        pairs = np.concatenate([np.stack([p, s]) for p, s in zip(each, alone, strict=True)], axis=1)
        pairs = pairs[:, ~np.isnan(pairs[1])]
        found[like] = {
            "models": errors_of(predicted, [m.whole_s for m in kept]),
            "operators": errors_of(pairs[0], pairs[1]) if pairs.size else {},
            "kept_out": {
                m.name: {"predicted_ms": round(p * 1e3, 4), "measured_ms": round(m.whole_s * 1e3, 4)}
                for m, p in zip(kept, predicted, strict=True)
            },
        }
        for m, p in zip(kept, predicted, strict=True):
            chosen.setdefault(m.name, {})[like] = (p, m.whole_s)
    regrets = [
        min(of.values())[1] / min(measured for _, measured in of.values()) - 1.0
        for of in chosen.values()
        if len(of) > 1
    ]
    if regrets:
        found["regret"] = {"mean": round(float(np.mean(regrets)), 4), "most": round(float(max(regrets)), 4)}
    return found
