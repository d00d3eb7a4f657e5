"""Calibrate a cost model of this machine: choose what to time, time it, fit, and say how wrong the fit is.

What was timed is in a log beside the profile, record by record; an interrupted calibration goes on from there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evaluators.base import Evaluator, Session
from evaluators.cost_model.calibrate_nets import GENERATOR, network
from evaluators.cost_model.calibrate_profile import (
    KEPT_OUT,
    MOST_NETS,
    Fits,
    build_profile,
    errors_on_models,
    next_network,
)
from evaluators.cost_model.calibrate_time import (
    Bench,
    CutProfile,
    Timed,
    is_of,
    pairs,
    time_contention,
    time_cuts,
    time_link,
)
from evaluators.cost_model.profile import SUFFIXES, ContentionProfile, CostProfile, LinkProfile, to_json
from evaluators.registry import make_evaluator
from optimizer.devices import choose_platform
from optimizer.files import write_atomic
from optimizer.provenance import provenance
from optimizer.storage import Record, TrialLog
from search_spaces.errors import ProfileError, RunFolderError, UnavailableError, UsageError
from search_spaces.platform import Platform

LEAST_MINUTES, MOST_MINUTES = 0.2, 600.0
_SHARE_OF_MODELS, _SHARE_OF_PAIRS = 0.2, 0.15
_LEAST_NETS = 6
_MOST_REFUSED = 20


@dataclass(slots=True)
class Measured:
    """What the log holds.

    Attributes:
        timed: what was timed on each kind of processor.
        refused: how many networks a kind of processor did not take.
        links, contention: what pairs of processors do to each other.
        cuts: what a cut costs on each kind of processor.
    """

    timed: list[Timed] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    links: list[LinkProfile] = field(default_factory=list)
    contention: list[ContentionProfile] = field(default_factory=list)
    cuts: list[CutProfile] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Take in a record of the log.

        Raises:
            ProfileError: it is damaged.
        """
        try:
            if record.kind == "timed":
                self.timed.append(Timed.from_json(record.data))
            elif record.kind == "refused":
                self.refuse(str(record.data["like"]))
            elif record.kind == "link":
                self.links.append(LinkProfile(**record.data))
            elif record.kind == "contention":
                self.contention.append(ContentionProfile(**record.data))
            elif record.kind == "cut":
                self.cuts.append(CutProfile(**record.data))
        except (KeyError, TypeError) as error:
            raise ProfileError(f"record {record.n} of the calibration's log is damaged: {error}") from error

    def refuse(self, like: str) -> None:
        """Count a network that a kind of processor did not take."""
        self.refused[like] = self.refused.get(like, 0) + 1

    def has(self, like: str, name: str) -> bool:
        """Return whether a model was timed on a kind of processor."""
        return any(t.like == like and t.name == name for t in self.timed)

    def has_contention(self, victim: str, other: str) -> bool:
        """Return whether it was timed how much slower one kind of processor is beside another."""
        return any((c.victim, c.other) == (victim, other) for c in self.contention)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A finished calibration.

    Attributes:
        profile, platform: what the file holds.
        out: the file.
        interrupted: whether the person ended it early.
    """

    profile: CostProfile
    platform: Platform
    out: Path
    interrupted: bool = False


def calibrate(
    out: Path,
    processors: Sequence[str] | None = None,
    minutes: float = 10.0,
    *,
    evaluator: str = "litert",
    command: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Calibrate the processors of this machine and write their profile to ``out``.

    Raises:
        UsageError: an option is wrong, or the log beside ``out`` is of another machine or of other processors.
        ProfileError: there was time for too little to fit.
        UnavailableError: the device failed.
    """
    if not LEAST_MINUTES <= minutes <= MOST_MINUTES:
        raise UsageError(f"--minutes {minutes:g}: give {LEAST_MINUTES:g} to {MOST_MINUTES:g} minutes")
    if out.suffix not in SUFFIXES:
        raise UsageError(f"--out {out}: a profile is a .json or .yaml file", f"give {out.with_suffix('.json')}")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}", "make it first")
    measurer = make_evaluator(evaluator)
    platform = choose_platform(measurer, processors)
    end_s = time.monotonic() + 60.0 * minutes
    log, contents = TrialLog.open(out.with_suffix(".log"))
    interrupted = False
    with ExitStack() as stack:
        stack.callback(log.close)
        measured = Measured()
        session = stack.enter_context(measurer.prepare(platform))
        _check_log(log, contents.records, _identity(measurer, session, platform))
        for record in contents.records:
            measured.add(record)
        if measured.timed:
            tell(f"{len(measured.timed)} timings of an earlier start are used")
        bench = stack.enter_context(Bench(measurer, session, platform))
        try:
            _measure(measured, bench, log, end_s, tell)
        except KeyboardInterrupt:
            interrupted = True
    return _finish(measured, platform, out, [*command], interrupted=interrupted)


def _identity(evaluator: Evaluator, session: Session, platform: Platform) -> dict[str, Any]:
    machine = provenance()
    return {
        "evaluator": evaluator.name,
        "cpu": machine["machine"]["cpu"],
        "runtime": session.fingerprint().get("runtime"),
        "processors": [[p.name, p.like] for p in platform.processors],
        "generator of networks": GENERATOR,
    }


