"""What the product tells people, checked against one golden file: ``tests/golden/sentences.yaml``.

A test names the error that it expects and leaves the wording to the golden file, which holds the sentences of each
test in the order in which it meets them, without repeats. ``{*}`` there stands for any text: figures of this machine,
words of a library. Of a long output it has the phrases that matter, in their order: ``{*}4 of 4 studies are done{*}``.
``pytest --golden`` writes the sentences of the tests that it runs; sentences with ``{*}`` stay where they still fit,
and of phrases those that are gone become the lines that are most like them.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import defaultdict
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

import pytest
import yaml

GOLDEN = Path(__file__).parents[1] / "golden" / "sentences.yaml"
ANY = "{*}"
_LONGEST = 120
_WHOLE = 1000  # characters: of a longer output the golden file has phrases
_ROOT = Path(__file__).parents[2]
# Each process of pytest-xdist has a folder of its own.
_SPEND = re.compile(r"/[^\s'\"“”:;,]*?/pytest-\d+/(?:popen-gw\d+/)?[^\s/'\"“”:;,]+")

Error = TypeVar("Error", bound=BaseException)
Sentences = dict[str, dict[str, list[str]]]


def read_golden() -> Sentences:
    """Return file → test → sentences."""
    # Each process of pytest reads it: in C, where PyYAML has that, in a tenth of the time.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: Sentences = yaml.load(GOLDEN.read_text(), Loader=loader) if GOLDEN.exists() else {}
    return found


class Golden:
    """The sentences of a session of tests.

    Args:
        write: whether sentences are taken over instead of checked.
        whole: whether tests run with all their parameters, so that sentences of other parameters are of none.
    """

    def __init__(self, *, write: bool, whole: bool = False) -> None:
        self.write = write
        self._whole = whole
        self._golden = read_golden()
        self._met: dict[str, list[str]] = defaultdict(list)
        self._last: dict[str, str] = {}

    def meet(self, test: str, sentence: str) -> None:
        """Check a sentence of a test, or take it over."""
        met = self._met[test]
        place, text = len(met), plain(sentence.strip())
        if text == self._last.get(test):
            return
        self._last[test] = text
        file, _, name = test.partition("::")
        golden = self._golden.get(file, {}).get(name, [])
        expected = golden[place] if place < len(golden) else None
        if expected is None or not fits(expected, text):
            if not self.write:
                shown = expected and lacking(expected, text)
                pytest.fail(f"the golden file has {shown!r}, not {text!r}; if that is meant: pytest --golden {file}")
            expected = renewed(expected or "", text)
            if len(expected) > _WHOLE:
                pytest.fail(f"{GOLDEN}: write the phrases of this output that matter, as {{*}}a phrase{{*}}: {text}")
        met.append(expected)

    def save(self) -> None:
        """Write what was met over what the golden file has of these tests; tests of files that are gone go, too."""
        found = {file: tests for file, tests in self._golden.items() if (_ROOT / file).exists()}
        met = {test.partition("[")[0] for test in self._met} if self._whole else set()
        for file, tests in found.items():
            found[file] = {name: s for name, s in tests.items() if f"{file}::{name.partition('[')[0]}" not in met}
        for test, sentences in self._met.items():
            file, _, name = test.partition("::")
            found.setdefault(file, {})[name] = sentences
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(yaml.safe_dump(found, allow_unicode=True, width=10_000))


def plain(sentence: str) -> str:
    """Return a sentence without the folders of this machine and this run."""
    return _SPEND.sub("TMP", sentence).replace(str(_ROOT), "ROOT")


def fits(golden: str, text: str) -> bool:
    """Return whether a sentence is the golden one, in which ``{*}`` stands for any text."""
    return lacking(golden, text) is None


def lacking(golden: str, text: str) -> str | None:
    """Return what of the golden sentence a text lacks where it should be: a piece between two ``{*}``."""
    first, *pieces = golden.split(ANY)
    if not text.startswith(first) or (not pieces and text != first):
        return first
    place = len(first)
    for i, piece in enumerate(pieces, 1):
        found = text.find(piece, place) if i < len(pieces) else max(place, len(text) - len(piece))
        if found < 0 or not text.startswith(piece, found):
            return piece
        place = found + len(piece)
    return None


def renewed(golden: str, text: str) -> str:
    """Return what the golden file should have of a text that its sentence does not fit."""
    if not (golden.startswith(ANY) and golden.endswith(ANY)):
        return text
    lines = [line.strip() for line in re.split(r"\n|<[^<>]*>", text)]
    pieces = [p if p in text else get_close_matches(p, lines, 1, 0.0)[0] for p in golden.split(ANY)]
    return ANY.join(pieces) if fits(ANY.join(pieces), text) else text


_session: list[Golden] = []


def begin(*, write: bool, whole: bool) -> None:
    """Begin a session of tests; see :class:`Golden`."""
    _session[:] = [Golden(write=write, whole=whole)]


def end() -> None:
    """End a session of tests: with ``--golden``, write the golden file."""
    if _session and _session[0].write:
        _session[0].save()


def says(sentence: str) -> None:
    """Check one more sentence of the running test."""
    file, _, name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].partition("::")
    if len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}… {zlib.crc32(name.encode()):08x}"
    _session[0].meet(f"{file}::{name}", sentence)


def fails(*errors: type[Error]) -> _Fails[Error]:
    """Expect an error, and its sentence as the golden file has it."""
    return _Fails(errors)


class _Fails(Generic[Error]):
    """What :func:`fails` returns: no generator, whose frame would keep alive what the error refers to."""

    def __init__(self, errors: tuple[type[Error], ...]) -> None:
        self._raises = pytest.raises(errors)

    def __enter__(self) -> pytest.ExceptionInfo[Error]:
        return self._raises.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        handled = self._raises.__exit__(kind, error, trace)
        if handled:
            says(str(error))
        return handled
