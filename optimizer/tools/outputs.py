"""Difference of the outputs of two models with the same inputs, computed in a process of its own.

``python -m optimizer.tools.outputs FOLDER MODEL`` runs a model on the arrays ``FOLDER/inputs.npz`` and writes what
it computes to ``FOLDER/outputs.npz``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from evaluators.litert.tensors import model_inputs
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.models.stages import cut_stage

_LIMIT_S = 600.0


def relative_error(before: Graph, after: Graph, seed: int = 0) -> float:
    """Return the norm of the difference of all outputs, over the norm of those of ``before``.

    Args:
        before, after: models with the same inputs and outputs.
        seed: of the inputs, uniform in [-1, 1).

    Raises:
        UnavailableError: the runtime does not run a model here.
        ModelError: a model's file is gone.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "inputs.npz", *model_inputs(before, seed))
        first, second = (_outputs(folder, graph) for graph in (before, after))
    norm = float(np.linalg.norm(first))
    apart = float(np.linalg.norm(second - first))
    return apart / norm if norm else apart


def _outputs(folder: Path, graph: Graph) -> NDArray[np.float64]:
    """Return all outputs, one behind the other."""
    model = folder / "model.tflite"
    cut_stage(graph, range(len(graph.operators))).write(model)
    command = [sys.executable, "-P", "-m", "optimizer.tools.outputs", str(folder), str(model)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{graph.name!r}: no outputs within {_LIMIT_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UnavailableError(f"the runtime does not run {graph.name!r} here: {last}")
    with np.load(folder / "outputs.npz") as held:
        return np.concatenate([held[key].ravel().astype(np.float64) for key in held.files])


def _main(folder: Path, model: str) -> None:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model, num_threads=1)
    interpreter.allocate_tensors()
    with np.load(folder / "inputs.npz") as held:
        for detail, key in zip(interpreter.get_input_details(), held.files, strict=True):
            interpreter.set_tensor(detail["index"], held[key])
    interpreter.invoke()
    found = [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]
    np.savez(folder / "outputs.npz", *found)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
