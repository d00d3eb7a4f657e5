"""Plans on disk, complete enough to run without the search and without the model.

::

    best/plan.json        of one model, beside its stage files
    best/plan.json        of several models: when requests arrive, the processors of each job, the dispatch order
    best/model_0/         plan.json and stage files of one of them, a file for each job
"""

from __future__ import annotations

import itertools
import json
import re
import reprlib
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from evaluators.litert.memory_group import MemoryLimitError
from evaluators.litert.parts import join, share_weights
from evaluators.litert.processor_names import processor_options
from evaluators.litert.stages import custom_operators, opens
from evaluators.litert.worker.runtimes import INTERPRETER
from evaluators.workload.lowered import Lowerings
from evaluators.workload.scheduler import QueueClient
from evaluators.workload.setting import Setting, exclusions, setting
from search_spaces.core.bounded import built, parsed_json, read_bounded
from search_spaces.core.errors import ModelError, PlanError, UnavailableError, damage, reason_of, shown
from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.core.plan import Dispatch, Plan, Stage
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.pools import single_processors
from search_spaces.models.files import file_digest, replacing
from search_spaces.models.inputs import read_inputs, write_inputs
from search_spaces.models.litert import graph_of, read_model
from search_spaces.models.shapes import needs_interpreter
from search_spaces.models.stages import StageModel, cut_stage, flattened
from search_spaces.rewrites.views import lie_inside, without_copies

_FILE_NAME = re.compile(r"stage_\d+\.tflite")
_MAX_NBYTES = 64 << 20
INPUTS = "inputs.npz"
SCHEMA_VERSION = 1  # of plans of several models
KIND = "workload plan"
_DISPATCHES: tuple[Dispatch, ...] = ("fifo", "priority", "edf")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A plan read back from disk.

    Attributes:
        plan: over ``graph``, one stage per operator.
        graph: the stages as operators of kind ``STAGE``, and the tensors between them.
        platform: the processors that the plan uses.
        stages: the stage files, verified by digest and against the plan.
        content_digest: SHA-256 of the model that the stages were cut from.
        inputs: those that the search measured with; empty where they are drawn without regard to the operators.
    """

    plan: Plan
    graph: Graph
    platform: Platform
    stages: tuple[StageModel, ...]
    content_digest: str
    inputs: tuple[NDArray[Any], ...] = ()


def with_custom_ops(deployment: Deployment, library: Path | None) -> Deployment:
    """Return a deployment whose stages take the kernels of custom operators from a library."""
    if library is None:
        return deployment
    stages = tuple(replace(s, source=replace(s.source, custom_ops=library.absolute())) for s in deployment.stages)
    return replace(deployment, stages=stages)


def write_deployment(folder: Path, graph: Graph, plan: Plan, platform: Platform, content_digest: str) -> Path:
    """Write the stage files of a plan, then ``plan.json``, and return the latter's path.

    Raises:
        ModelError: the model's file is gone or has changed.
        UsageError: the folder cannot be written, or the disk is full.
    """
    document = _write_stages(folder, graph, plan, platform, content_digest)
    share_weights({folder: document})
    return _write_plan(folder, document)


def _write_plan(folder: Path, document: Mapping[str, Any]) -> Path:
    path = folder / "plan.json"
    with replacing(path) as file:
        file.write(json.dumps(document, indent=2).encode())
    return path


def _write_stages(folder: Path, graph: Graph, plan: Plan, platform: Platform, content_digest: str) -> dict[str, Any]:
    """Write stage files and inputs of a plan, and return the content of ``plan.json``."""
    plan.validate(graph, platform)
    viewed = without_copies(graph, plan, platform) if graph.source is not None and graph.source.rewritten else None
    made, plan = (viewed.graph, viewed.plan) if viewed is not None else (graph, plan)
    stages: list[dict[str, Any]] = []
    for index, stage in enumerate(plan.stages):
        model = cut_stage(graph, viewed.operators[index] if viewed is not None else stage.operators)
        if platform[stage.processor].kind == "gpu":
            model = replace(model, schema=flattened(model.schema))  # the GPU compiler does not flatten by itself
        name = f"stage_{index}.tflite"
        digest = model.write(folder / name)
        entry = {"file": name, "sha256": digest, "inputs": model.inputs, "outputs": model.outputs}
        entry |= stage_needs(model.schema, platform[stage.processor])
        if made.views:  # a tensor that a stage reads may be a view of those that others write
            entry |= {"inputs": made.boundary(stage.operators).inputs, "reads": model.inputs}
        stages.append(entry)
    for stale in folder.glob("stage_*.*"):
        if stale.name not in {s["file"] for s in stages}:
            stale.unlink()
    border = sorted(_touched(made, stages) | {*graph.inputs, *graph.outputs})
    number = {tensor: i for i, tensor in enumerate(border)}
    used = {stage.processor for stage in plan.stages}
    document = plan.to_json() | {
        "model": {"name": graph.name, "sha256": content_digest, "operators": len(made.operators)},
        "platform": Platform(platform.name, tuple(p for p in platform.processors if p.name in used)).to_json(),
        "tensors": [
            {"name": t.name, "shape": t.shape, "dtype": t.dtype, "nbytes": t.nbytes}
            for t in (graph.tensors[i] for i in border)
        ],
        "inputs": [number[t] for t in graph.inputs],
        "outputs": [number[t] for t in graph.outputs],
        "files": [
            s | {side: [number[t] for t in s[side]] for side in ("inputs", "outputs", "reads") if side in s}
            for s in stages
        ],
    }
    if made.views:
        places = ((t, *made.views[t]) for t in border if t in made.views)
        document["views"] = [[number[t], number[root], first] for t, root, first in places]
    write_inputs(folder / INPUTS, graph)
    return document


def stage_needs(model: Any, processor: Processor) -> dict[str, Any]:
    """Return what a stage file (``ModelT``) requires of a runner: custom operators, and LiteRT's interpreter."""
    found: dict[str, Any] = {"custom_operators": custom} if (custom := custom_operators(model)) else {}
    return found | ({"engine": INTERPRETER} if processor.kind == "cpu" and needs_interpreter(model) else {})


