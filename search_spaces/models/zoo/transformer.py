"""ViT-B/16 (Dosovitskiy et al. 2021, arXiv:2010.11929) and MobileBERT (Sun et al. 2020, arXiv:2004.02984).

ViT is as torchvision has it, with separate queries, keys and values. MobileBERT is the encoder, with its input
embeddings by GATHER and its linear normalisation; the output is the last hidden state. A width multiplier scales the
number of attention heads; their size stays.
"""

from __future__ import annotations

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from search_spaces.models.zoo.builder import BIAS_STD, Builder, Value, whole
from search_spaces.models.zoo.names import Spec

_VIT_LAYERS, _VIT_HEADS, _VIT_HEAD, _PATCH = 12, 12, 64, 16
_BERT_LAYERS, _BERT_HEADS, _BERT_HEAD = 24, 4, 32
_WORDS, _EMBEDDING = 30522, 128
_MASKED = -10000.0


def build(net: Builder, spec: Spec) -> tuple[Value, ...]:
    """Add the encoder that the name says."""
    return ({"vit_b16": _vit, "mobilebert": _mobilebert}[spec.name](net, spec),)


def attention(net: Builder, query: Value, key: Value, value: Value, heads: int, name: str, mask: Value | None) -> Value:
    """Return multi-head attention, shape (1, tokens, channels); ``mask`` is added to the scores."""
    _, tokens, channels = query.shape
    size = channels // heads

    def split(x: Value, what: str) -> Value:
        x = net.reshape(x, (1, tokens, heads, size), f"{name}/{what}_heads")
        return net.transpose(x, (0, 2, 1, 3), f"{name}/{what}_first")

    q, k, v = split(query, "query"), split(key, "key"), split(value, "value")
    shape = (1, heads, tokens, tokens)
    scores = net.operator("BATCH_MATMUL", (q, k), shape, f"{name}/scores", schema.BatchMatMulOptionsT(adjY=True))
    scores = net.scalar("MUL", scores, size**-0.5, f"{name}/scaled")
    if mask is not None:
        scores = net.add(scores, mask, f"{name}/masked")
    shares = net.softmax(scores, f"{name}/softmax")
    x = net.operator("BATCH_MATMUL", (shares, v), v.shape, f"{name}/context", schema.BatchMatMulOptionsT())
    return net.reshape(net.transpose(x, (0, 2, 1, 3), f"{name}/back"), (1, tokens, channels), f"{name}/joined")


def _vit(net: Builder, spec: Spec) -> Value:
    heads = whole(_VIT_HEADS * spec.width)
    width = heads * _VIT_HEAD
    gain = (2 * _VIT_LAYERS) ** -0.5
    x = net.input((1, *spec.size, 3))
    x = net.conv(x, width, _PATCH, "patches", stride=_PATCH, padding="VALID")
    x = net.reshape(x, (1, x.shape[1] * x.shape[2], width), "tokens")
    x = net.concat([net.weight("class_token", (1, 1, width), 0.02), x], "with_class", axis=1)
    tokens = x.shape[1]
    x = net.add(x, net.weight("positions", (1, tokens, width), 0.02), "embedded")
    for layer in range(1, _VIT_LAYERS + 1):
        name = f"layer{layer}"
        y = net.normalised(x, (2,), f"{name}/norm1", 1e-6)
        query, key, value = (net.fully_connected(y, width, f"{name}/{w}", keep=True) for w in ("q", "k", "v"))
        y = attention(net, query, key, value, heads, f"{name}/attention", None)
        x = net.add(x, net.fully_connected(y, width, f"{name}/out", keep=True, gain=gain), f"{name}/add1")
        y = net.normalised(x, (2,), f"{name}/norm2", 1e-6)
        y = net.fully_connected(y, 4 * width, f"{name}/mlp1", keep=True)
        y = net.unary("GELU", y, f"{name}/gelu", schema.GeluOptionsT(approximate=False))
        x = net.add(x, net.fully_connected(y, width, f"{name}/mlp2", keep=True, gain=gain), f"{name}/add2")
    # Only the class token is used, so only it is normalised.
    x = net.part(x, (0, 0, 0), (1, 1, width), "class")
    x = net.normalised(x, (2,), "norm", 1e-6)
    return net.softmax(net.fully_connected(net.reshape(x, (1, width), "features"), 1000, "head"))


def _mobilebert(net: Builder, spec: Spec) -> Value:
    heads = whole(_BERT_HEADS * spec.width)
    inner = heads * _BERT_HEAD
    outer = 4 * inner
    x, mask = _bert_inputs(net, spec.size[0], outer)
    for layer in range(1, _BERT_LAYERS + 1):
        x = _bert_layer(net, x, mask, heads, inner, f"layer{layer}")
    return x


