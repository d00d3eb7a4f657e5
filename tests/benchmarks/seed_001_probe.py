"""What a GPU can do at most, and which Tucker triples are quicker there than the convolutions that they replace.

Both are asked of a process of its own: ``python -m tests.benchmarks.seed_001_probe`` reads a JSON line and writes one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
BUSY = 4


def ask(question: Mapping[str, Any]) -> Any:
    """Ask a new process."""
    command = [sys.executable, "-m", "tests.benchmarks.seed_001_probe"]
    limit_s = LIMIT_S + question.get("seconds", 0.0)
    try:
        run = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"the probe did not end within {limit_s:.0f} s") from None
    if run.returncode:
        raise SystemExit(f"the probe failed: {run.stderr[-2000:]}")
    return json.loads(run.stdout.strip().splitlines()[-1])


def ceilings(device: str, precision: str) -> dict[str, float]:
    """Return bytes a second that are read, and floating-point operations a second of a large matrix product."""
    import torch

    size, nbytes = (8192, 4 << 30) if device != "cpu" else (256, 1 << 24)
    data = torch.ones(nbytes // 4, device=device)
    a, b = (torch.randn((size, size), device=device) for _ in range(2))
    read = min(_seconds(data.sum, device) for _ in range(3))
    copied = min(_seconds(data.clone, device) for _ in range(3))
    product = min(_seconds(lambda: a @ b, device) for _ in range(4))
    return {
        "precision": precision,  # type: ignore[dict-item]
        "read_bytes_per_s": nbytes / read,
        "copied_bytes_per_s": 2 * nbytes / copied,
        "flop_per_s": 2 * size**3 / product,
    }


def _seconds(call: Any, device: str, repeats: int = 5) -> float:
    import torch

    wait = torch.cuda.synchronize if device != "cpu" else (lambda: None)
    call()
    wait()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - begin) / repeats


def operator_seconds(path: Path, operators: Sequence[int], device: str, tuning: Any, end_s: float) -> dict[int, float]:
    """Return what each convolution takes in its quickest way, while other streams are busy too.

    Args:
        end_s: on the monotonic clock; those for which no time is left are absent.
    """
    from evaluators.cuda.lowering import Weights, lower
    from search_spaces.models.litert import read_model

    weights = Weights(read_model(path), device)
    found = {}
    for operator in operators:
        if time.monotonic() > end_s:
            break
        seen: list[float] = []

        def choose(site: Any, seen: list[float] = seen) -> str:
            way = str(tuning(site))
            seen.append(min(tuning.times_s[tuning._key + site.signature].values()))
            return way

        lower(weights, [operator], choose, gpu=True)
        found[operator] = sum(seen)
    return found


def main() -> None:
    """Answer one question."""
    asked = json.loads(sys.stdin.read())
    device, precision = asked["device"], asked["precision"]
    import torch

    torch.set_grad_enabled(mode=False)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    answer: dict[str, Any] = {}
    if asked.get("ceilings"):
        answer["ceilings"] = ceilings(device, precision)
    if "models" in asked and device != "cpu":
        from evaluators.cuda.instance import Tuning

        tuning = Tuning(precision, BUSY)
        end_s = time.monotonic() + asked["seconds"]
        answer["seconds"] = [
            {str(k): s for k, s in operator_seconds(Path(path), operators, device, tuning, end_s).items()}
            for path, operators in asked["models"]
        ]
        answer |= {"chosen": tuning.chosen, "times_s": tuning.times_s}
    print(json.dumps(answer))  # noqa: T201


if __name__ == "__main__":
    main()
