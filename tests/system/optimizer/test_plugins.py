"""Plug-ins: found by entry points, and whatever is wrong with one is a line that names it."""

from __future__ import annotations

import json
import math
import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluators.base import Batch, Candidate, Capabilities, Evaluator, Session
from evaluators.forwarding import ForwardingCandidate, ForwardingSession
from evaluators.guard import guarded, wrong_batch
from evaluators.registry import make_evaluator
from evaluators.sampling import SamplingPolicy, measure
from evaluators.testing import SyntheticEvaluator, example_graph
from optimizer.cli import main
from optimizer.samplers import SAMPLERS, make_sampler
from optimizer.samplers.foreign import ForeignSampler
from optimizer.tools.doctor import known_devices, render_devices
from optimizer.tools.plugins import list_plugins, other_evaluators
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Limits, Platform
from search_spaces.core.plugins import OURS, load_entry, time_limit
from search_spaces.core.plugins import entries as entries_of
from search_spaces.models import load
from search_spaces.models.zoo.names import ZOO
from search_spaces.spaces.chain import ChainSpace, chain_plan
from search_spaces.spaces.registry import make_space
from tests.support.commands import ROOT, command
from tests.support.sentences import fails, says

PACKAGE = """
import os, time
from contextlib import contextmanager
import numpy as np
from evaluators.base import Batch
from evaluators.cost_model.session import CostModelEvaluator
from evaluators.table.evaluator import TableEvaluator
from evaluators.testing import SyntheticEvaluator, SyntheticSession
from search_spaces.spaces.chain import ChainSpace
from optuna.samplers import RandomSampler

class Fine(SyntheticEvaluator):
    def platform(self):
        print("hello from the board", os.system("echo hello from a tool"))
        return super().platform()

class Model(CostModelEvaluator):
    pass

class Table(TableEvaluator):
    pass

class Newer(SyntheticEvaluator):
    contract_version = 7

class NoEvaluator:
    pass

class _Returns(SyntheticEvaluator):
    value = 1.0
    @contextmanager
    def prepare(self, platform, scratch=None):
        with super().prepare(platform) as session:
            yield _Session(session, self.value)

class _Session:
    def __init__(self, inner, value):
        self.inner, self.value = inner, value
    def fingerprint(self):
        return self.inner.fingerprint()
    def load(self, graph, plan, *, fresh=False):
        return _Candidate(self.inner.load(graph, plan, fresh=fresh), self.value)

class _Odd(_Session):
    def fingerprint(self):
        return {"clock": object()}

class Odd(SyntheticEvaluator):
    @contextmanager
    def prepare(self, platform, scratch=None):
        with super().prepare(platform) as session:
            yield _Odd(session, 1.0)

class _Candidate:
    def __init__(self, inner, value):
        self.inner, self.value = inner, value
    def run(self, n, stop_above_s=float("inf")):
        if self.value == "raise":
            raise KeyError("no such register")
        batch = self.inner.run(n, stop_above_s)
        return Batch(batch.latency_s * 0 + self.value, batch.stage_s)
    def verify(self):
        return None
    def close(self):
        pass

class Nan(_Returns):
    value = float("nan")

class Negative(_Returns):
    value = -1.0

class Raises(_Returns):
    value = "raise"

class Huge(_Returns):
    value = 1e300

class Tiny(_Returns):
    value = 1e-300

class _Stages(_Candidate):
    def run(self, n, stop_above_s=float("inf")):
        batch = self.inner.run(n, stop_above_s)
        return Batch(batch.latency_s, batch.stage_s * 1e3)

class _Loads(_Session):
    def load(self, graph, plan, *, fresh=False):
        return self.value and self.value(self.inner.load(graph, plan, fresh=fresh), "fine")

class _Special(SyntheticEvaluator):
    value = None
    @contextmanager
    def prepare(self, platform, scratch=None):
        with super().prepare(platform) as session:
            yield _Loads(session, type(self).value)

class Void(_Special):
    pass

class Milliseconds(_Special):
    value = _Stages

class Halves(ChainSpace):
    pass

class Dice(RandomSampler):
    pass

def small(path):
    from search_spaces.models.zoo import write
    from search_spaces.models.zoo.names import parse_name
    write(parse_name("squeezenet1_1@0.25/64"), path)

def nothing(path):
    pass
"""

