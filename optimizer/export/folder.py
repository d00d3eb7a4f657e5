"""``optimize export``: stage files, plan, runners, and the settings that reproduce the plan, in one folder.

Files that this machine ran are linked where the file system allows it, so that weights are stored once. For a plan that
was predicted, or measured by an evaluator without files, the stages are cut from the models here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evaluators.litert.deployment import (
    INPUTS,
    has_files,
    is_workload_plan,
    read_deployment,
    read_workload_plan,
    stage_needs,
    write_deployment,
    write_workload,
)
from evaluators.litert.parts import share_weights
from evaluators.litert.settings import compile_settings
from evaluators.litert.worker.runtimes import LITERT, PACKAGES, TFLITE
from evaluators.objectives import OBJECTIVES
from evaluators.workload import scheduler
from evaluators.workload.lowered import Lowerings
from optimizer.export.run_plan import CUSTOM_OPS, excludes, kernels
from optimizer.export.run_plan import INPUTS as PLAIN_INPUTS
from optimizer.files import disk_errors, write_atomic, write_json
from optimizer.report.data import Study, read_study, recorded_platform
from optimizer.report.markdown import escaped
from optimizer.report.viewers import node_data
from optimizer.study.folder import resume_hint
from optimizer.tools.execute import open_workload
from search_spaces.core.bounded import parsed_json, read_bounded
from search_spaces.core.errors import RunFolderError, UsageError, printable
from search_spaces.core.graph import Graph, Tensor
from search_spaces.core.plan import Plan
from search_spaces.core.platform import MEMORY, Platform, Processor
from search_spaces.core.wording import plural
from search_spaces.models.inputs import read_inputs
from search_spaces.models.stages import cut_stage
from search_spaces.rewrites.lower import lowering

WHOLE = "whole.tflite"
_HERE = Path(__file__).parent
_RUNNER = "run_plan.py"
"""Moved first: a folder that contains it holds an exported plan, and may be exported to again."""

_NEW = ".export.tmp"
"""Folder in that of the export: a plan is complete there before files of an earlier one are deleted."""

_CC = ("run_plan.cc", "CMakeLists.txt")
_SCHEDULER = "scheduler.py"
_TARGET_FILES = ("run.sh", "openvino_plan.py", "onnx_plan.py", "placement.json", "partition.json")
_OURS = (WHOLE, "whole.part", "plan.txt", INPUTS, PLAIN_INPUTS, _SCHEDULER, *_TARGET_FILES, *_CC)
_ON_PHONE = "/data/local/tmp/plan"
_BUILT = ("run_plan", "libLiteRt.so")
"""Files that a phone needs beside those of a plan; the user builds them."""

_USUAL = {"gpu": {"precision": "f16", "adapter": ""}}
"""Kind of processor → options that the description of a device may omit."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Files of an exported plan.

    Attributes:
        files: names, sorted.
        fallback: the processor on which the runner in Python can run the whole model; None without ``--fallback``.
        missing: names of files that the plan needs to run and that must be built for its device.
    """

    folder: Path
    files: tuple[str, ...]
    fallback: str | None
    missing: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``--json``."""
        fallback = None if self.fallback is None else {"processor": self.fallback}
        found = {"folder": str(self.folder), "files": self.files, "fallback": fallback, "missing": self.missing}
        return {"schema_version": 1} | found

    @property
    def text(self) -> str:
        """What the command prints."""
        phone = f"adb push {self.folder}/. {_ON_PHONE} && adb shell sh {_ON_PHONE}/run.sh"
        how = phone if "run.sh" in self.files else f"python {self.folder / 'run_plan.py'}"
        lines = [f"{self.folder}: {', '.join(self.files)}"]
        if self.missing:
            lines.append(f"missing: {', '.join(self.missing)}; README.md of the folder says how to build them")
        lines.append(f"time it with: {how}")
        for script, model in (("openvino_plan.py", ""), ("onnx_plan.py", " MODEL.onnx")):
            if script in self.files:
                lines.append(f"place it in that runtime with: python {self.folder / script}{model}")
        if self.fallback is not None:
            lines.append(f"compare it with the whole model on {self.fallback}: add --fallback")
        return "\n".join(lines)


