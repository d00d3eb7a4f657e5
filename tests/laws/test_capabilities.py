"""Laws of capabilities: what is promised works, what is not is never called, and wrappers change nothing by the way."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluators.android.session import AdbSession
from evaluators.base import Agreement, Candidate, Capabilities, Evaluator, EvaluatorCapabilities, PartCosts, Session
from evaluators.base import capabilities_of as declared
from evaluators.cost_model.session import CostModelEvaluator, CostModelSession
from evaluators.cuda.session import CudaSession
from evaluators.cuda.workload import CudaWorkload
from evaluators.forwarding import ForwardingCandidate, ForwardingSession, LoweredCandidate
from evaluators.guard import guarded
from evaluators.litert.session import LitertEvaluator
from evaluators.measurement.disturbance import Counters
from evaluators.objectives import OBJECTIVES, PricedSession, Pricing
from evaluators.registry import evaluator_names, make_evaluator
from evaluators.remote import wire
from evaluators.remote.session import RemoteEvaluator
from evaluators.table.evaluator import TableEvaluator, TableSession
from evaluators.testing import SyntheticEvaluator, SyntheticSession
from evaluators.workload.host import came_of
from evaluators.workload.predicted import PredictedSession
from optimizer.model.robust import in_states
from optimizer.study import course
from optimizer.study.config import parse_config
from optimizer.study.several_models import SeveralModels
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.states import State
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.segment_space import SegmentSpace
from tests.support.narrowing import there
from tests.support.remote_agents import agent_here
from tests.support.sentences import fails
from tests.support.short_studies import go

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "experiments" / "tables" / "one_inference.yaml"
SMALL = "squeezenet1_1@0.25/64"
ALL = Capabilities(**{f.name: True for f in fields(Capabilities)})
OF_SESSIONS = {
    "conditions": Session.conditions,
    "counters": Session.counters,
    "deploy": Session.deploy,
    "placements": Session.placements,
    "unsupported": Session.unsupported_operators,
    "costs": Session.part_costs,
    "powers": Session.powers_w,
    "states": Session.in_state,
    "decompose": Session.decomposed_error,
}
OF_CANDIDATES = {
    "stream": Candidate.stream,
    "pause": Candidate.after_pause,
    "figures": Candidate.figures,
    "traffic": Candidate.traffic,
    "outputs": Candidate.verify,
}
OF_EVALUATORS = {
    "names": Evaluator.processor,
    "reduced": Evaluator.reduced,
    "descriptions": Evaluator.described,
    "places": Evaluator.own_placements,
    "apart": Evaluator.apart,
    "targets": Evaluator.at,
    "graphs": Evaluator.graph_of,
    "workloads": Evaluator.host,
}
NOT_OF_OLD = {
    ("tflite-runtime", what) for what in ("workloads", "reduced", "places", "apart")
}  # what it inherits would be LiteRT's
FACTS = {"measures_here", "predicts"}  # of evaluators, without a method

Opened = tuple[Session, Graph, Platform]


@contextmanager
def litert() -> Iterator[Opened]:
    platform = LitertEvaluator().platform().restrict(["cpu0", "cpu1"])
    with LitertEvaluator().prepare(platform) as session:
        yield session, load(SMALL), platform


@contextmanager
def cost_model(*, behind: Callable[[Evaluator], Evaluator] = lambda evaluator: evaluator) -> Iterator[Opened]:
    evaluator = behind(CostModelEvaluator())
    platform = there(evaluator.described("pixel4"))
    with evaluator.prepare(platform) as session:
        yield session, load(SMALL), platform


@contextmanager
def synthetic() -> Iterator[Opened]:
    with SyntheticEvaluator().prepare(SyntheticEvaluator().platform()) as session:
        yield session, load(SMALL), SyntheticEvaluator().platform()


@contextmanager
def table() -> Iterator[Opened]:
    evaluator = TableEvaluator()
    graph = evaluator.graph_of(str(TABLE))
    with evaluator.prepare(evaluator.platform()) as session:
        yield session, graph, evaluator.platform()


opened = pytest.mark.parametrize(
    "opened", [pytest.param(litert, marks=pytest.mark.litert), cost_model, synthetic, table]
)


def whole(graph: Graph, session: Session, platform: Platform) -> Plan:
    """Return a plan of one stage on a processor that takes all."""
    able = session.capabilities.unsupported
    names = [p.name for p in platform.processors if not (able and session.unsupported_operators(graph, p.name))]
    return chain_plan(graph, (), [names[0]])


def works(session: Session, graph: Graph, platform: Platform, folder: Path) -> None:
    """Check every promise of a session by calling what is promised."""
    plan, can = whole(graph, session, platform), session.capabilities
    first = platform.processors[0].name
    (target := folder / "best").mkdir(exist_ok=True)
    calls: dict[str, tuple[Callable[[], Any], Callable[[Any], bool]]] = {
        "conditions": (session.conditions, lambda found: isinstance(found, dict)),
        "counters": (session.counters, lambda found: isinstance(found, Counters)),
        "deploy": (lambda: session.deploy(target, graph, plan), lambda found: bool(found.accepted)),
        "unsupported": (lambda: session.unsupported_operators(graph, first), lambda f: sorted(f) == list(f)),
        "costs": (lambda: session.part_costs(graph), lambda found: isinstance(found, PartCosts)),
        "powers": (session.powers_w, lambda found: all(watts > 0.0 for watts in found.values())),
        "states": (lambda: session.in_state(State("hot", ((plan.stages[0].processor, 2.0),))), lambda _: True),
    }
    with closing(session.load(graph, plan)) as candidate:
        latency_s = float(candidate.run(2).latency_s[0])
        calls["stream"] = (lambda: candidate.stream(2), lambda batch: len(batch.latency_s) == 2)
        calls["pause"] = (lambda: candidate.after_pause(0.001), lambda seconds: seconds > 0.0)
        calls["figures"] = (candidate.figures, lambda found: isinstance(found, dict))
        for name, (call, holds) in calls.items():
            if getattr(can, name):
                found = call()
                assert holds(found), (name, found)
                if name == "states" and not can.figures:
                    slow = found.load(graph, plan).run(1).latency_s[0]
                    assert latency_s < slow <= 2.0 * latency_s * (1 + 1e-9)
        assert isinstance(candidate.verify(), Agreement) is can.outputs


@opened
def test_what_is_promised_works(opened: Any, tmp_path: Path) -> None:
    with opened() as (session, graph, platform):
        works(session, graph, platform, tmp_path)


@opened
def test_a_guard_keeps_everything(opened: Any, tmp_path: Path) -> None:
    with opened() as (inner, graph, platform):

        class Around(Evaluator):
            name = "around"

            def platform(self) -> Platform:
                raise NotImplementedError

            @contextmanager
            def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[Session]:  # noqa: ARG002
                yield inner

        with guarded(guarded(Around(), "inner"), "outer").prepare(platform) as session:
            assert session.capabilities == inner.capabilities
            works(session, graph, platform, tmp_path)


@opened
def test_other_objectives_change_what_they_say(opened: Any, tmp_path: Path) -> None:
    with opened() as (inner, graph, platform):
        session = PricedSession(inner, [Pricing(OBJECTIVES[name], platform, {}) for name in ("occupancy", "memory")])
        changed = {"pause": False, "stream": False, "figures": True}
        assert session.capabilities == replace(inner.capabilities, **changed)
        works(session, graph, platform, tmp_path)
        with closing(session.load(graph, whole(graph, inner, platform))) as candidate:
            assert candidate.figures().keys() == {"memory"}


@pytest.mark.parametrize("behind", [lambda inner: inner, lambda inner: guarded(inner, "x")])
def test_states_need_nothing_but_a_session_that_has_them(
    behind: Callable[[Evaluator], Evaluator], tmp_path: Path
) -> None:
    with cost_model(behind=behind) as (inner, graph, platform):
        processor = platform.processors[0].name
        session = in_states(inner, platform, ("cool:", f"hot:{processor}=2"), "worst")
        changed = {"pause": False, "stream": False, "states": False}
        assert session.capabilities == replace(inner.capabilities, **changed)
        works(session, graph, platform, tmp_path)
        plan = chain_plan(graph, (), [processor])
        usual, worst = (float(s.load(graph, plan).run(1).latency_s[0]) for s in (inner, session))
        assert usual < worst <= 2.0 * usual * (1 + 1e-9)


@pytest.mark.parametrize("evaluator", [pytest.param("litert", marks=pytest.mark.litert), "cost-model", "synthetic"])
def test_an_agent_forwards_what_fits_into_messages(evaluator: str, tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="remote devices need the extra 'remote'")
    inner = make_evaluator(evaluator)
    platform = inner.described("pixel4") if inner.capabilities.descriptions else inner.platform().restrict(["cpu0"])
    assert platform is not None
    with inner.prepare(platform) as here:
        wanted = replace(wire.capabilities_from_json(asdict(here.capabilities)), conditions=True)
    with agent_here(inner, tmp_path / "agent") as (_, served):
        remote = RemoteEvaluator()
        remote.at(served.address)
        with remote.prepare(platform) as session:
            assert session.capabilities == wanted
            works(session, load(SMALL), platform, tmp_path)


def test_an_agent_keeps_all_but_what_needs_tables_or_two_messages() -> None:
    far = {"counters", "placements", "costs", "states", "decompose", "figures", "traffic"}
    found = asdict(wire.capabilities_from_json({**asdict(ALL), "figures": "yes", "other": True}))
    assert {name for name, on in found.items() if not on} == far
    with fails(wire.WireError):
        wire.capabilities_from_json(["stream"])


@pytest.mark.litert
def test_a_plan_that_was_lowered_does_what_others_do() -> None:
    with litert() as (session, graph, platform):
        space = SegmentSpace(graph, platform)
        rng = np.random.default_rng(0)
        drawn = (space.plan_at(int(i)) for i in rng.integers(0, 2**40, 1000))
        plan = next(plan for plan in drawn if plan.is_split)
        with closing(session.load(graph, plan)) as candidate:
            assert isinstance(candidate, LoweredCandidate)
            batch, stream = candidate.run(3), candidate.stream(2)
            assert batch.stage_s.shape == (3, len(plan.stages))
            assert stream.stage_s.shape == (2, len(plan.stages))
            assert candidate.after_pause(0.001) > 0.0
            assert there(candidate.verify()).accepted


@pytest.mark.parametrize("behind", [lambda inner: inner, lambda inner: guarded(inner, "x")])
def test_workloads_run_behind_a_guard(behind: Callable[[Evaluator], Evaluator], tmp_path: Path) -> None:
    evaluator = behind(CostModelEvaluator())
    common = {"model": f"{SMALL}×2", "budget": "1", "evaluator": "cost-model", "platform": "pixel4"}
    problem = SeveralModels.read(parse_config(common), evaluator)
    arguments = problem.workload, problem.joined, problem.platform, problem.objective, tmp_path
    with evaluator.host(*arguments) as session:
        assert session.capabilities == PredictedSession.capabilities
        assert session.price(None, lambda _: None) == {}
        plan = problem.baselines[0].plan
        with closing(session.load(problem.joined.graph, plan)) as candidate:
            batch = candidate.run(2)
            took_s = float(batch.latency_s[1])
            assert came_of(batch).value_s(problem.objective) == pytest.approx(took_s)
        assert session.simulator.run(plan).value_s(problem.objective) == pytest.approx(took_s)
        assert session.decomposed_error(problem.joined.components[0].graph, ()) is None


# What is declared


@pytest.mark.parametrize("kind", [AdbSession, CostModelSession, CudaSession, SyntheticSession, TableSession])
def test_a_session_declares_what_it_has(kind: type[Session]) -> None:
    for name, method in OF_SESSIONS.items():
        assert getattr(kind.capabilities, name) is (getattr(kind, method.__name__) is not method), name


@pytest.mark.parametrize("kind", [CudaWorkload, PredictedSession])
def test_a_session_of_workloads_declares_what_it_has(kind: type[Session]) -> None:
    assert kind.capabilities.decompose
    assert kind.decomposed_error is not Session.decomposed_error


@pytest.mark.parametrize("name", evaluator_names())
def test_an_evaluator_declares_what_it_has(name: str) -> None:
    found = make_evaluator(name)
    assert OF_EVALUATORS.keys() | FACTS == {f.name for f in fields(EvaluatorCapabilities)}
    for what, method in OF_EVALUATORS.items():
        has = getattr(type(found), method.__name__) is not method
        assert getattr(found.capabilities, what) is (has and (name, what) not in NOT_OF_OLD), what
    assert guarded(found, "x").capabilities == found.capabilities


def test_every_capability_has_a_method_and_is_forwarded() -> None:
    every = {f.name for f in fields(Capabilities)}
    assert OF_SESSIONS.keys() | OF_CANDIDATES.keys() | {"computed", "rewrites"} == every
    for kind, wrapper, methods in (
        (Session, ForwardingSession, [*OF_SESSIONS.values(), Session.fingerprint]),
        (Candidate, ForwardingCandidate, [*OF_CANDIDATES.values(), Candidate.run, Candidate.close]),
    ):
        missing = [m.__name__ for m in methods if getattr(wrapper, m.__name__) is getattr(kind, m.__name__)]
        assert not missing


def test_who_declares_nothing_can_do_nothing_more() -> None:
    assert declared(object(), Capabilities) == Capabilities()
    assert declared(object(), EvaluatorCapabilities) == EvaluatorCapabilities(measures_here=True)
    assert not any(asdict(Capabilities()).values())


def test_a_plug_in_that_declares_something_else_is_reported() -> None:
    class Wrong(SyntheticEvaluator):
        @contextmanager
        def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[Any]:
            with super().prepare(platform, scratch) as session:
                session.capabilities = {"stream": True}  # type: ignore[assignment]
                yield session

    evaluator = guarded(Wrong(), "evaluator 'x' of y 1")
    with (
        fails(UnavailableError),
        evaluator.prepare(evaluator.platform()),
    ):
        pass


def test_a_promise_that_is_not_kept_is_one_line() -> None:
    class Boasting(SyntheticEvaluator):
        @contextmanager
        def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[Any]:
            with super().prepare(platform, scratch) as inner:
                inner.capabilities = Capabilities(counters=True, conditions=True)
                inner.counters = inner.conditions = None  # type: ignore[assignment, method-assign]
                yield inner

    evaluator = guarded(Boasting(), "evaluator 'x' of y 1")
    with evaluator.prepare(evaluator.platform()) as session:
        for call in (session.counters, session.conditions):
            with fails(UnavailableError):
                call()


# What is never called


class RefusedError(AssertionError):
    """A method was called that nobody promised."""


def silent(kind: type, methods: Iterable[Any], **known: Any) -> Any:
    """Return a class whose methods raise."""

    def refuse(name: str) -> Callable[..., Any]:
        def call(*_: object, **__: object) -> None:
            raise RefusedError(name)

        return call

    return type(kind.__name__, (kind,), {**{m.__name__: refuse(m.__name__) for m in methods}, **known})


CHANGED: list[dict[str, Any]] = [
    {},
    {"allow": "cuts,branches", "max_stages": 40},
    {"objective": ("occupancy", "memory")},
]


@pytest.mark.parametrize("changed", CHANGED)
def test_what_is_not_promised_is_never_called(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = silent(ForwardingCandidate, [m for m in OF_CANDIDATES.values() if m is not Candidate.verify])

    def loaded(self: Any, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        found: Candidate = candidate(self.inner.load(graph, plan, fresh=fresh))
        return found

    session = silent(ForwardingSession, OF_SESSIONS.values(), load=loaded)

    @contextmanager
    def prepare(self: Any, platform: Platform, scratch: Path | None = None) -> Iterator[Session]:
        with ExitStack() as stack:
            yield session(stack.enter_context(SyntheticEvaluator.prepare(self, platform, scratch)))

    evaluator = silent(SyntheticEvaluator, OF_EVALUATORS.values(), prepare=prepare)
    monkeypatch.setattr(course, "make_evaluator", lambda _: evaluator())
    result = go(tmp_path, **{"model": SMALL, "budget": 6, **changed})
    assert result.verdict is not None
    assert math.isfinite(sum(trial.median_s for trial in result.history.trials if not trial.failure))
    assert not any("RefusedError" in trial.failure for trial in result.history.trials)


# How nobody finds out


CLASSES = (ast.Name, ast.Attribute)
MODULES = sorted((ROOT / "optimizer").rglob("*.py"))


def of_evaluators(tree: ast.Module) -> set[str]:
    """Return the names that a module has from evaluators."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "evaluators"
        for alias in node.names
    }


