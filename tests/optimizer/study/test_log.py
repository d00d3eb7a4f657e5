"""The log survives a cut at any byte and a flip of any bit, and says what it cannot read."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.study import log as storage
from optimizer.study.log import LogContents, TrialLog, header, read_log
from search_spaces.core.errors import OptimizeError, RunFolderError
from tests.support.sentences import fails, says
from tests.support.trial_logs import TRIALS, written

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
entries = st.dictionaries(st.text(), values, max_size=5)


@contextlib.contextmanager
def fresh() -> Iterator[Path]:
    """A new path for each example: Hypothesis does not renew pytest's ``tmp_path``."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "trials.jsonl")


def reopened(path: Path, content: bytes) -> LogContents:
    """Open a log with this content, append to it, and check that it is whole again."""
    path.write_bytes(content)
    log, contents = TrialLog.open(path)
    with log:
        added = log.append("trial", {"after": True})
    again = read_log(path)
    assert again.records == (*contents.records, added)
    assert not any(d.line for d in again.damage)
    return contents


@given(st.lists(entries, max_size=6))
@settings(deadline=None, max_examples=30)
def test_what_is_appended_is_read_back(data: list[dict[str, Any]]) -> None:
    with fresh() as path:
        log, contents = TrialLog.open(path)
        assert contents == LogContents(())
        with log:
            appended = tuple(log.append("trial", entry) for entry in data)
        assert [r.n for r in appended] == list(range(1, len(data) + 1))
        assert [r.data for r in appended] == data
        assert read_log(path) == LogContents(appended)
        assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == list(range(len(data) + 1))