def export_run(run: Path, out: Path, *, fallback: bool = False, target: str = "linux") -> Exported:
    """Write the best plan of a finished study to a folder.

    The runners compare the stages' times with those expected when the plan was found.

    Args:
        fallback: also write the whole model, for the runner in Python to compare with.
        target: ``linux``, ``android``, or another runtime, in whose format the plan is written.

    Raises:
        RunFolderError: the study is not finished, its model has no file, or it has no fallback.
        UsageError: the folder holds something else, or cannot be written.
    """
    study = read_study(run)
    best = run / "best"
    if not study.result.get("complete", True):
        raise RunFolderError(f"{run}: the study is not finished", resume_hint(run))
    several = "workload" in study.result
    if has_files(best):  # check the files again
        read_workload_plan(best) if several else _check_deployment(best)
    elif not several and (study.graph is None or study.graph.source is None):
        why = study.missing or f"model {study.graph.name if study.graph else ''!r} has no file"
        raise RunFolderError(f"{run}: {why}", "stage files are cut from the study's model")
    with disk_errors(out, "give --out a folder that you can write to"):
        made = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        strangers = sorted(p.name for p in out.iterdir() if p.name != _NEW)
        if strangers and _RUNNER not in strangers:
            raise UsageError(f"{out}: holds {strangers[0]!r} and no exported plan", "give another --out")
        new = out / _NEW
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            document, custom = _write(study, new, fallback=fallback, target=target)
            _replace_by(new, out)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            if made:  # a refusal leaves no empty folder
                with suppress(OSError):
                    out.rmdir()
    written = tuple(sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()))
    needed = (*(_BUILT if target == "android" else ()), *(file for file, _ in custom))
    missing = tuple(name for name in needed if name not in written)
    return Exported(out, written, document["fallback"]["processor"]["name"] if fallback else None, missing)


def _write(
    study: Study, out: Path, *, fallback: bool, target: str
) -> tuple[dict[str, Any], list[tuple[str, list[str]]]]:
    """Write all files of an exported plan to an empty folder.

    Returns:
        The content of ``plan.json``; each library that the plan needs, with the custom operators that it must contain.
    """
    several = "workload" in study.result
    for name in (_RUNNER, *_CC):
        write_atomic(out / name, (_HERE / name).read_bytes())
    document = _write_several(study, out) if several else _write_one(study, out)
    if fallback:
        _write_whole(study, document, out)
    plans = {out: document} | {p.parent: parsed_json(read_bounded(p)) for p in sorted(out.glob("model_*/plan.json"))}
    share_weights(plans)
    for folder, plan in plans.items():
        write_json(folder / "plan.json", plan)
        _write_inputs(folder)
    write_json(out / "delegates.json", _delegates(document))
    if target == "android" and _runtimes(document) != [LITERT]:
        what = f"{study.path}: its plan uses {', '.join(_runtimes(document))}"
        raise RunFolderError(what, "a phone runs LiteRT alone")
    write_atomic(out / "plan.txt", printable(_in_words(document, out)).encode())
    if several:
        only_for_types = b"from search_spaces.core.plan import Dispatch\n"
        write_atomic(out / _SCHEDULER, Path(scheduler.__file__).read_bytes().replace(only_for_types, b""))
    custom = _custom_operators(out)
    more = [
        f"- Put the library with the kernels of {escaped(', '.join(names))} beside the stage files, as `{file}`."
        for file, names in custom
    ]
    more += _add_target(target, study, document, out)
    write_atomic(out / "README.md", printable(_readme(study, document, more)).encode())
    return document, custom


def _replace_by(new: Path, out: Path) -> None:
    """Delete the files of an earlier plan in ``out``, and move those of ``new`` there."""
    for stale in (*out.glob("stage_*.*"), *out.glob("partition_*.json"), *(out / name for name in _OURS)):
        stale.unlink(missing_ok=True)
    for stale in out.glob("model_*/plan.json"):
        shutil.rmtree(stale.parent)
    for file in sorted(new.iterdir(), key=lambda file: file.name != _RUNNER):
        file.replace(out / file.name)


def _check_deployment(best: Path) -> None:
    """Check the files of one model, unless its processors belong to another device and have no cores."""
    if all("cores" in p["options"] for p in parsed_json(read_bounded(best / "plan.json"))["platform"]["processors"]):
        read_deployment(best)


