"""Fit the six phones' profiles and tell the errors on models that were kept out of the fit.

::

    python -m tests.benchmarks.fit_phones ../shared/reference experiments

writes ``profiles/PHONE.json``, ``platforms/PHONE.yaml``, ``results/phones.json`` and ``results/phones.csv`` there.
Graphics processors are fitted from the operators of the GPU table, their overheads from end-to-end times; sets of CPU
cores from end-to-end times alone, float and quantised models together. Terms, lengths and noise are the same for all
phones and sets. That sums of terms are not enough for graphics processors was seen on errors of models kept out, among
three forms; the CPU's form is the first that was tried. No number was tuned.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.cost_model.features import Array, OperatorFeatures
from evaluators.cost_model.fit import TimedModel, errors_of, nonnegative_prices
from evaluators.cost_model.profile import CostProfile, ProcessorProfile, to_json
from search_spaces.core.platform import Platform, Processor
from tests.benchmarks.fitting import (
    MODEL_GROUPS,
    cross_validated,
    fit_operators,
    fit_overheads,
    fit_whole_models,
    sum_of_kernels,
)
from tests.benchmarks.phone_tables import PHONES, PhoneModel, read_phones

CHIPS = {
    "pixel4": ("Google Pixel 4", "Snapdragon 855, Adreno 640"),
    "s10": ("Samsung Galaxy S10", "Exynos 9820, Mali-G76"),
    "mi8se": ("Xiaomi Mi 8 SE", "Snapdragon 710, Adreno 616"),
    "a03s": ("Samsung Galaxy A03s", "Helio P35, PowerVR GE8320"),
    "iphone7": ("Apple iPhone 7", "A10"),
    "iphonexs": ("Apple iPhone XS", "A12"),
}
SOURCE = "qed-usc/mobile-ml-benchmark (MIT licence), commit 40ba833: 68 CNNs, TensorFlow Lite, batch 1"
NO_WINOGRAD = ("pixel4", "mi8se")  # Adreno: the runtime runs these convolutions as any other
COMMAND = "python -m tests.benchmarks.fit_phones ../shared/reference experiments"


def gpu_features(model: PhoneModel, phone: str) -> tuple[OperatorFeatures, ...]:
    """Return the operators as the phone's GPU runs them."""
    if phone not in NO_WINOGRAD:
        return model.merged
    return tuple(replace(f, kernel="conv") if f.kernel == "winograd" else f for f in model.merged)


def fit_gpu(phone: str, models: Sequence[PhoneModel], folds: int = 0) -> ProcessorProfile:
    """Fit a GPU from the operators and the end-to-end times of some models."""
    features, seconds, wholes, sums = [], [], [], []
    for model in models:
        described, times = gpu_features(model, phone), np.asarray(model.merged_s[phone])
        known = np.isfinite(times) & (times > 0)
        features += [f for f, k in zip(described, known, strict=True) if k]
        seconds += list(times[known])
        sums.append(float(times[known].sum()))
        wholes.append(_whole(model, described, (phone, "gpu", "float")))
    fitted = fit_overheads(fit_operators(features, seconds, folds=folds), wholes, sums)
    return replace(fitted, merged=("copy", "elementwise"))


def predict_gpu(phone: str, processor: ProcessorProfile, model: PhoneModel) -> float:
    """Predict a model end to end."""
    features = gpu_features(model, phone)
    whole = _whole(model, features, (phone, "gpu", "float"))
    return sum_of_kernels(processor, whole) + processor.dispatch_s * len(features) + processor.invocation_s


def cpu_wholes(phone: str, cores: str, models: Sequence[PhoneModel]) -> list[TimedModel]:
    """Return the float and the quantised models that were timed on a set of cores."""
    found = []
    for model in models:
        found.append(_whole(model, model.single, (phone, cores, "float")))
        if (phone, cores, "quant") in model.end_to_end_s:
            found.append(_whole(model, tuple(map(_int8, model.single)), (phone, cores, "quant")))
    return found


def predict_cpu(processor: ProcessorProfile, whole: TimedModel) -> float:
    """Predict a model end to end."""
    kernels = sum_of_kernels(processor, whole)
    return kernels + processor.dispatch_s * len(whole.features) + processor.invocation_s


def _whole(model: PhoneModel, features: tuple[OperatorFeatures, ...], key: tuple[str, str, str]) -> TimedModel:
    return TimedModel(model.name, model.family, features, model.end_to_end_s[key])


def _int8(feature: OperatorFeatures) -> OperatorFeatures:
    return replace(
        feature,
        dtype="int8",
        read_bytes=feature.read_bytes // 4,
        weight_bytes=feature.weight_bytes // 4,
        written_bytes=feature.written_bytes // 4,
    )


def by_macs(times: Array, macs: Array, groups: Sequence[str]) -> Array:
    """Predict by MACs alone (with a constant), each group by a fit to the others."""
    table = np.stack([np.ones_like(macs), macs], axis=1)
    rows = list(range(len(times)))
    return cross_validated(
        rows, groups, lambda kept: nonnegative_prices(table[kept], times[kept]), lambda p, row: float(table[row] @ p)
    )


