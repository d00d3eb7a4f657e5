"""The whole job on VGG16 against the plain loop, which runs a few trials here and is scaled up; see ``main_job``."""

from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

from tests.benchmarks import main_job

BUDGET, PLAIN_TRIALS = 200, 15


def test_the_job_is_ten_times_faster_than_the_plain_loop(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """And its plan is not significantly slower than that of the plain loop."""
    ours_s, our_plan = benchmark.pedantic(main_job.ours, ("vgg16", BUDGET, tmp_path / "run"))  # type: ignore[no-untyped-call]
    each_s, plain_plan = main_job.plain("vgg16", PLAIN_TRIALS)
    found = main_job.versus("vgg16", plain_plan, our_plan, max_s=10.0)
    benchmark.extra_info |= {
        "ours_s": ours_s,
        "plain_s": each_s * BUDGET,
        "our_plan": our_plan.to_json()["stages"],
        "plain_plan": plain_plan.to_json()["stages"],
        "our_plan_is_faster_by": found.ratio.value,
        "ci95": found.ratio.ci95,
    }
    assert each_s * BUDGET >= 10 * ours_s
    assert found.ratio.ci95[1] >= 1.0
