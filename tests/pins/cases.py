"""What is pinned, in plain words that outlive the product's types.

``allow`` are the freedoms of a plan, of which today's product takes the last one beside cuts. A platform is the name of
one that ships, or that of a file beside this one (``twins``, and profiles as they were when plans were drawn).
"""

from __future__ import annotations

from typing import Any, Final

MOBILENET: Final = "mobilenet_v1@0.5/128"
SQUEEZENET: Final = "squeezenet1_1/128"
GOOGLENET: Final = "googlenet@0.5/128"
INCEPTION: Final = "inception_v3@0.25/139"
RESNET: Final = "resnet18@0.5/128"
VGG: Final = "vgg16@0.25/128"
LARGE_VGG: Final = "vgg16@0.5"
LARGE_GOOGLENET: Final = "googlenet@0.5"
RANKED_VGG: Final = "vgg11@0.5/32+spectrum"
RANKED_SQUEEZENET: Final = "squeezenet1_1@0.5/64+spectrum"
PROCESSORS: Final = "gpu,1large,3med"
CROSSED: Final = "gpu,1large,1large1med,3med"  # the third excludes the second and the fourth
ALIKE: Final = "med0,med1"
LINKED: Final = ("snapdragon855", "kirin990", "zcu102")  # whose profiles know what a transfer takes
POWER: Final = ["gpu=2.5", "1large=1.5", "3med=0.9"]


def _case(allow: list[str], model: str | list[Any], platform: str | None = None, **more: Any) -> dict[str, Any]:
    what = {"model": model} if isinstance(model, str) else {"models": model}
    return {"allow": allow, **what, **({"platform": platform} if platform else {}), **more}


def _plans(count: int, allow: list[str], model: str | list[Any], platform: str, **more: Any) -> dict[str, Any]:
    return {"plans": count, "case": _case(allow, model, platform, **more)}


_MIXED: Final = [
    {"model": SQUEEZENET, "name": "a", "count": 2, "arrival": {"kind": "closed", "requests": 3}},
    {"model": MOBILENET, "name": "b", "arrival": {"kind": "periodic", "period_ms": 40, "requests": 6}, "priority": 2},
    {
        "model": GOOGLENET,
        "name": "c",
        "arrival": {"kind": "poisson", "rate_per_s": 5, "requests": 3},
        "deadline_ms": 80,
        "queue": 2,
    },
]
_TWO: Final = [{"model": SQUEEZENET, "name": "a", "count": 2}, {"model": RESNET, "name": "b"}]
_RANKED: Final = [
    {"model": RANKED_VGG, "name": "a", "count": 2, "tucker": {"max_error": 0.2}},
    {"model": RANKED_SQUEEZENET, "name": "b", "tucker": {"max_error": 0.2}},
]

PREDICTIONS: Final = [
    # chains
    *(_plans(6, ["cuts"], MOBILENET, p, max_stages=8) for p in (*LINKED, "pixel4", "twins")),
    *(_plans(5, ["cuts"], m, "snapdragon855", max_stages=6) for m in ("mobilenet_v2/96", RESNET)),
    *(_plans(4, ["cuts"], m, "pixel4", max_stages=6) for m in ("mobilenet_v3_large/96", VGG)),
    _plans(4, ["cuts"], "densenet121@0.25/64", "zcu102", max_stages=12),
    _plans(5, ["cuts"], f"{MOBILENET}:int8", "twins", max_stages=6),
    _plans(5, ["cuts"], "resnet50@0.5/64", "xavier", max_stages=5),
    # branches
    *(_plans(5, ["branches"], m, "snapdragon855") for m in (SQUEEZENET, GOOGLENET, INCEPTION)),
    *(_plans(5, ["branches"], GOOGLENET, p) for p in ("kirin990", "zcu102", "twins")),
    *(_plans(5, ["branches"], m, "pixel4", processors=CROSSED) for m in (SQUEEZENET, INCEPTION)),
    _plans(6, ["branches"], GOOGLENET, "pixel4", processors=PROCESSORS),
    # splits
    *(_plans(5, ["splits"], m, "snapdragon855") for m in (MOBILENET, SQUEEZENET, GOOGLENET, INCEPTION)),
    *(_plans(4, ["splits"], VGG, p) for p in ("kirin990", "zcu102", "twins")),
    *(_plans(4, ["splits"], m, "pixel4", processors=CROSSED) for m in (RESNET, SQUEEZENET)),
    # ranks
    *(_plans(5, ["ranks"], RESNET, p, max_stages=4) for p in ("snapdragon855", "pixel4")),
    *(_plans(5, ["ranks"], "squeezenet1_1@0.5/64", p, max_stages=4) for p in ("zcu102", "twins")),
    # several models
    *(_plans(5, ["cuts"], _TWO, p, max_stages=3, objective="makespan") for p in ("snapdragon855", "twins")),
    _plans(6, ["cuts"], _MIXED, "pixel4", processors=PROCESSORS, max_stages=2, objective="misses"),
    _plans(5, ["cuts"], _MIXED, "twins", max_stages=3, objective="mean"),
    _plans(4, ["cuts"], _TWO, "xavier", max_stages=2, objective="throughput"),
    _plans(7, ["ranks"], _RANKED, "pixel4", processors=PROCESSORS, max_stages=2, objective="worst"),
]

