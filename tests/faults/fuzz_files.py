"""Every file that a command reads, made hostile: each ends with a documented exit code and no traceback.

``python -m tests.faults.fuzz_files SECONDS SEED`` tries as many as there is time for, and prints what went wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from optimizer.cli import main as optimize
from optimizer.study.log import encode, header, read_log
from tests.support.commands import SEARCHED

MODEL = "squeezenet1_1@0.25/64"
LIMIT_S = 60.0
DOCUMENTED = {0, 2, 3, 4, 5}
MEMORY_NBYTES = 3 << 30
NAME = "\x1b[31m<script>alert(1)</script>=cmd|' /C calc'!A0\x07\u202e"
LEAVES: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 10**400, -(10**400), 0.5, 1e308, "", "x", "../../etc/passwd", NAME, "\x00",
    "9" * 5000, [], {}, [[]], {"a": {}}, [1, 2, 3], "NaN", "1e999",
)  # fmt: skip
RAW = (
    b"", b"\x00", b"\xff" * 100, b"{", b"[]", b"{}", b"null", b"NaN", b"1e999", b'"x"', b"[" * 100_000,
    b'{"a":' * 100_000, b"9" * 10_000, b'{"schema_version": 1e999}', b"a: &a [*a]\n",
    b"!!python/object/apply:os.system [x]",
    b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nd: [*c,*c,*c,*c]\n",
)  # fmt: skip
PLACES = ("fifo", "zero", "folder", "loop", "dangling", "full")


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of a command.

    Attributes:
        code: its exit code; None where it did not end in time.
        out, err: what it printed.
    """

    code: int | None
    out: str
    err: str

    @property
    def problem(self) -> str:
        """What is wrong with it, or ""."""
        if self.code is None:
            return "did not end"
        if self.code not in DOCUMENTED:
            return f"exit code {self.code}: {self.err.strip()[-300:]}"
        if "Traceback" in self.err:
            return "a traceback"
        if "\x1b[31m" in self.out + self.err or "\x07" in self.out + self.err:
            return "a name's escape sequence reached the terminal"
        return ""


def tried(words: Sequence[str], limit_s: float = LIMIT_S) -> Tried:
    """Run a command in a process of its own, with bounded time and memory."""
    read, write = os.pipe()
    reported, tell = os.pipe()
    child = os.fork()
    if child == 0:
        import resource

        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_NBYTES, MEMORY_NBYTES))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(write, 1)
        os.dup2(tell, 2)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="replace", buffering=1)
        with contextlib.suppress(SystemExit):
            ended = optimize(list(words))
            sys.stdout.flush()
            os._exit(ended)
        os._exit(70)
    os.close(write)
    os.close(tell)
    ends = {read: b"", reported: b""}
    until_s = time.monotonic() + limit_s
    code: int | None = None
    try:
        open_ends = set(ends)
        while open_ends and time.monotonic() < until_s:
            for end in select.select(list(open_ends), [], [], 0.5)[0]:
                if chunk := os.read(end, 1 << 16):
                    ends[end] += chunk
                else:
                    open_ends.discard(end)
        if not open_ends:
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if code is None:
            os.waitpid(child, 0)
        os.close(read)
        os.close(reported)
    return Tried(code, ends[read].decode(errors="replace"), ends[reported].decode(errors="replace"))


def replaced(value: Any, chance: random.Random, by: Callable[[Any], Any]) -> Any:
    """Return plain values with one of them, at any depth, replaced."""
    places = list(_places(value))
    path = chance.choice(places) if places else ()
    return _with(value, path, by)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from _places(each, (*path, key))


