from __future__ import annotations

import numpy as np

from evaluators.cost_model.correction import _matern, louder_noise


def test_what_networks_have_of_their_own_is_not_learnt() -> None:
    rng = np.random.default_rng(0)
    networks = np.repeat(np.arange(24), 10)
    # Shapes of one network are alike.
    points = (rng.uniform(-8.0, 8.0, (24, 1, 2)) + rng.normal(0.0, 0.3, (24, 10, 2))).reshape(240, 2)
    shared, own = np.sin(points[:, 0] / 3.0), rng.normal(0.0, 0.5, 24)[networks]
    chosen = [
        louder_noise(
            _matern(points / 8.0, points / 8.0, float(residual.std())),
            residual,
            np.full(240, 0.04),
            networks,
            np.ones(240),
        )
        for residual in (shared, shared + own, own)
    ]
    assert chosen[0] < chosen[1] <= chosen[2]