def _write_one(study: Study, out: Path) -> dict[str, Any]:
    """Put the stage files of a plan of one model into ``out``, and return the content of its ``plan.json``."""
    best, graph = study.path / "best", study.graph
    if has_files(best):
        for file in (*sorted(best.glob("stage_*.*")), *best.glob(INPUTS)):
            _link(file, out / file.name)
    elif graph is not None and graph.source is not None:
        lowered = lowering(graph).lower(study.best)
        digest = lowered.graph.source.content_digest() if lowered.graph.source is not None else ""
        write_deployment(out, lowered.graph, lowered.plan, _usual(study.platform), digest)
    document: dict[str, Any] = parsed_json(read_bounded((best if has_files(best) else out) / "plan.json"))
    document["expected"] = _expected(study, len(document["files"]))
    return document


def _write_several(study: Study, out: Path) -> dict[str, Any]:
    """Put the stage files of a plan of several models into ``out``, and return the content of its ``plan.json``."""
    best = study.path / "best"
    if is_workload_plan(best):
        for file in sorted(best.glob("model_*/*")):
            (out / file.parent.name).mkdir(exist_ok=True)
            _link(file, out / file.parent.name / file.name)
        document: dict[str, Any] = parsed_json(read_bounded(best / "plan.json"))
    else:
        run, out = study.path.resolve(), out.resolve()
        with open_workload(run) as workload:  # may change the folder to the one that the models' paths refer to
            joined, platform = read_study(run).joined, _usual(study.platform)
            if joined is None:
                raise RunFolderError(f"{study.path}: {study.missing}", "stage files are cut from the study's models")
            if without := next((c.graph.name for c in joined.components if c.graph.source is None), None):
                raise RunFolderError(f"model {without!r} has no file", "stage files are cut from models that have one")
            write_workload(out, study.best, Lowerings(workload, joined, platform))
        document = parsed_json(read_bounded(out / "plan.json"))
    found = study.result["workload"]["outcomes"]["best"]
    names = ("instances_ms", "mean_ms", "makespan_ms")
    document["expected"] = {"objective": study.result["objective"]} | {name: found[name] for name in names}
    return document


def _write_inputs(folder: Path) -> None:
    """Write the inputs that a model was measured with as bytes, for the runners; none where zeros serve."""
    kept = folder / INPUTS
    if not kept.exists():
        return
    document = parsed_json(read_bounded(folder / "plan.json"))
    entries = [document["tensors"][i] for i in document["inputs"]]
    ports = [Tensor(t["name"], tuple(t["shape"]), t["dtype"], t["nbytes"]) for t in entries]
    write_atomic(folder / PLAIN_INPUTS, b"".join(array.tobytes() for array in read_inputs(kept, ports)))


def _custom_operators(out: Path) -> list[tuple[str, list[str]]]:
    """Return each library that the plan needs, and the custom operators whose kernels it must contain."""
    found = []
    for path in (out / "plan.json", *sorted(out.glob("model_*/plan.json"))):
        entries = parsed_json(read_bounded(path)).get("files", ())
        names = sorted({name for entry in entries for name, _ in entry.get("custom_operators", ())})
        found += [(str(path.with_name(CUSTOM_OPS).relative_to(out)), names)] if names else []
    return found


def _usual(platform: Platform) -> Platform:
    """Return a platform whose processors have all options that the runners read."""
    processors = (replace(p, options=_options(p)) for p in platform.processors)
    return replace(platform, processors=tuple(processors))


def _options(processor: Processor) -> dict[str, Any]:
    """Return a processor's options for the runners; a phone's are derived from its flags and mask of cores."""
    known = dict(processor.options)
    flags = dict(flag[2:].split("=", 1) for flag in known.get("flags", ()))
    found: dict[str, Any] = {"threads": int(flags.get("num_threads", 1)), **_USUAL.get(processor.kind, {})}
    if processor.kind == "gpu" and flags.get("gpu_precision_loss_allowed") == "false":
        found["precision"] = "f32"
    if "mask" in known:
        mask = int(str(known["mask"]), 16)
        found["cores"] = tuple(core for core in range(mask.bit_length()) if mask >> core & 1)
    return found | known


