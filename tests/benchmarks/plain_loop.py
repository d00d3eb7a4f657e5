"""The loop that one would write in an afternoon: Optuna's TPE, an interpreter per stage, NumPy in between.

Every trial writes its stage files, builds an ``Interpreter`` for each, and runs 3 + 10 times. Run it as
``python -m tests.benchmarks.plain_loop MODEL.tflite TRIALS SEED``; it prints one JSON document. It is the yardstick
of ``main_job``, and lives in a process of its own because it loads the runtime.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from ai_edge_litert.interpreter import Interpreter

from evaluators.litert.processors import local_platform
from evaluators.litert.tensors import model_inputs
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.models.litert import read_model
from search_spaces.models.stages import cut_stage
from search_spaces.spaces.chain import ChainSpace

MAX_STAGES, WARM_UPS, RUNS = 4, 3, 10


def measure(graph: Graph, plan: Plan, platform: Platform, folder: Path) -> float:
    """Return the median latency of a plan in seconds."""
    stages: list[tuple[Any, tuple[int, ...], tuple[int, ...]]] = []
    for index, stage in enumerate(plan.stages):
        model = cut_stage(graph, stage.operators)
        path = folder / f"stage_{index}.tflite"
        model.write(path)
        threads = platform[stage.processor].options["threads"]
        interpreter = Interpreter(model_path=str(path), num_threads=threads)
        interpreter.allocate_tensors()
        stages.append((interpreter, model.inputs, model.outputs))
    inputs = dict(zip(graph.inputs, model_inputs(graph, 0), strict=True))
    latencies_s = []
    for _ in range(WARM_UPS + RUNS):
        values: dict[int, np.ndarray[Any, Any]] = dict(inputs)
        begin = time.perf_counter()
        for interpreter, reads, writes in stages:
            for tensor, detail in zip(reads, interpreter.get_input_details(), strict=True):
                interpreter.set_tensor(detail["index"], values[tensor])
            interpreter.invoke()
            for tensor, detail in zip(writes, interpreter.get_output_details(), strict=True):
                values[tensor] = interpreter.get_tensor(detail["index"])
        latencies_s.append(time.perf_counter() - begin)
    return statistics.median(latencies_s[WARM_UPS:])


def main() -> None:
    """Run the loop and print its best plan and how long it took."""
    path, trials, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    graph, platform = read_model(path), local_platform().restrict(["cpu", "cpu0", "cpu1"])
    space = ChainSpace(graph, platform, MAX_STAGES)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    begin = time.perf_counter()
    for _ in range(trials):
        trial = study.ask(space.distributions())
        with tempfile.TemporaryDirectory() as folder:
            study.tell(trial, measure(graph, space.decode(trial.params), platform, Path(folder)))
    document = {
        "wall_s": time.perf_counter() - begin,
        "trials": trials,
        "best_s": study.best_value,
        "plan": space.decode(study.best_params).to_json(),
    }
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