def test_a_cut_at_any_byte_loses_only_what_is_behind_it(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole")
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path = tmp_path / f"{cut}" / "trials.jsonl"
        path.parent.mkdir()
        contents = reopened(path, whole[:cut])
        before = sum(1 for end in ends[1:] if end - 1 <= cut)  # whole even without its line end
        assert [r.data for r in contents.records] == TRIALS[:before]
        torn = cut not in {0, *ends}
        assert bool(contents.damage) == torn
        assert (contents.original is not None) == torn
        if contents.original is not None:
            assert contents.original.read_bytes() == whole[:cut]


def test_a_flip_of_any_bit_is_noticed_and_costs_one_record_at_most(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    whole = written(path)
    line_of = [whole[:i].count(b"\n") for i in range(len(whole))]
    for position in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            path.write_bytes(flipped)
            contents = read_log(path)
            assert contents.damage, (position, bit)
            hit = line_of[position]
            for n, data in enumerate(TRIALS, 1):
                found = [r.data for r in contents.records if r.n == n]
                assert found == [data] or (n == hit and not found), (position, bit)


@given(st.lists(entries, min_size=1, max_size=4), st.data())
@settings(deadline=None, max_examples=30)
def test_damaged_logs_mend_and_go_on(data: list[dict[str, Any]], draw: st.DataObject) -> None:
    with fresh() as path:
        content = bytearray(written(path, data))
        first = draw.draw(st.integers(0, len(content) - 1))
        last = draw.draw(st.integers(first, min(len(content), first + 40)))
        rubbish = draw.draw(st.binary(max_size=40))
        whole = bytes(content)
        content[first:last] = rubbish
        contents = reopened(path, bytes(content))
        assert all(r.data == data[r.n - 1] for r in contents.records)
        if not contents.damage:  # nothing changed, or the last lines are gone as if they had never been written
            assert whole.startswith(content)
            assert bytes(content[-1:]) in {b"", b"\n"}


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=30)
def test_any_bytes_are_survived(content: bytes) -> None:
    with fresh() as path:
        contents = reopened(path, content)
        assert contents.records == ()
        assert bool(contents.damage) == bool(content)


def test_lost_doubled_and_swapped_lines_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    first, *lines = written(path).splitlines(keepends=True)
    path.write_bytes(b"".join([first, lines[0], lines[2]]))
    says("\n".join(map(str, read_log(path).damage)))
    path.write_bytes(b"".join([first, lines[2]]))
    says("\n".join(map(str, read_log(path).damage)))
    path.write_bytes(b"".join([first, lines[0], lines[2], lines[1], lines[1]]))
    contents = read_log(path)
    assert [r.n for r in contents.records] == [1, 2, 3]
    says("\n".join(map(str, contents.damage)))
    path.write_bytes(b"".join(lines))
    says("\n".join(map(str, read_log(path).damage)))
    path.write_bytes(b"".join([first, *lines]).replace(b"\n", b"\r\n"))
    contents = reopened(path, path.read_bytes())
    assert [r.data for r in contents.records] == TRIALS
    assert len(contents.damage) == 1


def test_a_record_inside_a_record_is_never_taken_for_one(tmp_path: Path) -> None:
    inner = {"n": 9, "kind": "trial", "data": {}, "sum": storage._checksum(b'{"n":9,"kind":"trial","data":{}').decode()}
    path = tmp_path / "trials.jsonl"
    content = bytearray(written(path, [{"inner": inner, "text": json.dumps(inner, separators=(",", ":"))}]))
    content[content.index(b"inner")] ^= 1
    assert reopened(path, bytes(content)).records == ()


def test_hostile_content_is_one_entry_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    whole = written(path)

    def sealed(text: bytes) -> bytes:
        body = b'{"n":9,"kind":"trial","data":' + text
        return body + b',"sum":"' + storage._checksum(body) + b'"}\n'

    hostile = {
        "100 MB": b"x" * 100_000_000 + b"\n",
        "utf-8": b'{"a": "\xff\xfe"}\n',
        "starts": b'{"n":' * 200_000 + b"\n",
        "nesting": sealed(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "huge int": sealed(b'{"a": ' + b"9" * 5000 + b"}"),
        "nan": sealed(b'{"a": NaN}'),
        "no object": sealed(b"[1]"),
        "not utf-8": sealed(b'{"a": "\xff"}'),
        "many lines": b"rubbish\n" * 10_000,
    }
    for name, content in hostile.items():
        path.write_bytes(whole + content + whole.splitlines(keepends=True)[0])
        damage = read_log(path).damage
        assert len(damage) == 2, name  # and the doubled first line
        assert "\n" not in str(damage[0]), name
        assert len(str(damage[0])) < 200, name
        assert [r.data for r in read_log(path).records] == TRIALS


def test_what_json_cannot_say_is_refused(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    circle: list[Any] = []
    circle.append(circle)
    path = tmp_path / "trials.jsonl"
    whole = written(path)
    log, _ = TrialLog.open(path)
    with log:
        for value in (math.nan, math.inf, -math.inf, nested, circle, object(), b"", 10**5000, "x" * (17 << 20)):
            with pytest.raises(OptimizeError) as caught:
                log.append("trial", {"value": value})
            assert "\n" not in str(caught.value)
        for kind in ("", "Trial", 'a"b', "x" * 33):
            with fails(OptimizeError):
                log.append(kind, {})
        assert path.read_bytes() == whole
        assert log.append("trial", {"tuple": (1, 2)}).data == {"tuple": [1, 2]}
    with fails(OptimizeError):
        log.append("trial", {})


def test_a_log_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    content = storage.encode(0, "log", {"schema_version": 2}) + b"something new\n"
    path.write_bytes(content)
    with fails(RunFolderError):
        TrialLog.open(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "file" / "log", tmp_path / "no" / "log", Path("a\0b")):
        with pytest.raises(RunFolderError) as caught:
            TrialLog.open(path)
        assert len(str(caught.value).splitlines()) == 1
    with fails(RunFolderError):
        read_log(tmp_path / "absent")


def test_without_hard_links_the_damaged_log_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(link: str, target: str) -> None:
        raise OSError(errno.EPERM, f"no links: {link} {target}")

    path = tmp_path / "trials.jsonl"
    whole = written(path)
    monkeypatch.setattr(os, "link", refuse)
    for i in (1, 2):
        path.write_bytes(whole[:-5])
        log, contents = storage.TrialLog.open(path)
        log.close()
        assert contents.original == tmp_path / f"trials.jsonl.damaged-{i}"
        assert contents.original.read_bytes() == whole[:-5]


def test_the_first_line_is_stable() -> None:
    # Written by version 1 of the format; whoever changes it cannot read the logs that exist.
    assert header() == b'{"n":0,"kind":"log","data":{"schema_version": 1},"sum":"88c8e3405e36f0fd"}\n'