def _link(file: Path, to: Path) -> None:
    """Link a file, or copy it to another file system; it is never written to under either name."""
    to.unlink(missing_ok=True)
    with suppress(OSError):
        os.link(file, to)
        return
    shutil.copyfile(file, to)


def _write_whole(study: Study, document: dict[str, Any], out: Path) -> None:
    """Write the whole model, for the processor that ran it fastest with the same outputs as the plan."""
    found = None if "clients" in document else _fallback(study, document)
    if found is None or study.graph is None:
        raise RunFolderError(
            f"{study.path}: the plan has no fallback",
            "export a plan of several stages that all use the same kernels, from a study that minimised latency and "
            "measured the whole model with these kernels",
        )
    whole = cut_stage(study.graph, tuple(range(len(study.graph.operators))))
    whole.write(out / WHOLE)
    document["fallback"] = {"file": WHOLE, "processor": _plain(found), **stage_needs(whole.schema, found)}


def _expected(study: Study, stages: int) -> dict[str, Any]:
    """Return the times measured when the plan was found; splits have more stage files (``stages``) than the plan."""
    objective = OBJECTIVES[str(study.result.get("objective", "latency")).split(",")[0]]
    entry = study.result["best"]
    found: dict[str, Any] = {"objective": objective.name}
    # A result stores the objective under the name of the latency.
    if entry.get("latency_ms"):
        found[objective.key] = entry["latency_ms"]["median"]
    timed = entry.get("stage_ms") and objective.aggregation in ("path", "busiest")  # otherwise these are not times
    if timed and len(entry["stage_ms"]) == stages:
        found["stage_ms"] = entry["stage_ms"]
    return found


def _fallback(study: Study, document: Mapping[str, Any]) -> Processor | None:
    """Return the processor that ran the whole model fastest, among those that compute the same outputs as the plan."""
    plan = Plan.from_json(document)
    rewritten = plan.ranks or document.get("views") or any(stage.share is not None for stage in plan.stages)
    if document["expected"]["objective"] != "latency" or len(plan.stages) == 1 or rewritten:
        return None
    used = [kernels(processor) for processor in document["platform"]["processors"]]
    wholes = [
        (each["latency_ms"]["median"], study.plans[name].stages[0].processor)
        for name, each in study.result["baselines"].items()
        if each.get("latency_ms") and len(study.plans[name].stages) == 1 and not study.plans[name].ranks
    ]
    alike = [(ms, name) for ms, name in wholes if all(k == kernels(_plain(study.platform[name])) for k in used)]
    return study.platform[min(alike)[1]] if alike else None


def _plain(processor: Processor) -> dict[str, Any]:
    return {"name": processor.name, "kind": processor.kind, "options": dict(processor.options)}


def _runtimes(document: Mapping[str, Any]) -> list[str]:
    return sorted({p["options"].get("runtime", LITERT) for p in document["platform"]["processors"]})


