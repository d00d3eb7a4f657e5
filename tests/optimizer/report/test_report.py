"""Reports: the numbers are those of the run folder, and the page needs nothing but itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.schedule import Event, Timeline
from optimizer.cli import main
from optimizer.model.baselines import glossary
from optimizer.report.data import STREAMED, Bar, Study, bars, best_by_stages, points, read_study, spreads
from optimizer.report.document import Column, Document, Figure, Section, Table, Text, shown
from optimizer.report.markdown import render as render_markdown
from optimizer.report.page import render as render_page
from optimizer.report.plots import NARROW, by_stages, front
from optimizer.report.study import _answer, _history, _outputs, _quiet, _ranking, study_document
from optimizer.report.svg import Scale, standalone
from optimizer.report.viewers import node_data, trace
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Share, Stage
from tests.support.pages import Page
from tests.support.sentences import says
from tests.support.short_studies import go
from tests.support.timelines import one_at_a_time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.usefixtures("few_steps")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, squeezenet: Graph) -> Path:
    """The run folder of a study with a synthetic evaluator."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    arguments = ["--model", "squeezenet1_1", "--evaluator", "synthetic", "--budget", "40", "--sampler", "random"]
    assert main([*arguments, "--max-stages", "3", "--out", str(folder), "-q", "--json"]) == 0
    return folder


@pytest.fixture(scope="module")
def study(run: Path) -> Study:
    return read_study(run)


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    assert main(["report", str(run)]) == 0
    return (run / "report.html").read_text()


def changed(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def test_points_are_the_plans_that_were_measured(study: Study) -> None:
    found = points(study)
    assert len(found) == len({t.plan.digest for t in study.trials}) == len(study.trials)
    assert [p.number for p in found] == sorted(p.number for p in found)
    assert {p.family for p in found} == {"baseline", "search"}  # "model" is what auto begins with
    assert sum(p.family == "baseline" for p in found) == len(study.plans)
    for before, after in pairwise(found):
        assert after.best_s <= before.best_s
    assert min(p.latency_s for p in found if not p.raced) == found[-1].best_s
    assert best_by_stages(found) == {
        k: min(p.latency_s for p in found if p.stages == k) for k in sorted({p.stages for p in found})
    }


def test_the_law_predicts_itself(study: Study) -> None:
    known = [p for p in points(study) if p.predicted_s and not p.raced]
    assert len(known) > 10
    errors = sorted(abs((p.predicted_s or 0.0) / p.latency_s - 1.0) for p in known)
    assert errors[len(errors) // 2] < 0.05


def test_timelines_lie_side_by_side(study: Study) -> None:
    found = bars(study)
    assert [b.source for b in found[:2]] == ["measured", "predicted"]
    assert found[0].plan == found[1].plan
    assert {b.name for b in found} >= {study.baseline}
    for bar in found:
        assert {e.stage for e in bar.timeline.events} == set(range(len(bar.plan.stages)))


def test_spreads_are_the_samples_of_the_result(study: Study) -> None:
    found = {s.name: s.samples for s in spreads(study)}
    for name, entry in study.result["baselines"].items():
        assert found[name].median * 1e3 == pytest.approx(entry["latency_ms"]["median"])


def test_the_page_stands_alone_and_can_be_read_by_all(page: str) -> None:
    read = Page(page)
    assert not read.outer
    assert "url(" not in page
    assert "<script" not in page
    assert read.inner <= read.ids
    assert read.headings[0] == "h1"
    assert read.headings.count("h1") == 1
    assert "prefers-color-scheme:dark" in page
    assert len(page.encode()) < 5_000_000


def test_the_answer_comes_first(page: str, study: Study, run: Path) -> None:
    markdown = (run / "report.md").read_text()
    best = study.result["best"]["latency_ms"]["median"]
    for text in (page, markdown):
        assert f"{best:.4g} ms" in text
        assert text.index("Answer") < text.index("Baselines") < text.index("Timeline") < text.index("Environment")
    named = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", markdown)
    assert len(named) >= 6
    assert all((run / name).is_file() for name in named)


def test_the_answer_says_that_a_deadline_is_missed(study: Study) -> None:
    best_ms = study.result["best"]["latency_ms"]["median"]
    late = replace(study, config={**study.config, "deadline": best_ms / 2.0})
    says(re.sub(r"[\d.]+ ms", "N ms", str(next(_answer(late)).text).partition(":")[0]))  # type: ignore[union-attr]


def test_plots_are_files_of_their_own(page: str, run: Path) -> None:
    plots = sorted((run / "report").glob("*.svg"))
    assert {p.stem for p in plots} == {"graph", "history", "predicted", "samples", "stages", "timeline"}
    for plot in plots:
        text = plot.read_text()
        ET.fromstring(text)
        if plot.stem != "graph":
            assert "var(" not in text
    pytest.importorskip("resvg_py", reason="PNG files need the extra 'report'")
    assert (run / "report" / "history.png").read_bytes().startswith(b"\x89PNG")


def keeps_the_trace_event_format(text: str) -> list[dict[str, Any]]:
    """Check the rules of the Trace Event Format, as Perfetto reads it; return the spans."""

    def no_number(name: str) -> Any:
        raise AssertionError(name)

    document = json.loads(text, parse_constant=no_number)
    events = document["traceEvents"]
    assert document["displayTimeUnit"] in {"ms", "ns"}
    assert all(isinstance(e[key], int) for e in events for key in ("pid", "tid"))
    assert {e["ph"] for e in events} <= {"M", "X"}
    processes = [e["pid"] for e in events if e["name"] == "process_name"]
    threads = [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"]
    assert len(processes) == len(set(processes))
    assert len(threads) == len(set(threads))
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == set(processes)
    assert {(e["pid"], e["tid"]) for e in spans} == set(threads)
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["name"] for e in spans)
    for thread in threads:  # spans of a thread nest, or follow each other
        own = sorted((round(e["ts"] * 1e3), -round(e["dur"] * 1e3)) for e in spans if (e["pid"], e["tid"]) == thread)
        for (one_ns, minus_ns), (other_ns, minus_other_ns) in pairwise(own):
            assert other_ns >= one_ns - minus_ns or other_ns - minus_other_ns <= one_ns - minus_ns
    return spans


def test_traces_open_in_perfetto(page: str, run: Path, study: Study) -> None:
    spans = keeps_the_trace_event_format((run / "viewers" / "trace.json").read_text())
    assert len(spans) == sum(len(b.timeline.events) for b in bars(study))


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1e3), st.floats(0, 1e3)), min_size=1, max_size=6),
       st.floats(0, 1e6))  # fmt: skip
