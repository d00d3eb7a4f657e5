"""A plan of a workload on disk, complete enough to run without the search.

::

    best/plan.json        who asks when, which lanes take which jobs, in which order
    best/model_0/         a plan.json with stage files, one for each job, as of a single model
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluators.base import Agreement
from evaluators.litert.deployment import Deployment, platform_of, read_deployment, write_deployment
from evaluators.workload.desk import Seat
from evaluators.workload.hosted import worst
from evaluators.workload.setting import Setting, setting
from search_spaces.bounded import parsed_json, read_bounded
from search_spaces.errors import PlanError
from search_spaces.models.files import replacing
from search_spaces.plan import Dispatch, Plan
from search_spaces.platform import Platform
from search_spaces.pools import lanes_of

if TYPE_CHECKING:
    from evaluators.litert.workload import LitertWorkload

SCHEMA_VERSION = 1
KIND = "workload plan"
_MAX_NBYTES = 64 << 20
_DISPATCHES: tuple[Dispatch, ...] = ("fifo", "priority", "edf")


@dataclass(frozen=True, slots=True)
class WorkloadFiles:
    """A plan of a workload, read back.

    Attributes:
        names: of the instance of each seat.
        models: the jobs of each seat; instances of one model share them.
    """

    name: str
    dispatch: Dispatch
    setting: Setting
    platform: Platform
    names: tuple[str, ...]
    models: tuple[Deployment, ...]


def deploy_workload(session: LitertWorkload, folder: Path, plan: Plan) -> Agreement:
    """Write a plan into an existing folder, run it from there once, and compare outputs with the whole models'.

    Raises:
        UsageError: the folder cannot be written.
        UnavailableError: a model failed.
    """
    from evaluators.litert.workload_runner import WorkloadRunner

    write_workload(session, folder, plan)
    with WorkloadRunner(folder) as runner:
        graphs = {i.name: c.graph for i, c in zip(session.workload.instances, session.joined.components, strict=True)}
        for name, graph in graphs.items():
            runner.set_inputs(name, session.inputs(graph))
        runner.run()
        used = [lane.name for lane in lanes_of(runner.platform)]
        found = setting(session.workload, session.joined, plan, session.platform, session.lowerings)
        return worst(
            session.agreement(
                model.model,
                runner.outputs(session.joined.components[index].name),
                used,
                model.may_be_off(session.workload.client_of(index).tucker or 0.0),
            )
            for index, model in zip(found.components, found.models, strict=True)
        )


def write_workload(session: LitertWorkload, folder: Path, plan: Plan) -> Path:
    """Write stage files of every model, then ``plan.json``, and return its path."""
    found = setting(session.workload, session.joined, plan, session.platform, session.lowerings)
    lanes = {lane.name: lane for lane in lanes_of(session.platform)}
    numbers: dict[Any, int] = {}
    seats = []
    for seat, index, model in zip(found.seats, found.components, found.models, strict=True):
        component = session.joined.components[index]
        client = session.workload.client_of(index)
        first = [found.lanes[each[0]] for each in seat.lanes]
        key = (model.graph.digest, client.model, model.operators, tuple(lanes[name].kind for name in first))
        if key not in numbers:
            numbers[key] = len(numbers)
            place = folder / f"model_{numbers[key]}"
            place.mkdir(parents=True, exist_ok=True)
            used = dict(zip(model.viewed.stage_of, first, strict=True))
            stages = (
                replace(stage, processor=used.get(job, first[0])) for job, stage in enumerate(model.lowered.plan.stages)
            )
            part = Plan(model.graph.digest, tuple(stages))
            platform = Platform(session.platform.name, tuple(lanes[name] for name in dict.fromkeys(first)))
            write_deployment(place, model.graph, part, platform, session.digest(model.graph))
        named = [[found.lanes[lane] for lane in each] for each in seat.lanes]
        own = {"own_weights": client.own_weights}
        seats.append({"name": component.name, "model": numbers[key], **asdict(seat), "lanes": named, **own})
    taken = {name for seat in seats for each in seat["lanes"] for name in each}
    platform = Platform(session.platform.name, tuple(lane for name, lane in lanes.items() if name in taken))
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "name": session.workload.name,
        "dispatch": plan.dispatch,
        "platform": platform.to_json(),
        "seats": seats,
        "plan": plan.to_json(),
    }
    path = folder / "plan.json"
    with replacing(path) as file:
        file.write(json.dumps(document, indent=2).encode())
    return path


def is_workload_plan(path: Path) -> bool:
    """Return whether a ``plan.json``, or the folder that holds it, is that of several models."""
    document = _document(path, strict=False)
    return isinstance(document, Mapping) and document.get("kind") == KIND


def read_workload_plan(path: Path) -> WorkloadFiles:
    """Read a plan of a workload and check it and the stage files.

    Raises:
        PlanError: a file is missing, damaged, or from a newer version.
    """
    document = _document(path, strict=True)
    folder = path if path.is_dir() else path.parent
    try:
        if document.get("kind") != KIND:
            raise PlanError(f"{path}: is no plan of several models", "optimize execute runs those of one model too")
        if document["schema_version"] != SCHEMA_VERSION:
            raise PlanError(f"{path}: has schema_version {document['schema_version']}, this version reads 1")
        platform = platform_of(document["platform"])
        dispatch = _DISPATCHES[_DISPATCHES.index(document["dispatch"])]
        names = tuple(str(entry["name"]) for entry in document["seats"])
        numbers = [int(entry["model"]) for entry in document["seats"]]
        lanes = [lane.name for lane in platform.processors]
        seats = tuple(_seat(entry, lanes) for entry in document["seats"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PlanError(f"{path}: the plan is damaged: {error!r}") from error
    known: dict[int, Deployment] = {}
    for number in numbers:
        if number not in known:
            known[number] = read_deployment(folder / f"model_{number}")
    for name, seat, number in zip(names, seats, numbers, strict=True):
        if len(seat.lanes) != len(known[number].plan.stages):
            raise PlanError(f"{path}: the plan is damaged: {name!r} has {len(seat.lanes)} jobs and other files")
    if len(set(names)) != len(names):
        raise PlanError(f"{path}: the plan is damaged: two instances have one name")
    every = platform.processors
    excluded = tuple(sum(1 << j for j, b in enumerate(every) if i == j or a.excludes(b)) for i, a in enumerate(every))
    stages, first = [], 0
    for seat in seats:
        stages.append(tuple(range(first, first + len(seat.lanes))))
        first += len(seat.lanes)
    made = Setting(seats, tuple(range(len(seats))), tuple(stages), tuple(lanes), excluded)
    return WorkloadFiles(str(document["name"]), dispatch, made, platform, names, tuple(known[n] for n in numbers))


def _document(path: Path, *, strict: bool) -> Any:
    file = path / "plan.json" if path.is_dir() else path
    try:
        if file.is_file() and file.stat().st_size <= _MAX_NBYTES:
            return parsed_json(read_bounded(file, _MAX_NBYTES))
        problem = "there is no such file, or it is too large"
    except (OSError, ValueError, RecursionError) as error:
        problem = f"is not a plan: {error}"
    if strict:
        raise PlanError(f"{file}: {problem}", "give the path of a plan.json")
    return None


def _seat(entry: Mapping[str, Any], lanes: Sequence[str]) -> Seat:
    numbers = tuple(tuple(lanes.index(name) for name in each) for each in entry["lanes"])
    if not numbers or not all(numbers):
        raise ValueError("a job without lanes")
    made = Seat(
        numbers,
        tuple(int(t) for t in entry["releases_ns"]),
        int(entry["requests"]),
        closed=bool(entry["closed"]),
        priority=int(entry["priority"]),
        deadline_ns=int(entry["deadline_ns"]),
        queue=int(entry["queue"]),
        after=tuple(int(bits) for bits in entry["after"]),
    )
    if made.after and (len(made.after) != len(numbers) or any(b < 0 or b >> j for j, b in enumerate(made.after))):
        raise ValueError("jobs that wait for later ones")
    if made.requests < 1 or len(made.releases_ns) != (1 if made.closed else made.requests) or made.queue < 1:
        raise ValueError("requests that cannot be")
    return replace(made, releases_ns=tuple(sorted(made.releases_ns)))
