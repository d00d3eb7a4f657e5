"""A plan on disk: ``plan.json`` beside its stage files, complete enough to run without the model."""

from __future__ import annotations

import json
import re
import reprlib
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from evaluators.litert.processor_names import processor_options
from search_spaces.bounded import parsed_json, read_bounded
from search_spaces.errors import ModelError, PlanError, UnavailableError
from search_spaces.graph import Graph, Operator, Tensor
from search_spaces.models.files import file_digest, replacing
from search_spaces.models.inputs import read_inputs, write_inputs
from search_spaces.models.litert import read_model
from search_spaces.models.stages import StageModel, cut_stage, flattened
from search_spaces.plan import Plan, Stage
from search_spaces.platform import Platform, Processor
from search_spaces.rewrites.views import lie_inside, without_copies

_FILE_NAME = re.compile(r"stage_\d+\.tflite")
_MAX_NBYTES = 64 << 20
_INPUTS = "inputs.npz"


@dataclass(frozen=True, slots=True)
class Deployment:
    """A plan read back from disk.

    Attributes:
        plan: over ``graph``, one stage per operator.
        graph: the stages as operators of kind ``STAGE``, and the tensors between them.
        platform: the lanes that the plan uses.
        stages: the stage files, verified by digest and against the plan.
        content_digest: SHA-256 of the model that the stages were cut from.
        inputs: what the search measured with; empty where those are drawn without regard to the operators.
    """

    plan: Plan
    graph: Graph
    platform: Platform
    stages: tuple[StageModel, ...]
    content_digest: str
    inputs: tuple[NDArray[Any], ...] = ()