def test_any_timeline_keeps_the_rules_of_traces(steps: list[tuple[int, float, float]], begin_s: float) -> None:
    events, now_s = [], begin_s
    for stage, (processor, pause_s, took_s) in enumerate(steps):
        events.append(Event(stage, f"p{processor}", now_s + pause_s, now_s + pause_s + took_s))
        now_s = events[-1].end_s
    plan = Plan("0" * 64, tuple(Stage((i,), e.processor) for i, e in enumerate(events)))
    bar = Bar("drawn", "predicted", plan, Timeline(tuple(events)))
    spans = keeps_the_trace_event_format(json.dumps(trace([bar, bar], ["p0", "p1", "p2"])))
    assert len(spans) == 2 * len(events)


def test_a_study_of_the_throughput_draws_inferences_that_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("optimizer.model.bounds._SOLVE_S", "optimizer.samplers.objective._LOOK_S"):
        monkeypatch.setattr(limit, 250.0)  # a slow machine finds the optimum, too
    words = ["--model", "squeezenet1_1@0.25/64", "--evaluator", "cost-model", "--platform", "pixel4", "-q"]
    words += ["--processors", "gpu,1large", "--objective", "throughput", "--budget", "20"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    study = read_study(tmp_path / "run")
    found = next(bar for bar in bars(study) if len(bar.plan.stages) > 1)
    assert set(found.inferences) == set(range(STREAMED))
    assert one_at_a_time(found.timeline)
    ends = [
        max(e.end_s for e, n in zip(found.timeline.events, found.inferences, strict=True) if n == i) for i in (2, 3)
    ]
    period_s = study.result["best"]["latency_ms"]["median"] / 1e3
    assert ends[1] - ends[0] <= period_s * 1.001
    assert found.timeline.makespan_s < STREAMED * max(ends[0], period_s)


def test_a_plan_is_drawn_once_under_its_name_in_the_table(tmp_path: Path) -> None:
    words = ["--evaluator", "synthetic", "--budget", "6", "--max-stages", "1", "--out", str(tmp_path / "run"), "-q"]
    assert main(["squeezenet1_1", *words]) == 0
    study = read_study(tmp_path / "run")
    assert study.verdict is not None
    assert study.verdict.challenger in study.plans.values()
    assert {spread.name for spread in spreads(study)} == set(study.plans)
    drawn = [bar.name for bar in bars(study)]
    assert study.plans[drawn[0]] == study.best
    assert set(drawn) <= set(study.plans)


def test_model_explorer_gets_every_operator(page: str, run: Path, squeezenet: Graph) -> None:
    data = json.loads((run / "viewers" / "partition.json").read_text())
    assert len(data["results"]) == len(squeezenet.operators)
    of_stage, of_operator = r"measured, [\d.e-]+ ms predicted", "profiled"
    if read_study(run).predicted:
        of_stage = of_operator = "predicted"
    pattern = rf".+ · stage \d+ · [\d.e-]+ ms {of_stage} · operator [\d.e-]+ ms {of_operator}"
    assert all(re.fullmatch(pattern, v["value"]) for v in data["results"].values())
    layers = [json.loads(file.read_text()) for file in (run / "viewers").glob("partition_*.json")]
    assert len(layers) == len(read_study(run).platform.processors)
    for layer in layers:
        assert all(entry["value"] >= 0.0 for entry in layer["results"].values())
        limits = [step["value"] for step in layer["thresholds"]]
        assert limits == sorted(limits)
        assert max(entry["value"] for entry in layer["results"].values()) <= limits[-1]


def test_model_explorer_gets_both_sides_of_a_split(study: Study, squeezenet: Graph) -> None:
    whole, rest = tuple(range(1, len(squeezenet.operators))), study.best.stages[0].processor
    sides = [Stage((0,), f"cpu{i}", Share("height", 5 * i, 5 * i + 5)) for i in range(2)]
    plan = replace(study.best, stages=(*sides, Stage(whole, rest)))
    split = replace(study, result={**study.result, "best": {"plan": plan.to_json(), "stage_ms": None}})
    values = [v["value"] for v in node_data(split, squeezenet)["partition"]["results"].values()]
    assert re.findall(r"(\w+) · stage", values[0]) == ["cpu0", "cpu1"]
    assert values[1].count("stage") == 1


def test_names_on_a_front_leave_the_marks_free() -> None:
    kept = [(5.0, 160.0), (17.0, 35.0), (26.0, 26.0)]
    drawn = front(kept, [], ["x", "y"], 1, ["a", "b", "whole on 1large1med"], width=NARROW)
    name, knee = (re.search(p, drawn) for p in (r'y="([\d.]+)"[^>]*>whole on', r'class="k1" d="M[\d.]+ ([\d.]+)h14'))
    assert name is not None
    assert knee is not None
    assert not -2.0 < float(name[1]) - float(knee[1]) < 24.0  # of a line of text above, or a mark below


@pytest.mark.parametrize("far", [0, 1, 3])
def test_a_front_says_how_many_plans_lie_outside_its_scale(far: int) -> None:
    kept = [(1.0, 5.0), (1.2, 4.0)]
    every = [*((*point, "auto") for point in kept), *((90.0 + i, 4.0, "every layer") for i in range(far))]
    picture = ET.fromstring(standalone(front(kept, every, ["latency, ms", "memory, MB"], 0, ["a", "b"])))
    says("\n".join(text for text in picture.itertext() if "outside" in text))
    assert sum(text.startswith("every layer: ") for text in picture.itertext()) == far


def test_names_from_files_cannot_become_markup() -> None:
    evil = '<img src=x onerror="alert(1)"> | `x` [a](b)'
    table = Table(evil, (Column(evil), Column("n", ".1f")), ((evil, 1.0), (evil, None)))
    document = Document(evil, evil, (Section("a", evil, (Text(evil), table)),), {})
    assert "<img" not in render_page(document)
    text = render_markdown(document, "plots")
    assert "<img src" not in text.replace("\\<", "")
    assert "[a](b)" not in text


def test_tables_have_their_captions_in_markdown() -> None:
    table = Table("Speeds", (Column("n"),), (("1",),))
    document = Document("t", "s", (Section("a", "Plans", (table, replace(table, caption="Plans"))),), {})
    headings = [line for line in render_markdown(document, "plots").splitlines() if line.startswith("#")]
    assert headings == ["# t", "## Plans", "### Speeds"]


def test_a_model_that_is_gone_leaves_the_rest(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    shutil.copytree(run, other)
    text = (other / "config.yaml").read_text().replace("squeezenet1_1", "gone.tflite")
    (other / "config.yaml").write_text(text)
    document = study_document(read_study(other))
    assert "gone.tflite" in render_page(document)
    assert {"answer", "baselines", "history"} <= {s.name for s in document.sections}


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: (p / "manifest.json").unlink(),
        lambda p: changed(p / "result.json", "baselines", {"whole": {}}),
        lambda p: (p / "result.json").unlink(),
        lambda p: (p / "result.json").write_text("{"),
        lambda p: (p / "result.json").write_text('{"schema_version": 99}'),
        lambda p: (p / "result.json").write_text('{"schema_version": 1}'),
        lambda p: (p / "manifest.json").write_text('{"schema_version": 99}'),
        lambda p: (p / "manifest.json").write_text("["),
        lambda p: (p / "result.json").write_text('{"schema_version": true}'),
        shutil.rmtree,
    ],
)
def test_what_is_no_finished_run_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: object
) -> None:
    other = tmp_path / "run"
    shutil.copytree(run, other)
    assert callable(damage)
    damage(other)
    assert main(["report", str(other)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    says(err)


@pytest.mark.parametrize("command", ["report", "explain", "export"])
def test_a_damaged_result_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    other = tmp_path / "run"
    shutil.copytree(run, other)
    changed(other / "result.json", "best", {"plan": 17})
    assert main([command, str(other)]) == 2
    says(capsys.readouterr().err)


def test_a_run_is_executed_by_its_folder_or_its_plan(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["execute", str(run / "config.yaml")]) == 2
    says(capsys.readouterr().err)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_lie_within_the_scale(low: float, span: float) -> None:
    scale = Scale(low, low + span, 0.0, 100.0)
    ticks = scale.ticks()
    assert ticks == sorted(ticks)
    assert len(ticks) <= 8
    assert all(-1e-3 <= scale(t) <= 100.001 for t in ticks) or span < 1e-6 * abs(low)


def test_standalone_pictures_keep_their_text() -> None:
    assert standalone("<svg><title>a</title><desc>b</desc><text>c</text></svg>").count("<text>c</text>") == 1


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: the page is not looked at in a browser")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (400, False), (400, True)])
def test_a_browser_shows_it_without_a_complaint(page: str, run: Path, tmp_path: Path, width: int, dark: bool) -> None:
    picture = tmp_path / "page.png"
    user = tmp_path / "user"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
               "--disable-background-networking", "--enable-logging=stderr", "--v=0", f"--user-data-dir={user}",
               f"--screenshot={picture}", f"--window-size={width},2400"]  # fmt: skip
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [*command, (run / "report.html").as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "CONSOLE" not in done.stderr
    assert picture.stat().st_size > 20_000


def test_the_study_opens_in_the_dashboard_of_optuna(study: Study) -> None:
    from optimizer.tools.dashboard import export

    made = export(study)
    measured = [t for t in study.trials if t.params and t.measurement]
    assert len(made.get_trials(states=None)) >= len(measured)
    assert made.best_value == pytest.approx(min(t.median_s for t in measured) * 1e3)


@pytest.mark.parametrize(
    "more",
    [{"allow": "cuts,branches,splits"}, {"model": "squeezenet1_1@0.25/64*2"}, {"allow": "ranks", "max_error": 1.0}],
)
def test_a_study_of_any_space_opens_with_its_own_parameters(tmp_path: Path, more: dict[str, Any]) -> None:
    from optimizer.tools.dashboard import export

    of: dict[str, Any] = {
        "model": "squeezenet1_1@0.25/64",
        "evaluator": "cost-model",
        "platform": "pixel4",
        "sampler": "random",
    }
    go(tmp_path / "run", **{**of, "processors": ("1large", "gpu"), "budget": 12} | more)
    made = export(read_study(tmp_path / "run"))
    assert len(made.trials) >= 12
    output = optuna.importance.get_param_importances(made)
    assert any(re.match(r"cut_|on_|jobs_|ranks_", name) for name in output)


def test_its_note_is_the_report_with_plots(study: Study, tmp_path: Path) -> None:
    dashboard = pytest.importorskip("optuna_dashboard", reason="the extra 'dashboard' is not installed")
    from optimizer.tools.dashboard import annotate, export

    made = export(study)
    annotate(made, study, tmp_path)
    note = dashboard._note.get_note(made)
    says(note)
    assert "](plots/" not in note
    for figure in study_document(study).figures:
        assert (tmp_path / f"{figure.name}.svg").is_file()
    shown = re.findall(r"\]\(/artifacts/\d+/([0-9a-f-]+)\)", note)
    assert len(shown) == len(study_document(study).figures)
    assert all((tmp_path / name).is_file() for name in shown)


OUTPUT = {"name": "y", "largest": 2e-3, "mean": 1e-4}


@pytest.mark.parametrize(
    "best",
    [
        {"identical": True, "max_rel_error": 0.0, "tolerance": 0.0},
        {"identical": False, "max_rel_error": 2e-3, "outputs": [OUTPUT], "tolerance": 1e-2},
        {"identical": None},  # of an earlier version
    ],
)
def test_how_far_the_outputs_are_is_reported(best: dict[str, object]) -> None:
    says("".join(str(block) for block in _outputs(best)))


def test_the_command_of_a_report_begins_a_study_of_its_own(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    shutil.copytree(run, tmp_path / "run")
    more = ["--study=one", "--storage", "sqlite:///s.db", "--heartbeat", "5"]
    changed(tmp_path / "run" / "manifest.json", "command", [*manifest["command"], *more])
    assert main(["report", str(tmp_path / "run")]) == 0
    text = (tmp_path / "run" / "report.md").read_text()
    command = next(line for line in text[text.index("## How to repeat it") :].splitlines() if "--model" in line)
    given = "--model squeezenet1_1 --evaluator synthetic --budget 40 --sampler random --max-stages 3 -q --json"
    assert command.endswith(f"optimize {given}")
    monkeypatch.chdir(tmp_path)
    assert main([*given.split(), "--dry-run"]) == 0


def test_figure_and_table_of_the_baselines_have_one_interval(study: Study) -> None:
    shown = {spread.name: spread.ci95_s for spread in spreads(study)}
    for name, entry in study.result["baselines"].items():
        if entry["latency_ms"] is not None:
            assert shown[name] == pytest.approx([end / 1e3 for end in entry["latency_ms"]["ci95"]])


def test_numbers_keep_their_digits_and_have_one_minus() -> None:
    assert [shown(x, ".4g") for x in (6.87, 12.3, 0.0, 12345.0, 1e-7)] == ["6.870", "12.30", "0", "1.234e+04", "1e−07"]
    assert [shown(x, "+.4g") for x in (-0.2119, 4.1, 1234.0)] == ["−0.2119", "+4.100", "+1234"]
    assert shown(-0.041, "+.1%") == "−4.1 %"


def test_pages_have_superscripts_and_sections_have_names_of_their_own(page: str) -> None:
    power = Document("a", "about 10^17 plans", (Section("b", "b", (Text("10^3"),)),), {})
    assert render_page(power).count("<sup>") == 2
    headings = re.findall(r"<h[23][^>]*>([^<]*)<", page)
    assert len(headings) == len(set(headings))


def test_narrow_screens_have_pictures_of_their_own(study: Study) -> None:
    for figure in study_document(study).figures:
        assert bool(figure.narrow) != figure.wide
        if figure.narrow:
            places = [float(x) for x in re.findall(r'<(?:text|circle)[^>]* c?x="([-0-9.]+)"', figure.narrow)]
            assert all(0 <= x <= NARROW for x in places)


def test_lines_join_neighbouring_numbers_of_stages_only(study: Study) -> None:
    found = [replace(points(study)[0], stages=k) for k in (1, 2, 5, 9)]
    drawn = by_stages(found, dict.fromkeys((1, 2, 5, 9), found[0].latency_s))
    assert drawn.count("<title>best") == 1
    says(drawn)


def test_every_baseline_of_a_page_has_its_sentence(page: str, study: Study) -> None:
    names = glossary(study.result["baselines"])
    assert names
    assert all(escape(text) in page for text in names.values())


@pytest.mark.parametrize(
    "pairs",
    [
        [(1.0, 1.0)] * 3,
        [(1.0, 1.0 + i) for i in range(8)],
        [(1.0 + i, 1.0 + i) for i in range(8)],
        [(1.0 + i, 9.0 - i) for i in range(8)],
        [(1.0 + i / 1e3, 1.0 + i) for i in range(8)],
    ],
    ids=["too few", "one prediction", "same order", "wrong order", "alike"],
)
def test_how_well_the_model_ranks_plans_is_reported(pairs: list[tuple[float, float]]) -> None:
    says(_ranking(pairs))


def test_measurements_below_the_predicted_optimum_are_no_riddle(study: Study) -> None:
    found = points(study)
    bound_ms = 1.25e3 * min(p.latency_s for p in found)
    other = replace(study, result={**study.result, "model_bound_ms": bound_ms, "bounds": {"proven": True}})
    (figure,) = _history(other, found)
    assert isinstance(figure, Figure)
    says(figure.caption)
    says(figure.svg)


def test_loads_of_the_machine_end_with_what_they_mean(study: Study) -> None:
    assert not list(_quiet(study))
    loaded = replace(study, result={**study.result, "disturbances": ["during the final, other processes held 5 %"]})
    (close,) = _quiet(loaded)
    (alone,) = _quiet(replace(loaded, verdict=None))
    assert isinstance(close, Text)
    assert isinstance(alone, Text)
    says(f"{close.text}\n{alone.text}")
