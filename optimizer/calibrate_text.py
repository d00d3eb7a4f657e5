"""A calibration as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from search_spaces.wording import percent

if TYPE_CHECKING:
    from optimizer.calibrate import Calibration


def render_calibration(found: Calibration) -> str:
    """Return where the profile is and how wrong it is, in lines."""
    lanes = {like: "/".join(p.name for p in members) for like, members in found.platform.classes().items()}
    lines = [f"{found.out}: {', '.join(lanes.get(k, k) for k in found.profile.processors)} of {found.platform.name}"]
    for like, errors in found.profile.errors.items():
        if not isinstance(errors, Mapping) or "models" not in errors:
            continue
        who = lanes.get(like, like)
        lines.append(f"{who}: models kept out of the fit {_errors(errors['models'])}")
        if errors.get("operators"):
            lines.append(f"{who}: their operators {_errors(errors['operators'])}")
    regret = found.profile.errors.get("regret")
    if isinstance(regret, Mapping):
        lines.append(
            f"choosing a processor by it costs {percent(regret['mean'], 1)} on average, "
            f"at most {percent(regret['most'], 1)}"
        )
    if len(lines) == 1:
        lines.append("no model was kept out of the fit, so how wrong it is is not known; give it more --minutes")
    return "\n".join(lines)


def _errors(errors: Mapping[str, Any]) -> str:
    return (
        f"({errors['cases']:.0f}): median error {percent(errors['median'], 1)}, 90th percentile "
        f"{percent(errors['p90'], 1)}; "
        f"within 10 %: {percent(errors['within_10'])}; rank correlation {errors['kendall']:.2f}"
    )
