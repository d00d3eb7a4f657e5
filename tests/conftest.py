"""Fixtures for all tests: real models, built once a session in a cache folder of its own."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command line has it; numpy reads it when it is imported
os.environ.pop("COLUMNS", None)  # of the terminal that the tests run in
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling takes longer than importing, for each process of a test

from evaluators.litert import session as litert
from evaluators.litert.processors import local_platform
from evaluators.litert.worker.runtimes import LITERT, runtime_of
from evaluators.measurement import final
from evaluators.measurement.final import FinalPolicy
from optimizer.study import course, several_models, verdict
from optimizer.tools import compare, execute
from optimizer.workload.search import SHARED_STEPS, STEPS
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.models.cache import ENVIRONMENT
from tests.support import sentences

sys.dont_write_bytecode = False  # of pytest's own process, which compiles the tests

# A neighbour's load is no failure.
settings.register_profile(
    "shared machine", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")

# Whoever starts tests in the background may have Ctrl-C ignored, which programs started by them would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

SHORT = {"_DISTURBED_S": 0.0, "_FINAL_S": 0.8, "_LEAST_FINAL_S": 0.6, "PAUSE_S": 0.1, "_PAUSES": 1, "_CLAIM_SHARE": 0.0}
"""Settings of a study's final in the process of the tests."""
USUAL = {name: getattr(course, name) for name in SHORT}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say how the golden file is written."""
    parser.addoption("--golden", action="store_true", help="write the sentences that are met to tests/golden")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Read the golden file."""
    config = session.config
    if config.getoption("--golden") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--golden writes one file: leave out -n")
    whole = not config.getoption("keyword") and not any("[" in word for word in config.args)
    sentences.begin(write=config.getoption("--golden"), whole=whole)


def pytest_sessionfinish() -> None:
    """Write the golden file where that is asked for."""
    sentences.end()


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of this session; the user's own stays untouched."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, str(folder))
        yield folder
    shutil.rmtree(folder)  # pytest keeps folders of earlier sessions, and a model can have half a gigabyte


@pytest.fixture(scope="session", autouse=True)
def _no_turns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Studies of tests that run at once, in processes of pytest, do not wait for each other's measurements."""
    tmp_path_factory.getbasetemp()  # stays where it is
    get_temp_dir()  # multiprocessing removes its folder at exit, so it may not lie in the one that goes before
    with tempfile.TemporaryDirectory(prefix="t") as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder).chmod(0o755)  # a server of a test may run as another user
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def _decided() -> Iterator[None]:
    """Studies of this process end decided: whether this machine is too busy for that is not what they test.

    Nor do they wait for it: the machine's noise is the evidence's business (:mod:`tests.benchmarks.verdicts`).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(final, "UNDECIDED", math.inf)
        for name, value in SHORT.items():
            patch.setattr(course, name, value)
        patch.setattr(verdict, "PAUSE_S", SHORT["PAUSE_S"])
        patch.setattr(compare, "_POLICY", FinalPolicy(max_s=1.5, disturbed_s=0.0))
        for name in ("_POLICY", "_STREAM_POLICY"):
            patch.setattr(execute, name, replace(getattr(execute, name), max_s=0.5))
        patch.setattr(execute, "_LIMIT_S", 0.5)
        yield


@pytest.fixture(scope="session", autouse=True)
def _litert_alone() -> Iterator[None]:
    """Studies of this process that name no processors use LiteRT's: timing OpenVINO's, too, doubles their time."""

    def found() -> Platform:
        here = local_platform()
        return replace(here, processors=tuple(p for p in here.processors if runtime_of(p) == LITERT))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(litert, "local_platform", found)
        yield


@pytest.fixture
def every_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies of this test that name no processors use OpenVINO's, too, as for everybody who has it."""
    monkeypatch.setattr(litert, "local_platform", local_platform)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies of several models in this process anneal for few steps: how good plans are is not the test."""
    monkeypatch.setattr(several_models, "STEPS", STEPS // 20)
    monkeypatch.setattr(several_models, "SHARED_STEPS", SHARED_STEPS // 20)


@pytest.fixture
def as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finals of this process last as long as those of the processes that it starts."""
    for name, value in USUAL.items():
        monkeypatch.setattr(course, name, value)
    monkeypatch.setattr(verdict, "PAUSE_S", USUAL["PAUSE_S"])


@pytest.fixture(scope="session")
def squeezenet(cache_folder: Path) -> Graph:
    """SqueezeNet 1.1: 39 operators, two branches in each fire module, 5 MB."""
    return load("squeezenet1_1")


@pytest.fixture(scope="session")
def mobilenet(cache_folder: Path) -> Graph:
    """MobileNet v1: a chain of 31 operators, 17 MB."""
    return load("mobilenet_v1")


@pytest.fixture(scope="session")
def small(cache_folder: Path) -> Graph:
    """SqueezeNet 1.1 of a quarter of the width, for images of 64 by 64."""
    return load("squeezenet1_1@0.25/64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the tests of a file have in common."""
    return tmp_path_factory.mktemp("folder")


@pytest.fixture(scope="module")
def scratch(folder: Path) -> Path:
    """A file that the tests of a file write again and again."""
    return folder / "scratch.tflite"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs in a folder of its own, into which run folders go by default."""
    monkeypatch.chdir(tmp_path)