ENTRIES = """
[partition_optimizer.evaluators]
fine = plugged:Fine
model = plugged:Model
typed = plugged:Table
newer = plugged:Newer
none = plugged:NoEvaluator
nan = plugged:Nan
negative = plugged:Negative
raises = plugged:Raises
odd = plugged:Odd
broken = plugged_broken:Thing
gone = plugged:Missing
leaves = plugged_leaves:Thing
crashes = plugged_crashes:Thing
huge = plugged:Huge
tiny = plugged:Tiny
void = plugged:Void
milliseconds = plugged:Milliseconds
[partition_optimizer.spaces]
halves = plugged:Halves
[partition_optimizer.samplers]
dice = plugged:Dice
[partition_optimizer.models]
tiny = plugged:small
void = plugged:nothing
"""

SMALL = "squeezenet1_1@0.25/64"
TABLE = Path(__file__).parents[3] / "experiments" / "tables" / "one_inference.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distribution as pip leaves it behind, importable from this folder."""
    path = tmp_path_factory.mktemp("site")
    info = path / "plugged-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    (path / "plugged.py").write_text(PACKAGE)
    (path / "plugged_broken.py").write_text("raise RuntimeError('the licence\\nhas run out')\n")
    (path / "plugged_leaves.py").write_text("import sys; sys.exit(3)\n")
    (path / "plugged_crashes.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\n")
    return path


