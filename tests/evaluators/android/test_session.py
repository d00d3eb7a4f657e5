"""Plans on a phone, of which there is none here: against a server double that speaks adb's own wire formats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evaluators.android.adb import Phone
from evaluators.android.session import FOLDER, AdbEvaluator, AdbSession, profiled_s
from evaluators.contract import EvaluatorContract
from search_spaces.core.errors import DeviceLostError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan
from tests.support.adb_server import SERIAL, SPEED, PhoneServer, phone_in_farm
from tests.support.sentences import fails, says


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PhoneServer]:
    with phone_in_farm(tmp_path, monkeypatch) as server:
        yield server


def evaluator() -> AdbEvaluator:
    found = AdbEvaluator()
    found.at("pixel")
    return found


@contextmanager
def session() -> Iterator[AdbSession]:
    made = evaluator()
    with made.prepare(made.platform()) as opened:
        yield opened


class TestAdbContract(EvaluatorContract):
    call_s = 5.0

    @pytest.fixture(autouse=True)
    def _phone(self, phone: PhoneServer) -> None:
        """Have a phone."""

    def evaluator(self) -> AdbEvaluator:
        return evaluator()

    def graph(self) -> Graph:
        return load("squeezenet1_1@0.25/64")


def test_stages_are_timed_alone_and_transfers_are_priced(phone: PhoneServer, small: Graph) -> None:
    plan = chain_plan(small, [5], ["big", "gpu"])
    with session() as opened:
        batch = opened.load(small, plan).run(3)
        conditions = opened.conditions()
    made = [sum(small.tensors[t].nbytes for o in s.operators for t in small.operators[o].outputs) for s in plan.stages]
    for column, nbytes, kind in zip(batch.stage_s.T, made, ("cpu", "gpu"), strict=True):
        assert column == pytest.approx(nbytes / SPEED[kind], rel=0.2)
    crossing = sum(small.tensors[t].nbytes for t in small.boundary(plan.stages[1].operators).inputs)
    priced_s = 1e-4 * len(small.boundary(plan.stages[1].operators).inputs) + crossing / 1e9  # each tensor waits
    assert batch.latency_s == pytest.approx(batch.stage_s.sum(axis=1) + priced_s, rel=0.05)
    says(conditions["transfer"])
    assert (conditions["temperature_c"], conditions["clock_hz"]) == (31.5, 1.8048e9)
    timed = [words for words in phone.commands if any(word.startswith("--graph=") for word in words)]
    assert len(timed) == 10  # two stages in five processes each
    assert timed[0][:2] == ["taskset", "f0"]
    assert "--use_gpu=true" in timed[-1]


def test_what_was_sent_and_timed_is_not_sent_and_timed_again(phone: PhoneServer, small: Graph) -> None:
    with session() as opened:
        opened.load(small, chain_plan(small, [5], ["big", "gpu"]))
        before = len(phone.commands), len(phone.pushed)
        opened.load(small, chain_plan(small, [5], ["big", "gpu"]))
        assert (len(phone.commands), len(phone.pushed)) == before
        opened.load(small, chain_plan(small, [5], ["gpu", "gpu"]))
        assert len(phone.pushed) == before[1]  # the same files on another processor
    with session() as opened:
        opened.load(small, chain_plan(small, [5], ["big", "gpu"]))
    assert len(phone.pushed) == before[1]
    assert all(name.startswith(f"{FOLDER}/") and name.endswith(".part") for name in phone.pushed)


def test_a_phone_that_is_gone_hangs_or_changes_files(phone: PhoneServer, small: Graph) -> None:
    plan = chain_plan(small, [], ["big"])
    with session() as opened:
        phone.present = False
        with fails(DeviceLostError):
            opened.load(small, plan)
        phone.present = True
        phone.hangs.add("getprop")
        with fails(DeviceLostError):
            Phone(SERIAL, "127.0.0.1", phone.server_address[1]).shell(["getprop", "x"], 0.3)
        phone.tampers = True
        with fails(UnavailableError):
            opened.load(small, plan)
        phone.tampers = False
        opened.load(small, plan)
        with fails(UnavailableError), session():
            pass
    with fails(UnavailableError):
        Phone(SERIAL, "127.0.0.1", 9).shell(["true"])


def test_what_is_no_profile_is_reported() -> None:
    for content in (b"", b"\xff\xff", b"STARTING!"):
        with fails(UnavailableError):
            profiled_s(content)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("serial: ", "serail: "),
        ("--use_gpu=true", "--graph=/etc/passwd"),
        ("--use_gpu=true", "'--use_gpu=true; rm -rf /'"),
        ("mask: f0", "mask: '; reboot'"),
        ("kind: gpu", "kind: dsp"),
        ("benchmark_model: benchmark_model", "benchmark_model: gone"),
        ("name: gpu", "name: big"),
    ],
)
def test_farm_files_tell_what_is_wrong(before: str, after: str, phone: PhoneServer, tmp_path: Path) -> None:
    farm = tmp_path / "devices.yaml"
    farm.write_text(farm.read_text().replace(before, after, 1))
    with fails(UsageError) as reported:
        evaluator()
    assert "devices.yaml:" in str(reported.value)
