"""Operators and tensors that do not go together are refused; those that do are not."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from search_spaces.core.graph import Operator, Tensor
from search_spaces.models.litert import check_operator
from tests.support.sentences import fails

Shape = tuple[int, ...]


def check(kind: str, inputs: list[Shape], outputs: list[Shape], **options: Any) -> None:
    tensors = [Tensor("t", shape, "float32", 4 * prod(shape)) for shape in (*inputs, *outputs)]
    numbers = tuple(range(len(tensors)))
    check_operator(Operator(kind, numbers[: len(inputs)], numbers[len(inputs) :], options), tensors)


CONV = {"stride_h": 2, "stride_w": 1, "padding": "VALID", "dilation_h_factor": 2, "dilation_w_factor": 1}


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "options"),
    [
        ("RELU", [(2, 3)], (2, 3), {}),
        ("ADD", [(4, 1, 3), (2, 1)], (4, 2, 3), {}),
        ("MUL", [(2, 3), (3,)], (2, 3), {}),
        ("ADD", [(0, 3), (1, 1)], (0, 3), {}),
        ("FULLY_CONNECTED", [(2, 2, 6), (5, 12), (5,)], (2, 5), {}),
        ("FULLY_CONNECTED", [(2, 2, 6), (5, 6), (5,)], (2, 2, 5), {}),
        ("CONV_2D", [(1, 9, 9, 4), (8, 3, 3, 2), (8,)], (1, 3, 7, 8), CONV),
        ("CONV_2D", [(1, 9, 9, 4), (8, 3, 3, 2), (8,)], (1, 5, 9, 8), CONV | {"padding": "SAME"}),
        ("DEPTHWISE_CONV_2D", [(1, 9, 9, 4), (1, 3, 3, 8), (8,)], (1, 3, 7, 8), CONV),
        ("MAX_POOL_2D", [(1, 9, 9, 4)], (1, 4, 8, 4), CONV | {"filter_height": 2, "filter_width": 2,
                                                             "dilation_h_factor": 1}),
        ("CONCATENATION", [(1, 2), (1, 3)], (1, 5), {}),
        ("RESHAPE", [(4, 3), (1,)], (12,), {}),
        ("MyOwn", [], (7,), {}),
    ],
)  # fmt: skip
def test_shapes_that_go_together(kind: str, inputs: list[Shape], output: Shape, options: dict[str, Any]) -> None:
    check(kind, inputs, [output], **options)
    check(kind, inputs, [(-1,) * len(output)], **options)
    if kind != "MyOwn":
        with fails(ValueError):
            check(kind, inputs, [(*output[:-1], output[-1] + 1)], **options)
        with fails(ValueError):
            check(kind, inputs, [output, output], **options)


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ("ADD", [(2, 3), (2, 4)]),
        ("FULLY_CONNECTED", [(2, 5), (3, 4)]),
        ("FULLY_CONNECTED", [(2, 5), (3, 0)]),
        ("CONV_2D", [(2, 5), (3, 4)]),
        ("MAX_POOL_2D", [(1, 9, 9, 4)]),
        ("RELU", []),
    ],
)
def test_what_cannot_be_computed(kind: str, inputs: list[Shape]) -> None:
    with fails(ValueError):
        check(kind, inputs, [(1, 1)])


def test_an_input_that_must_be_there() -> None:
    tensors = [Tensor("t", (2,), "float32", 8)]
    with fails(ValueError):
        check_operator(Operator("ADD", (0, -1), (0,)), tensors)
