"""Plans on a phone: the evaluator ``adb``.

Each stage is a file that is sent once and timed alone by LiteRT's ``benchmark_model``, in several processes one after
another. The plan itself is not run: its latency is computed from these times in the order of the plan, with a cost for
each tensor that moves to another processor. So effects between stages (caches, heat, bandwidth) are not included;
``conditions`` reports this with every measurement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from evaluators.android.farm import Handset, find_handset
from evaluators.base import Batch, Candidate, Capabilities, ClosableSession, Evaluator, EvaluatorCapabilities
from evaluators.schedule import Law, Task, run_tasks, timeline
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.models.cache import cache_dir
from search_spaces.models.files import file_digest, locked
from search_spaces.models.stages import cut_stage

FOLDER = "/data/local/tmp/partition-optimizer"
_PROCESSES = 5
_RUNS = ("--num_runs=20", "--min_secs=0.1", "--warmup_runs=2", "--warmup_min_secs=0.05", "--max_secs=20")
_PROFILING = ("--enable_op_profiling=true", "--op_profiling_output_mode=proto")


class AdbEvaluator(Evaluator):
    """Measures stages on an Android phone; :meth:`at` selects the phone first."""

    name = "adb"
    capabilities = EvaluatorCapabilities(targets=True, measures_here=False)

    def __init__(self) -> None:
        self._handset: Handset | None = None

    def at(self, device: str) -> None:
        """Measure on the device of that name from now on; several names, with commas, are any of several alike."""
        self._handset = find_handset(device)

    def platform(self) -> Platform:
        """Return the processors that this evaluator finds by itself.

        They are those that the file of devices lists for the phone.
        """
        return self._known().platform

    @contextmanager
    def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[AdbSession]:  # noqa: ARG002
        """Open a session on a platform; leaving the context releases the phone.

        A phone serves one study at a time.
        """
        handset = self._known()
        with (
            _alone(handset),
            TemporaryDirectory(prefix="stages-") as folder,
            closing(AdbSession(handset, platform, Path(folder))) as session,
        ):
            session.install()
            yield session

    def _known(self) -> Handset:
        if self._handset is None:
            raise UsageError("--evaluator adb requires a phone", "give --device NAME")
        return self._handset


def _alone(handset: Handset) -> AbstractContextManager[None]:
    """Return a context that keeps other studies of this machine from measuring on the phone meanwhile."""
    folder = cache_dir() / "phones"
    folder.mkdir(parents=True, exist_ok=True)
    serial = "".join(c if c.isalnum() else "_" for c in handset.phone.serial)
    busy = UnavailableError(f"phone {handset.name} measures for another study", "wait for it")
    return locked(folder / f"{serial}.lock", busy)


def profiled_s(content: bytes) -> float:
    """Return the time of a stage (s), averaged over the runs of one process: the sum over its nodes.

    Args:
        content: of the file that ``--op_profiling_output_file`` named.

    Raises:
        UnavailableError: it is not a profile, or contains no run.
    """
    from ai_edge_litert.profiling_info_pb2 import BenchmarkProfilingData
    from google.protobuf.message import DecodeError

    data = BenchmarkProfilingData()
    try:
        data.ParseFromString(content)
    except DecodeError as error:
        what = "benchmark_model wrote no readable profile"
        raise UnavailableError(what, "use the benchmark_model of LiteRT") from error
    subgraphs = data.runtime_profile.subgraph_profiles
    # Nodes of called subgraphs are already counted in the node that calls them.
    nodes = [node for s in subgraphs if not s.subgraph_index for node in s.per_op_profiles]
    stats = [node.inference_microseconds for node in nodes]
    each_us = (stat.sum / stat.count if stat.count else float(stat.avg) for stat in stats)
    seconds = math.fsum(max(mean_us, 0.0) * 1e-6 for mean_us in each_us)
    if not seconds > 0.0:
        raise UnavailableError("benchmark_model wrote a profile without a run", "see its flags, and whether it crashed")
    return seconds


class AdbSession(ClosableSession):
    """A session on one phone."""

    capabilities = Capabilities(conditions=True)

    def __init__(self, handset: Handset, platform: Platform, folder: Path) -> None:
        self._handset, self._platform, self._folder = handset, platform, folder
        self._timed: dict[tuple[str, str, tuple[int, ...]], list[float]] = {}
        self._there: set[str] = set()
        self._reported: dict[str, Any] = {}
        self._facts: dict[str, str] = {}

    def install(self) -> None:
        """Copy ``benchmark_model`` to the phone if it is not there yet, and read the phone's model and build.

        Raises:
            UnavailableError: the phone is not attached, or refuses the file.
        """
        self._run(["mkdir", "-p", FOLDER])
        self._benchmark = self._sent(self._handset.benchmark, "benchmark_model", 0o755)
        for name, key in (("model", "ro.product.model"), ("build", "ro.build.fingerprint")):
            self._facts[name] = self._run(["getprop", key]).strip()[:200]

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values."""
        return {
            "evaluator": AdbEvaluator.name,
            "phone": self._facts,
            "benchmark_model": file_digest(self._handset.benchmark),
            "flags": [*_RUNS, *_PROFILING],
            "platform": self._platform.to_json(),
        }

    def conditions(self) -> dict[str, Any]:
        """Return conditions that may have affected the last measurements (governor, load, versions, …).

        Temperature and clock after the last stage, and the costs of transfers, which are not measured.
        """
        links = {(link.bandwidth_bytes_per_s, link.latency_s) for link in self._platform.links}
        price = "; ".join(f"{rate:g} B/s and {latency_s:g} s" for rate, latency_s in sorted(links)) or "nothing"
        return {**self._reported, "device": self._handset.name, "transfer": f"not measured: priced at {price}"}

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> AdbCandidate:
        """Compile a plan; with ``fresh``, share nothing with what is loaded already (a rebuilt instance).

        Without ``fresh``, stages that were timed before are not timed again.
        """
        self.check_open()
        plan.validate(graph, self._platform)
        if graph.source is None:
            raise UnavailableError(f"model {graph.name!r} has no file; phones are sent files")
        if any(stage.share is not None for stage in plan.stages):
            raise UnavailableError("phones run no split stages", "leave splits out of --allow")
        digest = graph.source.content_digest()
        samples = []
        for stage in plan.stages:
            key = (digest, stage.processor, stage.operators)
            if fresh or key not in self._timed:
                self._timed[key] = self._time(graph, stage.operators, self._platform[stage.processor])
            samples.append(self._timed[key])
        return AdbCandidate(graph, plan, self._platform, samples)

    def _time(self, graph: Graph, operators: tuple[int, ...], processor: Processor) -> list[float]:
        """Time a stage on a processor, in several processes one after another."""
        path = self._folder / "stage.tflite"
        digest = cut_stage(graph, operators).write(path)
        there = self._sent(path, f"{digest}.tflite", 0o644, digest)
        profile = f"{FOLDER}/profile.pb"
        command = [self._benchmark, f"--graph={there}", *processor.options["flags"], *_RUNS, *_PROFILING]
        command.append(f"--op_profiling_output_file={profile}")
        if "mask" in processor.options:
            command = ["taskset", processor.options["mask"], *command]
        found = []
        for _ in range(_PROCESSES):
            self._run(["rm", "-f", profile])
            self._run(command, self._platform.limits.run_s)
            found.append(profiled_s(self._handset.phone.pull(profile)))
        self._reported = self._conditions()
        return found

    def _sent(self, path: Path, name: str, mode: int, digest: str = "") -> str:
        """Send a file unless the phone has it, and verify its digest there; return its path on the phone."""
        digest, there = digest or file_digest(path), f"{FOLDER}/{name}"
        if digest in self._there:
            return there
        phone = self._handset.phone
        if self._digest(there) != digest:
            phone.push(path, f"{there}.part", mode)
            if self._digest(f"{there}.part") != digest:
                raise UnavailableError(f"phone {self._handset.name}: {name} did not arrive as it was sent", "try again")
            self._run(["mv", f"{there}.part", there])
        self._run(["chmod", f"{mode:o}", there])
        self._there.add(digest)
        return there

    def _digest(self, there: str) -> str:
        code, out, _ = self._handset.phone.shell(["sha256sum", there])
        return out.decode(errors="replace").split(" ")[0] if code == 0 else ""

    def _conditions(self) -> dict[str, Any]:
        """Return battery temperature and clock of core 0, as far as the phone reports them."""
        reported: dict[str, Any] = {}
        with suppress(UnavailableError, ValueError):
            battery = self._run(["dumpsys", "battery"])
            if found := re.search(r"^\s*temperature:(.*)$", battery, re.MULTILINE):
                reported["temperature_c"] = int(found[1]) / 10.0
        with suppress(UnavailableError, ValueError):
            path = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"
            reported["clock_hz"] = int(self._run(["cat", path])) * 1e3
        return reported

    def _run(self, words: list[str], limit_s: float = 60.0) -> str:
        code, out, errors = self._handset.phone.shell(words, limit_s)
        if code:
            lines = (errors or out).decode(errors="replace").strip().splitlines() or ["without a word"]
            program = Path(words[0]).name
            raise UnavailableError(f"phone {self._handset.name}: {program} ended with {code}: {lines[-1][:200]}")
        return out.decode(errors="replace")


