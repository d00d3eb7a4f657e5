"""Tables that people type in: read, solved with a proof, and used in studies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations, product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.base import Evaluator
from evaluators.contract import EvaluatorContract
from evaluators.registry import make_evaluator
from evaluators.table.evaluator import TableEvaluator
from evaluators.table.table import Table, read_table
from optimizer.cli import main
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts, ChainObjective, chain_cost
from optimizer.exact.period import least_period
from optimizer.model.bounds import price_of
from optimizer.tools.solve import solve_file, table_costs
from search_spaces.core.errors import InfeasibleError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.chain import ChainSpace, chain_plan
from tests.support.commands import answered, tells
from tests.support.sentences import fails, says
from tests.support.strategies import chain_graph

TABLES = Path(__file__).parents[3] / "experiments" / "tables"
STUDY, PIPELINE = TABLES / "one_inference.yaml", TABLES / "two_kinds_of_boards.yaml"
SMALL = """\
unit: ms
devices:
  - {kind: big, count: 2, overhead: 0.1}
  - {kind: little, memory_bytes: 100}
transfers:
  - {from: big, to: big, takes: 0.5}
  - {from: big, to: little, takes: 0.25, bandwidth_bytes_per_s: 1.0e+6}
networks:
  - name: a
    operators:
      - {name: one, times: {big: 1.0, little: 3}, memory_bytes: 60, output_bytes: 500}
      - {name: two, times: {big: 2.0, little: never}}
      - {name: three, times: {big: 1.5, little: 1.0}, memory_bytes: 60}
"""


STREAM = """
name: stream
unit: ms
objective: latency
devices: [{kind: cpu}, {kind: gpu}]
transfers: [{from: cpu, to: gpu, takes: 1.0}]
networks:
  - name: net
    operators:
      - {name: first, times: {cpu: 2.0, gpu: 5.0}}
      - {name: second, times: {cpu: 9.0, gpu: 3.0}}
