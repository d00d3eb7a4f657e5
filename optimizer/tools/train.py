"""``optimize train``: a float32 model whose weights were trained on labelled inputs, and its accuracy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from evaluators.cuda.training import Training, check_trainable, train
from evaluators.litert.candidate import LitertCandidate
from evaluators.litert.processors import local_platform
from evaluators.litert.session import LitertEvaluator
from optimizer.provenance import provenance
from optimizer.tools.rewrite import check_out
from search_spaces.core.errors import UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs, parameter_total
from search_spaces.core.wording import percent, plural
from search_spaces.models import load
from search_spaces.models.labelled import Labelled, read_labelled
from search_spaces.models.stages import with_values
from search_spaces.models.zoo.names import is_name
from search_spaces.spaces.chain import chain_plan

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model.

    Attributes:
        before, after: shares of the inputs kept apart whose class the model tells, before training and after it.
        inputs: how many were trained on, and how many kept apart.
        by: what trained it.
    """

    graph: Graph
    out: Path
    data: str
    how: Training
    before: float
    after: float
    inputs: tuple[int, int]
    by: str

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the accuracy after training (Wilson's): as many inputs are a sample."""
        from scipy.stats import binomtest

        known = binomtest(round(self.after * self.inputs[1]), self.inputs[1]).proportion_ci(method="wilson")
        return float(known.low), float(known.high)

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.graph.name,
            "file": str(self.out),
            "macs": sum(c.macs for c in operator_costs(self.graph)),
            "parameters": parameter_total(self.graph),
            "data": {"name": self.data, "trained_on": self.inputs[0], "kept_apart": self.inputs[1]},
            "epochs": self.how.epochs,
            "rate": self.how.rate,
            "seed": self.how.seed,
            "drawn_anew": self.how.anew,
            "trained_by": self.by,
            "accuracy": {"before": self.before, "after": self.after, "ci95": self.interval()},
            "provenance": provenance(),
        }

    def render(self) -> str:
        """Return the text for a terminal."""
        low, high = (percent(end, 1) for end in self.interval())
        return (
            f"{self.graph.name}: {plural(self.how.epochs, 'epoch')} of {self.inputs[0]} inputs of {self.data}, "
            f"by {self.by}\n"
            f"accuracy on the other {self.inputs[1]}, by LiteRT: {percent(self.before, 1)} before, "
            f"{percent(self.after, 1)} after [{low}, {high}]\n"
            f"the model is in {self.out}"
        )


def train_model(
    model: str, data: str, out: Path, epochs: int, rate: float, share: float, seed: int, told: Callable[[str], None]
) -> Trained:
    """Train a model and write it; the weights of a built-in one are drawn again by the seed.

    Args:
        share: of the inputs to train on; those of each class are drawn by the seed.
        told: called with the progress, in a sentence.

    Raises:
        UsageError: the data do not fit, or the file cannot be written.
        UnavailableError: PyTorch is not installed, or the model cannot be trained.
        ModelError: there is no such model.
    """
    graph = load(model)
    check_out(out, graph)
    check_trainable(graph)
    known = read_labelled(data).shaped(graph.tensors[graph.inputs[0]].shape)
    first, other = known.parted(share, seed)
    classes = graph.tensors[graph.outputs[0]].shape[-1]
    if not len(other.labels):
        raise UsageError(f"--share {share:g}: leaves no input to measure the accuracy by", "give a smaller share")
    if int(known.labels.max()) >= classes:
        raise UsageError(f"--data {data}: has {known.labels.max() + 1} classes, and {model} tells {classes}")
    before = accuracy(graph, other)
    how = Training(epochs, rate, seed, is_name(model))
    values, by = train(graph, first, how, told)
    with_values(graph, values).write(out)
    after = accuracy(load(str(out)), other)
    return Trained(graph, out, data, how, before, after, (len(first.labels), len(other.labels)), by)


def accuracy(graph: Graph, data: Labelled) -> float:
    """Return the share of inputs whose class a model tells, run by LiteRT on one processor of this machine.

    Raises:
        UnavailableError: the runtime does not run the model here.
    """
    platform, told = local_platform(), 0
    whole = chain_plan(graph, (), [platform.processors[0].name])
    with (
        LitertEvaluator().prepare(platform) as session,
        closing(cast("LitertCandidate", session.load(graph, whole))) as candidate,
    ):
        for each, label in zip(data.inputs, data.labels, strict=True):
            candidate.set_inputs([each[None]])
            candidate.run(1)
            told += int(candidate.outputs()[0].argmax()) == label
    return told / len(data.labels)
