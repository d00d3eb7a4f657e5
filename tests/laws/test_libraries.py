"""A library is loaded when its user named it: on the command line, or bound to a name in a file of theirs."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from evaluators.litert.processors import LIBRARIES, check_is_here, library_folder, make_processor, npu_folder
from evaluators.litert.session import LitertEvaluator
from evaluators.litert.settings import worker_starts
from optimizer.cli import main
from optimizer.devices import choose_platform
from search_spaces.core import allowed_code
from search_spaces.core.errors import UsageError
from search_spaces.core.platform import Platform, Processor
from tests.support.sentences import fails, says

MODEL = "squeezenet1_1@0.25/64"
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def _nothing_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(allowed_code, "_allowed", set())
    monkeypatch.setenv(LIBRARIES, str(tmp_path / "libraries.yaml"))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "ran"


@pytest.fixture
def folder(tmp_path: Path, mark: Path) -> Path:
    """A folder whose library leaves a file where it is loaded."""
    found = tmp_path / "sdk"
    found.mkdir()
    source = found / "evil.c"
    source.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) void ran(void) {{ fclose(fopen("{mark}", "w")); }}\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(found / "libLiteRtDispatch_Evil.so")], check=True)
    return found


@needs_compiler
def test_a_platform_file_loads_nothing(
    folder: Path, mark: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    platform = tmp_path / "p.yaml"
    options = f"{{cores: [0], threads: 1, folder: {folder}}}"
    for entry in (
        f"{{name: a, processor: 'npu:{folder}'}}",
        f"{{name: 'npu:{folder}'}}",
        f"{{name: a, processor: 'npu+cpu:{folder}'}}",
        f"{{name: a, kind: npu, options: {options}}}",
    ):
        platform.write_text(f"processors:\n- {{name: cpu}}\n- {entry}\n")
        capfd.readouterr()
        assert (
            main(["--model", MODEL, "--platform", str(platform), "--budget", "2", "-q", "--out", str(mark) + "-o"]) == 2
        )
        (line,) = capfd.readouterr().err.splitlines()
        says(line)
        assert not mark.exists()


@needs_compiler
def test_a_campaign_and_a_storage_load_nothing(
    folder: Path, mark: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from optimizer.shared.storage import close_storage, open_storage
    from optimizer.shared.study import SETTINGS

    campaign = tmp_path / "c.yaml"
    campaign.write_text(f"name: c\nmatrix: {{model: {MODEL}, budget: 3, processors: 'cpu,npu:{folder}'}}\n")
    assert main(["run", str(campaign), "--out", str(tmp_path / "c"), "-q"]) == 2
    says(capfd.readouterr().err)
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    shared = ["--study", "s", "--storage", url, "-q"]
    synthetic = ["--model", MODEL, "--evaluator", "synthetic", "--budget", "3", "--out", str(tmp_path / "a")]
    assert main([*synthetic, *shared]) == 0
    storage = open_storage(url)
    study = storage.get_study_id_from_name("s")
    settings = storage.get_study_user_attrs(study)[SETTINGS]
    changed = settings["config"] | {"evaluator": "litert", "processors": ["cpu", f"npu:{folder}"]}
    storage.set_study_user_attr(study, SETTINGS, settings | {"config": changed})
    close_storage(storage)
    assert main([*shared, "--out", str(tmp_path / "b")]) == 2
    says(capfd.readouterr().err)
    assert not mark.exists()


@needs_compiler
def test_a_run_folder_loads_nothing(
    folder: Path, mark: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A study of several models that was predicted is run again from its settings."""
    run = tmp_path / "run"
    words = ["--model", f"{MODEL}×2", "--evaluator", "cost-model", "--platform", "xavier", "--budget", "3", "-q"]
    assert main([*words, "--out", str(run)]) == 0
    settings = yaml.safe_load((run / "config.yaml").read_text())
    changed = settings | {"evaluator": "litert", "platform": None, "processors": ["cpu", f"npu:{folder}"]}
    (run / "config.yaml").write_text(yaml.safe_dump(changed))
    capfd.readouterr()
    assert main(["execute", str(run)]) == 2
    says(capfd.readouterr().err)
    assert not mark.exists()


@needs_compiler
def test_what_the_user_names_is_loaded_in_a_process_of_its_own_and_told(
    folder: Path, mark: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "libraries.yaml").write_text("libraries:\n  mine: sdk\n")
    platform = tmp_path / "p.yaml"
    platform.write_text("processors:\n- {name: a, processor: 'npu:mine'}\n")
    found = choose_platform(LitertEvaluator(), file=platform)
    assert mark.exists()  # a process of its own tried it, this one did not
    assert str(folder) not in Path("/proc/self/maps").read_text()
    check_is_here(found)
    with caplog.at_level(logging.WARNING):
        assert worker_starts(found)["a"].dispatch_folder == str(folder)
    says("\n".join(caplog.messages))
    with fails(UsageError):
        make_processor(f"npu:{tmp_path}")
    typed = f"npu+cpu:{folder}"
    (tmp_path / "libraries.yaml").unlink()
    with fails(UsageError):
        npu_folder(str(folder))
    allowed_code.allow(typed)
    assert make_processor(typed).options["folder"] == str(folder)


@pytest.mark.parametrize(
    ("content", "statement"),
    [
        ("libraries: [a]", ":1: libraries: must be a mapping of keys to values"),
        ("librarys: {}", ":1: a file of libraries has no 'librarys'"),
        ("libraries: {a: [b]}", ":1: libraries.a: must be text"),
        ("", ":1: the file is empty"),
    ],
)
def test_a_file_of_libraries_that_is_wrong_is_one_line(tmp_path: Path, content: str, statement: str) -> None:
    (tmp_path / "libraries.yaml").write_text(content)
    with pytest.raises(UsageError) as caught:
        make_processor("npu:a")
    assert f"libraries.yaml{statement}" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"cores": [0], "threads": 100_000}, {"cores": [0, 0], "threads": 1}, {"cores": ["x"], "threads": 1},
     {"cores": [0]}, {"cores": [0], "threads": 1, "kernels": "evil"}, {"cores": 1, "threads": 1},
     {"cores": [0], "threads": 1, "kernels": "blocked"},
     {"cores": [0], "threads": 1, "kernels": "builtin", "runtime": "openvino", "precision": "f32"},
     {"cores": [0], "threads": 1, "kernels": "blocked", "runtime": "openvino", "precision": "bf16"},
     {"cores": [0], "threads": 1, "kernels": "builtin", "runtime": "openvino", "precision": "bf16"},
     {"cores": [0], "threads": 1, "memory_nbytes": 12}, {"cores": [0], "threads": 1, "memory_nbytes": "1e9"}],
)  # fmt: skip
def test_a_described_processor_asks_for_nothing_that_harms(options: dict[str, object]) -> None:
    with fails(UsageError):
        check_is_here(Platform("p", (Processor("a", "cpu", {}, "a", options),)))


def test_the_empty_name_allows_nothing(tmp_path: Path) -> None:
    allowed_code.allow(*[""])
    with fails(UsageError):
        library_folder(str(tmp_path))
