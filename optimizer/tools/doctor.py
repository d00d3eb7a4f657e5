"""Check of this machine, and the other devices that can be searched for from here."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from evaluators.android.adb import phones
from evaluators.cost_model.profile import find_profile, shipped_profiles
from evaluators.litert.adapters import Adapter, driver_files, find_adapters, vulkan_version
from evaluators.litert.processors import (
    dispatch_libraries,
    local_platform,
    make_processor,
    npu_folder,
    reduced_processors,
    usable_cores,
)
from evaluators.litert.session import LitertEvaluator
from evaluators.litert.worker.openvino import find_devices, other_versions
from evaluators.litert.worker.runtimes import OPENVINO, TFLITE, check_installed, version
from evaluators.litert.workers import Request, Workers
from evaluators.machine import BUSY, HOT_C, STOLEN, MachineState, core_quota, machine_state
from evaluators.measurement.foreground import may_run_first
from evaluators.remote.connection import AgentState, agent_state
from evaluators.remote.devices import agents, devices_file
from optimizer.report.console import make_console
from optimizer.tools.plugins import other_evaluators
from search_spaces.core.errors import OptimizeError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform, tell_apart
from search_spaces.core.wording import percent, plural
from search_spaces.models import load
from search_spaces.models.cache import cache_dir

SCHEMA_VERSION = 1
_LEAST_MEMORY, _LEAST_DISK = 2 << 30, 4 << 30
_MOST_OPERATORS = 12
_START_LIMIT_S = 30.0
_MOST_PROCESSORS = 6  # of a device, that are named


@dataclass(frozen=True, slots=True)
class Finding:
    """One property of the machine that was checked.

    Attributes:
        name: what it is.
        value: its value, as text.
        problem: what is wrong with it, or "".
        advice: what to do about the problem, or "".
        blocks: whether nothing can be measured because of it.
    """

    name: str
    value: str
    problem: str = ""
    advice: str = ""
    blocks: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Operators of a model that a processor does not support.

    Attributes:
        operators: their indices, ascending.
        kinds: kind → how many of them.
        error: why they are not known, or "".
    """

    processor: str
    operators: tuple[int, ...]
    kinds: dict[str, int]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that the doctor found."""

    findings: tuple[Finding, ...]
    platform: Platform | None
    model: str | None = None
    refusals: tuple[Refusal, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether plans can be measured here."""
        return not any(finding.blocks for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "usable": self.usable,
            "findings": [asdict(finding) for finding in self.findings],
            "platform": self.platform.to_json() if self.platform else None,
            "model": self.model,
            "refusals": [asdict(refusal) for refusal in self.refusals],
        }


def _finding(name: str, value: str, bad: object, problem: str, advice: str) -> Finding:
    """Return a finding, with the problem and the advice if it is bad."""
    return Finding(name, value, problem, advice) if bad else Finding(name, value)


def diagnose(model: str | None = None) -> Diagnosis:
    """Check the machine, and which operators of a model its processors do not support.

    Raises:
        ModelError: there is no such model.
    """
    graph = load(model) if model is not None else None
    findings = [*_runtime(), *_cpu(), *_memory()]
    adapters = find_adapters(software=True)
    findings += [*_vulkan(adapters), _npu(), _openvino(), _other_runtime()]
    try:
        platform = _platform(adapters)
    except OptimizeError as error:
        findings.append(Finding("processors", "none", error.what, error.hint, blocks=True))
        return Diagnosis(tuple(findings), None, model)
    refusals = tuple(_refusals(platform, graph)) if graph is not None else ()
    return Diagnosis(tuple(findings), platform, model, refusals)


