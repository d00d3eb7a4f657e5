"""An exported plan as ONNX Runtime's layer assignment: ``layer_ann`` of each node, and the setting that reads it.

::

    python onnx_plan.py net.onnx                    # annotates the model that was converted, and asks ONNX Runtime
    python onnx_plan.py net.onnx --device gpu=cuda  # a processor of the plan is another device of ONNX Runtime

Needs onnx and onnxruntime 1.25 or later, and the files beside this one. A converter keeps tensor names at operators'
outputs, and fuses nodes: a node belongs to the stage that computes its outputs, or else the next named tensor after it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY, SETTING = "layer_ann", "session.layer_assignment_settings"
RECORD = "session.record_ep_graph_assignment_info"
_PROVIDERS = {"gpu": "CUDAExecutionProvider", "cuda": "CUDAExecutionProvider", "npu": "QNNExecutionProvider"}


def stages_of(graph: Any, tensors: Mapping[str, int]) -> list[int]:
    """Return the stage of each node of an ONNX graph.

    Args:
        tensors: name → stage that computes it, in the converted model.

    Raises:
        ValueError: no tensor of the graph has a name from the plan.
    """
    after: dict[str, list[int]] = {}
    for index, node in enumerate(graph.node):
        for name in node.input:
            after.setdefault(name, []).append(index)
    found: list[int | None] = [None] * len(graph.node)
    for index in reversed(range(len(graph.node))):
        outputs = graph.node[index].output
        own = [tensors[name] for name in outputs if name in tensors]
        later = [found[i] for name in outputs for i in after.get(name, ()) if found[i] is not None]
        found[index] = own[0] if own else min((s for s in later if s is not None), default=None)
    known = [s for s in found if s is not None]
    if not any(name in tensors for node in graph.node for name in node.output):
        raise ValueError("the model has no tensor of the plan: give the ONNX model that was converted")
    return [max(known) if stage is None else stage for stage in found]


def annotate(model: Any, placement: Mapping[str, Any], given: Mapping[str, str]) -> str:
    """Write the stage of each node into an ``onnx.ModelProto``; return the setting that places the stages.

    Args:
        given: processor of the plan → device of ONNX Runtime.
    """
    stages = stages_of(model.graph, placement["tensors"])
    if not set(stages) <= set(range(len(placement["stages"]))):
        raise ValueError(f"placement.json has {len(placement['stages'])} stages, and tensors of others")
    for node, stage in zip(model.graph.node, stages, strict=True):
        kept = [(p.key, p.value) for p in node.metadata_props if p.key != KEY]
        del node.metadata_props[:]
        for key, value in (*kept, (KEY, f"stage_{stage}")):
            node.metadata_props.add(key=key, value=value)
    rules: dict[str, list[str]] = {}
    for index, stage in enumerate(placement["stages"]):
        rules.setdefault(given.get(stage["processor"], stage["kind"]), []).append(f"=stage_{index}")
    return ";".join(f"{device}({','.join(stages)})" for device, stages in rules.items())


def session_of(path: Path, setting: str) -> Any:
    """Return an ``onnxruntime.InferenceSession`` of an annotated model that reports where its nodes run."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(SETTING, setting)
    options.add_session_config_entry(RECORD, "1")
    wanted = [_PROVIDERS.get(rule.partition("(")[0], "") for rule in setting.split(";")]
    providers = [name for name in onnxruntime.get_available_providers() if name in wanted]
    return onnxruntime.InferenceSession(path, options, providers=[*providers, "CPUExecutionProvider"])


def _pair(text: str) -> tuple[str, str]:
    name, _, device = text.partition("=")
    if not device:
        raise argparse.ArgumentTypeError(f"{text!r} is no PROCESSOR=DEVICE")
    return name, device


def main() -> int:
    """Annotate a model, write it beside itself, and report where ONNX Runtime puts its nodes."""
    parser = argparse.ArgumentParser(description="Place an exported plan by ONNX Runtime's layer assignment.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    parser.add_argument("--device", metavar="PROCESSOR=DEVICE", type=_pair, action="append", default=[])
    options = parser.parse_args()
    try:
        import onnx

        placement = json.loads((options.folder / "placement.json").read_text(encoding="utf-8"))
        model = onnx.load(options.model)
        setting = annotate(model, placement, dict(options.device))
        placed = options.model.with_name(f"{options.model.stem}.placed.onnx")
        onnx.save(model, placed)
        session = session_of(placed, setting)
    except Exception as error:  # noqa: BLE001 - onnx and onnxruntime raise classes of their own
        said = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        print(f"onnx_plan: {repr(error) if isinstance(error, LookupError) else said[0]}", file=sys.stderr)
        return 4
    print(f"{placed}: {SETTING} = {setting}")
    counts: dict[str, int] = {}
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name] = counts.get(part.ep_name, 0) + len(part.get_nodes())
    for provider, count in counts.items():
        print(f"{provider}: {count} nodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
