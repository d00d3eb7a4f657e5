"""The warning that a profile extrapolates the times of some operators, in one line for all processors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from evaluators.cost_model.profile import Concern
from search_spaces.wording import plural

Reported = set[tuple[str, bool]]
"""What was reported: kernels, and whether the fit lacks them (else they are far outside its range)."""


def extrapolation_warning(name: str, concerns: Mapping[str, Iterable[Concern]], told: Reported) -> str | None:
    """Return a line about operators that a profile was not fitted to, or None where everything was reported before.

    Args:
        name: of the profile.
        concerns: processor → what is extrapolated there.
        told: what was reported before of the same model; what this line reports is added.
    """
    lanes: dict[tuple[str, bool], list[str]] = {}
    worst: dict[tuple[str, bool], Concern] = {}
    operators: set[int] = set()
    for lane, found in concerns.items():
        for concern in found:
            what = concern.kernel, math.isinf(concern.beyond)
            operators.update(concern.operators)
            lanes.setdefault(what, []).append(lane)
            if what not in worst or concern.beyond > worst[what].beyond:
                worst[what] = concern
    if lanes.keys() <= told:
        return None
    told.update(lanes)
    far = [
        f"{kernel} (up to {_times(worst[kernel, unseen].beyond)} times{_where(lanes[kernel, unseen], concerns)})"
        for kernel, unseen in sorted(lanes, key=lambda what: -worst[what].beyond)
        if not unseen
    ]
    never = [f"{kernel}{_where(found, concerns)}" for (kernel, unseen), found in lanes.items() if unseen]
    parts = [f"outside the range of its fit: {', '.join(far)}"] if far else []
    parts += [f"missing in its fit: {', '.join(never)}"] if never else []
    return f"profile {name!r} extrapolates {plural(len(operators), 'operator')}; {'; '.join(parts)}"


def _times(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _where(lanes: list[str], every: Mapping[str, object]) -> str:
    """Return on which processors, in words, or nothing where it is on all."""
    if len(lanes) == len(every):
        return ""
    return f" on {', '.join(lanes)}" if len(lanes) <= 2 else f" on {len(lanes)} of {len(every)} processors"
