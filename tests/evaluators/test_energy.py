"""Energy: the platform's powers first, then what the machine counts, and a clear word where there is neither."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from evaluators.energy import find_meter, powers_w
from evaluators.testing import SyntheticEvaluator
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.platform import Platform
from tests.support.sentences import fails, says


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_rapl_counts_packages_and_goes_round(tmp_path: Path) -> None:
    package = tmp_path / "class/powercap/intel-rapl:0"
    counter = write(package / "energy_uj", "9000000\n")
    write(package / "max_energy_range_uj", "10000000\n")
    write(tmp_path / "class/powercap/intel-rapl:0:0/energy_uj", "1\n")
    meter = find_meter(tmp_path)
    assert meter.name == "RAPL"
    assert meter.joules() == 0.0
    write(counter, "9500000\n")
    assert meter.joules() == pytest.approx(0.5)
    write(counter, "500000\n")
    assert meter.joules() == pytest.approx(1.5)
    counter.unlink()
    with fails(UnavailableError):
        meter.joules()


def test_hwmon_counts_energy(tmp_path: Path) -> None:
    counter = write(tmp_path / "class/hwmon/hwmon3/energy1_input", "100\n")
    meter = find_meter(tmp_path)
    meter.joules()
    write(counter, "2000100\n")
    assert meter.joules() == pytest.approx(2.0)


@pytest.mark.parametrize("kind", ["hwmon", "rail", "old rail"])
def test_powers_are_added_up_over_time(tmp_path: Path, kind: str) -> None:
    if kind == "hwmon":
        write(tmp_path / "class/hwmon/hwmon0/power1_input", "4000000\n")
    elif kind == "rail":
        write(tmp_path / "class/hwmon/hwmon0/in1_label", "VDD_IN\n")
        write(tmp_path / "class/hwmon/hwmon0/in1_input", "5000\n")
        write(tmp_path / "class/hwmon/hwmon0/curr1_input", "800\n")
    else:
        write(tmp_path / "bus/i2c/drivers/ina3221x/1-0040/iio:device0/in_power0_input", "4000\n")
    meter = find_meter(tmp_path)
    marks = [time.perf_counter()]  # before and after each reading, which may be interrupted for any time
    readings = []
    for _ in range(2):
        readings.append(meter.joules())
        marks.append(time.perf_counter())
        time.sleep(0.05)
        marks.append(time.perf_counter())
    joules = readings[1] - readings[0]
    assert 4.0 * (marks[2] - marks[1]) <= joules <= 4.0 * (marks[3] - marks[0])
    (reader,) = (thread for thread in threading.enumerate() if thread.name == meter.name)
    del meter
    reader.join(60.0)
    assert not reader.is_alive()  # nobody has the meter any more


def test_where_nothing_tells_that_is_said(tmp_path: Path) -> None:
    with fails(UsageError) as caught:
        find_meter(tmp_path)
    says(caught.value.hint)


def test_powers_of_a_person_come_first(tmp_path: Path) -> None:
    write(tmp_path / "class/powercap/intel-rapl:0/energy_uj", "1\n")
    evaluator = SyntheticEvaluator()
    platform = evaluator.platform()
    stated = Platform("told", tuple(replace(p, options={**p.options, "power_w": 2.5}) for p in platform.processors))
    part = Platform("part", (stated.processors[0], *platform.processors[1:]))
    with evaluator.prepare(platform) as session:
        assert powers_w(stated, session, tmp_path) == ({"cpu": 2.5, "cpu0": 2.5, "cpu1": 2.5}, None)
        with fails(UsageError):
            powers_w(part, session, tmp_path)
        unlike = [
            replace(p, options={**p.options, "power_w": w}) for p, w in zip(platform.processors, (5, 2, 1), strict=True)
        ]
        with fails(UsageError):
            powers_w(Platform("unlike", tuple(unlike)), session, tmp_path)
        powers, meter = powers_w(platform, session, tmp_path)
        assert powers == {}
        assert meter is not None
