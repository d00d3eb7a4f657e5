"""Operators for tests of the cost model."""

from __future__ import annotations

from hypothesis import strategies as st

from evaluators.cost_model.features import KERNELS, OperatorFeatures

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
