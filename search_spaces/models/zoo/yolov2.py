"""YOLO v2 for the 80 classes of COCO, as darknet has it (Redmon and Farhadi 2017, arXiv:1612.08242)."""

from __future__ import annotations

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from search_spaces.models.zoo.builder import Builder, Value, whole
from search_spaces.models.zoo.names import Spec

# Darknet-19: filters and kernel of each convolution between two poolings.
_GROUPS = (
    ((32, 3),),
    ((64, 3),),
    ((128, 3), (64, 1), (128, 3)),
    ((256, 3), (128, 1), (256, 3)),
    ((512, 3), (256, 1), (512, 3), (256, 1), (512, 3)),
    ((1024, 3), (512, 1), (1024, 3), (512, 1), (1024, 3), (1024, 3), (1024, 3)),
)
_SLOPE = float(np.float32(0.1))
_OUTPUTS = 5 * (80 + 5)  # anchors × (classes, box and confidence)


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add Darknet-19, and a detector that also reads finer features, in blocks of four pixels."""
    x = net.input((1, *spec.size, 3))
    fine = x
    for group, layers in enumerate(_GROUPS, 1):
        if group > 1:
            fine = x
            x = net.max_pool(x, 2, 2, f"pool{group - 1}")
        for layer, (filters, kernel) in enumerate(layers, 1):
            x = _conv(net, x, whole(filters * spec.width), kernel, f"conv{group}_{layer}")
    fine = _conv(net, fine, whole(64 * spec.width), 1, "passthrough")
    batch, height, width, channels = fine.shape
    fine = net.operator(
        "SPACE_TO_DEPTH",
        (fine,),
        (batch, height // 2, width // 2, 4 * channels),
        "passthrough/reorg",
        schema.SpaceToDepthOptionsT(blockSize=2),
    )
    x = _conv(net, net.concat([fine, x], "concat"), whole(1024 * spec.width), 3, "conv7")
    return (net.conv(x, _OUTPUTS, 1, "detections"),)


def _conv(net: Builder, x: Value, filters: int, kernel: int, name: str) -> Value:
    x = net.conv(x, filters, kernel, name)
    return net.unary("LEAKY_RELU", x, f"{name}/leaky", schema.LeakyReluOptionsT(alpha=_SLOPE))