OPTIMA: Final = [
    _case(["cuts"], MOBILENET, "snapdragon855", max_stages=4),
    _case(["cuts"], LARGE_VGG, "pixel4", processors=PROCESSORS, max_stages=6),
    _case(["cuts"], RESNET, "twins", max_stages=8),
    _case(["cuts"], VGG, "zcu102", max_stages=22),
    _case(["cuts"], VGG, "kirin990", max_stages=3, objective="throughput"),
    _case(["cuts"], MOBILENET, "pixel4", processors=PROCESSORS, max_stages=4, objective="throughput"),
    _case(["cuts"], RESNET, "twins", max_stages=4, objective="throughput"),
    _case(["cuts"], MOBILENET, "pixel4", processors=PROCESSORS, max_stages=4, objective="energy", power=POWER),
    _case(["cuts"], RESNET, "pixel4", processors=CROSSED, max_stages=3, objective="occupancy"),
    _case(["cuts"], RESNET, "snapdragon855", max_stages=3, objective="memory"),
    _case(["branches"], SQUEEZENET, "pixel4", processors=PROCESSORS),
    _case(["branches"], GOOGLENET, "snapdragon855"),
    _case(["branches"], LARGE_GOOGLENET, "twins", processors=ALIKE),
    _case(["branches"], SQUEEZENET, "twins", processors="large,med0"),
    _case(["branches"], SQUEEZENET, "pixel4", processors=PROCESSORS, objective="throughput"),
    _case(["splits"], SQUEEZENET, "kirin990"),
    _case(["splits"], LARGE_VGG, "pixel4", processors="gpu,1large"),
    _case(["splits"], "mobilenet_v1@0.5", "twins", processors="large,med0"),
    _case(["splits"], LARGE_GOOGLENET, "twins", processors=ALIKE),
    _case(["splits"], SQUEEZENET, "pixel4", processors=PROCESSORS, objective="energy", power=POWER),
    _case(["ranks"], RANKED_VGG, "pixel4", processors=PROCESSORS, max_stages=2, max_error=0.2),
    _case(["ranks"], RANKED_SQUEEZENET, "snapdragon855", max_stages=3, max_error=0.1, objective="occupancy"),
    _case(["cuts"], _TWO, "twins", max_stages=3, objective="mean"),
    _case(["cuts"], _MIXED, "pixel4", processors=PROCESSORS, max_stages=2, objective="misses"),
    _case(["ranks"], _RANKED, "pixel4", processors=PROCESSORS, max_stages=2, objective="makespan"),
]

STUDIES: Final = [
    _case(["cuts"], MOBILENET, "pixel4", processors=PROCESSORS, max_stages=4, sampler="auto", seed=0, budget=30),
    _case(["cuts"], SQUEEZENET, evaluator="synthetic", max_stages=3, sampler="auto", seed=1, budget=30),
    _case(["cuts"], SQUEEZENET, evaluator="synthetic", max_stages=3, sampler="tpe", seed=2, budget=40),
    _case(["branches"], GOOGLENET, "snapdragon855", sampler="random", seed=3, budget=30),
    _case(["cuts"], VGG, "twins", max_stages=3, sampler="reinforce", seed=4, budget=20),
    _case(["splits"], SQUEEZENET, "twins", processors="large,med0", sampler="auto", seed=5, budget=15),
    _case(["cuts"], _TWO, "twins", max_stages=3, objective="mean", sampler="auto", seed=6, budget=25),
    _case(
        ["cuts"],
        MOBILENET,
        "pixel4",
        processors=PROCESSORS,
        max_stages=3,
        objective=["latency", "energy"],
        power=POWER,
        sampler="auto",
        seed=7,
        budget=30,
    ),
    _case(
        ["cuts"],
        "experiments/tables/one_inference.yaml",
        evaluator="table",
        max_stages=4,
        sampler="tpe",
        seed=8,
        budget=30,
    ),
    _case(
        ["ranks"],
        RANKED_VGG,
        "pixel4",
        processors=PROCESSORS,
        max_stages=2,
        max_error=0.2,
        sampler="auto",
        seed=9,
        budget=15,
    ),
]

PLACEMENTS: Final = [  # which CP-SAT proves in seconds; the others end by their time limit
    *((f"{name}_inference", "period") for name in ("l_bert24", "l_gnmt", "l_inceptionv3", "l_resnet50")),
    *((f"{name}_inference", "period") for name in ("o_bert_l-3", "o_bert_l-6", "o_bert_l-12", "o_resnet50")),
    *((f"{name}_inference", "latency") for name in ("l_bert24", "o_bert_l-3", "o_bert_l-6")),
]
QUICK: Final = {
    ("l_bert24_inference", "period"),
    ("l_gnmt_inference", "period"),
    ("o_bert_l-3_inference", "period"),
    ("o_bert_l-6_inference", "period"),
    ("l_bert24_inference", "latency"),
    ("o_bert_l-3_inference", "latency"),
}
LIMIT_S: Final = 120.0
