"""An exported plan as one OpenVINO model whose nodes carry their device: ``rt_info["affinity"]``.

::

    python openvino_plan.py                     # places the plan of this folder, and asks OpenVINO what went where
    python openvino_plan.py --device gpu=GPU.1  # a processor of the plan is another device of OpenVINO

    from openvino_plan import placed, compiled
    network = compiled(openvino.Core(), placed(openvino.Core(), "."))

Needs openvino alone, and the files beside this one. The stage files are joined to one model, in which each node has the
device of its stage; HETERO runs it there. Plans with split operators are refused: they have tensors that are views of
others, which OpenVINO cannot express.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

AFFINITY = "affinity"
_KINDS = {"cpu": "CPU", "gpu": "GPU", "npu": "NPU"}


def devices_of(document: Mapping[str, Any], given: Mapping[str, str]) -> list[str]:
    """Return the device of each stage: the one given for its processor, else the plan's, else that of its kind."""
    processors = {p["name"]: p for p in document["platform"]["processors"]}
    return [
        given.get(name) or processors[name]["options"].get("device") or _KINDS[processors[name]["kind"]]
        for name in (stage["processor"] for stage in document["stages"])
    ]


def placed(core: Any, folder: str | Path, given: Mapping[str, str] | None = None) -> Any:
    """Return the plan as one ``openvino.Model``, each node with its affinity.

    Args:
        given: processor of the plan → device of OpenVINO.

    Raises:
        ValueError: the plan is of several models, or splits operators.
    """
    import openvino

    if (here := str(Path(__file__).parent)) not in sys.path:
        sys.path.append(here)
    run_plan = importlib.import_module("run_plan")  # joins stage files that have weights in common
    document = json.loads((Path(folder) / "plan.json").read_text(encoding="utf-8"))
    if "clients" in document or document.get("views"):
        raise ValueError("OpenVINO cannot express several models in one plan, or split operators")
    tensors: dict[int, Any] = {}
    parameters: dict[int, Any] = {}
    stages = zip(document["files"], devices_of(document, given or {}), strict=True)
    for index, (entry, device) in enumerate(stages):
        with run_plan.whole_file(Path(folder), entry) as path:
            part = core.read_model(path)
        for node in part.get_ordered_ops():
            node.set_friendly_name(f"stage_{index}/{node.get_friendly_name()}")
            node.get_rt_info()[AFFINITY] = device
        for number, parameter in zip(entry["inputs"], part.get_parameters(), strict=True):
            if number in tensors:
                parameter.output(0).replace(tensors[number])
            else:
                tensors[number], parameters[number] = parameter.output(0), parameter
        for number, result in zip(entry["outputs"], part.get_results(), strict=True):
            tensors[number] = result.input_value(0)
    results = [openvino.opset13.result(tensors[number]) for number in document["outputs"]]
    model = openvino.Model(results, [parameters[n] for n in document["inputs"] if n in parameters], "plan")
    for result in model.get_results():
        result.get_rt_info()[AFFINITY] = result.input_value(0).get_node().get_rt_info()[AFFINITY].astype(str)
    model.validate_nodes_and_infer_types()
    return model


def affinities(model: Any) -> dict[str, str]:
    """Return the device of each node, by its name."""
    return {node.get_friendly_name(): node.get_rt_info()[AFFINITY].astype(str) for node in model.get_ordered_ops()}


def compiled(core: Any, model: Any, config: Mapping[str, Any] | None = None) -> Any:
    """Return the model, compiled by HETERO for the devices of its nodes; ``PERF_COUNT`` reports where they ran."""
    names = list(dict.fromkeys(affinities(model).values()))
    return core.compile_model(model, f"HETERO:{','.join(names)}", dict(config or {}))


def _pair(text: str) -> tuple[str, str]:
    name, _, device = text.partition("=")
    if not device:
        raise argparse.ArgumentTypeError(f"{text!r} is no PROCESSOR=DEVICE")
    return name, device


def main() -> int:
    """Print where the nodes of the plan beside this file run."""
    parser = argparse.ArgumentParser(description="Place an exported plan by OpenVINO's affinities.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    parser.add_argument("--device", metavar="PROCESSOR=DEVICE", type=_pair, action="append", default=[])
    options = parser.parse_args()
    try:
        import openvino

        core = openvino.Core()
        model = placed(core, options.folder, dict(options.device))
        network = compiled(core, model)
    except Exception as error:  # noqa: BLE001 - openvino raises classes of their own
        said = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        print(f"openvino_plan: {repr(error) if isinstance(error, LookupError) else said[-1]}", file=sys.stderr)
        return 4
    found = affinities(model)
    for device in dict.fromkeys(found.values()):
        print(f"{device}: {sum(each == device for each in found.values())} nodes")
    print(f"runs on {', '.join(network.get_property('EXECUTION_DEVICES'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
