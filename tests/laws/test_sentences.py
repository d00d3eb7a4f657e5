"""The golden file of sentences: what fits it, of which tests it is, and that sentences stand there alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.model.baselines import is_baseline
from search_spaces.core.wording import many, percent, plural
from tests.support.sentences import ANY, Golden, fits, lacking, plain, read_golden, renewed

ROOT = Path(__file__).parents[2]
DOCUMENTS = ROOT / "tests" / "system" / "test_docs.py"  # whose sentences are no output
METHODS = {"startswith", "endswith", "count", "search", "match", "fullmatch"}


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
    with pytest.raises(pytest.fail.Exception, match="--golden tests/test_none"):
        checked.meet("tests/test_none.py::test_a", "a sentence")
    with pytest.raises(pytest.fail.Exception, match="a phrase"):  # what is long is not written as a whole
        Golden(write=True).meet("tests/test_none.py::test_a", "a sentence" * 1000)


PAGE = "<h1>Answer</h1><p>2 plans</p><p>in 5 s</p>"


def test_phrases_of_a_long_output_stand_in_their_order() -> None:
    assert fits("{*}Answer{*}plans{*}", PAGE)
    assert lacking("{*}plans{*}Answer{*}", PAGE) == "Answer"
    assert lacking("{*}Answer", PAGE) == "Answer"
    assert renewed("{*}Answer{*}3 plans{*}", PAGE) == "{*}Answer{*}2 plans{*}"
    assert renewed("{*}Answer{*}", "none") == "{*}none{*}"


def test_folders_of_this_run_do_not_get_into_the_file(tmp_path: Path) -> None:
    assert plain(f"{tmp_path}/a.yaml; {ROOT}/b.md") == "TMP/a.yaml; ROOT/b.md"


def test_every_sentence_is_of_a_test_that_there_is() -> None:
    for file, tests in read_golden().items():
        defined = set(re.findall(r"def (test_\w+)", (ROOT / file).read_text()))
        assert {name.rpartition("::")[2].partition("[")[0].partition("…")[0] for name in tests} <= defined


def is_sentence(text: str) -> bool:
    """Return whether a literal has three or more words and is no name of a baseline."""
    return sum(bool(re.search("[A-Za-z]{2}", word)) for word in text.split()) > 2 and not is_baseline(text)


def literals(node: ast.AST, bound: Mapping[str, Sequence[ast.expr]]) -> Iterator[str]:
    """Yield the texts that an operand may be; of an f-string, what is not computed."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield " ".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
        case ast.Name(id=name):
            yield from (text for value in bound.get(name, ()) for text in literals(value, {}))
        case ast.Tuple() | ast.List() | ast.Set() | ast.Dict() | ast.IfExp() | ast.BinOp():
            yield from (text for part in ast.iter_child_nodes(node) for text in literals(part, bound))


def bindings(function: ast.FunctionDef) -> Iterator[tuple[str, list[ast.expr]]]:
    """Yield names and what loops, assignments and parameters of a test bind them to."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names, rows = [name], [value]
            case ast.For(target=target, iter=ast.Tuple(elts=rows) | ast.List(elts=rows)):
                names = [ast.unparse(part) for part in getattr(target, "elts", [target])]
            case ast.Call(func=ast.Attribute(attr="parametrize"), args=[given, ast.List(elts=rows), *_]):
                names = [name.strip() for name in ",".join(literals(given, {})).split(",")]
            case _:
                continue
        cells = [getattr(row, "elts", [row]) if len(names) > 1 else [row] for row in rows]
        yield from ((name, [row[i] for row in cells if i < len(row)]) for i, name in enumerate(names))


def asserted(tree: ast.AST) -> Iterator[str]:
    """Yield the literals that assertions compare with text; what has a key is a field, and no output."""
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        bound = dict(bindings(function))
        for node in (n for a in ast.walk(function) if isinstance(a, ast.Assert) for n in ast.walk(a.test)):
            match node:
                case ast.Compare(left=left, ops=ops, comparators=others) if isinstance(
                    ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn
                ):
                    sides = [left, *others]
                case ast.Call(func=ast.Attribute(attr=name), args=sides) if name in METHODS:
                    pass
                case _:
                    continue
            if not any(isinstance(side, ast.Subscript) and list(literals(side.slice, {})) for side in sides):
                yield from (text for side in sides for text in literals(side, bound))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "match":
            yield from literals(node.value, {})


def test_sentences_stand_in_the_golden_file_alone() -> None:
    trees = {path: ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("*.py") if path != DOCUMENTS}
    assert not [(path, text) for path, tree in trees.items() for text in asserted(tree) if is_sentence(text)]


@pytest.mark.parametrize(
    "text",
    [
        "assert 'nothing was run' in out",
        "assert f'{n} plans were run' in shown.out",
        "assert any(line.startswith('nothing was run') for line in lines)",
        "for title in ('A', 'What was run'):\n        assert title in page",
        "expected = 'nothing was run'\n    assert out == expected",
        "with pytest.warns(UserWarning, match='nothing was run'):\n        run()",
    ],
)
def test_a_sentence_beside_the_golden_file_would_be_found(text: str) -> None:
    assert any(map(is_sentence, asserted(ast.parse(f"def test_a(out):\n    {text}"))))


@pytest.mark.parametrize(
    "text",
    ["'whole on cpu' in out", "'not run' in out", "d['why'] == 'nothing was run'", "main('nothing was run') == 2"],
)
def test_names_fields_and_input_are_no_sentences(text: str) -> None:
    assert not any(map(is_sentence, asserted(ast.parse(f"def test_a(out):\n    assert {text}"))))


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
