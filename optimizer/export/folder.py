"""``optimize export``: stage files, plan, runners, and the settings that reproduce the plan, in one folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluators.litert.deployment import read_deployment
from evaluators.litert.runtimes import LITERT, PACKAGES
from evaluators.litert.settings import compile_settings
from evaluators.litert.workload_files import is_workload_plan
from evaluators.objectives import OBJECTIVES
from optimizer.export.run_plan import kernels
from optimizer.files import disk_errors, write_atomic, write_json
from optimizer.report.data import Study, read_study
from optimizer.report.markdown import escaped
from search_spaces.bounded import parsed_json, read_bounded
from search_spaces.errors import RunFolderError, UsageError, printable
from search_spaces.models.stages import cut_stage
from search_spaces.plan import Plan
from search_spaces.platform import Processor
from search_spaces.wording import plural

WHOLE = "whole.tflite"
_HERE = Path(__file__).parent
_CC = ("run_plan.cc", "CMakeLists.txt")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        files: names, sorted.
        fallback: the processor on which the runner in Python can run the whole model; None where none computes the same
            outputs as the plan.
    """

    folder: Path
    files: tuple[str, ...]
    fallback: str | None


def export_run(run: Path, out: Path) -> Exported:
    """Write the best plan of a finished study to a folder.

    The runners compare what stages take with what they took when the plan was found. The one in Python can also compare
    the plan with the whole model on one processor.

    Raises:
        RunFolderError: the study is not finished, or has no stage files.
        UsageError: the folder holds something else, or cannot be written.
    """
    study = read_study(run)
    best = run / "best"
    if not study.result.get("complete", True):
        raise RunFolderError(f"{run}: the study is not finished", f"resume with: optimize --out {run} and its options")
    if "workload" in study.result:
        files = f"its files in {best} are complete" if is_workload_plan(best) else "its evaluator writes no files"
        raise RunFolderError(
            f"{run}: a plan of several models is not exported; {files}", f"optimize execute {run} runs it"
        )
    if not (best / "stage_0.tflite").exists():
        raise RunFolderError(
            f"{run}: the study has no stage files: its evaluator, {study.result['evaluator']!r}, only predicts",
            "search on the device: --evaluator litert",
        )
    read_deployment(best)  # what is handed on is checked once more
    with disk_errors(out, "give --out a folder that you can write to"):
        out.mkdir(parents=True, exist_ok=True)
        strangers = sorted(p.name for p in out.iterdir())
        if strangers and "plan.json" not in strangers:
            raise UsageError(f"{out}: holds {strangers[0]!r} and no exported plan", "give another --out")
        for stale in (*out.glob("stage_*.tflite"), *(out / name for name in (WHOLE, "plan.txt", *_CC))):
            stale.unlink(missing_ok=True)
        for file in sorted(best.glob("stage_*.tflite")):
            shutil.copyfile(file, out / file.name)
        document = parsed_json(read_bounded(best / "plan.json"))
        document["expected"] = _expected(study)
        fallback = _fallback(study, document)
        if fallback is not None and study.graph is not None:
            cut_stage(study.graph, tuple(range(len(study.graph.operators)))).write(out / WHOLE)
            document["fallback"] = {"file": WHOLE, "processor": _plain(fallback)}
        write_json(out / "plan.json", document)
        write_json(out / "delegates.json", _delegates(study, document))
        if _runs_in_cc(document):
            write_atomic(out / "plan.txt", printable(_in_words(document)).encode())
        for name in ("run_plan.py", *(_CC if _runs_in_cc(document) else ())):
            write_atomic(out / name, (_HERE / name).read_bytes())
        write_atomic(out / "README.md", printable(_readme(study, document)).encode())
    written = tuple(sorted(p.name for p in out.iterdir()))
    return Exported(out, written, fallback.name if fallback is not None and WHOLE in written else None)


