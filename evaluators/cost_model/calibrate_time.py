"""Times networks on the processors of a session: whole, operator by operator, cut, and between pairs of processors.

The runtime's kernels are matched with a model's operators. XNNPACK runs operators in the model's order, but not as one
kernel each: a fused activation of a sum is a kernel of its own, paddings go into convolutions, reshapes vanish. So the
kernels of one class are matched, in order, with the operators that such kernels run; a class whose counts differ is
left out. Where the interpreter runs some operators itself, the order is another one (:func:`run_order`).

A machine's clock may drift by more than half within two hours without being reported. So every measurement is taken in
rounds between runs of one reference network, and scaled by its time: drift affects both alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Batch, Candidate, Evaluator, Session, unsupported_operators
from evaluators.cost_model.calibrate_nets import network
from evaluators.cost_model.features import Array, OperatorFeatures, fused, operator_features
from evaluators.cost_model.fit import TimedModel
from evaluators.cost_model.profile import COLD_BYTES, ContentionProfile, LinkProfile
from evaluators.cost_model.transfers import one_core
from evaluators.litert.settings import packs_weights
from evaluators.litert.worker.runtimes import OPENVINO, runtime_of
from search_spaces.core.errors import ProfileError, UnavailableError, damage
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform, Processor
from search_spaces.models import load, zoo
from search_spaces.models.litert import read_model
from search_spaces.models.zoo.builder import Builder, Draft, Value
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.cuts import every_layer

# Beginning of a kernel's name → the schema's kinds that it runs. The interpreter's own kernels are named by the kind.
_KINDS_OF: Mapping[str, tuple[str, ...]] = {
    "Convolution": ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"),
    "Fully Connected": ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"),
    "Deconvolution": ("TRANSPOSE_CONV",),
    "Batch Matrix Multiply": ("BATCH_MATMUL",),
    "Max Pooling": ("MAX_POOL_2D",),
    "Average Pooling": ("AVERAGE_POOL_2D",),
    "Global Average Pooling": ("AVERAGE_POOL_2D",),
    "Mean": ("MEAN",),
    "Add": ("ADD",),
    "Multiply": ("MUL",),
    "Subtract": ("SUB",),
    "Squared Difference": ("SQUARED_DIFFERENCE",),
    "HardSwish": ("HARD_SWISH",),
    "Sigmoid": ("LOGISTIC",),
    "TanH": ("TANH",),
    "GELU": ("GELU",),
    "LeakyReLU": ("LEAKY_RELU",),
    "Reciprocal Square Root": ("RSQRT",),
    "Copy": ("CONCATENATION",),
    "Constant Pad": ("PAD",),
    "Softmax": ("SOFTMAX",),
    "Transpose": ("TRANSPOSE",),
    "Slice": ("SLICE",),
    "Space To Depth": ("SPACE_TO_DEPTH",),
    "Static Resize Bilinear": ("RESIZE_BILINEAR",),
}
# Types of OpenVINO's kernels, and the schema's kinds that they run.
_OPENVINO_KINDS: Sequence[tuple[frozenset[str], frozenset[str]]] = tuple(
    (frozenset(kernels.split()), frozenset(kinds.split()))
    for kernels, kinds in (
        ("Convolution GroupConvolution", "CONV_2D DEPTHWISE_CONV_2D"),
        ("FullyConnected", "FULLY_CONNECTED"),
        ("Deconvolution", "TRANSPOSE_CONV"),
        ("MatMul", "BATCH_MATMUL"),
        ("MaxPool", "MAX_POOL_2D"),
        ("AvgPool", "AVERAGE_POOL_2D"),
        ("ReduceMean", "MEAN"),
        ("Concat", "CONCATENATION"),
        ("Pad", "PAD"),
        ("Softmax", "SOFTMAX"),
        ("Transpose", "TRANSPOSE"),
        ("Interpolate", "RESIZE_BILINEAR"),
    )
)
# Types of its elementwise kernels; a Subgraph is generated for any number of operators.
_OPENVINO_ELEMENTWISE = frozenset(
    {
        *("Subgraph", "Eltwise", "Add", "Subtract", "Multiply", "Divide", "Convert"),
        *("Relu", "Clamp", "HSwish", "HSigmoid", "Sigmoid", "Gelu", "Tanh"),
    }
)
_RAN_S = 0.9e-6  # kernels that took less did not run: they are fused with others
_KIND = re.compile(r"[A-Z][A-Z0-9_]+")
_CLAMPED = frozenset({"ADD", "MUL", "SUB", "DIV", "MAXIMUM", "MINIMUM"})
_CLAMPS = frozenset({"RELU", "RELU6", "RELU_0_TO_1", "RELU_N1_TO_1"})


def operator_seconds(
    features: Sequence[OperatorFeatures], names: Sequence[str], kernel_s: Sequence[float], graph: Graph | None = None
) -> NDArray[np.float64]:
    """Return the time of each operator (s), shape ``(n,)``; NaN where its kernels are unknown, 0 where none ran.

    Args:
        names, kernel_s: of the kernels, in execution order.
        graph: the features' graph; without it, no times are known of a model that the interpreter runs in part.
    """
    found = np.array([0.0 if f.free else np.nan for f in features])
    own = {name for name in names if _KIND.fullmatch(name)}
    if own and graph is None:
        return found
    order = run_order(graph, own) if graph is not None else range(len(features))
    by_class: dict[tuple[str, ...], list[float]] = {}
    clamps: list[float] = []
    for name, seconds in zip(names, kernel_s, strict=True):
        if name.startswith("Clamp"):
            clamps.append(seconds)
            continue
        kinds = next((runs for start, runs in _KINDS_OF.items() if name.startswith(start)), (name,))
        by_class.setdefault(kinds, []).append(seconds)
    for kinds, seconds_of in by_class.items():
        where = [i for i in order if features[i].kind in kinds and not features[i].free]
        if len(where) == len(seconds_of):
            found[where] = seconds_of
    clamped = [
        i for i in order if features[i].kind in _CLAMPS or (features[i].kind in _CLAMPED and features[i].activation)
    ]
    alone = [i for i in clamped if features[i].kind in _CLAMPS]
    found[alone] = 0.0
    if len(clamped) == len(clamps):
        found[clamped] += clamps
    else:
        found[clamped] = np.nan
    return found


def openvino_seconds(
    features: Sequence[OperatorFeatures], names: Sequence[str], kernel_s: Sequence[float]
) -> NDArray[np.float64]:
    """Return the same from OpenVINO's kernels, whose convolutions are in the operators' order.

    Args:
        features: with those that OpenVINO fuses as ``free`` (:func:`~evaluators.cost_model.features.fused`).
    """
    found = np.array([0.0 if f.free else np.nan for f in features])
    kernels = list(zip(names, kernel_s, strict=True))
    classes = [
        ([s for name, s in kernels if name in types], [i for i, f in enumerate(features) if f.kind in kinds])
        for types, kinds in _OPENVINO_KINDS
    ]
    ran = [s for name, s in kernels if name in _OPENVINO_ELEMENTWISE and s > _RAN_S]
    for seconds, where in (*classes, (ran, [i for i, f in enumerate(features) if f.kernel == "elementwise"])):
        own = [i for i in where if not features[i].free]
        if len(own) == len(seconds):
            found[own] = seconds
    return found


def run_order(graph: Graph, own: Collection[str]) -> list[int]:
    """Return the execution order of operators where the interpreter runs some kinds itself.

    It delegates the others in as few partitions as possible: alternately, all operators that are ready on one side, and
    all on the other, each in the model's order (TensorFlow Lite's ``PartitionGraphIntoIndependentNodeSubsets``).

    Args:
        own: kinds that the interpreter runs itself.
    """
    order: list[int] = []
    ready = set(range(len(graph.tensors))) - {t for o in graph.operators for t in o.outputs}
    waiting = list(range(len(graph.operators)))
    while waiting:
        side: bool | None = None
        left = []
        for index in waiting:
            operator = graph.operators[index]
            mine = operator.kind in own
            if all(t in ready or t == -1 for t in operator.inputs) and side in {None, mine}:
                side = mine
                order.append(index)
                ready.update(operator.outputs)
            else:
                left.append(index)
        waiting = left
    return order


ROUNDS = 4
LEAST_RUNS, MOST_RUNS = 3, 60
_LEAST_S, _MOST_S = 1e-9, 1e6
REFERENCE_S = 0.006  # spent on the reference before and after each part of a round


def check_seconds(values: Sequence[float], what: str) -> None:
    """Check that times are from a nanosecond to some days.

    Raises:
        ProfileError: one is not; the text names it.
    """
    for index, value in enumerate(values):
        if not _LEAST_S <= value <= _MOST_S:
            raise ProfileError(
                f"{what}: time {index} of {len(values)} is {value} s, which is not a time", "measure it again"
            )


def reference_network() -> Draft:
    """Return the reference network: two ordinary convolutions, about 2 ms on a fast core."""
    net = Builder("reference")
    x = net.input((1, 28, 28, 128))
    for layer in range(2):
        x = net.conv(x, 128, 3, f"conv{layer}", activation="RELU")
    return net.finish(x)


def transferring(side: int, channels: int) -> Draft:
    """Return a chain of three operators that take hardly longer than to pass their map on."""
    net = Builder(f"link{side}x{channels}")
    x = net.input((1, side, side, channels))
    for layer in range(3):
        x = net.depthwise_conv(x, 3, f"depth{layer}", activation="RELU")
    return net.finish(x)


def whole_plan(graph: Graph, processor: str) -> Plan:
    """Return the plan of one stage."""
    return chain_plan(graph, (), [processor])


def time_model(
    session: Session, graph: Graph, processor: str, reference: Candidate, *, seconds: float = 0.25
) -> tuple[Array, float, float]:
    """Time a model on a processor, whole and operator by operator, for about ``seconds`` each.

    Args:
        reference: the reference network, loaded on the same processor.

    Returns:
        The time of each operator as a stage of its own (s), which includes a stage call, shape ``(n,)``; the time of
        the model as one stage; and that of the reference network meanwhile.

    Raises:
        UnavailableError: the device failed, or does not support the model.
        ProfileError: the device returned a time that is not positive and finite.
    """
    with (
        closing(session.load(graph, whole_plan(graph, processor))) as whole,
        closing(session.load(graph, _in_stages(graph, [processor] * len(graph.operators)))) as apart,
    ):
        once_s = warm(whole)
        warm(apart)
        runs = int(np.clip(seconds / ROUNDS / once_s, LEAST_RUNS, MOST_RUNS))
        (whole_s, stage_s), usual_s = in_rounds(
            reference,
            lambda: np.median(whole.run(runs).latency_s, axis=0),
            lambda: np.median(apart.run(runs).stage_s, axis=0),
        )
    check_seconds((float(whole_s), *stage_s), graph.name)
    return stage_s, float(whole_s), usual_s


def in_rounds(reference: Candidate, *measures: Callable[[], Array]) -> tuple[list[Array], float]:
    """Return the medians of some measurements over rounds (s), and the usual time of the reference network meanwhile.

    Each measurement lies between two runs of the reference and is scaled by their mean.
    """
    beats = max(2, int(REFERENCE_S / warm(reference)))
    taken, clocks = [], []
    for _ in range(ROUNDS):
        clock, row = [float(np.median(reference.run(beats).latency_s))], []
        for measure in measures:
            row.append(measure())
            clock.append(float(np.median(reference.run(beats).latency_s)))
            row[-1] = row[-1] / (clock[-2] + clock[-1]) * 2.0
        taken.append(row)
        clocks.append(clock)
    usual_s = float(np.median(clocks))
    return [np.median(each, axis=0) * usual_s for each in zip(*taken, strict=True)], usual_s


def warm(candidate: Candidate) -> float:
    """Warm up with a few runs and return about how long a run takes (s)."""
    candidate.run(1)
    latency_s = candidate.run(2).latency_s
    if not np.all(np.isfinite(latency_s)):
        raise UnavailableError("the device returned times that are not numbers")
    return max(1e-7, float(latency_s.min()))


@dataclass(frozen=True, slots=True)
class Timed:
    """One model on one kind of processor.

    Attributes:
        name: of the model.
        like: the kind of processor.
        features: of its operators.
        operator_s: time of each, shape ``(n,)``; NaN where it is not known.
        whole_s: time of the model as one stage.
        reference_s: time of the reference network meanwhile.
        seed: of a generated network; None for a model that is kept out of the fit.
        fuses: whether the runtime fuses elementwise operators, which are then ``free``.
        stage_s: time of each operator as a stage of its own, shape ``(n,)``; None where that was not timed.
    """

    name: str
    like: str
    features: tuple[OperatorFeatures, ...]
    operator_s: Array
    whole_s: float
    reference_s: float
    seed: int | None = None
    fuses: bool = False
    stage_s: Array | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values; the features follow from the name, or from the seed."""
        return {
            "name": self.name,
            "like": self.like,
            "operator_s": [None if np.isnan(s) else float(f"{s:.5g}") for s in self.operator_s],
            "whole_s": self.whole_s,
            "reference_s": self.reference_s,
            "seed": self.seed,
            "fuses": self.fuses,
            "stage_s": None if self.stage_s is None else [float(f"{s:.5g}") for s in self.stage_s],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timed:
        """Build it from what :meth:`to_json` returned.

        Raises:
            ProfileError: a field is missing, or a time is not positive and finite.
        """
        try:
            name, seed = str(data["name"]), data["seed"]
            made = zoo.draft(name) if seed is None else network(name, int(seed))
            fuses, features = data["fuses"] is True, operator_features(made.graph())
            operator_s = np.array([np.nan if s is None else float(s) for s in data["operator_s"]])
            whole_s, reference_s = float(data["whole_s"]), float(data["reference_s"])
            features = fused(features) if fuses else features
            stage_s = None if data["stage_s"] is None else np.array([float(s) for s in data["stage_s"]])
            found = cls(name, str(data["like"]), features, operator_s, whole_s, reference_s, seed, fuses, stage_s)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProfileError(damage(error)) from error
        apart = operator_s if stage_s is None else stage_s
        if not len(features) == len(operator_s) == len(apart):
            raise ProfileError(
                f"{name}: {len(operator_s)} and {len(apart)} times for {len(features)} operators",
                "another version wrote the log",
            )
        check_seconds((found.whole_s, found.reference_s, *operator_s[~np.isnan(operator_s)]), name)
        check_seconds(() if stage_s is None else tuple(stage_s), name)
        return found

    def model(self, usual_s: float) -> TimedModel:
        """Return the timing scaled to a reference time of ``usual_s``."""
        factor = usual_s / self.reference_s
        family = "kept out" if self.seed is None else "generated"
        return TimedModel(self.name, family, self.features, self.whole_s * factor, self.operator_s * factor)


Loaded = Callable[[Draft], Graph]
"""Makes a graph that the session can load from a draft."""

MAPS = ((14, 32), (14, 64), (14, 256), (28, 128), (56, 64), (224, 16))
"""Side and channels of the transferred maps: 25 KB to 3.2 MB. Stages take some microseconds, so that the processors are
busy nearly all the time, as those that share operators are: one that waits a millisecond is slow afterwards, by 2 % of
the wait where this was measured, whatever it reads."""
_RUNS, _ROUNDS = 30, 5
_LINK_ROUNDS = 6
_LAYERS = 6  # of each chain that contends


def pairs(platform: Platform) -> list[tuple[Processor, Processor]]:
    """Return an ordered pair of processors for each two kinds, and one for each kind that has two processors.

    Kinds that share cores get two: processors that are driven from the same core, and processors that are not.
    """
    groups = list(platform.classes().values())
    found = []
    for i, group in enumerate(groups):
        if len(group) > 1:
            found.append((group[0], group[1]))
        for other in groups[i + 1 :]:
            for near in (True, False):
                both = [(a, b) for a in group for b in other if one_core(a, b) is near]
                for a, b in both[:1]:
                    found += [(a, b), (b, a)]
    return found


def time_link(session: Session, loaded: Loaded, source: Processor, target: Processor) -> LinkProfile:
    """Time transfers of maps of several sizes from one processor to another.

    Three stages run on the source, the target, and the source again, and then all on either one. The cost of a transfer
    is the extra time of the first two stages, and the gap between them.

    Raises:
        UnavailableError: the device failed.
    """
    terms, extra_s, gaps_s = [], [], []
    for side, channels in MAPS:
        graph = loaded(transferring(side, channels))
        processors = (source, target, source), (source,) * 3, (target,) * 3
        with ExitStack() as stack:
            across, here, there = (
                stack.enter_context(
                    closing(session.load(graph, _in_stages(graph, [processor.name for processor in way])))
                )
                for way in processors
            )
            gap, extra = [], []
            for number in range(_LINK_ROUNDS + 1):
                batches = [candidate.run(_RUNS) for candidate in (across, here, there)]
                if not number:
                    continue  # warm-up
                took, first, second = (np.median(batch.stage_s, axis=0) for batch in batches)
                gap.append(_first_gap_s(batches[0]))
                extra.append(float(took[0] - first[0] + took[1] - second[1]))
        nbytes = graph.tensors[graph.operators[1].inputs[0]].nbytes
        terms.append([1.0, min(1.0, nbytes / COLD_BYTES), nbytes])
        gaps_s.append(float(np.median(gap)))
        extra_s.append(float(np.median(extra)))
    from scipy.optimize import nnls

    size = np.max(terms, axis=0)
    always_s, cold_s, per_byte_s = nnls(np.array(terms) / size, np.array(extra_s))[0] / size
    return LinkProfile(
        source.like,
        target.like,
        max(0.0, float(np.median(gaps_s[1:]))) + float(always_s),
        float(per_byte_s),
        cold_s=float(cold_s),
        one_core=_near(source, target),
    )


def is_of(link: LinkProfile, source: Processor, target: Processor) -> bool:
    """Return whether :func:`time_link` of two processors measures this link."""
    return (link.source, link.target, link.one_core) == (source.like, target.like, _near(source, target))


def time_contention(session: Session, loaded: Loaded, victim: Processor, other: Processor) -> ContentionProfile:
    """Time a compute-bound and a memory-bound stage, alone and beside another processor with the same work.

    Raises:
        UnavailableError: the device failed.
    """
    factors = []
    for network_of_two in (_computing(), _moving()):
        graph = loaded(network_of_two)
        count = len(graph.operators) // 2
        first, second = tuple(range(0, 2 * count, 2)), tuple(range(1, 2 * count, 2))
        alone = Plan(graph.digest, (Stage(first, victim.name), Stage(second, victim.name)))
        beside = Plan(graph.digest, (Stage(first, victim.name), Stage(second, other.name)))
        with closing(session.load(graph, alone)) as quiet, closing(session.load(graph, beside)) as crowded:
            quiet.run(2)
            crowded.run(2)
            ratios = []
            for _ in range(_ROUNDS):
                own = float(np.median(quiet.run(_RUNS).stage_s[:, 0]))
                batch = crowded.run(_RUNS)
                # The other stage is as long, so that the two overlap nearly all the time.
                ratios.append(float(np.median(batch.stage_s[:, 0])) / own)
        factors.append(max(1.0, float(np.median(ratios))))
    return ContentionProfile(victim.like, other.like, factors[0], factors[1])


def _near(source: Processor, target: Processor) -> bool | None:
    """Return whether two processors that share cores are driven from the same one; None where they share none."""
    return one_core(source, target) if source.excludes(target) else None


def _first_gap_s(batch: Batch) -> float:
    """Return the time between the first two stages (s); without a timeline, the mean gap between stages."""
    if batch.timeline is None:
        gaps = batch.stage_s.shape[1] - 1
        return float(np.median(batch.latency_s - batch.stage_s.sum(axis=1)) / gaps)
    events = {event.stage: event for event in batch.timeline.events}
    return float(events[1].start_s - events[0].end_s)


def _in_stages(graph: Graph, processors: Sequence[str]) -> Plan:
    return chain_plan(graph, every_layer(graph), processors)


def _computing() -> Draft:
    """Return two equal independent chains, their operators alternating, whose work stays in the caches."""
    net = Builder("computing")
    chains = [net.input((1, 14, 14, 128), f"input{i}") for i in range(2)]
    for layer in range(_LAYERS):
        chains = [net.conv(x, 128, 3, f"conv{i}_{layer}", activation="RELU") for i, x in enumerate(chains)]
    return net.finish(*chains)


def _moving() -> Draft:
    """Return two equal independent chains of maps that are larger than a core's caches."""
    net = Builder("moving")
    chains: list[Value] = [net.input((1, 256, 256, 16), f"input{i}") for i in range(2)]
    kept = list(chains)
    for layer in range(_LAYERS):
        chains = [net.add(x, y, f"add{i}_{layer}") for i, (x, y) in enumerate(zip(chains, kept, strict=True))]
    return net.finish(*chains)


SECONDS = 0.15  # spent on each measurement of a model


class Bench:
    """Times models; use it in a ``with`` statement.

    Attributes:
        session, platform: the device that it times on.
    """

    def __init__(self, evaluator: Evaluator, session: Session, platform: Platform) -> None:
        self.session = session
        self.platform = platform
        self._files = evaluator.name != "synthetic"  # an evaluator that reads no files loads structures alone
        self._runtime = evaluator.name
        self._stack = ExitStack()
        self._references: dict[str, Candidate] = {}

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(TemporaryDirectory()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def loaded(self, draft: Draft) -> Graph:
        """Return a draft's graph, with a file where the session needs one."""
        if not self._files:
            return draft.graph()
        path = self._folder / f"{draft.name}-{draft.graph().digest[:16]}.tflite"  # two drafts may have one name
        if not path.exists():
            draft.write(path)
        return read_model(path, draft.name)

    def time(self, processor: Processor, draft: Draft, *, apart: bool = False) -> Timed:
        """Time a network on a processor.

        Args:
            apart: whether each operator is also timed as a stage of its own, beside its time within the network.

        Raises:
            UnavailableError: the device failed, or does not support the network.
        """
        graph = self.loaded(draft)
        try:
            return self.time_graph(processor, graph, apart=apart)
        finally:
            if graph.source is not None:
                graph.source.path.unlink(missing_ok=True)

    def time_zoo(self, processor: Processor, name: str) -> Timed:
        """Time a model of the zoo on a processor; errors as in :meth:`time`.

        Raises:
            ModelError: there is no such model.
        """
        return self.time_graph(processor, load(name) if self._files else zoo.draft(name).graph())

    def time_graph(self, processor: Processor, graph: Graph, *, apart: bool = False) -> Timed:
        """Time a graph that the session can load; option and errors as in :meth:`time`."""
        features = operator_features(graph)
        if unsupported_operators(self.session, graph, processor.name):
            raise UnavailableError(f"{processor.name} does not support all operators of {graph.name}")
        reference = self._reference(processor)
        # The runtime reports kernel times where XNNPACK or OpenVINO runs them on the CPU.
        profiled = packs_weights(processor) or (processor.kind == "cpu" and runtime_of(processor) == OPENVINO)
        if self._runtime == "litert" and profiled and graph.source is not None:
            fuses = not packs_weights(processor)
            features = fused(features) if fuses else features
            kernel_s, clock_s = self._kernels(processor, graph, features)
            stage_s = None
            if apart:
                stage_s, whole_s, usual_s = time_model(self.session, graph, processor.name, reference, seconds=SECONDS)
            else:
                whole_s, usual_s = self._whole(processor, graph, reference)
            kernel_s = kernel_s * (usual_s / clock_s)
            return Timed(graph.name, processor.like, features, kernel_s, whole_s, usual_s, None, fuses, stage_s)
        stage_s, whole_s, usual_s = time_model(self.session, graph, processor.name, reference, seconds=SECONDS)
        call_s = max(0.0, (float(stage_s.sum()) - whole_s) / max(1, len(features) - 1))
        own_s = np.where(stage_s > 2 * call_s, stage_s - call_s, stage_s / 2)
        own_s[[f.free for f in features]] = np.nan
        return Timed(graph.name, processor.like, features, own_s, whole_s, usual_s, stage_s=stage_s)

    def time_plan(self, processor: Processor, graph: Graph, plan: Plan) -> tuple[Array, float]:
        """Return the time of each stage (s), and that of the reference network on a processor meanwhile.

        Raises:
            UnavailableError: the device failed, or cannot run the plan.
        """
        reference = self._reference(processor)
        with closing(self.session.load(graph, plan)) as candidate:
            runs = int(np.clip(SECONDS / ROUNDS / warm(candidate), LEAST_RUNS, MOST_RUNS))
            (stage_s,), usual_s = in_rounds(reference, lambda: np.median(candidate.run(runs).stage_s, axis=0))
        return stage_s, usual_s

    def _kernels(self, processor: Processor, graph: Graph, features: Sequence[OperatorFeatures]) -> tuple[Array, float]:
        from evaluators.cost_model.calibrate_kernels import profile_kernels

        path = self.loaded(reference_network()).source
        if graph.source is None or path is None:
            raise UnavailableError(f"{graph.name} has no file")
        packed = self._folder / "packed.xnnpack" if packs_weights(processor) else None
        if packed is not None:
            packed.unlink(missing_ok=True)
        found = profile_kernels(graph.source.path, path.path, processor, packed, seconds=SECONDS)
        if packed is None:
            seconds = openvino_seconds(features, found.names, found.kernel_s)
        else:
            seconds = operator_seconds(features, found.names, found.kernel_s, graph)
        return np.where(seconds > 0, seconds, np.nan), found.reference_s

    def _whole(self, processor: Processor, graph: Graph, reference: Candidate) -> tuple[float, float]:
        """Return the times of a whole model and of the reference meanwhile (s)."""
        with closing(self.session.load(graph, whole_plan(graph, processor.name))) as candidate:
            runs = int(np.clip(SECONDS / ROUNDS / warm(candidate), 2, MOST_RUNS))
            (whole_s,), usual_s = in_rounds(reference, lambda: np.median(candidate.run(runs).latency_s, axis=0))
        return float(whole_s), usual_s

    def _reference(self, processor: Processor) -> Candidate:
        if processor.like not in self._references:
            graph = self.loaded(reference_network())
            candidate = self.session.load(graph, whole_plan(graph, processor.name))
            self._stack.callback(candidate.close)
            self._references[processor.like] = candidate
        return self._references[processor.like]
