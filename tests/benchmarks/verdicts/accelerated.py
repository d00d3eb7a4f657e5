"""Studies over a CPU and a graphics adapter, and an independent long comparison of each network's best plans."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.models import load
from tests.benchmarks.verdicts.document import judged
from tests.benchmarks.verdicts.studies import REGRET, Row, compared, long_trace, plans_to_compare, study
from tests.benchmarks.verdicts.trace import Trace, ratio

PROCESSORS = ("cpu", "gpu")
MODELS = {
    **dict.fromkeys(("mobilenet_v2", "densenet121", "squeezenet1_1"), 3),
    **dict.fromkeys(("resnet50", "inception_v3", "efficientnet_lite0", "vgg16", "retinaface"), 1),
}
"""Network → how many studies of it."""

CLAIMS = {"densenet121": ("layer length K=2", "whole on gpu")}
"""Network → two rows of its tables of which the first was said to be faster (by 10 %, in seed_000.md)."""

STUDIES = tuple(f"{model}/{seed}" for model, seeds in MODELS.items() for seed in range(seeds))


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


def run(name: str, processors: Sequence[str], budget: int) -> Row:
    """Run a study by its name."""
    model, seed = name.split("/")
    command = ["--model", model, "--processors", ",".join(processors), "--budget", str(budget), "--seed", seed]
    return {"study": name, **study(command, os.environ)}


def compare(model: str, rows: Sequence[Row], processors: Sequence[str], seconds: float) -> Row:
    """Compare the recommended plans of a network's studies with the best rows of their tables, for so many seconds."""
    plans = plans_to_compare(rows, claimed(model, rows))
    with LitertEvaluator().prepare(platform_of(processors)) as session:
        trace = long_trace(session, load(model), plans, seconds)
    return compared(trace, plans) | {"studies": {r["study"]: within(trace, r) for r in rows if "best" in r}}


def claimed(model: str, rows: Sequence[Row]) -> list[Plan]:
    """Return the two plans that a claim is about; none where there is no claim, or no study measured them."""
    named = {e["name"]: Plan.from_json(e["plan"]) for row in rows for e in row.get("table", ()) if e["name"]}
    names = CLAIMS.get(model, ())
    return [named[name] for name in names] if set(names) <= set(named) else []


def check_claim(model: str, plans: Sequence[Plan], processors: Sequence[str], seconds: float) -> Row:
    """Compare the two plans of a claim with nothing between them, for so many seconds."""
    with LitertEvaluator().prepare(platform_of(processors)) as session:
        trace = long_trace(session, load(model), plans, seconds)
    faster, slower = CLAIMS[model]
    value, half = ratio(trace, 1, 0)
    claim = {"faster": faster, "than": slower, "by": math.expm1(value), "half": half}
    return compared(trace, plans) | {"claim": claim}


def within(trace: Trace, row: Row) -> Row:
    """Return what a long comparison says of a study's recommended plan beside the rows of the study's own table."""
    best, reference = (trace.names.index(Plan.from_json(row[name]).digest) for name in ("best", "reference"))
    own = {trace.names[best], trace.names[reference], *(Plan.from_json(e["plan"]).digest for e in row["table"])}
    works = [i for i, name in enumerate(trace.names) if name in own and math.isfinite(trace.typical_s[i])]
    if not {best, reference} <= set(works):
        return {}
    fastest = min(works, key=lambda i: ratio(trace, i, best)[0])
    regret, half = ratio(trace, best, fastest) if fastest != best else (0.0, 0.0)
    speedup, speedup_half = ratio(trace, reference, best) if reference != best else (0.0, 0.0)
    return {
        "regret": math.expm1(regret),
        "half": half,
        "true_speedup": math.exp(speedup),
        "speedup_half": speedup_half,
        "false_claim": bool(row["says_faster"]) and speedup <= 0.0,
    }


def judge(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the summary of all studies against the limits: one may be off, and one undecided.

    ``open`` are those of which the long comparison cannot tell whether they are off: its interval holds the limit.
    """
    off = [row["study"] for row in rows if not row.get("regret", 1.0) <= REGRET]
    known = [row for row in rows if "regret" in row]
    undecided = [row["study"] for row in rows if row["exit"] == 5]
    return {
        "off": off,
        "open": [row["study"] for row in known if abs(row["regret"] - REGRET) < row["half"]],
        "undecided": undecided,
        "limits": {
            "off": judged(len(off), 1, most=True),
            "undecided": judged(len(undecided), 1, most=True),
        },
    }
