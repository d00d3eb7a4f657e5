"""Operators and networks for tests of the cost model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from evaluators.cost_model.calibrate_nets import drawn, random_dense, random_network
from evaluators.cost_model.features import KERNELS, OperatorFeatures
from search_spaces.models.zoo.builder import Draft

SIZES = st.integers(0, 1 << 30)
PLANES = st.tuples(st.integers(1, 512), st.integers(1, 512), st.integers(1, 4096))


def features(kernels: tuple[str, ...] = KERNELS) -> st.SearchStrategy[OperatorFeatures]:
    """Return operators of any shape, not only of shapes that go with their work."""
    return st.builds(
        OperatorFeatures,
        kernel=st.sampled_from(kernels),
        kind=st.just("CONV_2D"),
        macs=st.integers(0, 1 << 40),
        read_bytes=SIZES,
        weight_bytes=SIZES,
        written_bytes=SIZES,
        input=PLANES,
        output=PLANES,
        filter=st.tuples(st.integers(1, 7), st.integers(1, 7)),
        groups=st.integers(1, 64),
        inputs=st.integers(1, 4),
    )


ANY_KINDS = 80


def networks(names: Sequence[str], seed: int = 0) -> list[Draft]:
    """Return a network for each name: every fifth one has dense layers.

    From the 81st on they are those that a calibration draws.
    """

    def network(index: int, name: str) -> Draft:
        rng = np.random.default_rng([seed, index])
        if index >= ANY_KINDS:
            return drawn(name, rng, index)
        return random_dense(name, rng) if index % 5 == 4 else random_network(name, rng)

    return [network(index, name) for index, name in enumerate(names)]
