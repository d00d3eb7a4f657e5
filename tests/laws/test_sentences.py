"""The golden file of sentences: what fits it, and that it has no sentences of tests that are gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.core.wording import many, percent, plural
from tests.support.sentences import ANY, Golden, fits, plain, read_golden

ROOT = Path(__file__).parents[2]


@given(st.lists(st.text(), min_size=1, max_size=5), st.lists(st.text(), min_size=4, max_size=4))
def test_a_sentence_fits_whatever_stands_for_its_gaps(pieces: list[str], fills: list[str]) -> None:
    text = pieces[0] + "".join(fill + piece for fill, piece in zip(fills, pieces[1:], strict=False))
    assert fits(ANY.join(pieces), text)


@given(st.text(alphabet="abc {*}", max_size=8), st.text(alphabet="abc ", max_size=8))
def test_without_gaps_a_sentence_fits_itself_alone(golden: str, text: str) -> None:
    if ANY not in golden:
        assert fits(golden, text) == (golden == text)


def test_another_sentence_fails_its_test_and_names_the_command() -> None:
    checked = Golden(write=False)
    with pytest.raises(pytest.fail.Exception, match="pytest --golden tests/test_none"):
        checked.meet("tests/test_none.py::test_a", "a sentence")


def test_folders_of_this_run_do_not_get_into_the_file(tmp_path: Path) -> None:
    assert plain(f"{tmp_path}/a.yaml: is empty; see {ROOT}/README.md") == "TMP/a.yaml: is empty; see ROOT/README.md"


def test_every_sentence_is_of_a_test_that_there_is() -> None:
    for file, tests in read_golden().items():
        defined = set(re.findall(r"def (test_\w+)", (ROOT / file).read_text()))
        assert {name.rpartition("::")[2].partition("[")[0].partition("…")[0] for name in tests} <= defined


@given(st.integers(0, 10**18))
def test_counts_keep_three_digits(count: int) -> None:
    text = many(count)
    if count < 10**6:
        assert int(text.replace(",", "")) == count
    elif count < 10**15:
        number, word = text.split()
        assert float(number) * {"million": 1e6, "billion": 1e9, "trillion": 1e12}[word] == pytest.approx(
            count, rel=5e-3
        )
    else:
        assert text == f"about 10^{len(str(count)) - 1}"


def test_numbers_go_with_their_nouns() -> None:
    assert [plural(n, "plan") for n in (0, 1, 2, 249_237_768)] == ["0 plans", "1 plan", "2 plans", "249 million plans"]
    assert [percent(0.394), percent(0.0415, 1), percent(1.0)] == ["39 %", "4.2 %", "100 %"]