ASKING = {"isinstance", "issubclass", "getattr", "hasattr"}


def asked(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each look at what an object is or has."""
    names = of_evaluators(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKING:
            kinds = {
                ast.unparse(n).split(".")[0] for a in node.args[1:2] for n in ast.walk(a) if isinstance(n, CLASSES)
            }
            subject = ast.unparse(node.args[0]).split(".")[-1] if node.args else ""
            if (node.func.id in {"isinstance", "issubclass"} and kinds & names) or (
                node.func.id in {"getattr", "hasattr"} and subject in {"session", "candidate", "evaluator"}
            ):
                yield node.lineno, ast.unparse(node)


def test_nobody_asks_what_a_session_is() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}
    assert not [f"{path.relative_to(ROOT)}:{line}: {text}" for path in MODULES for line, text in asked(trees[path])]


@pytest.mark.parametrize(
    "text", ["isinstance(x, Session)", "isinstance(x.y, int | Session)", "hasattr(self.session, 'a')"]
)
def test_who_asked_would_be_found(text: str) -> None:
    assert list(asked(ast.parse(f"from evaluators.base import Session\n{text}")))


def test_no_protocol_can_be_asked_for() -> None:
    texts = {
        p: p.read_text(encoding="utf-8") for top in ("evaluators", "optimizer") for p in (ROOT / top).rglob("*.py")
    }
    users = {p.name for p, text in texts.items() if "runtime_checkable" in text}
    assert not users
