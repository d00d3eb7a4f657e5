"""Record what today's code computes, and compare later code with it; nothing here knows the product's types."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.pins import adapter
from tests.pins.cases import LIMIT_S, OPTIMA, PLACEMENTS, PREDICTIONS, QUICK, STUDIES

Plain = dict[str, Any]
FILE = Path(__file__).with_name("pins.json")
EXPLAINED = Path(__file__).with_name("explained.json")
REFERENCE = Path(os.environ.get("PARTITION_OPTIMIZER_REFERENCE", adapter.ROOT.parent / "shared" / "reference"))
RTOL = 1e-9
_NAMED = ("platform", "evaluator", "processors", "objective", "sampler")
SOLVED_RTOL = 1e-5  # CP-SAT rounds costs to integers


@dataclass(frozen=True, slots=True)
class Difference:
    """A pin that does not hold: its class, by which differences are explained, and what is different."""

    kind: str
    what: str


def record(old: Plain | None = None) -> Plain:
    """Return all pins.

    Args:
        old: pins whose plans are kept, so that only what is said of them is new.
    """
    if old is not None:
        groups = [(group["case"], [_plan(pin) for pin in group["pins"]]) for group in old["predictions"]]
    else:
        groups = [(g["case"], adapter.drawn(g["case"], g["plans"], seed)) for seed, g in enumerate(PREDICTIONS)]
    return {
        "schema_version": 1,
        "predictions": [
            {
                "case": case,
                "pins": [plan | said for plan, said in zip(plans, adapter.predictions(case, plans), strict=True)],
            }
            for case, plans in groups
        ],
        "optima": [{"case": case, **adapter.optimum(case)} for case in OPTIMA],
        "studies": [{"case": case, **adapter.replay(case)} for case in STUDIES],
        "placements": _placements(old),
    }


def text(pins: Plain) -> str:
    """Return pins as JSON with one pin a line."""

    def line(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"))

    groups = [
        f'{{"case":{line(group["case"])},"pins":[\n' + ",\n".join(map(line, group["pins"])) + "\n]}"
        for group in pins["predictions"]
    ]
    parts = [f'"schema_version":{pins["schema_version"]}', '"predictions":[\n' + ",\n".join(groups) + "\n]"]
    parts += [
        f'"{name}":[\n' + ",\n".join(map(line, pins[name])) + "\n]" for name in ("optima", "studies", "placements")
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def differences(pins: Plain, *, quick: bool) -> Iterator[Difference]:
    """Yield what today's code computes otherwise than is recorded.

    Args:
        quick: leave out placements that take long.
    """
    for group in pins["predictions"]:
        yield from _predicted(group)
    for pin in pins["optima"]:
        yield from _optimum(pin)
    for pin in pins["studies"]:
        yield from _study(pin)
    for pin in pins["placements"]:
        if not quick or (pin["instance"], pin["objective"]) in QUICK:
            yield from _placement(pin)


def unexplained(found: Sequence[Difference], *, quick: bool) -> list[str]:
    """Return what is wrong with differences by what is said of them in the file of explanations.

    A class of which there is no word must have none, and any other as many as the file says; where only a part of the
    pins was looked at, not more.
    """
    explained: dict[str, Plain] = json.loads(EXPLAINED.read_text())
    counts = Counter(each.kind for each in found)
    wrong = []
    for kind in sorted({*counts, *explained}):
        allowed = explained.get(kind, {}).get("count", 0)
        if counts[kind] > allowed or (counts[kind] < allowed and not quick):
            first = next((f": {each.what}" for each in found if each.kind == kind), "")
            wrong.append(f"{kind}: {counts[kind]} differ, {allowed} are explained{first}")
    return wrong


def _plan(pin: Plain) -> Plain:
    return {name: pin[name] for name in ("stages", "ranks", "dispatch") if name in pin}


def _label(case: Plain) -> str:
    words = [each if isinstance(each, str) else each["model"] for each in case.get("models", [case.get("model")])]
    return " ".join([*words, *(str(case[name]) for name in _NAMED if name in case)])


def _kind(case: Plain) -> str:
    several = "several models, " if "models" in case else ""
    return f"{several}{case['allow'][-1]}"


def _predicted(group: Plain) -> Iterator[Difference]:
    case, pins = group["case"], group["pins"]
    found = adapter.predictions(case, [_plan(pin) for pin in pins])
    for number, (pin, said) in enumerate(zip(pins, found, strict=True)):
        processors = len({stage[2] for stage in pin["stages"]})
        where = "one processor" if processors == 1 else "several processors"
        for name in pin.keys() - _plan(pin).keys():
            if not _near(said.get(name), pin[name]):
                kind = f"prediction of {name}: {_kind(case)}, {case['platform']}, {where}"
                yield Difference(kind, f"{_label(case)} plan {number}: {_short(pin[name])} → {_short(said.get(name))}")


def _optimum(pin: Plain) -> Iterator[Difference]:
    case = pin["case"]
    found = adapter.optimum(case)
    if not found["value"] <= pin["value"] * (1 + RTOL):
        yield Difference(f"worse optimum: {_kind(case)}", f"{_label(case)}: {pin['value']!r} → {found['value']!r}")
    if not _near(found["bound"], pin["bound"]):
        yield Difference(f"bound: {_kind(case)}", f"{_label(case)}: {pin['bound']!r} → {found['bound']!r}")


def _study(pin: Plain) -> Iterator[Difference]:
    case = pin["case"]
    found, kind = adapter.replay(case), f"{_kind(case)}, {case['sampler']}"
    if not _near(found["tried"], pin["tried"]):
        pairs = zip(found["tried"], pin["tried"], strict=False)
        same = next(
            (n for n, (a, b) in enumerate(pairs) if not _near(a, b)), min(len(found["tried"]), len(pin["tried"]))
        )
        yield Difference(f"study's sequence: {kind}", f"{_label(case)}: from trial {same} on")
    if not found["value"] <= pin["value"] * (1 + RTOL):
        yield Difference(f"study's best: {kind}", f"{_label(case)}: {pin['value']!r} → {found['value']!r}")
    elif found["best"] != pin["best"]:
        yield Difference(f"study's best plan: {kind}", f"{_label(case)}: {found['value']!r}")
    for _, *old in pin.get("front", ()):
        if not any(all(a <= b * (1 + RTOL) for a, b in zip(new, old, strict=True)) for _, *new in found["front"]):
            yield Difference(f"study's front: {kind}", f"{_label(case)}: nothing is as good as {old}")


def _placement(pin: Plain) -> Iterator[Difference]:
    path = REFERENCE / "placement" / f"{pin['instance']}.json"
    if not path.is_file():
        return
    found = adapter.placement(path, pin["objective"], LIMIT_S)
    if not found["value"] <= pin["value"] * (1 + SOLVED_RTOL):
        yield Difference("worse placement", f"{path.stem} {pin['objective']}: {pin['value']!r} → {found['value']!r}")
    if not math.isclose(found["bound"], pin["bound"], rel_tol=SOLVED_RTOL):
        yield Difference("placement's bound", f"{path.stem} {pin['objective']}: {pin['bound']!r} → {found['bound']!r}")


def _placements(old: Plain | None) -> list[Plain]:
    if old is not None and not (REFERENCE / "placement").is_dir():
        return list(old["placements"])
    found = []
    for name, objective in PLACEMENTS:
        solved = adapter.placement(REFERENCE / "placement" / f"{name}.json", objective, LIMIT_S)
        if solved.pop("proven"):
            rounded = {key: float(f"{value:.7g}") for key, value in solved.items()}
            found.append({"instance": name, "objective": objective, **rounded})
    return found


def _near(found: Any, pinned: Any) -> bool:
    if isinstance(pinned, list):
        return isinstance(found, list) and len(found) == len(pinned) and all(map(_near, found, pinned))
    if isinstance(pinned, float) and isinstance(found, int | float):
        return math.isclose(found, pinned, rel_tol=RTOL)
    return bool(found == pinned)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 60 else f"{shown[:57]}…"