def _check_log(log: TrialLog, records: Sequence[Record], identity: dict[str, Any]) -> None:
    """Check that a log is of this machine; a new one is told what it is of."""
    if not records:
        log.append("calibration", identity)
        return
    known = dict(records[0].data) if records[0].kind == "calibration" else {}
    for name, value in identity.items():
        if known.get(name) != value:
            raise RunFolderError(
                f"{log.path}: belongs to a calibration with another {name}: {known.get(name)}, not {value}",
                "give another --out, or remove the log",
            )


def _measure(measured: Measured, bench: Bench, log: TrialLog, end_s: float, tell: Callable[[str], None]) -> None:
    """Time networks, then pairs of processors, then whole models, in shares of the time that is left."""
    left_s = max(0.0, end_s - time.monotonic())
    kinds = [members[0] for members in bench.platform.classes().values()]
    _measure_pairs(measured, bench, log, end_s - left_s * (1.0 - _SHARE_OF_PAIRS), tell)
    _measure_cuts(measured, bench, log, tell)
    nets_end_s = end_s - left_s * _SHARE_OF_MODELS
    fits: Fits = {}
    for number in range(MOST_NETS):
        for lane in kinds:
            mine = [t for t in measured.timed if t.like == lane.like and t.seed is not None]
            if len(mine) > number or (time.monotonic() > nets_end_s and number >= _LEAST_NETS):
                continue
            seed = next_network(mine, measured.refused.get(lane.like, 0), fits=fits)
            tell(f"timing network {number + 1} on {lane.name}")
            try:
                timed = bench.time(lane, network(f"net{seed}", seed))
            except UnavailableError as error:
                measured.refuse(lane.like)
                log.append("refused", {"like": lane.like, "seed": seed, "reason": error.what})
                if measured.refused[lane.like] > _MOST_REFUSED:
                    raise
                continue
            measured.timed.append(replace(timed, seed=seed))
            log.append("timed", measured.timed[-1].to_json())
        if time.monotonic() > nets_end_s and number >= _LEAST_NETS:
            break
    for name in KEPT_OUT:
        for lane in kinds:
            if measured.has(lane.like, name) or time.monotonic() > end_s:
                continue
            tell(f"timing {name} on {lane.name}, which is kept out of the fit")
            try:
                measured.timed.append(bench.time_zoo(lane, name))
            except UnavailableError as error:
                tell(f"{name} is left out on {lane.name}: {error.what}")
                continue
            log.append("timed", measured.timed[-1].to_json())


def _measure_pairs(measured: Measured, bench: Bench, log: TrialLog, end_s: float, tell: Callable[[str], None]) -> None:
    """Time what the log lacks of each pair of processors: handing over, and running at once where they can."""
    for pair in pairs(bench.platform):
        source, target = pair
        linked = any(is_of(link, *pair) for link in measured.links)
        crowded = source.excludes(target) or measured.has_contention(source.like, target.like)
        if linked and crowded:
            continue
        if time.monotonic() > end_s:
            break
        if not linked:
            tell(f"timing transfers from {source.name} to {target.name}")
            measured.links.append(time_link(bench.session, bench.loaded, *pair))
            log.append("link", _fields(measured.links[-1]))
        if not crowded:
            tell(f"timing {source.name} beside {target.name}")
            measured.contention.append(time_contention(bench.session, bench.loaded, *pair))
            log.append("contention", _fields(measured.contention[-1]))


def _measure_cuts(measured: Measured, bench: Bench, log: TrialLog, tell: Callable[[str], None]) -> None:
    """Time what the log lacks of what a cut costs on each kind of processor."""
    for like, members in bench.platform.classes().items():
        if not any(cut.like == like for cut in measured.cuts):
            tell(f"timing cuts on {members[0].name}")
            try:
                measured.cuts.append(time_cuts(bench.session, bench.loaded, members[0]))
            except UnavailableError as error:
                tell(f"the cost of a cut on {members[0].name} could not be measured: {error.what}")
                continue
            log.append("cut", _fields(measured.cuts[-1]))


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


def _finish(
    measured: Measured, platform: Platform, out: Path, command: Sequence[str], *, interrupted: bool
) -> Calibration:
    try:
        profile = build_profile(platform, measured.timed, measured.links, measured.contention, measured.cuts)
    except ProfileError as error:
        if interrupted:
            raise KeyboardInterrupt from error
        raise
    profile = replace(
        profile,
        provenance={"command": list(command), **provenance(), "timings": len(measured.timed)},
        errors=errors_on_models(profile, measured.timed),
    )
    write_profile(out, profile, platform)
    return Calibration(profile, platform, out, interrupted)


def write_profile(out: Path, profile: CostProfile, platform: Platform) -> None:
    """Write a profile's file, whole or not at all.

    Raises:
        RunFolderError: it cannot be written.
    """
    write_atomic(out, (json.dumps(to_json(profile, platform), indent=1) + "\n").encode())
