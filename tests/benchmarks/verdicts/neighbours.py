"""Other work on the machine while something is measured: threads in bursts, a compiler, a second study.

All processes of a neighbour are in a process group of their own. A supervisor (this file, run as a program) starts
them; it kills the group when its standard input is closed, which also happens when the process that measures dies.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONDITIONS = ("quiet", "random", "bursts", "compiler", "optimize")
_BEGIN_S = 3.0
_SHORTEST_S, _LONGEST_S = 0.001, 2.0  # of a spell of the neighbour "random"
_BURST_S = (5.0, 20.0)
_FUNCTIONS = 120


def describe(condition: str) -> str:
    """Return what the neighbour of a condition does, in words."""
    compiler = shutil.which("g++")
    compiling = "g++ -O2 of a generated file of templates, in a loop"
    if compiler is None:
        compiling = "python -m compileall of the standard library in a loop (no C++ compiler is installed)"
    return {
        "quiet": "none",
        "random": f"one thread, busy and idle for {_SHORTEST_S:g} to {_LONGEST_S:g} s (log-uniform)",
        "bursts": f"two threads at once, busy and idle for {_BURST_S[0]:g} to {_BURST_S[1]:g} s",
        "compiler": compiling,
        "optimize": "optimize --model squeezenet1_1 --budget 40, in a loop, on the same cores",
    }[condition]


@contextmanager
def neighbour(condition: str) -> Iterator[int | None]:
    """Have the neighbour of a condition meanwhile; yields its process group, None for ``quiet``."""
    if condition == "quiet":
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), condition, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            time.sleep(_BEGIN_S)
            if process.poll() is not None:
                raise RuntimeError(f"the neighbour {condition} ended with exit code {process.returncode}")
            yield process.pid
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.stdin is not None:
                process.stdin.close()
            process.wait()


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _at_random(_: Path) -> None:
    source = random.Random(0)
    ratio = _LONGEST_S / _SHORTEST_S
    while True:
        _spin(_SHORTEST_S * ratio ** source.random())
        time.sleep(_SHORTEST_S * ratio ** source.random())


def _in_bursts(_: Path) -> None:
    source = random.Random(0)
    os.fork()  # both processes draw the same spells
    while True:
        _spin(source.uniform(*_BURST_S))
        time.sleep(source.uniform(*_BURST_S))


def _compiling(folder: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        library = str(Path(os.__file__).parent)
        while True:
            command = [sys.executable, "-m", "compileall", "-q", "-f", library]
            subprocess.run(command, env={**os.environ, "PYTHONPYCACHEPREFIX": str(folder)}, check=False)
    source = folder / "large.cc"
    source.write_text(_cpp())
    while True:
        subprocess.run([compiler, "-std=c++17", "-O2", "-c", str(source), "-o", str(folder / "large.o")], check=True)


def _cpp() -> str:
    """Return C++ that keeps a compiler busy for about a minute: each function has types of its own."""
    head = "#include <algorithm>\n#include <map>\n#include <regex>\n#include <string>\n#include <tuple>\n"
    head += "#include <variant>\n#include <vector>\ntemplate <int N> struct T { int v[N + 1]; double d = N; };\n"
    body = """
int f{i}(const std::string& text) {{
  using Items = std::vector<std::variant<int, double, std::string, T<{i}>>>;
  using Row = std::tuple<std::string, T<{i}>, Items>;
  std::map<std::string, std::vector<Row>> rows;
  rows[text].emplace_back(text, T<{i}>{{}}, Items{{1, 2.0, text}});
  for (auto& [key, list] : rows)
    std::sort(list.begin(), list.end(), [](const Row& a, const Row& b) {{ return std::get<0>(a) < std::get<0>(b); }});
  int sum = std::regex_search(text, std::regex("a+b{i}")) ? 1 : 0;
  for (auto& [key, list] : rows)
    for (auto& row : list)
      for (auto& item : std::get<2>(row))
        sum += std::visit([](auto&& value) {{ return static_cast<int>(sizeof(value)); }}, item);
  return sum;
}}
"""
    return head + "".join(body.format(i=i) for i in range(_FUNCTIONS))


def _optimizing(folder: Path) -> None:
    seed, cores = 0, ",".join(["cpu", *(f"cpu{core}" for core in sorted(os.sched_getaffinity(0)))])
    while True:
        command = [sys.executable, "-m", "optimizer.cli", "--model", "squeezenet1_1", "--budget", "40", "-q"]
        command += ["--processors", cores, "--seed", str(seed), "--out", str(folder / str(seed))]
        subprocess.run(command, check=False)
        shutil.rmtree(folder / str(seed), ignore_errors=True)
        seed += 1


def _watch() -> None:
    sys.stdin.buffer.read()
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    """Be the neighbour that the command line names until standard input is closed."""
    work = {"random": _at_random, "bursts": _in_bursts, "compiler": _compiling, "optimize": _optimizing}[sys.argv[1]]
    if work is not _in_bursts:
        threading.Thread(target=_watch, daemon=True).start()
        work(Path(sys.argv[2]))
    elif os.fork():
        _watch()
    else:
        work(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
