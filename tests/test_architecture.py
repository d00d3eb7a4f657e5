"""What holds for every module: one direction of imports, sizes, and what product code never does."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("search_spaces", "evaluators", "optimizer")
MODULES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in MODULES}
# Importing these takes from 0.05 s to seconds each, and `--help` needs none of them.
HEAVY = ("ai_edge_litert", "networkx", "numpy", "optuna", "pydantic", "rich", "scipy", "yaml")
HELP_S = 0.4

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "os.system"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Defined = Function | ast.ClassDef


def imported(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and absolute module of each import, those inside functions and TYPE_CHECKING blocks included."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            yield node.lineno, ".".join(part for part in (base, node.module) if part)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"importlib.import_module", "__import__"}:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Defined]]:
    """Yield what others may use: not what is named ``_…``, nor what is inside a function."""
    for node in body:
        if isinstance(node, Defined) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}{node.name}.")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_module = pytest.mark.parametrize("path", MODULES, ids=name)


def test_there_are_modules_in_every_layer() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(LAYERS)


@each_module
def test_imports_go_one_way(path: Path) -> None:
    above = LAYERS[LAYERS.index(path.relative_to(ROOT).parts[0]) + 1 :]
    wrong = [f"line {line}: {module}" for line, module in imported(TREES[path], path) if module.split(".")[0] in above]
    assert not wrong


@each_module
def test_product_code_does_not_import_tests_or_unsafe_loaders(path: Path) -> None:
    forbidden = FORBIDDEN_IMPORTS | {"tests", "pytest", "hypothesis"}
    wrong = [
        f"line {line}: {module}" for line, module in imported(TREES[path], path) if module.split(".")[0] in forbidden
    ]
    assert not wrong


@each_module
def test_product_code_neither_asserts_nor_runs_data(path: Path) -> None:
    wrong = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Assert):
            wrong.append(f"line {node.lineno}: assert")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            wrong.append(f"line {node.lineno}: {ast.unparse(node.func)}")
    assert not wrong


@each_module
def test_what_is_public_is_documented(path: Path) -> None:
    tree = TREES[path]
    wrong = [what for what, node in public(tree.body) if not ast.get_docstring(node)]
    assert not wrong
    assert ast.get_docstring(tree) or not tree.body


@each_module
def test_no_path_of_one_machine(path: Path) -> None:
    homes = re.compile(r"/(?:home|root|Users|work)/\w")
    wrong = [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and homes.search(node.value)
    ]
    assert not wrong


def loaded_after(statement: str) -> set[str]:
    """Return which heavy packages a fresh interpreter has loaded after a statement."""
    program = f"import sys\n{statement}\nprint(*(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", [*LAYERS, "search_spaces.errors", "optimizer.cli"])
def test_importing_is_light(module: str) -> None:
    if not (ROOT / module.replace(".", "/")).with_suffix(".py").exists() and not (ROOT / module).is_dir():
        pytest.skip(f"{module} is not there yet")
    assert loaded_after(f"import {module}") == set()


def children_s() -> float:
    """Return the processor time of processes that ended: other work on this machine does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.skipif(not (ROOT / "optimizer" / "cli").is_dir(), reason="optimizer.cli is not there yet")
def test_help_is_light_and_quick() -> None:
    run = "import contextlib, optimizer.cli\nwith contextlib.suppress(SystemExit): optimizer.cli.main(['--help'])"
    assert loaded_after(run) == set()
    times = []
    for _ in range(3):
        before_s = children_s()
        subprocess.run([sys.executable, "-m", "optimizer.cli", "--help"], capture_output=True, check=True, cwd=ROOT)
        times.append(children_s() - before_s)
    assert min(times) <= HELP_S


@each_module
def test_processes_of_our_own_do_not_search_the_current_folder(path: Path) -> None:
    """It may hold files of others: a ``numpy.py`` beside a received campaign would run."""
    wrong = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
            flag = node.elts[1]
            if not (isinstance(flag, ast.Constant) and flag.value in {"-P", "-I"}):
                wrong.append(f"line {node.lineno}: {ast.unparse(flag)}")
    assert not wrong
