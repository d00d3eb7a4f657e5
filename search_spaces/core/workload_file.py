"""Workloads from YAML files, with errors at ``file:line``.

::

    name: robot
    memory_limit_mb: 512           # weights and tensors of all instances
    models:
      - model: mobilenet_v1        # a built-in model, or a .tflite file, relative to this one
        name: detector             # default: the name of the model
        count: 2
        arrival: {kind: periodic, period_ms: 33.3, requests: 60}
        deadline_ms: 33.3          # default of a periodic model: its period
        priority: 2
      - model: squeezenet1_1
        arrival: {kind: closed, requests: 20}
        own_weights: true
      - model: speech.tflite
        input: spoken.npz          # as --input
        signature: decode          # as --signature
        custom_ops: libops.so      # as --custom-ops, which must name it, too: a file alone loads no code
      - model: resnet50
        tucker: {max_error: 0.05}  # decompose convolutions within this error; true: 0.1, or --max-error
      - model: googlenet
        arrival: {kind: poisson, rate_per_s: 5, requests: 10}
        queue: 8
    seed: 7                        # of random arrivals
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from search_spaces.core.errors import UsageError
from search_spaces.core.workload import (
    GIVEN,
    MAX_INSTANCES,
    MAX_REQUESTS,
    QUEUE,
    RANKED_ERROR,
    Arrival,
    ArrivalKind,
    Client,
    Workload,
    wrong_with,
)
from search_spaces.core.yaml_file import Document, Part, Word, composed, read_document, wrong

_WANTS = {"periodic": "period_ms", "poisson": "rate_per_s"}

Requests = Annotated[int, Field(ge=1, le=MAX_REQUESTS)]
Milliseconds = Annotated[float, Field(ge=0, le=86_400e3)]


class _Arrival(Part):
    kind: ArrivalKind
    requests: Requests = 1
    period_ms: Milliseconds | None = None
    rate_per_s: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    offset_ms: Milliseconds = 0.0

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: object) -> object:
        return {"kind": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _fits(self) -> Self:
        wanted = _WANTS.get(self.kind)
        for key in _WANTS.values():
            given = getattr(self, key) is not None
            if given and key != wanted:
                raise wrong(f"{key!r} does not go with an arrival of kind {self.kind!r}", key=key)
            if not given and key == wanted:
                raise wrong(f"an arrival of kind {self.kind!r} must say {wanted!r}")
        return self

    @property
    def arrival(self) -> Arrival:
        period_s = 1.0 / self.rate_per_s if self.rate_per_s is not None else (self.period_ms or 0.0) / 1e3
        return Arrival(self.kind, self.requests, period_s, self.offset_ms / 1e3)


class _Tucker(Part):
    max_error: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _switch(cls, data: object) -> object:
        if isinstance(data, str) and data not in ("true", "false"):
            raise wrong("tucker must be true, false or {max_error: E}")
        return data if not isinstance(data, str) else {} if data == "true" else {"max_error": 0.0}


class _Model(Part):
    model: Word
    name: Word | None = None
    count: Annotated[int, Field(ge=1, le=MAX_INSTANCES)] = 1
    arrival: _Arrival | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    deadline_ms: Annotated[Milliseconds, Field(gt=0)] | None = None
    own_weights: bool = False
    queue: Requests | None = None
    tucker: _Tucker | None = None
    input: Word | None = None
    signature: Word | None = None
    custom_ops: Word | None = None


class _Workload(Part):
    name: Word | None = None
    memory_limit_mb: Annotated[float, Field(ge=1e-3)] | None = None
    models: Annotated[tuple[_Model, ...], Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0


def is_workload_file(path: Path) -> bool:
    """Return whether a YAML file has models; false where it cannot be read."""
    try:
        return "models" in _keys(path)
    except UsageError:
        return False


def _keys(path: Path) -> set[Any]:
    root = composed(path, "a workload", "it must describe a workload")
    return {key.value for key, _ in root.value if key.id == "scalar"} if root.id == "mapping" else set()


def read_workload(path: Path, most_error: float = RANKED_ERROR) -> Workload:
    """Read a workload.

    Args:
        most_error: limit on the error of models that may be decomposed and give none themselves.

    Raises:
        UsageError: the file is missing, no workload, or wrong; the text begins with ``file:line``.
    """
    keys = _keys(path)
    if "models" not in keys and "networks" in keys:
        raise UsageError(f"{path}: is a table of times, not a workload", "give --evaluator table")
    if "models" not in keys and "matrix" in keys:
        raise UsageError(f"{path}: is a campaign, not a workload", f"use optimize run {path}")
    document = read_document(path, _Workload, "a workload")
    found, clients = document.content, list[Client]()
    for number in range(len(found.models)):
        client = _client(document, number, most_error)
        if any(client.name == other.name for other in clients):
            problem = f"two models have the name {client.name!r}"
            raise document.error(("models", number), problem, "give a count, or a name to each")
        clients.append(client)
    limit_mb = found.memory_limit_mb
    try:
        return Workload(
            found.name or path.stem, tuple(clients), found.seed, None if limit_mb is None else int(limit_mb * 1e6)
        )
    except UsageError as error:
        raise document.error(("models",), error.what, error.hint) from error


def _client(document: Document[_Workload], number: int, most_error: float) -> Client:
    entry = document.content.models[number]
    model = entry.model
    if model.endswith((".tflite", ".yaml", ".yml")):
        model = _beside(document.path, model)
    given = {name: text for name in GIVEN if (text := getattr(entry, name)) is not None}
    given |= {name: _beside(document.path, given[name]) for name in ("input", "custom_ops") if name in given}
    arrival = Arrival() if entry.arrival is None else entry.arrival.arrival
    deadline_s = arrival.period_s if arrival.kind == "periodic" else None
    error = None
    if entry.tucker is not None:
        error = most_error if entry.tucker.max_error is None else entry.tucker.max_error
    client = Client(
        entry.name or (Path(model).stem if model.endswith(".tflite") else model),
        model,
        entry.count,
        arrival,
        entry.priority,
        deadline_s if entry.deadline_ms is None else entry.deadline_ms / 1e3,
        entry.own_weights,
        entry.queue or max(QUEUE, arrival.requests if arrival.kind == "burst" else 0),
        error,
        **given,
    )
    if problem := wrong_with(client):
        raise document.error(("models", number), f"{client.name!r} {problem}")
    return client


def _beside(path: Path, file: str) -> str:
    """Return the path of a file relative to the workload file if it exists there, else unchanged."""
    beside = path.parent / file
    return str(beside) if beside.is_file() else file
