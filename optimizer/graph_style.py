"""Colours of a graph's picture: by family of operators, on light and on dark."""

from __future__ import annotations

from optimizer.inspect import Inspection

# Family → kinds; a known kind that is in no list works element by element.
_KINDS = {
    "convolution": "CONV_2D CONV_3D TRANSPOSE_CONV CONV_3D_TRANSPOSE",
    "depthwise convolution": "DEPTHWISE_CONV_2D",
    "matrix product": "FULLY_CONNECTED BATCH_MATMUL LSTM RNN SVDF UNIDIRECTIONAL_SEQUENCE_LSTM"
    " UNIDIRECTIONAL_SEQUENCE_RNN BIDIRECTIONAL_SEQUENCE_LSTM BIDIRECTIONAL_SEQUENCE_RNN",
    "pooling, reduction": "AVERAGE_POOL_2D MAX_POOL_2D L2_POOL_2D MEAN SUM REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN"
    " REDUCE_PROD ARG_MAX ARG_MIN CUMSUM SOFTMAX LOG_SOFTMAX L2_NORMALIZATION LOCAL_RESPONSE_NORMALIZATION",
    "copy, change of shape": "BATCH_TO_SPACE_ND BROADCAST_TO CAST CONCATENATION DEPTH_TO_SPACE DEQUANTIZE"
    " DYNAMIC_UPDATE_SLICE EXPAND_DIMS FILL GATHER GATHER_ND MIRROR_PAD PACK PAD PADV2 QUANTIZE RESHAPE"
    " RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR REVERSE_V2 SCATTER_ND SHAPE SLICE SPACE_TO_BATCH_ND SPACE_TO_DEPTH SPLIT"
    " SPLIT_V SQUEEZE STRIDED_SLICE TILE TRANSPOSE UNPACK",
}
_ELEMENTWISE, _GROUPED, UNKNOWN = "element by element", "placed as one", "not known to the cost table"
_FAMILY = {kind: family for family, kinds in _KINDS.items() for kind in kinds.split()}
FAMILIES = (*_KINDS, _ELEMENTWISE, _GROUPED, UNKNOWN)

# Colours of families, in that order, on light and on dark; they keep apart for the colour-blind, and no text is set
# in them.
_LIGHT = ("#2a6fbb", "#12a0a6", "#6a4fb3", "#d9822b", "#b8a12b", "#3d9a50", "#8a8f98", "#c2416c")
_DARK = ("#5b9fe8", "#3cc4c4", "#a08be8", "#f0a35a", "#d6c356", "#6cc47c", "#a4a9b3", "#ee7fa3")

STYLE = f"""
.graph{{--surface:#fff;--ink:#1b1f24;--muted:#5a626c;--line:#c9ced6;--wire:#767f8b;--box:#e9edf3;--bar:#9fb3cc;
--mark:#0b7a4b;{"".join(f"--c{i}:{c};" for i, c in enumerate(_LIGHT))}}}
@media (prefers-color-scheme:dark){{.graph{{--surface:#15181c;--ink:#e8eaed;--muted:#a3abb5;--line:#3d444d;
--wire:#8b949e;--box:#20262e;--bar:#4f6683;--mark:#4fd39a;{"".join(f"--c{i}:{c};" for i, c in enumerate(_DARK))}}}}}
.graph{{font:11px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}}
.graph{{background:var(--surface)}}
.graph text{{fill:var(--ink)}}
.graph .h{{font-size:18px;font-weight:600}}
.graph .m{{fill:var(--muted)}}
.graph .e{{text-anchor:end}}
.graph .n text{{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}}
.graph .s{{fill:var(--surface)}}
.graph .b{{fill:var(--box);stroke:var(--line);stroke-width:.75}}
.graph .n rect.f{{fill:var(--surface);stroke:var(--line)}}
.graph .u rect.f{{stroke:var(--ink);stroke-dasharray:3 2}}
.graph .w{{fill:none;stroke:var(--wire);stroke-width:1.4}}
.graph .a{{fill:var(--wire)}}
.graph .t{{fill:none;stroke:transparent;stroke-width:7}}
.graph g.l:hover .w{{stroke:var(--ink);stroke-width:2.4}}
.graph .c line{{stroke:var(--line);stroke-dasharray:1 3}}
.graph .c .r{{fill:var(--bar)}}
.graph .c .z{{fill:transparent}}
.graph .c:hover line,.graph .c:target line{{stroke:var(--ink);stroke-dasharray:none}}
.graph .k text{{font-weight:600;fill:var(--mark)}}
.graph .k .r{{fill:var(--mark)}}
.graph .k line{{stroke:var(--mark);stroke-dasharray:4 2}}
.graph .n:hover rect.f,.graph .n:target rect.f{{stroke:var(--ink);stroke-width:2}}
"""


def family(found: Inspection, index: int) -> str:
    """Return the family that an operator is drawn as, one of :data:`FAMILIES`."""
    operator = found.graph.operators[index]
    if not found.costs[index].known:
        return UNKNOWN
    return _GROUPED if operator.parts else _FAMILY.get(operator.kind, _ELEMENTWISE)
