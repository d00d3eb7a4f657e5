"""What holds for every module: one direction of imports, sizes, and what product code never does."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("search_spaces", "evaluators", "optimizer")
MODULES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
# Importing these takes from 0.05 s to seconds each, and `--help` needs none of them.
HEAVY = ("ai_edge_litert", "networkx", "numpy", "optuna", "pydantic", "rich", "scipy", "yaml")
HELP_S = 0.4

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "os.system"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Defined = Function | ast.ClassDef


class Module(NamedTuple):
    """A module, parsed once for all rules: its path, its tree and all nodes of that."""

    path: Path
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @property
    def layer(self) -> int:
        return LAYERS.index(self.path.relative_to(ROOT).parts[0])


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    """All modules of the product."""
    trees = [ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in MODULES]
    return [Module(path, tree, tuple(ast.walk(tree))) for path, tree in zip(MODULES, trees, strict=True)]


Rule = Callable[[Module], Iterator[str]]


def broken(modules: list[Module], rule: Rule) -> list[str]:
    """Return where a rule is broken, and how."""
    return [f"{module.path.relative_to(ROOT)}: {what}" for module in modules for what in rule(module)]


def imported(module: Module) -> Iterator[tuple[int, str]]:
    """Yield line and absolute module of each import, those inside functions and TYPE_CHECKING blocks included."""
    package = module.path.relative_to(ROOT).parent.parts
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            yield node.lineno, ".".join(part for part in (base, node.module) if part)
        elif isinstance(node, ast.Call):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and ast.unparse(node.func) in {"importlib.import_module", "__import__"}:
                yield node.lineno, str(first.value)


def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Defined]]:
    """Yield what others may use: not what is named ``_…``, nor what is inside a function."""
    for node in body:
        if isinstance(node, Defined) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}{node.name}.")


def test_there_are_modules_in_every_layer() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(LAYERS)


def test_imports_go_one_way(modules: list[Module]) -> None:
    def upwards(module: Module) -> Iterator[str]:
        above = LAYERS[module.layer + 1 :]
        yield from (f"line {line}: {name}" for line, name in imported(module) if name.split(".")[0] in above)

    assert not broken(modules, upwards)


def test_product_code_does_not_import_tests_or_unsafe_loaders(modules: list[Module]) -> None:
    forbidden = FORBIDDEN_IMPORTS | {"tests", "pytest", "hypothesis"}

    def unsafe(module: Module) -> Iterator[str]:
        yield from (f"line {line}: {name}" for line, name in imported(module) if name.split(".")[0] in forbidden)

    assert not broken(modules, unsafe)


def test_product_code_neither_asserts_nor_runs_data(modules: list[Module]) -> None:
    def asserts_or_runs(module: Module) -> Iterator[str]:
        for node in module.nodes:
            if isinstance(node, ast.Assert):
                yield f"line {node.lineno}: assert"
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
                yield f"line {node.lineno}: {ast.unparse(node.func)}"

    assert not broken(modules, asserts_or_runs)


def test_rewrites_are_named_in_the_search_spaces_alone(modules: list[Module]) -> None:
    private = {"Split", "TuckerRanks"}
    found = [
        f"{module.path.relative_to(ROOT)}:{node.lineno} names {name}"
        for module in modules
        if module.path.relative_to(ROOT).parts[0] != "search_spaces"
        for node in module.nodes
        if isinstance(node, ast.Name | ast.Attribute | ast.alias)
        and (name := getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", "")) in private
    ]
    assert not found


@pytest.mark.parametrize("name", ["__init__", "tool"])
def test_the_examples_of_evaluators_are_short(name: str) -> None:
    text = (ROOT / f"experiments/example_evaluator/example_evaluator/{name}.py").read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in text[text.index("\nclass ") :].splitlines()) < 50


def test_what_is_public_is_documented(modules: list[Module]) -> None:
    def undocumented(module: Module) -> Iterator[str]:
        yield from (what for what, node in public(module.tree.body) if not ast.get_docstring(node))
        if module.tree.body and not ast.get_docstring(module.tree):
            yield "the module"

    assert not broken(modules, undocumented)


def test_no_path_of_one_machine(modules: list[Module]) -> None:
    homes = re.compile(r"/(?:home|root|Users|work)/\w")

    def local(module: Module) -> Iterator[str]:
        for node in module.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and homes.search(node.value):
                yield f"line {node.lineno}: {node.value!r}"

    assert not broken(modules, local)


def loaded_after(statement: str) -> set[str]:
    """Return which heavy packages a fresh interpreter has loaded after a statement."""
    program = f"import sys\n{statement}\nprint(*(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", [*LAYERS, "search_spaces.core.errors", "optimizer.cli"])
def test_importing_is_light(module: str) -> None:
    assert loaded_after(f"import {module}") == set()


def children_s() -> float:
    """Return the processor time of processes that ended: other work on this machine does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_is_light_and_quick() -> None:
    run = "import contextlib, optimizer.cli\nwith contextlib.suppress(SystemExit): optimizer.cli.main(['--help'])"
    assert loaded_after(run) == set()
    times = []
    for _ in range(3):
        before_s = children_s()
        subprocess.run([sys.executable, "-m", "optimizer.cli", "--help"], capture_output=True, check=True, cwd=ROOT)
        times.append(children_s() - before_s)
    assert min(times) <= HELP_S


def test_processes_of_our_own_do_not_search_the_current_folder(modules: list[Module]) -> None:
    """It may hold files of others: a ``numpy.py`` beside a received campaign would run."""

    def searching(module: Module) -> Iterator[str]:
        for node in module.nodes:
            if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                flag = node.elts[1]
                if not (isinstance(flag, ast.Constant) and flag.value in {"-P", "-I"}):
                    yield f"line {node.lineno}: {ast.unparse(flag)}"

    assert not broken(modules, searching)
