"""Training of a float32 network by PyTorch: a process of its own, on the GPU if there is one.

The weights of convolutions and matrix products are trained, with Adam, on the cross-entropy of the output; a softmax at
the end is left out. The learning rate falls to zero as a cosine.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import ceil, inf, isfinite, prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.cuda.devices import torch_module
from evaluators.cuda.lowering import Weights, lower, refused
from evaluators.own_process import own_process
from search_spaces.core.errors import ModelError, UnavailableError, needs_extra
from search_spaces.core.graph import Graph
from search_spaces.models.labelled import Labelled
from search_spaces.models.litert import read_model

_BATCH = 32
_SILENT_S = 1800.0  # longest time without a line from the process, which writes one after each batch
_TRAINED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
_REQUEST, _DATA, _WEIGHTS, _BY = "request.json", "data.npz", "weights.npz", "by"


@dataclass(frozen=True, slots=True)
class Training:
    """How a network is trained.

    Attributes:
        epochs: how often every input is used.
        rate: learning rate at the beginning.
        seed: of the order of the inputs.
        anew: whether the weights are drawn again by the seed, each tensor's from its own values.
    """

    epochs: int
    rate: float
    seed: int
    anew: bool


def check_trainable(graph: Graph) -> Path:
    """Check that a network can be trained, and return its file.

    It has one float32 input for one inference, one output, and operators that are supported.

    Raises:
        ModelError: it cannot.
    """
    why = next((f"operator {i} ({graph.operators[i].kind}): {text}" for i, text in refused(graph).items()), "")
    reads, writes = ([graph.tensors[t].shape for t in side] for side in (graph.inputs, graph.outputs))
    if len(reads) != 1 or len(writes) != 1 or reads[0][:1] != (1,):
        why = "it does not have one input, for one inference, and one output"
    elif not why and graph.outputs[0] not in graph.producer:
        why = "its output is its input"
    elif not why and (not writes[0] or prod(writes[0]) != writes[0][-1]):
        why = "its output is not a number for each class"
    elif not why and not _trained(graph):
        why = "it has no convolution and no matrix product"
    if why:
        raise ModelError(f"{graph.name!r} cannot be trained: {why}", "give another float32 model")
    if graph.source is None or graph.source.fixed:
        hint = "write it first, by optimize inspect MODEL --out FILE"
        raise ModelError(f"{graph.name!r} cannot be trained: its structure is not that of its file", hint)
    return graph.source.path.absolute()


def train(
    graph: Graph, data: Labelled, how: Training, told: Callable[[str], None] = lambda _: None
) -> tuple[dict[int, NDArray[np.float32]], str]:
    """Return tensor → its values after training, and what trained it, for example ``PyTorch 2.14 on the CPU``.

    Args:
        data: in the shape that the network reads.
        told: called with the progress, in a sentence.

    Raises:
        UnavailableError: PyTorch is not installed, or training failed.
        ModelError: the network cannot be trained, or has no file.
    """
    path = check_trainable(graph)
    with needs_extra("training", "train"):
        if find_spec("torch") is None:
            raise ImportError
    with TemporaryDirectory(prefix="training-") as name:
        folder = Path(name)
        request = {"path": str(path), "name": graph.name, **asdict(how)}
        (folder / _REQUEST).write_text(json.dumps(request))
        np.savez(folder / _DATA, inputs=data.inputs, labels=data.labels)
        with (folder / "log").open("w+b") as log:
            command = own_process(__name__, name)
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, bufsize=0) as process:
                try:
                    _listen(process, told)
                    code = process.wait(_SILENT_S)
                except subprocess.TimeoutExpired as error:
                    process.kill()
                    raise UnavailableError(f"training did not end within {_SILENT_S:.0f} s of its last word") from error
                except BaseException:
                    process.kill()
                    raise
            if code:
                log.seek(0)
                said = log.read().decode(errors="replace").strip().splitlines()
                raise UnavailableError(f"{graph.name!r}: training failed: {(said or [f'exit code {code}'])[-1]}")
        with np.load(folder / _WEIGHTS, allow_pickle=False) as found:
            return {int(t): found[t] for t in found if t != _BY}, str(found[_BY])


def _listen(process: subprocess.Popen[bytes], told: Callable[[str], None]) -> None:
    """Tell the lines of a process until it closes its output.

    Raises:
        UnavailableError: it has been silent for too long.
    """
    output = process.stdout
    while output is not None:
        ready, _, _ = select.select([output], [], [], _SILENT_S)
        if not ready:
            raise UnavailableError(f"training said nothing for {_SILENT_S:.0f} s")
        if not (line := output.readline()):
            return
        if text := line.decode().strip():  # an empty line is a sign of life
            told(text)


def _trained(graph: Graph) -> list[int]:
    """Return the tensors that training changes."""
    found = (o.inputs[1:] for o in graph.operators if o.kind in _TRAINED)
    return list(dict.fromkeys(t for inputs in found for t in inputs if t != -1))


class _Parameters(Weights):
    """Weights that gradients are computed for; nothing that is made of them outlives a step."""

    def arranged(self, tensor: int, order: tuple[int, ...]) -> Any:
        return self[tensor].permute(order)


def _outputs(graph: Graph, weights: Weights) -> Callable[[Any], Any]:
    """Return the function from inputs ``(n, …)`` as values (NCHW) to the last operator's outputs, without a softmax."""
    torch, last = torch_module(), graph.operators[graph.producer[graph.outputs[0]]]
    ends = last.kind == "SOFTMAX" and not graph.consumers.get(graph.outputs[0])
    output = last.inputs[0] if ends else graph.outputs[0]
    job = lower(weights, [i for i, o in enumerate(graph.operators) if not (ends and o is last)])

    def one(value: Any) -> Any:
        values = {graph.inputs[0]: value[None]}
        job.run(values)
        return values[output].flatten()

    computed: Callable[[Any], Any] = torch.vmap(one)
    return computed


