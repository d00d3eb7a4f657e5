"""``optimize train``: a float32 model whose weights were trained on labelled inputs, and its accuracy.

Inputs are parted by the data, the share and the seed alone: a model that is trained on with the same ones is measured
by inputs that it has not seen.
"""

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
from search_spaces.core.errors import ModelError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs, parameter_total
from search_spaces.core.wording import percent, plural
from search_spaces.models import load
from search_spaces.models.labelled import Labelled, read_labelled
from search_spaces.models.stages import with_values
from search_spaces.spaces.chain import chain_plan

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Trained:
    """A model that was trained, or only measured.

    Attributes:
        out: the file that was written; None if nothing was trained.
        before, after: shares of the inputs kept apart whose class the model tells, before training (None if its weights
            were drawn again) and after it.
        inputs: how many were trained on, and how many kept apart.
        shaped: how inputs were put into the shape that the model reads, or "".
        by: what trained it.
    """

    graph: Graph
    out: Path | None
    data: str
    how: Training
    share: float
    before: float | None
    after: float
    inputs: tuple[int, int]
    shaped: str
    by: str

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the accuracy after training (Wilson's): as many inputs are a sample."""
        from scipy.stats import binomtest

        known = binomtest(round(self.after * self.inputs[1]), self.inputs[1]).proportion_ci(method="wilson")
        return float(known.low), float(known.high)

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        data = {"name": self.data, "share": self.share, "trained_on": self.inputs[0], "kept_apart": self.inputs[1]}
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.graph.name,
            "file": None if self.out is None else str(self.out),
            "macs": sum(c.macs for c in operator_costs(self.graph)),
            "parameters": parameter_total(self.graph),
            "data": data | {"shaped": self.shaped},
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
        measured = f"accuracy on {self.inputs[1]} inputs kept apart, by LiteRT: "
        measured += f"{percent(self.before, 1)} before, " if self.before is not None and self.out else ""
        measured += f"{percent(self.after, 1)}{' after' if self.out else ''} [{low}, {high}]"
        shaped = f"\n{self.shaped}" if self.shaped else ""
        if self.out is None:
            return f"{self.graph.name}: {measured}{shaped}"
        return (
            f"{self.graph.name}: {plural(self.how.epochs, 'epoch')} of {self.inputs[0]} inputs of {self.data}, "
            f"by {self.by}{shaped}\n{measured}\n"
            f"the model is in {self.out}; to measure it by inputs that it has not seen, train it on with "
            f"--share {self.share:g} --seed {self.how.seed}"
        )


def train_model(
    model: str,
    data: str,
    out: Path | None,
    how: Training,
    share: float,
    told: Callable[[str], None] = lambda _: None,
) -> Trained:
    """Train a model and write it, or only measure its accuracy if it is to be trained for no epochs.

    Args:
        out: the file to write; None for no epochs.
        share: of the inputs to train on; those of each class are drawn by the seed.
        told: called with the progress, in a sentence.

    Raises:
        UsageError: the data do not fit, or the file cannot be written.
        UnavailableError: PyTorch is not installed, or training failed.
        ModelError: there is no such model, or it cannot be trained.
    """
    graph = load(model)
    if out is not None:
        check_out(out, graph)
        if out.exists() and Path(data).exists() and out.samefile(data):
            raise UsageError(f"{out}: is the data", "write to another file")
        check_trainable(graph)
    reads, writes = ([graph.tensors[t] for t in side] for side in (graph.inputs, graph.outputs))
    if [(t.dtype, t.shape[:1]) for t in reads] != [("float32", (1,))] or len(writes) != 1 or not writes[0].shape:
        raise ModelError(
            f"{graph.name!r} does not have one float32 input, for one inference, and one output", "give another model"
        )
    known = read_labelled(data)
    shaped = known.shaped(graph.tensors[graph.inputs[0]].shape)
    first, other = shaped.parted(share, how.seed)
    classes = graph.tensors[graph.outputs[0]].shape[-1]
    if not len(other.labels):
        raise UsageError(
            f"--share {share:g}: leaves no input to measure the accuracy by", "give more inputs, or a smaller share"
        )
    if int(known.labels.max()) >= classes:
        raise UsageError(f"--data {data}: has {known.labels.max() + 1} classes, and {model} tells {classes}")
    sizes = ["×".join(map(str, each.inputs.shape[1:])) for each in (known, shaped)]
    put = f"each input of {sizes[0]} lies in the middle of zeros, {sizes[1]}" if sizes[0] != sizes[1] else ""
    before = None if how.anew else accuracy(graph, other)
    by, after = "", before
    if out is not None:
        values, by = train(graph, first, how, told)
        with_values(graph, values).write(out)
        after = accuracy(load(str(out)), other)
    counts = len(first.labels), len(other.labels)
    return Trained(graph, out, data, how, share, before, after or 0.0, counts, put, by)


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