def study_gpu(phone: str, models: Sequence[PhoneModel]) -> dict[str, Any]:
    """Return the errors on models kept out, one by one and by family."""
    times = np.array([m.end_to_end_s[phone, "gpu", "float"] for m in models])
    macs = np.array([float(sum(f.macs for f in m.merged)) for m in models])
    found: dict[str, Any] = {}
    for protocol, groups in _protocols(models).items():
        predicted = cross_validated(models, groups, partial(fit_gpu, phone), partial(predict_gpu, phone))
        found[protocol] = {"float": predicted / times, "macs_only": by_macs(times, macs, groups) / times}
    return found


def study_cpu(phone: str, cores: str, models: Sequence[PhoneModel]) -> dict[str, Any]:
    """Return the errors on models kept out, one by one and by family."""
    wholes = cpu_wholes(phone, cores, models)
    times = np.array([w.whole_s for w in wholes])
    macs = np.array([float(sum(f.macs for f in w.features)) for w in wholes])
    quant = np.array([w.features[0].dtype == "int8" for w in wholes])
    found: dict[str, Any] = {}
    for protocol in ("model", "family"):
        groups = [w.name if protocol == "model" else w.family for w in wholes]
        ratio = cross_validated(wholes, groups, fit_whole_models, predict_cpu) / times
        plain = [g for g, q in zip(groups, quant, strict=True) if not q]
        found[protocol] = {"float": ratio[~quant], "macs_only": by_macs(times[~quant], macs[~quant], plain)}
        found[protocol]["macs_only"] /= times[~quant]
        if quant.any():
            found[protocol]["quant"] = ratio[quant]
    return found


def _protocols(models: Sequence[PhoneModel]) -> dict[str, list[str]]:
    return {"model": [m.name for m in models], "family": [m.family for m in models]}


def errors(ratios: Sequence[Array]) -> dict[str, float]:
    """Return the errors of predicted over measured times."""
    together = np.concatenate(list(ratios))
    found = errors_of(together, np.ones_like(together))
    del found["kendall"]
    return found


def platform_of(phone: str, sets: Sequence[str]) -> Platform:
    """Return a phone's processors: its GPU and the timed sets of cores; sets that share cores exclude each other."""
    processors = [Processor("gpu", "gpu", {"gpu": 1.0}, "gpu")]
    for cores in sets:
        parts = re.findall(r"(\d)(large|med|small)", cores)
        shares = {f"{kind}{index}": 1.0 for count, kind in parts for index in range(int(count))}
        processors.append(Processor(cores, "cpu", shares, cores, {"threads": len(shares)}))
    return Platform(phone, tuple(processors))


def platform_text(platform: Platform, source: str, command: str = COMMAND) -> str:
    """Return a platform as the YAML file that is read by ``--platform``."""
    lines = [f"# {source}", f"# Written by {command}", f"name: {platform.name}", "processors:"]
    for processor in platform.processors:
        shares = ", ".join(f"{name}: {share:g}" for name, share in processor.resources.items())
        options = "".join(f", options: {{threads: {processor.options['threads']}}}" if processor.options else "")
        lines.append(f"  - {{name: {processor.name}, kind: {processor.kind}, resources: {{{shares}}}{options}}}")
    lines += ["links:"] if platform.links else []
    for link in platform.links:
        lines.append(f"  - between: [{', '.join(link.between)}]")
        lines.append(f"    bandwidth_bytes_per_s: {link.bandwidth_bytes_per_s:.3e}")
        lines.append(f"    latency_s: {link.latency_s:.4g}")
    return "\n".join(lines) + "\n"


def rounded(value: Any) -> Any:
    """Return plain values with five digits: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def write_json(path: Path, content: Any, *, indent: int | None = None) -> None:
    """Write a document of plain values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    separators = (",", ":") if indent is None else None
    path.write_text(json.dumps(content, indent=indent, separators=separators, ensure_ascii=False) + "\n")


Row = dict[str, Any]


def figures(phone: str, name: str, processor: ProcessorProfile, models: Sequence[PhoneModel], left: Any) -> list[Row]:
    """Return a row for each model that was timed on a processor: measured, by the fit, and by one without the model.

    Args:
        left: predictions of fits without the model, over the measured times (:func:`study_gpu`, :func:`study_cpu`).
    """
    if name == "gpu":
        wholes = [_whole(m, gpu_features(m, phone), (phone, "gpu", "float")) for m in models]
        fitted_s = [predict_gpu(phone, processor, model) for model in models]
    else:
        wholes = cpu_wholes(phone, name, models)
        fitted_s = [predict_cpu(processor, whole) for whole in wholes]
    kinds = ["quant" if w.features[0].dtype == "int8" and name != "gpu" else "float" for w in wholes]
    ratios = {kind: iter(left[kind]) for kind in dict.fromkeys(kinds)}
    return [
        {
            "phone": phone,
            "processor": name,
            "model": whole.name,
            "kind": kind,
            "measured_ms": rounded(whole.whole_s * 1e3),
            "fitted_ms": rounded(fit_s * 1e3),
            "left_out_ms": rounded(float(next(ratios[kind])) * whole.whole_s * 1e3),
        }
        for whole, fit_s, kind in zip(wholes, fitted_s, kinds, strict=True)
    ]


