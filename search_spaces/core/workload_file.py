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
from typing import Any

from search_spaces.core.errors import UsageError
from search_spaces.core.workload import (
    GIVEN,
    KINDS,
    MAX_INSTANCES,
    MAX_REQUESTS,
    QUEUE,
    RANKED_ERROR,
    Arrival,
    Client,
    Workload,
    wrong_with,
)
from search_spaces.core.yaml_file import Value, parsed

_FILES = (".tflite", ".onnx", ".pt2")
_WORKLOAD = ("name", "memory_limit_mb", "models", "seed")
_CLIENT = ("model", "name", "count", "arrival", "priority", "deadline_ms", "own_weights", "queue", "tucker", *GIVEN)
_ARRIVAL = ("kind", "requests", "period_ms", "rate_per_s", "offset_ms")
_WANTS = {"periodic": "period_ms", "poisson": "rate_per_s"}
_MOST_MS = 86_400e3


def is_workload_file(path: Path) -> bool:
    """Return whether a YAML file has models; false where it cannot be read."""
    try:
        return any(key.node.value == "models" for key, _ in parsed(path, "a workload").items("a workload"))
    except UsageError:
        return False


def read_workload(path: Path, most_error: float = RANKED_ERROR) -> Workload:
    """Read a workload.

    Args:
        most_error: limit on the error of models that may be decomposed and give none themselves.

    Raises:
        UsageError: the file is missing, no workload, or wrong; the text begins with ``file:line``.
    """
    root = parsed(path, "a workload")
    fields = root.fields("a workload", _WORKLOAD, models="a workload must have models")
    entries = fields["models"].each("models")
    clients = list[Client]()
    for entry in entries:
        client = _client(entry, path, most_error)
        if any(client.name == other.name for other in clients):
            raise entry.error(f"two models have the name {client.name!r}", "give a count, or a name to each")
        clients.append(client)
    limit = fields["memory_limit_mb"].number("the memory limit", above=1e-3) if "memory_limit_mb" in fields else None
    try:
        return Workload(
            fields["name"].text("the workload's name") if "name" in fields else path.stem,
            tuple(clients),
            _whole(fields["seed"], "the seed", 0, 2**31) if "seed" in fields else 0,
            None if limit is None else int(limit * 1e6),
        )
    except UsageError as error:
        raise fields["models"].error(error.what, error.hint) from error


def _client(entry: Value, path: Path, most_error: float) -> Client:
    fields = entry.fields("a model", _CLIENT, model="an entry must say which 'model' it is")
    model = fields["model"].text("the model")
    if model.endswith((".tflite", ".yaml", ".yml")):
        model = _beside(path, model)
    given = {name: fields[name].text(f"the {name.replace('_', ' ')}") for name in GIVEN if name in fields}
    given |= {name: _beside(path, given[name]) for name in ("input", "custom_ops") if name in given}
    arrival = _arrival(fields["arrival"]) if "arrival" in fields else Arrival()
    deadline_s = arrival.period_s if arrival.kind == "periodic" else None
    if "deadline_ms" in fields:
        deadline_s = _milliseconds(fields["deadline_ms"], "the deadline") or None
        if deadline_s is None:
            raise fields["deadline_ms"].error("the deadline must be above 0")
    client = Client(
        fields["name"].text("the name")
        if "name" in fields
        else Path(model).stem
        if model.endswith(".tflite")
        else model,
        model,
        _whole(fields["count"], "the count", 1, MAX_INSTANCES) if "count" in fields else 1,
        arrival,
        _whole(fields["priority"], "the priority", -1000, 1000) if "priority" in fields else 0,
        deadline_s,
        _truth(fields["own_weights"], "own_weights") if "own_weights" in fields else False,
        _whole(fields["queue"], "the queue", 1, MAX_REQUESTS) if "queue" in fields else max(QUEUE, _at_once(arrival)),
        _tucker(fields["tucker"], most_error) if "tucker" in fields else None,
        **given,
    )
    problem = wrong_with(client)
    if problem:
        raise entry.error(f"{client.name!r} {problem}")
    return client


def _beside(path: Path, file: str) -> str:
    """Return the path of a file relative to the workload file if it exists there, else unchanged."""
    beside = path.parent / file
    return str(beside) if beside.is_file() else file


def _tucker(entry: Value, most_error: float) -> float:
    """Return how far outputs may be off: ``true``, ``false`` or ``{max_error: E}``."""
    if entry.node.id == "scalar":
        return most_error if _truth(entry, "tucker without max_error") else 0.0
    fields = entry.fields("tucker", ("max_error",))
    return fields["max_error"].number("the error") if "max_error" in fields else most_error


def _at_once(arrival: Arrival) -> int:
    return arrival.requests if arrival.kind == "burst" else 0


def _arrival(entry: Value) -> Arrival:
    if entry.node.id == "scalar":
        kind, fields = entry, {}
    else:
        fields = entry.fields("an arrival", _ARRIVAL)
        if "kind" not in fields:
            raise entry.error("an arrival must have a kind", f"one of {', '.join(KINDS)}")
        kind = fields["kind"]
    name: Any = kind.text("the kind")
    if name not in KINDS:
        raise kind.error(f"there is no arrival {name!r}", f"one of {', '.join(KINDS)}")
    wanted = _WANTS.get(name)
    if wanted is not None and wanted not in fields:
        raise entry.error(f"an arrival of kind {name!r} must say {wanted!r}")
    for key in ("period_ms", "rate_per_s"):
        if key in fields and key != wanted:
            raise fields[key].error(f"{key!r} does not go with an arrival of kind {name!r}")
    period_s = 0.0
    if name == "periodic":
        period_s = _milliseconds(fields["period_ms"], "the period")
    elif name == "poisson":
        period_s = 1.0 / fields["rate_per_s"].number("the rate", above=1e-6, most=1e6)
    return Arrival(
        name,
        _whole(fields["requests"], "the requests", 1, MAX_REQUESTS) if "requests" in fields else 1,
        period_s,
        _milliseconds(fields["offset_ms"], "the offset") if "offset_ms" in fields else 0.0,
    )


def _milliseconds(value: Value, what: str) -> float:
    return value.number(what, most=_MOST_MS) / 1e3


def _whole(value: Value, what: str, least: int, most: int) -> int:
    found = value.plain()
    if type(found) is not int or not least <= found <= most:
        raise value.error(f"{what} must be a whole number from {least} to {most}")
    return found


def _truth(value: Value, what: str) -> bool:
    found = value.plain()
    if not isinstance(found, bool):
        raise value.error(f"{what} must be true or false")
    return found