def render(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text: findings, what to do, processors, operators that are not supported."""
    width = max(len(finding.name) for finding in diagnosis.findings)
    lines, wide = [], make_console().width
    for finding in diagnosis.findings:
        absent = "–" if finding.value == "none" or finding.value.startswith("none: ") else "✓"
        sign = "×" if finding.blocks else "!" if finding.problem else absent
        starts = {f"{sign} {finding.name:{width}}  ": finding.value, "": finding.problem, "→ ": finding.advice}
        for start, text in starts.items():
            first = start if start.startswith(sign) else f"  {'':{width}}  {start}"
            lines += wrap(text, wide, initial_indent=first, subsequent_indent=" " * (width + 4))
    if diagnosis.platform is not None:
        lines += ["", "processors", *_processor_lines(diagnosis.platform)]
    if diagnosis.model is not None:
        lines += ["", f"operators of {diagnosis.model} that are not supported"]
        lines += [f"  {refusal.processor}: {_refused_text(refusal)}" for refusal in diagnosis.refusals]
    return "\n".join(lines)


def _processor_lines(platform: Platform) -> list[str]:
    """Return a line for each processor: its name, and what it is."""
    wide, found = max(len(p.name) for p in platform.processors), []
    for processor in platform.processors:
        options = processor.options
        if processor.kind == "gpu":
            driver = f", driver {options['driver_version']}" if "driver_version" in options else ""
            what = f"{options['adapter']}{driver}, {options['precision']}"
        else:
            cores = options["cores"]
            word = "core" if len(cores) == 1 else "cores"
            what = f"{word} {', '.join(map(str, cores))}; {plural(options['threads'], 'thread')}"
        if "runtime" in options:
            what += f"; {options['runtime']}"
        found.append(f"  {processor.name:{wide}}  {what}")
    return found


def _refused_text(refusal: Refusal) -> str:
    if refusal.error:
        return refusal.error
    if not refusal.operators:
        return "none"
    shown = ", ".join(map(str, refusal.operators[:_MOST_OPERATORS]))
    more = len(refusal.operators) - _MOST_OPERATORS
    kinds = ", ".join(f"{count} {kind}" for kind, count in refusal.kinds.items())
    return f"{kinds} (operators {shown}{f' and {more} more' if more > 0 else ''})"


def _runtime() -> Iterator[Finding]:
    yield Finding("Python", f"{sys.version.split()[0]} on {sys.platform}")
    try:
        version = importlib.metadata.version("ai-edge-litert")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("LiteRT", "missing", "the runtime is not installed", "pip install ai-edge-litert", blocks=True)
        return
    try:
        platform = local_platform()
        with closing(Workers(platform)) as processors:
            processors.ask(platform.processors[0].name, Request({"op": "arena", "id": 0, "nbytes": 0}), _START_LIMIT_S)
    except OptimizeError as error:
        yield Finding("LiteRT", version, error.what, error.hint, blocks=True)
        return
    yield Finding("LiteRT", version)


def _cpu() -> Iterator[Finding]:
    try:
        cores = usable_cores()
    except UnavailableError as error:
        yield Finding("cores", str(os.cpu_count()), error.what, error.hint, blocks=True)
        return
    value = f"{len(cores)} of {os.cpu_count()}: {', '.join(map(str, cores))}"
    few = "processors on separate cores need at least two cores"
    yield _finding("cores", value, len(cores) < 2, few, "give the process or container more cores")
    quota = core_quota()
    if quota is not None and quota < len(cores):
        yield Finding(
            "core time",
            f"that of {quota:g} cores",
            "the control group throttles all processes that together use more",
            "give the container whole cores instead of a share of time (docker: --cpuset-cpus instead of --cpus)",
        )
    first = may_run_first()
    yield Finding(
        "priority",
        "measurements run before other processes" if first else "equal to that of other processes",
        advice="" if first else "run as root, so that measurements run first",
    )
    yield from _state(machine_state(cores))


def _state(state: MachineState) -> Iterator[Finding]:
    yield _finding(
        "governor",
        ", ".join(state.governors) or "unknown",
        any(g != "performance" for g in state.governors),
        "the clock follows the load: short measurements run at a lower clock",
        "sudo cpupower frequency-set -g performance",
    )
    clocks = [hz / 1e9 for hz in state.clocks_hz]
    highest = f", at most {state.highest_hz / 1e9:.2f}" if state.highest_hz else ""
    yield Finding("clocks", f"{min(clocks):.2f} to {max(clocks):.2f} GHz{highest}" if clocks else "unknown")
    yield _finding(
        "temperature",
        "no sensor" if state.temperature_c is None else f"{state.temperature_c:.0f} °C",
        state.temperature_c is not None and state.temperature_c >= HOT_C,
        "the machine may throttle",
        "let it cool for five minutes, or improve its cooling",
    )
    yield _finding(
        "other load",
        "unknown" if state.busy is None else f"{percent(state.busy, 1)} of these cores",
        state.busy is not None and state.busy > BUSY,
        "other processes use the measured cores",
        "stop them (see top), or leave them a core: --processors cpu0",
    )
    yield _finding(
        "steal",
        "unknown" if state.steal is None else percent(state.steal, 1),
        state.steal is not None and state.steal > STOLEN,
        "the host runs other virtual machines on these cores",
        "measure at a quieter time, or on a machine with cores of its own",
    )


def _memory() -> Iterator[Finding]:
    free = machine_state((), 0.0).memory_free_nbytes
    shown = "unknown" if free is None else f"{free / 1e9:.1f} GB"
    little = free is not None and free < _LEAST_MEMORY
    yield _finding("free memory", shown, little, "large models will not fit", "close other programs")
    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        disk = shutil.disk_usage(existing).free
    except OSError as error:
        yield Finding("cache folder", str(folder), str(error), "point PARTITION_OPTIMIZER_CACHE to another folder")
        return
    problem = ""
    if not os.access(existing, os.W_OK):
        problem = "it is not writable: models and packed weights are rebuilt every time"
    elif disk < _LEAST_DISK:
        problem = "packed weights of large models may not fit"
    advice = "point PARTITION_OPTIMIZER_CACHE to a folder with more room"
    yield _finding("cache folder", f"{folder} ({disk / 1e9:.1f} GB free)", problem, problem, advice)


def _vulkan(adapters: tuple[Adapter, ...]) -> Iterator[Finding]:
    loader, missing = vulkan_version(), "no graphics adapter can be used"
    install = "install libvulkan1 (Debian, Ubuntu) or vulkan-loader (Fedora, Arch)"
    yield _finding("Vulkan loader", loader or "missing", not loader, missing, install)
    hardware = [a for a in adapters if a.kind != "software"]
    software = [a for a in adapters if a.kind == "software"]
    names = ", ".join(f"{a.name} ({a.kind}, driver {a.driver_version}, Vulkan {a.api_version})" for a in hardware)
    drivers = ", ".join(path.name for path in driver_files()) if not hardware else ""
    problem = f"no Vulkan driver answers; driver files: {drivers or 'none'}"
    advice = "install the adapter's Vulkan driver; in a container, give it the device (NVIDIA: graphics capability)"
    yield _finding("graphics adapters", names or "none", not hardware, problem, advice)
    found = ", ".join(f"{a.name} (Vulkan {a.api_version})" for a in software)
    yield Finding("software adapters", f"{found}; used only when named" if found else "none")


def _npu() -> Finding:
    try:
        return Finding("neural processor", str(npu_folder()))
    except UnavailableError as error:
        return Finding("neural processor", f"none: {error.what}", "", error.hint)


def _openvino() -> Finding:
    try:
        found = version(OPENVINO)
        devices = ", ".join(f"{d.device} ({d.name}: {' '.join(sorted(d.precisions))})" for d in find_devices())
    except UnavailableError as error:
        return Finding("OpenVINO", f"none: {error.what}", "", error.hint)
    other = other_versions(dispatch_libraries())
    return Finding("OpenVINO", f"{found}: {devices}", "", f"for npu: {', '.join(other)}" if other else "")


def _other_runtime() -> Finding:
    try:
        found = version(TFLITE)
    except UnavailableError:
        return Finding("tflite-runtime", "not installed (LiteRT is its successor)")
    try:
        check_installed(TFLITE)
    except UnavailableError as error:
        return Finding("tflite-runtime", found, error.what, error.hint)
    return Finding("tflite-runtime", found)


def _platform(adapters: tuple[Adapter, ...]) -> Platform:
    """Return the processors of this machine, those of less precision and software adapters, too."""
    found = local_platform()
    more = [make_processor("gpu:swiftshader")] if any(a.matches("swiftshader") for a in adapters) else []
    return Platform(found.name, tell_apart((*found.processors, *reduced_processors(), *more)))


def _refusals(platform: Platform, graph: Graph) -> Iterator[Refusal]:
    with LitertEvaluator().prepare(platform) as session:
        for processor in platform.processors:
            try:
                operators = tuple(session.unsupported_operators(graph, processor.name))
            except OptimizeError as error:
                yield Refusal(processor.name, (), {}, str(error))
                continue
            kinds = Counter(graph.operators[operator].kind for operator in operators)
            yield Refusal(processor.name, operators, dict(kinds))


@dataclass(frozen=True, slots=True)
class KnownDevices:
    """Devices that plans can be searched for.

    Attributes:
        here: processors of this machine; None if none can be used.
        problem: why not, or "".
        platforms: devices with a cost model that ships: name → its processors.
        phones: serial → state, from the adb server; None if no server answers.
        agents: name → what the agent of ``--evaluator remote`` answers.
        agents_file: where agents are described.
        evaluators: installed by others: name → its processors, or why it names none.
    """

    here: Platform | None
    problem: str
    platforms: dict[str, tuple[str, ...]]
    phones: dict[str, str] | None
    agents: dict[str, AgentState]
    agents_file: str
    evaluators: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self), "here": self.here.to_json() if self.here else None}


def known_devices() -> KnownDevices:
    """Look for devices; agents are asked, installed evaluators are started in processes of their own.

    Raises:
        UsageError: the file of agents is wrong.
    """
    here, problem = None, ""
    try:
        here = _platform(find_adapters(software=True))
    except OptimizeError as error:
        problem = str(error)
    profiles = ((name, find_profile(name)) for name in shipped_profiles())
    platforms = {name: tuple(p.name for p in profile[1].processors) for name, profile in profiles if profile}
    path = devices_file()
    found = agents(path) if path.exists() else {}
    with ThreadPoolExecutor(max(1, len(found))) as pool:
        states = dict(zip(found, pool.map(agent_state, found.values()), strict=True))
    evaluators = {p.name: p.note for p in other_evaluators(_START_LIMIT_S)}
    return KnownDevices(here, problem, platforms, phones(), states, str(path), evaluators)


def _some(processors: Sequence[str]) -> str:
    more = f", … ({len(processors)} processors)" if len(processors) > _MOST_PROCESSORS else ""
    return ", ".join(processors[:_MOST_PROCESSORS]) + more


def render_devices(found: KnownDevices) -> str:
    """Return the devices as text: each kind with the options that use it."""
    lines = ["this machine (--processors A,B)"]
    lines += _processor_lines(found.here) if found.here else [f"  none: {found.problem}"]
    lines += ["", "known devices, predicted (--evaluator cost-model --platform NAME)"]
    wide = max(map(len, found.platforms), default=0)
    for name, processors in found.platforms.items():
        lines.append(f"  {name:{wide}}  {_some(processors)}")
    lines += ["", "phones (--evaluator adb)"]
    if found.phones is None:
        lines.append("  no adb server answers; start it with: adb start-server")
    elif not found.phones:
        lines.append("  none is connected")
    else:
        lines += [f"  {serial}  {state}" for serial, state in found.phones.items()]
    lines += ["", "agents (--evaluator remote --device NAME)"]
    for name, agent in found.agents.items():
        asked = f"{agent.address}, {agent.state}: {_some(agent.processors)}" if agent.processors else agent.state
        lines.append(f"  {name}  {asked}")
    if not found.agents:
        lines.append(f"  none in {found.agents_file}; an example: devices: {{board: {{agent: HOST:7450}}}}")
    if found.evaluators:
        lines += ["", "installed evaluators (--evaluator NAME)"]
        lines += [f"  {name}  {processors}" for name, processors in found.evaluators.items()]
    return "\n".join(lines)
