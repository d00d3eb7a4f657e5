"""The generated networks that a calibration times: lawful, affordable, and the same again."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from evaluators.cost_model.calibrate_nets import (
    GENERATOR,
    MOST_ELEMENTS,
    MOST_MACS,
    MOST_WEIGHTS,
    network,
    random_blocks,
    random_deep,
)
from search_spaces.core.intensity import operator_costs
from tests.support.cost_model import networks


def test_networks_are_the_same_again_affordable_and_lawful() -> None:
    for one, again in zip(networks(["a", "b"], 3), networks(["a", "b"], 3), strict=True):
        assert one.graph().digest == again.graph().digest
    some = [*networks([f"n{i}" for i in range(10)], 4), *(network(f"n{seed}", seed) for seed in range(10))]
    for draft in some:
        graph = draft.graph()
        assert len(graph.operators) >= 6
        assert max(cost.macs for cost in operator_costs(graph)) <= 1.01 * MOST_MACS
        assert draft.nbytes < 150_000_000
    assert {"BATCH_MATMUL", "CONV_2D"} <= {o.kind for draft in some for o in draft.graph().operators}


def test_networks_of_blocks_fall_in_size_at_least_thrice_and_are_affordable() -> None:
    for seed in range(300):
        graph = random_blocks("n", np.random.default_rng([seed, 7])).graph()
        sizes = {
            graph.tensors[o.outputs[0]].shape[1] for o in graph.operators if len(graph.tensors[o.outputs[0]].shape) == 4
        }
        assert len(sizes) >= 4, seed  # with that of the stem; the last one may be 1
        assert sum(cost.macs for cost in operator_costs(graph)) <= 1.1 * MOST_MACS, seed  # with stem and head


def test_deep_networks_are_affordable_and_some_have_few_rows() -> None:
    shapes = set()
    for seed in range(60):
        graph = random_deep("n", np.random.default_rng([seed, 7])).graph()
        costs = [cost.macs for cost in operator_costs(graph)]
        assert max(costs) <= 1.01 * MOST_MACS, seed
        assert sum(costs) <= 8.2 * MOST_MACS, seed
        assert max(t.nbytes for t in graph.tensors if t.constant) <= 4 * MOST_WEIGHTS, seed
        assert max(t.nbytes for t in graph.tensors if not t.constant) <= 8 * MOST_ELEMENTS, seed
        _, rows, columns, _ = graph.tensors[graph.inputs[0]].shape
        shapes.add(columns // rows)
    assert shapes == {1, 2, 4}


@pytest.mark.parametrize("seed", [813, 1112])
def test_a_map_that_is_not_square_is_not_smaller_than_a_kernel(seed: int) -> None:
    """A fast machine times enough networks to come to one whose map a kernel of one row has left narrow."""
    graph = network("n", seed).graph()
    assert min(min(graph.tensors[t].shape) for o in graph.operators for t in o.outputs) > 0


def test_seeds_stand_for_the_same_networks_as_long_as_the_generator_has_its_number() -> None:
    """Where this fails, raise GENERATOR, and write the digest of the new networks here."""
    drawn = [network(f"net{seed}", seed).graph().digest for seed in range(40)]
    assert (GENERATOR, hashlib.sha256(" ".join(drawn).encode()).hexdigest()[:16]) == (5, "f42f4cea80b5efb0")
