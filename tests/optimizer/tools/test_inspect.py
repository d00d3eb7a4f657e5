"""Looking at a model: the numbers, the layout of the picture, and the text, SVG and HTML made of them."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from optimizer import cli
from optimizer.report.graph import CALLER, lay_out, render_svg, write_picture
from optimizer.report.graph_page import render_page
from optimizer.tools.inspect import human_count, inspect_graph, moved_bytes, printable, render, to_json
from search_spaces.core.errors import UsageError
from search_spaces.core.graph import Graph, Operator
from search_spaces.core.intensity import operator_costs
from search_spaces.models import load
from search_spaces.spaces.branches import branch_groups, walk
from search_spaces.spaces.cuts import cut_points
from tests.support.pages import Page
from tests.support.sentences import fails, says
from tests.support.strategies import chain_graph, graphs, tensor, vgg16_graph

_SVG = "{http://www.w3.org/2000/svg}"


@st.composite
def named_graphs(draw: st.DrawFn) -> Graph:
    """Graphs whose names are any text, as a file may hold it."""
    graph = draw(graphs(max_operators=12))
    names = st.text(max_size=30)
    tensors = tuple(replace(t, name=draw(names)) for t in graph.tensors)
    operators = tuple(replace(o, kind=draw(st.one_of(st.just(o.kind), names))) for o in graph.operators)
    return Graph(draw(names), tensors, operators, graph.inputs, graph.outputs)


@given(graphs(max_operators=12))
def test_kinds_add_up_to_the_whole(graph: Graph) -> None:
    found = inspect_graph(graph)
    costs = operator_costs(graph)
    assert sum(k.count for k in found.kinds) == len(graph.operators)
    assert sum(k.cost.macs for k in found.kinds) == found.total.macs == sum(c.macs for c in costs)
    assert sum(moved_bytes(k.cost) for k in found.kinds) == moved_bytes(found.total)
    assert found.total.parameters <= sum(k.cost.parameters for k in found.kinds)  # kinds may share a weight
    assert found.cuts == cut_points(graph)
    assert [cut.nbytes for cut in found.cheapest(3)] == sorted(cut.nbytes for cut in found.cuts)[:3]
    assert [cut.nbytes for cut in found.largest(3)] == sorted((cut.nbytes for cut in found.cuts), reverse=True)[:3]


@given(named_graphs())
def test_the_document_is_plain_json_and_whole(graph: Graph) -> None:
    found = inspect_graph(graph)
    document = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert document["schema_version"] == 1
    assert document["totals"]["operators"] == len(document["operators"]) == len(graph.operators)
    assert [c["position"] for c in document["cut_points"]] == list(range(1, len(graph.operators)))
    for cut in document["cut_points"]:
        assert cut["nbytes"] == sum(t["nbytes"] for t in cut["tensors"])
    listed = document["branch_groups"]
    assert len(listed) == sum(1 for _ in walk(found.groups))
    for index, group in enumerate(listed):
        assert group["within"] is None or group["within"] < index
        assert len(group["branches"]) > 1


@given(graphs(max_operators=12))
def test_what_crosses_a_row_border_in_the_picture_is_what_crosses_the_cut(graph: Graph) -> None:
    layout = lay_out(graph, branch_groups(graph))
    for cut in cut_points(graph):
        drawn = {wire.origin for wire in layout.wires if wire.origin < cut.position <= wire.target}
        assert drawn == {graph.producer.get(t, CALLER) for t in cut.tensors}


@given(graphs(max_operators=12))
def test_wires_run_past_operators_and_apart_from_each_other(graph: Graph) -> None:
    layout = lay_out(graph, branch_groups(graph))
    taken: dict[tuple[int, int, int], int] = {}  # column, track, gap below a row → origin
    for wire in layout.wires:
        for row in range(wire.origin + 1, wire.target):
            assert wire.track > 0 or layout.columns[row] != wire.column
        for gap in range(wire.origin, wire.target):
            assert taken.setdefault((wire.column, wire.track, gap), wire.origin) == wire.origin
        assert wire.track <= layout.tracks[wire.column]


@given(graphs(max_operators=12))
def test_branches_stand_side_by_side(graph: Graph) -> None:
    layout = lay_out(graph, branch_groups(graph))
    for box in layout.boxes:
        sides = [{layout.columns[o] for o in branch.members()} for branch in box.group.branches]
        assert sum(map(len, sides)) == len(set().union(*sides))
        assert all(box.columns[0] <= column < box.columns[1] for side in sides for column in side)
        assert all(box.rows[0] <= o < box.rows[1] for o in box.group.members())


@settings(max_examples=40)
@given(named_graphs())
def test_the_picture_is_well_formed_and_needs_nothing_else(graph: Graph) -> None:
    found = inspect_graph(graph)
    text = render_svg(found)
    text.encode()
    root = ET.fromstring(text)
    ids = {element.get("id") for element in root.iter(f"{_SVG}g")} - {None}
    count = len(graph.operators)
    assert ids == {f"op-{i}" for i in range(count)} | {f"cut-{p}" for p in range(1, count)}
    assert not re.search(r"url\(|@import|href|<script|<image|<foreignObject", text)
    assert {element.tag for element in root.iter()} <= {
        f"{_SVG}{tag}" for tag in ("svg", "title", "desc", "style", "rect", "text", "g", "line", "path")
    }
    assert float(root.get("width", "0")) < 10_000


@settings(max_examples=40)
@given(named_graphs())
def test_the_page_is_well_formed_and_needs_nothing_else(graph: Graph) -> None:
    page = Page(render_page(inspect_graph(graph)))
    assert not page.outer
    assert page.inner <= page.ids
    assert len(page.scripts) == 1
    assert "default-src 'none'" in page.policy


@settings(max_examples=60)
@given(named_graphs(), st.integers(20, 200))
def test_the_text_shows_any_model_and_no_control_characters(graph: Graph, width: int) -> None:
    shown = text_of(graph, width)
    assert all(line.isprintable() for line in shown.split("\n"))


@given(st.text(), st.integers(3, 30))
def test_printable_keeps_to_its_limit(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert shown.isprintable()
    assert len(shown) == min(len(text), limit)


def text_of(graph: Graph, width: int = 110) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(render(inspect_graph(graph), width))
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_vgg16_in_words() -> None:
    says(" ".join(text_of(vgg16_graph()).split()))


def test_unknown_operators_and_groups_are_named() -> None:
    parts = (Operator("SVDF", (0,), (2,)), Operator("MyOwn", (2,), (3,)))
    operators = (Operator("GROUP", (0,), (3,), parts=parts), Operator("RELU", (3,), (1,)))
    graph = Graph("kept together", tuple(tensor(4) for _ in range(4)), operators, (0,), (1,))
    says(text_of(graph))
    document = to_json(inspect_graph(graph))
    assert document["unknown_kinds"] == {"MyOwn": 1}
    assert document["operators"][0]["parts"] == ["SVDF", "MyOwn"]
    says(render_svg(inspect_graph(graph)))


def test_long_models_have_a_few_lines_of_marks() -> None:
    shown = text_of(chain_graph(5000))
    says(shown)
    assert len(shown.splitlines()) < 50


def test_one_operator_has_no_cut() -> None:
    graph = chain_graph(1)
    assert "cut point" not in text_of(graph)
    assert inspect_graph(graph).cuts == ()
    ET.fromstring(render_svg(inspect_graph(graph)))
    render_page(inspect_graph(graph))


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0 k"), (999_949, "999.9 k"), (999_950, "1.0 M"), (15_470_264_320, "15.5 G")],
)
def test_human_count(number: int, text: str) -> None:
    assert human_count(number) == text


@pytest.mark.parametrize("name", ["graph.svg", "graph.HTML"])
def test_a_picture_replaces_the_file_that_was_there(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("before")
    write_picture(inspect_graph(vgg16_graph()), path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith(("<?xml", "<!doctype html>"))
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_picture_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    for name in ("graph.png", "graph", "folder.svg", "missing/graph.svg"):
        with fails(UsageError):
            write_picture(inspect_graph(chain_graph(2)), tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["folder.svg"]


def test_the_command_prints_one_document(squeezenet: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert squeezenet.source is not None
    picture = tmp_path / "graph.svg"
    assert cli.main(["inspect", str(squeezenet.source.path), "--json", "--picture", str(picture)]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["file_nbytes"] == squeezenet.source.nbytes
    assert document["graph_digest"] == squeezenet.digest
    assert [len(g["branches"]) for g in document["branch_groups"]] == [2] * 8
    says(printed.err)
    assert len(ET.parse(picture).findall(f".//{_SVG}g[@id]")) == 39 + 38


def test_the_command_prints_tables(squeezenet: Graph, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "squeezenet1_1"]) == 0
    printed = capsys.readouterr()
    says(printed.out)
    assert not printed.err


def test_the_command_refuses_a_picture_before_it_reads_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "no such model", "--picture", "graph.gif"]) == 2
    printed = capsys.readouterr()
    says(printed.err)
    assert not printed.out


def test_a_model_is_written_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "small.tflite"
    assert cli.main(["inspect", "squeezenet1_1@0.25/64", "--out", str(out)]) == 0
    says(capsys.readouterr().err)
    assert load(str(out)).digest == load("squeezenet1_1@0.25/64").digest
    os.mkfifo(tmp_path / "pipe")
    for place in (str(tmp_path), str(tmp_path / "pipe"), ""):
        assert cli.main(["inspect", "squeezenet1_1@0.25/64", "--out", place]) == 2
        says(capsys.readouterr().err)
    assert (tmp_path / "pipe").is_fifo()
