"""Stages run by tflite-runtime keep LiteRT's contract; where it is not installed, one line says so."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from evaluators.base import Evaluator
from evaluators.contract import check_timeline
from evaluators.litert import PlanRunner
from evaluators.litert.deployment import write_deployment
from evaluators.litert.processor_names import parse_processor
from evaluators.litert.processors import local_platform, make_processor
from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.litert.worker.runtimes import check_installed
from evaluators.testing import EvaluatorContract
from evaluators.tflite_runtime import TfliteRuntimeEvaluator
from optimizer.cli import main
from search_spaces.core.errors import OptimizeError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.models.stages import cut_stage, join
from search_spaces.spaces.chain import chain_plan
from tests.support.models.litert_loading import survives
from tests.support.narrowing import there
from tests.support.sentences import fails


def why_not() -> str:
    try:
        check_installed("tflite-runtime")
    except UnavailableError as error:
        return str(error)
    return ""


PROBLEM = why_not()
FOUND = local_platform()
SINGLES = [p.name for p in FOUND.processors if p.kind == "cpu" and len(p.options["cores"]) == 1]
FIRST, LAST = SINGLES[0], SINGLES[-1]


def runs(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that runs the runtime."""
    marked: Callable[..., None] = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)(test)
    return pytest.mark.tflite_runtime(marked)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def platform() -> Platform:
    return TfliteRuntimeEvaluator().platform().restrict(list(dict.fromkeys([FIRST, LAST])))


@pytest.fixture(scope="module")
def session(platform: Platform, cache_folder: Path) -> Iterator[LitertSession]:
    with TfliteRuntimeEvaluator().prepare(platform) as opened:
        yield opened


@pytest.mark.tflite_runtime
@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
class TestTfliteRuntime(EvaluatorContract):
    measures = True

    def evaluator(self) -> Evaluator:
        class Small(TfliteRuntimeEvaluator):
            def platform(self) -> Platform:
                return super().platform().restrict(list(dict.fromkeys([FIRST, LAST])))

        return Small()

    def graph(self) -> Graph:
        return load("squeezenet1_1")


