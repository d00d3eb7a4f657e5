"""Studies over a CPU and a graphics adapter, each followed by an independent long comparison of its table."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator
from search_spaces.models import load
from search_spaces.plan import Plan
from search_spaces.platform import Platform
from tests.benchmarks.verdicts.document import judged
from tests.benchmarks.verdicts.studies import REGRET, Row, long_comparison, study, with_regret

PROCESSORS = ("cpu", "gpu")
STUDIES = tuple(
    f"{model}/{seed}"
    for models, seeds in (
        (("mobilenet_v2", "densenet121", "squeezenet1_1"), 3),
        (("resnet50", "inception_v3", "efficientnet_lite0", "vgg16", "retinaface"), 1),
    )
    for model in models
    for seed in range(seeds)
)
_MOST_PLANS = 10


def wanted(only: Sequence[str]) -> list[str]:
    """Return the studies that ``--only`` names: ``mobilenet_v2`` for all its seeds, ``mobilenet_v2/1`` for one.

    Raises:
        ValueError: a name is of none of them.
    """
    strange = [word for word in only if not any(word in {name, name.split("/")[0]} for name in STUDIES)]
    if strange:
        raise ValueError(f"there is no study {strange[0]!r}; there are {', '.join(STUDIES)}")
    return [name for name in STUDIES if not only or name in only or name.split("/")[0] in only]


def platform_of(processors: Sequence[str]) -> Platform:
    """Return the processors of these names, and LiteRT's own placements of whole networks on them."""
    platform = Platform("device", tuple(map(make_processor, processors)))
    own = LitertEvaluator().own_placements(platform)
    return Platform("device", (*platform.processors, *own)) if own else platform


def run(name: str, processors: Sequence[str], budget: int, seconds: float) -> Row:
    """Run a study by its name, and a long comparison that takes about so many seconds."""
    model, seed = name.split("/")
    command = ["--model", model, "--processors", ",".join(processors), "--budget", str(budget), "--seed", seed]
    row: Row = {"study": name, **study(command, os.environ)}
    if "best" not in row:
        return row
    begin_s = time.monotonic()
    with LitertEvaluator().prepare(platform_of(processors)) as session:
        long = long_comparison(session, load(model), table_plans(row), seconds)
    return with_regret(row, long) | {"long": long, "long_wall_s": round(time.monotonic() - begin_s, 1)}


def table_plans(row: Row) -> list[Plan]:
    """Return the recommended plan, the reference, and the fastest rows of a study's table."""
    first = [Plan.from_json(row[name]) for name in ("best", "reference")]
    entries = sorted(row["table"], key=lambda e: (not e["left"], e["to_best"]))
    plans = [*first, *(Plan.from_json(entry["plan"]) for entry in entries)]
    return list({plan.digest: plan for plan in plans}.values())[:_MOST_PLANS]


def judge(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the summary of all studies against the limits: one may be off, and one undecided."""
    off = [row["study"] for row in rows if not row.get("regret", 1.0) <= REGRET]
    undecided = [row["study"] for row in rows if row["exit"] == 5]
    return {
        "off": off,
        "undecided": undecided,
        "limits": {
            "off": judged(len(off), 1, most=True),
            "undecided": judged(len(undecided), 1, most=True),
        },
    }