def _expected(study: Study) -> dict[str, Any]:
    """Return what the plan took when it was found."""
    objective = OBJECTIVES[str(study.result.get("objective", "latency")).split(",")[0]]
    entry = study.result["best"]
    found: dict[str, Any] = {"objective": objective.name}
    # Whatever was made small stands under the latency's name in a study that was read.
    if entry.get("latency_ms"):
        found[objective.key] = entry["latency_ms"]["median"]
    if entry.get("stage_ms") and objective.law in ("latency", "period"):  # else these are no times
        found["stage_ms"] = entry["stage_ms"]
    return found


def _fallback(study: Study, document: Mapping[str, Any]) -> Processor | None:
    """Return the processor that ran the whole model fastest among those that compute the same outputs as the plan."""
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


def _runs_in_cc(document: Mapping[str, Any]) -> bool:
    """Return whether the runner in C++ runs a plan: it knows LiteRT alone, and no tensors that are rows of others."""
    return _runtimes(document) == [LITERT] and not document.get("views")


def _delegates(study: Study, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return, for each processor of the plan, what its runtime is set to."""
    used = [p["name"] for p in document["platform"]["processors"]]
    return {
        "schema_version": 1,
        "accelerators": {"cpu": 1, "gpu": 2, "npu": 4},
        "processors": {
            name: {
                "cores": list(study.platform[name].options.get("cores", ())),
                "settings": compile_settings(study.platform[name], None),
            }
            for name in used
        },
    }


def _in_words(document: Mapping[str, Any]) -> str:
    """Return the plan for programs that read no JSON: a line a tensor, a stage; key=value words."""
    lanes = {p["name"]: p for p in document["platform"]["processors"]}
    expected = document["expected"]
    stage_ms = expected.get("stage_ms") or [0.0] * len(document["files"])
    lines = [f"tensor {i} {tensor['nbytes']}" for i, tensor in enumerate(document["tensors"])]
    lines += [f"{side} {_numbers(document[side])}" for side in ("inputs", "outputs")]
    for entry, stage, ms in zip(document["files"], document["stages"], stage_ms, strict=True):
        lines.append(f"stage {_stage_words(entry, lanes[stage['processor']], ms)}")
    return "\n".join(lines) + "\n"


def _stage_words(entry: Mapping[str, Any], processor: Mapping[str, Any], expected_ms: float) -> str:
    options = processor["options"]
    words = {
        "file": entry["file"],
        "kind": processor["kind"],
        **({"both": 1} if options.get("fallback") else {}),
        "threads": options.get("threads", 1),
        "cores": _numbers(options.get("cores", ())),
        **({"precision": options["precision"]} if "precision" in options else {}),
        "inputs": _numbers(entry["inputs"]),
        "outputs": _numbers(entry["outputs"]),
        "expected_ms": f"{expected_ms:.6g}",
    }
    return " ".join(f"{key}={value}" for key, value in words.items())


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


def _readme(study: Study, document: Mapping[str, Any]) -> str:
    needs = ", ".join(PACKAGES[runtime].distribution for runtime in _runtimes(document))
    lines = [
        f"# {escaped(document['model']['name'])} in {plural(len(document['files']), 'stage')}",
        "",
        f"Found by study {escaped(study.manifest['study'])}; `plan.json` has the numbers it expects under `expected`.",
        "",
        "| stage | file | processor |",
        "|---|---|---|",
    ]
    lines += [
        f"| {i} | {escaped(entry['file'])} | {escaped(stage['processor'])} |"
        for i, (entry, stage) in enumerate(zip(document["files"], document["stages"], strict=True))
    ]
    lines += [
        "",
        f"- `python run_plan.py` times it (needs {needs} and numpy); `from run_plan import Plan` runs it.",
        *_fallback_lines(document),
    ]
    if _runs_in_cc(document):
        lines += [
            "- `run_plan.cc` with `CMakeLists.txt` is the same in C++: it needs the sources of LiteRT and Abseil, and",
            "  the libLiteRt.so of the package ai-edge-litert; the head of `CMakeLists.txt` has the command.",
        ]
    lines += ["- `delegates.json` holds the runtime's settings of each processor: device, threads, precision.", ""]
    return "\n".join(lines)