def with_custom_ops(deployment: Deployment, library: Path | None) -> Deployment:
    """Return a deployment whose stages find kernels of custom operators in a library."""
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
    plan.validate(graph, platform)
    viewed = without_copies(graph, plan, platform) if graph.source is not None and graph.source.rewritten else None
    made, plan = (viewed.graph, viewed.plan) if viewed is not None else (graph, plan)
    stages: list[dict[str, Any]] = []
    for index, stage in enumerate(plan.stages):
        model = cut_stage(graph, viewed.operators[index] if viewed is not None else stage.operators)
        if platform[stage.processor].kind == "gpu":
            model = replace(model, schema=flattened(model.schema))  # whatever runs the file there needs it
        name = f"stage_{index}.tflite"
        digest = model.write(folder / name)
        entry = {"file": name, "sha256": digest, "inputs": model.inputs, "outputs": model.outputs}
        if made.views:  # what a stage reads may lie in tensors that others write
            entry |= {"inputs": made.boundary(stage.operators).inputs, "reads": model.inputs}
        stages.append(entry)
    for stale in folder.glob("stage_*.tflite"):
        if stale.name not in {s["file"] for s in stages}:
            stale.unlink()
    border = sorted(_touched(made, stages) | {*graph.inputs, *graph.outputs})
    number = {tensor: i for i, tensor in enumerate(border)}
    used = {stage.processor for stage in plan.stages}
    document = plan.to_json() | {
        "model": {"name": graph.name, "sha256": content_digest},
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
    path = folder / "plan.json"
    write_inputs(folder / _INPUTS, graph)
    with replacing(path) as file:
        file.write(json.dumps(document, indent=2).encode())
    return path


def _touched(graph: Graph, stages: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the tensors that cross the borders of stages, and those in whose memory they lie."""
    found = {t for s in stages for t in (*s["inputs"], *s["outputs"], *s.get("reads", ()))}
    return found | {graph.views[t][0] for t in found if t in graph.views}


def runs_here(path: Path) -> bool:
    """Return whether a plan of one model has files and names the cores of its processors, for LiteRT's lanes to run."""
    document = _peek(path)
    try:
        return "files" in document and all("cores" in p["options"] for p in document["platform"]["processors"])
    except (KeyError, TypeError):
        return False


def has_files(path: Path) -> bool:
    """Return whether a plan, of one model or several, names stage files."""
    return bool({"files", "seats"} & set(_peek(path)))


def _peek(path: Path) -> Mapping[str, Any]:
    try:
        document = parsed_json(read_bounded(path / "plan.json" if path.is_dir() else path, _MAX_NBYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def read_deployment(path: Path) -> Deployment:
    """Read ``plan.json`` and check it and every stage file beside it.

    Raises:
        PlanError: the file is missing, damaged, from a newer version, or a stage file is not the one it names.
    """
    try:
        if path.is_dir():
            path = path / "plan.json"
        document = parsed_json(read_bounded(path, _MAX_NBYTES))
    except OSError as error:
        raise PlanError(f"{path}: {(error.strerror or str(error)).lower()}", "give the path of a plan.json") from error
    except RecursionError as error:
        raise PlanError(f"{path}: is not a plan: it is nested too deeply") from error
    except ValueError as error:
        raise PlanError(f"{path}: is not a plan: {error}") from error
    if isinstance(document, dict) and "stages" in document and "files" not in document:
        raise PlanError(f"{path}: names no stage files", "only a study that measures on this machine writes them")
    try:
        written = Plan.from_json(document)
        graph = _stage_graph(document)
        platform = platform_of(document["platform"])
        names = [str(entry["file"]) for entry in document["files"]]
        digests = [str(entry["sha256"]) for entry in document["files"]]
        content_digest = str(document["model"]["sha256"])
    except PlanError as error:
        raise PlanError(f"{path}: {error.what}", error.hint) from error
    except KeyError as error:
        raise PlanError(f"{path}: the plan is damaged: it lacks {error}") from error
    except (TypeError, AttributeError) as error:
        raise PlanError(f"{path}: the plan is damaged: a value is of the wrong type ({error})") from error
    except (ValueError, OverflowError, ModelError) as error:
        what = error.what if isinstance(error, ModelError) else str(error)
        raise PlanError(f"{path}: the plan is damaged: {what}") from error
    if len(names) != len(written.stages):
        raise PlanError(f"{path}: the plan has {len(written.stages)} stages but {len(names)} files")
    stages = tuple(Stage((i,), stage.processor) for i, stage in enumerate(written.stages))
    plan = Plan(graph.digest, stages)
    plan.validate(graph, platform)
    for index, operator in enumerate(graph.operators):
        if set(graph.boundary((index,)).outputs) != set(operator.outputs):
            raise PlanError(f"{path}: the plan is damaged: an output of stage {index} goes nowhere")
    files = tuple(_stage_file(path.parent, *pair) for pair in zip(names, digests, strict=True))
    pairs = zip(files, document["files"], graph.operators, strict=True)
    models = tuple(_stage_model(file, _reads(entry, o, graph, path), o.outputs, graph) for file, entry, o in pairs)
    inputs = path.parent / _INPUTS
    drawn = tuple(read_inputs(inputs, [graph.tensors[t] for t in graph.inputs])) if inputs.exists() else ()
    return Deployment(plan, graph, platform, models, content_digest, drawn)


@contextmanager
def started_for(path: str | Path) -> Iterator[None]:
    """Name the plan in errors of what starts its lanes.

    Raises:
        UnavailableError: this machine lacks what the plan at ``path`` needs.
    """
    try:
        yield
    except UnavailableError as error:
        raise UnavailableError(f"{path}: {error.what}", "search again on this machine: optimize --model …") from error


def _reads(entry: Mapping[str, Any], operator: Operator, graph: Graph, path: Path) -> tuple[int, ...]:
    """Return the tensors that a stage file reads: its inputs, or what lies in them."""
    reads = entry.get("reads")
    if reads is None:
        return operator.inputs
    known = isinstance(reads, list) and all(type(t) is int and 0 <= t < len(graph.tensors) for t in reads)
    roots = {t for pair in graph.views.items() for t in (pair[0], pair[1][0])}
    if not known or any(t not in operator.inputs and t not in roots for t in reads):
        raise PlanError(f"{path}: the plan is damaged: a stage reads {reprlib.repr(reads)}, which nobody writes")
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
    """Return the lanes that a plan's file describes; errors are those of wrong types and missing fields.

    Raises:
        PlanError: they are those of another device.
    """
    if any("cores" not in entry["options"] for entry in data["processors"]):
        raise PlanError(f"its processors are those of {data['name']}", "run it there, by the run_plan.py of its export")
    processors = []
    for entry in data["processors"]:
        if entry["kind"] not in ("cpu", "gpu", "npu"):
            raise ValueError(f"a processor of kind {entry['kind']!r}")
        options = processor_options(entry["kind"], entry["options"])
        resources = {str(name): float(share) for name, share in entry["resources"].items()}
        processors.append(Processor(str(entry["name"]), entry["kind"], resources, str(entry["like"]), options))
    return Platform(str(data["name"]), tuple(processors))


def _stage_file(folder: Path, name: str, digest: str) -> Path:
    if not _FILE_NAME.fullmatch(name):
        raise PlanError(f"{folder}: the plan names a stage file {name!r}", "stage files are called stage_<n>.tflite")
    path = folder / name
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise PlanError(f"{path}: is not a regular file", "keep stage files beside plan.json")
        found = file_digest(path)
    except OSError as error:
        raise PlanError(
            f"{path}: {(error.strerror or str(error)).lower()}", "keep stage files beside plan.json"
        ) from error
    if found != digest:
        raise PlanError(f"{path}: is not the stage file that the plan was made with: its digest differs")
    return path


def _stage_model(file: Path, reads: tuple[int, ...], writes: tuple[int, ...], graph: Graph) -> StageModel:
    """Read a stage file and compare its inputs and outputs with what the plan says; the runtime trusts its sizes."""
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