def main() -> int:
    """Train; the first argument is the folder of the request."""
    try:
        torch = torch_module()
    except UnavailableError as error:  # it is there, and cannot be loaded
        raise SystemExit(error.what) from None
    folder = Path(sys.argv[1])
    request: Mapping[str, Any] = json.loads((folder / _REQUEST).read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    graph = read_model(Path(request["path"]), request["name"])
    weights, rng = _Parameters(graph, device), np.random.default_rng([request["seed"], 5])
    tensors = _trained(graph)
    for tensor in tensors if request["anew"] else ():
        drawn = rng.permutation(weights[tensor].cpu().numpy().ravel())
        weights[tensor].copy_(torch.from_numpy(drawn).reshape(weights[tensor].shape))
    parameters = [weights[tensor].requires_grad_() for tensor in tensors]
    with np.load(folder / _DATA, allow_pickle=False) as data:
        inputs, labels = (torch.from_numpy(data[name]).to(device) for name in ("inputs", "labels"))
    inputs = inputs.permute(0, 3, 1, 2) if inputs.dim() == 4 else inputs
    steps = request["epochs"] * ceil(len(labels) / _BATCH)
    optimiser = torch.optim.Adam(parameters, request["rate"])
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    order, first = torch.Generator().manual_seed(request["seed"]), inf
    for epoch in range(request["epochs"]):
        total = 0.0
        for batch in torch.randperm(len(labels), generator=order).to(device).split(_BATCH):
            optimiser.zero_grad()
            loss = torch.nn.functional.cross_entropy(_outputs(graph, weights)(inputs[batch]), labels[batch])
            loss.backward()
            optimiser.step()
            falling.step()
            total += loss.item() * len(batch)
            sys.stdout.write("\n")
            sys.stdout.flush()
        if not isfinite(total):
            raise SystemExit("the loss is not finite: take a smaller learning rate")
        first = total if epoch == 0 else first
        risen = "; it has risen: take a smaller learning rate" if total > first else ""
        sys.stdout.write(f"epoch {epoch + 1} of {request['epochs']}: loss {total / len(labels):.4g}{risen}\n")
        sys.stdout.flush()
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    values: dict[str, Any] = {str(t): p.detach().cpu().numpy() for t, p in zip(tensors, parameters, strict=True)}
    values[_BY] = np.array(f"PyTorch {torch.__version__} on {name}")
    np.savez(folder / _WEIGHTS, **values)
    return 0