def _with(value: Any, path: tuple[Any, ...], by: Callable[[Any], Any]) -> Any:
    if not path:
        return by(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _with(value[path[0]], path[1:], by)
    return copy


def made_hostile(file: Path, chance: random.Random) -> str:
    """Change a file in one way that nobody means well by, and return which."""
    way = chance.choice(["raw", "place", "leaf", "leaf", "leaf", "leaf", "missing", "cut"])
    if way == "place":
        return in_place(file, chance.choice(PLACES))
    if way == "raw":
        content = chance.choice(RAW)
        file.write_bytes(content)
        return f"holds {content[:40]!r}"
    content = file.read_bytes()
    if way == "cut" or file.suffix not in {".json", ".jsonl", ".yaml"}:
        at = chance.randrange(len(content) + 1)
        file.write_bytes(
            content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :] if way != "cut" else content[:at]
        )
        return f"{way} at {at}"
    leaf = chance.choice(LEAVES)

    def change(before: Any) -> Any:
        if way == "missing":
            return None if not isinstance(before, dict) or not before else dict(list(before.items())[1:])
        return leaf

    if file.suffix == ".jsonl":
        records = list(read_log(file).records)
        at = chance.randrange(len(records))
        lines = [header()]
        for number, record in enumerate(records):
            data = replaced(dict(record.data), chance, change) if number == at else dict(record.data)
            lines.append(encode(record.n, record.kind, data if isinstance(data, dict) else {}))
        file.write_bytes(b"".join(lines))
        return f"record {at + 1}: {way} {str(leaf)[:40]!r}"
    if file.suffix == ".yaml":
        import yaml

        file.write_text(yaml.safe_dump(replaced(yaml.safe_load(content), chance, change)), encoding="utf-8")
    else:
        file.write_text(json.dumps(replaced(json.loads(content), chance, change)), encoding="utf-8")
    return f"{way} {str(leaf)[:40]!r}"


def in_place(file: Path, kind: str) -> str:
    """Put something that is no regular file, or never ends, in the place of a file."""
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        target = {"zero": "/dev/zero", "loop": str(file), "dangling": "/nonexistent/x", "full": "/dev/full"}[kind]
        file.symlink_to(target)
    return kind


def prepared(folder: Path) -> dict[str, Path]:
    """Make one of each thing that commands read."""
    from search_spaces.models.zoo import write
    from search_spaces.models.zoo.names import parse_name

    made = {name: folder / name for name in ("run", "predicted", "campaign", "several", "policy.npz")}
    base = ["--model", MODEL, "--max-stages", "2", "-q"]
    for words in (
        [*base, "--budget", "4", "--processors", "cpu", "--out", str(made["run"])],
        [*base, "--budget", "4", "--evaluator", "cost-model", "--platform", "xavier", "--out", str(made["predicted"])],
        ["--model", f"{MODEL}×2", "--evaluator", "cost-model", "--platform", "xavier", "--budget", "3", "-q", "--out",
         str(made["several"])],
        ["pretrain", "--model", MODEL, "--platform", "xavier", "--batches", "4", "--out", str(made["policy.npz"])],
    ):  # fmt: skip
        found = tried(words, 300.0)
        if found.code not in SEARCHED:
            raise RuntimeError(found.err)
    (folder / "c.yaml").write_text(f"name: c\nmatrix: {{model: {MODEL}, evaluator: synthetic, budget: [2, 3]}}\n")
    if tried(["run", str(folder / "c.yaml"), "--out", str(made["campaign"]), "-q"]).code != 0:
        raise RuntimeError("the campaign failed")
    (folder / "platform.yaml").write_text("name: p\nprocessors:\n- {name: a, processor: cpu}\n- {name: d, kind: npu}\n")
    (folder / "workload.yaml").write_text(f"name: w\nmodels:\n- {{model: {MODEL}, count: 2}}\nseed: 3\n")
    shutil.copy(Path(__file__).parents[2] / "experiments" / "tables" / "one_inference.yaml", folder / "table.yaml")
    shutil.copy(Path(__file__).parents[2] / "experiments" / "profiles" / "xavier.json", folder / "profile.json")
    write(parse_name(MODEL), folder / "model.tflite")
    np.savez_compressed(folder / "input.npz", np.zeros((1, 64, 64, 3), np.float32))
    return made


