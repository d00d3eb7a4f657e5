"""Tables of operators' times on which samplers are compared: ``experiments/results/operator_times.json``.

``python -m tests.benchmarks.sampler_tables OUT.json --models A,B --processors cpu0,cpu1:builtin`` times each operator
of each model on each processor of this machine, as a study does before it searches. ``--runs FOLDER…`` adds tables of
studies that were run elsewhere, from the profiles in their trial logs; their runtime's own placements are left out.
A model that OUT has already is kept. Transfers are what each study read, disturbed ones among them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evaluators.litert.session import LitertEvaluator
from evaluators.remote.wire import platform_from_json, platform_to_json
from optimizer.devices import choose_platform
from optimizer.model.profile import Profile, Profiler, profile
from optimizer.provenance import machine, provenance
from search_spaces.core.platform import Limits, Platform
from search_spaces.models import load

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "operator_times.json"
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Timed:
    """The operators of a network on some processors.

    Attributes:
        where: the machine, in a word.
    """

    network: str
    where: str
    platform: Platform
    profile: Profile

    @classmethod
    def of(cls, network: str, where: str, platform: Platform, known: Profile) -> Timed:
        """Return the table of processors that are called what they are like, without what a runtime needs of them."""
        plain = tuple(replace(p, like=p.name, options={}) for p in platform.processors)
        return cls(network, where, Platform(where, plain), known.of({p.name: p.like for p in platform.processors}))

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain values, each to four digits."""
        platform, known = platform_to_json(self.platform), _rounded(self.profile.to_json())
        return {"network": self.network, "where": self.where, "platform": platform, "profile": known}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Timed:
        """Return the table that :meth:`to_json` wrote."""
        return cls(
            data["network"], data["where"], platform_from_json(data["platform"]), Profile.from_json(data["profile"])
        )


def read(path: Path = RESULT) -> dict[tuple[str, str], Timed]:
    """Return the tables of a file, by machine and network."""
    found = [Timed.from_json(each) for each in json.loads(path.read_text())["tables"]]
    return {(table.where, table.network): table for table in found}


def measured(network: str, processors: list[str]) -> Timed:
    """Time the operators of a network here."""
    evaluator = LitertEvaluator()
    platform = choose_platform(evaluator, processors)
    with TemporaryDirectory() as folder, evaluator.prepare(platform, Path(folder)) as session:
        return Timed.of(network, "xeon", platform, profile(Profiler(session, load(network), platform)))


def logged(folder: Path, where: str) -> Iterator[Timed]:
    """Yield the tables of studies whose logs are in a folder, as ``NETWORK_0_trials.jsonl``."""
    for path in sorted(folder.glob("*_0_trials.jsonl")):
        records = {record["kind"]: record["data"] for record in map(json.loads, path.read_text().splitlines())}
        platform = platform_from_json({"limits": asdict(Limits())} | records["device"]["platform"])
        own = platform.restrict([p.name for p in platform.processors if not p.options.get("fallback")])
        known = Profile.from_json(records["profile"])
        yield Timed.of(path.name.removesuffix("_0_trials.jsonl"), where, own, known)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def main() -> None:
    """Measure, collect and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default="")
    parser.add_argument("--processors", default="cpu0,cpu1:builtin,cpu1:openvino")
    parser.add_argument("--runs", type=Path, nargs="*", default=[])
    parser.add_argument("--where", default="h100", help="the machine of these runs")
    options = parser.parse_args()
    known = read(options.out) if options.out.exists() else {}
    for folder in options.runs:
        known |= {(table.where, table.network): table for table in logged(folder, options.where)}
    for network in filter(None, options.models.split(",")):
        if ("xeon", network) not in known:
            known["xeon", network] = measured(network, options.processors.split(","))
            sys.stderr.write(f"{network}\n")
    tables = [json.dumps(known[key].to_json()) for key in sorted(known)]
    head = {"schema_version": 1, "made_by": "python -m tests.benchmarks.sampler_tables OUT.json", **provenance()}
    head["machines"] = {"xeon": machine(), "h100": "16 cores of a Xeon with an NVIDIA H100 (Vulkan, float16)"}
    text = json.dumps(head, indent=1)[:-2] + ',\n "tables": [\n  ' + ",\n  ".join(tables) + "\n ]\n}\n"
    options.out.write_text(text)


if __name__ == "__main__":
    main()
