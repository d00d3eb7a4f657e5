"""Measure plans on another machine: the evaluator ``remote``.

When a device is lost, the batch that it was running is lost, too. A plan that has returned no batch yet moves silently
to the first of the devices that answers, or waits until one does. For any other plan the measurement fails with
:class:`~search_spaces.core.errors.DeviceLostError`, since samples of two devices do not mix, and is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from evaluators.base import Agreement, Batch, Candidate, Evaluator, EvaluatorCapabilities, Session
from evaluators.guard import wrong_batch
from evaluators.litert.deployment import INPUTS
from evaluators.remote import wire
from evaluators.remote.connection import SHORT_S, SLACK_S, Connection, Link, Sendable, sendable, waited
from evaluators.remote.devices import Device, find_devices
from evaluators.workload.host import PricedWorkload
from evaluators.workload.lowered import Lowerings
from evaluators.workload.outcome import Objective
from evaluators.workload.predicted import Grids
from evaluators.workload.prices import PriceTable
from search_spaces.core.decoded_plan import RankSet
from search_spaces.core.errors import DeviceLostError, OptimizeError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.pools import single_processors
from search_spaces.core.workload import Workload
from search_spaces.models.inputs import write_inputs

_PRICE_S = 1000.0  # the agent's own limit, and time for the transfer


class RemoteEvaluator(Evaluator):
    """Measures plans on a device that an agent serves; :meth:`at` selects the device first."""

    name = "remote"
    capabilities = EvaluatorCapabilities(names=True, targets=True, workloads=True, measures_here=False)

    def __init__(self) -> None:
        self._devices: tuple[Device, ...] = ()
        self._names: list[str] = []

    def at(self, device: str) -> None:
        """Measure on the device of that name from now on; several names, with commas, are any of several alike."""
        self._devices = find_devices(device)

    def platform(self) -> Platform:
        """Return the processors of the first device that answers, under the names of the devices."""
        found = wire.platform_from_json(self._first("Describe", {}).get("platform"))
        return replace(found, name=",".join(device.name for device in self._known()))

    def processor(self, name: str) -> Processor:
        """Return the processor of a name, as the first device that answers makes it."""
        found = wire.platform_from_json(self._first("Processor", {"name": name}).get("platform"))
        self._names.append(name)
        return found.processors[0]

    @contextmanager
    def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[RemoteSession]:  # noqa: ARG002
        """Open a session on a platform; leaving the context returns the device.

        Waits for a device that measures for another client.
        """
        with self._leased(platform) as (link, folder):
            yield RemoteSession(link, folder)

    @contextmanager
    def host(
        self,
        workload: Workload,
        joined: JoinedGraph,
        platform: Platform,
        objective: Objective,
        scratch: Path | None = None,  # noqa: ARG002
    ) -> Iterator[RemoteWorkload]:
        """Open a session for one workload, as :meth:`prepare` does; the models run in the agent's evaluator."""
        with self._leased(replace(platform, processors=single_processors(platform))) as (link, folder):
            yield RemoteWorkload(link, folder, Lowerings(workload, joined, platform), objective)

    @contextmanager
    def _leased(self, platform: Platform) -> Iterator[tuple[Link, Path]]:
        """Hold the lease of a device; yield its link and a folder for files that are sent."""
        with (
            TemporaryDirectory(prefix="sent-") as folder,
            closing(Link(self._known(), platform, self._names)) as link,
        ):
            link.connect()
            yield link, Path(folder)

    def _known(self) -> tuple[Device, ...]:
        if not self._devices:
            raise UsageError("--evaluator remote requires a device", "give --device NAME")
        return self._devices

    def _first(self, method: str, data: dict[str, Any]) -> dict[str, Any]:
        """Call a method of the first device that answers."""

        def ask(device: Device) -> dict[str, Any]:
            with closing(Connection(device)) as connection:
                return connection.call(method, data, SHORT_S)

        return waited(self._known(), ask)