def _touched(graph: Graph, stages: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the tensors that cross stage borders, and those that they are views of."""
    found = {t for s in stages for t in (*s["inputs"], *s["outputs"], *s.get("reads", ()))}
    return found | {graph.views[t][0] for t in found if t in graph.views}


def runs_here(path: Path) -> bool:
    """Return whether a plan of one model has stage files, and cores of processors, so that LiteRT can run it here."""
    document = _peek(path)
    try:
        return "files" in document and all("cores" in p["options"] for p in document["platform"]["processors"])
    except (KeyError, TypeError):
        return False


def has_files(path: Path) -> bool:
    """Return whether a plan, of one model or several, names stage files."""
    return bool({"files", "clients"} & set(_peek(path)))


def is_workload_plan(path: Path) -> bool:
    """Return whether a ``plan.json``, or the one in a folder, is a plan of several models."""
    return _peek(path).get("kind") == KIND


def _peek(path: Path) -> Mapping[str, Any]:
    try:
        document = _document(path)
    except PlanError:
        return {}
    return document if isinstance(document, dict) else {}


def _document(path: Path) -> Any:
    """Read a ``plan.json``, or the one in a folder."""
    try:
        if path.is_dir():
            path = path / "plan.json"
        return parsed_json(read_bounded(path, _MAX_NBYTES))
    except OSError as error:
        hint = "give the folder of a finished study, or the path of a plan.json"
        raise PlanError(f"{path}: {reason_of(error)}", hint) from error
    except RecursionError as error:
        raise PlanError(f"{path}: is not a plan: it is nested too deeply") from error
    except ValueError as error:
        raise PlanError(f"{path}: is not a plan: {error}") from error


def read_deployment(path: Path) -> Deployment:
    """Read ``plan.json`` and check it and every stage file beside it.

    Raises:
        PlanError: the file is missing, damaged, from a newer version, or a stage file is not the one it names.
    """
    document = _document(path)
    if path.is_dir():
        path = path / "plan.json"
    if not isinstance(document, dict) or "stages" not in document:
        raise PlanError(f"{path}: is not a plan: it has no stages", "give a plan.json or its folder")
    if "files" not in document:
        raise PlanError(f"{path}: names no stage files", "only a study that measures on this machine writes them")
    try:
        written = Plan.from_json(document)
        graph = _stage_graph(document)
        platform = platform_of(document["platform"])
        names = [str(entry["file"]) for entry in document["files"]]
        digests = [str(entry["sha256"]) for entry in document["files"]]
        content_digest, count = str(document["model"]["sha256"]), int(document["model"]["operators"])
    except PlanError as error:
        raise PlanError(f"{path}: {error.what}", error.hint) from error
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, ModelError) as error:
        raise PlanError(f"{path}: the plan is damaged: {damage(error)}") from error
    if len(names) != len(written.stages):
        raise PlanError(f"{path}: the plan has {len(written.stages)} stages but {len(names)} files")
    operators = sorted(o for stage in written.stages for o in stage.operators)
    if len(operators) != count or operators != list(range(len(operators))):
        raise PlanError(f"{path}: the plan is damaged: its stages do not hold each of {count} operators once")
    stages = tuple(Stage((i,), stage.processor) for i, stage in enumerate(written.stages))
    plan = Plan(graph.digest, stages)
    plan.validate(graph, platform)
    for index, operator in enumerate(graph.operators):
        if set(graph.boundary((index,)).outputs) != set(operator.outputs):
            raise PlanError(f"{path}: the plan is damaged: an output of stage {index} goes nowhere")
    parts = [entry.get("parts") for entry in document["files"]]
    files = tuple(_stage_file(path.parent, *each) for each in zip(names, digests, parts, strict=True))
    pairs = zip(files, document["files"], graph.operators, strict=True)
    models = tuple(_stage_model(file, _reads(entry, o, graph, path), o.outputs, graph) for file, entry, o in pairs)
    inputs = path.parent / INPUTS
    drawn = tuple(read_inputs(inputs, [graph.tensors[t] for t in graph.inputs])) if inputs.exists() else ()
    return Deployment(plan, graph, platform, models, content_digest, drawn)


@contextmanager
def started_for(path: str | Path) -> Iterator[None]:
    """Name the plan in errors raised while its workers start.

    Raises:
        UnavailableError: this machine lacks what the plan at ``path`` needs.
    """
    try:
        yield
    except MemoryLimitError:
        raise
    except UnavailableError as error:
        raise UnavailableError(f"{path}: {error.what}", "search again on this machine: optimize --model …") from error


def _reads(entry: Mapping[str, Any], operator: Operator, graph: Graph, path: Path) -> tuple[int, ...]:
    """Return the tensors that a stage file reads: its inputs, or views of them."""
    reads = entry.get("reads")
    if reads is None:
        return operator.inputs
    known = isinstance(reads, list) and all(type(t) is int and 0 <= t < len(graph.tensors) for t in reads)
    roots = {t for pair in graph.views.items() for t in (pair[0], pair[1][0])}
    if not known or any(t not in operator.inputs and t not in roots for t in reads):
        raise PlanError(f"{path}: the plan is damaged: a stage reads {reprlib.repr(reads)}, which no stage writes")
    return tuple(reads)


def _stage_graph(document: Mapping[str, Any]) -> Graph:
    tensors = []
    for entry in document["tensors"]:
        shape = tuple(int(d) for d in entry["shape"])
        nbytes = int(entry["nbytes"])
        if not 0 <= nbytes < 1 << 40:
            raise ValueError(f"a tensor of {nbytes} bytes")
        tensors.append(Tensor(str(entry["name"]), shape, str(entry["dtype"]), nbytes))
    operators = tuple(
        Operator("STAGE", tuple(int(t) for t in entry["inputs"]), tuple(int(t) for t in entry["outputs"]))
        for entry in document["files"]
    )
    graph = Graph(
        str(document["model"]["name"]),
        tuple(tensors),
        operators,
        tuple(int(t) for t in document["inputs"]),
        tuple(int(t) for t in document["outputs"]),
        views={int(t): (int(root), int(first)) for t, root, first in document.get("views", ())},
    )
    written = {graph.views.get(t, (t, 0))[0] for t in (*graph.inputs, *graph.producer)}
    if not lie_inside(graph) or any(root not in written for root, _ in graph.views.values()):
        raise ValueError("a tensor lies outside the one that it is a part of")
    return graph


def platform_of(data: Mapping[str, Any]) -> Platform:
    """Return the processors that a plan file describes.

    Raises:
        PlanError: they belong to another device.
        KeyError, TypeError, ValueError: a field is missing or wrong.
    """
    found = built(Platform, data, "the plan is", PlanError)
    if any("cores" not in processor.options for processor in found.processors):
        raise PlanError(f"its processors are those of {found.name}", "run it there, by the run_plan.py of its export")
    options = [processor_options(processor.kind, processor.options) for processor in found.processors]
    each = zip(found.processors, options, strict=True)
    return Platform(found.name, tuple(replace(processor, options=checked) for processor, checked in each))


def _stage_file(folder: Path, name: str, digest: str, parts: Sequence[Any] | None) -> Path:
    if not _FILE_NAME.fullmatch(name):
        raise PlanError(f"{folder}: the plan names a stage file {name!r}", "stage files are called stage_<n>.tflite")
    if parts is not None:
        return join(folder, parts, digest)
    path = folder / name
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise PlanError(f"{path}: is not a regular file", "keep stage files beside plan.json")
        found = file_digest(path)
    except OSError as error:
        raise PlanError(f"{path}: {reason_of(error)}", "keep stage files beside plan.json") from error
    if found != digest:
        raise PlanError(f"{path}: is not the stage file that the plan was made with: its digest differs")
    return path


def _stage_model(file: Path, reads: tuple[int, ...], writes: tuple[int, ...], graph: Graph) -> StageModel:
    """Read a stage file and check its inputs and outputs against the plan: the runtime trusts the sizes in it."""
    try:
        stage = read_model(file)
    except ModelError as error:
        raise PlanError(error.what, error.hint) from error
    for mine, theirs in ((stage.inputs, reads), (stage.outputs, writes)):
        a = [(stage.tensors[t].dtype, stage.tensors[t].shape, stage.tensors[t].nbytes) for t in mine]
        b = [(graph.tensors[t].dtype, graph.tensors[t].shape, graph.tensors[t].nbytes) for t in theirs]
        if a != b:
            raise PlanError(f"{file}: has other inputs or outputs than the plan says")
    if stage.source is None:
        raise PlanError(f"{file}: has no weights to read")
    buffers = tuple(sorted(stage.source.extents))
    return StageModel(stage.source.schema, stage.source, buffers, reads, writes)


@dataclass(frozen=True, slots=True)
class WorkloadFiles:
    """A plan of a workload, read back.

    Attributes:
        names: of the instances.
        clients: the client of each instance, by name.
        models: the jobs of each instance; instances of one model share them.
    """

    name: str
    dispatch: Dispatch
    setting: Setting
    platform: Platform
    names: tuple[str, ...]
    clients: tuple[str, ...]
    models: tuple[Deployment, ...]


def write_workload(folder: Path, plan: Plan, lowerings: Lowerings) -> Path:
    """Write stage files of every model, then ``plan.json``, and return its path.

    Raises:
        ModelError: a model has no file, or the file is gone or has changed.
        UsageError: the folder cannot be written, or the disk is full.
    """
    workload, joined, device = lowerings.workload, lowerings.joined, lowerings.platform
    found = setting(plan, lowerings)
    processors = {processor.name: processor for processor in single_processors(device)}
    numbers: dict[Any, int] = {}
    written: dict[Path, dict[str, Any]] = {}
    clients = list[dict[str, Any]]()
    for client, index, model in zip(found.clients, found.components, found.models, strict=True):
        component = joined.components[index]
        asks = workload.client_of(index)
        first = [found.processors[each[0]] for each in client.processors]
        key = (model.graph.digest, asks.source, model.operators, tuple(processors[name].kind for name in first))
        if key not in numbers:
            numbers[key] = len(numbers)
            place = folder / f"model_{numbers[key]}"
            place.mkdir(parents=True, exist_ok=True)
            used = dict(zip(model.viewed.stage_of, first, strict=True))
            stages = (
                replace(stage, processor=used.get(job, first[0])) for job, stage in enumerate(model.lowered.plan.stages)
            )
            part = Plan(model.graph.digest, tuple(stages))
            platform = Platform(device.name, tuple(processors[name] for name in dict.fromkeys(first)))
            digest = model.graph.source.content_digest() if model.graph.source is not None else ""
            written[place] = _write_stages(place, model.graph, part, platform, digest)
        named = [[found.processors[processor] for processor in each] for each in client.processors]
        own = {"client": asks.name, "own_weights": asks.own_weights, "processors": named}
        clients.append({"name": component.name, "model": numbers[key], **asdict(client), **own})
    share_weights(written)
    for place, model_plan in written.items():
        _write_plan(place, model_plan)
    taken = {name for client in clients for each in client["processors"] for name in each}
    platform = Platform(device.name, tuple(processor for name, processor in processors.items() if name in taken))
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "name": workload.name,
        "dispatch": plan.dispatch,
        "platform": platform.to_json(),
        "clients": clients,
        "plan": plan.to_json(),
    }
    return _write_plan(folder, document)


def read_workload_plan(path: Path) -> WorkloadFiles:
    """Read a plan of a workload and check it and the stage files.

    Raises:
        PlanError: a file is missing, damaged, or from a newer version.
    """
    document = _document(path)
    folder = path if path.is_dir() else path.parent
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise PlanError(f"{path}: is not a plan of several models", "optimize execute runs those of one model too")
    if (version := document.get("schema_version")) != SCHEMA_VERSION:
        has = "no schema_version" if version is None else f"schema_version {shown(version)}"
        raise PlanError(f"{path}: has {has}; this version reads {SCHEMA_VERSION}")
    try:
        platform = platform_of(document["platform"])
        dispatch = _DISPATCHES[_DISPATCHES.index(document["dispatch"])]
        names, of = (tuple(str(entry[key]) for entry in document["clients"]) for key in ("name", "client"))
        numbers = [int(entry["model"]) for entry in document["clients"]]
        processors = [processor.name for processor in platform.processors]
        clients = tuple(_client(entry, processors) for entry in document["clients"])
    except PlanError as error:
        raise PlanError(f"{path}: {error.what}", error.hint) from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PlanError(f"{path}: the plan is damaged: {damage(error)}") from error
    known = {number: read_deployment(folder / f"model_{number}") for number in dict.fromkeys(numbers)}
    for name, client, number in zip(names, clients, numbers, strict=True):
        if len(client.processors) != len(known[number].plan.stages):
            raise PlanError(f"{path}: the plan is damaged: {name!r} has {len(client.processors)} jobs and other files")
    if len(set(names)) != len(names):
        raise PlanError(f"{path}: the plan is damaged: two instances have one name")
    firsts = [0, *itertools.accumulate(len(client.processors) for client in clients)]
    stages = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(firsts))
    made = Setting(clients, tuple(range(len(clients))), stages, tuple(processors), exclusions(platform.processors))
    return WorkloadFiles(str(document["name"]), dispatch, made, platform, names, of, tuple(known[n] for n in numbers))


def _client(entry: Mapping[str, Any], processors: Sequence[str]) -> QueueClient:
    numbers = tuple(tuple(processors.index(name) for name in each) for each in entry["processors"])
    if not numbers or not all(numbers):
        raise ValueError("a job without processors")
    made = built(QueueClient, {**entry, "processors": numbers}, "the plan is", PlanError)
    if made.after and (len(made.after) != len(numbers) or any(b < 0 or b >> j for j, b in enumerate(made.after))):
        raise ValueError("jobs that wait for later ones")
    if made.requests < 1 or len(made.releases_ns) != (1 if made.closed else made.requests) or made.queue < 1:
        raise ValueError("requests, arrivals or a queue that are not valid")
    return replace(made, releases_ns=tuple(sorted(made.releases_ns)))


def with_inner_tensors(
    deployment: Deployment, groups: Sequence[tuple[str, Sequence[int]]]
) -> tuple[Graph, Plan, tuple[StageModel, ...]]:
    """Return graph, plan and stages of a deployment; stages that expose inner tensors become their operators.

    Tensors that cross stage borders keep their numbers; any other stage stays one operator.

    Args:
        groups: processors, each with stages that are compiled together there.
    """
    graph, platform = deployment.graph, deployment.platform
    open_stages = {i for name, indices in groups if opens(platform[name], len(indices)) for i in indices}
    tensors, operators = list(graph.tensors), list[Operator]()
    stages, models = list[Stage](), list[StageModel]()
    try:
        for index, (stage, operator) in enumerate(zip(deployment.stages, graph.operators, strict=True)):
            first = len(operators)
            if index in open_stages:
                part = graph_of(stage.source, graph.name)
                number = _numbers(part, stage, tensors)
                operators += [_renumbered(o, number, stage, operator) for o in part.operators]
                models.append(replace(stage, tensors=tuple(number[t] for t in range(len(part.tensors)))))
            else:
                operators.append(operator)
                models.append(stage)
            stages.append(Stage(tuple(range(first, len(operators))), deployment.plan.stages[index].processor))
        whole = Graph(graph.name, tuple(tensors), tuple(operators), graph.inputs, graph.outputs, views=graph.views)
    except (ModelError, ValueError):  # where the operators of the stages make no graph, stages run as they are
        return graph, deployment.plan, deployment.stages
    return whole, Plan(whole.digest, tuple(stages)), tuple(models)


def _numbers(part: Graph, stage: StageModel, tensors: list[Tensor]) -> dict[int, int]:
    """Return the plan's number of each tensor of a stage; inner ones are appended to ``tensors``."""
    number = dict(zip((*part.inputs, *part.outputs), (*stage.inputs, *stage.outputs), strict=True))
    for index, tensor in enumerate(part.tensors):
        if index not in number:
            number[index] = len(tensors)
            tensors.append(tensor)
    return number


def _renumbered(operator: Operator, number: dict[int, int], stage: StageModel, whole: Operator) -> Operator:
    """Return an operator with the plan's tensor numbers; a view is replaced by the tensors written in its place."""
    written = tuple(t for t in whole.inputs if t not in stage.inputs)
    inputs: list[int] = []
    for tensor in (number.get(t, -1) for t in operator.inputs):
        inputs += written if tensor in stage.inputs and tensor not in whole.inputs else (tensor,)
    return replace(operator, inputs=tuple(inputs), outputs=tuple(number[t] for t in operator.outputs))
