"""Target 1 of the cost model: this machine's CPU, models whose whole family was kept out of the fit.

``python -m tests.benchmarks.cost_model_cpu prepare DATA`` writes models and packs their weights;
``python -m tests.benchmarks.cost_model_cpu measure DATA --processor cpu0 --minutes 4`` visits 75 models of the zoo and
160 generated networks in turns on a processor (``cpu0``: one thread, ``cpu``: all cores, ``cpu:openvino``), and adds to
what DATA holds;
``python -m tests.benchmarks.cost_model_cpu evaluate DATA OUT.json`` fits and compares.

Protocol: for each family of the zoo (one module of it, so that MobileNet v1, v2 and v3 are one family) a fit is made
from the generated networks and all other families, and predicts that family's models at all their widths and sizes.
Length scales of the fit come from the generated networks alone. ``generated_alone`` predicts the zoo's models by a fit
to generated networks, as a calibration does; ``without_blocks`` by those of them that repeat no blocks. Predicted is
the latency of a whole model as one stage; what is fitted are the times of kernels within models, and whole models of
the other families. All models are
visited in turns, and brought to one pace by what the others took just before and after; of the visits to a model the
quicker half count, since the others were disturbed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.cost_model.calibrate_nets import random_blocks
from evaluators.cost_model.calibrate_time import openvino_seconds, operator_seconds, reference_network
from evaluators.cost_model.features import Array, OperatorFeatures, fused, operator_features
from evaluators.cost_model.fit import TimedModel, awake, errors_of, fit_processor, nonnegative_prices, waited_s
from evaluators.cost_model.profile import CostProfile, ProcessorProfile
from evaluators.litert.processors import make_processor
from evaluators.litert.worker.runtimes import OPENVINO
from optimizer.provenance import provenance
from search_spaces.core.errors import OptimizeError
from search_spaces.models import load
from search_spaces.models.zoo import draft
from search_spaces.models.zoo.builder import Draft
from search_spaces.models.zoo.names import ZOO, parse_name
from tests.benchmarks.fitting import slowness, usual_times
from tests.benchmarks.visits import visits
from tests.support.cost_model import networks

MODELS = """
vgg16 vgg16@0.5 vgg16@0.25 vgg16@0.125 vgg16@0.75 vgg11@0.5 vgg19@0.375 vgg11/160 alexnet alexnet@0.5 alexnet@0.25
resnet18 resnet18@0.5 resnet18/160 resnet50 resnet50@0.5 resnet50@0.25 resnet50/160 resnet101@0.5 resnet152@0.375
resnet50@0.75/192 squeezenet1_0 squeezenet1_1 squeezenet1_0@0.5 squeezenet1_1@0.5 squeezenet1_1@1.5 squeezenet1_1/160
mobilenet_v1 mobilenet_v1@0.75 mobilenet_v1@0.5 mobilenet_v1@0.25 mobilenet_v1@1.5 mobilenet_v1/160
mobilenet_v1@0.5/192 mobilenet_v2 mobilenet_v2@0.5 mobilenet_v2@1.4 mobilenet_v2/160 mobilenet_v2@0.75
mobilenet_v3_large mobilenet_v3_large@0.75 mobilenet_v3_large@0.5 mobilenet_v3_large/160 efficientnet_lite0
efficientnet_lite0@0.5 efficientnet_lite0/160 efficientnet_lite0@1.5 googlenet googlenet@0.5 googlenet/160 googlenet@1.5
inception_v3 inception_v3@0.5 inception_v3@0.25 densenet121 densenet121@0.5 densenet121/160 regnet_y_32gf@0.25
regnet_y_32gf@0.125 regnet_y_32gf@0.125/160 posenet posenet@0.5 posenet/128 yolov2@0.5 yolov2@0.25 yolov2@0.5/224
retinaface/320 retinaface@0.5/320 retinaface@0.5/192 fast_style_transfer/240x320 fast_style_transfer@0.5/240x320
mobilebert/64 mobilebert@0.5/64 vit_b16@0.25 vit_b16@0.5/112
""".split()  # noqa: SIM905 - a list of 75 quoted names is harder to read
NETS, BLOCKS, SEED = 100, 60, 3
GENERATED, OF_BLOCKS = "generated", "net_of_blocks"


def family(name: str) -> str:
    """Return the module of the zoo that builds a model."""
    return GENERATED if name.startswith("net") else ZOO[parse_name(name).name].module


def drafts() -> dict[str, Draft]:
    """Return the structure of everything that is timed."""
    names = [f"net{i}" for i in range(NETS)]
    blocks = {f"{OF_BLOCKS}{i}": random_blocks("net", np.random.default_rng([i, 7])) for i in range(BLOCKS)}
    return dict(zip(names, networks(names, SEED), strict=True)) | blocks | {name: draft(name) for name in MODELS}


def files(data: Path) -> list[tuple[str, Path, Path]]:
    """Return each model's name, its file, and the file of its packed weights; generated networks are written here."""
    folder = data.with_suffix(".files")
    folder.mkdir(exist_ok=True)
    found = []
    for name, made in drafts().items():
        path = folder / f"{name}.tflite"
        if family(name) != GENERATED:
            source = load(name).source
            if source is None:
                raise OptimizeError(f"{name} has no file")
            path = source.path
        elif not path.exists():
            made.write(path)
        found.append((name, path, folder / f"{name}.xnnpack".replace("/", "-")))
    reference = folder / "reference.tflite"
    if not reference.exists():
        reference_network().write(reference)
    return found


