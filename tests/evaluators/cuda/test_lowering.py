"""What the lowering to PyTorch computes is what LiteRT computes; PyTorch's CPU stands in for the GPU."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluators.cuda.session import References
from evaluators.litert import tensors
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.models.zoo.builder import Builder
from search_spaces.rewrites.tucker import Ranks, decompose, tucker_layers
from tests.support.sentences import fails

torch = pytest.importorskip("torch", reason="needs PyTorch (the extra cuda)")
REFERENCES = References()
NEAR = 2e-5


def computed(
    graph: Graph, cuts: tuple[int, ...] = (), *, first: bool = False, room_nbytes: int | None = None
) -> list[Any]:
    """Return a model's outputs by PyTorch, computed in parts."""
    from evaluators.cuda.lowering import Weights, as_in_file, held, lower
    from evaluators.cuda.streamed import Staging

    weights = Weights(graph, "cpu", room_nbytes=room_nbytes)
    staging = Staging("cpu") if weights.streams else None
    values = {}
    for tensor, array in zip(graph.inputs, tensors.model_inputs(graph, 0), strict=True):
        value = held(torch.from_numpy(np.array(array)), array.ndim)
        values[tensor] = value.contiguous() if first else value
    borders = [0, *cuts, len(graph.operators)]
    for begin, end in pairwise(borders):
        job = lower(weights, range(begin, end), first=first, staging=staging)
        inside = {t: values[t] for t in job.inputs}
        job.run(inside)
        assert set(inside) >= set(job.outputs)
        values |= {t: inside[t] for t in job.outputs}
    return [as_in_file(values[t]).numpy() for t in graph.outputs]


def off(found: list[Any], graph: Graph) -> float:
    return tensors.agreement(graph, found, REFERENCES.outputs(graph), 0.0).max_rel_error


MODELS = (
    "vgg16@0.125/32",
    "resnet152@0.125/32",
    "inception_v3@0.125/75",
    "regnet_y_32gf@0.125/32",
    "squeezenet1_1@0.5/64",
    "mobilenet_v1@0.25/64",
    "mobilenet_v2@0.25/64",
    "googlenet@0.25/64",
)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_zoo(name: str) -> None:
    graph = load(name)
    assert off(computed(graph), graph) <= NEAR
    assert off(computed(graph, first=True), graph) <= NEAR
    third = len(graph.operators) // 3
    assert off(computed(graph, (third, 2 * third)), graph) <= NEAR


