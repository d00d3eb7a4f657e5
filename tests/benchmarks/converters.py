"""How many architectures of torchvision and timm arrive at a measured plan, with seeded weights; failures by cause.

    python -m tests.benchmarks.converters FOLDER OUT.json [MINUTES]

Each is converted, compared with PyTorch, and searched with a budget of two plans on one core. FOLDER keeps what was
converted and the runs; what it holds is not done again. Needs ``pip install '.[torch]' timm``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 420
TORCHVISION = [
    "alexnet",
    "squeezenet1_1",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "shufflenet_v2_x1_0",
    "mnasnet0_5",
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "googlenet",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "regnet_y_400mf",
    "convnext_tiny",
    "inception_v3",
    "vgg11",
    "swin_t",
    "vit_b_32",
]
TIMM = [
    "resnet18",
    "mobilenetv3_small_100",
    "mobilenetv4_conv_small",
    "mobilevit_xxs",
    "efficientnet_lite0",
    "ghostnet_100",
    "hardcorenas_a",
    "lcnet_050",
    "tinynet_e",
    "mixnet_s",
    "repvgg_a0",
    "fbnetc_100",
    "regnetx_002",
    "edgenext_xx_small",
    "fastvit_t8",
    "convnext_atto",
    "poolformer_s12",
    "levit_128s",
    "deit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
]


def attempt(name: str, folder: Path) -> dict[str, Any]:
    """Return what became of an architecture."""
    out = folder / re.sub(r"[^a-z0-9_]", "-", name)
    words = [name, "--processors", "cpu0", "--max-stages", "1", "--budget", "2", "-q", "--json", "--out", str(out)]
    env = os.environ | {"PARTITION_OPTIMIZER_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    begin_s = time.monotonic()
    command = [sys.executable, "-m", "optimizer.cli", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=LIMIT_S)
        code, reported = done.returncode, (done.stderr.strip().splitlines() or [""])[-1]
    except subprocess.TimeoutExpired:
        code, reported = -1, f"took more than {LIMIT_S} s"
    found: dict[str, Any] = {"name": name, "exit_code": code, "seconds": round(time.monotonic() - begin_s, 1)}
    if code in {0, 5}:  # 5: measured, on a machine too disturbed to decide between its plans
        return found | {"operators": json.loads(done.stdout)["model"]["operators"]}
    return found | {"cause": reported.removeprefix("optimize: ").removeprefix(f"{name}: ")}


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    end_s = time.monotonic() + 60 * float(sys.argv[3] if len(sys.argv) > 3 else 600)
    known = {each["name"]: each for each in json.loads(out.read_text())["models"]} if out.exists() else {}
    names = [f"{kind}:{name}" for pair in zip(TORCHVISION, TIMM, strict=True) for kind, name in
             zip(("torchvision", "timm"), pair, strict=True)]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name in known or time.monotonic() > end_s:
            continue
        known[name] = attempt(name, folder)
        sys.stderr.write(json.dumps(known[name]) + "\n")
        packages = ("torch", "torchvision", "timm", "litert-torch", "ai-edge-litert")
        document = {
            "command": "python -m tests.benchmarks.converters FOLDER OUT.json",
            "versions": {package: version(package) for package in packages},
            "arrived": sum("cause" not in each for each in known.values()),
            "tried": len(known),
            "of": len(names),
            "models": [known[n] for n in names if n in known],
        }
        out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
