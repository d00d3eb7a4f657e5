"""Names from files are shown, and neither command a terminal nor become part of a page, a picture or a formula."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from optimizer.campaign.table import to_csv
from optimizer.cli import main
from optimizer.report.console import make_console
from optimizer.study.log import encode, header, read_log
from search_spaces.core.errors import UsageError
from tests.faults.fuzz_files import MODEL, NAME
from tests.support.pages import Page

COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202e]")


def renamed(value: Any, old: str) -> Any:
    """Return plain values in which a name is hostile."""
    if isinstance(value, dict):
        return {renamed(k, old): renamed(v, old) for k, v in value.items()}
    if isinstance(value, list):
        return [renamed(v, old) for v in value]
    return value.replace(old, NAME) if isinstance(value, str) else value


@pytest.mark.parametrize("old", ["whole on cpu", "squeezenet", "xavier", "cost-model"])
def test_a_name_is_only_shown(old: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    words = ["--model", MODEL, "--evaluator", "cost-model", "--platform", "xavier", "--max-stages", "2", "-q"]
    assert main([*words, "--budget", "4", "--out", str(run)]) == 0
    for name in ("result.json", "manifest.json"):
        document = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps(renamed(document, old)))
    records = read_log(run / "trials.jsonl").records
    lines = [encode(r.n, r.kind, renamed(dict(r.data), old)) for r in records]
    (run / "trials.jsonl").write_bytes(header() + b"".join(lines))
    capfd.readouterr()
    codes = [
        main(["report", str(run), "--out", str(out)]),
        main(["explain", str(run)]),
        main(["export", str(run), "--out", str(tmp_path / "exported")]),
        main([*words, "--budget", "5", "--out", str(run)]),
        main([*words, "--budget", "5", "--out", str(run), "-v"]),
    ]
    assert set(codes) <= {0, 2, 4}
    shown = capfd.readouterr()
    assert not COMMANDS.search((shown.out + shown.err).replace("\n", ""))
    for path in out.rglob("*"):
        if path.suffix in {".html", ".svg", ".md", ".csv", ".txt"}:
            check(path)


def check(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not COMMANDS.search(text.replace("\n", "")), path
    if path.suffix == ".html":
        assert not any("alert(1)" in script and "<script>" in script for script in Page(text).scripts)
    elif path.suffix == ".svg":
        root = ET.fromstring(text)
        assert not [each for each in root.iter() if each.tag.endswith("script")]
    elif path.suffix == ".md":
        assert not re.search(
            r"(?<!\\)<script", re.sub(r"^(`{3,})sh\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
        )


def test_cells_are_no_formulas() -> None:
    texts = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "a\x1b[31m", "plain", "\r=2"]
    rows = list(csv.DictReader(io.StringIO(to_csv([{"name": text, "x": -1.5} for text in texts]))))
    assert not any(row["name"].startswith(("=", "+", "-", "@", "\t", "\r")) for row in rows)
    assert {row["x"] for row in rows} == {"-1.5"}
    assert rows[6]["name"] == "plain"


def test_errors_and_consoles_show_no_commands(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert not COMMANDS.search(str(UsageError(f"no {NAME}", NAME)))
    make_console().print(f"a {NAME}", markup=False)
    assert main(["--model", str(tmp_path / f"{NAME.replace('/', '')}.tflite"), "--dry-run"]) == 2
    shown = capfd.readouterr()
    assert "alert" in shown.out
    assert not COMMANDS.search((shown.out + shown.err).replace("\n", ""))