def _bert_layer(net: Builder, x: Value, mask: Value, heads: int, inner: int, name: str) -> Value:
    """Add a bottleneck, attention and four feed-forward networks in it, and the expansion back."""
    outer = x.shape[2]

    def dense(y: Value, units: int, what: str, gain: float = 2**-0.5) -> Value:
        return net.fully_connected(y, units, f"{name}/{what}", keep=True, gain=gain)

    narrow = net.affine(dense(x, inner, "bottleneck"), f"{name}/bottleneck_norm")
    shared = net.affine(dense(x, inner, "shared"), f"{name}/shared_norm")
    query, key, value = dense(shared, inner, "q"), dense(shared, inner, "k"), dense(x, inner, "v")
    y = attention(net, query, key, value, heads, f"{name}/attention", mask)
    y = net.add(dense(y, inner, "attended", 0.3), narrow, f"{name}/attended_add")
    y = net.affine(y, f"{name}/attended_norm")
    for number in range(1, 5):
        z = net.fully_connected(y, outer, f"{name}/ffn{number}/wide", keep=True, activation="RELU")
        z = dense(z, inner, f"ffn{number}/narrow", 0.3)
        y = net.affine(net.add(z, y, f"{name}/ffn{number}/add"), f"{name}/ffn{number}/norm")
    y = net.add(dense(y, outer, "back", (2 * _BERT_LAYERS) ** -0.5), x, f"{name}/back_add")
    return net.affine(y, f"{name}/back_norm")


def _bert_inputs(net: Builder, tokens: int, outer: int) -> tuple[Value, Value]:
    """Return the embedded words (1, tokens, outer), and the mask of the scores: 0 for tokens that count."""
    words = net.input((1, tokens), "input_ids", "INT32")
    counts = net.input((1, tokens), "input_mask", "INT32")
    segments = net.input((1, tokens), "segment_ids", "INT32")
    table = net.weight("embeddings/words", (_WORDS, _EMBEDDING), 1.0, matrix=True)
    shape = (1, tokens, _EMBEDDING)
    x = net.operator("GATHER", (table, words), shape, "embeddings/gather", schema.GatherOptionsT(axis=0))
    # Each token also reads the words before and after it.
    after = net.part(x, (0, 1, 0), (1, tokens - 1, _EMBEDDING), "embeddings/after_part")
    after = net.pad(after, ((0, 0), (0, 1), (0, 0)), "embeddings/after")
    before = net.part(x, (0, 0, 0), (1, tokens - 1, _EMBEDDING), "embeddings/before_part")
    before = net.pad(before, ((0, 0), (1, 0), (0, 0)), "embeddings/before")
    x = net.concat([after, x, before], "embeddings/trigram")
    x = net.fully_connected(x, outer, "embeddings/transform", keep=True, gain=2**-0.5)
    # Of the 512 positions, a converter keeps those of the fixed sequence length.
    x = net.add(x, net.weight("embeddings/positions", (1, tokens, outer), 0.02), "embeddings/placed")
    # Two segments: a product with ones and zeros, as BERT does it, which takes any whole number.
    depth = net.constant("embeddings/segments/depth", np.array(2, np.int32))
    on, off = (net.constant(f"embeddings/segments/{v}", np.array(v, np.float32)) for v in (1, 0))
    options = schema.OneHotOptionsT(axis=-1)
    hot = net.operator("ONE_HOT", (segments, depth, on, off), (1, tokens, 2), "embeddings/one_hot", options)
    kinds = net.weight("embeddings/segments", (outer, 2), 0.02)
    bias = net.weight("embeddings/segments/bias", (outer,), BIAS_STD)
    options = schema.FullyConnectedOptionsT(keepNumDims=True)
    kind = net.operator("FULLY_CONNECTED", (hot, kinds, bias), x.shape, "embeddings/segment", options)
    x = net.affine(net.add(x, kind, "embeddings/sum"), "embeddings/norm")
    options = schema.CastOptionsT(inDataType=schema.TensorType.INT32, outDataType=schema.TensorType.FLOAT32)
    mask = net.operator("CAST", (counts,), counts.shape, "mask/float", options)
    mask = net.scalar("SUB", net.reshape(mask, (1, 1, 1, tokens), "mask/shape"), 1.0, "mask/less_one")
    return x, net.scalar("MUL", mask, -_MASKED, "mask")