def measure(data: Path, processor: str, minutes: float) -> None:
    """Visit all models in turns, and add what they took to ``DATA``."""
    models = files(data)
    begun = int(time.time())
    reference = data.with_suffix(".files") / "reference.tflite"
    named: set[str] = set()
    count = 0
    with data.open("a") as file:
        for visit in visits(models, reference, make_processor(processor), 60 * minutes, seed=begun):
            row = asdict(visit) | {"processor": processor, "run": begun}
            if visit.model in named:
                del row["names"]
            named.add(visit.model)
            count += 1
            file.write(json.dumps(row) + "\n")
            file.flush()
    print(f"{count} visits to {len(named)} models on {processor}")  # noqa: T201


def rows_of(data: Path) -> list[dict[str, Any]]:
    """Return what was timed."""
    return [json.loads(line) for line in data.read_text().splitlines()]


def timed_models(data: Path, processor: str, runs: Sequence[int] = ()) -> list[TimedModel]:
    """Return what was timed on a processor, brought to one pace.

    Args:
        runs: of the measuring process that count; all where none is named.
    """
    rows = [row for row in rows_of(data) if row["processor"] == processor and (not runs or row["run"] in runs)]
    slower = slowness([row["model"] for row in rows], [row["whole_s"] for row in rows])
    made = drafts()
    found = []
    for name in dict.fromkeys(row["model"] for row in rows):
        where = np.array([i for i, row in enumerate(rows) if row["model"] == name])
        names = next(rows[i]["names"] for i in where if "names" in rows[i])
        whole_s = usual_times([[rows[i]["whole_s"]] for i in where], slower[where])[0]
        kernel_s = usual_times([rows[i]["kernel_s"] for i in where], slower[where])
        graph = made[name].graph()
        features = operator_features(graph)
        if OPENVINO in processor:
            features = fused(features)
            seconds = openvino_seconds(features, names, [float(s) for s in kernel_s])
        else:
            seconds = operator_seconds(features, names, [float(s) for s in kernel_s], graph)
        found.append(TimedModel(name, family(name), features, float(whole_s), np.where(seconds > 0, seconds, np.nan)))
    return found


