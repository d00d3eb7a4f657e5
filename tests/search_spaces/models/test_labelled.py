"""Labelled inputs: parts drawn by class, images put into the shape that a network reads, files that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.core.errors import UsageError
from search_spaces.models.labelled import Labelled, read_labelled
from tests.support.sentences import fails


def images(count: int, *shape: int) -> Labelled:
    inputs = np.arange(1, count * int(np.prod(shape)) + 1, dtype=np.float32).reshape(count, *shape)
    return Labelled("x", inputs, np.arange(count, dtype=np.int64) % 3)


@given(
    labels=st.lists(st.integers(0, 4), min_size=2, max_size=60),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**31 - 1),
)
def test_parts_are_disjoint_and_have_their_share_of_every_class(labels: list[int], share: float, seed: int) -> None:
    data = Labelled("x", np.arange(len(labels), dtype=np.float32)[:, None], np.array(labels))
    first, other = data.parted(share, seed)
    assert sorted([*first.inputs[:, 0], *other.inputs[:, 0]]) == list(range(len(labels)))
    for label in set(labels):
        assert int(np.sum(first.labels == label)) == max(1, round(share * labels.count(label)))
    again = data.parted(share, seed)[0]
    assert np.array_equal(again.inputs, first.inputs)


def test_a_small_image_lies_in_the_middle_of_zeros_and_its_channel_is_repeated() -> None:
    data = images(2, 2, 3)
    found = data.shaped((1, 4, 4, 3)).inputs
    assert found.shape == (2, 4, 4, 3)
    assert np.array_equal(found[:, 1:3, 0:3], np.repeat(data.inputs[..., None], 3, axis=3))
    assert found.sum() == 3 * data.inputs.sum()
    assert data.shaped((1, 2, 3)) is data


@pytest.mark.parametrize("shape", [(1, 1, 3, 3), (1, 2, 2, 1), (1, 7), (1, 2, 3, 3, 1)])
def test_what_does_not_fit_is_one_line(shape: tuple[int, ...]) -> None:
    with fails(UsageError):
        images(2, 2, 3).shaped(shape)


def test_inputs_that_would_not_fit_into_memory_are_one_line() -> None:
    with fails(UsageError):
        images(3, 2, 3).shaped((1, 20_000, 20_000, 3))


GOOD: dict[str, Any] = {"inputs": np.zeros((4, 8, 8), np.uint8), "labels": np.array([0, 1, 0, 1])}


def test_bytes_of_a_file_become_shares_of_one(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", inputs=GOOD["inputs"] + np.uint8(255), labels=GOOD["labels"])
    found = read_labelled(str(tmp_path / "x.npz"))
    assert found.inputs.dtype == np.float32
    assert found.inputs.max() == 1.0
    assert found.labels.dtype == np.int64


@pytest.mark.parametrize(
    "wrong",
    [
        {"labels": None},
        {"labels": np.array([0, 1, 0])},
        {"labels": np.array([0.0, 1.0, 0.0, 1.0])},
        {"labels": np.array([0, 1, -1, 1])},
        {"labels": np.array([[0, 1, 0, 1]])},
        {"labels": np.array([1, 1, 1, 1])},
        {"inputs": np.full((4, 2), np.nan, np.float32)},
        {"inputs": np.zeros(4, np.float32)},
        {"inputs": np.array(["a"] * 4)},
        {"more": np.zeros(1)},
    ],
)
def test_a_file_that_is_not_of_labelled_inputs_is_one_line(tmp_path: Path, wrong: dict[str, Any]) -> None:
    arrays = {name: array for name, array in (GOOD | wrong).items() if array is not None}
    np.savez(tmp_path / "x.npz", **arrays)
    with fails(UsageError):
        read_labelled(str(tmp_path / "x.npz"))


def test_files_that_are_no_arrays_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 no archive")
    with fails(UsageError):
        read_labelled(str(tmp_path / "x.npz"))
    with fails(UsageError):
        read_labelled(str(tmp_path / "missing.npz"))
