"""What a record costs: 3 ms at most, of a trial that takes some hundred."""

from __future__ import annotations

from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

from optimizer.study.log import TrialLog, read_log

# A trial as it is: 40 samples of 4 stages.
TRIAL = {
    "params": {f"cut_{i}": i for i in range(8)},
    "latency_s": [0.0781234567 + i * 1e-6 for i in range(40)],
    "stage_s": [[0.0195308642 + i * 1e-6] * 4 for i in range(40)],
}
MAX_APPEND_S = 0.003


def test_append(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    log, _ = TrialLog.open(tmp_path / "trials.jsonl")
    with log:
        benchmark.pedantic(log.append, ("trial", TRIAL), rounds=200, warmup_rounds=5)  # type: ignore[no-untyped-call]
    assert benchmark.stats is not None
    assert benchmark.stats.stats.median <= MAX_APPEND_S


def test_read_1000_records(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    log, _ = TrialLog.open(path)
    with log:
        for _ in range(1000):
            log.append("trial", TRIAL)
    contents = benchmark.pedantic(read_log, (path,), rounds=5)  # type: ignore[no-untyped-call]
    assert len(contents.records) == 1000