def drift(data: Path, processor: str) -> dict[str, Any]:
    """Return how unsteady the machine was, as relative differences: what no prediction can be nearer than.

    ``pace`` is what it did to all models at a time, which is allowed for; ``visits`` how far two visits to one model
    differ all the same; ``halves`` how far what a model usually takes by its odd and even visits differs, and by its
    earlier and later ones: the second number of each is that of the worst tenth.
    """
    rows = [row for row in rows_of(data) if row["processor"] == processor]
    names = np.array([row["model"] for row in rows])
    slower = slowness(list(names), [row["whole_s"] for row in rows])
    own = np.log([row["whole_s"] for row in rows]) - slower
    by_model = [own[names == name] for name in dict.fromkeys(names)]

    def usual(logs: Array) -> float:
        return float(np.log(usual_times(np.exp(logs)[:, None].tolist(), np.zeros(len(logs)))[0]))

    odd = [abs(usual(v[::2]) - usual(v[1::2])) for v in by_model if len(v) > 1]
    later = [abs(usual(v[: len(v) // 2]) - usual(v[len(v) // 2 :])) for v in by_model if len(v) > 1]

    def usual_and_worst(values: Sequence[Any]) -> list[float]:
        return [round(float(np.percentile(values, q)), 4) for q in (50, 90)]

    return {
        "visits_to_each": [int(min(map(len, by_model))), int(max(map(len, by_model)))],
        "pace_sd": round(float(slower.std()), 4),
        "pace_range": [round(float(slower.min()), 4), round(float(slower.max()), 4)],
        "visits_sd": usual_and_worst([v.std() for v in by_model]),
        "halves_odd_even": usual_and_worst(odd),
        "halves_earlier_later": usual_and_worst(later),
    }


def flops_only(models: list[TimedModel], unseen: list[TimedModel]) -> list[float]:
    """Return what a line through (MACs, time) predicts, as beside seed 002."""

    def terms(some: list[TimedModel]) -> Any:
        return np.array([[float(sum(f.macs for f in m.features)), 1.0] for m in some])

    prices = nonnegative_prices(terms(models), np.array([m.whole_s for m in models]))
    return [float(v) for v in terms(unseen) @ prices]


def evaluate_processor(data: Path, processor: str) -> dict[str, Any]:
    """Return predictions and errors of one processor, each family kept out in its turn."""
    models = timed_models(data, processor)
    generated, zoo = ([m for m in models if (m.family == GENERATED) is own] for own in (True, False))
    tuned = fit_processor(generated)
    of_blocks = {
        name for name, made in drafts().items() if any(t.name.startswith("block") for t in made.graph().tensors)
    }
    walks = fit_processor([m for m in generated if m.name not in of_blocks])
    rows: list[dict[str, Any]] = []
    operators: list[tuple[float, float]] = []
    for out in sorted({m.family for m in zoo}):
        seen, unseen = [m for m in models if m.family != out], [m for m in models if m.family == out]
        profile = CostProfile("fold", {processor: fit_processor(seen, tuned.kernels)})
        plain = flops_only([m for m in seen if m.family != GENERATED], unseen)
        wait_s = waited_s(seen)
        for model, flops in zip(unseen, plain, strict=True):
            each = profile.predict(model.features, processor).seconds
            alone_s = awake(model, wait_s).operator_s
            operators += [
                (float(p), float(s)) for p, s, f in zip(each, alone_s, model.features, strict=True) if counts(f, s)
            ]
            rows.append(
                {
                    "model": model.name,
                    "family": out,
                    "measured_ms": round(model.whole_s * 1e3, 4),
                    "predicted_ms": round(profile.predict_whole(model.features, processor) * 1e3, 4),
                    "flops_only_ms": round(flops * 1e3, 4),
                }
            )
    measured = [r["measured_ms"] for r in rows]
    cnn = [r for r in rows if r["family"] != "transformer"]
    return {
        "models": errors_of([r["predicted_ms"] for r in rows], measured),
        "without_transformers": errors_of([r["predicted_ms"] for r in cnn], [r["measured_ms"] for r in cnn]),
        "flops_only": errors_of([r["flops_only_ms"] for r in rows], measured),
        "generated_alone": errors_by(tuned, zoo, processor),
        "without_blocks": errors_by(walks, zoo, processor),
        "operators": errors_of([p for p, _ in operators], [s for _, s in operators]),
        "machine_drift": drift(data, processor),
        "rows": rows,
    }


def errors_by(fitted: ProcessorProfile, models: Sequence[TimedModel], processor: str) -> dict[str, float]:
    """Return the errors of models by a fit."""
    profile = CostProfile("fitted", {processor: fitted})
    predicted = [profile.predict_whole(m.features, processor) for m in models]
    return errors_of(predicted, [m.whole_s for m in models])


def counts(feature: OperatorFeatures, seconds: float) -> bool:
    """Return whether an operator's time is known."""
    return not feature.free and bool(np.isfinite(seconds))


def main() -> None:
    """Measure or evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "measure", "evaluate"))
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--processor", default="cpu0")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--note", default="", help="what else there is to know of DATA")
    options = parser.parse_args()
    if options.what != "evaluate":
        measure(options.data, options.processor, options.minutes if options.what == "measure" else 0.0)
        return
    processors = sorted({row["processor"] for row in rows_of(options.data)})
    document = {
        "schema_version": 1,
        "made_by": "python -m tests.benchmarks.cost_model_cpu evaluate DATA OUT",
        "protocol": (__doc__ or "").split("Protocol: ")[1].strip(),
        "note": options.note,
        **provenance(),
        "processors": {processor: evaluate_processor(options.data, processor) for processor in processors},
    }
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    for processor, found in document["processors"].items():
        for what in found.keys() - {"rows"}:
            print(processor, what, found[what])  # noqa: T201


if __name__ == "__main__":
    main()