class RemoteSession(Session):
    """A session on the device whose lease is held."""

    def __init__(self, link: Link, folder: Path) -> None:
        self._link = link
        self._folder = folder
        self.platform = link.platform
        self._models: dict[tuple[str, str], Sendable] = {}
        # An agent adds conditions of its own.
        self.capabilities = replace(link.capabilities, conditions=True)

    def powers_w(self) -> dict[str, float]:
        """Return the power (W) of processors while they run, where it is known."""
        return self._link.powers_w

    def conditions(self) -> dict[str, Any]:
        """Return conditions that may have affected the last measurements (governor, load, versions, …).

        They come from the device's last answer.
        """
        return dict(self._link.conditions)

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values."""
        return dict(self._link.fingerprint)

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> RemoteCandidate:
        """Compile a plan; with ``fresh``, share nothing with what is loaded already (a rebuilt instance)."""
        plan.validate(graph, self.platform)
        model, sent = self._sent(graph, plan)
        candidate = RemoteCandidate(self._link, model, plan, sent, fresh=fresh)
        self._link.moved(candidate.load)
        return candidate

    def _sent(self, graph: Graph, plan: Plan) -> tuple[Sendable | None, Callable[[], Plan]]:
        """Return the file to send, if any, and a function that returns the plan for the graph on the device."""
        model = self._model(graph)
        return model, partial(model.plan, plan)

    def unsupported_operators(self, graph: Graph, processor: str) -> list[int]:
        """Return the operators that a processor does not support, ascending."""
        model = self._model(graph)
        limit_s = self._link.platform.limits.load_s * len(graph.operators) + SLACK_S
        answer = self._link.moved(lambda: self._link.ask("Unsupported", {"processor": processor}, limit_s, model))
        found = answer.get("operators")
        if not isinstance(found, list) or not all(type(o) is int and 0 <= o < len(graph.operators) for o in found):
            raise wire.WireError("the device reports operators that do not exist")
        return sorted(found)

    def deploy(self, folder: Path, graph: Graph, plan: Plan) -> Agreement:
        """Write ``plan.json`` and the stage files to ``folder``, run them, and compare outputs.

        The device writes and runs the files, which are then fetched.
        """
        agreement = self._link.moved(lambda: self._deploy(folder, self._model(graph), plan))
        write_inputs(folder / INPUTS, graph)  # as the device drew them
        return agreement

    def _deploy(self, folder: Path, model: Sendable, plan: Plan) -> Agreement:
        data = {"plan": model.plan(plan).to_json()}
        answer = self._link.ask("Deploy", data, _load_limit_s(self._link, plan), model)
        entries, agreement = answer.get("files"), wire.agreement_from_json(answer.get("agreement"))
        if not isinstance(entries, list) or len(entries) > 2 * len(plan.stages) + 1 or agreement is None:
            raise wire.WireError("the device reports other files than the plan has")
        # plan.json comes first by name; it is fetched last, once all files that it names are here.
        fetched = {self._link.fetch(folder, entry).name for entry in reversed(entries)}
        for stale in folder.glob("stage_*.*"):
            if stale.name not in fetched:
                stale.unlink()
        return agreement

    def _model(self, graph: Graph) -> Sendable:
        key = (graph.digest, graph.source.content_digest() if graph.source is not None else "")
        if key not in self._models:
            self._models[key] = sendable(graph, self._folder)
        return self._models[key]


class RemoteWorkload(RemoteSession, PricedWorkload):
    """A session of several models: the device measures, this process predicts."""

    def __init__(self, link: Link, folder: Path, lowerings: Lowerings, objective: Objective) -> None:
        RemoteSession.__init__(self, link, folder)
        PricedWorkload.__init__(self, lowerings, objective)
        clients = [each.client for each in self.workload.instances]
        graphs = [self.joined.components[clients.index(c)].graph for c in range(len(self.workload.clients))]
        self._clients = [(graph, self._model(graph)) for graph in graphs]
        self._hosted = 0  # generation of the connection over which the models are hosted
        self._joined = ""
        self._there: dict[str, str] = {}
        link.moved(self._host)
        self.capabilities = replace(self.capabilities, deploy=False, stream=False, pause=False)

    def _host(self) -> None:
        """Have the device host the models, unless it does over the present connection."""
        if self._hosted == self._link.generation:
            return
        for _, model in self._clients:
            self._link.send(model)
        answer = self._link.ask(
            "Host",
            {
                "workload": self.workload.to_json(),
                "models": [model.digest for _, model in self._clients],
                "objective": self.objective,
            },
            2 * self.platform.limits.load_s + SLACK_S,
        )
        there = answer.get("structures")
        if not isinstance(there, list) or len(there) != len(self._clients):
            raise wire.WireError("the device hosts other models")
        self._there = {graph.digest: str(name) for (graph, _), name in zip(self._clients, there, strict=True)}
        self._joined, self._hosted = str(answer.get("joined")), self._link.generation
        capable = answer.get("capabilities")
        self.capabilities = replace(
            self.capabilities, decompose=isinstance(capable, dict) and capable.get("decompose") is True
        )

    def price(
        self, known: Mapping[str, Any] | None, progress: Callable[[str], None], grids: Grids = MappingProxyType({})
    ) -> Mapping[str, Any]:
        """Have the device measure the costs of jobs; predict by them, and return them as plain values."""
        found = known
        if known is None or grids:
            progress("the device determines the models' job times")
            sent = {self._there[m]: [list(map(list, each)) for each in rows] for m, rows in grids.items()}
            request = {"known": _renamed(known, self._there), "grids": sent}
            back = {there: here for here, there in self._there.items()}
            found = _renamed(self._asked("Price", request, _PRICE_S).get("prices"), back)
        if found is None:
            raise wire.WireError("the device reports no job times")
        self.predict_by(PriceTable.from_json(found))
        return found

    def _asked(self, method: str, data: dict[str, Any], limit_s: float) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            self._host()
            return self._link.ask(method, data, limit_s)

        return self._link.moved(ask)

    def decomposed_error(self, graph: Graph, ranks: RankSet) -> float | None:
        """Return the largest error of a decomposed model's outputs, relative to the largest value of that output."""
        request = {"structure": self._there[graph.digest], "ranks": list(map(list, ranks))}
        found = self._asked("DecomposedError", request, 4 * self.platform.limits.load_s + SLACK_S).get("error")
        return None if found is None else float(found)

    def _sent(self, graph: Graph, plan: Plan) -> tuple[None, Callable[[], Plan]]:  # noqa: ARG002
        """Return no file, and a function that returns the plan for the joined graph, which the device then hosts."""

        def sent() -> Plan:
            self._host()
            return replace(plan, graph_digest=self._joined)

        return None, sent


