"""``optimize devices``: what can be searched for from here: processors, known devices, phones and agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evaluators.android.adb import phones
from evaluators.cost_model.profile import find_profile, shipped_profiles
from evaluators.remote.devices import agents, devices_file
from optimizer.doctor import processor_lines, processors_here
from search_spaces.errors import OptimizeError
from search_spaces.platform import Platform

SCHEMA_VERSION = 1
_MOST_NAMES = 8


@dataclass(frozen=True, slots=True)
class KnownDevices:
    """What there is.

    Attributes:
        here: processors of this machine; None where there is none that can be used.
        problem: why not, or "".
        platforms: devices with a cost model that ships: name → its processors.
        phones: serial → state, as the adb server tells; None where no server answers.
        agents: name → address of ``--evaluator remote``.
        agents_file: where agents are described.
    """

    here: Platform | None
    problem: str
    platforms: dict[str, tuple[str, ...]]
    phones: dict[str, str] | None
    agents: dict[str, str]
    agents_file: str

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "here": self.here.to_json() if self.here else None,
            "problem": self.problem,
            "platforms": {name: list(processors) for name, processors in self.platforms.items()},
            "phones": self.phones,
            "agents": self.agents,
            "agents_file": self.agents_file,
        }


def known_devices() -> KnownDevices:
    """Look for devices; nothing is started, and no agent is asked.

    Raises:
        UsageError: the file of agents is wrong.
    """
    here, problem = None, ""
    try:
        here = processors_here()
    except OptimizeError as error:
        problem = str(error)
    platforms = {}
    for name in shipped_profiles():
        profile = find_profile(name)
        if profile is not None:
            platforms[name] = tuple(p.name for p in profile[1].processors)
    path = devices_file()
    found = agents(path) if path.exists() else {}
    return KnownDevices(here, problem, platforms, phones(), {n: d.address for n, d in found.items()}, str(path))


def render(found: KnownDevices) -> str:
    """Return what a person reads: each kind with the options that use it."""
    lines = ["this machine (--processors A,B)"]
    lines += processor_lines(found.here) if found.here else [f"  none: {found.problem}"]
    lines += ["", "known devices, predicted (--evaluator cost-model --platform NAME)"]
    wide = max(map(len, found.platforms), default=0)
    for name, processors in found.platforms.items():
        more = f", … ({len(processors)} processors)" if len(processors) > _MOST_NAMES else ""
        lines.append(f"  {name:{wide}}  {', '.join(processors[:_MOST_NAMES])}{more}")
    lines += ["", "phones (--evaluator adb)"]
    if found.phones is None:
        lines.append("  no adb server answers; start it with: adb start-server")
    elif not found.phones:
        lines.append("  none is connected")
    else:
        lines += [f"  {serial}  {state}" for serial, state in found.phones.items()]
    lines += ["", "agents (--evaluator remote --device NAME)"]
    lines += [f"  {name}  {address}" for name, address in found.agents.items()]
    if not found.agents:
        lines.append(f"  none in {found.agents_file}; see optimize help agent")
    return "\n".join(lines)