@pytest.mark.parametrize("share", [1.0, 0.7, 0.4])
@pytest.mark.parametrize("name", ["vgg16@0.125/32", "resnet152@0.125/32"])
def test_weights_that_do_not_fit_pass_through_buffers(monkeypatch: pytest.MonkeyPatch, name: str, share: float) -> None:
    from evaluators.cuda.lowering import Weights

    tile = 64 << 10
    for module in ("lowering", "streamed"):
        monkeypatch.setattr(f"evaluators.cuda.{module}.TILE_NBYTES", tile)
    graph = load(name)
    nbytes = sum(t.nbytes for t in graph.tensors if t.constant)
    room = max(int(share * nbytes), 2 * tile + nbytes // 4)
    assert Weights(graph, "cpu", room_nbytes=room).streams
    assert not Weights(graph, "cpu", room_nbytes=nbytes + 2 * tile).streams
    for first in (False, True):
        assert off(computed(graph, first=first, room_nbytes=room), graph) <= NEAR
    third = len(graph.operators) // 3
    assert off(computed(graph, (third, 2 * third), room_nbytes=room), graph) <= NEAR


def test_too_little_room_for_weights() -> None:
    from evaluators.cuda.lowering import Weights

    with fails(UnavailableError):
        Weights(load("vgg16@0.125/32"), "cpu", room_nbytes=1 << 20)


def test_every_operator_apart() -> None:
    graph = load("inception_v3@0.125/75")
    assert off(computed(graph, tuple(range(1, len(graph.operators)))), graph) <= NEAR


def test_a_decomposed_model() -> None:
    graph = load("vgg11@0.25/32")
    made = decompose(graph, {x.operator: Ranks(max(1, x.inputs // 2), x.outputs // 2) for x in tucker_layers(graph)})
    assert off(computed(made.graph), made.graph) <= NEAR


@given(
    side=st.integers(3, 9),
    channels=st.sampled_from((2, 4, 6)),
    kernel=st.sampled_from((1, 2, 3, 5)),
    stride=st.integers(1, 3),
    padding=st.sampled_from(("SAME", "VALID", 1)),
    activation=st.sampled_from(("NONE", "RELU", "RELU6")),
    groups=st.sampled_from((1, 2)),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_convolutions_and_pools_at_all_borders(
    tmp_path: Path, side: int, channels: int, kernel: int, stride: int, padding: Any, activation: Any, groups: int
) -> None:
    kernel = min(kernel, side)
    net = Builder("borders")
    image = net.input((1, side, side + 1, channels))
    size = (kernel, max(1, kernel - 1))
    x = net.conv(image, channels, size, "c", stride=stride, padding=padding, activation=activation, groups=groups)
    y = net.depthwise_conv(image, kernel, "d", stride=stride, padding=padding, activation=activation)
    outs = [x, y]
    if padding in {"SAME", "VALID"}:
        outs += [
            net.max_pool(image, kernel, stride, "m", padding=padding),
            net.average_pool(image, kernel, stride, "a", padding=padding),
        ]
    path = tmp_path / "m.tflite"
    net.finish(*outs).write(path)
    graph = read_model(path)
    assert off(computed(graph), graph) <= NEAR


def test_elementwise_axes_and_shapes(tmp_path: Path) -> None:
    net = Builder("shapes")
    image = net.input((1, 6, 4, 8))
    x = net.conv(image, 8, 3, "linear")
    x = net.add(image, x, "sum", activation="RELU")  # one call with the convolution
    scale = net.mean(x, "mean", keep=True)
    x = net.binary("MUL", x, net.unary("LOGISTIC", scale, "sigmoid"), "scaled")
    x = net.affine(x, "affine", "RELU6")
    x = net.concat([x, net.pad(x, ((0, 0), (0, 0), (0, 0), (0, 0)), "none")], "rows", axis=1)
    x = net.concat([x, x], "channels")
    x = net.pad(x, ((0, 0), (1, 2), (0, 3), (1, 0)), "pad")
    turned = net.transpose(x, (0, 2, 1, 3), "turned")
    flat = net.reshape(turned, (1, 7 * 15, 17), "flat")
    row = net.mean(flat, "row", axes=(1,))
    logits = net.fully_connected(x, 10, "fc", activation="RELU")
    softer = net.unary("SOFTMAX", logits, "soft", schema.SoftmaxOptionsT(beta=0.5))
    path = tmp_path / "m.tflite"
    net.finish(turned, flat, row, softer, net.unary("TANH", row, "tanh"), net.unary("HARD_SWISH", x, "swish")).write(
        path
    )
    graph = read_model(path)
    for cuts in ((), tuple(range(1, len(graph.operators)))):
        assert off(computed(graph, cuts), graph) <= NEAR
    assert off(computed(graph, first=True), graph) <= NEAR


def test_what_is_not_supported_is_named() -> None:
    from evaluators.cuda.lowering import Weights, lower, refused

    graph = load("squeezenet1_1@0.5/64:int8")
    assert set(refused(graph)) == set(range(len(graph.operators)))
    with fails(UnavailableError):
        lower(Weights(graph, "cpu"), range(len(graph.operators)))
    style = load("fast_style_transfer@0.25/32")
    kinds = {style.operators[i].kind for i in refused(style)}
    assert kinds >= {"TRANSPOSE_CONV"} or kinds >= {"RESIZE_NEAREST_NEIGHBOR"}


def test_memory_of_a_job_is_given_back_when_nobody_needs_it() -> None:
    from evaluators.cuda.lowering import Weights, lower

    graph = load("googlenet@0.25/64")
    job = lower(Weights(graph, "cpu"), range(len(graph.operators)))
    alive, most = set(job.inputs), 0
    for step in job.steps:
        assert set(step.inputs) <= alive
        alive.add(step.output)
        most = max(most, len(alive))
        alive -= set(step.over)
    assert alive == {*job.inputs, *job.outputs}
    assert most <= 8


def test_what_a_captured_job_reads_is_kept_by_its_instance() -> None:
    """A graph holds addresses, not tensors, so constants that were arranged for a job must outlive the call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from evaluators.cuda.instance import Instance
    from evaluators.cuda.lowering import Weights

    class Reads(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.read: set[int] = set()
            self.made: set[int] = set()

        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            self.read |= given - self.made
            made = function(*args, **(kwargs or {}))
            self.made |= {made.untyped_storage().data_ptr()} - given if isinstance(made, torch.Tensor) else set()
            return made

    seen = Reads()

    def recorder(call: Any) -> None:  # keeps the call as little as a graph does
        with seen:
            call()

    graph = load("mobilenet_v1@0.25/64")
    third = len(graph.operators) // 3
    everything = range(len(graph.operators))
    jobs = [(everything[a:b], lambda _: "plain") for a, b in pairwise((0, third, 2 * third, len(graph.operators)))]
    instance = Instance(Weights(graph, "cpu"), jobs, lambda _: recorder, lambda _: None)
    gc.collect()
    alive = {x.untyped_storage().data_ptr() for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}
    assert len(seen.read) > 2 * 27  # filters and biases
    assert seen.read <= alive
    assert len(instance.work) == 3
