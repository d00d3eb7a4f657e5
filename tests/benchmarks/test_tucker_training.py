"""Networks in PyTorch, decomposed by our factors: at full rank they compute the same; needs the extra ``train``."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed")
pytest.importorskip("sklearn", reason="the extra 'train' is not installed")

import numpy as np  # noqa: E402 - what needs the extra comes after the question whether it is there

from search_spaces.rewrites.tucker import Layer, Ranks  # noqa: E402
from tests.benchmarks import tucker_accuracy as experiment  # noqa: E402
from tests.benchmarks.tucker_training import (  # noqa: E402
    Data,
    accuracy,
    decompose,
    digits,
    equal_macs,
    layers,
    macs,
    outputs,
    train,
)

NETWORKS = pytest.mark.parametrize("name", sorted(experiment.NETWORKS))


def quarter(layer: Layer) -> Ranks:
    return Ranks(*(max(1, channels // 4) for channels in layer.full))


@NETWORKS
@pytest.mark.parametrize("seed", range(4))
def test_full_rank_reproduces_the_network_to_float_precision(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    network = experiment.NETWORKS[name](8 + seed)
    data = digits(seed, 0.1)
    train(network, data, 1, 1e-2, seed)  # so that nothing is as it was drawn
    images = data.test[0][:64]
    before = outputs(network, images)
    found = decompose(network, lambda layer: layer.full)
    assert len(found) == sum(layer is not None and layer.kernel == (3, 3) for _, layer in layers(network)) > 3
    np.testing.assert_allclose(outputs(network, images), before, rtol=1e-4, atol=1e-5 * float(np.abs(before).max()))


@NETWORKS
def test_fewer_ranks_take_the_macs_that_they_are_said_to_take(name: str) -> None:
    torch.manual_seed(0)
    network = experiment.NETWORKS[name](16)
    shapes = [layer for _, layer in layers(network) if layer is not None and layer.kernel == (3, 3)]
    before = macs(network)
    saved = sum(layer.macs() - layer.macs(quarter(layer)) for layer in shapes)
    decompose(network, quarter)
    assert macs(network) == before - saved
    small = equal_macs(experiment.NETWORKS[name], before - saved, 16)
    assert macs(small) == pytest.approx(before - saved, rel=0.3)


@NETWORKS
def test_a_trained_network_tells_digits_before_and_after(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "EPOCHS", 4)
    monkeypatch.setattr(experiment, "MORE_EPOCHS", 2)
    monkeypatch.setattr(experiment, "WIDTH", 16)
    torch.manual_seed(0)
    images, shows = digits(0, 0.3).train
    data = Data((images, shows), (images[:200], shows[:200]))
    run = experiment.one(experiment.NETWORKS[name], data, 0)
    assert run["accuracy"] > 0.8
    for row in run["tucker"].values():
        assert row["macs"] < run["macs"]
        assert 0.0 < row["accuracy_retrained"] <= 1.0  # two rounds over few images are too few to say more
    found = experiment.summary([run, run])
    assert found["accuracy"]["ci95"] == pytest.approx([run["accuracy"]] * 2)
    assert 0.0 <= accuracy(experiment.NETWORKS[name](4), data) <= 1.0