@pytest.fixture
def _hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution of its own: what must import under load needs another limit than what never will."""
    info = tmp_path / "hanging-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[partition_optimizer.evaluators]\nhangs = plugged_hangs:Thing\n")
    (tmp_path / "plugged_hangs.py").write_text(
        textwrap.dedent("""
            import time
            while True:
                try:
                    time.sleep(1)
                except Exception:
                    pass
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def _installed(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.chdir(tmp_path)


installed = pytest.mark.usefixtures("_installed")


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> str:
    assert main(["-q", "--model", "squeezenet1_1@0.25/64", "--budget", "3", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err.strip()


def test_built_ins_come_in_through_the_same_groups() -> None:
    found = list_plugins()
    assert {p.name for p in found if p.kind == "sampler"} >= set(SAMPLERS)
    assert {p.name for p in found if p.kind == "model"} >= set(ZOO)
    assert {"litert", "synthetic"} <= {p.name for p in found if p.kind == "evaluator"}
    ours = [p for p in found if p.distribution.startswith(f"{OURS} ")]
    assert not [p for p in ours if p.problem]
    assert {p.contract for p in ours} == {1}


@installed
@pytest.mark.parametrize(
    "name",
    [
        "broken",
        "gone",
        "leaves",
        "newer",
        "none",
        "nan",
        "negative",
        "raises",
        "odd",
        "huge",
        "tiny",
        "void",
        "milliseconds",
    ],
)
def test_what_a_plug_in_does_wrong_is_one_line(capsys: pytest.CaptureFixture[str], name: str) -> None:
    says(refused(capsys, ["--evaluator", name], 4))


@pytest.mark.usefixtures("_hanging")
def test_a_plug_in_that_hangs_is_broken_off() -> None:
    (entry,) = [e for e in entries_of("evaluator") if e.name == "hangs"]
    with fails(UnavailableError):
        load_entry("evaluator", entry, 0.3)  # without the limit it would never end
    (found,) = [p for p in list_plugins(limit_s=0.5) if p.distribution == "hanging 1.2"]
    says(found.problem)


@installed
def test_the_list_tells_what_is_broken_and_survives_it() -> None:
    found = {p.name: p for p in list_plugins() if p.distribution == "plugged 1.2"}
    assert not any(found[name].problem for name in ("fine", "halves", "dice", "tiny", "nan"))
    assert found["fine"].contract == 1
    assert found["fine"].processors == ("cpu", "cpu0", "cpu1")
    for name in ("none", "broken", "newer"):
        says(found[name].problem)
    assert "SystemExit" in found["leaves"].problem
    assert "SIGSEGV" in found["crashes"].problem


@installed
def test_processors_of_installed_evaluators_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [e for e in entries_of("evaluator") if e.name in {"litert", "fine", "none"}]
    monkeypatch.setattr("optimizer.tools.plugins.entries", lambda _: some)
    assert [p.name for p in other_evaluators()] == ["fine", "none"]
    says(render_devices(known_devices()))


@installed
def test_plug_ins_work_where_built_ins_do(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "tiny", "--evaluator", "fine", "--sampler", "dice", "--allow", "halves", "--budget", "30"]
    assert main([*arguments, "--json", "-q", "--out", "run"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"]["name"] == "tiny"
    assert result["unique_plans"] == 30
    sampler = make_sampler("dice", 0, 0)
    assert isinstance(sampler, ForeignSampler)
    assert sampler.inner.__class__.__name__ == "Dice"
    assert isinstance(make_space("halves", example_graph(), SyntheticEvaluator().platform(), 2), ChainSpace)


def test_what_programs_of_a_plug_in_print_leaves_results_alone(folder: Path, tmp_path: Path) -> None:
    words = ["--model", "tiny", "--evaluator", "fine", "--budget", "5", "--json", "-q"]
    run = command(words, env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["unique_plans"] == 5
    assert {"hello from the board 0", "hello from a tool"} <= set(run.stderr.splitlines())


@installed
@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ("cost-model", "model", ["--platform", "pixel4", "--model", SMALL, "--objective", "throughput"]),
        (
            "cost-model",
            "model",
            ["--platform", "pixel4", "--model", SMALL, "--state", "hot:gpu=2", "--max-stages", "2"],
        ),
        ("cost-model", "model", ["--platform", "pixel4", "--model", f"{SMALL}×2"]),
        ("table", "typed", ["--model", str(TABLE)]),
    ],
)
def test_plug_ins_can_do_what_built_ins_can(
    capsys: pytest.CaptureFixture[str], ours: str, theirs: str, words: list[str]
) -> None:
    found = []
    for name in (ours, theirs):
        assert main([*words, "--evaluator", name, "--budget", "8", "--out", name, "--json", "-q"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["best"]["plan"] == found[1]["best"]["plan"]
    assert found[0].get("bounds") == found[1].get("bounds")


@installed
def test_a_model_whose_function_writes_nothing_is_reported() -> None:
    with fails(UnavailableError):
        load("void")


@installed
def test_unknown_names_get_suggestions() -> None:
    with fails(UsageError):
        make_evaluator("negativ")
    with fails(UsageError):
        make_space("halvs", example_graph(), SyntheticEvaluator().platform(), 2)


def test_two_distributions_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[partition_optimizer.evaluators]\nsame = {name}:Thing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with fails(UsageError):
        make_evaluator("same")


def test_a_guard_keeps_what_a_session_can_do_and_checks_what_it_returns() -> None:
    inner, graph = SyntheticEvaluator(), example_graph()
    evaluator = guarded(inner, "evaluator 'x' of y 1")
    assert evaluator.capabilities == inner.capabilities
    with evaluator.prepare(evaluator.platform()) as session:
        candidate = session.load(graph, chain_plan(graph, (), ["cpu"]))
        batch = candidate.run(4)
    assert wrong_batch(batch, 4, 1, float("inf")) == ""
    assert "latencies" in wrong_batch(batch, 5, 1, float("inf"))
    assert "latencies" in wrong_batch(batch, 3, 1, float("inf"))
    says(wrong_batch(batch, 4, 2, float("inf")))
    assert wrong_batch(batch, 5, 1, 0.0) == ""
    says(wrong_batch([0.1], 1, 1, 0.0))


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("fingerprint", {"clock": math.nan}),
        ("part_costs", None),
        ("powers_w", {"cpu": -1.0}),
        ("powers_w", {"cpu": math.nan}),
        ("unsupported_operators", [10**6]),
    ],
)
def test_wrong_answers_of_a_session_name_the_plug_in(method: str, value: Any) -> None:
    class Board(ForwardingSession):
        capabilities = Capabilities(computed=True, costs=True, powers=True, unsupported=True)

        def __init__(self, inner: Session) -> None:
            self.inner = inner

        def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
            return self.inner.load(graph, plan, fresh=fresh)

    class Plugin(SyntheticEvaluator):
        @contextmanager
        def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[Any]:
            with super().prepare(platform, scratch) as session:
                board = Board(session)
                setattr(board, method, lambda *_: value)
                yield board

    evaluator = guarded(Plugin(), "evaluator 'x' of y 1")
    given = {"part_costs": (example_graph(),), "unsupported_operators": (example_graph(), "cpu")}.get(method, ())
    with evaluator.prepare(evaluator.platform()) as session, fails(UnavailableError):
        getattr(session, method)(*given)


def test_a_session_that_cannot_be_left_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Plugin(SyntheticEvaluator):
        @contextmanager
        def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[Any]:
            with super().prepare(platform, scratch) as session:
                yield session
            raise ValueError("the board is gone")

    evaluator = guarded(Plugin(), "evaluator 'x' of y 1")
    with evaluator.prepare(evaluator.platform()):
        pass
    says("\n".join(caplog.messages))


def test_a_platform_that_cannot_be_names_the_plug_in() -> None:
    class Plugin(SyntheticEvaluator):
        def platform(self) -> Platform:
            return Platform("my board", ())

    with fails(UsageError):
        guarded(Plugin(), "evaluator 'x' of y 1").platform()


def with_candidates(made: Callable[[Candidate], Candidate], name: str) -> Evaluator:
    """Return a guarded plug-in with these candidates."""

    class Board(ForwardingSession):
        capabilities = Capabilities()

        def __init__(self, inner: Session) -> None:
            self.inner = inner

        def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
            return made(self.inner.load(graph, plan, fresh=fresh))

    class Plugin(SyntheticEvaluator):
        @contextmanager
        def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[Any]:
            with super().prepare(platform, scratch) as session:
                yield Board(session)

    return guarded(Plugin(), name)


def test_lists_of_real_numbers_serve_as_arrays() -> None:
    given: list[Any] = [[0.1, 0.2], [[0.1], [0]], None, [0.5]]

    class Lists(ForwardingCandidate):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:  # noqa: ARG002
            return Batch(*given)

    evaluator, graph = with_candidates(Lists, "evaluator 'lists' of board 1"), example_graph()
    with evaluator.prepare(evaluator.platform()) as session:
        candidate = session.load(graph, chain_plan(graph, (), ["cpu"]))
        batch = candidate.run(2)
        found = (batch.latency_s, batch.stage_s, batch.errors)
        assert [values is not None and values.tolist() for values in found] == [[0.1, 0.2], [[0.1], [0.0]], [0.5]]
        for wrong in ([[0.1 + 1j], [[0.1]]], [[0.1], np.array([[1j]])], [["0.1"], [[0.1]]]):
            given[:] = wrong
            with fails(UnavailableError):
                candidate.run(1)


def test_only_an_agreement_tells_how_outputs_agree() -> None:
    class Fine(ForwardingCandidate):
        def verify(self) -> Any:
            return "fine"

    evaluator, graph = with_candidates(Fine, "evaluator 'x' of y 1"), example_graph()
    with evaluator.prepare(evaluator.platform()) as session, fails(UnavailableError):
        session.load(graph, chain_plan(graph, (), ["cpu"])).verify()


def test_what_starting_a_tool_takes_counts_against_the_time_of_a_plan_and_a_limit_says_how_to_get_more() -> None:
    class Slow(ForwardingCandidate):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
            time.sleep(0.12)
            return self.inner.run(n, stop_above_s)

    evaluator, graph = with_candidates(Slow, "evaluator 'x' of y 1"), example_graph()
    plan, platform = chain_plan(graph, (), ["cpu"]), evaluator.platform()
    with evaluator.prepare(platform) as session:
        found = measure(session.load(graph, plan), SamplingPolicy(precision=1e-6, max_s=0.2, min_runs=2))
    assert len(found.latency_s.values_s) == 2
    with evaluator.prepare(replace(platform, limits=Limits(run_s=0.01))) as session, fails(UnavailableError):
        session.load(graph, plan).run(1)


def test_an_outer_limit_outlives_an_inner_one() -> None:
    def nested() -> None:
        with time_limit(0.2, "outer"):
            with time_limit(5.0, "inner"):
                pass
            assert 0.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2
            time.sleep(5.0)

    with fails(UnavailableError):
        nested()