"""


def _easy() -> Table:
    """Return a table in which every device takes every layer."""
    with TemporaryDirectory() as folder:
        text = SMALL.replace("never", "2.5").replace("memory_bytes: 100", "overhead: 0.2")
        return read_table(_written(Path(folder), text))


class TestContract(EvaluatorContract):
    """The table keeps the contract of evaluators."""

    def evaluator(self) -> Evaluator:
        return TableEvaluator(_easy())

    def graph(self) -> Graph:
        return _easy().graph()


def _written(folder: Path, text: str = SMALL) -> Path:
    path = folder / "table.yaml"
    path.write_text(text)
    return path


def test_it_is_installed_by_name() -> None:
    assert make_evaluator("table").name == "table"


def test_the_best_chain_is_the_best_of_all_that_a_session_runs(tmp_path: Path) -> None:
    evaluator = TableEvaluator()
    graph = evaluator.graph_of(str(_written(tmp_path)))
    platform = evaluator.platform()
    space = ChainSpace(graph, platform, 3)
    with evaluator.prepare(platform) as session:
        assert session.unsupported_operators(graph, "little") == [1]
        price = price_of(graph, session)
        best = min(price(space.plan_at(i)) for i in range(space.cardinality()))
    found = solve_file(tmp_path / "table.yaml", None, 1.0)
    assert found.value == pytest.approx(best * 1e3)
    assert found.proven
    assert found.unit == "ms"


Several = tuple[ChainCosts, list[range], int | None, list[list[int]]]


@st.composite
def several(draw: st.DrawFn) -> Several:
    """Draw costs of one or two networks on three processors, of which two may exclude each other."""
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    networks = [range(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shared = draw(st.booleans())
    processors = tuple(
        Processor(f"p{i}", "cpu", {"x": 1.0} if shared and i else {f"x{i}": 1.0}, f"p{i}") for i in range(3)
    )
    count = sum(lengths)
    operator_s = np.asarray(rng.integers(1, 9, (3, count)) * 1e-3, dtype=np.float64)
    transfer_s = np.asarray(rng.integers(0, 5, (count, 3, 3)) * 1e-3 * (1 - np.eye(3)), dtype=np.float64)
    memory = draw(st.sampled_from((None, 4.0, 100.0)))
    costs = ChainCosts(
        Platform("p", processors),
        operator_s,
        np.asarray(rng.integers(0, 3, 3) * 1e-3, dtype=np.float64),
        transfer_s,
        rng.integers(0, 4, count).astype(float) if memory else None,
        np.full(3, memory) if memory else None,
    )
    chain = draw(st.booleans())
    reads = [
        [o - 1] * (o > network[0]) if chain else [e for e in network if e < o and draw(st.booleans())]
        for network in networks
        for o in network
    ]
    return costs, networks, draw(st.sampled_from((None, 1, 2))), reads


def _period_s(case: Several, word: tuple[int, ...]) -> float:
    costs, networks, most, reads = case
    load, kept = np.zeros(3), np.zeros(3)
    for network in networks:
        parts, moved = 0, set()
        for operator in network:
            processor = word[operator]
            load[processor] += costs.operator_s[processor, operator]
            kept[processor] += costs.operator_nbytes[operator] if costs.operator_nbytes is not None else 0.0
            if not reads[operator] or any(word[e] != processor for e in reads[operator]):
                parts += 1
                load[processor] += costs.overhead_s[processor]
            moved |= {(e, processor) for e in reads[operator] if word[e] != processor}
        if most is not None and parts > most:
            return float("inf")
        for written, processor in moved:
            load[processor] += costs.transfer_s[written + 1, word[written], processor]
    if costs.memory_bytes is not None and (kept > costs.memory_bytes).any():
        return float("inf")
    shared = costs.platform.processors[1].excludes(costs.platform.processors[2])
    return float(max(load[0], load[1] + load[2]) if shared else load.max())


@settings(max_examples=40, deadline=None)
@given(several())
def test_the_least_period_is_the_one_that_brute_force_finds(case: Several) -> None:
    costs, networks, most, reads = case
    words = product(range(3), repeat=costs.operator_s.shape[1])
    best = min(_period_s(case, word) for word in words)
    if best == float("inf"):
        with pytest.raises(InfeasibleError):
            least_period(costs, networks, most, 5.0, reads)
        return
    found = least_period(costs, networks, most, 5.0, reads)
    assert found.value == pytest.approx(best, rel=1e-5)
    assert found.proven
    assert found.bound <= best * (1 + 1e-9)


GRAPH = """\
unit: ms
devices: [{kind: gpu, overhead: 0.1}, {kind: cpu, count: 2}]
transfers: [{from: gpu, to: cpu, takes: 0.5}, {from: cpu, to: gpu, takes: 0.25}]
networks:
  - name: net
    operators:
      - {name: stem, times: {gpu: 1, cpu: 4}}
      - {name: left, times: {gpu: 3, cpu: 3.5}}
      - {name: right, times: {gpu: 3, cpu: 3.5}, reads: [stem]}
      - {name: join, times: {gpu: 1, cpu: never}, reads: [left, right]}
