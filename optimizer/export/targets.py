"""What ``optimize export --target`` adds to the folder: a phone's script, or a plan in the words of another runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.files import write_atomic, write_json
from optimizer.report.data import Study
from optimizer.report.viewers import node_data
from search_spaces.errors import RunFolderError
from search_spaces.graph import Graph
from search_spaces.plan import Plan

FILES = ("run.sh", "openvino_plan.py", "onnx_plan.py", "placement.json", "partition.json")
_HERE = Path(__file__).parent

RUN = """\
#!/system/bin/sh
# Runs the plan of this folder on the phone: sh run.sh [RUNS [INPUTS OUTPUTS]]
cd "${0%/*}" || exit 1
for file in run_plan libLiteRt.so; do
  if [ ! -f "$file" ]; then
    echo "run.sh: $file is missing: build it as the head of CMakeLists.txt says, and push the folder again" >&2
    exit 4
  fi
done
chmod +x run_plan
LD_LIBRARY_PATH=".:$LD_LIBRARY_PATH" exec ./run_plan . "$@"
"""


def add_target(target: str, study: Study, document: Mapping[str, Any], out: Path) -> str:
    """Write the files of a target; return what the folder's README says of them.

    Raises:
        RunFolderError: the plan cannot be said in the words of that runtime.
    """
    if target == "linux":
        return ""
    if target == "android":
        write_atomic(out / "run.sh", RUN.encode())
        return (
            "- On a phone: `adb push FOLDER /data/local/tmp/plan && adb shell sh /data/local/tmp/plan/run.sh`, once\n"
            "  `run_plan` and `libLiteRt.so` for it lie here; the head of `CMakeLists.txt` has the command."
        )
    if "seats" in document:
        raise RunFolderError(f"{study.path}: {target} has no word for several models in one plan", "leave --target out")
    if target == "openvino":
        if document.get("views"):
            raise RunFolderError(f"{study.path}: OpenVINO has no word for split operators", "leave --target out")
        write_atomic(out / "openvino_plan.py", (_HERE / "openvino_plan.py").read_bytes())
        return "- `python openvino_plan.py` places it by OpenVINO's affinities, and tells where its nodes run."
    if study.graph is None:
        raise RunFolderError(f"{study.path}: {study.missing}", "names of its tensors are needed")
    if target == "model-explorer":
        stage_s = [s * 1e-3 for s in study.result["best"]["stage_ms"] or ()]
        layers = node_data(study.graph, study.best, study.costs, stage_s)
        for name, layer in layers.items():
            write_json(out / f"{name}.json", layer)
        paths = ",".join(f"{name}.json" for name in layers)
        return f"- `model-explorer MODEL.tflite --node_data_paths={paths}` shows it on the model."
    if study.best.is_split or study.best.ranks:
        what = "ONNX Runtime places nodes as they are, neither split nor decomposed"
        raise RunFolderError(f"{study.path}: {what}", "search without --allow splits and ranks")
    kinds = {p["name"]: p["kind"] for p in document["platform"]["processors"]}
    stages = [{"processor": stage.processor, "kind": kinds[stage.processor]} for stage in study.best.stages]
    placement = {"schema_version": 1, "tensors": _tensors(study.graph, study.best), "stages": stages}
    write_json(out / "placement.json", placement)
    write_atomic(out / "onnx_plan.py", (_HERE / "onnx_plan.py").read_bytes())
    return "- `python onnx_plan.py MODEL.onnx` writes it as ONNX Runtime's layer assignment into the model's nodes."


def _tensors(graph: Graph, plan: Plan) -> dict[str, int]:
    """Return the stage that computes each named tensor."""
    pairs = ((o, index) for index, stage in enumerate(plan.stages) for o in stage.operators)
    return {graph.tensors[t].name: index for o, index in pairs for t in graph.operators[o].outputs}