class AdbCandidate(Candidate):
    """A plan whose stages were timed; ``benchmark_model`` does not report outputs."""

    def __init__(self, graph: Graph, plan: Plan, platform: Platform, samples: list[list[float]]) -> None:
        self._plan, self._samples, self._law = plan, samples, Law.of(platform)
        processors = {p.name: i for i, p in enumerate(platform.processors)}
        self._processors = [processors[stage.processor] for stage in plan.stages]
        self._needs = [_needs(graph, plan, platform, index) for index in range(len(plan.stages))]
        self._next = 0

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` inferences; fewer where one takes longer than ``stop_above_s``.

        Each run uses the stages' times from the next process.
        """
        latency_s: list[float] = []
        rows: list[list[float]] = []
        while len(rows) < n and not (latency_s and latency_s[-1] > stop_above_s):
            row = [taken[self._next % len(taken)] for taken in self._samples]
            self._next += 1
            tasks = [Task(*task) for task in zip(self._processors, row, self._needs, strict=True)]
            found = timeline(run_tasks(tasks, self._law), [stage.processor for stage in self._plan.stages])
            latency_s.append(max(event.end_s for event in found.events))
            rows.append(row)
        return Batch(np.array(latency_s), np.array(rows), found)


def _needs(graph: Graph, plan: Plan, platform: Platform, index: int) -> tuple[tuple[int, float], ...]:
    """Return the stages that a stage reads from, each with the time of the transfer (s)."""
    place = {operator: i for i, stage in enumerate(plan.stages) for operator in stage.operators}
    mine, taken = plan.stages[index].processor, dict[int, float]()
    for tensor in graph.boundary(plan.stages[index].operators).inputs:
        if tensor not in graph.producer:
            continue
        before = place[graph.producer[tensor]]
        link = next((k for k in platform.links if set(k.between) == {mine, plan.stages[before].processor}), None)
        priced_s = 0.0 if link is None else link.latency_s + graph.tensors[tensor].nbytes / link.bandwidth_bytes_per_s
        taken[before] = taken.get(before, 0.0) + priced_s
    return tuple(sorted(taken.items()))
