"""Models of other frameworks: found, refused in one line, and converted where the converters are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from optimizer.cli import main
from search_spaces.core.errors import ModelError
from search_spaces.models import convert, load
from search_spaces.models.convert import TOLERANCE, kind_of
from tests.support.commands import tells
from tests.support.sentences import fails, says

FINITE = arrays(np.float32, (2, 3), elements=st.floats(-100, 100, width=32))


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("net.pt2", "pt2"),
        ("a/net.onnx", "onnx"),
        ("torchvision:resnet18", "torchvision"),
        ("timm:resnet18", "timm"),
        ("net.tflite", None),
        ("vgg16", None),
        ("torchvision:", None),
        ("torchvision:../x", None),
    ],
)
def test_what_is_converted(source: str, kind: str | None) -> None:
    assert kind_of(source) == kind


def test_a_folder_is_a_saved_model_where_it_holds_one(tmp_path: Path) -> None:
    assert kind_of(str(tmp_path)) is None
    (tmp_path / "saved_model.pb").touch()
    assert kind_of(str(tmp_path)) == "savedmodel"


@pytest.mark.parametrize("source", ["net.onnx", "net.pt2", "torchvision:resnet18"])
def test_without_a_converter_the_line_tells_how_to_convert(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(convert, "_environment", lambda _: None)
    if ":" not in source:
        tells(capsys, "inspect", source, code=2)
        Path(source).write_bytes(b"anything")
    assert main(["inspect", source]) == 4
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    says(output)
    assert (source if ":" not in source else repr("resnet18")) in output


@pytest.mark.parametrize("source", ["it's 3 $(nets).onnx", "a net.pt2", "folder 'one'"])
def test_the_command_that_converts_is_one_that_a_shell_takes(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(convert, "_environment", lambda _: None)
    if source.startswith("folder"):
        Path(source).mkdir()
        (Path(source) / "saved_model.pb").touch()
    else:
        Path(source).touch()
    assert main(["inspect", source]) == 4
    command = capsys.readouterr().err.partition("convert it yourself: ")[2].strip()
    # Stand-ins that say what they were called with; the converters themselves need gigabytes.
    for name in ("python", "onnx2tf", "optimize"):
        (tmp_path / name).write_text(f"#!{sys.executable}\nimport sys; print(*sys.argv[1:], sep='\\n')\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert source in lines
    if lines[0] == "-c":
        compile(lines[1], "command", "exec")
    assert lines[-1] == ("converted/it's 3 $(nets)_float32.tflite" if source.endswith("onnx") else "net.tflite")


def converter(body: str, path: Path) -> None:
    """Write a stand-in for an interpreter that has a converter: a program that is called like one."""
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\nkind, source, out = sys.argv[-3:]\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("body", "limit_s"),
    [
        ("sys.exit('convert: no kernel')", 120),
        ("os.abort()", 120),
        ("time.sleep(600)", 1),
        ("open(out, 'wb').write(b'no model')", 120),
    ],
)
def test_a_converter_that_fails_is_one_line(
    body: str, limit_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.onnx").write_bytes(body.encode())
    converter(body, tmp_path / "python")
    monkeypatch.setattr(convert, "_environment", lambda _: (str(tmp_path / "python"), "1"))
    monkeypatch.setattr(convert, "LIMIT_S", limit_s)
    assert main(["inspect", str(tmp_path / "net.onnx")]) in {2, 4}
    message = capsys.readouterr().err
    says(message)
    assert message.count("\n") == 1


def test_a_converter_sees_this_package_and_nothing_that_is_installed_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site-packages"
    shutil.copytree(Path(convert.__file__).parents[1], site / "search_spaces")
    (site / "numpy.py").write_text("raise ImportError('of another Python')")
    (tmp_path / "net.onnx").write_bytes(b"anything")
    body = (
        "import search_spaces.models.convert as found; path = os.environ['PYTHONPATH']\n"
        "sys.exit('convert: ' + ' '.join(os.listdir(path)) + str(found.__file__.startswith(path)))"
    )
    converter(body, tmp_path / "python")
    monkeypatch.setattr(convert, "__file__", str(site / "search_spaces" / "models" / "convert.py"))
    monkeypatch.setattr(convert, "_environment", lambda _: (str(tmp_path / "python"), "1"))
    tells(capsys, "inspect", str(tmp_path / "net.onnx"), code=2)


def test_what_was_converted_is_kept_until_its_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: object
) -> None:
    whole = next(Path(load("squeezenet1_1@0.25/64").source.path.parent).glob("squeezenet1_1@0.25-64.*.tflite"))  # type: ignore[union-attr]
    source, count = tmp_path / "net.onnx", tmp_path / "count"
    source.write_bytes(b"one")
    converter(f"open({str(count)!r}, 'a').write('.'); import shutil; shutil.copy({str(whole)!r}, out)", tmp_path / "p")
    monkeypatch.setattr(convert, "_environment", lambda _: (str(tmp_path / "p"), "1"))
    digests = [load(str(source)).digest for _ in range(2)]
    assert count.read_text() == "."
    source.write_bytes(b"two, with weights in net.onnx.data")
    assert [load(str(source)).digest] * 2 == digests
    assert count.read_text() == ".."
    for weights in (b"w", b"v"):
        (tmp_path / "net.onnx.data").write_bytes(weights)
        (tmp_path / "other").write_bytes(weights)
        for _ in range(2):
            load(str(source))
    assert count.read_text() == "...."


@pytest.mark.parametrize("name", ["net.pt2", "folder"])
def test_what_is_code_is_refused_where_a_file_names_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    for file in ("net.pt2", "folder/saved_model.pb"):
        (tmp_path / file).write_bytes(b"anything")
    monkeypatch.setattr(convert, "_environment", lambda _: (sys.executable, "1"))
    with fails(ModelError):
        load(str(tmp_path / name))


def test_a_converter_has_no_network_and_little_memory() -> None:
    code = (
        "import socket, numpy as np\nfrom search_spaces.models import convert\nconvert._MEMORY_SHARE = 1e-2\n"
        "convert._confine()\n"
        "for what in (lambda: socket.create_connection(('127.0.0.1', 9)), lambda: np.ones(1 << 32)):\n"
        "    try:\n        what()\n"
        "    except PermissionError:\n        print('no network')\n"
        "    except MemoryError:\n        print('no memory')\n"
    )
    root = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["no network", "no memory"]


@given(FINITE, FINITE)
def test_how_far_outputs_are_off(mine: np.ndarray, wanted: np.ndarray) -> None:
    off = convert._off(mine, wanted)
    largest = float(np.abs(wanted).max())
    assert (off <= TOLERANCE) == bool(np.abs(mine.astype(float) - wanted).max() <= TOLERANCE * (largest or 1.0))
    assert convert._off(wanted, wanted) == 0


@pytest.mark.parametrize("kind", ["pt2", "module"])
def test_torch_modules_arrive(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("litert_torch", reason="pip install 'partition-optimizer[torch]'")
    import torch

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5))
    example = (torch.randn(1, 3, 8, 8),)
    if kind == "module":
        path = convert.converted_module(module, example)
    else:
        from search_spaces.core.allowed_code import allow

        source = tmp_path / "net.pt2"
        torch.export.save(torch.export.export(module.eval(), example), source)
        allow(str(source))
        path = convert.converted(str(source), "pt2")
    graph = load(str(path))
    assert [graph.tensors[t].shape for t in graph.outputs] == [(1, 5)]