"""
ROWS = """\
name,gpu,cpu,reads
stem,1,4,-
left,3,3.5,
right,3,3.5,stem
join,1,never,left right
"""


def test_operators_of_a_graph_are_placed_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _written(tmp_path, GRAPH)
    found = solve_file(path, "latency", 10.0)
    # stem and one branch on the GPU; the other on a core, which waits 0.5 ms for the stem and the GPU 0.25 ms for it
    assert found.value == pytest.approx(0.1 + 1 + 0.5 + 3.5 + 0.1 + 0.25 + 1)
    assert found.proven
    assert {p.device for p in found.parts} == {"gpu", "cpu0"}
    period = solve_file(path, "period", 10.0)
    assert period.proven
    assert period.value == pytest.approx(0.5 + 3.5)  # each branch on a core of its own, which waits for the stem
    words = ["--model", str(path), "--evaluator", "table", "--allow", "cuts,branches", "--budget", "20", "-q", "--json"]
    best = answered(capsys, [*words, "--out", str(tmp_path / "run")])["best"]
    assert best["latency_ms"]["median"] == pytest.approx(found.value)


def test_the_period_that_is_proven_is_that_of_a_plan_that_a_study_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _written(tmp_path, GRAPH.replace("overhead: 0.1", "overhead: 0.5").replace("cpu: 3.5", "cpu: 2"))
    found = solve_file(path, "period", 10.0)
    words = [
        "--model",
        str(path),
        "--evaluator",
        "table",
        "--objective",
        "throughput",
        "--budget",
        "30",
        "-q",
        "--json",
    ]
    best = answered(capsys, [*words, "--out", str(tmp_path / "run")])["best"]
    assert best["period_ms"]["median"] == pytest.approx(found.value)
    assert len(best["plan"]["stages"]) == len(found.parts)


ZERO = STREAM.replace("2.0, gpu: 5.0", "0, gpu: 0").replace("9.0, gpu: 3.0", "0, gpu: 0")


def test_times_of_zero_are_studied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(_written(tmp_path, ZERO)), "--evaluator", "table", "--budget", "12", "-q"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    assert "whole on cpu" in capsys.readouterr().out


@pytest.mark.parametrize("time", ["1.0e-7", "1.0e+300"])
def test_times_beyond_those_of_a_study_are_refused_there(tmp_path: Path, time: str) -> None:
    path = _written(tmp_path, STREAM.replace("cpu: 2.0", f"cpu: {time}"))
    read_table(path)
    with fails(UsageError) as caught:
        TableEvaluator().described(path)
    assert str(path) in str(caught.value)


def test_what_a_table_does_not_tell_is_no_objective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(_written(tmp_path, ZERO)), "--evaluator", "table", "--budget", "4", "-q"]
    assert main([*words, "--objective", "memory", "--out", str(tmp_path / "run")]) == 2
    says(capsys.readouterr().err)


@pytest.mark.parametrize("text", [STREAM, "name: c\nmatrix: {model: vgg16}\n"])
def test_other_documents_are_no_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main([str(_written(tmp_path, text)), "-q"]) == 2
    says(capsys.readouterr().err.replace(str(tmp_path), "FOLDER"))


def test_operators_stand_in_a_csv_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = read_table(_written(tmp_path, GRAPH))
    (tmp_path / "net.csv").write_text(ROWS)
    path = _written(tmp_path, GRAPH[: GRAPH.index("    operators:")] + "    operators: net.csv\n")
    assert read_table(path) == written
    (tmp_path / "net.csv").write_text(ROWS, encoding="utf-8-sig")  # as spreadsheets write it
    assert read_table(path) == written
    for old, new in (
        ("name,gpu", "name,gpo"),
        (",cpu,reads", ",reads"),
        ("left,3,", "left,-3,"),
        ("left right", "left wrong"),
        ("right,3,3.5,stem", "right,3"),
        ("stem,1,4,-", ",1,4,-"),
        ("stem,1,4", "stem,never,never"),
        ("right,3", "left,3"),
        ("name,gpu", "name,name"),
    ):
        assert old in ROWS
        (tmp_path / "net.csv").write_text(ROWS.replace(old, new))
        assert main(["solve", str(path)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        says(error)
    (tmp_path / "net.csv").unlink()
    tells(capsys, "solve", str(path), code=2)


def test_the_examples_are_solved(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([str(PIPELINE)], [str(PIPELINE), "--objective", "latency"], [str(STUDY)]):
        document = answered(capsys, ["solve", *words])
        assert document["proven"]
        assert document["gap"] == pytest.approx(0.0, abs=1e-9)
        assert sum(len(p["nodes"]) for p in document["parts"]) in (6, 8)
    tells(capsys, "solve", str(PIPELINE))


def test_several_chains_share_the_devices(tmp_path: Path) -> None:
    text = SMALL.replace("memory_bytes: 100", "overhead: 0.2")
    text += SMALL[SMALL.index("  - name: a") :].replace("name: a", "name: b")
    period, latency = (solve_file(_written(tmp_path, text), o, 10.0) for o in ("period", "latency"))
    assert period.proven
    assert latency.proven
    assert {p.chain for p in period.parts} == {p.chain for p in latency.parts} == {"a", "b"}
    assert period.value <= latency.value


def test_a_study_on_a_table_finds_what_is_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(STUDY), "--evaluator", "table", "--max-stages", "6", "-q"]
    words += ["--out", str(tmp_path / "run")]
    result = answered(capsys, [*words, "--budget", "30"])
    best = solve_file(STUDY, None, 1.0)
    assert result["best"]["latency_ms"]["median"] == pytest.approx(best.value)
    assert result["bounds"]["proven"]
    assert result["gap"] == pytest.approx(0.0, abs=1e-9)
    assert main([*words, "--budget", "30", "--dry-run"]) == 0


def test_a_model_that_fits_nowhere_whole_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SMALL.replace("overhead: 0.1", "overhead: 0.1, memory_bytes: 100")
    words = ["--model", str(_written(tmp_path, text)), "--evaluator", "table", "--out", str(tmp_path / "run"), "-q"]
    result = answered(capsys, [*words, "--budget", "10", "--max-stages", "3"])
    assert len(result["best"]["plan"]["stages"]) > 1
    assert result["bounds"]["proven"]


def _best_ms(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> float:
    """Return the latency of the best plan of a study."""
    found: float = answered(capsys, words)["best"]["latency_ms"]["median"]
    return found


def _two(tmp_path: Path, other: str = STREAM) -> list[str]:
    """Write two tables, and return what a study of both begins with."""
    (tmp_path / "one.yaml").write_text(STREAM)
    (tmp_path / "other.yaml").write_text(other.replace("name: net", "name: other"))
    models = ",".join(str(tmp_path / name) for name in ("one.yaml", "other.yaml"))
    return ["--model", models, "--evaluator", "table", "--budget", "20", "-q", "--out", str(tmp_path / "run")]


def test_several_tables_run_at_once_and_pay_their_transfers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The cpu does both first operators and the gpu, which waits for them, both second ones: 2 + (1 + 3) + (1 + 3) ms;
    # or one of the two is whole on a processor: on the gpu it takes 8 ms, and the other one 11 ms on the cpu.
    found = _best_ms(capsys, [*_two(tmp_path), "--objective", "makespan"])
    assert found == pytest.approx(10.0)
    hot = [*_two(tmp_path), "--state", "usual:", "--state", "hot:gpu=2", "--objective", "makespan", "--json"]
    tells(capsys, *hot, code=2)  # another study than the one in this folder
    # A transfer takes as long as ever: 2 + (1 + 6) + (1 + 6) ms with the same plan; but 2 + 11 ms on the cpu where it
    # does all but one second operator.
    assert _best_ms(capsys, [*hot, "--out", str(tmp_path / "hot")]) == pytest.approx(13.0)
    assert main(["report", str(tmp_path / "hot")]) == 0


def test_a_processor_keeps_what_all_models_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = STREAM.replace("{kind: gpu}", "{kind: gpu, memory_bytes: 100}").replace(
        "gpu: 3.0}", "gpu: 3.0}, memory_bytes: 60"
    )
    words = _two(tmp_path, text)
    (tmp_path / "one.yaml").write_text(text)
    # One second operator is on the cpu: 2 + 2 + 9 ms there, or the cpu does one model whole and the gpu the other.
    assert _best_ms(capsys, [*words, "--objective", "makespan"]) == pytest.approx(11.0)


def test_a_workload_of_tables_may_be_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _two(tmp_path)
    lines = [f"  - {{model: {name}, deadline_ms: 100}}\n" for name in ("one.yaml", "other.yaml")]
    (tmp_path / "both.yaml").write_text(f"models:\n{''.join(lines)}")
    words = ["--model", str(tmp_path / "both.yaml"), "--evaluator", "table", "--budget", "4", "-q", "--json"]
    found = answered(capsys, [*words, "--objective", "misses", "--out", str(tmp_path / "run")])
    assert len(found["workload"]["clients"]) == 2


@pytest.mark.parametrize(
    "other", [STREAM.replace("{kind: cpu}", "{kind: cpu, count: 2}"), STREAM.replace("gpu: 3.0", "gpu: 4.0")]
)
def test_tables_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str) -> None:
    words = _two(tmp_path, other)
    if "count" not in other:
        (tmp_path / "other.yaml").write_text(other)  # whose network has the name of the first one's
    tells(capsys, *words, code=2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("big: 1.0", "big: -1.0"),
        ("big: 1.0, ", ""),
        ("big: 1.0", "big: fast"),
        ("little: never", "little: .nan"),
        ("2.0, little: never", "never, little: never"),
        ("takes: 0.5", "takes: -0.5"),
        ("to: little", "to: litle"),
        ("unit: ms", "unit: min"),
        ("count: 2", "count: 1.5"),
        ("kind: little", "kind: big"),
        ("memory_bytes: 100", "memory_bytes: -1"),
        ("times: {big: 1.5", "tmes: {big: 1.5"),
        ("networks:", "network:"),
    ],
)
def test_wrong_tables_are_reported_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    assert old in SMALL
    path = _written(tmp_path, SMALL.replace(old, new, 1))
    assert main(["solve", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    says(error)


def test_what_cannot_be_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tight = SMALL.replace("overhead: 0.1", "memory_bytes: 10")
    tells(capsys, "solve", str(_written(tmp_path, tight)), code=3)
    tells(capsys, "solve", str(_written(tmp_path)), "--time-limit", "0", code=2)
    tells(capsys, "solve", str(tmp_path / "none.yaml"), code=2)
    tells(capsys, "--model", str(PIPELINE), "--evaluator", "table", "--out", str(tmp_path / "r"), code=2)
    with fails(UsageError):
        TableEvaluator().platform()
    evaluator = TableEvaluator(read_table(STUDY))
    with (
        fails(UnavailableError),
        evaluator.prepare(Platform("p", (Processor("x", "cpu", {}, "x"),))),
    ):
        pass


def test_the_solver_is_an_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    assert main(["solve", str(_written(tmp_path))]) == 0  # a single chain needs none
    capsys.readouterr()
    text = SMALL + SMALL[SMALL.index("  - name: a") :].replace("name: a", "name: b")
    tells(capsys, "solve", str(_written(tmp_path, text)), "--objective", "period", code=4)


def test_stages_of_a_stream_overlap(tmp_path: Path) -> None:
    evaluator = TableEvaluator()
    graph = evaluator.graph_of(str(_written(tmp_path, STREAM)))
    with evaluator.prepare(evaluator.platform()) as session:
        apart = session.load(graph, chain_plan(graph, (1,), ["cpu", "gpu"]))
        assert apart.run(1).latency_s[0] == pytest.approx(6e-3)
        assert apart.stream(2).latency_s.tolist() == pytest.approx([4e-3, 4e-3])  # the busier one: 3 ms and a transfer
        whole = session.load(graph, chain_plan(graph, (), ["cpu"]))
        assert whole.stream(1).latency_s[0] == pytest.approx(whole.run(1).latency_s[0])


def test_costs_of_a_table_are_its_numbers(tmp_path: Path) -> None:
    table = read_table(_written(tmp_path))
    costs = table_costs(table, table.platform())
    assert costs.operator_s[:, 0].tolist() == pytest.approx([1e-3, 1e-3, 3e-3])
    assert costs.transfer_s[1, 0].tolist() == pytest.approx([0.0, 5e-4, 2.5e-4 + 5e-4])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.sampled_from(("latency", "period")), st.integers(1, 4))
def test_one_part_for_each_device_is_what_brute_force_finds(
    count: int, seed: int, objective: ChainObjective, most: int
) -> None:
    rng = np.random.default_rng(seed)
    likes = ("big", "big", "little", "little")
    processors = tuple(Processor(f"{like}{i}", "cpu", {f"{like}{i}": 1.0}, like) for i, like in enumerate(likes))
    kind = np.array([0, 0, 1, 1])
    own = rng.integers(1, 9, (2, count)) * 1e-3
    own[rng.random((2, count)) < 0.15] = np.inf
    between = rng.integers(0, 5, (count, 2, 2)) * 1e-3
    costs = ChainCosts(
        Platform("p", processors),
        np.asarray(own[kind], dtype=np.float64),
        np.asarray((rng.integers(0, 3, 2) * 1e-3)[kind], dtype=np.float64),
        np.asarray(between[:, kind][:, :, kind] * (1 - np.eye(4)), dtype=np.float64),
        rng.integers(0, 4, count).astype(np.float64),
        np.full(4, 6.0),
    )
    graph = chain_graph(count)
    best = float("inf")
    for parts in range(1, min(most, count) + 1):
        for cuts in combinations(range(1, count), parts - 1):
            for word in permutations(range(4), parts):
                plan = chain_plan(graph, cuts, [processors[i].name for i in word])
                sizes = [costs.operator_nbytes[list(s.operators)].sum() for s in plan.stages]  # type: ignore[index]
                if max(sizes) <= 6.0:
                    best = min(best, chain_cost(costs, plan, objective))
    if best == float("inf"):
        with pytest.raises(InfeasibleError):
            best_chains(costs, most, objective=objective, once=True)
        return
    (found,) = best_chains(costs, most, objective=objective, once=True)
    plan = chain_plan(graph, found.cuts, found.processors)
    assert len(set(found.processors)) == len(found.processors)
    assert found.cost_s == pytest.approx(best) == chain_cost(costs, plan, objective)


def test_eight_boards_in_a_row_are_proven_at_once(tmp_path: Path) -> None:
    layers = "".join(f"      - {{name: l{i}, times: {{big: {1 + i % 3}, little: {2 + i % 5}}}}}\n" for i in range(60))
    text = "one_part_per_device: true\ndevices: [{kind: big, count: 4}, {kind: little, count: 4}]\n"
    text += f"networks:\n  - name: net\n    operators:\n{layers}"
    for objective in ("latency", "period"):
        found = solve_file(_written(tmp_path, text), objective, 5.0)
        assert found.proven
        assert len({p.device for p in found.parts}) == len(found.parts)
    two = text + f"  - name: other\n    operators:\n{layers}"
    with fails(UsageError):
        solve_file(_written(tmp_path, two), "period", 5.0)
    with fails(UsageError):
        TableEvaluator().graph_of(str(_written(tmp_path, text)))


def test_too_many_kinds_of_boards_are_given_up_in_time(tmp_path: Path) -> None:
    kinds = [f"k{i}" for i in range(12)]
    times = ", ".join(f"{kind}: {1 + i}" for i, kind in enumerate(kinds))
    layers = "".join(f"      - {{name: l{i}, times: {{{times}}}}}\n" for i in range(40))
    devices = ", ".join(f"{{kind: {kind}, count: 4}}" for kind in kinds)
    text = f"one_part_per_device: true\ndevices: [{devices}]\nnetworks:\n  - name: net\n    operators:\n{layers}"
    for objective in ("latency", "period"):
        with fails(UnavailableError):
            solve_file(_written(tmp_path, text), objective, 0.3)


@pytest.mark.parametrize(("was", "now"), [("gpu: 3.0}", "gpu: never}"), ("gpu: 3.0}", "gpu: 0}")])
def test_several_tables_may_have_operators_of_no_time_or_never(
    was: str, now: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = STREAM.replace(was, now)
    assert text != STREAM
    words = _two(tmp_path, text)
    assert _best_ms(capsys, [*words, "--objective", "makespan"]) > 0.0
