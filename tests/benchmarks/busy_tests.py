"""Whether tests pass on a busy machine: ``python -m tests.benchmarks.busy_tests OUT.json [--runs N]``.

Runs the tests with the mark ``timing``, each time in a new process, beside a compiler that never stops; several of
these processes at once disturb each other, too. Runs that are in OUT.json are kept, and the command goes on there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from optimizer.files import write_json
from optimizer.provenance import provenance
from tests.benchmarks.verdicts.neighbours import describe, neighbour

_LIMIT_S = 900.0
_SHOWN = 120  # lines of the output of a run that failed


def once(number: int) -> dict[str, Any]:
    """Return what one run came to, and the seconds that it took."""
    files = [str(path) for path in sorted(Path("tests").rglob("test_*.py")) if "mark.timing" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "timing", "-p", "no:cacheprovider", "--tb=short", *files]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    lines = done.stdout.strip().splitlines() or [""]
    found = {"run": number, "exit_code": done.returncode, "seconds": round(time.monotonic() - begin, 1)}
    return found | {"result": lines[-1]} | ({"output": lines[-_SHOWN:]} if done.returncode else {})


def main() -> None:
    """Run the tests until OUT has as many runs as were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--beside", default="compiler")
    options = parser.parse_args()
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    runs: list[dict[str, Any]] = known.get("runs", [])
    with neighbour(options.beside), ThreadPoolExecutor(options.at_once) as pool:
        for found in pool.map(once, range(len(runs), options.runs)):
            runs.append(found)
            document = {
                "schema_version": 1,
                "made_by": "python -m tests.benchmarks.busy_tests OUT.json",
                **provenance(),
                "beside": f"{describe(options.beside)}; {options.at_once} runs at once",
                "failed": sum(run["exit_code"] != 0 for run in runs),
                "runs": runs,
            }
            write_json(options.out, document)
            print(found["run"], found["result"], flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