def _delegates(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the runtime's settings of each processor of the plan."""
    processors = _usual(recorded_platform(document["platform"])).processors
    return {
        "schema_version": 1,
        "accelerators": {"cpu": 1, "gpu": 2, "npu": 4},
        "processors": {p.name: {"cores": list(p.cores), "settings": compile_settings(p, None)} for p in processors},
    }


def _in_words(document: Mapping[str, Any], folder: Path) -> str:
    """Return the content of ``plan.txt``: a line for each processor, model, tensor, stage, and instance."""
    processors = document["platform"]["processors"]
    number = {p["name"]: i for i, p in enumerate(processors)}
    lines = [f"dispatch {document['dispatch']}"]
    lines += [f"processor {_processor_words(p, processors)}" for p in processors]
    if "clients" not in document:
        used = [number[stage["processor"]] for stage in document["stages"]]
        client = {"name": document["model"]["name"], "model": 0, "requests": 1, "closed": True, "queue": 1}
        client |= {
            "releases_ns": [0],
            "priority": 0,
            "deadline_ns": 0,
            "processors": [[processor] for processor in used],
        }
        client["after"] = [0] * len(used)  # the runner executes stages of one model in the order of the plan
        models, clients = [(".", document)], [client]
    else:
        count = 1 + max(client["model"] for client in document["clients"])
        named = (f"model_{i}" for i in range(count))
        models = [(name, parsed_json(read_bounded(folder / name / "plan.json"))) for name in named]
        clients = [
            s | {"processors": [[number[name] for name in job] for job in s["processors"]]} for s in document["clients"]
        ]
    for name, model in models:
        lines += [f"model {name}", *_model_lines(model)]
    lines += [f"client {_client_words(client)}" for client in clients]
    return "\n".join(lines) + "\n"


def _processor_words(processor: Mapping[str, Any], processors: Sequence[Mapping[str, Any]]) -> str:
    options = processor["options"]
    words = {
        "kind": processor["kind"],
        **({"both": 1} if options.get("fallback") else {}),
        "threads": options.get("threads", 1),
        "cores": _numbers(options.get("cores", ())),
        **{name: options[name] for name in ("precision", "kernels", "runtime", "device") if name in options},
        "excludes": _numbers([i for i, other in enumerate(processors) if excludes(processor, other)]),
    }
    return " ".join(f"{key}={value}" for key, value in words.items())


def _model_lines(model: Mapping[str, Any]) -> Iterator[str]:
    views = {tensor: f" in={root},{first}" for tensor, root, first in model.get("views", ())}
    for i, tensor in enumerate(model["tensors"]):
        yield f"tensor {i} {tensor['nbytes']}{views.get(i, '')}"
    for side in ("inputs", "outputs"):
        yield f"{side} {_numbers(model[side])}"
    stage_ms = model.get("expected", {}).get("stage_ms") or [0.0] * len(model["files"])
    for entry, ms in zip(model["files"], stage_ms, strict=True):
        reads, writes = _numbers(entry.get("reads", entry["inputs"])), _numbers(entry["outputs"])
        custom = ",".join(f"{name}:{version}" for name, version in entry.get("custom_operators", ()))
        words = f" custom={''.join(custom.split())}" if custom else ""
        words += f" parts={','.join(':'.join(map(str, part)) for part in entry['parts'])}" if "parts" in entry else ""
        words += f" engine={entry['engine']}" if "engine" in entry else ""
        yield f"stage file={entry['file']} inputs={reads} outputs={writes} expected_ms={ms:.6g}{words}"


def _client_words(client: Mapping[str, Any]) -> str:
    words: dict[str, int | str] = {
        name: int(client[name]) for name in ("model", "requests", "closed", "priority", "deadline_ns", "queue")
    }
    words["releases_ns"] = _numbers(client["releases_ns"])
    words["processors"] = ";".join(_numbers(job) for job in client["processors"])
    jobs = range(len(client["processors"]))
    words["needs"] = ";".join(_numbers([i for i in jobs if client["after"][job] >> i & 1]) for job in jobs)
    return " ".join([*(f"{key}={value}" for key, value in words.items()), f"name={'_'.join(client['name'].split())}"])


def _numbers(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _fallback_lines(document: Mapping[str, Any]) -> list[str]:
    if "fallback" not in document:
        return []
    name = document["fallback"]["processor"]["name"]
    return [
        f"- `Plan(folder, fallback=True)` measures it against the whole model on {name} (`whole.tflite`) when it",
        "  starts, and runs the whole model if that is significantly faster; the outputs are the same. Default: off.",
    ]


def _readme(study: Study, document: Mapping[str, Any], more: Sequence[str]) -> str:
    needs = ", ".join(PACKAGES[runtime].distribution for runtime in _runtimes(document))
    several = "clients" in document
    rows = (
        [
            (client["name"], f"model_{client['model']}", " → ".join("/".join(job) for job in client["processors"]))
            for client in document["clients"]
        ]
        if several
        else [
            (str(i), _stored(entry), stage["processor"])
            for i, (entry, stage) in enumerate(zip(document["files"], document["stages"], strict=True))
        ]
    )
    name, kind = (document["name"], "model") if several else (document["model"]["name"], "stage")
    one = "`from run_plan import Models`" if several else "`from run_plan import Plan`"
    lines = [
        f"# {escaped(name)} in {plural(len(rows), kind)}",
        "",
        f"Found by study {escaped(study.manifest['study'])}; `plan.json` has the numbers it expects under `expected`.",
        "" if not study.predicted else f"They are predictions for {escaped(study.platform.name)}: nothing was run.\n",
        "| instance | files | processors |" if several else "| stage | file | processor |",
        "|---|---|---|",
        *(f"| {' | '.join(map(escaped, row))} |" for row in rows),
        "",
        f"- `python run_plan.py` times it (needs {needs} and numpy); {one} runs it.",
        *_fallback_lines(document),
    ]
    blocked = any(p["options"].get("kernels") == "blocked" for p in document["platform"]["processors"])
    if TFLITE not in _runtimes(document) and not blocked:  # the runner in C++ refuses both
        lines += [
            "- `run_plan.cc` with `CMakeLists.txt` is the same in C++: it needs the sources of LiteRT and Abseil, and",
            "  the libLiteRt.so of the package ai-edge-litert; the head of `CMakeLists.txt` has the command.",
        ]
    if any(MEMORY in p["options"] for p in document["platform"]["processors"]):
        more = (*more, "- Memory is not limited here, so that times may differ from the study's.")
    if any("storage" in p["options"] for p in document["platform"]["processors"]):
        more = (*more, "- The runtime chooses here whether it keeps a GPU's tensors in buffers or textures.")
    lines += [
        *more,
        "- `delegates.json` holds the runtime's settings of each processor: device, threads, precision.",
        "",
    ]
    return "\n".join(lines)


def _stored(entry: Mapping[str, Any]) -> str:
    """Return the name of a stage's file, or of the part of it that other files do not have."""
    parts = (str(name) for name, *_ in entry.get("parts", ()))
    return next((name for name in parts if name.endswith(".part")), str(entry["file"]))


def _add_target(target: str, study: Study, document: Mapping[str, Any], out: Path) -> list[str]:
    """Write the files of a target; return the lines of the folder's README about them.

    Raises:
        RunFolderError: that runtime cannot express the plan.
    """
    if target == "linux":
        return []
    if target == "android":
        write_atomic(out / "run.sh", (_HERE / "run.sh").read_bytes())
        cpus = all(p["kind"] == "cpu" for p in document["platform"]["processors"])
        by = "Debian's g++-aarch64-linux-gnu, or Android's NDK" if cpus else "Android's NDK"
        return [
            f"- On a phone: `adb push FOLDER/. {_ON_PHONE} && adb shell sh {_ON_PHONE}/run.sh`, once `run_plan` and",
            f"  `libLiteRt.so` for it lie here: the head of `CMakeLists.txt` has the command, which takes {by}.",
        ]
    if "clients" in document:
        raise RunFolderError(f"{study.path}: {target} cannot express several models in one plan", "leave --target out")
    if target == "openvino":
        if document.get("views"):
            raise RunFolderError(f"{study.path}: OpenVINO cannot express split operators", "leave --target out")
        write_atomic(out / "openvino_plan.py", (_HERE / "openvino_plan.py").read_bytes())
        return ["- `python openvino_plan.py` places it by OpenVINO's affinities, and reports where its nodes run."]
    if study.graph is None:
        raise RunFolderError(f"{study.path}: {study.missing}", "names of its tensors are needed")
    if target == "model-explorer":
        layers = node_data(study, study.graph)
        for name, layer in layers.items():
            write_json(out / f"{name}.json", layer)
        paths = ",".join(f"{name}.json" for name in layers)
        return [f"- `model-explorer MODEL.tflite --node_data_paths={paths}` shows it on the model."]
    if study.best.is_split or study.best.ranks:
        what = "ONNX Runtime places nodes as they are, neither split nor decomposed"
        raise RunFolderError(f"{study.path}: {what}", "search without --allow splits and ranks")
    kinds = {p["name"]: p["kind"] for p in document["platform"]["processors"]}
    stages = [{"processor": stage.processor, "kind": kinds[stage.processor]} for stage in study.best.stages]
    placement = {"schema_version": 1, "tensors": _tensors(study.graph, study.best), "stages": stages}
    write_json(out / "placement.json", placement)
    write_atomic(out / "onnx_plan.py", (_HERE / "onnx_plan.py").read_bytes())
    return ["- `python onnx_plan.py MODEL.onnx` writes it as ONNX Runtime's layer assignment into the model's nodes."]


def _tensors(graph: Graph, plan: Plan) -> dict[str, int]:
    """Return the stage that computes each named tensor."""
    pairs = ((o, index) for index, stage in enumerate(plan.stages) for o in stage.operators)
    return {graph.tensors[t].name: index for o, index in pairs for t in graph.operators[o].outputs}