def fitted_to(processor: ProcessorProfile, rows: Sequence[Row], operators: int) -> dict[str, float]:
    """Return how many numbers a processor has, how many figures, and the errors of the fit on whole models.

    Args:
        operators: that were timed one by one.
    """
    groups = {(MODEL_GROUPS[key.partition(":")[0]], key.partition(":")[2]): k for key, k in processor.kernels.items()}
    own = groups if processor.merged == () else processor.kernels
    numbers = 2 + sum(len(k.prices) + (len(k.correction.weights) if k.correction else 0) for k in own.values())
    seen = errors_of([row["fitted_ms"] for row in rows], [row["measured_ms"] for row in rows])
    found = {"numbers": float(numbers), "figures": float(len(rows) + operators)}
    return found | {f"{name}_in_sample": seen[name] for name in ("median", "p90", "within_10")}


def fit_phone(
    phone: str, models: Sequence[PhoneModel], out: Path, done: Callable[[str], None], rows: list[Row]
) -> dict[str, Any]:
    """Write one phone's profile and platform, and add its figures; return the ratios of predicted to measured times."""
    sets = [cores for p, cores, kind in models[0].end_to_end_s if p == phone and kind == "float" and cores != "gpu"]
    ratios = {"gpu": study_gpu(phone, models)}
    done(f"{phone} gpu")
    fitted = {"gpu": fit_gpu(phone, models, folds=5)}
    for cores in sets:
        ratios[cores] = study_cpu(phone, cores, models)
        fitted[cores] = fit_whole_models(cpu_wholes(phone, cores, models))
    done(f"{phone} {' '.join(sets)}")
    processors = {}
    for name, processor in fitted.items():
        mine = figures(phone, name, processor, models, ratios[name]["model"])
        timed = sum(s > 0 for m in models for s in m.merged_s[phone]) if name == "gpu" else 0
        known = errors([ratios[name]["model"]["float"]]) | fitted_to(processor, mine, timed)
        processors[name] = replace(processor, errors=known)
        rows += mine
    name, chip = CHIPS[phone]
    provenance = {
        "device": name,
        "chip": chip,
        "measured_by": SOURCE,
        "fitted_by": COMMAND,
        "fitted_to": "operators and end-to-end times (gpu); end-to-end times of float and int8 models (cores)",
        "errors": "each float model predicted by a fit that has not seen it; relative; in_sample: by the fit itself",
    }
    platform = platform_of(phone, sets)
    profile = CostProfile(phone, processors, provenance=provenance)
    write_json(out / "profiles" / f"{phone}.json", rounded(to_json(profile, platform)))
    text = platform_text(platform, f"{name} ({chip}); sets of CPU cores as timed by {SOURCE}")
    (out / "platforms").mkdir(exist_ok=True)
    (out / "platforms" / f"{phone}.yaml").write_text(text)
    return ratios


def summary(ratios: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of each processor of each phone, and of all of them."""
    found: dict[str, Any] = {"schema_version": 1, "command": COMMAND, "measured_by": SOURCE, "all": {}, "phones": {}}
    for protocol in ("model", "family"):
        for what, on_gpu in (("gpu float", True), ("cpu float", False), ("cpu quant", False)):
            chosen = [r for p in ratios.values() for processor, r in p.items() if (processor == "gpu") == on_gpu]
            kinds = {f"{what}": what.split()[1], f"{what.split()[0]} macs only": "macs_only"}
            for label, kind in kinds.items():
                each = [r[protocol][kind] for r in chosen if kind in r[protocol]]
                found["all"].setdefault(f"{protocol} kept out", {})[label] = errors(each)
    for phone, processors in ratios.items():
        found["phones"][phone] = {
            processor: {f"{p} kept out": {k: errors([v]) for k, v in kinds.items()} for p, kinds in r.items()}
            for processor, r in processors.items()
        }
    return found


def main(reference: Path, out: Path) -> None:
    """Fit all phones."""
    models = read_phones(reference)
    ratios, rows = {}, list[Row]()
    for phone in PHONES:
        ratios[phone] = fit_phone(phone, models, out, lambda text: print(text, file=sys.stderr, flush=True), rows)  # noqa: T201
    (out / "results").mkdir(exist_ok=True)
    with (out / "results" / "phones.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    found = summary(ratios)
    write_json(out / "results" / "phones.json", found, indent=1)
    print(json.dumps(found["all"], indent=1))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