@runs
@pytest.mark.parametrize("kernels", ["", ":builtin"])
def test_plans_compute_what_the_whole_model_computes(squeezenet: Graph, mobilenet: Graph, kernels: str) -> None:
    evaluator = TfliteRuntimeEvaluator()
    processors = list(dict.fromkeys([FIRST + kernels, LAST + kernels]))
    platform = Platform("two", tuple(map(evaluator.processor, processors)))
    with evaluator.prepare(platform) as session:
        for graph in (squeezenet, mobilenet):
            count = len(graph.operators)
            for cuts in ((), (count // 2,), tuple(range(1, count))):
                plan = chain_plan(graph, cuts, [processors[i % len(processors)] for i in range(len(cuts) + 1)])
                with closing(session.load(graph, plan)) as candidate:
                    batch = candidate.run(2)
                    check_timeline(there(batch.timeline), graph, plan, platform)
                    agreement = there(candidate.verify())
                    # Without a processor of XNNPACK the outputs are compared with those of one: LiteRT's.
                    assert agreement.accepted if kernels else agreement.identical


@runs
def test_both_runtimes_share_a_plan(squeezenet: Graph, cache_folder: Path) -> None:
    evaluator = LitertEvaluator()
    platform = Platform("both", (evaluator.processor(FIRST), evaluator.processor(f"{LAST}:tflite-runtime")))
    plan = chain_plan(squeezenet, [10, 20], [FIRST, f"{LAST}:tflite-runtime", FIRST])
    with evaluator.prepare(platform) as session:
        assert session.fingerprint()["versions"]["tflite-runtime"] == importlib.metadata.version("tflite-runtime")
        with closing(session.load(squeezenet, plan)) as candidate:
            candidate.run(2)
            agreement = there(candidate.verify())
    assert agreement.accepted
    assert 0 < agreement.tolerance <= 1e-4


@runs
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda n: signal.Signals(n).name)
def test_a_worker_that_dies_ends_its_trial_alone(session: LitertSession, squeezenet: Graph, number: int) -> None:
    survives(session, squeezenet, chain_plan(squeezenet, [10], [FIRST, LAST]), LAST, number)


@runs
def test_a_study_and_its_plan(
    tmp_path: Path, cache_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "squeezenet1_1@0.5/64", "--evaluator", "tflite-runtime", "--budget", "6", "--max-stages", "2"]
    assert main([*words, "--json", "--out", "run", "--quiet"]) == 0
    printed = capfd.readouterr()
    assert "XNNPACK" not in printed.err
    document = json.loads(printed.out)
    assert document["evaluator"] == "tflite-runtime"
    assert document["unique_plans"] == 6
    assert document["best"]["identical"]
    plan = json.loads((tmp_path / "run" / "best" / "plan.json").read_text())
    assert all(p["options"]["runtime"] == "tflite-runtime" for p in plan["platform"]["processors"])
    assert main(["execute", "run", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["latency_ms"]["median"] > 0


def test_names() -> None:
    assert parse_processor("cpu0:tflite-runtime:builtin").runtime == "tflite-runtime"
    with fails(UsageError):
        parse_processor("cpu0:tflite-runtime:tflite-runtime")
    with fails(UsageError):
        TfliteRuntimeEvaluator().processor("gpu")


@pytest.mark.skipif(not PROBLEM, reason="tflite-runtime works here")
def test_without_it_one_line_tells_what_to_install(
    squeezenet: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in (lambda: make_processor("cpu0:tflite-runtime"), TfliteRuntimeEvaluator().platform):
        with fails(UnavailableError):
            wrong()
    assert main(["--model", "squeezenet1_1", "--evaluator", "tflite-runtime", "--dry-run"]) == 4
    assert len(capsys.readouterr().err.splitlines()) == 1
    # A plan that was made for it elsewhere.
    write_deployment(
        tmp_path, squeezenet, chain_plan(squeezenet, [], [FIRST]), FOUND, there(squeezenet.source).content_digest()
    )
    document = json.loads((tmp_path / "plan.json").read_text())
    document["platform"]["processors"][0]["options"]["runtime"] = "tflite-runtime"
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with fails(UnavailableError):
        PlanRunner(tmp_path).close()
    document["platform"]["processors"][0]["options"]["runtime"] = "/tmp/evil.so"
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with fails(OptimizeError):
        PlanRunner(tmp_path).close()


def test_numpy_2_is_reported_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"tflite-runtime": "2.14.0", "numpy": "2.1.3"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    with fails(UnavailableError):
        check_installed("tflite-runtime")
    versions["numpy"] = "1.26.4"
    check_installed("tflite-runtime")


def test_a_stage_in_memory_is_its_file(mobilenet: Graph, tmp_path: Path) -> None:
    count = len(mobilenet.operators)
    for operators in (range(count), range(3, 9), range(count - 1, count)):
        stage = cut_stage(mobilenet, operators)
        stage.write(tmp_path / "file.tflite")
        with (tmp_path / "memory.tflite").open("wb") as file:
            join([stage]).write_into(file, file.name)
        one, other = read_model(tmp_path / "file.tflite"), read_model(tmp_path / "memory.tflite")
        assert [o.kind for o in one.operators] == [o.kind for o in other.operators]
        assert one.source is not None
        assert other.source is not None
        assert one.source.extents.keys() == other.source.extents.keys()
        whole, alone = (Path(s.path).read_bytes() for s in (one.source, other.source))
        for buffer, extent in one.source.extents.items():
            place = other.source.extents[buffer].offset
            mine = np.frombuffer(whole, np.uint8, extent.nbytes, extent.offset)
            assert np.array_equal(mine, np.frombuffer(alone, np.uint8, extent.nbytes, place))
    shutil.rmtree(tmp_path)
