"""README and guides: every command and snippet in them runs, and every link leads somewhere.

Commands run here on small models and budgets (``CHEAPER``); those that cannot run here say why (``NOT_RUN``).
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evaluators.android.farm import find_handset
from evaluators.base import Evaluator
from evaluators.cost_model.figures import read_figures
from evaluators.cost_model.profile import find_profile
from evaluators.cuda.devices import APART, GRAPHS, KERNELS, THREADS
from evaluators.litert.session import LitertEvaluator
from evaluators.registry import make_evaluator
from evaluators.remote.devices import ENVIRONMENT
from evaluators.testing import EvaluatorContract
from optimizer.campaign.file import read_campaign
from optimizer.campaign.studies import plan_studies
from optimizer.cli import COMMANDS, main
from search_spaces.core.platform_file import read_platform
from search_spaces.core.plugins import entries
from search_spaces.models import load
from search_spaces.models.zoo import write
from search_spaces.models.zoo.names import parse_name
from search_spaces.spaces.chain import chain_plan
from tests.benchmarks.readme_picture import picture
from tests.support.narrowing import there

ROOT = Path(__file__).parents[2]
GUIDES = [
    "README.md",
    "evaluators/GPU.md",
    "evaluators/README.md",
    "experiments/README.md",
    "experiments/platforms/README.md",
    "experiments/results/README.md",
    "optimizer/CODE.md",
    "optimizer/PYTHON.md",
    "optimizer/README.md",
    "optimizer/SECURITY.md",
    "optimizer/samplers/README.md",
    "optimizer/export/README.md",
    "search_spaces/CONCEPTS.md",
    "tests/README.md",
]
SMALL = "squeezenet1_1@0.25/64"
FEW = "--processors cpu0,cpu1 --allow cuts"  # timing operators for splits, and by OpenVINO, takes longer than the rest

# What is typed → what is run here: the same on a small model or budget, or without measuring.
CHEAPER = {
    "optimize path/to/model.tflite --budget 100 --study mine": f"optimize {SMALL} --budget 3 --study mine {FEW}",
    "optimize MODEL": f"optimize {SMALL} --dry-run",
    "optimize --model squeezenet1_1 --budget 40": f"optimize --model {SMALL} --budget 10 {FEW}",
    "optimize squeezenet1_0 --platform elsewhere.json --evaluator cost-model --budget 20": f"optimize {SMALL} "
    "--platform elsewhere.json --evaluator cost-model --budget 5",
    "optimize --model vgg16 --budget 200": "optimize --model vgg16@0.125 --budget 200 --dry-run",
    "optimize --model vgg16 --platform exynos2200 --evaluator cost-model --budget 50": f"optimize --model {SMALL} "
    "--platform exynos2200 --evaluator cost-model --budget 50",
    "optimize --model squeezenet1_0 --evaluator cost-model --platform zcu102 --allow cuts,branches --budget 60": (
        "optimize --model squeezenet1_0 --evaluator cost-model --platform zcu102 --allow cuts,branches --budget 5"
    ),
    "optimize squeezenet1_1*2 mobilenet_v1 --evaluator cost-model --platform xavier --budget 30": "optimize"
    f" {SMALL}*2 mobilenet_v1@0.25/128 --evaluator cost-model --platform xavier --budget 5",
    "optimize --workload experiments/workloads/robot.yaml --evaluator cost-model --platform xavier --budget 30": (
        "optimize --workload experiments/workloads/robot.yaml --evaluator cost-model --platform xavier --budget 5"
    ),
    "optimize rewrite --help": "optimize models",
    "optimize pretrain --help": "optimize models",
    "optimize train --help": "optimize models",
    "optimize run FILE.yaml": "optimize run small.yaml",
    "optimize run FILE --allow-code": "optimize run small.yaml --dry-run --allow-code",
    "optimize run FILE.yaml --dry-run": "optimize run small.yaml --dry-run",
    "optimize run --jobs N": "optimize run small.yaml --jobs 2",
    **{f"optimize {name} RUN": f"optimize {name} runs/mine" for name in ("report", "explain", "execute", "export")},
    "optimize execute RUN --stream": "optimize execute runs/mine --stream",
    "optimize run experiments/quickstart.yaml": "optimize run experiments/quickstart.yaml --dry-run",
    **{
        f"optimize run experiments/{name}.yaml": f"optimize run experiments/{name}.yaml --dry-run"
        for name in ("five_samplers", "seed_001_accuracy", "seed_001_xavier", "seed_002_codl")
    },
}
NOT_RUN = {
    "pip install ./experiments/example_evaluator": "needs a network; .ci/run does so",
    'export EXAMPLE_BOARD="sh $PWD/experiments/example_evaluator/example_evaluator/by_ssh.sh pi@board"': "needs one",
    'export EXAMPLE_TOOL="sh $PWD/experiments/example_evaluator/example_evaluator/tool_by_ssh.sh pi@board ./bench"': (
        "needs one"
    ),
    "optimize squeezenet1_1 --evaluator example-tool --budget 20 --minutes 20": "test_remote_ssh.py runs the example",
    "python -m pytest experiments/example_evaluator": ".ci/run does so",
    "optimize squeezenet1_1 --evaluator example --budget 20": "test_remote_ssh.py runs the example",
    "optimize dashboard RUN": "serves until it is interrupted; test_report.py opens the study that it shows",
    **{
        f"optimize run experiments/{name}.yaml": "builds gigabytes of models; test_campaign_file.py plans it"
        for name in (
            "joint",
            "machine",
            "pipelines",
            "runtimes",
            "seed_000_criteria",
            "seed_000_memory",
            "seed_001_pairs",
            "seed_001_pairs_predicted",
            "seed_002_coexecution",
            "seed_002_shares",
            "seed_003_branches",
            "seed_001_rates",
            "seed_001_multi_dnn",
            "seed_004_memory_access",
        )
    },
    **{
        f"optimize run experiments/{name}.yaml": "needs a GPU"
        for name in (
            "seed_000_criteria_gpu",
            "seed_000_memory_gpu",
            "seed_001_gpu",
            "seed_001_gpu_ranks",
            "seed_001_pairs_gpu",
            "seed_002_sharing_gpu",
            "seed_002_sharing_software",
            "seed_002_terms",
            "seed_003_branches_gpu",
            "seed_004_gpu",
            "seed_004_gpu_litert",
        )
    },
    **{
        f"optimize {arguments}": "takes minutes; test_cost_model_calibrate.py calibrates, and predicts by what came out"
        for arguments in (
            "calibrate --out here.json",
            "calibrate --out here.json --minutes 5",
            "calibrate --out here.json --processors cpu0,cpu1",
            "calibrate --refine STUDY --out here.json",
            "calibrate --processors cpu0,cpu0:openvino --minutes 6 --out two.json",
            "--model resnet50 --platform here.json --evaluator cost-model --budget 50",
        )
    },
    **dict.fromkeys(
        (
            "optimize squeezenet1_1 --evaluator adb --device pixel --budget 50 --study phone",
            "optimize export runs/phone --target android --out plan",
            "adb push plan /data/local/tmp",
            "adb shell sh /data/local/tmp/plan/run.sh",
        ),
        "needs a phone; test_android.py goes this way against a double of the adb server",
    ),
    **{
        f"python {words}": "test_export.py and test_foreign_plans.py do so"
        for words in ("run_plan.py", "openvino_plan.py", "onnx_plan.py net.onnx")
    },
    "optimize mobilenet_v1 --processors cpu,gpu": "needs a GPU",
    "optimize squeezenet1_1*4 --evaluator cuda --processors stream0,stream1,stream2,stream3": "needs an NVIDIA GPU",
    "optimize net.onnx": "needs a converter; test_convert.py converts",
    "optimize compare RUN RUN": "waits for a steady machine; test_compare.py compares two runs",
    "optimize report": "a mention",
    **{f"optimize {name}": "a mention" for name in ("execute", "export", "storage")},
    "optimize agent": "serves until it is interrupted; test_remote.py measures by one",
    "optimize storage URL": "serves until it is interrupted; test_shared.py shares by one",
    "optimize calibrate": "a mention",
    "optimize calibrate --figures experiments/figures/exynos2200.yaml --out experiments/profiles/exynos2200.json": (
        "takes 20 s; test_published.py compares what it wrote"
    ),
    "python -m tests.benchmarks.main_job vgg16 200 --plain-trials 20": "measures for 5 minutes",
    "python -m tests.benchmarks.exact placement REFERENCE OUT": "test_placement.py solves the same files",
    "python -m tests.benchmarks.verdicts OUT.json --part gpu --gpu-budget 15": "needs an NVIDIA GPU",
    "python -m tests.benchmarks.busy_tests OUT.json --at-once 3": "runs tests for an hour",
    "python -m tests.benchmarks.auto_instances OUT.json": "takes two minutes; test_auto.py has some of its instances",
    "python -m tests.benchmarks.placements OUT.json": "needs a GPU; test_placements.py makes its networks",
    **{
        f"python -m tests.benchmarks.{words}": "measures for minutes"
        for words in (
            "cost_model_cpu evaluate DATA OUT.json",
            "cost_model_choice OUT.json --platform FILE",
            "verdicts OUT.json",
            "verdicts OUT.json --part traces live studies --condition NAME",
            "cost_model_plans evaluate DATA CPU_DATA OUT.json",
            "runtimes OUT.json --runs FOLDER --only squeezenet1_1",
            "runtimes OUT.json --runs FOLDER --only MODEL --processors cpu,cpu:openvino,cpu:openvino:blocked --error 0",
            "runtimes experiments/results/runtimes.json --runs runs/runtimes",
            "samplers run OUT.json",
            "trial_cost OUT.json",
            "converters FOLDER OUT.json",
        )
    },
    "pytest --benchmark-only tests/benchmarks/test_cut_cost.py": "a benchmark",
    "pytest --benchmark-only tests/benchmarks/test_models.py tests/benchmarks/test_cut_cost.py": "a benchmark",
    **{
        f"pytest{folder}": "these tests"
        for folder in (
            "",
            " -n 3 --dist loadfile",
            " tests/system",
            " tests/laws",
            " tests/search_spaces/core/test_plan.py",
            " -m litert",
        )
    },
    "pytest --golden FILE…": "writes the golden file",
    "python -m tests.faults.fuzz_files SECONDS SEED": "test_fuzz_files.py does so",
    "pytest tests/system -k every_pair": "these tests",
    "python -m tests.benchmarks.readme_picture experiments/results/several_models.svg": "a test here compares it",
    "python -m tests.pins check": "test_pins.py does so",
    **{
        f"python -m tests.composition {words}": "half an hour"
        for words in (
            "FILE --evaluator NAME",
            "experiments/results/composition.md --evaluator litert cost-model table remote example able",
            "FILE --pairs --evaluator remote example",
        )
    },
    "python -m tests.benchmarks.NAME": "measures for minutes",
    "pip install -e '.[dev]'": "the environment of these tests",
    "pytest --benchmark-only tests/benchmarks": "a benchmark",
}
_BLOCK = re.compile(r"(?:<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:optimize|python|pytest|pip)[ ][^`]+)`")


@dataclass(frozen=True)
class Block:
    file: str
    line: int
    kind: str
    mark: str
    body: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def blocks() -> Iterator[Block]:
    for file in GUIDES:
        text = (ROOT / file).read_text()
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("body")) + 1
            yield Block(file, line, match["kind"], match["mark"] or "", match["body"])


def commands() -> Iterator[tuple[str, str]]:
    """Return where and what of every command: lines of shell blocks, and those within sentences and tables."""
    for block in blocks():
        if block.kind == "sh":
            for offset, line in enumerate(block.body.splitlines()):
                for word in line.split(" && "):
                    yield f"{block.file}:{block.line + offset}", word.strip()
    for file in GUIDES:
        text = _BLOCK.sub(lambda m: "\n" * m[0].count("\n"), (ROOT / file).read_text())
        for number, line in enumerate(text.splitlines(), 1):
            for found in _INLINE.findall(line):
                yield f"{file}:{number}", found.replace("\\|", "|")


ALL = list(commands())
OURS = list(dict.fromkeys(command for _, command in ALL if command.startswith("optimize ")))
OTHERS = {
    "python3 -m venv .venv", ". .venv/bin/activate", "pip install .", "pip install '.[test]'",
    "pip install '.[dashboard]'", "pip install '.[exact]'", "pip install '.[postgres]'", "pip install '.[train]'",
    "pip install '.[tflite-runtime]'", "pip install '.[cuda]'", "pip install '.[openvino]'", "pip install '.[remote]'",
    "pip install",
    "pip install ai-edge-litert numpy",
}  # fmt: skip
"""What .ci/run does in a new virtual environment, and extras, which need a network."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, cache_folder: Path) -> Path:
    """A folder in which the guides' commands make sense: a checkout, a finished study, a plug-in."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(ROOT / "experiments", folder / "experiments")
    (folder / "small.yaml").write_text(
        f"name: small\nmatrix: {{model: {SMALL}, evaluator: synthetic, budget: 3, seed: [0, 1]}}\n"
    )
    (path := folder / "path" / "to").mkdir(parents=True)
    write(parse_name(SMALL), path / "model.tflite")
    for block in blocks():
        if block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.body)
    (project,) = [b for b in blocks() if b.kind == "toml" and b.file == "evaluators/README.md"]
    info = folder / "my_chip-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-chip\nVersion: 1.0\n")
    ((group, known),) = tomllib.loads(project.body)["project"]["entry-points"].items()
    lines = (f"{name} = {place}" for name, place in known.items())
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", str(place))
    return place


@pytest.fixture
def study(here: Path) -> Path:
    """The finished study that commands are about."""
    run = here / "runs" / "mine"
    if not (run / "result.json").exists():
        assert main(["--model", SMALL, "--budget", "3", "--study", "mine", "-q", "--processors", "cpu"]) == 0
    return run


def test_every_command_is_known_to_this_test() -> None:
    strange = [(where, c) for where, c in ALL if c not in OTHERS | NOT_RUN.keys() and not c.startswith("optimize ")]
    assert strange == []
    assert set(CHEAPER) - {command for _, command in ALL} == set()


def test_every_command_of_ours_is_reported_of() -> None:
    output = {command.split()[1] for command in OURS}
    assert {"run", "report", "plugins", "calibrate", "solve", "explain", "compare", "doctor", "execute", "inspect",
            "models", "dashboard"} <= output & set(COMMANDS)  # fmt: skip


@pytest.mark.litert
@pytest.mark.parametrize("command", OURS)
def test_commands_run(command: str, study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if command in NOT_RUN:
        pytest.skip(NOT_RUN[command])
    if "solve" in command:
        pytest.importorskip("ortools", reason="the extra 'exact' is not installed")
    run = CHEAPER.get(command, command)
    if "--study mine" in run:
        shutil.rmtree("runs/mine")
    code = main(shlex.split(run)[1:])
    _, err = capsys.readouterr()
    assert code == 0, err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "option",
    [found for line in (ROOT / "optimizer/README.md").read_text().splitlines() if line.startswith("| `--")
     for found in re.findall(r"`(--[^`]+)`", line.split(" | ")[0])],
)  # fmt: skip
def test_options_are_understood(option: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    option = option.replace("--platform FILE", "--platform board.yaml --evaluator synthetic")
    (here / "board.yaml").write_text("name: board\nprocessors: [{name: cpu, kind: cpu}]\n")
    if evaluator := re.search("tflite-runtime|cuda", option):  # what need not be here
        assert evaluator[0] in {e.name for e in entries("evaluator")}
        return
    if "--processors" in option:
        LitertEvaluator().processor("cpu0")
        option = "--processors cpu0"
    option = option.replace("KEY", "serving_default") if "--signature" in option else option
    graph = load(str(here / "path" / "to" / "model.tflite"))
    shape = graph.tensors[graph.inputs[0]].shape
    np.savez("photo.npz", **{graph.tensors[graph.inputs[0]].name: np.zeros(shape, np.float32)})  # type: ignore[arg-type]
    Path("libops.so").touch()
    option = option.replace("--warm-start RUN", "")  # the dry run reads it; test_warm.py has one
    option = (
        f"{option} --evaluator cost-model --platform pixel4".replace("cpu=", "gpu=") if "--state" in option else option
    )
    option = option.replace("detector=", f"{here / 'path' / 'to' / 'model.tflite'}=")
    Path("plan.json").write_text(json.dumps(chain_plan(graph, (), ["cpu"]).to_json()))
    model = str(here / "path" / "to" / "model.tflite") if "input-shape" not in option else SMALL
    if "--rate" in option:
        model, option = "experiments/workloads/robot.yaml", f"{option} --evaluator cost-model --platform xavier"
    option = option.replace("1,224,224,3", "1,64,64,3")
    option = f"{option} --study one" if "--storage" in option else option
    code = main(["--model", model, "--dry-run", *shlex.split(option)])
    out, err = capsys.readouterr()
    if "input-shape" in option:
        assert code == 0 or "open dimension" in err
        return
    assert code == 0, err
    assert "plans" in out


@pytest.mark.litert
@pytest.mark.parametrize("block", [b for b in blocks() if b.kind == "python"], ids=str)
def test_snippets_run(block: Block, study: Path) -> None:
    known: dict[str, Any] = {"image": np.zeros((1, 64, 64, 3), dtype=np.float32)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a busy machine, as by the exit code 5 of the command
        exec(compile(block.body.replace("budget=100", "budget=5"), str(block), "exec"), known)
    if "outputs = " in block.body:
        assert all(np.isfinite(v).all() for v in _arrays(known["outputs"]))


def _arrays(outputs: object) -> list[NDArray[Any]]:
    return list(outputs.values()) if isinstance(outputs, dict) else [np.asarray(outputs)]


@pytest.mark.parametrize("block", [b for b in blocks() if b.kind == "yaml"], ids=str)
def test_files_in_the_guides_are_valid(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(block.body)
    if block.mark == "devices":
        monkeypatch.setenv(ENVIRONMENT, str(path))
        (tmp_path / "tools" / "arm64").mkdir(parents=True)
        (tmp_path / "tools" / "arm64" / "benchmark_model").touch()
        assert [p.name for p in find_handset("pixel").platform.processors] == ["big", "gpu"]
    elif block.mark == "file: elsewhere.yaml":
        assert read_figures(path).content.figures
    elif block.mark.startswith("platform"):
        find = LitertEvaluator().processor if block.mark.endswith("litert") else None
        assert read_platform(path, find).processors
    else:
        assert plan_studies(read_campaign(path))


@pytest.mark.usefixtures("here")
class TestTheGuidesEvaluator(EvaluatorContract):
    """The example of the guide keeps the contract."""

    def evaluator(self) -> Evaluator:
        return make_evaluator("my-chip")


@pytest.mark.parametrize("file", GUIDES)
def test_links_lead_somewhere(file: str) -> None:
    text = (ROOT / file).read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (ROOT / file).parent.joinpath(target).exists(), target
    for name in re.findall(r"`(experiments/[\w./]+\.(?:json|md|yaml|svg))`", text):
        assert (ROOT / name).exists(), name


def test_what_holds_who_is_trusted_is_there() -> None:
    """Each row of the table of trust names a test, or says nothing that could be held."""
    rows = [row for row in (ROOT / "optimizer/SECURITY.md").read_text().splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        file, _, name = re.findall(r"`([^`]+)` \|$", row)[0].partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), row


def test_figures_of_the_pages_are_those_of_the_results() -> None:
    results = ROOT / "experiments" / "results"
    text = (results / "README.md").read_text()
    kept = json.loads((results / "seed_004_memory_access.json").read_text())
    for row in (r for r in kept["explained"] if r["evaluator"] == "litert"):
        laws = ("flops", "flops_and_memory")
        squares = "; ".join(f"{row[law]:.3f}" for law in laws)
        errors = " | ".join(
            "; ".join(_percent(row, f"{law}_error_{which}") for which in ("median", "p90")) for law in laws
        )
        assert f"| {squares} | {errors} |" in text, row["family"]
    board = next(r for r in kept["explained"] if r["family"] == "all" and r["platform"] == "odroid-xu4")
    assert f"({board['flops']:.3f} with work alone, {board['flops_and_memory']:.3f} with memory accesses too)" in text
    excess = json.loads((results / "five_samplers.json").read_text())["mean_excess"]
    for tried in ("10", "25", "50", "100"):
        cells = (f"{curve[tried] * 100:.1f} %" for curve in excess.values())
        assert f"| {tried} | {' | '.join(cells)} |" in (ROOT / "optimizer/samplers/README.md").read_text()
    kept = json.loads((results / "machine.json").read_text())
    faster = sum(bool(r["significant"]) and r["ratio"] > 1 for r in kept["summary"])
    assert faster == 0
    assert f"In none of {len(kept['summary'])} networks" in text
    assert f"in none of {len(kept['summary'])} networks" in (ROOT / "README.md").read_text()
    kept = json.loads((results / "seed_000_memory_gpu.json").read_text())
    for size, row in ((None, "all of them"), (830, "1.5"), (553, "1.0"), (387, "0.7"), (221, "0.4")):
        name = "stream0:f32" if size is None else f"stream0:f32:memory={size}MB"
        (best,) = (r["best_ms"] for r in kept["summary"] if r["processors"] == name)
        columns = next(line for line in text.splitlines() if line.startswith(f"| {row} |")).split(" | ")
        assert f"{best:.2f}" == columns[3]
        with (results / "seed_000_memory_gpu.csv").open(newline="") as file:
            rows = [
                r for r in csv.DictReader(file) if r["processors"] == name and r["stages"] != "1" and r["over_best"]
            ]
        over = {r["plan"]: float(r["over_best"]) for r in rows}
        every = over.pop("every layer")
        assert f"{min(over.values()):.2f} to {max(over.values()):.2f}; {every:.2f} |" == columns[4]
    kept = json.loads((results / "seed_000_criteria.json").read_text())
    measured, profile = ([r for r in kept["expected"] if r["name"].endswith(w)] for w in ("measured", "profile"))
    ratios: list[str] = []
    for rows in (measured, profile):
        *criteria, every_layer = (r["ours"] for r in rows)
        ratios.append(f"{min(criteria):.2f} to {max(criteria):.2f} | {every_layer:.2f}")
    assert f"| two cores of a Xeon | {ratios[0]} |" in text
    assert f"{min(r['ours_low'] for r in measured):.2f} to {max(r['ours_high'] for r in measured):.2f}, and" in text
    kept = json.loads((results / "seed_000_criteria_gpu.json").read_text())
    *criteria, every_layer = (r["ours"] for r in kept["expected"] if r["name"].endswith("VGG16"))
    by_length, by_type, by_count = criteria[:3], criteria[3], criteria[4:]
    row = f"layer length {min(by_length):.2f} to {max(by_length):.2f}; layer type {by_type:.2f}; parameter count "
    row += f"{min(by_count):.2f} to {max(by_count):.2f} | {every_layer:.2f}"
    assert f"| an H200 in float16 | {row} |" in text
    off = [abs(figure["error"]) for figure in _figures("exynos2200")]
    near, worst = f"{sum(e <= 0.1 for e in off)} of {len(off)}", f"{max(off) * 100:.0f} %"
    within = sum(abs(r["ratio"] - 1.0) <= r["tolerance"] for r in profile)
    assert f"| {ratios[1]} | fitted, not predicted: {within} of {len(profile)} ratios" in text
    assert f"{near} times within 10 %, at worst {worst}" in text
    shared = [
        r for r in json.loads((results / "seed_002_codl.json").read_text())["expected"] if ": shared" in r["name"]
    ]
    for r in shared:
        assert f"{r['paper']:.2f}, {r['ours']:.2f} [{r['ours_low']:.2f}, {r['ours_high']:.2f}]" in text, r["name"]
    known = sum(r["ours_low"] <= r["paper"] <= r["ours_high"] for r in shared)
    assert f"Within 15 % of CoDL are {sum(r['within'] for r in shared)} of {len(shared)}, and {known} published" in text
    with (results / "seed_001_gpu.csv").open() as file:
        at_once = {(row["study"], row["plan"]): row for row in csv.DictReader(file)}
    sets = tuple(dict.fromkeys(study for study, _ in at_once))
    ways = {
        "our plan, searched": "best",
        "one process, graphs on a stream each": "one processor per model",
        "one process, graphs one after another": "one after another on stream0",
        "a process each, the tuned kernels as a CUDA graph": APART[GRAPHS],
        "a thread each, kernel by kernel": APART[THREADS],
    }
    for what, plan in ways.items():
        less = [1 - float(at_once[s, plan]["value"]) / float(at_once[s, APART[KERNELS]]["value"]) for s in sets]
        shown = " | ".join(f"{100 * part:.0f}".replace("-", "−") for part in less)
        assert f"| {what} | {shown} |" in text


def _figures(device: str) -> list[dict[str, Any]]:
    profile = there(find_profile(device))[0]
    return [figure for figure in profile.errors["figures"] if figure["error"] is not None]


def _percent(row: Mapping[str, float], name: str) -> str:
    value, low, high = (round(100 * row[name + end]) for end in ("", "_low", "_high"))
    return f"{value} % [{low}, {high}]"


def test_the_picture_of_the_first_page_is_that_of_the_results() -> None:
    assert picture() == (ROOT / "experiments" / "results" / "several_models.svg").read_text()


def test_errors_of_figures_that_were_left_out_are_those_of_the_fits() -> None:
    checked = 0
    for path in sorted((ROOT / "experiments").glob("*.yaml")):
        campaign = read_campaign(path).content
        for expected in (e for e in campaign.expect if e.left_out is not None):
            device = expected.where.platform or next(p for p in campaign.matrix.platform if p)
            errors = {round(f["error"], 3) for f in _figures(device) if f["published_ms"] == expected.paper}
            assert expected.left_out in errors, expected.name
            checked += 1
    assert checked == 53
