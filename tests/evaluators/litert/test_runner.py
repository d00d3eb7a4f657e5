"""A plan from its files: three lines run it, as often as one likes and from several threads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from numpy.typing import NDArray

from evaluators.litert import PlanRunner
from evaluators.litert.processors import local_platform
from evaluators.litert.tensors import model_inputs
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph
from tests.support.models.litert_loading import three_stages
from tests.support.narrowing import there
from tests.support.sentences import fails

pytestmark = pytest.mark.litert


@pytest.fixture(scope="module")
def folder(squeezenet: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_stages(tmp_path_factory.mktemp("plan"), squeezenet, local_platform())


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[PlanRunner]:
    with PlanRunner(folder) as opened:
        yield opened


def whole(graph: Graph, image: NDArray[Any]) -> NDArray[Any]:
    interpreter = Interpreter(model_path=str(there(graph.source).path), num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image)
    interpreter.invoke()
    found: NDArray[Any] = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    return found


def test_three_lines_in_a_script_without_a_main_guard(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from evaluators.litert import PlanRunner\n"
        "with PlanRunner(sys.argv[1]) as runner:\n"
        "    outputs = runner.run_seeded()\n"
        "print(*(f'{name} {array.shape} {array.sum():.3f}' for name, array in outputs.items()))\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, str(script), str(folder / "plan.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=env, cwd=tmp_path)
    assert run.stdout.split(" ", 1)[1] == "(1, 1000) 1.000\n"
    assert run.stderr == ""


def test_it_computes_what_the_model_computes(runner: PlanRunner, squeezenet: Graph) -> None:
    rng = np.random.default_rng(1)
    ((name, (shape, dtype)),) = runner.inputs.items()
    ((output, (output_shape, _)),) = runner.outputs.items()
    assert (name, shape, dtype) == (squeezenet.tensors[squeezenet.inputs[0]].name, IMAGE.shape, IMAGE.dtype)
    for _ in range(3):
        image = rng.standard_normal(shape).astype(dtype)
        wanted = whole(squeezenet, image)
        for given_ in (image, [image], {name: image}):
            found = runner.run(given_)
            assert found[output].shape == output_shape
            assert found[output].tobytes() == wanted.tobytes()
    seeded = runner.run_seeded()[output]
    assert seeded.tobytes() == whole(squeezenet, np.asarray(model_inputs(squeezenet, 0)[0])).tobytes()
    batch = runner.measure(4)
    assert batch.latency_s.shape == (4,)
    assert batch.stage_s.shape == (4, 3)


def test_outputs_are_copies(runner: PlanRunner) -> None:
    first = runner.run_seeded(1)
    kept = {name: array.copy() for name, array in first.items()}
    runner.run_seeded(2)
    assert all((first[name] == kept[name]).all() for name in kept)


IMAGE = np.zeros((1, 224, 224, 3), np.float32)


@pytest.mark.parametrize(
    "inputs",
    [
        IMAGE[0],
        IMAGE.astype(np.float64),
        IMAGE.astype(">f4"),
        [],
        [IMAGE, IMAGE],
        {},
        {"image": IMAGE},
        {"input": IMAGE, "b": IMAGE},
        {"input": None},
        {"input": "cat"},
        [object()],
    ],
)
def test_wrong_inputs_are_one_line(runner: PlanRunner, inputs: Any) -> None:
    with pytest.raises(UsageError) as caught:
        runner.run(inputs)
    assert "\n" not in str(caught.value)


def test_it_goes_on_after_a_worker_died(folder: Path) -> None:
    with PlanRunner(folder) as runner:
        runner.run_seeded()
        os.kill(next(iter(runner._workers._running.values())).pid, 9)
        with pytest.raises(UnavailableError):
            runner.run_seeded()
        with fails(UnavailableError):
            runner.run_seeded()
    with PlanRunner(folder) as runner:
        runner.run_seeded()


def test_closing_twice_and_running_afterwards(folder: Path) -> None:
    runner = PlanRunner(folder)
    runner.run_seeded()
    runner.close()
    runner.close()
    with fails(UsageError):
        runner.run_seeded()


def test_runners_leave_nothing_open(folder: Path) -> None:
    def count() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    def once() -> None:
        with PlanRunner(folder) as runner:
            runner.run_seeded()

    once()
    grown = []
    for _ in range(3):  # what earlier tests left in the background may open a file meanwhile, but not each time
        before = count()
        for _ in range(2):
            once()
        grown.append(count() - before)
    assert min(grown) <= 0


def test_a_runner_outlives_the_thread_that_made_it_and_serves_several(folder: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        runner = pool.submit(PlanRunner, folder).result()
    with runner:
        wanted = runner.run_seeded()
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda _: runner.run_seeded(), range(9)))
        assert all(np.array_equal(f[name], wanted[name]) for f in found for name in wanted)
    with fails(UsageError):
        runner.run_seeded()