def _renamed(table: Mapping[str, Any] | None, names: Mapping[str, str]) -> dict[str, Any] | None:
    """Return a table of prices with the models renamed."""
    if not isinstance(table, Mapping):
        return None
    return {
        field: {names.get(key, key): value for key, value in rows.items()} if isinstance(rows, Mapping) else rows
        for field, rows in table.items()
    }


class RemoteCandidate(Candidate):
    """A plan that the device has loaded.

    Args:
        model: the file of its graph; None where the device hosts it already.
        sent: returns the plan with the digest of the graph on the device.
    """

    def __init__(
        self, link: Link, model: Sendable | None, plan: Plan, sent: Callable[[], Plan], *, fresh: bool
    ) -> None:
        self._link, self._model, self._plan, self._sent, self._fresh = link, model, plan, sent, fresh
        self._number = self._generation = 0
        self._shown = False

    def load(self) -> None:
        """Have the device load the plan, over the current connection."""
        request = {"plan": self._sent().to_json(), "fresh": self._fresh}
        answer = self._link.ask("Load", request, _load_limit_s(self._link, self._plan), self._model)
        self._number, self._generation = wire.whole(answer, "candidate", 1, 1 << 53), self._link.generation

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` inferences; fewer where one takes longer than ``stop_above_s``.

        Raises:
            DeviceLostError: the device was lost after it had returned batches of this plan.
        """
        return self._batch({"n": n, "stop_above_s": wire.finite(stop_above_s)}, n, stop_above_s)

    def stream(self, n: int) -> Batch:
        """Return ``n`` observations of the period of a full pipeline; errors as in :meth:`run`."""
        return self._batch({"n": n, "stream": True}, n, math.inf)

    def after_pause(self, pause_s: float) -> float:
        """Return the latency (s) of one inference after a pause; errors as in :meth:`run`."""
        limit_s = self._link.platform.limits.run_s + pause_s + SLACK_S
        took_s = wire.seconds(self._asked("AfterPause", {"pause_s": pause_s}, limit_s), "seconds")
        if not 0.0 < took_s < math.inf:
            raise UnavailableError(f"the device returned a latency of {took_s} s")
        return took_s

    def _batch(self, request: dict[str, Any], n: int, stop_above_s: float) -> Batch:
        answer = self._asked("Run", request, self._link.platform.limits.run_s * (n + 1) + SLACK_S)
        batch = wire.batch_from_json(answer.get("batch"))
        problem = wrong_batch(batch, n, len(self._plan.stages), stop_above_s)
        if problem:
            raise UnavailableError(f"the device returned {problem}")
        self._shown = True
        return batch

    def verify(self) -> Agreement | None:
        """Compare the outputs of the last run with the whole model's; run once if there was none."""
        answer = self._asked("Verify", {}, 4 * self._link.platform.limits.run_s + SLACK_S)
        return wire.agreement_from_json(answer.get("agreement"))

    def close(self) -> None:
        """Release what only this candidate holds; a second call does nothing."""
        if self._number and self._generation == self._link.generation:
            with suppress(OptimizeError):  # a lost device has closed it
                self._link.ask("Close", {"candidate": self._number}, SHORT_S + SLACK_S)
        self._number = 0

    def _asked(self, method: str, data: dict[str, Any], limit_s: float) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            if self._generation != self._link.generation:
                self.load()
            return self._link.ask(method, {**data, "candidate": self._number}, limit_s)

        if not self._shown:
            return self._link.moved(ask)
        if self._generation != self._link.generation:
            raise DeviceLostError("the device was lost while a plan was measured")
        return ask()


def _load_limit_s(link: Link, plan: Plan) -> float:
    return link.platform.limits.load_s * (1 + len(plan.stages)) + SLACK_S
