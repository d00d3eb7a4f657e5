"""Which operators LiteRT's Interpreter runs, and which of them we run: ``python -m tests.benchmarks.operators``.

Every model of :mod:`~tests.support.models.operator_corpus` is run by the plain ``Interpreter`` in a process of its own
and by the product, on the same inputs; outputs are compared. The table goes to ``experiments/results/operators.md``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from ai_edge_litert.interpreter import Interpreter

from evaluators.litert.candidate import LitertCandidate
from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator, LitertSession
from search_spaces.core.errors import OptimizeError
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan
from tests.support.models.operator_corpus import Case, corpus
from tests.support.models.tflite_models import Array

_LIMIT_S = 20
_M_PERTURB = -6  # malloc.h
_RESULT = Path(__file__).parents[2] / "experiments" / "results" / "operators.md"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a model.

    Attributes:
        runtime: why the plain Interpreter does not run it; "" where it does.
        ours: why the product does not; "" where it does.
    """

    case: Case
    runtime: str
    ours: str

    @property
    def agrees(self) -> bool:
        return bool(self.runtime) == bool(self.ours)


def interpreted(path: Path, inputs: Sequence[Array] | None, fill: int = 0) -> list[Array] | str:
    """Return the outputs of the plain Interpreter, in a process of its own, or why it does not run the model.

    Args:
        fill: a byte with which fresh memory is filled, which shows what a kernel leaves unwritten; 0 fills nothing.
    """
    kept = path.with_suffix(".npz")
    kept.unlink(missing_ok=True)
    said = path.with_suffix(".txt")
    said.write_text("the process died")
    child = os.fork()
    if not child:
        try:
            signal.alarm(_LIMIT_S)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            ctypes.CDLL(None).mallopt(_M_PERTURB, fill)
            np.savez(kept, *_run(path, inputs))
        except Exception as error:  # noqa: BLE001 - whatever the runtime raises is the answer
            said.write_text(" ".join(str(error).split()) or "an error without a word")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    if not kept.exists():
        return said.read_text()
    with np.load(kept) as found:
        return [found[name] for name in found.files]


def _run(path: Path, inputs: Sequence[Array] | None) -> list[Array]:
    made = Interpreter(str(path), num_threads=1)
    made.allocate_tensors()
    details = made.get_input_details()
    given = inputs if inputs is not None else [np.ones(d["shape"], d["dtype"]) for d in details]
    for detail, array in zip(details, given, strict=True):
        made.set_tensor(detail["index"], array)
    made.invoke()
    return [made.get_tensor(d["index"]) for d in made.get_output_details()]


def tried(session: LitertSession, case: Case, folder: Path) -> Outcome:
    """Run a model both ways."""
    path = case.net().write(folder / "model.tflite")
    processor = session.platform.processors[0].name
    ours = ""
    inputs: list[Array] | None = None
    outputs: list[Array] = []
    try:
        graph = load(str(path))
        with closing(session.load(graph, chain_plan(graph, (), [processor]), fresh=True)) as candidate:
            assert isinstance(candidate, LitertCandidate)
            inputs = session.inputs(graph)
            candidate.run(1)
            agreement = candidate.verify()
            outputs = candidate.outputs()
            if agreement is None or not agreement.accepted:
                ours = "its outputs differ from those of the whole model"
    except OptimizeError as error:
        ours = " ".join(error.what.split())
    expected = interpreted(path, inputs, 1)
    if isinstance(expected, str):
        return Outcome(case, expected, ours)
    if not ours and not all(_same(*each) for each in zip(outputs, expected, expected, strict=True)):
        again = interpreted(path, inputs, 0xAA)  # other values there are what the Interpreter leaves unwritten
        if isinstance(again, str):
            return Outcome(case, again, ours)
        if not all(_same(*each) for each in zip(outputs, expected, again, strict=True)):
            ours = "its outputs differ from those of Interpreter"
    return Outcome(case, "", ours)


def _same(a: Array, b: Array, again: Array) -> bool:
    """Return whether outputs agree in what the Interpreter writes: EMBEDDING_LOOKUP of int16 fills half of its own."""
    if a.size != b.size or again.size != b.size:
        return False
    a, b, again = a.ravel(), b.ravel(), again.ravel()
    written = (b == again) | ((b != b) & (again != again))  # noqa: PLR0124 - not a number
    a, b = a[written], b[written]
    if not np.issubdtype(b.dtype, np.inexact):
        return bool(np.max(np.abs(a.astype(np.int64).ravel() - b.astype(np.int64).ravel()), initial=0) <= 1)
    return bool(np.allclose(a.ravel(), b.ravel(), rtol=1e-3, atol=1e-4, equal_nan=True))


def outcomes(cases: Iterable[Case]) -> Iterator[Outcome]:
    """Return what becomes of each case."""
    core = min(os.sched_getaffinity(0))
    platform = Platform("one core", (make_processor(f"cpu{core}"),))
    with TemporaryDirectory() as name, LitertEvaluator().prepare(platform) as session:
        for case in cases:
            yield tried(session, case, Path(name))


def table(found: Sequence[Outcome]) -> str:
    """Return the table in Markdown: a row for each operator."""
    kinds = sorted({o.case.kind for o in found})
    ran = [o for o in found if not o.runtime]
    agreed = sum(o.agrees for o in found)
    lines = [
        "# Operators",
        "",
        (
            f"{len(kinds)} builtin operators with a kernel in LiteRT, {len(found)} models, of which the plain "
            f"`Interpreter` runs {len(ran)}. Where one runs a model the other does too: {agreed} of {len(found)}. "
            "Made by `python -m tests.benchmarks.operators`."
        ),
        "",
        "| operator | LiteRT and we run | neither runs | they differ |",
        "|---|---|---|---|",
    ]
    for kind in kinds:
        mine = [o for o in found if o.case.kind == kind]
        columns = (
            [o for o in mine if not o.runtime and not o.ours],
            [o for o in mine if o.runtime and o.ours],
            [o for o in mine if not o.agrees],
        )
        cells = (
            ", ".join(" ".join(filter(None, (o.case.label, o.case.variant))) or "model" for o in c) for c in columns
        )
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the corpus, or the operators named on the command line, which are printed and not written down."""
    names = set(sys.argv[1:])
    found = []
    for outcome in outcomes(c for c in corpus() if not names or c.kind in names):
        found.append(outcome)
        if not outcome.agrees or names:
            sys.stderr.write(
                f"{outcome.case.name}: LiteRT: {outcome.runtime or 'runs'} | we: {outcome.ours or 'run'}\n"
            )
    if not names:
        _RESULT.write_text(table(found), encoding="utf-8")
    sys.exit(0 if all(o.agrees for o in found) else 1)


if __name__ == "__main__":
    main()