def cases(folder: Path, out: Path) -> list[tuple[str, list[str]]]:
    """Return each file, relative to the folder, with the commands that read it."""
    base = ["--max-stages", "2", "-q", "--dry-run"]
    run, several, predicted = (str(folder / name) for name in ("run", "several", "predicted"))
    go_on = ["--model", MODEL, "--max-stages", "2", "-q"]
    of_run = [
        ["report", run, "--out", str(out)], ["execute", run], ["export", run, "--out", str(out)],
        [*go_on, "--budget", "5", "--processors", "cpu", "--out", run],
        [*go_on, "--budget", "2", "--processors", "cpu", "--warm-start", run, "--out", str(out)],
    ]  # fmt: skip
    of_predicted = [
        ["report", predicted, "--out", str(out)], ["explain", predicted],
        [*go_on, "--budget", "6", "--evaluator", "cost-model", "--platform", "xavier", "--out", predicted],
    ]  # fmt: skip
    of_several = [["report", several, "--out", str(out)], ["execute", several]]
    inside = ("manifest.json", "config.yaml", "trials.jsonl", "result.json", "best/plan.json")
    found = [(f"run/{name}", words) for name in (*inside, "best/stage_0.tflite") for words in of_run]
    found += [(f"predicted/{name}", words) for name in inside for words in of_predicted]
    found += [(f"several/{name}", words) for name in (*inside, "best/workload.json") for words in of_several]
    found += [
        ("campaign/campaign.json", ["report", str(folder / "campaign"), "--out", str(out)]),
        ("c.yaml", ["run", str(folder / "c.yaml"), "--out", str(out), "-q"]),
        ("platform.yaml", ["--model", MODEL, "--platform", str(folder / "platform.yaml"), *base]),
        ("platform.yaml", ["--model", MODEL, "--platform", str(folder / "platform.yaml"), "--processors", "a",
                           "--budget", "2", "-q", "--out", str(out)]),
        ("profile.json", ["--model", MODEL, "--platform", str(folder / "profile.json"), "--evaluator", "cost-model",
                          "--budget", "2", "--max-stages", "2", "-q", "--out", str(out)]),
        ("workload.yaml", ["--workload", str(folder / "workload.yaml"), "--evaluator", "cost-model", "--platform",
                           "xavier", "-q", "--dry-run"]),
        ("table.yaml", ["solve", str(folder / "table.yaml"), "--time-limit", "5"]),
        ("input.npz", ["execute", run, "--input", str(folder / "input.npz")]),
        ("model.tflite", ["inspect", str(folder / "model.tflite")]),
        ("policy.npz", ["--model", MODEL, "--evaluator", "synthetic", "--sampler", f"reinforce@{folder / 'policy.npz'}",
                        "--budget", "8", "--max-stages", "2", "-q", "--out", str(out)]),
    ]  # fmt: skip
    return found


def main() -> None:
    """Try hostile files until the time is up; 1 where one of them did what is not documented."""
    limit_s, chance = float(sys.argv[1]), random.Random(int(sys.argv[2]))
    end_s = time.monotonic() + limit_s
    codes: Counter[str] = Counter()
    problems: dict[str, str] = {}
    with TemporaryDirectory() as name:
        clean, folder, out = Path(name) / "clean", Path(name) / "now", Path(name) / "out"
        clean.mkdir()
        prepared(clean)
        while time.monotonic() < end_s:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(clean, folder)
            file, words = chance.choice(cases(folder, out))
            how = made_hostile(folder / file, chance)
            found = tried(words)
            codes[str(found.code)] += 1
            if found.problem:
                reported = " ".join(word.replace(name, "") for word in words)
                problems.setdefault(found.problem[:160], f"{file} {how}: {reported}")
                sys.stderr.write(f"{found.problem}\n   {file} {how}: {reported}\n")
    sys.stdout.write(json.dumps({"tried": codes.total(), "codes": codes, "problems": len(problems)}, indent=2) + "\n")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
