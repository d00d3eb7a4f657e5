"""Fit profiles of the seeds' devices from their published figures, and tell the errors on figures that were left out.

::

    python -m tests.benchmarks.fit_published ../shared/reference experiments

writes ``profiles/DEVICE.json``, ``platforms/DEVICE.yaml`` and ``results/published.json`` there. A handful of figures
fixes a handful of prices: one for each multiply-accumulate, one for each byte, one for each operator or stage. Such a
profile tells which of two plans is better where they differ much; its stated errors say how far to trust it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from evaluators.cost_model.features import KERNELS, Array, OperatorFeatures, operator_features
from evaluators.cost_model.fit import errors_of, nonnegative_prices
from evaluators.cost_model.kernels import KernelModel
from evaluators.cost_model.profile import CostProfile, LinkProfile, ProcessorProfile, to_json
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Link, Platform, Processor
from search_spaces.models.zoo import draft
from search_spaces.spaces.cuts import every_layer, layer_length, layer_type, parameter_count
from tests.benchmarks.fit_phones import platform_text, rounded, write_json
from tests.benchmarks.fitting import cross_validated

COMMAND = "python -m tests.benchmarks.fit_published ../shared/reference experiments"
Report = dict[str, Any]
Device = tuple[CostProfile, Platform, Report]

EXYNOS_BYTES_PER_S = 51.2e9  # LPDDR5, four channels of 16 bits at 3.2 GHz (data sheet)
XAVIER_MACS_PER_S, XAVIER_BYTES_PER_S = 0.7e12, 137e9  # 512 CUDA cores at 1.377 GHz; LPDDR4x (data sheet)
MALI_BYTES_PER_S = 14.9e9 * 0.4  # Odroid-XU4's LPDDR3, of which a GPU usually reaches two fifths


@cache
def graph_of(model: str) -> Graph:
    """Return a model of the zoo without its weights."""
    return draft(model).graph()


@cache
def features_of(model: str) -> tuple[OperatorFeatures, ...]:
    """Return the operators of a model that run."""
    return tuple(f for f in operator_features(graph_of(model)) if not f.free)


def macs_of(model: str) -> float:
    """Return the multiply-accumulates of a model."""
    return float(sum(f.macs for f in features_of(model)))


def bytes_of(model: str, *, weights: bool = True) -> float:
    """Return what the operators of a model read and write, each on its own."""
    return float(sum(f.moved_bytes - (not weights) * f.weight_bytes for f in features_of(model)))


def processor(mac_s: float, byte_s: float, *, sigma: float, weights: bool = True, **more: Any) -> ProcessorProfile:
    """Return a processor with one price for each multiply-accumulate and one for each byte."""
    prices = {"macs": mac_s, "read": byte_s, "written": byte_s, "weight": byte_s * weights}
    model = KernelModel({name: price for name, price in prices.items() if price > 0}, sigma=sigma)
    return ProcessorProfile(dict.fromkeys(KERNELS, model), **more)


def left_out(predicted: Mapping[str, float], published: Mapping[str, float]) -> Report:
    """Return figures that the fit has not seen beside their prediction, and the errors."""
    each = {
        name: {"published": value, "predicted": float(predicted[name]), "error": float(predicted[name]) / value - 1.0}
        for name, value in published.items()
    }
    summary = errors_of([v["predicted"] for v in each.values()], [v["published"] for v in each.values()])
    return {"figures_ms": each, "errors": summary}


def device(
    name: str, profiles: Mapping[str, tuple[Any, ProcessorProfile]], report: Report, *links: LinkProfile
) -> Device:
    """Put a device together: processor → its kind and its profile."""
    provenance = {"fitted_by": COMMAND, **{k: v for k, v in report.items() if k != "left_out"}}
    errors = {what: found["errors"] for what, found in report["left_out"].items() if "errors" in found}
    processors = tuple(Processor(n, kind, {n: 1.0}, n) for n, (kind, _) in profiles.items())
    connected = tuple(_link(e) for e in links)
    profile = CostProfile(name, {n: p for n, (_, p) in profiles.items()}, links, provenance=provenance, errors=errors)
    return profile, Platform(name, processors, connected), report


def _link(priced: LinkProfile) -> Link:
    bandwidth = 1.0 / priced.copy_s_per_byte if priced.copy_s_per_byte else 1e12
    return Link((priced.source, priced.target), float(f"{bandwidth:.3e}"), priced.latency_s)


def exynos2200(published: Mapping[str, Any]) -> Device:
    """Seed 000: VGG16 in parts; a part that holds more weights than fit slows down as a whole."""
    graph = graph_of("vgg16")
    cuts: dict[str, tuple[int, ...]] = {"unpartitioned": (), "layer_by_layer": every_layer(graph)}
    times = {name: float(published[name]) for name in cuts}
    for criterion, cut in (("layer_length", layer_length), ("parameter_count", parameter_count)):
        for parts in (2, 3, 4):
            cuts[f"{criterion} K={parts}"] = cut(graph, parts)
            times[f"{criterion} K={parts}"] = float(published[criterion][f"K{parts}"])
    cuts["layer_type K=2"] = layer_type(graph)
    times["layer_type K=2"] = float(published["layer_type"]["K2"])

    def fit(names: Sequence[str]) -> ProcessorProfile:
        return _fit_stages([cuts[n] for n in names], np.array([times[n] for n in names]) * 1e-3)

    def predict(processor: ProcessorProfile, name: str) -> float:
        return _stages_s(processor, cuts[name]) * 1e3

    names = list(times)
    each = cross_validated(names, names, fit, predict)
    report: Report = {
        "source": "seed 000, Tables 1 to 3: VGG16 float32 on the GPU, means of 100 runs",
        "fitted_to": "all nine rows; five numbers: a MAC, a weight byte, a stage, and where and how much weights slow",
        "not_fitted": "bytes of activations: the data sheet's bandwidth",
        "left_out": {"each row of the nine in turn": left_out(dict(zip(names, each, strict=True)), times)},
    }
    return device("exynos2200", {"gpu": ("gpu", fit(names))}, report)


def _stages_s(processor: ProcessorProfile, cuts: Sequence[int]) -> float:
    profile = CostProfile("fit", {"gpu": processor})
    features = operator_features(graph_of("vgg16"))
    border = (0, *cuts, len(features))
    return sum(profile.predict_whole(features[a:b], "gpu") for a, b in pairwise(border))


def _fit_stages(cuts: Sequence[Sequence[int]], times: Array) -> ProcessorProfile:
    from scipy.optimize import least_squares

    def processor(numbers: Array, capacity: float) -> ProcessorProfile:
        mac_s, weight_s, stage_s, pressure = (float(v) for v in np.exp(numbers))
        byte = 1.0 / EXYNOS_BYTES_PER_S
        dense = KernelModel({"macs": mac_s}, sigma=0.15)
        heavy = KernelModel({"weight": weight_s}, sigma=0.3)
        kernels = dict.fromkeys(KERNELS, KernelModel({"read": byte, "written": byte}, sigma=0.5))
        kernels |= dict.fromkeys(("conv", "winograd", "pointwise", "grouped", "depthwise", "transpose_conv"), dense)
        kernels |= dict.fromkeys(("fully_connected", "matmul"), heavy)
        return ProcessorProfile(kernels, invocation_s=stage_s, capacity_bytes=int(capacity), pressure_per_byte=pressure)

    best, least = None, np.inf
    for capacity in (20e6, 58e6, 120e6, 250e6, 400e6):
        start = np.log([2e-12, 5e-12, 10e-3, 4e-9])
        low, high = np.log([1e-14, 3e-12, 1e-5, 1e-12]), np.log([1e-10, 1e-9, 1.0, 1e-6])
        found = least_squares(
            lambda v, c=capacity: [np.log(_stages_s(processor(v, c), k) / t) for k, t in zip(cuts, times, strict=True)],
            start,
            bounds=(low, high),
            loss="soft_l1",
            f_scale=0.05,
        )
        if found.cost < least:
            best, least = processor(found.x, capacity), found.cost
    if best is None:
        raise SystemExit("seed 000 could not be fitted")
    return best


CODL = {
    "retinaface": "retinaface",
    "yolov2": "yolov2",
    "vgg16": "vgg16",
    "posenet": "posenet",
    "fast_style_transfer": "fast_style_transfer",
}


def codl(name: str, published: Mapping[str, Any]) -> Device:
    """Seed 002: five models on a CPU and on a GPU; what sharing costs is from one operator on the Snapdragon 855.

    A start of each stage on the GPU would fit its times as well, but would be 55 to 79 ms, so that no operator could
    be shared: in the published operator all that comes with sharing takes 1 ms.
    """
    models = [CODL[m] for m in published["models"]]
    processors, out = {}, {}
    for kind in ("cpu", "gpu"):
        times = np.array(published[name][kind], dtype=np.float64) * 1e-3
        table = np.array([[macs_of(m), bytes_of(m, weights=False)] for m in models])
        each = _leave_one_out(table, times)
        found = left_out(dict(zip(models, each * 1e3, strict=True)), dict(zip(models, times * 1e3, strict=True)))
        out[f"each model on the {kind} in turn"] = found
        mac_s, byte_s = nonnegative_prices(table, times)
        sigma = max(0.1, 1.5 * found["errors"]["median"])
        processors[kind] = kind, processor(float(mac_s), float(byte_s), sigma=sigma, weights=False)
    one = published["operator_snapdragon855"]["conv3x3_in_112x112x32_out_64_ratio_0.5"]
    shared = (112 * 112 * 32 + 112 * 112 * 64) * 4 / 2
    latency_s = (one["pre_sync"] + one["post_sync"] + one["map"] + one["unmap"]) * 1e-3
    link = LinkProfile("cpu", "gpu", latency_s, one["transform"] * 1e-3 / shared)
    if name == "snapdragon855":
        out |= _operators_left_out(CostProfile(name, {n: p for n, (_, p) in processors.items()}), published, link)
    report: Report = {
        "source": "seed 002 (CoDL, MobiSys 2022): figures read from the paper, within 2 ms",
        "fitted_to": "five models on the CPU and on the GPU (a MAC, a byte of activations each); sharing: one operator",
        "not_fitted": "sharing" + ("" if name == "snapdragon855" else ", which is the Snapdragon 855's"),
        "left_out": out,
    }
    return device(name, processors, report, link)


def _operators_left_out(profile: CostProfile, published: Mapping[str, Any], link: LinkProfile) -> Report:
    """Compare single operators, and what sharing one costs, with what the fits to models and one operator say."""
    rows = published["operator_snapdragon855"]
    point = rows["conv1x1_in_52x52x256_out_128"]
    pixels = 52 * 52
    feature = OperatorFeatures(
        kernel="pointwise",
        kind="CONV_2D",
        macs=pixels * 256 * 128,
        read_bytes=pixels * 256 * 4,
        weight_bytes=256 * 128 * 4,
        written_bytes=pixels * 128 * 4,
        input=(52, 52, 256),
        output=(52, 52, 128),
    )
    predicted = {k: float(profile.predict([feature], k).seconds[0]) * 1e3 for k in ("cpu", "gpu")}
    shared = (feature.read_bytes + feature.written_bytes) / 2
    sharing = (link.latency_s + shared * link.copy_s_per_byte) * 1e3
    example = rows["conv3x3_in_240x320x64_out_128"]
    pixels = 240 * 320
    feature = OperatorFeatures(
        kernel="conv",
        kind="CONV_2D",
        macs=pixels * 9 * 64 * 128,
        read_bytes=pixels * 64 * 4,
        weight_bytes=9 * 64 * 128 * 4,
        written_bytes=pixels * 128 * 4,
        input=(240, 320, 64),
        output=(240, 320, 128),
    )
    cpu_s, gpu_s = (float(profile.predict([feature], k).seconds[0]) for k in ("cpu", "gpu"))
    return {
        "the GPU's share of a convolution": {
            "published": example["best_gpu_ratio"],
            "by MACs, published": example["flops_regression_ratio"],
            "predicted": cpu_s / (cpu_s + gpu_s),
        },
        "one pointwise operator": left_out(predicted, {k: point[k] for k in ("cpu", "gpu")}),
        "sharing it": left_out({"sharing": sharing}, {"sharing": point["coexecution_sharing"]}),
    }


def _leave_one_out(table: Array, times: Array) -> Array:
    rows = list(range(len(times)))
    return cross_validated(
        rows,
        [str(r) for r in rows],
        lambda kept: nonnegative_prices(table[kept], times[kept]),
        lambda prices, row: float(table[row] @ prices),
    )


def xavier(published: Mapping[str, Any]) -> Device:
    """Seed 001: four models alone; six at once are left to the law of one processor."""
    models = {"alexnet": "alexnet", "squeezenet": "squeezenet1_0", "vgg16": "vgg16", "regnet_y_32gf": "regnet_y_32gf"}
    figures = published["alone_and_six_at_once"]
    times = np.array([figures[m][0] for m in models]) * 1e-3
    roof = [macs_of(m) / XAVIER_MACS_PER_S + bytes_of(m) / XAVIER_BYTES_PER_S for m in models.values()]
    table = np.array([[len(features_of(m)), r] for m, r in zip(models.values(), roof, strict=True)])
    each = _leave_one_out(table, times) * 1e3
    dispatch_s, slower = nonnegative_prices(table, times)
    alone = left_out(dict(zip(models, each, strict=True)), {m: figures[m][0] for m in models})
    six = left_out({m: 6.0 * figures[m][0] for m in models}, {m: figures[m][1] for m in models})
    gpu = processor(
        float(slower) / XAVIER_MACS_PER_S,
        float(slower) / XAVIER_BYTES_PER_S,
        sigma=max(0.1, 1.5 * alone["errors"]["median"]),
        dispatch_s=float(dispatch_s),
    )
    report: Report = {
        "source": "seed 001, Table 1: models alone and six at once",
        "fitted_to": "four models alone; two numbers: an operator's dispatch, and how far below the data sheet",
        "not_fitted": "the ratio of a MAC to a byte: the data sheet's",
        "left_out": {"each model alone in turn": alone, "six at once: one processor, first come first served": six},
    }
    return device("xavier", {"gpu": ("gpu", gpu)}, report)


def zcu102(published: Mapping[str, Any]) -> Device:
    """Seed 003: SqueezeNet on CPU and NPU; three figures give three prices.

    The small branches of the groups that gain hide behind the large ones: what is saved is the price of their work,
    and what is left of the time is that of the NPU's k x k convolutions. A group gains if the CPU's branch, handed
    there and back, ends before both would on the NPU; that some groups gain and no other bounds the transfer.
    """
    features = features_of("squeezenet1_0")
    pairs = _expansions(features)
    small = sorted((first.macs for first, _ in pairs), reverse=True)
    gaining = int(published["groups_run_in_parallel"])
    whole_s, saved_s = published["sequential"] * 1e-3, (published["sequential"] - published["branch_parallel"]) * 1e-3
    large = sum(f.macs for f in features if f.kernel in ("conv", "winograd"))
    rest_s = saved_s / sum(small[:gaining])
    large_s = (whole_s - (macs_of("squeezenet1_0") - large) * rest_s) / large
    # 1 x 1 and 3 x 3 of a group have the same channels: 9 times the work.
    least, most = 9 * small[gaining] * large_s / 2, small[gaining - 1] * (9 * large_s - rest_s) / 2
    report: Report = {
        "source": "seed 003: SqueezeNet on the ZCU102, 1000 images",
        "fitted_to": "sequential 202.72 ms, branch-parallel 180.18 ms, and that 4 of 8 groups run in parallel; three "
        "numbers: a MAC of the NPU's k x k convolutions, any other MAC, and a transfer",
        "not_fitted": "the middle of the transfers that the count allows",
        "transfer_ms_allowed": [round(least * 1e3, 4), round(most * 1e3, 4)],
        "parallel_ms_of_other_models_that_fit_the_sequential_time_and_the_count": _range(pairs, published),
        "left_out": {
            "branch-parallel; half of the time on bytes, the CPU as fast as the NPU": left_out(
                {"branch_parallel": _parallel_ms(pairs, published, 0.5, 1.0)},
                {"branch_parallel": published["branch_parallel"]},
            )
        },
    }
    slow, quick = (KernelModel({"macs": price}, sigma=0.3) for price in (rest_s, large_s))
    npu = dict.fromkeys(KERNELS, slow) | {"conv": quick, "winograd": quick}
    processors = {
        "cpu": ("cpu", ProcessorProfile(dict.fromkeys(KERNELS, slow))),
        "npu": ("npu", ProcessorProfile(npu)),
    }
    return device("zcu102", processors, report, LinkProfile("npu", "cpu", (least + most) / 2))


def _range(pairs: Sequence[tuple[OperatorFeatures, OperatorFeatures]], published: Mapping[str, Any]) -> list[float]:
    """Return what branches in parallel take, least and most, where the NPU is priced by MACs and bytes.

    What share of the time goes to bytes, and how fast the CPU is, are not published.
    """
    every = [
        _parallel_ms(pairs, published, share, ratio) for share in (0, 0.25, 0.5, 0.75) for ratio in (1.0, 2.0, 4.0)
    ]
    return [round(min(every), 2), round(max(every), 2)]


def _parallel_ms(
    pairs: Sequence[tuple[OperatorFeatures, OperatorFeatures]],
    published: Mapping[str, Any],
    share: float,
    ratio: float,
) -> float:
    """Return what branches in parallel take by the sequential time and the count alone.

    Args:
        share: of the time that goes to bytes.
        ratio: of a CPU's time to the NPU's.
    """
    macs, moved, whole_s = macs_of("squeezenet1_0"), bytes_of("squeezenet1_0"), published["sequential"] * 1e-3
    mac_s, byte_s = whole_s * (1 - share) / macs, whole_s * share / moved
    return float((whole_s - _gain(pairs, mac_s, byte_s, ratio, published["groups_run_in_parallel"])) * 1e3)


def _expansions(features: Sequence[OperatorFeatures]) -> list[tuple[OperatorFeatures, OperatorFeatures]]:
    """Return the two convolutions of each group: 1 by 1 and 3 by 3, which read the same tensor."""
    found = []
    for first, second in pairwise(features):
        if first.filter == (1, 1) and second.filter == (3, 3) and first.input == second.input:
            found.append((first, second))
    return found


def _gain(
    pairs: Sequence[tuple[OperatorFeatures, OperatorFeatures]], mac_s: float, byte_s: float, ratio: float, gaining: int
) -> float:
    """Return what ``gaining`` groups gain together, with the middle of the transfers for which no other gains."""

    def took(f: OperatorFeatures) -> float:
        return f.macs * mac_s + f.moved_bytes * byte_s

    rows = []
    for first, second in pairs:
        together = took(first) + took(second)
        saved = together - max(ratio * took(first), took(second))
        rows.append(max(0.0, saved))
    rows.sort(reverse=True)
    handing_s = (rows[gaining - 1] + rows[gaining]) / 2
    return sum(max(0.0, saved - handing_s) for saved in rows)


def odroid(_: Mapping[str, Any]) -> Device:
    """Seed 004 tells no times but two differences: one fixes the ratio of MAC to byte, the other is left out."""
    even = ("googlenet@0.5", "mobilenet_v1@0.75")
    more = macs_of(even[0]) - macs_of(even[1])
    fewer = bytes_of(even[1]) - bytes_of(even[0])
    byte_s = 1.0 / MALI_BYTES_PER_S
    mac_s = max(0.0, byte_s * fewer / more)
    later = ("mobilenet_v1", "googlenet@0.75")
    predicted = (macs_of(later[0]) - macs_of(later[1])) * mac_s + (bytes_of(later[0]) - bytes_of(later[1])) * byte_s
    report: Report = {
        "source": "seed 004; its times are only in its figures",
        "fitted_to": "GoogLeNet 0.5 and MobileNet 0.75 take about the same (ratio of a MAC to a byte)",
        "not_fitted": "bandwidth: two fifths of the data sheet's 14.9 GB/s",
        "left_out": {
            "MobileNet 1.0 minus GoogLeNet 0.75": left_out({"difference": predicted * 1e3}, {"difference": 14.0}),
            "MACs of GoogLeNet over MobileNet, in millions": left_out(
                {"0.5 over 0.75": more / 1e6, "0.75 over 1.0": (macs_of(later[1]) - macs_of(later[0])) / 1e6},
                {"0.5 over 0.75": 99.0, "0.75 over 1.0": 342.0},
            ),
        },
    }
    gpu = processor(mac_s, byte_s, sigma=0.5, cache_bytes=196_608)
    return device("odroid-xu4", {"gpu": ("gpu", gpu)}, report)


def main(reference: Path, out: Path) -> None:
    """Fit all devices."""
    published = yaml.safe_load((reference / "published.yaml").read_text(encoding="utf-8"))
    devices = [
        exynos2200(published["seed_000_vgg16_exynos2200_gpu"]),
        xavier(published["seed_001_xavier"]),
        zcu102(published["seed_003_squeezenet_zcu102"]),
        odroid(published["seed_004_width_multipliers"]),
        *(codl(n, published["seed_002_codl"]) for n in ("snapdragon855", "snapdragon865", "snapdragon888", "kirin990")),
    ]
    found: Report = {"schema_version": 1, "command": COMMAND, "devices": {}}
    (out / "platforms").mkdir(parents=True, exist_ok=True)
    for profile, platform, report in devices:
        write_json(out / "profiles" / f"{profile.name}.json", rounded(to_json(profile, platform)))
        (out / "platforms" / f"{profile.name}.yaml").write_text(platform_text(platform, report["source"], COMMAND))
        found["devices"][profile.name] = report
    write_json(out / "results" / "published.json", rounded(found), indent=1)
    summary = {n: {k: v.get("errors", v) for k, v in r["left_out"].items()} for n, r in found["devices"].items()}
    print(json.dumps(summary, indent=1))  # noqa: T201


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reference", type=Path, help="the folder with published.yaml")
    parser.add_argument("out", type=Path, help="the folder of platforms, profiles and results")
    given = parser.parse_args()
    if not (given.reference / "published.yaml").is_file():
        parser.error(f"{given.reference}: no published.yaml there")
    main(given.reference, given.out)
